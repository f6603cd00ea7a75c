"""Read csv files, by one rule for the types of columns."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import torch

from td_core import KeyPathError, NestedKey
from td_core.errors import FormatError
from td_core.spi import as_dtype, parse_json

from ._arrow_types import ARROW
from ._from_arrow import read_in_memory
from ._read_columns import is_list, join_chunks
from ._table_header import read_facts
from ._table_locations import open_input, show_place
from ._text_schemas import build_column, find_item, find_stand_in, load_schema
from ._write_csv import CELL, QUOTING, choose_delimiter, split_cells

_LEADING_ZERO = r"^\s*[+-]?0(\d+|[xX].*)\s*$"


class CsvText:
    """The text of a csv file, parsed as often as its columns need it.

    Attributes:
        where: the location, for messages.
        names: the names of the columns.
    """

    def __init__(
        self, content: bytes, where: str, delimiter: str, quotes: bool, header: bool, skip: int
    ) -> None:
        self.where, self.content = where, content.removeprefix(b"\xef\xbb\xbf")
        self._delimiter = delimiter
        self._parse = {
            "delimiter": delimiter,
            "quote_char": '"' if quotes else False,
            "newlines_in_values": quotes,
        }
        sizes: list[int] = []
        reader = csv.reader(
            itertools.islice(self._list_lines(sizes), skip, None),
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        )
        try:
            first = next(reader, None)
        except UnicodeDecodeError as error:
            raise self._encoding_error(error) from error
        except csv.Error as error:
            raise FormatError(f"{where}, line 1: {error}") from error
        if not first:
            raise FormatError(f"{where}: the file is empty: it has no line with the names of columns")
        self.names = first if header else [str(i) for i in range(len(first))]
        self._skipped = skip + (reader.line_num if header else 0)
        self._rows = self.content[sum(sizes[: self._skipped]) :]
        if b'"' not in self._rows:
            self._parse["newlines_in_values"] = False  # Arrow is faster
        repeated = [name for name, count in Counter(self.names).items() if count > 1]
        if repeated:
            raise FormatError(f"{where}: two columns are called {repeated[0]!r}: rename one")

    def _list_lines(self, sizes: list[int]) -> Iterator[str]:
        """Yield the lines, whose ends are those of any system, and add their bytes to ``sizes``."""
        for line in io.TextIOWrapper(io.BytesIO(self.content), "utf-8", newline=""):
            sizes.append(len(line.encode()))
            yield line

    def _encoding_error(self, error: Exception) -> FormatError:
        try:
            self.content.decode()
        except UnicodeDecodeError as found:
            line = self.content.count(b"\n", 0, found.start) + 1
            return FormatError(f"{self.where}, line {line}: its bytes are not UTF-8: pass encoding=")
        return FormatError(f"{self.where}: it is no csv file: {type(error).__name__}")

    def read(
        self, types: Mapping[str, Any], names: Iterable[str] | None = None, *, nulls: list[str], quoted: bool
    ) -> Any:
        """Return a table of columns; ``quoted`` says whether an empty field in quotes is a null.

        Raises:
            FormatError: a row has another number of fields, or a field is not of its type.
        """
        options = pcsv.ConvertOptions(
            column_types=dict(types),
            include_columns=None if names is None else list(names),
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

    def _read_with(self, options: Any, handler: Any) -> Any:
        has_blank_rows = len(self.names) == 1  # a line without text is a missing field
        if not self._rows or (
            not has_blank_rows and self._rows[:1] in b"\r\n" and not self._rows.strip(b"\r\n")
        ):
            types = options.column_types
            names = options.include_columns or self.names
            return pa.table({name: pa.array([], types.get(name, pa.null())) for name in names})
        return pcsv.read_csv(
            pa.BufferReader(self._rows),
            read_options=pcsv.ReadOptions(column_names=self.names, use_threads=handler is None),
            parse_options=pcsv.ParseOptions(
                **self._parse, ignore_empty_lines=not has_blank_rows, invalid_row_handler=handler
            ),
            convert_options=options,
        )

    def _explain(self, options: Any, error: Exception) -> FormatError:
        found: list[Any] = []

        def note(row: Any) -> str:
            found.append(row)
            return "error"

        with contextlib.suppress(pa.ArrowInvalid):
            self._read_with(options, note)
        if found:
            row = found[0]
            line = self._skipped + row.number
            return FormatError(
                f"{self.where}, line {line}: it has {row.actual_columns} fields; expected {row.expected_columns}"
            )
        column = re.match(r"In CSV column #(\d+): CSV conversion error to ([\w\[\]]+)", str(error))
        if column is None or "UTF8" in str(error):
            return self._encoding_error(error)
        return FormatError(
            f"{self.where}: column {self.names[int(column[1])]!r} has a field that is no {column[2]}"
        )

    def has_leading_zeros(self) -> bool:
        """Return True if a field may begin with a zero and a digit, or be hexadecimal."""
        content = np.frombuffer(self.content, np.uint8)
        zeros = np.flatnonzero(content[:-1] == ord("0"))
        zeros = zeros[_is_one_of(content[zeros + 1], b"0123456789xX")]
        before = np.where(zeros > 0, content[zeros - 1], ord("\n"))
        return bool(_is_one_of(before, b'\r\n" +-' + self._delimiter.encode()).any())


def _is_one_of(characters: Any, wanted: bytes) -> Any:
    """Return where characters are some of ASCII."""
    table = np.zeros(256, bool)
    table[list(wanted)] = True
    return table[characters]


def read_csv(
    path: Any,
    *,
    separator: str | None = None,
    dtypes: Mapping[NestedKey, Any] | None = None,
    schema: bool | None = None,
    device: Any = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "jagged",
    delimiter: str | None = None,
    sep: str | None = None,
    quoting: str | int = "needed",
    header: bool | None = True,
    encoding: str = "utf-8",
    usecols: Iterable[str] | None = None,
    nrows: int | None = None,
    skiprows: int = 0,
    na_values: str | Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Read a csv file; see :func:`from_csv`."""
    where = show_place(path)
    for name, value in (("nrows", nrows), ("skiprows", skiprows)):
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"{name} is a number of rows, 0 or more; got {value!r:.100}")
    found = load_schema(path, schema)
    with open_input(path, storage_options) as file:
        content = file.read()
    if encoding.lower().replace("-", "") != "utf8":
        try:
            content = content.decode(encoding).encode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise FormatError(f"{where}, line {line}: its bytes are not {encoding}") from error
    quotes = QUOTING.get(quoting, quoting) != "none" if isinstance(quoting, int) else quoting != "none"
    text = CsvText(content, where, choose_delimiter(delimiter, sep), quotes, bool(header), skiprows)
    missing = ["", *([na_values] if isinstance(na_values, str) else na_values)]
    types = _find_types(dtypes or {}, text.names, separator, where)
    if found is not None and not dtypes and usecols is None:
        table = _fit_schema(text, found, missing)
    else:
        chosen = _choose_columns(text.names, usecols, where)
        table = _join_cells(_infer(text, chosen, types, missing), where)
    if nrows is not None:
        table = table.slice(0, nrows)
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
    for name, dtype in types.items():
        if dtype[1] is not None and (key := _as_key(name, separator)) in result.keys(True):
            result.set(key, result.get(key).to(dtype[1]))
    return result if rows is None else result[rows]


