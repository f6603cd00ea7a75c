"""A list that writes back to the collection it was read from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

from torch.utils import _pytree as torch_pytree

from ._public_names import set_module

__all__ = ["LinkedList"]


@set_module("td_core")
class LinkedList(list[Any]):
    """A list of what a collection holds, element by element; assigning an item writes it back.

    The collection decides what can be written: an item assignment becomes ``td[index] = value``. Operations that would
    change the length change this list only. To ``tree_map`` it is a list, and so is what that makes of it.

    Args:
        values: the items.
        td: the collection that they come from.

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
        if self._td is None:
            super().__setitem__(index, value)
            return
        if isinstance(index, slice):
            value, count = list(value), len(self[index])
            if len(value) != count:
                raise ValueError(f"a batch keeps its size: the slice has {count} items, got {len(value)}")
        self._td[index] = value
        self._show(index, value)

    def _show(self, index: SupportsIndex | slice, value: Any) -> None:
        """Put a value where it was written to; a list there that writes back stays, with other items."""
        if isinstance(index, slice):
            for place, item in zip(range(len(self))[index], value):
                self._show(place, item)
            return
        held = self[index]
        if isinstance(held, LinkedList) and isinstance(value, list) and len(value) == len(held):
            held._show(slice(None), value)
        else:
            super().__setitem__(index, value)

    def tolist(self) -> list[Any]:
        """Return the items as plain lists, which write nothing back.

        >>> type(LinkedList([1, 2]).tolist())
        <class 'list'>
        """
        return [item.tolist() if isinstance(item, LinkedList) else item for item in self]

    def __repr__(self) -> str:
        return f"LinkedList({super().__repr__()})"


def _flatten(items: LinkedList) -> tuple[list[Any], None]:
    return list(items), None


def _flatten_with_keys(items: LinkedList) -> tuple[list[tuple[Any, Any]], None]:
    return [(torch_pytree.SequenceKey(place), item) for place, item in enumerate(items)], None


# A function of what a collection holds gives a list of its own, which writes nothing back.
torch_pytree.register_pytree_node(
    LinkedList,
    _flatten,
    lambda items, context: list(items),
    serialized_type_name="td_core._linked_list.LinkedList",  # exported programs hold this name
    flatten_with_keys_fn=_flatten_with_keys,
)
