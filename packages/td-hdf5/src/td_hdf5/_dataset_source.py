"""The source of stored tensors: one dataset of an HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import h5py
import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import set_module
from td_core.typing import SourceIndex
from td_store.arrays import KeptSource, as_storable, get_stored, view_mapped

from ._datasets import (
    NATIVE,
    Array,
    can_hold,
    find_array,
    locate,
    read_part,
    read_positions,
    write_part,
)
from ._h5_files import StoreFile, convert_errors

#: HDF5 takes quadratic time for a selection of many positions.
_POSITIONS = 512


@set_module("td_hdf5")
class DatasetSource:
    """A leaf in a dataset. Contiguous datasets are mapped, each process opens the file itself.

    A pickle has the path of the file and the name of the dataset.

    Args:
        path: the file.
        identity: device, inode and time of birth of the file; None for the file that is now at the path.
        name: name of the dataset.
        shape: shape of the leaf.
        dtype: dtype of the leaf. HDF5 lacks some, whose elements are stored as integers or as pairs.

    >>> from td_hdf5 import save
    >>> _ = save(TensorDict({"a": torch.arange(6).view(3, 2)}), "data.h5")
    >>> DatasetSource("data.h5", None, "a", [3, 2], torch.int64).read((slice(1, 2, 1), slice(0, 2, 1)))
    tensor([[2, 3]])
    """

    def __init__(
        self,
        path: str | StoreFile,
        identity: Sequence[int | None] | None,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.file = path if isinstance(path, StoreFile) else StoreFile.at(path, identity)
        self.name, self.shape, self.dtype = name, torch.Size(shape), dtype
        self._stored = Array(*get_stored(dtype, tuple(shape), NATIVE))
        self._mapped: dict[bool, Tensor] = {}
        self._leaf: Tensor | None = None
        self._leaf_structure = -1
        self._offset: int | None = None
        self._structure = -1
        #: The open file, the number of its structure, and the dataset, which keeps its chunks in a cache.
        self._found: tuple[Any, int, Any] | None = None
        #: The elements, after the dataset was removed.
        self._kept: Tensor | None = None

    def __repr__(self) -> str:
        return f"{self.file.path}, dataset {self.name!r}"

    def __reduce__(self) -> tuple[object, ...]:
        if self._kept is not None:
            return KeptSource, (self._kept,)
        return DatasetSource, (self.file.path, self.file.identity, self.name, tuple(self.shape), self.dtype)

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Shape of the chunks in the dims of the leaf, or None for a dataset without."""
        with self.file.use() as file, convert_errors(repr(self)):
            found = _get_chunk(self._find(file))
        return None if found is None else found[: len(self.shape)]

    @property
    def is_kept(self) -> bool:
        """Whether the dataset was removed, so that the elements are in memory."""
        return self._kept is not None

    def keep(self, dataset: h5py.h5d.DatasetID) -> None:
        """Read all elements, of a dataset whose link was removed: reads and writes stay in memory from now on."""
        whole = self._extend(tuple(slice(0, n, 1) for n in self.shape))
        with convert_errors(repr(self)):  # another collection can have replaced it by a smaller one
            self._kept = self._restore(read_dataset(dataset, whole, self._stored.dtype))

    def read(self, index: SourceIndex) -> Tensor:
        """Return a copy of a part of the leaf."""
        if self._kept is not None:
            return self._kept[index].clone()
        full = self._extend(index)
        if self._offset is not None:
            self.file.notice()
        mapped = self._map(shared=False)
        if mapped is not None:
            part = mapped[full]
            return self._restore(
                part.clone(memory_format=torch.contiguous_format) if _find_vector(full) is None else part
            )
        with self.file.use() as file, convert_errors(repr(self)):
            return self._restore(read_dataset(self._find(file), full, self._stored.dtype))

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write a part of the leaf into the file."""
        if self._kept is not None:
            self._kept[index] = value
            return
        full, value = self._extend(index), as_signed(as_storable(value, NATIVE))
        if self._map(shared=True) is not None:
            # Another process cannot move the dataset while the file is locked.
            with self.file.use(maps=True):
                mapped = self._map(shared=True)
                if mapped is not None:
                    mapped[full] = value
                    return
        with self.file.use(write=True) as file:
            _write_dataset(self._find(file), full, value, self._stored.dtype)

    def hold(self) -> AbstractContextManager[object]:
        """Lock the file during a block that reads elements and writes them."""
        if self._kept is not None:
            return nullcontext()
        is_mapped = self._map(shared=True) is not None
        return self.file.use(write=not is_mapped, maps=is_mapped)

    def map(self) -> Tensor | None:
        """Return the leaf as memory that is mapped from the file, or None if its dataset has chunks."""
        if self._kept is not None:
            return self._kept
        if self._offset is not None:
            self.file.notice()
        if self._leaf_structure != self.file.structure:
            self._leaf = None
            mapped = self._map(shared=os.access(self.file.path, os.W_OK))
            if mapped is not None:
                self._leaf = self._restore(mapped)
            self._leaf_structure = self.file.structure
        return self._leaf

    def flush(self) -> None:
        """Return when what was written has reached the disk."""
        self.file.sync()

    def _map(self, *, shared: bool) -> Tensor | None:
        """Return the dataset, mapped, as :func:`as_signed`; None if it is not contiguous."""
        if self._structure != self.file.structure:
            with self.file.use() as file, convert_errors(repr(self)):
                dataset = self._find(file)
                self._offset = locate(dataset, self._stored, file.get_filesize())
                if self._offset is not None and self._offset % self.dtype.itemsize:
                    self._offset = None
                self._mapped.clear()
                self._structure = self.file.structure
        if self._offset is None:
            return None
        if shared not in self._mapped:
            storage = self.file.map(self._offset + self._stored.nbytes, shared=shared)
            self._mapped[shared] = as_signed(
                view_mapped(storage, self._stored.dtype, self._stored.shape, self._offset)
            )
        return self._mapped[shared]

    def _find(self, file: object) -> h5py.h5d.DatasetID:
        """Return the ``DatasetID``. Raise FormatError if it is missing, or has another shape or dtype."""
        if self._found is not None and self._found[0] is file and self._found[1] == self.file.structure:
            return self._found[2]
        dataset, found = find_array(file, self.name, self.file.path, self._stored)
        if found != self._stored and not can_hold(found, self._stored):
            raise FormatError(
                f"{self!r} has the dtype {found.dtype} and the shape {list(found.shape)}; expected {self._stored.dtype} "
                f"and {list(self._stored.shape)}: open the file again"
            )
        self._found = file, self.file.structure, dataset
        return dataset

    def _extend(self, index: SourceIndex) -> SourceIndex:
        """Add the dims that the dataset has for pairs."""
        if len(index) == len(self._stored.shape):
            return tuple(index)
        return (*index, *(slice(0, n, 1) for n in self._stored.shape[len(self.shape) :]))

    def _restore(self, part: Tensor) -> Tensor:
        """Return the leaf's elements of a part in the dtype of :func:`as_signed`."""
        if part.dtype == self.dtype:
            return part
        stored = part.view(self._stored.dtype)
        if stored.dtype == self.dtype:
            return stored
        return torch.view_as_complex(stored) if stored.ndim > len(self.shape) else stored.view(self.dtype)


