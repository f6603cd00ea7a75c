"""A save that is killed or fails leaves the complete old save or the complete new one, and no files that stay."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import CodecError, TensorDict, load
from td_safetensors import save
from td_store.files import NewFile


def make_collection(value: int) -> TensorDict:
    return TensorDict(
        {
            "a": torch.full((300_000,), value),
            "n": {"b": torch.full((5,), float(value)), "c": torch.full((2, value + 1), value).t()},
        }
    )


def read_value(path: Path) -> int | None:
    """Return the number of the :func:`make_collection` at a path, None if there is none; fail for a mixture."""
    try:
        found = load(path, format="safetensors")
    except FileNotFoundError:
        return None
    found = TensorDict(found)  # of a checkpoint, too
    values = {int(value) for leaf in found.values(True, True) for value in leaf.flatten()[:10]}
    assert len(values) == 1, f"a mixture: {values}"
    (value,) = values
    assert found["n", "c"].shape == (value + 1, 2)
    return value


def save_file(value: int, path: Path) -> None:
    save(make_collection(value), path, durable=True, checksums=True)


def save_in_threads(value: int, path: Path) -> None:
    save(make_collection(value), path, num_threads=3)


def save_checkpoint(value: int, path: Path) -> None:
    td_core.save(dict(make_collection(value).items()), path, format="safetensors", durable=True)


def save_shards(value: int, path: Path) -> None:
    save(make_collection(value), path, max_shard_size="100kB", durable=True)


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
@pytest.mark.parametrize("work", [save_file, save_checkpoint, save_shards])
def test_save_ended_at_any_call_leaves_complete_save(
    work: Any, over: bool, tmp_path: Path, copy_at_calls: Any
) -> None:
    folder, wanted = tmp_path / "now", None
    folder.mkdir()
    if over:
        work(1, folder / "save")
        wanted = 1
    copies = copy_at_calls(lambda: work(2, folder / "save"), folder, tmp_path / "copies")
    found = [read_value(copy / "save") for copy in copies]
    assert len(copies) >= 8
    assert found == sorted(found, key=(wanted, 2).index)  # the old save, then the new one
    assert set(found) == {wanted, 2}
    for copy in copies[::3]:
        # The next save removes what the ended one left behind.
        path = copy / "save"
        work(3, path)
        assert read_value(path) == 3
        assert [name for name in list_all(copy) if ".tmp-" in name] == []
        assert len(list_all(copy)) == (1 if path.is_file() else 3)


@pytest.mark.once
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
@pytest.mark.parametrize("work", [save_in_threads, save_checkpoint])
def test_save_killed_at_any_call_leaves_complete_save(
    work: Any, over: bool, tmp_path: Path, kill_at_call: Any
) -> None:
    path, wanted = tmp_path / "save", None
    seen = set()
    for n in range(1000):
        if over:
            work(1, path)
            wanted = 1
        else:
            remove(path)
        unfinished = kill_at_call(n, lambda: work(2, path))
        found = read_value(path)
        seen.add(found)
        assert found in (wanted, 2), f"killed at call {n}"
        if not unfinished:
            break
        if n % 3 == 0:
            # The next save removes what the killed one left behind.
            work(3, path)
            assert read_value(path) == 3
            assert [name for name in list_all(tmp_path) if ".tmp-" in name] == [], f"killed at call {n}"
            assert len(list_all(tmp_path)) == (1 if path.is_file() else 3), f"killed at call {n}"
    assert n >= 8
    assert seen == {wanted, 2}


def list_all(folder: Path) -> list[str]:
    return [str(item) for item in folder.rglob("*") if item.is_file()]


def remove(path: Path) -> None:
    for item in [*path.glob("*"), *path.glob(".*")] if path.is_dir() else [path]:
        item.unlink(missing_ok=True)


@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "replace"])
@pytest.mark.parametrize("work", [save_file, save_checkpoint, save_shards])
def test_save_failing_call_keeps_old_save(
    call: str, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch_calls: Any
) -> None:
    path = tmp_path / "save"
    work(1, path)
    before = sorted(list_all(tmp_path))
    for n in range(100):
        count = 0

        def see(name: str, n: int = n) -> None:
            nonlocal count
            count += name == call
            if name == call and count == n + 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            watch_calls(see, patch)
            try:
                work(2, path)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        if read_value(path) == 1:
            assert sorted(list_all(tmp_path)) == before, f"{call} {n}"
        else:  # the new save is complete, and only its name is not yet on the disk
            assert (call, read_value(path)) in (("fsync", 2), ("open", 2))
            work(1, path)
            before = sorted(list_all(tmp_path))
    assert n > 0
    assert read_value(path) == 2


def test_save_removes_stale_temporaries_of_its_name_only(path: Path, td: TensorDict) -> None:
    names = [
        ".data.safetensors.tmp-00000000",
        ".data.safetensors.tmp-x",
        ".other.safetensors.tmp-0123abcd",
        "data.tmp",
    ]
    for name in names:
        (path.parent / name).write_bytes(b"x")
    save(td, path)
    assert sorted(os.listdir(path.parent)) == sorted([path.name, *names[1:]])


def test_save_keeps_temporary_of_running_save(path: Path, td: TensorDict) -> None:
    running = NewFile(path)
    save(td, path)
    assert os.path.exists(running.temporary)
    running.discard()
    assert os.listdir(path.parent) == [path.name]


def test_save_interrupted_by_progress_removes_temporary(path: Path, td: TensorDict) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(td, path, progress=stop)
    assert os.listdir(path.parent) == []


def test_save_refused_value_keeps_old_file(path: Path, td: TensorDict, same: Any) -> None:
    save(td, path)
    with pytest.raises(CodecError, match="'n', 'x'"):
        save(TensorDict({"n": {"x": torch.ones(2).to_sparse()}}), path)
    same(load(path), td)


def test_save_over_mapped_file_keeps_loaded_leaves(path: Path, td: TensorDict, same: Any) -> None:
    save(td, path)
    loaded = load(path, strategy="mmap")
    save(loaded + 1, path)
    same(loaded, td)
    same(load(path), td + 1)
    save(load(path), path)
    same(load(path), td + 1)


def test_save_return_early_gives_future(path: Path, td: TensorDict, same: Any) -> None:
    future = save(td, path, return_early=True)
    assert future.result(timeout=60) is td
    same(load(path), td)


def test_save_return_early_reports_error_in_result(tmp_path: Path, td: TensorDict) -> None:
    (tmp_path / "file").write_text("")
    future = save(td, tmp_path / "file" / "x", return_early=True)
    with pytest.raises(NotADirectoryError, match="file/x"):
        future.result(timeout=60)


def test_save_from_threads_leaves_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "save"
    threads = [
        threading.Thread(target=work, args=(i, path / name))
        for i in range(4)
        for work, name in ((save_shards, "s"), (save_file, "x.safetensors"))
    ]
    path.mkdir()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_value(path / "s") in range(4)
    assert read_value(path / "x.safetensors") in range(4)
    assert [name for name in list_all(path) if ".tmp-" in name] == []


@pytest.mark.parametrize(
    ("options", "make", "error", "message"),
    [
        ({}, Path.mkdir, IsADirectoryError, "is a directory: pass the path of a file, or max_shard_size"),
        ({"max_shard_size": 10}, Path.touch, NotADirectoryError, "writes a directory of files"),
        ({"max_shard_size": "5 apples"}, None, ValueError, "'5GB'; got '5 apples'"),
        ({"max_shard_size": 0}, None, ValueError, "must be positive; got 0"),
    ],
    ids=["directory", "file", "unit", "zero"],
)
def test_save_wrong_place_raises(
    options: Any, make: Any, error: Any, message: str, path: Path, td: TensorDict
) -> None:
    if make is not None:
        make(path)
    with pytest.raises(error, match=message):
        save(td, path, **options)
