"""Write collections as data sets of mosaicml-streaming (MDS), without that library."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from td_core.errors import CodecError
from td_core.spi import parse_json, show_path
from td_store.files import NewDirectory

from ._json_text import write_cells
from ._mds_encodings import BYTES, SCALARS, encode_cells, find_size, is_known
from ._mds_shards import (
    check_hashes,
    compress,
    describe_file,
    dump_config,
    make_shard,
    parse_compression,
    parse_size,
    split_samples,
)
from ._read_columns import is_list, join_chunks, split_lists
from ._table_header import read_facts
from ._write_columns import to_arrow

#: Settings of the library for uploads.
_UPLOADS = frozenset({"progress_bar", "max_workers", "retry"})


class Column(NamedTuple):
    """A column of samples: its encoding, and its cells, an array or a list."""

    name: str
    encoding: str
    cells: Any


def to_mds(
    data: Any,
    *,
    columns: Mapping[str, str] | None = None,
    out: Any = None,
    keep_local: bool = False,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | str | None = 1 << 26,
    writer: Any = None,
    finish_writer: bool | None = None,
    **kwargs: Any,
) -> None:
    """Write a collection as a data set of mosaicml-streaming: a sample for each row.

    Numbers have their dtypes, bools are uint8, and leaves with dims are arrays of a fixed shape. Text and bytes are that, other
    values JSON. Keys of nested entries are joined by a dot. The index has a header that the library ignores, with which
    :func:`from_mds` gives the same collection. The directory appears whole.

    Args:
        data: the collection.
        columns: the encoding of each column, instead of those that are found. All must be there.
        out: a directory that is new or empty; or a remote location, or a pair of both, to which the library writes.
        keep_local: with a remote location, keep the local directory.
        compression: ``"zstd"``, ``"gz"``, ``"bz2"``, ``"br"`` or ``"snappy"``, also with a level, as ``"zstd:7"``.
        hashes: names of hashes of each shard, sorted; ``from_mds`` checks them.
        size_limit: the most bytes of a shard, also as text, such as ``"100kb"``; None for one shard.
        writer: an ``MDSWriter`` of the library to write to, instead of ``out``.
        finish_writer: whether the writer is finished; by default if the collection has batch dims.
        **kwargs: settings of the library for uploads: ``progress_bar``, ``max_workers``, ``retry``.

    Raises:
        FileExistsError: the directory has files.
        CodecError: a value or leaf cannot be stored.
        ValueError: an option is invalid, or ``columns`` lacks an entry.
        ImportError: a remote location needs the library.

    >>> to_mds(TensorDict({"x": torch.arange(6).view(3, 2), "name": ["a", "b", "c"]}, [3]), out="samples")
    >>> from td_arrow import from_mds
    >>> from_mds("samples", rows=[2, 0])["x"]
    tensor([[4, 5],
            [0, 1]])
    """
    if unknown := kwargs.keys() - _UPLOADS:
        raise TypeError(f"to_mds() has no option {', '.join(map(repr, sorted(unknown)))}")
    if (out is None) == (writer is None):
        raise TypeError("to_mds() takes out= or writer=")
    packing, limit, algorithms = parse_compression(compression), parse_size(size_limit), check_hashes(hashes)
    table = to_arrow(data, separator=".")
    made = _choose_columns(table, columns)
    if writer is not None:
        _write_with(
            writer, made, table.num_rows, bool(data.batch_size) if finish_writer is None else finish_writer
        )
        return
    if _is_remote(out):
        created = _make_writer(out, made, keep_local, compression, algorithms, size_limit, kwargs)
        _write_with(created, made, table.num_rows, True)
        return
    _save(os.fspath(out), made, table, compression, packing, algorithms, limit)


def _is_remote(out: Any) -> bool:
    return isinstance(out, (tuple, list)) or (
        isinstance(out, str) and "://" in out and not out.startswith("file:")
    )


def _make_writer(
    out: Any,
    columns: Sequence[Column],
    keep_local: bool,
    compression: str | None,
    hashes: list[str],
    size_limit: Any,
    options: Mapping[str, Any],
) -> Any:
    try:
        from streaming import MDSWriter
    except ImportError as error:
        raise ImportError(
            "to_mds() to a remote location needs mosaicml-streaming: pip install mosaicml-streaming"
        ) from error
    encodings = {column.name: column.encoding for column in columns}
    return MDSWriter(
        columns=encodings,
        out=out,
        keep_local=keep_local,
        compression=compression,
        hashes=hashes,
        size_limit=size_limit,
        **options,
    )


def _write_with(writer: Any, columns: Sequence[Column], rows: int, finish: bool) -> None:
    """Write samples with a writer of the library, which has its own encodings."""
    cells = [
        column.cells.tolist()
        if isinstance(column.cells, np.ndarray) and column.cells.ndim == 1
        else column.cells
        for column in columns
    ]
    with writer if finish else nullcontext():
        for row in range(rows):
            writer.write({column.name: each[row] for column, each in zip(columns, cells, strict=True)})


def _choose_columns(table: Any, encodings: Mapping[str, str] | None) -> list[Column]:
    """Return the columns of a table, with the encodings that the caller wants."""
    if encodings is not None:
        for names, problem in (
            ([name for name in table.schema.names if name not in encodings], "columns lacks the entries"),
            (
                [name for name in encodings if name not in table.schema.names],
                "the collection lacks the columns",
            ),
        ):
            if names:
                raise ValueError(
                    f"{problem} {', '.join(map(repr, names))}: name all entries, or select() those to write"
                )
        for name, encoding in encodings.items():
            if not is_known(encoding):
                raise ValueError(
                    f"columns: {name!r} has the encoding {encoding!r:.100}, which is "
                    f"{'a pickle, which can run any code' if encoding == 'pkl' else 'unknown'}"
                )
    return [
        _make_column(item, join_chunks(table.column(item.name)), (encodings or {}).get(item.name))
        for item in table.schema
    ]


def _make_column(item: Any, array: Any, wanted: str | None) -> Column:
    encoding, cells = _find_cells(item, array)
    if wanted is None:
        return Column(item.name, encoding, cells)
    if wanted in ("json", "str", "str_int", "str_float", "str_decimal"):
        cells = array.to_pylist()
    elif wanted in BYTES and encoding != "bytes":
        raise CodecError(f"cannot save {show_path((item.name,))} as {wanted!r}: it has no bytes")
    return Column(item.name, wanted, cells)


def _find_cells(item: Any, array: Any) -> tuple[str, Any]:
    """Return the encoding of a column, and its cells."""
    kind = array.type
    if read_facts(item).get("json"):
        return "json", [None if text is None else parse_json(text) for text in array.to_pylist()]
    if not array.null_count:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "str", array.to_pylist()
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return "bytes", array.to_pylist()
        is_value = read_facts(item).get("kind") == "values" and is_list(kind)
        numbers = None if is_value else _find_numbers(array)
        if numbers is not None:
            return numbers
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise CodecError(f"cannot save {show_path((item.name,))}: MDS holds no bytes beside None")
    return "json", [parse_json(text) for text in write_cells(array, nonfinite="literal").to_pylist()]


def _find_numbers(array: Any) -> tuple[str, Any] | None:
    """Return encoding and cells of a column of numbers, or of lists of these; None for another column."""
    sizes: list[int] = []
    lists: list[Any] = []
    inner = array
    while is_list(inner.type):
        if not pa.types.is_fixed_size_list(inner.type):
            if sizes:
                return None
            lengths, inner, _ = split_lists(inner)
            lists.append(lengths)
        else:
            sizes.append(inner.type.list_size)
            inner = inner.flatten()
    if inner.null_count or not (
        pa.types.is_integer(inner.type) or pa.types.is_floating(inner.type) or pa.types.is_boolean(inner.type)
    ):
        return None
    flat = inner.to_numpy(zero_copy_only=False)
    flat = flat.astype(np.uint8) if flat.dtype == bool else flat
    name = next(each for each, dtype in SCALARS.items() if dtype == flat.dtype)
    if not lists:
        cells = flat.reshape(len(array), *sizes)
        return (f"ndarray:{name}:{','.join(map(str, sizes))}" if sizes else name), cells
    if len(lists) > 1:
        return f"ndarray:{name}", [np.array(cell, flat.dtype) for cell in array.to_pylist()]
    ends = np.cumsum(lists[0])
    flat = flat.reshape(-1, *sizes)
    return f"ndarray:{name}", [
        flat[end - length : end] for end, length in zip(ends.tolist(), lists[0].tolist(), strict=True)
    ]


def _encode(columns: Sequence[Column], rows: int) -> Iterator[Any]:
    """Yield the bytes of the cells of each column."""
    for column in columns:
        try:
            yield encode_cells(column.encoding, column.cells) if rows else np.zeros((0, 0), np.uint8)
        except CodecError as error:
            raise CodecError(f"cannot save {show_path((column.name,))}, {error}") from None
        except (TypeError, ValueError) as error:
            raise CodecError(
                f"cannot save {show_path((column.name,))} with the encoding {column.encoding!r}: {error}"
            ) from error


def _join_samples(columns: Sequence[Column], rows: int) -> tuple[Any, list[bytes] | None, Any]:
    """Return the bytes of each sample, as a matrix if all have one size, else as a list, and the sizes."""
    cells = [*_encode(columns, rows)]
    fixed = [find_size(column.encoding) is not None for column in columns]
    if all(fixed):
        matrix = np.concatenate(cells, axis=1) if cells else np.zeros((rows, 0), np.uint8)
        return matrix, None, np.full(rows, matrix.shape[1])
    variable = [each for each, is_fixed in zip(cells, fixed, strict=True) if not is_fixed]
    heads = np.array([[len(cell) for cell in each] for each in variable], "<u4").T
    samples = [
        b"".join(
            [
                heads[row].tobytes(),
                *(each[row].tobytes() if isinstance(each, np.ndarray) else each[row] for each in cells),
            ]
        )
        for row in range(rows)
    ]
    return None, samples, np.array([len(sample) for sample in samples])


def _save(
    folder: str,
    columns: Sequence[Column],
    table: Any,
    compression: str | None,
    packing: tuple[str, int | None] | None,
    hashes: list[str],
    limit: int | None,
) -> None:
    if os.path.isdir(folder) and os.listdir(folder):
        raise FileExistsError(f"{folder} has files: choose a new directory, or remove it")
    matrix, samples, sizes = _join_samples(columns, table.num_rows)
    config = {
        "version": 2,
        "format": "mds",
        "compression": compression,
        "hashes": hashes,
        "size_limit": limit,
        "column_names": [column.name for column in columns],
        "column_encodings": [column.encoding for column in columns],
        "column_sizes": [find_size(column.encoding) for column in columns],
    }
    text = dump_config(config)
    shards: list[dict[str, Any]] = []
    with NewDirectory(folder) as new:
        for start, stop in split_samples(sizes, 8 + len(text), limit):
            joined = matrix[start:stop].tobytes() if samples is None else b"".join(samples[start:stop])
            content = make_shard(text, joined, sizes[start:stop])
            name = f"shard.{len(shards):05}.mds"
            raw, packed = describe_file(name, content, hashes), None
            if packing is not None:
                content, name = compress(*packing, content), f"{name}.{packing[0]}"
                packed = describe_file(name, content, hashes)
            with open(os.path.join(new.temporary, name), "wb") as file:
                file.write(content)
            shards.append({"samples": stop - start, "raw_data": raw, "zip_data": packed, **config})
        header = {"version": 1, "schema": base64.b64encode(table.schema.serialize()).decode()}
        with open(os.path.join(new.temporary, "index.json"), "w", encoding="ascii") as file:
            json.dump({"version": 2, "shards": shards, "td": header}, file)
        new.commit()
