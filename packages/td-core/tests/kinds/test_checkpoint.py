"""Checkpoints: the node, and loading into modules, optimizers, schedulers and collections, with the checks before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from td_core import TensorDict
from td_core._kinds.checkpoint import load_into, make_checkpoint
from td_core.errors import KeyMismatchError, StructureError
from td_core.spi import decode, encode


def save_tree(tree: Any) -> Any:
    """Return what load() returns for a saved mapping."""
    return make_checkpoint(tree).to_tree()


def make_trained(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a module and an optimizer that has taken a step."""
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def read_all(*objects: Any) -> list[Any]:
    return [copy.deepcopy(item.state_dict()) for item in objects]


def assert_equal_states(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_load_into_objects_returns_rest() -> None:
    model, optimizer = make_trained()
    saved = save_tree(
        {"model": model, "optimizer": optimizer, "step": 3, "x": {"y": 1, "z": nn.Linear(1, 1)}}
    )
    other, theirs = make_trained()
    inner = nn.Linear(1, 1)
    rest = load_into(saved, {"model": other, "optimizer": theirs, "x": {"z": inner}}, "'x'")
    assert rest == {"step": 3, "x": {"y": 1}}
    assert_equal_states(read_all(other, theirs), read_all(model, optimizer))


def test_load_into_fresh_optimizer_continues_alike() -> None:
    model, optimizer = make_trained()
    saved = save_tree({"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    fresh = torch.optim.Adam(other.parameters())
    assert load_into(saved, {"model": other, "optimizer": fresh}, "'x'") == {}
    data = torch.randn(4, 2)
    for module, each in ((model, optimizer), (other, fresh)):
        each.zero_grad()
        module(data).square().sum().backward()
        each.step()
    assert_equal_states(read_all(model, optimizer), read_all(other, fresh))


def test_load_into_step_leaves_result_of_load_alone() -> None:
    _, optimizer = make_trained()
    saved = save_tree({"o": optimizer})
    before = copy.deepcopy(saved)
    optimizer.step()
    assert_equal_states(saved, before)


def test_load_into_collection_writes_it() -> None:
    saved = save_tree({"td": TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(2)}}, [2])})
    target = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(2)}}, [2])
    leaf = target["a"]
    assert load_into(saved, {"td": target}, "'x'") == {}
    assert leaf.tolist() == [1, 1]
    assert target["n", "b"].tolist() == [0, 0]


def make_scheduler(kind: Any, *args: Any) -> Any:
    return kind(torch.optim.SGD([torch.zeros(1)], 0.1), *args)


