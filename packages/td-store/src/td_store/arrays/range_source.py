"""Sources that read ranges of bytes, where mapping a file is slow or impossible: only the rows that are used are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from td_core import LockedError
from td_core.typing import ObjectInfo, ObjectStore, SourceIndex

from .._stored_tensor import StoredTensor
from .byte_ranges import Bytes, read_objects
from .places import Place, restore

#: The gap of a store that has no such attribute.
_GAP = 1 << 16


class RangeReader(Protocol):
    """Reads ranges of a file or object.

    Attributes:
        gap: ranges with at most this many bytes between them are read as one.
        batch: readers that have an equal one read together.
    """

    gap: int
    batch: object

    def read_together(self, requests: Sequence[tuple[object, Sequence[Bytes]]]) -> list[list[Tensor]]:
        """Return the bytes of ranges of several readers of this batch, as new tensors."""


class ObjectReader:
    """Reads ranges of an object in a store, which must still have the stamp that it had when it was opened.

    >>> from td_store.testing import MemoryStore
    >>> store = MemoryStore({"a": b"0123456789"})
    >>> reader = ObjectReader(store, store.stat(["a"])[0])
    >>> reader.read_together([(reader, [(1, 3), (9, 10)])])
    [[tensor([49, 50], dtype=torch.uint8), tensor([57], dtype=torch.uint8)]]
    """

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self.store, self.info = store, info

    @property
    def gap(self) -> int:
        """The bytes between two ranges that cost less than a request."""
        gap: int = getattr(self.store, "gap", _GAP)
        return gap

    @property
    def batch(self) -> object:
        """The store: its objects are read with one call."""
        return id(self.store)

    def read_together(self, requests: Sequence[tuple[ObjectReader, Sequence[Bytes]]]) -> list[list[Tensor]]:
        """Return the bytes of ranges of several objects of the store."""
        named = [(reader.info.name, reader.info.stamp, ranges) for reader, ranges in requests]
        return [
            [
                torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
                for part in parts
            ]
            for parts in read_objects(self.store, named)
        ]

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store its options again, if it has any."""
        reopen: Any = getattr(self.store, "reopen", None)
        if reopen is not None:
            reopen(storage_options)


class Run(NamedTuple):
    """Rows of an array that are read as one range: the first one, the end, and those of them that are wanted."""

    first: int
    end: int
    wanted: Any


class RangeSource:
    """A contiguous array in a file or object, of which whole rows of the first dim are read as ranges of bytes.

    Args:
        reader: reads ranges.
        dtype: the dtype of the elements as they are stored.
        shape: the shape of the array as it is stored.
        begin: the position of its first byte.
        place: how the leaf is made from the array; see :func:`restore`.

    >>> from td_store.testing import MemoryStore
    >>> store = MemoryStore({"a": bytes(range(12))})
    >>> reader = ObjectReader(store, store.stat(["a"])[0])
    >>> source = RangeSource(reader, torch.uint8, (5, 2), 2, "a")
    >>> source.read((slice(1, 3, 1), slice(0, 2, 1)))
    tensor([[4, 5],
            [6, 7]], dtype=torch.uint8)
    """

    def __init__(
        self, reader: Any, dtype: torch.dtype, shape: Sequence[int], begin: int, place: Place
    ) -> None:
        self.reader, self.stored, self.begin, self.place = reader, (dtype, tuple(shape)), begin, place
        twin = restore(place, lambda name: torch.empty(tuple(shape), dtype=dtype, device="meta"))
        self.shape, self.dtype = twin.shape, twin.dtype

    def read(self, index: SourceIndex) -> Tensor:
        """Return a part of the array."""
        return self.read_many([(self, index)])[0]

    def read_many(self, requests: Sequence[tuple[RangeSource, SourceIndex]]) -> list[Tensor]:
        """Return parts of several arrays, with one call for all files or objects of one store."""
        runs = [source._list_runs(index) for source, index in requests]
        todo: dict[object, dict[int, tuple[Any, list[Bytes]]]] = {}
        for (source, _), items in zip(requests, runs, strict=True):
            reader = source.reader
            ranges = todo.setdefault(reader.batch, {}).setdefault(id(reader), (reader, []))[1]
            ranges += [source._locate(run) for run in items]
        found: dict[int, Iterator[Tensor]] = {}
        for batch in todo.values():
            first, _ = next(iter(batch.values()))
            parts = first.read_together(list(batch.values()))
            found.update(zip(batch, map(iter, parts), strict=True))
        return [
            source._assemble(index, items, [next(found[id(source.reader)]) for _ in items])
            for (source, index), items in zip(requests, runs, strict=True)
        ]

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Raise LockedError."""
        raise LockedError("cannot write to a file that is read as ranges of bytes; clone() the leaf first")

    def flush(self) -> None:
        """Do nothing."""

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store of the array its options again."""
        self.reader.reopen(storage_options)

    @property
    def _row(self) -> int:
        """Size of one row in bytes."""
        dtype, shape = self.stored
        return math.prod(shape[1:] if self.shape else shape) * dtype.itemsize

    def _locate(self, run: Run) -> Bytes:
        return self.begin + run.first * self._row, self.begin + run.end * self._row

    def _list_runs(self, index: SourceIndex) -> list[Run]:
        """Return the rows to read, in runs without long gaps."""
        rows: Any = index[0] if index else slice(0, 1, 1)
        row, gap = self._row, self.reader.gap
        if isinstance(rows, slice):
            if (rows.step - 1) * row <= gap:
                return [Run(rows.start, rows.stop, slice(None, None, rows.step))]
            rows = torch.arange(rows.start, rows.stop, rows.step)
        breaks = ((rows[1:] - rows[:-1] - 1) * row > gap).nonzero().flatten() + 1
        parts = rows.tensor_split(breaks)
        return [Run(int(part[0]), int(part[-1]) + 1, part - part[0]) for part in parts]

    def _assemble(self, index: SourceIndex, runs: list[Run], found: list[Tensor]) -> Tensor:
        """Return the part of the array at an index, from the bytes of its rows."""
        parts = [
            data.view(run.end - run.first, self._row)[run.wanted]
            for run, data in zip(runs, found, strict=True)
        ]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        dtype, stored = self.stored
        shape = (len(rows), *stored[1:]) if self.shape else stored
        raw = rows.contiguous().view(-1).view(dtype).view(shape)
        leaf = restore(self.place, lambda name: raw)
        inner = (slice(None), *index[1:])
        return leaf[inner].contiguous() if index else leaf


def open_place(place: Place, open_array: Callable[[str, Place], Any], mode: str = "r") -> Tensor:
    """Return the leaf of a place without reading it; a nested tensor is read."""
    if isinstance(place, dict) and "tensor" in place:
        stored = {name: value for name, value in place.items() if name != "expand"}
        leaf = StoredTensor(open_array(place["tensor"], stored), mode=mode)
        return leaf.expand(place["expand"]) if "expand" in place else leaf

    def read(name: str) -> Tensor:
        leaf = StoredTensor(open_array(name, name), mode=mode)
        return leaf.clone() if isinstance(place, dict) else leaf

    return restore(place, read)
