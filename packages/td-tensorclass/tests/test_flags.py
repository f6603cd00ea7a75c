"""Logical operations and comparisons of values that are bools."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import StructureError
from td_tensorclass import MetaData, NonTensorData, NonTensorStack, tensorclass

LEAF = torch.tensor([True, False])
Operator = Callable[[Any, Any], Any]
LOGICAL: dict[str, Operator] = {"^": operator.xor, "&": operator.and_, "|": operator.or_}
COMPARISONS: dict[str, Operator] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
#: The forms of a flag: a value for the batch, one for each element, and a leaf; and the bools that they mean.
FLAGS: dict[str, tuple[Callable[[], Any], list[bool]]] = {
    "true": (lambda: NonTensorData(True, batch_size=[2]), [True, True]),
    "false": (lambda: NonTensorData(False, batch_size=[2]), [False, False]),
    "stack": (lambda: NonTensorStack(False, True), [False, True]),
    "leaf": (lambda: torch.tensor([True, False]), [True, False]),
}


@tensorclass
class Masks:
    """A mask and a flag."""

    mask: torch.Tensor
    done: Any = False


def make(done: Any, kind: str = "dense") -> Any:
    data = TensorDict({"mask": LEAF.clone(), "n": {"done": done}}, batch_size=[2])
    return lazy_stack(data.unbind(0)) if kind == "lazy" else data


def read(result: Any) -> list[bool]:
    assert isinstance(result["n", "done"], torch.Tensor)
    return result["n", "done"].tolist()


@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("symbol", [*LOGICAL, *COMPARISONS])
@pytest.mark.parametrize("first", FLAGS)
def test_combine_flags_of_two_collections_equals_torch(first: str, symbol: str, kind: str) -> None:
    operate = {**LOGICAL, **COMPARISONS}[symbol]
    for second, (right, others) in FLAGS.items():
        left, bools = FLAGS[first]
        for other_kind in ("dense", kind):
            result = operate(make(left(), kind), make(right(), other_kind))
            wanted = operate(torch.tensor(bools), torch.tensor(others))
            assert read(result) == wanted.tolist(), second
            assert torch.equal(result["mask"], operate(LEAF, LEAF))


@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("symbol", [*LOGICAL, *COMPARISONS])
@pytest.mark.parametrize("first", FLAGS)
def test_combine_flags_with_number_or_tensor_equals_torch(first: str, symbol: str, kind: str) -> None:
    operate = {**LOGICAL, **COMPARISONS}[symbol]
    left, bools = FLAGS[first]
    for other in (True, False, torch.tensor(True), torch.tensor([False, True]), torch.ones(3, 2).bool()):
        result = operate(make(left(), kind), other)
        assert result["n", "done"].tolist() == operate(torch.tensor(bools), other).tolist()
        assert (
            operate(other, make(left(), kind))["n", "done"].tolist()
            == operate(other, torch.tensor(bools)).tolist()
        )


@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("first", FLAGS)
def test_invert_flags_equals_torch(first: str, kind: str) -> None:
    left, bools = FLAGS[first]
    assert read(~make(left(), kind)) == (~torch.tensor(bools)).tolist()


@pytest.mark.parametrize("name", ["bitwise_and", "logical_and"])
def test_call_logical_method_combines_flags(name: str) -> None:
    first, second = make(NonTensorStack(True, True)), make(NonTensorStack(True, False))
    assert read(getattr(first, name)(second)) == [True, False]
    assert read(getattr(torch, name)(first, second)) == [True, False]


def test_combine_flags_in_place_operator_replaces_values() -> None:
    data = make(NonTensorData(True, batch_size=[2]))
    data ^= make(NonTensorStack(True, False))
    assert read(data) == [False, True]


def test_combine_flags_of_larger_batch_size_reads_rows() -> None:
    first = TensorDict(
        {"mask": torch.zeros(2, 3).bool(), "done": NonTensorStack(True, False)}, batch_size=[2]
    )
    second = TensorDict({"mask": torch.ones(2, 3).bool(), "done": torch.ones(2, 3).bool()}, batch_size=[2, 3])
    assert (first ^ second)["done"].tolist() == [[False] * 3, [True] * 3]
    assert (second & first)["done"].tolist() == [[True] * 3, [False] * 3]


def test_combine_flags_of_value_nodes_and_tensorclasses() -> None:
    true, false = NonTensorData(True, batch_size=[2]), NonTensorStack(False, True)
    assert (true ^ false).tolist() == [True, False]
    assert (MetaData(True) & MetaData(False)).tolist() is False
    masks = Masks(LEAF, NonTensorData(True, batch_size=[2]), batch_size=[2])
    result = masks ^ masks
    assert type(result) is Masks and result.done.tolist() == [False, False]


@pytest.mark.parametrize("symbol", LOGICAL)
def test_combine_ints_that_are_values_equals_torch(symbol: str) -> None:
    first, second = make(NonTensorStack(5, 6)), make(NonTensorData(3, batch_size=[2]))
    operate = LOGICAL[symbol]
    assert operate(first, second)["n", "done"].tolist() == [operate(5, 3), operate(6, 3)]


@pytest.mark.parametrize("symbol", LOGICAL)
def test_combine_other_values_keeps_equal_ones_and_names_others(symbol: str) -> None:
    operate = LOGICAL[symbol]
    assert operate(make("a"), make("a"))["n", "done"] == "a"
    assert operate(make("a"), True)["n", "done"] == "a" and (~make("a"))["n", "done"] == "a"
    for first, second in (
        ("a", "b"),
        (True, "b"),
        (NonTensorStack("a", "b"), NonTensorStack("a", "c")),
        (1.5, 2.5),
    ):
        pair = [
            make(NonTensorData(v, batch_size=[2]) if not isinstance(v, NonTensorStack) else v)
            for v in (first, second)
        ]
        with pytest.raises(
            TypeError, match=rf"cannot compute td \{symbol} x: key 'done' holds values that are neither"
        ):
            operate(*pair)
    with pytest.raises(StructureError, match="key 'done': a tensor there, a NonTensorData here"):
        operate(make(LEAF), make("a"))
