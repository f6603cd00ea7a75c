"""The objects of a group in an object store of td-core, and that store as one of zarr."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zarr.abc.store
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from td_core.spi import run_parallel, set_module
from td_core.typing import ObjectLocation, ObjectStore, Range

from ._group_locks import GroupLock, lock_store
from ._zarr_objects import StoreObjects, gather

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype


#: How many objects are written at the same time, and how many are read one by one, at the same time.
_TOGETHER, _FEW = 16, 4


@set_module("td_zarr.zarr_pickles")
class RemoteObjects(StoreObjects):
    """The objects of a group in an object store; ``name`` is that of its lock in this process."""

    together = _TOGETHER

    def __init__(self, where: str, objects: ObjectStore, name: str) -> None:
        self.objects, self.name = objects, name
        #: What was read ahead, by key, for the store of zarr.
        self.ahead: dict[str, memoryview] = {}
        super().__init__(where, partial(ObjectZarrStore, objects, ahead=self.ahead))

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteObjects, (self.where, self.objects, self.name)

    @property
    def lock(self) -> GroupLock:
        """The lock of the group in this process."""
        if self._lock is None or self._lock[0] != os.getpid():
            self._lock = os.getpid(), lock_store(self.name)
            self._saves = self._lock[1].saves
        return self._lock[1]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read objects: a few at the same time, of many those that exist, with one call."""
        found: list[bytes | None] = [None] * len(keys)

        def read(i: int) -> None:
            with contextlib.suppress(FileNotFoundError):
                found[i] = bytes(self.objects.read([Range(keys[i], 0)])[0])

        if len(keys) <= _FEW:
            run_parallel([partial(read, i) for i in range(len(keys))], len(keys))
            return found
        infos = self.objects.stat(keys)
        there = [i for i, info in enumerate(infos) if info is not None]
        contents = self.objects.read([Range(keys[i], 0) for i in there])
        for i, content in zip(there, contents, strict=True):
            found[i] = bytes(content)
        return found

    def missing_error(self) -> Exception:
        """Return the error for a group without a root, with which a save begins."""
        return FileNotFoundError(f"cannot load: there is no Zarr group at {self.where}")

    @contextlib.contextmanager
    def read_ahead(self, keys: Iterable[str]) -> Iterator[None]:
        """Read chunks with one call; if one of them is missing, zarr finds which."""
        names = dict.fromkeys(keys)
        read: list[memoryview] = []
        with contextlib.suppress(FileNotFoundError):
            read = self.objects.read([Range(name, 0) for name in names]) if names else []
        self.ahead.update(zip(names, read, strict=False))
        try:
            yield
        finally:
            for name in names:
                self.ahead.pop(name, None)

    def put(self, key: str, buffers: Sequence[object]) -> None:
        """Write an object."""
        self.objects.write(key, buffers)

    def put_new(self, key: str, content: bytes) -> None:
        """Write an object that does not exist."""
        self.objects.write(key, [content], create=True)

    def _delete(self, keys: Iterable[str]) -> None:
        self.objects.delete(list(keys))

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store its options again."""
        reopen: Any = getattr(self.objects, "reopen", None)
        if reopen is not None:
            reopen(storage_options)


def find_remote(place: ObjectLocation) -> RemoteObjects:
    """Return the objects at a location; stores with one name have one lock only if they have one URL."""
    name = place.where if place.url is not None else f"{place.where} {id(place.store)}"
    return RemoteObjects(place.where, place.store, name)


class ObjectZarrStore(zarr.abc.store.Store):  # type: ignore[misc]
    """An object store as a store of zarr; its methods run in threads."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(
        self, objects: ObjectStore, *, read_only: bool = False, ahead: Mapping[str, memoryview] | None = None
    ) -> None:
        super().__init__(read_only=read_only)
        self.objects, self.ahead = objects, {} if ahead is None else ahead

    def with_read_only(self, read_only: bool = False) -> ObjectZarrStore:
        """Return the same objects as a store that can, or cannot, be written."""
        return ObjectZarrStore(self.objects, read_only=read_only, ahead=self.ahead)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectZarrStore):
            return False
        return other.objects is self.objects and other.read_only is self.read_only

    def __hash__(self) -> int:
        return id(self.objects)

    def __str__(self) -> str:
        return self.objects.where

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return an object, or a part of it; None if it is missing."""
        known = self.ahead.get(key) if byte_range is None else None
        if known is not None:
            return prototype.buffer.from_bytes(bytes(known))
        start, stop = 0, None
        if isinstance(byte_range, RangeByteRequest):
            start, stop = byte_range.start, byte_range.end
        elif isinstance(byte_range, OffsetByteRequest):
            start = byte_range.offset
        elif isinstance(byte_range, SuffixByteRequest):
            start = -byte_range.suffix
        try:
            (content,) = await asyncio.to_thread(self.objects.read, [Range(key, start, stop)])
        except FileNotFoundError:
            return None
        return prototype.buffer.from_bytes(bytes(content))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return parts of several objects."""
        return await gather(self.get(key, prototype, part) for key, part in key_ranges)

    async def exists(self, key: str) -> bool:
        """Return True if there is an object."""
        return (await asyncio.to_thread(self.objects.stat, [key])) != [None]

    async def set(self, key: str, value: Any) -> None:
        """Write an object."""
        self._check_writable()
        await asyncio.to_thread(self.objects.write, key, [value.to_bytes()])

    async def delete(self, key: str) -> None:
        """Remove an object."""
        self._check_writable()
        await asyncio.to_thread(self.objects.delete, [key])

    async def list(self) -> AsyncIterator[str]:
        """Yield the names of all objects."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that begin with a prefix."""
        find: Callable[[], list[str]] = lambda: [info.name for info in self.objects.list(prefix)]  # noqa: E731
        for name in await asyncio.to_thread(find):
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of objects and folders directly below a folder."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        found: dict[str, None] = {}
        async for name in self.list_prefix(start):
            found[name.removeprefix(start).partition("/")[0]] = None
        for name in found:
            yield name
