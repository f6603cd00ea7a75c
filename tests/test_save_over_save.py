"""A save at a path with another save replaces it or is refused: one of the two loads, whatever their formats are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict

#: The format, the options, and whether the save is a directory, by the name of a save.
SAVES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "memmap": ("memmap", {}, True),
    "tdz": ("memmap", {}, False),
    "zarr": ("zarr", {}, True),
    "zip": ("zarr", {}, False),
    "safetensors": ("safetensors", {}, False),
    "safetensors shards": ("safetensors", {"max_shard_size": "1GB"}, True),
    "hdf5": ("hdf5", {}, False),
}
#: The package and the library of each format.
MODULES = {
    "memmap": ("td_memmap",),
    "zarr": ("td_zarr", "zarr"),
    "safetensors": ("td_safetensors", "safetensors"),
    "hdf5": ("td_hdf5", "h5py"),
}
#: The saves whose suffix decides on a file, and those that are directories without it.
SUFFIXES = {"tdz": "memmap", "zip": "zarr"}
PAIRS = [
    (old, new)
    for old, new in itertools.product(SAVES, SAVES)
    if old == new
    or not ({old, new} <= SUFFIXES.keys() or SUFFIXES.get(old) == new or SUFFIXES.get(new) == old)
]


def save(data: TensorDict, path: Path, name: str) -> None:
    form, options, _ = SAVES[name]
    td_core.save(data, path, format=form, **options)


def make_path(folder: Path, *names: str) -> Path:
    for name in names:
        for module in MODULES[SAVES[name][0]]:
            pytest.importorskip(module)
    return folder / ".".join(["save", *{*names}.intersection(SUFFIXES)])


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_save_over_save_replaces_or_refuses(old: str, new: str, tmp_path: Path) -> None:
    path = make_path(tmp_path, old, new)
    save(TensorDict({"a": torch.zeros(3)}), path, old)
    before = list_files(tmp_path)
    directories = SAVES[old][2], SAVES[new][2]
    if old == new or directories == (False, False):
        save(TensorDict({"b": torch.ones(3)}), path, new)
        assert list(td_core.load(path).keys()) == ["b"]
        return
    with pytest.raises((FileExistsError, IsADirectoryError, NotADirectoryError)):
        save(TensorDict({"b": torch.ones(3)}), path, new)
    assert list_files(tmp_path) == before
    assert list(td_core.load(path).keys()) == ["a"]


#: Keys like the names of files by which formats are recognised.
KEYS = [
    "meta.json",
    "zarr.json",
    ".zarray",
    ".zgroup",
    "model.safetensors",
    "x.safetensors.index.json",
    "c",
    "",
]


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("nested", [False, True], ids=["leaf", "nested"])
def test_load_keys_like_files_of_formats_finds_format(name: str, nested: bool, tmp_path: Path) -> None:
    data = TensorDict({key: {"b": torch.ones(3)} if nested else torch.ones(3) for key in KEYS})
    path = make_path(tmp_path, name)
    save(data, path, name)
    for read in (td_core.load, td_core.open):
        found = read(path)
        assert list(found.keys()) == KEYS
        assert (found == data).all()
    td_core.inspect(path)
    assert td_core.verify(path).ok
