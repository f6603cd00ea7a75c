"""A save is complete or not there, whatever stops it, and nobody else's files are lost."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError
from td_memmap import (
    FileTakenError,
    MemoryMappedTensor,
    _commit,
    _file_names,
    _fs,
    _save_files,
    append_memmap,
    inspect,
    pack_memmap,
    unpack_memmap,
    verify,
)
from td_memmap._commit import Staging
from td_memmap._meta import LIMIT

#: What reaches the file system; the rest of ``os`` computes.
CALLS = {
    "open", "close", "read", "write", "pwrite", "mkdir", "rmdir", "unlink", "link", "rename", "replace", "stat", "fstat",
    "listdir", "scandir", "fsync", "ftruncate", "posix_fallocate", "fchmod", "makedirs", "access", "dup",
}  # fmt: skip


class Watched:
    """Stand for the module ``os`` inside the module that touches the file system, and see every call."""

    def __init__(self, see: Callable[[str, tuple[Any, ...], Any], None], behind: bool = False) -> None:
        self._see = see
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        member = getattr(os, name)
        return self.wrapped(name, member) if name in CALLS else member

    def wrapped(self, name: str, member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._behind:
                self._see(name, args, kwargs)
                return member(*args, **kwargs)
            result = member(*args, **kwargs)
            self._see(name, args, kwargs)
            return result

        return call


def watch(
    monkeypatch: pytest.MonkeyPatch,
    see: Callable[[str, tuple[Any, ...], Any], None],
    *,
    behind: bool = False,
) -> None:
    """Call ``see`` before every call that reaches the file system, or behind it."""
    watched, rename = Watched(see, behind), _fs._renameat2()
    if rename is not None:
        rename = watched.wrapped("renameat2", rename)
    monkeypatch.setattr(_fs, "os", watched)
    monkeypatch.setattr(_fs, "_renameat2", lambda: rename)
    monkeypatch.setattr(_fs.fcntl, "flock", watched.wrapped("flock", _fs.fcntl.flock))


def make(value: int, *, more: bool = False) -> TensorDict:
    tied = torch.full((4,), value)
    td = TensorDict(
        {
            "a": torch.full((3, 2), value),
            "n": {"b": torch.full((5,), float(value)), "tied": tied, "deep": {"c": torch.full((2,), value)}},
            "tied": tied,
            "strided": torch.full((4, 3), value).t(),
        }
    )
    if more:
        td["more"] = TensorDict({"d": torch.full((2,), value)})
    return td


def content(prefix: Path) -> int | None:
    """Return which of the saves of :func:`make` is complete at ``prefix``; None where nothing is."""
    try:
        loaded = TensorDict.load_memmap(prefix, mode="r")
    except FileNotFoundError:
        return None
    values = {int(value) for leaf in loaded._leaves() for value in leaf.flatten()}
    assert len(values) == 1, f"a mixture: {values}"
    (value,) = values
    wanted = make(value, more=value % 2 == 1)
    assert set(loaded.keys(True)) == set(wanted.keys(True))
    return value


def start(work: Callable[[], Any]) -> int:
    """Run ``work`` in a forked child; return its id."""
    pid = os.fork()
    if pid == 0:
        # The threads that torch started to compute with did not come along.
        torch.set_num_threads(1)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def running(pid: int) -> bool:
    """Tell whether a child still runs; one that has ended must have succeeded."""
    done, status = os.waitpid(pid, os.WNOHANG)
    assert not done or status == 0
    return not done


def in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a forked child and return how it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(start(work), 0)[1])


def killed(n: int, work: Callable[[], Any]) -> bool:
    """Run ``work`` in a child that is killed before call ``n`` that reaches the file system; tell whether it was."""
    calls = itertools.count()

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if next(calls) >= n:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched() -> None:
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, see)
            work()

    end = in_child(watched)
    assert end in (0, -signal.SIGKILL)
    return end != 0


FOREIGN = {"README.md": "mine", "logs/today.txt": "mine too", "n/notes.txt": "mine as well"}


def put_foreign(prefix: Path) -> None:
    for name, text in FOREIGN.items():
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(text)


def keeps_foreign(prefix: Path) -> bool:
    """Tell whether the foreign files are where they were put."""
    return all((prefix / name).read_text() == text for name, text in FOREIGN.items())


def foreign_is_there(folder: Path) -> set[str]:
    """Return the foreign files that exist, wherever below ``folder``."""
    return {
        name
        for name in FOREIGN
        if any(file.read_text() == FOREIGN[name] for file in folder.rglob(Path(name).name))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        lambda prefix, archive: make(2).memmap(prefix),
        lambda prefix, archive: make(2).memmap(prefix, num_threads=4),
        lambda prefix, archive: unpack_memmap(archive, prefix),
    ],
    ids=["save", "threads", "unpack"],
)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_commit_killed_at_any_call_leaves_complete_save(
    work: Any,
    over: bool,
    prefix: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, archive = make(1, more=True), tmp_path_factory.mktemp("archive") / "save.tdz"
    make(2).memmap(archive)
    # Threads only write large leaves; here they shall write all.
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    seen = set()
    for n in range(10_000):
        if over:
            if not (prefix / "meta.json").exists() or n == 0 or content(prefix) != 1:
                old.memmap(prefix)
                put_foreign(prefix)
        unfinished = killed(n, lambda: work(prefix, archive))
        found = content(prefix)
        seen.add(found)
        assert found in ((1, 2) if over else (None, 2)), f"killed at call {n}"
        if over:
            assert foreign_is_there(tmp_path) == set(FOREIGN), f"killed at call {n}"
        if not unfinished:
            break
        if n % 7 == 0:
            # The next save removes the litter, and brings back what is not ours.
            make(1, more=True).memmap(prefix)
            assert os.listdir(tmp_path) == ["save"], f"killed at call {n}"
            if over:
                assert keeps_foreign(prefix)
            else:
                subprocess.run(["rm", "-rf", prefix], check=True)
        elif not over:
            for litter in tmp_path.iterdir():
                subprocess.run(["rm", "-rf", litter], check=True)
    assert n > 50
    assert seen == ({1, 2} if over else {None, 2})
    make(3, more=True).memmap(prefix)
    assert os.listdir(tmp_path) == ["save"]
    assert content(prefix) == 3


@pytest.mark.parametrize("call", ["write", "open", "mkdir", "renameat2", "rename", "fsync", "link"])
def test_commit_failed_call_keeps_old_save_without_litter(call: str, prefix: Path, tmp_path: Path) -> None:
    make(1, more=True).memmap(prefix)
    put_foreign(prefix)
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
            watch(patch, see)
            try:
                make(2).memmap(prefix, durable=True)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failures += 1
                if content(prefix) == 1:
                    assert os.listdir(tmp_path) == ["save"], f"{call} {n}"
                continue
            finally:
                patch.undo()
        break
    assert failures
    assert content(prefix) == 2
    assert os.listdir(tmp_path) == ["save"]
    assert keeps_foreign(prefix)


def save_without_exchange(prefix: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fs, "exchange", lambda *names: False)
        make(2).memmap(prefix)


#: What an interrupt comes behind: what changes names, marks who uses what, or follows the opening of a file.
INTERRUPTED = {"mkdir", "rename", "renameat2", "replace", "link", "unlink", "flock", "fstat"}


@pytest.mark.parametrize(
    ("work", "ends"),
    [
        (lambda prefix: make(2).memmap(prefix), {1, 2}),
        (save_without_exchange, {1, 2}),
        (lambda prefix: unpack_memmap(f"{prefix}.tdz", prefix), {1, 2}),
        (lambda prefix: pack_memmap(prefix, f"{prefix}.tdz"), {1}),
        (lambda prefix: TensorDict.load_memmap(prefix), {1}),
        (lambda prefix: TensorDict.load_memmap(f"{prefix}.tdz"), {1}),
        (lambda prefix: verify(prefix), {1}),
    ],
    ids=["save", "save without exchange", "unpack", "pack", "load", "load archive", "verify"],
)
def test_commit_interrupted_leaves_no_litter(
    work: Any, ends: set[int], prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(1, more=True).memmap(prefix, checksums=True)
    make(2).memmap(f"{prefix}.tdz")
    put_foreign(prefix)
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
            watch(patch, interrupt, behind=True)
            with contextlib.suppress(KeyboardInterrupt):
                work(prefix)
        assert set(os.listdir("/proc/self/fd")) == files, f"interrupted at call {n}"
        seen.add(content(prefix))
        if count <= n:
            break
        if content(prefix) != 1 or n % 7 == 0 or len(os.listdir(tmp_path)) > 2:
            # Whatever is left is no more in use, though this process goes on.
            make(1, more=True).memmap(prefix, checksums=True)
            make(2).memmap(f"{prefix}.tdz")
            assert sorted(os.listdir(tmp_path)) == ["save", "save.tdz"], f"interrupted at call {n}"
            assert keeps_foreign(prefix)
    assert n > 1
    assert seen == ends


def test_memmap_full_disk_error_has_key_and_file(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    make(1, more=True).memmap(prefix)
    td = make(2)
    td["n", "deep", "big"] = torch.zeros(100_000, dtype=torch.uint8)

    def full(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "write" and len(args[1]) == 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for num_threads in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, full)
            with pytest.raises(
                OSError, match=r"cannot write key \('n', 'deep', 'big'\), 100000 bytes: No space left"
            ) as found:
                td.memmap(prefix, num_threads=num_threads)
        assert found.value.errno == errno.ENOSPC
        assert found.value.filename == str(prefix / "n" / "deep" / "big.memmap")
        assert content(prefix) == 1
        assert os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize("limit", [50_000, 2_000, 100, 30, 10, 0])
def test_memmap_file_size_limit_raises(limit: int, prefix: Path, tmp_path: Path) -> None:
    """Of the leaves, of the metadata of a level, of the first file: whatever is larger."""
    make(1, more=True).memmap(prefix)

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        td = make(2)
        td["big"] = torch.zeros(100_000)
        named = "cannot write key 'big', 400000 bytes: " if limit >= 100 else ""
        with pytest.raises(OSError, match=f"{named}File too large"):
            td.memmap(prefix)
        td["big"] = torch.zeros(2)
        if limit < 2_000:
            with pytest.raises(OSError, match="File too large"):
                td.memmap(prefix)

    assert in_child(save) == 0
    assert content(prefix) == 1
    assert os.listdir(tmp_path) == ["save"]


def test_memmap_few_descriptors_saves_many_nodes(prefix: Path, tmp_path: Path) -> None:
    td = TensorDict({f"g{i}": {"x": torch.ones(2), "y": {"z": torch.ones(3)}} for i in range(50)})

    def check(loaded: Any) -> None:
        assert bool((loaded == td).all())

    def work() -> None:
        soft = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for num_threads in (0, 0, 2):  # the second and the third over a save
            td.memmap(prefix, num_threads=num_threads)
            check(TensorDict.load_memmap(prefix))
        assert verify(prefix).ok
        td.memmap_like(prefix)

    assert in_child(work) == 0
    assert os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize("durable", [False, True])
def test_memmap_few_descriptors_threads_wait(durable: bool, prefix: Path) -> None:
    td = TensorDict({f"g{i}": {"x": torch.full((1 << 20,), i, dtype=torch.uint8)} for i in range(30)})

    def work() -> None:
        def slowly(fd: int, data: Any) -> None:
            time.sleep(0.02)
            write_all(fd, data)

        write_all = _fs.write_all
        soft = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_fs, "write_all", slowly)
            td.memmap(prefix, num_threads=16, durable=durable)
        assert bool((TensorDict.load_memmap(prefix, num_threads=16) == td).all())

    assert in_child(work) == 0


#: What is done in the directory ``here``, which has saves of ``make(1)``: ``old``, which ``mapped`` maps, and ``old.tdz``.
WITH_FEW_FILES: dict[str, Callable[[Path, Any], Any]] = {
    "save": lambda here, mapped: make(2).memmap(here / "new"),
    "save over": lambda here, mapped: make(2).memmap(here / "old"),
    "save what is mapped": lambda here, mapped: mapped.memmap(here / "old"),
    "like": lambda here, mapped: make(2).memmap_like(here / "new"),
    "load": lambda here, mapped: TensorDict.load_memmap(here / "old"),
    "load a part": lambda here, mapped: TensorDict.load_memmap(here / "old", subpath="n/deep"),
    "append": lambda here, mapped: append_memmap(here / "rows", _rows()),
    "pack": lambda here, mapped: pack_memmap(here / "old", here / "new.tdz"),
    "unpack": lambda here, mapped: unpack_memmap(here / "old.tdz", here / "new"),
    "verify": lambda here, mapped: verify(here / "old"),
    "add": lambda here, mapped: mapped.make_memmap(("n", "deep", "new"), ()),
}


def _rows() -> TensorDict:
    tied = torch.arange(3)
    return TensorDict(
        {"a": tied, "n": TensorDict({"tied": tied, "n": TensorDict({"b": tied}, [3])}, [3])}, [3]
    )


@pytest.mark.parametrize("work", WITH_FEW_FILES.values(), ids=WITH_FEW_FILES)
def test_commit_few_descriptors_completes_or_leaves_nothing(
    work: Callable[[Path, Any], Any], tmp_path: Path
) -> None:
    def set_up(here: Path) -> Any:
        here.mkdir()
        mapped = make(1, more=True).memmap(here / "old")
        put_foreign(here / "old")
        pack_memmap(here / "old", here / "old.tdz")
        _rows().memmap(here / "rows")
        return mapped

    def limited(here: Path, free: int) -> None:
        mapped = set_up(here)
        before, hard = set(os.listdir(here)), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, hard))
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for fd in taken[len(taken) - free :]:
            os.close(fd)
        error = None
        try:
            work(here, mapped)
        except OSError as raised:
            error = raised
        for fd in taken[: len(taken) - free]:
            os.close(fd)
        assert error is None or (error.errno == errno.EMFILE and str(error.filename).startswith(str(here)))
        assert error is None or free < 14
        new = set(os.listdir(here)) - before
        assert new <= (set() if error is not None else {"new", "new.tdz"})
        assert keeps_foreign(here / "old") and verify(here / "old").ok and verify(here / "rows").ok

    work(tmp_path / "warm", set_up(tmp_path / "warm"))
    for free in range(15):
        assert in_child(lambda here=tmp_path / str(free), free=free: limited(here, free)) == 0, free


@pytest.mark.parametrize("archive", [False, True])
def test_load_without_address_space_error_has_file(archive: bool, prefix: Path, tmp_path: Path) -> None:
    path = tmp_path / "save.tdz" if archive else prefix
    TensorDict({"a": {"big": torch.zeros(64 << 20, dtype=torch.uint8)}}).memmap(path)
    named = str(path if archive else prefix / "a" / "big.memmap")

    def work() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        with pytest.raises(OSError, match="cannot map 67[0-9]+ bytes: Cannot allocate memory") as found:
            TensorDict.load_memmap(path)
        assert found.value.errno == errno.ENOMEM
        assert found.value.filename == named

    assert in_child(work) == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    yield disk
    # At once, even where a mapping is still alive: what stays mounted, no later run of pytest could remove.
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_memmap_full_disk_keeps_old_save(small_disk: Path) -> None:
    prefix = small_disk / "save"
    make(1, more=True).memmap(prefix)
    for call in ("memmap", "memmap_"):
        td = make(2)
        td["big"] = torch.zeros(1_000_000)
        with pytest.raises(OSError, match="No space left on device"):
            getattr(td, call)(prefix)
        assert content(prefix) == 1
        assert os.listdir(small_disk) == ["save"]


def test_write_full_disk_error_has_file(small_disk: Path) -> None:
    small = TensorDict({"a": torch.zeros(2, 2)}, batch_size=[2])
    large = TensorDict({"a": torch.rand(2, 200_000)}, batch_size=[2])
    saved, outside = small.memmap(small_disk / "save"), small_disk.parent / "outside"
    large.memmap(outside)
    pack_memmap(outside, f"{outside}.tdz")
    wide = TensorDict({"a": torch.zeros(2, 200_000)}, batch_size=[2]).memmap_like(small_disk / "wide")
    for write, name in (
        (lambda: large.memmap(small_disk / "save"), "save/a.memmap"),
        (lambda: large.memmap(small_disk / "new.tdz"), "new.tdz"),
        (lambda: pack_memmap(outside, small_disk / "new.tdz"), "new.tdz"),
        (lambda: unpack_memmap(f"{outside}.tdz", small_disk / "new"), "new/a.memmap"),
        (lambda: append_memmap(small_disk / "wide", large), "wide/a.memmap"),
        (lambda: saved.make_memmap_from_tensor("b", large["a"]), "save/b.memmap"),
        (lambda: saved.make_memmap("b", (2, 200_000)), "save/b.memmap"),
        (lambda: MemoryMappedTensor.from_tensor(large["a"], filename=small_disk / "t"), "t"),
    ):
        with pytest.raises(OSError, match="cannot .*No space left on device") as found:
            write()
        assert found.value.filename == str(small_disk / name)
        assert sorted(os.listdir(small_disk)) == ["save", "wide"]
    assert TensorDict.load_memmap(small_disk / "wide").shape == wide.shape
    assert list(TensorDict.load_memmap(small_disk / "save").keys()) == list(saved.keys()) == ["a"]


def test_memmap_mount_point_saves_in_place_only_once(small_disk: Path) -> None:
    (small_disk / "mine.txt").write_text("mine")
    make(2).memmap(small_disk)
    assert content(small_disk) == 2
    assert (small_disk / "mine.txt").read_text() == "mine"
    assert not (small_disk / "%saving").exists()
    with pytest.raises(
        FileTakenError, match="cannot replace the save at .* in one step: it is a mount point"
    ):
        make(1, more=True).memmap(small_disk)
    assert content(small_disk) == 2


@pytest.mark.parametrize("num_threads", [0, 4])
def test_save_in_place_killed_leaves_litter_for_next_save(
    num_threads: int, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    for n in range(1000):
        subprocess.run(["rm", "-rf", prefix], check=True)
        prefix.mkdir()
        put_foreign(prefix)
        unfinished = killed(n, lambda: make(2).memmap(prefix, num_threads=num_threads))
        assert content(prefix) in (None, 2)
        if content(prefix) is None:
            make(3, more=True).memmap(prefix)
            assert content(prefix) == 3
            assert not (prefix / "%saving").exists()
        assert keeps_foreign(prefix)
        if not unfinished:
            break
    assert n > 30


def test_save_in_place_killed_in_cleanup_is_recovered(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(1, more=True).memmap(unfinished := tmp_path / "unfinished")
    files = [file.relative_to(unfinished).parts for file in unfinished.rglob("*.*")]
    put_foreign(unfinished)
    (unfinished / "meta.json").unlink()
    (unfinished / "%saving").write_bytes(_file_names.format_listing(files))
    make(2).memmap(prefix)
    put_foreign(prefix)
    wanted = sorted(prefix.rglob("*"))
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    for n in range(1000):
        shutil.rmtree(prefix)
        shutil.copytree(unfinished, prefix)
        assert killed(n, lambda: make(2).memmap(prefix))
        list_of_new = (prefix / "%saving").exists() and b"%meta.json" in (prefix / "%saving").read_bytes()
        make(2).memmap(prefix)
        assert sorted(prefix.rglob("*")) == wanted, f"killed at call {n}"
        if list_of_new:
            break
    assert n > 20


def test_save_in_place_second_writer_raises(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    prefix.mkdir()
    with (
        Staging(str(prefix), [("x",)]),
        pytest.raises(FileTakenError, match="cannot save at .*/save: another process does"),
    ):
        make(2).memmap(prefix)
    make(2).memmap(prefix)
    assert content(prefix) == 2


def test_memmap_unstorable_value_writes_nothing(prefix: Path, tmp_path: Path) -> None:
    make(1, more=True).memmap(prefix)
    td = make(2)
    td["zzz"] = torch.eye(2).to_sparse()
    for num_threads in (0, 2):
        with pytest.raises(CodecError, match="cannot store a tensor of layout torch.sparse_coo at key 'zzz'"):
            td.memmap(prefix, num_threads=num_threads)
    assert content(prefix) == 1
    assert os.listdir(tmp_path) == ["save"]


def test_commit_keeps_unknown_files_and_removes_stale_ones(prefix: Path, tmp_path: Path) -> None:
    make(1, more=True).memmap(prefix)
    put_foreign(prefix)
    os.symlink("nowhere", prefix / "link")
    (prefix / "more" / "mine").write_text("x")
    inode = os.stat(prefix / "README.md").st_ino
    make(2).memmap(prefix)
    assert content(prefix) == 2
    assert keeps_foreign(prefix)
    assert os.stat(prefix / "README.md").st_ino == inode
    assert os.readlink(prefix / "link") == "nowhere"
    assert os.listdir(prefix / "more") == ["mine"]
    assert os.listdir(tmp_path) == ["save"]


def test_commit_removes_members_of_general_node(prefix: Path) -> None:
    lazy_stack([TensorDict({"a": 1}), TensorDict({"b": 2})]).memmap(prefix)
    (prefix / "meta.json").write_text(
        '{"_format_version": 2, "kind": "x", "entries": [], "members": ["0", "1"]}'
    )
    (prefix / "%manifest.json").unlink()
    make(2).memmap(prefix)
    assert not (prefix / "0").exists() and not (prefix / "1").exists()


@pytest.mark.parametrize("file", ["more/mine", "more/deep/mine", None])
def test_commit_merges_unknown_directory_with_node_name(
    file: str | None, prefix: Path, tmp_path: Path
) -> None:
    (prefix / "more" / "empty").mkdir(parents=True)
    if file is not None:
        (prefix / file).parent.mkdir(exist_ok=True)
        (prefix / file).write_text("x")
    for value in (1, 3, 4, 5):
        make(value, more=value % 2 == 1).memmap(prefix)
        assert content(prefix) == value
        assert (prefix / "more" / "empty").is_dir()
        assert file is None or (prefix / file).read_text() == "x"
        assert os.listdir(tmp_path) == ["save"]


def test_memmap_to_file_system_root_raises() -> None:
    with pytest.raises(FileTakenError, match="the root of a file system cannot be replaced"):
        make(1).memmap(Path(os.sep))


#: A file that was put into a save later: its name, and what a manifest that knew of it would say.
LATER = {
    "any": ("notes.txt", lambda file: [file.st_size, file.st_mtime_ns]),
    "below": ("n/deeper/notes.txt", lambda file: [file.st_size, None]),
    "elements": ("mine.memmap", lambda file: [file.st_size, file.st_mtime_ns - 1]),
    "elements without a time": ("mine.memmap", lambda file: [file.st_size, None]),
    "elements of another size": ("mine.memmap", lambda file: [file.st_size + 1, file.st_mtime_ns]),
    "metadata": ("mine/meta.json", lambda file: [file.st_size + 1, None]),
    "values": ("mine/%values.json", lambda file: [file.st_size + 1, None]),
    "no row": ("mine.memmap", lambda file: file.st_size),
}


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("what", LATER)
def test_commit_manifest_listing_later_file_keeps_it(what: str, damage: bool, prefix: Path) -> None:
    make(1, more=True).memmap(prefix)
    name, row = LATER[what]
    mine = prefix / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    manifest = json.loads((prefix / "%manifest.json").read_text())
    manifest["files"][name] = row(mine.stat())
    (prefix / "%manifest.json").write_text(json.dumps(manifest))
    if damage:
        (prefix / "meta.json").write_text("{")
    make(2).memmap(prefix)
    assert content(prefix) == 2
    assert mine.read_text() == "mine"
    assert not (prefix / "more").exists()


def test_commit_text_newer_than_manifest_is_kept(prefix: Path) -> None:
    make(1).memmap(prefix)
    manifest = json.loads((prefix / "%manifest.json").read_text())
    manifest["files"]["mine/meta.json"] = [2, None]
    (prefix / "%manifest.json").write_text(json.dumps(manifest))
    os.utime(
        prefix / "%manifest.json", (1 << 32, 1 << 32)
    )  # a copy keeps such a time, but says when it was made
    time.sleep(0.05)
    (prefix / "mine").mkdir()
    (prefix / "mine" / "meta.json").write_text("{}")
    make(2).memmap(prefix)
    assert content(prefix) == 2
    assert (prefix / "mine" / "meta.json").read_text() == "{}"


@pytest.mark.parametrize("key", ["a", "shape"])
@pytest.mark.parametrize("place", ["{key}", "l/3", "l/1/b"])
def test_commit_keeps_unrelated_save_in_directory(place: str, key: str, prefix: Path, same: Any) -> None:
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


def test_commit_saving_list_keeps_unknown_files(prefix: Path) -> None:
    make(1).memmap(prefix)
    put_foreign(prefix)
    (prefix / "%saving").write_bytes(bytes(1).join(name.encode() for name in (*FOREIGN, "stale.memmap")))
    (prefix / "stale.memmap").write_text("what an unfinished save left")
    make(2).memmap(prefix)
    assert content(prefix) == 2
    assert keeps_foreign(prefix)
    assert not (prefix / "stale.memmap").exists()


#: What may stand where a save in place says what is unfinished, and is no list of ours.
NO_LISTS = {
    "a fifo": os.mkfifo,
    "a directory": Path.mkdir,
    "a link out of it": lambda path: path.symlink_to(path.parents[1] / "outside"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a long file": lambda path: (path.touch(), os.truncate(path, LIMIT + 1)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("what", NO_LISTS)
def test_commit_invalid_saving_list_raises(
    what: str, old: bool, in_place: bool, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").write_text("mine.memmap")
    if old:
        make(1, more=True).memmap(prefix)
    put_foreign(prefix)
    (prefix / "mine.memmap").write_text("mine")
    NO_LISTS[what](prefix / "%saving")
    monkeypatch.setattr(_fs, "is_mount", lambda path: in_place)
    with pytest.raises(FileTakenError, match="'%saving' exists and is not part of a save; move it away"):
        make(2).memmap(prefix)
    assert content(prefix) == (1 if old else None)
    assert keeps_foreign(prefix)
    assert (prefix / "mine.memmap").read_text() == "mine"
    assert (prefix / "%saving").is_symlink() or (prefix / "%saving").exists()
    if old:
        pack_memmap(prefix, tmp_path / "save.tdz")
        assert content(tmp_path / "save.tdz") == 1


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
def test_commit_hostile_saving_list_removes_no_unknown_file(
    listed: bytes, prefix: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside.memmap").write_text("mine")
    put_foreign(prefix)
    (prefix / "%saving").write_bytes(listed)
    make(2).memmap(prefix)
    assert content(prefix) == 2
    assert keeps_foreign(prefix)
    assert sorted(os.listdir(tmp_path)) == ["outside.memmap", "save"]
    assert not (prefix / "%saving").exists()


@pytest.mark.parametrize("place", ["meta.json", "n/meta.json"])
def test_commit_replaces_save_with_damaged_metadata(place: str, prefix: Path, tmp_path: Path) -> None:
    make(1, more=True).memmap(prefix)
    put_foreign(prefix)
    (prefix / place).write_text("{")
    make(2).memmap(prefix)
    assert content(prefix) == 2
    make(2).memmap(fresh := tmp_path / "fresh")
    wanted = {str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file()}
    assert {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()} == {
        *wanted,
        *FOREIGN,
    }
    assert keeps_foreign(prefix)


def test_commit_unknown_file_with_needed_name_raises(prefix: Path, tmp_path: Path) -> None:
    for name in ("a.memmap", "n/b.memmap", "n", "n/meta.json", "%manifest.json"):
        prefix.mkdir()
        (prefix / name).parent.mkdir(exist_ok=True)
        (prefix / name).write_text("mine")
        with pytest.raises(
            FileTakenError, match=f"cannot save at .*/save: '{name}' exists and is not part of a save"
        ):
            make(2).memmap(prefix)
        assert (prefix / name).read_text() == "mine"
        assert os.listdir(tmp_path) == ["save"]
        subprocess.run(["rm", "-rf", prefix], check=True)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("taken", ["", "d", "f", "d/f"])
def test_recover_all_returns_whether_all_files_moved(taken: str, known: bool, tmp_path: Path) -> None:
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


def test_commit_undeletable_litter_is_left_for_later_save(
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


def test_memmap_readonly_parent_saves_in_place_only_once(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_fs, "make_directory", refuse)
    with pytest.raises(PermissionError):
        make(1).memmap(prefix)
    assert os.listdir(tmp_path) == []
    prefix.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(_fs, "sync_file", refuse)
        with pytest.raises(PermissionError):
            make(1).memmap(prefix, durable=True)
    assert os.listdir(prefix) == []
    make(1).memmap(prefix)
    with pytest.raises(
        FileTakenError, match="cannot replace the save at .* in one step: .*its parent directory"
    ):
        make(2).memmap(prefix)
    assert TensorDict.load_memmap(prefix)["a"].unique().tolist() == [1]
    assert verify(prefix).problems == []


@pytest.mark.parametrize(
    "litter", [["new-00000002"], ["old-00000003"], ["new-00000000", "old-00000001", "new-00000004"]]
)
def test_commit_removes_litter_of_concurrent_processes(tmp_path: Path, litter: list[str]) -> None:
    for name in litter:
        make(1).memmap(tmp_path / "other")
        os.rename(tmp_path / "other", tmp_path / f".save.td-{name}")
    make(2).memmap(tmp_path / "save")
    assert os.listdir(tmp_path) == ["save"]
    assert TensorDict.load_memmap(tmp_path / "save")["a"].unique().tolist() == [2]


def saved_with_value(prefix: Path) -> tuple[Any, list[Path]]:
    pytest.importorskip("td_tensorclass")
    td = make(1)
    td["n", "value"] = "old"
    return td.memmap(prefix), sorted(prefix.rglob("*"))


@pytest.mark.parametrize(
    ("change", "call"),
    [
        (lambda td: td.make_memmap(("n", "new"), (2,)), "posix_fallocate"),
        (lambda td: td["n"].set_("value", "new"), "rename"),
    ],
)
def test_commit_removes_litter_of_live_edit(change: Any, call: str, prefix: Path) -> None:
    td, files = saved_with_value(prefix)

    def kill(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == call:
            os._exit(0)

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, kill)
            change(td)
        os._exit(1)

    assert in_child(work) == 0
    assert sorted(prefix.rglob("*")) != files
    td.memmap(prefix)
    assert sorted(prefix.rglob("*")) == files
    assert TensorDict.load_memmap(prefix)["n", "value"] == "old"


@pytest.mark.parametrize("call", ["write", "rename"])
def test_edit_failure_keeps_live_save(call: str, prefix: Path) -> None:
    td, files = saved_with_value(prefix)

    def fail(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, fail)
        with pytest.raises(OSError, match="No space left"):
            td["n"].set_("value", "new")
    assert sorted(prefix.rglob("*")) == files
    assert TensorDict.load_memmap(prefix)["n", "value"] == "old"


def test_commit_does_not_list_parent_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def watched(listing: Callable[[Any], Any], where: Any) -> Any:
        seen.append(os.path.realpath(f"/proc/self/fd/{where}" if isinstance(where, int) else where))
        return listing(where)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, functools.partial(watched, getattr(os, name)))
    for _ in range(2):
        make(1).memmap(tmp_path / "save")
        make(1).memmap(tmp_path / "save.tdz")
        rows = TensorDict({"a": torch.zeros(2, 3)}, [2]).memmap(tmp_path / "rows", durable=True)
        append_memmap(tmp_path / "rows", rows)
    assert str(tmp_path) not in seen
    assert seen


def test_commit_without_hard_links_saves(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    for value in (1, 3):
        make(value, more=True).memmap(prefix, checksums=True)
        put_foreign(prefix)
        assert content(prefix) == value
        TensorDict.load_memmap(prefix).memmap(prefix, checksums=True)
        assert content(prefix) == value
        assert keeps_foreign(prefix)
        assert verify(prefix).hashed == verify(prefix).files
        assert os.listdir(tmp_path) == ["save"]


def test_commit_keeps_litter_in_use_and_unknown_files(prefix: Path, tmp_path: Path) -> None:
    for name in (".save.td-new-zzzzzzzz", ".save.td-something", ".save.other.td-new-00000000"):
        (tmp_path / name).mkdir()
    (tmp_path / ".save.td-new-00000000").write_text("a file")
    with Staging(str(prefix), [("x",)]) as staging:
        busy = staging.tree.path
        make(2).memmap(prefix)
        assert os.path.isdir(busy)
    assert not os.path.exists(busy)
    assert len(os.listdir(tmp_path)) == 5
    with pytest.raises(ValueError, match="names like this one are those of unfinished saves"):
        make(2).memmap(tmp_path / ".save.td-old-00000000")


@pytest.mark.slow
def test_commit_without_exchange_restores_old_save(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fs, "_renameat2", lambda: None)
    make(1, more=True).memmap(prefix)
    put_foreign(prefix)
    for n in range(1000):
        if not killed(n, lambda: make(2).memmap(prefix)):
            break
        assert content(prefix) in (None, 1, 2)
        if content(prefix) is None:
            # The next save finds what was moved aside, and would restore it before it did anything else.
            with Staging(str(prefix), [("x",)]):
                assert content(prefix) in (1, 2)
        if content(prefix) == 2:
            make(1, more=True).memmap(prefix)
    assert content(prefix) == 2
    assert keeps_foreign(prefix)


def test_commit_recovers_file_added_during_replacement(prefix: Path, tmp_path: Path) -> None:
    make(1, more=True).memmap(prefix)
    late: list[str] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "rmdir" and args[0].startswith(".save.td-") and not late:
            late.append(args[0])
            (tmp_path / args[0] / "mine.txt").write_text("mine")

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, see)
        make(2).memmap(prefix)
    assert late and content(prefix) == 2
    make(3, more=True).memmap(prefix)
    assert (prefix / "mine.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["save"] and content(prefix) == 3


def test_commit_durable_syncs_before_publishing(prefix: Path, tmp_path: Path) -> None:
    make(1, more=True).memmap(prefix)
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
        watch(patch, see)
        make(2).memmap(prefix, durable=True)
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
                dirty.discard(path)  # a link to a file that is synced under its other name
    assert dirty <= {str(tmp_path)}, "written, and not synced before it was published"
    assert ("sync", str(tmp_path)) in after
    assert renamed.startswith(str(tmp_path / ".save.td-new-"))


class Disk:
    """What of a directory a power failure leaves: a model that follows the calls of a save.

    A file has the content that it had when it was last synced, a directory the names. Directories are dicts, files
    lists of their pieces.
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
        # With the item itself, so that its id is not given to another one.
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

    def after_a_failure(self, *, renamed: bool) -> dict[str, Any]:
        """Return what is left, with the names beside the save as they were synced, or as they are."""

        def left(item: Any) -> Any:
            _, kept = self.synced.get(id(item), (None, {} if isinstance(item, dict) else []))
            return {name: left(below) for name, below in kept.items()} if isinstance(kept, dict) else kept

        top = self.now if renamed else self.synced[id(self.now)][1]
        return {name: left(item) for name, item in top.items()}


