"""A file that appears under its name when it is complete: archives, and tensors with a file of their own."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from td_core.errors import FormatError

from . import _file_names, _fs
from ._fs import DirectoryTree

#: So many processes may build at one prefix at once, all but the last end well, and the last be killed.
_GAP = 4


class NewFile:
    """A file that appears under its name once it is complete, with an inode of its own.

    ``with NewFile(path, replace=False) as new: ...; new.publish()``
    """

    fd: int

    def __init__(self, path: str, *, replace: bool) -> None:
        self.path = path
        self._replace = replace
        self._start = os.path.join(
            os.path.dirname(path), _file_names.list_temporary_prefixes(os.path.basename(path)) + "file-"
        )
        self._temporary = ""

    def __enter__(self) -> NewFile:
        if not self._replace and os.path.lexists(self.path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        numbers = _file_names.iter_numbers()
        while True:
            temporary = self._start + next(numbers)
            try:
                self.fd = _fs.open_new(temporary)
            except FileExistsError:
                self.remove_stale()
                continue
            try:
                # Until it is locked, another process may take it for litter.
                if _fs.mark_in_use(self.fd, without_locks=True) and _fs.get_open_status(self.fd).st_nlink:
                    self._temporary = temporary
                    return self
            finally:
                if not self._temporary:
                    _fs.close(self.fd)

    def remove_stale(self) -> None:
        """Remove what processes that were killed left of this file."""
        folder, start = os.path.split(self._start)
        # What cannot be opened or removed is not ours.
        with contextlib.suppress(OSError), DirectoryTree.at_path(folder) as tree:
            for name in iter_numbered(tree.root, start):
                with contextlib.suppress(OSError, FormatError):
                    fd, _ = tree.open((), name)
                    with _fs.closing(fd):
                        if _fs.mark_in_use(fd, without_locks=False):
                            tree.remove((), name)

    def publish(self, *, durable: bool = False) -> None:
        """Give the file its name, and the permissions of the one that it replaces; make content and name durable."""
        if durable:
            _fs.sync_file(self.fd)
        if self._replace:
            _fs.copy_mode(self.fd, self.path)
            _fs.rename_path(self._temporary, self.path)
            self._temporary = ""
        else:
            _fs.link_path(self._temporary, self.path)
        if durable:
            with DirectoryTree.at_path(os.path.dirname(self.path)) as tree:
                tree.sync()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # As long as it is open it is locked, and its name nobody else's.
        try:
            if self._temporary:
                _fs.remove_path(self._temporary)
        finally:
            _fs.close(self.fd)
        if isinstance(error, OSError) and error.filename is None:
            raise _fs.add_path(error, "cannot write it", self.path) from error


def iter_numbered(dir_fd: int, *starts: str) -> Iterator[str]:
    """Yield the names in an open directory that are one of ``starts`` and a number.

    Each was made with the lowest number that was free, so after a gap there are no more: to list the directory would take
    the longer, the more saves stand in it.
    """
    gap = 0
    for number in _file_names.iter_numbers():
        results = [start + number for start in starts if _fs.is_name(start + number, dir_fd)]
        yield from results
        gap = 0 if results else gap + 1
        if gap == _GAP:
            return
