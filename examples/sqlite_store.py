"""An object store in one SQLite file, with which every format of td works: save, open, rows as ranges, append to Zarr.

python examples/sqlite_store.py
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from td_core import FormatError
from td_core.typing import ObjectInfo, Range


class SqliteStore:
    """Objects below a folder of an SQLite file. A write is one transaction; it can be pickled, and shared by processes."""

    def __init__(self, path: str, folder: str = "") -> None:
        self.path, self.folder, self.where = path, folder, f"sqlite://{path}/{folder}"
        with self._connect() as db:
            db.execute("CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, stamp TEXT, content BLOB)")

    @contextlib.contextmanager
    def _connect(self, name: str = "") -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as db, db:
                yield db
        except sqlite3.IntegrityError as error:
            raise FileExistsError(f"{self.where}: the object {name!r} exists") from error
        except sqlite3.Error as error:
            raise OSError(f"{self.where}: {error}") from error

    def _place(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder and name else self.folder or name

    def stat(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return size and stamp of each object."""
        query = "SELECT length(content), stamp FROM objects WHERE name = ?"
        with self._connect() as db:
            rows = [(name, db.execute(query, [self._place(name)]).fetchone()) for name in names]
        return [None if row is None else ObjectInfo(name, *row) for name, row in rows]

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return the bytes of each range."""
        found = []
        size, part = "SELECT length(content), stamp FROM objects", "SELECT substr(content, ?, ?) FROM objects"
        with self._connect() as db:
            db.execute("BEGIN")  # all ranges are of one state
            for item in ranges:
                place = self._place(item.name)
                row = db.execute(f"{size} WHERE name = ?", [place]).fetchone()
                if row is None:
                    raise FileNotFoundError(f"{self.where}: there is no object {item.name!r}")
                start = item.start if item.start >= 0 else row[0] + item.start
                stop = row[0] if item.stop is None else item.stop
                why = "is truncated" if item.stamp in (None, row[1]) else "was replaced"
                if why == "was replaced" or not 0 <= start <= stop <= row[0]:
                    raise FormatError(f"{self.where}: the object {item.name!r} {why}")
                content = db.execute(f"{part} WHERE name = ?", [start + 1, stop - start, place]).fetchone()
                found.append(memoryview(content[0] or b""))
        return found

    def write(self, name: str, content: Iterable[Any], *, create: bool = False) -> ObjectInfo:
        """Write an object in one transaction."""
        whole, stamp = b"".join(memoryview(part).cast("B") for part in content), secrets.token_hex(8)
        verb, row = "INSERT" if create else "REPLACE", [self._place(name), stamp, whole]
        with self._connect(name) as db:
            db.execute(f"{verb} INTO objects VALUES (?, ?, ?)", row)
        return ObjectInfo(name, len(whole), stamp)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        start = f"{self.folder}/" if self.folder else ""
        with self._connect() as db:
            rows = db.execute("SELECT name, length(content), stamp FROM objects ORDER BY name").fetchall()
        chosen = [row for row in rows if row[0].startswith(start + prefix)]
        return (ObjectInfo(name[len(start) :], size, stamp) for name, size, stamp in chosen)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        with self._connect() as db:
            db.executemany("DELETE FROM objects WHERE name = ?", [[self._place(name)] for name in names])


def main() -> None:
    """Save a collection in each format that is installed, and read two rows."""
    import torch

    import td_core
    from td_core import TensorDict

    data = TensorDict({"a": torch.arange(12.0).view(6, 2), "n": {"b": torch.arange(6)}}, [6])
    with tempfile.TemporaryDirectory() as folder:
        for name in ("safetensors", "memmap", "hdf5", "zarr", "parquet", "arrow"):
            store = SqliteStore(f"{folder}/objects.sqlite", f"data.{name}")
            td_core.save(data, store, format=name)
            rows = td_core.open(store)[[4, 1]]
            print(name, rows["n", "b"].tolist())
            if not (rows == data[[4, 1]]).all():
                raise SystemExit(f"the rows of {name} differ from those that were saved")


if __name__ == "__main__":
    main()
