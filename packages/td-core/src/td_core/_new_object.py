"""``object.__new__``, wrapped in a function for torch before 2.13, which cannot trace the builtin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["new_object"]

T = TypeVar("T")

_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _new(cls: type[T]) -> T:
    return object.__new__(cls)


new_object: Callable[[type[T]], T] = _new if _OLD else object.__new__
