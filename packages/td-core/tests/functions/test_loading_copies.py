"""load_state_dict copies tensors and adds no entries to parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from td_core import Buffer, LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import StructureError


def make_params(value: float) -> TensorDict:
    return TensorDict(
        {
            "a": torch.full((2,), value),
            "n": {"b": torch.full((2, 3), value), "m": {"c": torch.full((2,), value)}},
        },
        batch_size=[2],
    )


SOURCES: dict[str, Callable[[], Any]] = {
    "dense": lambda: make_params(1),
    "lazy stack": lambda: lazy_stack([make_params(1)[0], make_params(1)[1]]),
    "lazy level": lambda: make_params(1).update(
        {"n": lazy_stack([make_params(1)["n"][0], make_params(1)["n"][1]])}
    ),
    "params": lambda: TensorDictParams(make_params(1)),
    "params as level": lambda: TensorDict(
        {"a": torch.ones(2), "n": TensorDictParams(make_params(1)["n"])}, [2]
    ),
    "locked": lambda: make_params(1).lock_(),
}
TARGETS: dict[str, Callable[[], Any]] = {
    "empty": TensorDict,
    "empty with a batch size": lambda: TensorDict(batch_size=[2]),
    "some entries": lambda: make_params(0).select("a", ("n", "m")),
    "other entries": lambda: TensorDict({"z": torch.zeros(2), "n": {}}, [2]),
    "all entries": lambda: make_params(0),
    "lazy stack": lambda: LazyStackedTensorDict(make_params(0)[0].select("a"), make_params(0)[1].select("a")),
}


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_load_state_dict_not_strict_copies_every_entry(
    source: str, target: str, flatten: bool, keep_vars: bool
) -> None:
    given, loaded = SOURCES[source](), TARGETS[target]()
    assert (
        loaded.load_state_dict(given.state_dict(flatten=flatten, keep_vars=keep_vars), strict=False) is loaded
    )
    for leaf in given._leaves():
        leaf.detach().fill_(7)
    for key in ("a", ("n", "b"), ("n", "m", "c")):
        assert (loaded[key] == 1).all() and loaded[key].shape == make_params(1)[key].shape
        assert not loaded[key].requires_grad


@pytest.mark.parametrize("flatten", [False, True])
def test_load_state_dict_assign_stores_same_tensors(flatten: bool) -> None:
    given, loaded = make_params(1), TensorDict()
    loaded.load_state_dict(given.state_dict(flatten=flatten, keep_vars=True), strict=False, assign=True)
    assert loaded["a"] is given["a"] and loaded["n", "m", "c"] is given["n", "m", "c"]


def load_directly(params: Any, state: Any, **options: Any) -> None:
    params.load_state_dict(state, strict=False, **options)


def load_in_a_module(params: Any, state: Any, **options: Any) -> None:
    holder = nn.Module()
    holder.held = params
    holder.load_state_dict({f"held.{key}": leaf for key, leaf in state.items()}, strict=False, **options)


def load_in_a_collection(params: Any, state: Any, **options: Any) -> None:
    TensorDict({"held": params}).load_state_dict(
        {f"held.{key}": leaf for key, leaf in state.items()}, strict=False, **options
    )


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("load", [load_directly, load_in_a_module, load_in_a_collection])
@pytest.mark.parametrize("no_convert", [False, True])
def test_load_state_dict_not_strict_adds_nothing_to_params(no_convert: bool, load: Any, assign: bool) -> None:
    entries = {
        "w": nn.Parameter(torch.zeros(2)),
        "n": {"b": nn.Parameter(torch.zeros(2)), "mean": Buffer(torch.zeros(2))},
    }
    params = TensorDictParams(TensorDict(entries), no_convert=no_convert)
    extra = {"x": torch.ones(5), "n.x": torch.ones(5), "n.m.x": torch.ones(5), "e.x": torch.ones(5)}
    load(params, {"w": torch.ones(2), "n.b": torch.ones(2), **extra}, assign=assign)
    assert [name for name, _ in params.named_parameters()] == ["w", "n.b"]
    assert [name for name, _ in params.named_buffers()] == ["n.mean"]
    assert params["w"].tolist() == params["n", "b"].tolist() == [1, 1] and params["n", "mean"].tolist() == [
        0,
        0,
    ]


def test_load_state_dict_strict_extra_entries_raises() -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2)}))
    with pytest.raises(
        StructureError, match=r"unexpected keys: \['n.x', 'x'\]|unexpected keys: \['x', 'n.x'\]"
    ):
        params.load_state_dict({"w": torch.ones(2), "x": torch.ones(5), "n.x": torch.ones(5)})
    assert params["w"].tolist() == [0, 0]


def test_load_state_dict_not_strict_wrong_shape_raises() -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2)}))
    with pytest.raises(StructureError, match=r"key 'w' has shape \(2,\), given \(3,\)"):
        params.load_state_dict({"w": torch.ones(3), "x": torch.ones(5)}, strict=False)
