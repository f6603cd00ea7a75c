"""Sources that read ranges of bytes, where mapping a file is slow or impossible: only the rows that are used are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from td_core import LockedError
from td_core.spi import run_parallel
from td_core.typing import SourceIndex
from td_store import StoredTensor
from td_store.arrays import Place, read_into, restore

from ._format import DTYPES, Array


class RangeReader(Protocol):
    """Reads ranges of a file.

    Attributes:
        gap: ranges with at most this many bytes between them are read as one.
    """

    gap: int

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the bytes of each range, as new tensors."""


class LocalReader:
    """Reads ranges of an open file, without mapping it."""

    gap = 1 << 14

    def __init__(self, fd: int, num_threads: int) -> None:
        self.fd, self.num_threads = fd, num_threads

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the bytes of each range."""
        results = [torch.empty(end - begin, dtype=torch.uint8, device="cpu") for begin, end in ranges]

        def read(i: int) -> Callable[[], None]:
            return lambda: read_into(self.fd, results[i], ranges[i][0], lambda count: None)

        run_parallel([read(i) for i in range(len(ranges))], self.num_threads)
        return results


class Run(NamedTuple):
    """Rows of an array that are read as one range: the first one, the end, and those of them that are wanted."""

    first: int
    end: int
    wanted: Any


class RangeSource:
    """An array of a file of which whole rows of the first dim are read as ranges of bytes."""

    def __init__(self, reader: RangeReader, array: Array, start: int, place: Place) -> None:
        self.reader, self.array, self.start, self.place = reader, array, start, place
        twin = restore(place, lambda name: torch.empty(array.shape, dtype=DTYPES[array.dtype], device="meta"))
        self.shape, self.dtype = twin.shape, twin.dtype

    def read(self, index: SourceIndex) -> Tensor:
        """Return a part of the array."""
        return self.read_many([(self, index)])[0]

    def read_many(self, requests: Sequence[tuple[RangeSource, SourceIndex]]) -> list[Tensor]:
        """Return parts of several arrays, with one call of each reader."""
        runs = [source._list_runs(index) for source, index in requests]
        todo: dict[int, tuple[RangeReader, list[tuple[int, int]]]] = {}
        for (source, _), items in zip(requests, runs, strict=True):
            ranges = todo.setdefault(id(source.reader), (source.reader, []))[1]
            ranges += [source._locate(run) for run in items]
        found = {key: iter(reader.read_ranges(ranges)) for key, (reader, ranges) in todo.items()}
        return [
            source._assemble(index, items, [next(found[id(source.reader)]) for _ in items])
            for (source, index), items in zip(requests, runs, strict=True)
        ]

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Raise LockedError."""
        raise LockedError("cannot write to a file that is read as ranges of bytes; clone() the leaf first")

    def flush(self) -> None:
        """Do nothing."""

    @property
    def _row(self) -> int:
        """Size of one row in bytes."""
        return self.array.nbytes // self.shape[0] if self.shape else self.array.nbytes

    def _locate(self, run: Run) -> tuple[int, int]:
        begin = self.start + self.array.begin
        return begin + run.first * self._row, begin + run.end * self._row

    def _list_runs(self, index: SourceIndex) -> list[Run]:
        """Return the rows to read, in runs without long gaps."""
        rows = index[0] if index else slice(0, 1, 1)
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
        shape = (len(rows), *self.array.shape[1:]) if self.shape else self.array.shape
        raw = rows.contiguous().view(-1).view(DTYPES[self.array.dtype]).view(shape)
        leaf = restore(self.place, lambda name: raw)
        inner = (slice(None), *index[1:])
        return leaf[inner].contiguous() if index else leaf


def open_place(place: Place, open_array: Callable[[str, Place], RangeSource], mode: str = "r") -> Tensor:
    """Return the leaf of a place without reading it; a nested tensor is read."""
    if isinstance(place, dict) and "tensor" in place:
        stored = {name: value for name, value in place.items() if name != "expand"}
        leaf = StoredTensor(open_array(place["tensor"], stored), mode=mode)
        return leaf.expand(place["expand"]) if "expand" in place else leaf

    def read(name: str) -> Tensor:
        leaf = StoredTensor(open_array(name, name), mode=mode)
        return leaf.clone() if isinstance(place, dict) else leaf

    return restore(place, read)
