"""Save collections as files of tables: Parquet, and files of Arrow that can be mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from td_core import NestedKey
from td_core.errors import StructureError, UnsupportedOperationError
from td_core.spi import check_same_format, is_stored, make_reporter, parse_json, run_in_background
from td_core.typing import Progress
from td_store.files import Checksum, NewDirectory, NewFile

from ._from_arrow import get_columns
from ._parquet_options import CODECS, WRITER, check_options, declare_options
from ._read_columns import join_chunks
from ._table_columns import is_level, list_fields
from ._table_files import open_tables
from ._table_header import KEY, dump_header, hash_column, read_facts
from ._table_locations import is_directory, is_object, is_url, list_parts, open_output, show_place
from ._write_columns import to_arrow

#: A row group has at most this many bytes, and rows.
_GROUP_BYTES, _GROUP_ROWS = 1 << 26, 1 << 20
#: Opens a writer of tables for a file.
OpenWriter = Callable[[Any, Any], Any]


@declare_options(WRITER)
def save_parquet(
    data: Any,
    location: Any,
    *,
    compression: Any = "auto",
    tensors: str | Mapping[NestedKey | None, str] = "auto",
    row_group_size: int | None = None,
    separator: str | None = None,
    row_dims: int = 1,
    mask_key: NestedKey | None = None,
    max_rows_per_file: int | None = None,
    checksums: bool = False,
    durable: bool = False,
    return_early: bool = False,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Save a collection as a Parquet file, or as a directory of files.

    The new content is complete under its name, or the old one remains, whenever the process is killed.

    Args:
        data: the collection.
        location: a path, a URL, or a binary file object.
        compression: ``"auto"`` compresses text, integers and bools with zstd, and keeps floats and bytes as they are; a name of
            pyarrow; or a mapping from columns to names.
        tensors: as for :func:`td_arrow.to_arrow`. ``"auto"`` stores cells of more than 1,024 elements as bytes.
        row_group_size: rows of a group, the unit of reading; by default those of 64 MB, at most 1,048,576.
        separator: joins the keys of nested entries to names of columns.
        row_dims: 2 makes a row of each element of the first two batch dims.
        mask_key: key of a level with masks, which become nulls.
        max_rows_per_file: write a directory of files with at most this many rows.
        checksums: write a CRC for each page, which every reader can check.
        durable: return after the data has reached the disk.
        return_early: write in the background, and return a future.
        progress: show a progress bar, or call a function of (rows done, all rows).
        storage_options: arguments of the file system of fsspec, for a URL.
        **options: arguments of ``pyarrow.parquet.ParquetWriter``.

    Raises:
        CodecError: a value or leaf cannot be stored; nothing is written.
        TypeError: an option is unknown.

    >>> td = TensorDict({"x": torch.arange(6), "name": ["a", "b"] * 3}, [6])
    >>> save_parquet(td, "data.parquet", row_group_size=4) is td
    True
    """
    make_writer = make_parquet_writer(compression, checksums, options)
    if row_group_size is not None and (type(row_group_size) is not int or row_group_size < 1):
        raise ValueError(f"row_group_size is a positive int; got {row_group_size!r:.100}")
    return _save(
        data,
        location,
        "parquet",
        make_writer,
        {"separator": separator, "row_dims": row_dims, "tensors": tensors, "mask_key": mask_key},
        rows=row_group_size,
        most=max_rows_per_file,
        durable=durable,
        return_early=return_early,
        progress=progress,
        storage_options=storage_options,
    )


