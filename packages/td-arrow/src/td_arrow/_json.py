"""JSON files: an array of records, or one record a line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pjson
import torch

from td_core import KeyPathError, NestedKey
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
from ._table_locations import open_input, open_output, show_place
from ._table_plan import EMPTY
from ._text_schemas import build_column, check_beside, find_stand_in, load_schema, save_schema
from ._write_columns import to_arrow

#: The rows whose text is made at a time.
_ROWS = 1 << 16
#: The most bytes that Arrow parses at a time, in which it has one type for each field.
_MOST_BLOCK = 1 << 30


def to_json(
    data: Any,
    path: Any,
    *,
    separator: str | None = None,
    lines: bool = False,
    schema: bool = False,
    nonfinite: str = "raise",
    durable: bool = False,
) -> None:
    """Write a collection as JSON in UTF-8: a record for each row, with nested records for nested collections.

    Args:
        data: the collection.
        path: a path, a URL, or a binary file object.
        separator: joins the keys of nested entries to one name.
        lines: write one record a line, instead of an array of records.
        schema: write ``<name>.td.json`` beside the file, with which :func:`from_json` gives the same collection.
        nonfinite: what an infinite number is: ``"raise"``, ``"literal"`` for ``Infinity`` and ``NaN``, which Python and few
            other programs read, or ``"null"``. Otherwise NaN is null.
        durable: return after the file has reached the disk.

    Raises:
        CodecError: a column has bytes, or what no format can store.
        ValueError: a number is infinite, or an option is invalid.

    >>> import pathlib
    >>> to_json(TensorDict({"x": torch.tensor([1.0, 2.5]), "n": {"y": torch.arange(2)}}, [2]), "data.jsonl", lines=True)
    >>> print(pathlib.Path("data.jsonl").read_text())
    {"x": 1.0, "n": {"y": 0}}
    {"x": 2.5, "n": {"y": 1}}
    <BLANKLINE>
    """
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite is one of {', '.join(map(repr, NONFINITE))}; got {nonfinite!r:.100}")
    if schema:
        check_beside(path)
    table = to_arrow(data, separator=separator)
    begin, between, end = ("", "\n", "\n") if lines else ("[\n", ",\n", "\n]\n")
    with open_output(path, durable) as sink:
        sink.write(begin.encode())
        for start in range(0, table.num_rows, _ROWS):
            records = _write_records(table.slice(start, _ROWS), nonfinite, start)
            sink.write((between if start else "").encode())
            whole = pa.LargeListArray.from_arrays(pa.array([0, len(records)], pa.int64()), records)
            sink.write(pc.binary_join(whole, pa.scalar(between, pa.large_string()))[0].as_buffer())
        sink.write((end if table.num_rows or not lines else "").encode())
    if schema:
        save_schema(path, table.schema)


def _write_records(table: Any, nonfinite: str, start: int) -> Any:
    """Return the text of each row of a table."""
    items = [item for item in table.schema if item.name != EMPTY]
    cells = [
        _write_column(join_chunks(table.column(item.name)), item, (item.name,), nonfinite, start)
        for item in items
    ]
    return join_fields([item.name for item in items], cells, table.num_rows)


def _write_column(array: Any, item: Any, path: Path, nonfinite: str, start: int) -> Any:
    """Return the JSON text of the cells of a column; the fields of a level have columns of their own."""
    if is_level(item) and not array.null_count:
        parts = [item.type.field(i) for i in range(item.type.num_fields)]
        below = [
            _write_column(part, each, (*path, each.name), nonfinite, start)
            for part, each in zip(array.flatten(), parts, strict=True)
        ]
        return join_fields([each.name for each in parts], below, len(array))
    if read_facts(item).get("json"):
        return array.cast(pa.large_string()).fill_null("null")
    stand_in = find_stand_in(item)
    try:
        return write_cells(
            array, None if stand_in is None else str(stand_in).removeprefix("torch."), nonfinite
        )
    except InfiniteError as error:
        raise ValueError(
            f'{show_path(path)}, row {start + error.position}: {error}: pass nonfinite="literal" or nonfinite="null"'
        ) from None
    except CodecError as error:
        raise CodecError(f"cannot save {show_path(path)} as text: {error}") from error


def read_json(
    path: Any,
    *,
    separator: str | None = None,
    lines: bool | None = None,
    dtypes: Mapping[NestedKey, torch.dtype] | None = None,
    schema: bool | None = None,
    device: Any = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Read a JSON file; see :func:`from_json`."""
    where = show_place(path)
    found = load_schema(path, schema)
    with open_input(path, storage_options) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{where}, line {line}: its bytes are not UTF-8") from error
    table = _parse_quickly(content, lines) if found is None else None
    if table is None:
        records = _parse_records(text, lines if text.strip() or found is None else True, where)
        table = _infer_table(records, where) if found is None else _fit_schema(records, found, where)
    result = read_in_memory(
        table,
        where,
        nulls=nulls,
        mask_key=mask_key,
        keys=keys,
        separator=separator,
        lists=lists,
        device=device,
    )
    for key, dtype in (dtypes or {}).items():
        if result.get(key, None) is None:
            raise KeyPathError(f"{where}: there is no {key!r} for dtypes")
        result.set(key, result.get(key).to(dtype))
    return result if rows is None else result[rows]


