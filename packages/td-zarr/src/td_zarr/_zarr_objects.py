"""The objects of a group by key: files below a local directory, members of a zip file, or objects of a store of zarr.

Keys are relative to the group: ``zarr.json``, ``a/zarr.json``, ``a/c/0/0``. An instance can be pickled. It opens its store
when a process first uses it, so a process never uses what its parent has opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zarr
import zarr.abc.store
import zarr.storage
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from td_core.errors import FormatError, MissingPluginError, TensorDictError
from td_core.spi import NewFile, set_module

ResultT = TypeVar("ResultT")

#: The most requests to a store at the same time.
_CONCURRENT = 32


def run(work: Coroutine[object, object, ResultT]) -> ResultT:
    """Run a coroutine on the event loop of zarr, and return its result."""
    result: ResultT = sync(work)
    return result


class Objects:
    """The objects of one group."""

    #: The location, for messages.
    where: str
    #: Whether objects cannot be written.
    is_read_only = False

    def get(self, key: str) -> bytes | None:
        """Return the content of an object, or None if there is no object with this key."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the contents of several objects."""
        raise NotImplementedError

    def put(self, key: str, buffers: Sequence[object]) -> None:
        """Write an object from buffers of bytes, one after the other."""
        raise NotImplementedError

    def replace(self, key: str, content: bytes) -> None:
        """Write an object that readers see as it was, or complete."""
        self.put(key, [content])

    def list_keys(self) -> list[str]:
        """Return the keys of all objects."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove all objects but the metadata of the root."""
        raise NotImplementedError

    def remove(self, names: Sequence[str]) -> None:
        """Remove all objects of some arrays and groups."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise FormatError if another save has replaced the group since it was opened."""

    @property
    def store(self) -> zarr.storage.StorePath:
        """The group as a path in a store of zarr."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the store, if this object has opened it."""


