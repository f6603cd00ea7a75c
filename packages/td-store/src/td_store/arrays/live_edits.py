"""The changes of a live collection in one block: they reach its store together at the end, or none of them does."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from td_core import TensorDictBase
from td_core.errors import BatchSizeError, LockedError, StructureError
from td_core.spi import Encoded, Node, show_path, visit, walk
from td_core.typing import Names

from .._stored_tensor import StoredTensor
from .table_edits import KeyPath, TableEdit

Child = Tensor | Node

#: The fields of a row that methods for metadata change.
_FIELDS = ("batch_size", "names", "stack_dim", "stack_dim_name", "stands_for")


class LiveNode(TensorDictBase):
    """A node of a collection in a store: what :class:`Edits` changes."""

    _store: Any
    _path: KeyPath
    _entries: dict[str, Child]
    _size: torch.Size
    _label: torch.device | None
    _labels: Names | None
    #: Whether the entry of this node was removed from the store, or replaced.
    _is_removed = False
    _of_opened: Callable[..., LiveNode]


@dataclass(slots=True)
class Change:
    """A change of the structure that a store makes.

    Attributes:
        edit: removes entries from the table of the store, and changes metadata. It raises an error for a table that it does
            not fit.
        added: collections with one entry each, by the key path that the entry gets.
        removed: the key paths of the entries that are removed or replaced.
        release: to be called before arrays are removed; returns the sources of removed leaves that the program still uses,
            whose elements are then kept in memory.
    """

    edit: Callable[[TableEdit], object]
    added: dict[KeyPath, Node] = field(default_factory=dict)
    removed: list[KeyPath] = field(default_factory=list)
    release: Callable[[], list[Any]] = list


class LiveStore(ABC):
    """The open store of a collection, whose header is written again when the structure of the collection changes.

    Attributes:
        is_writable: whether changes reach the store.
        edits: the changes of the block that a thread is in, or None.
    """

    is_writable = True
    edits: Edits | None = None

    @property
    @abstractmethod
    def where(self) -> str:
        """Location, for messages."""

    @abstractmethod
    def check_entry(self, data: Node) -> None:
        """Raise CodecError if the only entry of a collection cannot be stored."""

    @abstractmethod
    def read_table(self) -> Encoded:
        """Return the table of the header as it is now."""

    @abstractmethod
    def commit(self, change: Change) -> None:
        """Change the table of the header, add and remove arrays; an error leaves the store as it is."""

    @abstractmethod
    def open_entries(self, paths: Sequence[KeyPath]) -> Any:
        """Open a collection with the stored entries of some key paths alone."""

    def owns(self, leaf: StoredTensor) -> bool:
        """Return False if the elements of a leaf are surely in another store."""
        return True

    def can_link(self, leaf: StoredTensor) -> bool:
        """Return True if ``commit`` gives the array of a leaf another name, instead of writing its elements again."""
        return False

    def is_tied(self, leaf: StoredTensor) -> bool:
        """Return True if other entries can have the array of a leaf, too."""
        return leaf.source in self.__dict__.get("_tied", ())

    def tie(self, *leaves: StoredTensor) -> None:
        """Note that other entries have the arrays of some leaves, too."""
        self.__dict__.setdefault("_tied", weakref.WeakSet()).update(leaf.source for leaf in leaves)

    def check_writable(self, path: KeyPath, what: str) -> None:
        """Raise LockedError if the store is opened for reading."""
        if not self.is_writable:
            raise LockedError(
                f"cannot {what} {show_path(path)} in {self.where}: it is opened with mode='r'; open it with mode='r+'"
            )

    @contextlib.contextmanager
    def edit_together(self) -> Iterator[Edits]:
        """Make the changes of a block reach the store together, or none of them. Other threads wait with theirs."""
        with self._get_lock():
            if self.edits is not None:  # a block around this one writes them
                yield self.edits
                return
            self.edits = Edits(self)
            try:
                yield self.edits
                self.edits.commit()
            except BaseException:
                self.edits.undo()
                raise
            finally:
                self.edits = None

    def _get_lock(self) -> threading.RLock:
        """Return the lock of this process: a child does not have the thread that held the one of its parent."""
        found = self.__dict__.get("_lock")
        if found is None or found[0] != os.getpid():
            found = self.__dict__["_lock"] = os.getpid(), threading.RLock()
            self.edits = None
        lock: threading.RLock = found[1]
        return lock


class Edits:
    """The changes of a block. Until its end they are in memory alone."""

    def __init__(self, store: LiveStore) -> None:
        self.store = store
        #: Per changed node: its entries, and its batch size, device and dim names, at the beginning.
        self._before: dict[int, tuple[LiveNode, dict[str, Child], tuple[Any, ...]]] = {}
        self._log: list[tuple[LiveNode, str, bool]] = []
        #: The nodes with other metadata, and whether their devices changed, too.
        self._resized: dict[int, bool] = {}
        #: The nodes that are no longer in the collection.
        self._detached: dict[int, LiveNode] = {}
        #: After the release: ids of the sources of removed leaves, and the nodes that the program still uses.
        self._gone: set[int] = set()
        self._left: list[weakref.ref[LiveNode]] = []

    def put(self, node: LiveNode, key: str, value: Child) -> None:
        """Set an entry of a node."""
        before = self._note(node)
        self._detach(node._entries.get(key))
        if before.get(key) is value:
            for inner in self._list_live(value):
                self._detached.pop(id(inner), None)
        node._entries[key] = value
        self._log.append((node, key, True))

    def remove(self, node: LiveNode, key: str) -> None:
        """Remove an entry of a node."""
        self._note(node)
        self._detach(node._entries.pop(key))
        self._log.append((node, key, False))

    def resize(self, node: LiveNode, *, device: bool = False) -> None:
        """Note that batch size and dim names, or the device, of a node change."""
        self._note(node)
        self._resized[id(node)] = device or self._resized.get(id(node), False)

    def undo(self) -> None:
        """Restore the entries and metadata that the nodes had at the beginning."""
        for node, entries, metadata in self._before.values():
            node._entries.clear()
            node._entries.update(entries)
            node._size, node._label, node._labels = metadata

    def commit(self) -> None:
        """Write the changes into the store; an error changes nothing."""
        places = {
            (*node._path, key): (node, key)
            for node, key, is_put in self._list_log()
            if is_put and key in node._entries
        }
        values = {path: node._entries[key] for path, (node, key) in places.items()}
        kept = {path for path, (node, key) in places.items() if self._note(node).get(key) is values[path]}
        copies = self._find_copies(places, values.keys() - kept)
        added = {path: value for path, value in values.items() if path not in kept and path not in copies}
        contents = [(copies[path], self._read_own(values[path])) for path in copies]
        for path, held in copies.items():
            node, key = places[path]
            node._entries[key] = held
        if added or self._resized or any(not is_put for _, _, is_put in self._log):
            self.store.commit(self._make_change(places, added))
            self._open(places, added)
        for target, content in contents:
            target.copy_(content)

    def _make_change(
        self, places: dict[KeyPath, tuple[LiveNode, str]], added: Mapping[KeyPath, Child]
    ) -> Change:
        """Build the change of the file: entries that are added, and those that are removed or replaced."""
        data = {path: self._wrap(*places[path]) for path in added}
        replaced = [path for path, (node, key) in places.items() if path in added and key in self._note(node)]
        removed = [(*node._path, key) for node, key, is_put in self._list_log() if not is_put]
        return Change(self._make_edit(added), data, [*removed, *replaced], self._release)

    def _note(self, node: LiveNode) -> dict[str, Child]:
        """Record a node before its first change, and return its entries at the beginning."""
        if id(node) not in self._before:
            self._before[id(node)] = node, dict(node._entries), (node._size, node._label, node._labels)
        return self._before[id(node)][1]

    def _list_log(self) -> list[tuple[LiveNode, str, bool]]:
        """Return the changes of nodes that are in the collection."""
        return [item for item in self._log if id(item[0]) not in self._detached]

    def _list_live(self, value: object) -> list[Any]:
        nodes = walk(value) if isinstance(value, Node) else ()
        return [node for node in nodes if getattr(node, "_store", None) is self.store]

    def _detach(self, old: object) -> None:
        self._detached.update((id(node), node) for node in self._list_live(old))

    def _find_copies(
        self, places: dict[KeyPath, tuple[LiveNode, str]], paths: Iterable[KeyPath]
    ) -> dict[KeyPath, Tensor]:
        """Return the leaves whose arrays have room for the new values, and are those of no other entry."""
        found: dict[KeyPath, Tensor] = {}
        used = {id(source) for path in paths for source in _list_sources(_get(places[path]))}
        for path in paths:
            node, key = places[path]
            held, value = self._note(node).get(key), node._entries[key]
            if isinstance(held, StoredTensor) and fits(held, value) and not self.store.is_tied(held):
                if id(held.source) not in used:
                    found[path] = held
        return found

    def _read_own(self, value: Any) -> Any:
        """Return a value with the leaves of this store that cannot be linked in memory: their arrays may change first."""

        def read(leaf: Tensor) -> Tensor:
            if isinstance(leaf, StoredTensor) and self.store.owns(leaf) and not self.store.can_link(leaf):
                return leaf.clone()
            return leaf

        if isinstance(value, Tensor):
            return read(value)
        return value._map(cache(read)) if _list_sources(value) else value

    def _wrap(self, node: LiveNode, key: str) -> Node:
        data: Node = node._with_children({key: self._read_own(node._entries[key])})
        return data

    def _make_edit(self, added: Mapping[KeyPath, Child]) -> Callable[[TableEdit], None]:
        """Return the function that changes the table: entries are removed, or get places for what is added."""
        steps = [((*node._path, key), is_put) for node, key, is_put in self._list_log()]
        sizes = {(*node._path,): list(metadata[0]) for node, _, metadata in self._before.values()}
        changes = [*self._list_metadata(added)]

        def edit(table: TableEdit) -> None:
            for path in added:
                found, known = table.get_row(path[:-1])["meta"].get("batch_size"), sizes[path[:-1]]
                if found != known:
                    raise StructureError(
                        f"cannot set {show_path(path)}: the batch size is {found} now, and was {known} when the collection "
                        "was opened: open it again"
                    )
            removed: dict[KeyPath, object] = {}
            for path, is_put in steps:
                if not is_put:
                    removed[path] = table.remove(path)
                elif not table.has(path):
                    table.put(path, removed.get(path))
            for change in changes:
                change(table)
            for path, value in added.items():
                check_above(table, path, value)

        return edit

    def _list_metadata(self, added: Iterable[KeyPath]) -> Iterator[Callable[[TableEdit], None]]:
        """Yield the changes of metadata: those of a node, and of the entries in it that are no live collections."""
        for node, _, _ in self._before.values():
            if id(node) not in self._resized or id(node) in self._detached:
                continue
            has_moved = self._resized[id(node)]
            meta: dict[str, object] = {"batch_size": list(node._size)}
            meta["names"] = None if node._labels is None else list(node._labels)
            if has_moved:
                meta["device"] = None if node._label is None else str(node._label)
            yield partial(TableEdit.set_meta, path=node._path, changes=meta)
            fields = (*_FIELDS, "device") if has_moved else _FIELDS
            for key, child in node._entries.items():
                path = (*node._path, key)
                if isinstance(child, Node) and not self._list_live(child) and path not in added:
                    yield partial(TableEdit.set_metadata_of, path=path, node=child, fields=fields)

    def _release(self) -> list[Any]:
        """Forget the old entries; return the sources of removed leaves that the program still uses."""
        old = [
            child
            for node, entries, _ in self._before.values()
            for key, child in entries.items()
            if node._entries.get(key) is not child
        ]
        sources = [source for child in old for source in _list_sources(child)]
        self._gone = {id(source) for source in sources}
        for inner in (inner for child in old if isinstance(child, Node) for inner in walk(child)):
            inner._keeper = None  # values that are written later do not belong to this store
        self._left = [weakref.ref(node) for node in self._detached.values()]
        left = [weakref.ref(source) for source in sources]
        self._before.clear()
        self._detached.clear()
        self._log.clear()
        del old, sources
        return [source for source in (ref() for ref in left) if source is not None]

    def _open(self, places: dict[KeyPath, tuple[LiveNode, str]], added: dict[KeyPath, Child]) -> None:
        """Replace the values that were written by the entries of the store."""
        opened = self.store.open_entries(list(added)) if added else None
        levels: dict[KeyPath, dict[str, Child]] = {}
        for path in added:
            node, key = places[path]
            if path[:-1] not in levels:
                above: Any = opened
                for part in path[:-1]:
                    above = above._children()[part]
                levels[path[:-1]] = node._of_opened(self.store, node._path, above)._entries
            node._entries[key] = levels[path[:-1]][key]
            self._adopt(node._entries, key, added[path])
        for ref in self._left:
            left = ref()
            if left is not None:
                left._is_removed = True

    def _adopt(self, entries: dict[str, Child], key: str, value: object) -> None:
        """Let the nodes and leaves of a value that were moved in the store stand for what they are there."""
        moved = {id(node) for node in (ref() for ref in self._left) if node is not None}

        def adopt(
            entries: dict[str, Child], key: str, old: Any
        ) -> Iterator[tuple[dict[str, Child], str, Any]]:
            new: Any = entries[key]
            if isinstance(old, StoredTensor) and isinstance(new, StoredTensor):
                if id(old.source) not in self._gone:
                    if self.store.can_link(old):
                        self.store.tie(old, new)
                elif type(old.source) is type(new.source) and old.shape == new.shape == old.source.shape:
                    vars(old.source).clear()
                    vars(old.source).update(vars(new.source))
                    entries[key] = old
            elif isinstance(old, Node) and getattr(new, "_store", None) is self.store:
                below = dict(old._children())
                if id(old) in moved:
                    node: Any = old
                    node._path = new._path
                    node._entries.clear()
                    node._entries.update(new._entries)
                    self._left = [ref for ref in self._left if ref() is not node]
                    entries[key] = new = node
                yield from (
                    (new._entries, part, child) for part, child in below.items() if part in new._entries
                )

        visit(adopt, entries, key, value)


def fits(held: Tensor, value: object) -> bool:
    """Return True if a value can be written into the array of a leaf."""
    return (
        isinstance(value, Tensor)
        and not value.is_nested
        and value.layout is torch.strided
        and not value.is_meta
        and value.dtype == held.dtype
        and value.shape == held.shape
        and 0 not in held.stride()
    )


def check_above(table: TableEdit, path: KeyPath, value: Child) -> None:
    """Raise StructureError for a value that does not start with the batch size of each level above: no file can hold it."""
    for length in range(len(path)):
        size = torch.Size(table.get_row(path[:length])["meta"].get("batch_size", ()))
        try:
            if isinstance(value, Node):
                value._check_batch_size(size, path)
            elif [value.size(dim) for dim in range(min(len(size), value.ndim))] != [*size]:
                raise BatchSizeError(f"its shape is {list(value.shape)}")
        except BatchSizeError as error:
            raise StructureError(
                f"cannot set {show_path(path)} in a file: {show_path(path[:length])} has the batch size {list(size)}; {error}"
            ) from error


def _get(place: tuple[LiveNode, str]) -> Child:
    return place[0]._entries[place[1]]


def _list_sources(value: Any) -> list[object]:
    """Return the sources of the stored leaves of a value."""
    leaves = [value] if isinstance(value, Tensor) else value._leaves()
    return [leaf.source for leaf in leaves if isinstance(leaf, StoredTensor)]
