"""Leaves of opened tables that are decoded in groups of rows, which are kept in memory up to a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from td_core.errors import LockedError
from td_core.spi import run_parallel, set_module
from td_core.typing import SourceIndex
from td_store.arrays import ObjectFile

from ._nulls import Nulls, Path
from ._read_columns import ColumnReader
from ._table_files import ParquetTable, Table, map_path, open_object, read_arrow
from ._table_locations import Stamp, check_stamp, open_input


class _Opened:
    """A file that this process has opened, and the groups of its columns that were decoded last."""

    def __init__(self, path: str | ObjectFile, stamp: Stamp, name: str) -> None:
        self.path, self.stamp, self.name, self.pid = path, stamp, name, os.getpid()
        self.lock = threading.RLock()
        self.kept: OrderedDict[tuple[Path, int], Tensor] = OrderedDict()
        self.size = 0
        self._table: Table | None = None

    def open(self) -> Table:
        """Return the table, opened once; raise FormatError if the file has changed."""
        if isinstance(self.path, ObjectFile):  # whose ranges have the stamp
            if self._table is None:
                self._table = open_object(self.name, self.path, self.path.store.where)
            return self._table
        check_stamp(self.path, self.stamp)
        if self._table is None:
            if self.name == "arrow":
                self._table = read_arrow(map_path(self.path), self.path)
            else:
                self._context = open_input(self.path)
                self._table = ParquetTable(self._context.__enter__(), self.path)
        return self._table

    def read_ahead(self, sources: Sequence[GroupSource], groups: Sequence[int]) -> None:
        """Read the groups of columns in an object store that are not kept, with one call."""
        with self.lock:
            table = self.open()
            paths = [source.column for source in sources]
            new = [group for group in groups if any((path, group) not in self.kept for path in paths)]
            table.fetch(paths, new)

    def decode(self, sources: Sequence[GroupSource], group: int) -> list[Tensor]:
        """Return a group of columns; those that are not kept are decoded together."""
        with self.lock:
            table = self.open()
            fields = {source.column: source.field for source in sources}
            found = {path: self.kept[path, group] for path in fields if (path, group) in self.kept}
            for path, array in table.read([path for path in fields if path not in found], [group]):
                leaf = ColumnReader(Nulls.of("auto")).read(array, fields[path], path)
                assert isinstance(leaf, Tensor)
                found[path] = self.kept[path, group] = leaf
                self.size += leaf.nbytes
            for path in found:
                self.kept.move_to_end((path, group))
            limit = max(source.cache_bytes for source in sources)
            while self.size > limit and len(self.kept) > len(found):
                _, leaf = self.kept.popitem(last=False)
                self.size -= leaf.nbytes
            return [found[source.column] for source in sources]


#: The files that this process has opened, and their lock.
_FILES: OrderedDict[tuple[str | ObjectFile, Stamp], _Opened] = OrderedDict()
_LOCK = threading.Lock()
#: So many files in object stores are read at the same time.
_TOGETHER = 16
#: At most this many files are kept open.
_MOST_FILES = 64


def _get_opened(path: str | ObjectFile, stamp: Stamp, name: str) -> _Opened:
    with _LOCK:
        opened = _FILES.get((path, stamp))
        if opened is None or opened.pid != os.getpid():  # a descriptor must not be shared with the parent
            opened = _FILES[path, stamp] = _Opened(path, stamp, name)
        _FILES.move_to_end((path, stamp))
        while len(_FILES) > _MOST_FILES:
            _FILES.popitem(last=False)
        return opened


def show_file(file: str | ObjectFile) -> str:
    """Return the location of a file, for messages."""
    return file if isinstance(file, str) else file.store.where


class GroupedFile(NamedTuple):
    """A file, what distinguishes it from a later one, and the rows of its groups."""

    path: str | ObjectFile
    stamp: Stamp
    groups: tuple[int, ...]


@set_module("td_arrow.arrow_pickles")
@dataclass(eq=False, repr=False)
class GroupSource:
    """A column of files as an array, of which whole groups of rows are decoded.

    Args:
        name: ``"parquet"`` or ``"arrow"``.
        files: path, stamp and rows of the groups of each file.
        column: the column path.
        field: its field.
        shape: shape of the array.
        dtype: dtype of the array.
        cache_bytes: how many bytes of decoded groups of a file each process keeps.
    """

    name: str
    files: tuple[GroupedFile, ...]
    column: Path
    field: pa.Field
    shape: torch.Size
    dtype: torch.dtype
    cache_bytes: int

    def __post_init__(self) -> None:
        self.files = tuple(GroupedFile(*file) for file in self.files)
        self.shape = torch.Size(self.shape)
        #: Parts of a group are read together.
        self.chunks = (tuple(rows for file in self.files for rows in file.groups), *self.shape[1:])

    def __reduce__(self) -> Any:
        files = tuple(map(tuple, self.files))
        return type(self), (
            self.name, files, self.column, self.field, self.shape, self.dtype, self.cache_bytes,
        )  # fmt: skip

    def read(self, index: SourceIndex) -> Tensor:
        """Return a part of the array."""
        return self.read_many([(self, index)])[0]

    def read_many(self, requests: Sequence[tuple[GroupSource, SourceIndex]]) -> list[Tensor]:
        """Return parts of several arrays; groups of columns of one file are decoded together."""
        results: dict[int, Tensor] = {}
        together: dict[Any, list[int]] = {}
        for number, (source, index) in enumerate(requests):
            key = (source.name, source.files, tuple(_list_rows(index).tolist()))
            together.setdefault(key, []).append(number)
        for numbers in together.values():
            results.update(zip(numbers, _read_rows([requests[i] for i in numbers]), strict=True))
        return [results[number] for number in range(len(requests))]

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Raise LockedError."""
        kind = "a Parquet file" if self.name == "parquet" else "a column that is not mapped"
        raise LockedError(
            f"cannot write to {show_file(self.files[0].path)}: {kind} cannot be changed in place: clone() the collection, or "
            "save it again"
        )

    def flush(self) -> None:
        """Do nothing."""


