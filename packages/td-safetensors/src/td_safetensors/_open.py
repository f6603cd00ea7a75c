"""Open a save: its leaves are mapped, so that nothing but the header is read before an element is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from td_core import NestedKey
from td_core.errors import FormatError
from td_core.spi import Encoded, check_mode, select_keys, set_module
from td_core.typing import SourceIndex
from td_store import StoredTensor
from td_store.arrays import (
    MappedSource,
    Place,
    as_mapped,
    build_leaves,
    check_in_place,
    list_names,
    open_place,
    refuse_objects,
    refuse_values,
    restore,
)
from td_store.files import identify_file

from ._find_save import Save, open_file, open_for_reading, open_save
from ._write_save import create_file

#: Inode, size, time of the last write (None for a file that is written), and time of birth, which old pickles lack.
Stamp = tuple[int | None, ...]


class _Kept:
    """A file that is kept open, so that no other one gets its inode."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        self._names = os.fstat(fd).st_nlink

    def has_names(self) -> bool:
        """Return True if the file has all the names that it had: a save that replaces it removes one."""
        return os.fstat(self.fd).st_nlink == self._names

    def __del__(self) -> None:
        os.close(self.fd)


@set_module("td_safetensors.safetensors_pickles")
class FileSource(MappedSource):
    """A leaf of a file that is opened for writing."""

    def __init__(
        self,
        path: str,
        stamp: Stamp,
        place: Place,
        shape: torch.Size,
        dtype: torch.dtype,
        kept: _Kept | None = None,
    ) -> None:
        self.path, self.stamp, self.place, self.shape, self.dtype = path, stamp, place, shape, dtype
        self._kept = kept

    def _open(self) -> Tensor:
        with open_for_reading(self.path, write=True) as fd:
            mapped = _map_leaf(self.path, fd, self.stamp, self.place, shared=True)
            self._kept = self._kept or _Kept(fd)
        return mapped

    def map(self) -> Tensor:
        """Return the leaf as memory; raise FormatError if another save has replaced its file."""
        if self._kept is not None and not self._kept.has_names():
            with contextlib.suppress(FileNotFoundError):  # the elements of a removed file can be read
                self._check()
        return super().map()

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write a part of the leaf into the file."""
        mapped = self.map()
        self._check()
        mapped[index] = value

    def _check(self) -> None:
        if os.stat(self.path).st_ino != self.stamp[0]:
            raise _make_replaced_error(self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return FileSource, (self.path, self.stamp, self.place, self.shape, self.dtype)


def open_collection(
    path: str | os.PathLike[str],
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    strict: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Open a safetensors file, or a directory of shards, without reading its leaves.

    The leaves are mapped: an element is read when it is used. A pickle of an opened collection, as one that a DataLoader sends
    to a worker, has the places of the leaves instead of their elements.

    Args:
        path: the file, the index of shards, or their directory; a path, or a URL of fsspec, whose leaves are
            :class:`td_store.StoredTensor` that read ranges of bytes.
        mode: ``"r"`` and ``"c"`` keep writes in the memory of this process. ``"r+"`` writes into the file: leaves are
            :class:`td_store.StoredTensor`. Except with ``"c"``, the collection is locked: keys cannot be added or removed.
        keys: keys or key paths to open, with all that is below them.
        strict: False opens a tensorclass that is not defined as a TensorDict.
        storage_options: arguments of the file system of fsspec, for a URL.

    Raises:
        FormatError: the save is damaged; the message has the path and the key.
        KeyPathError: the save has no such key.
        ValueError: the mode is unknown.
        UnsupportedOperationError: the mode is ``"r+"``, and the save has a nested tensor.

    >>> from td_safetensors import save
    >>> _ = save(TensorDict({"a": torch.arange(1000)}, [1000]), "data.safetensors")
    >>> open_collection("data.safetensors")[[7, 5]]["a"]
    tensor([7, 5])
    """
    check_mode(mode)
    if mode == "r+":
        refuse_objects(path, "write into", "open it with mode='c', and save() the result")
    with open_save(path, storage_options) as save:
        open_array = save.make_opener()
        table = select_keys(save.table, keys, save.path)
        if mode == "r+":
            opened = _open_for_writing(save, table, strict).lock_()
            refuse_values(opened, save.path)
            return opened

        origins: dict[Any, tuple[str, Stamp]] = {}

        def open_leaf(place: Place) -> Tensor:
            if save.is_remote:
                return open_place(place, open_array, mode)
            leaf = restore(place, save.map)
            files: Any = {save.arrays[name][0] for name in list_names(place)}
            if mode == "c" or leaf.is_nested or len(files) != 1:
                return leaf
            (file,) = files
            if file not in origins:
                origins[file] = os.path.abspath(file.path), _stamp(file.fd)
            return as_mapped(leaf, rebuild_mapped, *origins[file], place)

        result = build_leaves(table, save.path, open_leaf, strict=strict)
    return result if mode == "c" else result.lock_()


