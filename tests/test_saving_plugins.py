"""Saves of what plugins add: values with a serializer and nodes of a registered kind."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.errors import CodecError, MissingPluginError, PluginError
from td_core.plugins.manager import installed
from td_core.spi import Layout, LeafSerializer, NodeKind, Record, hookimpl

td_memmap = pytest.importorskip("td_memmap")

NonTensorData = pytest.importorskip("td_tensorclass").NonTensorData


class Colour(Enum):
    RED = 1


class Colours:
    @hookimpl
    def td_serializers(self) -> Any:
        return [LeafSerializer("test.Colour", Colour, lambda colour: colour.name, Colour.__getitem__)]


def test_load_value_of_missing_plugin_names_plugin(place: Path) -> None:
    with installed(Colours(), id="colours", distribution="td-colours", version="1.2"):
        TensorDict({"a": torch.ones(1), "c": NonTensorData(Colour.RED)}).memmap(place)
        assert TensorDict.load_memmap(place)["c"] is Colour.RED
    with pytest.raises(
        MissingPluginError, match="'td-colours' 1.2, .*: install it from where its authors publish it"
    ):
        TensorDict.load_memmap(place)
    assert list(TensorDict.load_memmap(place, strict=False).keys()) == ["a"]


class Masked(TensorDict):
    """A kind of a plugin whose record has metadata, entries, members and values."""

    __slots__ = ("note", "spare")

    def _map(self, fn: Any) -> Masked:
        node: Masked = super()._map(fn)
        node.spare, node.note = self.spare._map(fn), self.note
        return node

    def _shallow_copy(self) -> Masked:
        node: Masked = super()._shallow_copy()
        node.spare, node.note = self.spare._shallow_copy(), self.note
        return node


def _flatten_masked(node: Any) -> Record:
    return Record(
        {"batch_size": list(node.batch_size)}, node._children(), {"spare": node.spare}, {"note": node.note}
    )


def _unflatten_masked(record: Record) -> Masked:
    node = Masked(dict(record.entries), batch_size=record.meta["batch_size"])
    node.spare, node.note = record.members["spare"], record.values["note"]
    return node


class Masks:
    @hookimpl
    def td_node_kinds(self) -> Any:
        return [NodeKind("test.Masked", Masked, _flatten_masked, _unflatten_masked)]


def test_load_kind_of_missing_plugin_names_plugin(place: Path) -> None:
    node = Masked({"shape": torch.arange(3), "n": {"x": torch.ones(3)}}, batch_size=[3])
    node.spare, node.note = TensorDict({"y": torch.zeros(2)}), (1, b"x")
    with installed(Masks(), id="masks", distribution="td-masks", version="1.2"):
        td = TensorDict({"a": torch.ones(3), "m": node}, batch_size=[3])
        for mapped in (td.memmap(), td.memmap_like(), td.memmap().memmap()):
            assert mapped["m"].spare.keys() == {"y"}
        td.memmap(place)
        loaded = TensorDict.load_memmap(place)["m"]
        assert type(loaded) is Masked
        assert loaded.batch_size == (3,)
        assert loaded["shape"].tolist() == [0, 1, 2]
        assert loaded["n", "x"].tolist() == [1, 1, 1]
        assert loaded.spare["y"].tolist() == [0, 0]
        assert loaded.note == (1, b"x")
        assert TensorDict.load_memmap(place, device="meta")["m"].spare["y"].is_meta
    with pytest.raises(
        MissingPluginError,
        match="key 'm', of the kind 'test.Masked', was written by 'td-masks' 1.2, .*: install it from where",
    ):
        TensorDict.load_memmap(place)
    assert list(TensorDict.load_memmap(place, strict=False).keys()) == ["a"]
    assert "m: test.Masked [3], 44 bytes, by td-masks==1.2" in str(td_memmap.inspect(place))


class Faulty(TensorDict):
    """A kind of a plugin with a faulty flatten function."""


def make_faulty_plugin(flatten: Any, *formats: str) -> Any:
    def unflatten(record: Record) -> Any:
        return Faulty(dict(record.entries))

    layouts = {name: Layout(flatten, unflatten, ("Faulty",)) for name in formats}
    kinds = [NodeKind("test.Faulty", Faulty, flatten, unflatten, layouts)]
    return type("Plugin", (), {"td_node_kinds": hookimpl(lambda self: kinds)})()


@pytest.mark.parametrize("formats", [(), ("memmap/1", "consolidated/1")])
@pytest.mark.parametrize("record", [None, ({}, {})])
def test_save_kind_without_record_raises_with_key(
    record: Any, formats: tuple[str, ...], tmp_path: Path
) -> None:
    td = TensorDict({"n": {"x": Faulty({"a": 1})}})
    with installed(
        make_faulty_plugin(lambda node: record, *formats), distribution="td-faulty", version="1.5"
    ):
        for save in (td.memmap, td.memmap_like, td.memmap_, getattr(td, "consolidate", td.memmap)):
            for place in (None, tmp_path / "a"):
                with pytest.raises(
                    PluginError,
                    match=r"^key \('n', 'x'\): .*'test.Faulty', of td-faulty==1.5, gives",
                ):
                    save(place)  # type: ignore[operator]


def test_save_kind_with_non_json_header_raises_with_key(tmp_path: Path) -> None:
    pytest.importorskip("td_distributed")
    td = TensorDict({"a": 1, "n": {"x": Faulty({"a": 1})}})
    with installed(make_faulty_plugin(lambda node: Record({"u": {1}}, dict(node._children())))):
        whole = td.consolidate()
        for save in (
            lambda: td.memmap(tmp_path / "a"),
            lambda: td.consolidate(tmp_path / "b"),
            lambda: pickle.dumps(whole),
        ):
            with pytest.raises(
                CodecError, match=r"the metadata of key \('n', 'x'\).* set is not JSON serial"
            ):
                save()
