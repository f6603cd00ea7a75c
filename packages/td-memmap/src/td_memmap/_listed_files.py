"""The files of a save whose names and sizes are known from one listing: those of an archive or of an object store."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from . import _file_names
from ._fs import Parts

#: Times of the files. They are constant: those of an archive or a server cannot be compared with file times.
_TIMELESS = {"st_mtime_ns": 0, "st_ctime_ns": 0}

#: Endings of files with the sizes of nested tensors, which are read together with the metadata.
_SIZES = (".shape.memmap", ".offsets.memmap", ".lengths.memmap")


def is_metadata(path: Parts) -> bool:
    """Return True for a file that a save needs before its leaves are used: metadata, values and sizes of nested tensors."""
    name = path[-1]
    fixed = (_file_names.META, _file_names.MANIFEST, *_file_names.SIDECARS)
    return name in fixed or name.endswith(_SIZES) or _file_names.is_row_file(name)


class ListedTree:
    """Files with the interface of a DirectoryTree; a subclass reads them.

    Attributes:
        path: the location, for messages.
        base: the directory below which paths are.
    """

    def __init__(self, path: str, sizes: Iterable[tuple[Parts, int]]) -> None:
        self.path = path
        self.base: Parts = ()
        self._sizes = dict(sizes)
        self._listing: dict[Parts, dict[str, bool]] = {(): {}}
        for place in self._sizes:
            self._list(place[:-1])[place[-1]] = False

    def _list(self, parts: Parts) -> dict[str, bool]:
        """Return the listing of a directory, and add the directory to the listings of its parents."""
        listing = self._listing.get(parts)
        if listing is None:
            listing = self._listing[parts] = {}
            known = False
            while not known:
                above = parts[:-1]
                known = above in self._listing
                self._listing.setdefault(above, {})[parts[-1]] = True
                parts = above
        return listing

    def show(self, parts: Parts, name: str = "") -> str:
        """Format a path below the location for error messages."""
        inner = "/".join((*self.base, *parts, name) if name else (*self.base, *parts))
        return f"{self.path.rstrip('/')}/{inner}" if inner else self.path

    def entries(self, parts: Parts = ()) -> dict[str, bool]:
        """Return the names in a directory, mapped to True for subdirectories and to False for files."""
        return self._listing.get((*self.base, *parts), {})

    def stat(self, parts: Parts, name: str) -> SimpleNamespace | None:
        """Return an object with the size and mode of a file or directory, or None if it does not exist."""
        path = (*self.base, *parts, name)
        size = self._sizes.get(path)
        if size is not None:
            return SimpleNamespace(st_size=size, st_mode=0o100644, **_TIMELESS)
        return SimpleNamespace(st_size=0, st_mode=0o040755, **_TIMELESS) if path in self._listing else None

    def stat_path(self, path: Parts) -> SimpleNamespace | None:
        """Return an object with the size and mode at a path, or None if nothing exists there."""
        return self.stat(path[:-1], path[-1])
