"""The table of pointwise operations: its rows agree with torch, with the methods, and with each other."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch

from td_core import TensorDict
from td_core._torch.operators import OPERATIONS, Operation

ROWS = {row.name: row for row in OPERATIONS}
OF_ONE_TENSOR = [row.name for row in OPERATIONS if row.kind == "unary"]
PAIRS = [row.name for row in OPERATIONS if row.kind in ("binary", "comparison") and row.symbol]


def test_names_and_functions_occur_once() -> None:
    counts = Counter(name for row in OPERATIONS for name in row.functions)
    assert len(ROWS) == len(OPERATIONS)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", ROWS)
def test_row_names_functions_of_torch_and_methods(name: str) -> None:
    row = ROWS[name]
    assert row.kind in ("unary", "binary", "comparison", "ternary")
    assert row.loop_in in ("", "autocast", "autograd")
    assert all(hasattr(torch, function) for function in row.functions)
    assert not row.kernel or hasattr(torch, row.kernel)
    assert callable(getattr(TensorDict, row.method))
    assert hasattr(TensorDict, f"{name}_") is row.inplace
    assert (row.named or row.dunder) and bool(row.symbol) is bool(row.dunder)
    assert not row.method_of_second or hasattr(TensorDict, row.method_of_second)


@pytest.mark.parametrize(
    ("row", "method", "of_second", "functions"),
    [
        (Operation("f", "unary", "it"), "f", "", ("f",)),
        (Operation("f", "unary", "it", named=False, dunder="g"), "__g__", "", ("f",)),
        (Operation("f", "binary", "it", dunder="g", reflected="f"), "f", "__rg__", ("f",)),
        (Operation("f", "binary", "it", reflected="h"), "f", "h", ("f",)),
        (
            Operation("f", "comparison", "it", named=False, dunder="lt", reflected="gt"),
            "__lt__",
            "__gt__",
            ("f",),
        ),
        (Operation("f", "binary", "it", function="g", aliases=("h", "i")), "f", "", ("g", "h", "i")),
    ],
)
def test_names_that_follow_from_a_row(
    row: Operation, method: str, of_second: str, functions: tuple[str, ...]
) -> None:
    assert (row.method, row.method_of_second, row.functions) == (method, of_second, functions)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].aliases])
def test_aliases_equal_the_function(name: str) -> None:
    function, *aliases = (getattr(torch, function) for function in ROWS[name].functions)
    operands = [torch.tensor([0.5, -1.5, 2.0])] * {"unary": 1, "binary": 2, "comparison": 2, "ternary": 3}[
        ROWS[name].kind
    ]
    operands = [leaf + i for i, leaf in enumerate(operands)]
    for alias in aliases:
        assert torch.equal(function(*operands).nan_to_num(7.0), alias(*operands).nan_to_num(7.0))


@pytest.mark.parametrize("name", PAIRS)
def test_symbol_is_the_operator_of_the_function(name: str) -> None:
    row, (left, right) = ROWS[name], torch.tensor([[6, 3, 5], [2, 4, 5]])
    function = getattr(operator, {"and": "and_", "or": "or_"}.get(row.dunder, row.dunder))
    assert torch.equal(getattr(torch, row.functions[0])(left, right), function(left, right))
    shown = eval(f"left {row.symbol} right", {"left": left, "right": right})
    assert torch.equal(shown, function(left, right))


@pytest.mark.parametrize(
    "name", [name for name in PAIRS if ROWS[name].reflected and ROWS[name].kind == "binary"]
)
def test_reflected_operation_exchanges_operands(name: str) -> None:
    row, (left, right) = ROWS[name], torch.tensor([[6, 3, 5], [2, 4, 1]])
    expected = getattr(torch, row.functions[0])(left, right)
    second = TensorDict({"a": right}, [3])
    assert torch.equal(getattr(second, row.method_of_second)(left)["a"], expected)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].kernel])
def test_kernel_with_a_number_equals_the_function(name: str) -> None:
    leaf = torch.tensor([1.0, 5.0, float("nan")])
    expected = getattr(torch, ROWS[name].functions[0])(leaf, torch.tensor(2.0))
    torch.testing.assert_close(getattr(torch, ROWS[name].kernel)(leaf, 2.0), expected, equal_nan=True)
