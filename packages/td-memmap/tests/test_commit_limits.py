"""A full disk, a file size limit or too few file descriptors never damage a save."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
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
    pack_memmap,
    unpack_memmap,
    verify,
)


def test_memmap_full_disk_raises_with_key_and_path(
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: Any,
    read_value: Any,
    watch_calls: Any,
) -> None:
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    make_tree(1, more=True).memmap(prefix)
    td = make_tree(2)
    td["n", "deep", "big"] = torch.zeros(100_000, dtype=torch.uint8)

    def full(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name == "write" and len(args[1]) == 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for num_threads in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, full)
            with pytest.raises(
                OSError, match=r"cannot write key \('n', 'deep', 'big'\), 100000 bytes: No space left"
            ) as found:
                td.memmap(prefix, num_threads=num_threads)
        assert found.value.errno == errno.ENOSPC
        assert found.value.filename == str(prefix / "n" / "deep" / "big.memmap")
        assert read_value(prefix) == 1
        assert os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize("limit", [50_000, 2_000, 100, 30, 10, 0])
def test_memmap_over_file_size_limit_keeps_old_save(
    limit: int, prefix: Path, tmp_path: Path, make_tree: Any, read_value: Any, run_in_child: Any
) -> None:
    make_tree(1, more=True).memmap(prefix)

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        td = make_tree(2)
        td["big"] = torch.zeros(100_000)
        named = "cannot write key 'big', 400000 bytes: " if limit >= 100 else ""
        with pytest.raises(OSError, match=f"{named}File too large"):
            td.memmap(prefix)
        td["big"] = torch.zeros(2)
        if limit < 2_000:
            with pytest.raises(OSError, match="File too large"):
                td.memmap(prefix)

    assert run_in_child(save) == 0
    assert read_value(prefix) == 1
    assert os.listdir(tmp_path) == ["save"]


def test_memmap_few_file_descriptors_saves_many_nodes(
    prefix: Path, tmp_path: Path, run_in_child: Any
) -> None:
    td = TensorDict({f"g{i}": {"x": torch.ones(2), "y": {"z": torch.ones(3)}} for i in range(50)})

    def check(loaded: Any) -> None:
        assert bool((loaded == td).all())

    def work() -> None:
        soft = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for num_threads in (0, 0, 2):  # The second and third save replace the first.
            td.memmap(prefix, num_threads=num_threads)
            check(TensorDict.load_memmap(prefix))
        assert verify(prefix).ok
        td.memmap_like(prefix)

    assert run_in_child(work) == 0
    assert os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize("durable", [False, True])
def test_memmap_few_file_descriptors_many_threads_saves(
    durable: bool, prefix: Path, run_in_child: Any
) -> None:
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

    assert run_in_child(work) == 0


#: Operations in the directory ``here``, which has the saves ``old`` (mapped as ``mapped``), ``old.tdz`` and ``rows``.
OPERATIONS: dict[str, Callable[[Any, Path, Any], Any]] = {
    "save": lambda make_tree, here, mapped: make_tree(2).memmap(here / "new"),
    "save over": lambda make_tree, here, mapped: make_tree(2).memmap(here / "old"),
    "save mapped collection": lambda make_tree, here, mapped: mapped.memmap(here / "old"),
    "like": lambda make_tree, here, mapped: make_tree(2).memmap_like(here / "new"),
    "load": lambda make_tree, here, mapped: TensorDict.load_memmap(here / "old"),
    "load subpath": lambda make_tree, here, mapped: TensorDict.load_memmap(here / "old", subpath="n/deep"),
    "append": lambda make_tree, here, mapped: append_memmap(here / "rows", make_rows()),
    "pack": lambda make_tree, here, mapped: pack_memmap(here / "old", here / "new.tdz"),
    "unpack": lambda make_tree, here, mapped: unpack_memmap(here / "old.tdz", here / "new"),
    "verify": lambda make_tree, here, mapped: verify(here / "old"),
    "add": lambda make_tree, here, mapped: mapped.make_memmap(("n", "deep", "new"), ()),
}


def make_rows() -> TensorDict:
    tied = torch.arange(3)
    return TensorDict(
        {"a": tied, "n": TensorDict({"tied": tied, "n": TensorDict({"b": tied}, [3])}, [3])}, [3]
    )


@pytest.mark.parametrize("work", OPERATIONS.values(), ids=OPERATIONS)
def test_commit_few_file_descriptors_succeeds_or_keeps_old_save(
    work: Callable[[Any, Path, Any], Any],
    tmp_path: Path,
    make_tree: Any,
    run_in_child: Any,
    put_user_files: Any,
    has_user_files: Any,
) -> None:
    def set_up(here: Path) -> Any:
        here.mkdir()
        mapped = make_tree(1, more=True).memmap(here / "old")
        put_user_files(here / "old")
        pack_memmap(here / "old", here / "old.tdz")
        make_rows().memmap(here / "rows")
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
            work(make_tree, here, mapped)
        except OSError as raised:
            error = raised
        for fd in taken[: len(taken) - free]:
            os.close(fd)
        assert error is None or (error.errno == errno.EMFILE and str(error.filename).startswith(str(here)))
        assert error is None or free < 14
        new = set(os.listdir(here)) - before
        assert new <= (set() if error is not None else {"new", "new.tdz"})
        assert has_user_files(here / "old") and verify(here / "old").ok and verify(here / "rows").ok

    work(make_tree, tmp_path / "warm", set_up(tmp_path / "warm"))
    for free in range(15):
        assert run_in_child(lambda here=tmp_path / str(free), free=free: limited(here, free)) == 0, free


@pytest.mark.parametrize("archive", [False, True])
def test_load_without_address_space_raises_with_path(
    archive: bool, prefix: Path, tmp_path: Path, run_in_child: Any
) -> None:
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

    assert run_in_child(work) == 0


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
    # Unmount lazily, even with live mappings: pytest could not delete a mounted directory.
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_memmap_full_disk_keeps_old_save(small_disk: Path, make_tree: Any, read_value: Any) -> None:
    prefix = small_disk / "save"
    make_tree(1, more=True).memmap(prefix)
    for call in ("memmap", "memmap_"):
        td = make_tree(2)
        td["big"] = torch.zeros(1_000_000)
        with pytest.raises(OSError, match="No space left on device"):
            getattr(td, call)(prefix)
        assert read_value(prefix) == 1
        assert os.listdir(small_disk) == ["save"]


def test_write_full_disk_raises_with_path(small_disk: Path) -> None:
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


def test_memmap_to_mount_point_second_save_raises(small_disk: Path, make_tree: Any, read_value: Any) -> None:
    (small_disk / "mine.txt").write_text("mine")
    make_tree(2).memmap(small_disk)
    assert read_value(small_disk) == 2
    assert (small_disk / "mine.txt").read_text() == "mine"
    assert not (small_disk / "%saving").exists()
    with pytest.raises(
        FileTakenError, match="cannot replace the save at .* in one step: it is a mount point"
    ):
        make_tree(1, more=True).memmap(small_disk)
    assert read_value(small_disk) == 2
