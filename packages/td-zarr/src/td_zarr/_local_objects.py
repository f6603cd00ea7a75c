"""The objects of the group at a location; those in a local directory are its files, none of which is outside of it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zarr
import zarr.abc.store
import zarr.storage

from td_core.errors import FormatError
from td_core.spi import Serializer, set_module, visit
from td_store.files import NewFile, allocate_file

from ._group_locks import GroupLock, lock_directory
from ._remote_objects import find_remote
from ._zarr_objects import TEMPORARY, Objects, StoreObjects, ZipObjects, return_store

#: A link is opened by the path that it leads to, and a pipe is not waited for.
_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


@set_module("td_zarr.zarr_pickles")
class LocalObjects(Objects):
    """The files below a directory.

    Attributes:
        path: the directory.
        stamp: what distinguishes it from another one that is later saved under its name.
    """

    def __init__(
        self, path: str | os.PathLike[str], stamp: int | None = None, version: object = None
    ) -> None:
        self.path = self.where = os.path.abspath(path)
        self.stamp, self.version = stamp, version
        self._store: zarr.storage.StorePath | None = None
        self._lock: tuple[int, GroupLock] | None = None
        #: The names in a folder that are links, the folders that are inside, and the arrays whose files were looked at.
        self._links: dict[str, frozenset[str]] = {}
        self._inside: set[str] = set()
        self._checked: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return LocalObjects, (self.path, self.stamp, self.version)

    def locate(self, key: str) -> str:
        """Return the path of the file of an object."""
        return os.path.join(self.path, *key.split("/"))

    def open_file(self, key: str, flags: int = os.O_RDONLY) -> tuple[int, int]:
        """Open the file of an object, and return it and its size; FormatError if it is outside of the group or irregular."""
        path = self._find_inside(key)
        try:
            fd = os.open(path, flags | _FLAGS, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ENXIO):
                raise self._irregular_error(path) from error
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            fd = os.open(self._resolve(path), flags | _FLAGS, 0o666)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise self._irregular_error(path)
        return fd, status.st_size

    def _find_inside(self, key: str) -> str:
        """Return the path of an object; raise FormatError if a folder above it is a link that leads out of the group."""
        path = os.path.join(self.path, key)
        folder = key[: key.rfind("/") + 1]
        if folder not in self._inside:
            above = ""
            for part in folder.split("/")[:-1]:
                links = self._list_links(above)
                if links is None:  # nothing below it can be opened
                    return path
                if part in links:
                    self._resolve(self.locate(f"{above}{part}"))
                above = f"{above}{part}/"
            self._inside.add(folder)
        return path

    def _list_links(self, folder: str) -> frozenset[str] | None:
        """Return the names in a folder that are links; None if there is no such folder."""
        links = self._links.get(folder)
        if links is None:
            try:
                with os.scandir(os.path.join(self.path, folder)) as entries:
                    links = frozenset(entry.name for entry in entries if entry.is_symlink())
            except (FileNotFoundError, NotADirectoryError):
                return None
            self._links[folder] = links
        return links

    def _resolve(self, path: str) -> str:
        """Return the path that a link leads to."""
        target = os.path.realpath(path)
        if not target.startswith(os.path.join(os.path.realpath(self.path), "")):
            raise FormatError(f"{self.where}: {path!r} is a link that leads out of the group")
        return target

    def _irregular_error(self, path: str) -> FormatError:
        return FormatError(f"{self.where}: {path!r} is not a regular file")

    def check_files(self, name: str) -> None:
        """Raise FormatError for a file of an array that :meth:`open_file` refuses; a library opens them by their paths."""
        if name in self._checked:
            return
        self._find_inside(f"{name}/")
        links: set[str] = set()

        def check_folder(folder: str) -> Iterator[tuple[str]]:
            try:
                entries = os.scandir(folder)
            except (FileNotFoundError, NotADirectoryError):
                return
            with entries:
                for entry in entries:
                    if entry.is_symlink():
                        path = self._resolve(entry.path)
                        if path in links:
                            continue
                        links.add(path)
                    if entry.is_dir():
                        yield (entry.path,)
                    elif not entry.is_file():
                        raise self._irregular_error(entry.path)

        visit(check_folder, self.locate(name))
        self._checked.add(name)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read files."""
        return [self._read(key) for key in keys]

    def _read(self, key: str) -> bytes | None:
        try:
            fd, _ = self.open_file(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with open(fd, "rb", buffering=0) as file:
            return file.readall()

    def put_same(self, keys: Sequence[str], content: bytes) -> None:
        """Write files with the same content."""
        is_blank = content.count(0) == len(content)
        for key in keys:
            if is_blank:
                self.extend(key, len(content))
            else:
                self.put(key, [content])

    def extend(self, key: str, size: int) -> None:
        """Write a file of zeros, with space for what will be written to a mapping of it."""
        self.put(key, [])
        fd, _ = self.open_file(key, os.O_WRONLY)
        try:
            allocate_file(fd, size)
        finally:
            os.close(fd)

    def put(self, key: str, buffers: Sequence[Any]) -> None:
        """Write a file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            fd, _ = self.open_file(key, flags)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(self.locate(key)), exist_ok=True)
            fd, _ = self.open_file(key, flags)
        with open(fd, "wb", buffering=0) as file:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                while len(view):
                    view = view[file.write(view) :]

    def replace(self, key: str, content: bytes) -> None:
        """Write a file under another name, and rename it."""
        with NewFile(self._find_inside(key)) as file:
            file.write([content])
            file.commit()

    def list_keys(self) -> list[str]:
        """List the files."""
        start = len(os.path.join(self.path, ""))
        return [
            os.path.join(folder, name)[start:].replace(os.sep, "/")
            for folder, _, names in os.walk(self.path)
            for name in names
        ]

    def remove(self, names: Sequence[str]) -> None:
        """Remove directories; those of which a part is left have a temporary name."""
        path = self.locate(f"{TEMPORARY}removed")
        for name in names:
            self._checked.discard(name)
            shutil.rmtree(path, ignore_errors=True)
            try:
                os.rename(self._find_inside(name), path)
            except FileNotFoundError:
                continue
            except OSError:  # a file of it is in use
                shutil.rmtree(self._find_inside(name), ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)

    @property
    def lock(self) -> GroupLock:
        """The lock of the directory, opened by this process."""
        if self._lock is None or self._lock[0] != os.getpid():
            self._lock = os.getpid(), lock_directory(self.path)
        return self._lock[1]

    def check(self) -> None:
        """Compare the directory with the one that was opened."""
        if self.stamp is not None and self.read_stamp() != self.stamp:
            raise self.make_replaced_error()

    def pin(self) -> None:
        """Note which directory is there now, and keep it open: while it is, no other one gets its number."""
        self._lock = os.getpid(), lock_directory(self.path)
        self.stamp = self.read_stamp()

    def read_stamp(self) -> int | None:
        """Return the stamp of the directory that is there now, or None if there is none."""
        try:
            return os.stat(self.path).st_ino
        except FileNotFoundError:
            return None

    def read_version(self, key: str = "zarr.json") -> object:
        """Return the number, time and size of the file of an object; None if there is none."""
        try:
            status = os.stat(os.path.join(self.path, key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def read_number(self, key: str) -> int | None:
        """Return the number of the file of an object; None if there is none."""
        try:
            return os.stat(os.path.join(self.path, key)).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    @property
    def store(self) -> zarr.storage.StorePath:
        """The directory as a store of zarr."""
        if self._store is None:
            self._store = zarr.storage.StorePath(zarr.storage.LocalStore(self.path))
        return self._store


def find_local_path(location: object) -> str | None:
    """Return the path of a location in the local file system, or None for another one."""
    if isinstance(location, zarr.Group):
        location = location.store_path
    if isinstance(location, zarr.storage.StorePath) and isinstance(location.store, zarr.storage.LocalStore):
        return os.fspath(Path(location.store.root, *location.path.split("/")))
    if isinstance(location, zarr.storage.LocalStore):
        return str(location.root)
    if isinstance(location, os.PathLike) or (isinstance(location, str) and "://" not in location):
        return os.fspath(location)
    return None


def find_objects(location: object, storage_options: Mapping[str, object] | None = None) -> Objects:
    """Return the objects of the group at a location: a path, a URL, or an object of zarr."""
    if storage_options is not None:
        location = Serializer.find_objects(location, storage_options)
    path = find_local_path(location)
    if path is not None and os.path.isdir(path):
        objects = LocalObjects(path)
        objects.pin()
        return objects
    if path is not None:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is nothing at {path!r}")
        return ZipObjects(path)
    if isinstance(location, zarr.Group):
        location = location.store_path
    if isinstance(location, zarr.abc.store.Store):
        location = zarr.storage.StorePath(location)
    if isinstance(location, zarr.storage.StorePath):
        store = location.store
        make = partial(return_store, store)
        # What cannot be removed cannot be written again, as in a ZipStore.
        is_fixed = not store.supports_deletes
        return StoreObjects(str(location), make, location.path, is_own=False, is_read_only=is_fixed)
    place = Serializer.find_objects(location, storage_options)
    if place is None:
        raise TypeError(f"a group is at a path, a URL, or in a store; got a {type(location).__name__}")
    return find_remote(place)
