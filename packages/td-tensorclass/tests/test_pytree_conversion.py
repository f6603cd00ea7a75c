"""from_pytree and to_pytree, which store the classes of containers as non-tensor data."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from td_core import TensorDict, from_any, from_struct_array
from td_tensorclass import NonTensorStack, TensorClass

Pair = namedtuple("Pair", "a b")

TREES: list[Any] = [
    {"a": torch.zeros(3), "b": [torch.ones(3), (torch.zeros(3),)]},
    [torch.zeros(3)],
    (torch.zeros(3), [torch.ones(3)], {}),
    Pair(torch.zeros(3), [torch.ones(3)]),
    {1: torch.zeros(3), ("x", 2): {"y": torch.ones(3)}},
    OrderedDict(b=torch.zeros(3), a=torch.ones(3)),
    {"a": [], "b": ()},
]


def assert_same(tree: Any, other: Any) -> None:
    leaves, spec = torch_pytree.tree_flatten(tree)
    others, other_spec = torch_pytree.tree_flatten(other)
    assert spec == other_spec
    for leaf, other_leaf in zip(leaves, others, strict=True):
        assert torch.equal(leaf, other_leaf)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_pytree_round_trip_returns_equal_tree(tree: Any) -> None:
    td = TensorDict.from_pytree(tree)
    assert_same(td.to_pytree(), tree)


@pytest.mark.parametrize("tree", TREES[:4], ids=str)
def test_to_pytree_after_operations_equals_tree_map(tree: Any) -> None:
    td = TensorDict.from_pytree(tree, auto_batch_size=True).apply(lambda leaf: leaf + 1)
    assert_same(td[:2].to_pytree(), torch_pytree.tree_map(lambda leaf: (leaf + 1)[:2], tree))


def test_from_pytree_keeps_collections_as_leaves() -> None:
    inner = TensorDict({"x": 1})
    assert TensorDict.from_pytree({"a": inner}).to_pytree()["a"] is inner


def test_from_struct_array_strings_round_trip() -> None:
    array = np.array([(1, "ab"), (2, "c")], dtype=[("x", "i4"), ("s", "U2")])
    td = from_struct_array(array)
    assert td["s"] == ["ab", "c"]
    assert td.to_struct_array().dtype == array.dtype
    assert td.to_struct_array().tolist() == array.tolist()


def test_from_any_list_of_strings_becomes_non_tensor() -> None:
    assert from_any(["a", "b"]).tolist() == ["a", "b"]
    assert TensorDict.from_dict({"a": [{"b": 1}, {"b": 2}]})["a"] == [{"b": 1}, {"b": 2}]


def test_to_dict_returns_non_tensor_values() -> None:
    td = TensorDict({"a": 1, "s": "x", "n": {"m": None}})
    assert td.to_dict() == {"a": torch.tensor(1), "s": "x", "n": {"m": None}}
    assert td.to_dict(retain_none=False) == {"a": torch.tensor(1), "s": "x", "n": {}}
    assert td.to_tensordict()["s"] == "x"
    assert td.to_namedtuple().s == "x"


def test_to_tensordict_retain_none_keeps_none_fields() -> None:
    class Point(TensorClass):
        x: torch.Tensor
        y: torch.Tensor = None

    points = Point(torch.zeros(2), batch_size=[2])
    for source in (points, TensorDict({"p": points}, [2])["p"], Point.lazy_stack([points])):
        assert "y" not in source.to_tensordict().keys()
        assert "y" not in source.to_tensordict(retain_none=False).keys()
        copy = source.to_tensordict(retain_none=True)
        assert copy["y"] is None or set(copy["y"]) == {None}
        assert copy.get("y").batch_size == source.batch_size
    # In a TensorDict, None is stored like any other value.
    assert TensorDict({"a": None}).to_tensordict(retain_none=False)["a"] is None


def test_pytree_defaultdict_round_trips() -> None:
    tree = defaultdict(list, a=torch.ones(1), b=defaultdict(int, c=torch.zeros(1)))
    back = TensorDict.from_pytree(tree).to_pytree()
    assert type(back) is type(back["b"]) is defaultdict
    assert (back["a"], back["b"]["c"]) == (tree["a"], tree["b"]["c"])


def test_from_struct_array_objects_round_trip() -> None:
    td = TensorDict({"a": torch.arange(2), "v": NonTensorStack({"k": 1}, {"k": 2})}, [2])
    assert td.to_struct_array().tolist() == [(0, {"k": 1}), (1, {"k": 2})]


def step_optimizer(cls: Any, **options: Any) -> Any:
    net = torch.nn.Linear(2, 2)
    optimizer = cls(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: step_optimizer(torch.optim.SGD, momentum=0.9),
    "adam": lambda: step_optimizer(torch.optim.Adam, betas=(0.8, 0.9)),
    "adamw": lambda: step_optimizer(torch.optim.AdamW, amsgrad=True),
    "rmsprop": lambda: step_optimizer(torch.optim.RMSprop),
    "adagrad": lambda: step_optimizer(torch.optim.Adagrad),
}


def assert_same_state(back: Any, state: Any) -> None:
    assert_same(back["state"], state["state"])
    assert back["param_groups"] == state["param_groups"]
    assert type(back["param_groups"][0]["lr"]) is float


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_optimizer_round_trips(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    state = optimizer.state_dict()
    as_pytree, as_dict = TensorDict.from_pytree(state), TensorDict.from_dict({"o": state, "step": 3})
    for back in (as_pytree.to_pytree(), as_dict.to_dict()["o"], (as_dict * 1).to_dict()["o"]):
        assert_same_state(back, state)
        optimizer.load_state_dict(back)


@pytest.mark.parametrize(
    "leaf", [True, 3, 0.1, 2j, "text", b"bytes", None], ids=lambda leaf: type(leaf).__name__
)
def test_pytree_values_round_trip_exactly(leaf: Any) -> None:
    back = TensorDict.from_pytree({"a": [leaf], "t": torch.ones(1)}).to_pytree()
    assert (back["a"], type(back["a"][0])) == ([leaf], type(leaf))


@pytest.mark.parametrize("key", [0, -1, 1.5, True, None, b"x", frozenset({1})], ids=repr)
def test_from_dict_other_keys_round_trip(key: Any) -> None:
    source = {"a": {key: {"b": {key: torch.ones(2)}}, "s": torch.zeros(1)}, "last": torch.ones(1)}
    back = TensorDict.from_dict(source).to_dict()
    assert list(back) == ["a", "last"] and list(back["a"]) == [key, "s"]
    assert back["a"][key]["b"][key] is source["a"][key]["b"][key]
    assert TensorDict.from_dict({key: torch.ones(2)}).to_dict()[key].tolist() == [1.0, 1.0]
