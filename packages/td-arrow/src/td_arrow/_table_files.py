"""Tables as a sequence of groups of rows: Parquet files, files and streams of Arrow, directories of them, and memory.

A file is opened once, so that a save that replaces it meanwhile cannot mix its rows with those of another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch

from td_core.errors import FormatError
from td_core.spi import open_regular, run_parallel
from td_core.typing import ObjectLocation
from td_store.arrays import ObjectFile, map_file

from ._arrow_footers import Batch, Bytes, place_columns, read_batches
from ._from_arrow import Columns, get_columns
from ._nulls import Path, show_column
from ._object_tables import find_parts
from ._parquet_footers import Chunk, read_chunks
from ._table_columns import list_fields
from ._table_header import KEY
from ._table_locations import (
    StorageOptions,
    is_directory,
    is_local,
    is_url,
    list_parts,
    open_input,
    show_place,
)
from ._table_options import check_count

#: Columns are decoded together up to this many bytes.
_TOGETHER = 1 << 26
#: Files in an object store that are opened at the same time.
_FILES_TOGETHER = 16
#: The end of a file of Arrow; a stream has none.
_ARROW = b"ARROW1"


@contextlib.contextmanager
def report_errors(where: str) -> Iterator[None]:
    """Raise FormatError with the location for errors of pyarrow in a block."""
    try:
        yield
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, pa.ArrowMemoryError) or getattr(error, "errno", None) is not None:
            raise
        raise FormatError(f"{where}: the file is damaged, or is no table: {error}") from error


class Table:
    """A table whose rows are read in groups.

    Attributes:
        where: its location, for messages.
        schema: its schema in Arrow.
        groups: the number of rows of each group.
        mapped: the memory of a mapped file.
    """

    where: str
    schema: pa.Schema
    groups: list[int]
    mapped: torch.UntypedStorage | None = None

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Columns:
        """Yield the array of each column path, of some groups or all."""
        raise NotImplementedError

    def find_groups(self, condition: pc.Expression) -> list[int]:
        """Return the groups that can have rows that meet a condition."""
        return list(range(len(self.groups)))

    def list_tables(self) -> Sequence[Table]:
        """Return the table of each file."""
        return [self]

    def fetch(self, paths: Iterable[Path], groups: Sequence[int]) -> None:
        """Read the bytes of columns in some groups ahead, if the table is in an object store."""


class ParquetTable(Table):
    """A Parquet file, whose groups are row groups."""

    def __init__(self, source: pa.NativeFile, where: str, threads: bool = True, **options: Any) -> None:
        self.where, self._source, self._threads = where, source, threads
        self._is_encrypted = options.get("decryption_properties") is not None
        with report_errors(where):
            self.file = pq.ParquetFile(source, **options)
            self.schema = self.file.schema_arrow
        metadata = self.file.metadata
        self.groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._leaves = _number_leaves(self.schema)

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Columns:
        """Yield the array of each column path, a few columns at a time."""
        groups = range(len(self.groups)) if groups is None else groups
        for part in self._split(list(paths), groups):
            leaves = [leaf for path in part for leaf in self._leaves[path]]
            with report_errors(self.where):
                # By number: a name with points is ambiguous.
                table = self.file.reader.read_row_groups(
                    list(groups), column_indices=leaves, use_threads=self._threads
                )
            yield from get_columns(table, part)

    def _split(self, paths: list[Path], groups: Sequence[int]) -> Iterator[list[Path]]:
        """Yield columns that are about ``_TOGETHER`` bytes, if all are of one size: pyarrow ends the process at damaged sizes."""
        metadata = self.file.metadata
        size = sum(max(metadata.row_group(group).total_byte_size, 0) for group in groups)
        step = max(1, metadata.num_columns * _TOGETHER // max(size, 1))
        for start in range(0, len(paths), step):
            yield paths[start : start + step]

    @cached_property
    def _chunks(self) -> list[list[Chunk]]:
        """The parts of all columns for each row group."""
        return read_chunks(self._source, self.where)

    def list_chunks(self, path: Path) -> list[Chunk]:
        """Return the parts of a column; raise FormatError if the footer is damaged."""
        return [group[leaf] for group in self._chunks for leaf in self._leaves[path]]

    def find_groups(self, condition: pc.Expression) -> list[int]:
        """Return the row groups that can have rows that meet a condition, by their statistics."""
        if not self._is_encrypted:
            _ = self._chunks  # pyarrow does not check what it compares
        fragment = ds.ParquetFileFormat().make_fragment(self._source)
        return [group.id for group in fragment.subset(condition, schema=self.schema).row_groups]


def _number_leaves(schema: pa.Schema) -> dict[Path, list[int]]:
    """Return the numbers of the leaf columns of each column path."""
    result: dict[Path, list[int]] = {}

    def visit(path: Path, item: pa.Field, first: int) -> int:
        end = first
        if pa.types.is_struct(item.type):
            for part in item.type:
                end = visit((*path, part.name), part, end)
        else:
            end += _count_leaves(item.type)
        result[path] = list(range(first, end))
        return end

    count = 0
    for item in schema:
        count = visit((item.name,), item, count)
    return result


def _count_leaves(kind: pa.DataType) -> int:
    """Return the number of Parquet columns of a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count_leaves(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _count_leaves(kind.value_type)
    if pa.types.is_map(kind):
        return _count_leaves(kind.key_type) + _count_leaves(kind.item_type)
    if pa.types.is_nested(kind):
        return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields))
    return 1


