"""Broadcast and align two collections of different batch sizes.

Batch dims are aligned with batch dims, and feature dims with feature dims. For example, a leaf of shape [3, 2] in a batch of
[3] is aligned as [1, 3, 1, 2] with a leaf of shape [4, 3, 5, 2] in a batch of [4, 3].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._plans.elements import align_dims
from .._plans.plans import broadcast_shape
from .._plans.steps import Shape, remove_size
from .._torch.dtypes import cast_for_promotion
from .._torch.kernels import PLAIN, expand_operands
from .._tree.defaults import has_lazy_stack
from .._tree.dim_names import set_batch_size
from .._tree.node import Child, Core, CoreT
from .._tree.ragged import get_display_shape
from .._tree.walks import has_entries, visit, walk, zip_walk


def expand_to_match(item: CoreT, beside: Core, size: tuple[int, ...]) -> CoreT:
    """Expand ``item`` to ``size``, the common batch size of ``item`` and ``beside`` after broadcasting.

    A leaf with as many dims as its operand in ``beside`` already has all batch dims, so no dims are inserted.
    """
    if item.batch_size == size:
        return item
    if find_longer_size(item, beside) == size:
        return extend_batch(item, torch.Size(size))
    result = item.expand(size)
    more = len(beside.batch_size) != len(item.batch_size)
    even = not has_lazy_stack(item)

    def fit(left: Any, right: Core, level: Core) -> Iterator[tuple[object, object, object]]:
        if not even and left.batch_size:
            return  # only leaves without dims are cast then, and a node with batch dims has none
        if even and more and left.batch_dims > item.batch_dims and _has_batch_dims(left, right, size):
            _restore_entries(left, level, size)
            return
        others = right._children()
        for key, leaf in dict(left._children()).items():
            if key not in others:
                continue
            if type(leaf) not in PLAIN and not isinstance(leaf, Tensor):
                other = right._get_child(key)
                if isinstance(other, Core) and has_entries(leaf):
                    yield leaf, other, level._get_child(key)
                continue
            if (fitted := _fit_leaf(leaf, right, key, level, even)) is not None:
                level._set_child(key, fitted)

    if even or not item.batch_size:
        visit(fit, item, beside, result)
    return result


def find_longer_size(first: Core, second: Core) -> torch.Size | None:
    """Return the longer of two batch sizes if it starts with the other one, and all leaves of one key have these dims."""
    size, start = first.batch_size, second.batch_size
    short, long = second, first
    if len(size) < len(start):
        size, start, short, long = start, size, first, second
    if len(size) == len(start) or size[: len(start)] != start or -1 in size:
        return None
    found = False
    for left, right in zip_walk(short, long):
        others, batch = right._children(), max(left.batch_size, right.batch_size, key=len)
        for key, leaf in dict(left._children()).items():
            if key not in others or isinstance(leaf, Core):
                continue
            shape, shown = get_display_shape(leaf), _get_shape(right, key)
            both = broadcast_shape(shape, shown) if len(shown) == len(shape) else None
            if both is None or both[: len(batch)] != batch:
                return None
            found = True
    return size if found else None


def stack_like(node: Core, other: Any) -> Any:
    """Convert dense nodes to lazy stacks where those of another collection are stacks; return ``node`` if none is made."""
    stacked = other._members_and_dim()
    if node._members_and_dim() is not None or not has_entries(node):
        return node
    if stacked is not None:
        return node.to_lazystack(stacked[1]) if node.batch_size == other.batch_size else node
    below = other._children()
    found = {key: child for key, child in dict(node._children()).items() if isinstance(child, Core)}
    made = {
        key: stack_like(child, below[key]) for key, child in found.items() if isinstance(below.get(key), Core)
    }
    changed = {key: child for key, child in made.items() if child is not found[key]}
    return node._with_children({**node._children(), **changed}) if changed else node


def extend_batch(item: CoreT, size: torch.Size) -> CoreT:
    """Return a view of a collection with a longer batch size, which starts with its own; its leaves keep the dims they have."""
    ndim = item.batch_dims
    result = item._shallow_copy()

    def extend(node: Core, wanted: torch.Size, first: int) -> Iterator[tuple[object, ...]]:
        stacked = node._members_and_dim()
        if stacked is not None:
            members, dim = stacked
            for member in members:
                yield member, torch.Size(remove_size(wanted, dim)), first - (dim < first)
            return
        for key, child in dict(node._children()).items():
            if isinstance(child, Tensor):
                node._set_child(key, _insert_dims(child, child.shape, wanted, first))
            elif has_entries(child):
                yield child, torch.Size((*wanted, *child.batch_size[len(wanted) :])), first
            else:
                node._set_child(key, _extend_value(child, wanted, first))
        set_batch_size(node, wanted)

    visit(extend, result._inner(), size, ndim)
    return result


def _extend_value(value: Core, size: torch.Size, first: int) -> Any:
    """Expand a value node to ``size``; lists that have the items of its last dims give the values of these dims."""
    longest = value._max_batch_size()
    if longest is not None and longest[: len(size)] == size:
        return value._with_batch_size(size)
    shape = value.batch_size
    return _insert_dims(value, shape, size, len(shape) if shape == size[: len(shape)] else first)


def _insert_dims(value: Child, shape: Shape, size: Shape, first: int) -> Child:
    """Expand leading dims to ``size``; where they do not fit it, insert dims after the ``first`` ones before."""
    lead = len(size)
    if shape[:lead] == size:
        return value
    if len(shape) < lead or any(n not in (1, wanted) for n, wanted in zip(shape, size)):
        shape = (*shape[:first], *[1] * (lead - first), *shape[first:])
        value = value.reshape(shape)
    return value.expand(*size, *shape[lead:])


def _fit_leaf(leaf: Tensor, right: Core, key: str, level: Any, even: bool) -> Tensor | None:
    """Return what replaces an expanded leaf beside its operand in ``right``; None if it stays."""
    # A 0-dim leaf has a lower priority in type promotion than its expanded copy, so cast it first.
    if not leaf.ndim:
        other = right._peek_child(key)
        scalar = cast_for_promotion(other.dtype, leaf) if isinstance(other, Tensor) else leaf
        return None if scalar is leaf else scalar.expand(level._get_child(key).shape)
    shape = _get_shape(right, key) if even else ()
    both = broadcast_shape(leaf.shape, shape) if len(shape) == leaf.ndim else None
    fits = both is not None and both[: level.batch_dims] == level.batch_size
    return _expand_lead(leaf, level.batch_size) if fits else None


def _has_batch_dims(level: Core, beside: Core, size: Shape) -> bool:
    """Return True if all leading dims broadcast to ``size``, and a leaf broadcasts with its operand without new dims."""
    result = False
    for left, right in zip_walk(level, beside):
        others = right._children()
        for key, leaf in dict(left._children()).items():
            if key not in others or isinstance(leaf, Core):
                continue
            shape, shown = get_display_shape(leaf), _get_shape(right, key)
            if len(shape) < len(size) or any(n not in (1, wanted) for n, wanted in zip(shape, size)):
                return False
            both = broadcast_shape(shape, shown) if len(shown) == len(shape) else None
            result = result or (both is not None and both[: len(size)] == size)
    return result


def _get_shape(level: Any, key: str) -> Shape:
    """Return the shape of an entry of a level, with -1 for a dim that differs between members."""
    shape: Shape = level.get_item_shape(key)
    return shape


def _restore_entries(level: Core, expanded: Core, size: Shape) -> None:
    """Replace the entries of an expanded copy by the original ones, expanded only along batch dims of size one."""
    for left, copy in zip_walk(level, expanded):
        set_batch_size(copy, torch.Size((*size, *left.batch_size[len(size) :])))
        for key, child in dict(left._children()).items():
            if not has_entries(child):
                copy._set_child(key, _expand_lead(child, size) if isinstance(child, Tensor) else child)


def _expand_lead(leaf: Tensor, size: tuple[int, ...]) -> Tensor:
    """Expand the leading dims of a leaf to ``size``."""
    lead = len(size)
    return leaf if leaf.shape[:lead] == size else leaf.expand(*size, *leaf.shape[lead:])


def align_pairs(
    node: Core, other: Core, leaves: list[Tensor], operand: list[Tensor], ndim: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Insert dims of size one so that paired leaves have equally many dims and their feature dims broadcast."""
    if [leaf.ndim for leaf in leaves] == [value.ndim for value in operand]:
        return leaves, operand
    left_dims, right_dims = _map_batch_dims(node), _map_batch_dims(other)
    left, right = [], []
    for leaf, value in zip(leaves, operand):
        # A slice of an entry for one member of a lazy stack is not in the maps: take the batch dims of its operand.
        common = left_dims.get(id(leaf), right_dims.get(id(value), ndim))
        common = min(common, right_dims.get(id(value), common))
        left.append(align_dims(leaf, value.ndim, common))
        right.append(align_dims(value, leaf.ndim, common))
    return left, right


