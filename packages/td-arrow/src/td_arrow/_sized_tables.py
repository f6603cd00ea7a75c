"""Loads with the arguments of tensordict: batch sizes of the caller, and one dtype for all numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from td_core import NestedKey, load
from td_core.spi import as_dtype
from td_core.typing import DeviceType


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
        options["keys"] = columns
    loaded = load(path, format="parquet", separator=separator, device=device, **options)
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def set_sizes(
    loaded: Any, auto_batch_size: bool, batch_dims: int | None, batch_size: Any, dtype: torch.dtype | None
) -> Any:
    """Return what was loaded with another batch size and dtype; raise ValueError if two arguments say the batch size."""
    if batch_size is not None and (auto_batch_size or batch_dims is not None):
        raise ValueError("pass batch_size, or auto_batch_size with batch_dims, not both")
    if dtype is not None:
        kind = as_dtype(dtype)
        loaded = loaded.apply(lambda leaf: leaf if leaf.is_complex() else leaf.to(kind))
    if batch_size is not None:
        loaded.batch_size = torch.Size(batch_size)
    elif auto_batch_size or batch_dims is not None:
        loaded.auto_batch_size_(batch_dims)
    return loaded
