"""Open the files of saves: regular ones only, since a pipe could block for ever, and a device could lose what is read."""

from __future__ import annotations

import errno
import os
import stat

from ..errors import FormatError

_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: str | os.PathLike[str], write: bool = False) -> int:
    """Open a regular file, which the caller closes; with ``write`` also for writing.

    Raises:
        FileNotFoundError: there is no file.
        FormatError: something else is at the path.

    >>> import os
    >>> os.mkfifo("pipe")
    >>> open_regular("pipe")
    Traceback (most recent call last):
    td_core.errors.FormatError: cannot open pipe: it is not a regular file
    """
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | _FLAGS)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a socket cannot be opened at all
            raise _irregular_error(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _irregular_error(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the status of a file that a library opens by path; raise the errors of :func:`open_regular`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _irregular_error(path)
    return status


def _irregular_error(path: str | os.PathLike[str]) -> FormatError:
    return FormatError(f"cannot open {os.fspath(path)}: it is not a regular file")
