"""Compute gather maps of shape plans in plain Python, which works under torch.compile and FakeTensorMode.

A plan acts on tensors. To rearrange the values of a stack like the elements of a leaf, the plan is applied to their
positions: recursively per member of the first dim, as for a lazy stack, or, if the plan does not support that, to a
tensor of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from td_core._plans import MultiPlan
from td_core._shape_plans import Reshape

#: (source position of each element of the result, in order; size of the result)
GatherMap = tuple[Sequence[int], tuple[int, ...]]


def make_gather_maps(plan: Any, size: tuple[int, ...], device: torch.device | None) -> list[GatherMap]:
    """Compute the source position of each element, per result of a plan that is applied to a batch of ``size``."""
    result = _map_by_members(plan, size)
    if result is not None:
        return result
    tensors = plan.leaf(make_positions(size, _get_device(plan) or device))
    parts = tensors if isinstance(plan, MultiPlan) else [tensors]
    return [(part.flatten().tolist(), tuple(part.shape)) for part in parts]


def take_values(values: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Gather the values at ``places``; a range of places is read as a slice, which is faster."""
    if type(places) is range and places.step > 0:
        return values[places.start : places.stop : places.step]
    return [values[i] for i in places]


def permute_positions(size: Sequence[int], order: Sequence[int]) -> list[int]:
    """Compute the source position of each element after permuting the dims of a batch."""
    results = [0]
    for dim in order:
        step = prod(size[dim + 1 :])
        results = [start + i * step for start in results for i in range(size[dim])]
    return results


def make_positions(size: tuple[int, ...], device: torch.device | None) -> Tensor:
    """Return the flat position of each element of a batch, as an int64 tensor of the shape of the batch."""
    # Callers read the positions, and tensors on the meta device cannot be read.
    place = "cpu" if device is None or device.type == "meta" else device
    return torch.arange(prod(size), device=place).view(size)


def _map_by_members(plan: Any, size: tuple[int, ...]) -> list[GatherMap] | None:
    """Compute gather maps from those of the members along the first dim; None if the plan can only be applied to a tensor."""
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
    if several and along.stack_dim is None and along.plan is None:  # as of unbind: each result is one member
        step = prod(rest)
        return [(range(i * step, i * step + step), rest) for i in picked]
    return [_stack_maps(member, size, picks, along.stack_dim) for picks in picked for member in members]


def _stack_maps(member: GatherMap, size: tuple[int, ...], picks: Any, dim: int | None) -> GatherMap:
    """Repeat the gather map of one member for each picked member, stacked along ``dim``; an int picks a single member."""
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
    """Return the device of the tensors in the index of a plan, or None: positions must be on the same device."""
    index = getattr(plan, "index", None)
    for item in index if type(index) is tuple else (index,):
        if isinstance(item, Tensor):
            return item.device
    return None
