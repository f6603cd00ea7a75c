"""Directories of shards with an index, as model hubs have them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import FormatError, TensorDict, load
from td_safetensors import _find_save, save

INDEX = "model.safetensors.index.json"


@pytest.fixture
def big() -> TensorDict:
    """Return a collection of three leaves of 1000, 2000 and 400 bytes."""
    return TensorDict({"a": torch.ones(250), "n": {"b": torch.arange(250)}, "c": torch.zeros(100)})


@pytest.mark.parametrize(
    ("size", "files"),
    [
        (3000, {"model-00001-of-00002.safetensors": {"a", "n.b"}, "model-00002-of-00002.safetensors": {"c"}}),
        ("10MB", {"model-00001-of-00001.safetensors": {"a", "n.b", "c"}}),
        (
            "0.5kB",
            {f"model-0000{i + 1}-of-00003.safetensors": {name} for i, name in enumerate(["a", "n.b", "c"])},
        ),
    ],
    ids=["two", "one", "leaf larger than shard"],
)
def test_save_shards_writes_index_of_files(
    size: Any, files: dict[str, set[str]], tmp_path: Path, big: TensorDict, same: Any, read_header: Any
) -> None:
    big = TensorDict({"a": big["a"], "n": big["n"], "c": big["c"]})
    save(big, tmp_path / "m", max_shard_size=size)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 3400
    found: dict[str, set[str]] = {}
    for name, file in index["weight_map"].items():
        found.setdefault(file, set()).add(name)
    order = list(index["weight_map"])
    assert {name for names in found.values() for name in names} == {"a", "n.b", "c"}
    if len(files) != 2 or order == ["a", "n.b", "c"]:
        assert sorted(map(len, found.values())) == sorted(map(len, files.values()))
    assert set(found) == set(files)
    assert set(os.listdir(tmp_path / "m")) == {INDEX, *files}
    for file, names in found.items():
        header = read_header(tmp_path / "m" / file)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert set(header) == names
    for place in (tmp_path / "m", tmp_path / "m" / INDEX):
        for strategy in ("mmap", "read"):
            same(load(place, strategy=strategy), big)
    same(load(tmp_path / "m", keys="c"), big.select("c"))


def test_save_shards_again_replaces_old_ones(tmp_path: Path, big: TensorDict, same: Any) -> None:
    for value, size in ((1, 10), (2, 10), (3, "1MB"), (4, 2500)):
        save(big + value, tmp_path, max_shard_size=size, checksums=True)
        same(load(tmp_path), big + value)
        index = json.loads((tmp_path / INDEX).read_text())
        assert set(os.listdir(tmp_path)) == {INDEX, *index["weight_map"].values()}


def test_save_shards_beside_single_file_raises(tmp_path: Path, big: TensorDict) -> None:
    save(big, tmp_path / "model.safetensors")
    with pytest.raises(FileExistsError, match="other programs read instead of the shards: remove it"):
        save(big, tmp_path, max_shard_size=10)


def test_load_directory_reads_single_file(tmp_path: Path, big: TensorDict, same: Any) -> None:
    save(big, tmp_path / "model.safetensors")
    same(load(tmp_path), big)


def test_load_directory_reads_index_of_other_name(tmp_path: Path, big: TensorDict, same: Any) -> None:
    save(big, tmp_path, max_shard_size=10)
    (tmp_path / INDEX).rename(tmp_path / "model.fp32.safetensors.index.json")
    same(load(tmp_path), big)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match="more than one index: model.fp32.*other"):
        load(tmp_path)


def test_load_foreign_index_splits_names(tmp_path: Path) -> None:
    save(TensorDict({"w.x": torch.ones(2), "unlisted": torch.ones(1)}), tmp_path / "one.safetensors")
    save(TensorDict({"w.y": torch.zeros(2), "w.x": torch.zeros(2)}), tmp_path / "two.safetensors")
    weights = {"w.x": "one.safetensors", "w.y": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weights}))
    result = load(tmp_path)
    assert {key: leaf.tolist() for key, leaf in result.items(True, True)} == {
        ("w", "x"): [1, 1],
        ("w", "y"): [0, 0],
    }


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../x.safetensors", "'a' names a file outside of its directory: '../x.safetensors'"),
        ("/etc/x.safetensors", "outside of its directory"),
        ("a/../../x", "outside of its directory"),
        ("..\\x", "outside of its directory"),
        ("C:x", "outside of its directory"),
        ("", "outside of its directory"),
        (7, "outside of its directory: 7"),
        ("gone.safetensors", "a shard that it names is missing: .*gone.safetensors"),
        ("other.safetensors", "'a' is not in .*other.safetensors, which the index names"),
    ],
)
def test_load_hostile_weight_map_raises(file: Any, message: str, tmp_path: Path, big: TensorDict) -> None:
    folder = tmp_path / "m"
    save(big, folder, max_shard_size="1MB")
    save(TensorDict({"z": torch.ones(1)}), folder / "other.safetensors")
    save(TensorDict({"a": torch.ones(1)}), tmp_path / "x.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["a"] = file
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "weight_map is not an object"),
        ('{"weight_map": 3}', "not an object; got 3"),
    ],
)
def test_load_damaged_index_raises(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=f"{INDEX}.*{message}"):
        load(tmp_path, format="safetensors")


def test_load_damaged_shard_raises_with_its_path(tmp_path: Path, big: TensorDict) -> None:
    save(big, tmp_path, max_shard_size=10)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model-00002-of-00003.safetensors is truncated"):
        load(tmp_path)


def test_load_during_save_of_shards_reads_new_index(
    tmp_path: Path, big: TensorDict, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(big, tmp_path, max_shard_size=10)
    check = _find_save.check_weight_map
    calls = []

    def save_after_read(index: Any, path: str) -> Any:
        if not calls:
            calls.append(path)
            save(big + 1, tmp_path, max_shard_size=10)
        return check(index, path)

    monkeypatch.setattr(_find_save, "check_weight_map", save_after_read)
    same(load(tmp_path), big + 1)
