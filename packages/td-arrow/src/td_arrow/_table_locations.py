"""Where tables are: local files and directories, URLs, and file objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

import pyarrow as pa

from td_core.errors import FormatError, UnsupportedOperationError
from td_core.spi import check_regular
from td_core.typing import ObjectLocation
from td_store.files import NewFile, identify_file

from ._object_tables import read_keys, write_object

#: Schemes that pyarrow reads by itself; fsspec reads the others.
_OWN = ("s3", "gs", "gcs", "hdfs", "abfs", "abfss")
#: Arguments of the file system of fsspec, for a URL.
StorageOptions = Mapping[str, Any] | None
#: Device, inode, time of birth, size and time of the last write of a file.
Stamp = tuple[int | None, ...]


def choose_format(location: object, name: str | None) -> str:
    """Return the format that is named, else that of the suffix; raise ValueError for another one."""
    if name is None:
        return "arrow" if str(location).lower().endswith((".arrow", ".feather", ".ipc")) else "parquet"
    if name not in ("parquet", "arrow"):
        raise ValueError(f"format is one of 'parquet', 'arrow'; got {name!r:.100}")
    return name


def is_object(location: object) -> bool:
    """Return True for a file object, False for a path or URL."""
    return not isinstance(location, (str, os.PathLike))


def is_url(location: object) -> bool:
    """Return True for a URL."""
    return isinstance(location, str) and "://" in location


def is_local(location: object) -> bool:
    """Return True for a local path."""
    return not is_object(location) and not is_url(location)


def is_directory(location: Any) -> bool:
    """Return True for a local directory."""
    return is_local(location) and os.path.isdir(location)


def show_place(location: Any) -> str:
    """Return the name of a location for messages."""
    if isinstance(location, ObjectLocation):
        return location.where
    return f"a {type(location).__name__}" if is_object(location) else os.fspath(location)


def refuse_url(location: Any, operation: str) -> str:
    """Return a local path; raise UnsupportedOperationError for other locations."""
    if not is_local(location):
        raise UnsupportedOperationError(f"cannot {operation} {show_place(location)}: it is not a local path")
    return str(os.fspath(location))


def stamp_file(path: str) -> Stamp:
    """Return what distinguishes a file from another one that is later written under its name."""
    status = os.stat(path)
    return (*identify_file(path, status), status.st_size, status.st_mtime_ns)


def check_stamp(path: str, stamp: Stamp, *, written: bool = False) -> None:
    """Raise FormatError if a file is not the one that was opened; with ``written`` it may have been written in place."""
    found = stamp_file(path)
    if (found[:-1] if written else found) != (stamp[:-1] if written else stamp):
        raise FormatError(f"{path} changed since it was opened: open it again")


def _open_url(url: str, write: bool, options: StorageOptions) -> pa.NativeFile | IO[bytes]:
    """Open the file of a URL, with the file system of pyarrow or of fsspec."""
    if url.partition("://")[0] in _OWN and not options:
        from pyarrow.fs import FileSystem

        system, path = FileSystem.from_uri(url)
        return system.open_output_stream(path) if write else system.open_input_file(path)
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"cannot open {url}: it needs fsspec: pip install fsspec") from error
    return fsspec.open(url, "wb" if write else "rb", **(options or {})).open()


def _as_native(file: pa.NativeFile | IO[bytes], mode: str) -> pa.NativeFile:
    """Return a file object as a file of pyarrow."""
    if not hasattr(file, "closed"):
        raise TypeError(f"a location is a path, a URL or a binary file object; got a {type(file).__name__}")
    return file if isinstance(file, pa.NativeFile) else pa.PythonFile(file, mode)


@contextlib.contextmanager
def open_input(location: Any, options: StorageOptions = None) -> Iterator[pa.NativeFile]:
    """Open one file for reading; a file object is read from its beginning, and stays open."""
    if is_object(location):
        with contextlib.suppress(AttributeError, OSError):
            location.seek(0)
        yield _as_native(location, "r")
    elif is_url(location):
        with _open_url(location, False, options) as file:
            yield _as_native(file, "r")
    else:
        check_regular(location)
        with pa.OSFile(os.fspath(location), "rb") as file:
            yield file


@contextlib.contextmanager
def open_output(location: Any, durable: bool, options: StorageOptions = None) -> Iterator[pa.NativeFile]:
    """Open one file for writing, which appears under its name at the end of the block, or not at all after an error."""
    if isinstance(location, ObjectLocation):
        with write_object(location) as sink:
            yield sink
    elif is_object(location):
        yield _as_native(location, "w")
    elif is_url(location):
        sink = pa.BufferOutputStream()
        yield sink
        with _open_url(location, True, options) as file:
            file.write(sink.getvalue())
    else:
        with NewFile(location) as new:
            with pa.OSFile(new.temporary, "wb") as file:
                yield file
            new.commit(durable=durable)


def list_parts(folder: str) -> list[tuple[str, dict[str, str]]]:
    """Return the files of a directory in the order of their names, and the keys and values that their folders name."""
    result: list[tuple[str, dict[str, str]]] = []
    todo: list[tuple[str, ...]] = [()]
    while todo:
        names = todo.pop()
        path = os.path.join(folder, *names)
        if os.path.isdir(path):
            below = (name for name in os.listdir(path) if name[0] not in "._")
            todo += [(*names, name) for name in sorted(below, reverse=True)]
        else:
            result.append((path, read_keys(names[:-1])))
    if not result:
        raise FormatError(f"{folder}: the directory has no tables")
    return result
