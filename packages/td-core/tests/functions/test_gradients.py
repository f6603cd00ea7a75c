"""Pairs of leaves of two collections where one may lack what holds no such leaf, as gradients do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import KeyMismatchError, StructureError, TensorDict, lazy_stack
from td_core._functions.casting import pair_leaves


def needs_grad(leaf: Tensor) -> bool:
    return leaf.requires_grad


def make_outputs() -> TensorDict:
    w, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    return TensorDict({"w": w, "count": torch.zeros(2), "n": {"b": b}, "stats": {"mean": torch.zeros(1)}})


def test_pair_leaves_skips_what_needs_no_counterpart() -> None:
    outputs = make_outputs()
    grads = TensorDict({"n": {"b": torch.zeros(3)}, "w": torch.zeros(2), "other": torch.zeros(4)})
    pairs = pair_leaves(outputs, grads, needs_grad)
    expected = [(outputs["w"], grads["w"]), (outputs["n", "b"], grads["n", "b"])]
    assert [(id(a), id(b)) for a, b in pairs] == [(id(a), id(b)) for a, b in expected]


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (
            {"n": {"b": torch.zeros(3)}},
            r"missing keys \['w'\], of which each holds a leaf that needs a counterpart",
        ),
        ({"w": torch.zeros(2)}, r"missing keys \['n'\]"),
        ({"w": torch.zeros(2), "n": {}}, r"the structures differ at key 'n': missing keys \['b'\]"),
    ],
)
def test_pair_leaves_missing_counterpart_raises(grads: dict[str, Any], message: str) -> None:
    with pytest.raises(KeyMismatchError, match=message):
        pair_leaves(make_outputs(), TensorDict(grads), needs_grad)


@pytest.mark.parametrize("grads", [{"w": {}, "n": {"b": 0.0}}, {"w": 0.0, "n": torch.zeros(3)}])
def test_pair_leaf_with_node_raises(grads: dict[str, Any]) -> None:
    with pytest.raises(StructureError):
        pair_leaves(make_outputs(), TensorDict(grads), needs_grad)


def test_pair_leaves_of_lazy_stack_goes_through_members() -> None:
    members = [TensorDict({"a": torch.ones(n, requires_grad=True)}) for n in (1, 2)]
    grads = [TensorDict({"a": torch.zeros(n)}) for n in (1, 2)]
    pairs = pair_leaves(lazy_stack(members), lazy_stack(grads), needs_grad)
    assert [(a is m["a"], b is g["a"]) for (a, b), m, g in zip(pairs, members, grads, strict=True)] == [
        (True, True)
    ] * 2


def test_pair_lazy_stack_with_other_number_of_rows_raises() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(1, requires_grad=True)}) for _ in range(2)])
    with pytest.raises(
        StructureError, match=r"a lazy stack of 2 members along dim 0 there, batch size \[3\] here"
    ):
        pair_leaves(stack, TensorDict({"a": torch.zeros(3, 1)}, [3]), needs_grad)


def test_pair_leaves_of_deep_trees_does_not_recurse() -> None:
    def make(requires_grad: bool) -> TensorDict:
        td = TensorDict({"a": torch.ones(1, requires_grad=requires_grad)})
        for _ in range(2000):
            td = TensorDict({"k": td})
        return td

    assert len(pair_leaves(make(True), make(False), needs_grad)) == 1
