"""Write csv files that every program reads."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from td_core import TensorCollection
from td_core.errors import CodecError
from td_core.spi import show_path

from ._arrow_types import is_list, split_type
from ._json_text import InfiniteError, view_floats, write_cells, write_numbers
from ._read_columns import join_chunks
from ._table_header import read_facts
from ._table_locations import open_output
from ._text_schemas import check_beside, find_stand_in, save_schema
from ._write_columns import check_collection, make_table

#: The styles of quoting, by the number of the module csv.
QUOTING = {0: "needed", 1: "all_valid", 2: "all_valid", 3: "none"}
#: Whole floats below it are exact as decimals.
_MOST_EXACT = 1e14
#: The name of the column of one element of a cell.
_CELL = re.compile(r"(.*)\[(\d+(?:,\d+)*)\]\Z", re.DOTALL)


def write_csv(
    data: TensorCollection,
    path: Any,
    separator: str | None,
    schema: bool,
    delimiter: str | None,
    sep: str | None,
    quoting: str | int,
    header: bool,
    encoding: str,
    durable: bool,
) -> None:
    """Write a collection as a csv file; see :func:`td_arrow.to_csv`."""
    check_collection("to_csv", data)
    style = QUOTING.get(quoting, quoting) if isinstance(quoting, int) else quoting
    if style not in QUOTING.values():
        raise ValueError(f"quoting is one of 'needed', 'all_valid' and 'none'; got {quoting!r:.100}")
    if schema:
        check_beside(path)
    delimiter = choose_delimiter(delimiter, sep)
    options = pcsv.WriteOptions(include_header=bool(header), delimiter=delimiter, quoting_style=style)
    nested = next((key for key in data.keys(True) if isinstance(key, tuple)), None)
    if separator is None and nested is not None:
        raise ValueError(
            f'to_csv() has a column for each entry, and {show_path(nested)} is nested: pass separator=".", or flatten_keys()'
        )
    table = make_table(data, separator)
    content = _split_table(table)
    with open_output(path, durable) as sink:
        if is_utf8(encoding):
            _write(content, sink, options)
        else:
            text = pa.BufferOutputStream()
            _write(content, text, options)
            sink.write(text.getvalue().to_pybytes().decode().encode(encoding))
    if schema:
        save_schema(path, table.schema)


def is_utf8(encoding: str) -> bool:
    """Return True for a name of UTF-8."""
    return encoding.lower().replace("-", "") == "utf8"


def choose_delimiter(delimiter: str | None, sep: str | None) -> str:
    """Return the delimiter, which has two names; raise ValueError for an invalid one."""
    if delimiter is not None and sep is not None:
        raise ValueError("pass delimiter or sep, not both")
    found = "," if delimiter is None and sep is None else delimiter if sep is None else sep
    if not isinstance(found, str) or len(found) != 1 or not found.isascii() or found in '"\r\n':
        raise ValueError(f"delimiter is one character of ASCII, no quote or end of line; got {found!r:.100}")
    return found


def _write(table: pa.Table, sink: pa.NativeFile, options: pcsv.WriteOptions) -> None:
    try:
        pcsv.write_csv(table, sink, options)
    except pa.ArrowInvalid as error:
        raise ValueError('a field has a delimiter, quote or end of line: pass quoting="needed"') from error


def _split_table(table: pa.Table) -> pa.Table:
    """Return a table with a column for each column of csv: one for each element of cells, and text for lists."""
    names: list[str] = []
    arrays: list[pa.Array] = []
    for item, chunks in zip(table.schema, table.columns, strict=True):
        for name, cells in split_cells(item.name, join_chunks(chunks)):
            names.append(name)
            arrays.append(cells if read_facts(item).get("json") else _make_column(cells, item))
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"two columns would be called {repeated!r}: rename an entry")
    return pa.table(arrays, names)


def split_cells(name: str, array: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yield the columns of the elements of cells of a fixed size; an array of other cells itself."""
    sizes, kind = split_type(array.type)
    if not sizes or is_list(kind) or pa.types.is_struct(kind):
        yield name, array
        return
    for position in itertools.product(*map(range, sizes)):
        part = array
        for number in position:
            part = pc.list_element(part, number)
        yield f"{name}[{','.join(map(str, position))}]", part


def group_cells(names: Iterable[str]) -> dict[str, dict[tuple[int, ...], str]]:
    """Return the columns ``x[0]`` or ``x[1,2]`` by the name of their leaf and their position."""
    groups: dict[str, dict[tuple[int, ...], str]] = {}
    for name in names:
        match = _CELL.match(name)
        if match is not None:
            groups.setdefault(match[1], {})[tuple(map(int, match[2].split(",")))] = name
    return groups


def _make_column(array: pa.Array, item: pa.Field) -> pa.Array:
    dtype, types = find_stand_in(item), pa.types
    if dtype is not None and types.is_integer(array.type):
        array = view_floats(array, dtype)
    kind = array.type
    if types.is_floating(kind):
        return _as_decimals(array) if _is_whole(array) else array
    if types.is_dictionary(kind):
        return array.dictionary_decode()
    if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        try:
            text = write_cells(array, dtype, "literal")
        except (CodecError, InfiniteError) as error:
            raise CodecError(f"cannot save {show_path((item.name,))} as text: {error}") from error
        return pc.if_else(array.is_valid(), text, pa.scalar(None, text.type))
    return array


def _is_whole(array: pa.Array) -> bool:
    """Return True if all numbers of a column are whole, so that csv could not say that they are floats."""
    numbers = array.cast(pa.float64()).drop_null()
    whole = pc.all(pc.equal(numbers, pc.trunc(numbers)), min_count=0).as_py()
    return bool(whole) and not pc.any(pc.is_inf(numbers), min_count=0).as_py()


def _as_decimals(array: pa.Array) -> pa.Array:
    """Return whole floats as numbers that Arrow writes with a point; as text, which it quotes, if a decimal loses something."""
    numbers = array.cast(pa.float64())
    present = numbers.drop_null().to_numpy(zero_copy_only=False)
    if np.any(np.abs(present) >= _MOST_EXACT) or np.any(np.signbit(present) & (present == 0)):
        return write_numbers(array)
    return numbers.cast(pa.decimal128(38, 1))
