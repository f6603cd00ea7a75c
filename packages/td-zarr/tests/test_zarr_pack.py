"""Small leaves that share an array."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from td_core import TensorDict, lazy_stack
from td_core.errors import FormatError, UnsupportedOperationError
from td_core.testing import assert_same
from td_core.testing._collection_samples import make_samples, make_value_samples
from td_zarr import append, from_zarr, inspect, load, save, verify
from td_zarr import open as open_group


def make_data() -> TensorDict:
    leaves = {f"k{i}": torch.arange(i + 1.0) for i in range(5)}
    large = {"large": torch.arange(5000), "strided": torch.arange(6.0).view(2, 3).t(), "one": torch.tensor(7)}
    return TensorDict({**leaves, **large, "n": {"flag": torch.tensor([True]), "scalar": torch.tensor(1.5)}})


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checksums": {"checksums": True},
    "chunks": {"chunks": 3, "compressors": zarr.codecs.ZstdCodec()},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_packed_leaves_come_back(options: str, path: Path) -> None:
    save(make_data(), path, pack="auto", **OPTIONS[options])
    assert_same(load(path), make_data())
    assert load(path, keys=("n", "scalar"))["n", "scalar"] == 1.5
    assert verify(path).ok
    arrays = set(dict(zarr.open_group(path, mode="r").members(max_depth=None)))
    assert arrays == {"packed_float32", "large", "one", "n", "n/flag"}
    tree = inspect(path)
    assert (tree.nbytes, tree.children["k1"].shape) == (make_data().bytes(), [2])


@pytest.mark.parametrize("name", [*make_samples(), *make_value_samples()])
def test_packed_sample_comes_back(name: str, path: Path) -> None:
    data = {**make_samples(), **make_value_samples()}[name]
    save(data, path, pack="auto")
    assert_same(load(path), data)
    assert_same(open_group(path).clone(), data.clone())


def test_packed_leaves_open_for_writing(path: Path) -> None:
    save(make_data(), path, pack=1000)
    live = from_zarr(path, mode="r+")
    live["k3"].zero_()
    live["n", "scalar"] = torch.tensor(2.5)
    live["new"] = torch.ones(2)
    del live["k0"]
    again = pickle.loads(pickle.dumps(open_group(path)))
    for found in (load(path), again, live):
        assert found["k3"].tolist() == [0.0] * 4
        assert found["k4"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert (found["n", "scalar"], found["strided"].tolist()) == (2.5, make_data()["strided"].tolist())
        assert "k0" not in found.keys()
        assert found["new"].sum() == 2


def test_pack_leaves_stacks_and_large_leaves_alone(path: Path) -> None:
    stack = lazy_stack([TensorDict({"a": torch.full((2,), i)}) for i in range(3)])
    save(TensorDict({"s": stack, "x": torch.zeros(3), "y": torch.zeros(4)}), path, pack=14)
    assert set(dict(zarr.open_group(path, mode="r").arrays())) == {"x", "y"}
    assert load(path)["s"][2]["a"].tolist() == [2, 2]


def test_append_to_packed_leaves_raises(path: Path) -> None:
    td = TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3])
    save(td, path, pack="auto")
    with pytest.raises(UnsupportedOperationError, match="leaves share arrays; save it without pack="):
        append(td, path)


@pytest.mark.parametrize("pack", [-1, "all", 1.5, True])
def test_wrong_limit_raises(pack: Any, path: Path) -> None:
    with pytest.raises(ValueError, match="pack is a number of bytes, 'auto' or None"):
        save(TensorDict(), path, pack=pack)


@pytest.mark.parametrize(
    "change", [{"begin": 100}, {"begin": -1}, {"shape": [100]}, {"shape": ["x"]}, {"packed": 3}]
)
def test_damaged_place_raises(change: Any, path: Path) -> None:
    save(make_data(), path, pack="auto")
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    header = str(group.attrs["td"])
    place = '{"packed":"packed_float32","begin":1,"shape":[2]}'
    assert place in header
    damaged = {"packed": "packed_float32", "begin": 1, "shape": [2], **change}
    group.attrs["td"] = header.replace(place, json.dumps(damaged))
    with pytest.raises(FormatError):
        load(path)