def save_arrow(
    data: Any,
    location: Any,
    *,
    compression: str | None = None,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    batch_rows: int | None = None,
    separator: str | None = None,
    row_dims: int = 1,
    mask_key: NestedKey | None = None,
    max_rows_per_file: int | None = None,
    checksums: bool = False,
    durable: bool = False,
    return_early: bool = False,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Save a collection as a file of Arrow (feather), or as a directory of files; other options as for :func:`save_parquet`.

    Args:
        data: the collection.
        location: a path, a URL, or a binary file object.
        compression: None, ``"lz4"`` or ``"zstd"``. Only what is not compressed can be mapped.
        tensors: as for :func:`td_arrow.to_arrow`.
        batch_rows: rows of a record batch; by default all.
        separator: joins the keys of nested entries to names of columns.
        row_dims: 2 makes a row of each element of the first two batch dims.
        mask_key: key of a level with masks, which become nulls.
        max_rows_per_file: write a directory of files with at most this many rows.
        checksums: store a hash of each column in the header, which ``verify`` compares; for one file.
        durable: return after the data has reached the disk.
        return_early: write in the background, and return a future.
        progress: show a progress bar, or call a function of (rows done, all rows).
        storage_options: arguments of the file system of fsspec, for a URL.

    >>> _ = save_arrow(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> TensorDict.load("data.arrow")["x"].sum()
    tensor(15)
    """
    if checksums and max_rows_per_file is not None:
        raise ValueError("checksums are of one file: leave out max_rows_per_file")
    if batch_rows is not None and (type(batch_rows) is not int or batch_rows < 1):
        raise ValueError(f"batch_rows is a positive int; got {batch_rows!r:.100}")
    return _save(
        data,
        location,
        "arrow",
        make_arrow_writer(compression),
        {"separator": separator, "row_dims": row_dims, "tensors": tensors, "mask_key": mask_key},
        rows=batch_rows,
        most=max_rows_per_file,
        durable=durable,
        return_early=return_early,
        progress=progress,
        storage_options=storage_options,
        checksums=checksums,
    )


def make_parquet_writer(compression: Any, checksums: bool, options: Mapping[str, Any]) -> OpenWriter:
    """Return a function that opens a writer of pyarrow for a sink and a schema; raise TypeError for an unknown option."""
    check_options(options, WRITER, "save")
    names = [*compression.values()] if isinstance(compression, Mapping) else [compression]
    for name in names:
        if name is not None and not (isinstance(name, str) and name.lower() in CODECS):
            raise ValueError(
                f"compression is one of {', '.join(map(repr, CODECS))}, None, or a mapping of columns to these; got {name!r:.100}"
            )

    def open_writer(sink: Any, schema: Any) -> Any:
        codecs: dict[str, Any] = {"compression": compression}
        if compression == "auto":
            codecs = _choose_codecs(schema)
        return pq.ParquetWriter(sink, schema, **{"write_page_checksum": checksums, **codecs, **options})

    return open_writer


def make_arrow_writer(compression: str | None) -> OpenWriter:
    """Return a function that opens a writer of pyarrow for a sink and a schema; raise ValueError for an unknown codec."""
    if compression not in (None, "lz4", "zstd"):
        raise ValueError(f'compression is None, "lz4" or "zstd"; got {compression!r:.100}')

    def open_writer(sink: Any, schema: Any) -> Any:
        return pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression))

    return open_writer


def _choose_codecs(schema: Any) -> dict[str, Any]:
    """Return compression and dictionaries of each column of Parquet: none for floats and bytes of cells."""
    codecs: dict[str, str] = {}
    todo: list[tuple[tuple[str, ...], Any]] = [((item.name,), item.type) for item in schema]
    while todo:
        path, kind = todo.pop()
        if isinstance(kind, pa.BaseExtensionType):
            todo.append((path, kind.storage_type))
        elif pa.types.is_struct(kind):
            todo += [((*path, kind.field(i).name), kind.field(i).type) for i in range(kind.num_fields)]
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            todo.append(((*path, "list", "element"), kind.value_type))
        else:
            plain = pa.types.is_floating(kind) or pa.types.is_fixed_size_binary(kind)
            codecs[".".join(path)] = "none" if plain else "zstd"
    dictionaries = [path for path, codec in codecs.items() if codec == "zstd"]
    return {"compression": codecs, "use_dictionary": dictionaries or False}


def _save(
    data: Any,
    location: Any,
    name: str,
    open_writer: OpenWriter,
    columns: dict[str, Any],
    *,
    rows: int | None,
    most: int | None,
    durable: bool,
    return_early: bool,
    progress: Progress,
    storage_options: Mapping[str, Any] | None,
    checksums: bool = False,
) -> Any:
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_rows_per_file is a positive int; got {most!r:.100}")
    if storage_options is not None and not is_url(location):
        raise ValueError(f"storage_options are for URLs; {show_place(location)} is none")
    if most is not None and (is_object(location) or is_url(location)):
        raise UnsupportedOperationError(
            f"max_rows_per_file writes a local directory; {show_place(location)} is none"
        )
    if most is None and is_directory(location):
        raise IsADirectoryError(
            f"cannot save to {show_place(location)!r}, which is a directory: pass the path of a file, or max_rows_per_file"
        )
    parts = iter([_add_hashes(to_arrow(data, **columns))]) if checksums else _split_stored(data, columns)
    first = next(parts)

    def write() -> None:
        report = make_reporter(progress, max(data.batch_size[0] if data.batch_size else 1, 1), "save", "rows")
        tables = _chain(first, parts)
        if most is None:
            with open_output(location, durable, storage_options) as sink:
                _write(sink, first.schema, tables, open_writer, rows, report)
            return
        check_same_format(os.fspath(location), name)
        with NewDirectory(location) as folder:
            whole = pa.concat_tables([table.cast(first.schema) for table in tables])
            for number, start in enumerate(range(0, max(whole.num_rows, 1), most)):
                path = os.path.join(folder.temporary, name_part(number, name))
                with pa.OSFile(path, "wb") as sink:
                    _write(sink, whole.schema, [whole.slice(start, most)], open_writer, rows, report)
            folder.commit(durable=durable)

    if return_early:
        return run_in_background(write, "td-arrow-save", data)
    write()
    return data


def _add_hashes(table: Any) -> Any:
    """Return a table with hashes of its columns in the header."""
    paths = [path for path, item in list_fields(table.schema, "the table").items() if not is_level(item)]
    digests = {"/".join(path): hash_column(join_chunks(array)) for path, array in get_columns(table, paths)}
    header = parse_json(table.schema.metadata[KEY])
    header["hashes"] = {"algorithm": Checksum().algorithm, "columns": digests}
    return table.replace_schema_metadata({**table.schema.metadata, **dump_header(header)})


def _chain(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def name_part(number: int, name: str) -> str:
    """Return the name of a file of a directory."""
    return f"part-{number:05}.{name}"


def _split_stored(data: Any, columns: dict[str, Any]) -> Iterator[Any]:
    """Yield the tables of a collection: one, or several if leaves are in a store, which are read in parts."""
    stored = [leaf for leaf in data._leaves() if is_stored(leaf)]
    size = sum(leaf.nbytes for leaf in stored)
    if (
        size <= _GROUP_BYTES
        or not data.batch_size
        or columns["row_dims"] != 1
        or not hasattr(data, "_entries")
    ):
        yield to_arrow(data, **columns)
        return
    step = max(1, data.batch_size[0] * _GROUP_BYTES // size)
    for start in range(0, data.batch_size[0], step):
        yield to_arrow(data[start : start + step], **columns)


def _write(
    sink: Any,
    schema: Any,
    tables: Any,
    open_writer: OpenWriter,
    rows: int | None,
    report: Callable[[int], None],
) -> None:
    with open_writer(sink, schema) as writer:
        for table in tables:
            write_table(writer, table, schema, rows)
            report(table.num_rows)


def write_table(writer: Any, table: Any, schema: Any, rows: int | None) -> None:
    """Write the rows of a table, whose columns are those of a schema, in groups."""
    if table.schema != schema:
        table = fit_schema(table, schema)
    if isinstance(writer, pq.ParquetWriter):
        size = max(1, table.nbytes // max(table.num_rows, 1))
        writer.write_table(table, row_group_size=rows or max(1, min(_GROUP_ROWS, _GROUP_BYTES // size)))
    elif table.num_rows:
        writer.write_table(table, max_chunksize=rows)


def fit_schema(table: Any, schema: Any) -> Any:
    """Return a table with a schema of the same columns; raise StructureError if columns, types or what fields say differ."""
    for item in schema:
        if item.name not in table.schema.names:
            raise StructureError(f"the rows lack the column {item.name!r} of the table")
        own = table.schema.field(item.name)
        if own.type == pa.null() and item.nullable and read_facts(item).get("kind") == "values":
            continue  # all of them are None
        if own.type != item.type or own.metadata != item.metadata:
            raise StructureError(
                f"the column {item.name!r} of the rows has the type {_show_type(own)}, and that of the table {_show_type(item)}"
            )
    more = [name for name in table.schema.names if name not in schema.names]
    if more:
        raise StructureError(f"the table lacks the columns {', '.join(map(repr, more))} of the rows")
    return table.select(schema.names).cast(schema)


def _show_type(item: Any) -> str:
    """Return the type of a field, and what the field says about it."""
    facts = read_facts(item)
    return f"{item.type} {json.dumps(facts)}" if facts else str(item.type)


@declare_options(WRITER)
def append_parquet(
    rows: Any,
    location: Any,
    *,
    compression: Any = "auto",
    tensors: str | Mapping[NestedKey | None, str] = "auto",
    separator: str | None = None,
    checksums: bool = False,
    durable: bool = False,
    **options: Any,
) -> None:
    """Add rows to a directory of Parquet files, as a file of their own; the options are those of :func:`save_parquet`.

    Raises:
        UnsupportedOperationError: the location is a file.
        StructureError: the rows have other columns.
    """
    columns = {"separator": separator, "tensors": tensors}
    _append("parquet", make_parquet_writer(compression, checksums, options), rows, location, columns, durable)


def append_arrow(
    rows: Any,
    location: Any,
    *,
    compression: str | None = None,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    separator: str | None = None,
    durable: bool = False,
) -> None:
    """Add rows to a directory of files of Arrow, as a file of their own; the options are those of :func:`save_arrow`.

    Raises:
        UnsupportedOperationError: the location is a file.
        StructureError: the rows have other columns.
    """
    columns = {"separator": separator, "tensors": tensors}
    _append("arrow", make_arrow_writer(compression), rows, location, columns, durable)


def _append(
    name: str, open_writer: OpenWriter, rows: Any, location: Any, columns: dict[str, Any], durable: bool
) -> None:
    """Add rows to a directory of files, as a file of their own."""
    if not is_directory(location):
        raise UnsupportedOperationError(
            f"cannot append rows to {show_place(location)}, which is one file: save with max_rows_per_file for a directory, or "
            "use TableWriter"
        )
    folder = os.fspath(location)
    with open_tables(location, name) as table:
        schema = table.schema
    content = fit_schema(to_arrow(rows, **columns), schema)
    names = {os.path.basename(path) for path, _ in list_parts(folder)}
    number = 1 + max(
        (int(item[5:10]) for item in names if item.startswith("part-") and item[5:10].isdigit()), default=-1
    )
    while True:
        try:
            path = os.path.join(folder, name_part(number, name))
            with NewFile(path, replace=False, beside=(f".{name}",)) as new:
                with pa.OSFile(new.temporary, "wb") as sink:
                    _write(sink, schema, [content], open_writer, None, lambda count: None)
                new.commit(durable=durable)
            return
        except FileExistsError:
            number += 1  # another process has appended
