"""Load groups, or open them, and arrays and groups that are set as entries, without reading their arrays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import zarr
import zarr.storage
from torch import Tensor

from td_core import NestedKey, TensorDict, from_any
from td_core.errors import FormatError, UnsupportedOperationError
from td_core.spi import Encoded, Source, check_mode, make_reporter, select_keys, set_module
from td_core.typing import DeviceType, Progress
from td_store import StoredTensor
from td_store.arrays import (
    Place,
    as_mapped,
    build_collection,
    build_leaves,
    check_in_place,
    is_nested,
    list_names,
    refuse_values,
    restore,
)
from td_store.files import read_unreplaced

from ._array_documents import ArrayInfo, read_array_document
from ._chunk_access import ChunkSource, RawSource, as_tensor, map_raw, read_whole, rebuild_mapped
from ._foreign_groups import ForeignGroup
from ._group_header import GroupContent, find_documents, find_old_document, read_group
from ._local_objects import LocalObjects, find_local_path, find_objects
from ._opened_arrays import has_changed, has_replaced_arrays
from ._zarr_objects import StoreObjects, return_store

#: A load reads smaller chunks instead of mapping them: that is as fast, and a process has a limited number of mappings.
_SMALL = 1 << 14
#: A reader gives up after this many changes of what it read.
_MOST_READS = 100


@contextlib.contextmanager
def open_group(
    location: object,
    storage_options: Mapping[str, object] | None = None,
    *,
    allow_pickle: bool = False,
    stack_values: bool = True,
    write: bool = False,
) -> Iterator[GroupContent]:
    """Open a group for the duration of a block; with ``write``, hold its lock."""
    objects = find_objects(location, storage_options)
    try:
        with objects.hold() if write else contextlib.nullcontext():
            group = read_group(objects, allow_pickle=allow_pickle, stack_values=stack_values)
            try:
                yield group
            except FormatError as error:
                if has_changed(objects):
                    raise _ChangedError(
                        f"{objects.where}: it was changed while it was read: {error}"
                    ) from error
                raise
            opened = chain(group.arrays.values(), group.texts.values())
            if not write and has_replaced_arrays(objects, opened):
                raise _ChangedError(f"{objects.where}: arrays were replaced while it was read")
    finally:
        objects.close()


class _ChangedError(FormatError):
    """What was read is not one state of the group: another thread or process has changed it meanwhile."""


def load(
    location: object,
    *,
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    strict: bool = True,
    allow_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress = False,
) -> Any:
    """Load a collection from a Zarr group.

    Groups of tensordict and of other programs load too, of version 2 or 3 of the format.

    Args:
        location: a directory, a zip file, a URL, or a store or group of zarr.
        device: device of the leaves; ``"meta"`` reads no leaf.
        keys: keys or key paths to load, with all that is below them. Nothing else is read.
        rows: index of the first batch dim: an int, a slice or positions. Only their chunks are read.
        strict: False loads a tensorclass that is not defined as a TensorDict.
        allow_pickle: True loads values that tensordict has pickled. A pickle can run any code.
        storage_options: options of the file system of a URL.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Raises:
        FileNotFoundError: there is nothing at a local path.
        FormatError: the group is damaged; the message has its location, and the array or key.
        KeyPathError: the group has no such key.

    >>> from td_zarr import save
    >>> _ = save(TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3)}}, [3]), "data.zarr")
    >>> load("data.zarr", keys="a", rows=slice(1, None))["a"]
    tensor([1, 2])
    """
    target = None if device is None else TensorDict(device=device).device  # td-core adds the index of a GPU
    is_meta = target is not None and target.type == "meta"

    def read() -> Any:
        with open_group(location, storage_options, allow_pickle=allow_pickle) as group:
            table = group.read_texts(select_keys(group.table, keys, group.where))
            if rows is None or is_meta:
                reader = _make_reader(group, table, target, progress)
                return build_collection(table, group.where, reader, target, strict=strict)
            opener = Opener(group, table, "c")
            lazy = build_leaves(table, group.where, opener.open, strict=strict)
            return lazy[rows].clone()

    result = _read_unreplaced(location, read)
    if rows is not None:
        result = result[rows] if is_meta else result if target is None else result.to(target)
    return result


def _read_unreplaced(location: object, read: Callable[[], object]) -> Any:
    """Return the result of ``read``, repeated if a save replaced the directory, or another process changed the group."""
    path = find_local_path(location)
    is_directory = path is not None and os.path.isdir(path)
    for left in range(_MOST_READS, 0, -1):
        try:
            return read_unreplaced(path, read) if path is not None and is_directory else read()
        except _ChangedError:
            if left == 1:
                raise
    return None


def _make_reader(
    group: GroupContent, table: Encoded, device: torch.device | None, progress: Progress
) -> Callable[[str], Tensor]:
    """Return a function from the name of an array to its tensor."""
    used = dict.fromkeys(name for place in table.leaves for name in list_names(place))
    infos = [group.arrays[name] for name in used if name in group.arrays]
    if device is not None and device.type == "meta":
        return group.make_blank
    report = make_reporter(progress, sum(info.nbytes for info in infos), "load")
    local = group.objects if isinstance(group.objects, LocalObjects) else None
    known = {}
    for info in infos:
        if info.raw is not None and local is not None and _has_chunk(group, info):
            known[info.name] = map_raw(local, info, small=_SMALL)
            report(info.nbytes)
    others = [info for info in infos if info.name not in known]
    if others:
        known.update(read_whole(group.objects, others, strict=group.is_strict, report=report))
    if device is None:
        return known.__getitem__
    return lambda name: known[name].to(device)


def _has_chunk(group: GroupContent, info: ArrayInfo) -> bool:
    """Return True if the only chunk of an array must be there, or is there: zarr fills others with the fill value."""
    return group.is_strict or (
        isinstance(group.objects, LocalObjects)
        and os.path.exists(group.objects.locate(f"{info.name}/{info.raw}"))
    )


@set_module("td_zarr.zarr_pickles")
def finish_place(place: Place, array: Tensor) -> Tensor:
    """Return the leaf of a place that has one array."""
    return restore(place, lambda name: array)


@set_module("td_zarr.zarr_pickles")
class Reinterpreted:
    """Source of a leaf whose dtype Zarr lacks: the array has integers of the same width, or pairs of real numbers."""

    def __init__(self, source: Any, place: Place, leaf: Tensor) -> None:
        self.source, self.place = source, place
        self.shape, self.dtype = leaf.shape, leaf.dtype

    def __repr__(self) -> str:
        return repr(self.source)

    def __reduce__(self) -> tuple[object, ...]:
        return Reinterpreted, (
            self.source,
            self.place,
            torch.empty(self.shape, dtype=self.dtype, device="meta"),
        )

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Shape of the chunks of the array in the dims of the leaf."""
        found = getattr(self.source, "chunks", None)
        return None if found is None else tuple(found[: len(self.shape)])

    def _extend(self, index: Any) -> Any:
        return (*index, *(slice(0, n, 1) for n in self.source.shape[len(self.shape) :]))

    def read(self, index: Any) -> Tensor:
        """Read integers or pairs, and view them as elements."""
        return restore(self.place, lambda name: self.source.read(self._extend(index)))

    def write(self, index: Any, value: Tensor) -> None:
        """View elements as integers or pairs, and write those."""
        stand_in = torch.view_as_real(value) if value.is_complex() else value.view(self.source.dtype)
        self.source.write(self._extend(index), stand_in)

    def keep(self) -> None:
        """Read all elements before the array is removed."""
        self.source.keep()

    def flush(self) -> None:
        """Flush the array."""
        self.source.flush()

    def hold(self) -> contextlib.AbstractContextManager[object]:
        """Exclude other writers during a block."""
        held: contextlib.AbstractContextManager[object] = self.source.hold()
        return held


