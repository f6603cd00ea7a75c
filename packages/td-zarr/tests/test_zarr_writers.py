"""Several threads, processes and openers of one group: nothing is lost, and nothing is read as something else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from td_core import TensorDict
from td_core.errors import FormatError
from td_zarr import append, from_zarr, load, save, to_zarr
from td_zarr import open as open_group

pytestmark = pytest.mark.usefixtures("engine")

#: The options of a save whose array of 16 rows has several rows in a chunk, or in a shard.
CHUNKS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"chunks": 8},
    "shards": {"chunks": 2, "shards": 8},
    "checksums": {"chunks": 8, "checksums": True},
}


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_threads(work: Callable[[int], None], count: int = 4) -> None:
    errors: list[BaseException] = []

    def run(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def write_row(leaf: Any, row: int) -> None:
    leaf[row] = row + 1


def write_positions(leaf: Any, row: int) -> None:
    leaf[torch.tensor([row]), torch.tensor([0])] = row + 1.0
    leaf[torch.tensor([row]), torch.tensor([1])] = row + 1.0


def write_column(leaf: Any, row: int) -> None:
    leaf.t()[:, row] = row + 1


@pytest.mark.parametrize("write", [write_row, write_positions, write_column])
@pytest.mark.parametrize("name", CHUNKS)
def test_write_rows_of_one_chunk_in_threads_keeps_all(
    name: str, write: Callable[[Any, int], None], path: Path, switching: None
) -> None:
    save(TensorDict({"a": torch.zeros(16, 2)}, [16]), path, **CHUNKS[name])
    opened = [open_group(path, mode="r+") for _ in range(2)]

    def work(worker: int) -> None:
        for row in range(worker, 16, 4):
            write(opened[worker % 2]["a"], row)

    run_threads(work)
    wanted = torch.arange(1.0, 17.0).unsqueeze(1).expand(16, 2)
    assert torch.equal(load(path)["a"], wanted)


def test_set_keys_in_threads_of_two_collections_keeps_all(path: Path, switching: None) -> None:
    first = to_zarr(TensorDict({"a": torch.zeros(3)}, [3]), path)
    second = from_zarr(path, mode="r+")

    def work(worker: int) -> None:
        for i in range(4):
            (first, second)[worker % 2][f"k{worker}{i}"] = torch.full((3,), float(i))

    run_threads(work)
    assert set(load(path).keys()) == {"a", *(f"k{worker}{i}" for worker in range(4) for i in range(4))}


def test_append_in_threads_keeps_all_rows(path: Path, switching: None) -> None:
    save(TensorDict({"a": torch.zeros(1)}, [1]), path, chunks=4)
    run_threads(lambda worker: append(TensorDict({"a": torch.ones(4)}, [4]), path))
    assert load(path)["a"].sum() == 16


@pytest.mark.parametrize("name", CHUNKS)
def test_write_after_append_keeps_appended_rows(name: str, path: Path) -> None:
    if name == "checksums":
        pytest.skip("as chunks")
    save(TensorDict({"a": torch.ones(5)}, [5]), path, **CHUNKS[name])
    opened = {mode: from_zarr(path, mode=mode) for mode in ("r", "r+")}
    append(TensorDict({"a": torch.full((4,), 2.0)}, [4]), path)
    opened["r+"]["a"][4] = 9.0
    from_zarr(path, mode="r+")["a"][0] = 7.0
    opened["r+"]["a"][1] = 8.0
    assert load(path)["a"].tolist() == [7, 8, 1, 1, 9, 2, 2, 2, 2]
    for collection in opened.values():
        assert collection["a"].tolist() == [7, 8, 1, 1, 9]


REPLACEMENTS: dict[str, Any] = {
    "dtype": torch.arange(4) + 0.5,
    "width": torch.arange(4, dtype=torch.int16),
    "shape": torch.arange(8).view(4, 2),
    "values": torch.arange(4) + 5,
    "complex": torch.arange(4) * 1j,
    "bfloat16": torch.arange(4).bfloat16(),
    "node": TensorDict({"b": torch.arange(4)}, [4]),
}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_read_entry_that_was_replaced_raises_or_is_new(
    name: str, options: Any, mode: str, path: Path
) -> None:
    to_zarr(TensorDict({"t": torch.arange(4), "x": torch.zeros(4)}, [4]), path, **options)
    reader = from_zarr(path, mode=mode)
    from_zarr(path, mode="r+")["t"] = REPLACEMENTS[name]
    if name == "values":
        assert reader["t"].tolist() == [5, 6, 7, 8]
    else:
        with pytest.raises(FormatError, match="data.zarr: .*'t'"):
            reader["t"].clone()
    assert reader["x"].tolist() == [0] * 4


def test_read_array_that_other_program_replaced_raises(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("a", data=np.arange(4))
    opened = open_group(path, mode="r+")
    group.create_array("a", data=np.arange(4) + 0.5, overwrite=True)
    with pytest.raises(FormatError, match="the array 'a' was replaced since it was opened"):
        opened["a"].clone()


@pytest.mark.parametrize("place", ["x.zarr", "x.zarr.zip", "memory"])
@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
def test_use_collection_of_replaced_group_raises(place: str, options: Any, tmp_path: Path) -> None:
    location: Any = zarr.storage.MemoryStore() if place == "memory" else tmp_path / place
    data = TensorDict({"a": torch.zeros(4)}, [4])
    save(data, location, **options)
    opened = [from_zarr(location), *([] if place.endswith("zip") else [from_zarr(location, mode="r+")])]
    for collection in opened:
        assert collection["a"][0] == 0
    save(data + 7, location, **options)
    for collection in opened:
        with pytest.raises(FormatError, match="was replaced since it was opened"):
            collection["a"].clone()
        if len(opened) == 2 and collection is opened[1]:
            with pytest.raises(FormatError, match="was replaced since it was opened"):
                collection["a"][1] = 5.0
            with pytest.raises(FormatError, match="was replaced since it was opened"):
                collection["b"] = torch.zeros(4)
    assert load(location)["a"].tolist() == [7] * 4
