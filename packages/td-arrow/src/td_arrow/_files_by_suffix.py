"""The operations of both formats of tables: the format is named, or that of the suffix or the content of a location."""

from __future__ import annotations

from typing import Any

from td_core import Report, Tree
from td_core import append as append_rows
from td_core import inspect as inspect_save
from td_core import load as load_save
from td_core import open as open_save
from td_core import save as save_data
from td_core import verify as verify_save

from ._table_locations import choose_format


def save(data: Any, location: Any, *, format: str | None = None, **options: Any) -> Any:
    """Save a collection as a Parquet file, or as a file of Arrow.

    Args:
        data: the collection.
        location: a path, a URL, or a binary file object.
        format: ``"parquet"`` or ``"arrow"``; by default that of the suffix, else ``"parquet"``.
        **options: those of the format, see [the table](../packages/arrow.md).

    Raises:
        CodecError: a value or leaf cannot be stored; nothing is written.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.parquet")
    """
    return save_data(data, location, format=choose_format(location, format), **options)


def _find(location: Any, name: str | None) -> str | None:
    """Return the format that is named; None, so that the content decides."""
    return None if name is None else choose_format(location, name)


def load(location: Any, *, format: str | None = None, **options: Any) -> Any:
    """Load a file of tables, or a directory of them; see :func:`save`.

    Raises:
        FormatError: the file is damaged, or is no table.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> load("data.arrow", rows=slice(2))["x"]
    tensor([0, 1])
    """
    return load_save(location, format=_find(location, format), **options)


def open_table(location: Any, *, format: str | None = None, **options: Any) -> Any:
    """Open a file of tables, or a directory of them, whose leaves are read when they are used.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> open_table("data.arrow")[[4, 1]]["x"]
    tensor([4, 1])
    """
    return open_save(location, format=_find(location, format), **options)


def append(rows: Any, location: Any, *, format: str | None = None, **options: Any) -> None:
    """Add rows to a directory of tables, as a file of their own.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data", format="parquet", max_rows_per_file=4)
    >>> append(TensorDict({"x": torch.arange(2)}, [2]), "data")
    >>> load("data").batch_size
    torch.Size([8])
    """
    append_rows(rows, location, format=_find(location, format), **options)


def inspect(location: Any, *, format: str | None = None, **options: Any) -> Tree:
    """Return the tree of a file of tables from its header: keys, shapes, dtypes, sizes, nulls.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> inspect("data.arrow").children["x"].shape
    [6]
    """
    return inspect_save(location, format=_find(location, format), **options)


def verify(location: Any, *, format: str | None = None, **options: Any) -> Report:
    """Read all columns of a file of tables, and report what is damaged.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow", checksums=True)
    >>> verify("data.arrow").ok
    True
    """
    return verify_save(location, format=_find(location, format), **options)
