"""Save collections as files of tables, wholly or piece by piece: Parquet, and files of Arrow that can be mapped."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from td_core import NestedKey, TensorCollection, is_tensor_collection
from td_core.errors import StructureError, UnsupportedOperationError
from td_core.spi import check_same_format, is_stored, make_reporter, run_in_background
from td_core.typing import ObjectLocation, Progress
from td_store.files import NewDirectory, NewFile

from ._arrow_types import is_list
from ._from_arrow import get_columns
from ._nulls import Path
from ._object_tables import NUMBERED, list_files, write_object, write_parts
from ._read_columns import join_chunks
from ._table_columns import is_level, list_fields
from ._table_files import find_format, open_tables
from ._table_header import add_hashes, hash_column, read_facts
from ._table_locations import (
    StorageOptions,
    choose_format,
    is_directory,
    is_local,
    is_url,
    open_output,
    show_place,
)
from ._table_options import WRITER, bind, check_count, check_options, option
from ._table_plan import Tensors
from ._write_columns import check_separator, make_table

#: A row group has at most this many bytes, and rows.
_GROUP_BYTES, _GROUP_ROWS = 1 << 26, 1 << 20
#: The option for the rows of a group of each format, and the form of cells by default.
_ROWS, _TENSORS = {"parquet": "row_group_size", "arrow": "batch_rows"}, {"parquet": "auto", "arrow": "list"}
_CODECS = ("auto", "none", "snappy", "gzip", "brotli", "lz4", "zstd")
#: Opens a writer of tables for a file and a schema.
OpenWriter = Callable[[pa.NativeFile, pa.Schema], Any]


def _save(
    name: str,
    data: TensorCollection,
    location: Any,
    *,
    compression: Any = "auto",
    tensors: str | Mapping[NestedKey | None, str] | None = None,
    separator: str | None = None,
    row_dims: int = 1,
    mask_key: NestedKey | None = None,
    max_rows_per_file: int | None = None,
    checksums: bool = False,
    durable: bool = False,
    return_early: bool = False,
    progress: Progress = False,
    storage_options: StorageOptions = None,
    **options: Any,
) -> Any:
    """Save a collection in one of the formats; see :func:`td_arrow.save`."""
    rows, most = options.pop(_ROWS[name], None), max_rows_per_file
    for option_name, number in ((_ROWS[name], rows), ("max_rows_per_file", most)):
        if number is not None:
            check_count(option_name, number)
    open_writer = make_writer(name, compression, checksums, options)
    _check_location(location, most, storage_options)
    columns = (separator, row_dims, tensors or _TENSORS[name], mask_key)
    if name == "arrow" and checksums:
        if most is not None:
            raise ValueError("checksums are of one file: leave out max_rows_per_file")
        parts = iter([_add_hashes(make_table(data, *columns))])
    else:
        parts = _split_stored(data, *columns)
    first = next(parts)
    tables = itertools.chain([first], parts)

    def write() -> None:
        report = make_reporter(progress, max(data.batch_size[0] if data.batch_size else 1, 1), "save", "rows")

        def write_file(sink: pa.NativeFile, pieces: Iterable[pa.Table]) -> None:
            with open_writer(sink, first.schema) as writer:
                for table in pieces:
                    write_table(writer, table, first.schema, rows)
                    report(table.num_rows)

        if most is None:
            with open_output(location, durable, storage_options) as sink:
                write_file(sink, tables)
            return
        whole = pa.concat_tables([table.cast(first.schema) for table in tables])
        if isinstance(location, ObjectLocation):
            names = [_name_part(number, name) for number in range(-(-max(whole.num_rows, 1) // most))]
            write_parts(
                location, names, lambda number, sink: write_file(sink, [whole.slice(number * most, most)])
            )
            return
        check_same_format(os.fspath(location), name)
        with NewDirectory(location) as folder:
            for number, start in enumerate(range(0, max(whole.num_rows, 1), most)):
                with pa.OSFile(os.path.join(folder.temporary, _name_part(number, name)), "wb") as sink:
                    write_file(sink, [whole.slice(start, most)])
            folder.commit(durable=durable)

    if return_early:
        return run_in_background(write, "td-arrow-save", data)
    write()
    return data


save_parquet = bind(_save, "parquet", [option("row_group_size"), *WRITER])
save_arrow = bind(_save, "arrow", [option("batch_rows")])


def _check_location(location: object, most: int | None, storage_options: StorageOptions) -> None:
    """Raise an error for a location that does not fit the other options."""
    if storage_options is not None and not is_url(location):
        raise ValueError(f"storage_options are for URLs; {show_place(location)} is none")
    if most is not None and not is_local(location) and not isinstance(location, ObjectLocation):
        raise UnsupportedOperationError(
            f"max_rows_per_file writes a local directory; {show_place(location)} is none"
        )
    if most is None and is_directory(location):
        raise IsADirectoryError(
            f"cannot save to {show_place(location)!r}, which is a directory: pass the path of a file, or max_rows_per_file"
        )


def make_writer(name: str, compression: Any, checksums: bool, options: Mapping[str, Any]) -> OpenWriter:
    """Return a function that opens a writer of pyarrow; raise TypeError or ValueError for an invalid option."""
    check_options(options, WRITER if name == "parquet" else (), f"the format {name!r}")
    if name == "arrow":
        codec = None if compression == "auto" else compression
        if codec not in (None, "lz4", "zstd"):
            raise ValueError(f'compression is None, "lz4" or "zstd"; got {compression!r:.100}')
        written = pa.ipc.IpcWriteOptions(compression=codec)
        return lambda sink, schema: pa.ipc.new_file(sink, schema, options=written)
    for each in compression.values() if isinstance(compression, Mapping) else [compression]:
        if each is not None and not (isinstance(each, str) and each.lower() in _CODECS):
            raise ValueError(
                f"compression is one of {', '.join(map(repr, _CODECS))}, None, or a mapping of columns to these; "
                f"got {each!r:.100}"
            )

    def open_writer(sink: pa.NativeFile, schema: pa.Schema) -> Any:
        codecs = _choose_codecs(schema) if compression == "auto" else {"compression": compression}
        schema = add_hashes(schema) if checksums else schema
        return pq.ParquetWriter(sink, schema, **{"write_page_checksum": checksums, **codecs, **options})

    return open_writer


def _choose_codecs(schema: pa.Schema) -> dict[str, Any]:
    """Return compression and dictionaries of each column of Parquet: none for floats and bytes of cells."""
    codecs: dict[str, str] = {}
    todo: list[tuple[Path, pa.DataType]] = [((item.name,), item.type) for item in schema]
    while todo:
        path, kind = todo.pop()
        if isinstance(kind, pa.BaseExtensionType):
            todo.append((path, kind.storage_type))
        elif pa.types.is_struct(kind):
            todo += [((*path, item.name), item.type) for item in kind]
        elif is_list(kind):
            todo.append(((*path, "list", "element"), kind.value_type))
        else:
            plain = pa.types.is_floating(kind) or pa.types.is_fixed_size_binary(kind)
            codecs[".".join(path)] = "none" if plain else "zstd"
    dictionaries = [path for path, codec in codecs.items() if codec == "zstd"]
    return {"compression": codecs, "use_dictionary": dictionaries or False}


def _add_hashes(table: pa.Table) -> pa.Table:
    """Return a table with hashes of its columns in the header."""
    paths = [path for path, item in list_fields(table.schema, "the table").items() if not is_level(item)]
    digests = {"/".join(path): hash_column(join_chunks(array)) for path, array in get_columns(table, paths)}
    return table.replace_schema_metadata(add_hashes(table.schema, digests).metadata)


def _name_part(number: int, name: str) -> str:
    """Return the name of a file of a directory."""
    return f"part-{number:05}.{name}"


def _split_stored(data: Any, separator: str | None, row_dims: int, *columns: Any) -> Iterator[pa.Table]:
    """Yield the tables of a collection: one, or several if leaves are in a store, which are read in parts."""
    size = sum(leaf.nbytes for leaf in data._leaves() if is_stored(leaf))
    if size <= _GROUP_BYTES or not data.batch_size or row_dims != 1 or not hasattr(data, "_entries"):
        yield make_table(data, separator, row_dims, *columns)
        return
    step = max(1, data.batch_size[0] * _GROUP_BYTES // size)
    for start in range(0, data.batch_size[0], step):
        yield make_table(data[start : start + step], separator, row_dims, *columns)


def write_table(writer: Any, table: pa.Table, schema: pa.Schema, rows: int | None) -> None:
    """Write the rows of a table, whose columns are those of a schema, in groups."""
    if table.schema != schema:
        table = fit_schema(table, schema)
    if isinstance(writer, pq.ParquetWriter):
        size = max(1, table.nbytes // max(table.num_rows, 1))
        writer.write_table(table, row_group_size=rows or max(1, min(_GROUP_ROWS, _GROUP_BYTES // size)))
    elif table.num_rows:
        writer.write_table(table, max_chunksize=rows)


def fit_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with a schema of the same columns; raise StructureError if columns, types or what fields say differ."""
    for item in schema:
        if item.name not in table.schema.names:
            raise StructureError(f"the rows lack the column {item.name!r} of the table")
        own = table.schema.field(item.name)
        if own.type == pa.null() and item.nullable and read_facts(item).get("kind") == "values":
            continue  # all of them are None
        is_category = pa.types.is_dictionary(item.type)
        if is_category and (pa.types.is_string(own.type) or pa.types.is_large_string(own.type)):
            table = table.set_column(
                table.schema.get_field_index(item.name), item, _encode(table[item.name], item)
            )
        elif own.type != item.type or own.metadata != item.metadata:
            way = '; give its labels as strings, as load(categories="values") does' if is_category else ""
            raise StructureError(
                f"the column {item.name!r} of the rows has the type {_show_type(own)}, and that of the table "
                f"{_show_type(item)}{way}"
            )
    more = [name for name in table.schema.names if name not in schema.names]
    if more:
        raise StructureError(f"the table lacks the columns {', '.join(map(repr, more))} of the rows")
    return table.select(schema.names).cast(schema)