def _as_key(name: str, separator: str | None) -> Any:
    parts = tuple(name.split(separator)) if separator else (name,)
    return parts if len(parts) > 1 else parts[0]


def _choose_columns(names: list[str], usecols: Iterable[str] | None, where: str) -> list[str]:
    if usecols is None:
        return names
    wanted = list(usecols)
    for name in wanted:
        if name not in names:
            raise KeyPathError(
                f"{where}: there is no column {name!r}; its columns are {', '.join(map(repr, names))}"
            )
    return [name for name in names if name in wanted]


def _find_types(
    dtypes: Mapping[NestedKey, Any], names: list[str], separator: str | None, where: str
) -> dict[str, tuple[Any, torch.dtype | None]]:
    """Return for each column of ``dtypes`` the type of Arrow that is read, and the dtype that it is cast to, if another."""
    bases = {_find_base(name) for name in names}
    result: dict[str, tuple[Any, torch.dtype | None]] = {}
    for key, wanted in dtypes.items():
        name = key if isinstance(key, str) else (separator or ".").join(key)
        if name not in bases:
            raise KeyPathError(
                f"{where}: there is no column {name!r} for dtypes; its columns are {', '.join(map(repr, names))}"
            )
        if wanted is str:
            result[name] = pa.string(), None
            continue
        dtype = as_dtype(wanted)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes has dtypes, and str for text; got {wanted!r:.100} for {name!r}")
        if dtype.is_complex:
            raise TypeError(f"dtypes: a field of csv is no complex number; got {dtype} for {name!r}")
        # Arrow parses no text as float16.
        known = ARROW.get(dtype) if dtype is not torch.float16 else None
        result[name] = (pa.float32(), dtype) if known is None else (known, None)
    return result


def _find_base(name: str) -> str:
    match = CELL.match(name)
    return match[1] if match else name


def _infer(text: CsvText, names: list[str], types: Mapping[str, Any], missing: list[str]) -> Any:
    """Return a table of columns by the rule for their types; pyarrow guesses other ones, which are read again as text."""
    given = {name: types[_find_base(name)][0] for name in names if _find_base(name) in types}
    table = text.read(given, names, nulls=missing, quoted=True)
    zeros = text.has_leading_zeros()
    again = [name for name in names if _is_doubtful(table.column(name), zeros, name in given)]
    if again and table.num_rows:
        plain = text.read(dict.fromkeys(again, pa.string()), again, nulls=missing, quoted=False)
        for name in again:
            number = table.schema.get_field_index(name)
            array = (
                plain.column(name)
                if name in given
                else _choose_type(table.column(name), plain.column(name), name, text)
            )
            table = table.set_column(number, name, array)
    if not table.num_rows:
        empty = {name: pa.array([], given.get(name, pa.float64())) for name in names}
        return pa.table(empty)
    return table


