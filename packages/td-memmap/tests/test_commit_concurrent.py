"""Concurrent readers and writers of one save see complete saves only."""

from __future__ import annotations

import errno
import functools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_memmap import (
    FileTakenError,
    MemoryMappedTensor,
    _fs,
    append_memmap,
    inspect,
    pack_memmap,
    verify,
)
from td_memmap._commit import Staging


def test_save_in_place_second_writer_raises(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, make_tree: Any, read_value: Any
) -> None:
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    prefix.mkdir()
    with (
        Staging(str(prefix), [("x",)]),
        pytest.raises(FileTakenError, match="cannot save at .*/save: another process does"),
    ):
        make_tree(2).memmap(prefix)
    make_tree(2).memmap(prefix)
    assert read_value(prefix) == 2


@pytest.mark.once
def test_load_during_replacements_returns_one_version(
    prefix: Path, make_tree: Any, read_value: Any, fork_child: Any, is_running: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)

    def write() -> None:
        for i in range(2, 102):
            make_tree(i, more=i % 2 == 1).memmap(prefix)

    pid = fork_child(write)
    seen = set()
    while is_running(pid):
        found = read_value(prefix)
        assert found is not None
        seen.add(found)
    assert len(seen) > 3
    assert read_value(prefix) == 101


def has_one_value(td: Any) -> bool:
    leaves = [leaf for _, leaf in td.items(include_nested=True, leaves_only=True)]
    return len({float(value) for leaf in leaves for value in leaf.flatten()}) == 1


READERS: dict[str, Callable[[Path], bool]] = {
    "load": lambda prefix: has_one_value(TensorDict.load_memmap(prefix)),
    "verified": lambda prefix: has_one_value(TensorDict.load_memmap(prefix, verify=True)),
    "subpath": lambda prefix: has_one_value(TensorDict.load_memmap(prefix, subpath="n")),
    "deep": lambda prefix: has_one_value(TensorDict.load_memmap(prefix, subpath="n/deep")),
    "inspect": lambda prefix: inspect(prefix).nbytes in (244, 260),
    "verify": lambda prefix: verify(prefix).problems == [],
    "pack": lambda prefix: has_one_value(
        TensorDict.load_memmap(pack_memmap(prefix, prefix.with_name("packed")))
    ),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_read_save_replaced_at_any_open_returns_one_version(
    reader: Callable[[Path], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tree: Any
) -> None:
    prefix, real = tmp_path / "save", _fs.DirectoryTree.open
    calls = position = 0

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == position:
            make_tree(2, more=True).memmap(prefix, checksums=True)
        return real(self, *args, **kwargs)

    while calls >= position:
        with monkeypatch.context() as patch:
            make_tree(1).memmap(prefix, checksums=True)
            calls, position = 0, position + 1
            patch.setattr(_fs.DirectoryTree, "open", replaced)
            assert reader(prefix), position


@pytest.mark.parametrize("delays", [False, True], ids=["fast", "delayed"])
@pytest.mark.parametrize("values", [(2, 3), (2, 3, 4)], ids=["two", "three"])
def test_memmap_concurrent_writers_leave_one_complete_save(
    values: tuple[int, ...],
    delays: bool,
    prefix: Path,
    tmp_path: Path,
    make_tree: Any,
    read_value: Any,
    watch_calls: Any,
    fork_child: Any,
    is_running: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    make_tree(1, more=True).memmap(prefix)
    put_user_files(prefix)

    def write(value: int) -> None:
        chance = random.Random(value)

        def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
            # Random delays stop each writer at any system call while the others continue.
            if delays and chance.random() < 0.05:
                time.sleep(chance.random() * 0.005)

        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, see)
            for _ in range(20 if delays else 40):
                make_tree(value, more=value % 2 == 1).memmap(prefix)

    children = [fork_child(functools.partial(write, value)) for value in values]
    while children:
        assert read_value(prefix) in (1, *values)
        children = [pid for pid in children if is_running(pid)]
    # The last writer removes all temporary files, so none is left for the next save.
    assert os.listdir(tmp_path) == ["save"]
    assert has_user_files(prefix)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("exchange", [False, True], ids=["plain", "renameat2"])
def test_memmap_two_first_saves_leave_one_complete_save(
    exchange: bool,
    after: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    watch_calls: Any,
) -> None:
    if not exchange:
        monkeypatch.setattr(_fs, "rename_with", lambda *args: False)
    for n in range(1000):
        prefix = tmp_path / str(n) / "save"
        prefix.parent.mkdir()
        calls = 0

        def see(name: str, args: tuple[Any, ...], kwargs: Any, n: int = n, prefix: Path = prefix) -> None:
            nonlocal calls
            calls += 1
            if calls == n + 1:
                make_tree(2).memmap(prefix)

        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, see, after=after)
            make_tree(1, more=True).memmap(prefix)
        if calls <= n:
            break
        assert read_value(prefix) in (1, 2), n
        assert os.listdir(prefix.parent) == ["save"], n
    assert n > 15


def test_memmap_threads_at_one_prefix_leave_complete_save(
    prefix: Path, tmp_path: Path, make_tree: Any, read_value: Any
) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda value: make_tree(value, more=value % 2 == 1).memmap(prefix), range(40)))
    assert read_value(prefix) in range(40)
    assert os.listdir(tmp_path) == ["save"]


def test_commit_stale_lock_file_is_removed(tmp_path: Path, make_tree: Any) -> None:
    (tmp_path / ".save.td-lock").touch()
    make_tree(1, more=True).memmap(tmp_path / "save")
    assert os.listdir(tmp_path) == ["save"]


def test_commit_process_forked_during_save_keeps_no_lock(
    prefix: Path, make_tree: Any, read_value: Any, watch_calls: Any, fork_child: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)
    ready, go = os.pipe()
    forked: list[int] = []
    waiting: list[Any] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "renameat2" and not forked:
            # The forked process has the lock file open and runs until the pipe is closed.
            forked.append(fork_child(lambda: (os.close(go), os.read(ready, 1))))
            waiting.append(pool.submit(lambda: make_tree(3, more=True).memmap(prefix)))
            time.sleep(0.2)  # The other save waits for the lock by now.

    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.MonkeyPatch.context() as patch:
                watch_calls(patch, see)
                make_tree(2).memmap(prefix)
            waiting[0].result(timeout=60)
        finally:
            os.close(go)
    assert os.waitpid(forked[0], 0)[1] == 0
    os.close(ready)
    assert read_value(prefix) == 3


def test_commit_without_file_locks_replaces_save(
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(_fs.fcntl, "flock", flock)
    for value in (1, 2, 3):
        make_tree(value, more=value % 2 == 1).memmap(prefix)
        put_user_files(prefix)
        assert read_value(prefix) == value
        assert os.listdir(tmp_path) == ["save"]
    assert has_user_files(prefix)
    # Without locks no process can detect whether these files are in use, so they are kept.
    (tmp_path / ".save.td-new-00000000").mkdir()
    (tmp_path / ".t.tmp-00000000").touch()
    rows = TensorDict({"a": torch.ones(1)}, batch_size=[1])
    rows.memmap(prefix)
    append_memmap(prefix, rows)
    MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "t")
    assert sorted(os.listdir(tmp_path)) == [".save.td-new-00000000", ".t.tmp-00000000", "save", "t"]