def _encode(column: pa.ChunkedArray, item: pa.Field) -> pa.Array:
    """Return strings as categories of the type of a field; raise StructureError if that has not so many, or others."""
    kind = item.type
    try:
        found = join_chunks(column).cast(kind.value_type).dictionary_encode()
        codes = found.indices.cast(kind.index_type)
    except pa.ArrowException as error:
        raise StructureError(
            f"the column {item.name!r} cannot have the categories of the rows: {error}"
        ) from error
    return pa.DictionaryArray.from_arrays(codes, found.dictionary, ordered=kind.ordered)


def _show_type(item: pa.Field) -> str:
    """Return the type of a field, and what the field says about it."""
    facts = read_facts(item)
    return f"{item.type} {json.dumps(facts)}" if facts else str(item.type)


def _append(
    name: str,
    rows: TensorCollection,
    location: Any,
    *,
    compression: Any = "auto",
    tensors: str | Mapping[NestedKey | None, str] | None = None,
    separator: str | None = None,
    checksums: bool = False,
    durable: bool = False,
    **options: Any,
) -> None:
    """Add rows to a directory of files, as a file of their own; see :func:`td_arrow.append`."""
    open_writer = make_writer(name, compression, checksums, options)
    if not rows.batch_size:
        raise StructureError(
            f"cannot append to {show_place(location)}: the rows have no batch dim; append data[i : i + 1] in place of data[i]"
        )
    is_tree = isinstance(location, ObjectLocation) and location.first is None
    if not (is_tree or is_directory(location)):
        raise UnsupportedOperationError(
            f"cannot append rows to {show_place(location)}, which is one file: save with max_rows_per_file for a directory, or "
            "use TableWriter"
        )
    with open_tables(location, name) as table:
        schema = table.schema
    content = fit_schema(make_table(rows, separator, tensors=tensors or _TENSORS[name]), schema)

    names = [info.name for info in list_files(location)] if is_tree else os.listdir(location)
    numbers = [int(match[1]) for part in names if (match := NUMBERED.fullmatch(part))]
    for number in itertools.count(1 + max(numbers, default=-1)):
        with contextlib.suppress(FileExistsError):  # another process has appended
            with (
                _open_part(location, _name_part(number, name), durable) as sink,
                open_writer(sink, schema) as writer,
            ):
                write_table(writer, content, schema, None)
            return


