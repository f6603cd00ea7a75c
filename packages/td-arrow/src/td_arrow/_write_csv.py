"""Write csv files that every program reads."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from td_core.errors import CodecError
from td_core.spi import show_path

from ._json_text import InfiniteError, view_floats, write_cells, write_numbers
from ._read_columns import is_list, join_chunks
from ._table_header import read_facts
from ._table_locations import open_output
from ._text_schemas import (
    check_beside,
    find_stand_in,
    save_schema,
)
from ._write_columns import to_arrow

#: The styles of quoting, by the name of pyarrow and the number of the module csv.
QUOTING = {0: "needed", 1: "all_valid", 2: "all_valid", 3: "none"}
#: Whole floats below it are exact as decimals.
_MOST_EXACT = 1e14
#: The name of the column of one element of a cell.
CELL = re.compile(r"(.*)\[(\d+(?:,\d+)*)\]\Z", re.DOTALL)
_LEADING_ZERO = r"^\s*[+-]?0[0-9xX]"


def to_csv(
    data: Any,
    path: Any,
    *,
    separator: str | None = None,
    schema: bool = False,
    delimiter: str | None = None,
    sep: str | None = None,
    quoting: str | int = "needed",
    header: bool = True,
    encoding: str = "utf-8",
    durable: bool = False,
) -> None:
    """Write a collection as a csv file: a line for each row.

    Args:
        data: the collection.
        path: a path, a URL, or a binary file object.
        separator: joins the keys of nested entries to the name of a column.
        schema: write ``<name>.td.json`` beside the file, with which :func:`from_csv` gives the same collection.
        delimiter: the character between fields; ``,`` by default.
        sep: another name of ``delimiter``.
        quoting: ``"needed"``, ``"all_valid"``, ``"none"``, or a constant of the module csv.
        header: whether the first line has the names of columns.
        encoding: encoding of the text.
        durable: return after the file has reached the disk.

    Raises:
        ValueError: the collection is nested and ``separator`` is missing, or an option is invalid.
        CodecError: a column has bytes, or what no format can store.

    >>> import pathlib
    >>> to_csv(TensorDict({"x": torch.tensor([1.0, 2.5]), "ok": torch.tensor([True, False])}, [2]), "data.csv")
    >>> print(pathlib.Path("data.csv").read_text())
    "x","ok"
    1,true
    2.5,false
    <BLANKLINE>
    """
    style = QUOTING.get(quoting, quoting) if isinstance(quoting, int) else quoting
    if style not in QUOTING.values():
        raise ValueError(f"quoting is one of 'needed', 'all_valid' and 'none'; got {quoting!r:.100}")
    if schema:
        check_beside(path)
    options = pcsv.WriteOptions(
        include_header=bool(header), delimiter=choose_delimiter(delimiter, sep), quoting_style=style
    )
    check_levels(data, separator, "to_csv")
    table = to_arrow(data, separator=separator)
    content = make_columns(table)
    with open_output(path, durable) as sink:
        if encoding.lower().replace("-", "") == "utf8":
            _write(content, sink, options)
        else:
            text = pa.BufferOutputStream()
            _write(content, text, options)
            sink.write(text.getvalue().to_pybytes().decode().encode(encoding))
    if schema:
        save_schema(path, table.schema)


def choose_delimiter(delimiter: str | None, sep: str | None) -> str:
    if delimiter is not None and sep is not None:
        raise ValueError("pass delimiter or sep, not both")
    found = "," if delimiter is None and sep is None else delimiter if sep is None else sep
    if not isinstance(found, str) or len(found) != 1 or not found.isascii() or found in '"\r\n':
        raise ValueError(f"delimiter is one character of ASCII, no quote or end of line; got {found!r:.100}")
    return found


def check_levels(data: Any, separator: str | None, name: str) -> None:
    """Raise ValueError for a nested collection without a separator for its keys."""
    nested = next((key for key in data.keys(True) if isinstance(key, tuple)), None)
    if separator is None and nested is not None:
        raise ValueError(
            f'{name}() has a column for each entry, and {show_path(nested)} is nested: pass separator=".", or flatten_keys()'
        )


def _write(table: Any, sink: Any, options: Any) -> None:
    try:
        pcsv.write_csv(table, sink, options)
    except pa.ArrowInvalid as error:
        raise ValueError('a field has a delimiter, quote or end of line: pass quoting="needed"') from error


def make_columns(table: Any) -> Any:
    """Return a table with a column for each column of csv: one for each element of cells, and text for lists."""
    names: list[str] = []
    arrays: list[Any] = []
    for item, chunks in zip(table.schema, table.columns, strict=True):
        array, facts = join_chunks(chunks), read_facts(item)
        dtype = str(find_stand_in(item)).removeprefix("torch.") if find_stand_in(item) is not None else None
        for name, cells in split_cells(item.name, array):
            names.append(name)
            arrays.append(_make_column(cells, dtype, (item.name,)) if not facts.get("json") else cells)
    if any(count > 1 for count in Counter(names).values()):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two columns would be called {repeated!r}: rename an entry")
    return pa.table(arrays, names)


def split_cells(name: str, array: Any) -> Iterable[tuple[str, Any]]:
    """Yield the columns of the elements of cells of a fixed size; an array of other cells itself."""
    sizes, kind = [], array.type
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    if not sizes or is_list(kind) or pa.types.is_struct(kind):
        yield name, array
        return
    for position in itertools.product(*map(range, sizes)):
        part = array
        for number in position:
            part = pc.list_element(part, number)
        yield f"{name}[{','.join(map(str, position))}]", part


def _make_column(array: Any, dtype: str | None, path: tuple[str, ...]) -> Any:
    kind = array.type
    if dtype is not None and pa.types.is_integer(kind):
        array = view_floats(array, dtype)
        kind = array.type
    if pa.types.is_floating(kind):
        return _as_decimals(array) if _are_whole(array) else array
    if pa.types.is_dictionary(kind):
        return array.dictionary_decode()
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        try:
            text = write_cells(array, dtype, "literal")
        except (CodecError, InfiniteError) as error:
            raise CodecError(f"cannot save {show_path(path)} as text: {error}") from error
        return pc.if_else(array.is_valid(), text, pa.scalar(None, text.type))
    return array


def _are_whole(array: Any) -> bool:
    """Return True if all numbers of a column are whole, so that csv could not say that they are floats."""
    numbers = array.cast(pa.float64()).drop_null()
    return bool(pc.all(pc.equal(numbers, pc.trunc(numbers)), min_count=0).as_py()) and not bool(
        pc.any(pc.is_inf(numbers), min_count=0).as_py()
    )


def _as_decimals(array: Any) -> Any:
    """Return whole floats as numbers that Arrow writes with a point; as text, which it quotes, if a decimal loses something."""
    numbers = array.cast(pa.float64())
    present = numbers.drop_null().to_numpy(zero_copy_only=False)
    if np.any(np.abs(present) >= _MOST_EXACT) or np.any(np.signbit(present) & (present == 0)):
        return write_numbers(array)
    return numbers.cast(pa.decimal128(38, 1))
