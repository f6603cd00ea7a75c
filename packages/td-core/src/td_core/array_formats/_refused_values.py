"""Values of collections that are opened for writing: they are in the header, which writes in place do not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._collection import Core
from .._public_names import set_module
from .._storage_backends import Keeper
from .._walks import walk
from ..errors import LockedError

__all__ = ["RefusedValues", "refuse_values"]


@set_module("td_core.array_formats")
class RefusedValues(Keeper):
    """Refuses writes of values, which would not reach a save at ``where``."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def check(self, node: Core, values: Sequence[Any]) -> None:
        """Raise LockedError."""
        raise LockedError(
            f"cannot write values into {self.where} in place, since only its leaves are opened for writing: clone() the "
            "collection, or save it again"
        )

    @contextmanager
    def lock(self, node: Core) -> Iterator[None]:
        """Raise LockedError."""
        self.check(node, ())
        yield

    def of_part(self) -> Keeper:
        """Return this keeper."""
        return self

    def __reduce__(self) -> Any:
        return RefusedValues, (self.where,)


def refuse_values(opened: Core, where: str) -> None:
    """Let the nodes of a collection that is opened for writing refuse writes of values in place.

    >>> td = TensorDict({"a": 1})
    >>> refuse_values(td, "data.bin")
    >>> td.zero_()["a"]
    tensor(0)
    """
    for node in walk(opened):
        node._keeper = RefusedValues(where)
