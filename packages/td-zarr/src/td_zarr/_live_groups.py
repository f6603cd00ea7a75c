"""``ZarrTensorDict``: a Zarr group as a collection, whose entries are added to and removed from the group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from td_core import Encoded, NestedKey, StoredTensor, TensorDict, encode, kinds
from td_core.array_formats import (
    LiveCollection,
    build_collection,
    compute_check,
    list_names,
    make_array_plan,
)
from td_core.spi import set_module

from ._array_documents import NATIVE, ArrayInfo, ChunkOptions, join_names, make_array_document, make_blank
from ._dim_labels import name_dims
from ._group_header import list_documents, read_group, read_root
from ._read_collections import Opener, open_collection, open_with_content
from ._write_groups import PlannedGroup, dump_json, save, write_entries
from ._zarr_objects import Objects, find_local_path, find_objects

KeyPath = tuple[str, ...]

#: The options of a save that new arrays get, too.
_ARRAY_OPTIONS = ("chunks", "shards", "filters", "compressors", "serializer", "checksums")


def _as_key(path: KeyPath) -> Any:
    return path if len(path) > 1 else path[0]


class _LiveGroup:
    """A group whose header is written again when the structure of its collection changes.

    Attributes:
        objects: the objects of the group.
        options: options of the chunks of new arrays.
    """

    def __init__(self, objects: Objects, options: Mapping[str, Any]) -> None:
        self.objects, self.options = objects, options

    @property
    def where(self) -> str:
        """Location of the group."""
        return self.objects.where

    def check_writable(self, path: KeyPath, what: str) -> None:
        """Do nothing: such a group is opened for writing."""

    def find_row(self, row: None, key: str) -> None:
        """Return None: entries are found by their paths."""

    def write_values(self, path: KeyPath, row: None, node: Any) -> None:
        """Write the values of an entry into the header."""
        self.edit(lambda whole: whole.set(_as_key(path), node.clone()))

    def record(self, path: KeyPath, row: None, size: torch.Size, names: Any) -> None:
        """Write batch size and dim names of a node into the header."""

        def change(whole: Any) -> None:
            node = whole.get(_as_key(path)) if path else whole
            node._set_batch_size(size)
            node._names = names

        self.edit(change)

    def edit(
        self,
        change: Callable[[Any], object],
        *,
        added: KeyPath = (),
        entry: Any = None,
        removed: KeyPath = (),
    ) -> None:
        """Change the collection in the header, and write the root of the group.

        Args:
            change: changes a collection of meta tensors, which is that of the header.
            added: key path of an entry that ``change`` sets.
            entry: a collection with this entry alone; its arrays are written before the root.
            removed: key path of an entry that ``change`` removes; its arrays are removed after the root is written.

        Raises:
            CodecError: a value or leaf cannot be stored; nothing is changed.
        """
        self.objects.check()
        group = read_group(self.objects)
        whole = build_collection(group.table, group.where, lambda name: make_blank(group.arrays[name]))
        is_locked = whole.is_locked
        change(whole.unlock_())
        encoded = encode(whole.lock_() if is_locked else whole)
        places = dict(zip(group.table.leaf_paths(), group.table.leaves, strict=True))
        infos: dict[str, ArrayInfo] = group.arrays
        planned = None if entry is None else self._plan(entry, infos)
        if planned is not None:
            table = Encoded.of_header(planned.plan.header, group.where)
            places = {key: place for key, place in places.items() if key[: len(added)] != added}
            places.update(zip(table.leaf_paths(), table.leaves, strict=True))
            infos = {**infos, **planned.arrays}
        header = encoded.make_header([places[key] for key in encoded.leaf_paths()])
        used = {name for place in header["leaves"] for name in list_names(place)}
        header["check"] = compute_check((name, infos[name].shape) for name in used)
        if not group.is_strict:
            header["sparse"] = True
        root = read_root(self.objects)
        documents = list_documents(self.objects, root)
        if planned is not None:
            write_entries(self.objects, planned, set(documents))
            documents = {**planned.root["consolidated_metadata"]["metadata"], **documents}
        gone = _find_unused(documents, used, group.arrays, removed) if removed else []
        root["attributes"]["td"] = json.dumps(header, separators=(",", ":"))
        root["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": {name: document for name, document in documents.items() if name not in gone},
        }
        self.objects.replace("zarr.json", dump_json(root))
        self.objects.remove(gone)

    def _plan(self, entry: Any, taken: Mapping[str, Any]) -> PlannedGroup:
        plan = make_array_plan(entry, NATIVE, join_names, reserved=taken, separator="/")
        dims, options = name_dims(plan.arrays), ChunkOptions(**self.options)
        documents = {
            name: make_array_document(item, dims[name], options) for name, item in plan.arrays.items()
        }
        return PlannedGroup(plan, documents)

    def open_entry(self, path: KeyPath) -> Any:
        """Open an entry of the group for writing."""
        group = read_group(self.objects)
        table = group.table.select_keys([_as_key(path)], group.where)
        opener = Opener(group, table, "r+")
        opened = build_collection(table, group.where, opener.read, wrap=opener.wrap)
        return opened.get(_as_key(path))


def _find_unused(
    documents: Mapping[str, Any], used: set[str], arrays: Mapping[str, Any], removed: KeyPath
) -> list[str]:
    """Return the names of the groups and arrays that no entry needs after one was removed, groups after their content."""
    needed = {name[:end] for name in used for end, char in enumerate(name) if char == "/"} | used
    prefix = join_names(removed)
    below = {name for name in documents if name == prefix or name.startswith(f"{prefix}/")}
    return sorted((below | arrays.keys()) - needed, key=len, reverse=True)


@set_module("td_zarr")
class ZarrTensorDict(LiveCollection):
    """A Zarr group that is opened for writing, as a collection.

    Leaves are stored tensors or mapped: writes in place reach the group. So do new entries, removed and renamed ones, batch
    sizes and dim names, in this collection and in the nested ones. Results of operations, such as an index, ``clone()`` or
    ``to_tensordict()``, are TensorDicts. A change of the structure writes the new arrays, and then the metadata of the root,
    so a process that is killed leaves the old structure or the new one. One process at a time should change it.

    ``to_zarr`` and ``from_zarr(mode="r+")`` return such collections.

    >>> from td_core import load
    >>> group = TensorDict({"a": torch.arange(3)}, [3]).to_zarr("data.zarr")
    >>> group["n", "b"] = torch.zeros(3, 2)
    >>> group.rename_key_("a", "c").sorted_keys
    ['c', 'n']
    >>> load("data.zarr")["n", "b"].shape
    torch.Size([3, 2])
    """

    _store: _LiveGroup

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the place of the group and the keys of a nested collection."""
        return rebuild_live, (self._store.objects, self._path, dict(self._store.options))

    def _write_entry(self, key: str, value: Any) -> None:
        path, store = (*self._path, key), self._store
        entry = self._with_children({key: value})
        if any(isinstance(leaf, StoredTensor) for leaf in entry._leaves()):
            entry = entry.clone()  # it can have leaves of the entry that it replaces
        make_array_plan(entry, NATIVE, join_names, separator="/")  # an error changes nothing
        if key in self._entries:  # its arrays, whose names the new ones get, are removed first
            store.edit(lambda whole: whole.set(_as_key(path), TensorDict({}, self._size)), removed=path)
        for above in reversed(self._path):
            entry = TensorDict({above: entry})
        store.edit(lambda whole: whole.set(_as_key(path), entry.get(_as_key(path))), added=path, entry=entry)
        opened = self._with_children({key: store.open_entry(path)})
        self._entries[key] = self._of_opened(store, self._path, None, opened)._entries[key]

    def _remove_entry(self, key: str) -> None:
        path = (*self._path, key)
        self._store.edit(lambda whole: whole.del_(_as_key(path)), removed=path)