@contextlib.contextmanager
def _open_part(location: Any, name: str, durable: bool) -> Iterator[pa.NativeFile]:
    """Open a new file of a directory, or of a location in an object store; raise FileExistsError if it is there."""
    if isinstance(location, ObjectLocation):
        with write_object(location, name, create=True) as sink:
            yield sink
        return
    path = os.path.join(location, name)
    with NewFile(path, replace=False, beside=(os.path.splitext(name)[1],)) as new:
        with pa.OSFile(new.temporary, "wb") as sink:
            yield sink
        new.commit(durable=durable)


append_parquet = bind(_append, "parquet", WRITER)
append_arrow = bind(_append, "arrow", without=["checksums"])


class TableWriter:
    """Writes collections with the same columns, one after the other, to a file that appears when all are written.

    Args:
        location: a path, a URL, or a binary file object.
        format: ``"parquet"`` or ``"arrow"``; by default that of the suffix, else ``"parquet"``.
        like: a collection with the columns; by default the first one that is written.
        row_group_size: rows of a row group or record batch; by default those of 64 MB.
        separator: joins the keys of nested entries to names of columns.
        tensors: as for :func:`td_arrow.to_arrow`.
        compression: as for :func:`td_arrow.save`.
        checksums: write a hash of the schema of a Parquet file, and a CRC for each page.
        durable: return from ``close`` after the data has reached the disk.
        **options: arguments of ``pyarrow.parquet.ParquetWriter``.

    >>> with TableWriter("data.parquet") as writer:
    ...     for start in (0, 3):
    ...         writer.write(TensorDict({"x": torch.arange(start, start + 3)}, [3]))
    >>> TensorDict.load("data.parquet")["x"]
    tensor([0, 1, 2, 3, 4, 5])
    """

    def __init__(
        self,
        location: Any,
        *,
        format: str | None = None,
        like: TensorCollection | None = None,
        row_group_size: int | None = None,
        separator: str | None = None,
        tensors: str | Mapping[NestedKey | None, str] | None = None,
        compression: Any = "auto",
        checksums: bool = False,
        durable: bool = False,
        **options: Any,
    ) -> None:
        name = choose_format(location, format)
        if row_group_size is not None:
            check_count("row_group_size", row_group_size)
        if name == "arrow" and checksums:
            raise TypeError(
                "files of Arrow have no option checksums here: save() writes hashes of all columns"
            )
        self._open_writer = make_writer(name, compression, checksums, options)
        self._separator, self._tensors = separator, tensors or _TENSORS[name]
        check_separator(separator)
        Tensors(self._tensors)
        self._location, self._rows, self._durable = location, row_group_size, durable
        self._schema = None if like is None else self._make_table(like).schema
        self._waiting: list[pa.Table] = []
        self._writer: Any = None
        self._stack: contextlib.ExitStack | None = contextlib.ExitStack()

    def _make_table(self, td: TensorCollection) -> pa.Table:
        return make_table(td, self._separator, tensors=self._tensors, copy=True)

    def write(self, td: TensorCollection) -> None:
        """Add the rows of a collection.

        Raises:
            StructureError: it has other columns than the first one; nothing of it is written.
            UnsupportedOperationError: the writer is closed.
        """
        if self._stack is None:
            raise UnsupportedOperationError(f"the writer of {show_place(self._location)} is closed")
        table = self._make_table(td)
        if self._schema is None:
            self._schema = table.schema
        self._waiting.append(fit_schema(table, self._schema))
        rows = sum(item.num_rows for item in self._waiting)
        if self._rows is not None and rows >= self._rows:
            self._flush(self._stack, rows - rows % self._rows)
        elif self._rows is None and sum(item.nbytes for item in self._waiting) >= _GROUP_BYTES:
            self._flush(self._stack, rows)

    def _flush(self, stack: contextlib.ExitStack, count: int) -> None:
        """Write the first rows that wait."""
        if self._writer is None:
            sink = stack.enter_context(open_output(self._location, self._durable))
            self._writer = stack.enter_context(self._open_writer(sink, self._schema))
        if self._waiting:
            table = pa.concat_tables(self._waiting).combine_chunks()
            write_table(self._writer, table.slice(0, count), self._schema, self._rows)
            self._waiting = [table.slice(count)] if count < table.num_rows else []

    def close(self) -> None:
        """Write what is left, and give the file its name."""
        stack, self._stack = self._stack, None
        if stack is not None:
            with stack:
                if self._schema is not None:
                    self._flush(stack, sum(item.num_rows for item in self._waiting))

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._stack is not None:
            stack, self._stack = self._stack, None
            stack.__exit__(kind, error, trace)


def arrow_schema(source: Any) -> Any:
    """Return the ``pyarrow.Schema`` of a collection as a table, or of a file of a table.

    >>> arrow_schema(TensorDict({"x": torch.zeros(2)}, [2])).names
    ['x']
    """
    if is_tensor_collection(source):
        return make_table(source).schema
    with open_tables(source, find_format(source)) as table:
        return table.schema
