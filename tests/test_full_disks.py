"""Full disks: a write to a new store raises OSError, and no write to a mapping ends the process (SIGBUS)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict

ROWS = 400
#: The suffix of the stores of each format, and the distribution that provides it.
FORMS = {
    "memmap": ("", "td-memmap"),
    "safetensors": (".safetensors", "td-safetensors"),
    "hdf5": (".h5", "td-hdf5"),
    "zarr": (".zarr", "td-zarr"),
}


def run_on_small_disk(folder: Path, work: Callable[[str], None]) -> int:
    """Call a function with a path on a disk of a megabyte, in a process of its own. Return its wait status."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 99
    try:
        flags = (1 << 18) | (1 << 14)  # this mount is seen by this process only
        if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, flags, None):
            code = 77
        elif libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=1m") == 0:
            code = 1
            try:
                work(str(folder / "store"))
                code = 0
            except OSError as error:
                code = 28 if error.errno == errno.ENOSPC else 2
    finally:
        os._exit(code)


def check_status(status: int, code: int) -> None:
    if status >> 8 == 77:
        pytest.skip("only root can mount a disk")
    assert (status & 127, status >> 8) == (0, code)


def make_like(rows: int) -> Any:
    return TensorDict({"a": torch.zeros(rows, 1024), "n": {"b": torch.zeros(rows, 2)}}, [rows]).to("meta")


def fill_store(form: str, path: str, rows: int) -> None:
    stored = td_core.create(make_like(rows), path + FORMS[form][0], format=form)
    for row in range(rows):
        stored["a"][row] = 1.0
    stored["n", "b"].fill_(2.0)
    assert float(stored["a"].sum()) == rows * 1024


@pytest.mark.parametrize("form", FORMS)
def test_write_to_new_store_on_full_disk_raises(form: str, tmp_path: Path, installed: set[str]) -> None:
    if FORMS[form][1] not in installed:
        pytest.skip(f"{FORMS[form][1]} is not installed")
    check_status(run_on_small_disk(tmp_path, lambda path: fill_store(form, path, ROWS)), 28)
    check_status(run_on_small_disk(tmp_path, lambda path: fill_store(form, path, 40)), 0)


def append_rows(form: str, path: str, options: dict[str, Any]) -> None:
    place = path + FORMS[form][0]
    rows = TensorDict({"a": torch.ones(40, 1024), "n": {"b": torch.ones(40)}}, [40])
    td_core.save(rows, place, format=form, **options)
    for number in range(20):
        try:
            td_core.append(rows, place)
        except OSError:
            for _ in range(2):
                loaded = td_core.load(place)
                assert len(loaded) == 40 * (number + 1) and bool((loaded == 1).all())
                assert td_core.verify(place).ok
            raise


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("memmap", {}),
        ("zarr", {}),
        ("hdf5", {}),
        ("hdf5", {"chunks": 10}),
    ],
    ids=str,
)
def test_append_on_full_disk_raises_and_keeps_rows(
    form: str, options: dict[str, Any], tmp_path: Path, installed: set[str]
) -> None:
    if FORMS[form][1] not in installed:
        pytest.skip(f"{FORMS[form][1]} is not installed")
    check_status(run_on_small_disk(tmp_path, lambda path: append_rows(form, path, options)), 28)


def add_live_entries(form: str, path: str, size: int) -> None:
    place = path + FORMS[form][0]
    td_core.save(TensorDict({"a": torch.ones(40, 100)}, [40]), place, format=form)
    live = (TensorDict.from_h5 if form == "hdf5" else TensorDict.from_zarr)(place, mode="r+")
    for number in range(1000):
        try:
            live["n", str(number)] = torch.ones(40, size)
        except OSError:
            loaded = td_core.load(place)
            assert len(loaded["n"].keys()) == number and bool((loaded == 1).all())
            assert bool((live["a"].clone() == 1).all())
            raise


@pytest.mark.parametrize(("form", "size"), [("hdf5", 50), ("hdf5", 1024), ("zarr", 1024)])
def test_set_new_live_entry_on_full_disk_raises_and_keeps_others(
    form: str, size: int, tmp_path: Path, installed: set[str]
) -> None:
    if FORMS[form][1] not in installed:
        pytest.skip(f"{FORMS[form][1]} is not installed")
    check_status(run_on_small_disk(tmp_path, lambda path: add_live_entries(form, path, size)), 28)


def write_compressed_rows(path: str) -> None:
    blank = TensorDict({"a": torch.zeros(400, 1024), "b": torch.zeros(400)}, [400])
    td_core.save(blank, path + ".h5", format="hdf5", compression="gzip", chunks=10)
    stored = td_core.open(path + ".h5", mode="r+")
    for start in range(0, 400, 10):
        stored["a"][start : start + 10] = torch.rand(10, 1024)


def save_many(path: str) -> None:
    for number in range(9):
        leaves = {str(key): torch.ones(40, number + 1) for key in range(200)}
        td_core.save(TensorDict(leaves, [40]), f"{path}{number}.h5", format="hdf5", chunks=20)


def add_entry(path: str) -> None:
    mapped = TensorDict({"a": torch.zeros(40, 1024)}, [40]).memmap(path)
    for number in range(10):
        mapped.make_memmap(str(number), (40, 1024)).fill_(1.0)


def consolidate_all(path: str) -> None:
    for number in range(10):
        TensorDict({"a": torch.zeros(40, 1024)}).consolidate(f"{path}{number}")["a"].fill_(1.0)


WRITES: dict[str, tuple[str, Callable[[str], object]]] = {
    "make_memmap": ("td-memmap", add_entry),
    "memmap": ("td-memmap", lambda path: TensorDict({"a": torch.ones(ROWS, 1024)}).memmap(path)),
    "archive": ("td-memmap", lambda path: TensorDict({"a": torch.ones(ROWS, 1024)}).memmap(path + ".tdz")),
    "compressed rows": ("td-hdf5", write_compressed_rows),
    "many datasets": ("td-hdf5", save_many),
    "consolidate": ("td-distributed", consolidate_all),
}


@pytest.mark.parametrize("write", WRITES)
def test_write_new_file_on_full_disk_raises(write: str, tmp_path: Path, installed: set[str]) -> None:
    if WRITES[write][0] not in installed:
        pytest.skip(f"{WRITES[write][0]} is not installed")
    check_status(run_on_small_disk(tmp_path, lambda path: WRITES[write][1](path) and None), 28)
