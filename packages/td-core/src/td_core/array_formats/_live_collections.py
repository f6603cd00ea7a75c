"""A collection whose entries are in an open store, to which changes of the structure are written, too."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .._base import TensorDictBase
from .._collection import Child, Core, make_dense, show_path
from .._dim_names import resize_names
from .._plans import as_batch_size
from .._storage_backends import Keeper
from .._stored import StoredTensor
from .._tensordict import TensorDict
from .._value_codec import split
from .._walks import visit, walk
from ..errors import StructureError, UnsupportedOperationError
from ..typing import Names


class LiveStore(Protocol):
    """The open store of a collection. A *row* is what the format has for a node, or None.

    Attributes:
        where: location, for messages.
    """

    @property
    def where(self) -> str: ...
    def check_writable(self, path: tuple[str, ...], what: str) -> None:
        """Raise LockedError if the store is opened for reading."""

    def find_row(self, row: Any, key: str) -> Any:
        """Return the row of an entry of a node."""

    def write_values(self, path: tuple[str, ...], row: Any, node: Core) -> None:
        """Write the values of an entry."""

    def record(self, path: tuple[str, ...], row: Any, size: torch.Size, names: Names | None) -> None:
        """Write the batch size and dim names of a node."""


class EntryValues(Keeper):
    """Writes the values of a node that is an entry of a live collection into the store."""

    __slots__ = ("is_part", "path", "row", "store")

    def __init__(self, store: LiveStore, path: tuple[str, ...], row: Any, is_part: bool) -> None:
        self.store, self.path, self.row, self.is_part = store, path, row, is_part

    def check(self, node: Core, values: Sequence[object]) -> None:
        """Raise an error if the store is opened for reading, or for a value that cannot be stored."""
        self.store.check_writable(self.path, "write")
        if self.is_part:
            raise StructureError(
                f"cannot write the values of {show_path(self.path)} in {self.store.where} in place, since they are those "
                "of a larger entry there: set the entry again, or clone() it first"
            )
        for value in values:
            split(value)

    @contextlib.contextmanager
    def lock(self, node: Core) -> Iterator[None]:
        """Check that values can be written."""
        self.check(node, ())
        yield

    def write(self, node: Core) -> None:
        """Write the values of a node into the store."""
        self.store.write_values(self.path, self.row, node)

    def of_part(self) -> Keeper:
        """Return a keeper that refuses writes."""
        return EntryValues(self.store, self.path, self.row, True)

    def __reduce__(self) -> tuple[type[Keeper], tuple[()]]:
        return Keeper, ()  # in another process, the values are in memory


class LiveCollection(TensorDictBase):
    """A collection that writes each change of its structure into a store.

    A format derives from it, and implements ``_write_entry`` and ``_remove_entry``. :meth:`_of_opened` creates an instance.
    Results of operations are TensorDicts.

    >>> from types import SimpleNamespace
    >>> class Printed(LiveCollection):
    ...     def _write_entry(self, key, value):
    ...         print("write", key)
    ...         self._entries[key] = value
    ...
    ...     def _remove_entry(self, key):
    ...         print("remove", key)
    >>> def ignore(*facts):
    ...     pass
    >>> store = SimpleNamespace(where="memory", check_writable=ignore, find_row=ignore, record=ignore)
    >>> Printed._of_opened(store, (), None, TensorDict({"a": 1})).rename_key_("a", "b").sorted_keys
    write b
    remove a
    ['b']
    """

    _store: Any
    _row: Any
    _path: tuple[str, ...]
    _entries: dict[str, Child]
    _size: torch.Size
    _label: torch.device | None
    _labels: Names | None

    @classmethod
    def _of_opened(cls, store: LiveStore, path: tuple[str, ...], row: Any, opened: Core) -> Any:
        """Replace the TensorDicts of an opened collection by collections that write into the store; lock other nodes."""

        def open_below(made: LiveCollection, node: Core) -> Iterator[tuple[LiveCollection, Core]]:
            for key, child in node._children().items():
                place, below = (*made._path, key), store.find_row(made._row, key)
                if type(child) is TensorDict:
                    nested = cls._of_node(store, place, below, child)
                    yield nested, child
                    child = nested
                elif not isinstance(child, Tensor):
                    child.lock_()  # changes of its structure would not reach the store
                    for inner in walk(child):
                        inner._keeper = EntryValues(store, place, below, not child._is_value)
                made._entries[key] = child

        root = cls._of_node(store, path, row, opened)
        visit(open_below, root, opened)
        return root

    @classmethod
    def _of_node(cls, store: LiveStore, path: tuple[str, ...], row: Any, node: Core) -> Any:
        self = cls.__new__(cls)
        self._store, self._path, self._row, self._entries = store, path, row, {}
        self._size, self._label, self._labels = node.batch_size, node.device, node._names
        return self

    @abstractmethod
    def _write_entry(self, key: str, value: Child) -> None:
        """Write a checked leaf or node into the store, in the place of the entry that is there."""

    @abstractmethod
    def _remove_entry(self, key: str) -> None:
        """Remove an entry from the store."""

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims that all entries share; settable if the shape of every entry starts with the new value."""
        return self._size

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> None:
        self._change_batch_size(as_batch_size(batch_size))

    @property
    def device(self) -> torch.device | None:
        """Device of every entry, or None."""
        return self._label

    @property
    def _names(self) -> Names | None:
        return self._labels

    @_names.setter
    def _names(self, names: Names | None) -> None:
        self._labels = names
        self._record()

    def _record(self) -> None:
        self._store.record(self._path, self._row, self._size, self._labels)

    def _children(self) -> dict[str, Child]:
        return self._entries

    def _with_children(self, children: Mapping[str, Child], **metadata: Any) -> Any:
        return make_dense({}, self._size, self._label, self._labels)._with_children(children, **metadata)

    def _set_child(self, key: str, value: Child) -> None:
        held, path = self._entries.get(key), (*self._path, key)
        if held is value:
            return
        self._store.check_writable(path, "set")
        if isinstance(held, StoredTensor) and isinstance(value, Tensor) and _fits(held, value):
            held.copy_(value)
            return
        if any(leaf.is_nested for leaf in self._with_children({key: value})._leaves()):
            raise UnsupportedOperationError(
                f"cannot set {show_path(path)} in {self._store.where}: a nested tensor cannot be written in place; save() the "
                "collection"
            )
        self._write_entry(key, value)

    def _del_child(self, key: str) -> None:
        if key not in self._entries:
            raise KeyError(key)
        self._store.check_writable((*self._path, key), "remove")
        self._remove_entry(key)
        del self._entries[key]

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._labels = resize_names(self._labels, len(batch_size))
        self._size = batch_size
        self._record()

    def _set_device(self, device: torch.device | None) -> None:
        self._label = device


def _fits(held: Tensor, value: Tensor) -> bool:
    """Return True if a value can be written into the array of a leaf."""
    return (
        not value.is_nested
        and value.dtype == held.dtype
        and value.shape == held.shape
        and 0 not in held.stride()
    )
