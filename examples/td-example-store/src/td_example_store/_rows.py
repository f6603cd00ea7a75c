"""The source of stored tensors: an array in the table ``rows`` of a data base, with one blob per row."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError

Index = tuple[Any, ...]


class RowSource:
    """An array in a data base. It opens the file for each request, so threads, forks and pickles need no care."""

    def __init__(self, path: Path, number: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.path, self.number, self.shape, self.dtype = path, number, shape, dtype

    def __repr__(self) -> str:
        return f"{self.path} (array {self.number})"

    def read(self, index: Index) -> Tensor:
        """Return a part of the array."""
        with closing(sqlite3.connect(self.path, timeout=60)) as base:
            return self.read_from(base, index)

    def write(self, index: Index, value: Tensor) -> None:
        """Write a part of the array, in one transaction."""
        with closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as base:
            base.execute(
                "begin immediate"
            )  # other writers wait, so that rows that are written in part stay consistent
            rows = self._read_rows(base, index)
            rows[_get_columns(index)] = value
            blobs = to_blobs(rows, self.shape)
            base.executemany(
                "update rows set data = ? where number = ? and row = ?",
                [(blob, self.number, row) for row, blob in zip(self._list_rows(index), blobs, strict=True)],
            )
            base.execute("commit")

    def flush(self) -> None:
        """Do nothing: each write is a transaction."""

    def read_from(self, base: sqlite3.Connection, index: Index) -> Tensor:
        """Return a part of the array, from an open data base."""
        return self._read_rows(base, index)[_get_columns(index)].contiguous()

    def _list_rows(self, index: Index) -> list[int]:
        if not index:
            return [0]
        return (
            list(range(*index[0].indices(self.shape[0])))
            if isinstance(index[0], slice)
            else index[0].tolist()
        )

    def _read_rows(self, base: sqlite3.Connection, index: Index) -> Tensor:
        rows = self._list_rows(index)
        query = "select data from rows where number = ? and row = ?"
        blobs = [base.execute(query, (self.number, row)).fetchone() for row in rows]
        size = self.shape[1:].numel() * self.dtype.itemsize
        if any(blob is None or len(blob[0]) != size for blob in blobs):
            raise FormatError(f"{self.path}: rows of array {self.number} are missing or have another size")
        data = torch.frombuffer(bytearray(b"".join(blob for (blob,) in blobs)), dtype=torch.uint8)
        found = data.view(self.dtype)
        return found.view(len(rows), *self.shape[1:]) if index else found.view(())


def to_blobs(rows: Tensor, shape: torch.Size) -> list[bytes]:
    """Return the bytes of each row; an array without dims is one row."""
    rows = rows.reshape(-1, max(shape[1:].numel(), 1)).contiguous().view(torch.uint8)
    return [row.numpy().tobytes() for row in rows]


def _get_columns(index: Index) -> Any:
    return (slice(None), *index[1:]) if index else ...
