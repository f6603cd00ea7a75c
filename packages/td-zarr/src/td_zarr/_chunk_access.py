"""Read and write arrays: mapped from the file of their only chunk, or in chunks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from td_core.errors import FormatError, LockedError
from td_core.spi import set_module
from td_core.typing import SourceIndex
from td_store.arrays import KeptSource, MappedSource, as_mapped, map_file, read_into, view_mapped

from ._array_documents import ArrayInfo
from ._array_engines import FastArray, SlowArray, is_read_whole, list_chunks, open_array, wait_for_all
from ._local_objects import LocalObjects
from ._opened_arrays import OpenedArray
from ._zarr_objects import Objects

if TYPE_CHECKING:
    import numpy.typing as npt

#: The most arrays, and about the most bytes, that are read or written at the same time.
_BATCH, _BATCH_BYTES = 256, 1 << 26


def read_whole(
    objects: Objects, arrays: Sequence[ArrayInfo], *, strict: bool, report: Callable[[int], None]
) -> dict[str, Tensor]:
    """Read arrays, several at the same time, and return them by name."""
    result = {}
    for batch in _split_batches(arrays):
        opened = [open_array(objects, info, strict=strict) for info in batch]
        with objects.read_ahead(_list_wanted([(info, None) for info in batch], strict)):
            contents = wait_for_all([array.read() for array in opened])
        for info, found in zip(batch, contents, strict=True):
            result[info.name] = as_tensor(found)
            report(info.nbytes)
    return result


def _list_wanted(parts: Iterable[tuple[ArrayInfo, SourceIndex | None]], strict: bool) -> Iterator[str]:
    """Yield the keys of the chunks of parts of arrays, of which all must exist if reads are ``strict``."""
    for info, index in parts:
        if strict and info.nbytes and is_read_whole(info):
            yield from list_chunks(info, index)


def _split_batches(arrays: Iterable[ArrayInfo]) -> Iterator[list[ArrayInfo]]:
    """Split arrays in batches, so that progress is reported and not all of them are in memory twice."""
    batch: list[ArrayInfo] = []
    nbytes = 0
    for info in arrays:
        batch.append(info)
        nbytes += info.nbytes
        if len(batch) >= _BATCH or nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def as_tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """Return an array that was read as a tensor that can be written."""
    if array.flags.carray and array.dtype.isnative and array.dtype.kind in "biufc" and array.size:
        return torch.from_numpy(array)
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    tensor = torch.from_numpy(array.view(np.int64) if array.dtype.kind in "mM" else array)
    # An empty array can have other strides than an empty tensor.
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)


def write_arrays(
    objects: Objects,
    arrays: Mapping[str, tuple[ArrayInfo, Callable[[], Tensor]]],
    report: Callable[[int], None],
) -> None:
    """Write the elements of arrays by name, several at the same time."""
    for batch in _split_batches(info for info, _ in arrays.values() if info.nbytes):
        opened = [(open_array(objects, info, strict=False), arrays[info.name][1]) for info in batch]
        wait_for_all([array.write_all(read().numpy()) for array, read in opened])
        report(sum(info.nbytes for info in batch))


@set_module("td_zarr.zarr_pickles")
class ChunkSource:
    """An array in chunks."""

    def __init__(self, objects: Objects, info: ArrayInfo, *, strict: bool) -> None:
        assert info.dtype is not None
        self.objects, self.info, self.strict = objects, info, strict
        self.shape, self.dtype = info.shape, info.dtype
        self._current = OpenedArray(objects, info)
        self._opened: tuple[int, ArrayInfo, FastArray | SlowArray] | None = None
        #: The elements, after the array was removed.
        self._kept: KeptSource | None = None

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Shape of the chunks, or of the shards, of an array of version 3."""
        grid = self.info.document.get("chunk_grid", {})
        found = grid.get("configuration", {}).get("chunk_shape")
        return None if found is None else tuple(found)

    def __repr__(self) -> str:
        return f"ChunkSource({self.objects.where!r}, {self.info.name!r})"

    def __reduce__(self) -> str | tuple[object, ...]:
        if self._kept is not None:
            return self._kept.__reduce_ex__(2)
        return rebuild_source, (self.objects, self.info, self.strict)

    @property
    def array(self) -> FastArray | SlowArray:
        """The array of this process, with the rows that it has now; FormatError if it was replaced since it was opened."""
        info, opened = self._current.find(), self._opened
        if opened is None or opened[0] != os.getpid() or opened[1] is not info:
            opened = os.getpid(), info, open_array(self.objects, info, strict=self.strict)
            self._opened = opened
        return opened[2]

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store of the group its options again."""
        self.objects.reopen(storage_options)

    def keep(self) -> None:
        """Read all elements before the array is removed: reads and writes stay in memory from now on."""
        self._kept = KeptSource(self.read(tuple(slice(0, n, 1) for n in self.shape)))

    def read(self, index: SourceIndex) -> Tensor:
        """Read the chunks that a part of the array is in."""
        return self.read_many([(self, index)])[0]

    def read_many(self, requests: Sequence[tuple[ChunkSource, SourceIndex]]) -> list[Tensor]:
        """Read parts of several arrays at the same time."""
        if any(source._kept is not None for source, _ in requests):
            return [
                source.read_many([(source, index)])[0] if source._kept is None else source._kept.read(index)
                for source, index in requests
            ]
        objects = {id(source.objects): source.objects for source, _ in requests}
        with contextlib.ExitStack() as stack:
            arrays = [source.array for source, _ in requests]
            for number, group in objects.items():
                parts = [(s.info, index) for s, index in requests if id(s.objects) == number and s.strict]
                stack.enter_context(group.read_ahead(_list_wanted(parts, True)))
            found = wait_for_all(
                [array.read(_as_selection(index)) for array, (_, index) in zip(arrays, requests, strict=True)]
            )
        for source, _ in requests:
            source._current.find()  # raises if the array was replaced while it was read
        return [as_tensor(item) for item in found]

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write the chunks that a part of the array is in; those that are written in part are read first."""
        if self._kept is not None:
            self._kept.write(index, value)
            return
        with self.objects.hold():
            self.array.write(_as_selection(index), value.numpy())

    def hold(self) -> contextlib.AbstractContextManager[object]:
        """Exclude other writers during a block."""
        return self.objects.hold()

    def flush(self) -> None:
        """Do nothing: each write is complete when it returns."""


