"""Blocks on disk: what is read from them, how they stay bounded, and what happens if one is damaged."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from td_core.typing import Range
from td_remote import Remote, _block_cache, cache_info
from td_remote._block_cache import BlockCache, read_size

BLOCK = 1 << 10


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 1 kB, and any disk."""
    monkeypatch.setattr(_block_cache, "BLOCK", BLOCK)
    monkeypatch.setattr(_block_cache, "_FREE", 0)


CONTENT = random.Random(0).randbytes(20 * BLOCK + 100)


def make(folder: Path, content: bytes = CONTENT, size: int | str = "1MB", **settings: Any) -> Remote:
    """Return a location in memory with one object, and a cache."""
    remote = Remote(f"memory://{uuid.uuid4().hex}", cache=folder, cache_size=size, **settings)
    put(remote, content)
    return remote


def put(remote: Remote, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"{remote.url.removeprefix('memory:/')}/a", content)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the list of the ranges that are read from the memory of fsspec."""
    found: list[tuple[int, int]] = []
    system = type(fsspec.filesystem("memory"))
    original = system.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> Any:
        found.append((start, end))
        return original(self, path, start, end)

    monkeypatch.setattr(system, "cat_file", cat_file)
    return found


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 1),
        (5, 900),
        (1000, 1100),
        (1024, 2048),
        (10, 5000),
        (20 * BLOCK, 20 * BLOCK + 100),
        (-7, None),
        (300, None),
        (0, None),
    ],
)
def test_range_is_read_once(start: int, stop: int | None, tmp_path: Path, requests: list[Any]) -> None:
    remote = make(tmp_path / "blocks")
    for _ in range(2):
        assert bytes(remote.read([Range("a", start, stop)])[0]) == CONTENT[start:stop]
    assert len(requests) == len(set(requests))
    assert all(first % BLOCK == 0 for first, _ in requests)
    count = len(requests)
    again = Remote(remote.url, cache=tmp_path / "blocks")
    assert bytes(again.read([Range("a", start, stop)])[0]) == CONTENT[start:stop]
    assert len(requests) == count


def test_replaced_object_uses_no_old_block(tmp_path: Path) -> None:
    remote = make(tmp_path / "blocks")
    remote.checked_for = 0.0
    assert bytes(remote.read([Range("a", 0, 10)])[0]) == CONTENT[:10]
    put(remote, CONTENT[::-1])
    assert bytes(remote.read([Range("a", 0, 10)])[0]) == CONTENT[::-1][:10]


@pytest.mark.parametrize("damage", ["flip", "flip tail", "cut", "grow", "empty", "delete"])
def test_damaged_block_is_read_again(damage: str, tmp_path: Path, requests: list[Any]) -> None:
    folder = tmp_path / "blocks"
    remote = make(folder)
    remote.read([Range("a", 0, 3 * BLOCK)])
    changes: dict[str, Callable[[bytes], bytes]] = {
        "flip": lambda old: old[:100] + bytes([old[100] ^ 1]) + old[101:],
        "flip tail": lambda old: old[:-40] + bytes([old[-40] ^ 1]) + old[-39:],
        "cut": lambda old: old[:-1],
        "grow": lambda old: old + b"x",
        "empty": lambda old: b"",
    }
    for path in [path for path in folder.iterdir() if "-" in path.name and path.name != "td-remote-cache"]:
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes(changes[damage](path.read_bytes()))
    requests.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert bytes(remote.read([Range("a", 0, 3 * BLOCK)])[0]) == CONTENT[: 3 * BLOCK]
    assert len(requests) == 3
    assert [
        str(item.message) for item in seen if "is damaged and is read again" not in str(item.message)
    ] == []
    assert bool(seen) == (damage != "delete")
    requests.clear()
    assert bytes(remote.read([Range("a", 0, 3 * BLOCK)])[0]) == CONTENT[: 3 * BLOCK]
    assert requests == []


def test_size_of_directory_stays_below_limit(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    remote = make(folder, size=8 * BLOCK)
    for start in range(0, len(CONTENT) - 700, 700):
        assert bytes(remote.read([Range("a", start, start + 700)])[0]) == CONTENT[start : start + 700]
        assert cache_info(folder).size <= 8 * BLOCK
    assert cache_info(folder).blocks >= 3


def test_blocks_that_were_not_used_for_longest_are_removed(tmp_path: Path, requests: list[Any]) -> None:
    folder = tmp_path / "blocks"
    remote = make(folder, size=8 * (BLOCK + 48))
    remote.read([Range("a", 0, 6 * BLOCK)])
    old = time.time() - 1000
    for path in folder.iterdir():
        os.utime(path, (old, old))
    remote.read([Range("a", 0, 10), Range("a", 5 * BLOCK, 5 * BLOCK + 10)])  # which are used now
    remote.read([Range("a", 10 * BLOCK, 14 * BLOCK)])
    requests.clear()
    remote.read([Range("a", 0, 10), Range("a", 5 * BLOCK, 5 * BLOCK + 10)])
    assert requests == []


def test_read_that_needs_more_than_the_cache_goes_past_it(tmp_path: Path) -> None:
    remote = make(tmp_path / "blocks", size=3 * BLOCK)
    assert bytes(remote.read([Range("a", 0)])[0]) == CONTENT
    assert not (tmp_path / "blocks").exists()


def test_whole_object_is_kept_only_if_the_cache_is_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TD_REMOTE_CACHE", str(tmp_path / "blocks"))
    monkeypatch.setenv("TD_REMOTE_CACHE_SIZE", "1MB")
    remote = make(None)  # type: ignore[arg-type]
    remote.read([Range("a", 10, 20)])
    assert cache_info().blocks == 1
    remote.read([Range("a", 0)])
    assert cache_info().blocks == 1
    make(tmp_path / "blocks").read([Range("a", 0)])
    assert cache_info().blocks == 22


@pytest.mark.parametrize("names", [["weights.bin"], ["td-remote-cache", "weights.bin"], ["0" * 32 + "-0"]])
def test_directory_with_other_files_is_refused(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"the only copy")
    remote = make(tmp_path)
    with pytest.raises(
        ValueError, match="is not a cache of td-remote: it has .*; pass a new or empty directory"
    ):
        remote.read([Range("a", 0, 10)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    remote = make(tmp_path / "blocks")
    monkeypatch.setattr(os, "writev", fail)
    with pytest.warns(UserWarning, match="the cache cannot be written: .*No space left"):
        assert bytes(remote.read([Range("a", 0, 10)])[0]) == CONTENT[:10]
    assert cache_info(tmp_path / "blocks").blocks == 0


def test_stale_file_of_killed_writer_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    remote = make(folder)
    remote.read([Range("a", 0, 10)])
    left = folder / f"{'0' * 32}-0.{'1' * 32}.tmp"
    left.write_bytes(bytes(100))
    BlockCache(folder, 1 << 20).clear()
    assert not left.exists()
    left.write_bytes(bytes(100))
    os.utime(left, (0, 0))
    Remote(remote.url, cache=folder).read([Range("a", 0, 10)])
    assert not left.exists()


def read_for_a_while(url: str, folder: Path, size: int, seed: int, seconds: float) -> None:
    """Read random ranges in a process, and exit with an error if one of them is wrong."""
    _block_cache.BLOCK, _block_cache._FREE = BLOCK, 0
    remote, draw = Remote(url, cache=folder, cache_size=size, engine="fsspec"), random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = draw.randrange(len(CONTENT) - 600)
        assert bytes(remote.read([Range("a", start, start + 600)])[0]) == CONTENT[start : start + 600]


def start_readers(count: int, seconds: float, *arguments: Any) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    started = [
        context.Process(target=read_for_a_while, args=(*arguments, seed, seconds)) for seed in range(count)
    ]
    for process in started:
        process.start()
    return started


@pytest.mark.once
def test_eight_processes_share_a_cache_smaller_than_the_data(server: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    server.put("/x/a", CONTENT)
    limit = 10 * (BLOCK + 48)
    readers = start_readers(8, 2.0, f"{server.url}/x", tmp_path / "blocks", limit)
    largest = 0
    while any(process.is_alive() for process in readers):
        if (tmp_path / "blocks" / "td-remote-cache").exists():
            largest = max(largest, cache_info(tmp_path / "blocks").size)
        time.sleep(0.01)
    assert [process.exitcode for process in readers] == [0] * 8
    assert 0 < largest <= limit + 8 * 2 * (BLOCK + 48)  # the blocks under way


@pytest.mark.once
def test_killed_writers_leave_a_good_cache(server: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    server.put("/x/a", CONTENT)
    for _ in range(2):
        readers = start_readers(3, 600.0, f"{server.url}/x", tmp_path / "blocks", 1 << 20)
        while not (tmp_path / "blocks").exists() or len([*(tmp_path / "blocks").iterdir()]) < 3:
            time.sleep(0.01)
        for process in readers:
            process.kill()
            process.join()
    remote = Remote(f"{server.url}/x", cache=tmp_path / "blocks", engine="fsspec")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no block is damaged
        assert bytes(remote.read([Range("a", 0)])[0]) == CONTENT


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("10GB", 10**10), ("1.5 kB", 1500), ("2T", 2 * 10**12), ("3mb", 3 * 10**6)],
)
def test_size_is_read(text: int | str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", None, True])
def test_wrong_size_raises(text: Any) -> None:
    with pytest.raises(ValueError, match="a size is a number of bytes or a text such as '10GB'"):
        read_size(text)


def test_info_of_other_directory_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TD_REMOTE_CACHE", raising=False)
    with pytest.raises(ValueError, match="is not a cache of td-remote"):
        cache_info(tmp_path)
    with pytest.raises(ValueError, match="there is no cache directory: pass one, or set TD_REMOTE_CACHE"):
        cache_info()
