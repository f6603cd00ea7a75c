"""What text cannot say about a collection: the schema of its table beside it, and columns that are built by that schema."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from td_core.errors import FormatError
from td_core.spi import STORABLE, parse_json
from td_store.arrays import as_storable
from td_store.files import NewFile

from ._arrow_types import ARROW, Facts, is_list
from ._nulls import Path, show_column
from ._table_columns import is_level
from ._table_header import read_facts
from ._table_locations import is_local, show_place

#: The ending of the name of the file with the schema.
ENDING = ".td.json"
_VERSION = 1


def check_beside(location: object) -> None:
    """Raise ValueError for a location that is not a local file, beside which a schema can be."""
    if not is_local(location):
        raise ValueError(f"schema=True writes a file beside a local file; {show_place(location)} is none")


def dump_schema(schema: pa.Schema) -> Facts:
    """Return a schema as JSON, for a header."""
    return {"version": _VERSION, "schema": base64.b64encode(schema.serialize()).decode()}


def parse_schema(content: Any, what: str, most: int | None = None) -> pa.Schema | None:
    """Return the schema of a header; None if it is of a text of another size than ``most``. Damage is an error."""
    try:
        if content["version"] != _VERSION:
            raise FormatError(f"{what} has the version {content['version']!r:.100}; upgrade td-arrow")
        if most is not None and content["size"] != most:
            return None
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
    except (ValueError, LookupError, TypeError, OSError, pa.ArrowException) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{what} is damaged: {type(error).__name__}") from error


def save_schema(location: Any, schema: pa.Schema) -> None:
    """Write the schema of a text file beside it, with its size, by which a later change is noticed."""
    path = os.fspath(location)
    content = {**dump_schema(schema), "size": os.path.getsize(path)}
    with NewFile(path + ENDING) as new:
        with open(new.temporary, "w", encoding="ascii") as file:
            json.dump(content, file)
        new.commit()


def load_schema(location: Any, schema: bool | None) -> pa.Schema | None:
    """Return the schema beside a text file; None if none fits its size, which is an error if ``schema`` is True."""
    if schema is False or not is_local(location):
        if schema:
            check_beside(location)
        return None
    path, found = os.fspath(location), None
    with contextlib.suppress(FileNotFoundError):
        with open(path + ENDING, encoding="utf-8", errors="replace") as file:
            text = file.read()
        try:
            content = parse_json(text)
        except ValueError as error:
            raise FormatError(f"{path}{ENDING} is damaged: it is not JSON") from error
        found = parse_schema(content, f"{path}{ENDING}", os.path.getsize(path))
    if found is None and schema:
        raise FormatError(
            f"there is no schema of {path} at {path}{ENDING}, or the file has changed: pass schema=False"
        )
    return found


@contextlib.contextmanager
def report_misfit(
    where: str, path: Path, said: str = "the schema beside the file says: pass schema=False"
) -> Iterator[None]:
    """Raise FormatError for a column that is not what the schema says."""
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, LookupError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: column {show_column(path)} is not what {said}") from error


def find_item(item: pa.Field) -> pa.Field:
    """Return the field of the numbers or text of a column, below its lists."""
    while is_list(item.type):
        item = item.type.value_field
    return item


def find_stand_in(item: pa.Field) -> torch.dtype | None:
    """Return the dtype of a column whose numbers are stored as integers of their width, or None."""
    dtype = STORABLE.get(f"torch.{read_facts(item).get('dtype')}")
    return None if dtype is None or dtype in ARROW or dtype.is_complex else dtype


def build_column(values: list[Any], item: pa.Field, where: str, path: Path = ()) -> pa.Array:
    """Return the array of a field from the values that JSON has for its cells; other values are an error."""
    path = (*path, item.name)
    with report_misfit(where, path):
        if not is_level(item):
            return _build_array(values, item)
        arrays = [
            build_column([None if value is None else value[each.name] for value in values], each, where, path)
            for each in item.type
        ]
        mask = pa.array([value is None for value in values]) if None in values else None
        return pa.StructArray.from_arrays(arrays, fields=list(item.type), mask=mask)


def _build_array(values: list[Any], item: pa.Field) -> pa.Array:
    kind, inner = item.type, find_item(item)
    if read_facts(item).get("json"):
        return pa.array([None if value is None else json.dumps(value) for value in values], kind)
    stand_in = find_stand_in(item)
    if stand_in is not None or pa.types.is_floating(inner.type):
        values = _convert_items(values, kind, lambda flat: _store_floats(flat, inner, stand_in))
    elif (pa.types.is_temporal(inner.type) and not pa.types.is_duration(inner.type)) or pa.types.is_decimal(
        inner.type
    ):
        if inner is item:
            return _parse_text(values, kind)
        values = _convert_items(values, kind, lambda flat: _parse_text(flat, inner.type).to_pylist())
    return pa.array(values, kind)


def _parse_text(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return dates, times or decimals of their text."""
    if pa.types.is_time(kind):  # Arrow does not parse these
        values = [None if each is None else datetime.time.fromisoformat(each) for each in values]
        return pa.array(values, kind)
    return pa.array(values, pa.string()).cast(kind)


def _store_floats(flat: list[Any], inner: pa.Field, stand_in: torch.dtype | None) -> list[Any]:
    """Return floats as numbers of the type of a field; None is NaN where the field cannot be null."""
    numbers = [float("nan") if each is None else float(each) for each in flat]
    stored: list[Any] = numbers
    if stand_in is not None:
        stored = as_storable(torch.tensor(numbers, dtype=torch.float64).to(stand_in), ARROW).tolist()
    elif pa.types.is_float16(inner.type):
        stored = [*np.array(numbers, "f2")]
    if not inner.nullable:
        return stored
    return [None if each is None else number for each, number in zip(flat, stored, strict=True)]


def _convert_items(
    values: list[Any], kind: pa.DataType, convert: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Return cells of a type, which may be nested lists, with the results of a function of all their items."""
    if not is_list(kind):
        return convert(values)
    present = [value for value in values if value is not None]
    items = iter(_convert_items([item for value in present for item in value], kind.value_type, convert))
    return [None if value is None else [next(items) for _ in value] for value in values]