def _check_writable(group: GroupContent, table: Encoded) -> None:
    """Raise UnsupportedOperationError for what cannot be written in place."""
    if group.objects.is_read_only:
        raise UnsupportedOperationError(
            f"{group.where} cannot be written in place: load it and save it again, or open it with mode='c'"
        )
    check_in_place(table, group.where)


class Opener:
    """Makes the leaves of a group that is opened: with ``follows``, only such as notice what others change in the group."""

    def __init__(self, group: GroupContent, table: Encoded, mode: str, *, follows: bool = False) -> None:
        self.group, self.mode, self.follows = group, mode, follows or mode == "r+"
        self.local = group.objects if isinstance(group.objects, LocalObjects) else None
        self.nested = {name for place in table.leaves if is_nested(place) for name in list_names(place)}

    def read(self, name: str) -> Tensor:
        """Return an array: mapped, or in the store. The arrays of nested tensors are read."""
        info = self.group.arrays[name]
        if self.can_map(info) and not self.follows and self.local is not None:
            return map_raw(self.local, info)
        if name in self.nested:
            strict = self.group.is_strict
            return read_whole(self.group.objects, [info], strict=strict, report=lambda size: None)[name]
        return StoredTensor(self.make_source(info), mode=self.mode)

    def can_map(self, info: ArrayInfo) -> bool:
        return info.raw is not None and self.local is not None and _has_chunk(self.group, info)

    def make_source(self, info: ArrayInfo) -> Source:
        if self.can_map(info) and self.local is not None:
            return RawSource(self.local, info, self.mode == "r+")
        return ChunkSource(self.group.objects, info, strict=self.group.is_strict)

    def open(self, place: Place) -> Tensor:
        """Return the leaf of a place, which can be pickled, and written if the mode allows that."""
        leaf = restore(place, self.read)
        if leaf.is_nested:
            return leaf
        if not isinstance(leaf, StoredTensor):
            if self.mode == "c" or self.local is None:
                return leaf
            (name,) = list_names(place)
            finish = partial(finish_place, place)
            return as_mapped(leaf, rebuild_mapped, self.local, self.group.arrays[name], finish)
        if not isinstance(place, dict) or "dtype" not in place:
            return leaf
        info = self.group.arrays[place["tensor"]]
        own = {field: value for field, value in place.items() if field != "expand"}
        blank = finish_place(own, torch.empty(info.shape, dtype=info.dtype, device="meta"))
        stored = StoredTensor(Reinterpreted(self.make_source(info), own, blank), mode=self.mode)
        return stored.expand(place["expand"]) if "expand" in place else stored


