"""Logical operations and comparisons of values that are not tensors, with a small kind that holds a list of values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorCollection, TensorDict, lazy_stack
from td_core.errors import StructureError


class Values(TensorCollection):
    """A node without entries that holds one value for each element of a batch."""

    _is_value = True

    def __init__(self, *values: object) -> None:
        self.values = list(values)

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(self.values)])

    @property
    def device(self) -> None:
        return None

    def _children(self) -> Mapping[str, Any]:
        return {}

    def _with_children(self, children: Any, **metadata: Any) -> Any:
        return self

    def _set_device(self, device: Any) -> None:
        """Keep no device."""

    def tolist(self, **options: Any) -> Any:
        return self.values

    def _unwrap(self) -> Any:
        return tuple(self.values)

    def _compare(self, other: Any, single: Callable[..., object]) -> Any:
        return torch.tensor([bool(x == y) for x, y in zip(self.values, other.values, strict=True)])


Operator = Callable[[Any, Any], Any]
LOGICAL: dict[str, Operator] = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
COMPARISONS: dict[str, Operator] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BOOLS = {"mixed": [True, False, True], "other": [True, True, False], "none": [False] * 3}
LEAF = torch.tensor([False, True, True])


def make(held: Any) -> TensorDict:
    """Build a tree of a leaf and ``held``, one level down."""
    return TensorDict({"leaf": LEAF.clone(), "n": {"held": held}}, batch_size=[len(LEAF)])


def assert_result(result: Any, expected: Tensor, leaf: Tensor) -> None:
    assert isinstance(result["n", "held"], Tensor)
    assert torch.equal(result["n", "held"], expected)
    assert torch.equal(result["leaf"], leaf)


@pytest.mark.parametrize("symbol", LOGICAL)
@pytest.mark.parametrize("first", BOOLS)
@pytest.mark.parametrize("second", BOOLS)
def test_combine_values_of_two_collections_equals_torch(symbol: str, first: str, second: str) -> None:
    operate = LOGICAL[symbol]
    left, right = BOOLS[first], BOOLS[second]
    expected = operate(torch.tensor(left), torch.tensor(right))
    result = operate(make(Values(*left)), make(Values(*right)))
    assert_result(result, expected, operate(LEAF, LEAF))


@pytest.mark.parametrize("symbol", [*LOGICAL, *COMPARISONS])
@pytest.mark.parametrize("values", BOOLS)
def test_combine_values_with_leaf_at_their_key_equals_torch(symbol: str, values: str) -> None:
    operate = {**LOGICAL, **COMPARISONS}[symbol]
    held, leaf = make(Values(*BOOLS[values])), make(torch.tensor(BOOLS["other"]))
    expected = operate(torch.tensor(BOOLS[values]), torch.tensor(BOOLS["other"]))
    assert_result(operate(held, leaf), expected, operate(LEAF, LEAF))
    expected = operate(torch.tensor(BOOLS["other"]), torch.tensor(BOOLS[values]))
    assert_result(operate(leaf, held), expected, operate(LEAF, LEAF))


@pytest.mark.parametrize("symbol", [*LOGICAL, *COMPARISONS])
@pytest.mark.parametrize(
    "operand",
    [True, False, torch.tensor(True), torch.tensor([True, False, False]), torch.ones(2, 3).bool()],
    ids=str,
)
def test_combine_values_with_number_or_tensor_equals_torch(symbol: str, operand: Any) -> None:
    operate = {**LOGICAL, **COMPARISONS}[symbol]
    values = torch.tensor(BOOLS["mixed"])
    td = make(Values(*BOOLS["mixed"]))
    assert torch.equal(operate(td, operand)["n", "held"], operate(values, operand))
    assert torch.equal(operate(operand, td)["n", "held"], operate(operand, values))
    assert torch.equal(operate(td, operand)["leaf"], operate(LEAF, operand))


@pytest.mark.parametrize("symbol", LOGICAL)
def test_combine_ints_of_two_collections_equals_torch(symbol: str) -> None:
    left, right = [1, 2, 3], [3, 5, 6]
    result = LOGICAL[symbol](make(Values(*left)), make(Values(*right)))
    assert torch.equal(result["n", "held"], LOGICAL[symbol](torch.tensor(left), torch.tensor(right)))


def test_combine_other_values_keeps_equal_and_raises_for_different() -> None:
    first = make(Values("x", "y", "z"))
    assert (first & make(Values("x", "y", "z")))["n"].get("held").values == ["x", "y", "z"]
    with pytest.raises(
        TypeError,
        match=r"cannot compute td & x: key 'held' holds values that are neither bools nor ints, "
        r"\('x', 'y', 'z'\) and \('x', 'q', 'z'\); exclude\(\) them first",
    ):
        first & make(Values("x", "q", "z"))


@pytest.mark.parametrize("values", BOOLS)
def test_invert_bools_equals_torch(values: str) -> None:
    assert_result(~make(Values(*BOOLS[values])), ~torch.tensor(BOOLS[values]), ~LEAF)


@pytest.mark.parametrize("values", [(1, 2, 3), ("x", "y", "z"), (1.5, 2.5, 0.0)], ids=str)
def test_operation_with_number_keeps_values_that_are_not_bools(values: tuple[object, ...]) -> None:
    for result in (~make(Values(*values)), make(Values(*values)) & True, make(Values(*values)) < True):
        assert result["n"].get("held").values == list(values)
    assert torch.equal((~make(Values(*values)))["leaf"], ~LEAF)


def test_invert_lazy_stack_inverts_values_of_members() -> None:
    stack = lazy_stack([make(Values(*BOOLS[name])) for name in ("mixed", "other")])
    for result, name in zip((~stack).unbind(0), ("mixed", "other"), strict=True):
        assert_result(result, ~torch.tensor(BOOLS[name]), ~LEAF)


@pytest.mark.parametrize("name", ["bitwise_and", "logical_and"])
def test_call_logical_method_combines_values(name: str) -> None:
    left, right = (torch.tensor(BOOLS[key]) for key in ("mixed", "other"))
    first, second = make(Values(*BOOLS["mixed"])), make(Values(*BOOLS["other"]))
    for function in (getattr(TensorDict, name), getattr(torch, name)):
        assert torch.equal(function(first, second)["n", "held"], getattr(torch, name)(left, right))


def test_combine_collections_of_other_structure_raises() -> None:
    with pytest.raises(StructureError, match="'n'"):
        make(Values(*BOOLS["mixed"])) & TensorDict({"leaf": LEAF.clone(), "n": LEAF.clone()}, [3])