def align_collections(node: CoreT, other: Core) -> tuple[CoreT, Core]:
    """Align the leaves of two collections with equal keys and batch sizes, so that their feature dims broadcast."""
    ndim = len(node.batch_size)
    return _align_leaves(node, other, ndim), _align_leaves(other, node, ndim)


def _align_leaves(item: CoreT, beside: Core, ndim: int) -> CoreT:
    """Return a collection with dims inserted after the first ``ndim`` in leaves that have fewer than those of ``beside``."""
    leaves: list[Tensor] = []
    others: list[Tensor] = []
    levels = item._flatten_leaves(leaves)
    item._flatten_other(beside, others)
    lined = align_pairs(item, beside, leaves, others, ndim)[0]
    return item if lined is leaves else item._unflatten(lined, levels)


def align_columns(node: Core, leaves: list[Tensor], *operands: object) -> list[Any]:
    """Align the leaves of a collection and several operands so that their feature dims broadcast.

    Return one list per column; an operand that is not a list is returned unchanged.
    """
    dims, ndim = _map_batch_dims(node), len(node.batch_size)
    common = [dims.get(id(leaf), ndim) for leaf in leaves]
    rows = list(zip(leaves, *expand_operands(leaves, operands), strict=True))
    most = [max(item.ndim for item in row if isinstance(item, Tensor)) for row in rows]
    return [
        [align_dims(item, *position) for item, position in zip(column, zip(most, common))]
        if type(column) is list
        else column
        for column in (leaves, *operands)
    ]


def _map_batch_dims(root: Core) -> dict[int, int]:
    """Map the id of each leaf to the number of batch dims of its node, or the smallest number if several nodes hold it."""
    result: dict[int, int] = {}
    for level in walk(root):
        size = len(level.batch_size)
        for child in level._tree_children():
            if isinstance(child, Tensor):
                result[id(child)] = min(size, result.get(id(child), size))
    return result