@set_module("td_arrow.arrow_pickles")
class ObjectGroupSource(GroupSource):
    """A column of files in an object store."""

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the stores of the files their options again."""
        for file in self.files:
            reopen: Any = getattr(getattr(file.path, "store", None), "reopen", None)
            if reopen is not None:
                reopen(storage_options)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _list_rows(index: SourceIndex) -> Tensor:
    rows: Any = index[0]
    return torch.arange(rows.start, rows.stop, rows.step) if isinstance(rows, slice) else rows


def _read_rows(requests: Sequence[tuple[GroupSource, SourceIndex]]) -> list[Tensor]:
    """Return the same rows of columns of the same files."""
    sources = [source for source, _ in requests]
    first, rows = sources[0], _list_rows(requests[0][1])
    edges = torch.tensor([0, *first.chunks[0]]).cumsum(0)
    owners = torch.searchsorted(edges, rows, right=True) - 1
    groups = [(file, number) for file in first.files for number in range(len(file.groups))]
    results = [
        torch.empty(len(rows), *source.shape[1:], dtype=source.dtype, device="cpu") for source in sources
    ]
    wanted = owners.unique().tolist()
    ahead: dict[GroupedFile, list[int]] = {}
    for file, number in map(groups.__getitem__, wanted):
        ahead.setdefault(file, []).append(number)
    opened = {file: _get_opened(file.path, file.stamp, first.name) for file in ahead}
    reads = [partial(opened[file].read_ahead, sources, numbers) for file, numbers in ahead.items()]
    run_parallel(reads, _TOGETHER if isinstance(first.files[0].path, ObjectFile) else 0)
    for group in wanted:
        places = (owners == group).nonzero().flatten()
        part = rows[places] - edges[group]
        file, number = groups[group]
        leaves = opened[file].decode(sources, number)
        for result, leaf in zip(results, leaves, strict=True):
            # torch has no index_put for unsigned integers, and before torch 2.5 no index.
            signed = _SIGNED.get(result.dtype, result.dtype)
            result.view(signed)[places] = leaf.view(signed)[part]
    cells = [(slice(None), *index[1:]) for _, index in requests]
    return [result[index].contiguous() for result, index in zip(results, cells, strict=True)]