def create(like: object, path: str | os.PathLike[str], *, durable: bool = False) -> Any:
    """Write a file of zeros with the structure, shapes and dtypes of a collection, and open it for writing.

    Raises:
        FileExistsError: something is at ``path``.
    """
    create_file(like, path, durable=durable)
    return open_collection(path, mode="r+")


def _open_for_writing(save: Save, table: Encoded, strict: bool) -> Any:
    check_in_place(table, save.path)
    kept: dict[Any, tuple[str, Stamp, _Kept]] = {}

    def open_leaf(place: Place) -> Tensor:
        leaf = restore(place, save.map)
        files: Any = {save.arrays[name][0] for name in list_names(place)}
        (file,) = files
        size = place.get("expand") if isinstance(place, dict) else None
        if size is not None:
            place = {name: value for name, value in place.items() if name != "expand"}
            leaf = restore(place, save.map)
        if file not in kept:
            kept[file] = os.path.abspath(file.path), _stamp(file.fd, written=True), _Kept(file.fd)
        path, stamp, opened = kept[file]
        stored = StoredTensor(FileSource(path, stamp, place, leaf.shape, leaf.dtype, opened))
        return stored if size is None else stored.expand(size)

    return build_leaves(table, save.path, open_leaf, strict=strict)


def _stamp(fd: int, *, written: bool = False) -> Stamp:
    """Return what distinguishes the file from another one that is later saved under its name."""
    status = os.fstat(fd)
    birth = identify_file(fd, status)[2]
    return status.st_ino, status.st_size, None if written else status.st_mtime_ns, birth


def _map_leaf(path: str, fd: int, stamp: Stamp, place: Place, *, shared: bool = False) -> Tensor:
    if _stamp(fd, written=shared)[: len(stamp)] != stamp:
        raise _make_replaced_error(path)
    file = open_file(path, fd, shared=shared)
    leaf = restore(place, lambda name: file.map(name, file.header.arrays[name]))
    for name in list_names(place) if shared else ():
        if (file.header.start + file.header.arrays[name].begin) % leaf.dtype.itemsize:  # it is a copy
            raise FormatError(
                f"{path}: {name!r} is not aligned for {leaf.dtype}, so it cannot be written in place"
            )
    return leaf


def _make_replaced_error(path: str) -> FormatError:
    return FormatError(f"{path} was replaced since it was opened: open it again")


@set_module("td_safetensors.safetensors_pickles")
def rebuild_mapped(path: str, stamp: Stamp, place: Place) -> Tensor:
    """Map a leaf again, in another process; FormatError if another save has replaced the file."""
    with open_for_reading(path) as fd:
        leaf = _map_leaf(path, fd, stamp, place)
    return as_mapped(leaf, rebuild_mapped, path, stamp, place)
