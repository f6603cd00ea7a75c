"""Comparisons of collections whose entries are values: elementwise, with a clear error for another structure."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch

from td_core import BatchSizeError, StructureError, TensorDict, lazy_stack
from td_tensorclass import MetaData, NonTensorData, NonTensorStack

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


COLUMN = ["a", "c", None]
#: Columns, with the values that they hold for each element.
COLUMNS = {
    "stack": (lambda: TensorDict({"v": COLUMN}, [3]).get("v"), COLUMN),
    "one value": (lambda: TensorDict({"v": "b"}, [3]).get("v"), ["b"] * 3),
    "metadata": (lambda: MetaData("b", batch_size=[3]), ["b"] * 3),
    "two dims": (lambda: NonTensorStack.from_list([["a"], ["b"]]), [["a"], ["b"]]),
    "no dims": (lambda: NonTensorData("b"), "b"),
    "part": (lambda: TensorDict({"v": ["b", *COLUMN]}, [4]).get("v")[1:], COLUMN),
    "lazy stack": (lambda: lazy_stack([TensorDict({"v": v}) for v in COLUMN]).get("v"), COLUMN),
    "numbers": (lambda: NonTensorStack(1, 2.0, True), [1, 2.0, True]),
    "lists": (lambda: NonTensorStack([1], [2, 3]), [[1], [2, 3]]),
}


def map_values(function, values, ndim):
    return [map_values(function, value, ndim - 1) for value in values] if ndim else function(values)


@pytest.mark.parametrize("name", ["eq", "ne", *ORDERS])
@pytest.mark.parametrize("value", ["b", None, 1, 2.0, b"b", ("b",), np.str_("b"), torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("column", COLUMNS)
def test_compare_column_with_one_value_compares_each(column, value, name):
    node, values = COLUMNS[column][0](), COLUMNS[column][1]
    plain = value.item() if isinstance(value, torch.Tensor) else value
    expected = map_values(lambda item: compare(name, item, plain), values, node.batch_dims)
    found = getattr(operator, name)(node, value)
    assert (found.dtype, found.shape, found.tolist()) == (torch.bool, node.batch_size, expected)
    mirrored = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(name, name)
    if not isinstance(value, (torch.Tensor, np.generic)):
        assert getattr(operator, mirrored)(value, node).tolist() == expected


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b", None],
        np.array(["a", "b", None], dtype=object),
        TensorDict({"v": ["a", "b", None]}, [3])["v"],
    ],
    ids=["list", "array", "linked list"],
)
def test_compare_column_with_list_compares_pairs(values):
    column = TensorDict({"v": COLUMN}, [3]).get("v")
    assert (column == values).tolist() == [True, False, True]
    assert (column != values).tolist() == [False, True, False]


@pytest.mark.parametrize("values", [["a"], [["a"], ["b"], ["c"]][:2], []])
def test_compare_column_with_list_of_other_length_raises(values):
    with pytest.raises(
        BatchSizeError, match="one value for each element of the batch, whose size is \\[3\\]"
    ):
        TensorDict({"v": COLUMN}, [3]).get("v") == values  # noqa: B015


def test_compare_column_with_non_tensor_data_compares_each_with_its_value():
    column = NonTensorStack([1], [2, 3])
    assert (column == NonTensorData([1], batch_size=[2])).tolist() == [True, False]


def test_compare_uneven_values_raises():
    node = lazy_stack([TensorDict({"v": "a"}, [n]) for n in (1, 2)]).get("v")
    if -1 in node.batch_size:
        with pytest.raises(BatchSizeError, match="batches of several sizes"):
            node == "a"  # noqa: B015


def test_mask_of_comparison_selects_rows():
    data = TensorDict({"x": torch.arange(3), "name": ["a", "b", "a"]}, [3])
    names = data.get("name")
    assert data[names == "a"]["x"].tolist() == [0, 2]
    assert data[(names == "a") & (data["x"] > 0)]["x"].tolist() == [2]
    data[names == "b"] = TensorDict({"x": torch.tensor([7]), "name": ["c"]}, [1])
    assert (data["x"].tolist(), list(data["name"])) == ([0, 7, 2], ["a", "c", "a"])


def test_compared_nodes_stay_hashable():
    node = NonTensorData("a")
    assert len({node, node, NonTensorData("a")}) == 2
