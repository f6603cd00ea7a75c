"""The options of the operations of both formats: those of this package, and those that pyarrow takes for Parquet files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pyarrow.parquet as pq

#: What the format sets itself.
_OWN = (
    "self", "source", "where", "schema", "filesystem", "options", "compression", "write_page_checksum", "store_schema",
)  # fmt: skip
#: The options of the writer and of the reader of Parquet files of pyarrow.
WRITER, READER = (
    [each for each in inspect.signature(cls).parameters.values() if each.name not in _OWN]
    for cls in (pq.ParquetWriter, pq.ParquetFile)
)


def option(name: str, default: object = None) -> inspect.Parameter:
    """Return an option of an operation."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def bind(
    function: Callable[..., Any],
    name: str,
    options: Iterable[inspect.Parameter] = (),
    without: Iterable[str] = (),
) -> Callable[..., Any]:
    """Return an operation of one format, with a signature that names its options, which td-core checks."""
    operation = partial(function, name)
    found = {
        each.name: each
        for each in inspect.signature(operation).parameters.values()
        if each.kind is not each.VAR_KEYWORD and each.name not in without
    }
    for each in options:
        found.setdefault(each.name, option(each.name, each.default))
    operation.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
    return operation


def check_options(options: Iterable[str], names: Iterable[inspect.Parameter], where: str) -> None:
    """Raise TypeError for an option that is not one of ``names``."""
    known = {each.name for each in names}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"{where} has no option {', '.join(map(repr, unknown))}; its options are {', '.join(sorted(known))}"
        )


def check_text_options(options: Iterable[str], function: Callable[..., object], where: str) -> None:
    """Raise TypeError for an option that the reader of a text format does not have."""
    names = [
        each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    check_options(
        options, [*names, *map(option, ("device", "keys", "lists", "mask_key", "nulls", "separator"))], where
    )


def check_count(name: str, number: object, least: float = 1, wanted: str = "a positive int") -> None:
    """Raise ValueError for an option that is not an int of a least value."""
    if type(number) is not int or number < least:
        raise ValueError(f"{name} is {wanted}; got {number!r:.100}")
