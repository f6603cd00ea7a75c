"""The objects of a group by key: files below a local directory, members of a zip file, or objects of a store of zarr.

Keys are relative to the group: ``zarr.json``, ``a/zarr.json``, ``a/c/0/0``. An instance can be pickled. It opens its store
when a process first uses it, so a process never uses what its parent has opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import lzma
import os
import struct
import weakref
import zipfile
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import zarr
import zarr.abc.store
import zarr.storage
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from td_core.errors import FormatError, MissingPluginError, TensorDictError
from td_core.spi import open_regular, set_module

from ._array_documents import Document
from ._group_locks import GroupLock, lock_store

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

ResultT = TypeVar("ResultT")

#: What zipfile raises for damaged members.
_BAD_MEMBER = (
    zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, OverflowError, struct.error, zlib.error, lzma.LZMAError,
)  # fmt: skip
#: How the keys of groups begin that are removed before a change ends, or by the next one; their names begin with "%".
TEMPORARY = ".td-tmp-"
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
    #: Whether objects cannot be written, and how many are written at the same time, at least.
    is_read_only, together = False, 0
    #: What :meth:`read_version` returned when the header of td was read; None if the group has none.
    version: object = None
    #: The metadata of the root, if it was read again since then.
    root: Document = Document()

    def get(self, key: str) -> bytes | None:
        """Return the content of an object, or None if there is no object with this key."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the contents of several objects."""
        raise NotImplementedError

    def read_ahead(self, keys: Iterable[str]) -> contextlib.AbstractContextManager[object]:
        """Read objects together, where that takes less time than when zarr reads them during the block."""
        return contextlib.nullcontext()

    def put(self, key: str, buffers: Sequence[object]) -> None:
        """Write an object from buffers of bytes, one after the other."""
        raise NotImplementedError

    def put_new(self, key: str, content: bytes) -> None:
        """Write an object that does not exist; FileExistsError if another process makes it at the same time."""
        self.put(key, [content])

    def put_same(self, keys: Sequence[str], content: bytes) -> None:
        """Write objects that all have the same content."""
        for key in keys:
            self.put(key, [content])

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

    @property
    def lock(self) -> GroupLock:
        """The lock of the group."""
        raise NotImplementedError

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock of the group during a block; raise FormatError if another save has replaced the group."""
        with self.lock.hold():
            self.check()
            yield

    def check(self) -> None:
        """Raise FormatError if another save has replaced the group since it was opened."""

    def start_save(self) -> None:
        """Note that the group is replaced by what is written from now on."""

    def make_replaced_error(self) -> FormatError:
        """Return the error for a group that another save has replaced."""
        return FormatError(f"{self.where} was replaced since it was opened: open it again")

    def missing_error(self) -> Exception:
        """Return the error for a group without a root."""
        return FormatError(
            f"{self.where} is not a Zarr group, or its save is incomplete: it has no zarr.json"
        )

    def read_version(self, key: str = "zarr.json") -> object:
        """Return what changes with an object that has metadata; None where changes cannot be noticed."""
        return None

    @property
    def store(self) -> zarr.storage.StorePath:
        """The group as a path in a store of zarr."""
        raise NotImplementedError

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store its options again, if it has any."""

    def close(self) -> None:
        """Close the store, if this object has opened it."""


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
        self._lock: tuple[int, GroupLock] | None = None
        self._saves = self.lock.saves

    def __reduce__(self) -> tuple[object, ...]:
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

    @property
    def lock(self) -> GroupLock:
        """The lock of the group in this process."""
        if self._lock is None or self._lock[0] != os.getpid():
            self._lock = os.getpid(), lock_store(self.where)
            self._saves = self._lock[1].saves
        return self._lock[1]

    def check(self) -> None:
        """Compare the number of the saves of this process with that of the opened group."""
        if self.lock.saves != self._saves:
            raise self.make_replaced_error()

    def read_version(self, key: str = "zarr.json") -> object:
        """Return the numbers of the saves and changes of this process."""
        return self.lock.saves, self.lock.edits

    def replace(self, key: str, content: bytes) -> None:
        """Write an object, and note the change."""
        self.put(key, [content])
        self.lock.edits += 1

    def put_same(self, keys: Sequence[str], content: bytes) -> None:
        """Write objects, several at the same time."""
        store, buffer = self.store, default_buffer_prototype().buffer.from_bytes(content)
        run(gather((store / key).set(buffer) for key in keys))

    def start_save(self) -> None:
        """Note that the group is replaced by what is written from now on."""
        self.lock.saves += 1
        self._saves = self.lock.saves

    def put(self, key: str, buffers: Sequence[Any]) -> None:
        """Write an object."""
        content = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        run((self.store / key).set(default_buffer_prototype().buffer.from_bytes(content)))

    def list_keys(self) -> list[str]:
        """List the objects."""
        return self._list_below("")

    def _list_below(self, beginning: str) -> list[str]:
        start, store = f"{self.prefix}/" if self.prefix else "", self.store.store

        async def collect() -> list[str]:
            return [key.removeprefix(start) async for key in store.list_prefix(start + beginning)]

        return run(collect())

    def clear(self) -> None:
        """Remove all objects but the metadata of the root."""
        self._delete(key for key in self.list_keys() if key != "zarr.json")

    def remove(self, names: Sequence[str]) -> None:
        """Remove the objects below some names, and their metadata last, by which a save knows what td has written."""
        keys = [key for name in names for key in self._list_below(f"{name}/")]
        for is_metadata in (False, True):
            self._delete(key for key in keys if key.endswith("/zarr.json") == is_metadata)

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