def _parse_quickly(content: bytes, lines: bool | None) -> Any:
    """Return the table that Arrow makes of one record a line; None where the rule for types differs from that of Arrow."""
    if lines is False or content[:1] != b"{":
        return None
    options = pjson.ReadOptions(block_size=max(1 << 20, min(len(content), _MOST_BLOCK)))
    try:
        table = pjson.read_json(io.BytesIO(content), read_options=options)
        dates = [item.name for item in table.schema if pa.types.is_temporal(item.type)]
        if dates:
            explicit = pa.schema([(name, pa.string()) for name in dates])
            parse = pjson.ParseOptions(explicit_schema=explicit)
            table = pjson.read_json(io.BytesIO(content), read_options=options, parse_options=parse)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    # Arrow reads records of several lines, too.
    if table.num_rows != content.count(b"\n") + (content[-1:] != b"\n"):
        return None
    if not table.schema.names or not all(_is_plain(chunks) for chunks in table.columns):
        return None
    return table


def _is_plain(array: Any) -> bool:
    """Return True for a column that Arrow reads as the rule says: no dates, no large integers, no records in lists."""
    kind = array.type
    if pa.types.is_struct(kind):
        parts = range(kind.num_fields)
        return bool(parts) and all(
            _is_plain(pa.chunked_array([each.field(i) for each in array.chunks])) for i in parts
        )
    if pa.types.is_list(kind):
        inner = kind.value_type
        return not (pa.types.is_nested(inner) or pa.types.is_null(inner)) and _is_plain(
            pc.list_flatten(array)
        )
    if pa.types.is_floating(kind):
        # Integers of more than 64 bits are floats of Arrow.
        return not pc.any(pc.greater_equal(pc.abs(array), 2.0**63)).as_py()
    return not pa.types.is_temporal(kind)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of the pairs of an object; raise FormatError if two have one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedError(next(name for name in names if names.count(name) > 1))
    return found


