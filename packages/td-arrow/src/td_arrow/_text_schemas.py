"""What text files cannot say about a collection: a file beside them with the schema of its table, and columns built by it."""

from __future__ import annotations

import base64
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

from ._arrow_types import ARROW
from ._read_columns import is_list
from ._table_header import read_facts
from ._table_locations import is_object, is_url, show_place

#: The ending of the name of the file with the schema.
ENDING = ".td.json"
_VERSION = 1


def check_beside(location: Any) -> str:
    """Return the path of a local file, beside which a schema can be; ValueError for other locations."""
    if is_object(location) or is_url(location):
        raise ValueError(f"schema=True writes a file beside a local file; {show_place(location)} is none")
    return str(os.fspath(location))


def save_schema(location: Any, schema: Any) -> None:
    """Write the schema of a text file beside it, with its size, by which a later change is noticed."""
    path = os.fspath(location)
    content = {
        "version": _VERSION,
        "size": os.path.getsize(path),
        "schema": base64.b64encode(schema.serialize()).decode(),
    }
    with NewFile(path + ENDING) as new:
        with open(new.temporary, "w", encoding="ascii") as file:
            json.dump(content, file)
        new.commit()


def load_schema(location: Any, schema: bool | None) -> Any:
    """Return the schema beside a text file; None if there is none that fits its size, or ``schema`` is False.

    Raises:
        FormatError: it is damaged, or with ``schema`` True there is none.
    """
    if schema is False or is_object(location) or is_url(location):
        if schema:
            check_beside(location)
        return None
    path = os.fspath(location)
    try:
        with open(path + ENDING, encoding="utf-8") as file:
            content = parse_json(file.read())
        if content["version"] != _VERSION:
            raise FormatError(
                f"{path}{ENDING} has the version {content['version']!r:.100}; expected {_VERSION}: upgrade td-arrow"
            )
        fits = content["size"] == os.path.getsize(path)
        found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"]))) if fits else None
    except FileNotFoundError:
        found = None
    except (ValueError, KeyError, TypeError, pa.ArrowException, OSError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}{ENDING} is damaged: {type(error).__name__}") from error
    if found is None and schema:
        raise FormatError(
            f"there is no schema of {path} at {path}{ENDING}, or the file has changed: pass schema=False"
        )
    return found


def find_item(item: Any) -> Any:
    """Return the field of the numbers or text of a column, below its lists."""
    while is_list(item.type):
        item = item.type.value_field
    return item


def find_stand_in(item: Any) -> torch.dtype | None:
    """Return the dtype of a column whose numbers are stored as integers of their width, or None."""
    dtype = STORABLE.get(f"torch.{read_facts(item).get('dtype')}")
    return None if dtype is None or dtype in ARROW or dtype.is_complex else dtype


def is_written_as_text(kind: Any) -> bool:
    """Return True for a type whose cells are text in JSON, and are read by a cast: dates, times and decimals."""
    return bool((pa.types.is_temporal(kind) and not pa.types.is_duration(kind)) or pa.types.is_decimal(kind))


def build_column(values: list[Any], item: Any) -> Any:
    """Return the array of a field from the values that JSON has for its cells.

    Raises:
        ValueError, TypeError, ArrowException: a value is not one of the type of the field.
    """
    facts, kind = read_facts(item), item.type
    if facts.get("json"):
        return pa.array([None if value is None else json.dumps(value) for value in values], kind)
    inner = find_item(item)
    stand_in = find_stand_in(item)
    if stand_in is not None or pa.types.is_floating(inner.type):
        values = _convert_items(values, kind, lambda flat: _store_floats(flat, inner, stand_in))
    elif is_written_as_text(inner.type):
        if inner is item:
            return _parse_text(values, kind)
        values = _convert_items(values, kind, lambda flat: _parse_text(flat, inner.type).to_pylist())
    return pa.array(values, kind)


def _parse_text(values: list[Any], kind: Any) -> Any:
    """Return dates, times or decimals of their text."""
    if pa.types.is_time(kind):  # Arrow does not parse these
        return pa.array(
            [None if each is None else datetime.time.fromisoformat(each) for each in values], kind
        )
    return pa.array(values, pa.string()).cast(kind)


def _store_floats(flat: list[Any], inner: Any, stand_in: torch.dtype | None) -> list[Any]:
    """Return floats as numbers of the type of a field; None is NaN where the field cannot be null."""
    numbers = [float("nan") if each is None else each for each in flat]
    if stand_in is not None:
        stored: list[Any] = as_storable(
            torch.tensor(numbers, dtype=torch.float64).to(stand_in), ARROW
        ).tolist()
    elif pa.types.is_float16(inner.type):
        stored = [*np.array(numbers, "f2")]
    else:
        stored = [float(each) for each in numbers]
    if not inner.nullable:
        return stored
    return [None if each is None else number for each, number in zip(flat, stored, strict=True)]


def _convert_items(values: list[Any], kind: Any, convert: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Return cells of a type, which may be nested lists, with the results of a function of all their items."""
    depth = 1
    while is_list(kind):
        depth, kind = depth + 1, kind.value_type

    def flatten(value: Any, level: int) -> Iterator[Any]:
        if level == depth:
            yield value
        elif value is not None:
            for each in value:
                yield from flatten(each, level + 1)

    results = iter(convert([*flatten(values, 0)]))

    def rebuild(value: Any, level: int) -> Any:
        if level == depth:
            return next(results)
        return None if value is None else [rebuild(each, level + 1) for each in value]

    rebuilt: list[Any] = rebuild(values, 0)
    return rebuilt
