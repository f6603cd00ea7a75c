"""Modules as users write them. pyright checks this file; no test runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_nn import (
    CudaGraphModule,
    EnsembleModule,
    FlowReport,
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    as_tensordict_module,
    dispatch,
    interaction_type,
    set_interaction_type,
    set_skip_existing,
    skip_existing,
)
from td_nn.fx import TDGraphModule, symbolic_trace


class Normalize(TensorDictModuleBase[Tensor]):
    """A module that writes one key."""

    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y"]  # noqa: RUF012

    @dispatch
    def forward(self, tensordict: TensorDict) -> TensorDict:
        """Return the collection with the result."""
        return tensordict.set("y", tensordict["x"] / tensordict["x"].norm())


def call(data: TensorDict, lazy: LazyStackedTensorDict) -> Tensor:
    """Call modules with collections and with tensors."""
    layer = TensorDictModule(nn.Linear(3, 2), in_keys="x", out_keys="y")
    assert_type(layer, TensorDictModule[Tensor])
    assert_type(layer(data), TensorDict)
    assert_type(layer(lazy), LazyStackedTensorDict)
    assert_type(layer(torch.ones(3)), Tensor)
    assert_type(layer(x=torch.ones(3)), Tensor)
    pair: TensorDictModule[tuple[Tensor, Tensor]] = TensorDictModule(
        torch.max, ["x", "dim"], ["value", "place"]
    )
    value, place = pair(x=torch.ones(3), dim=0)
    assert_type(value, Tensor)
    assert_type(Normalize()(data), TensorDict)
    assert_type(Normalize()(x=place), Tensor)
    assert_type(TensorDictModuleWrapper[Tensor](layer)(data), TensorDict)
    return layer(x=value)


def chain(data: TensorDict) -> TensorDict:
    """Build, check and edit a sequence."""
    seq = TensorDictSequential({"enc": Normalize(), "dec": lambda td: td}, inplace="empty")
    assert_type(seq.check(data), FlowReport)
    assert_type(seq.graph(), str)
    assert_type(seq.select_out_keys("y"), TensorDictSequential)
    assert_type(seq.select_subsequence(out_keys=["y"]), TensorDictSequential)
    assert_type(seq.append(WrapModule(lambda td: td), name="last"), TensorDictSequential)
    with set_skip_existing(["y"]), set_interaction_type("mean"):
        assert_type(seq(data), TensorDict)
    return seq(data)


def repeat(data: TensorDict) -> Tensor:
    """Build ensembles, CUDA graphs and torch.fx graphs."""
    layer = TensorDictModule(nn.Linear(3, 2), in_keys="x", out_keys="y")
    ensemble = EnsembleModule(layer, 4, expand_input=False, randomness="different")
    assert_type(ensemble, EnsembleModule[Tensor])
    assert_type(ensemble(data), TensorDict)
    assert_type(ensemble(x=torch.ones(4, 3)), Tensor)
    assert_type(ensemble.params_td, TensorDictParams)
    assert_type(ensemble.train(False), EnsembleModule[Tensor])
    captured = CudaGraphModule(layer, warmup=3, in_keys=["x"], device="cuda:0")
    captured.load_state_dict(captured.state_dict())
    assert_type(symbolic_trace(layer), TDGraphModule)
    y: Tensor = captured(torch.ones(3))
    return y


@set_interaction_type(InteractionType.MEAN)
def switched() -> tuple[InteractionType | None, bool | list[Any]]:
    """Return the values of the global settings."""
    return interaction_type(), skip_existing()


@as_tensordict_module(in_keys=["x"], out_keys=["y"])
def double(x: Tensor) -> Tensor:
    """Return twice its argument."""
    return x * 2
