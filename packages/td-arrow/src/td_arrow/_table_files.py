"""Files of tables as a sequence of groups of rows: Parquet files, files and streams of Arrow, and directories of them.

A file is opened once, so that a save that replaces it meanwhile cannot mix its rows with those of another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch

from td_core.errors import FormatError, UnsupportedOperationError
from td_core.spi import open_regular
from td_store.arrays import map_file

from ._from_arrow import get_columns
from ._nulls import Path, show_column
from ._table_columns import list_fields
from ._table_header import KEY
from ._table_locations import is_directory, is_object, is_url, list_parts, open_input, show_place

#: Columns are decoded together up to this many bytes.
_TOGETHER = 1 << 26


@contextlib.contextmanager
def report_errors(where: str) -> Iterator[None]:
    """Raise FormatError with the location for errors of pyarrow in a block."""
    try:
        yield
    except (pa.ArrowException, EOFError) as error:
        if isinstance(error, pa.ArrowMemoryError):
            raise
        raise FormatError(f"{where}: the file is damaged, or is no table: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise FormatError(f"{where}: the file is damaged, or is no table: {error}") from error


class ParquetTable:
    """A Parquet file.

    Attributes:
        where: its location, for messages.
        schema: its schema in Arrow.
        groups: the number of rows of each row group.
    """

    def __init__(self, source: Any, where: str, threads: bool = True, **options: Any) -> None:
        self.where, self._source, self._threads = where, source, threads
        with report_errors(where):
            self.file = pq.ParquetFile(source, **options)
            self.schema = self.file.schema_arrow
        metadata = self.file.metadata
        self.groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._leaves = _number_leaves(self.schema)

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Iterator[tuple[Path, Any]]:
        """Yield the array of each column path, of some row groups or all, a few columns at a time."""
        groups = range(len(self.groups)) if groups is None else groups
        for part in self._split(paths, groups):
            leaves = [leaf for path in part for leaf in self._leaves[path]]
            with report_errors(self.where):
                # By number: a name with points is ambiguous.
                table = self.file.reader.read_row_groups(
                    list(groups), column_indices=leaves, use_threads=self._threads
                )
            yield from get_columns(table, part)

    def _split(self, paths: Iterable[Path], groups: Sequence[int]) -> Iterator[list[Path]]:
        """Yield columns that are about ``_TOGETHER`` bytes, if all are of one size: pyarrow ends the process at damaged sizes."""
        metadata, todo = self.file.metadata, list(paths)
        size = sum(max(metadata.row_group(group).total_byte_size, 0) for group in groups)
        step = max(1, metadata.num_columns * _TOGETHER // max(size, 1))
        for start in range(0, len(todo), step):
            yield todo[start : start + step]

    def list_chunks(self, path: Path) -> list[Any]:
        """Return the metadata of the parts of a column."""
        metadata = self.file.metadata
        return [
            metadata.row_group(i).column(leaf) for i in range(len(self.groups)) for leaf in self._leaves[path]
        ]

    def find_groups(self, condition: Any) -> list[int]:
        """Return the row groups that can have rows that meet a condition, by their statistics."""
        fragment = ds.ParquetFileFormat().make_fragment(self._source)
        return [group.id for group in fragment.subset(condition, schema=self.schema).row_groups]

    def close(self) -> None:
        """Close the file, if this object opened it."""
        self.file.close()


def _number_leaves(schema: Any) -> dict[Path, list[int]]:
    """Return the numbers of the leaf columns of each column path."""
    result: dict[Path, list[int]] = {}
    count = 0

    def visit(path: Path, item: Any) -> None:
        nonlocal count
        first = count
        if pa.types.is_struct(item.type):
            for i in range(item.type.num_fields):
                part = item.type.field(i)
                visit((*path, part.name), part)
        else:
            count += _count_leaves(item.type)
        result[path] = list(range(first, count))

    for item in schema:
        visit((item.name,), item)
    return result


def _count_leaves(kind: Any) -> int:
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


class ArrowTable:
    """A file or stream of Arrow: its record batches are the groups. Those of a mapped file are read when they are used."""

    def __init__(self, source: Any, where: str, *, check: bool = True) -> None:
        self.where = where
        #: The memory of a mapped file.
        self.mapped = source if isinstance(source, torch.UntypedStorage) else None
        if self.mapped is not None:
            source = pa.foreign_buffer(source.data_ptr(), source.nbytes(), source)
        with report_errors(where):
            try:
                reader = pa.ipc.open_file(source)
                self.batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            except pa.ArrowInvalid:
                reader = pa.ipc.open_stream(source)
                self.batches = list(reader)
            self.schema = reader.schema
            for batch in self.batches if check else ():
                _check_batch(batch)
        self.groups = [batch.num_rows for batch in self.batches]
        self.whole = pa.Table.from_batches(self.batches, self.schema)

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Iterator[tuple[Path, Any]]:
        """Yield the array of each column path, of some batches or all."""
        table = self.whole
        if groups is not None:
            table = pa.Table.from_batches([self.batches[i] for i in groups], self.schema)
        yield from get_columns(table, paths)

    def find_groups(self, condition: Any) -> list[int]:
        """Return all batches: files of Arrow have no statistics."""
        return list(range(len(self.groups)))

    def close(self) -> None:
        """Do nothing: arrays keep the memory that they need."""


def _check_batch(batch: Any) -> None:
    """Raise an error of pyarrow for arrays whose buffers are too small, or whose offsets are outside of them."""
    for column, item in zip(batch.columns, batch.schema, strict=True):
        column.validate(full=not _has_fixed_width(item.type))


def _has_fixed_width(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_fixed_width(kind.storage_type)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_struct(kind):
        return all(_has_fixed_width(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind))


class Parts:
    """Several tables with the same columns, as one."""

    def __init__(
        self, tables: Sequence[Any], keys: Sequence[Mapping[str, str]], where: str, strict: bool
    ) -> None:
        self.tables, self.where = tables, where
        self.groups = [rows for table in tables for rows in table.groups]
        self._constants = _make_constants(keys)
        self._known = [{*list_fields(table.schema, table.where)} for table in tables]
        self.schema = _join_schemas(tables, strict)
        for name, array in self._constants.items():
            if name not in self.schema.names:
                self.schema = self.schema.append(pa.field(name, array.type))
        self._fields = list_fields(self.schema, where)

    def read(self, paths: Iterable[Path], groups: Sequence[int] | None = None) -> Iterator[tuple[Path, Any]]:
        """Yield the array of each column path, of some groups or all."""
        chosen = list(range(len(self.groups))) if groups is None else list(groups)
        for path in paths:
            first, chunks = 0, []
            for number, table in enumerate(self.tables):
                own = [i - first for i in chosen if first <= i < first + len(table.groups)]
                first += len(table.groups)
                rows = sum(table.groups[i] for i in own)
                if path[0] in self._constants and path not in self._known[number]:
                    chunks.append(pa.repeat(self._constants[path[0]][number], rows))
                elif path not in self._known[number]:
                    chunks.append(pa.nulls(rows, self._fields[path].type))
                elif own:
                    chunks += next(table.read([path], own))[1].chunks
            yield path, pa.chunked_array(chunks, self._fields[path].type)

    def find_groups(self, condition: Any) -> list[int]:
        """Return the groups that can have rows that meet a condition."""
        result, first = [], 0
        for table, known in zip(self.tables, self._known, strict=True):
            # A file that lacks a column of the condition has nulls there.
            whole = {(name,) for name in self.schema.names} <= known
            own = table.find_groups(condition) if whole else range(len(table.groups))
            result += [first + number for number in own]
            first += len(table.groups)
        return result

    def close(self) -> None:
        """Close all files."""
        for table in self.tables:
            table.close()


def _make_constants(keys: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    result = {}
    for name in dict.fromkeys(name for item in keys for name in item):
        texts = [item.get(name) for item in keys]
        missing = "__HIVE_DEFAULT_PARTITION__"
        values: list[Any] = [None if text in (None, missing) else text for text in texts]
        if all(value is None or (value.isascii() and value.isdigit()) for value in values):
            values = [None if value is None else int(value) for value in values]
        result[name] = pa.array(values)
    return result


def _join_schemas(tables: Sequence[Any], strict: bool) -> Any:
    """Return the schema of the first table, with columns that only others have if ``strict`` is False."""
    first = tables[0]
    schema = first.schema
    own = {item.name: item for item in schema}
    for table in tables[1:]:
        for item in table.schema:
            known = own.get(item.name)
            if known is None and not strict:
                own[item.name] = item.with_nullable(True)
                schema = schema.append(own[item.name])
            elif known is None:
                raise _differ(table, item.name, f"which {first.where} lacks")
            elif known.type != item.type or _without(known) != _without(item):
                raise _differ(table, item.name, f"as {item.type}, and {first.where} has it as {known.type}")
        missing = [name for name in schema.names if name not in table.schema.names]
        if missing and strict:
            raise _differ(table, missing[0], f"only in {first.where}", has=False)
    return schema


def _without(item: Any) -> Any:
    return (item.metadata or {}).get(KEY)


def _differ(table: Any, name: str, how: str, has: bool = True) -> FormatError:
    verb = "has the column" if has else "lacks the column, which is"
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
    *,
    storage_options: Mapping[str, Any] | None = None,
    num_threads: int = 0,
    strict: bool | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Open the table of a location in a format for the duration of a block.

    Raises:
        FileNotFoundError: there is nothing at the location.
        FormatError: a file is damaged, or those of a directory differ.
    """
    if storage_options is not None and not is_url(location):
        raise ValueError(f"storage_options are for URLs; {show_place(location)} is none")
    if type(num_threads) is not int or num_threads < 0:
        raise ValueError(f"num_threads is 0 or more; got {num_threads!r:.100}")
    if strict not in (None, True, False):
        raise TypeError(f"strict is None, True or False; got {strict!r:.100}")
    with contextlib.ExitStack() as stack:

        def open_one(place: Any) -> Any:
            where = show_place(place)
            if name == "arrow" and not is_object(place) and not is_url(place):
                return ArrowTable(map_path(os.fspath(place)), where)
            source = stack.enter_context(open_input(place, storage_options))
            if name == "arrow":
                return ArrowTable(pa.py_buffer(source.read()), where)
            return ParquetTable(source, where, num_threads != 1, **options)

        if not is_directory(location):
            yield open_one(location)
            return
        parts = list_parts(os.fspath(location))
        tables = [open_one(path) for path, _ in parts]
        yield Parts(tables, [keys for _, keys in parts], show_place(location), strict is not False)


def refuse_url(location: Any, operation: str) -> str:
    """Return a local path; raise UnsupportedOperationError for other locations."""
    if is_object(location) or is_url(location):
        raise UnsupportedOperationError(f"cannot {operation} {show_place(location)}: it is not a local path")
    path: str = os.fspath(location)
    return path
