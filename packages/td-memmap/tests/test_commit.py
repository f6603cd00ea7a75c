"""Committing a save replaces an older save and keeps every file that is not part of a save."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_memmap import (
    FileTakenError,
    _fs,
    append_memmap,
    pack_memmap,
    verify,
)
from td_memmap._meta import LIMIT


def test_commit_over_save_keeps_only_files_of_user(
    prefix: Path, tmp_path: Path, make_tree: Any, read_value: Any, put_user_files: Any, has_user_files: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)
    put_user_files(prefix)
    os.symlink("nowhere", prefix / "link")
    (prefix / "more" / "mine").write_text("x")
    inode = os.stat(prefix / "README.md").st_ino
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2
    assert has_user_files(prefix)
    assert os.stat(prefix / "README.md").st_ino == inode
    assert os.readlink(prefix / "link") == "nowhere"
    assert os.listdir(prefix / "more") == ["mine"]
    assert os.listdir(tmp_path) == ["save"]


def test_commit_over_general_node_removes_its_members(prefix: Path, make_tree: Any) -> None:
    lazy_stack([TensorDict({"a": 1}), TensorDict({"b": 2})]).memmap(prefix)
    (prefix / "meta.json").write_text(
        '{"_format_version": 2, "kind": "x", "entries": [], "members": ["0", "1"]}'
    )
    (prefix / "%manifest.json").unlink()
    make_tree(2).memmap(prefix)
    assert not (prefix / "0").exists() and not (prefix / "1").exists()


@pytest.mark.parametrize("file", ["more/mine", "more/deep/mine", None])
def test_commit_user_directory_with_name_of_node_is_kept(
    file: str | None, prefix: Path, tmp_path: Path, make_tree: Any, read_value: Any
) -> None:
    (prefix / "more" / "empty").mkdir(parents=True)
    if file is not None:
        (prefix / file).parent.mkdir(exist_ok=True)
        (prefix / file).write_text("x")
    for value in (1, 3, 4, 5):
        make_tree(value, more=value % 2 == 1).memmap(prefix)
        assert read_value(prefix) == value
        assert (prefix / "more" / "empty").is_dir()
        assert file is None or (prefix / file).read_text() == "x"
        assert os.listdir(tmp_path) == ["save"]


def test_memmap_to_file_system_root_raises(make_tree: Any) -> None:
    with pytest.raises(FileTakenError, match="the root of a file system cannot be replaced"):
        make_tree(1).memmap(Path(os.sep))


#: A user file added after the save: its name, and the row by which the manifest claims it.
LATER_FILES = {
    "any": ("notes.txt", lambda file: [file.st_size, file.st_mtime_ns]),
    "below": ("n/deeper/notes.txt", lambda file: [file.st_size, None]),
    "elements": ("mine.memmap", lambda file: [file.st_size, file.st_mtime_ns - 1]),
    "elements without a time": ("mine.memmap", lambda file: [file.st_size, None]),
    "elements of another size": ("mine.memmap", lambda file: [file.st_size + 1, file.st_mtime_ns]),
    "metadata": ("mine/meta.json", lambda file: [file.st_size + 1, None]),
    "values": ("mine/%values.json", lambda file: [file.st_size + 1, None]),
    "not a row": ("mine.memmap", lambda file: file.st_size),
}


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("what", LATER_FILES)
def test_commit_user_file_listed_in_manifest_is_kept(
    what: str, damage: bool, prefix: Path, make_tree: Any, read_value: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)
    name, row = LATER_FILES[what]
    mine = prefix / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    manifest = json.loads((prefix / "%manifest.json").read_text())
    manifest["files"][name] = row(mine.stat())
    (prefix / "%manifest.json").write_text(json.dumps(manifest))
    if damage:
        (prefix / "meta.json").write_text("{")
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2
    assert mine.read_text() == "mine"
    assert not (prefix / "more").exists()


def test_commit_user_metadata_newer_than_manifest_is_kept(
    prefix: Path, make_tree: Any, read_value: Any
) -> None:
    make_tree(1).memmap(prefix)
    manifest = json.loads((prefix / "%manifest.json").read_text())
    manifest["files"]["mine/meta.json"] = [2, None]
    (prefix / "%manifest.json").write_text(json.dumps(manifest))
    os.utime(
        prefix / "%manifest.json", (1 << 32, 1 << 32)
    )  # This time is in the future, so only the change time can be right.
    time.sleep(0.05)
    (prefix / "mine").mkdir()
    (prefix / "mine" / "meta.json").write_text("{}")
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2
    assert (prefix / "mine" / "meta.json").read_text() == "{}"


@pytest.mark.parametrize("key", ["a", "shape"])
@pytest.mark.parametrize("place", ["{key}", "l/3", "l/1/b"])
def test_commit_unrelated_save_in_subdirectory_is_kept(place: str, key: str, prefix: Path, same: Any) -> None:
    stack = lazy_stack([TensorDict({"b": torch.full((2,), i)}) for i in range(3)])
    td = TensorDict({key: torch.ones(3), "l": stack}, [3])
    td.memmap(prefix)
    within = prefix / place.format(key=key)
    mine = TensorDict({"z": torch.arange(5)})
    mine.memmap(within)
    assert verify(prefix).problems == []
    for other in td.clone(), TensorDict():
        other.memmap(prefix)
        same(TensorDict.load_memmap(prefix), other)
        same(TensorDict.load_memmap(within), mine)


def test_commit_after_unfinished_save_keeps_user_files(
    prefix: Path, make_tree: Any, read_value: Any, put_user_files: Any, has_user_files: Any, user_files: Any
) -> None:
    make_tree(1).memmap(prefix)
    put_user_files(prefix)
    (prefix / "%saving").write_bytes(bytes(1).join(name.encode() for name in (*user_files, "stale.memmap")))
    (prefix / "stale.memmap").write_text("what an unfinished save left")
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2
    assert has_user_files(prefix)
    assert not (prefix / "stale.memmap").exists()


#: Files named ``%saving`` that are not the list of unfinished files of a save in place.
INVALID_LISTS = {
    "a fifo": os.mkfifo,
    "a directory": Path.mkdir,
    "a link out of it": lambda path: path.symlink_to(path.parents[1] / "outside"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a long file": lambda path: (path.touch(), os.truncate(path, LIMIT + 1)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("what", INVALID_LISTS)
def test_commit_over_user_file_named_saving_raises(
    what: str,
    old: bool,
    in_place: bool,
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    (tmp_path / "outside").write_text("mine.memmap")
    if old:
        make_tree(1, more=True).memmap(prefix)
    put_user_files(prefix)
    (prefix / "mine.memmap").write_text("mine")
    INVALID_LISTS[what](prefix / "%saving")
    monkeypatch.setattr(_fs, "is_mount", lambda path: in_place)
    with pytest.raises(FileTakenError, match="'%saving' exists and is not part of a save; move it away"):
        make_tree(2).memmap(prefix)
    assert read_value(prefix) == (1 if old else None)
    assert has_user_files(prefix)
    assert (prefix / "mine.memmap").read_text() == "mine"
    assert (prefix / "%saving").is_symlink() or (prefix / "%saving").exists()
    if old:
        pack_memmap(prefix, tmp_path / "save.tdz")
        assert read_value(tmp_path / "save.tdz") == 1


@pytest.mark.parametrize(
    "listed",
    [
        bytes(range(256)) * 100,
        b"",
        b"README.md\0../outside.memmap\0/etc/passwd\0"
        + b"a/" * 5000
        + b"x.memmap\0"
        + b"x" * 300
        + b".memmap",
    ],
    ids=["garbage", "nothing", "other places"],
)
def test_commit_hostile_list_of_unfinished_files_keeps_user_files(
    listed: bytes,
    prefix: Path,
    tmp_path: Path,
    make_tree: Any,
    read_value: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    (tmp_path / "outside.memmap").write_text("mine")
    put_user_files(prefix)
    (prefix / "%saving").write_bytes(listed)
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2
    assert has_user_files(prefix)
    assert sorted(os.listdir(tmp_path)) == ["outside.memmap", "save"]
    assert not (prefix / "%saving").exists()


@pytest.mark.parametrize("place", ["meta.json", "n/meta.json"])
def test_commit_replaces_save_with_damaged_metadata(
    place: str,
    prefix: Path,
    tmp_path: Path,
    make_tree: Any,
    read_value: Any,
    put_user_files: Any,
    has_user_files: Any,
    user_files: Any,
) -> None:
    make_tree(1, more=True).memmap(prefix)
    put_user_files(prefix)
    (prefix / place).write_text("{")
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2
    make_tree(2).memmap(fresh := tmp_path / "fresh")
    wanted = {str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file()}
    assert {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()} == {
        *wanted,
        *user_files,
    }
    assert has_user_files(prefix)


def test_commit_user_file_with_required_name_raises(prefix: Path, tmp_path: Path, make_tree: Any) -> None:
    for name in ("a.memmap", "n/b.memmap", "n", "n/meta.json", "%manifest.json"):
        prefix.mkdir()
        (prefix / name).parent.mkdir(exist_ok=True)
        (prefix / name).write_text("mine")
        with pytest.raises(
            FileTakenError, match=f"cannot save at .*/save: '{name}' exists and is not part of a save"
        ):
            make_tree(2).memmap(prefix)
        assert (prefix / name).read_text() == "mine"
        assert os.listdir(tmp_path) == ["save"]
        subprocess.run(["rm", "-rf", prefix], check=True)


def test_memmap_readonly_parent_second_save_raises(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tree: Any
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_fs, "make_directory", refuse)
    with pytest.raises(PermissionError):
        make_tree(1).memmap(prefix)
    assert os.listdir(tmp_path) == []
    prefix.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(_fs, "sync_file", refuse)
        with pytest.raises(PermissionError):
            make_tree(1).memmap(prefix, durable=True)
    assert os.listdir(prefix) == []
    make_tree(1).memmap(prefix)
    with pytest.raises(
        FileTakenError, match="cannot replace the save at .* in one step: .*its parent directory"
    ):
        make_tree(2).memmap(prefix)
    assert TensorDict.load_memmap(prefix)["a"].unique().tolist() == [1]
    assert verify(prefix).problems == []


def test_commit_does_not_list_parent_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tree: Any
) -> None:
    seen: list[str] = []

    def watched(listing: Callable[[Any], Any], where: Any) -> Any:
        seen.append(os.path.realpath(f"/proc/self/fd/{where}" if isinstance(where, int) else where))
        return listing(where)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, functools.partial(watched, getattr(os, name)))
    for _ in range(2):
        make_tree(1).memmap(tmp_path / "save")
        make_tree(1).memmap(tmp_path / "save.tdz")
        rows = TensorDict({"a": torch.zeros(2, 3)}, [2]).memmap(tmp_path / "rows", durable=True)
        append_memmap(tmp_path / "rows", rows)
    assert str(tmp_path) not in seen
    assert seen


def test_commit_without_hard_links_keeps_user_files(
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    for value in (1, 3):
        make_tree(value, more=True).memmap(prefix, checksums=True)
        put_user_files(prefix)
        assert read_value(prefix) == value
        TensorDict.load_memmap(prefix).memmap(prefix, checksums=True)
        assert read_value(prefix) == value
        assert has_user_files(prefix)
        assert verify(prefix).hashed == verify(prefix).files
        assert os.listdir(tmp_path) == ["save"]
