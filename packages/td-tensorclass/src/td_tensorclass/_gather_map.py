"""Where a plan puts the elements of a batch, in plain Python: what torch.compile and FakeTensorMode can follow.

A plan acts on tensors. The values of a stack go where the elements of a leaf go, so the plan is applied to their
positions: member by member along the first dim, as a lazy stack does, or, where only a tensor can say, to a tensor
of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from td_core._plans import MultiPlan
from td_core._shape_plans import Reshape

#: For each element of a result, in order, its position in the batch that it comes from; and the size of the result.
GatherMap = tuple[Sequence[int], tuple[int, ...]]


def make_gather_maps(plan: Any, size: tuple[int, ...], device: torch.device | None) -> list[GatherMap]:
    """Return where the elements of a batch of ``size`` go: one arrangement, or one for each part of an exploding plan.

    >>> from td_core._shape_plans import transpose_plan, unbind_plan
    >>> make_gather_maps(transpose_plan((2, 3), 0, 1), (2, 3), None)
    [([0, 3, 1, 4, 2, 5], (3, 2))]
    >>> make_gather_maps(unbind_plan((2, 3), 0), (2, 3), None)
    [(range(0, 3), (3,)), (range(3, 6), (3,))]
    """
    result = _map_by_members(plan, size)
    if result is not None:
        return result
    tensors = plan.leaf(make_positions(size, _get_device(plan) or device))
    parts = tensors if isinstance(plan, MultiPlan) else [tensors]
    return [(part.flatten().tolist(), tuple(part.shape)) for part in parts]


def take_values(values: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Return what a sequence has at some places, which for a range of them is a slice.

    >>> take_values("abcd", [2, 0]), take_values([1, 2, 3, 4], range(1, 4, 2))
    (['c', 'a'], [2, 4])
    """
    if type(places) is range and places.step > 0:
        return values[places.start : places.stop : places.step]
    return [values[i] for i in places]


def permute_positions(size: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return where the elements of a batch come from whose dims are put into another order.

    >>> permute_positions((2, 3), (1, 0))
    [0, 3, 1, 4, 2, 5]
    """
    results = [0]
    for dim in order:
        step = prod(size[dim + 1 :])
        results = [start + i * step for start in results for i in range(size[dim])]
    return results


def make_positions(size: tuple[int, ...], device: torch.device | None) -> Tensor:
    """Return the position of each element of a batch, in the shape of the batch.

    >>> make_positions((2, 2), None)
    tensor([[0, 1],
            [2, 3]])
    """
    # Values have no device, and the meta device no positions.
    place = "cpu" if device is None or device.type == "meta" else device
    return torch.arange(prod(size), device=place).view(size)


def _map_by_members(plan: Any, size: tuple[int, ...]) -> list[GatherMap] | None:
    """Return the arrangements; None where only a tensor can say."""
    if isinstance(plan, Reshape):
        return [(range(prod(size)), (*plan.lead, *size[plan.n :]))]
    if not plan.n:
        return [([*range(prod(size))] * prod(plan.lead), (*plan.lead, *size))]
    along = plan.along(0)
    if along is None:
        return None
    rest = size[1:]
    members = [(range(prod(rest)), rest)] if along.plan is None else _map_by_members(along.plan, rest)
    if members is None:
        return None
    several = isinstance(plan, MultiPlan) and along.picks is not None
    picked = along.picks if several else [along.picks]
    if several and along.stack_dim is None and along.plan is None:  # one of the members each
        step = prod(rest)
        return [(range(i * step, i * step + step), rest) for i in picked]
    return [_stack_maps(member, size, picks, along.stack_dim) for picks in picked for member in members]


def _stack_maps(member: GatherMap, size: tuple[int, ...], picks: Any, dim: int | None) -> GatherMap:
    """Return some members, each arranged in the same way, as a stack along ``dim``; or the one that is picked."""
    inner, shape = member
    step = prod(size[1:])
    if isinstance(picks, int):
        start = picks % size[0] * step
        if type(inner) is range:
            return range(start + inner.start, start + inner.stop, inner.step), shape
        return [start + position for position in inner], shape
    if type(picks) is range and step == 1 and not shape:
        return picks, (len(picks),)
    starts = [i % size[0] * step for i in (range(size[0]) if picks is None else picks)]
    block = prod(shape[dim:])
    arranged = [
        start + position
        for index in range(0, prod(shape), block or 1)
        for start in starts
        for position in inner[index : index + block]
    ]
    return arranged, (*shape[:dim], len(starts), *shape[dim:])


def _get_device(plan: Any) -> torch.device | None:
    """Return the device of the tensors of an index, where the positions must be too."""
    index = getattr(plan, "index", None)
    for item in index if type(index) is tuple else (index,):
        if isinstance(item, Tensor):
            return item.device
    return None
