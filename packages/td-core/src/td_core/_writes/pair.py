"""Pair the entries of a target with those of a source, and write all leaves in one call if each is plain and fits its value.

A function that tries a write returns False, with nothing written, if the general path has to pair, check and write the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import starmap
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._plans.index import BoundIndex, IndexPlan
from .._torch.dtypes import ROWS
from .._torch.kernels import PLAIN
from .._torch.private import functorch_level, plain_results
from .._tree.backends import get_backends
from .._tree.coerce import NUMBERS, WRAPPED
from .._tree.keys import unravel_key_below
from .._tree.node import Core
from .._tree.walks import expand, has_entries
from .check import (
    are_copyable,
    are_writable,
    has_passed,
    have_same_sizes,
    is_all_contiguous,
    is_all_strided,
    remember,
)
from .packed import try_copy_packed
from .positions import write_rows
from .run import try_copy_fused

#: Dtypes for which some versions of torch cannot write at an index tensor or mask.
RARELY_SCATTERED = frozenset(dtype for dtype, row in ROWS.items() if "scatter" in row.cannot)

_DTYPE = attrgetter("dtype")
_SHAPE = attrgetter("shape")
_NO_DISPATCH = Tensor.__torch_dispatch__
_STRINGS = {str}
_BASIC = {int, slice, type(None)}

# Comparing all keys of two nodes at once is faster only above about this many entries.
_FEW = 8


class Through(dict[str, Any]):
    """A nested key as a one-entry dict. Unlike a dict value, an update does not replace a leaf on its path by it."""


def list_pairs(items: Mapping[Any, object], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, Any]]:
    """Return the entries of a mapping under ``prefix`` by their first keys; the entry of a nested key becomes a dict."""
    entries = dict(items)
    if {*map(type, entries)} <= _STRINGS:
        return entries.items()
    return starmap(split_pair, ((unravel_key_below(prefix, key), value) for key, value in entries.items()))


def split_pair(path: tuple[str, ...], value: object) -> tuple[str, object]:
    """Return the first part of a key, and its entry: the value, or a dict of it under the other parts."""
    key, *below = path
    for part in reversed(below):
        value = Through({part: value})
    return key, value


def is_node(value: object) -> bool:
    """Return True for a mapping, and for a collection of entries."""
    # Check the most common types first: isinstance with an abstract class is slow.
    if type(value) is dict or isinstance(value, Tensor):
        return type(value) is dict
    return has_entries(value) if isinstance(value, Core) else isinstance(value, Mapping)


def is_scalar(value: object) -> bool:
    """Return True for a number, and for a tensor or array without dims."""
    return isinstance(value, NUMBERS) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0)


def is_basic(index: object) -> bool:
    """Return True if an index is basic: ints, slices and None, which select a view."""
    items = index if type(index) is tuple else (index,)
    return {*map(type, items)} <= _BASIC


def try_copy_whole(
    target: Core, source: object, non_blocking: bool = False, plan: IndexPlan | None = None
) -> bool:
    """Copy all leaves of a collection or dict, in one fused call if a plan is not of positions or a mask."""
    if plan is None and source is target:
        return True
    if plan is None and target._inner()._backends is not None:
        if try_copy_packed(target, source, non_blocking):
            return True
    leaves, values = _pair_leaves(target, source)
    if plan is None or is_basic(plan.index):
        return try_copy_leaves(target, leaves, source, values, non_blocking, plan)
    return _try_scatter(target, leaves, values, plan)


def try_copy_leaves(
    target: Core,
    leaves: list[Tensor],
    source: Any,
    values: list[Any],
    non_blocking: bool = False,
    plan: IndexPlan | None = None,
) -> bool:
    """Copy the values of a source into the leaves of a target, or into their views at a basic index, in one fused call."""
    if plan is not None:
        leaves = _take_views(leaves, plan)
    if not leaves or functorch_level() is not None:
        return False
    if leaves[0] is values[0] and are_writable(leaves):
        # A source that has leaves of the target, such as an updated copy of it, writes only the others.
        pairs = [(leaf, value) for leaf, value in zip(leaves, values) if leaf is not value]
        leaves, values = [leaf for leaf, _ in pairs], [value for _, value in pairs]
        if not pairs:
            return True
    if not _can_write(target, "copy", leaves, values, have_same_sizes):
        return False
    for item in get_backends(target) if type(source) is not dict and isinstance(source, Core) else ():
        if item.write(target, source, leaves, values, non_blocking):
            return True
    return try_copy_fused(leaves, values, non_blocking)


def _take_views(leaves: list[Tensor], plan: IndexPlan) -> list[Tensor]:
    """Return the views of all leaves at a basic index; an empty list if one has none."""
    # The element of a sparse leaf is a copy, so a write to it would be lost.
    if not (is_all_contiguous(leaves) or is_all_strided(leaves)):
        return []
    try:
        return list(map(plan.leaf, leaves))
    except RuntimeError:
        return []


def _try_scatter(target: Core, leaves: list[Tensor], values: list[Any], plan: IndexPlan) -> bool:
    """Write all leaves at an index tensor or mask."""
    if torch.compiler.is_compiling() or functorch_level() is not None or not leaves:
        return False
    lead, n = plan.lead, plan.n

    def fit(leaves: list[Tensor], values: list[Tensor]) -> bool:
        try:
            pairs = list(zip(map(_SHAPE, leaves), map(_SHAPE, values)))
        except RuntimeError:
            return False  # reading the shape of a strided nested tensor raises
        return RARELY_SCATTERED.isdisjoint(map(_DTYPE, leaves)) and all(
            right == (*lead, *left[n:]) for left, right in pairs
        )

    # The batch dims of tensors that passed earlier fit each other, so the first pair is enough.
    if not _can_write(target, "scatter", leaves, values, fit):
        return False
    if values[0].shape != (*lead, *leaves[0].shape[n:]):
        return False
    plan.check_range()
    place = BoundIndex(plan.index)
    try:
        for leaf, value in zip(leaves, values):
            write_rows(leaf, place.move_to_device_of(leaf), value)
    except RuntimeError:
        return False  # an indexed write cannot change device or dtype; the general path can, and writes every leaf again
    return True


def _can_write(
    target: Core, check: str, leaves: list[Tensor], values: list[Any], fit: Callable[..., bool]
) -> bool:
    """Return True if torch can write all values into the leaves, or could at an earlier write of the same forms."""
    both = [*values, *leaves]
    if not torch.compiler.is_compiling() and has_passed(target, check, both):
        return True
    if not (are_writable(leaves) and are_copyable(values) and fit(leaves, values)):
        return False
    remember(target, check, both)
    return True


def _pair_leaves(target: Core, source: object) -> tuple[list[Tensor], list[object]]:
    """Pair the leaves of ``target`` with the values of ``source``. Return empty lists if the general path is needed."""
    targets: list[Tensor] = []
    values: list[object] = []
    add, add_value = targets.append, values.append
    kind = type(target)
    todo: list[tuple[Any, Any]] = [(target, source)]
    # By hand: the row `update_` of benchmarks/ops.py.
    while todo:
        node, right = todo.pop()
        left = node._children()
        # torch.compile returns its own proxy class for __class__, so use type().
        if type(right) is kind or (type(right) is not dict and isinstance(right, Core)):
            right = right._children()
        if type(left) is not dict or type(right) is not dict:
            return [], []
        right = right.copy()
        if (
            len(right) > _FEW
            and list(level := left.copy()) == list(right)
            and PLAIN.issuperset(map(type, level.values()))
        ):
            targets += level.values()
            values += right.values()
            continue
        for key, value in right.items():
            entry: Any = left.get(key)
            if type(entry) in PLAIN:
                add(entry)
                add_value(value)
            elif (type(entry) is kind and type(value) in (kind, dict)) or (is_node(entry) and is_node(value)):
                todo.append((entry, value))
            elif (entry := as_plain(entry, value)) is not None:
                add(entry)
                add_value(value)
            else:
                return [], []
    return targets, values


def as_plain(entry: Any, value: object) -> Tensor | None:
    """Return a plain view of a leaf of a subclass, such as a memory-mapped one, if writing to it is the same; else None."""
    kind = type(entry)
    if (
        type(value) in PLAIN
        and isinstance(entry, Tensor)
        and not torch.compiler.is_compiling()
        and not entry.requires_grad
        and kind.__torch_function__ is plain_results
        and kind.__torch_dispatch__ is _NO_DISPATCH
        and kind.__setitem__ is Tensor.__setitem__
        and kind.copy_ is Tensor.copy_
    ):
        return Tensor.detach(entry)  # indexing a tensor subclass would also run the code of the subclass
    return None


def pair_rows(node: Core, value: object) -> list[tuple[Core, object]] | None:
    """Pair each member of a lazy stack with its item of a list of tensors of different shapes; None for other values."""
    stacked = node._members_and_dim() if type(value) in (list, tuple) else None
    if stacked is None or getattr(node._inner(), "hook_in", None) is not None:
        return None
    members, dim = stacked
    rows = rows_of_members(value, dim, len(members))
    return None if rows is None else list(zip(members, rows, strict=True))


def rows_of_members(value: object, dim: int, count: int) -> list[object] | None:
    """Split a nested list along ``dim`` into a row per member. Return None unless it has tensors of different shapes."""
    shapes = set()
    for item in expand([value], lambda item: item if isinstance(item, (list, tuple)) else ()):
        if isinstance(item, (Tensor, np.ndarray)) and type(item) not in WRAPPED:
            shapes.add(tuple(item.shape))
        elif not isinstance(item, (list, tuple)):
            return None
    rows = _along(value, dim) if len(shapes) > 1 else None
    return rows if rows is not None and len(rows) == count else None


def _along(value: Any, dim: int) -> list[object] | None:
    """Split a tensor, an array or nested lists along a dim into a list; None if that dim is missing in a part."""
    if isinstance(value, Tensor):
        return list(value.unbind(dim)) if dim < value.ndim else None
    if not isinstance(value, (list, tuple)):
        return list(np.moveaxis(value, dim, 0)) if dim < value.ndim else None
    if dim == 0:
        return list(value)
    columns: list[Any] = [_along(row, dim - 1) for row in value]
    if any(column is None for column in columns):
        return None
    return [list(row) for row in zip(*columns)] if len({*map(len, columns)}) == 1 else None
