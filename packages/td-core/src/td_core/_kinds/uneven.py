"""Index and reshape lazy stacks whose members have different batch sizes, shapes or keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._plans.index import plan_index
from .._plans.plans import ShapePlan, compute_coordinates
from .._tree.node import Core
from ..errors import CollectionIndexError, StructureError


def uneven_index(stack: Any, index: object) -> Any:
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


def make_empty_like(stack: Any, size: torch.Size) -> Any:
    """Build a dense collection of the empty batch size ``size``, with the keys that all members have.

    A lazy stack without members would have no keys. If members differ in shape, the shapes of the first are used.
    """
    members, dim = stack.tensordicts, stack.stack_dim
    item = members[0].select(*stack.keys(True)).unsqueeze(dim)
    if stack._stack_dim_name is not None:
        item.names = stack._names
    nothing = item._index((slice(None),) * dim + (slice(0, 0),))
    return nothing if nothing.batch_size == size or -1 in size else nothing.reshape(size)


def transform_uneven(stack: Core, plan: ShapePlan) -> Any:
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


def _gather_elements(stack: Any, positions: object, size: torch.Size) -> object:
    """Build nested lazy stacks of the elements at flat ``positions`` (nested lists) of a batch of ``size``."""
    if isinstance(positions, list):
        return stack._of([_gather_elements(stack, row, size) for row in positions], 0)
    where = list(compute_coordinates(positions, size))
    members, dim = stack.tensordicts, stack.stack_dim
    member = members[where.pop(dim)]
    return member._index(tuple(where)) if where else member


def _index_member(member: Core, plan: ShapePlan) -> Core:
    return member if plan is None else member._transform(plan)


def uneven_plans(stack: Any, index: object) -> tuple[Any, dict[int, Any], Any]:
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
