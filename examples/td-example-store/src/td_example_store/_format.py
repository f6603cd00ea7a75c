"""A format for collections: a SQLite data base with a JSON header and the rows of all leaves."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import CodecError, FormatError, TensorDictError
from td_core.spi import Encoded, Serializer, decode, encode, join_value, split_value
from td_example_store._rows import RowSource, to_blobs
from td_store import StoredTensor

TABLES = "create table td_header (text); create table rows (number, row, data, primary key (number, row)) without rowid"


class SqliteFormat(Serializer):
    """The format of ``save(td, path, format="sqlite")``, for all registered kinds of nodes.

    >>> SqliteFormat().name
    'sqlite'
    """

    name = "sqlite"
    suffixes = (".sqlite",)
    stores_kinds = True

    def save(self, data: TensorCollection, path: Path) -> TensorCollection:
        """Write a collection to one file, atomically: a reader sees the old file or the new one."""
        encoded = encode(data)
        for key_path, leaf in zip(encoded.leaf_paths(), encoded.leaves, strict=True):
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise CodecError(f"cannot store {key_path} in a data base: it is not a dense tensor")
        header = {
            "nodes": encoded.nodes,
            "values": [split_value(value) for value in encoded.values],
            "leaves": [[list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] for leaf in encoded.leaves],
        }
        partial = path.with_name(f"{path.name}.partial")  # the next save replaces the file of a killed one
        partial.unlink(missing_ok=True)
        try:
            with closing(sqlite3.connect(partial)) as base:
                base.executescript(f"pragma journal_mode = off; {TABLES}")
                with base:
                    base.execute("insert into td_header values (?)", (json.dumps(header),))
                    for number, leaf in enumerate(encoded.leaves):
                        blobs = (
                            to_blobs(leaf.detach().cpu().resolve_conj().resolve_neg(), leaf.shape)
                            if leaf.numel()
                            else []
                        )
                        rows = [(number, row, blob) for row, blob in enumerate(blobs)]
                        base.executemany("insert into rows values (?, ?, ?)", rows)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return data

    def load(self, path: Path) -> Any:
        """Read all leaves into memory."""
        return self._read(path, _read_whole)

    def open(self, path: Path, *, mode: str = "r", keys: Iterable[Any] | None = None) -> Any:
        """Return a collection whose leaves stay in the data base."""
        opened = self._read(path, lambda base, source: StoredTensor(source, mode=mode))
        return opened if keys is None else opened.select(*keys)

    def detect(self, path: Any, head: bytes) -> bool:
        """Return True for a data base that this format wrote."""
        if not head.startswith(b"SQLite format 3\0"):
            return False
        try:
            with closing(sqlite3.connect(path)) as base:
                return base.execute("select count(*) from td_header").fetchone() == (1,)
        except sqlite3.Error:
            return False

    def _read(self, path: Path, make_leaf: Any) -> Any:
        # One connection reads everything, so that a save that replaces the file meanwhile cannot be mixed in.
        try:
            with (
                path.open("rb") as file,
                closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base,
            ):
                start = file.read(100)
                pages = int.from_bytes(start[28:32], "big") * (int.from_bytes(start[16:18], "big") or 65536)
                if path.stat().st_size != pages:
                    raise FormatError(f"{path} is damaged: it has {path.stat().st_size} bytes, not {pages}")
                ((text,),) = base.execute("select text from td_header").fetchall()
                header = json.loads(text)
                leaves = []
                for number, (shape, dtype) in enumerate(header["leaves"]):
                    source = RowSource(path.absolute(), number, torch.Size(shape), getattr(torch, dtype))
                    leaves.append(make_leaf(base, source))
            return decode(
                Encoded(header["nodes"], leaves, [join_value(*value) for value in header["values"]])
            )
        except (FileNotFoundError, TensorDictError):
            raise
        except Exception as error:  # a damaged file can raise any error
            raise FormatError(f"{path} is damaged: {error}") from error


def _read_whole(base: sqlite3.Connection, source: RowSource) -> Tensor:
    if not source.shape.numel():
        return torch.empty(source.shape, dtype=source.dtype)
    return source.read_from(base, tuple(slice(0, n, 1) for n in source.shape))
