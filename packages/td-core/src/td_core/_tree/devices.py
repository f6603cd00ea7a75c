"""Device arguments, device labels (the device that a node states for its leaves), and synchronization of GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..typing import DeviceType
from .node import Core, CoreT
from .walks import expand, list_nested, walk

_IS_CPU = attrgetter("is_cpu")


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


def set_device_labels(node: Core, device: torch.device | None) -> None:
    """Set the device label of every node of a tree."""
    for level in walk(node):
        level._set_device(device)


def fix_decoded_devices(result: CoreT, nodes: Iterable[dict[str, Any]], leaves: Iterable[Tensor]) -> CoreT:
    """Correct the device labels of a decoded collection, which came from encoded ``nodes`` and ``leaves``."""
    labels = {node["meta"].get("device") for node in nodes} - {None}
    if labels and (labels != {"cpu"} or not all(map(_IS_CPU, leaves))):
        fix_device_metadata(result)
    return result


def fix_device_metadata(result: Core) -> None:
    """Correct device labels that differ from the devices of the leaves, as after ``torch.load(map_location=...)``."""
    for level in expand([result], lambda level: list_nested(level) if level.device is None else ()):
        if level.device is None:
            continue
        leaves = level._leaves()
        places = {leaf.device for leaf in leaves}
        if places and places != {level.device}:
            set_device_labels(level, places.pop() if len(places) == 1 else None)
