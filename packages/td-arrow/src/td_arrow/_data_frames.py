"""Data frames of pandas as collections, and back."""

from __future__ import annotations

import contextlib
import itertools
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

from ._arrow_types import Dense, convert, peel, view_numbers
from ._from_arrow import Columns, read_collection
from ._nulls import Nulls, Path
from ._read_columns import One, RowValues, find_form, join_chunks
from ._row_values import read_values
from ._table_columns import list_fields
from ._table_header import KEY, read_facts
from ._write_columns import make_table
from ._write_csv import group_cells

#: The most columns of a leaf whose elements are columns.
_MOST_COLUMNS = 4096
_FORMS = ("arrow", "object", "columns")


def import_pandas(caller: str) -> Any:
    """Return pandas; raise ImportError that says who needs it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"{caller}() needs pandas: pip install pandas") from error
    return pandas


def make_frame(td: TensorCollection, separator: str | None, tensors: str, mask_key: NestedKey | None) -> Any:
    """Return a collection as a data frame; see :func:`td_arrow.to_pandas`."""
    pd = import_pandas("to_pandas")
    if tensors not in _FORMS:
        raise ValueError(f"tensors is one of {', '.join(map(repr, _FORMS))}; got {tensors!r:.100}")
    table = make_table(td, separator, mask_key=mask_key)
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


def _make_series(pd: Any, field: pa.Field, array: pa.Array, tensors: str) -> Iterator[tuple[str, Any]]:
    """Yield name and content of the columns of a column of Arrow."""
    facts, types = read_facts(field), pa.types
    if facts.get("kind"):
        is_text = types.is_string(array.type) and not facts.get("json")
        plain = is_text or types.is_timestamp(array.type) or types.is_duration(array.type)
        yield field.name, array.to_pandas() if plain else pd.Series(read_values(array, facts), dtype=object)
        return
    form = find_form(field, (field.name,), {})
    if form is not None and not form.stored_shape and not facts:
        nullable = _choose_nullable(pd) if array.null_count else None
        yield field.name, array.to_pandas(types_mapper=nullable) if nullable else array.to_numpy(False)
    elif form is None or tensors == "arrow":
        yield field.name, pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([array])))
    elif not form.shape:
        yield field.name, _view_rows(array, form)
    else:
        yield from _split_cells(pd, field.name, array, form, tensors)


def _split_cells(pd: Any, name: str, array: pa.Array, form: Dense, tensors: str) -> Iterator[tuple[str, Any]]:
    """Yield the column of the cells of a leaf with dims, or those of their elements."""
    rows = _view_rows(array, form)
    if tensors == "object":
        cells = pd.Series([None] * len(array), dtype=object)
        present = array.is_valid().to_pylist()
        cells[:] = [row if is_here else None for row, is_here in zip(rows, present, strict=True)]
        yield name, cells
        return
    if rows[:1].size > _MOST_COLUMNS:
        raise ValueError(
            f"the entry {name!r} has {rows[:1].size} elements in a row; tensors='columns' makes at most {_MOST_COLUMNS} columns "
            "of one"
        )
    for place in itertools.product(*map(range, rows.shape[1:])):
        cell = (slice(None), *place)
        yield f"{name}[{','.join(map(str, place))}]", rows[cell]


def _choose_nullable(pd: Any) -> Any:
    """Return a function that gives the nullable dtype of pandas of a type of Arrow."""
    names = {kind.lower(): f"{kind}Dtype" for kind in ("Int8", "Int16", "Int32", "Int64")}
    names |= {f"u{kind}": f"U{name}" for kind, name in names.items()} | {"bool": "BooleanDtype"}
    return lambda kind: getattr(pd, names[str(kind)])() if str(kind) in names else None


def _view_rows(array: pa.Array, form: Dense) -> Any:
    leaf = convert(view_numbers(peel(array)[0], form.stored), form)
    try:
        return leaf.numpy()
    except TypeError:  # numpy lacks the dtype
        return leaf.float().numpy()


def read_frame(dataframe: Any, index: bool | None, *, nulls: Any = "auto", **options: Any) -> Any:
    """Return the collection of a data frame; see :func:`td_arrow.from_pandas`."""
    pd = import_pandas("from_pandas")
    if not isinstance(dataframe, pd.DataFrame):
        raise TypeError(f"from_pandas() takes a data frame of pandas; got {type(dataframe).__qualname__}")
    policy = Nulls.of(nulls)
    frame = _add_index(pd, dataframe, index)
    header = frame.attrs.get("td") if isinstance(frame.attrs.get("td"), dict) else {}
    reading = _Frame(pd, frame, header.get("fields") or {}, policy, options["times"], options["categories"])
    schema = pa.schema(reading.fields, {KEY: header["header"].encode()} if "header" in header else None)
    return read_collection(schema, len(frame), reading.read, "the data frame", nulls=policy, **options)


def _add_index(pd: Any, frame: Any, index: bool | None) -> Any:
    """Return a frame with columns for its index, if that is an entry."""
    plain = isinstance(frame.index, pd.RangeIndex) and frame.index.equals(pd.RangeIndex(len(frame)))
    if plain or index is False:
        return frame
    if index is None:
        warnings.warn(
            "the index of the data frame is left out: pass index=True for an entry, or index=False",
            stacklevel=4,
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

    def __init__(
        self, pd: Any, frame: Any, facts: Mapping[str, str], nulls: Nulls, times: str, categories: str
    ) -> None:
        self._pd, self._nulls, self._times, self._categories = pd, nulls, times, categories
        self._columns: dict[Path, Any] = {}
        for position, label in enumerate(frame.columns):
            path = tuple(map(str, label)) if isinstance(label, tuple) else (str(label),)
            path = tuple(name for name in path if name) or path[:1]
            if path in self._columns:
                raise FormatError(f"the data frame: two columns are called {label!r}: rename one")
            self._columns[path] = frame.iloc[:, position]
        self._join_cells(facts)
        self.fields = _make_fields([(path, facts.get(".".join(path))) for path in self._columns])
        self._known = list_fields(self.fields, "the data frame")

    def _join_cells(self, facts: Mapping[str, str]) -> None:
        """Join columns that are the elements of one leaf, which the header has under a name that no column has."""
        columns = {path[0]: series for path, series in self._columns.items() if len(path) == 1}
        for name, places in group_cells(columns).items():
            shape = tuple(max(sizes) + 1 for sizes in zip(*places, strict=True))
            if name not in facts or name in columns or len(places) != int(np.prod(shape)):
                continue
            parts = [columns[places[place]].to_numpy() for place in sorted(places)]
            leaf = torch.from_numpy(np.stack(parts, 1)).view(-1, *shape)
            joined = {(part,) for part in places.values()}
            items = [
                ((name,), leaf) if path in joined else (path, item) for path, item in self._columns.items()
            ]
            self._columns = dict(items)

    def read(self, paths: Iterable[Path]) -> Columns:
        """Yield what each column is: a leaf, values of rows, or an array of Arrow."""
        for path in paths:
            series = self._columns[path]
            facts = read_facts(self._known[path])
            if facts.get("kind"):
                yield path, self._read_own(series, facts["kind"])
                continue
            item = series if isinstance(series, Tensor) else self._read_series(series, path)
            if isinstance(item, Tensor) and f"torch.{facts.get('dtype')}" in STORABLE:
                item = item.to(STORABLE[f"torch.{facts['dtype']}"])
            yield path, item

    def _read_own(self, series: Any, kind: str) -> Any:
        """Return a column of values that :func:`make_frame` made."""
        values = self._list_values(series)
        if kind == "one" and values and all(value == values[0] for value in values):
            return One(values[0].to_pydatetime() if isinstance(values[0], self._pd.Timestamp) else values[0])
        is_object = isinstance(series.dtype, np.dtype) and series.dtype.kind == "O"
        return RowValues(values) if is_object else pa.array(series, from_pandas=True)

    def _list_values(self, series: Any) -> list[Any]:
        """Return the values of a column, None for those that are missing."""
        return [None if value is self._pd.NA or value is self._pd.NaT else value for value in series]

    def _read_series(self, series: Any, path: Path) -> Any:
        """Return what a column is."""
        pd, dtype = self._pd, series.dtype
        if isinstance(dtype, pd.SparseDtype):
            series, dtype = series.sparse.to_dense(), dtype.subtype
        if isinstance(dtype, pd.CategoricalDtype) and self._categories != "values":
            codes = series.cat.codes.to_numpy()
            leaf = self._fill(torch.from_numpy(codes.copy()), codes >= 0, path)
            if self._categories == "codes":
                return leaf
            return {"codes": leaf, "labels": series.cat.categories.tolist()}
        if self._times == "numbers" and getattr(dtype, "kind", "") in "Mm":
            is_zoned = getattr(dtype, "tz", None) is not None
            plain = series.dt.tz_convert("UTC").dt.tz_localize(None) if is_zoned else series
            numbers = plain.to_numpy().astype(f"{dtype.kind}8[ns]")
            return self._fill(torch.from_numpy(numbers.view(np.int64).copy()), ~np.isnat(numbers), path)
        if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
            leaf, valid = as_tensor(series.to_numpy(copy=True)), series.notna().to_numpy(copy=True)
            # NaN is what pandas has for a missing number, and stays one by default.
            return leaf if self._nulls.get(path) == "auto" else self._fill(leaf, valid, path)
        if isinstance(dtype, np.dtype) and dtype.kind == "O":
            return self._read_objects(series, path)
        return pa.array(series, from_pandas=True)

    def _fill(self, leaf: Tensor, valid: Any, path: Path) -> Tensor:
        return leaf if valid.all() else self._nulls.fill(path, leaf, valid)

    def _read_objects(self, series: Any, path: Path) -> Any:
        """Return what a column of Python objects is: a dense leaf of arrays, numbers of one type, lists, or values."""
        values = self._list_values(series)
        if not {type(value) for value in values if value is not None} <= {float, int, bool}:
            # Among text, NaN is what pandas has for a missing value.
            values = [None if isinstance(value, float) and value != value else value for value in values]
        present = [value for value in values if value is not None]
        kinds = {*map(type, present)}
        if present and all(isinstance(value, (np.ndarray, Tensor)) for value in present):
            return _join_arrays(values)
        if kinds == {list}:
            kinds = {*map(type, itertools.chain(*present))}
            are_numbers = kinds <= {int, float}
        else:
            are_numbers = kinds in ({int}, {float}, {bool})
        if are_numbers:
            with contextlib.suppress(pa.ArrowInvalid, OverflowError):
                return pa.array(values)
        return RowValues(self._nulls.keep(path, values))


def _make_fields(columns: list[tuple[Path, str | None]]) -> list[pa.Field]:
    """Return the field of each column, whose type is not used, or the struct of those that begin with one name."""
    nested: dict[str, list[tuple[Path, str | None]]] = {}
    for path, text in columns:
        nested.setdefault(path[0], []).append((path[1:], text))
    fields = []
    for name, parts in nested.items():
        below = [(path, text) for path, text in parts if path]
        if below and len(below) < len(parts):
            raise FormatError(f"the data frame: {name!r} is a column, and the level of others")
        text = parts[0][1]
        kind = pa.struct(_make_fields(below)) if below else pa.null()
        fields.append(pa.field(name, kind, True, {KEY: text.encode()} if text and not below else None))
    return fields


def _join_arrays(values: list[Any]) -> Any:
    """Return arrays of one shape as a leaf, and others as lists."""
    if all(value is not None for value in values):
        parts = [torch.as_tensor(value) for value in values]
        if len({(part.shape, part.dtype) for part in parts}) == 1:
            return torch.stack(parts)
    return pa.array([None if value is None else np.asarray(value).tolist() for value in values])
