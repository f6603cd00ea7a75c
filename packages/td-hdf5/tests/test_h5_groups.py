"""Files and groups that the caller has opened with h5py as locations; vectors of different lengths."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.errors import LockedError, UnsupportedOperationError


def fill(path: Path, name: str, td: TensorDict, **options: Any) -> None:
    """Save a collection into a group of a new file, beside a dataset of another program."""
    with h5py.File(path, "w") as file:
        file["other"] = np.arange(3)
        td_core.save(td, file.create_group(name), format="hdf5", **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunks": 2, "compression": "gzip"},
    "hashes": {"checksums": True},
}


@pytest.mark.parametrize("name", ["run", "runs/3"])
@pytest.mark.parametrize("options", OPTIONS)
def test_save_to_group_and_load_again(
    options: str, name: str, path: Path, td: TensorDict, same: Callable[..., None]
) -> None:
    td.names = ["t"]
    fill(path, name, td, **OPTIONS[options])
    with h5py.File(path, "r") as file:
        group = file[name]
        same(td_core.load(group), td)
        same(td_core.load(group, rows=[3, 1], keys="n")["n"], td["n"][[3, 1]])
        assert [key for key, _ in td_core.inspect(group).walk()] == [
            (),
            ("a",),
            ("n",),
            ("n", "b"),
            ("n", "c"),
        ]
        assert td_core.verify(group).ok
        assert td_core.verify(group).hashed == (3 if options == "hashes" else 0)
        assert torch.equal(td_core.open(group)[[2, 0]]["n", "b"], torch.tensor([2, 0]))
        assert file["other"][:].tolist() == [0, 1, 2]


def test_open_group_for_writing_writes_into_its_file(path: Path, td: TensorDict) -> None:
    fill(path, "run", td)
    with h5py.File(path, "r+") as file:
        td_core.open(file["run"], mode="r+")[1] = td[3]
    with h5py.File(path, "r") as file:
        assert (td_core.load(file["run"]) == td[[0, 3, 2, 3]]).all()


@pytest.mark.parametrize("chunks", [None, 2])
def test_append_to_group_adds_rows(
    chunks: int | None, path: Path, td: TensorDict, same: Callable[..., None]
) -> None:
    fill(path, "run", td, chunks=chunks)
    with h5py.File(path, "r+") as file:
        td_core.append(td[:2], file["run"])
        same(td_core.load(file["run"]), torch.cat([td, td[:2]]))


def test_create_in_group_gives_zeros_to_be_filled(path: Path, td: TensorDict) -> None:
    with h5py.File(path, "w") as file:
        opened = td_core.create(td, file.create_group("run"), format="hdf5")
        assert opened["a"].sum() == 0
        opened.copy_(td)
        assert (td_core.load(file["run"]) == td).all()
        with pytest.raises(FileExistsError, match="cannot create a save in '/run' of .*: it has entries"):
            td_core.create(td, file["run"], format="hdf5")


def test_save_to_group_replaces_own_save_alone(path: Path, td: TensorDict, same: Callable[..., None]) -> None:
    fill(path, "run", td)
    with h5py.File(path, "r+") as file:
        with pytest.raises(FileExistsError, match="cannot save to '/' of .*entries that td has not written"):
            td_core.save(td, file, format="hdf5")
        opened = td_core.open(file["run"])
        td_core.save(opened.select("n") + 1, file["run"], format="hdf5")
        same(td_core.load(file["run"]), td.select("n") + 1)
        td_core.save(td_core.open(file["run"]), file["run"], format="hdf5")  # over itself
        same(td_core.load(file["run"]), td.select("n") + 1)


def test_save_to_group_of_file_opened_for_reading_raises(path: Path, td: TensorDict) -> None:
    fill(path, "run", td)
    with h5py.File(path, "r") as file, pytest.raises(LockedError, match="open the file with mode='r\\+'"):
        td_core.save(td, file["run"], format="hdf5")


def test_group_of_saved_file_is_its_nested_collection(
    path: Path, td: TensorDict, same: Callable[..., None]
) -> None:
    td["n"].batch_size = [4, 1] if td["n", "c"].shape == (4, 1) else [4]
    td["n"].names = ["t"]
    td_core.save(td, path, format="hdf5")
    with h5py.File(path, "r") as file:
        same(td_core.load(file), td)
        same(td_core.load(file["n"]), td["n"])
        assert td_core.open(file["n"])["b"].tolist() == [0, 1, 2, 3]


def test_file_in_memory_loads_and_is_not_opened(td: TensorDict, same: Callable[..., None]) -> None:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        td_core.save(td, file, format="hdf5")
    with h5py.File(buffer, "r") as file:
        same(td_core.load(file), td)
        same(td_core.load(file, rows=slice(1, 3)), td[1:3])
        with pytest.raises(UnsupportedOperationError, match="only load\\(\\) can read it"):
            td_core.open(file)


def test_unwritten_changes_of_caller_are_read(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"] = np.zeros(100_000)
        file["a"][5] = 7
        assert td_core.load(file)["a"][5] == 7


#: Vectors of different lengths, and their dtype.
VECTORS = {
    "int32": [[1, 2, 3], [], [4]],
    "float64": [[0.5], [1.5, 2.5]],
    "empty": [],
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_different_lengths_load_as_jagged_tensor(name: str, path: Path) -> None:
    rows, dtype = VECTORS[name], np.dtype("i4" if name == "empty" else name)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("n/x", (len(rows),), h5py.vlen_dtype(dtype))
        for number, row in enumerate(rows):
            dataset[number] = np.array(row, dtype)
        file["n/a"] = np.arange(len(rows))
    for td in (td_core.load(path), td_core.open(path)):
        found = td["n", "x"]
        assert td["n"].batch_size == (len(rows),)
        assert found.dtype == torch.from_numpy(np.zeros(0, dtype)).dtype
        assert [row.tolist() for row in found.unbind()] == rows
    assert td_core.inspect(path).children["n"].children["x"].kind == "nested leaf"
    with pytest.raises(UnsupportedOperationError, match="nested tensor"):
        td_core.open(path, mode="r+")
    td_core.open(path, mode="r+", keys=[("n", "a")])["n", "a"].zero_()
