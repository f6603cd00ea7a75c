"""A save recovers or removes what an interrupted save left at the same path."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_memmap import (
    _commit,
    _file_names,
    _fs,
    _save_files,
)
from td_memmap._commit import Staging


@pytest.mark.parametrize("num_threads", [0, 4])
def test_save_in_place_killed_is_cleaned_up_by_next_save(
    num_threads: int,
    prefix: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    kill_at_call: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    for n in range(1000):
        subprocess.run(["rm", "-rf", prefix], check=True)
        prefix.mkdir()
        put_user_files(prefix)
        unfinished = kill_at_call(n, lambda: make_tree(2).memmap(prefix, num_threads=num_threads))
        assert read_value(prefix) in (None, 2)
        if read_value(prefix) is None:
            make_tree(3, more=True).memmap(prefix)
            assert read_value(prefix) == 3
            assert not (prefix / "%saving").exists()
        assert has_user_files(prefix)
        if not unfinished:
            break
    assert n > 30


def test_save_in_place_killed_in_cleanup_is_recovered(
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    kill_at_call: Any,
    put_user_files: Any,
) -> None:
    make_tree(1, more=True).memmap(unfinished := tmp_path / "unfinished")
    files = [file.relative_to(unfinished).parts for file in unfinished.rglob("*.*")]
    put_user_files(unfinished)
    (unfinished / "meta.json").unlink()
    (unfinished / "%saving").write_bytes(_file_names.format_listing(files))
    make_tree(2).memmap(prefix)
    put_user_files(prefix)
    wanted = sorted(prefix.rglob("*"))
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    for n in range(1000):
        shutil.rmtree(prefix)
        shutil.copytree(unfinished, prefix)
        assert kill_at_call(n, lambda: make_tree(2).memmap(prefix))
        list_of_new = (prefix / "%saving").exists() and b"%meta.json" in (prefix / "%saving").read_bytes()
        make_tree(2).memmap(prefix)
        assert sorted(prefix.rglob("*")) == wanted, f"killed at call {n}"
        if list_of_new:
            break
    assert n > 20


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("taken", ["", "d", "f", "d/f"])
def test_recover_all_taken_name_returns_false(taken: str, known: bool, tmp_path: Path) -> None:
    mine = _save_files.SaveFiles()
    if known:
        mine.add(("d", "meta.json"))
    for place in (tmp_path / "old" / "d", tmp_path / "now"):
        place.mkdir(parents=True)
    (tmp_path / "old" / "f").write_text("mine")
    (tmp_path / "old" / "d" / "f").write_text("mine")
    if taken:
        (tmp_path / "now" / taken).parent.mkdir(exist_ok=True)
        (tmp_path / "now" / taken).write_text("taken")
    with (
        _fs.DirectoryTree.at_path(str(tmp_path / "old")) as old,
        _fs.DirectoryTree.at_path(str(tmp_path / "now")) as now,
    ):
        assert _commit._recover_all(old, now, mine) == (not taken)
    assert (tmp_path / "now" / "f").read_text() == ("taken" if taken == "f" else "mine")
    if taken != "d":
        assert (tmp_path / "now" / "d" / "f").read_text() == ("taken" if taken == "d/f" else "mine")


def test_commit_undeletable_files_are_removed_by_later_save(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(_fs.DirectoryTree, "remove", refuse)
        for value in range(3):
            TensorDict({"a": torch.tensor(value)}).memmap(prefix)
            assert TensorDict.load_memmap(prefix)["a"] == value
    assert len(os.listdir(tmp_path)) == 3
    TensorDict({"a": torch.tensor(3)}).memmap(prefix)
    assert os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize(
    "stale", [["new-00000002"], ["old-00000003"], ["new-00000000", "old-00000001", "new-00000004"]]
)
def test_commit_removes_stale_directories_of_processes(
    tmp_path: Path, stale: list[str], make_tree: Any
) -> None:
    for name in stale:
        make_tree(1).memmap(tmp_path / "other")
        os.rename(tmp_path / "other", tmp_path / f".save.td-{name}")
    make_tree(2).memmap(tmp_path / "save")
    assert os.listdir(tmp_path) == ["save"]
    assert TensorDict.load_memmap(tmp_path / "save")["a"].unique().tolist() == [2]


def test_staging_published_before_it_is_locked_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tree: Any, read_value: Any
) -> None:
    stale = tmp_path / ".save.td-new-00000000"
    make_tree(2).memmap(tmp_path / "other")
    os.rename(tmp_path / "other", stale)
    lock = _fs.mark_in_use

    def publish_then_lock(fd: int, **options: Any) -> bool:
        if not (tmp_path / "published").exists():
            stale.rename(tmp_path / "published")
        return lock(fd, **options)

    monkeypatch.setattr(_fs, "mark_in_use", publish_then_lock)
    make_tree(4).memmap(tmp_path / "save")
    assert read_value(tmp_path / "published") == 2
    assert read_value(tmp_path / "save") == 4


def save_with_value(make_tree: Any, prefix: Path) -> tuple[Any, list[Path]]:
    pytest.importorskip("td_tensorclass")
    td = make_tree(1)
    td["n", "value"] = "old"
    return td.memmap(prefix), sorted(prefix.rglob("*"))


@pytest.mark.parametrize(
    ("change", "call"),
    [
        (lambda td: td.make_memmap(("n", "new"), (2,)), "posix_fallocate"),
        (lambda td: td["n"].set_("value", "new"), "rename"),
    ],
)
def test_commit_after_killed_edit_removes_temporary_files(
    change: Any, call: str, prefix: Path, make_tree: Any, watch_calls: Any, run_in_child: Any
) -> None:
    td, files = save_with_value(make_tree, prefix)

    def kill(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == call:
            os._exit(0)

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, kill)
            change(td)
        os._exit(1)

    assert run_in_child(work) == 0
    assert sorted(prefix.rglob("*")) != files
    td.memmap(prefix)
    assert sorted(prefix.rglob("*")) == files
    assert TensorDict.load_memmap(prefix)["n", "value"] == "old"


@pytest.mark.parametrize("call", ["write", "rename"])
def test_edit_failure_keeps_live_save(call: str, prefix: Path, make_tree: Any, watch_calls: Any) -> None:
    td, files = save_with_value(make_tree, prefix)

    def fail(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, fail)
        with pytest.raises(OSError, match="No space left"):
            td["n"].set_("value", "new")
    assert sorted(prefix.rglob("*")) == files
    assert TensorDict.load_memmap(prefix)["n", "value"] == "old"


def test_commit_temporary_files_in_use_are_kept(prefix: Path, tmp_path: Path, make_tree: Any) -> None:
    for name in (".save.td-new-zzzzzzzz", ".save.td-something", ".save.other.td-new-00000000"):
        (tmp_path / name).mkdir()
    (tmp_path / ".save.td-new-00000000").write_text("a file")
    with Staging(str(prefix), [("x",)]) as staging:
        busy = staging.tree.path
        make_tree(2).memmap(prefix)
        assert os.path.isdir(busy)
    assert not os.path.exists(busy)
    assert len(os.listdir(tmp_path)) == 5
    with pytest.raises(ValueError, match="names like this one are those of unfinished saves"):
        make_tree(2).memmap(tmp_path / ".save.td-old-00000000")


def test_commit_file_added_during_replacement_is_recovered(
    prefix: Path, tmp_path: Path, make_tree: Any, read_value: Any, watch_calls: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)
    late: list[str] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "rmdir" and args[0].startswith(".save.td-") and not late:
            late.append(args[0])
            (tmp_path / args[0] / "mine.txt").write_text("mine")

    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, see)
        make_tree(2).memmap(prefix)
    assert late and read_value(prefix) == 2
    make_tree(3, more=True).memmap(prefix)
    assert (prefix / "mine.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["save"] and read_value(prefix) == 3