def write_out(item: Any, path: Path) -> None:
    if isinstance(item, dict):
        path.mkdir()
        for name, below in item.items():
            write_out(below, path / name)
    else:
        path.write_bytes(b"".join(item))


@pytest.mark.parametrize("old", ["a save", "nothing", "a mount point"])
def test_commit_durable_survives_power_failure_at_any_call(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    prefix = tmp_path / "disk" / "save"
    if old == "a save":
        make(1, more=True).memmap(prefix)
    elif old == "a mount point":
        monkeypatch.setattr(_fs, "is_mount", lambda path: True)
        prefix.mkdir()
    before = content(prefix)
    disk = Disk(tmp_path / "disk")
    states: list[dict[str, Any]] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        for renamed in (False, True):
            states.append(disk.after_a_failure(renamed=renamed))
        disk.see(name, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, see)
        make(2).memmap(prefix, durable=True)
    found = []
    for i, state in enumerate(states):
        if i < 2 or state not in states[i - 2 : i]:
            write_out(state, tmp_path / str(i))
            found.append(content(tmp_path / str(i) / "save"))
    assert set(found) == {before, 2}
    assert found[-1] == 2
    # The model is worth nothing if it follows something else than what happens.
    write_out({name: disk.now[name] for name in disk.now}, tmp_path / "all")
    assert content(tmp_path / "all" / "save") == 2
    last = disk.after_a_failure(renamed=False)
    write_out(last, tmp_path / "last")
    assert content(tmp_path / "last" / "save") == 2
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        states.clear()
        disk = Disk(tmp_path / "disk")
        watch(patch, see)
        make(3, more=True).memmap(prefix)
    write_out(disk.after_a_failure(renamed=True), tmp_path / "not durable")
    with pytest.raises((FormatError, FileNotFoundError, AssertionError)):
        assert content(tmp_path / "not durable" / "save") in (2, 3)


@pytest.mark.slow
def test_load_during_replacements_returns_one_version(prefix: Path) -> None:
    make(1, more=True).memmap(prefix)

    def write() -> None:
        for i in range(2, 102):
            make(i, more=i % 2 == 1).memmap(prefix)

    pid = start(write)
    seen = set()
    while running(pid):
        found = content(prefix)
        assert found is not None
        seen.add(found)
    assert len(seen) > 3
    assert content(prefix) == 101


def one_value(td: Any) -> bool:
    leaves = [leaf for _, leaf in td.items(include_nested=True, leaves_only=True)]
    return len({float(value) for leaf in leaves for value in leaf.flatten()}) == 1


READERS: dict[str, Callable[[Path], bool]] = {
    "load": lambda prefix: one_value(TensorDict.load_memmap(prefix)),
    "verified": lambda prefix: one_value(TensorDict.load_memmap(prefix, verify=True)),
    "subpath": lambda prefix: one_value(TensorDict.load_memmap(prefix, subpath="n")),
    "deep": lambda prefix: one_value(TensorDict.load_memmap(prefix, subpath="n/deep")),
    "inspect": lambda prefix: inspect(prefix).nbytes in (244, 260),
    "verify": lambda prefix: verify(prefix).problems == [],
    "pack": lambda prefix: one_value(TensorDict.load_memmap(pack_memmap(prefix, prefix.with_name("packed")))),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_read_replaced_at_any_open_returns_one_version(
    reader: Callable[[Path], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, real = tmp_path / "save", _fs.DirectoryTree.open
    calls = position = 0

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == position:
            make(2, more=True).memmap(prefix, checksums=True)
        return real(self, *args, **kwargs)

    while calls >= position:
        with monkeypatch.context() as patch:
            make(1).memmap(prefix, checksums=True)
            calls, position = 0, position + 1
            patch.setattr(_fs.DirectoryTree, "open", replaced)
            assert reader(prefix), position


@pytest.mark.parametrize("delays", [False, True], ids=["fast", "delayed"])
@pytest.mark.parametrize("values", [(2, 3), (2, 3, 4)], ids=["two", "three"])
def test_memmap_concurrent_writers_leave_one_complete_save(
    values: tuple[int, ...], delays: bool, prefix: Path, tmp_path: Path
) -> None:
    make(1, more=True).memmap(prefix)
    put_foreign(prefix)

    def write(value: int) -> None:
        chance = random.Random(value)

        def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
            # So that each writer stands still at every place of the protocol while the others go on.
            if delays and chance.random() < 0.05:
                time.sleep(chance.random() * 0.005)

        with pytest.MonkeyPatch.context() as patch:
            watch(patch, see)
            for _ in range(20 if delays else 40):
                make(value, more=value % 2 == 1).memmap(prefix)

    children = [start(functools.partial(write, value)) for value in values]
    while children:
        assert content(prefix) in (1, *values)
        children = [pid for pid in children if running(pid)]
    # Nobody but the last of them cleans up, so there is nothing left to do for the next save.
    assert os.listdir(tmp_path) == ["save"]
    assert keeps_foreign(prefix)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("exchange", [False, True], ids=["plain", "renameat2"])
def test_memmap_two_first_saves_leave_one_complete_save(
    exchange: bool, behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(_fs, "_rename_with", lambda *args: False)
    for n in range(1000):
        prefix = tmp_path / str(n) / "save"
        prefix.parent.mkdir()
        calls = 0

        def see(name: str, args: tuple[Any, ...], kwargs: Any, n: int = n, prefix: Path = prefix) -> None:
            nonlocal calls
            calls += 1
            if calls == n + 1:
                make(2).memmap(prefix)

        with pytest.MonkeyPatch.context() as patch:
            watch(patch, see, behind=behind)
            make(1, more=True).memmap(prefix)
        if calls <= n:
            break
        assert content(prefix) in (1, 2), n
        assert os.listdir(prefix.parent) == ["save"], n
    assert n > 15


def test_memmap_threads_at_one_prefix_take_turns(prefix: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda value: make(value, more=value % 2 == 1).memmap(prefix), range(40)))
    assert content(prefix) in range(40)
    assert os.listdir(tmp_path) == ["save"]


def test_commit_stale_lock_file_does_not_block(tmp_path: Path) -> None:
    (tmp_path / ".save.td-lock").touch()
    make(1, more=True).memmap(tmp_path / "save")
    assert os.listdir(tmp_path) == ["save"]


def test_commit_fork_during_save_does_not_block(prefix: Path) -> None:
    make(1, more=True).memmap(prefix)
    ready, go = os.pipe()
    forked: list[int] = []
    waiting: list[Any] = []

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "renameat2" and not forked:
            # It has the lock file open, and lives on until the pipe is closed.
            forked.append(start(lambda: (os.close(go), os.read(ready, 1))))
            waiting.append(pool.submit(lambda: make(3, more=True).memmap(prefix)))
            time.sleep(0.2)  # until it waits for the lock

    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.MonkeyPatch.context() as patch:
                watch(patch, see)
                make(2).memmap(prefix)
            waiting[0].result(timeout=60)
        finally:
            os.close(go)
    assert os.waitpid(forked[0], 0)[1] == 0
    os.close(ready)
    assert content(prefix) == 3


def test_commit_without_file_locks_saves(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(_fs.fcntl, "flock", flock)
    for value in (1, 2, 3):
        make(value, more=value % 2 == 1).memmap(prefix)
        put_foreign(prefix)
        assert content(prefix) == value
        assert os.listdir(tmp_path) == ["save"]
    assert keeps_foreign(prefix)
    # Nobody can tell whether these are in use.
    (tmp_path / ".save.td-new-00000000").mkdir()
    (tmp_path / ".t.td-file-00000000").touch()
    rows = TensorDict({"a": torch.ones(1)}, batch_size=[1])
    rows.memmap(prefix)
    append_memmap(prefix, rows)
    MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "t")
    assert sorted(os.listdir(tmp_path)) == [".save.td-new-00000000", ".t.td-file-00000000", "save", "t"]
