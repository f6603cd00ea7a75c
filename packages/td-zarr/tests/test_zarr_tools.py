"""What zarr-python, xarray and tensorstore see of our groups, and what we read of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from td_core import TensorDict, lazy_stack
from td_zarr import load, save
from td_zarr import open as open_group

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunks": 2, "compressors": zarr.codecs.ZstdCodec()},
}


def make_data() -> TensorDict:
    stack = lazy_stack([TensorDict({"x": torch.full((4, 2), i)}, [4]) for i in range(3)], 1)
    inner = TensorDict({"b": torch.arange(12).view(4, 3), "s": stack}, [4, 3], names=["t", None])
    leaves = {"a": torch.arange(24.0).view(4, 2, 3), "h": torch.ones(4).bfloat16(), "n": inner}
    return TensorDict(leaves, [4], names=["t"])


#: Names of the dims of each array.
DIMS = {
    "a": ("t", "a_1", "a_2"),
    "h": ("t",),
    "n/b": ("t", "batch_1"),
    "n/s/x": ("t", "batch_1", "x_2"),
}


@pytest.fixture(params=OPTIONS)
def saved(request: pytest.FixtureRequest, path: Path) -> Path:
    """Save a collection with names, two levels and a lazy stack."""
    save(make_data(), path, **OPTIONS[request.param])
    return path


@pytest.mark.parametrize("consolidated", [False, True])
def test_zarr_python_reads_arrays(consolidated: bool, saved: Path) -> None:
    group = zarr.open_group(saved, mode="r", use_consolidated=consolidated)
    members = dict(group.members(max_depth=None))
    arrays = {name: node for name, node in members.items() if isinstance(node, zarr.Array)}
    assert {name: node.metadata.dimension_names for name, node in arrays.items()} == DIMS
    assert np.array_equal(arrays["a"][...], make_data()["a"].numpy())
    assert np.array_equal(arrays["n/s/x"][...], np.broadcast_to(np.arange(3)[None, :, None], (4, 3, 2)))
    assert (arrays["h"].dtype, arrays["h"].attrs["td_dtype"]) == (np.uint16, "bfloat16")
    assert members["n"].attrs["__tensordict__"] == {"batch_size": [4, 3], "version": 1, "names": ["t", None]}


def test_xarray_opens_root_and_tree(saved: Path) -> None:
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(saved) as dataset:
        assert dataset["a"].dims == DIMS["a"]
        assert np.array_equal(dataset["a"].isel(t=slice(1, 3)).values, make_data()["a"][1:3].numpy())
    with xarray.open_datatree(saved, engine="zarr") as tree:
        assert {name: tree[name].dims for name in DIMS} == DIMS
        assert np.array_equal(tree["n/b"].values, make_data()["n", "b"].numpy())


def test_td_reads_dataset_of_xarray(path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    dataset = xarray.Dataset({"a": (("t", "x"), np.arange(6.0).reshape(3, 2)), "b": (("t",), np.arange(3))})
    dataset.to_zarr(path, zarr_format=3, consolidated=False)
    found = load(path)
    assert torch.equal(found["a"], torch.arange(6.0).view(3, 2).double())
    assert open_group(path)["b"].tolist() == [0, 1, 2]


def open_with_tensorstore(path: Path, **options: Any) -> Any:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, **options}
    return tensorstore.open(spec).result()


def test_tensorstore_reads_arrays(saved: Path) -> None:
    array = open_with_tensorstore(saved / "a")
    assert np.array_equal(array.read().result(), make_data()["a"].numpy())
    assert array.domain.labels == DIMS["a"]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_td_reads_arrays_of_tensorstore(name: str, path: Path) -> None:
    zarr.open_group(path, mode="w")
    metadata = {
        "shape": [5],
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    }
    array = open_with_tensorstore(path / "a", metadata=metadata, create=True)
    wanted = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, name))
    array.write(np.array([0, 1, 1, 0, 1]).astype(array.dtype.numpy_dtype)).result()
    for td in (load(path), open_group(path)):
        assert td["a"].dtype is wanted.dtype
        assert torch.equal(td["a"].float(), wanted.float())


def test_same_files_from_both_engines(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("td_zarr._array_engines")
    pytest.importorskip("tensorstore")
    monkeypatch.setattr(engines, "tensorstore", None)
    other = tmp_path / "other.zarr"
    save(make_data(), other, **(OPTIONS["chunks"] if (saved / "a" / "c").is_dir() else {}))
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert {file.relative_to(saved) for file in files} == {
        f.relative_to(other) for f in other.rglob("*") if f.is_file()
    }
    assert (load(saved) == load(other)).all()
    assert all(
        file.read_bytes() == (other / file.relative_to(saved)).read_bytes()
        for file in files
        if "json" in file.name
    )


def test_names_of_dims_differ_within_array_and_agree_in_group(path: Path) -> None:
    leaves = {
        "a_1": torch.zeros(2, 3),
        "a": torch.zeros(2, 5),
        "b": torch.zeros(2, 2),
        "batch_1": torch.zeros(2, 2, 4),
    }
    save(TensorDict(leaves, [2], names=["b_1"]), path)
    group = zarr.open_group(path, mode="r")
    names = {name: array.metadata.dimension_names for name, array in group.arrays()}
    assert all(len(set(dims)) == len(dims) for dims in names.values())
    sizes: dict[str, set[int]] = {}
    for name, dims in names.items():
        for dim, size in zip(dims, group[name].shape, strict=True):
            sizes.setdefault(dim, set()).add(size)
    assert all(len(found) == 1 for found in sizes.values())


def test_values_are_left_out_for_tensordict_where_json_changes_them(path: Path) -> None:
    values = pytest.importorskip("td_tensorclass")
    data = {"s": "text", "d": {"k": [1, None]}, "t": (1, 2)}
    td = TensorDict({key: values.NonTensorData(value) for key, value in data.items()})
    save(td, path)
    arrays = dict(zarr.open_group(path, mode="r").arrays())
    assert {name: bytes(array[...]) for name, array in arrays.items()} == {
        "s": b'"text"',
        "d": b'{"k": [1, null]}',
    }
    assert load(path)["t"] == (1, 2)
