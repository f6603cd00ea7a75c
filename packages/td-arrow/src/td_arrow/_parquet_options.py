"""The options of the reader and the writer of Parquet files of pyarrow, which the operations of the format pass on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pyarrow.parquet as pq

#: Names of codecs.
CODECS = ("auto", "none", "snappy", "gzip", "brotli", "lz4", "zstd")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

#: What the format sets itself.
_OWN = (
    "self",
    "source",
    "where",
    "schema",
    "filesystem",
    "options",
    "compression",
    "write_page_checksum",
    "store_schema",
)


def _list_options(cls: type) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(cls).parameters if name not in _OWN)


WRITER, READER = _list_options(pq.ParquetWriter), _list_options(pq.ParquetFile)


def declare_options(names: Iterable[str]) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that gives a function with ``**options`` a signature with their names, which td-core checks.

    >>> @declare_options(["page"])
    ... def write(*, rows=1, **options):
    ...     return options
    >>> inspect.signature(write)
    <Signature (*, rows=1, page=None)>
    """

    def decorate(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        parameters = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        known = {item.name for item in parameters}
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(name, keyword, default=None) for name in names if name not in known]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def check_options(options: Iterable[str], names: tuple[str, ...], operation: str) -> None:
    """Raise TypeError for an option that is not one of ``names``."""
    unknown = [name for name in options if name not in names]
    if unknown:
        raise TypeError(
            f"the serializer 'parquet' has no option {', '.join(map(repr, unknown))} for {operation}(); those of pyarrow are "
            f"{', '.join(names)}"
        )
