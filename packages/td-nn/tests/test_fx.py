"""symbolic_trace: torch.fx graphs of modules and sequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from td_core import TensorDict
from td_nn import TensorDictModule, TensorDictModuleWrapper, TensorDictSequential, WrapModule
from td_nn.fx import TDGraphModule, symbolic_trace


class Halves(nn.Module):
    """A module with two results."""

    def forward(self, x, scale=1):
        return x[..., :2] * scale, x[..., 2:]


class Quiet(TensorDictModule):
    """A module with its own forward(), which keys do not describe."""

    def forward(self, tensordict):
        return tensordict


def layer(read="x", write="y", **options):
    return TensorDictModule(nn.Linear(3, 3), [read], [write], **options)


MODULES = {
    "layer": layer,
    "nested keys": lambda: layer(("n", "x"), ("n", "y")),
    "argument names": lambda: TensorDictModule(nn.Linear(3, 3), {"input": "x"}, ["y"]),
    "two results": lambda: TensorDictModule(Halves(), ["x"], ["y", "z"], method_kwargs={"scale": 3}),
    "sink": lambda: TensorDictModule(Halves(), ["x"], ["_", "z"]),
    "function": lambda: TensorDictModule(lambda x: x * 2 + 1, ["x"], ["y"]),
    "method": lambda: TensorDictModule(nn.ReLU(), ["x"], ["y"], method="forward"),
    "selection": lambda: TensorDictModule(Halves(), ["x"], ["y", "z"]).select_out_keys("z"),
    "sequence": lambda: TensorDictSequential(layer(), layer("y", "z"), TensorDictSequential(layer("z", "w"))),
    "named": lambda: TensorDictSequential({"a": layer(), "b": TensorDictModule(nn.Tanh(), ["y"], ["y"])}),
    "selected": lambda: TensorDictSequential(layer(), layer("y", "z")).select_out_keys("z"),
}


def collection():
    x = torch.arange(6.0).view(2, 3)
    return TensorDict({"x": x, "n": {"x": x}}, [2])


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_symbolic_trace_equals_source_module(make):
    module = make()
    traced = symbolic_trace(module)
    assert isinstance(traced, TDGraphModule) and traced.out_keys == [k for k in module.out_keys if k != "_"]
    td = collection()
    assert traced(td) is td
    torch.testing.assert_close(td.to_dict(), module(collection()).to_dict())
    out = TensorDict({}, [2])
    assert traced(collection(), tensordict_out=out) is out
    assert set(out.keys(True, True)) == set(traced.out_keys)
    assert {id(leaf) for leaf in traced.parameters()} == {id(leaf) for leaf in module.parameters()}


def test_symbolic_trace_sequence_passes_tensors_between_members():
    traced = symbolic_trace(MODULES["sequence"]())
    reads = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert [node.args[1] for node in reads] == ["x"]
    assert "return (" in traced.code


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(1, 1),
        WrapModule(lambda td: td),
        TensorDictSequential(layer(), lambda td: td),
        TensorDictModuleWrapper(layer()),
        Quiet(nn.ReLU(), ["x"], ["y"]),
    ],
)
def test_symbolic_trace_other_module_raises(module):
    with pytest.raises(
        TypeError, match="takes a TensorDictModule or a TensorDictSequential of them.*; got a"
    ):
        symbolic_trace(module)


def test_symbolic_trace_partial_tolerant_sequence_raises():
    with pytest.raises(TypeError, match="with partial_tolerant=True, each call chooses which members run"):
        symbolic_trace(TensorDictSequential(layer(), partial_tolerant=True))


def test_traced_module_missing_input_raises():
    with pytest.raises(KeyError, match="x"):
        symbolic_trace(layer())(TensorDict(z=torch.ones(3)))
