"""Device labels: what a collection says about where its leaves lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._collection import Core

T = TypeVar("T")


def relabel(node: Core, device: torch.device | None) -> None:
    """Store the device label at every level."""
    todo = [node]
    while todo:
        level = todo.pop()
        level._set_device(device)
        todo.extend(level._nested())


def arrived(result: T, leaves: Sequence[Tensor]) -> T:
    """Return a collection that was taken apart elsewhere, its labels made true.

    Its leaves may lie on another device than they did there: ``torch.load`` takes a ``map_location``, and a message comes to
    where the backend receives.

    Args:
        result: the collection.
        leaves: all its leaves.
    """
    found = {leaf.device for leaf in leaves}
    todo: list[Any] = [result]
    while todo and found:
        level = todo.pop()
        if level.device is None:
            todo.extend(level._nested())
        elif found != {level.device}:
            here: list[Tensor] = []
            level._collect(here)
            places = {leaf.device for leaf in here}
            if places and places != {level.device}:
                relabel(level, places.pop() if len(places) == 1 else None)
    return result
