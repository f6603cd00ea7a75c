"""Dtypes of results: lazy stacks, of scalars too, promote as the stacked tensor does, whatever stands beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core._element_types import dtype_beside

DTYPES = [torch.uint8, torch.int64, torch.float32, torch.float64, torch.complex64]
ALL_DTYPES = [*DTYPES, torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex128]


def values(dtype: torch.dtype, shape: tuple[int, ...], start: int = 1) -> Tensor:
    count = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
    return count % 2 == 0 if dtype is torch.bool else count.to(dtype)


def lazy(leaf: Tensor) -> Any:
    return LazyStackedTensorDict(*[TensorDict({"a": part.clone()}) for part in leaf])


#: Collections that show a tensor whose first dim is that of the batch, each with the key of the tensor in it.
KINDS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "dense": (lambda leaf: TensorDict({"a": leaf.clone()}, leaf.shape[:1]), "a"),
    "lazy": (lazy, "a"),
    "lazy below": (lambda leaf: TensorDict({"n": lazy(leaf)}, leaf.shape[:1]), ("n", "a")),
    "lazy below no batch": (lambda leaf: TensorDict({"z": leaf[0].clone(), "n": lazy(leaf)}), ("n", "a")),
    "level in lazy": (
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


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None


def check(found: Any, key: Any, expected: Tensor | None, context: Any) -> None:
    """Compare a result with that of torch; where torch refuses, a result may be there."""
    if expected is None:
        return
    assert found is not None, context
    leaf = found[key]
    assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape), context
    torch.testing.assert_close(leaf, expected, equal_nan=True, msg=lambda text: f"{context}: {text}")


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BINARY)
def test_scalar_promotes_as_beside_the_stacked_tensor(name: str, kind: str, shape: tuple[int, ...]) -> None:
    make, key = KINDS[kind]
    function = BINARY[name]
    if name == "where" and kind == "lazy below no batch":
        pytest.skip("a condition has the dims of the batch")
    for dtype in DTYPES:
        leaf = values(dtype, shape)
        td = make(leaf)
        for other in [*[values(each, (), 2) for each in DTYPES], True, 2, 2.5]:
            context = (dtype, other)
            expected = outcome(function, leaf, other)
            check(outcome(function, td, other), key, expected, context)
            if name in REVERSED:
                expected = outcome(function, other, leaf)
                check(outcome(function, other, td), key, expected, context)


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lazy below no batch"])
@pytest.mark.parametrize("name", [name for name in BINARY if name != "where"])
def test_operand_with_dims_promotes(name: str, kind: str, shape: tuple[int, ...]) -> None:
    make, key = KINDS[kind]
    function = BINARY[name]
    for dtype in DTYPES:
        leaf = values(dtype, shape)
        td = make(leaf)
        for other_dtype in DTYPES:
            of_batch, of_leaf = values(other_dtype, (2,), 2), values(other_dtype, shape, 2)
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
                expected = outcome(function, leaf, plain)
                check(outcome(function, td, operand), key, expected, context)
                if name in REVERSED:
                    expected = outcome(function, plain, leaf)
                    check(outcome(function, operand, td), key, expected, context)


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lazy below no batch"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_scalar_in_place_computes_in_the_dtype_of_the_stacked_tensor(
    name: str, kind: str, shape: tuple[int, ...]
) -> None:
    make, key = KINDS[kind]
    for dtype in DTYPES:
        for other in [*[values(each, (), 300) for each in DTYPES], 2, 2.5]:
            leaf = values(dtype, shape)
            td = make(leaf)
            row = other if isinstance(other, Tensor) else torch.tensor(other)
            scalars = TensorDict({"a": row}) if key == "a" else TensorDict({"n": {"a": row}})
            expected = outcome(IN_PLACE[name], leaf, other)
            check(outcome(IN_PLACE[name], td, other), key, expected, (dtype, other))
            if isinstance(other, Tensor) and len(shape) == 1:
                check(
                    outcome(IN_PLACE[name], make(values(dtype, shape)), scalars),
                    key,
                    expected,
                    (dtype, row),
                )


def test_scalar_beside_scalar_promotes_fully() -> None:
    td = TensorDict(
        {"a": torch.tensor(1.0), "n": LazyStackedTensorDict(TensorDict({"a": torch.tensor(1.0)}))}
    )
    result = td * torch.tensor(2.0, dtype=torch.float64)
    assert (result["a"].dtype, result["n", "a"].dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtype_beside_is_that_of_torch(dtype: torch.dtype) -> None:
    for other in ALL_DTYPES:
        expected = torch.result_type(torch.zeros(1, dtype=dtype), torch.zeros((), dtype=other))
        assert dtype_beside(dtype, other) == expected, other


def test_compiled_stack_of_scalars_promotes_as_dense() -> None:
    td = lazy(torch.ones(2))
    gamma = torch.tensor(0.5, dtype=torch.float64)
    compiled = torch.compile(
        lambda td, x: ((td * x)["a"], td.addcmul(x, x)["a"]), backend="eager", fullgraph=True
    )
    assert [(leaf.dtype, leaf.tolist()) for leaf in compiled(td, gamma)] == [
        (torch.float32, [0.5, 0.5]),
        (torch.float32, [1.25, 1.25]),
    ]


def test_gradient_of_scalar_operand_has_its_dtype() -> None:
    gamma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (lazy(torch.ones(2)) * gamma)["a"].sum().backward()
    assert gamma.grad is not None and (gamma.grad.dtype, gamma.grad.item()) == (torch.float64, 2.0)
