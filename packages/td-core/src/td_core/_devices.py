"""Devices: one spelling for each."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .typing import DeviceType


def as_device(device: DeviceType) -> torch.device:
    """Return a torch device; an accelerator without an index gets the current one, as its tensors do.

    >>> as_device("cpu")
    device(type='cpu')
    """
    result = torch.device(device)
    if result.index is None and result.type == "cuda":
        # To ask whether there is a GPU takes longer than most uses of it.
        if torch.cuda.is_initialized() or torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
    return result


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until the current streams of the GPUs among some devices have done what they were told to.

    What other threads do next does not wait for these streams by itself.

    >>> wait_for([torch.device("cpu")])
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
