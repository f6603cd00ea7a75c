"""Methods that repeat, reorder or select elements along batch dims."""

from __future__ import annotations

from collections.abc import Callable

from .shape import write_back


def write_inverse(owner: object, result: object, inverse: Callable[[object], object]) -> None:
    write_back(owner, inverse(result))
