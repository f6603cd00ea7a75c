"""Groups in every kind of store: directories, zip files, stores and groups of zarr, URLs, a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import td_core
from td_core import TensorDict
from td_core.errors import FormatError, LockedError, UnsupportedOperationError
from td_zarr import append, inspect, load, save, verify
from td_zarr import open as open_group


@pytest.fixture(params=["directory", "local store", "store path", "group", "zip", "memory", "fsspec"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a location of each kind, where nothing is yet."""
    if request.param == "fsspec":
        request.getfixturevalue("urls")
        pytest.importorskip("fsspec").filesystem("memory").store.clear()
        return "memory://bucket/x.zarr"
    if request.param == "group":
        return zarr.open_group(tmp_path / "x.zarr", mode="w").create_group("inner")
    return {
        "directory": tmp_path / "x.zarr",
        "local store": zarr.storage.LocalStore(tmp_path / "x.zarr"),
        "store path": zarr.storage.StorePath(zarr.storage.MemoryStore(), "some/where"),
        "zip": tmp_path / "x.zarr.zip",
        "memory": zarr.storage.MemoryStore(),
    }[request.param]


@pytest.mark.parametrize(
    "options", [{}, {"chunks": 2, "checksums": True}, {"chunks": 1, "shards": 2}], ids=str
)
def test_round_trip_through_every_store(location: Any, options: Any, td: TensorDict) -> None:
    td_core.save(td.zero_(), location, format="zarr")
    td = TensorDict({"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4)}}, [4])
    td_core.save(td, location, format="zarr", **options)
    assert (td_core.load(location) == td).all()
    assert (td_core.load(location, keys="n", rows=[3, 1])["n", "b"] == torch.tensor([3, 1])).all()
    assert verify(location).ok
    assert [key for key, _ in inspect(location).walk()] == [(), ("a",), ("n",), ("n", "b")]
    opened = td_core.open(location)
    assert opened["n", "b"][2] == 2
    with pytest.raises((LockedError, RuntimeError)):
        opened["x"] = torch.ones(4)


def test_write_and_append_in_every_store(location: Any, td: TensorDict) -> None:
    save(td, location, chunks=2)
    if str(location).endswith(".zip"):
        for change in (lambda: open_group(location, mode="r+"), lambda: append(td, location)):
            with pytest.raises(UnsupportedOperationError, match="zip file|written in place"):
                change()
        return
    open_group(location, mode="r+")[1] = td[3]
    append(td[:1], location)
    expected = torch.cat([td[[0, 3, 2, 3]], td[:1]])
    assert (load(location) == expected).all()


def test_save_over_files_of_others_raises(tmp_path: Path, td: TensorDict) -> None:
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(FileExistsError, match="files that are not of a Zarr group"):
        save(td, tmp_path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotADirectoryError, match="is a file"):
        save(td, tmp_path / "file")
    (tmp_path / "x.zip").mkdir()
    with pytest.raises(IsADirectoryError, match="is a directory"):
        save(td, tmp_path / "x.zip")
    store = zarr.storage.MemoryStore()
    zarr.create_array(store, name="other/a", shape=(2,), dtype="int8")
    zarr.core.sync.sync(store.delete("zarr.json"))
    with pytest.raises(FileExistsError, match="files that are not of a Zarr group"):
        save(td, store)
    assert (tmp_path / "notes.txt").exists()


def test_save_over_old_group_in_store_removes_its_arrays(td: TensorDict) -> None:
    store = zarr.storage.MemoryStore()
    save(td, store)
    save(td.select("a"), store)
    assert {key for key, _ in zarr.open_group(store, mode="r").members(max_depth=None)} == {"a"}


@pytest.mark.parametrize("number", range(0, 30, 3))
def test_save_to_store_that_ends_early_is_an_error(number: int, td: TensorDict) -> None:
    class Failing(zarr.storage.MemoryStore):
        left = 10**6

        async def set(self, *args: Any, **options: Any) -> None:
            Failing.left -= 1
            if Failing.left < 0:
                raise OSError("no connection")
            await super().set(*args, **options)

    store = Failing()
    save(td.clone().zero_(), store, chunks=1)
    Failing.left = number
    try:
        save(td, store, chunks=1)
    except OSError:
        Failing.left = 10**6
        if number == 0:  # nothing was changed
            assert load(store)["a"].sum() == 0
        else:
            with pytest.raises(FormatError, match="has not ended"):
                load(store)
        save(td, store, chunks=1)
    assert (load(store) == td).all()


def test_missing_location_raises(tmp_path: Path) -> None:
    for call in (load, open_group, inspect, verify):
        with pytest.raises(FileNotFoundError, match=r"missing.zarr"):
            call(tmp_path / "missing.zarr")


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
def test_read_from_server(server: str, options: Any, tmp_path: Path, td: TensorDict) -> None:
    pytest.importorskip("aiohttp")
    save(td, tmp_path / "x.zarr", **options)
    assert (td_core.load(f"{server}/x.zarr") == td).all()
    opened = td_core.open(f"{server}/x.zarr", format="zarr")
    assert opened[[2, 0]]["n", "b"].tolist() == [2, 0]
    (tmp_path / "x.zarr" / "a" / ("c.0.0" if not options else "c/1/0")).unlink()
    with pytest.raises(FormatError, match=r"the array 'a'.*is missing"):
        load(f"{server}/x.zarr")
