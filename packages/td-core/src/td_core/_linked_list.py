"""A list that writes back to the collection it was read from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

__all__ = ["LinkedList"]


class LinkedList(list[Any]):
    """A list of what a collection holds, element by element; assigning an item writes it back.

    The collection decides what can be written: an item assignment becomes ``td[index] = value``. Operations that would
    change the length change this list only.

    Args:
        values: the items.
        td: the collection that they come from.

    >>> from td_core import TensorDict
    >>> td = TensorDict({"a": [1, 2]}, batch_size=[2])
    >>> items = td.tolist(as_linked_list=True)
    >>> items[0] = {"a": 5}
    >>> td["a"]
    tensor([5, 2])
    """

    __slots__ = ("_td",)

    def __init__(self, values: Iterable[Any] = (), *, td: Any = None) -> None:
        super().__init__(values)
        self._td = td

    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        if self._td is not None:
            self._td[index] = value
        super().__setitem__(index, value)

    def __repr__(self) -> str:
        return f"LinkedList({super().__repr__()})"
