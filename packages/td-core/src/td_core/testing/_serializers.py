"""Conformance suite for serializers, the formats of whole collections."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from .._locations import read_head
from .._nodes import NodeKind, Record
from .._saving import load, save
from .._serializers import SERIALIZERS, Serializer
from .._tensordict import TensorDict
from .._value_types import LeafSerializer
from ..errors import CodecError, FormatError
from ..plugins.hookspecs import hookimpl
from ..plugins.manager import installed

__all__ = ["SerializerTests"]


class _Holder(TensorDict):
    """A kind of node with an additional Python value."""

    value: Any = None


class _Version(tuple):  # type: ignore[type-arg]
    """A type that is storable only with the serializer of a plugin."""

    def __repr__(self) -> str:
        return ".".join(map(str, self))


class _Plugin:
    @hookimpl
    def td_node_kinds(self) -> Iterable[NodeKind]:
        def unflatten(record: Record) -> _Holder:
            holder = _Holder(dict(record.entries), record.meta["batch_size"])
            holder.value = record.values["value"]
            return holder

        def flatten(node: Any) -> Record:
            return Record(
                {"batch_size": list(node.batch_size)}, node._children(), values={"value": node.value}
            )

        return [NodeKind("td_core.testing.Holder", _Holder, flatten, unflatten)]

    @hookimpl
    def td_serializers(self) -> Iterable[Serializer | LeafSerializer]:
        return [LeafSerializer("td_core.testing.Version", _Version, dump=list, load=_Version)]


class SerializerTests:
    """Conformance suite of a file format. A subclass defines :meth:`serializer`.

    The format must be registered while the tests run, by an installed package or by :func:`installed` in a fixture.

    Attributes:
        suffix: suffix of file names of this format.
        one_file: whether a save is a single file, which the suite truncates to test damaged files.

    >>> SerializerTests().collections()["flat"]["a"]
    tensor([0., 1., 2.])
    """

    suffix: ClassVar[str] = ""
    one_file: ClassVar[bool] = True

    def serializer(self) -> Serializer:
        """Return the serializer under test."""
        raise NotImplementedError(f"{type(self).__name__} must define serializer()")

    def collections(self) -> dict[str, Any]:
        """Return the collections to save and load, by name. Override it to add other kinds."""
        return {
            "flat": TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2)}, batch_size=[3]),
            "nested": TensorDict({"a": {"b": {"c": torch.zeros(2, 4)}, "d": torch.ones(2)}}, batch_size=[2]),
            "no batch": TensorDict({"a": torch.tensor(1), "b": torch.tensor(True)}),
            "empty": TensorDict({}, batch_size=[4]),
            "empty level": TensorDict({"a": {}}, batch_size=[4]),
            "no elements": TensorDict({"a": torch.zeros(0, 3)}, batch_size=[0]),
            "order": TensorDict({key: torch.zeros(1) for key in "zbya"}, batch_size=[1]),
            "keys": TensorDict({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "é/": torch.zeros(1)}),
            "dtypes": TensorDict(
                {
                    str(dtype): torch.tensor([0, 1]).to(dtype)
                    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64)
                },
                batch_size=[2],
            ),
            "views": TensorDict({"a": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(1).expand(3)}),
            "names": TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3], names=["x", None]),
        }

    def check(self, result: Any, expected: Any) -> None:
        """Assert that two collections are equal: kind, keys in order, leaves, batch sizes, names."""
        assert type(result) is type(expected)
        assert list(result.keys()) == list(expected.keys())
        assert result.batch_size == expected.batch_size
        assert result.names == expected.names
        for key, leaf in expected.items():
            if isinstance(leaf, Tensor):
                assert result.get(key).dtype == leaf.dtype
                torch.testing.assert_close(result.get(key), leaf, equal_nan=True, rtol=0, atol=0)
            else:
                self.check(result.get(key), leaf)

    def test_the_format_is_registered(self) -> None:
        """The format is registered, so that ``save(format=...)`` selects it."""
        serializer = self.serializer()
        assert serializer.name in SERIALIZERS
        assert type(SERIALIZERS.get(serializer.name)) is type(serializer)

    def test_round_trip(self, tmp_path: Path) -> None:
        """Loading returns an equal collection, and saving does not change the collection."""
        for name, collection in self.collections().items():
            before = collection.clone()
            path = tmp_path / (name + self.suffix)
            save(collection, path, format=self.serializer().name)
            self.check(collection, before)
            self.check(load(path, format=self.serializer().name), before)

    def test_kinds_and_values_that_it_has_never_seen(self, tmp_path: Path) -> None:
        """Kinds and values of plugins keep their types; saving a value without a serializer raises CodecError."""
        holder = _Holder({"a": torch.ones(2)}, [2])
        with installed(_Plugin(), id="td_core.testing"):
            for i, value in enumerate(["text", None, (1, [2.5]), {"k": b"\x00"}, [_Version((1, 2))]]):
                holder.value = value
                path = tmp_path / (f"{i}{self.suffix}")
                save(TensorDict({"x": holder}, [2]), path, format=self.serializer().name)
                result = load(path, format=self.serializer().name).get("x")
                assert type(result) is _Holder
                assert (result.value, repr(result.value)) == (value, repr(value))
            holder.value = object()
            with pytest.raises(CodecError, match="no serializer is registered for its type"):
                save(
                    TensorDict({"x": holder}, [2]),
                    tmp_path / ("x" + self.suffix),
                    format=self.serializer().name,
                )

    def test_a_save_is_recognised(self, tmp_path: Path) -> None:
        """``detect`` recognises a save, so that ``load`` needs no argument ``format``."""
        collection = self.collections()["flat"]
        path = tmp_path / ("x" + self.suffix)
        save(collection, path, format=self.serializer().name)
        assert self.serializer().detect(path, read_head(path))
        self.check(load(path), collection)
        self.check(type(collection).load(path), collection)

    def test_nothing_else_is_recognised(self, tmp_path: Path) -> None:
        """``detect`` returns False for other files and directories."""
        serializer = self.serializer()
        for name, content in [("empty", b""), ("text", b"hello"), ("binary", bytes(range(256)))]:
            (tmp_path / name).write_bytes(content)
            assert not serializer.detect(tmp_path / name, content), name
        (tmp_path / "folder").mkdir()
        assert not serializer.detect(tmp_path / "folder", b"")

    def test_saving_again_replaces(self, tmp_path: Path) -> None:
        """Saving to an existing path replaces the old save completely."""
        collections = self.collections()
        path = tmp_path / ("x" + self.suffix)
        for name in ("nested", "flat"):
            save(collections[name], path, format=self.serializer().name)
        self.check(load(path), collections["flat"])

    def test_loading_in_place(self, tmp_path: Path) -> None:
        """``load_`` writes into the existing leaves."""
        collection = self.collections()["flat"]
        path = tmp_path / ("x" + self.suffix)
        save(collection, path, format=self.serializer().name)
        target = collection.clone().zero_()
        leaf = target.get("a")
        assert target.load_(path) is target
        assert target.get("a") is leaf
        self.check(target, collection)

    def test_an_unknown_option_is_refused(self, tmp_path: Path) -> None:
        """An unknown option raises TypeError that names the format, and writes no file."""
        serializer = self.serializer()
        path = tmp_path / ("x" + self.suffix)
        with pytest.raises(TypeError, match=serializer.name):
            save(self.collections()["flat"], path, format=serializer.name, no_such_option=1)
        assert not path.exists()

    def test_a_damaged_save_is_an_error(self, tmp_path: Path) -> None:
        """Loading a truncated file raises FormatError and never returns wrong data."""
        if not self.one_file:
            pytest.skip("a save of this format is not one file")
        path = tmp_path / ("x" + self.suffix)
        save(self.collections()["nested"], path, format=self.serializer().name)
        content = path.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:size])
            with pytest.raises(FormatError):
                load(path, format=self.serializer().name)
