"""Pickles, deep copies and state dicts of modules that wrap modules, functions and closures."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import types

import pytest
import torch
from torch import nn

from td_core import TensorDict
from td_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    dispatch,
    set_skip_existing,
)

ONE = torch.ones(1)


def plus(x, by=1):
    """A function that pickle can import by name."""
    return x + by


class Plus:
    """A callable object."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x + self.by


class Copied(nn.Linear):
    """A module with __deepcopy__()."""

    def __deepcopy__(self, memo):
        made = Copied(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        made.was_copied = True
        return made


class Base(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y", "z"]  # noqa: RUF012

    @dispatch
    @set_skip_existing(None)
    def forward(self, tensordict):
        return tensordict.set("y", tensordict["x"] + 1).set("z", tensordict["x"])


def layer():
    return TensorDictModule(nn.Linear(1, 1), ["x"], [("n", "y")])


MODULES = {
    "layer": layer,
    "dict keys": lambda: TensorDictModule(plus, {"x": "a", "by": "b"}, ["y"], inplace="empty"),
    "function": lambda: TensorDictModule(plus, ["x"], ["y"], strict=True, method_kwargs={"by": 3}),
    "builtin": lambda: TensorDictModule(torch.relu, ["x"], ["y"]),
    "partial": lambda: TensorDictModule(functools.partial(plus, by=2), ["x"], ["y"]),
    "object": lambda: TensorDictModule(Plus(2), ["x"], ["y"]),
    "selection": lambda: TensorDictModule(lambda_free_pair, ["x"], ["y", "z"]).select_out_keys("z"),
    "base": lambda: Base().select_out_keys("z"),
    "wrapper": lambda: TensorDictModuleWrapper(layer()),
    "collection": lambda: WrapModule(clone, in_keys=["x"]),
    "sequence": lambda: TensorDictSequential(layer(), Base(), inplace="empty", selected_out_keys=["z"]),
    "names": lambda: TensorDictSequential({"first": layer(), "then": clone}, partial_tolerant=True),
}


def lambda_free_pair(x):
    return x, x + 1


def clone(td):
    return td.clone()


def same(one, other):
    assert list(one.keys(True, True)) == list(other.keys(True, True))
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key])


def by_pickle(module):
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("name", MODULES)
def test_copied_module_gives_same_result(name, copied):
    module = MODULES[name]()
    other = copied(module)
    assert (type(other), other.in_keys, other.out_keys) == (type(module), module.in_keys, module.out_keys)
    assert other.out_keys_source == module.out_keys_source
    assert repr(other).count("\n") == repr(module).count("\n")
    given = TensorDict(x=ONE, a=ONE, b=ONE)
    same(other(given.clone()), module(given.clone()))
    other.out_keys = [*other.out_keys]
    for parameter in other.parameters():
        parameter.data.zero_()
    assert not module.state_dict() or any(value.any() for value in module.state_dict().values())


def test_deepcopy_keeps_submodule_shared_by_members():
    inner = nn.Linear(1, 1)
    twice = copy.deepcopy(TensorDictSequential(*[TensorDictModule(inner, ["x"], ["x"]) for _ in range(2)]))
    assert twice[0].module is twice[1].module is not inner


def test_deepcopy_calls_deepcopy_of_inner_module():
    assert copy.deepcopy(TensorDictModule(Copied(1, 1), ["x"], ["y"])).module.was_copied


def closures():
    by = 3
    return [
        TensorDictModule(lambda x: x + by, ["x"], ["y"]),
        TensorDictModule(functools.partial(lambda x, more: x + by + more, more=0), ["x"], ["y"]),
        TensorDictSequential(lambda td: td.set("y", td["x"] + by)),
        TensorDictModuleWrapper(TensorDictModule(lambda x: x + by, ["x"], ["y"])),
    ]


@pytest.mark.parametrize("number", range(4))
def test_deepcopy_closure_gives_same_result(number):
    module = closures()[number]
    assert copy.deepcopy(module)(TensorDict(x=ONE))["y"] == 4


@pytest.mark.parametrize("number", range(4))
def test_pickle_closure_with_cloudpickle_gives_same_result(number):
    pytest.importorskip("cloudpickle")
    module = closures()[number]
    for copied in (by_pickle, by_torch_save):
        assert copied(module)(TensorDict(x=ONE))["y"] == 4


def test_pickle_closure_calls_cloudpickle(monkeypatch):
    stand_in = types.SimpleNamespace(dumps=lambda function: pickle.dumps(plus))
    monkeypatch.setitem(sys.modules, "cloudpickle", stand_in)
    assert by_pickle(closures()[0]).module is plus


def test_pickle_closure_without_cloudpickle_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for module in closures():
        with pytest.raises(pickle.PicklingError, match="pip install cloudpickle"):
            pickle.dumps(module)


def test_torch_load_closure_weights_only_raises():
    pytest.importorskip("cloudpickle")
    file = io.BytesIO()
    torch.save(closures()[0], file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


def test_state_dict_has_parameters_only_and_loads():
    module, other = MODULES["sequence"](), MODULES["sequence"]()
    assert list(module.state_dict()) == ["module.0.module.weight", "module.0.module.bias"]
    other.load_state_dict(module.state_dict())
    assert torch.equal(other[0].weight, module[0].weight)


def test_to_and_eval_apply_to_wrapped_module():
    module = (
        TensorDictSequential(layer(), TensorDictModule(nn.Dropout(), [("n", "y")], ["z"])).double().eval()
    )
    assert module(ONE.double())[1].dtype == torch.float64
    assert not module[1].module.training
    assert module.requires_grad_(False) is module
    assert len(list(module.named_modules())) == 6
