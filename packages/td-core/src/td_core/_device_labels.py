"""Device labels: what a collection says about where its leaves lie."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._collection import Core, iter_nodes

T = TypeVar("T")

_IS_CPU = attrgetter("is_cpu")


def set_device_labels(node: Core, device: torch.device | None) -> None:
    """Store the device label at every level."""
    for level in iter_nodes(node):
        level._set_device(device)


def fix_decoded_devices(result: T, nodes: Iterable[dict[str, Any]], leaves: Iterable[Tensor]) -> T:
    """Return a collection that was taken apart elsewhere, into encoded nodes and all its leaves, its labels made true."""
    labels = {node["meta"].get("device") for node in nodes} - {None}
    if labels and (labels != {"cpu"} or not all(map(_IS_CPU, leaves))):
        fix_device_metadata(result)
    return result


def fix_device_metadata(result: Any) -> None:
    """Make the labels of a collection true.

    Leaves may lie on another device than where they were taken apart: ``torch.load`` takes a ``map_location``, a message comes
    to where the backend receives, a file is mapped.
    """
    todo = [result]
    while todo:
        level = todo.pop()
        if level.device is None:
            todo.extend(level._iter_nested())
            continue
        leaves = level._leaves()
        places = {leaf.device for leaf in leaves}
        if places and places != {level.device}:
            set_device_labels(level, places.pop() if len(places) == 1 else None)
