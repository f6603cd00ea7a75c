"""``ZarrTensorDict``: a Zarr group as a collection, whose entries are added to and removed from the group."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

import zarr

from td_core import NestedKey, TensorCollection, TensorDict, kinds
from td_core.errors import FormatError
from td_core.spi import Encoded, Node, select_keys, set_module
from td_store import StoredTensor
from td_store.arrays import (
    Change,
    LiveCollection,
    LiveStore,
    TableEdit,
    add_texts,
    build_leaves,
    compute_check,
    find_old_names,
    list_array_names,
    list_names,
    list_texts,
    load_array_table,
    make_table_header,
    take_texts,
)

from ._array_documents import (
    ArrayInfo,
    ChunkOptions,
    Document,
    join_names,
    make_text_document,
    read_array_document,
)
from ._array_engines import write_changed_rows, write_texts
from ._dim_labels import name_dims
from ._group_header import GroupContent, list_documents, read_group
from ._local_objects import find_objects
from ._read_collections import Opener, open_with_content
from ._remote_objects import RemoteObjects
from ._write_groups import PlannedGroup, consolidate, dump_json, plan_group, save, write_entries
from ._zarr_objects import TEMPORARY, Objects

KeyPath = tuple[str, ...]


class _LiveGroup(LiveStore):
    """A group that is opened.

    Attributes:
        objects: the objects of the group.
        options: options of the chunks of new arrays.
        mode: ``"r"`` or ``"r+"``.
    """

    def __init__(self, objects: Objects, options: Mapping[str, Any], mode: str) -> None:
        self.objects, self.options, self.mode = objects, options, mode
        # The structure of a group without a header of td can only be read.
        self.is_writable = mode == "r+" and objects.version is not None

    @property
    def where(self) -> str:
        """Location of the group."""
        return self.objects.where

    def check_entry(self, data: Node) -> None:
        """Raise CodecError if the only entry of a collection cannot be stored."""
        plan_group(data, ChunkOptions(**self.options))

    def read_table(self) -> Encoded:
        """Return the table of the header as it is now."""
        return read_group(self.objects).table

    def commit(self, change: Change) -> None:
        """Write the arrays of new entries, then the root, and remove the groups and arrays of old entries."""
        with self.objects.hold():
            self._commit(change)

    def _commit(self, change: Change) -> None:
        group = read_group(self.objects)
        edit = TableEdit(group.table)
        change.edit(edit)
        for path in change.added:
            edit.put(path, None)
        documents: Mapping[str, Document] = list_documents(self.objects, self.objects.root)
        spare = _find_spare(documents)
        below = join_names((spare,))
        self.objects.remove([below])  # what a process that was killed has left
        gone: list[str] = []
        if change.removed:
            arrays = {*group.arrays, *group.texts}
            gone = _find_unused(documents, {*list_array_names(edit.finish())}, arrays, change.removed)
        planned = self._plan(change.added, {*group.arrays, *group.texts} - {*gone})
        late = [entry for entry in planned if not entry.group.documents.keys().isdisjoint(gone)]
        first = [entry for entry in planned if entry not in late]
        # An array that takes the name of an old one is written under another name, and again when that is removed.
        first += self._plan({entry.path: change.added[entry.path] for entry in late}, set(), spare)
        group, documents = self._write(edit, group, documents, first, gone)
        for source in change.release():
            source.keep()
        self.objects.remove(gone)
        if late:
            with contextlib.suppress(OSError, FormatError):  # the arrays have the other names then
                self._write(edit, group, documents, late, _list_below(below, documents))
                self.objects.remove([below])

    def _plan(
        self, added: Mapping[KeyPath, Node], reserved: set[str], spare: str | None = None
    ) -> list[_PlannedEntry]:
        """Plan the arrays of new entries, with ``spare`` in the group of that key."""
        planned = []
        for path, data in added.items():
            source = path if spare is None else (spare, *path)
            for above in reversed(source[:-1]):
                data = TensorDict({above: data})
            item = plan_group(data, ChunkOptions(**self.options), reserved=reserved)
            reserved |= item.arrays.keys() | item.texts.keys()
            planned.append(_PlannedEntry(path, source, item))
        return planned

    def _write(
        self,
        edit: TableEdit,
        group: GroupContent,
        documents: Mapping[str, Document],
        planned: Sequence[_PlannedEntry],
        gone: Iterable[str],
    ) -> tuple[GroupContent, Mapping[str, Document]]:
        """Write the arrays of new entries, and the root without those that are ``gone``; return what the group has then."""
        old, arrays, texts = {*gone}, dict(group.arrays), dict(group.texts)
        documents = {name: document for name, document in documents.items() if name not in old}
        known = set(documents)
        new = {name for _, _, item in planned for name in item.documents if name not in known}
        try:
            for path, source, item in planned:
                self.objects.remove([name for name in (*item.arrays, *item.texts) if name not in known])
                write_entries(self.objects, item, set(documents))
                documents = {**item.root["consolidated_metadata"]["metadata"], **documents}
                edit.add(path, load_array_table(item.plan.header, self.where), source)
                arrays.update(item.arrays)
                texts.update(item.texts)
            table = edit.finish()
            documents = self._write_texts(group, table, texts, documents)
        except BaseException:
            self.objects.remove(sorted(new, key=len, reverse=True))
            raise
        texts = {name: texts[name] for name in list_texts(table)}
        stale = group.texts.keys() - texts.keys() - old
        documents = {name: document for name, document in documents.items() if name not in stale}
        group = replace(group, table=table, arrays=arrays, texts=texts)
        self._write_root(group, documents)
        self.objects.remove(sorted(stale))
        return group, documents

    def _write_texts(
        self,
        before: GroupContent,
        table: Encoded,
        texts: dict[str, ArrayInfo],
        documents: Mapping[str, Document],
    ) -> Mapping[str, Document]:
        """Write the text columns that were written in place, and return the metadata with that of new ones."""
        known, paths = find_old_names(before.table, table), table.node_paths(members=False)
        taken = {*documents}

        def choose(position: int) -> str:
            if position not in known:
                taken.add(name := _find_free(join_names(paths[position]), taken))
                return name
            return known[position]

        columns = take_texts(table.nodes, table.values, choose, before.table.values)
        for name, column in columns.items():
            if name in texts:
                write_changed_rows(self.objects, texts[name], column)
                continue
            document = make_text_document(
                column, name_dims({name: column})[name], ChunkOptions(**self.options)
            )
            texts[name] = read_array_document(name, document, self.where)
            self.objects.put(f"{name}/zarr.json", [dump_json(document)])
            write_texts(self.objects, [(texts[name], column)])
            documents = {**documents, name: document}
        return documents

    def _write_root(self, group: GroupContent, documents: Mapping[str, Document]) -> None:
        """Write the root of a group, with the metadata of its groups and arrays."""
        header = add_texts(make_table_header(group.table))
        names = {name for place in group.table.leaves for name in list_names(place)}
        header["check"] = compute_check((name, group.arrays[name].shape) for name in names)
        if not group.is_strict:
            header["sparse"] = True
        root = self.objects.root
        attributes = {**root["attributes"], "td": json.dumps(header, separators=(",", ":"))}
        metadata = consolidate(documents)
        self.objects.replace(
            "zarr.json", dump_json({**root, "attributes": attributes, "consolidated_metadata": metadata})
        )

    def owns(self, leaf: StoredTensor) -> bool:
        """Return False for a leaf in another group."""
        source = leaf.source
        objects = getattr(getattr(source, "source", source), "objects", self.objects)
        return bool(objects.where == self.where)

    def open_entries(self, paths: Sequence[KeyPath]) -> Any:
        """Open a collection with the stored entries of some key paths alone."""
        group = read_group(self.objects)
        table = group.read_texts(select_keys(group.table, list(paths), group.where))
        opener = Opener(group, table, self.mode, follows=True)
        return build_leaves(table, group.where, opener.open)


class _PlannedEntry(NamedTuple):
    """A new entry: its key path, that in the table of its planned group, and the planned group."""

    path: KeyPath
    source: KeyPath
    group: PlannedGroup


def _find_spare(documents: Mapping[str, Document]) -> str:
    """Return the key of a group for arrays that later get another name; one is taken if a process was killed before that."""
    keys = (f"{TEMPORARY}{number}" for number in itertools.count())
    return next(key for key in keys if join_names((key,)) not in documents)


def _find_free(name: str, taken: Container[str]) -> str:
    """Return a name of an array, with a number if it is taken."""
    numbered = (f"{name}#{number}" for number in itertools.count(1))
    return next(found for found in itertools.chain([name], numbered) if found not in taken)


def _list_below(group: str, documents: Iterable[str]) -> list[str]:
    return [name for name in documents if name == group or name.startswith(f"{group}/")]


def _find_unused(
    documents: Mapping[str, Document], used: set[str], arrays: set[str], removed: Iterable[KeyPath]
) -> list[str]:
    """Return the names of the groups and arrays that no entry needs after some were removed, groups after their content."""
    needed = {name[:end] for name in used for end, char in enumerate(name) if char == "/"} | used
    prefixes = {join_names(path) for path in removed}
    starts = tuple(f"{prefix}/" for prefix in prefixes)
    below = {name for name in documents if name in prefixes or name.startswith(starts)}
    return sorted((below | arrays) - needed, key=len, reverse=True)


@set_module("td_zarr")
class ZarrTensorDict(LiveCollection):
    """An opened Zarr group as a collection.

    Leaves are stored tensors, which read the group when an operation needs their elements. With ``mode="r+"``, writes in place
    reach the group. So do new entries, removed and renamed ones, batch sizes and dim names, in this collection and in the
    nested ones. Results of operations, such as an index, ``clone()`` or ``to_tensordict()``, are TensorDicts. A change of the
    structure writes the new arrays, and then the metadata of the root, so a process that is killed leaves the old structure
    or the new one, whose arrays can have other names; what else it leaves is removed by the next change or save. Each write
    and change holds the lock of the group, which excludes other threads and, in a local directory, other processes. What
    others have replaced since the group was opened is an error.

    ``to_zarr`` and ``from_zarr`` return such collections.

    >>> from td_core import load
    >>> group = TensorDict({"a": torch.arange(3)}, [3]).to_zarr("data.zarr")
    >>> group["n", "b"] = torch.zeros(3, 2)
    >>> group.rename_key_("a", "c").sorted_keys
    ['c', 'n']
    >>> load("data.zarr")["n", "b"].shape
    torch.Size([3, 2])
    """

    _store: _LiveGroup
    #: Why the group of a pickle could not be opened.
    _error: OSError | None = None

    def _children(self) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        return super()._children()

    def reopen_store(self, storage_options: Mapping[str, object]) -> None:
        """Give the store of the group its options again, which its pickle does not contain; see ``td_core.reopen``."""
        store = self._store
        store.objects.reopen(storage_options)
        if self._error is not None:
            self.__dict__.update(_open_again(store.objects, self._path, store.options, store.mode).__dict__)
            self._error = None

    @property
    def filename(self) -> str:
        """Location of the group."""
        return self._store.where

    @property
    def file(self) -> zarr.Group:
        """The root of the group, opened by zarr. The header does not describe what is added to it directly."""
        place = self._store.objects.store
        if self.mode == "r" and not place.store.read_only:
            place = zarr.storage.StorePath(place.store.with_read_only(read_only=True), place.path)
        return zarr.open_group(place, mode=self.mode)

    @property
    def mode(self) -> Literal["r", "r+"]:
        """``"r"``, or ``"r+"`` if writes reach the group."""
        return "r" if self._store.mode == "r" else "r+"

    @property
    def kwargs(self) -> dict[str, object]:
        """Options of the chunks of new arrays."""
        return dict(self._store.options)

    def close(self) -> None:
        """Close the store, if td has opened it. It is opened again when elements are used."""
        self._store.objects.close()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Reduce to the place of the group and the keys of a nested collection."""
        store = self._store
        return rebuild_live, (store.objects, self._path, dict(store.options), store.mode)


