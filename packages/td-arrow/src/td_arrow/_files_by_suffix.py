"""The operations of both formats of tables: the format is named, or that of the suffix or the content of a location."""

from __future__ import annotations

from typing import Any

import td_core
from td_core import Report, TensorCollection, Tree

from ._table_locations import choose_format


def _find(location: object, name: str | None) -> str | None:
    """Return the format that is named; None, so that the content decides."""
    return None if name is None else choose_format(location, name)


def save(data: TensorCollection, location: Any, *, format: str | None = None, **options: Any) -> Any:
    """Save a collection as a Parquet file, or as a file of Arrow, or as a directory of such files.

    The new content is complete under its name, or the old one remains, whenever the process is killed.

    Args:
        data: the collection.
        location: a path, a URL, or a binary file object.
        format: ``"parquet"`` or ``"arrow"``; by default that of the suffix, else ``"parquet"``.
        **options: ``separator``, ``row_dims``, ``tensors`` and ``mask_key`` as for :func:`to_arrow`; for Parquet, ``tensors`` is
            ``"auto"`` by default. ``compression``: for Parquet, ``"auto"`` compresses text, integers and bools with zstd, and
            keeps floats and bytes as they are; a name of pyarrow; or a mapping from columns to names. For Arrow, None,
            ``"lz4"`` or ``"zstd"``; only what is not compressed can be mapped. ``row_group_size`` (Parquet, the unit of reading;
            by default the rows of 64 MB) or ``batch_rows`` (Arrow; by default all). ``max_rows_per_file``: write a directory of
            files. ``checksums``: a hash of the schema, and a CRC for each page of Parquet, or a hash of each column of
            Arrow. ``durable``, ``return_early`` and ``progress`` as for :func:`td_core.save`. ``storage_options`` of fsspec, for
            a URL. For Parquet, also the arguments of ``pyarrow.parquet.ParquetWriter``.

    Raises:
        CodecError: a value or leaf cannot be stored; nothing is written.
        TypeError: an option is unknown.

    >>> td = TensorDict({"x": torch.arange(6), "name": ["a", "b"] * 3}, [6])
    >>> save(td, "data.parquet", row_group_size=4) is td
    True
    """
    return td_core.save(data, location, format=choose_format(location, format), **options)


def load(location: Any, *, format: str | None = None, **options: Any) -> Any:
    """Load a file of tables, or a directory of them.

    A local file of Arrow is mapped: numbers that are not compressed are read when they are used, and writes stay in memory.

    Args:
        location: a path, a URL, or a binary file object.
        format: ``"parquet"`` or ``"arrow"``; by default that of the content.
        **options: ``keys``, ``device``, ``nulls`` (``"auto"`` by default), ``mask_key``, ``lists``, ``times``, ``categories``,
            ``separator`` and ``strict`` as for :func:`from_arrow`; ``strict=False`` also fills columns that a file of a directory
            lacks with nulls. ``filter``: a ``pyarrow.compute.Expression``, or tuples such as ``[("step", "<", 10)]``, which rows
            meet; a nested column is a tuple of names. ``rows``: an index of the rows that ``filter`` keeps. ``progress``,
            ``storage_options``. For Parquet, ``num_threads`` (1 decodes in this thread), and the arguments of
            ``pyarrow.parquet.ParquetFile``.

    Raises:
        FormatError: the file is damaged, or is not a table.
        ValueError: a column has nulls that ``nulls`` refuses.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.parquet")
    >>> load("data.parquet", filter=[("x", ">", 1)], rows=slice(2))["x"]
    tensor([2, 3])
    """
    return td_core.load(location, format=_find(location, format), **options)


def open_table(location: Any, *, format: str | None = None, **options: Any) -> Any:
    """Open a file of tables, or a directory of them, whose leaves are read when they are used.

    Numbers of one record batch of Arrow that are not compressed are mapped. Others are decoded in whole row groups or record
    batches when they are used, and kept; for rows in a random order, convert the file to the format ``"arrow"``. Values, lists,
    and integers with nulls are read now.

    Args:
        location: a local path.
        format: ``"parquet"`` or ``"arrow"``; by default that of the content.
        **options: ``mode``: ``"r"``; ``"c"``, which keeps writes in memory; or ``"r+"`` for one file of Arrow, if all leaves
            can be mapped. ``keys``, ``separator`` and ``strict`` as for :func:`from_arrow`. ``cache_bytes``: how many bytes of
            decoded groups of a file each process keeps.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> open_table("data.arrow")[[4, 1]]["x"]
    tensor([4, 1])
    """
    return td_core.open(location, format=_find(location, format), **options)


def append(rows: TensorCollection, location: Any, *, format: str | None = None, **options: Any) -> None:
    """Add rows to a directory of tables, as a file of their own; the options are those of :func:`save`.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data", format="parquet", max_rows_per_file=4)
    >>> append(TensorDict({"x": torch.arange(2)}, [2]), "data")
    >>> load("data").batch_size
    torch.Size([8])
    """
    td_core.append(rows, location, format=_find(location, format), **options)


def inspect(location: Any, *, format: str | None = None, **options: Any) -> Tree:
    """Return the tree of a file of tables from its header: keys, shapes, dtypes, sizes, nulls.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> inspect("data.arrow").children["x"].shape
    [6]
    """
    return td_core.inspect(location, format=_find(location, format), **options)


def verify(location: Any, *, format: str | None = None, **options: Any) -> Report:
    """Read all columns of a file of tables, and report what is damaged.

    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow", checksums=True)
    >>> verify("data.arrow").ok
    True
    """
    return td_core.verify(location, format=_find(location, format), **options)
