"""HDF5 files that td or tensordict writes and the other one reads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core.testing import installed

tensordict = pytest.importorskip("tensordict")
pytest.importorskip("h5py")
plugin = pytest.importorskip("td_hdf5.plugin")

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="hdf5", distribution="td-hdf5", if_missing=True):
        yield


def make_collections(module: Any) -> dict[str, Any]:
    """Return collections of td or tensordict by name, which both can store."""
    TensorDict = module.TensorDict
    return {
        "flat": TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2), "c": torch.ones(3).bool()}, [3]),
        "nested": TensorDict(
            {"n": TensorDict({"m": TensorDict({"x": torch.ones(2)}, [2])}, [2]), "y": torch.zeros(2)}, [2]
        ),
        "dtypes": TensorDict(
            {
                str(dtype).removeprefix("torch."): torch.tensor([0, 1]).to(dtype)
                for dtype in (
                    torch.bool,
                    torch.uint8,
                    torch.int16,
                    torch.float16,
                    torch.float64,
                    torch.complex64,
                )
            },
            [2],
        ),
        "two dims": TensorDict({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, 3, 4)}, [2, 3]),
        "transposed": TensorDict({"a": torch.arange(6.0).view(2, 3).t()}, [3]),
        "key": TensorDict({"é b": torch.ones(1), "td.0": torch.zeros(1)}, [1]),
    }


def list_leaves(data: Any) -> dict[Any, Any]:
    return {
        key: (leaf.dtype, leaf.tolist())
        for key, leaf in data.items(True, True)
        if isinstance(leaf, torch.Tensor)
    }


@pytest.mark.parametrize(
    "options", [{}, {"chunks": True, "compression": "gzip"}], ids=["contiguous", "chunks"]
)
@pytest.mark.parametrize("name", make_collections(td_core))
def test_tensordict_reads_file_of_td(name: str, options: Any, tmp_path: Path) -> None:
    data = make_collections(td_core)[name]
    td_core.save(data, tmp_path / "x.h5", format="hdf5", **options)
    found = tensordict.PersistentTensorDict.from_h5(str(tmp_path / "x.h5"))
    assert list_leaves(found.to_tensordict()) == list_leaves(data)
    assert list_leaves(found[0]) == list_leaves(data[0])
    found.close()


@pytest.mark.parametrize(
    "options", [{}, {"chunks": True, "compression": "gzip"}], ids=["contiguous", "chunks"]
)
@pytest.mark.parametrize("name", make_collections(td_core))
def test_td_reads_file_of_tensordict(name: str, options: Any, tmp_path: Path) -> None:
    data = make_collections(tensordict)[name]
    path = str(tmp_path / "x.h5")
    data.to_h5(path, **options).close()
    for found in (td_core.load(path), td_core.TensorDict.from_h5(path), td_core.open(path)):
        assert list_leaves(found.clone()) == list_leaves(data)
        assert found.batch_size[: len(data.batch_size)] == data.batch_size
    assert td_core.verify(path).ok


@pytest.mark.skipif(not HAS_VALUES, reason="needs td-tensorclass")
def test_td_reads_values_of_tensordict(tmp_path: Path) -> None:
    path = str(tmp_path / "x.h5")
    stored = tensordict.PersistentTensorDict.from_dict(
        tensordict.TensorDict({"a": torch.ones(3), "s": tensordict.NonTensorStack("x", "y", "z")}, [3]), path
    )
    stored["_len"] = tensordict.NonTensorData(7)
    stored["text"] = tensordict.NonTensorData("abc")
    stored.close()
    found = td_core.load(path)
    assert (found["_len"], found["text"], list(found["s"]), found.batch_size) == (
        7,
        "abc",
        ["x", "y", "z"],
        (3,),
    )


def test_td_adds_to_file_of_tensordict(tmp_path: Path) -> None:
    path = str(tmp_path / "x.h5")
    tensordict.TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(3)}}, [3]).to_h5(path).close()
    stored = td_core.TensorDict.from_h5(path, mode="r+")
    stored["n", "c"] = torch.arange(3)
    stored["a"] += 1
    stored.close()
    found = tensordict.PersistentTensorDict.from_h5(path)
    assert (found["n", "c"].tolist(), found["a"].tolist()) == ([0, 1, 2], [2, 2, 2])
    found.close()