def open_live(objects: Objects, opened: Any, options: Mapping[str, Any], mode: str) -> Any:
    """Return a collection whose structure can be changed if it is a TensorDict that is opened for writing."""
    if type(opened) is not TensorDict:
        return opened.lock_()
    store = _LiveGroup(objects, options, mode)
    live = ZarrTensorDict._of_opened(store, (), opened)
    return live if store.is_writable else live.lock_()


@set_module("td_zarr.zarr_pickles")
def rebuild_live(objects: Objects, path: KeyPath, options: Mapping[str, Any], mode: str = "r+") -> Any:
    """Open the collection of a pickle; FormatError if another save has replaced the group.

    If its store lacks options, a collection that raises the error of the store until it is reopened.
    """
    try:
        return _open_again(objects, path, options, mode)
    except OSError as error:
        if not isinstance(objects, RemoteObjects):
            raise
        closed = ZarrTensorDict._of_node(_LiveGroup(objects, options, mode), path, TensorDict())
        closed._error = error
        return closed


def _open_again(objects: Objects, path: KeyPath, options: Mapping[str, Any], mode: str) -> Any:
    objects.check()
    group = read_group(objects)
    opener = Opener(group, group.table, mode, follows=True)
    opened = build_leaves(group.read_texts(group.table), group.where, opener.open)
    live = open_live(objects, opened, options, mode)
    return live.get(path) if path else live


