"""Tests that the public conformance suites fail for a faulty kind or format."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import NO_DEFAULT, TensorDict, TensorDictBase, spi
from td_core.spi import NodeKind, Record, Serializer, hookimpl
from td_core.testing import CollectionTests, SerializerTests, installed


class Lossy(TensorDict):
    """A faulty kind: ``_with_children`` drops the last entry."""

    def _with_children(self, children: Any, **kwargs: Any) -> Any:
        return super()._with_children(dict(list(children.items())[:-1]), **kwargs)


class LossyTests(CollectionTests):
    def make(self) -> Lossy:
        return Lossy({"a": torch.ones(3, 2), "b": torch.ones(3, 2)}, batch_size=[3, 2])


def test_collection_suite_lost_entry_fails() -> None:
    with pytest.raises(AssertionError):
        LossyTests().test_children_make_the_same_node_again()


class Length(TensorDictBase):
    """Numbers with a unit: a correct kind, from which the faulty kinds below derive."""

    def __init__(
        self, entries: Any, unit: str, batch_size: Any, device: Any = None, names: Any = None
    ) -> None:
        self._entries, self.unit = dict(entries), unit
        self._batch_size, self._device, self._names = torch.Size(batch_size), device, names

    @property
    def batch_size(self) -> torch.Size:
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> None:
        self._change_batch_size(torch.Size(batch_size))

    @property
    def device(self) -> Any:
        return self._device

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size

    def _set_device(self, device: Any) -> None:
        self._device = device

    def _children(self) -> dict[str, Any]:
        return self._entries

    def _set_child(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def _del_child(self, key: str) -> None:
        del self._entries[key]

    def _with_children(
        self, children: Any, *, batch_size: Any = None, device: Any = NO_DEFAULT, names: Any = NO_DEFAULT
    ) -> Any:
        return type(self)(
            children,
            self.unit,
            self._batch_size if batch_size is None else batch_size,
            self._device if device is NO_DEFAULT else device,
            self._names if names is NO_DEFAULT else names,
        )


def flatten(node: Length) -> Record:
    return Record.of(node, node._children(), unit=node.unit)


def unflatten(cls: type[Length], record: Record) -> Length:
    batch_size, device, names, locked = record.read_header()
    node = (record.cls or cls)(record.entries, record.meta["unit"], batch_size, device, names)
    return node.lock_() if locked else node


def call_with_children(
    self: Length, children: Any, *, drop: str = "", change: Any = None, **kwargs: Any
) -> Length:
    """Call ``_with_children`` without the argument ``drop``, and apply ``change`` to the result."""
    kwargs.pop(drop, None)
    made = Length._with_children(self, children, **kwargs)
    if change is not None:
        change(made)
    return made


def make_broken(**kwargs: Any) -> dict[str, Any]:
    return {"_with_children": partialmethod(call_with_children, **kwargs)}


def sort(node: Length) -> None:
    node._entries = dict(sorted(node._entries.items()))


CHILDREN, SIZE = "test_children_make_the_same_node_again", "test_the_batch_size_can_be_changed"
#: Faulty members of a class, the test that has to fail, and its message.
CLASSES: list[tuple[dict[str, Any], str, str]] = [
    (
        make_broken(change=lambda node: setattr(node, "_names", None)),
        CHILDREN,
        "_with_children loses the names",
    ),
    (
        make_broken(change=lambda node: setattr(node, "_device", None)),
        CHILDREN,
        "_with_children loses the device",
    ),
    (
        make_broken(change=lambda node: setattr(node, "unit", "inch")),
        CHILDREN,
        "changes what .* holds: .*inch.* instead of",
    ),
    (make_broken(change=sort), CHILDREN, "_with_children loses the keys"),
    (make_broken(drop="names"), CHILDREN, "_with_children ignores the names"),
    (make_broken(drop="device"), CHILDREN, "_with_children ignores the device"),
    (make_broken(drop="batch_size"), CHILDREN, "_with_children ignores the batch_size"),
    ({"_set_device": lambda self, device: None}, CHILDREN, "_set_device does not store the device"),
    ({"_change_batch_size": Length._set_batch_size}, SIZE, "DID NOT RAISE .*BatchSizeError"),
]


ENTRIES = "test_entries_are_stored_and_removed"
#: A faulty form of each member that a kind must provide, the test that has to fail, and its message.
REQUIRED: dict[str, tuple[Any, str, str]] = {
    "batch_size": (
        property(lambda self: tuple(self._batch_size)),
        "test_make_gives_what_the_suite_needs",
        "batch_size is not a torch.Size",
    ),
    "device": (property(lambda self: None), CHILDREN, "does not store the device"),
    "_names": (
        property(lambda self: None, lambda self, names: None),
        CHILDREN,
        "_names does not store the names",
    ),
    "_children": (lambda self: dict(list(self._entries.items())[:2]), ENTRIES, "_children does not list it"),
    "_with_children": (
        make_broken(drop="names")["_with_children"],
        CHILDREN,
        "_with_children ignores the names",
    ),
    "_set_child": (lambda self, key, value: None, ENTRIES, "_set_child does not store an entry"),
    "_del_child": (lambda self, key: self._entries.pop(key, None), ENTRIES, "DID NOT RAISE .*KeyError"),
    "_set_batch_size": (lambda self, batch_size: None, SIZE, "_set_batch_size does not store the batch size"),
    "_set_device": (lambda self, device: None, CHILDREN, "_set_device does not store the device"),
}


@pytest.mark.parametrize("name", spi.REQUIRED)
def test_collection_suite_faulty_required_member_fails(name: str) -> None:
    member, test, message = REQUIRED[name]
    with (
        make_suite({name: member}, unflatten) as suite,
        pytest.raises((AssertionError, pytest.fail.Exception), match=message),
    ):
        getattr(suite, test)()


@pytest.mark.parametrize(("members", "test", "message"), CLASSES, ids=[message for *_, message in CLASSES])
def test_collection_suite_broken_primitive_fails(members: Any, test: str, message: str) -> None:
    with (
        make_suite(members, unflatten) as suite,
        pytest.raises((AssertionError, pytest.fail.Exception), match=message),
    ):
        getattr(suite, test)()


#: Wrong values for fields of the header, and the expected message of the suite.
READINGS: dict[str, tuple[Any, str]] = {
    "names": (None, "changes the names"),
    "device": (None, "changes the device"),
    "batch_size": ([3], "changes the batch size"),
    "locked": (None, "changes the lock"),
    "unit": ("inch", "changes what the kind holds: .*inch.* instead of"),
}


@pytest.mark.parametrize("test", ["test_encoding", "test_pickling", "test_copying"])
@pytest.mark.parametrize("name", READINGS)
def test_collection_suite_lossy_unflatten_fails(name: str, test: str) -> None:
    value, message = READINGS[name]

    def lossy(cls: type[Length], record: Record) -> Length:
        meta = {**record.meta, name: value}
        if name == "batch_size" and meta.get("names"):
            meta["names"] = meta["names"][:1]  # else the header contradicts itself
        return unflatten(cls, replace(record, meta=meta))

    with make_suite({}, lossy) as suite, pytest.raises(AssertionError, match=message):
        getattr(suite, test)(*([2] if test == "test_pickling" else []))


def test_collection_suite_wrong_unflatten_fails() -> None:
    def sorting(cls: type[Length], record: Record) -> Length:
        return unflatten(cls, replace(record, entries=dict(sorted(record.entries.items()))))

    with (
        make_suite({}, sorting) as suite,
        pytest.raises(AssertionError, match="changes the keys: .*instead of"),
    ):
        suite.test_encoding()

    def base_only(cls: type[Length], record: Record) -> Length:
        return unflatten(cls, replace(record, cls=None))

    with (
        make_suite({}, base_only) as suite,
        pytest.raises(AssertionError, match="gives a Broken, not record.cls"),
    ):
        suite.test_a_subclass_comes_back_as_itself()


def test_collection_suite_operation_losing_state_fails() -> None:
    def transform(self: Length, plan: Any) -> Length:
        leaves = {key: plan.leaf(leaf) for key, leaf in self._children().items()}
        return type(self)(leaves, "inch", plan.resize_batch(self.batch_size))

    with (
        make_suite({"_transform": transform}, unflatten) as suite,
        pytest.raises(AssertionError, match="the operation changes what"),
    ):
        suite.test_operations_keep_what_the_kind_holds(lambda length: length[:])


@contextmanager
def make_suite(members: dict[str, Any], unflatten: Any) -> Iterator[CollectionTests]:
    """Register a class derived from ``Length`` as a kind, and yield its suite."""
    cls: Any = type("Broken", (Length,), {"__module__": __name__, **members})
    kind = NodeKind("test.Broken", cls, flatten, partial(unflatten, cls))

    class Suite(CollectionTests):
        def make(self) -> Any:
            return cls({"z": torch.ones(3, 2), "y": torch.ones(3, 2, 4)}, "m", [3, 2])

    class Plugin:
        @hookimpl
        def td_node_kinds(self) -> list[NodeKind]:
            return [kind]

    with installed(Plugin()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Broken", cls, raising=False)
        yield Suite()


def run_suite(suite: CollectionTests) -> Iterator[Any]:
    """Run every test of a suite, with each of its parameters."""
    for name in dir(suite):
        if name.startswith("test_"):
            test = getattr(suite, name)
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            for value in marks[0].args[1] if marks else [None]:
                yield test(value) if marks else test()


def test_collection_suite_correct_kind_passes() -> None:
    with make_suite({}, unflatten) as suite:
        assert len(list(run_suite(suite))) > 80


def test_collection_suite_without_factory_raises() -> None:
    with pytest.raises(NotImplementedError, match=r"^CollectionTests must define make\(\)$"):
        CollectionTests().make()
    with pytest.raises(NotImplementedError, match=r"^SerializerTests must define serializer\(\)$"):
        SerializerTests().serializer()


class Everything(Serializer):
    """A faulty format: detects every path, and loads the same collection from it."""

    name = "everything"

    def save(self, data: Any, path: Path) -> Any:
        path.write_text("x")
        return data

    def load(self, path: Path) -> Any:
        return TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2)}, batch_size=[3])

    def detect(self, path: Path, head: bytes) -> bool:
        return True


class EverythingTests(SerializerTests):
    def serializer(self) -> Serializer:
        return Everything()


class Plugin:
    @hookimpl
    def td_serializers(self) -> list[Serializer]:
        return [Everything()]


@pytest.mark.parametrize(
    "test",
    [
        lambda suite, path: suite.test_round_trip(path),
        lambda suite, path: suite.test_kinds_and_values_that_it_has_never_seen(path),
        lambda suite, path: suite.test_nothing_else_is_recognised(path),
    ],
)
def test_serializer_suite_detecting_every_path_fails(test: Any, tmp_path: Path) -> None:
    with installed(Plugin()), pytest.raises(AssertionError):
        test(EverythingTests(), tmp_path)


def test_serializer_suite_undetected_damage_fails(tmp_path: Path) -> None:
    with installed(Plugin()), pytest.raises(pytest.fail.Exception, match="DID NOT RAISE FormatError"):
        EverythingTests().test_a_damaged_save_is_an_error(tmp_path)


#: What ``make`` returns, and what the suite says that it needs.
UNFIT_COLLECTIONS = {
    "int leaves": (
        lambda: TensorDict({"a": torch.ones(3, 2, dtype=torch.int64)}, [3, 2]),
        "'a' of torch.int64",
    ),
    "one batch dim": (
        lambda: TensorDict({"a": torch.ones(3)}, [3]),
        r"batch size \[3\]; the suite needs two dims",
    ),
    "a dim of size 1": (lambda: TensorDict({"a": torch.ones(3, 1)}, [3, 1]), "dims of size 2 or more"),
    "no tensors": (lambda: TensorDict({}, [3, 2]), "a TensorDict without tensors"),
    "locked": (lambda: TensorDict({"a": torch.ones(3, 2)}, [3, 2]).lock_(), "returns a locked collection"),
    "a dict": (lambda: {"a": torch.ones(3, 2)}, "returns a dict, not a collection"),
}


@pytest.mark.parametrize("name", UNFIT_COLLECTIONS)
def test_suite_says_what_make_lacks(name: str) -> None:
    make, words = UNFIT_COLLECTIONS[name]

    class Suite(CollectionTests):
        def make(self) -> Any:
            return make()

    with pytest.raises(AssertionError, match=words):
        Suite().test_make_gives_what_the_suite_needs()
