"""The suite of object stores: the store in memory passes it, and it finds a store with a fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from td_core.errors import FormatError
from td_core.typing import ObjectInfo, Range
from td_store.testing import MemoryStore, ObjectStoreTests


class TestMemoryStore(ObjectStoreTests):
    is_shared = False

    def make(self, contents: Mapping[str, bytes]) -> MemoryStore:
        return MemoryStore(contents)


def test_memory_store_logs_requests() -> None:
    store = MemoryStore({"a": b"123"})
    store.read([Range("a", 0, 1)])
    store.write("b", [b"1"])
    list(store.list("b"))
    store.delete(["a", "b"])
    assert store.log == [("read", ("a",)), ("write", ("b",)), ("list", ("b",)), ("delete", ("a", "b"))]


class ShortRead(MemoryStore):
    """Returns fewer bytes than were requested."""

    def read(self, ranges: Any) -> Any:
        try:
            return super().read(ranges)
        except FormatError:
            return [memoryview(b"")] * len(ranges)


class SameStamp(MemoryStore):
    """Gives all contents of an object one stamp."""

    def _put(self, name: str, content: bytes) -> ObjectInfo:
        self._objects[name] = content, "stamp"
        return ObjectInfo(name, len(content), "stamp")


class PartlyWritten(MemoryStore):
    """Publishes what was written before an error."""

    def write(self, name: str, content: Any, *, create: bool = False) -> ObjectInfo:
        done: list[Any] = []
        try:
            for buffer in content:
                done += [buffer]
        finally:
            info = super().write(name, done, create=create)
        return info


class Overwriting(MemoryStore):
    """Ignores ``create``."""

    def write(self, name: str, content: Any, *, create: bool = False) -> ObjectInfo:
        return super().write(name, content)


FAULTS: dict[type[MemoryStore], Callable[[ObjectStoreTests], None]] = {
    ShortRead: lambda suite: suite.test_read_past_the_end_raises(
        Range("other", 5, 11), suite.make({"other": b"0"})
    ),
    SameStamp: lambda suite: suite.test_write_changes_stamp(),
    PartlyWritten: lambda suite: suite.test_write_that_fails_publishes_nothing("other"),
    Overwriting: lambda suite: suite.test_create_of_existing_object_raises(),
}


@pytest.mark.parametrize(("cls", "test"), FAULTS.items())
def test_suite_finds_store_with_fault(
    cls: type[MemoryStore], test: Callable[[ObjectStoreTests], None]
) -> None:
    class Suite(ObjectStoreTests):
        def make(self, contents: Mapping[str, bytes]) -> MemoryStore:
            return cls(contents)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(Suite())
