"""Fit batch sizes of values, and infer batch sizes from the shapes of leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import BatchSizeError
from .dim_names import lift_names, set_batch_size
from .node import Core, CoreT
from .ragged import get_display_shape
from .walks import has_entries


def fit_batch_size(value: CoreT, batch_size: torch.Size, path: tuple[str, ...]) -> CoreT:
    """Give a value node a batch size that starts with ``batch_size``; a node that has one is returned unchanged.

    Raise BatchSizeError, with the key path ``path``, if the node holds one value per element of another batch size.
    """
    try:
        return value._with_batch_size(batch_size)
    except BatchSizeError:
        value._check_batch_size(batch_size, path)
        raise


def infer_batch_sizes(root: Core, batch_dims: int | None, keep_compliant_size: bool) -> None:
    """Set the batch size of every node to the leading dims that all its entries share; see ``auto_batch_size_``."""
    if batch_dims is not None and batch_dims < 0:
        raise BatchSizeError(f"batch_dims is the number of batch dims; got {batch_dims}")
    if root._max_batch_size() is not None:
        _check_fixed_batch_size(root, batch_dims)
        return
    kept = batch_dims if keep_compliant_size else None
    # Compute sizes from the deepest node up and set them from the root down: the size of a child must start with its parent's.
    levels: list[tuple[Core, int]] = [(root, -1)]
    for position, (node, _) in enumerate(levels):
        levels.extend(
            (child, position)
            for child in list(node._children().values())
            if has_entries(child) and child._max_batch_size() is None
        )
    sizes = _infer_from_leaves(levels, batch_dims, kept)
    for position, (node, parent) in enumerate(levels):
        # A node without leaves accepts any batch size: take the parent's. A root without leaves keeps its own.
        if sizes[position] is None:
            sizes[position] = sizes[parent] if parent >= 0 else node.batch_size
        _set_value_batch_size(node, torch.Size(sizes[position]))
        set_batch_size(node, torch.Size(sizes[position]))
    if any(node._names is not None for node, _ in levels):
        lift_names(root)


def _infer_from_leaves(levels: list[tuple[Core, int]], batch_dims: int | None, kept: int | None) -> list[Any]:
    """Return the leading dims that the entries of each node share, or None; ``levels`` has the position of each parent."""
    shapes: list[list[tuple[int, ...]]] = [[] for _ in levels]
    sizes: list[Any] = [None] * len(levels)
    for position in reversed(range(len(levels))):
        node, parent = levels[position]
        for child in list(node._children().values()):
            if isinstance(child, Tensor):
                shapes[position].append(get_display_shape(child))
            elif (reach := child._max_batch_size()) is not None:
                shapes[position].append(tuple(reach))
        if shapes[position]:
            stays = kept is not None and parent >= 0 and len(node.batch_size) >= kept
            sizes[position] = (
                tuple(node.batch_size) if stays else find_common_prefix(shapes[position], batch_dims)
            )
            if parent >= 0:
                shapes[parent].append(sizes[position])
    return sizes


def _check_fixed_batch_size(root: Any, batch_dims: int | None) -> None:
    """Raise BatchSizeError if the entries of a lazy stack share another batch size than its own."""
    leaves = [tuple(root.get_item_shape(key)) for key in root.keys(True, True)]
    result = find_common_prefix(leaves, batch_dims) if leaves else root.batch_size
    if result != root.batch_size and batch_dims != len(root.batch_size):
        raise BatchSizeError(
            f"a lazy stack has the batch size of its members, {list(root.batch_size)} with the stack dim, not the "
            f"{list(result)} that its entries share: call auto_batch_size_() on them before stacking, or set batch_size"
        )


def _set_value_batch_size(node: Core, size: torch.Size) -> None:
    for key, child in dict(node._children()).items():
        if not isinstance(child, Tensor) and not has_entries(child) and child.batch_size != size:
            fitted = child._with_batch_size(size)
            if fitted is not child:
                node._set_child(key, fitted)


def find_common_prefix(shapes: Iterable[tuple[int, ...]], limit: int | None = None) -> tuple[int, ...]:
    """Return the longest common prefix of the shapes, of at most ``limit`` dims."""
    prefix: list[int] = []
    for sizes in zip(*shapes):
        if len(prefix) == limit or sizes.count(sizes[0]) != len(sizes) or sizes[0] < 0:
            break
        prefix.append(sizes[0])
    return tuple(prefix)
