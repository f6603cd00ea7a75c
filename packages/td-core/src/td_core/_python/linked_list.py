"""A list that writes back to the collection it was read from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import torch

from .._torch.private import pytree as torch_pytree
from .public_names import set_module


@set_module("td_core")
class LinkedList(list[Any]):
    """A list of the batch elements of a collection; assigning an item also writes it to the collection.

    ``items[index] = value`` calls ``td[index] = value``. ``sort`` and ``reverse`` write too. Operations that change the
    length, such as ``append``, change only this list. ``tree_map`` treats it as a list and returns a plain list.

    Args:
        values: the items.
        td: the collection that the items come from; None for a list that writes nothing back.

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

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        """Sort the items in place, in the collection too, whose other entries keep their order."""
        self[:] = sorted(self, key=key, reverse=reverse)

    def reverse(self) -> None:
        """Reverse the items in place, in the collection too, whose other entries keep their order."""
        self[:] = self[::-1]

    def __eq__(self, other: object) -> bool:
        _warn_of_text(other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        _warn_of_text(other)
        return super().__ne__(other)

    __hash__ = None

    def _show(self, index: SupportsIndex | slice, value: Any) -> None:
        """Store a written value in this list. A nested LinkedList is kept, and its items are replaced."""
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
        """Convert to nested plain lists, which write nothing back.

        >>> type(LinkedList([1, 2]).tolist())
        <class 'list'>
        """
        return [item.tolist() if isinstance(item, LinkedList) else item for item in self]

    def __repr__(self) -> str:
        return f"LinkedList({super().__repr__()})"


def _warn_of_text(other: object) -> None:
    if isinstance(other, str) and not torch.compiler.is_compiling():
        warnings.warn(
            "no list equals a string: data.get(key) == value is the mask of a column of values, and of the values of a "
            "tensorclass torch.tensor([x == value for x in column])",
            stacklevel=3,
        )


def _flatten(items: LinkedList) -> tuple[list[object], None]:
    return list(items), None


def _flatten_with_keys(items: LinkedList) -> tuple[list[tuple[Any, object]], None]:
    return [(torch_pytree.SequenceKey(place), item) for place, item in enumerate(items)], None


# unflatten returns a plain list: results of tree_map must not write back to the collection.
torch_pytree.register_pytree_node(
    LinkedList,
    _flatten,
    lambda items, context: list(items),
    serialized_type_name="td_core._linked_list.LinkedList",  # exported programs store this name, so keep it
    flatten_with_keys_fn=_flatten_with_keys,
)
