"""Gradients as collections: only leaves that require gradients need an entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import KeyMismatchError, StructureError, TensorDict, TensorDictParams, lazy_stack


def make_dense(**more: Any) -> TensorDict:
    return TensorDict({"w": torch.arange(4.0), "n": {"v": torch.ones(4, 2)}, **more}, batch_size=[4])


def make_uneven() -> Any:
    """Return a lazy stack whose members differ in shapes and keys."""
    return lazy_stack(
        [TensorDict({"w": torch.ones(2)}), TensorDict({"w": torch.ones(3), "z": torch.ones(1)})]
    )


KINDS: dict[str, Callable[[], Any]] = {
    "dense": make_dense,
    "empty node": lambda: make_dense(empty={}, deep={"empty": {}}),
    "lazy": lambda: lazy_stack(make_dense().unbind(0)),
    "uneven": make_uneven,
    "nested stack": lambda: TensorDict({"in": make_uneven()}, batch_size=[2]),
    "params": lambda: TensorDictParams(make_dense(empty={})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_and_grad_of_collection_equal_torch(kind: str) -> None:
    weights = KINDS[kind]().requires_grad_()
    outputs = weights * 3
    ones = outputs.apply(torch.ones_like, filter_empty=True)
    outputs.backward(ones, retain_graph=True)
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 3.0)) for leaf in weights._leaves())
    result = torch.autograd.grad(outputs, weights, ones)
    assert all(torch.equal(leaf, torch.full_like(leaf, 3.0)) for leaf in result._leaves())
    weights.grad = weights.grad * 2
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 6.0)) for leaf in weights._leaves())


def test_backward_lazy_stack_and_dense_gradient_equals_torch() -> None:
    stack, dense = lazy_stack([TensorDict({"w": torch.ones(3)}) for _ in range(2)]), torch.ones(2, 3)
    for weights, gradient in (
        (stack.clone(), TensorDict({"w": dense}, batch_size=[2])),
        (TensorDict({"w": dense.clone()}, batch_size=[2]), stack),
    ):
        (weights.requires_grad_() * 2).backward(gradient)
        assert torch.equal(weights.grad["w"], dense * 2)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (TensorDict({"w": torch.ones(4)}), KeyMismatchError, r"at the root: missing keys \['n'\]"),
        (TensorDict({"w": torch.ones(4), "n": {}}), KeyMismatchError, r"at key 'n': missing keys \['v'\]"),
        (
            TensorDict({"w": torch.ones(4), "n": torch.ones(4)}),
            StructureError,
            r"at key 'n': a TensorDict there",
        ),
        (
            TensorDict({"w": {"x": torch.ones(4)}, "n": {"v": torch.ones(4, 2)}}),
            StructureError,
            r"at key 'w'",
        ),
    ],
)
def test_backward_gradient_without_a_needed_leaf_raises(
    gradient: TensorDict, error: type[Exception], message: str
) -> None:
    weights = make_dense().requires_grad_()
    with pytest.raises(error, match=message):
        (weights * 2).backward(gradient)
    with pytest.raises(error, match=message):
        torch.autograd.grad(weights * 2, weights, gradient)
    assert weights.grad is None


def test_backward_gradient_of_other_member_count_raises() -> None:
    weights = make_uneven().requires_grad_()
    with pytest.raises(
        StructureError, match=r"a lazy stack of 2 members along dim 0 there, batch size \[3\] here"
    ):
        (weights * 2).backward(lazy_stack([TensorDict({"w": torch.ones(2)})] * 3))


def test_grad_of_outputs_with_an_integer_leaf_leaves_it_out() -> None:
    x = torch.ones(4, requires_grad=True)
    outputs = TensorDict({"a": x * 2, "index": torch.arange(4)}, batch_size=[4])
    for gradient in (TensorDict({"a": torch.ones(4)}), torch.ones_like(outputs)):
        (result,) = torch.autograd.grad(outputs, x, gradient, retain_graph=True)
        assert result.tolist() == [2.0] * 4
