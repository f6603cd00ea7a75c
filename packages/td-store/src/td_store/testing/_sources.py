"""Sources for tests and examples: an array in memory, an array in a file, and a source that logs its requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from td_core.spi import set_module
from td_core.typing import Source, SourceIndex

__all__ = ["LoggedSource", "MemorySource", "RawFile"]


@set_module("td_store.testing")
class MemorySource:
    """A source on an array in memory. Pickles contain the array.

    >>> source = MemorySource(torch.arange(3))
    >>> source.write((slice(1, 2, 1),), torch.tensor([7]))
    >>> source.read((slice(0, 3, 1),))
    tensor([0, 7, 2])
    """

    def __init__(self, array: Tensor) -> None:
        self.array = array.clone()
        self.shape, self.dtype = array.shape, array.dtype

    def __repr__(self) -> str:
        return f"MemorySource({tuple(self.shape)})"

    def read(self, index: SourceIndex) -> Tensor:
        """Return a copy of a part of the array."""
        return self.array[index].clone()

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Copy a value into a part of the array."""
        self.array[index] = value

    def flush(self) -> None:
        """Do nothing."""


@set_module("td_store.testing")
class RawFile:
    """A source on the elements of an array in a file, in C order, from byte ``start`` on.

    It opens the file for each request, so threads, forks and pickles need no care.

    >>> source = RawFile.create("array.bin", torch.arange(6).view(3, 2))
    >>> source.read((torch.tensor([0, 2]), slice(1, 2, 1)))
    tensor([[1],
            [5]])
    """

    #: Two threads may write parts of one row, which is written as a whole.
    _writing = threading.Lock()

    def __init__(self, path: str | Path, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> None:
        self.path, self.shape, self.dtype, self.start = str(path), torch.Size(shape), dtype, start

    def __repr__(self) -> str:
        return f"RawFile({self.path!r})"

    @classmethod
    def create(cls, path: str | Path, array: Tensor) -> RawFile:
        """Write an array to a new file, and return its source."""
        Path(path).write_bytes(_as_buffer(array.contiguous()))
        return cls(path, array.shape, array.dtype)

    def read(self, index: SourceIndex) -> Tensor:
        """Read the rows of the index, then take the columns."""
        rows = self._read_rows(index)
        return rows[_get_columns(index)].contiguous()

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write the rows of the index; read them first if the index has only some of their columns."""
        with self._writing:
            rows = self._read_rows(index)
            rows[_get_columns(index)] = value
            with open(self.path, "r+b", buffering=0) as file:
                done = 0
                for first, count in self._list_runs(index):
                    file.seek(self.start + first * self._row_bytes)
                    file.write(_as_buffer(rows[done : done + count] if index else rows))
                    done += count

    def flush(self) -> None:
        """Do nothing: each write is complete when it returns."""

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def _list_runs(self, index: SourceIndex) -> Iterator[tuple[int, int]]:
        """Yield the first row and the number of rows of each part of the file."""
        if not index:
            yield 0, 1
        elif isinstance(index[0], slice) and index[0].step == 1:
            yield index[0].start, index[0].stop - index[0].start
        else:
            rows = (
                range(*index[0].indices(self.shape[0])) if isinstance(index[0], slice) else index[0].tolist()
            )
            yield from ((row, 1) for row in rows)

    def _read_rows(self, index: SourceIndex) -> Tensor:
        runs = list(self._list_runs(index))
        rows = torch.empty((sum(count for _, count in runs), *self.shape[1:]), dtype=self.dtype, device="cpu")
        done = 0
        with open(self.path, "rb", buffering=0) as file:
            for first, count in runs:
                file.seek(self.start + first * self._row_bytes)
                file.readinto(_as_buffer(rows[done : done + count]))
                done += count
        return rows if index else rows.view(())


def _get_columns(index: SourceIndex) -> SourceIndex | EllipsisType:
    return (slice(None), *index[1:]) if index else ...


def _as_buffer(array: Tensor) -> memoryview:
    buffer: Any = array.reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)


@set_module("td_store.testing")
class LoggedSource:
    """A source that passes requests to another source, and appends a row ``(operation, name, index)`` to a list.

    >>> log = []
    >>> source = LoggedSource(MemorySource(torch.arange(3)), "a", log)
    >>> source.read((slice(1, 2, 1),)), log
    (tensor([1]), [('read', 'a', (slice(1, 2, 1),))])
    """

    def __init__(self, source: Source, name: str, log: list[tuple[str, str, SourceIndex]]) -> None:
        self.source, self.name, self.log = source, name, log
        self.shape, self.dtype = source.shape, source.dtype

    def __repr__(self) -> str:
        return repr(self.source)

    def read(self, index: SourceIndex) -> Tensor:
        """Read from the other source."""
        self.log.append(("read", self.name, index))
        return self.source.read(index)

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write to the other source."""
        self.log.append(("write", self.name, index))
        self.source.write(index, value)

    def flush(self) -> None:
        """Flush the other source."""
        self.source.flush()
