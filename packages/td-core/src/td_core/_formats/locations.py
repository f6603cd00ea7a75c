"""Locations of saves: local paths, URLs, and objects of other libraries; and how the files there are opened.

Only regular files are opened, since a pipe could block for ever, and a device could lose what is read.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

from .._python.type_names import is_instance_of_named
from ..errors import FormatError
from ..typing import ObjectLocation

#: A local path, a URL as a string, or an object that a format accepts in place of a path.
Location = Any

#: The modes in which a save or a stored tensor is opened.
MODES = ("r", "r+", "c")

#: Suffixes of files of other libraries, which no format of the project writes, and the function that reads each.
_READERS = {
    (".pt", ".pth"): "torch.load()",
    (".npy", ".npz"): "numpy.load()",
    (".pkl", ".pickle"): "pickle.load()",
    (".json",): "json.load()",
}

#: Size of the part of a local file that ``detect`` of each format receives.
HEAD_SIZE = 512

#: An open does not wait for a pipe.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)

#: A URL, or a chain of URLs such as ``filecache::s3://bucket/x``. A scheme of one letter is a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(?:::[A-Za-z][A-Za-z0-9+.\-]+)*://")


def as_location(location: Location) -> Location:
    """Return a local path as a ``Path``, a URL as a ``str``, and any other object unchanged."""
    if isinstance(location, Path):
        return location
    if isinstance(location, str):
        scheme = get_scheme(location)
        if scheme is None:
            return Path(location)
        return _read_file_url(location) if scheme == "file" else location
    return Path(location) if isinstance(location, os.PathLike) else location


def get_scheme(url: str) -> str | None:
    """Return the scheme of a URL in lower case, or None for a path."""
    match = _URL.match(url)
    return None if match is None else match[1].lower()


def _read_file_url(url: str) -> Path:
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"the URL {url!r} is not of this machine: write file:///PATH, with three slashes")
    return Path(url2pathname(parts.path))


def check_mode(mode: object) -> None:
    """Raise ValueError for an unknown mode of opening a save or a stored tensor."""
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(map(repr, MODES))}; got {mode!r}")


def show_location(location: Location) -> str:
    """Format a location for messages, a URL without its secrets."""
    if isinstance(location, Path):
        return repr(str(location))
    where = (
        ObjectLocation.hide_secrets(location)
        if isinstance(location, str)
        else getattr(location, "where", None)
    )
    return repr(where) if isinstance(where, str) else f"a {_name_type(location)}"


def _name_type(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def can_use_location(location: Location, schemes: tuple[str, ...], types: tuple[type | str, ...]) -> bool:
    """Return True if a format with these schemes and types of objects accepts a location."""
    if isinstance(location, Path):
        return True
    if isinstance(location, str):
        return get_scheme(location) in schemes
    return is_instance_of_named(location, types)


def has_suffix(location: Location, suffixes: tuple[str, ...]) -> bool:
    """Return True if the name of a path, URL or store ends with one of some suffixes, in any case."""
    name = location if isinstance(location, (str, Path)) else getattr(location, "where", "")
    return str(name).lower().rstrip("/").endswith(suffixes)


def find_reader(location: Location) -> str | None:
    """Return the function that reads files of a name, or None if the name is of no known library.

    >>> find_reader("model.pt")
    'torch.load()'
    """
    return next((reader for suffixes, reader in _READERS.items() if has_suffix(location, suffixes)), None)


def read_head(location: Location) -> bytes:
    """Return the first bytes of a local file; empty for a directory, URL or object. FormatError for a pipe or a device."""
    if not isinstance(location, Path) or location.is_dir():
        return b""
    with os.fdopen(open_regular(location), "rb") as file:
        return file.read(HEAD_SIZE)


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
