"""Safetensors files that td or tensordict writes and the other one reads."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core.testing import installed

tensordict = pytest.importorskip("tensordict")
plugin = pytest.importorskip("td_safetensors.plugin")

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="safetensors", distribution="td-safetensors", if_missing=True):
        yield


def make_collections(module: Any) -> dict[str, Any]:
    """Return collections of td or tensordict by name."""
    TensorDict, Stack = module.TensorDict, module.LazyStackedTensorDict

    def member(i: int) -> Any:
        return TensorDict({"x": torch.full((2, 3), i), "n": TensorDict({"y": torch.ones(2) * i}, [2])}, [2])

    cases = {
        "flat": TensorDict(
            {"a": torch.arange(3.0), "z": torch.ones(3, 2).bfloat16(), "b": torch.zeros(3, 0)}, [3]
        ),
        "nested": TensorDict({"a": TensorDict({"b": TensorDict({"c": torch.ones(2)}, [2])}, [2])}, [2]),
        "names": TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["x", None]),
        "empty": TensorDict({}, [4]),
        "empty node": TensorDict({"a": TensorDict({}, [4])}, [4]),
        "keys": TensorDict({"": torch.ones(1), "é/": torch.ones(1), "a.b": torch.zeros(1)}),
        "dtypes": TensorDict(
            {
                str(d): torch.tensor([0, 1]).to(d)
                for d in (torch.bool, torch.uint16, torch.float8_e5m2, torch.complex64)
            }
        ),
        "transposed": TensorDict({"a": torch.arange(6.0).view(2, 3).t()}),
        "stack": Stack(*map(member, range(3)), stack_dim=0),
        "stack dim 1": TensorDict({"s": Stack(*map(member, range(3)), stack_dim=1)}, [2, 3]),
    }
    if HAS_VALUES:
        values = tensordict if module is tensordict else importlib.import_module("td_tensorclass")
        data = values.NonTensorData
        cases["values"] = TensorDict(
            {"s": data("text"), "d": data({"k": [1, None, 2.5]}), "nan": data(float("inf"))}
        )
    return cases


CASES = list(make_collections(td_core))


@pytest.mark.parametrize("name", CASES)
def test_tensordict_reads_file_of_td(name: str, tmp_path: Path, same: Any) -> None:
    ours, theirs = (make_collections(module)[name] for module in (td_core, tensordict))
    td_core.save(ours, tmp_path / "x.safetensors", format="safetensors")
    same(theirs, tensordict.from_safetensors(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("name", CASES)
def test_td_reads_file_of_tensordict(name: str, tmp_path: Path, same: Any) -> None:
    ours, theirs = (make_collections(module)[name] for module in (td_core, tensordict))
    tensordict.to_safetensors(theirs, tmp_path / "x.safetensors")
    same(td_core.load(tmp_path / "x.safetensors"), tensordict.from_safetensors(tmp_path / "x.safetensors"))
    same(td_core.load(tmp_path / "x.safetensors"), ours)


def test_tensordict_reads_tied_leaves_of_td(tmp_path: Path) -> None:
    leaf = torch.arange(3)
    td_core.save(td_core.TensorDict({"a": leaf, "b": leaf}), tmp_path / "x.safetensors", format="safetensors")
    found = tensordict.from_safetensors(tmp_path / "x.safetensors")
    assert found["a"].tolist() == found["b"].tolist() == [0, 1, 2]


def test_unbatched_tensor_is_exchanged(tmp_path: Path) -> None:
    values = pytest.importorskip("td_tensorclass")
    path = tmp_path / "x.safetensors"
    for module, write, read in (
        (tensordict, tensordict.to_safetensors, td_core.load),
        (values, lambda td, path: td.to_safetensors(path), tensordict.from_safetensors),
    ):
        source = td_core if module is values else tensordict
        td = source.TensorDict({"u": module.UnbatchedTensor(torch.arange(2)), "a": torch.ones(3)}, [3])
        write(td, path)
        result = read(path)
        assert (type(result["u"]).__name__, result["u"].data.tolist()) == ("UnbatchedTensor", [0, 1])
        assert result.batch_size == torch.Size([3])
