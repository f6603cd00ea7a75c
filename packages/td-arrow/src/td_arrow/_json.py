"""JSON files: an array of records, or one record a line."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pjson
import torch

from td_core import KeyPathError, NestedKey, TensorCollection
from td_core.errors import CodecError, FormatError
from td_core.spi import parse_json, show_path

from ._arrow_types import Cells
from ._from_arrow import read_in_memory
from ._json_text import NONFINITE, InfiniteError, join_fields, write_cells
from ._nulls import Path, show_column
from ._read_columns import join_chunks
from ._row_values import make_values
from ._table_columns import is_level
from ._table_header import make_field, read_facts
from ._table_locations import StorageOptions, open_input, open_output, show_place
from ._table_plan import EMPTY
from ._text_schemas import build_column, check_beside, find_stand_in, load_schema, save_schema
from ._write_columns import make_table

#: The rows whose text is made at a time.
_ROWS = 1 << 16
#: The most bytes that Arrow parses at a time, in which it has one type for each field.
_MOST_BLOCK = 1 << 30


def write_json(
    data: TensorCollection,
    path: Any,
    separator: str | None,
    lines: bool,
    schema: bool,
    nonfinite: str,
    durable: bool,
) -> None:
    """Write a collection as JSON; see :func:`td_arrow.to_json`."""
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite is one of {', '.join(map(repr, NONFINITE))}; got {nonfinite!r:.100}")
    if schema:
        check_beside(path)
    table = make_table(data, separator)
    items = [item for item in table.schema if item.name != EMPTY]
    begin, between, end = ("", "\n", "\n") if lines else ("[\n", ",\n", "\n]\n")
    with open_output(path, durable) as sink:
        sink.write(begin.encode())
        for start in range(0, table.num_rows, _ROWS):
            part = table.slice(start, _ROWS)
            cells = [
                _write_column(join_chunks(part.column(item.name)), item, (item.name,), nonfinite, start)
                for item in items
            ]
            records = join_fields([item.name for item in items], cells, part.num_rows)
            sink.write((between if start else "").encode())
            whole = pa.LargeListArray.from_arrays(pa.array([0, len(records)], pa.int64()), records)
            sink.write(pc.binary_join(whole, pa.scalar(between, pa.large_string()))[0].as_buffer())
        sink.write((end if table.num_rows or not lines else "").encode())
    if schema:
        save_schema(path, table.schema)


def _write_column(array: pa.Array, item: pa.Field, path: Path, nonfinite: str, start: int) -> pa.Array:
    """Return the JSON text of the cells of a column; the fields of a level have columns of their own."""
    if is_level(item) and not array.null_count:
        below = [
            _write_column(part, each, (*path, each.name), nonfinite, start)
            for part, each in zip(array.flatten(), item.type, strict=True)
        ]
        return join_fields([each.name for each in item.type], below, len(array))
    if read_facts(item).get("json"):
        return array.cast(pa.large_string()).fill_null("null")
    try:
        return write_cells(array, find_stand_in(item), nonfinite)
    except InfiniteError as error:
        raise ValueError(
            f'{show_path(path)}, row {start + error.position}: {error}: pass nonfinite="literal" or nonfinite="null"'
        ) from None
    except CodecError as error:
        raise CodecError(f"cannot save {show_path(path)} as text: {error}") from error


def read_json(
    path: Any,
    *,
    lines: bool | None = None,
    dtypes: Mapping[NestedKey, torch.dtype] | None = None,
    schema: bool | None = None,
    rows: Any = None,
    storage_options: StorageOptions = None,
    **reading: Any,
) -> Any:
    """Read a JSON file; see :func:`td_arrow.from_json`."""
    where = show_place(path)
    found = load_schema(path, schema)
    with open_input(path, storage_options) as file:
        content = file.read()
    if found is not None:
        text = _decode(content, where)
        table = _fit_table(_parse_records(text, lines if text.strip() else True, where), found, where)
    else:
        if not content.isascii():
            _decode(content, where)  # Arrow does not check text
        table = _parse_quickly(content, lines)
        if table is None:
            table = _infer_table(_parse_records(_decode(content, where), lines, where), where)
    result = read_in_memory(table, where, **{"lists": "auto", **reading})
    for key, dtype in (dtypes or {}).items():
        if result.get(key, None) is None:
            raise KeyPathError(f"{where}: there is no {key!r} for dtypes")
        result.set(key, result.get(key).to(dtype))
    return result if rows is None else result[rows]


def _decode(content: bytes, where: str) -> str:
    """Return the text of a file; raise FormatError with the line for bytes that are not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{where}, line {line}: its bytes are not UTF-8") from error


