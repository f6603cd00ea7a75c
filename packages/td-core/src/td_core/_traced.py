"""Two calls in their fastest spelling, or in the one that ``torch.compile`` can follow where torch is older than 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["bounds", "new_object"]

T = TypeVar("T")

_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _new(cls: type[T]) -> T:
    return object.__new__(cls)


def _bounds(item: slice, size: int) -> tuple[int, int, int]:
    found = range(size)[item]
    return found.start, found.stop, found.step


def _indices(item: slice, size: int) -> tuple[int, int, int]:
    # As a method of a slice it is followed, as a function of the class it is not.
    return item.indices(size)


#: ``object.__new__``
new_object: Callable[[type[T]], T] = _new if _OLD else object.__new__
#: ``slice.indices``, as a function of a slice and a size
bounds: Callable[[slice, int], tuple[int, int, int]] = _bounds if _OLD else _indices