_STEP, _COSINE = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(
    ("tree", "into", "error", "message"),
    [
        ({"a": 1}, {"b": nn.Linear(1, 1)}, KeyMismatchError, r"the checkpoint 'x' has no 'b'; its keys: 'a'"),
        ({}, {"b": nn.Linear(1, 1)}, KeyMismatchError, "has no 'b'; its keys: none"),
        (
            {"m": nn.Linear(1, 1, bias=False)},
            {"m": nn.Linear(1, 1)},
            KeyMismatchError,
            r"the checkpoint 'x'\['m'\] misses 'bias'; nothing was loaded",
        ),
        (
            {"m": nn.Linear(1, 1)},
            {"m": nn.Linear(1, 1, bias=False)},
            KeyMismatchError,
            r"\['m'\] has the unexpected 'bias'; nothing was loaded",
        ),
        (
            {"m": nn.Linear(1, 2)},
            {"m": nn.Linear(2, 2)},
            StructureError,
            r"\['m'\]\['weight'\] has the shape \[2, 1\], and the target \[2, 2\]; nothing was loaded",
        ),
        (
            {"o": make_trained()[1]},
            {"o": torch.optim.Adam([torch.zeros(1)])},
            StructureError,
            r"\['o'\] has groups of \[4\] parameters, and the optimizer of \[1\]; nothing was loaded",
        ),
        (
            {"o": make_trained()[1]},
            {"o": make_trained(5)[1]},
            StructureError,
            r"\['o'\]\['state'\]\[0\]\['exp_avg'\] has the shape \[3, 2\], and the target \[5, 2\]",
        ),
        (
            {"o": nn.Linear(1, 1)},
            {"o": make_trained()[1]},
            KeyMismatchError,
            r"\['o'\] misses 'param_groups'",
        ),
        (
            {"s": make_scheduler(_STEP, 3)},
            {"s": make_scheduler(_COSINE, 3)},
            KeyMismatchError,
            r"\['s'\] misses 'T_max', 'eta_min' and has the unexpected 'step_size', 'gamma'",
        ),
        ({"m": 3}, {"m": nn.Linear(1, 1)}, StructureError, r"\['m'\] is not a state dict; got a int"),
        ({"m": 3}, {"m": {"n": nn.Linear(1, 1)}}, StructureError, r"\['m'\] is not a mapping; got a int"),
        ({"m": 3}, {"m": 4}, TypeError, r"'m' is a int: read it from the result of load\(\)"),
        (
            {"td": TensorDict({"a": torch.ones(1)})},
            {"td": TensorDict({"b": torch.ones(1)})},
            KeyMismatchError,
            r"\['td'\] misses 'b' and has the unexpected 'a'",
        ),
    ],
)
def test_load_into_object_that_differs_writes_nothing(
    tree: Any, into: Any, error: type[Exception], message: str
) -> None:
    good = nn.Linear(2, 2)
    before = read_all(good)
    saved = save_tree({"good": nn.Linear(2, 2), **tree})
    with pytest.raises(
        error, match=message.replace("none", "'good'").replace("keys: 'a'", "keys: 'good', 'a'")
    ):
        load_into(saved, {"good": good, **into}, "'x'")
    assert_equal_states(read_all(good), before)


def test_load_into_of_collection_raises() -> None:
    hint = r"is not a mapping; got a TensorDict; load it without into=, and call to_module\(model, inplace=True\)"
    with pytest.raises(StructureError, match=f"^what is saved at 'x' {hint}"):
        load_into(TensorDict(), {"m": nn.Linear(1, 1)}, "'x'")
    with pytest.raises(StructureError, match=rf"^the checkpoint 'x'\['p'\] {hint}"):
        load_into(save_tree({"p": TensorDict()}), {"p": {"m": nn.Linear(1, 1)}}, "'x'")


def test_load_into_lazy_module_gives_it_shapes() -> None:
    lazy = nn.LazyLinear(2)
    load_into(save_tree({"m": nn.Linear(3, 2)}), {"m": lazy}, "'x'")
    assert lazy.weight.shape == (2, 3)


class Counted:
    """An object whose state has more keys later."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def test_load_into_other_object_leaves_keys_to_it() -> None:
    full, empty = Counted(), Counted()
    full.state = {"position": 3}
    load_into(save_tree({"c": full}), {"c": empty}, "'x'")
    assert empty.state == {"position": 3}


def test_checkpoint_results_of_operations_are_plain() -> None:
    node: Any = make_checkpoint({"a": torch.ones(2), "b": 3})
    assert list(node.keys()) == ["a"]
    assert type(node.select("a")) is TensorDict
    assert type(node + 1) is type(node.clone()) is type(node)


def test_checkpoint_copies_keep_values() -> None:
    node: Any = make_checkpoint({"a": torch.ones(2), "b": 3})
    for copied in (node.clone(), node.copy(), decode(encode(node)), node._unflatten(node._leaves())):
        assert copied.to_tree()["b"] == 3
        assert copied.to_tree()["a"].tolist() == [1, 1]


def test_checkpoint_loaded_has_memory_of_its_own() -> None:
    value = torch.ones(2)
    make_checkpoint({"a": value}).to_tree()["a"].zero_()
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize("into", [nn.Linear(2, 2), ["m"]])
def test_load_into_other_than_a_mapping_raises(into: Any) -> None:
    with pytest.raises(TypeError, match=f"into={{'model': model}}; got a {type(into).__name__}"):
        load_into({"m": 3}, into, "'x'")