class _RepeatedError(Exception):
    """Two fields of a record have one name."""


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
    records = [*_parse_lines(text, where)] if lines else _parse(text, 1, where)
    if isinstance(records, dict):
        _refuse_object(where)
    if not isinstance(records, list):
        raise FormatError(f"{where}: it is no array of records: its content is a {type(records).__name__}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise FormatError(f"{where}: record {number} is no object, but a {type(record).__name__}")
    return records


def _refuse_object(where: str) -> NoReturn:
    raise FormatError(f"{where}: it is a single object, not records: use from_dict(json.load(file))")


def _parse(text: str, line: int, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except _RepeatedError as error:
        raise FormatError(f"{where}: a record has two fields called {str(error)!r}") from None
    except json.JSONDecodeError as error:
        raise FormatError(f"{where}, line {line + error.lineno - 1}: {error.msg}") from error
    except RecursionError as error:
        raise FormatError(f"{where}: its values are nested too deep") from error


def _parse_lines(text: str, where: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _parse(line, number, where)
            except FormatError:
                if number == 1 and text.rstrip()[-1:] == "}" and _is_object(text):
                    _refuse_object(where)
                raise


def _is_object(text: str) -> bool:
    """Return True if a whole text is one object."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


def _infer_table(records: list[dict[str, Any]], where: str) -> Any:
    """Return a table of records, whose types are those of their values."""
    if not any(records):
        return pa.table({EMPTY: pa.nulls(len(records))})
    arrays, items = _infer_columns(records, (), where)
    return pa.Table.from_arrays(arrays, schema=pa.schema(items))


def _infer_columns(records: list[Any], path: Path, where: str) -> tuple[list[Any], list[Any]]:
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
    if kinds == {dict}:
        present = [value is not None for value in values]
        arrays, items = _infer_columns(values, path, where)
        mask = None if all(present) else pa.array([not each for each in present])
        if not arrays:
            return make_values(values, lambda row: f"{where}: column {show_column(path)}, row {row}")
        return Cells(pa.StructArray.from_arrays(arrays, fields=items, mask=mask), {})
    if kinds <= {int, float} or kinds in ({bool}, {str}):
        return Cells(_make_scalars(values, kinds, path, where), {})
    if kinds == {list}:
        found = _make_lists(values, path, where)
        if found is not None:
            return Cells(found, {})
    return make_values(values, lambda row: f"{where}: column {show_column(path)}, row {row}")


def _make_scalars(values: list[Any], kinds: set[type], path: Path, where: str) -> Any:
    if not kinds:
        return pa.nulls(len(values))
    if kinds == {int}:
        present = [value for value in values if value is not None]
        low, high = min(present), max(present)
        if high >= 1 << 64 or low < -(1 << 63) or (low < 0 and high >= 1 << 63):
            raise FormatError(f"{where}: column {show_column(path)} has integers of more than 64 bits")
        return pa.array(values, pa.uint64() if high >= 1 << 63 else pa.int64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {str}:
        return pa.array(values, pa.large_string())
    return pa.array([None if value is None else float(value) for value in values], pa.float64())


def _make_lists(values: list[Any], path: Path, where: str, *, is_inner: bool = False) -> Any:
    """Return an array of lists of numbers, at any depth; None for other lists. Inner lists of one length have a fixed size."""
    items = [item for value in values if value is not None for item in value]
    kinds = {*map(type, items)} - {type(None)}
    inner: Any = None
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
    offsets: list[Any] = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    mask = pa.array([value is None for value in values]) if None in values else None
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), inner, mask=mask)


def _fit_schema(records: list[Any], schema: Any, where: str) -> Any:
    """Return the table of a schema, whose columns the records have."""
    if EMPTY in schema.names:
        return pa.Table.from_arrays([pa.nulls(len(records))], schema=schema)
    arrays = [
        _fit_column([record.get(item.name) for record in records], item, (item.name,), where)
        for item in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _fit_column(values: list[Any], item: Any, path: Path, where: str) -> Any:
    try:
        if not is_level(item):
            return build_column(values, item)
        parts = [item.type.field(i) for i in range(item.type.num_fields)]
        arrays = [
            _fit_column(
                [None if value is None else value[each.name] for value in values],
                each,
                (*path, each.name),
                where,
            )
            for each in parts
        ]
        mask = pa.array([value is None for value in values]) if None in values else None
        return pa.StructArray.from_arrays(arrays, fields=parts, mask=mask)
    except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{where}: column {show_column(path)} is not what the schema beside the file says: pass schema=False"
        ) from error
