"""Checkpoints of models and optimizers of torch, in every format."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import td_core
from td_core import (
    CodecError,
    LazyStackedTensorDict,
    StructureError,
    TensorDict,
    TensorDictParams,
    load,
    save,
)
from td_core._encode.value_codec import is_same_value
from td_core.testing import assert_same

#: A path for each format, and for the archives of the default one, with the package of the format.
PACKAGES = {
    "save": "memmap",
    "save.tdz": "memmap",
    "save.safetensors": "safetensors",
    "save.h5": "hdf5",
    "save.zarr": "zarr",
}

pytestmark = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture(autouse=True)
def _skip_missing_formats(name: str) -> None:
    pytest.importorskip(f"td_{PACKAGES[name]}")


class Net(nn.Module):
    """A module with tied weights, buffers, and a buffer that state dicts omit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.full((2,), 1 + 2j))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x) + self.second(x)) * self.scale.float()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(
        [{"params": list(parameters)[:2]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.5}],
        betas=(0.8, 0.9),
    ),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.01, history_size=3),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        ],
        [2],
    ),
}


def make_run(optimizer: str, scheduler: str, steps: int = 2) -> tuple[Any, Any, Any]:
    """Build a module, an optimizer and a scheduler that have taken some steps."""
    model = Net()
    optim = OPTIMIZERS[optimizer](model.parameters())
    plan = SCHEDULERS[scheduler](optim)
    for step in range(steps):
        take_step(model, optim, plan, step)
    return model, optim, plan


def take_step(model: Any, optimizer: Any, scheduler: Any, step: int) -> None:
    data = torch.linspace(-1, 1, 15).view(5, 3) + step

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(compute)
    scheduler.step(*([loss.item()] if "ReduceLR" in type(scheduler).__name__ else []))


def assert_equal(first: Any, second: Any) -> None:
    """Assert that two trees are equal, with the classes and the order of their containers."""
    assert is_same_value(first, second)
    assert repr(first) == repr(second)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")
def test_checkpoint_of_run_continues_alike(optimizer: str, scheduler: str, name: str, tmp_path: Path) -> None:
    run = make_run(optimizer, scheduler)
    parts = dict(zip(("model", "optimizer", "scheduler"), run, strict=True))
    path = tmp_path / name
    tree = {**parts, "step": 2, "random": torch.get_rng_state()}
    assert save(tree, path) is tree
    states = {key: copy.deepcopy(part.state_dict()) for key, part in parts.items()}
    found = load(path)
    assert_equal({key: found[key] for key in parts}, states)
    assert found["model"]["first.weight"] is found["model"]["second.weight"]
    assert found["model"]._metadata == run[0].state_dict()._metadata
    fresh = make_run(optimizer, scheduler, steps=0)
    rest = load(path, into=dict(zip(parts, fresh, strict=True)))
    assert_equal(rest, {key: tree[key] for key in ("step", "random")})
    for step in (2, 3):
        take_step(*run, step)
        take_step(*fresh, step)
    assert_equal([part.state_dict() for part in fresh], [part.state_dict() for part in run])
    assert_equal({key: load(path)[key] for key in parts}, states)  # the steps did not reach the files


_keys = st.one_of(
    st.text(max_size=3), st.integers(-2, 2), st.none(), st.booleans(), st.tuples(st.integers(0, 1))
)
_leaves = st.one_of(
    st.builds(
        torch.full,
        st.sampled_from([(), (2,), (0,), (1, 2)]),
        st.integers(0, 1),
        dtype=st.sampled_from(
            [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn]
        ),
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=2),
    st.none(),
)
_trees = st.recursive(
    _leaves,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=2).map(tuple),
        st.dictionaries(_keys, below, max_size=3),
    ),
    max_leaves=8,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=st.dictionaries(_keys, _trees, max_size=3))
def test_checkpoint_of_any_tree_comes_back(tree: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save(tree, path)
    found = load(path)
    assert_equal(found, tree)
    save(found, path)
    assert_equal(load(path), tree)


def test_checkpoint_keeps_collections(name: str, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    data = TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}, [3], "cpu", names=["time"])
    tree = {
        "dense": data,
        "lazy": LazyStackedTensorDict(data, data.clone(), stack_dim=0),
        "params": TensorDictParams(TensorDict({"w": torch.ones(2)}, device="cpu")),
        "text": TensorDict({"s": "abc", "a": torch.ones(1)}, device="cpu"),
    }
    save(tree, tmp_path / name)
    found = load(tmp_path / name)
    assert list(found) == list(tree)
    for key, value in tree.items():
        assert_same(found[key], value)


