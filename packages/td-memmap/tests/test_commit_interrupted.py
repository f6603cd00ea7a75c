"""A save that is killed, interrupted or fails leaves the complete old save or the complete new one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, save
from td_core.errors import CodecError, FormatError
from td_memmap import (
    _fs,
    pack_memmap,
    unpack_memmap,
    verify,
)
from td_memmap._commit import Staging
from td_store import _temporary_files


@pytest.mark.once
@pytest.mark.parametrize(
    "work",
    [
        lambda make_tree, prefix, archive: make_tree(2).memmap(prefix),
        lambda make_tree, prefix, archive: make_tree(2).memmap(prefix, num_threads=4),
        lambda make_tree, prefix, archive: unpack_memmap(archive, prefix),
        lambda make_tree, prefix, archive: save(dict(make_tree(2).items()), prefix),
    ],
    ids=["save", "threads", "unpack", "checkpoint"],
)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_commit_killed_at_any_call_leaves_complete_save(
    work: Any,
    over: bool,
    prefix: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    kill_at_call: Any,
    put_user_files: Any,
    has_user_files: Any,
    find_user_files: Any,
    user_files: Any,
) -> None:
    old, archive = make_tree(1, more=True), tmp_path_factory.mktemp("archive") / "save.tdz"
    make_tree(2).memmap(archive)
    # By default threads write only large leaves; let them write all.
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    seen = set()
    for n in range(10_000):
        if over:
            if not (prefix / "meta.json").exists() or n == 0 or read_value(prefix) != 1:
                old.memmap(prefix)
                put_user_files(prefix)
        unfinished = kill_at_call(n, lambda: work(make_tree, prefix, archive))
        found = read_value(prefix)
        seen.add(found)
        assert found in ((1, 2) if over else (None, 2)), f"killed at call {n}"
        if over:
            assert find_user_files(tmp_path) == set(user_files), f"killed at call {n}"
        if not unfinished:
            break
        if n % 7 == 0:
            # The next save removes the temporary files and moves user files back.
            make_tree(1, more=True).memmap(prefix)
            assert os.listdir(tmp_path) == ["save"], f"killed at call {n}"
            if over:
                assert has_user_files(prefix)
            else:
                subprocess.run(["rm", "-rf", prefix], check=True)
        elif not over:
            for stale in tmp_path.iterdir():
                subprocess.run(["rm", "-rf", stale], check=True)
    assert n > 50
    assert seen == ({1, 2} if over else {None, 2})
    make_tree(3, more=True).memmap(prefix)
    assert os.listdir(tmp_path) == ["save"]
    assert read_value(prefix) == 3


@pytest.mark.parametrize("call", ["write", "open", "mkdir", "renameat2", "rename", "fsync", "link"])
def test_commit_failing_system_call_keeps_old_save(
    call: str,
    prefix: Path,
    tmp_path: Path,
    make_tree: Any,
    read_value: Any,
    watch_calls: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    make_tree(1, more=True).memmap(prefix)
    put_user_files(prefix)
    failures = 0
    for n in range(1000):
        count = 0

        def see(name: str, args: tuple[Any, ...], kwargs: Any, n: int = n) -> None:
            nonlocal count
            if name == call and not (name == "open" and not args[1] & os.O_CREAT):
                count += 1
                if count == n + 1:
                    raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, see)
            try:
                make_tree(2).memmap(prefix, durable=True)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failures += 1
                if read_value(prefix) == 1:
                    assert os.listdir(tmp_path) == ["save"], f"{call} {n}"
                continue
            finally:
                patch.undo()
        break
    assert failures
    assert read_value(prefix) == 2
    assert os.listdir(tmp_path) == ["save"]
    assert has_user_files(prefix)


def save_without_exchange(make_tree: Any, prefix: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fs, "exchange", lambda *names: False)
        make_tree(2).memmap(prefix)


#: Calls after which the test raises KeyboardInterrupt: they change names, lock a file or follow its opening.
INTERRUPTED = {"mkdir", "rename", "renameat2", "replace", "link", "unlink", "flock", "fstat"}


@pytest.mark.parametrize(
    ("work", "ends"),
    [
        (lambda make_tree, prefix: make_tree(2).memmap(prefix), {1, 2}),
        (save_without_exchange, {1, 2}),
        (lambda make_tree, prefix: unpack_memmap(f"{prefix}.tdz", prefix), {1, 2}),
        (lambda make_tree, prefix: pack_memmap(prefix, f"{prefix}.tdz"), {1}),
        (lambda make_tree, prefix: TensorDict.load_memmap(prefix), {1}),
        (lambda make_tree, prefix: TensorDict.load_memmap(f"{prefix}.tdz"), {1}),
        (lambda make_tree, prefix: verify(prefix), {1}),
    ],
    ids=["save", "save without exchange", "unpack", "pack", "load", "load archive", "verify"],
)
def test_commit_interrupted_leaves_complete_save(
    work: Any,
    ends: set[int],
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    watch_calls: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    make_tree(1, more=True).memmap(prefix, checksums=True)
    make_tree(2).memmap(f"{prefix}.tdz")
    put_user_files(prefix)
    seen = set()
    for n in range(1000):
        count = 0

        def interrupt(name: str, args: tuple[Any, ...], kwargs: Any, n: int = n) -> None:
            nonlocal count
            count += name in INTERRUPTED
            if name in INTERRUPTED and count == n + 1:
                raise KeyboardInterrupt

        files = set(os.listdir("/proc/self/fd"))
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, interrupt, after=True)
            with contextlib.suppress(KeyboardInterrupt):
                work(make_tree, prefix)
        assert set(os.listdir("/proc/self/fd")) == files, f"interrupted at call {n}"
        seen.add(read_value(prefix))
        if count <= n:
            break
        if read_value(prefix) != 1 or n % 7 == 0 or len(os.listdir(tmp_path)) > 2:
            # The temporary files are no longer in use, although this process still runs.
            make_tree(1, more=True).memmap(prefix, checksums=True)
            make_tree(2).memmap(f"{prefix}.tdz")
            assert sorted(os.listdir(tmp_path)) == ["save", "save.tdz"], f"interrupted at call {n}"
            assert has_user_files(prefix)
    assert n > 1
    assert seen == ends


def test_memmap_unstorable_value_writes_nothing(
    prefix: Path, tmp_path: Path, make_tree: Any, read_value: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)
    td = make_tree(2)
    td["zzz"] = torch.eye(2).to_sparse()
    for num_threads in (0, 2):
        with pytest.raises(CodecError, match="cannot store a tensor of layout torch.sparse_coo at key 'zzz'"):
            td.memmap(prefix, num_threads=num_threads)
    assert read_value(prefix) == 1
    assert os.listdir(tmp_path) == ["save"]


@pytest.mark.once
def test_commit_killed_without_exchange_restores_old_save(
    prefix: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    kill_at_call: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    monkeypatch.setattr(_temporary_files, "_find_renameat2", lambda: None)
    make_tree(1, more=True).memmap(prefix)
    put_user_files(prefix)
    for n in range(1000):
        if not kill_at_call(n, lambda: make_tree(2).memmap(prefix)):
            break
        assert read_value(prefix) in (None, 1, 2)
        if read_value(prefix) is None:
            # The next save first restores the old save from its temporary name.
            with Staging(str(prefix), [("x",)]):
                assert read_value(prefix) in (1, 2)
        if read_value(prefix) == 2:
            make_tree(1, more=True).memmap(prefix)
    assert read_value(prefix) == 2
    assert has_user_files(prefix)


def test_commit_durable_syncs_before_publishing(
    prefix: Path, tmp_path: Path, make_tree: Any, watch_calls: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)
    log: list[tuple[str, str]] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "write":
            log.append(("write", os.readlink(f"/proc/self/fd/{args[0]}")))
        elif name == "fsync":
            log.append(("sync", os.readlink(f"/proc/self/fd/{args[0]}")))
        elif name == "open" and args[1] & os.O_CREAT and not args[0].endswith(".td-lock"):
            folder = os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}")
            log.append(("create", f"{folder}/{args[0]}"))
        elif name in ("mkdir", "link"):
            fd = kwargs.get("dir_fd", kwargs.get("dst_dir_fd"))
            made = args[0] if name == "mkdir" else args[1]
            log.append(
                ("mkdir" if name == "mkdir" else "create", f"{os.readlink(f'/proc/self/fd/{fd}')}/{made}")
            )
        elif name == "renameat2" and args[4] == 2:
            log.append(("exchange", ""))

    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, see)
        make_tree(2).memmap(prefix, durable=True)
    published = [kind for kind, _ in log].index("exchange")
    before, after = log[:published], log[published:]
    dirty: set[str] = set()
    renamed = before[-1][1]
    assert before[-1][0] == "sync"
    for kind, path in before:
        if kind == "sync":
            dirty.discard(path)
        elif kind == "write":
            dirty.add(path)
        else:
            dirty.update({path, os.path.dirname(path)})
            if kind == "create" and Path(path).name == "tied.memmap":
                dirty.discard(path)  # This hard link names a file that is synced under its other name.
    assert dirty <= {str(tmp_path)}, "written, and not synced before it was published"
    assert ("sync", str(tmp_path)) in after
    assert renamed.startswith(str(tmp_path / ".save.td-new-"))


class Disk:
    """Model of a disk that follows the system calls of a save and loses unsynced changes in a power failure.

    A file then has the content, and a directory the names, of its last sync. Directories are dicts, files are lists
    of chunks.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now: dict[str, Any] = {}
        self.synced: dict[int, Any] = {}
        for path in [root, *sorted(root.rglob("*"))]:
            if path != root:
                self.at(path.parent)[path.name] = {} if path.is_dir() else [path.read_bytes()]
        todo: list[Any] = [self.now]
        while todo:
            self.sync(item := todo.pop())
            todo.extend(item.values() if isinstance(item, dict) else ())

    def at(self, path: Path) -> Any:
        item = self.now
        for name in path.relative_to(self.root).parts:
            item = item[name]
        return item

    def sync(self, item: Any) -> None:
        # Keep the item alive, so that no other object gets its id.
        self.synced[id(item)] = (item, item.copy())

    def see(self, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        def folder(fd: int) -> Any:
            return self.at(Path(os.readlink(f"/proc/self/fd/{fd}")))

        if name == "open" and args[1] & os.O_CREAT:
            folder(kwargs["dir_fd"]).setdefault(args[0], [])
        elif name == "write":
            folder(args[0]).append(bytes(args[1]))
        elif name == "mkdir":
            folder(kwargs["dir_fd"])[args[0]] = {}
        elif name == "link":
            folder(kwargs["dst_dir_fd"])[args[1]] = folder(kwargs["src_dir_fd"])[args[0]]
        elif name in ("unlink", "rmdir"):
            folder(kwargs["dir_fd"]).pop(args[0], None)
        elif name == "rename":
            folder(kwargs["dst_dir_fd"])[args[1]] = folder(kwargs["src_dir_fd"]).pop(args[0])
        elif name == "renameat2":
            source, target = folder(args[0]), folder(args[2])
            one, other = os.fsdecode(args[1]), os.fsdecode(args[3])
            if args[4] == 2:
                source[one], target[other] = target[other], source[one]
            elif other not in target:
                target[other] = source.pop(one)
        elif name == "fsync":
            self.sync(folder(args[0]))

    def get_state_after_failure(self, *, renamed: bool) -> dict[str, Any]:
        """Return the disk after a power failure; with ``renamed``, renames next to the save survive without a sync."""

        def left(item: Any) -> Any:
            _, kept = self.synced.get(id(item), (None, {} if isinstance(item, dict) else []))
            return {name: left(below) for name, below in kept.items()} if isinstance(kept, dict) else kept

        top = self.now if renamed else self.synced[id(self.now)][1]
        return {name: left(item) for name, item in top.items()}


def write_directory(item: Any, path: Path) -> None:
    if isinstance(item, dict):
        path.mkdir()
        for name, below in item.items():
            write_directory(below, path / name)
    else:
        path.write_bytes(b"".join(item))


@pytest.mark.parametrize("old", ["a save", "nothing", "a mount point"])
def test_commit_durable_survives_power_failure_at_any_call(
    old: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    watch_calls: Any,
) -> None:
    (tmp_path / "disk").mkdir()
    prefix = tmp_path / "disk" / "save"
    if old == "a save":
        make_tree(1, more=True).memmap(prefix)
    elif old == "a mount point":
        monkeypatch.setattr(_fs, "is_mount", lambda path: True)
        prefix.mkdir()
    before = read_value(prefix)
    disk = Disk(tmp_path / "disk")
    states: list[dict[str, Any]] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        for renamed in (False, True):
            states.append(disk.get_state_after_failure(renamed=renamed))
        disk.see(name, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, see)
        make_tree(2).memmap(prefix, durable=True)
    found = []
    for i, state in enumerate(states):
        if i < 2 or state not in states[i - 2 : i]:
            write_directory(state, tmp_path / str(i))
            found.append(read_value(tmp_path / str(i) / "save"))
    assert set(found) == {before, 2}
    assert found[-1] == 2
    # Check the model itself: without a failure it has the complete save.
    write_directory({name: disk.now[name] for name in disk.now}, tmp_path / "all")
    assert read_value(tmp_path / "all" / "save") == 2
    last = disk.get_state_after_failure(renamed=False)
    write_directory(last, tmp_path / "last")
    assert read_value(tmp_path / "last" / "save") == 2
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        states.clear()
        disk = Disk(tmp_path / "disk")
        watch_calls(patch, see)
        make_tree(3, more=True).memmap(prefix)
    write_directory(disk.get_state_after_failure(renamed=True), tmp_path / "not durable")
    with pytest.raises((FormatError, FileNotFoundError, AssertionError)):
        assert read_value(tmp_path / "not durable" / "save") in (2, 3)
