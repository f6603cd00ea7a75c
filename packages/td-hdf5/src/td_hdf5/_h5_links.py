"""Remove links of a file so that it can be undone, and so that what they led to can still be read or linked again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import h5py


class Links:
    """The links that one change removes from a file and adds to it.

    Attributes:
        added: names of the links that the change may have added.
        removed: the objects of the removed links by name, open: HDF5 keeps them until they are closed.
    """

    def __init__(self, file: Any) -> None:
        self.file, self.added = file, list[str]()
        self.removed: dict[str, Any] = {}
        self._root = h5py.h5g.open(file, b"/")

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of some groups and datasets that the file has."""
        for name in sorted(names, key=len, reverse=True):  # groups after their content
            with contextlib.suppress(KeyError):
                self.removed[name] = h5py.h5o.open(self._root, name.encode())
                self._root.unlink(name.encode())

    def find_dataset(self, name: str) -> Any:
        """Return a dataset of the file, by the name that it had before the change."""
        return self.removed[name] if name in self.removed else h5py.h5d.open(self.file, name.encode())

    def undo(self) -> None:
        """Remove what was added, and restore what was removed."""
        for name in sorted(self.added, key=len, reverse=True):
            with contextlib.suppress(KeyError):
                self._root.unlink(name.encode())
        for name in sorted(self.removed, key=len):
            h5py.h5o.link(self.removed[name], self._root, name.encode())