@set_module("td_zarr.zarr_pickles")
def rebuild_source(objects: Objects, info: ArrayInfo, strict: bool) -> ChunkSource:
    """Return the source of a pickle."""
    return ChunkSource(objects, info, strict=strict)


def _as_selection(index: SourceIndex) -> object:
    return tuple(item if isinstance(item, slice) else item.numpy() for item in index)


@set_module("td_zarr.zarr_pickles")
def rebuild_mapped(objects: LocalObjects, info: ArrayInfo, finish: Callable[[Tensor], Tensor]) -> Tensor:
    """Map a leaf again, in another process; FormatError if another save has replaced the group."""
    objects.check()
    return as_mapped(finish(map_raw(objects, info)), rebuild_mapped, objects, info, finish)


def map_raw(objects: LocalObjects, info: ArrayInfo, *, shared: bool = False, small: int = 0) -> Tensor:
    """Map the only chunk of an array: writes to a private mapping stay in memory, those to a shared one reach the file.

    A chunk of fewer than ``small`` bytes is read.

    Raises:
        FormatError: the chunk is missing, or has another size.
    """
    assert info.dtype is not None
    if not info.nbytes:
        return torch.empty(info.shape, dtype=info.dtype)
    key = f"{info.name}/{info.raw}"
    try:
        fd, size = objects.open_file(key, os.O_RDWR if shared else os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(f"{objects.where}: the chunk {key!r} is missing") from error
    except PermissionError as error:
        raise LockedError(f"cannot open {objects.locate(key)!r}: {error.strerror}") from error
    try:
        if size != info.nbytes:
            raise FormatError(f"{objects.where}: the chunk {key!r} has {size} bytes; expected {info.nbytes}")
        if size < small:
            result = torch.empty(info.shape, dtype=info.dtype)
            read_into(fd, result, 0, lambda count: None)
            return result
        return view_mapped(map_file(fd, shared=shared), info.dtype, info.shape)
    finally:
        os.close(fd)


@set_module("td_zarr.zarr_pickles")
class RawSource(MappedSource):
    """An array with one chunk, which is mapped; writes to a ``shared`` one reach the file.

    After rows were appended, it has several chunks, and is read and written as such.
    """

    def __init__(self, objects: LocalObjects, info: ArrayInfo, shared: bool = True) -> None:
        assert info.dtype is not None
        self.objects, self.info, self.shared = objects, info, shared
        self.shape, self.dtype = info.shape, info.dtype
        self._key = f"{info.name}/{info.raw}"
        self.path = objects.locate(self._key)
        self._current = OpenedArray(objects, info)
        self._chunks = ChunkSource(objects, info, strict=True)
        #: What distinguishes the file that is mapped from one that replaces it.
        self._version: object = None
        #: The elements, after the array was removed.
        self._kept: KeptSource | None = None

    def __repr__(self) -> str:
        return f"RawSource({self.objects.where!r}, {self.info.name!r})"

    def __reduce__(self) -> str | tuple[object, ...]:
        if self._kept is not None:
            return self._kept.__reduce_ex__(2)
        return RawSource, (self.objects, self.info, self.shared)

    def keep(self) -> None:
        """Read all elements before the array is removed: reads and writes stay in memory from now on."""
        self._kept = KeptSource(self.read(tuple(slice(0, n, 1) for n in self.shape)))

    def flush(self) -> None:
        """Return when what was written has reached the disk."""
        if self._kept is None:
            super().flush()

    def _open(self) -> Tensor:
        return map_raw(self.objects, self.info, shared=self.shared)

    def map(self) -> Tensor | None:  # type: ignore[override]
        """Return the array as memory, or None if it has several chunks now; FormatError if it was replaced."""
        if self._kept is not None:
            return self._kept.map()
        if self._current.find() is not self.info:
            return None
        version = self.objects.read_number(self._key)
        if self._mapped is None or version != self._version:
            self._mapped, self._version = self._open(), version
        return self._mapped

    def read(self, index: SourceIndex) -> Tensor:
        """Return a copy of a part of the array."""
        mapped = self.map()
        return self._chunks.read(index) if mapped is None else mapped[index].clone()

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write a part of the array into the file."""
        if self._kept is not None:
            self._kept.write(index, value)
            return
        with self.objects.hold():
            mapped = self.map()
            if mapped is None:
                self._chunks.write(index, value)
            else:
                mapped[index] = value

    def hold(self) -> contextlib.AbstractContextManager[object]:
        """Exclude other writers during a block."""
        return self.objects.hold()
