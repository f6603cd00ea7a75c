"""An object store in memory, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from td_core.errors import FormatError
from td_core.spi import set_module
from td_core.typing import ObjectInfo, Range

__all__ = ["MemoryStore"]


@set_module("td_store.testing")
class MemoryStore:
    """An :class:`~td_core.typing.ObjectStore` in memory, which logs its requests. Pickles contain the objects.

    Args:
        contents: the objects by name.
        where: the location, for messages.

    Attributes:
        log: a row for each call, ``(operation, names)``.

    >>> store = MemoryStore({"a.bin": b"0123456789"})
    >>> [bytes(part) for part in store.read([Range("a.bin", 2, 4), Range("a.bin", -3)])]
    [b'23', b'789']
    >>> store.stat(["a.bin", "b.bin"])
    [ObjectInfo(name='a.bin', size=10, stamp='1'), None]
    >>> store.log
    [('read', ('a.bin', 'a.bin')), ('stat', ('a.bin', 'b.bin'))]
    """

    def __init__(self, contents: Mapping[str, bytes] | None = None, where: str = "memory://test") -> None:
        self.where = where
        self.log: list[tuple[str, tuple[str, ...]]] = []
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._writes = 0
        self._lock = threading.Lock()
        for name, content in (contents or {}).items():
            self._put(name, content)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def stat(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return size and stamp of each object, None for one that is missing."""
        self.log.append(("stat", tuple(names)))
        found = [self._objects.get(name) for name in names]
        return [
            None if item is None else ObjectInfo(name, len(item[0]), item[1])
            for name, item in zip(names, found, strict=True)
        ]

    def peek(self, name: str, size: int) -> tuple[ObjectInfo, memoryview] | None:
        """Return the description of an object and its first bytes; None if it is missing."""
        self.log.append(("peek", (name,)))
        found = self._look(name, size)
        return None if found is None else found[:2]

    def peek_ends(self, name: str, size: int) -> tuple[ObjectInfo, memoryview, memoryview] | None:
        """Return the description of an object, its first and its last bytes; None if it is missing."""
        self.log.append(("peek", (name,)))
        return self._look(name, size)

    def _look(self, name: str, size: int) -> tuple[ObjectInfo, memoryview, memoryview] | None:
        if name not in self._objects:
            return None
        content, stamp = self._objects[name]
        whole = memoryview(content)
        return ObjectInfo(name, len(content), stamp), whole[:size], whole[max(len(content) - size, 0) :]

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return exactly the bytes of each range."""
        self.log.append(("read", tuple(item.name for item in ranges)))
        return [self._slice(item) for item in ranges]

    def write(self, name: str, content: Iterable[Any], *, create: bool = False) -> ObjectInfo:
        """Write an object from buffers of bytes, which readers see complete."""
        self.log.append(("write", (name,)))
        whole = b"".join(memoryview(buffer).cast("B") for buffer in content)
        with self._lock:
            if create and name in self._objects:
                raise FileExistsError(f"{self.where}: the object {name!r} exists")
            return self._put(name, whole)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        self.log.append(("list", (prefix,)))
        for name, (content, stamp) in sorted(self._objects.items()):
            if name.startswith(prefix):
                yield ObjectInfo(name, len(content), stamp)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is missing is not an error."""
        self.log.append(("delete", tuple(names)))
        for name in names:
            self._objects.pop(name, None)

    def _put(self, name: str, content: bytes) -> ObjectInfo:
        self._writes += 1
        self._objects[name] = content, str(self._writes)
        return ObjectInfo(name, len(content), str(self._writes))

    def _slice(self, item: Range) -> memoryview:
        found = self._objects.get(item.name)
        if found is None:
            raise FileNotFoundError(f"{self.where}: there is no object {item.name!r}")
        content, stamp = found
        if item.stamp not in (None, stamp):
            raise FormatError(
                f"{self.where}: the object {item.name!r} was replaced since it was opened: open it again"
            )
        start = item.start if item.start >= 0 else len(content) + item.start
        stop = len(content) if item.stop is None else item.stop
        if not 0 <= start <= stop <= len(content):
            raise FormatError(
                f"{self.where}: the object {item.name!r} is truncated: it has {len(content)} bytes, and the bytes "
                f"from {item.start} to {item.stop} were read"
            )
        return memoryview(content)[start:stop]
