"""Devices: one spelling for each."""

from __future__ import annotations

import torch

from .typing import DeviceType


def as_device(device: DeviceType) -> torch.device:
    """Return a torch device; an accelerator without an index gets the current one, as its tensors do.

    >>> as_device("cpu")
    device(type='cpu')
    """
    result = torch.device(device)
    if result.index is None and result.type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return result
