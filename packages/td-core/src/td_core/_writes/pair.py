"""Write all leaves of a tree in one call, if it has the keys of the source and each leaf is plain and fits its value.

Each function returns False, with nothing written, if the general path has to pair, check and write the leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._collection import Core
from .._dtypes import ROWS
from .._foreach import PLAIN
from .._indexing import BoundIndex, IndexPlan
from .._storage_backends import get_backends
from .._torch_private import functorch_level, plain_results
from .check import (
    are_copyable,
    are_writable,
    has_passed,
    have_same_sizes,
    is_all_contiguous,
    is_all_strided,
    remember,
)
from .run import try_copy_fused

#: Dtypes for which some versions of torch cannot write at an index tensor or mask.
RARELY_SCATTERED = frozenset(dtype for dtype, row in ROWS.items() if "scatter" in row.cannot)

_DTYPE = attrgetter("dtype")
_SHAPE = attrgetter("shape")
_NO_DISPATCH = Tensor.__torch_dispatch__

# Comparing all keys of two nodes at once is faster only above about this many entries.
_FEW = 8


def try_copy_whole(
    target: Core, source: object, non_blocking: bool, view: Callable[[Tensor], Tensor] | None = None
) -> bool:
    """Copy all leaves of a collection or dict in one fused call; ``view`` maps a leaf to the view that is written."""
    leaves, values = _pair_leaves(target, source)
    return try_copy_leaves(target, leaves, source, values, non_blocking, view)


def try_copy_leaves(
    target: Core,
    leaves: list[Tensor],
    source: Any,
    values: list[Any],
    non_blocking: bool = False,
    view: Callable[[Tensor], Tensor] | None = None,
) -> bool:
    """Copy the values of a source into the leaves of a target in one fused call."""
    if not leaves or functorch_level() is not None:
        return False
    if view is not None:
        # The element of a sparse leaf is a copy, so a write to it would be lost.
        if not (is_all_contiguous(leaves) or is_all_strided(leaves)):
            return False
        try:
            leaves = list(map(view, leaves))
        except RuntimeError:
            return False
    both = [*values, *leaves]
    if torch.compiler.is_compiling() or not has_passed(target, "copy", both):
        if not (are_writable(leaves) and are_copyable(values) and have_same_sizes(leaves, values)):
            return False
        remember(target, "copy", both)
    for item in get_backends(target) if type(source) is not dict and isinstance(source, Core) else ():
        if item.write(target, source, leaves, values, non_blocking):
            return True
    return try_copy_fused(leaves, values, non_blocking)


def try_scatter_whole(target: Core, source: object, plan: IndexPlan) -> bool:
    """Write all leaves at an index tensor or mask."""
    leaves, values = _pair_leaves(target, source)
    if torch.compiler.is_compiling() or functorch_level() is not None or not leaves:
        return False
    if not _can_scatter(target, leaves, values, plan):
        return False
    plan.check_range()
    place = BoundIndex(plan.index)
    try:
        for leaf, value in zip(leaves, values):
            leaf[place.move_to_device_of(leaf)] = value
    except RuntimeError:
        return False  # an indexed write cannot change device or dtype; the general path can, and writes every leaf again
    return True


def _can_scatter(node: Core, leaves: list[Tensor], values: list[Any], plan: IndexPlan) -> bool:
    """Return True if ``leaf[index] = value`` writes all leaves correctly, or raises so that the general path takes over."""
    lead, n, both = plan.lead, plan.n, [*values, *leaves]
    if has_passed(node, "scatter", both):
        # The batch dims of these tensors fit each other, so the first pair is enough.
        return bool(values[0].shape == (*lead, *leaves[0].shape[n:]))
    if not (are_writable(leaves) and are_copyable(values)):
        return False
    if not RARELY_SCATTERED.isdisjoint(map(_DTYPE, leaves)):
        return False
    try:
        wanted, given = list(map(_SHAPE, leaves)), list(map(_SHAPE, values))
    except RuntimeError:
        return False  # reading the shape of a strided nested tensor raises
    if any(right != (*lead, *left[n:]) for right, left in zip(given, wanted)):
        return False
    remember(node, "scatter", both)
    return True


def _pair_leaves(target: Core, source: Any) -> tuple[list[Tensor], list[Any]]:
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
            elif type(entry) is kind is type(value) or _is_node_pair(entry, value):
                todo.append((entry, value))
            elif (entry := _as_plain(entry, value)) is not None:
                add(entry)
                add_value(value)
            else:
                return [], []
    return targets, values


def _as_plain(entry: Any, value: object) -> Tensor | None:
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


def _is_node_pair(entry: Any, value: object) -> bool:
    """Return True if ``entry`` is a node with entries, and ``value`` is such a node or a dict."""
    if not isinstance(entry, Core) or entry._is_value:
        return False
    return type(value) is dict or (isinstance(value, Core) and not value._is_value)
