"""Groups that tensordict and other programs have written, of version 2 and 3 of the format."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import td_core
from td_core import TensorDict
from td_core.errors import FormatError
from td_zarr import from_zarr, load, verify
from td_zarr import open as open_group

# Early releases of zarr 3.1 say this of arrays of strings.
pytestmark = pytest.mark.filterwarnings("ignore:The codec `vlen-utf8`")

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("packed", [True, False], ids=["zip", "directory"])
def test_group_of_tensordict_loads(packed: bool, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    location = FIXTURES / "mixed.zarr.zip"
    if not packed:
        zipfile.ZipFile(location).extractall(tmp_path)
        location = tmp_path
    for td in (td_core.load(location), open_group(location), from_zarr(location)):
        assert (td.batch_size, td.names, td["n"].batch_size, td["n"].names) == (
            (3,),
            ["t"],
            (3, 4),
            ["t", None],
        )
        assert td["a"].tolist() == torch.arange(6.0).view(3, 2).tolist()
        assert td["n", "b"].dtype is torch.float32
        assert (td["s"], td["num"], list(td["st"])) == ("abc", 3, ["a", "b", "c"])
    assert verify(location).ok


def test_pickled_value_loads_only_if_allowed() -> None:
    pytest.importorskip("td_tensorclass")
    location = FIXTURES / "pickled.zarr.zip"
    for call in (load, open_group, from_zarr):
        with pytest.raises(
            FormatError, match=r"pickled.zarr.zip: the value 'p' is a pickle.*allow_pickle=True"
        ):
            call(location)
        assert call(location, allow_pickle=True)["p"] == {1, 2}


def add_array(group: zarr.Group, name: str, data: Any, **options: Any) -> None:
    """Write an array; zarr 3.0 cannot create it with its elements."""
    group.create_array(name, shape=data.shape, dtype=data.dtype, **options)[...] = data


class Trap:
    """A value whose pickle creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_pickle_in_group_is_not_executed(tmp_path: Path) -> None:
    payload = np.frombuffer(pickle.dumps(Trap(tmp_path / "trap")), np.uint8)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    add_array(group, "v", payload, attributes={"__tensordict_non_tensor__": {"encoding": "pickle"}})
    with pytest.raises(FormatError, match="is a pickle"):
        load(tmp_path / "x.zarr")
    assert not (tmp_path / "trap").exists()


