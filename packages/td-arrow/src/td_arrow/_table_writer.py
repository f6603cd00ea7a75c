"""Write a file of a table piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa

from td_core import NestedKey, is_tensor_collection
from td_core.errors import UnsupportedOperationError

from ._batches import find_format
from ._save_tables import fit_schema, make_arrow_writer, make_parquet_writer, write_table
from ._table_files import open_tables
from ._table_locations import choose_format, open_output, show_place
from ._write_columns import check_columns, to_arrow

#: Rows are written when they have this many bytes.
_GROUP_BYTES = 1 << 26


class TableWriter:
    """Writes collections with the same columns, one after the other, to a file that appears when all are written.

    Args:
        location: a path, a URL, or a binary file object.
        format: ``"parquet"`` or ``"arrow"``; by default that of the suffix, else ``"parquet"``.
        like: a collection with the columns; by default the first one that is written.
        row_group_size: rows of a row group or record batch; by default those of 64 MB.
        separator: joins the keys of nested entries to names of columns.
        tensors: as for :func:`td_arrow.to_arrow`.
        compression: as for :func:`td_arrow.save`.
        checksums: write a CRC for each page of a Parquet file.
        durable: return from ``close`` after the data has reached the disk.
        **options: arguments of ``pyarrow.parquet.ParquetWriter``.

    >>> with TableWriter("data.parquet") as writer:
    ...     for start in (0, 3):
    ...         writer.write(TensorDict({"x": torch.arange(start, start + 3)}, [3]))
    >>> TensorDict.load("data.parquet")["x"]
    tensor([0, 1, 2, 3, 4, 5])
    """

    def __init__(
        self,
        location: Any,
        *,
        format: str | None = None,
        like: Any = None,
        row_group_size: int | None = None,
        separator: str | None = None,
        tensors: str | Mapping[NestedKey | None, str] | None = None,
        compression: Any = "auto",
        checksums: bool = False,
        durable: bool = False,
        **options: Any,
    ) -> None:
        format = choose_format(location, format)
        if row_group_size is not None and (type(row_group_size) is not int or row_group_size < 1):
            raise ValueError(f"row_group_size is a positive int; got {row_group_size!r:.100}")
        if format == "parquet":
            self._open_writer = make_parquet_writer(compression, checksums, options)
        elif options or checksums:
            raise TypeError(f"files of Arrow have no option {', '.join([*options, 'checksums'][:1])}")
        else:
            self._open_writer = make_arrow_writer(None if compression == "auto" else compression)
        choice = tensors or ("auto" if format == "parquet" else "list")
        check_columns(separator, choice)
        self._columns: dict[str, Any] = {"separator": separator, "tensors": choice}
        self._location, self._rows, self._durable = location, row_group_size, durable
        self._schema = None if like is None else to_arrow(like, **self._columns).schema
        self._waiting: list[Any] = []
        self._writer: Any = None
        self._stack: contextlib.ExitStack | None = contextlib.ExitStack()

    def write(self, td: Any) -> None:
        """Add the rows of a collection.

        Raises:
            StructureError: it has other columns than the first one; nothing of it is written.
            UnsupportedOperationError: the writer is closed.
        """
        if self._stack is None:
            raise UnsupportedOperationError(f"the writer of {show_place(self._location)} is closed")
        table = to_arrow(td, **self._columns, copy=True)
        if self._schema is None:
            self._schema = table.schema
        self._waiting.append(fit_schema(table, self._schema))
        rows = sum(item.num_rows for item in self._waiting)
        size = sum(item.nbytes for item in self._waiting)
        if self._rows is not None and rows >= self._rows:
            self._flush(self._stack, rows - rows % self._rows)
        elif self._rows is None and size >= _GROUP_BYTES:
            self._flush(self._stack, rows)

    def _flush(self, stack: contextlib.ExitStack, count: int) -> None:
        if self._writer is None:
            sink = stack.enter_context(open_output(self._location, self._durable))
            self._writer = stack.enter_context(self._open_writer(sink, self._schema))
        if self._waiting:
            table = pa.concat_tables(self._waiting).combine_chunks()
            write_table(self._writer, table.slice(0, count), self._schema, self._rows)
            self._waiting = [table.slice(count)] if count < table.num_rows else []

    def close(self) -> None:
        """Write what is left, and give the file its name."""
        stack, self._stack = self._stack, None
        if stack is not None:
            with stack:
                if self._schema is not None:
                    self._flush(stack, sum(item.num_rows for item in self._waiting))

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._stack is not None:
            stack, self._stack = self._stack, None
            stack.__exit__(kind, error, trace)


def arrow_schema(source: Any) -> Any:
    """Return the ``pyarrow.Schema`` of a collection as a table, or of a file of a table.

    >>> arrow_schema(TensorDict({"x": torch.zeros(2)}, [2])).names
    ['x']
    """
    if is_tensor_collection(source):
        return to_arrow(source).schema
    with open_tables(source, find_format(source)) as table:
        return table.schema
