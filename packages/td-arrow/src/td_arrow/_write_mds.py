"""Write collections as data sets of mosaicml-streaming (MDS), without that library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from td_core import TensorCollection
from td_core.errors import CodecError
from td_core.spi import parse_json, show_path
from td_store.files import NewDirectory

from ._arrow_types import Facts, is_list
from ._json_text import write_cells
from ._mds_encodings import BYTES, SCALARS, Bytes, encode_cells, find_size, is_known
from ._mds_shards import Packing, describe_file, make_shard, split_samples
from ._read_columns import join_chunks, split_lists
from ._table_header import read_facts
from ._text_schemas import dump_schema
from ._write_columns import make_table

#: Settings of the library for uploads.
_UPLOADS = frozenset({"keep_local", "progress_bar", "max_workers", "retry"})


class Column(NamedTuple):
    """A column of samples: its encoding, and its cells, an array or a list."""

    name: str
    encoding: str
    cells: Any


def write_mds(
    data: TensorCollection,
    encodings: Mapping[str, str] | None,
    out: Any,
    writer: Any,
    finish_writer: bool | None,
    packing: Facts,
    uploads: Facts,
) -> None:
    """Write a collection as a data set; see :func:`td_arrow.to_mds`."""
    if unknown := uploads.keys() - _UPLOADS:
        raise TypeError(f"to_mds() has no option {', '.join(map(repr, sorted(unknown)))}")
    packed = Packing.of(**packing)
    table = make_table(data, ".")
    columns = _choose_columns(table, encodings)
    is_remote = isinstance(out, (tuple, list)) or (
        isinstance(out, str) and "://" in out and not out.startswith("file:")
    )
    if writer is not None:
        finish = bool(data.batch_size) if finish_writer is None else finish_writer
        _write_with(writer, columns, table.num_rows, finish)
    elif is_remote:
        try:
            from streaming import MDSWriter
        except ImportError as error:
            raise ImportError(
                "to_mds() to a remote location needs mosaicml-streaming: pip install mosaicml-streaming"
            ) from error
        named = {column.name: column.encoding for column in columns}
        created = MDSWriter(columns=named, out=out, **{**packing, "hashes": packed.hashes}, **uploads)
        _write_with(created, columns, table.num_rows, True)
    else:
        _save(os.fspath(out), columns, table, packed)


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


def _choose_columns(table: pa.Table, encodings: Mapping[str, str] | None) -> list[Column]:
    """Return the columns of a table, with the encodings that the caller wants."""
    found = encodings or {}
    if encodings is not None:
        lacking = [name for name in table.schema.names if name not in encodings]
        unknown = [name for name in encodings if name not in table.schema.names]
        if lacking or unknown:
            problem = "columns lacks the entries" if lacking else "the collection lacks the columns"
            raise ValueError(
                f"{problem} {', '.join(map(repr, lacking or unknown))}: name all entries, or select() those to write"
            )
    for name, encoding in found.items():
        if not is_known(encoding):
            reason = "a pickle, which can run any code" if encoding == "pkl" else "unknown"
            raise ValueError(f"columns: {name!r} has the encoding {encoding!r:.100}, which is {reason}")
    return [
        _make_column(item, join_chunks(column), found.get(item.name))
        for item, column in zip(table.schema, table.columns, strict=True)
    ]


def _make_column(item: pa.Field, array: pa.Array, wanted: str | None) -> Column:
    encoding, cells = _find_cells(item, array)
    if wanted is None:
        return Column(item.name, encoding, cells)
    if wanted in ("json", "str", "str_int", "str_float", "str_decimal"):
        cells = array.to_pylist()
    elif wanted in BYTES and encoding != "bytes":
        raise CodecError(f"cannot save {show_path((item.name,))} as {wanted!r}: it has no bytes")
    return Column(item.name, wanted, cells)


def _find_cells(item: pa.Field, array: pa.Array) -> tuple[str, Any]:
    """Return the encoding of a column, and its cells."""
    kind, facts = array.type, read_facts(item)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if facts.get("json"):
        return "json", [None if text is None else parse_json(text) for text in array.to_pylist()]
    if array.null_count:
        if is_bytes:
            raise CodecError(f"cannot save {show_path((item.name,))}: MDS holds no bytes beside None")
    elif is_bytes or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "bytes" if is_bytes else "str", array.to_pylist()
    elif not (facts.get("kind") == "values" and is_list(kind)):
        numbers = _find_numbers(array)
        if numbers is not None:
            return numbers
    return "json", [parse_json(text) for text in write_cells(array, nonfinite="literal").to_pylist()]


def _find_numbers(array: pa.Array) -> tuple[str, Any] | None:
    """Return encoding and cells of a column of numbers, or of lists of these; None for another column."""
    sizes: list[int] = []
    lists = []
    inner = array
    while is_list(inner.type):
        if pa.types.is_fixed_size_list(inner.type):
            sizes.append(inner.type.list_size)
            inner = inner.flatten()
        elif sizes:
            return None
        else:
            lengths, inner, _ = split_lists(inner)
            lists.append(lengths)
    types = pa.types
    numeric = any(check(inner.type) for check in (types.is_integer, types.is_floating, types.is_boolean))
    if inner.null_count or not numeric:
        return None
    flat = inner.to_numpy(zero_copy_only=False)
    flat = flat.astype(np.uint8) if flat.dtype == bool else flat
    name = next(each for each, dtype in SCALARS.items() if dtype == flat.dtype)
    if not lists:
        cells = flat.reshape(len(array), *sizes)
        return (f"ndarray:{name}:{','.join(map(str, sizes))}" if sizes else name), cells
    if len(lists) > 1:
        return f"ndarray:{name}", [np.array(cell, flat.dtype) for cell in array.to_pylist()]
    return f"ndarray:{name}", np.split(flat.reshape(-1, *sizes), np.cumsum(lists[0])[:-1])


def _encode(columns: Sequence[Column], rows: int) -> Iterator[Bytes | list[bytes]]:
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


def _join_samples(columns: Sequence[Column], rows: int) -> Bytes | list[bytes]:
    """Return the bytes of each sample: a matrix if all have one size, else a list."""
    cells = [*_encode(columns, rows)]
    fixed = [find_size(column.encoding) is not None for column in columns]
    if all(fixed):
        return np.concatenate(cells, axis=1) if cells else np.zeros((rows, 0), np.uint8)
    variable = [each for each, is_fixed in zip(cells, fixed, strict=True) if not is_fixed]
    heads = np.array([[len(cell) for cell in each] for each in variable], "<u4").T
    return [b"".join([heads[row].tobytes(), *(bytes(each[row]) for each in cells)]) for row in range(rows)]


def _save(folder: str, columns: Sequence[Column], table: pa.Table, packing: Packing) -> None:
    if os.path.isdir(folder) and os.listdir(folder):
        raise FileExistsError(f"{folder} has files: choose a new directory, or remove it")
    samples = _join_samples(columns, table.num_rows)
    sizes = np.array([len(sample) for sample in samples], np.int64)
    config = {
        "version": 2,
        "format": "mds",
        "compression": packing.name,
        "hashes": packing.hashes,
        "size_limit": packing.limit,
        "column_names": [column.name for column in columns],
        "column_encodings": [column.encoding for column in columns],
        "column_sizes": [find_size(column.encoding) for column in columns],
    }
    text = json.dumps(config, sort_keys=True).encode()
    shards: list[Facts] = []
    with NewDirectory(folder) as new:
        for start, stop in split_samples(sizes, 8 + len(text), packing.limit):
            part = samples[start:stop]
            joined = part.tobytes() if isinstance(part, np.ndarray) else b"".join(part)
            content = make_shard(text, joined, sizes[start:stop])
            name = f"shard.{len(shards):05}.mds"
            raw, packed = describe_file(name, content, packing.hashes), None
            if packing.codec is not None:
                content, name = packing.compress(content), f"{name}.{packing.codec}"
                packed = describe_file(name, content, packing.hashes)
            with open(os.path.join(new.temporary, name), "wb") as file:
                file.write(content)
            shards.append({"samples": stop - start, "raw_data": raw, "zip_data": packed, **config})
        with open(os.path.join(new.temporary, "index.json"), "w", encoding="ascii") as file:
            json.dump({"version": 2, "shards": shards, "td": dump_schema(table.schema)}, file)
        new.commit()
