"""Arrays and groups of zarr that are set as entries of collections."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from td_core import LockedError, TensorDict, from_any
from td_core.errors import BatchSizeError
from td_store import StoredTensor
from td_zarr import save

NUMBERS = np.arange(12, dtype="f4").reshape(4, 3)


def make_store(kind: str, path: Path) -> Any:
    return zarr.storage.MemoryStore() if kind == "memory" else zarr.storage.LocalStore(path)


def make_array(kind: str, path: Path, key: str, *, zarr_format: int = 3, data: Any = NUMBERS) -> Any:
    """Return an array of chunks of two rows, below a group or at the root of a store."""
    store = make_store(kind, path)
    if not key:
        made: Any = zarr.create_array(store, data=data, chunks=(2, *data.shape[1:]), zarr_format=zarr_format)
        return made
    zarr.create_group(store, zarr_format=zarr_format)
    return zarr.create_array(store, name=key, data=data, chunks=(2, *data.shape[1:]), zarr_format=zarr_format)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("key", ["x", "run/x", ""])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_set_array_stores_leaf_in_its_store(kind: str, key: str, zarr_format: int, path: Path) -> None:
    array = make_array(kind, path, key, zarr_format=zarr_format)
    td = TensorDict({"a": array}, [4])
    assert torch.equal(td["a"][:], torch.from_numpy(NUMBERS))
    assert td[torch.tensor([3, 1])]["a"].tolist() == NUMBERS[[3, 1]].tolist()
    is_stored = kind == "local" or key != ""
    assert isinstance(td["a"], StoredTensor) == is_stored
    td["a"][0] = 7
    assert (array[0].tolist() == [7, 7, 7]) == is_stored
    assert torch.equal(from_any(array)[1:], torch.from_numpy(NUMBERS[1:]))


def test_array_that_is_read_only_refuses_writes(path: Path) -> None:
    make_array("local", path, "x")
    array = zarr.open_group(path, mode="r")["x"]
    td = TensorDict({"a": array}, [4])
    with pytest.raises(LockedError):
        td["a"][0] = 7
    assert pickle.loads(pickle.dumps(td))["a"][:].tolist() == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (np.array([1, 0, 1, 1], "?"), torch.tensor([True, False, True, True])),
        (np.arange(4, dtype=">i2"), torch.arange(4, dtype=torch.int16)),
        (np.arange(4) + 1j, torch.arange(4) + 1j),
    ],
    ids=["bool", "byte order", "complex"],
)
@pytest.mark.parametrize("key", ["x", ""])
def test_set_array_of_other_dtypes(data: Any, expected: torch.Tensor, key: str, path: Path) -> None:
    found = TensorDict({"a": make_array("local", path, key, data=data)}, [4])["a"][:]
    assert found.tolist() == expected.tolist() and found.dtype.is_complex == expected.dtype.is_complex


@pytest.mark.parametrize(("kind", "key"), [("local", "x"), ("local", ""), ("memory", "")])
def test_array_of_text_is_one_value_for_each_row(kind: str, key: str, path: Path) -> None:
    pytest.importorskip("td_tensorclass")  # values are its nodes
    array: Any = zarr.create_array(make_store(kind, path), name=key or None, shape=(4,), dtype=str)
    array[:] = np.array(["a", "b", "cc", "d"])
    assert TensorDict({"a": array}, [4])["a"] == ["a", "b", "cc", "d"]


def test_array_of_other_length_names_the_way_out(path: Path) -> None:
    array = make_array("local", path, "x")
    with pytest.raises(
        BatchSizeError, match=r"^key 'a' has shape \[4, 3\], .*; a Array is stored as its elements: wrap it"
    ):
        TensorDict({"a": array}, [5])


@pytest.mark.parametrize("is_ours", [True, False])
def test_set_group_opens_its_collection(is_ours: bool, path: Path, td: TensorDict) -> None:
    if is_ours:
        save(td, path, chunks=2)
    else:
        group = zarr.create_group(path)
        group.create_array("a", data=td["a"].numpy(), chunks=(2, 3))
        group.create_array("n/b", data=td["n", "b"].numpy(), chunks=(2,))
        group.create_array("n/c", data=td["n", "c"].numpy(), chunks=(2, 2))
    for mode in ("r", "r+"):
        held = TensorDict({"g": zarr.open_group(path, mode=mode)}, [4])
        assert (held["g"] == td).all()
        assert isinstance(held["g", "a"], StoredTensor)
    held["g", "a"][0] = 7
    assert from_any(zarr.open_group(path, mode="r"))["a"][0].tolist() == [7, 7, 7]
    assert torch.equal(TensorDict(zarr.open_group(path), [4])["n", "b"][:], td["n", "b"])


def test_group_that_cannot_be_written_in_place_is_opened_for_reading(path: Path) -> None:
    rows = [torch.ones(n) for n in (1, 2, 3, 1)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    save(TensorDict({"a": torch.arange(4.0), "j": jagged}, [4]), path, chunks=2)
    held = TensorDict({"g": zarr.open_group(path)}, [4])
    assert held["g", "j"].unbind()[2].tolist() == [1, 1, 1]
    with pytest.raises(LockedError):
        held["g", "a"][0] = 7