def open_collection(
    location: object,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    strict: bool = True,
    allow_pickle: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Open a Zarr group, without reading its arrays.

    Arrays of one uncompressed chunk in a local directory are mapped. Other leaves are :class:`td_store.StoredTensor`, whose
    elements are read when an operation needs them. A pickle of an opened collection has the places of the leaves.

    Args:
        location: a directory, a zip file, a URL, or a store or group of zarr.
        mode: ``"r"`` never changes the store, ``"r+"`` writes into it, ``"c"`` keeps writes in the memory of this process.
            Except with ``"c"``, the collection is locked: keys cannot be added or removed.
        keys: keys or key paths to open, with all that is below them.
        strict: False opens a tensorclass that is not defined as a TensorDict.
        allow_pickle: True reads values that tensordict has pickled. A pickle can run any code.
        storage_options: options of the file system of a URL.

    Raises:
        FormatError: the group is damaged; the message has its location, and the array or key.
        KeyPathError: the group has no such key.
        UnsupportedOperationError: the mode is ``"r+"``, and the group is a zip file, or has a nested tensor.

    >>> from td_zarr import save
    >>> _ = save(TensorDict({"a": torch.arange(1000)}, [1000]), "data.zarr", chunks=100)
    >>> open_collection("data.zarr")[[7, 5]]["a"]
    tensor([7, 5])
    """
    result, _ = open_with_content(location, mode, keys, strict, allow_pickle, storage_options)
    return result if mode == "c" else result.lock_()


def open_with_content(
    location: Any,
    mode: str,
    keys: Iterable[NestedKey] | None,
    strict: bool,
    allow_pickle: bool,
    storage_options: Mapping[str, object] | None,
    stack_values: bool = True,
    follows: bool = False,
) -> tuple[Any, GroupContent]:
    """Open a group; return also what it contains. ``follows`` is that of :class:`Opener`."""
    check_mode(mode)

    def read() -> tuple[Any, GroupContent]:
        with open_group(
            location, storage_options, allow_pickle=allow_pickle, stack_values=stack_values
        ) as group:
            table = group.read_texts(select_keys(group.table, keys, group.where))
            if mode == "r+":
                _check_writable(group, table)
            opener = Opener(group, table, mode, follows=follows)
            result = build_leaves(table, group.where, opener.open, strict=strict)
            if mode == "r+":
                refuse_values(result, group.where)
            return result, group

    opened: tuple[Any, GroupContent] = _read_unreplaced(location, read)
    return opened


def read_object(item: zarr.Group | zarr.Array[object]) -> Any:
    """Open an array or group of zarr in the mode of its store: its elements stay there.

    An array at the root of a store that is not a directory has no group, and is read.

    Raises:
        FormatError: the group is damaged, or torch lacks the dtype of an array.
    """
    mode = "r" if item.read_only else "r+"
    if isinstance(item, zarr.Group):
        try:
            return open_collection(item, mode=mode)
        except UnsupportedOperationError:  # it has nested tensors, or is in a zip file
            return open_collection(item, mode="r")
    store, (above, _, name) = item.store, item.path.rpartition("/")
    if not name and isinstance(store, zarr.storage.LocalStore):
        store, name = zarr.storage.LocalStore(store.root.parent, read_only=item.read_only), store.root.name
    if not name:
        elements = np.asarray(item[...])
        return as_tensor(elements) if elements.dtype.kind in "biufcmM" else from_any(elements.tolist())
    return _open_array(
        StoreObjects(str(item.store_path), partial(return_store, store), above, is_own=False), name, mode
    )


def _open_array(objects: StoreObjects, name: str, mode: str) -> object:
    """Return the entry of an array: a leaf in the store, or its text as values."""
    if objects.get(f"{name}/zarr.json") is None:
        document = find_old_document(objects, name)
    else:
        document = find_documents(objects, {}, [name])[name]
    infos = {name: read_array_document(name, document, objects.where)}
    table = ForeignGroup(objects, {name: document}, infos, allow_pickle=False, stack_values=True).build({})
    opener = Opener(GroupContent(objects, infos, table, False, False), table, mode)
    return build_leaves(table, objects.where, opener.open)._children()[name]
