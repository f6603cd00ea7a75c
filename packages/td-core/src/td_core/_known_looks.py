"""Cache of the metadata (dtypes, shapes, devices) of leaf lists that passed a check: equal lists skip the check."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from ._foreach import PLAIN
from ._torch_private import looks

__all__ = ["KnownLooks"]

_IS_NESTED = attrgetter("is_nested")
_REMEMBERED = 256


class KnownLooks:
    """Cache of the metadata of leaf lists that passed a check; it holds no leaves.

    Comparing the metadata of a list takes one call, as fast as reading one attribute per leaf; a check reads several.
    """

    __slots__ = ("_looks",)

    def __init__(self) -> None:
        self._looks: dict[tuple[int, torch.Size], Callable[[list[Tensor]], bool] | None] = {}

    def of(self, leaves: list[Tensor]) -> Callable[[list[Tensor]], bool] | None:
        """Return a predicate, True for lists with the metadata of ``leaves``; None if that metadata is not cached."""
        if torch.compiler.is_compiling() or not leaves:
            return None
        try:
            same = self._looks.get((len(leaves), leaves[0].shape))
        except RuntimeError:
            return None  # reading .shape of a strided nested tensor raises
        return same if same is not None and same(leaves) else None

    def add(self, leaves: list[Tensor]) -> None:
        """Record that ``leaves`` passed the check; the second call caches their metadata."""
        if torch.compiler.is_compiling() or not leaves or not PLAIN.issuperset(map(type, leaves)):
            return
        if len(set(map(id, leaves))) != len(leaves) or any(map(_IS_NESTED, leaves)):
            return  # TensorGuards of torch supports neither repeated nor nested tensors
        key = len(leaves), leaves[0].shape
        if key not in self._looks and len(self._looks) >= _REMEMBERED:
            self._looks.clear()
        # Building a predicate is slow, so build one only at every second call with the same key.
        self._looks[key] = _looks_of(leaves) if self._looks.get(key, self) is None else None


def _looks_of(leaves: list[Tensor]) -> Callable[[list[Tensor]], bool]:
    check = looks(leaves)

    def same(others: list[Tensor]) -> bool:
        # The guards of torch abort the process on a nested tensor of strided layout, so test is_nested first.
        # A value without that attribute is not a tensor and never matches.
        try:
            return not any(map(_IS_NESTED, others)) and check(*others)
        except AttributeError:
            return False

    return same
