"""A ``meta.json`` of another program is never overwritten, whatever its content."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
import td_memmap
from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import FormatError, StructureError
from td_memmap import FileTakenError

CONTENTS = {
    "object": b'{"name": "run 7", "tags": ["a", "b"]}',
    "no keys": b"{}",
    "shape": b'{"shape": [3], "dtype": "<f4"}',
    "leaf": b'{"a": {"shape": [3], "dtype": "torch.float32", "device": "cpu"}, "shape": [], "device": "cpu"}',
    "type": b'{"_type": "experiment", "shape": []}',
    "class": b'{"_type": "<class \'lab.Run\'>", "name": "run 7"}',
    "version": b'{"_format_version": 2, "kind": "run"}',
    "list": b"[1, 2]",
    "list of pairs": b'[["_type", "x"]]',
    "number": b"7",
    "null": b"null",
    "true": b"true",
    "string": b'"_type"',
    "empty": b"",
    "not JSON": b"{",
    "not text": b"\xff\xfe\x00{",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "huge": b'{"text": "' + b"x" * 5_000_000 + b'"}',
    "huge number": b"1" * 10_000,
}
#: Paths of the foreign metadata below the prefix.
PLACES = ["meta.json", "n/meta.json", "lazy/meta.json", "lazy/1/meta.json"]


def make_tree() -> TensorDict:
    lazy = LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)}))
    return TensorDict({"a": torch.arange(3), "n": TensorDict({"b": torch.ones(2)}), "lazy": lazy})


def unpack_tree(prefix: Path) -> None:
    make_tree().memmap(archive := prefix.with_name("other.tdz"))
    td_memmap.unpack_memmap(archive, prefix)


SAVE_METHODS: dict[str, Callable[[Path], Any]] = {
    "memmap": lambda prefix: make_tree().memmap(prefix),
    "memmap in threads": lambda prefix: make_tree().memmap(prefix, num_threads=2, return_early=True).result(),
    "memmap_": lambda prefix: make_tree().memmap_(prefix),
    "memmap_like": lambda prefix: make_tree().memmap_like(prefix),
    "save": lambda prefix: make_tree().save(prefix),
    "function": lambda prefix: td_core.save(make_tree(), prefix),
    "unpack": unpack_tree,
}


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_memmap_over_foreign_metadata_raises(content: bytes, place: str, prefix: Path) -> None:
    (prefix / place).parent.mkdir(parents=True)
    (prefix / place).write_bytes(content)
    (prefix / "notes.txt").write_text("mine")
    before = read_files(prefix.parent)
    with pytest.raises(
        FileTakenError, match=f"cannot save at .*/save: '{place}' exists and is not part of a save"
    ):
        make_tree().memmap(prefix)
    assert read_files(prefix.parent) == before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", SAVE_METHODS.values(), ids=SAVE_METHODS.keys())
def test_save_methods_over_foreign_metadata_raise(
    way: Callable[[Path], Any], place: str, prefix: Path
) -> None:
    (prefix / place).parent.mkdir(parents=True)
    (prefix / place).write_bytes(CONTENTS["object"])
    with pytest.raises(FileTakenError, match="cannot (save at|create files at) "):
        way(prefix)
    assert read_files(prefix) == {place: CONTENTS["object"]}


@pytest.mark.parametrize("place", PLACES)
def test_memmap_over_save_with_foreign_metadata_raises(place: str, prefix: Path) -> None:
    make_tree().memmap(prefix)
    (prefix / place).write_bytes(CONTENTS["object"])
    before = read_files(prefix)
    with pytest.raises(FileTakenError, match="exists and is not part of a save"):
        make_tree().memmap(prefix)
    assert read_files(prefix) == before


def test_memmap_without_node_keeps_its_foreign_metadata(prefix: Path) -> None:
    make_tree().memmap(prefix)
    (prefix / "n" / "meta.json").write_bytes(CONTENTS["list"])
    TensorDict({"a": torch.zeros(2)}).memmap(prefix)
    assert (prefix / "n" / "meta.json").read_bytes() == CONTENTS["list"]
    assert list(TensorDict.load_memmap(prefix).keys()) == ["a"]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_append_to_foreign_metadata_raises(content: bytes, prefix: Path) -> None:
    prefix.mkdir()
    (prefix / "meta.json").write_bytes(content)
    with pytest.raises(FormatError):
        td_memmap.append_memmap(prefix, TensorDict({"a": torch.zeros(3)}, batch_size=[3]))
    assert read_files(prefix) == {"meta.json": content}


def test_append_below_foreign_metadata_adds_rows(prefix: Path) -> None:
    TensorDict({"a": torch.zeros(3)}, batch_size=[3]).memmap(prefix / "0")
    (prefix / "meta.json").write_bytes(CONTENTS["object"])
    td_memmap.append_memmap(prefix / "0", TensorDict({"a": torch.ones(1)}, batch_size=[1]))
    assert TensorDict.load_memmap(prefix / "0")["a"].tolist() == [0, 0, 0, 1]
    assert (prefix / "meta.json").read_bytes() == CONTENTS["object"]


EDITS: dict[str, Callable[[Any], Any]] = {
    "make_memmap": lambda td: td.make_memmap("new", (2,)),
    "make_memmap below": lambda td: td.make_memmap(("new", "x"), (2,)),
    "from_tensor": lambda td: td.make_memmap_from_tensor("new", torch.ones(2)),
    "from_storage": lambda td: td.make_memmap_from_storage("new", torch.ones(2).untyped_storage(), (2,)),
    "refresh": lambda td: td.memmap_refresh_(),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_make_memmap_in_save_with_foreign_metadata_raises(
    edit: Callable[[Any], Any], content: bytes, prefix: Path
) -> None:
    saved = TensorDict({"a": torch.ones(2)}).memmap(prefix)
    (prefix / "meta.json").write_bytes(content)
    before = read_files(prefix)
    with pytest.raises((StructureError, FormatError), match="save/meta.json"):
        edit(saved)
    assert read_files(prefix) == before


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_make_memmap_new_node_over_foreign_metadata_raises(content: bytes, prefix: Path) -> None:
    saved = TensorDict({"a": torch.ones(2)}).memmap(prefix)
    (prefix / "mine").mkdir()
    (prefix / "mine" / "meta.json").write_bytes(content)
    before = read_files(prefix)
    with pytest.raises(
        FileTakenError, match="cannot add key 'mine': another program has metadata that is in the way"
    ):
        saved.make_memmap(("mine", "x"), (2,))
    assert read_files(prefix) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda path: make_tree().memmap(path),
        lambda path: make_tree().memmap_like(path),
        lambda path: td_memmap.pack_memmap(path.with_name("directory"), path),
    ],
    ids=["memmap", "memmap_like", "pack"],
)
@pytest.mark.parametrize("files", [{"meta.json": CONTENTS["object"]}, {"meta.json": b"["}, {"a.txt": b"x"}])
def test_memmap_archive_over_foreign_zip_raises(
    files: dict[str, bytes], write: Callable[[Path], Any], tmp_path: Path
) -> None:
    make_tree().memmap(tmp_path / "directory")
    path = tmp_path / "archive.tdz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    before = path.read_bytes()
    with pytest.raises(
        FileTakenError, match="cannot (write the archive|create the archive|create files at) .*archive.tdz"
    ):
        write(path)
    assert path.read_bytes() == before


def test_pack_foreign_metadata_raises(prefix: Path) -> None:
    prefix.mkdir()
    (prefix / "meta.json").write_bytes(CONTENTS["object"])
    with pytest.raises(FormatError, match="no save is at .*/save"):
        td_memmap.pack_memmap(prefix, prefix.with_name("archive.tdz"))
    assert os.listdir(prefix.parent) == ["save"]


FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = sorted(path.stem for path in (FIXTURES / "legacy").glob("*.zip"))


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (FIXTURES / "memmap").iterdir() if path.is_dir())
)
def test_memmap_over_tensordict_save_replaces_it(name: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "memmap" / name, tmp_path / name)
    TensorDict({"a": torch.zeros(3)}).memmap(tmp_path / name)
    if name == "keys_reserved":  # The metadata of this save does not list these leaves.
        for hidden in ("_type", "device", "shape"):
            (tmp_path / name / f"{hidden}.memmap").unlink()
    assert sorted(read_files(tmp_path / name)) == ["%manifest.json", "a.memmap", "meta.json"]


@pytest.mark.parametrize("release", RELEASES)
def test_memmap_over_old_release_save_replaces_it(release: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(FIXTURES / "legacy" / f"{release}.zip") as archive:
        archive.extractall(tmp_path)
    saves = [path for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert saves
    keys = {"a": torch.zeros(3), "n": {"b": torch.ones(2), "m": {"c": torch.ones(1)}}, "x": torch.ones(1)}
    for save in saves:
        TensorDict(keys).memmap(save)
        loaded = TensorDict.load_memmap(save)
        assert loaded["a"].tolist() == [0, 0, 0] and loaded["n", "m", "c"].tolist() == [1]
        assert set(loaded.keys(True)) == set(TensorDict(keys).keys(True))
        assert not (save / "meta.pt").exists()


def test_memmap_over_foreign_old_metadata_raises(prefix: Path) -> None:
    prefix.mkdir()
    torch.save({"epoch": 3, "batch_size": 32}, prefix / "meta.pt")
    torch.save({"dtype": torch.int64}, prefix / "a.meta.pt")
    (prefix / "a.memmap").write_bytes(b"mine")
    before = read_files(prefix)
    with pytest.raises(FileTakenError, match="'a.memmap' exists and is not part of a save"):
        make_tree().memmap(prefix)
    assert read_files(prefix) == before


def test_memmap_over_user_class_save_replaces_it(prefix: Path) -> None:
    TensorDict({"x": torch.ones(2)}).memmap(prefix / "_tensordict")
    (prefix / "_tensordict" / "%manifest.json").unlink()
    (prefix / "meta.json").write_text(json.dumps({"_type": "<class 'lab.Run'>"}))
    make_tree().memmap(prefix)
    assert not (prefix / "_tensordict").exists()