@set_module("td_zarr.zarr_pickles")
class LocalObjects(Objects):
    """The files below a directory."""

    def __init__(self, path: str | os.PathLike[str], stamp: int | None = None) -> None:
        self.path = self.where = os.path.abspath(path)
        #: What distinguishes the directory from another one that is later saved under its name.
        self.stamp = stamp
        self._store: zarr.storage.StorePath | None = None

    def __reduce__(self) -> Any:
        return LocalObjects, (self.path, self.stamp)

    def locate(self, key: str) -> str:
        """Return the path of the file of an object."""
        return os.path.join(self.path, *key.split("/"))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read files."""
        return [_read_file(self.locate(key)) for key in keys]

    def extend(self, key: str, size: int) -> None:
        """Write a file of zeros, which takes no space on most file systems."""
        self.put(key, [])
        os.truncate(self.locate(key), size)

    def put(self, key: str, buffers: Sequence[Any]) -> None:
        """Write a file."""
        path = self.locate(key)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        with open(fd, "wb", buffering=0) as file:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                while len(view):
                    view = view[file.write(view) :]

    def replace(self, key: str, content: bytes) -> None:
        """Write a file under another name, and rename it."""
        with NewFile(self.locate(key)) as file:
            file.write([content])
            file.commit()

    def list_keys(self) -> list[str]:
        """List the files."""
        return [
            Path(folder, name).relative_to(self.path).as_posix()
            for folder, _, names in os.walk(self.path)
            for name in names
        ]

    def remove(self, names: Sequence[str]) -> None:
        """Remove directories."""
        for name in names:
            shutil.rmtree(self.locate(name), ignore_errors=True)

    def check(self) -> None:
        """Compare the directory with the one that was opened."""
        if self.stamp is not None and self.read_stamp() != self.stamp:
            raise FormatError(f"{self.where} was replaced since it was opened: open it again")

    def pin(self) -> None:
        """Note which directory is there now, and keep it open: while it is, no other one gets its number."""
        if os.name != "nt":
            fd = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, fd)
        self.stamp = self.read_stamp()

    def read_stamp(self) -> int | None:
        """Return the stamp of the directory that is there now, or None if there is none."""
        try:
            return os.stat(self.path).st_ino
        except FileNotFoundError:
            return None

    @property
    def store(self) -> zarr.storage.StorePath:
        """The directory as a store of zarr."""
        if self._store is None:
            self._store = zarr.storage.StorePath(zarr.storage.LocalStore(self.path))
        return self._store


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except (FileNotFoundError, NotADirectoryError):
        return None


@set_module("td_zarr.zarr_pickles")
class StoreObjects(Objects):
    """The objects below a path in a store of zarr; ``make`` opens the store in each process."""

    def __init__(
        self,
        where: str,
        make: Callable[[], zarr.abc.store.Store],
        prefix: str = "",
        *,
        is_own: bool = True,
        is_read_only: bool = False,
    ) -> None:
        self.where, self.make, self.prefix = where, make, prefix.strip("/")
        self.is_own, self.is_read_only = is_own, is_read_only
        self._opened: tuple[int, zarr.storage.StorePath] | None = None

    def __reduce__(self) -> Any:
        make = partial(StoreObjects, is_own=self.is_own, is_read_only=self.is_read_only)
        return make, (self.where, self.make, self.prefix)

    @property
    def store(self) -> zarr.storage.StorePath:
        """The store of this process. It cannot be opened on the event loop."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), zarr.storage.StorePath(self.make(), self.prefix)
        return self._opened[1]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read objects, several at the same time."""
        prototype, store = default_buffer_prototype(), self.store

        async def read(key: str) -> bytes | None:
            with name_object(key):
                buffer = await (store / key).get(prototype)
            return None if buffer is None else buffer.to_bytes()

        return run(gather(map(read, keys)))

    def put(self, key: str, buffers: Sequence[Any]) -> None:
        """Write an object."""
        content = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        run((self.store / key).set(default_buffer_prototype().buffer.from_bytes(content)))

    def list_keys(self) -> list[str]:
        """List the objects."""
        start, store = f"{self.prefix}/" if self.prefix else "", self.store.store

        async def collect() -> list[str]:
            return [key.removeprefix(start) async for key in store.list_prefix(start)]

        return run(collect())

    def clear(self) -> None:
        """Remove all objects but the metadata of the root."""
        self._delete(key for key in self.list_keys() if key != "zarr.json")

    def remove(self, names: Sequence[str]) -> None:
        """Remove the objects below some names."""
        starts = tuple(f"{name}/" for name in names)
        self._delete(key for key in self.list_keys() if key.startswith(starts))

    def _delete(self, keys: Iterable[str]) -> None:
        store = self.store

        async def delete(key: str) -> None:
            await (store / key).delete()

        run(gather(map(delete, keys)))

    def close(self) -> None:
        """Close the store of this process, unless the caller of td has opened it."""
        if self._opened is not None and self.is_own:
            self._opened[1].store.close()
            self._opened = None


@contextlib.contextmanager
def name_object(key: str) -> Iterator[None]:
    """Raise OSError for an error of another type of a file system, such as one of an HTTP library."""
    try:
        yield
    except (OSError, TensorDictError):
        raise
    except Exception as error:  # each file system of fsspec has errors of its own
        raise OSError(f"cannot read {key!r}: {error!r}") from error


async def gather(work: Iterable[Coroutine[object, object, ResultT]]) -> list[ResultT]:
    """Await coroutines, some of them at the same time."""
    limit = asyncio.Semaphore(_CONCURRENT)

    async def wait(item: Coroutine[object, object, ResultT]) -> ResultT:
        async with limit:
            return await item

    return await asyncio.gather(*map(wait, work))


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


def find_objects(location: Any, storage_options: dict[str, Any] | None = None) -> Objects:
    """Return the objects of the group at a location: a path, a URL, or an object of zarr.

    Raises:
        FileNotFoundError: there is nothing at a local path.
        MissingPluginError: a URL needs fsspec, or a package of a file system.
    """
    path = find_local_path(location)
    if path is not None and os.path.isdir(path):
        objects = LocalObjects(path)
        objects.pin()
        return objects
    if path is not None:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is nothing at {path!r}")
        return StoreObjects(path, partial(open_zip, path), is_read_only=True)
    if isinstance(location, zarr.Group):
        location = location.store_path
    if isinstance(location, zarr.abc.store.Store):
        location = zarr.storage.StorePath(location)
    if isinstance(location, zarr.storage.StorePath):
        return StoreObjects(str(location), partial(return_store, location.store), location.path, is_own=False)
    return StoreObjects(location, partial(open_url, location, storage_options))


@set_module("td_zarr.zarr_pickles")
def return_store(store: zarr.abc.store.Store) -> zarr.abc.store.Store:
    """Return a store that the caller of td has opened."""
    return store


@set_module("td_zarr.zarr_pickles")
def open_url(url: str, storage_options: dict[str, Any] | None) -> zarr.abc.store.Store:
    """Open the store of a URL."""
    try:
        store = zarr.storage.FsspecStore.from_url(url, storage_options=storage_options)
    except ImportError as error:
        raise MissingPluginError(
            f"{url!r} needs a package that is not installed: {error}; pip install fsspec aiohttp"
        ) from error
    return store


@set_module("td_zarr.zarr_pickles")
def open_zip(path: str) -> zarr.abc.store.Store:
    """Open a zip file for reading."""
    try:
        store = zarr.storage.ZipStore(path, mode="r")
        run(store._open())
    except Exception as error:
        raise FormatError(f"{path} is not a Zarr group: it is neither a directory nor a zip file") from error
    return store


@contextlib.contextmanager
def create_zip(path: str) -> Any:
    """Yield the objects of a new zip file, which is complete at the end of the block."""
    store = zarr.storage.ZipStore(path, mode="w")
    try:
        yield StoreObjects(path, partial(return_store, store))
    finally:
        store.close()