def as_signed(tensor: Tensor) -> Tensor:
    """Return a view as signed integers of a tensor of unsigned ones, on which torch has more operations."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def read_dataset(dataset: h5py.h5d.DatasetID, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """Return a part of a dataset of a dtype, as :func:`as_signed`."""
    dim = _find_vector(index)
    if dim is None:
        return as_signed(read_part(dataset, index, dtype))
    positions = index[dim]
    found = []
    for rows in positions.split(_POSITIONS):
        first, last = int(rows[0]), int(rows[-1])
        part = (*index[:dim], slice(first, last + 1, 1), *index[dim + 1 :])
        if last - first < 2 * len(rows):
            found.append(as_signed(read_part(dataset, part, dtype)).index_select(dim, rows - first))
        else:
            found.append(as_signed(read_positions(dataset, part, dim, rows, dtype)))
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def _write_dataset(
    dataset: h5py.h5d.DatasetID, index: tuple[Any, ...], value: Tensor, dtype: torch.dtype
) -> None:
    dim = _find_vector(index)
    if dim is None:
        write_part(dataset, value.view(dtype), index)
        return
    for part, rows, place in _list_parts(index, dim, _get_chunk(dataset)):
        piece = value.narrow(dim, *place)
        if rows is not None:  # the rows between keep their elements
            slab = as_signed(read_part(dataset, part, dtype))
            piece = slab.index_copy_(dim, rows, piece)
        write_part(dataset, piece.contiguous().view(dtype), part)


def _find_vector(index: tuple[object, ...]) -> int | None:
    """Return the dim that is indexed with positions, or None."""
    for dim, item in enumerate(index):
        if not isinstance(item, slice):
            return dim
    return None


def _get_chunk(dataset: h5py.h5d.DatasetID) -> tuple[int, ...] | None:
    """Return the shape of the chunks of a dataset, or None."""
    creation = dataset.get_create_plist()
    return creation.get_chunk() if creation.get_layout() == h5py.h5d.CHUNKED else None


def _list_parts(
    index: tuple[Any, ...], dim: int, chunk: tuple[int, ...] | None
) -> Iterator[tuple[tuple[slice, ...], Tensor | None, tuple[int, int]]]:
    """Split an index with positions in a dim into parts of slices, so that each chunk is read once.

    Yield the part, the positions in it (None for all), and start and number of its rows in the result.
    """
    positions: Tensor = index[dim]
    ends = positions.diff() > 1
    if chunk is not None:
        ends &= (positions // chunk[dim]).diff() > 0
    start = 0
    for end in (*(ends.nonzero().flatten() + 1).tolist(), len(positions)):
        rows = positions[start:end]
        first, last = int(rows[0]), int(rows[-1])
        part = (*index[:dim], slice(first, last + 1, 1), *index[dim + 1 :])
        yield part, None if last - first + 1 == len(rows) else rows - first, (start, end - start)
        start = end
