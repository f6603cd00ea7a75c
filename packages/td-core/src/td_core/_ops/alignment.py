"""Collections of different batch sizes beside each other: what is expanded, and what stands beside what.

Leaves line up from the batch dims of their level on, and the dims behind these broadcast: a leaf of shape [3, 2] of a batch
of [3] stands beside one of shape [4, 3, 5, 2] of a batch of [4, 3] as [1, 3, 1, 2] does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._collection import Core, has_lazy_stack, lined_up
from .._element_types import cast_beside
from .._foreach import PLAIN, columns
from .._plans import Shape, broadcast_shape
from .._ragged import shown_shape


def expanded(item: Any, beside: Any, size: tuple[int, ...]) -> Any:
    """Return a collection expanded to the batch size that it has together with ``beside``.

    Leaves that have as many dims as those beside them, and fit, hold the batch dims already and stay as they are: a
    collection that was not told its batch size is one of the same leaves. So does a level with batch dims of its own.
    Those that have no dims promote the dtypes of the others as they would alone.
    """
    if item.batch_size == size:
        return item
    result = item.expand(size)
    more = len(beside.batch_size) != len(item.batch_size)
    even = not has_lazy_stack(item)
    todo: list[tuple[Any, Any, Any]] = [(item, beside, result)] if even or not item.batch_size else []
    while todo:
        mine, theirs, level = todo.pop()
        if mine._stacked() is not None:
            continue
        if even and more and mine.batch_dims > item.batch_dims and _holds(mine, theirs, size):
            _put_back(mine, level, size)
            continue
        others = theirs._children()
        for key, leaf in dict(mine._children()).items():
            if key not in others:
                continue
            if type(leaf) not in PLAIN and not isinstance(leaf, Tensor):
                other = theirs._get_child(key)
                if isinstance(other, Core) and not leaf._opaque and not leaf._shows_tensor:
                    todo.append((leaf, other, level._get_child(key)))
                continue
            if not leaf.ndim:
                other = theirs._stand_in(key)
                if isinstance(other, Tensor) and (scalar := cast_beside(other.dtype, leaf)) is not leaf:
                    level._set_child(key, scalar.expand(level._get_child(key).shape))
                continue
            shape = _shape_at(theirs, key) if even else ()
            if len(shape) == leaf.ndim:
                both = broadcast_shape(leaf.shape, shape)
                if both is not None and both[: level.batch_dims] == level.batch_size:
                    level._set_child(key, _with_lead(leaf, level.batch_size))
    return result


def _holds(level: Any, beside: Any, size: Shape) -> bool:
    """Tell whether every leaf of a level starts with a batch size, and one has as many dims as what it fits beside it."""
    found = False
    todo = [(level, beside)]
    while todo:
        mine, theirs = todo.pop()
        others = theirs._children()
        for key, leaf in dict(mine._children()).items():
            if key not in others or (isinstance(leaf, Core) and leaf._opaque):
                continue
            if isinstance(leaf, Core):
                todo += [(leaf, other)] if isinstance(other := theirs._get_child(key), Core) else ()
                continue
            shape, shown = shown_shape(leaf), _shape_at(theirs, key)
            if len(shape) < len(size) or any(n not in (1, wanted) for n, wanted in zip(shape, size)):
                return False
            both = broadcast_shape(shape, shown) if len(shown) == len(shape) else None
            found = found or (both is not None and both[: len(size)] == size)
    return found


def _shape_at(level: Any, key: str) -> Shape:
    """Return the shape of an entry; a lazy stack knows it without stacking."""
    if level._stacked() is not None:
        return level.get_item_shape(key)  # type: ignore[no-any-return]
    return shown_shape(level._children()[key])


def _put_back(level: Any, expanded: Any, size: Shape) -> None:
    """Give an expanded copy of a level the entries of that again, and the batch size that both have together."""
    todo = [(level, expanded)]
    while todo:
        mine, copy = todo.pop()
        copy._set_batch_size(torch.Size((*size, *mine.batch_size[len(size) :])))
        for key, child in dict(mine._children()).items():
            if isinstance(child, Core) and not child._opaque and not child._shows_tensor:
                todo.append((child, copy._get_child(key)))
            else:
                copy._set_child(key, _with_lead(child, size) if isinstance(child, Tensor) else child)


def _with_lead(leaf: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return a leaf that holds the batch dims, some of size one, expanded along these: a lazy stack takes it apart."""
    lead = len(size)
    return leaf if leaf.shape[:lead] == size else leaf.expand(*size, *leaf.shape[lead:])


def aligned_pairs(
    node: Core, other: Core, leaves: list[Tensor], operand: list[Any], ndim: int
) -> tuple[list[Tensor], list[Any]]:
    """Return leaves with as many dims as what stands beside them: those behind the batch dims broadcast, too."""
    if [leaf.ndim for leaf in leaves] == [value.ndim for value in operand]:
        return leaves, operand
    mine, theirs = _batch_dims(node), _batch_dims(other)
    left, right = [], []
    for leaf, value in zip(leaves, operand):
        # A part of an entry, for one member of a lazy stack, has the batch dims of what it stands beside.
        common = mine.get(id(leaf), theirs.get(id(value), ndim))
        common = min(common, theirs.get(id(value), common))
        left.append(lined_up(leaf, value.ndim, common))
        right.append(lined_up(value, leaf.ndim, common))
    return left, right


def aligned(node: Any, other: Any) -> tuple[Any, Any]:
    """Return two collections, of the same keys and batch size, whose leaves broadcast behind the batch dims."""
    ndim = len(node.batch_size)
    return _lined_up(node, other, ndim), _lined_up(other, node, ndim)


def _lined_up(item: Any, beside: Any, ndim: int) -> Any:
    leaves: list[Tensor] = []
    others: list[Tensor] = []
    levels = item._collect(leaves)
    beside._collect_like(item, others)
    lined = aligned_pairs(item, beside, leaves, others, ndim)[0]
    return item if lined is leaves else item._with_leaves(lined, levels)


def aligned_columns(node: Core, leaves: list[Tensor], *operands: Any) -> list[Any]:
    """Return leaves of a collection, and what stands beside each, with as many dims: those behind the batch dims broadcast."""
    dims, ndim = _batch_dims(node), len(node.batch_size)
    common = [dims.get(id(leaf), ndim) for leaf in leaves]
    rows = list(zip(leaves, *columns(leaves, operands), strict=True))
    most = [max(item.ndim for item in row if isinstance(item, Tensor)) for row in rows]
    return [
        [lined_up(item, *at) for item, at in zip(column, zip(most, common))]
        if type(column) is list
        else column
        for column in (leaves, *operands)
    ]


def _batch_dims(root: Core) -> dict[int, int]:
    """Return how many batch dims the level of a leaf has, by the id of the leaf."""
    found: dict[int, int] = {}
    todo: list[Any] = [root]
    while todo:
        level = todo.pop()
        size = len(level.batch_size)
        for child in level._below():
            if isinstance(child, Core):
                todo.append(child)
            else:
                found[id(child)] = min(size, found.get(id(child), size))
    return found
