"""HDF5 files in object stores: contiguous datasets are ranges of bytes; of others, all chunks that are needed are read at once.

HDF5 reads a file by one short range after the other. So the beginning of the object, where td puts the metadata, is read
first, and before HDF5 reads elements, their chunks are put into the cache of the file object that it reads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import h5py
import torch
from torch import Tensor

from td_core import LockedError
from td_core.spi import set_module
from td_core.typing import ObjectInfo, ObjectLocation, ObjectStore, Source, SourceIndex
from td_store.arrays import ObjectFile, ObjectReader, Place, RangeSource, restore, upload

from ._dataset_source import read_dataset
from ._datasets import Array, create_file, find_array, locate
from ._h5_files import close_file, convert_errors, find_full_disk, make_access

#: So many bytes are read first.
_BEGINNING = 1 << 21
#: Metadata is put into blocks of this part of a file, and of at least so many bytes.
_SHARE, _LEAST = 64, 1 << 11

Bytes = tuple[int, int]


@set_module("td_hdf5.h5_pickles")
class ObjectH5File:
    """An HDF5 file in an object store, which each process opens itself."""

    def __init__(self, store: ObjectStore, info: ObjectInfo, head: bytes | memoryview = b"") -> None:
        self.store, self.info, self._head = store, info, head
        self.reader = ObjectReader(store, info)
        self._lock = threading.RLock()
        self._opened: tuple[int, ObjectFile, h5py.File] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectH5File, (self.store, self.info)

    @property
    def path(self) -> str:
        """The location, for messages."""
        return self.store.where

    @contextlib.contextmanager
    def use(self) -> Iterator[tuple[ObjectFile, h5py.h5f.FileID]]:
        """Pass the object and the ``FileID`` of the file to a block, which no other thread uses meanwhile."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                content = ObjectFile(self.store, self.info)
                content.keep(0, self._head)
                content.fetch([(0, _BEGINNING)])
                with convert_errors(self.path):
                    self._opened = os.getpid(), content, h5py.File(content, "r")
            yield self._opened[1], self._opened[2].id

    def make_source(self, name: str, array: Array, place: Place) -> Source:
        """Return a source for the leaf of a place, which has one dataset."""
        with self.use() as (content, file):
            dataset, found = find_array(file, name, self.path, array)
            begin = locate(dataset, found, content.info.size) if found == array else None
        if begin is None:
            return ObjectDataset(self, name, array, place)
        return RangeSource(self.reader, array.dtype, array.shape, begin, place)

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store its options again."""
        self.reader.reopen(storage_options)


def open_object(place: ObjectLocation) -> ObjectH5File:
    """Return the HDF5 file at a location; FileNotFoundError if there is none."""
    if place.first is None:
        raise FileNotFoundError(f"cannot load: there is no object at {place.where}")
    return ObjectH5File(place.store, *place.first)


@set_module("td_hdf5.h5_pickles")
class ObjectDataset:
    """Source of a leaf in a dataset that is not contiguous."""

    def __init__(self, file: ObjectH5File, name: str, array: Array, place: Place) -> None:
        self.file, self.name, self.array, self.place = file, name, array, place
        twin = restore(place, lambda name: torch.empty(array.shape, dtype=array.dtype, device="meta"))
        self.shape, self.dtype = twin.shape, twin.dtype

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectDataset, (self.file, self.name, self.array, self.place)

    def __repr__(self) -> str:
        return f"{self.file.path}, dataset {self.name!r}"

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Shape of the chunks in the dims of the leaf, or None for a dataset without."""
        with self.file.use() as (_, file):
            found = _get_chunk(find_array(file, self.name, self.file.path, self.array)[0])
        return None if found is None else found[: len(self.shape)]

    def read(self, index: SourceIndex) -> Tensor:
        """Return a part of the leaf."""
        return self.read_many([(self, index)])[0]

    def read_many(self, requests: Sequence[tuple[ObjectDataset, SourceIndex]]) -> list[Tensor]:
        """Return parts of several leaves; the chunks of those in one file are read together."""
        files = {id(source.file): source.file for source, _ in requests}
        results: dict[int, Tensor] = {}
        for file in files.values():
            mine = [i for i, (source, _) in enumerate(requests) if source.file is file]
            with file.use() as (content, opened):
                found = [(i, *requests[i][0]._find(opened, requests[i][1])) for i in mine]
                content.fetch([part for _, dataset, index in found for part in _list_ranges(dataset, index)])
                for i, dataset, index in found:
                    results[i] = requests[i][0]._read(dataset, index)
        return [results[i] for i in range(len(requests))]

    def _find(self, file: h5py.h5f.FileID, index: SourceIndex) -> tuple[h5py.h5d.DatasetID, SourceIndex]:
        """Return the dataset, and the index in its dims: some dtypes are stored as pairs, or in a stack."""
        dataset, _ = find_array(file, self.name, self.file.path, self.array)
        return dataset, (*index, *(slice(0, n, 1) for n in self.array.shape[len(index) :]))

    def _read(self, dataset: h5py.h5d.DatasetID, index: SourceIndex) -> Tensor:
        with convert_errors(repr(self)):
            part = read_dataset(dataset, index, self.array.dtype)
        return restore(self.place, lambda name: part.view(self.array.dtype))

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Raise LockedError."""
        raise LockedError("cannot write to a file in an object store; clone() the leaf first")

    def flush(self) -> None:
        """Do nothing."""

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store its options again."""
        self.file.reopen(storage_options)


def _get_chunk(dataset: h5py.h5d.DatasetID) -> tuple[int, ...] | None:
    creation = dataset.get_create_plist()
    return creation.get_chunk() if creation.get_layout() == h5py.h5d.CHUNKED else None


def _list_ranges(dataset: h5py.h5d.DatasetID, index: SourceIndex) -> Iterator[Bytes]:
    """Yield the bytes of the file that HDF5 needs for a part of a dataset."""
    chunk = _get_chunk(dataset)
    if chunk is None:
        if (begin := dataset.get_offset()) is not None:
            yield begin, begin + dataset.get_storage_size()
        return
    if not math.prod(chunk) or not dataset.get_num_chunks():
        return
    starts: list[list[int]] = []
    for item, size in zip(index, chunk, strict=True):
        rows = torch.arange(item.start, item.stop, item.step) if isinstance(item, slice) else item
        starts.append((rows // size * size).unique().tolist())
    for coordinate in itertools.product(*starts):
        info = dataset.get_chunk_info_by_coord(coordinate)
        if info.byte_offset is not None:
            yield info.byte_offset, info.byte_offset + info.size


def upload_file(place: ObjectLocation, fill: Callable[[h5py.h5f.FileID], None], nbytes: int) -> None:
    """Write an HDF5 file of about ``nbytes`` to a location: to a temporary file first, with its metadata at the beginning."""
    access = make_access()
    access.set_meta_block_size(max(min(nbytes // _SHARE, _BEGINNING // 2), _LEAST))
    with tempfile.NamedTemporaryFile(delete=False) as file:
        try:
            opened = create_file(file.name, access)
        finally:
            os.unlink(file.name)  # HDF5 opens no file without a name, and needs none afterwards
        try:
            fill(opened)
            h5py.h5f.flush(opened)
        except BaseException as error:
            raise find_full_disk(error, place.where) or error from error
        finally:
            close_file(opened)
        upload(place.store, file)
