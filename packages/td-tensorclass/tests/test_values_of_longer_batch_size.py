"""Values of collections whose batch size starts with that of the other operand: each row has its own value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_tensorclass import NonTensorData, NonTensorStack, UnbatchedTensor, tensorclass

KEEP = torch.tensor([True, False])


@tensorclass
class Step:
    """A leaf with two batch dims, and a value."""

    count: torch.Tensor
    name: Any = None


def make_pair() -> tuple[TensorDict, TensorDict]:
    """Build collections of batch size [2] and [2, 2], each with one value, and one for each element."""
    first = TensorDict({"count": torch.zeros(2, 2, 1)}, batch_size=[2])
    second = TensorDict({"count": torch.ones(2, 2, 1)}, batch_size=[2, 2])
    first.update({"row": NonTensorStack("a", "b"), "run": NonTensorData("x", batch_size=[2])})
    second.update(
        {"row": NonTensorStack(["p", "q"], ["r", "s"]), "run": NonTensorData("y", batch_size=[2, 2])}
    )
    return first, second


@pytest.mark.parametrize("lazy", [False, True])
def test_where_values_of_longer_batch_size_takes_rows(lazy: bool) -> None:
    first, second = make_pair()
    if lazy:
        first, second = lazy_stack(first.unbind(0)), lazy_stack(second.unbind(1), 1)
    result = first.where(KEEP, second)
    assert result.batch_size == (2, 2) and result["count"].flatten().tolist() == [0, 0, 1, 1]
    assert result.get("row").tolist() == [["a", "a"], ["r", "s"]]
    assert result.get("run").tolist() == [["x", "x"], ["y", "y"]]
    back = second.where(KEEP, first)
    assert back.get("row").tolist() == [["p", "q"], ["b", "b"]]
    assert back.get("run").tolist() == [["y", "y"], ["x", "x"]]


def test_compare_values_of_longer_batch_size_repeats_rows() -> None:
    first, second = make_pair()
    second["row"] = NonTensorStack(["a", "q"], ["b", "b"])
    assert (first == second)["row"].tolist() == [[True, False], [True, True]]
    assert (second != first)["row"].tolist() == [[False, True], [False, False]]
    assert (first + second).get("row").tolist() == [["a", "a"], ["b", "b"]]


def test_where_tensorclass_of_longer_batch_size_takes_rows() -> None:
    first = Step(torch.zeros(2, 2, 1), "a", batch_size=[2])
    second = Step(torch.ones(2, 2, 1), "b", batch_size=[2, 2])
    result = first.where(KEEP, second)
    assert type(result) is Step and result.batch_size == (2, 2)
    assert result.count.flatten().tolist() == [0, 0, 1, 1]
    assert result.get("name").tolist() == [["a", "a"], ["b", "b"]]


def test_where_tensorclass_of_uneven_stack_takes_whole_entries() -> None:
    stack = lazy_stack([Step(torch.ones(size), "a") for size in (3, 4)])
    result = stack.where(KEEP, lazy_stack([Step(torch.zeros(size), "b") for size in (1, 2)]))
    assert [(type(item), item.count.tolist(), item.name) for item in result.unbind(0)] == [
        (Step, [1.0] * 3, "a"),
        (Step, [0.0] * 2, "b"),
    ]


def test_where_unbatched_tensor_of_longer_batch_size_keeps_tensor() -> None:
    shared = UnbatchedTensor(torch.arange(5))
    first, second = make_pair()
    result = first.set("u", shared).where(KEEP, second.set("u", shared))
    assert result.batch_size == (2, 2) and result["u"].tolist() == [0, 1, 2, 3, 4]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda data: data.to_dict(),
    "from_dict": lambda data: TensorDict.from_dict(data.to_dict()),
    "from_namedtuple": lambda data: TensorDict.from_namedtuple(data.to_namedtuple()),
    "from_namedtuple with a batch size": lambda data: TensorDict.from_namedtuple(
        data.to_namedtuple(), batch_size=data.batch_size
    ),
}


@pytest.mark.parametrize("stack", [None, torch.stack, lazy_stack])
@pytest.mark.parametrize("batch_size", [[], [3], [3, 2]], ids=str)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_of_values_of_longer_batch_size_equals_them(
    name: str, batch_size: Any, stack: Any
) -> None:
    rows = NonTensorStack(*[NonTensorStack(text, text + "2") for text in "abc"])
    below = TensorDict({"v": rows, "x": torch.ones(3, 2)}, [3, 2])
    data: Any = TensorDict({"v": rows, "x": torch.zeros(3, 2), "one": "s", "n": below}, batch_size)
    other = TensorDict({**data, "v": NonTensorStack(*[NonTensorStack("a", "z")] * 3)}, batch_size)
    if stack is not None:
        data, other = stack([data, data.clone()]), stack([data, other])
    assert (data == CONVERSIONS[name](data)).all()
    assert not (data == CONVERSIONS[name](other)).all()
    if name != "dict":
        assert (CONVERSIONS[name](data) == data).all()
