"""Comparisons of collections whose entries are values: elementwise, with a clear error for another structure."""

from __future__ import annotations

import operator

import pytest
import torch

from td_core import StructureError, TensorDict, lazy_stack
from td_tensorclass import NonTensorData, NonTensorStack

ORDERS = ["lt", "le", "gt", "ge"]
PAIRS = [
    (1, 2),
    (2, 1),
    (2, 2),
    ("a", "b"),
    (1.5, 1),
    (None, "s"),
    ("s", None),
    (None, None),
    (3, "s"),
    ({}, {}),
]


def compare(name, a, b):
    try:
        return bool(getattr(operator, name)(a, b))
    except TypeError:
        return False


def hold(value):
    return TensorDict({"n": {"v": NonTensorData(value)}, "t": torch.zeros(2)})


@pytest.mark.parametrize("name", [*ORDERS, "eq", "ne"])
@pytest.mark.parametrize(
    "kind",
    [lambda a, b: (hold(a), hold(b)), lambda a, b: (lazy_stack([hold(a)]), lazy_stack([hold(b)]))],
    ids=["dense", "lazy"],
)
def test_compare_values_gives_bools(name, kind):
    for a, b in PAIRS:
        left, right = kind(a, b)
        found = getattr(operator, name)(left, right)["n", "v"]
        assert found.dtype is torch.bool and found.all().item() is compare(name, a, b), (a, b)
        assert getattr(torch, name)(left, right)["n", "v"].all().item() is compare(name, a, b)


@pytest.mark.parametrize("name", ORDERS)
def test_compare_value_per_element_gives_bool_per_element(name):
    left, right = ["a", "c", None], ["b", "b", "b"]
    found = getattr(operator, name)(*[TensorDict({"s": NonTensorStack(*row)}, [3]) for row in (left, right)])
    assert found["s"].tolist() == [compare(name, a, b) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("name", ORDERS)
def test_compare_order_with_missing_value_ignores_it(name):
    data = TensorDict({"t": torch.zeros(2)})
    found = getattr(operator, name)(TensorDict({"t": torch.ones(2), "v": NonTensorData(3)}), data)
    assert found["t"].all().item() is compare(name, 1, 0)


NODES = {
    "empty node": lambda: TensorDict(batch_size=[2]),
    "node": lambda: TensorDict({"a": torch.zeros(2)}, [2]),
    "empty stack": lambda: lazy_stack([TensorDict(), TensorDict()]),
}
VALUES = {"value": lambda: NonTensorData(3, batch_size=[2]), "stack": lambda: NonTensorStack("a", "b")}


@pytest.mark.parametrize("name", ["eq", "ne", *ORDERS])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("node", NODES)
def test_compare_node_with_value_raises_naming_key(node, value, name):
    left, right = TensorDict({"n": NODES[node]()}, [2]), TensorDict({"n": VALUES[value]()}, [2])
    for pair in ((left, right), (right, left)):
        with pytest.raises(StructureError, match="the structures differ at key 'n'"):
            getattr(operator, name)(*pair)


def test_combine_lazy_stacks_without_leaves_gives_empty_stack():
    data = TensorDict({"n": lazy_stack([TensorDict(), TensorDict()])}, [2])
    assert (data + data).is_empty() and (data == data).is_empty()
