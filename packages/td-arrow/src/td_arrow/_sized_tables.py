"""Loads with the arguments of tensordict: batch sizes of the caller, and one dtype for all numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from td_core import NestedKey, load
from td_core.spi import as_dtype
from td_core.typing import DeviceType

from ._json import read_json
from ._read_csv import read_csv


def from_parquet(
    path: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    columns: Iterable[NestedKey] | NestedKey | None = None,
    **options: Any,
) -> Any:
    """Load a Parquet file.

    Args:
        path: a path, a URL, or a binary file object.
        auto_batch_size: find the batch dims that all leaves share.
        batch_dims: the most batch dims that are found.
        device: where the leaves go.
        batch_size: the batch size, instead of ``[rows]``.
        separator: splits the names of columns into key paths.
        dtype: dtype of all leaves of numbers and bools.
        columns: keys or key paths to read.
        **options: those of :func:`td_arrow.load`.

    Raises:
        FormatError: the file is damaged, or cannot be read.
        ValueError: a column has nulls that the option ``nulls`` refuses, or two arguments name the batch size.

    >>> TensorDict({"x": torch.zeros(3, 2)}, [3]).to_parquet("data.parquet")
    >>> from_parquet("data.parquet", auto_batch_size=True).batch_size
    torch.Size([3, 2])
    """
    if columns is not None:
        names = [columns] if isinstance(columns, (str, tuple)) else columns
        # A name of a column, too, as other programs know it.
        options["keys"] = [
            tuple(name.split(separator)) if separator and isinstance(name, str) else name for name in names
        ]
    loaded = load(path, format="parquet", separator=separator, device=device, **options)
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def from_csv(
    path: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    dtypes: Mapping[NestedKey, Any] | None = None,
    schema: bool | None = None,
    **options: Any,
) -> Any:
    r"""Read a csv file, by one rule for all files.

    A column is bool if all fields are ``true`` or ``false``; int64 if all are integers, uint64 if these need it; float64 if all
    are numbers, ``nan`` or ``inf``; else text as it is written, also digits that begin with a zero. An empty field is missing, of
    text only without quotes. Columns ``x[0]``, ``x[1]`` and so on are one leaf.

    Args:
        path: a path, a URL, or a binary file object.
        auto_batch_size: find the batch dims that all leaves share.
        batch_dims: the most batch dims that are found.
        device: where the leaves go.
        batch_size: the batch size, instead of ``[rows]``.
        separator: splits the names of columns into key paths.
        dtype: dtype of all leaves of numbers and bools.
        dtypes: the dtype of columns by key, or ``str`` for text.
        schema: whether the schema beside the file is used, from which an equal collection is made: by default if it fits.
        **options: ``keys``, ``rows``, ``nulls``, ``mask_key`` and ``lists`` as for :func:`td_arrow.load`; ``delimiter`` or
            ``sep``, ``quoting``, ``header`` (False if the first line is a row), ``encoding``, ``usecols``, ``nrows``,
            ``skiprows``, ``na_values`` and ``storage_options``.

    Raises:
        FormatError: the file is malformed; the message has the line.
        ValueError: a column has nulls that the option ``nulls`` refuses.
        TypeError: an option is unknown.

    >>> with open("data.csv", "w") as file:
    ...     _ = file.write("id,x,ok\n007,1.5,true\n008,,false\n")
    >>> td = from_csv("data.csv")
    >>> list(td["id"]), td["x"].tolist(), td["ok"].tolist()
    (['007', '008'], [1.5, nan], [True, False])
    """
    refuse_unknown("from_csv", read_csv, options)
    loaded = read_csv(path, separator=separator, device=device, dtypes=dtypes, schema=schema, **options)
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def from_json(
    path: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    lines: bool | None = None,
    dtypes: Mapping[NestedKey, Any] | None = None,
    schema: bool | None = None,
    **options: Any,
) -> Any:
    r"""Read a JSON file of records.

    Integers are int64 or uint64, numbers with a point or exponent float64, and text is text, whatever it looks like. Records in
    records are nested collections; arrays of numbers are leaves, jagged if their lengths differ. What a record lacks is null.

    Args:
        path: a path, a URL, or a binary file object.
        auto_batch_size: find the batch dims that all leaves share.
        batch_dims: the most batch dims that are found.
        device: where the leaves go.
        batch_size: the batch size, instead of ``[rows]``.
        separator: splits names into key paths.
        dtype: dtype of all leaves of numbers and bools.
        lines: whether each line is a record; None decides by the first character.
        dtypes: the dtype of leaves by key.
        schema: whether the schema beside the file is used, from which an equal collection is made: by default if it fits.
        **options: ``keys``, ``rows``, ``nulls``, ``mask_key``, ``lists`` (``"auto"`` by default) and ``storage_options`` as for
            :func:`td_arrow.load`.

    Raises:
        FormatError: the file is malformed; the message has the line.
        ValueError: a column has nulls that the option ``nulls`` refuses.
        TypeError: an option is unknown.

    >>> with open("data.jsonl", "w") as file:
    ...     _ = file.write('{"x": 1, "at": "2020-01-01"}\n{"x": 2.5, "at": null}\n')
    >>> td = from_json("data.jsonl")
    >>> td["x"].tolist(), list(td["at"])
    ([1.0, 2.5], ['2020-01-01', None])
    """
    refuse_unknown("from_json", read_json, options)
    loaded = read_json(
        path, separator=separator, device=device, lines=lines, dtypes=dtypes, schema=schema, **options
    )
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def refuse_unknown(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for options that a function does not have."""
    known = [each for each in inspect.signature(function).parameters if each != "path"]
    unknown = [each for each in options if each not in known]
    if unknown:
        raise TypeError(
            f"{name}() has no option {', '.join(map(repr, unknown))}; its options are {', '.join(sorted(known))}"
        )


def set_sizes(
    loaded: Any, auto_batch_size: bool, batch_dims: int | None, batch_size: Any, dtype: torch.dtype | None
) -> Any:
    """Return what was loaded with another batch size and dtype; raise ValueError if two arguments say the batch size."""
    if batch_size is not None and (auto_batch_size or batch_dims is not None):
        raise ValueError("pass batch_size, or auto_batch_size with batch_dims, not both")
    if dtype is not None:
        kind = as_dtype(dtype)
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"dtype is a dtype of torch; got {dtype!r:.100}")
        loaded = loaded.apply(lambda leaf: leaf if leaf.is_complex() else leaf.to(kind))
    if batch_size is not None:
        loaded.batch_size = torch.Size(batch_size)
    elif auto_batch_size or batch_dims is not None:
        loaded.auto_batch_size_(batch_dims)
    return loaded
