"""Compute gather maps of shape plans in plain Python, which works under torch.compile and FakeTensorMode.

The steps of a plan give the source position of each element. Where only torch knows it, the plan is applied to a tensor
of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from td_core._plan_steps import GatherMap
from td_core._plans import MultiPlan


def make_gather_maps(plan: Any, size: tuple[int, ...], device: torch.device | None) -> list[GatherMap]:
    """Compute the source position of each element, per result of a plan that is applied to a batch of ``size``."""
    maps: list[GatherMap] = plan.list_gather_maps(size)
    if None not in maps:
        return maps
    tensors = plan.leaf(make_positions(size, _get_device(plan) or device))
    parts = tensors if isinstance(plan, MultiPlan) else [tensors]
    return [(part.flatten().tolist(), tuple(part.shape)) for part in parts]


def take_values(values: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Gather the values at ``places``; a range of places is read as a slice, which is faster."""
    if type(places) is range and places.step > 0:
        return values[places.start : places.stop : places.step]
    return [values[i] for i in places]


def make_positions(size: tuple[int, ...], device: torch.device | None) -> Tensor:
    """Return the flat position of each element of a batch, as an int64 tensor of the shape of the batch."""
    # Callers read the positions, and tensors on the meta device cannot be read.
    place = "cpu" if device is None or device.type == "meta" else device
    return torch.arange(prod(size), device=place).view(size)


def _get_device(plan: Any) -> torch.device | None:
    """Return the device of the tensors in the index of a plan, or None: positions must be on the same device."""
    index = getattr(plan, "index", None)
    for item in index if type(index) is tuple else (index,):
        if isinstance(item, Tensor):
            return item.device
    return None