class ArrowTable(Table):
    """Record batches of Arrow, which are the groups, in memory or in a mapped file, whose pages are read when they are used."""

    def __init__(
        self,
        batches: list[pa.RecordBatch],
        schema: pa.Schema,
        where: str,
        mapped: torch.UntypedStorage | None = None,
    ) -> None:
        self.where, self.schema, self.mapped, self._batches = where, schema, mapped, batches
        self.groups = [batch.num_rows for batch in batches]
        self._whole = pa.Table.from_batches(batches, schema)

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Columns:
        """Yield the array of each column path, of some batches or all."""
        table = self._whole
        if groups is not None:
            table = pa.Table.from_batches([self._batches[i] for i in groups], self.schema)
        return get_columns(table, paths)


def read_arrow(source: torch.UntypedStorage | pa.Buffer, where: str, *, check: bool = True) -> ArrowTable:
    """Return the table of a file or stream of Arrow; with ``check``, offsets outside of their buffers are an error."""
    mapped = source if isinstance(source, torch.UntypedStorage) else None
    if mapped is not None:
        source = pa.foreign_buffer(mapped.data_ptr(), mapped.nbytes(), mapped)
    with report_errors(where):
        try:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except pa.ArrowInvalid:
            reader = pa.ipc.open_stream(source)
            batches = list(reader)
        if check:
            _check_batches(batches)
    return ArrowTable(batches, reader.schema, where, mapped)


def _check_batches(batches: Iterable[pa.RecordBatch]) -> None:
    """Raise an error of pyarrow for offsets outside of their buffers."""
    for batch in batches:
        for column in batch.columns:
            column.validate(full=not _has_fixed_width(column.type))


def _has_fixed_width(kind: pa.DataType) -> bool:
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _has_fixed_width(kind.storage_type)
    nested = pa.types.is_fixed_size_list(kind) or pa.types.is_struct(kind)
    return nested and all(_has_fixed_width(kind.field(i).type) for i in range(kind.num_fields))


class JoinedTable(Table):
    """Several tables with the same columns, as one; ``keys`` are those that the folders of each name."""

    def __init__(
        self, tables: Sequence[Table], where: str, keys: Sequence[Mapping[str, str]] = (), strict: bool = True
    ) -> None:
        self._tables, self.where = tables, where
        self.groups = [rows for table in tables for rows in table.groups]
        self._constants = _make_constants(keys)
        self._known = [{*list_fields(table.schema, table.where)} for table in tables]
        self.schema = _join_schemas(tables, strict)
        for name, array in self._constants.items():
            if name not in self.schema.names:
                self.schema = self.schema.append(pa.field(name, array.type))
        self._fields = list_fields(self.schema, where)

    def list_tables(self) -> Sequence[Table]:
        """Return the tables."""
        return self._tables

    def _number(self) -> Iterator[tuple[int, Table, int]]:
        """Yield the number of each table, the table, and the number of its first group."""
        first = 0
        for number, table in enumerate(self._tables):
            yield number, table, first
            first += len(table.groups)

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Columns:
        """Yield the array of each column path, of some groups or all."""
        chosen = range(len(self.groups)) if groups is None else groups
        for path in paths:
            chunks: list[pa.Array] = []
            for number, table, first in self._number():
                own = [i - first for i in chosen if first <= i < first + len(table.groups)]
                rows = sum(table.groups[i] for i in own)
                if path in self._known[number]:
                    chunks += next(iter(table.read([path], own)))[1].chunks if own else []
                elif path[0] in self._constants:
                    chunks.append(pa.repeat(self._constants[path[0]][number], rows))
                else:
                    chunks.append(pa.nulls(rows, self._fields[path].type))
            yield path, pa.chunked_array(chunks, self._fields[path].type)

    def find_groups(self, condition: pc.Expression) -> list[int]:
        """Return the groups that can have rows that meet a condition."""
        result: list[int] = []
        for number, table, first in self._number():
            # A file that lacks a column of the condition has nulls there.
            whole = {(name,) for name in self.schema.names} <= self._known[number]
            own = table.find_groups(condition) if whole else range(len(table.groups))
            result += [first + group for group in own]
        return result


