"""Match and check the entries of nodes that are stacked or concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .._plans.elements import JoinPlan
from .._plans.shapes import Join
from .._python.settings import RULES
from .._tree.components import cat_components
from .._tree.defaults import check_same_keys, leaf_node_mismatch_error, show_path
from .._tree.node import Child, Core
from .._tree.ragged import get_display_shape
from ..errors import StructureError

ChildT = TypeVar("ChildT", bound=Child)


def zip_entries(
    columns: list[dict[str, ChildT]], path: tuple[str, ...]
) -> Iterator[tuple[str, Sequence[ChildT]]]:
    """Zip several dicts by key; KeyMismatchError if their keys differ."""
    keys = list(columns[0])
    for column in columns:
        if list(column) != keys:
            break
    else:
        # Fast path: dicts with keys in one order need no look-ups. zip(strict=True) would be measurably slower.
        return zip(keys, zip(*map(dict.values, columns)))
    start = RULES.begin("The sets of keys in the tensordicts to stack are exclusive")
    for column in columns:
        check_same_keys(columns[0], column, path, start)
    return ((key, [column[key] for column in columns]) for key in keys)


def unify_kinds(items: Sequence[Any], plan: JoinPlan) -> Sequence[Core]:
    """Convert dense items of a ``cat`` to lazy stacks if other items are lazy stacks, so that uneven entries are kept."""
    first = items[0]
    if (
        not isinstance(plan, Join)
        or plan.stacks
        or (first._inner() is first and len({*map(type, items)}) == 1)
    ):
        return items  # all items are of one kind; wrappers are excluded, since they may wrap different kinds
    stacks = [item._members_and_dim() for item in items]
    dims = {stack[1] for stack in stacks if stack is not None}
    dim = dims.pop() if len(dims) == 1 else None
    if dim is None or not all(len(item.batch_size) > dim and item.batch_size[dim] for item in items):
        return items
    return [item.to_lazystack(dim) if stack is None else item for item, stack in zip(items, stacks)]


def join_nodes(values: Sequence[Any], plan: JoinPlan, path: tuple[str, ...]) -> Core:
    """Join nodes of any kind. Raise StructureError if one of the values is a tensor."""
    for value in values:
        if isinstance(value, Tensor):
            raise leaf_node_mismatch_error(values[0], value, path)
    values = unify_kinds(values, plan)
    return values[0]._join(values, plan, path)


def join_nested_tensors(
    values: Sequence[Tensor | Core], plan: JoinPlan, path: tuple[str, ...], error: Exception
) -> Tensor:
    """Join the components of nested tensors, which the function of the plan cannot join; raise an error for other leaves."""
    joined = cat_components(plan, values)
    if joined is None:
        stacks = isinstance(plan, Join) and plan.stacks
        start = (
            "The shapes of the tensors to stack is incompatible" if stacks else "Sizes of tensors must match"
        )
        raise join_error(values, path, error, RULES.begin(start)) from error
    return joined


def check_even(values: Sequence[Core], n: int, path: tuple[str, ...]) -> None:
    """Raise StructureError if the batch sizes of nodes differ after the first ``n`` dims."""
    first = values[0].batch_size
    for i, value in enumerate(values):
        if value.batch_size[n:] != first[n:]:
            raise StructureError(
                f"cannot join: {show_path(path)} has batch size {list(first)} in item 0 and {list(value.batch_size)} in "
                f"item {i}; use lazy_stack() to keep both"
            )


def join_error(
    values: Sequence[Child], path: tuple[str, ...], error: Exception, start: str = ""
) -> StructureError:
    """Build the error for entries that torch cannot join: it states the kind, shape or device that differs."""
    first = values[0]
    for i, value in enumerate(values):
        if not isinstance(first, Tensor) or not isinstance(value, Tensor):
            return leaf_node_mismatch_error(first, value, path)
        what = "shape"
        left: object = get_display_shape(first)
        right: object = get_display_shape(value)
        if left == right:
            what, left, right = "device", first.device, value.device
        if left != right:
            hint = ", or densify() a lazy stack to make a nested tensor of them" if what == "shape" else ""
            if first.is_nested or value.is_nested:
                hint = "; stack() needs rows of equal lengths, cat() does not"
            return StructureError(
                f"{start}cannot join: {show_path(path)} has {what} {left} in item 0 and {right} in item {i}; "
                f"use lazy_stack() to keep both{hint}"
            )
    return StructureError(f"{start}cannot join: {show_path(path)}: {error}")
