"""Pointwise methods with two collections: broadcasting of batch dims, missing keys, mixed leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import BatchSizeError, StructureError


def test_add_collections_broadcasts_batch_sizes(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    for other in (td[0], td[:1]):
        assert_leaves_equal(td + other, {key: leaf + leaf[0] for key, leaf in td.items(True, True)})
        assert_leaves_equal(other + td, {key: leaf[0] + leaf for key, leaf in td.items(True, True)})
        assert_leaves_equal(
            td.clone().add_(other), {key: leaf + leaf[0] for key, leaf in td.items(True, True)}
        )
    assert (td[0] + td).batch_size == (2, 3)


def test_add_larger_tensor_expands_batch_size(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    result = td + torch.ones(4, 2, 3)
    assert result.batch_size == (4, 2, 3)
    assert_leaves_equal(
        result, {key: (leaf + 1).expand(4, *leaf.shape) for key, leaf in td.items(True, True)}
    )


def test_add_default_replaces_missing_keys(assert_leaves_equal: Any) -> None:
    a, b, c = torch.rand(2), torch.rand(2, 3), torch.rand(2)
    first = TensorDict({"a": a, "n": {"b": b}}, [2])
    second = TensorDict({"n": {"b": b, "d": c}, "m": {"c": c}}, [2])
    for default in (10.0, torch.tensor(10.0)):
        result = first.sub(second, default=default)
        assert_leaves_equal(result, {"a": a - 10, ("n", "b"): b - b, ("n", "d"): 10 - c, ("m", "c"): 10 - c})
    assert_leaves_equal(first.sub(second, default="intersection"), {("n", "b"): b - b})
    with pytest.raises(TypeError, match=r"default= is a number, a tensor, 'intersection' or None; got 'bad'"):
        first.sub(second, default="bad")


@pytest.mark.parametrize("call", ["add", "add_", "__eq__", "__lt__", "maximum"])
def test_binary_different_keys_raises_with_keys(call: str, make_nested: Any) -> None:
    td = make_nested()
    other = make_nested()
    del other["n", "m", "c"]
    with pytest.raises(StructureError, match=r"differ at key \('n', 'm'\).*missing keys \['c'\]"):
        getattr(td, call)(other)


@pytest.mark.parametrize("call", ["add", "add_", "__eq__", "__lt__", "maximum"])
def test_binary_different_keys_in_lazy_stack_raises_with_path(call: str) -> None:
    td, other = (
        TensorDict({"n": {"l": LazyStackedTensorDict(TensorDict({"m": {key: torch.ones(1)}}))}})
        for key in "ac"
    )
    with pytest.raises(
        StructureError, match=r"differ at key \('n', 'l', 'm'\): missing keys \['a'\], extra keys \['c'\]"
    ):
        getattr(td, call)(other)


def test_binary_failing_leaf_raises_same_type_with_key() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2, 4)}}, [2])
    other = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2, 5)}}, [2])
    with pytest.raises(
        RuntimeError, match=r"cannot compute add: key \('n', 'b'\): .*\(shapes \[\[2, 4\], \[2, 5\]\]\)"
    ):
        td.add(other)
    with pytest.raises(NotImplementedError, match=r"cannot compute bitwise_and: key 'a'"):
        td.bitwise_and(td)


def test_binary_invalid_operand_raises(make_nested: Any) -> None:
    td = make_nested()
    with pytest.raises(TypeError, match=r"add\(\) takes a number, a tensor or a collection; got str: 'x'"):
        td.add("x")
    with pytest.raises(TypeError, match="unsupported operand"):
        td + "x"
    with pytest.raises(
        BatchSizeError, match=r"cannot compute add: an operand of shape \[2\].*batch size \[2, 3\]"
    ):
        td.add(torch.ones(2))
    with pytest.raises(
        BatchSizeError, match=r"add_ in place: an operand of batch size \[4, 2, 3\] does not fit"
    ):
        td.add_(torch.ones(4, 2, 3))


def test_add_default_fills_keys_that_some_members_lack(assert_leaves_equal: Any) -> None:
    members = TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.ones(1), "b": torch.ones(1)})
    stack = LazyStackedTensorDict(*members)
    for outer in (stack, TensorDict({"s": stack})):
        result = outer.add(outer, default=5.0)
        result = result if outer is stack else result["s"]
        assert [sorted(member.keys()) for member in result.tensordicts] == [["a"], ["a", "b"]]
        assert result[1]["b"] == 2
    other = TensorDict({"a": torch.ones(2, 1), "b": torch.ones(2, 1)}, [2])
    assert_leaves_equal(
        stack.add(other, default=5.0), {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[6.0], [2.0]])}
    )


MIXED = [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2)])
@pytest.mark.parametrize("other", MIXED)
@pytest.mark.parametrize("mine", MIXED)
def test_binary_mixed_dtypes_promotes_as_torch(mine, other, shape, stacked):
    x, each = torch.arange(1, torch.Size(shape).numel() + 1).view(shape).to(mine), torch.arange(4).to(other)
    td = TensorDict({"x": x}, [4])
    if stacked:
        td = LazyStackedTensorDict(*td.unbind(0))
    wide = each.view(4, *[1] * (len(shape) - 1))
    assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_equal((td * each)["x"], x * wide)
    assert_equal((td == each)["x"], x == wide)
    if len(shape) > 1 or not stacked:
        assert_equal((td + each[1])["x"], x + wide.flatten()[1])


@pytest.mark.parametrize("number", [np.float32(2), np.array([2.0, 3.0]), np.array(2.0)], ids=repr)
def test_add_numpy_operand_equals_torch(number: Any) -> None:
    leaf = torch.arange(4.0).view(2, 2)
    td, wide = TensorDict({"a": leaf.clone()}, [2]), torch.as_tensor(number).float()
    expected = leaf + (wide.unsqueeze(-1) if wide.ndim else wide)
    assert torch.equal((td + number)["a"], expected)
    with torch.device("meta"):  # an array is moved to the device of the leaves, not to the default device
        assert torch.equal((td + number)["a"], expected)
        assert torch.equal(td.add_(number)["a"], expected)
    if not wide.ndim:
        td[0] = type(number)(7) if isinstance(number, np.generic) else 7
        assert td["a"].tolist() == [[7, 7], expected[1].tolist()]


def test_addcmul_float_with_int_leaf_promotes_to_float() -> None:
    td = TensorDict({"a": torch.arange(3)})
    assert td.addcmul(0.5, td)["a"].tolist() == [0, 1.5, 3]
    with pytest.raises(RuntimeError, match="addcmul_ in place: key 'a': result type Float can't be cast"):
        td.addcmul_(0.5, 4)
    assert td["a"].tolist() == [0, 1, 2]


def test_binary_operand_without_batch_dims_matches_feature_dims() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.ones(2, 1, 4)}}, [2])
    for c in (torch.tensor(4.0), torch.full((4,), 4.0)):
        other = TensorDict({"a": torch.tensor(2.0), "b": {"c": c}})
        for result in (td * other, other * td):
            assert result.batch_size == (2,)
            assert torch.equal(result["a"], torch.full((2, 3), 2.0))
            assert torch.equal(result["b", "c"], torch.full((2, 1, 4), 4.0))
        written = td.clone().mul_(other)
        assert torch.equal(written["a"], torch.full((2, 3), 2.0))
        assert torch.equal(written["b", "c"], torch.full((2, 1, 4), 4.0))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 1), (3, 3)])
def test_binary_operand_without_batch_size_matches_equal_shapes(
    shape: tuple[int, ...], stacked: bool
) -> None:
    td = TensorDict({"a": torch.rand(3, *shape[1:]), "b": {"c": torch.rand(3, 3)}}, [3])
    leaves = {"a": torch.rand(shape), "b": {"c": torch.rand(3)}}
    other = TensorDict(leaves)
    named = lazy_stack(list(td.unbind(0))) if stacked else td
    for result in (
        named - other,
        -(other - named),
        named.clone().sub_(other),
        named.lerp(other, 1.0) * -1 + td,
    ):
        assert result.batch_size == (3,)
        torch.testing.assert_close(result["a"], td["a"] - leaves["a"])
        # The operand has fewer dims than the leaf, so it matches the feature dims.
        torch.testing.assert_close(result["b", "c"], td["b", "c"] - leaves["b"]["c"])
    assert (named == TensorDict({"a": td["a"], "b": {"c": td["b", "c"]}})).all()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("nested_size", [[3], [3, 2]])
def test_binary_nested_larger_batch_size_matches_equal_shapes(nested_size: list[int], stacked: bool) -> None:
    deep = {"d": torch.rand(3, 2, 4), "e": torch.rand(3, 2)}
    leaves = {"c": torch.rand(3, 2), **deep}
    td = TensorDict(
        {"a": torch.rand(3), "b": TensorDict({**leaves, "n": TensorDict(deep, [3, 2])}, nested_size)}, [3]
    )
    below = TensorDict({**leaves, "n": TensorDict(deep, [3, 2])}, [3, 2])
    other = TensorDict({"a": td["a"], "b": below})
    named = lazy_stack(list(td.unbind(0))) if stacked else td
    for result in (named - other, other - named, named.clone().sub_(other), named.lerp(other, 1.0) - td):
        assert result.batch_size == (3,) == result["a"].shape
        assert result["b", "n"].batch_size == (3, 2)
        assert result["b"].batch_size in ((3,), (3, 2))
        for key, leaf in leaves.items():
            torch.testing.assert_close(result["b", key], torch.zeros_like(leaf))
    assert (other == named).all()


@pytest.mark.parametrize("size", [(4, 3), (4, 1), ()])
def test_binary_nested_batch_dims_align_before_feature_dims(
    size: tuple[int, ...],
) -> None:
    td = TensorDict({"b": TensorDict({"c": torch.rand(3, 2, 2)}, [3, 2])}, [3])
    other = TensorDict({"b": TensorDict({"c": torch.rand(*size, 2)}, [*size, 2])}, size)
    wanted = td["b", "c"] + other["b", "c"][..., None]
    for result in (td + other, other + td):
        assert result["b"].batch_size == (*result.batch_size, 2) == wanted.shape[:-1]
        torch.testing.assert_close(result["b", "c"], wanted)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [(3,), (1, 3), (4, 1), (1, 1), ()])
def test_binary_lazy_stack_aligns_after_batch_dims(size: tuple[int, ...], dim: int) -> None:
    td = TensorDict({"a": torch.rand(4, 3, 3), "n": {"b": torch.rand(4, 3)}}, [4, 3])
    other = TensorDict({"a": torch.rand(*size, 1)[..., 0], "n": {"b": torch.rand(*size, 4)}}, size)
    wanted = {"a": td["a"] + other["a"][..., None], "b": td["n", "b"][..., None] + other["n", "b"]}
    stack = lazy_stack(list(td.unbind(dim)), dim)
    for result in (td + other, stack + other, other + td, other + stack):
        assert result.batch_size == (4, 3)
        torch.testing.assert_close(result["a"], wanted["a"])
        torch.testing.assert_close(result["n", "b"], wanted["b"])
    written = stack.select("a").add_(other.select("a"))
    torch.testing.assert_close(written["a"], wanted["a"])
    for result in (td.addcmul(other, other), stack.addcmul(other, other)):
        torch.testing.assert_close(result["a"], td["a"] + other["a"][..., None] ** 2)
        torch.testing.assert_close(result["n", "b"], td["n", "b"][..., None] + other["n", "b"] ** 2)
    torch.testing.assert_close(td.lerp(other, 1.0)["n", "b"], other["n", "b"].expand(4, 3, 4))


def test_binary_leaf_with_node_raises_with_key() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    other = TensorDict({"a": {"b": torch.zeros(3)}})
    for first, second in ((td, other), (other, td)):
        with pytest.raises(StructureError, match="'a'"):
            first + second


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
