"""A collection whose entries are in an open store, to which changes of the structure are written, too."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._base import TensorDictBase
from .._collection import Child, Core, make_dense, show_path
from .._dim_names import resize_names
from .._encoded_tables import dump_table, prune_table
from .._nodes import Encoded, Row, encode
from .._plans import as_batch_size
from .._storage_backends import Keeper
from .._stored import StoredTensor
from .._tensordict import TensorDict
from .._value_codec import split
from .._walks import visit, walk
from ..errors import KeyPathError, LockedError, StructureError, UnsupportedOperationError
from ..typing import Names

KeyPath = tuple[str, ...]


class LiveStore(ABC):
    """The open store of a collection, whose header is written again when the structure of the collection changes.

    Attributes:
        is_writable: whether changes reach the store.
    """

    is_writable = True

    @property
    @abstractmethod
    def where(self) -> str:
        """Location, for messages."""

    @abstractmethod
    def edit(self, change: Callable[[Encoded], Encoded], removed: KeyPath = ()) -> None:
        """Replace the table of the header by the result of a function, and remove what the entry ``removed`` had alone."""

    @abstractmethod
    def check_entry(self, data: Core) -> None:
        """Raise CodecError if the only entry of a collection cannot be stored."""

    @abstractmethod
    def add_entry(self, path: KeyPath, data: Core) -> None:
        """Write the only entry of a collection to a key path, then the header; an error changes nothing."""

    @abstractmethod
    def open_entry(self, path: KeyPath) -> Any:
        """Open a collection with the stored entry of a key path alone."""

    def hold(self) -> contextlib.AbstractContextManager[object]:
        """Keep the store open and locked during a block, in which entries are removed and added."""
        return contextlib.nullcontext()

    def can_link(self, path: KeyPath, value: Child) -> bool:
        """Return True if ``add_entry`` gives the array of a leaf another name, also after the entry at the path is removed."""
        return False

    def check_writable(self, path: KeyPath, what: str) -> None:
        """Raise LockedError if the store is opened for reading."""
        if not self.is_writable:
            raise LockedError(
                f"cannot {what} {show_path(path)} in {self.where}: it is opened with mode='r'; open it with mode='r+'"
            )


def set_entry(table: Encoded, path: KeyPath, other: Encoded, source: KeyPath = ()) -> Encoded:
    """Return a table with the node or leaf at key path ``source`` of another table as its entry at ``path``.

    Raises:
        KeyPathError: the table has no node that gets the entry.
        StructureError: this node has another batch size than the one above the entry in the other table.

    >>> from td_core import TensorDict, encode
    >>> table = encode(TensorDict({"a": 1, "b": 2}))
    >>> set_entry(table, ("a",), encode(TensorDict({"c": {"d": 3}})), ("c",)).leaf_paths()
    [('b',), ('a', 'd')]
    """
    if source:
        above = (
            table.nodes[_find_reference(table, path[:-1])],
            other.nodes[_find_reference(other, source[:-1])],
        )
        stored, opened = (row["meta"].get("batch_size") for row in above)
        if stored != opened:
            raise StructureError(
                f"cannot set {show_path(path)}: the batch size is {stored} now, and was {opened} when the collection was "
                "opened: open it again"
            )
    nodes, leaves, values = len(table.nodes), len(table.leaves), len(table.values)
    found = _find_reference(other, source)
    part = Encoded([], [other.leaves[found[0]]], []) if isinstance(found, list) else prune_table(other, found)

    def shift(ref: Any) -> object:
        return [ref[0] + leaves] if isinstance(ref, list) else ref + nodes

    added = [
        {
            **row,
            "entries": [[key, shift(ref)] for key, ref in row["entries"]],
            "members": [[key, shift(ref)] for key, ref in row["members"]],
            "values": [[name, ref + values] for name, ref in row["values"]],
        }
        for row in part.nodes
    ]
    whole = replace(
        table,
        nodes=[*table.nodes, *added],
        leaves=[*table.leaves, *part.leaves],
        values=[*table.values, *part.values],
    )
    return _put_reference(whole, path, [leaves] if isinstance(found, list) else nodes)


def remove_entry(table: Encoded, path: KeyPath) -> Encoded:
    """Return a table without the entry at a key path."""
    return _put_reference(table, path, None)


def find_row(table: Encoded, path: Sequence[str]) -> Row:
    """Return the row of the node at a key path.

    Raises:
        KeyPathError: the table has no such node.
    """
    row: Row = table.nodes[_find_reference(table, tuple(path))]
    return row


def _find_reference(table: Encoded, path: KeyPath) -> Any:
    """Return the position of the node at a key path, or that of a leaf in a list."""
    found: Any = 0
    try:
        for key in path:
            found = dict(table.nodes[found]["entries"])[key]
    except (LookupError, TypeError) as error:
        raise KeyPathError(
            f"{show_path(path)} was removed since the collection was opened: open it again"
        ) from error
    return found


def _put_reference(table: Encoded, path: KeyPath, ref: Any) -> Encoded:
    position, key = _find_reference(table, path[:-1]), path[-1]
    old = dict(table.nodes[position]["entries"])
    row = [[name, other] for name, other in {**old, key: ref}.items() if other is not None]
    nodes = [*table.nodes]
    nodes[position] = {**nodes[position], "entries": row}
    changed = replace(table, nodes=nodes)
    return prune_table(changed) if key in old else changed


def _make_table(node: Core) -> Encoded:
    """Return the table of a node without leaves."""
    header = dump_table(encode(node), [])
    return Encoded(header["nodes"], [], header["values"])


class EntryValues(Keeper):
    """Writes the values of a node that is an entry of a live collection into the store."""

    __slots__ = ("is_part", "path", "store")

    def __init__(self, store: LiveStore, path: KeyPath, is_part: bool) -> None:
        self.store, self.path, self.is_part = store, path, is_part

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
        self.store.edit(lambda table: set_entry(table, self.path, _make_table(node)))

    def of_part(self) -> Keeper:
        """Return a keeper that refuses writes."""
        return EntryValues(self.store, self.path, True)

    def __reduce__(self) -> tuple[type[Keeper], tuple[()]]:
        return Keeper, ()  # in another process, the values are in memory


class LiveCollection(TensorDictBase):
    """A collection that writes each change of its structure into a store.

    A format derives from it, and :meth:`_of_opened` creates an instance. Results of operations are TensorDicts.
    """

    _store: Any
    _path: KeyPath
    _entries: dict[str, Child]
    _size: torch.Size
    _label: torch.device | None
    _labels: Names | None

    @classmethod
    def _of_opened(cls, store: LiveStore, path: KeyPath, opened: Core) -> Any:
        """Replace the TensorDicts of an opened collection by collections that write into the store; lock other nodes."""

        def open_below(made: LiveCollection, node: Core) -> Iterator[tuple[LiveCollection, Core]]:
            for key, child in node._children().items():
                place = (*made._path, key)
                if type(child) is TensorDict:
                    nested = cls._of_node(store, place, child)
                    yield nested, child
                    child = nested
                elif not isinstance(child, Tensor):
                    child.lock_()  # changes of its structure would not reach the store
                    for inner in walk(child):
                        inner._keeper = EntryValues(store, place, not child._is_value)
                made._entries[key] = child

        root = cls._of_node(store, path, opened)
        visit(open_below, root, opened)
        return root

    @classmethod
    def _of_node(cls, store: LiveStore, path: KeyPath, node: Core) -> Any:
        self = cls.__new__(cls)
        self._store, self._path, self._entries = store, path, {}
        self._size, self._label, self._labels = node.batch_size, node.device, node._names
        return self

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
        """Write batch size and dim names, if the store is opened for writing."""

        def change(table: Encoded) -> Encoded:
            position = _find_reference(table, self._path)
            meta = {**table.nodes[position]["meta"], "batch_size": list(self._size)}
            meta.pop("names", None)
            if self._labels is not None:
                meta["names"] = list(self._labels)
            nodes = [*table.nodes]
            nodes[position] = {**nodes[position], "meta": meta}
            return replace(table, nodes=nodes)

        if self._store.is_writable:
            self._store.edit(change)

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

    def _write_entry(self, key: str, value: Any) -> None:
        """Write a checked leaf or node into the store, in the place of the entry that is there."""
        path, store = (*self._path, key), self._store
        with store.hold():
            if key in self._entries and not store.can_link(path, value):
                value = value.clone()  # it can have leaves of the entry that it replaces
            data = self._with_children({key: value})
            if key in self._entries:
                store.check_entry(data)
                # The arrays of the old entry, whose names the new ones get, are removed first.
                blank = _make_table(make_dense({}, self._size))
                store.edit(lambda table: set_entry(table, path, blank), removed=path)
            store.add_entry(path, data)
            opened = store.open_entry(path)
        for above in self._path:
            opened = opened._children()[above]
        self._entries[key] = self._of_opened(store, self._path, opened)._entries[key]

    def _del_child(self, key: str) -> None:
        if key not in self._entries:
            raise KeyError(key)
        path, store = (*self._path, key), self._store
        store.check_writable(path, "remove")
        store.edit(lambda table: remove_entry(table, path), removed=path)
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