def make_group(path: Path, version: int, **options: Any) -> zarr.Group:
    """Return a group of another program with two levels."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    add_array(group, "a", np.arange(6.0).reshape(3, 2), **options)
    add_array(group, "n/b", np.arange(3), chunks=(2,))
    return group


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_group_of_other_program_loads(version: int, consolidated: bool, path: Path) -> None:
    make_group(path, version)
    if consolidated:
        with warnings.catch_warnings(action="ignore"):
            zarr.consolidate_metadata(path)
    for td in (td_core.load(path), open_group(path), open_group(path, mode="c")):
        assert {key: td[key].tolist() for key in ("a", ("n", "b"))} == {
            "a": [[0, 1], [2, 3], [4, 5]],
            ("n", "b"): [0, 1, 2],
        }
        assert td.batch_size == (3,)
    assert load(path, keys=("n", "b"))["n", "b"].dtype is torch.int64
    assert from_zarr(path).batch_size == (3,)
    assert from_zarr(path, batch_size=[]).batch_size == ()
    assert from_zarr(path, batch_dims=1)["a"].shape == (3, 2)
    opened = open_group(path, mode="r+")
    opened["n", "b"][1] = 7
    assert zarr.open_group(path, mode="r")["n/b"][...].tolist() == [0, 7, 2]


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunk_of_other_program_is_fill_value(version: int, path: Path) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.create_array("a", shape=(4,), chunks=(2,), dtype="f4", fill_value=3)[:2] = 1
    assert load(path)["a"].tolist() == [1, 1, 3, 3]
    assert open_group(path)["a"].tolist() == [1, 1, 3, 3]


DTYPES = [">f4", "<f8", ">i2", "u4", "bool", "c8", ">c16", "f2"]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_of_other_program_is_read(dtype: str, version: int, path: Path) -> None:
    data = np.arange(6).reshape(3, 2).astype(dtype)
    add_array(zarr.open_group(path, mode="w", zarr_format=version), "a", data)
    for td in (load(path), open_group(path)):
        assert torch.equal(td["a"].clone(), torch.from_numpy(data.astype(np.dtype(dtype).newbyteorder("="))))


def test_order_and_filters_of_version_2_are_read(path: Path) -> None:
    data = np.arange(12).reshape(3, 4)
    add_array(zarr.open_group(path, mode="w", zarr_format=2), "a", data, order="F", chunks=(2, 3))
    assert load(path)["a"].tolist() == data.tolist()
    assert open_group(path)[...]["a"][1:, ::2].tolist() == data[1:, ::2].tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtype_that_zarr_python_lacks_is_read(name: str, path: Path) -> None:
    dtype = getattr(torch, name)
    wanted = torch.tensor([0.5, 1.0, -2.0]).to(dtype)
    group = zarr.open_group(path, mode="w")
    add_array(group, "a", wanted.view(torch.uint8).numpy().view(f"u{dtype.itemsize}"), compressors=None)
    document = json.loads((path / "a" / "zarr.json").read_text())
    (path / "a" / "zarr.json").write_text(json.dumps({**document, "data_type": name}))
    for td in (load(path), open_group(path), open_group(path, mode="r+")):
        assert td["a"].dtype is dtype
        assert td["a"].float().tolist() == [0.5, 1, -2]


def test_array_of_strings_is_stack_of_values(path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    group = zarr.open_group(path, mode="w")
    group.create_array("s", shape=(3,), dtype=str)[...] = np.array(["a", "b", "c"])
    add_array(group, "a", np.arange(3))
    assert list(load(path)["s"]) == ["a", "b", "c"]
    assert list(from_zarr(path, non_tensor_as_stack=True)["s"]) == ["a", "b", "c"]
    assert from_zarr(path, non_tensor_as_stack=False)["s"] == ["a", "b", "c"]
    assert from_zarr(path, non_tensor_as_stack=False)[1]["s"] == ["a", "b", "c"]
    assert [found[1]["s"] for found in (from_zarr(path), from_zarr(path, batch_size=[3]))] == ["b", "b"]


@pytest.mark.filterwarnings("ignore:The data type")
def test_times_are_integers(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    add_array(group, "t", np.array(["2020-01-01", "2020-01-02"], "datetime64[s]"))
    assert load(path)["t"].tolist() == [1577836800, 1577923200]


def test_attributes_of_level_that_are_damaged_raise(path: Path) -> None:
    group = make_group(path, 3)
    for level in (
        {"batch_size": [3]},
        {"version": 2, "batch_size": [3]},
        {"version": 1, "batch_size": "x"},
        3,
    ):
        group.attrs["__tensordict__"] = level
        with pytest.raises(FormatError, match="data.zarr: the attribute __tensordict__ is damaged"):
            load(path)
    group.attrs["__tensordict__"] = {"version": 1, "batch_size": [5]}
    with pytest.raises(FormatError, match=r"data.zarr: "):
        load(path)


def test_array_alone_is_not_a_group(path: Path) -> None:
    zarr.create_array(path, data=np.arange(3))
    with pytest.raises(FormatError, match="is not a Zarr group: its node_type is 'array'"):
        td_core.load(path, format="zarr")


def test_groups_below_store_of_others(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "x.zarr", mode="w")
    TensorDict({"a": torch.ones(2)}).to_zarr(root.create_group("inner"))
    assert load(root["inner"])["a"].tolist() == [1, 1]
    assert load(tmp_path / "x.zarr")["inner", "a"].tolist() == [1, 1]
