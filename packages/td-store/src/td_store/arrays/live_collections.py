"""A collection whose entries are in an open store, to which changes of the structure are written, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from td_core import TensorCollection, TensorDict
from td_core.errors import KeyPathError, StructureError, UnsupportedOperationError
from td_core.spi import EntrySchema, Keeper, Node, as_batch_size, lock, make_dense, show_path, visit, walk
from td_core.spi import split_value as split
from td_core.typing import NO_DEFAULT, BatchSize, Names, NestedKey

from .._stored_tensor import StoredTensor
from .live_edits import Change, Child, LiveNode, LiveStore, check_above, fits
from .table_edits import KeyPath, TableEdit

if TYPE_CHECKING:
    from typing_extensions import Self


class _LiveSchema(EntrySchema):
    """Every entry is accepted, but several of them are stored together, or none of them."""

    __slots__ = ()

    is_in_memory = False


class EntryValues(Keeper):
    """Writes the values of a node that is an entry of a live collection into the store."""

    __slots__ = ("is_part", "path", "store")

    def __init__(self, store: LiveStore, path: KeyPath, is_part: bool) -> None:
        self.store, self.path, self.is_part = store, path, is_part

    def check(self, node: Node, values: Sequence[object]) -> None:
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
    def lock(self, node: Node) -> Iterator[None]:
        """Check that values can be written."""
        self.check(node, ())
        yield

    def write(self, node: Node) -> None:
        """Write the values of a node into the store."""

        def edit(table: TableEdit) -> None:
            table.find(self.path)
            table.add_node(self.path, node)

        self.store.commit(Change(edit))

    def of_part(self) -> Keeper:
        """Return a keeper that refuses writes."""
        return EntryValues(self.store, self.path, True)

    def __reduce__(self) -> tuple[type[Keeper], tuple[()]]:
        return Keeper, ()  # in another process, the values are in memory


class LiveCollection(LiveNode):
    """A collection that writes each change of its structure into a store.

    A format derives from it, and :meth:`_of_opened` creates an instance. Results of operations are TensorDicts.
    """

    _schema = _LiveSchema()

    @classmethod
    def _of_opened(cls, store: LiveStore, path: KeyPath, opened: Node) -> Any:
        """Replace the TensorDicts of an opened collection by collections that write into the store; lock other nodes."""
        seen: set[int] = set()

        def open_below(made: LiveCollection, node: Node) -> Iterator[tuple[LiveCollection, Node]]:
            for key, child in node._children().items():
                place = (*made._path, key)
                if type(child) is TensorDict:
                    nested = cls._of_node(store, place, child)
                    yield nested, child
                    child = nested
                elif not isinstance(child, Tensor):
                    lock(child, as_entry=True)  # changes of its structure would not reach the store
                    for inner in walk(child):
                        inner._keeper = EntryValues(store, place, not child._is_value)
                elif id(child) in seen and isinstance(child, StoredTensor):
                    store.tie(child)
                else:
                    seen.add(id(child))
                made._entries[key] = child

        root = cls._of_node(store, path, opened)
        visit(open_below, root, opened)
        return root

    @classmethod
    def _of_node(cls, store: LiveStore, path: KeyPath, node: Node) -> Self:
        self = cls.__new__(cls)
        self._store, self._path, self._entries = store, path, {}
        self._size, self._label, self._labels = node.batch_size, node.device, node._names
        return self

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims that all entries share; settable if the shape of every entry starts with the new value."""
        return self._size

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        with self._edit_together():
            self._change_batch_size(as_batch_size(batch_size))

    @property
    def device(self) -> torch.device | None:
        """Device of every entry, or None if entries may be on different devices."""
        return self._label

    @property
    def _names(self) -> Names | None:
        return self._labels

    @_names.setter
    def _names(self, names: Names | None) -> None:
        with self._resize():
            self._labels = names

    def _set_names(self, names: Names | None) -> None:
        with self._edit_together():
            super()._set_names(names)

    def pop(self, key: NestedKey, default: object = NO_DEFAULT) -> Any:
        """Remove an entry and return it in memory, or return the default if it is missing.

        Raises:
            KeyPathError: the key is missing, and ``default`` is not given.
        """
        with self._edit_together():
            popped = super().pop(key, default)
            if popped is not default and isinstance(popped, (TensorCollection, Tensor)):
                popped = popped.clone()  # before its arrays are removed
            return popped

    def _edit_together(self) -> contextlib.AbstractContextManager[object]:
        edits: contextlib.AbstractContextManager[object] = self._store.edit_together()
        return edits

    @contextlib.contextmanager
    def _resize(self, *, device: bool = False) -> Iterator[None]:
        """Write the metadata that a block changes, if the store is opened for writing."""
        if self._is_removed or not self._store.is_writable:
            yield
            return
        with self._store.edit_together() as edits:
            edits.resize(self, device=device)
            yield

    def _children(self) -> dict[str, Child]:
        return self._entries

    def _with_children(self, children: Mapping[str, Child], **metadata: Any) -> Any:
        return make_dense({}, self._size, self._label, self._labels)._with_children(children, **metadata)

    def _set_child(self, key: str, value: Child) -> None:
        held = self._entries.get(key)
        if held is value:
            return
        store = self._store
        if (
            isinstance(held, StoredTensor)
            and isinstance(value, Tensor)
            and fits(held, value)
            and store.edits is None
            and not store.is_tied(held)
        ):
            self._check_change(key, "set")
            held.copy_(value)
            return
        self._check_form(key, value)
        with store.edit_together() as edits:
            edits.put(self, key, value)

    def _set_children(self, values: Mapping[str, Child]) -> None:
        with self._edit_together():
            super()._set_children(values)

    def _check_child(self, key: str, value: Child) -> None:
        self._check_form(key, value)
        self._store.check_entry(self._with_children({key: value}))
        check_above(TableEdit(self._store.read_table()), (*self._path, key), value)

    def _check_form(self, key: str, value: Child) -> None:
        """Raise an error if nothing can be set, or nothing with a nested tensor."""
        self._check_change(key, "set")
        leaves = [value] if isinstance(value, Tensor) else value._leaves()
        if any(leaf.is_nested for leaf in leaves):
            raise UnsupportedOperationError(
                f"cannot set {show_path((*self._path, key))} in {self._store.where}: a nested tensor cannot be written in "
                "place; save() the collection"
            )

    def _del_child(self, key: str) -> None:
        if key not in self._entries:
            raise KeyError(key)
        self._check_change(key, "remove")
        with self._store.edit_together() as edits:
            edits.remove(self, key)

    def _check_change(self, key: str, what: str) -> None:
        """Raise an error if the store is opened for reading, or this node is no longer in it."""
        self._store.check_writable((*self._path, key), what)
        if self._is_removed:
            raise KeyPathError(
                f"{show_path(self._path)} was removed since the collection was opened: open it again"
            )

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        with self._resize():
            if self._labels is not None:
                labels = (*self._labels, *[None] * len(batch_size))[: len(batch_size)]
                self._labels = None if labels.count(None) == len(labels) else labels
            self._size = batch_size

    def _set_device(self, device: torch.device | None) -> None:
        with self._resize(device=True):
            self._label = device
