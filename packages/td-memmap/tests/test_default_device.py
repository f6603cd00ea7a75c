"""Leaves are mapped on the CPU under any default device of torch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from td_core import TensorDict
from td_memmap import MemoryMappedTensor, pack_memmap

HOST = torch.device("cpu")
FULL, NONE = torch.arange(6.0).view(3, 2), torch.zeros(3, 0)


def make_nested() -> torch.Tensor:
    # torch warns that nested tensors are a prototype, and pytest turns warnings into errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(1), torch.ones(3)])


def make_collection() -> TensorDict:
    return TensorDict({"full": FULL.clone(), "n": {"none": NONE.clone(), "rows": make_nested()}}, [3])


def save(td: TensorDict, folder: Path) -> Path:
    td.memmap(folder / "save")
    return folder / "save"


def save_archive(td: TensorDict, folder: Path) -> Path:
    pack_memmap(save(td, folder), folder / "save.tdz")
    return folder / "save.tdz"


COLLECTIONS = {
    "memmap": lambda td, folder: td.memmap(folder / "here"),
    "memmap_": lambda td, folder: td.memmap_(),
    "memmap_like": lambda td, folder: td.memmap_like(folder / "here"),
    "load_memmap": lambda td, folder: TensorDict.load_memmap(save(td, folder)),
    "archive": lambda td, folder: TensorDict.load_memmap(save_archive(td, folder)),
}
ROWS = make_nested()

TENSORS = {
    "from_tensor": lambda folder: MemoryMappedTensor.from_tensor(FULL),
    "from_tensor without elements": lambda folder: MemoryMappedTensor.from_tensor(
        NONE, filename=folder / "a"
    ),
    "from_tensor of a nested tensor": lambda folder: MemoryMappedTensor.from_tensor(ROWS),
    "from_storage": lambda folder: MemoryMappedTensor.from_storage(FULL.untyped_storage(), shape=(3, 2)),
    "a list": lambda folder: MemoryMappedTensor([1, 2, 3]),
    "zeros": lambda folder: MemoryMappedTensor.zeros(3),
    "empty": lambda folder: MemoryMappedTensor.empty((0, 3)),
}


@pytest.mark.parametrize("make", COLLECTIONS)
def test_memmap_under_default_device_stays_on_cpu(make: str, tmp_path: Path) -> None:
    td = make_collection()
    with torch.device("meta"):
        result = COLLECTIONS[make](td, tmp_path)
    assert {leaf.device for leaf in result.values(True, True)} == {HOST}
    if make != "memmap_like":
        assert torch.equal(result["full"], FULL)
        assert [len(part) for part in result["n", "rows"].unbind()] == [2, 1, 3]


@pytest.mark.parametrize("make", TENSORS)
def test_create_tensor_under_default_device_stays_on_cpu(make: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        result = TENSORS[make](tmp_path)
    assert result.device == HOST and type(result) is MemoryMappedTensor
