"""Public access to the registered kinds, their classes and their layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from td_core import PluginError, TensorDict, TensorDictParams, kinds, lazy_stack
from td_core._encode.node_kinds import KINDS
from td_core._tree.node import Core
from td_core.spi import Layout, NodeKind, Record, encode


class Own(TensorDict):
    """A subclass without a kind."""


def make_flat(value: float = 1.0) -> TensorDict:
    return TensorDict({"a": torch.full((2,), value)}, [2])


#: By name: a collection, the tag of its kind, and the keys of its record with the layout of "dict/1".
NODES: dict[str, tuple[Any, str, list[str]]] = {
    "dict": (make_flat, "TensorDict", ["a"]),
    "subclass": (lambda: Own({"a": torch.ones(2)}, [2]), "TensorDict", ["a"]),
    "lazy stack": (lambda: lazy_stack([make_flat(), make_flat()]), "LazyStackedTensorDict", ["0", "1"]),
    "params": (lambda: TensorDictParams(make_flat()), "TensorDictParams", ["params"]),
}


@pytest.mark.parametrize("name", NODES)
def test_of_and_record_of_return_registered_kind(name: str, dict_layout: str) -> None:
    make, tag, keys = NODES[name]
    node = make()
    kind = kinds.of(node)
    assert (kind.tag, kind) == (tag, kinds.of(type(node)))
    assert kinds.find(tag) is kind
    assert kind in list(kinds.list_kinds())
    record = kinds.record_of(node, dict_layout)
    assert [*record.entries, *record.members] == keys
    again = kind.layouts.get(dict_layout, kind).unflatten(record)
    assert isinstance(again, kind.type)


def test_record_of_uses_layout_of_format(dict_layout: str) -> None:
    node = make_flat().lock_()
    assert kinds.record_of(node).meta == {"batch_size": [2], "locked": True}
    assert "is_locked" in kinds.record_of(node, dict_layout).meta
    assert kinds.record_of(node, "no such format").meta == kinds.record_of(node).meta


def test_lookups_of_unknown_names_return_none(dict_layout: str) -> None:
    assert kinds.find("no such tag") is None
    assert kinds.named("TensorDict", "no such format") is None
    assert kinds.named("no such name", dict_layout) is None
    assert kinds.find_class(kinds.of(TensorDict), "no.module:Class") is None
    with pytest.raises(PluginError, match="has no node kind"):
        kinds.of(Core)


@pytest.mark.parametrize("name_of", [kinds.name_class, str])
def test_find_class_by_name_in_files(name_of: Any, dict_layout: str) -> None:
    assert kinds.find_class(kinds.of(TensorDict), name_of(Own)) is Own
    assert kinds.named("Dict", dict_layout).type is TensorDict  # type: ignore[union-attr]


def test_add_layout_to_class_without_kind_raises() -> None:
    with pytest.raises(PluginError, match="has no node kind"):
        kinds.add_layout(Core, "dict/1", Layout(str, str))


class Again(TensorDict):
    """A class that is registered, and registered again."""


def test_register_replaces_kind_of_class() -> None:
    kind = NodeKind("test.Again", Again, lambda node: Record({}), lambda record: Again(), with_class=True)
    try:
        for made in (kind, replace(kind)):
            kinds.register(made)
            assert kinds.find("test.Again") is kinds.of(Again) is made
        assert kinds.record_of(Again({"a": 1})).entries == {}
        with pytest.raises(PluginError, match="^the tag of a node kind is a string; got None$"):
            kinds.register(replace(kind, tag=None))
    finally:
        KINDS.remove("test.Again")


def test_store_as_flattens_class_as_other_kind() -> None:
    opened = type("Opened", (Own,), {"__module__": __name__})
    kinds.store_as(opened, "TensorDict")
    kind = kinds.of(opened)
    assert (kind.tag, kind.type) == ("TensorDict", opened)
    assert "class" not in encode(opened({"a": 1})).nodes[0]
    assert "class" in encode(Own({"a": 1})).nodes[0]
    assert torch.utils._pytree.tree_map(torch.neg, opened({"a": torch.ones(())}))["a"] == -1


def test_list_kinds_is_copy_of_registry() -> None:
    tags = [kind.tag for kind in kinds.list_kinds()]
    assert {"TensorDict", "LazyStackedTensorDict", "TensorDictParams"} < set(tags)
    assert [kinds.find(tag).tag for tag in tags] == tags
