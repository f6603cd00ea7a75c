"""Writing into a lazy stack at an index: each member gets the part of the value that lands in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._coerce import nest
from ._collection import Core
from ._indexing import plan_index
from .errors import BatchSizeError, StructureError


def assign_members(stack: Any, index: Any, value: Any, non_blocking: bool = False) -> None:
    """Write ``stack[index] = value`` into the members.

    Raises:
        BatchSizeError: the value's batch size cannot be broadcast to the indexed one.
        StructureError: the members' batch sizes differ, and the index names more than one of them.
    """
    members, dim, size = stack._members, stack._stack_dim, stack.batch_size
    if -1 in size:
        along: Any = plan_index(
            index, (*members[0].batch_size[:dim], len(members), *members[0].batch_size[dim:])
        ).along(dim)
        if along is None or not isinstance(along.picks, int):
            raise StructureError(
                f"members of different batch sizes can be written one at a time only; got the index {index!r}"
            )
        members[along.picks]._assign(
            () if along.plan is None else along.plan.index, value, non_blocking=non_blocking
        )
        return
    plan = plan_index(index, size)
    lead = torch.Size((*plan.lead, *size[plan.n :]))
    along = plan.along(dim)
    inner: Any = () if along is None or along.plan is None else along.plan.index
    if along is not None and isinstance(along.picks, int):
        members[along.picks]._assign(inner, value, non_blocking=non_blocking)
        return
    value = _fitted(value, lead, index, stack.device)
    if along is not None:
        picked = members if along.picks is None else [members[i] for i in along.picks]
        parts = value.unbind(along.stack_dim) if isinstance(value, Core) else [value] * len(picked)  # type: ignore[attr-defined]
        for member, part in zip(picked, parts, strict=True):
            member._assign(inner, part, non_blocking=non_blocking)
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
            member._assign(
                inner,
                part if inner or not isinstance(part, Core) else part._index(-1),
                non_blocking=non_blocking,
            )


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
    if isinstance(value, Tensor) and value.ndim:
        raise StructureError(
            "a collection takes a collection, a mapping or a number at an index, not a tensor"
        )
    return value
