"""Entries of collections from columns and tables of Arrow, pandas, polars, xarray and Hugging Face."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from td_core import TensorDict
from td_core.spi import as_tensor

from ._data_frames import import_pandas, read_frame
from ._from_arrow import as_table, read_in_memory


def read_column(column: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the elements of a column: a leaf, a jagged leaf, a collection for structs, or one value for each row."""
    make = pa.chunked_array if hasattr(column, "__arrow_c_stream__") else pa.array
    return read_table(pa.table({"column": make(column)}), batch_size, device)._children()["column"]


def read_series(series: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the elements of a column, an index or an array of pandas, as :func:`read_column`."""
    pd = import_pandas("from_pandas")
    column = pd.Series(list(series), dtype=object) if isinstance(series, pd.MultiIndex) else pd.Series(series)
    return read_data_frame(pd.DataFrame({"column": column}), batch_size, device)._children()["column"]


def read_dataset_column(column: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the elements of a column of a data set of Hugging Face."""
    name = column.column_name
    return read_table(column.source.select_columns([name]), batch_size, device)._children()[name]


def read_table(table: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the collection of a table, with one batch dim."""
    with _rephrase_nulls():
        # A frame does not change when a leaf does.
        return read_in_memory(as_table(table), "the table", copy=True)


def read_data_frame(frame: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the collection of a data frame of pandas, without its index; columns of several levels become nested keys."""
    with _rephrase_nulls():
        return read_frame(frame, False, times="values", categories="values").clone()


@contextlib.contextmanager
def _rephrase_nulls() -> Iterator[None]:
    """Say in the error of missing numbers what a program that sets an entry can do."""
    try:
        yield
    except ValueError as error:
        problem, found, _ = str(error).partition(": pass nulls=")
        if not found:
            raise
        hint = "fill them first, or convert the table by from_arrow(..., nulls=...)"
        raise ValueError(f"{problem}: {hint}") from error


def read_tensor(tensor: Any, batch_size: torch.Size, device: object) -> Any:
    """Return a tensor of Arrow as a leaf."""
    return as_tensor(np.array(tensor.to_numpy()))


def read_variable(variable: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the elements of an array of xarray; dates and text become values."""
    return TensorDict({"data": variable.values}, batch_size)._children()["data"]


def read_variables(data: Any, batch_size: torch.Size, device: object) -> Any:
    """Return the collection of the variables of a data set of xarray; batch dims are those that all share from the left."""
    variables = {str(name): variable for name, variable in data.data_vars.items()}
    shared: list[tuple[str, int]] = []
    for column in zip(*(zip(map(str, each.dims), each.shape) for each in variables.values())):
        if len({*column}) > 1:
            break
        shared.append(column[0])
    entries = {name: variable.values for name, variable in variables.items()}
    names = [name for name, _ in shared]
    return TensorDict(entries, [size for _, size in shared], names=names or None)


def refuse_unread(value: object, batch_size: torch.Size, device: object) -> Any:
    """Raise TypeError for an object that reads its rows later."""
    raise TypeError(
        f"a {type(value).__name__} cannot be an entry: it is not in memory: collect() it, or use iter_batches"
    )
