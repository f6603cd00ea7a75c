"""Writing into a lazy stack at an index: each member gets the part of the value that lands in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .._coerce import nest
from .._collection import Core
from .._indexing import plan_index
from ..errors import BatchSizeError, StructureError

Part = tuple[Any, Any, Any]


def member_parts(stack: Any, index: Any, value: Any) -> Iterator[Part]:
    """Iterate over what ``stack[index] = value`` writes: each time a member, the index in it, and its value.

    Raises:
        BatchSizeError: the value's batch size cannot be broadcast to the indexed one.
        StructureError: the members' batch sizes differ, and the index names more than one of them.
    """
    size = stack.batch_size
    found = stack._stacked()
    if found is None:
        plan_index(index, size)
        return
    members, dim = found
    if -1 in size:
        along: Any = plan_index(
            index, (*members[0].batch_size[:dim], len(members), *members[0].batch_size[dim:])
        ).along(dim)
        if along is None or not isinstance(along.picks, int):
            raise StructureError(
                f"members of different batch sizes can be written one at a time only; got the index {index!r}"
            )
        yield members[along.picks], () if along.plan is None else along.plan.index, value
        return
    plan = plan_index(index, size)
    lead = torch.Size((*plan.lead, *size[plan.n :]))
    along = plan.along(dim)
    inner: Any = () if along is None or along.plan is None else along.plan.index
    if along is not None and isinstance(along.picks, int):
        yield members[along.picks], inner, value
        return
    value = _fitted(value, lead, index, stack.device)
    if along is not None:
        picked = members if along.picks is None else [members[i] for i in along.picks]
        parts = value.unbind(along.stack_dim) if isinstance(value, Core) else [value] * len(picked)  # type: ignore[attr-defined]
        for member, part in zip(picked, parts, strict=True):
            yield member, inner, part
        return
    # The positions that the index names tell which member, and where in it, each element of the value belongs.
    chosen = plan.leaf(torch.arange(size.numel()).view(size))
    if not chosen.numel():
        return
    coordinates = torch.unravel_index(chosen, size)
    for i, member in enumerate(members):
        here = coordinates[dim] == i
        if bool(here.any()):
            part = value._index(here) if isinstance(value, Core) else value
            inner = tuple(where[here] for j, where in enumerate(coordinates) if j != dim)
            yield member, inner, part if inner or not isinstance(part, Core) else part._index(-1)


def _fitted(value: Any, lead: torch.Size, index: Any, device: torch.device | None) -> Any:
    """Return a value as a number, or as a collection of the batch size that the index gives."""
    if isinstance(value, Mapping) and not isinstance(value, Core):
        return nest(value, lead, device)
    if isinstance(value, Core) and value.batch_size != lead:
        try:
            return value.expand(lead) if lead or not value.batch_size else value.reshape(())  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            raise BatchSizeError(
                f"the value has batch size {list(value.batch_size)}, the index {index!r} gives {list(lead)}"
            ) from error
    return value
