"""Files that get their name when they are complete: archives, and tensors with a separate file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from td_core.errors import FormatError

from . import _file_names, _fs
from ._fs import DirectoryTree

#: iter_numbered() stops after this many free numbers in a row; gaps come from concurrent processes that ended.
_GAP = 4


class NewFile:
    """File that gets its name when it is complete, with a new inode.

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
                # Until the file is locked, another process may remove it as a stale file.
                if _fs.mark_in_use(self.fd, without_locks=True) and _fs.get_open_status(self.fd).st_nlink:
                    self._temporary = temporary
                    return self
            finally:
                if not self._temporary:
                    _fs.close(self.fd)

    def remove_stale(self) -> None:
        """Remove the temporary files of this path that killed processes left."""
        folder, start = os.path.split(self._start)
        # Ignore files that cannot be opened or deleted: they belong to other users.
        with contextlib.suppress(OSError), DirectoryTree.at_path(folder) as tree:
            for name in iter_numbered(tree.root, start):
                with contextlib.suppress(OSError, FormatError):
                    fd, _ = tree.open((), name)
                    with _fs.closing(fd):
                        if _fs.mark_in_use(fd, without_locks=False):
                            tree.remove((), name)

    def publish(self, *, durable: bool = False) -> None:
        """Rename the file to its path, with the permissions of the file that it replaces.

        With ``durable=True``, content and name are synced to disk.
        """
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
        # Remove the name before closing: closing releases the lock that protects the name.
        try:
            if self._temporary:
                _fs.remove_path(self._temporary)
        finally:
            _fs.close(self.fd)
        if isinstance(error, OSError) and error.filename is None:
            raise _fs.add_path(error, "cannot write it", self.path) from error


def iter_numbered(dir_fd: int, *starts: str) -> Iterator[str]:
    """Yield existing names that start with any of ``starts`` and end with a number, up to a gap in the numbers."""
    gap = 0
    for number in _file_names.iter_numbers():
        results = [start + number for start in starts if _fs.is_name(start + number, dir_fd)]
        yield from results
        gap = 0 if results else gap + 1
        if gap == _GAP:
            return