def _make_constants(keys: Sequence[Mapping[str, str]]) -> dict[str, pa.Array]:
    """Return the values of the columns that folders name, one for each table."""
    result = {}
    for name in dict.fromkeys(name for item in keys for name in item):
        texts = [item.get(name) for item in keys]
        values: list[Any] = [None if text == "__HIVE_DEFAULT_PARTITION__" else text for text in texts]
        if all(value is None or (value.isascii() and value.isdigit()) for value in values):
            values = [None if value is None else int(value) for value in values]
        result[name] = pa.array(values)
    return result


def _join_schemas(tables: Sequence[Table], strict: bool) -> pa.Schema:
    """Return the schema of the first table, with columns that only others have if ``strict`` is False."""
    first = tables[0]
    schema = first.schema
    own = {item.name: item for item in schema}
    for table in tables[1:]:
        for item in table.schema:
            known = own.get(item.name)
            if known is None:
                if strict:
                    raise _differ(table, item.name, f"which {first.where} lacks")
                own[item.name] = item.with_nullable(True)
                schema = schema.append(own[item.name])
            elif known.type != item.type or (known.metadata or {}).get(KEY) != (item.metadata or {}).get(KEY):
                raise _differ(table, item.name, f"as {item.type}, and {first.where} has it as {known.type}")
        missing = [name for name in schema.names if name not in table.schema.names]
        if missing and strict:
            raise _differ(table, missing[0], f"only in {first.where}", "lacks the column, which is")
    return schema


def _differ(table: Table, name: str, how: str, verb: str = "has the column") -> FormatError:
    return FormatError(
        f"{table.where}: the file {verb} {show_column((name,))} {how}: the files of a directory have the same columns; "
        "strict=False fills what is missing with nulls"
    )


def map_path(path: str, *, shared: bool = False) -> torch.UntypedStorage:
    """Map a local file: writes stay in memory, or with ``shared`` reach it."""
    fd = open_regular(path, write=shared)
    try:
        if not os.fstat(fd).st_size:
            raise FormatError(f"{path}: the file is empty")
        return map_file(fd, shared=shared)
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_tables(
    location: Any,
    name: str,
    storage_options: StorageOptions = None,
    num_threads: int = 0,
    strict: bool | None = None,
    **options: Any,
) -> Iterator[Table]:
    """Open the table of a location in a format for the duration of a block."""
    if storage_options is not None and not is_url(location):
        raise ValueError(f"storage_options are for URLs; {show_place(location)} is none")
    check_count("num_threads", num_threads, 0, "0 or more")
    if strict not in (None, True, False):
        raise TypeError(f"strict is None, True or False; got {strict!r:.100}")
    with contextlib.ExitStack() as stack:

        def open_one(place: Any) -> Table:
            where = show_place(place)
            if name == "arrow" and is_local(place):
                return read_arrow(map_path(os.fspath(place)), where)
            source = stack.enter_context(open_input(place, storage_options))
            if name == "arrow":
                return read_arrow(pa.py_buffer(source.read()), where)
            return ParquetTable(source, where, num_threads != 1, **options)

        if isinstance(location, ObjectLocation):
            yield _open_objects(location, name, num_threads != 1, strict is not False, options)
            return
        if not is_directory(location):
            yield open_one(location)
            return
        parts = list_parts(os.fspath(location))
        tables = [open_one(path) for path, _ in parts]
        yield JoinedTable(tables, show_place(location), [keys for _, keys in parts], strict is not False)


class ObjectParquet(ParquetTable):
    """A Parquet file in an object store: the columns that are decoded together are read together."""

    def __init__(self, content: ObjectFile, where: str, threads: bool = True, **options: Any) -> None:
        self.content = content
        super().__init__(pa.PythonFile(content, "r"), where, threads, **options)

    def fetch(self, paths: Iterable[Path], groups: Sequence[int]) -> None:
        """Read the bytes of columns in some row groups, with one call of the store."""
        if self._is_encrypted:
            return  # pyarrow alone finds them
        leaves = [leaf for path in paths for leaf in self._leaves[path]]
        chunks = [self._chunks[group][leaf] for group in groups for leaf in leaves]
        self.content.fetch([(max(chunk.begin, 0), chunk.begin + chunk.stored) for chunk in chunks])

    def _split(self, paths: list[Path], groups: Sequence[int]) -> Iterator[list[Path]]:
        for part in super()._split(paths, groups):
            self.fetch(part, groups)
            yield part