@set_module("td_zarr.zarr_pickles")
class ZipObjects(StoreObjects):
    """The members of a zip file, which is opened for reading; ``stamp`` distinguishes it from one that replaces it."""

    def __init__(self, path: str, stamp: tuple[int, ...] | None = None) -> None:
        super().__init__(path, partial(open_zip, path), is_read_only=True)
        fd = open_regular(path)
        weakref.finalize(self, os.close, fd)  # while it is open, no other file gets its number
        self.stamp = _get_stamp(os.fstat(fd)) if stamp is None else stamp

    def __reduce__(self) -> tuple[object, ...]:
        return ZipObjects, (self.where, self.stamp)

    def check(self) -> None:
        """Compare the file with the one that was opened."""
        if self.read_version() != self.stamp:
            raise self.make_replaced_error()

    def read_version(self, key: str = "zarr.json") -> object:
        """Return the stamp of the file that is there now, or None if there is none."""
        try:
            return _get_stamp(os.stat(self.where))
        except FileNotFoundError:
            return None


def _get_stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns


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


@set_module("td_zarr.zarr_pickles")
def return_store(store: zarr.abc.store.Store) -> zarr.abc.store.Store:
    """Return a store of the caller of td, who closes it; open it if it opens itself at its first use."""
    if not store._is_open:
        if hasattr(store, "_zf"):  # to open a zip file again that was written would empty it
            raise ValueError(f"the store {store} is closed: make another one, for reading with mode='r'")
        run(store._open())
    return store


@set_module("td_zarr.zarr_pickles")
def open_url(url: str, storage_options: Mapping[str, object] | None) -> zarr.abc.store.Store:
    """Open the store of a URL."""
    try:
        store = zarr.storage.FsspecStore.from_url(url, storage_options=storage_options)
    except ImportError as error:
        raise MissingPluginError(
            f"{url!r} needs a package that is not installed: {error}; pip install fsspec aiohttp"
        ) from error
    return store


class _ReadZip(zarr.storage.ZipStore):  # type: ignore[misc]
    """A zip file that is read; a damaged member raises FormatError."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        try:
            return await super().get(key, prototype, byte_range)
        except _BAD_MEMBER as error:
            if (
                isinstance(error, OSError) and error.errno != errno.EINVAL
            ):  # of a seek to a place before the file
                raise
            raise FormatError(f"{self.path}: the member {key!r} is damaged: {error}") from error


@set_module("td_zarr.zarr_pickles")
def open_zip(path: str) -> zarr.abc.store.Store:
    """Open a zip file for reading."""
    try:
        store = _ReadZip(path, mode="r")
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
