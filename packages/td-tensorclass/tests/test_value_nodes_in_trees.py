"""Value nodes below other nodes: walks, joins, comparisons and errors treat each kind as it declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, TensorDictParams, assert_close, lazy_stack
from td_core.errors import StructureError
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    UnbatchedTensor,
    is_leaf_nontensor,
)


class Point(TensorClass):
    x: Tensor


#: Values that are not plain tensors, and whether they count as leaves.
VALUES: dict[str, tuple[Callable[[], Any], bool]] = {
    "data": (lambda: NonTensorData("a"), False),
    "stack": (lambda: NonTensorStack("a", "b"), False),
    "metadata": (lambda: MetaData("a"), False),
    "unbatched": (lambda: UnbatchedTensor(torch.ones(3)), True),
}

#: Nodes with entries of batch size [2], in which a value may be stored under "v".
NODES: dict[str, Callable[[], Any]] = {
    "empty": lambda: TensorDict({}, [2]),
    "TensorDict": lambda: TensorDict({"x": torch.zeros(2)}, [2]),
    "lazy stack": lambda: lazy_stack([TensorDict({"x": torch.zeros(())}) for _ in range(2)]),
    "parameters": lambda: TensorDictParams(TensorDict({"x": torch.zeros(2)}, [2])),
    "tensorclass": lambda: Point(torch.zeros(2), batch_size=[2]),
}


def make_tree(value: Any) -> TensorDict:
    return TensorDict({"v": value, "n": {"v": value, "x": torch.zeros(2)}, "x": torch.zeros(2)}, [2])


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_list_leaves_lists_values_that_are_leaves(name: str, sort: bool) -> None:
    make, is_leaf = VALUES[name]
    td = make_tree(make())
    own, below = ["v"] * is_leaf, [("n", "v")] * is_leaf
    leaves = [*below, ("n", "x"), *own, "x"] if sort else [*own, *below, ("n", "x"), "x"]
    keys = td.keys(True, True, sort=sort)
    assert list(keys) == leaves
    assert len(keys) == len(leaves)
    items = list(td.items(True, True, sort=sort))
    assert [key for key, _ in items] == leaves
    assert [type(leaf) for leaf in td.values(True, True, sort=sort)] == [type(leaf) for _, leaf in items]
    assert all(isinstance(leaf, Tensor) for _, leaf in items)


@pytest.mark.parametrize("name", VALUES)
def test_list_entries_lists_every_value_once(name: str) -> None:
    td = make_tree(VALUES[name][0]())
    assert list(td.keys(True)) == ["v", "n", ("n", "v"), ("n", "x"), "x"]
    assert list(td.keys(True, True, is_leaf=is_leaf_nontensor)) == ["v", ("n", "v"), ("n", "x"), "x"]
    assert len(td.keys(True)) == 5
    assert len(td.keys()) == len(list(td.keys(False, True))) + 2 - VALUES[name][1] == 3
    assert ("v", "q") not in td.keys(True)
    assert td.get(("v", "q"), "missing") == td.get(("v", "q"), "missing", as_padded_tensor=True) == "missing"


@pytest.mark.parametrize("join", [torch.stack, torch.cat], ids=["stack", "cat"])
@pytest.mark.parametrize("other", NODES)
@pytest.mark.parametrize("name", VALUES)
def test_join_value_with_node_of_entries_raises(name: str, other: str, join: Any) -> None:
    first, second = (TensorDict({"k": value}, [2]) for value in (VALUES[name][0](), NODES[other]()))
    for items in ([first, second], [second, first]):
        with pytest.raises(StructureError, match="the structures differ at key 'k': a .* there, a .* here"):
            join(items)


@pytest.mark.parametrize("other", NODES)
@pytest.mark.parametrize("name", [name for name, (_, is_leaf) in VALUES.items() if not is_leaf])
def test_where_value_and_node_of_entries_raises(name: str, other: str) -> None:
    value, node = (TensorDict({"k": value}, [2]) for value in (VALUES[name][0](), NODES[other]()))
    for left, right in ((value, node), (node, value)):
        with pytest.raises(StructureError, match="the structures differ"):
            left.where(torch.tensor([True, False]), right)


@pytest.mark.parametrize("other", [*VALUES, *NODES, "tensor"])
@pytest.mark.parametrize("name", VALUES)
def test_assert_close_of_other_form_raises(name: str, other: str) -> None:
    values = {**{key: make for key, (make, _) in VALUES.items()}, **NODES, "tensor": lambda: torch.ones(2)}
    is_value = [key in VALUES and not VALUES[key][1] for key in (name, other)]
    left, right = (TensorDict({"k": values[key]()}, [2]) for key in (name, other))
    if name == other:
        assert assert_close(left, right)
        return
    message = "key 'k' differs" if all(is_value) else "the structures differ at key 'k'"
    if {name, other} == {"data", "metadata"}:  # equal values for the whole batch
        assert assert_close(left, right)
        assert assert_close(right, left)
        return
    for first, second in ((left, right), (right, left)):
        with pytest.raises(AssertionError, match=message):
            assert_close(first, second)


@pytest.mark.parametrize(
    "wrap", [lambda td: td, lambda td: TensorDict({"p": td}, [2])], ids=["root", "nested"]
)
@pytest.mark.parametrize("name", VALUES)
def test_write_value_in_place_reaches_it(name: str, wrap: Any) -> None:
    new = {"unbatched": UnbatchedTensor(torch.zeros(3)), "metadata": MetaData("b")}.get(
        name, NonTensorData("b")
    )
    expected = [0.0] * 3 if name == "unbatched" else ["b", "b"]
    for write in (
        lambda td: td["n"].set_("v", new),
        lambda td: td.update_(TensorDict({"n": TensorDict({"v": new}, [2])}, [2])),
        lambda td: td.set_at_(("n", "v"), new, ()),
    ):
        td = make_tree(VALUES[name][0]())
        locked = wrap(td).lock_()
        write(td)
        assert td.get(("n", "v")).tolist() == expected
        assert locked.is_locked


def list_devices(td: Any) -> list[torch.device | None]:
    """Return the device labels of a node and all nodes below it."""
    return [td.device, *(node.device for node in td.values(True) if not isinstance(node, Tensor))]


@pytest.mark.parametrize("node", ["TensorDict", "lazy stack", "parameters"])
@pytest.mark.parametrize("name", VALUES)
def test_auto_device_labels_values_as_their_level(name: str, node: str) -> None:
    td = NODES[node]()
    td["v"] = VALUES[name][0]()
    td["n"] = {"v": VALUES[name][0](), "p": Point(torch.zeros(2), batch_size=[2])}
    count = len(list_devices(td))
    assert list_devices(td.auto_device_()) == [torch.device("cpu")] * count
    assert list_devices(td.clear_device_()) == [None] * count


@pytest.mark.parametrize("name", [name for name, (_, is_leaf) in VALUES.items() if not is_leaf])
def test_auto_device_of_values_alone_is_none(name: str) -> None:
    td = TensorDict({"v": VALUES[name][0](), "x": torch.zeros(2, device="meta")}, [2])
    td["n"] = {"v": VALUES[name][0]()}
    td.auto_device_()
    assert (td.device, td.get("v").device) == (None, None)
    assert td["n"].device is td["n"].get("v").device is None


@pytest.mark.parametrize("name", VALUES)
def test_densify_keeps_values(name: str) -> None:
    value = VALUES[name][0]()
    lazy = lazy_stack([TensorDict({"x": torch.zeros(1 + i)}) for i in range(2)])
    td = TensorDict({"v": value, "l": lazy}, [2]).densify(torch.jagged)
    assert td["l", "x"].is_nested
    assert td.get("v").tolist() == make_tree(value).get("v").tolist()


def test_error_at_unbatched_leaf_names_its_key() -> None:
    td = TensorDict({"n": {"u": UnbatchedTensor(torch.tensor([True]))}, "x": torch.zeros(2)}, [2])
    with pytest.raises(Exception, match=r"\('n', 'u'\)"):
        td.neg()


@pytest.mark.parametrize("name", VALUES)
def test_set_below_value_raises(name: str) -> None:
    td = make_tree(VALUES[name][0]())
    for key in (("n", "v", "q"), ("n", "v", "data"), ("n", "v", "q", "r")):
        with pytest.raises(KeyError, match=r"key \('n', 'v'\) is not a collection, so key .* cannot be set"):
            td[key] = torch.zeros(2)
