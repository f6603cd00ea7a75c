"""Data frames of pandas as collections, and back."""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from td_core import NestedKey, TensorCollection
from td_core.errors import FormatError
from td_core.spi import STORABLE, as_tensor
from td_core.typing import DeviceType

from ._arrow_types import convert, peel, view_numbers
from ._build_rows import One
from ._from_arrow import make_reader, read_collection
from ._nulls import Path
from ._read_columns import CATEGORIES, TIMES, ColumnReader, RowValues, find_form, join_chunks
from ._row_values import read_values
from ._sized_tables import set_sizes
from ._table_columns import list_fields
from ._table_header import KEY, read_facts
from ._write_columns import to_arrow

#: The most columns of a leaf whose elements are columns.
_MOST_COLUMNS = 4096
_CELL = re.compile(r"(.*)\[(\d+(?:,\d+)*)\]\Z", re.DOTALL)
_FORMS = ("arrow", "object", "columns")


def import_pandas(caller: str) -> Any:
    """Return pandas; raise ImportError that says who needs it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"{caller}() needs pandas: pip install pandas") from error
    return pandas


def to_pandas(
    td: TensorCollection,
    *,
    separator: str | None = None,
    tensors: str = "arrow",
    mask_key: NestedKey | None = None,
) -> Any:
    """Return a collection as a ``pandas.DataFrame``, whose ``attrs`` have what :func:`from_pandas` needs to restore it.

    Args:
        td: the collection.
        separator: joins the keys of a nested entry to the name of a column.
        tensors: cells with dims are columns of ``"arrow"``, without a copy; ``"object"``, an array for each row; or
            ``"columns"``, a column for each element, called ``x[0]`` or ``x[1,2]``.
        mask_key: key of a level with masks, which become missing values.

    Raises:
        ValueError: the collection is nested, and ``separator`` is None.
        ImportError: pandas is not installed.

    >>> to_pandas(TensorDict({"x": torch.zeros(2), "name": ["a", "b"]}, [2]))  # doctest: +SKIP
         x name
    0  0.0    a
    1  0.0    b
    """
    pd = import_pandas("to_pandas")
    if tensors not in _FORMS:
        raise ValueError(f"tensors is one of {', '.join(map(repr, _FORMS))}; got {tensors!r:.100}")
    table = to_arrow(td, separator=separator, mask_key=mask_key)
    columns: dict[str, Any] = {}
    for field, array in zip(table.schema, table.columns, strict=True):
        if pa.types.is_struct(field.type):
            raise ValueError(
                f"the entry {field.name!r} is nested, and a data frame is not: pass separator='.' for names of columns such as "
                f"'{field.name}.{field.type.field(0).name}'"
            )
        columns.update(_make_series(pd, field, join_chunks(array), tensors))
    frame = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows), copy=False)
    fields = {field.name: (field.metadata or {}).get(KEY, b"").decode() for field in table.schema}
    frame.attrs["td"] = {"header": table.schema.metadata[KEY].decode(), "fields": fields}
    return frame


def _make_series(pd: Any, field: Any, array: Any, tensors: str) -> Iterator[tuple[str, Any]]:
    """Yield name and content of the columns of a column of Arrow."""
    facts = read_facts(field)
    if facts.get("kind"):
        text = pa.types.is_string(array.type) and not facts.get("json")
        plain = text or pa.types.is_timestamp(array.type) or pa.types.is_duration(array.type)
        yield field.name, array.to_pandas() if plain else pd.Series(read_values(array, facts), dtype=object)
        return
    form = find_form(field, (field.name,), {})
    if form is not None and not form.stored_shape and not facts:
        if array.null_count:
            yield field.name, array.to_pandas(types_mapper=_choose_nullable(pd))
        else:
            yield field.name, array.to_numpy(zero_copy_only=False)
    elif form is None or tensors == "arrow":
        yield field.name, pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([array])))
    elif not form.shape:
        yield field.name, _view_rows(array, form)
    elif tensors == "object":
        cells = pd.Series([None] * len(array), dtype=object)
        cells[:] = _list_cells(array, form)
        yield field.name, cells
    else:
        rows = _view_rows(array, form)
        shape = rows.shape[1:]
        if rows[:1].size > _MOST_COLUMNS:
            raise ValueError(
                f"the entry {field.name!r} has {rows[:1].size} elements in a row; tensors='columns' makes at most "
                f"{_MOST_COLUMNS} columns of one"
            )
        for place in itertools.product(*map(range, shape)):
            yield f"{field.name}[{','.join(map(str, place))}]", rows[_in_cells(place)]


def _in_cells(place: tuple[int, ...]) -> Any:
    """Return the index of an element of each cell."""
    return (slice(None), *place)


def _choose_nullable(pd: Any) -> Any:
    names = {kind.lower(): f"{kind}Dtype" for kind in ("Int8", "Int16", "Int32", "Int64")}
    names |= {f"u{kind}": f"U{name}" for kind, name in names.items()}

    def choose(kind: Any) -> Any:
        if pa.types.is_boolean(kind):
            return pd.BooleanDtype()
        return getattr(pd, names[str(kind)])() if str(kind) in names else None

    return choose


def _view_rows(array: Any, form: Any) -> Any:
    numbers, _ = peel(array)
    leaf = convert(view_numbers(numbers, form.stored), form)
    return (leaf.float() if leaf.dtype not in _NUMPY else leaf).numpy()


#: Dtypes that numpy has.
_NUMPY = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _list_cells(array: Any, form: Any) -> list[Any]:
    valid = array.is_valid().to_pylist()
    return [row if present else None for row, present in zip(_view_rows(array, form), valid, strict=True)]


def from_pandas(
    dataframe: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "jagged",
    times: str = "numbers",
    categories: str = "codes",
    index: bool | None = None,
) -> Any:
    """Return the collection of a data frame of pandas.

    Args:
        dataframe: the frame. A column index of several levels makes nested entries.
        auto_batch_size: find the batch dims that all leaves share.
        batch_dims: the most batch dims that are found.
        device: where the leaves go.
        batch_size: the batch size, instead of ``[rows]``.
        separator: splits the names of columns into key paths.
        dtype: dtype of all leaves of numbers and bools.
        nulls: what missing values become, as for :func:`td_arrow.from_arrow`.
        mask_key: key of the level with masks.
        lists: what lists of numbers become.
        times: ``"numbers"``, int64 nanoseconds, or ``"values"``.
        categories: ``"codes"``, ``"values"`` or ``"labels"``.
        index: True makes an entry of the index, False leaves it out, None warns if it is not the default one.

    Raises:
        FormatError: two columns have the same name.
        ValueError: a column has missing values that ``nulls`` refuses.
        TypeError: ``dataframe`` is no data frame of pandas.

    >>> frame = pandas.DataFrame({"x": [1, 2], "name": ["a", None]})  # doctest: +SKIP
    >>> from_pandas(frame)["name"]  # doctest: +SKIP
    ['a', None]
    """
    pd = import_pandas("from_pandas")
    if not isinstance(dataframe, pd.DataFrame):
        raise TypeError(f"from_pandas() takes a data frame of pandas; got {type(dataframe).__qualname__}")
    for name, value, choices in (("times", times, TIMES), ("categories", categories, CATEGORIES)):
        if value not in choices:
            raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r:.100}")
    frame = _add_index(pd, dataframe, index)
    header = frame.attrs.get("td") if isinstance(frame.attrs.get("td"), dict) else {}
    reading = _Frame(pd, frame, header, times, categories)
    metadata = {KEY: header["header"].encode()} if "header" in header else None
    schema = pa.schema(reading.fields, metadata)
    reader = make_reader(nulls, "auto", lists, times, categories, None, schema)
    result = read_collection(
        schema,
        len(frame),
        lambda paths: reading.read(paths, reader),
        reader,
        "the data frame",
        separator=separator,
        mask_key=mask_key,
        device=device,
    )
    return set_sizes(result, auto_batch_size, batch_dims, batch_size, dtype)


def _add_index(pd: Any, frame: Any, index: bool | None) -> Any:
    plain = isinstance(frame.index, pd.RangeIndex) and frame.index.equals(pd.RangeIndex(len(frame)))
    if plain or index is False:
        return frame
    if index is None:
        warnings.warn(
            "the index of the data frame is left out: pass index=True for an entry, or index=False",
            stacklevel=3,
        )
        return frame
    names = ["index" if name is None and frame.index.nlevels == 1 else name for name in frame.index.names]
    names = [f"level_{i}" if name is None else str(name) for i, name in enumerate(names)]
    return frame.reset_index(names=names)


class _Frame:
    """Reads the columns of a frame.

    Attributes:
        fields: a field for each column; that of one without a type of Arrow has the type null.
    """

    def __init__(self, pd: Any, frame: Any, header: Mapping[str, Any], times: str, categories: str) -> None:
        self._pd, self._frame, self._times, self._categories = pd, frame, times, categories
        facts = header.get("fields") or {}
        self.fields: list[Any] = []
        self._columns: dict[Path, Any] = {}
        nested: dict[str, list[Any]] = {}
        for position, label in enumerate(frame.columns):
            path = tuple(map(str, label)) if isinstance(label, tuple) else (str(label),)
            path = tuple(name for name in path if name) or path[:1]
            if path in self._columns:
                raise FormatError(f"the data frame: two columns are called {label!r}: rename one")
            self._columns[path] = frame.iloc[:, position]
            nested.setdefault(path[0], []).append((path[1:], facts.get(".".join(path))))
        self._join_cells(facts, nested)
        for name, parts in nested.items():
            self.fields.append(_make_field(name, parts))
        self._known = list_fields(self.fields, "the data frame")

    def _join_cells(self, facts: Mapping[str, Any], nested: dict[str, Any]) -> None:
        """Join columns that are the elements of one leaf, which the header has under a name that no column has."""
        groups: dict[str, dict[tuple[int, ...], Path]] = {}
        for path in list(self._columns):
            match = _CELL.fullmatch(path[0]) if len(path) == 1 else None
            if match and match[1] in facts and (match[1],) not in self._columns:
                groups.setdefault(match[1], {})[tuple(map(int, match[2].split(",")))] = path
        for name, places in groups.items():
            shape = tuple(max(sizes) + 1 for sizes in zip(*places, strict=True))
            if len(places) != int(np.prod(shape)):
                continue
            parts = [self._columns.pop(places[place]).to_numpy() for place in sorted(places)]
            self._columns[(name,)] = torch.from_numpy(np.stack(parts, 1)).view(-1, *shape)
            joined = {path[0] for path in places.values()}
            text = facts.get(name)
            items = [(name, [((), text)]) if key in joined else (key, item) for key, item in nested.items()]
            nested.clear()
            nested.update(items)

    def read(self, paths: Iterable[Path], reader: ColumnReader) -> Iterator[tuple[Path, Any]]:
        """Yield what each column is: a leaf, values of rows, or an array of Arrow."""
        for path in paths:
            series = self._columns[path]
            facts = read_facts(self._known[path])
            if facts.get("kind"):
                yield path, self._read_own(series, facts["kind"])
                continue
            item = series if isinstance(series, Tensor) else self.read_series(series, path, reader)
            if isinstance(item, Tensor) and f"torch.{facts.get('dtype')}" in STORABLE:
                item = item.to(STORABLE[f"torch.{facts['dtype']}"])
            yield path, item

    def _read_own(self, series: Any, kind: str) -> Any:
        """Return a column of values that :func:`to_pandas` made."""
        values = [None if value is self._pd.NA or value is self._pd.NaT else value for value in series]
        if kind == "one" and values and all(value == values[0] for value in values):
            return One(values[0].to_pydatetime() if isinstance(values[0], self._pd.Timestamp) else values[0])
        is_object = isinstance(series.dtype, np.dtype) and series.dtype.kind == "O"
        return RowValues(values) if is_object else pa.array(series, from_pandas=True)

    def read_series(self, series: Any, path: Path, reader: ColumnReader) -> Any:
        """Return what a column is."""
        pd, dtype = self._pd, series.dtype
        if isinstance(dtype, pd.SparseDtype):
            series, dtype = series.sparse.to_dense(), dtype.subtype
        if isinstance(dtype, pd.CategoricalDtype):
            return self._read_category(series, path, reader)
        if self._times == "numbers" and getattr(dtype, "kind", "") in "Mm":
            zone = getattr(dtype, "tz", None)
            plain = series.dt.tz_convert("UTC").dt.tz_localize(None) if zone is not None else series
            numbers = plain.to_numpy().astype("M8[ns]" if dtype.kind == "M" else "m8[ns]")
            return _fill_missing(
                torch.from_numpy(numbers.view(np.int64).copy()), ~np.isnat(numbers), path, reader
            )
        if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
            leaf, valid = as_tensor(series.to_numpy(copy=True)), series.notna().to_numpy(copy=True)
            # NaN is what pandas has for a missing number, and stays one by default.
            return leaf if reader.nulls.get(path) == "auto" else _fill_missing(leaf, valid, path, reader)
        if isinstance(dtype, np.dtype) and dtype.kind == "O":
            return _read_objects(pd, series, path, reader)
        return pa.array(series, from_pandas=True)

    def _read_category(self, series: Any, path: Path, reader: ColumnReader) -> Any:
        if self._categories == "values":
            return pa.array(series, from_pandas=True)
        codes = series.cat.codes.to_numpy()
        leaf = _fill_missing(torch.from_numpy(codes.copy()), codes >= 0, path, reader)
        if self._categories == "codes":
            return leaf
        return {"codes": leaf, "labels": series.cat.categories.tolist()}


def _make_field(name: str, parts: list[Any]) -> Any:
    """Return the field of a name, or the struct of those that begin with it; their types are not used."""
    if any(path for path, _ in parts):
        below: dict[str, list[Any]] = {}
        for path, facts in parts:
            if not path:
                raise FormatError(f"the data frame: {name!r} is a column, and the level of others")
            below.setdefault(path[0], []).append((path[1:], facts))
        return pa.field(name, pa.struct([_make_field(key, items) for key, items in below.items()]))
    text = parts[0][1]
    return pa.field(name, pa.null(), True, {KEY: text.encode()} if text else None)


def _fill_missing(leaf: Tensor, valid: Any, path: Path, reader: ColumnReader) -> Tensor:
    return leaf if valid.all() else reader.nulls.fill(path, leaf, valid)


def _read_objects(pd: Any, series: Any, path: Path, reader: ColumnReader) -> Any:
    """Return what a column of Python objects is: a dense leaf of arrays, numbers of one type, lists, or values."""
    values = [None if value is pd.NA or value is pd.NaT else value for value in series]
    present = [value for value in values if value is not None]
    kinds = {*map(type, present)}
    if float in kinds and not kinds <= {
        float,
        int,
        bool,
    }:  # among text, NaN is what pandas has for a missing value
        values = [None if isinstance(value, float) and value != value else value for value in values]
        present = [value for value in values if value is not None]
        kinds = {*map(type, present)}
    if present and all(isinstance(value, (np.ndarray, Tensor)) for value in present):
        return _join_arrays(values)
    is_list = kinds == {list} and {*map(type, itertools.chain(*present))} <= {int, float}
    if is_list or kinds in ({int}, {float}, {bool}):
        with contextlib.suppress(pa.ArrowInvalid, OverflowError):
            return pa.array(values)
    return RowValues(reader.nulls.keep(path, values))


def _join_arrays(values: list[Any]) -> Any:
    """Return arrays of one shape as a leaf, and others as lists."""
    if all(value is not None for value in values):
        parts = [torch.as_tensor(value) for value in values]
        if len({(part.shape, part.dtype) for part in parts}) == 1:
            return torch.stack(parts)
    return pa.array([None if value is None else np.asarray(value).tolist() for value in values])
