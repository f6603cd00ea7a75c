"""Batch sizes, as callers give them and as the leaves have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._collection import Core
from .._plans import as_ints
from .._ragged import get_display_shape
from ..errors import BatchSizeError
from ..typing import BatchSize


def as_batch_size(batch_size: BatchSize | None) -> torch.Size:
    """Return a batch size given as a size, a sequence of ints or one int.

    Raises:
        BatchSizeError: a dim is negative or no int.

    >>> as_batch_size(3), as_batch_size(None)
    (torch.Size([3]), torch.Size([]))
    """
    if batch_size is None:
        return torch.Size()
    if type(batch_size) is not torch.Size:
        try:
            plain = isinstance(batch_size, (list, tuple))
            batch_size = torch.Size(batch_size if plain else as_ints(batch_size))  # type: ignore[arg-type]
        except TypeError as error:
            raise BatchSizeError(
                f"a batch size is an int or a sequence of ints; got {batch_size!r}"
            ) from error
    for dim in batch_size:
        if dim < 0:
            raise BatchSizeError(f"a batch size has no negative dim; got {list(batch_size)}")
        if type(dim) is not int and isinstance(dim, np.integer):
            return torch.Size(as_ints(batch_size))
    return batch_size


def fit_batch_size(value: Any, batch_size: torch.Size, path: tuple[str, ...]) -> Any:
    """Return a node that holds values, which is at ``path``, or one of them whose batch size starts with ``batch_size``.

    Raises:
        BatchSizeError: it has one value for each element of another one; the message names the key.
    """
    try:
        return value._with_batch_size(batch_size)
    except BatchSizeError:
        value._check_batch_size(batch_size, path)
        raise


def infer_batch_sizes(root: Any, batch_dims: int | None, keep_compliant_size: bool) -> None:
    """Give every level the leading dims that all of its entries share; see ``auto_batch_size_``."""
    if batch_dims is not None and batch_dims < 0:
        raise BatchSizeError(f"batch_dims is the number of batch dims; got {batch_dims}")
    if root._members_and_dim() is not None and batch_dims != len(root.batch_size):
        leaves = [tuple(root.get_item_shape(key)) for key in root.keys(True, True)]
        result = find_common_prefix(leaves, batch_dims) if leaves else root.batch_size
        if result != root.batch_size:
            raise BatchSizeError(
                f"a lazy stack has the batch size of its members, {list(root.batch_size)} with the stack dim, not the "
                f"{list(result)} that its entries share: call auto_batch_size_() on them before stacking, or set batch_size"
            )
    kept = batch_dims if keep_compliant_size else None
    # Sizes are worked out from the deepest level up, and set from the root down.
    levels: list[tuple[Any, int]] = [(root, -1)]
    for position, (node, _) in enumerate(levels):
        if node._members_and_dim() is None:
            levels.extend(
                (child, position)
                for child in list(node._children().values())
                if not isinstance(child, Tensor) and not child._is_value
            )
    shapes: list[list[tuple[int, ...]]] = [[] for _ in levels]
    sizes: list[Any] = [None] * len(levels)
    for position in reversed(range(len(levels))):
        node, parent = levels[position]
        stays = node._members_and_dim() is not None
        if not stays:
            for child in list(node._children().values()):
                if isinstance(child, Tensor):
                    shapes[position].append(get_display_shape(child))
                elif child._is_value and (reach := child._max_batch_size()) is not None:
                    shapes[position].append(tuple(reach))
            stays = (
                len(shapes[position]) > 0
                and kept is not None
                and parent >= 0
                and len(node.batch_size) >= kept
            )
        if stays or shapes[position]:
            sizes[position] = (
                tuple(node.batch_size) if stays else find_common_prefix(shapes[position], batch_dims)
            )
            if parent >= 0:
                shapes[parent].append(sizes[position])
    for position, (node, parent) in enumerate(levels):
        # A level without leaves has any batch size: that of its parent; without leaves at all, the one that it had.
        if sizes[position] is None:
            sizes[position] = sizes[parent] if parent >= 0 else node.batch_size
        if node._members_and_dim() is None:
            _set_value_batch_size(node, torch.Size(sizes[position]))
            node._set_batch_size(torch.Size(sizes[position]))


def _set_value_batch_size(node: Core, size: torch.Size) -> None:
    for key, child in dict(node._children()).items():
        if not isinstance(child, Tensor) and child._is_value and child.batch_size != size:
            fitted = child._with_batch_size(size)
            if fitted is not child:
                node._set_child(key, fitted)


def find_common_prefix(shapes: Iterable[tuple[int, ...]], limit: int | None = None) -> tuple[int, ...]:
    """Return the leading dims that all shapes share, ``limit`` of them at most.

    >>> find_common_prefix([(3, 4, 5), (3, 4)]), find_common_prefix([(3, 4), (3, 4)], 1)
    ((3, 4), (3,))
    """
    prefix: list[int] = []
    for sizes in zip(*shapes):
        if len(prefix) == limit or sizes.count(sizes[0]) != len(sizes) or sizes[0] < 0:
            break
        prefix.append(sizes[0])
    return tuple(prefix)
