"""Dtype promotion: a lazy stack promotes with any operand as the dense tensor does, also if its members are scalars."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict

DTYPES = [torch.uint8, torch.int64, torch.float32, torch.float64, torch.complex64]


def make_values(dtype: torch.dtype, shape: tuple[int, ...], start: int = 1) -> Tensor:
    count = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
    return count % 2 == 0 if dtype is torch.bool else count.to(dtype)


def make_lazy(leaf: Tensor) -> Any:
    return LazyStackedTensorDict(*[TensorDict({"a": part.clone()}) for part in leaf])


#: Functions that build a collection from a tensor of shape (batch, ...), and the key of that tensor.
KINDS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "dense": (lambda leaf: TensorDict({"a": leaf.clone()}, leaf.shape[:1]), "a"),
    "lazy": (make_lazy, "a"),
    "lazy below": (lambda leaf: TensorDict({"n": make_lazy(leaf)}, leaf.shape[:1]), ("n", "a")),
    "lazy below no batch": (
        lambda leaf: TensorDict({"z": leaf[0].clone(), "n": make_lazy(leaf)}),
        ("n", "a"),
    ),
    "node in lazy": (
        lambda leaf: LazyStackedTensorDict(*[TensorDict({"n": {"a": part.clone()}}) for part in leaf]),
        ("n", "a"),
    ),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "mod": operator.mod,
    "and": operator.and_,
    "lt": operator.lt,
    "eq": operator.eq,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "torch.sub": torch.sub,
    "torch.pow": torch.pow,
    "clamp_max": torch.clamp_max,
    "clamp_min": torch.clamp_min,
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "where": lambda x, y: x.where(torch.tensor([True, False]), y) if not isinstance(x, Tensor) else torch.where(
        torch.tensor([True, False]).view(2, *[1] * (x.ndim - 1)), x, y
    ),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y),
    "clamp": lambda x, y: torch.clamp(x, y, y),
    "lerp": lambda x, y: torch.lerp(x, y, y),
}  # fmt: skip
REVERSED = [
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "and",
    "lt",
    "eq",
    "maximum",
    "minimum",
    "torch.sub",
    "torch.pow",
]
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    name: (lambda x, y, name=name: getattr(x, name)(y))
    for name in ("add_", "sub_", "mul_", "div_", "pow_", "clamp_max_", "clamp_min_", "__iadd__")
} | {"addcmul_": lambda x, y: x.addcmul_(y, y)}


def call_or_none(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None


def assert_equals_torch(found: Any, key: Any, expected: Tensor | None, context: Any) -> None:
    """Compare the leaf under ``key`` with torch's result; skip the comparison if torch raised (``expected`` is None)."""
    if expected is None:
        return
    assert found is not None, context
    leaf = found[key]
    assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape), context
    torch.testing.assert_close(leaf, expected, equal_nan=True, msg=lambda text: f"{context}: {text}")


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BINARY)
def test_scalar_operand_promotes_as_with_dense_tensor(name: str, kind: str, shape: tuple[int, ...]) -> None:
    make, key = KINDS[kind]
    function = BINARY[name]
    if name == "where" and kind == "lazy below no batch":
        pytest.skip("a condition has the dims of the batch")
    for dtype in DTYPES:
        leaf = make_values(dtype, shape)
        td = make(leaf)
        for other in [*[make_values(each, (), 2) for each in DTYPES], True, 2, 2.5]:
            context = (dtype, other)
            expected = call_or_none(function, leaf, other)
            assert_equals_torch(call_or_none(function, td, other), key, expected, context)
            if name in REVERSED:
                expected = call_or_none(function, other, leaf)
                assert_equals_torch(call_or_none(function, other, td), key, expected, context)


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lazy below no batch"])
@pytest.mark.parametrize("name", [name for name in BINARY if name != "where"])
def test_operand_with_dims_promotes_as_torch(name: str, kind: str, shape: tuple[int, ...]) -> None:
    make, key = KINDS[kind]
    function = BINARY[name]
    for dtype in DTYPES:
        leaf = make_values(dtype, shape)
        td = make(leaf)
        for other_dtype in DTYPES:
            of_batch, of_leaf = make_values(other_dtype, (2,), 2), make_values(other_dtype, shape, 2)
            row = of_leaf[0].clone()
            scalars = TensorDict({"a": row}) if key == "a" else TensorDict({"n": {"a": row}})
            pairs = [(of_batch, of_batch.view(2, *[1] * (len(shape) - 1))), (scalars, row)]
            pairs += [
                (KINDS[other][0](of_leaf), of_leaf)
                for other in KINDS
                if KINDS[other][1] == key and "no" not in other
            ]
            for operand, plain in pairs:
                context = (dtype, type(operand), other_dtype)
                expected = call_or_none(function, leaf, plain)
                assert_equals_torch(call_or_none(function, td, operand), key, expected, context)
                if name in REVERSED:
                    expected = call_or_none(function, plain, leaf)
                    assert_equals_torch(call_or_none(function, operand, td), key, expected, context)


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lazy below no batch"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_inplace_scalar_operand_computes_in_dense_dtype(name: str, kind: str, shape: tuple[int, ...]) -> None:
    make, key = KINDS[kind]
    for dtype in DTYPES:
        for other in [*[make_values(each, (), 300) for each in DTYPES], 2, 2.5]:
            leaf = make_values(dtype, shape)
            td = make(leaf)
            row = other if isinstance(other, Tensor) else torch.tensor(other)
            scalars = TensorDict({"a": row}) if key == "a" else TensorDict({"n": {"a": row}})
            expected = call_or_none(IN_PLACE[name], leaf, other)
            assert_equals_torch(call_or_none(IN_PLACE[name], td, other), key, expected, (dtype, other))
            if isinstance(other, Tensor) and len(shape) == 1:
                assert_equals_torch(
                    call_or_none(IN_PLACE[name], make(make_values(dtype, shape)), scalars),
                    key,
                    expected,
                    (dtype, row),
                )


def test_scalar_operand_with_scalar_leaf_promotes_as_torch() -> None:
    td = TensorDict(
        {"a": torch.tensor(1.0), "n": LazyStackedTensorDict(TensorDict({"a": torch.tensor(1.0)}))}
    )
    result = td * torch.tensor(2.0, dtype=torch.float64)
    assert (result["a"].dtype, result["n", "a"].dtype) == (torch.float64, torch.float32)


def test_compile_stack_of_scalars_promotes_as_dense() -> None:
    td = make_lazy(torch.ones(2))
    gamma = torch.tensor(0.5, dtype=torch.float64)
    compiled = torch.compile(
        lambda td, x: ((td * x)["a"], td.addcmul(x, x)["a"]), backend="eager", fullgraph=True
    )
    assert [(leaf.dtype, leaf.tolist()) for leaf in compiled(td, gamma)] == [
        (torch.float32, [0.5, 0.5]),
        (torch.float32, [1.25, 1.25]),
    ]


def test_backward_scalar_operand_gradient_has_its_dtype() -> None:
    gamma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (make_lazy(torch.ones(2)) * gamma)["a"].sum().backward()
    assert gamma.grad is not None and (gamma.grad.dtype, gamma.grad.item()) == (torch.float64, 2.0)
