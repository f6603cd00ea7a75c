"""Normalise device arguments, and synchronize GPUs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .typing import DeviceType


def as_device(device: DeviceType) -> torch.device:
    """Convert a value to a torch device; ``cuda`` without an index gets the current index.

    >>> as_device("cpu")
    device(type='cpu')
    """
    result = torch.device(device)
    if result.index is None and result.type == "cuda":
        # is_available() is slow, so test is_initialized() first.
        if torch.cuda.is_initialized() or torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
    return result


def wait_for(devices: Iterable[torch.device]) -> None:
    """Synchronize the current streams of the GPUs among ``devices``.

    >>> wait_for({torch.device("cpu")})
    """
    # Wait on the host, since other threads use other streams, which would not wait for these streams.
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