def test_checkpoint_is_inspected_verified_and_opened(name: str, tmp_path: Path) -> None:
    save({"m": nn.Linear(2, 1), "step": 3}, tmp_path / name)
    tree = td_core.inspect(tmp_path / name)
    assert list(tree.children) == ["m.weight", "m.bias"]
    assert td_core.verify(tmp_path / name).ok
    opened = td_core.open(tmp_path / name)
    assert opened["m.weight"].shape == (1, 2)


def test_checkpoint_that_needs_a_pickle_leaves_old_save(name: str, tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / name)
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(
        CodecError, match=r"cannot save \['m'\]\['f'\]: only a pickle could hold a .*function"
    ):
        save({"a": 2, "m": {"t": torch.ones(2), "f": make_run}}, tmp_path / name)
    assert load(tmp_path / name) == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == names


def test_checkpoint_on_meta_has_shapes(name: str, tmp_path: Path) -> None:
    save({"m": nn.Linear(2, 1), "step": 3}, tmp_path / name)
    found = load(tmp_path / name, device="meta")
    assert found["m"]["weight"].device.type == "meta"
    assert found["m"]["weight"].shape == (1, 2)
    assert found["step"] == 3


def test_checkpoint_saved_early_has_values_of_call(name: str, tmp_path: Path) -> None:
    if name == "save.tdz":
        pytest.skip("an archive is written by one thread")
    value = torch.zeros(1000)
    options = {"num_threads": 1} if name == "save" else {}
    future = save({"a": value, "step": 3}, tmp_path / name, return_early=True, **options)
    value.fill_(1)
    future.result()
    assert load(tmp_path / name)["a"].sum() == 0


_PROGRAM = """
import torch, td_core
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
td_core.save({"model": model, "optimizer": optimizer, 3: (None, True)}, PATH)
assert td_core.load(PATH, into={"model": model, "optimizer": optimizer}) == {3: (None, True)}
import sys
assert "td_tensorclass" not in sys.modules
"""


def test_checkpoint_needs_no_other_package(name: str, tmp_path: Path) -> None:
    plugins = f"store,{PACKAGES[name]}"
    program = _PROGRAM.replace("PATH", repr(str(tmp_path / name)))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TD_PLUGINS": plugins},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_leaf_of_two_collections_is_one_leaf_again(name: str, tmp_path: Path) -> None:
    weight, rows = nn.Parameter(torch.ones(2)), torch.zeros(3)
    tree = {
        "actor": TensorDictParams(TensorDict(weight=weight)),
        "critic": TensorDictParams(
            TensorDict(head=TensorDict(weight=weight), bias=nn.Parameter(torch.ones(1)))
        ),
        "data": [TensorDict(x=rows), TensorDict(y=rows)],
    }
    save(tree, tmp_path / name)
    found = load(tmp_path / name)
    assert found["actor"]["weight"] is found["critic"]["head", "weight"]
    assert isinstance(found["actor"]["weight"], nn.Parameter)
    assert found["data"][0]["x"] is found["data"][1]["y"]
    for key in ("actor", "critic"):
        assert_same(found[key], tree[key])


def test_part_of_a_checkpoint_loads_as_the_error_says(name: str, tmp_path: Path) -> None:
    model, part = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.Sequential(nn.Linear(3, 4))
    save({"model": model}, tmp_path / name)
    before = part[0].weight.detach().clone()
    with pytest.raises(TypeError, match=r"load_state_dict\(load\(path\)\['model'\], strict=False\)"):
        load(tmp_path / name, into={"model": part}, strict=False)
    assert part[0].weight.equal(before)
    part.load_state_dict(load(tmp_path / name)["model"], strict=False)
    assert part[0].weight.equal(model[0].weight)
    assert load(tmp_path / name, into={"model": model}, strict=True) == {}


def test_parameters_of_a_collection_load_into_a_module_as_the_error_says(name: str, tmp_path: Path) -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    save(TensorDict.from_module(model).data, tmp_path / name)
    with pytest.raises(
        StructureError, match=r"is not a mapping; .* call to_module\(model, inplace=True\) of the result"
    ):
        load(tmp_path / name, into={"model": other})
    weight = other.weight
    load(tmp_path / name).to_module(other, inplace=True)
    assert weight is other.weight
    assert weight.equal(model.weight)
