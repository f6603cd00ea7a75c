"""Public access to kinds, and key paths of encoded trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    PluginError,
    TensorDict,
    TensorDictParams,
    encode,
    kinds,
    lazy_stack,
)
from td_core._tree.node import Core


class Own(TensorDict):
    """A subclass without a kind."""


def make_flat(value: float = 1.0) -> TensorDict:
    return TensorDict({"a": torch.full((2,), value)}, [2])


#: By name: a collection, the tag of its kind, and the keys of its record with the layout of "consolidated/1".
NODES: dict[str, tuple[Any, str, list[str]]] = {
    "dict": (make_flat, "TensorDict", ["a"]),
    "subclass": (lambda: Own({"a": torch.ones(2)}, [2]), "TensorDict", ["a"]),
    "lazy stack": (lambda: lazy_stack([make_flat(), make_flat()]), "LazyStackedTensorDict", ["0", "1"]),
    "params": (lambda: TensorDictParams(make_flat()), "TensorDictParams", ["params"]),
}


@pytest.mark.parametrize("name", NODES)
def test_of_and_record_of_return_registered_kind(name: str) -> None:
    make, tag, keys = NODES[name]
    node = make()
    kind = kinds.of(node)
    assert (kind.tag, kind) == (tag, kinds.of(type(node)))
    assert kinds.find(tag) is kind
    assert kind in list(kinds.list_kinds())
    record = kinds.record_of(node, "consolidated/1")
    assert [*record.entries, *record.members] == keys
    again = kind.layouts.get("consolidated/1", kind).unflatten(record)
    assert isinstance(again, kind.type)


def test_record_of_uses_layout_of_format() -> None:
    node = make_flat().lock_()
    assert kinds.record_of(node).meta == {"batch_size": [2], "locked": True}
    assert "is_locked" in kinds.record_of(node, "consolidated/1").meta
    assert kinds.record_of(node, "no such format").meta == kinds.record_of(node).meta


def test_lookups_of_unknown_names_return_none() -> None:
    assert kinds.find("no such tag") is None
    assert kinds.named("TensorDict", "no such format") is None
    assert kinds.named("no such name", "consolidated/1") is None
    assert kinds.find_class(kinds.of(TensorDict), "no.module:Class") is None
    with pytest.raises(PluginError, match="has no node kind"):
        kinds.of(Core)


@pytest.mark.parametrize("name_of", [kinds.name_class, str])
def test_find_class_by_name_in_files(name_of: Any) -> None:
    assert kinds.find_class(kinds.of(TensorDict), name_of(Own)) is Own
    assert kinds.named("LazyStackedTensorDict", "consolidated/1").type is LazyStackedTensorDict  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tree", "nodes", "leaves"),
    [
        (
            lambda: TensorDict({"a": 1, "n": {"b": 2, "m": {}}}),
            {(), ("n",), ("n", "m")},
            {("a",), ("n", "b")},
        ),
        (
            lambda: TensorDict({"s": lazy_stack([make_flat(), make_flat()])}),
            {(), ("s",), ("s", "0"), ("s", "1")},
            {("s", "0", "a"), ("s", "1", "a")},
        ),
        (lambda: TensorDictParams(make_flat()), {(), ("params",)}, {("params", "a")}),
        (lambda: TensorDict(), {()}, set()),
    ],
)
def test_encoded_paths_match_positions(tree: Any, nodes: set[Any], leaves: set[Any]) -> None:
    encoded = encode(tree())
    assert set(encoded.node_paths()) == nodes
    assert set(encoded.leaf_paths()) == leaves
    assert (len(encoded.node_paths()), len(encoded.leaf_paths())) == (len(encoded.nodes), len(encoded.leaves))


def test_encoded_paths_name_leaf_at_position() -> None:
    leaves = {f"k{i}": torch.tensor(i) for i in range(5)}
    encoded = encode(TensorDict({"x": leaves, **leaves}))
    for path, leaf in zip(encoded.leaf_paths(), encoded.leaves, strict=True):
        assert path[-1] == f"k{leaf.item()}"
    assert len(set(encoded.leaf_paths())) == 10


def test_encoded_paths_of_shared_node_are_first_ones() -> None:
    node = make_flat()
    encoded = encode(TensorDict({"x": node, "y": node}), shared=True)
    assert encoded.node_paths() == [(), ("x",)]
    assert encoded.leaf_paths() == [("x", "a")]
