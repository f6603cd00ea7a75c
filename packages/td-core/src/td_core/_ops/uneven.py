"""Index, reshape and densify lazy stacks whose members have different batch sizes, shapes or keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._coerce import WRAPPED
from .._collection import Child, Core
from .._indexing import plan_index
from .._plans import ShapePlan, compute_coordinates
from .._ragged import fill_gaps, get_display_shape, make_nested_tensor
from .._walks import expand, has_entries, list_holders
from ..errors import CollectionIndexError, StructureError

if TYPE_CHECKING:
    from .._lazy_stack import LazyStackedTensorDict


def uneven_index(stack: LazyStackedTensorDict, index: object) -> Any:
    """Index a lazy stack: return one indexed member, or a lazy stack of several; errors as in :func:`uneven_plans`."""
    picks, plans, stack_dim = uneven_plans(stack, index)
    members = stack.tensordicts
    if isinstance(picks, int):
        return _index_member(members[picks], plans[picks])
    if not picks:
        first = next(iter(plans))
        inner = _index_member(members[first], plans[first]).batch_size
        return make_empty_like(stack, torch.Size((*inner[:stack_dim], 0, *inner[stack_dim:])))
    return stack._with_members([_index_member(members[i], plans[i]) for i in picks], stack_dim)


def make_empty_like(stack: LazyStackedTensorDict, size: torch.Size) -> Any:
    """Build a dense collection of the empty batch size ``size``, with the keys that all members have.

    A lazy stack without members would have no keys. If members differ in shape, the shapes of the first are used.
    """
    members, dim = stack.tensordicts, stack.stack_dim
    item = members[0].select(*stack.keys(True)).unsqueeze(dim)
    if stack._stack_dim_name is not None:
        item.names = stack._names
    nothing = item._index((slice(None),) * dim + (slice(0, 0),))
    return nothing if nothing.batch_size == size or -1 in size else nothing.reshape(size)


def transform_uneven(stack: LazyStackedTensorDict, plan: ShapePlan) -> Any:
    """Apply a shape plan to members that cannot be stacked: arrange their elements in nested lazy stacks."""
    old = stack.batch_size[: plan.n]
    if 0 in plan.lead:
        result = make_empty_like(stack, plan.resize_batch(stack.batch_size))
    else:
        positions = plan.leaf(torch.arange(old.numel(), device="cpu").view(old))
        if not isinstance(positions, Tensor):
            raise CollectionIndexError(
                "a first-class dim cannot index the stack dim of members of different shapes: index the members"
            )
        result = _gather_elements(stack, positions.tolist(), old)
    if (names := plan.rename_dims(stack._names)) is not None:
        result._set_names(names)
    return result


def _gather_elements(stack: LazyStackedTensorDict, positions: object, size: torch.Size) -> Any:
    """Build nested lazy stacks of the elements at flat ``positions`` (nested lists) of a batch of ``size``."""
    if isinstance(positions, list):
        return stack._of([_gather_elements(stack, row, size) for row in positions], 0)
    where = list(compute_coordinates(positions, size))
    members, dim = stack.tensordicts, stack.stack_dim
    member = members[where.pop(dim)]
    return member._index(tuple(where)) if where else member


def _index_member(member: Core, plan: ShapePlan) -> Core:
    return member if plan is None else member._transform(plan)


def uneven_plans(stack: LazyStackedTensorDict, index: object) -> tuple[Any, dict[int, Any], Any]:
    """Split an index over members of different batch sizes. Return (positions of picked members, their plans, stack dim).

    A plan of None selects the whole member. Raise if the index is out of range for a picked member, or mixes members.
    """
    members, dim = stack.tensordicts, stack.stack_dim

    def along(i: int) -> Any:
        size = members[i].batch_size
        return plan_index(index, (*size[:dim], len(members), *size[dim:])).along(dim)

    # The index may be out of range for members that it does not pick, so plan with the first member for which it is in range.
    errors = []
    for i in range(len(members)):
        try:
            first = along(i)
            break
        except CollectionIndexError as error:
            errors.append(error)
    else:
        raise errors[0]
    plans = {i: first}
    if first is not None:
        picks = range(len(members)) if first.picks is None else first.picks
        for j in [picks] if isinstance(picks, int) else picks:
            if j not in plans:
                plans[j] = along(j)
    if None in plans.values():
        raise StructureError(f"members of different batch sizes cannot be indexed together by {index!r}")
    return picks, {j: plan.plan for j, plan in plans.items()}, first.stack_dim


def list_dense_entries(
    node: Core, out: dict[str, object], _: None, layout: torch.layout
) -> Iterator[tuple[str, Core, None]]:
    """Add the entries of a node, those that are ragged as nested tensors of ``layout``, and yield its nested nodes."""
    entries = node._children()
    members, dim = node._members_and_dim() or ((), 0)
    for key in list(entries):
        shapes = {
            get_display_shape(entry) if isinstance(entry := member._get_child(key), Tensor) else None
            for member in members
        }
        if len(shapes) > 1:
            out[key] = node.get(key, None, as_nested_tensor=True, layout=layout)
        elif has_entries(child := entries[key]):
            yield key, child, None
        else:
            out[key] = child
    for key in dict.fromkeys(chain(*[list(member._children()) for member in members])):
        if key not in entries:
            out[key] = make_nested_tensor(key, fill_gaps(key, members), dim, layout)


def build_dense(node: Core, entries: dict[str, Child]) -> Core:
    """Build a node of the class of the first innermost member of a lazy stack; other nodes keep their class."""
    first = next(iter(list_holders(node)), node)
    return first._with_children(entries, batch_size=node.batch_size, device=node.device, names=node._names)


def pair_rows(node: Core, value: object) -> list[tuple[Any, object]] | None:
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
