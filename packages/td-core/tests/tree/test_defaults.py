"""Defaults that walk nodes: batch sizes, cycles, concurrent nodes, keys, forms and paths in messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack
from td_core._tree.defaults import call_once_per_leaf, is_aliasing
from td_core._tree.node import copy_leaf, identity
from td_core.errors import CycleError, StructureError


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (identity, True),
        (Tensor.detach, True),
        (call_once_per_leaf(Tensor.detach), True),
        (copy_leaf, False),
        (call_once_per_leaf(copy_leaf), False),
    ],
)
def test_is_aliasing_returns_true_if_storage_is_shared(
    fn: Callable[[Tensor], Tensor], expected: bool
) -> None:
    assert is_aliasing(fn) is expected


def test_call_once_per_leaf_maps_tied_leaf_once() -> None:
    tied, other = torch.ones(2), torch.ones(2)
    fn = call_once_per_leaf(torch.clone)
    assert fn(tied) is fn(tied) is not tied
    assert fn(other) is not fn(tied)


@pytest.mark.parametrize(
    "inside",
    [
        lambda td: td,
        lambda td: TensorDict({"y": td}),
        lambda td: {"y": td},
        lambda td: {"y": {"z": td}},
        lambda td: {("y", "z"): td},
        lambda td: lazy_stack([td, td]),
    ],
)
@pytest.mark.parametrize("key", ["x", ("n", "x"), ("n", "m", "x"), ("new", "x"), ("n", "new", "x")])
@pytest.mark.parametrize(
    "put",
    [
        lambda td, key, value: td.set(key, value),
        lambda td, key, value: td.__setitem__(key, value),
        lambda td, key, value: td.setdefault(key, value),
        lambda td, key, value: td.update({key: value}),
        lambda td, key, value: td.update({key: value}, inplace=True),
        lambda td, key, value: td.update(TensorDict({key: value})),
    ],
)
def test_set_cycle_raises(put, key, inside):
    td = TensorDict({"n": {"m": {}}})
    with pytest.raises(StructureError, match="contains the collection it is set into"):
        put(td, key, inside(td))
    assert list(td.keys(True)) == ["n", ("n", "m")]


@pytest.mark.parametrize(
    "inside", [lambda stack: stack, lambda stack: {"y": stack}, lambda stack: stack.clone(False)]
)
@pytest.mark.parametrize("key", ["x", ("n", "x"), ("n", "m", "x"), ("n", "new", "x")])
@pytest.mark.parametrize(
    "put", [lambda td, key, value: td.set(key, value), lambda td, key, value: td.update({key: value})]
)
def test_set_cycle_in_member_raises(put, key, inside):
    members = [TensorDict({"n": {"m": {}}, "i": i}) for i in range(2)]
    stack = lazy_stack(members)
    with suppress(StructureError):
        put(stack, key, inside(stack))
    for td in (stack, *members):
        assert len(list(islice(td.keys(True), 100))) < 100, "the walk has no end"


@pytest.mark.parametrize(
    "add",
    [
        lambda stack, new: stack.append(new),
        lambda stack, new: stack.insert(0, new),
        lambda stack, new: stack.extend([new]),
    ],
)
@pytest.mark.parametrize(
    "inside", [lambda stack: stack, lambda stack: {"m": stack}, lambda stack: lazy_stack([stack])[0]]
)
def test_add_member_containing_stack_raises(add, inside):
    stack = lazy_stack([TensorDict({"a": 0}) for _ in range(2)])
    with pytest.raises(CycleError, match="cannot add a member: it contains the stack"):
        add(stack, TensorDict({"a": 1, "x": inside(stack)}))
    assert stack["a"].tolist() == [0, 0]
    add(stack, TensorDict({"a": 1, "x": stack[-1]}))
    assert sorted(stack["a"].tolist()) == [0, 0, 1]


def test_set_cycle_below_stack_changes_nothing():
    deep = lazy_stack([lazy_stack([TensorDict({"a": 0, "n": {}}) for _ in range(2)]) for _ in range(2)])
    with pytest.raises(CycleError, match=r"cannot set key \('n', 'x'\)"):
        deep.update({"a": torch.ones(2, 2), "n": {"x": deep}})
    with pytest.raises(CycleError, match=r"cannot set key \('n', 'x'\)"):
        deep.set(("n", "x"), lazy_stack([lazy_stack([TensorDict(), TensorDict()]), deep[1]]))
    assert deep["a"].tolist() == [[0, 0], [0, 0]] and not list(deep["n"].keys())


def test_set_shared_member_without_cycle_succeeds():
    stack = lazy_stack([TensorDict({"i": i}) for i in range(3)])
    lazy_stack([stack[0], stack[1]]).set("next", lazy_stack([stack[1], stack[2]]))
    assert stack[0]["next", "next", "i"] == 2
