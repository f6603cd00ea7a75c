"""Pointwise methods with two collections: broadcasting of batch dims, missing keys, mixed leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

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
