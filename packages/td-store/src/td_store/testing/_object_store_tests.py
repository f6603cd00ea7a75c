"""Conformance suite for object stores."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

from td_core.errors import FormatError, TensorDictError
from td_core.typing import ObjectStore, Range

__all__ = ["ObjectStoreTests"]

_CONTENTS = {"a.bin": bytes(range(200)), "n/b.bin": b"bbb", "n/c.bin": b"", "other": b"0123456789"}

#: Requests of one call, each of which is read as the slice of the content.
_RANGES: dict[str, list[Range]] = {
    "part": [Range("a.bin", 3, 7)],
    "whole": [Range("a.bin", 0)],
    "all_bytes": [Range("a.bin", 0, 200)],
    "rest": [Range("a.bin", 190)],
    "tail": [Range("a.bin", -5)],
    "whole_tail": [Range("a.bin", -200)],
    "no_bytes": [Range("a.bin", 7, 7)],
    "end": [Range("a.bin", 200, 200)],
    "empty_object": [Range("n/c.bin", 0)],
    "several": [Range("a.bin", 100, 120), Range("other", 0, 2), Range("a.bin", 3, 7), Range("n/b.bin", -1)],
    "overlapping": [Range("a.bin", 0, 50), Range("a.bin", 49, 60), Range("a.bin", 0, 50)],
    "many": [Range("a.bin", start, start + 1) for start in reversed(range(0, 200, 8))],
    "none": [],
}

#: Ranges that are not in the object ``other`` of ten bytes.
_TOO_LONG = [Range("other", 5, 11), Range("other", 11), Range("other", 20, 30), Range("other", -11)]


class ObjectStoreTests:
    """Conformance suite of an :class:`~td_core.typing.ObjectStore`. A subclass defines :meth:`make`.

    Attributes:
        is_writable: False for a store that refuses ``write`` and ``delete`` with an OSError.
        can_list: False for a store whose ``list`` raises an OSError, as that of a plain web server.
        creates_atomically: whether only one of several writers with ``create=True`` succeeds.
        is_shared: whether a store that was pickled sees the writes of the other one.
        stamps_content: True if an object with the content of an earlier one can have its stamp, as with an ETag.

    >>> from td_store.testing import MemoryStore
    >>> class TestMemoryStore(ObjectStoreTests):
    ...     is_shared = False
    ...
    ...     def make(self, contents):
    ...         return MemoryStore(contents)
    """

    is_writable: ClassVar[bool] = True
    can_list: ClassVar[bool] = True
    creates_atomically: ClassVar[bool] = True
    is_shared: ClassVar[bool] = True
    stamps_content: ClassVar[bool] = False

    def make(self, contents: Mapping[str, bytes]) -> ObjectStore:
        """Return a new store with some objects, and no others."""
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> ObjectStore:
        """Return a store with four objects."""
        return self.make(_CONTENTS)

    def _writable(self, contents: Mapping[str, bytes]) -> ObjectStore:
        if not self.is_writable:
            pytest.skip("the store cannot be written")
        return self.make(contents)

    def test_where_has_no_secrets(self, store: ObjectStore) -> None:
        assert store.where
        assert "?" not in store.where
        assert "@" not in store.where.replace("***@", "")

    def test_stat_returns_size_or_none(self, store: ObjectStore) -> None:
        found = store.stat(["n/b.bin", "missing", "a.bin", "n/c.bin"])
        described = [None if info is None else (info.name, info.size) for info in found]
        assert described == [("n/b.bin", 3), None, ("a.bin", 200), ("n/c.bin", 0)]
        assert found == store.stat(["n/b.bin", "missing", "a.bin", "n/c.bin"])
        assert store.stat([]) == []
        assert all(isinstance(info.stamp, str) and info.stamp for info in found if info is not None)

    def test_stat_of_tree_finds_no_object_at_location(self, store: ObjectStore) -> None:
        assert store.stat(["", "n"]) == [None, None]

    def test_object_at_location_has_empty_name(self) -> None:
        store = self.make({"": b"0123456789"})
        (info,) = store.stat([""])
        assert info is not None
        assert (info.name, info.size) == ("", 10)
        assert [bytes(part) for part in store.read([Range("", 2, 4, info.stamp)])] == [b"23"]

    @pytest.mark.parametrize("ranges", _RANGES.values(), ids=_RANGES)
    def test_read_returns_slices(self, ranges: list[Range], store: ObjectStore) -> None:
        found = store.read(ranges)
        assert [bytes(part) for part in found] == [_CONTENTS[it.name][it.start : it.stop] for it in ranges]
        assert all(isinstance(part, memoryview) and part.format == "B" for part in found)

    @pytest.mark.parametrize("method", ["peek", "peek_ends"])
    @pytest.mark.parametrize("size", [3, 200, 1000])
    def test_peek_returns_ends_of_object(self, method: str, size: int, store: ObjectStore) -> None:
        peek = getattr(store, method, None)
        if peek is None:
            pytest.skip("the store does not have the optional member")
        info, *parts = peek("a.bin", size)
        content = _CONTENTS["a.bin"]
        ends = [content[:size], content[-size:]][: len(parts)]
        assert ([info], [bytes(part) for part in parts]) == (store.stat(["a.bin"]), ends)
        assert len(parts) == (1 if method == "peek" else 2)
        assert peek("missing", size) is None
        assert [bytes(part) for part in peek("n/c.bin", size)[1:]] == [b""] * len(parts)

    @pytest.mark.parametrize("item", _TOO_LONG, ids=str)
    def test_read_past_the_end_raises(self, item: Range, store: ObjectStore) -> None:
        with pytest.raises(FormatError, match="truncated") as caught:
            store.read([Range("other", 0, 2), item])
        self._check_message(caught.value, store, "other")

    @pytest.mark.parametrize("name", ["missing", "n", "n/missing"])
    def test_read_missing_object_raises(self, name: str, store: ObjectStore) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            store.read([Range("other", 0, 2), Range(name, 0, 2)])
        self._check_message(caught.value, store, name)

    def test_read_with_stamp_of_object_reads(self, store: ObjectStore) -> None:
        (info,) = store.stat(["other"])
        assert info is not None
        assert bytes(store.read([Range("other", 0, 3, info.stamp)])[0]) == b"012"

    def test_read_with_other_stamp_raises(self, store: ObjectStore) -> None:
        with pytest.raises(FormatError, match="replaced") as caught:
            store.read([Range("a.bin", 0, 1), Range("other", 0, 3, "another stamp")])
        self._check_message(caught.value, store, "other")

    def test_list_yields_objects_with_prefix(self, store: ObjectStore) -> None:
        if not self.can_list:
            with pytest.raises((OSError, TensorDictError)):
                list(store.list())
            return
        found = {info.name: info for info in store.list()}
        assert {name: info.size for name, info in found.items()} == {
            name: len(content) for name, content in _CONTENTS.items()
        }
        assert list(found.values()) == store.stat(list(found))
        assert {info.name for info in store.list("n/")} == {"n/b.bin", "n/c.bin"}
        assert {info.name for info in store.list("n/b")} == {"n/b.bin"}
        assert list(store.list("missing")) == []

    def test_threads_read_the_same(self, store: ObjectStore) -> None:
        def read(start: int) -> bytes:
            return bytes(store.read([Range("a.bin", start, start + 8)])[0])

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, range(64))) == [bytes(range(start, start + 8)) for start in range(64)]

    def test_pickled_store_reads(self, store: ObjectStore) -> None:
        again = pickle.loads(pickle.dumps(store))
        assert (again.where, again.stat(["other"])) == (store.where, store.stat(["other"]))
        assert bytes(again.read([Range("other", 1, 4)])[0]) == b"123"

    def test_read_only_store_refuses_writes(self, store: ObjectStore) -> None:
        if self.is_writable:
            pytest.skip("the store can be written")
        for change in (lambda: store.write("new", [b"1"]), lambda: store.delete(["other"])):
            with pytest.raises((OSError, TensorDictError)):
                change()
        assert bytes(store.read([Range("other", 0)])[0]) == _CONTENTS["other"]

    @pytest.mark.parametrize("name", ["", "new.bin", "n/b.bin", "x/y/z w+%41é"])
    def test_write_replaces_object(self, name: str) -> None:
        store = self._writable({} if name == "" else _CONTENTS)
        tensor = torch.arange(3, dtype=torch.int32)
        buffers = [b"ab", bytearray(b"cd"), memoryview(b"e"), b"", tensor.numpy()]
        info = store.write(name, iter(buffers))
        expected = b"abcde" + tensor.numpy().tobytes()
        assert (info.name, info.size) == (name, len(expected))
        assert store.stat([name]) == [info]
        assert bytes(store.read([Range(name, 0, None, info.stamp)])[0]) == expected

    def test_write_of_no_buffers_makes_empty_object(self) -> None:
        store = self._writable({})
        assert store.write("empty", []).size == 0
        assert bytes(store.read([Range("empty", 0)])[0]) == b""

    def test_write_changes_stamp(self) -> None:
        store = self._writable({})
        infos = [store.write("x", [content]) for content in (b"first", b"other", b"first")]
        assert len({info.stamp for info in infos}) == (2 if self.stamps_content else 3)
        with pytest.raises(FormatError, match="replaced"):
            store.read([Range("x", 0, 2, infos[1].stamp)])

    @pytest.mark.parametrize("name", ["new", "other"])
    def test_write_that_fails_publishes_nothing(self, name: str) -> None:
        store = self._writable(_CONTENTS)
        before = store.stat([name])

        def produce() -> Iterator[bytes]:
            yield bytes(1000)
            raise ZeroDivisionError("the content cannot be made")

        with pytest.raises(ZeroDivisionError, match="cannot be made"):
            store.write(name, produce())
        assert store.stat([name]) == before
        if self.can_list:
            assert {info.name for info in store.list()} == set(_CONTENTS)

    def test_create_of_existing_object_raises(self) -> None:
        store = self._writable(_CONTENTS)
        assert store.write("new", [b"1"], create=True).size == 1
        for name in ("new", "other"):
            with pytest.raises(FileExistsError) as caught:
                store.write(name, [b"2"], create=True)
            self._check_message(caught.value, store, name)
        assert [bytes(part) for part in store.read([Range("new", 0), Range("other", 0)])] == [
            b"1",
            _CONTENTS["other"],
        ]

    def test_one_of_several_creations_succeeds(self) -> None:
        store = self._writable({})
        if not self.creates_atomically:
            pytest.skip("the store does not create atomically")

        def create(number: int) -> int | None:
            try:
                store.write("x", [b"%d" % number], create=True)
            except FileExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            done = [number for number in pool.map(create, range(8)) if number is not None]
        assert len(done) == 1
        assert bytes(store.read([Range("x", 0)])[0]) == b"%d" % done[0]

    def test_read_during_writes_is_never_mixed(self) -> None:
        store = self._writable({"x": bytes(4096)})

        def write(number: int) -> None:
            store.write("x", [bytes([number]) * 2048] * 2)

        def read(_: int) -> bytes:
            return bytes(store.read([Range("x", 0)])[0])

        with ThreadPoolExecutor(4) as pool:
            writes = [pool.submit(write, number) for number in range(20)]
            found = list(pool.map(read, range(40)))
        assert [write.result() for write in writes] == [None] * 20
        assert all(len(part) == 4096 and len(set(part)) == 1 for part in found)

    def test_delete_removes_objects(self) -> None:
        store = self._writable(_CONTENTS)
        store.delete(["a.bin", "missing", "n/b.bin"])
        store.delete([])
        found = store.stat(list(_CONTENTS))
        assert [info is None for info in found] == [True, True, False, False]

    def test_pickled_store_sees_writes(self) -> None:
        store = self._writable(_CONTENTS)
        if not self.is_shared:
            pytest.skip("a pickled store has objects of its own")
        again = pickle.loads(pickle.dumps(store))
        store.write("other", [b"new"])
        assert bytes(again.read([Range("other", 0)])[0]) == b"new"

    def _check_message(self, error: BaseException, store: ObjectStore, name: str) -> None:
        """Check that the message of an error has the location and the object."""
        assert store.where in str(error)
        assert name in str(error)
