"""Gradients of collections with values: what holds no leaf needs no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_tensorclass import NonTensorStack, UnbatchedTensor, tensorclass


@tensorclass
class Weights:
    """A leaf, a leaf that may be None, and a value."""

    w: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = "run"


def make(**more: Any) -> TensorDict:
    return TensorDict({"w": torch.arange(4.0), **more}, batch_size=[4])


KINDS: dict[str, Callable[[], Any]] = {
    "node of values": lambda: make(meta={"name": "run 7"}),
    "deep node of values": lambda: make(meta={"deep": {"name": "run 7"}}),
    "value": lambda: make(name="run 7"),
    "value for each row": lambda: make(name=NonTensorStack(*"abcd")),
    "tensorclass": lambda: Weights(torch.arange(4.0), batch_size=[4]),
    "nested tensorclass": lambda: make(n=Weights(torch.arange(4.0), batch_size=[4])),
    "unbatched": lambda: make(u=UnbatchedTensor(torch.ones(3))),
    "lazy": lambda: lazy_stack([TensorDict({"w": torch.ones(n), "meta": {"name": str(n)}}) for n in (2, 3)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_with_values_equals_torch(kind: str) -> None:
    weights = KINDS[kind]().requires_grad_()
    outputs = weights * 3
    outputs.backward(torch.ones_like(outputs), retain_graph=True)
    assert all((leaf.grad == 3).all() for leaf in weights._leaves())
    result = torch.autograd.grad(outputs, weights, torch.ones_like(outputs))
    assert all((leaf == 3).all() for leaf in result._leaves())
    weights.grad = weights.grad * 2
    assert all((leaf.grad == 6).all() for leaf in weights._leaves())


def test_backward_tensorclass_with_gradient_of_another_class_equals_torch() -> None:
    weights = Weights(torch.arange(4.0), batch_size=[4]).requires_grad_()
    (weights * 3).backward(make())
    assert torch.equal(weights.w.grad, torch.arange(4.0) * 3)