def _parse_quickly(content: bytes, lines: bool | None) -> pa.Table | None:
    """Return the table that Arrow makes of one record a line; None where the rule for types differs from that of Arrow."""
    if lines is False or content[:1] != b"{":
        return None
    read = partial(
        pjson.read_json,
        read_options=pjson.ReadOptions(block_size=max(1 << 20, min(len(content), _MOST_BLOCK))),
    )
    try:
        table = read(io.BytesIO(content))
        dates = [(item.name, pa.string()) for item in table.schema if pa.types.is_temporal(item.type)]
        if dates:
            options = pjson.ParseOptions(explicit_schema=pa.schema(dates))
            table = read(io.BytesIO(content), parse_options=options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    # Arrow reads records of several lines, too.
    whole = table.num_rows == content.count(b"\n") + (content[-1:] != b"\n")
    return table if whole and table.schema.names and all(map(_is_plain, table.columns)) else None


def _is_plain(array: pa.ChunkedArray) -> bool:
    """Return True for a column that Arrow reads as the rule says: no dates, no large integers, no records in lists."""
    kind = array.type
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(map(_is_plain, array.flatten()))
    if pa.types.is_list(kind):
        inner = kind.value_type
        nested = pa.types.is_nested(inner) or pa.types.is_null(inner)
        return not nested and _is_plain(pc.list_flatten(array))
    if pa.types.is_floating(kind):
        # Integers of more than 64 bits are floats of Arrow.
        return not pc.any(pc.greater_equal(pc.abs(array), 2.0**63)).as_py()
    return not pa.types.is_temporal(kind)


class _RepeatedError(Exception):
    """Two fields of a record have one name."""


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of the pairs of an object; raise an error if two have one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedError(next(name for name in names if names.count(name) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_repeated)


def _parse_records(text: str, lines: bool | None, where: str) -> list[dict[str, Any]]:
    """Return the records of a file; ``lines`` None decides by the first character."""
    begin = text.lstrip()[:1]
    if not begin:
        if lines:
            return []
        raise FormatError(f"{where}: the file is empty")
    if lines is None:
        lines = begin != "["
    try:
        numbered = enumerate(text.split("\n"), 1) if lines else ()
        records: Any = [_parse(line, number, where) for number, line in numbered if line.strip()]
        records = records if lines else _parse(text, 1, where)
    except FormatError:
        if begin != "{" or not _is_object(text):
            raise
        records = {}
    if isinstance(records, dict):
        raise FormatError(f"{where}: it is a single object, not records: use from_dict(json.load(file))")
    if not isinstance(records, list):
        raise FormatError(f"{where}: it is no array of records: its content is a {type(records).__name__}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise FormatError(f"{where}: record {number} is no object, but a {type(record).__name__}")
    return records


def _parse(text: str, line: int, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except _RepeatedError as error:
        raise FormatError(f"{where}: a record has two fields called {str(error)!r}") from None
    except json.JSONDecodeError as error:
        raise FormatError(f"{where}, line {line + error.lineno - 1}: {error.msg}") from error
    except RecursionError as error:
        raise FormatError(f"{where}: its values are nested too deep") from error


def _is_object(text: str) -> bool:
    """Return True if a whole text is one object."""
    try:
        return isinstance(parse_json(text), dict)
    except (ValueError, RecursionError):
        return False


def _infer_table(records: list[dict[str, Any]], where: str) -> pa.Table:
    """Return a table of records, whose types are those of their values."""
    if not any(records):
        return pa.table({EMPTY: pa.nulls(len(records))})
    arrays, items = _infer_columns(records, (), where)
    return pa.Table.from_arrays(arrays, schema=pa.schema(items))


def _infer_columns(records: list[Any], path: Path, where: str) -> tuple[list[pa.Array], list[pa.Field]]:
    names = dict.fromkeys(name for record in records if record is not None for name in record)
    arrays, items = [], []
    for name in names:
        values = [None if record is None else record.get(name) for record in records]
        array, facts = _infer_column(values, (*path, name), where)
        arrays.append(array)
        items.append(make_field(name, array, facts))
    return arrays, items


def _infer_column(values: list[Any], path: Path, where: str) -> Cells:
    kinds = {*map(type, values)} - {type(None)}
    array = None
    if kinds == {dict} and any(values):
        arrays, items = _infer_columns(values, path, where)
        array = pa.StructArray.from_arrays(arrays, fields=items, mask=_mask_missing(values))
    elif kinds <= {int, float} or kinds in ({bool}, {str}):
        array = _make_scalars(values, kinds, path, where)
    elif kinds == {list}:
        array = _make_lists(values, path, where)
    if array is None:
        return make_values(values, lambda row: f"{where}: column {show_column(path)}, row {row}")
    return Cells(array, {})


def _mask_missing(values: list[Any]) -> pa.Array | None:
    return pa.array([value is None for value in values]) if None in values else None


def _make_scalars(values: list[Any], kinds: set[type], path: Path, where: str) -> pa.Array:
    if kinds == {int}:
        present = [value for value in values if value is not None]
        low, high = min(present), max(present)
        if high >= 1 << 64 or low < -(1 << 63) or (low < 0 and high >= 1 << 63):
            raise FormatError(f"{where}: column {show_column(path)} has integers of more than 64 bits")
        return pa.array(values, pa.uint64() if high >= 1 << 63 else pa.int64())
    if float in kinds:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values, pa.large_string() if kinds == {str} else None)


def _make_lists(values: list[Any], path: Path, where: str, *, is_inner: bool = False) -> pa.Array | None:
    """Return an array of lists of numbers, at any depth; None for other lists. Inner lists of one length have a fixed size."""
    items = [item for value in values if value is not None for item in value]
    kinds = {*map(type, items)} - {type(None)}
    inner = None
    if kinds == {list}:
        inner = _make_lists(items, path, where, is_inner=True)
    elif kinds and (kinds <= {int, float} or kinds == {bool}):
        inner = _make_scalars(items, kinds, path, where)
    elif not items:
        inner = pa.array([], pa.float64())
    if inner is None:
        return None
    lengths = [0 if value is None else len(value) for value in values]
    if is_inner and len({*lengths}) == 1 and lengths[0] and None not in values:
        return pa.FixedSizeListArray.from_arrays(inner, lengths[0])
    offsets = pa.array([0, *itertools.accumulate(lengths)], pa.int64())
    return pa.LargeListArray.from_arrays(offsets, inner, mask=_mask_missing(values))


def _fit_table(records: list[Any], schema: pa.Schema, where: str) -> pa.Table:
    """Return the table of a schema, whose columns the records have."""
    if EMPTY in schema.names:
        return pa.Table.from_arrays([pa.nulls(len(records))], schema=schema)
    arrays = [build_column([record.get(item.name) for record in records], item, where) for item in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