def _is_doubtful(array: Any, zeros: bool, is_given: bool) -> bool:
    kind = array.type
    if is_given:
        return bool(pa.types.is_string(kind)) and array.null_count > 0
    if pa.types.is_integer(kind):
        return zeros
    if pa.types.is_floating(kind):
        largest = pc.max(pc.abs(array.filter(pc.is_finite(array)))).as_py() if len(array) else None
        return zeros or (largest is not None and largest >= 2.0**63)
    return not (pa.types.is_boolean(kind) or (pa.types.is_string(kind) and not array.null_count))


def _choose_type(guess: Any, text: Any, name: str, source: CsvText) -> Any:
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
    if max(present) >= 1 << 64 or min(present) < (0 if max(present) >= 1 << 63 else -(1 << 63)):
        raise FormatError(
            f"{source.where}: column {name!r} has integers of more than 64 bits: pass dtypes={{{name!r}: str}}"
        )
    return pa.array(numbers, pa.uint64() if max(present) >= 1 << 63 else pa.int64())


def _join_cells(table: Any, where: str) -> Any:
    """Return a table with one column for the columns ``x[0]``, ``x[1]`` and so on, if all of a shape are there."""
    groups: dict[str, dict[tuple[int, ...], str]] = {}
    for name in table.schema.names:
        match = CELL.match(name)
        if match is not None:
            groups.setdefault(match[1], {})[tuple(map(int, match[2].split(",")))] = name
    for base, members in groups.items():
        positions = sorted(members)
        shape = tuple(size + 1 for size in positions[-1])
        kinds = {table.column(name).type for name in members.values()}
        numeric = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds)
        complete = (
            positions == [*itertools.product(*map(range, shape))]
            if len({*map(len, positions)}) == 1
            else False
        )
        if not complete or not (numeric or kinds == {pa.bool_()}) or base in table.schema.names:
            continue
        kind = kinds.pop() if len(kinds) == 1 else pa.float64()
        columns = [join_chunks(table.column(members[position]).cast(kind)) for position in positions]
        place = table.schema.names.index(members[positions[0]])
        table = table.drop_columns(list(members.values()))
        table = table.add_column(place, base, _stack_cells(columns, shape, kind))
    return table


def _stack_cells(columns: list[Any], shape: tuple[int, ...], kind: Any) -> Any:
    """Return cells of a shape from the columns of their elements."""
    rows = len(columns[0])
    order = np.arange(rows * len(columns)).reshape(len(columns), rows).T.reshape(-1)
    cells = pa.concat_arrays(columns).take(pa.array(order))
    for size in reversed(shape):
        cells = pa.FixedSizeListArray.from_arrays(cells, size)
    return cells


def _fit_schema(text: CsvText, schema: Any, missing: list[str]) -> Any:
    """Return the table of a schema, whose columns the file has."""
    columns: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for item in schema:
        nothing = pa.array([], item.type)
        columns[item.name] = [
            (
                tuple(map(int, match[2].split(",")))
                if (match := CELL.match(name)) and name != item.name
                else (),
                name,
            )
            for name, _ in split_cells(item.name, nothing)
        ]
    wanted = [name for parts in columns.values() for _, name in parts]
    if sorted(wanted) != sorted(text.names):
        raise FormatError(
            f"{text.where}: its columns are not those of the schema beside it: pass schema=False"
        )
    types = {
        name: pa.string() if is_list(item.type) and name == item.name else _find_written(item)
        for item in schema
        for _, name in columns[item.name]
    }
    table = text.read(types, wanted, nulls=missing, quoted=False)
    arrays = [_fit_column(table, item, columns[item.name], text.where) for item in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _find_written(item: Any) -> Any:
    """Return the type as which the fields of a column are parsed: that of its numbers, or text."""
    kind = find_item(item).type
    if find_stand_in(item) is not None or pa.types.is_float16(kind):
        return pa.float64()
    if pa.types.is_duration(kind):
        return pa.int64()
    return kind if pa.types.is_primitive(kind) and not pa.types.is_temporal(kind) else pa.string()


def _fit_column(table: Any, item: Any, parts: list[tuple[tuple[int, ...], str]], where: str) -> Any:
    arrays = [join_chunks(table.column(name)) for _, name in parts]
    try:
        if len(parts) == 1 and parts[0][0] == ():
            (array,) = arrays
            if array.type == item.type:
                return array
            if is_list(item.type):
                cells = [None if each is None else parse_json(each) for each in array.to_pylist()]
                return build_column(cells, item)
            if pa.types.is_null(item.type):
                return pa.nulls(len(array))
            if read_facts(item).get("json"):
                return array.cast(item.type)
            return build_column(array.to_pylist(), item)
        shape = tuple(size + 1 for size in parts[-1][0])
        cells = np.array([each.to_pylist() for each in arrays], dtype=object).T.reshape(
            len(arrays[0]), *shape
        )
        listed = cells.tolist()
        if item.nullable and not find_item(item).nullable:
            listed = [None if all(each is None for each in row.ravel()) else row.tolist() for row in cells]
        return build_column(listed, item)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise FormatError(
            f"{where}: column {item.name!r} is not what the schema beside the file says: pass schema=False"
        ) from error
