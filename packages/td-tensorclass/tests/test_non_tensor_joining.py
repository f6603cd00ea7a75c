"""Stack, concatenate, pad and combine collections with values that are not tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    lazy_stack,
    pad_sequence,
    unpad_sequence,
)
from td_core.errors import BatchSizeError, StructureError
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    set_capture_non_tensor_stack,
)

VALUE_AND_TENSOR: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "sub": lambda a, b: a.sub(b),
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "addcmul": lambda a, b: a.addcmul(b, b),
    "maximum": lambda a, b: a.maximum(b),
    "in place": lambda a, b: a.mul_(b),
    ">": lambda a, b: a > b,
}


@pytest.mark.parametrize("operation", VALUE_AND_TENSOR.values(), ids=VALUE_AND_TENSOR)
@pytest.mark.parametrize("lazy", [False, True])
def test_arithmetic_non_tensor_in_one_operand_is_ignored(operation: Any, lazy: bool) -> None:
    def make(**values: Any) -> Any:
        members = [
            TensorDict({"n": TensorDict({"x": torch.ones(2) + i, **values}, [2])}, [2]) for i in range(2)
        ]
        return LazyStackedTensorDict(*members) if lazy else torch.stack(members)

    with_value, without, another = make(s="q"), make(), make(t="r")
    for pair in ((with_value, without), (without, with_value), (with_value, another)):
        first, second = pair[0].clone(), pair[1]
        wanted = operation(make(), make())["n", "x"]
        keys = list(first["n"].keys())
        result = operation(first, second)
        assert result["n", "x"].equal(wanted)
        assert list(result["n"].keys()) == keys
    with pytest.raises(StructureError, match="missing keys"):
        operation(make(), TensorDict({"n": TensorDict({"y": torch.ones(2, 2)}, [2, 2])}, [2, 2]))


def test_eq_non_tensor_in_one_operand_raises() -> None:
    first, second = TensorDict({"x": 1, "s": "q"}), TensorDict({"x": 1})
    for a, b in ((first, second), (second, first)):
        with pytest.raises(StructureError, match="keys"):
            a.__eq__(b)


def test_stack_non_tensor_data_returns_non_tensor_stack() -> None:
    items = [TensorDict({"a": "x"}), TensorDict({"a": "x"})]
    for stacked in (torch.stack(items), LazyStackedTensorDict(*items)):
        assert stacked["a"] == ["x", "x"]
        assert type(stacked.get("a")) is NonTensorStack
    with set_capture_non_tensor_stack(True):
        assert torch.stack(items)["a"] == "x"
        assert torch.stack([items[0], TensorDict({"a": "y"})])["a"] == ["x", "y"]


def test_cat_equal_non_tensor_data_keeps_one_value() -> None:
    def td(value: Any, n: int) -> TensorDict:
        return TensorDict({"a": value}, batch_size=[n])

    assert torch.cat([td("x", 2), td("x", 1)])["a"] == "x"
    assert torch.cat([td("x", 2), td("y", 1)])["a"] == ["x", "x", "y"]
    assert torch.cat([td("1", 2), td(b"1", 1)])["a"] == ["1", "1", b"1"]
    assert torch.cat([td("x", 2), td(NonTensorStack("p", "q"), 2)])["a"] == ["x", "x", "p", "q"]


def test_capture_stack_equal_numpy_scalars_keeps_one() -> None:
    values = [np.float64(1.5), np.int64(3), np.datetime64("2020-01-01"), np.str_("a")]
    for value in values:
        twice = [TensorDict({"k": NonTensorData(type(value)(value)), "x": torch.ones(1)}) for _ in range(2)]
        assert torch.utils._pytree.tree_map(torch.add, *twice)["x"].item() == 2
        with set_capture_non_tensor_stack(True):
            assert type(torch.stack(twice).get("k")) is NonTensorData


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value], lambda value: {"k": (value,)}])
def test_cat_nan_non_tensor_data_keeps_one_value(wrap: Any) -> None:
    parts = [TensorDict({"v": NonTensorData(wrap(float("nan")), batch_size=[2])}, [2]) for _ in range(2)]
    assert type(torch.cat(parts).get("v")) is NonTensorData


def test_filter_non_tensor_data_of_some_members_removes_it() -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": 1, "s": "x"}), TensorDict({"a": 1}))
    assert [list(member.keys()) for member in stack.filter_non_tensor_data().tensordicts] == [["a"], ["a"]]


@pytest.mark.parametrize(
    "masks", [lambda r: None, lambda r: r["masks"].select("x"), lambda r: r["masks", "x"]]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_sequence_pads_non_tensor_with_none(side: str, masks: Callable[[Any], Any]) -> None:
    def item(n: int) -> TensorDict:
        names = list("abc"[:n])
        deep = {"t": names, "z": torch.arange(float(n))}
        return TensorDict({"x": torch.ones(n, 2), "v": names, "n": {"s": names, "deep": deep}}, [n])

    items = [item(n) for n in (1, 3)]
    padded = pad_sequence(items, return_mask=True, padding_side=side)
    short = ["a", None, None] if side == "right" else [None, None, "a"]
    assert padded["n", "s"] == padded["v"] == [short, ["a", "b", "c"]]
    given = masks(padded)
    back = unpad_sequence(padded if given is None else padded.exclude("masks"), given)
    for found, wanted in zip(back.tensordicts, items, strict=True):
        assert found.batch_size == found["n"].batch_size == found["n", "deep"].batch_size == wanted.batch_size
        assert found["v"] == found["n", "s"] == found["n", "deep", "t"] == wanted["v"]
        assert torch.equal(found["n", "deep", "z"], wanted["n", "deep", "z"])


@pytest.mark.parametrize(
    "join",
    [
        lambda x, y: torch.stack([x, y]),
        lambda x, y: lazy_stack([x, y]).contiguous(),
        lambda x, y: torch.cat([x.unsqueeze(0), y.unsqueeze(0)]),
    ],
)
def test_stack_uneven_non_tensor_stacks_raises(join: Any) -> None:
    first, second = TensorDict({"s": ["a", "b"]}), TensorDict({"s": ["d", "e", "f"]})
    with pytest.raises(
        StructureError, match=r"item 0 has values for a batch of \[(1, )?2\] and item 1 for one of"
    ):
        join(first, second)
    nodes = lazy_stack([first, second]).get("s", as_list=True)
    assert [node.tolist() for node in nodes] == [["a", "b"], ["d", "e", "f"]]


def make_conversations(batched: bool) -> Any:
    turns = (["hi", "ho", "bye"], ["yes"], [])
    return lazy_stack(
        [TensorDict({"n": {"s": NonTensorStack.from_list(each)}}, [len(each)][:batched]) for each in turns]
    )


READS: list[Callable[[Any], Any]] = [
    lambda td: td["n", "s"],
    lambda td: td.get(("n", "s")).tolist(),
    lambda td: td.to_dict()["n"]["s"],
    lambda td: td.clone()["n"]["s"],
    lambda td: td.flatten_keys(".")["n.s"],
    lambda td: td.to_tensordict()["n", "s"],
    lambda td: td.densify()["n", "s"],
    lambda td: (td + 1)["n", "s"],
    lambda td: td[[2, 0, 1]][[1, 2, 0]]["n", "s"],
    lambda td: lazy_stack([td, td])["n", "s"][1],
    lambda td: pickle.loads(pickle.dumps(td))["n", "s"],
    lambda td: [td[i]["n", "s"] for i in range(3)],
]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("read", READS)
def test_lazy_stack_get_uneven_non_tensor_returns_lists(read: Any, batched: bool) -> None:
    assert read(make_conversations(batched)) == [["hi", "ho", "bye"], ["yes"], []]


@pytest.mark.parametrize("batched", [False, True])
def test_lazy_stack_write_list_sets_uneven_member(batched: bool) -> None:
    td = make_conversations(batched)
    td["n", "s"][0] = ["a", "b", "c"]
    td.get(("n", "s"))[1] = NonTensorData("z")
    assert [td[i]["n", "s"] for i in range(3)] == td["n", "s"] == [["a", "b", "c"], ["z"], []]
    with pytest.raises(
        StructureError, match=r"cannot write key 's' in place: it has shape \[3\] there, the value \[2\]"
    ):
        td["n", "s"][0] = ["p", "q"]
    assert td["n", "s"] == [["a", "b", "c"], ["z"], []]


def test_non_tensor_stack_of_uneven_stacks_holds_lists() -> None:
    parts = [NonTensorStack.from_list([[1, 2], [3, 4]]), NonTensorStack.from_list([[5], [6]])]
    for made in (NonTensorStack(*parts), lazy_stack(parts)):
        assert made.batch_size == (2, 2)
        assert made.tolist() == [[[1, 2], [3, 4]], [[5], [6]]]
    assert NonTensorStack(*parts, stack_dim=1).tolist() == [[[1, 2], [5]], [[3, 4], [6]]]
    with pytest.raises(BatchSizeError, match=r"item 0 has batch size \[2, 2\], item 1 has \[2, 1\]"):
        NonTensorStack(*parts, stack_dim=2)


def test_to_padded_tensor_pads_non_tensor_with_none() -> None:
    padded = make_conversations(True).to_padded_tensor()
    assert padded.batch_size == padded["n"].batch_size == padded.get(("n", "s")).batch_size == (3, 3)
    assert padded["n", "s"] == [["hi", "ho", "bye"], ["yes", None, None], [None, None, None]]


@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("value", [NonTensorData, MetaData])
def test_where_scalar_condition_keeps_one_non_tensor(value: Any, condition: bool) -> None:
    first, second = TensorDict({"n": {"k": value("a")}}), TensorDict({"n": {"k": value("b")}})
    chosen = first.where(torch.tensor(condition), second)
    assert isinstance(chosen.get(("n", "k")), NonTensorData)
    assert chosen["n", "k"] == ("a" if condition else "b")


@pytest.mark.parametrize("capture", [False, True])
def test_lazy_stack_get_same_metadata_returns_one_value(capture: bool) -> None:
    thing = NonTensorData("a") if capture else MetaData("a")
    lazy = lazy_stack([TensorDict({"k": thing}, [n]) for n in (2, 3)])
    with set_capture_non_tensor_stack(capture):
        assert (lazy["k"], lazy.get("k").batch_size) == ("a", (2, -1))


def test_stack_same_metadata_uneven_batches_raises() -> None:
    items = [TensorDict({"k": MetaData("a", batch_size=[1, n])}, [1]) for n in (2, 3)]
    for join in (torch.stack, torch.cat):
        with pytest.raises(
            StructureError, match=r"key 'k': item 0 has values for a batch of \[1, 2\] and item 1"
        ):
            join(items)