def open_live(objects: Objects, opened: Any, options: Mapping[str, Any]) -> Any:
    """Return a collection that is opened for writing, and whose structure can be changed if it is a TensorDict."""
    if type(opened) is not TensorDict:
        return opened.lock_()
    return ZarrTensorDict._of_opened(_LiveGroup(objects, options), (), None, opened)


@set_module("td_zarr.zarr_pickles")
def rebuild_live(objects: Objects, path: KeyPath, options: Mapping[str, Any]) -> Any:
    """Open the collection of a pickle.

    Raises:
        FormatError: another save has replaced the group.
    """
    objects.check()
    group = read_group(objects)
    opener = Opener(group, group.table, "r+")
    opened = build_collection(group.table, group.where, opener.read, wrap=opener.wrap)
    live = open_live(objects, opened, options)
    return live.get(_as_key(path)) if path else live


def to_zarr(
    data: Any,
    filename: Any,
    *,
    allow_pickle: bool | None = None,
    storage_options: dict[str, Any] | None = None,
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
        The opened collection, a :class:`ZarrTensorDict` for a TensorDict; a zip file is opened for reading.

    >>> opened = to_zarr(TensorDict({"a": torch.zeros(2)}, [2]), "data.zarr", chunks=1)
    >>> opened[1] = TensorDict({"a": 5.0})
    >>> opened["a"].tolist()
    [0.0, 5.0]
    """
    if allow_pickle:
        raise ValueError("td-zarr never pickles values: register a LeafSerializer for their type")
    save(data, filename, storage_options=storage_options, **options)
    path = find_local_path(filename)
    if path is not None and path.endswith(".zip"):
        return open_collection(filename)
    opened = open_collection(filename, mode="r+", storage_options=storage_options).unlock_()
    chosen = {name: value for name, value in options.items() if name in _ARRAY_OPTIONS}
    return open_live(find_objects(filename, storage_options), opened, chosen)


def from_zarr(
    filename: Any,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: Any = None,
    non_tensor_as_stack: bool = False,
    allow_pickle: bool | None = None,
    strict: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """Open a Zarr group, as :func:`td_zarr.open` does, and choose a batch size.

    With ``mode="r+"``, a TensorDict is returned as a :class:`ZarrTensorDict`, whose structure can be changed.

    Args:
        filename: a directory, a zip file, a URL, or a store or group of zarr.
        mode: ``"r"``, ``"r+"`` or ``"c"``.
        keys: keys or key paths to open.
        auto_batch_size: replace the batch size by the leading dims that all entries share, as is done for a group that has none
            because another program wrote it.
        batch_dims: the largest number of batch dims for ``auto_batch_size``.
        batch_size: replace the batch size by this one.
        non_tensor_as_stack: return an array of strings as a stack of values; False returns it as one value, a list.
        allow_pickle: True reads values that tensordict has pickled. A pickle can run any code.
        strict: False opens a tensorclass that is not defined as a TensorDict.
        storage_options: options of the file system of a URL.

    >>> _ = TensorDict({"a": torch.ones(2, 3)}).to_zarr("data.zarr")
    >>> from_zarr("data.zarr", batch_size=[2]).batch_size
    torch.Size([2])
    """
    result, content = open_with_content(
        filename, mode, keys, strict, bool(allow_pickle), storage_options, non_tensor_as_stack
    )
    if batch_size is not None:
        result.batch_size = batch_size
    elif auto_batch_size or not content.has_sizes:
        result.auto_batch_size_(batch_dims)
    if mode == "r+" and content.is_ours:
        return open_live(find_objects(filename, storage_options), result, {})
    return result if mode == "c" else result.lock_()


# A save or message of such a collection has TensorDicts.
kinds.store_as(ZarrTensorDict, "TensorDict")
