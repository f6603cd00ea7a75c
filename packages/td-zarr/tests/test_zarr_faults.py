"""Stores that fail: whichever request fails once, the group is the old or the new one, or says that it is incomplete."""

from __future__ import annotations

import errno
import http.server
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from td_core import TensorDict
from td_core.errors import FormatError
from td_zarr import append, load, save, verify
from td_zarr import open as open_group


class FaultyStore(zarr.storage.WrapperStore[Any]):  # type: ignore[misc]
    """A store in memory, one of whose requests fails."""

    def __init__(self, store: Any = None) -> None:
        super().__init__(zarr.storage.MemoryStore() if store is None else store)

    failing: frozenset[str] = frozenset()
    left = -1

    @classmethod
    def fail(cls, requests: Iterable[str], number: int) -> None:
        """Let one of the next requests fail."""
        FaultyStore.failing, FaultyStore.left = frozenset(requests), number

    def note(self, request: str) -> None:
        if request in FaultyStore.failing:
            FaultyStore.left -= 1
            if FaultyStore.left == -1:
                raise OSError("no connection")

    async def set(self, *args: Any, **options: Any) -> None:
        self.note("set")
        await self._store.set(*args, **options)

    async def delete(self, key: str) -> None:
        self.note("delete")
        await self._store.delete(key)

    async def get(self, *args: Any, **options: Any) -> Any:
        self.note("get")
        return await self._store.get(*args, **options)


def make_data(value: int, rows: int = 3) -> TensorDict:
    leaves = {"a": torch.full((rows, 2), value), "n": {"b": torch.full((rows,), float(value))}}
    return TensorDict(leaves, [rows])


def save_again(store: Any) -> None:
    save(make_data(2), store, chunks=2)


def add_rows(store: Any) -> None:
    append(make_data(2), store)


def write_rows(store: Any) -> None:
    open_group(store, mode="r+")["a"].fill_(2)


#: What is done, and the group after it.
CHANGES: dict[str, tuple[Callable[[Any], None], TensorDict]] = {
    "save": (save_again, make_data(2)),
    "append": (add_rows, torch.cat([make_data(1), make_data(2)])),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("requests", [{"set"}, {"delete"}, {"get"}], ids=str)
def test_failed_request_leaves_old_or_new_or_error(name: str, requests: set[str]) -> None:
    change, new = CHANGES[name]
    old = make_data(1)
    for number in itertools.count():
        store = FaultyStore()
        FaultyStore.fail((), -1)
        save(old, store, chunks=2)
        FaultyStore.fail(requests, number)
        try:
            change(store)
        except OSError as error:
            assert "no connection" in str(error)
        else:
            break
        try:
            found = load(store)
        except FormatError as error:
            assert name == "save"
            assert "a save to this group has not ended" in str(error)
        else:
            wanted = old if found.batch_size == old.batch_size else new
            assert (found == wanted).all()
            if wanted is new:
                continue
        change(store)
        assert (load(store) == new).all()
        assert verify(store).ok
    assert FaultyStore.left >= 0
    FaultyStore.fail((), -1)
    assert (load(store) == new).all()


def test_failed_write_of_chunk_raises_and_can_be_repeated() -> None:
    for number in range(2):
        store = FaultyStore()
        FaultyStore.fail((), -1)
        save(make_data(1), store, chunks=2)
        FaultyStore.fail({"set"}, number)
        with pytest.raises(OSError, match="no connection"):
            write_rows(store)
        assert set(load(store)["a"].flatten().tolist()) <= {1, 2}
        write_rows(store)
        assert set(load(store)["a"].flatten().tolist()) == {2}


def test_failed_read_is_not_zeros() -> None:
    store = FaultyStore()
    FaultyStore.fail((), -1)
    save(make_data(1), store, chunks=2)
    for number in itertools.count():
        FaultyStore.fail({"get"}, number)
        try:
            found = load(store)
        except OSError as error:
            assert "no connection" in str(error)
        else:
            break
    assert number > 4
    assert (found == make_data(1)).all()


class FaultyHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files; a request for a chunk gets the answer of ``fault``."""

    fault = "none"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if "/a/c" not in self.path or self.fault == "none":
            super().do_GET()
        elif self.fault == "busy":
            self.send_error(503)
        else:
            self.send_response(200)
            self.send_header("Content-Length", "48")
            self.end_headers()
            self.wfile.write(b"half")


@pytest.fixture
def handler() -> type[FaultyHandler]:
    """Let the fixture ``server`` answer with faults, which a test chooses."""
    return FaultyHandler


@pytest.mark.parametrize("fault", ["busy", "truncated"])
@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
def test_answer_of_failing_server_raises_os_error(
    fault: str, options: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    save(make_data(1), tmp_path / "x.zarr", **options)
    once = {"retries": 0}
    opened = open_group(f"{server}/x.zarr", storage_options=once)
    monkeypatch.setattr(FaultyHandler, "fault", fault)
    for read in (lambda: load(f"{server}/x.zarr", storage_options=once), lambda: opened[[2, 0]]):
        with pytest.raises(OSError, match="cannot read the object 'a/c"):
            read()
    monkeypatch.setattr(FaultyHandler, "fault", "none")
    assert (opened[[2, 0]] == make_data(1, 2)).all()


def test_append_above_largest_size_of_files_is_an_os_error(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    save(TensorDict({"a": torch.zeros(5000)}, [5000]), tmp_path / "x.zarr")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write the array 'a': File too large") as caught:
            append(TensorDict({"a": torch.rand(5000)}, [5000]), tmp_path / "x.zarr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert torch.equal(load(tmp_path / "x.zarr")["a"], torch.zeros(5000))