class ObjectArrow(Table):
    """A file of Arrow in an object store: the columns of some record batches are read together."""

    def __init__(self, content: ObjectFile, where: str) -> None:
        self.content, self.where = content, where
        with report_errors(where):
            self.schema = self._open([]).schema
        self._batches, self._dictionaries = read_batches(content, where)
        self._parts = place_columns(self.schema)
        self.groups = [batch.rows for batch in self._batches]

    def _open(self, columns: list[int]) -> Any:
        options = pa.ipc.IpcReadOptions(included_fields=columns)
        return pa.ipc.open_file(pa.PythonFile(self.content, "r"), options=options)

    def fetch(self, paths: Iterable[Path], groups: Sequence[int]) -> None:
        """Read the bytes of columns in some record batches, with one call of the store."""
        tops = dict.fromkeys(path[:1] for path in paths)
        ranges = [*self._dictionaries]
        for batch in (self._batches[group] for group in groups):
            ranges += [part for path in tops for part in self._list_ranges(batch, path)]
        self.content.fetch(ranges)

    def _list_ranges(self, batch: Batch, path: Path) -> list[Bytes]:
        if self._parts is None:
            return [batch.body]
        return [batch.buffers[i] for i in self._parts[path].buffers if i < len(batch.buffers)]

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Columns:
        """Yield the array of each column path, a few columns at a time."""
        groups = range(len(self.groups)) if groups is None else groups
        for part in self._split(paths, groups):
            self.fetch(part, groups)
            numbers = sorted({self.schema.get_field_index(path[0]) for path in part})
            with report_errors(self.where):
                reader = self._open(numbers)
                batches = [reader.get_batch(group) for group in groups]
                _check_batches(batches)
            fields = [self.schema.field(number) for number in numbers]
            yield from get_columns(pa.Table.from_batches(batches, pa.schema(fields)), part)

    def _split(self, paths: Iterable[Path], groups: Sequence[int]) -> Iterator[list[Path]]:
        """Yield columns that are about ``_TOGETHER`` bytes; those of one struct are together, since it is read as a whole."""
        result: list[Path] = []
        size = 0
        for top, same in itertools.groupby(paths, key=lambda path: path[:1]):
            result += same
            for group in groups:
                size += sum(end - begin for begin, end in self._list_ranges(self._batches[group], top))
            if size > _TOGETHER:
                yield result
                result, size = [], 0
        if result:
            yield result

    def find_range(self, path: Path) -> Bytes | None:
        """Return the bytes of a column's numbers; None if it has nulls, is compressed, or in several batches."""
        if len(self._batches) != 1 or self._parts is None or self._batches[0].is_compressed:
            return None
        batch, part = self._batches[0], self._parts[path]
        above = [self._parts[path[:depth]].nodes.start for depth in range(1, len(path))]
        if any(batch.nulls[node] for node in [*above, *part.nodes]):
            return None
        return batch.buffers[part.buffers[-1]]


def open_object(name: str, content: ObjectFile, where: str, threads: bool = True, **options: Any) -> Table:
    """Open a file in an object store; a stream of Arrow, which has no footer, is read at once."""
    if name == "parquet":
        return ObjectParquet(content, where, threads, **options)
    content.seek(max(content.info.size - len(_ARROW), 0))
    if content.read(len(_ARROW)) == _ARROW:
        return ObjectArrow(content, where)
    content.fetch([(0, content.info.size)])
    content.seek(0)
    return read_arrow(pa.py_buffer(content.readall()), where)


def _open_objects(
    location: ObjectLocation, name: str, threads: bool, strict: bool, options: Mapping[str, Any]
) -> Table:
    """Open the table at a location in an object store: one file, or several."""
    parts = find_parts(location)
    tables: list[Table] = [Table()] * len(parts)

    def open_part(number: int) -> None:
        part = parts[number]
        tables[number] = open_object(name, part.content, part.where, threads, **options)

    run_parallel([partial(open_part, number) for number in range(len(parts))], _FILES_TOGETHER)
    if location.first is not None:
        (table,) = tables
        return table
    return JoinedTable(tables, show_place(location), [part.keys for part in parts], strict)


def find_format(location: Any) -> str:
    """Return the format of a file or directory of tables; raise FormatError for another one."""
    first = list_parts(location)[0][0] if is_directory(location) else location
    with open_input(first) as file:
        head = bytes(file.read(6))
    if head[:4] == b"PAR1":
        return "parquet"
    if head == b"ARROW1":
        return "arrow"
    raise FormatError(f"{show_place(location)}: neither a Parquet file nor one of Arrow")
