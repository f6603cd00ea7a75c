"""What leaves looked like that passed a check, so that such leaves need no check of their own."""

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
    """What lists of leaves looked like that passed a check; nothing of the leaves themselves.

    To ask a list whether it looks like another takes as long as to ask each leaf for one thing, a check asks for several,
    and programs write to the same leaves again and again.

    >>> known = KnownLooks()
    >>> leaves = [torch.zeros(2), torch.zeros(3)]
    >>> known.add(leaves), known.add(leaves)
    (None, None)
    >>> same = known.of(leaves)
    >>> same([torch.ones(2), torch.ones(3)]), same([torch.ones(2), torch.ones(1)]), known.of([torch.ones(3)])
    (True, False, None)
    """

    __slots__ = ("_looks",)

    def __init__(self) -> None:
        self._looks: dict[tuple[int, torch.Size], Callable[[list[Tensor]], bool] | None] = {}

    def of(self, leaves: list[Tensor]) -> Callable[[list[Tensor]], bool] | None:
        """Return what tells whether as many other tensors look like leaves that passed; None where these do not."""
        if torch.compiler.is_compiling() or not leaves:
            return None
        try:
            same = self._looks.get((len(leaves), leaves[0].shape))
        except RuntimeError:
            return None  # a nested tensor of strided layout has no shape
        return same if same is not None and same(leaves) else None

    def add(self, leaves: list[Tensor]) -> None:
        """Take note that leaves passed; what they look like is remembered from the second time on."""
        if torch.compiler.is_compiling() or not leaves or not PLAIN.issuperset(map(type, leaves)):
            return
        if len(set(map(id, leaves))) != len(leaves) or any(map(_IS_NESTED, leaves)):
            return  # torch takes no list that has a tensor twice for known, and cannot describe a nested one
        key = len(leaves), leaves[0].shape
        if key not in self._looks and len(self._looks) >= _REMEMBERED:
            self._looks.clear()
        # Where others came under one key, every second one is remembered.
        self._looks[key] = _looks_of(leaves) if self._looks.get(key, self) is None else None


def _looks_of(leaves: list[Tensor]) -> Callable[[list[Tensor]], bool]:
    check = looks(leaves)

    def same(others: list[Tensor]) -> bool:
        # torch ends the process where it is asked about a nested tensor of strided layout. What has other classes has
        # other looks; an attribute of Tensor is all that is asked of them before.
        try:
            return not any(map(_IS_NESTED, others)) and check(*others)
        except AttributeError:
            return False

    return same
