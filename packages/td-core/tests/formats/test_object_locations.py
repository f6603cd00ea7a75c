"""URLs and object stores as locations: they become a store once, with its options, and formats are found by its first bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import td_core
from td_core import MissingPluginError, TensorDict, TensorDictError
from td_core._formats.serializers import SERIALIZERS
from td_core.spi import Serializer, hookimpl
from td_core.testing import installed
from td_core.typing import ObjectInfo, ObjectLocation, Range


class Shelf:
    """A store on a dict, which logs its requests."""

    def __init__(self, contents: dict[str, bytes], where: str = "shelf://top") -> None:
        self.contents, self.where, self.log = contents, where, []

    def stat(self, names: Any) -> Any:
        self.log.append(("stat", *names))
        found = [(name, self.contents.get(name)) for name in names]
        return [None if item is None else ObjectInfo(name, len(item), "1") for name, item in found]

    def read(self, ranges: list[Range]) -> Any:
        self.log.append(("read", *ranges))
        return [memoryview(self.contents[item.name])[item.start : item.stop] for item in ranges]

    def write(self, name: str, content: Any, *, create: bool = False) -> Any:
        self.contents[name] = b"".join(content)

    def list(self, prefix: str = "") -> Any:
        return iter(self.stat([name for name in self.contents if name.startswith(prefix)]))

    def delete(self, names: Any) -> None:
        for name in names:
            self.contents.pop(name, None)


class Numbers(Serializer):
    """A format of one object with an int64 vector, or of a tree that is marked by ``meta.json``."""

    name = "numbers"
    suffixes = (".numbers",)
    reads_objects = True

    def save(self, data: Any, location: Any) -> Any:
        location.store.write("", [b"NUMBERS", data["a"].numpy().tobytes()])
        return data

    def load(self, location: Any, *, keys: Any = None) -> Any:
        name = "" if location.first is not None else "values"
        content = location.store.read([Range(name, 0)])[0][7:]
        return TensorDict({"a": torch.frombuffer(bytearray(content), dtype=torch.int64)})

    def detect(self, location: Any, head: bytes) -> bool:
        if isinstance(location, ObjectLocation) and not head:
            return "meta.json" in location.marks
        return head.startswith(b"NUMBERS")

    def open(self, location: Any, *, mode: str = "r", keys: Any = None) -> Any:
        return self.load(location)

    def create(self, like: Any, location: Any) -> Any:
        return self.save(like, location)

    def append(self, rows: Any, location: Any) -> None:
        self.save(TensorDict({"a": torch.cat([self.load(location)["a"], rows["a"]])}), location)

    def inspect(self, location: Any) -> Any:
        return location.where

    def verify(self, location: Any) -> Any:
        return location.where


class Old(Serializer):
    """A format that accepts URLs, and opens them itself."""

    name = "old"
    schemes = ("shelf", "attic")
    seen: ClassVar[list[Any]] = []

    def save(self, data: Any, location: Any, *, storage_options: Any = None) -> Any:
        self.seen.append((location, storage_options))
        return data

    def load(self, location: Any, *, storage_options: Any = None) -> Any:
        self.seen.append((location, storage_options))
        return TensorDict()

    def detect(self, location: Any, head: bytes) -> bool:
        return head == b"OLD"


CONTENT = b"NUMBERS" + torch.arange(3).numpy().tobytes()


class Plugin:
    """Opens the one store, and logs with what."""

    def __init__(self, store: Shelf) -> None:
        self.store, self.opened = store, []

    def open(self, url: str, options: Any) -> Shelf:
        self.opened.append((url, dict(options)))
        return self.store

    @hookimpl
    def td_stores(self) -> Any:
        return {"shelf": self.open}

    @hookimpl
    def td_serializers(self) -> Any:
        return [Numbers(), Old()]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    monkeypatch.setattr(SERIALIZERS, "_by_name", {})
    monkeypatch.setattr(Old, "seen", [])
    plugin = Plugin(Shelf({"": CONTENT}))
    with installed(plugin):
        yield plugin


def make_rows() -> TensorDict:
    return TensorDict({"a": torch.arange(3)}, [3])


OPERATIONS: dict[str, Any] = {
    "save": lambda place, **options: td_core.save(make_rows(), place, format="numbers", **options),
    "save method": lambda place, **options: make_rows().save(place, format="numbers", **options),
    "load": td_core.load,
    "load method": TensorDict.load,
    "load_": lambda place, **options: TensorDict({"a": torch.zeros(3).long()}).load_(place, **options),
    "open": td_core.open,
    "open method": TensorDict.open,
    "create": lambda place, **options: td_core.create(make_rows(), place, format="numbers", **options),
    "append": lambda place, **options: td_core.append(TensorDict({"a": torch.arange(3)}), place, **options),
    "inspect": td_core.inspect,
    "verify": td_core.verify,
}


@pytest.mark.parametrize("call", OPERATIONS.values(), ids=OPERATIONS)
def test_operation_opens_store_once_with_its_options(call: Any, plugin: Plugin) -> None:
    call("shelf://top", storage_options={"key": "secret"})
    assert plugin.opened == [("shelf://top", {"key": "secret"})]


@pytest.mark.parametrize("call", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize(
    ("place", "options", "error", "message"),
    [
        ("shelf://top", 3, TypeError, "storage_options must be a mapping; got int"),
        ("x.numbers", {}, ValueError, "storage_options are for URLs; 'x.numbers' is a local path"),
        (Shelf({}), {}, ValueError, "storage_options are for URLs; got a Shelf"),
    ],
)
def test_storage_options_of_no_use_raise(
    call: Any, place: Any, options: Any, error: type[Exception], message: str, plugin: Plugin
) -> None:
    with pytest.raises(error, match=message):
        call(place, storage_options=options)
    assert plugin.opened == []


@pytest.mark.parametrize("name", ["load", "open", "inspect"])
def test_operation_takes_store_as_location(name: str, plugin: Plugin) -> None:
    result = OPERATIONS[name](plugin.store)
    assert result == "shelf://top" if name == "inspect" else result["a"].tolist() == [0, 1, 2]
    assert plugin.opened == []


def test_save_to_store_finds_format_by_suffix(plugin: Plugin) -> None:
    store = Shelf({}, "shelf://x.numbers")
    data = make_rows()
    assert td_core.save(data, store) is data
    assert store.contents == {"": CONTENT}


def test_detect_reads_first_bytes_of_object_once(plugin: Plugin) -> None:
    plugin.store.contents[""] = CONTENT + bytes(ObjectLocation.HEAD_SIZE)
    td_core.inspect("shelf://top")
    assert plugin.store.log == [("stat", ""), ("read", Range("", 0, ObjectLocation.HEAD_SIZE, "1"))]


def test_detect_of_tree_looks_for_marks_once(plugin: Plugin) -> None:
    plugin.store.contents = {"meta.json": b"{}", "values": CONTENT}
    assert td_core.load("shelf://top")["a"].tolist() == [0, 1, 2]
    assert plugin.store.log == [("stat", ""), ("stat", *ObjectLocation.MARKS), ("read", Range("values", 0))]


def test_detect_of_tree_with_other_object_at_location(plugin: Plugin) -> None:
    plugin.store.contents = {"": b"<html>", "meta.json": b"{}", "values": CONTENT}
    assert td_core.inspect("shelf://top") == "shelf://top"


def test_peek_gives_first_bytes_with_one_request(plugin: Plugin) -> None:
    store: Any = plugin.store
    store.peek = lambda name, size: (ObjectInfo(name, len(CONTENT), "1"), memoryview(CONTENT)[:size])
    td_core.inspect("shelf://top")
    assert store.log == []


def test_format_with_schemes_receives_url_and_options(plugin: Plugin) -> None:
    plugin.store.contents[""] = b"OLD"
    td_core.load("shelf://top", storage_options={"a": 1})
    td_core.load("attic://top", format="old", storage_options={"b": 1})
    td_core.save(TensorDict(), "attic://top", format="old")
    assert Old.seen == [("shelf://top", {"a": 1}), ("attic://top", {"b": 1}), ("attic://top", None)]


MISSING: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": ({}, FileNotFoundError, "there is nothing at 'shelf://\\*\\*\\*@top'"),
    "other content": (
        {"": b"other"},
        TensorDictError,
        "no registered format recognises 'shelf://\\*\\*\\*@top'",
    ),
    "other tree": ({"zarr.json": b""}, TensorDictError, "no registered format recognises"),
}


@pytest.mark.parametrize(("contents", "error", "message"), MISSING.values(), ids=MISSING)
def test_load_of_nothing_known_raises_without_secrets(
    contents: Any, error: type[Exception], message: str, plugin: Plugin
) -> None:
    plugin.store.contents = contents
    with pytest.raises(error, match=message) as caught:
        td_core.load("shelf://ann:secret@top?key=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", [*OPERATIONS])
def test_url_without_provider_names_the_scheme(name: str, plugin: Plugin) -> None:
    with pytest.raises(MissingPluginError, match="none provides the scheme 'cellar' with the hook td_stores"):
        OPERATIONS[name]("cellar://top")


def test_find_objects_returns_location_or_none(plugin: Plugin) -> None:
    found = Serializer.find_objects("shelf://ann:secret@top/x?v=1", {"key": 1})
    assert found is not None
    assert (str(found), found.url) == ("shelf://***@top/x", "shelf://ann:secret@top/x?v=1")
    assert Serializer.find_objects(found) is found
    assert found.find_folder().url == "shelf://ann:secret@top?v=1"
    assert (
        Serializer.find_objects("a/b") is None
        and Serializer.find_objects(Path("a")) is None
        and Serializer.find_objects([1]) is None
    )
    with pytest.raises(ValueError, match="pass the store of the folder above it"):
        ObjectLocation(plugin.store).find_folder()
