"""Saves that are killed at any moment, and opened groups in forked and spawned processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import td_core
from td_core import TensorDict
from td_core.errors import FormatError
from td_core.testing import kill_after
from td_zarr import append, load, save, verify
from td_zarr import open as open_group

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork()")


def make_data(value: int, rows: int = 40) -> TensorDict:
    leaves = {"a": torch.full((rows, 50), value), "n": {"b": torch.full((rows,), float(value))}}
    return TensorDict(leaves, [rows])


def measure(work: Callable[[], Any]) -> float:
    """Return the time of the second call, which imports nothing."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "chunks": {"chunks": 4, "checksums": True}}


@pytest.mark.once
@pytest.mark.parametrize("suffix", [".zarr", ".zarr.zip"])
@pytest.mark.parametrize("name", OPTIONS)
def test_save_killed_at_any_moment_leaves_old_or_new(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    seconds = measure(lambda: save(make_data(2), path, **OPTIONS[name]))
    save(make_data(1), path, **OPTIONS[name])
    for i in range(25):
        kill_after(lambda: save(make_data(2), path, **OPTIONS[name]), seconds * 1.5 * i / 25)
        found = load(path)["a"]
        assert found.min() == found.max()
        assert found.max() in (1, 2)
        if found.max() == 2:
            save(make_data(1), path, **OPTIONS[name])
    save(make_data(1), path, **OPTIONS[name])
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.once
@pytest.mark.parametrize("name", OPTIONS)
def test_append_killed_at_any_moment_leaves_old_or_new(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    save(make_data(1), path, **OPTIONS[name])
    seconds = measure(lambda: append(make_data(2, 10), path))
    rows = 60
    for i in range(25):
        kill_after(lambda: append(make_data(2, 10), path), seconds * 1.5 * i / 25)
        found = load(path)
        assert found.batch_size[0] in (rows, rows + 10)
        rows = found.batch_size[0]
        assert found["a"][:40].unique().tolist() == [1]
        assert found["a"][40:].unique().tolist() == [2]
        assert found["n", "b"].shape == (rows,)
    append(make_data(2, 10), path)
    assert verify(path).ok


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The rows of an opened group."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data[indices]


def return_batch(batch: Any) -> Any:
    return batch


@pytest.mark.once
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_data_loader_read_opened_group(method: str, tmp_path: Path) -> None:
    wanted = TensorDict({"a": torch.arange(80.0).view(40, 2), "n": {"b": torch.arange(40)}}, [40])
    save(wanted, tmp_path / "x.zarr", chunks={"a": 4})  # one leaf in chunks, the other one mapped
    opened = open_group(tmp_path / "x.zarr")
    assert opened[[3]]["a"].tolist() == [[6, 7]]  # this process has opened the store
    loader = torch.utils.data.DataLoader(
        Rows(opened),
        batch_size=8,
        num_workers=1 + (method == "fork"),
        collate_fn=return_batch,
        multiprocessing_context=method,
    )
    found = torch.cat(list(loader))
    assert (found == wanted).all()


@pytest.mark.parametrize("location", ["zip", "memory"])
def test_forked_process_opens_store_itself(location: str, tmp_path: Path) -> None:
    place = tmp_path / "x.zip" if location == "zip" else zarr.storage.MemoryStore()
    save(make_data(3), place, chunks=4)
    opened = open_group(place)
    assert opened["a"][1, 1] == 3

    def read() -> None:
        assert (opened[[5, 1]]["a"] == 3).all()

    context = multiprocessing.get_context("fork")
    process = context.Process(target=read)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_pickle_of_opened_group_has_no_elements(tmp_path: Path) -> None:
    for options in OPTIONS.values():
        save(make_data(3, 10_000), tmp_path / "x.zarr", **{**options, "chunks": 5000} if options else {})
        for mode in ("r", "r+"):
            content = pickle.dumps(open_group(tmp_path / "x.zarr", mode=mode))
            assert len(content) < 10_000
            assert b"td_zarr.zarr_pickles" in content
            assert b"td_zarr._" not in content
            assert (pickle.loads(content) == make_data(3, 10_000)).all()


def test_pickle_of_replaced_group_raises(tmp_path: Path) -> None:
    save(make_data(3), tmp_path / "x.zarr", chunks=4)
    content = pickle.dumps(open_group(tmp_path / "x.zarr"))
    save(make_data(4), tmp_path / "x.zarr", chunks=4)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        pickle.loads(content)["a"].clone()


def test_load_during_saves_of_chunks_returns_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    save(make_data(1), path, chunks=4)
    pid = os.fork()
    if pid == 0:
        try:
            for i in range(30):
                save(make_data(i % 2), path, chunks=4)
        finally:
            os._exit(0)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        found = td_core.load(path)["a"]
        assert found.min() == found.max()