def to_zarr(
    data: TensorCollection,
    filename: object,
    *,
    allow_pickle: bool | None = None,
    storage_options: Mapping[str, object] | None = None,
    **options: Any,
) -> Any:
    """Save a collection as a Zarr group, and open that for writing.

    Args:
        data: the collection.
        filename: a directory, a URL, or a store or group of zarr.
        allow_pickle: accepted for programs that were written for tensordict. Values are never pickled, so True is an error.
        storage_options: options of the file system of a URL.
        **options: options of :func:`td_zarr.save`.

    Returns:
        The opened collection, a :class:`ZarrTensorDict` for a TensorDict; a zip file or ``ZipStore`` is opened for reading.

    >>> opened = to_zarr(TensorDict({"a": torch.zeros(2)}, [2]), "data.zarr", chunks=1)
    >>> opened[1] = TensorDict({"a": 5.0})
    >>> opened["a"].tolist()
    [0.0, 5.0]
    """
    if allow_pickle:
        raise ValueError("td-zarr never pickles values: register a LeafSerializer for their type")
    save(data, filename, storage_options=storage_options, **options)
    mode = "r" if find_objects(filename, storage_options).is_read_only else "r+"
    opened, content = open_with_content(filename, mode, None, True, False, storage_options, follows=True)
    chosen = {item.name: options[item.name] for item in fields(ChunkOptions) if item.name in options}
    return open_live(content.objects, opened, chosen, mode)


