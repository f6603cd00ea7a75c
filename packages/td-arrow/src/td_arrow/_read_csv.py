"""Read csv files, by one rule for the types of columns."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import torch

from td_core import KeyPathError, NestedKey
from td_core.errors import FormatError
from td_core.spi import as_dtype, parse_json

from ._arrow_types import ARROW, is_list, split_type
from ._from_arrow import read_in_memory
from ._read_columns import join_chunks
from ._table_header import read_facts
from ._table_locations import StorageOptions, open_input, show_place
from ._table_options import check_count
from ._text_schemas import build_column, find_item, find_stand_in, load_schema, report_misfit
from ._write_csv import QUOTING, choose_delimiter, group_cells, is_utf8, split_cells

_LEADING_ZERO = r"^\s*[+-]?0(\d+|[xX].*)\s*$"
#: The bytes that are searched at a time, which fit into a cache of the processor.
_BLOCK = 1 << 18


class CsvText:
    """The text of a csv file, parsed as often as its columns need it.

    Attributes:
        where: the location, for messages.
        names: the names of the columns.
    """

    def __init__(
        self, content: bytes, where: str, delimiter: str, quotes: bool, header: bool, skip: int
    ) -> None:
        self.where, self._content = where, content.removeprefix(b"\xef\xbb\xbf")
        sizes: list[int] = []
        reader = csv.reader(
            itertools.islice(self._list_lines(sizes), skip, None),
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        )
        try:
            first = next(reader, None)
        except UnicodeDecodeError as error:
            raise self._explain_encoding(error) from error
        except csv.Error as error:
            raise FormatError(f"{where}, line 1: {error}") from error
        if not first:
            raise FormatError(f"{where}: the file is empty: it has no line with the names of columns")
        self.names = first if header else [str(i) for i in range(len(first))]
        self._skipped = skip + (reader.line_num if header else 0)
        begin = sum(sizes[: self._skipped])
        self._rows = memoryview(self._content)[begin:]
        self._delimiter = delimiter
        self._parse: dict[str, Any] = {
            "delimiter": delimiter,
            "quote_char": '"' if quotes else False,
            # Arrow is faster without.
            "newlines_in_values": quotes and self._content.find(b'"', begin) >= 0,
        }
        repeated = [name for name, count in Counter(self.names).items() if count > 1]
        if repeated:
            raise FormatError(f"{where}: two columns are called {repeated[0]!r}: rename one")

    def _list_lines(self, sizes: list[int]) -> Iterator[str]:
        """Yield the lines, whose ends are those of any system, and add their bytes to ``sizes``."""
        for line in io.TextIOWrapper(io.BytesIO(self._content), "utf-8", newline=""):
            sizes.append(len(line.encode()))
            yield line

    def _explain_encoding(self, error: Exception) -> FormatError:
        try:
            self._content.decode()
        except UnicodeDecodeError as found:
            line = self._content.count(b"\n", 0, found.start) + 1
            return FormatError(f"{self.where}, line {line}: its bytes are not UTF-8: pass encoding=")
        return FormatError(f"{self.where}: it is no csv file: {type(error).__name__}")

    def read(
        self, types: Mapping[str, pa.DataType], names: Iterable[str], nulls: list[str], quoted: bool
    ) -> pa.Table:
        """Return a table of columns; ``quoted`` says whether an empty field in quotes is a null."""
        options = pcsv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(names),
            null_values=nulls,
            strings_can_be_null=True,
            quoted_strings_can_be_null=quoted,
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
        )
        try:
            return self._read_with(options, None)
        except pa.ArrowInvalid as error:
            raise self._explain(options, error) from error

    def _read_with(self, options: pcsv.ConvertOptions, handler: Callable[[Any], str] | None) -> pa.Table:
        has_blank_rows = len(self.names) == 1  # a line without text is a missing field
        rows = self._rows
        if not rows or (not has_blank_rows and rows[0] in b"\r\n" and not bytes(rows).strip(b"\r\n")):
            types = options.column_types
            return pa.table(
                {name: pa.array([], types.get(name, pa.null())) for name in options.include_columns}
            )
        return pcsv.read_csv(
            pa.BufferReader(rows),
            read_options=pcsv.ReadOptions(column_names=self.names, use_threads=handler is None),
            parse_options=pcsv.ParseOptions(
                **self._parse, ignore_empty_lines=not has_blank_rows, invalid_row_handler=handler
            ),
            convert_options=options,
        )

    def _explain(self, options: pcsv.ConvertOptions, error: Exception) -> FormatError:
        """Return the error of a file that Arrow refuses, with the line of a row of another number of fields."""
        found: list[Any] = []

        def note(row: Any) -> str:
            found.append(row)
            return "error"

        with contextlib.suppress(pa.ArrowInvalid):
            self._read_with(options, note)
        if found:
            row = found[0]
            return FormatError(
                f"{self.where}, line {self._skipped + row.number}: it has {row.actual_columns} fields; expected "
                f"{row.expected_columns}"
            )
        column = re.match(r"In CSV column #(\d+): CSV conversion error to ([\w\[\]]+)", str(error))
        if column is None or "UTF8" in str(error):
            return self._explain_encoding(error)
        return FormatError(
            f"{self.where}: column {self.names[int(column[1])]!r} has a field that is no {column[2]}"
        )

    def has_leading_zeros(self) -> bool:
        """Return True if a field may begin with a zero and a digit, or be hexadecimal."""
        begin = re.compile(rb'[\r\n" %s][+-]?0[0-9xX]' % re.escape(self._delimiter.encode()))
        content, delimiter = self._content, ord(self._delimiter)
        if begin.match(b"\n" + content[:3]):
            return True
        for start in range(0, len(content) - 2, _BLOCK):
            block = np.frombuffer(content, np.uint8, min(_BLOCK + 2, len(content) - start), start)
            before, after = block[:-2], block[2:]
            # Few comparisons find most places: bytes in front of a field are below the digits, those behind a zero are not.
            found = (block[1:-1] == ord("0")) & (after >= ord("0"))
            found &= (
                before < ord(".") if delimiter < ord(".") else (before < ord(".")) | (before == delimiter)
            )
            if delimiter >= ord("0"):
                found &= after != delimiter
            if found.any():
                for place in (np.flatnonzero(found) + start).tolist():
                    if begin.match(content, place) or begin.match(content, max(place - 1, 0)):
                        return True
        return False


def read_csv(
    path: Any,
    *,
    separator: str | None = None,
    dtypes: Mapping[NestedKey, Any] | None = None,
    schema: bool | None = None,
    rows: Any = None,
    delimiter: str | None = None,
    sep: str | None = None,
    quoting: str | int = "needed",
    header: bool | None = True,
    encoding: str = "utf-8",
    usecols: Iterable[str] | None = None,
    nrows: int | None = None,
    skiprows: int = 0,
    na_values: str | Iterable[str] = (),
    storage_options: StorageOptions = None,
    **reading: Any,
) -> Any:
    """Read a csv file; see :func:`td_arrow.from_csv`."""
    where = show_place(path)
    for name, value in (("nrows", 0 if nrows is None else nrows), ("skiprows", skiprows)):
        check_count(name, value, 0, "a number of rows, 0 or more")
    found = load_schema(path, schema)
    quotes = (QUOTING.get(quoting) if isinstance(quoting, int) else quoting) != "none"
    content = _read_content(path, where, encoding, storage_options)
    text = CsvText(content, where, choose_delimiter(delimiter, sep), quotes, bool(header), skiprows)
    missing = ["", *([na_values] if isinstance(na_values, str) else na_values)]
    types, casts = _find_types(dtypes or {}, text.names, separator, where)
    if found is not None and not dtypes and usecols is None:
        table = _fit_schema(text, found, missing)
    else:
        table = _join_cells(_infer(text, _choose_columns(text.names, usecols, where), types, missing))
    result = read_in_memory(table.slice(0, nrows), where, separator=separator, **reading)
    for name, dtype in casts.items():
        parts = name.split(separator) if separator else [name]
        key: NestedKey = tuple(parts) if len(parts) > 1 else name
        if key in result.keys(True):
            result.set(key, result.get(key).to(dtype))
    return result if rows is None else result[rows]


def _read_content(path: Any, where: str, encoding: str, options: StorageOptions) -> bytes:
    """Return the bytes of a file in UTF-8."""
    with open_input(path, options) as file:
        content: bytes = file.read()
    if is_utf8(encoding):
        return content
    try:
        return content.decode(encoding).encode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{where}, line {line}: its bytes are not {encoding}") from error


def _choose_columns(names: list[str], usecols: Iterable[str] | None, where: str) -> list[str]:
    if usecols is None:
        return names
    wanted = list(usecols)
    for name in wanted:
        _check_column(name, names, names, where, "")
    return [name for name in names if name in wanted]


def _check_column(name: str, known: Iterable[str], names: list[str], where: str, purpose: str) -> None:
    if name not in known:
        raise KeyPathError(
            f"{where}: there is no column {name!r}{purpose}; its columns are {', '.join(map(repr, names))}"
        )


def _find_types(
    dtypes: Mapping[NestedKey, Any], names: list[str], separator: str | None, where: str
) -> tuple[dict[str, pa.DataType], dict[str, torch.dtype]]:
    """Return the type of Arrow that is read of each column of ``dtypes``, and the dtype of those that are cast to another."""
    bases = _find_bases(names)
    types: dict[str, pa.DataType] = {}
    casts: dict[str, torch.dtype] = {}
    for key, wanted in dtypes.items():
        name = key if isinstance(key, str) else (separator or ".").join(key)
        _check_column(name, bases.values(), names, where, " for dtypes")
        dtype = wanted if wanted is str else as_dtype(wanted)
        if dtype is str:
            types[name] = pa.string()
        elif not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes has dtypes, and str for text; got {wanted!r:.100} for {name!r}")
        elif dtype.is_complex:
            raise TypeError(f"dtypes: a field of csv is no complex number; got {dtype} for {name!r}")
        elif dtype in ARROW and dtype is not torch.float16:
            types[name] = ARROW[dtype]
        else:  # Arrow parses no text as these
            types[name], casts[name] = pa.float32(), dtype
    return types, casts


def _find_bases(names: Iterable[str]) -> dict[str, str]:
    """Return the name of the leaf of each column."""
    cells = {name: base for base, members in group_cells(names).items() for name in members.values()}
    return {name: cells.get(name, name) for name in names}


def _infer(text: CsvText, names: list[str], types: Mapping[str, pa.DataType], missing: list[str]) -> pa.Table:
    """Return a table of columns by the rule for their types; pyarrow guesses other ones, which are read again as text."""
    given = {name: types[base] for name, base in _find_bases(names).items() if base in types}
    table = text.read(given, names, missing, True)
    if not table.num_rows:
        return pa.table({name: pa.array([], given.get(name, pa.float64())) for name in names})
    numeric = any(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in table.schema.types)
    zeros = numeric and text.has_leading_zeros()
    again = [name for name in names if _is_doubtful(table.column(name), zeros, name in given)]
    if again:
        plain = text.read(dict.fromkeys(again, pa.string()), again, missing, False)
        for name in again:
            array = plain.column(name)
            if name not in given:
                array = _choose_type(table.column(name), array, name, text.where)
            table = table.set_column(table.schema.get_field_index(name), name, array)
    return table


def _is_doubtful(array: pa.ChunkedArray, zeros: bool, is_given: bool) -> bool:
    """Return True for a column that pyarrow may have read otherwise than the rule says."""
    kind, types = array.type, pa.types
    if is_given:
        return bool(types.is_string(kind)) and array.null_count > 0
    if types.is_integer(kind):
        return zeros
    if types.is_floating(kind):
        return zeros or _is_large(array)
    return not (types.is_boolean(kind) or (types.is_string(kind) and not array.null_count))


def _is_large(array: pa.ChunkedArray) -> bool:
    """Return True for floats that may be integers of more than 64 bits, which pyarrow rounds."""
    parts = [np.abs(chunk.to_numpy(zero_copy_only=False)) for chunk in array.chunks]
    return any(((part >= 2.0**63) & (part < np.inf)).any() for part in parts)


def _choose_type(
    guess: pa.ChunkedArray, text: pa.ChunkedArray, name: str, where: str
) -> pa.Array | pa.ChunkedArray:
    """Return a column that pyarrow has guessed as another type than the rule says."""
    if text.null_count == len(text):
        return pa.nulls(len(text))
    if not (pa.types.is_integer(guess.type) or pa.types.is_floating(guess.type)):
        return text
    if pc.any(pc.match_substring_regex(text, _LEADING_ZERO)).as_py():
        return text
    if not pc.all(pc.match_substring_regex(text, r"^\s*[+-]?\d+\s*$")).as_py():
        return guess
    numbers = [None if item is None else int(item) for item in text.to_pylist()]
    present = [item for item in numbers if item is not None]
    low, high = min(present), max(present)
    if high >= 1 << 64 or low < (0 if high >= 1 << 63 else -(1 << 63)):
        raise FormatError(
            f"{where}: column {name!r} has integers of more than 64 bits: pass dtypes={{{name!r}: str}}"
        )
    return pa.array(numbers, pa.uint64() if high >= 1 << 63 else pa.int64())


def _join_cells(table: pa.Table) -> pa.Table:
    """Return a table with one column for the columns ``x[0]``, ``x[1]`` and so on, if all of a shape are there."""
    for base, members in group_cells(table.schema.names).items():
        positions = sorted(members)
        shape = tuple(size + 1 for size in positions[-1])
        kinds = {table.column(name).type for name in members.values()}
        numeric = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds)
        if positions != [*itertools.product(*map(range, shape))] or base in table.schema.names:
            continue
        if not numeric and kinds != {pa.bool_()}:
            continue
        kind = kinds.pop() if len(kinds) == 1 else pa.float64()
        columns = [join_chunks(table.column(members[position]).cast(kind)) for position in positions]
        place = table.schema.names.index(members[positions[0]])
        table = table.drop_columns(list(members.values()))
        table = table.add_column(place, base, _stack_cells(columns, shape))
    return table


def _stack_cells(columns: list[pa.Array], shape: tuple[int, ...]) -> pa.Array:
    """Return cells of a shape from the columns of their elements."""
    rows = len(columns[0])
    order = np.arange(rows * len(columns)).reshape(len(columns), rows).T.reshape(-1)
    cells = pa.concat_arrays(columns).take(pa.array(order))
    for size in reversed(shape):
        cells = pa.FixedSizeListArray.from_arrays(cells, size)
    return cells


def _fit_schema(text: CsvText, schema: pa.Schema, missing: list[str]) -> pa.Table:
    """Return the table of a schema, whose columns the file has."""
    columns = {
        item.name: [name for name, _ in split_cells(item.name, pa.array([], item.type))] for item in schema
    }
    wanted = [name for names in columns.values() for name in names]
    if sorted(wanted) != sorted(text.names):
        raise FormatError(
            f"{text.where}: its columns are not those of the schema beside it: pass schema=False"
        )
    types = {
        name: pa.string() if is_list(item.type) and name == item.name else _find_written(item)
        for item in schema
        for name in columns[item.name]
    }
    table = text.read(types, wanted, missing, False)
    arrays = []
    for item in schema:
        found = [join_chunks(table.column(name)) for name in columns[item.name]]
        with report_misfit(text.where, (item.name,)):
            arrays.append(_fit_column(found, item, columns[item.name] == [item.name], text.where))
    return pa.Table.from_arrays(arrays, schema=schema)


def _find_written(item: pa.Field) -> pa.DataType:
    """Return the type as which the fields of a column are parsed: that of its numbers, or text."""
    kind = find_item(item).type
    if find_stand_in(item) is not None or pa.types.is_float16(kind):
        return pa.float64()
    if pa.types.is_duration(kind):
        return pa.int64()
    return kind if pa.types.is_primitive(kind) and not pa.types.is_temporal(kind) else pa.string()


def _fit_column(arrays: list[pa.Array], item: pa.Field, is_whole: bool, where: str) -> pa.Array:
    """Return the array of a field: of the column of its cells, or those of their elements."""
    if is_whole:
        return _fit_cells(arrays[0], item, where)
    sizes, _ = split_type(item.type)
    elements = np.array([array.to_pylist() for array in arrays], dtype=object).T
    cells = elements.reshape(len(elements), *sizes).tolist()
    if item.nullable and not find_item(item).nullable:
        missing = [all(each is None for each in row) for row in elements]
        cells = [None if gone else cell for cell, gone in zip(cells, missing, strict=True)]
    return build_column(cells, item, where)


def _fit_cells(array: pa.Array, item: pa.Field, where: str) -> pa.Array:
    if array.type == item.type:
        return array
    if pa.types.is_null(item.type):
        return pa.nulls(len(array))
    if read_facts(item).get("json"):
        return array.cast(item.type)
    cells = array.to_pylist()
    if is_list(item.type):
        cells = [None if cell is None else parse_json(cell) for cell in cells]
    return build_column(cells, item, where)
