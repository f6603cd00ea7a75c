"""Logical operations and comparisons of values that are not tensors but bools or ints, kept in value nodes.

The result holds a tensor in their place, as the result of ``==`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.kernels import Op
from .._tree.defaults import show_path
from .._tree.node import LEAF_KINDS, Core, make_dense
from .._tree.walks import has_entries, map_levels, zip_walk
from ..errors import StructureError
from .operands import CoreT, Operand, combine, compare_values, convert_values, run_each_leaf

_BOOL = frozenset({torch.bool})
_INTS = frozenset({torch.bool, torch.int64})


def combine_logical(node: CoreT, name: str, this: Op, other: Operand, default: object = None) -> CoreT:
    """Apply a logical operation to leaves and to values; return NotImplemented if ``other`` cannot be an operand."""
    foreign: list[Core] = []
    try:
        result = combine(node, name, this, other, default, foreign)
    except StructureError:
        if not isinstance(other, Core):
            raise
        # One may have a tensor where the other has a value.
        converted = convert_values(node, other, strict=True), convert_values(other, node, strict=True)
        foreign.clear()
        result = combine(converted[0], name, this, converted[1], default, foreign)
        node, other = converted
    if not foreign or result is NotImplemented:
        return result
    if not isinstance(other, Core):
        return combine_flags(result, node, name, this, other)
    combined: CoreT = compare_values(result, node, other, partial(_combine_values, name, this.single), False)
    return combined


def combine_flags(result: CoreT, node: CoreT, name: str, this: Op, other: Operand) -> CoreT:
    """Combine the values of ``node`` that are bools with a number or tensor, and add them to ``result``."""
    flags = _read_flags(node)
    return result if flags is None else _add_leaves(result, combine(flags, name, this, other))


def invert(node: CoreT) -> CoreT:
    """Return the bitwise not of each leaf, and of the values that are bools."""
    result, flags = run_each_leaf("~td", node, torch.bitwise_not), _read_flags(node)
    return result if flags is None else _add_leaves(result, flags._map(torch.logical_not))


def _add_leaves(result: CoreT, flags: Core) -> CoreT:
    if flags.batch_size != result.batch_size:
        flags = flags.expand(result.batch_size)
    for level, target in zip_walk(flags, result):
        for key, child in dict(level._children()).items():
            if isinstance(child, Tensor):
                target._set_child(key, child)
    return result


def _read_flags(node: Core) -> Core | None:
    """Return a collection of the values that are bools, as tensors, at their keys; None without such values."""

    def fill(level: Core, entries: dict[str, object], _: None) -> Iterator[tuple[str, Core, None]]:
        for key, child in dict(level._children()).items():
            if isinstance(child, Tensor):
                continue
            if has_entries(child):
                yield key, child, None
            elif (made := _as_tensor(child, _BOOL)) is not None:
                entries[key] = made

    def make(level: Core, entries: dict[str, Any]) -> Core | None:
        return make_dense(entries, level.batch_size, level.device) if entries else None

    return map_levels(node, fill, make=make, by_member=True)


def _as_tensor(value: Core, dtypes: frozenset[torch.dtype]) -> Tensor | None:
    """Return a value node as a tensor of its batch size, if torch reads its values in one of the dtypes; else None."""
    if type(value) in LEAF_KINDS:
        return None
    try:
        made = torch.as_tensor(value.tolist(), device=value.device or "cpu")
    except (TypeError, ValueError, RuntimeError):
        return None  # other values, or those of which vmap hides a dim
    return made if made.dtype in dtypes and made.shape == value.batch_size else None


def _combine_values(
    name: str, single: Callable[..., Tensor], left: Core, right: Core, key: str
) -> Tensor | None:
    """Combine two value nodes; None if both hold the same values of other types, which stay."""
    if type(left) in LEAF_KINDS:
        return None
    pair = [_as_tensor(item, _INTS) for item in (left, right)]
    if None not in pair:
        return single(*pair)
    same = left._compare(right, torch.eq)
    if same is None or same.all():
        return None
    raise TypeError(
        f"cannot compute {name}: {show_path((key,))} holds values that are neither bools nor ints, {left._unwrap()!r} and "
        f"{right._unwrap()!r}; exclude() them first"
    )