def from_zarr(
    filename: object,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: object = None,
    non_tensor_as_stack: bool = True,
    allow_pickle: bool | None = None,
    strict: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Open a Zarr group, and choose a batch size.

    A TensorDict is returned as a :class:`ZarrTensorDict`, except with ``mode="c"``; with ``mode="r+"``, its structure can be
    changed. Unlike with :func:`td_zarr.open`, no leaf is mapped memory, so that an entry that is replaced later is an error.

    Args:
        filename: a directory, a zip file, a URL, or a store or group of zarr.
        mode: ``"r"``, ``"r+"`` or ``"c"``.
        keys: keys or key paths to open.
        auto_batch_size: replace the batch size by the leading dims that all entries share, as is done for a group that has none
            because another program wrote it.
        batch_dims: the largest number of batch dims for ``auto_batch_size``.
        batch_size: replace the batch size by this one; with ``mode="r+"``, also that of the group.
        non_tensor_as_stack: an array of strings is one value per row; False makes it one value, a list.
        allow_pickle: True reads values that tensordict has pickled. A pickle can run any code.
        strict: False opens a tensorclass that is not defined as a TensorDict.
        storage_options: options of the file system of a URL.

    >>> _ = TensorDict({"a": torch.ones(2, 3)}).to_zarr("data.zarr")
    >>> from_zarr("data.zarr", batch_size=[2]).batch_size
    torch.Size([2])
    """
    result, content = open_with_content(
        filename, mode, keys, strict, bool(allow_pickle), storage_options, non_tensor_as_stack, mode != "c"
    )
    if mode != "c":
        result = open_live(content.objects, result, {}, mode)
    if batch_size is not None:
        result.batch_size = batch_size
    elif auto_batch_size or not content.has_sizes:
        result.auto_batch_size_(batch_dims)
    return result


# A save or message of such a collection has TensorDicts.
kinds.store_as(ZarrTensorDict, "TensorDict")
