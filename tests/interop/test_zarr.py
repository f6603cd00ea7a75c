"""Zarr groups that td or tensordict writes and the other one reads."""

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
zarr = pytest.importorskip("zarr")
plugin = pytest.importorskip("td_zarr.plugin")

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="zarr", distribution="td-zarr", if_missing=True):
        yield


def make_collections(module: Any) -> dict[str, Any]:
    """Return collections of td or tensordict by name."""
    TensorDict = module.TensorDict
    cases = {
        "flat": TensorDict({"a": torch.arange(3.0), "z": torch.ones(3, 2), "b": torch.zeros(3, 0)}, [3]),
        "nested": TensorDict({"a": TensorDict({"b": TensorDict({"c": torch.ones(2)}, [2])}, [2])}, [2]),
        "names": TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["x", None]),
        "empty node": TensorDict({"a": TensorDict({}, [4])}, [4]),
        "batch sizes": TensorDict({"a": TensorDict({"b": torch.ones(2, 3)}, [2, 3])}, [2]),
        "no batch size": TensorDict({"a": torch.ones(2), "b": torch.ones(2)}),
        "dtypes": TensorDict(
            {
                str(d): torch.tensor([0, 1]).to(d)
                for d in (torch.bool, torch.uint16, torch.float16, torch.int8, torch.complex64, torch.float64)
            }
        ),
        "transposed": TensorDict({"a": torch.arange(6.0).view(2, 3).t()}),
    }
    if HAS_VALUES:
        values = tensordict if module is tensordict else importlib.import_module("td_tensorclass")
        data, stack = values.NonTensorData, values.NonTensorStack
        cases["values"] = TensorDict({"s": data("text"), "d": data({"k": [1, None, 2.5]}), "n": data(3)})
        cases["stacks"] = TensorDict({"s": stack("a", "b"), "n": stack(*map(data, range(2)))}, [2])
    return cases


CASES = list(make_collections(td_core))


def sort_keys(data: Any) -> Any:
    """Return a collection of tensordict with its keys in the order of their names, as it lists those of a group."""
    return data.select(*sorted(data.keys()))


@pytest.mark.parametrize("options", [{}, {"chunks": 1}, {"compressors": "zstd"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tensordict_reads_group_of_td(name: str, options: Any, tmp_path: Path, same: Any) -> None:
    if "compressors" in options:
        options = {"compressors": zarr.codecs.ZstdCodec()}
    ours, theirs = (make_collections(module)[name] for module in (td_core, tensordict))
    td_core.save(ours, tmp_path / "x.zarr", format="zarr", **options)
    found = tensordict.TensorDict.from_zarr(tmp_path / "x.zarr").to_tensordict()
    same(sort_keys(theirs), sort_keys(found))


@pytest.mark.parametrize("name", CASES)
def test_td_reads_group_of_tensordict(name: str, tmp_path: Path, same: Any) -> None:
    ours, theirs = (make_collections(module)[name] for module in (td_core, tensordict))
    theirs.to_zarr(tmp_path / "x.zarr")
    for found in (
        td_core.load(tmp_path / "x.zarr"),
        td_core.TensorDict.from_zarr(tmp_path / "x.zarr").clone(),
    ):
        same(found.select(*ours.keys()), theirs)


def test_tensordict_reads_lazy_stack_as_dense_level(tmp_path: Path) -> None:
    members = [td_core.TensorDict({"x": torch.full((2, 3), i)}, [2]) for i in range(3)]
    td_core.save(td_core.lazy_stack(members, 1), tmp_path / "x.zarr", format="zarr")
    found = tensordict.TensorDict.from_zarr(tmp_path / "x.zarr")
    assert found.batch_size == torch.Size([2, 3])
    assert found["x"][:, 2].tolist() == [[2] * 3] * 2


def test_tensordict_opens_group_with_leaves_that_it_lacks(tmp_path: Path) -> None:
    values = pytest.importorskip("td_tensorclass")
    ragged = torch.nested.nested_tensor([torch.ones(i + 1) for i in range(3)], layout=torch.jagged)
    td = td_core.TensorDict(
        {
            "a": torch.arange(3),
            "r": ragged,
            "u": values.UnbatchedTensor(torch.ones(7)),
            "h": torch.ones(3).bfloat16(),
        },
        [3],
    )
    td_core.save(td, tmp_path / "x.zarr", format="zarr")
    found = tensordict.TensorDict.from_zarr(tmp_path / "x.zarr")
    assert found["a"].tolist() == [0, 1, 2]
    assert found["h"].dtype is torch.uint16


def test_pickle_of_tensordict_loads_only_if_allowed(tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    data = tensordict.TensorDict({"v": tensordict.NonTensorData((1, 2))})
    data.to_zarr(tmp_path / "x.zarr", allow_pickle=True)
    with pytest.raises(td_core.FormatError, match="allow_pickle=True"):
        td_core.load(tmp_path / "x.zarr")
    assert td_core.load(tmp_path / "x.zarr", allow_pickle=True)["v"] == (1, 2)
