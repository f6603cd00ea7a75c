"""Device labels: the device that a node states for its leaves."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._collection import Core
from ._walks import expand, list_nested, walk

T = TypeVar("T")

_IS_CPU = attrgetter("is_cpu")


def set_device_labels(node: Core, device: torch.device | None) -> None:
    """Set the device label of every node of a tree."""
    for level in walk(node):
        level._set_device(device)


def fix_decoded_devices(result: T, nodes: Iterable[dict[str, Any]], leaves: Iterable[Tensor]) -> T:
    """Correct the device labels of a decoded collection, which came from encoded ``nodes`` and ``leaves``."""
    labels = {node["meta"].get("device") for node in nodes} - {None}
    if labels and (labels != {"cpu"} or not all(map(_IS_CPU, leaves))):
        fix_device_metadata(result)
    return result


def fix_device_metadata(result: Any) -> None:
    """Correct device labels that differ from the devices of the leaves, as after ``torch.load(map_location=...)``."""
    for level in expand([result], lambda level: list_nested(level) if level.device is None else ()):
        if level.device is None:
            continue
        leaves = level._leaves()
        places = {leaf.device for leaf in leaves}
        if places and places != {level.device}:
            set_device_labels(level, places.pop() if len(places) == 1 else None)
