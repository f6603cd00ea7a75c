"""HDF5 files in object stores: how many turns of requests they take, and what is refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import td_core
from td_core import FormatError, TensorDict, UnsupportedOperationError
from td_hdf5 import load, save
from td_store.testing import MemoryStore

WHERE = "s3://bucket/data.h5"
OPTIONS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunks": {"chunks": 2, "compression": "gzip"},
    "checksums": {"checksums": True, "chunks": 1, "fletcher32": True},
}


def make_data() -> TensorDict:
    """Return a collection with dtypes that HDF5 has, and those that it lacks."""
    leaves = {
        "a": torch.arange(18.0).view(6, 3),
        "n": {"b": torch.arange(24).view(6, 2, 2), "half": torch.arange(6).bfloat16()},
        "c": torch.view_as_complex(torch.arange(24.0).view(6, 2, 2)),
        "u": torch.arange(6).to(torch.uint16),
        "empty": torch.zeros(6, 0),
    }
    return TensorDict(leaves, [6])


def save_in_store(data: Any, **options: Any) -> MemoryStore:
    """Save to a new store, and forget the requests."""
    store = MemoryStore({}, WHERE)
    save(data, store, **options)
    store.log.clear()
    return store


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_operation_reads_store(options: Any, tmp_path: Path) -> None:
    data = make_data()
    store = save_in_store(data, **options)
    save(data, tmp_path / "x.h5", **options)
    for found in (
        td_core.load(store),
        td_core.open(store).clone(),
        pickle.loads(pickle.dumps(td_core.open(store))),
    ):
        assert (found.to_tensordict() == data).all()
        assert found["n", "half"].dtype is torch.bfloat16
    for rows in ([4, 1, 4], slice(1, 4), slice(None, None, 2), 3, torch.tensor([[0, 5]])):
        assert (td_core.open(store)[rows] == data[rows]).all()
        assert (load(store, rows=rows) == data[rows]).all()
    assert set(load(store, keys=["n"]).keys(True, True)) == {("n", "b"), ("n", "half")}
    assert load(store, device="meta")["a"].is_meta
    assert td_core.inspect(store).nbytes == td_core.inspect(tmp_path / "x.h5").nbytes
    report = td_core.verify(store)
    assert (report.ok, report.hashed) == (True, td_core.verify(tmp_path / "x.h5").hashed)
    assert (data.clone().zero_().load_(store) == data).all()


@pytest.mark.parametrize("options", [{}, {"chunks": 500}], ids=["contiguous", "chunks"])
def test_open_takes_two_turns_and_rows_one(options: Any) -> None:
    count = 50_000
    data = TensorDict({f"k{i}": torch.arange(count * 8).view(count, 8) + i for i in range(4)}, [count])
    store = save_in_store(data, **options)
    opened = td_core.open(store)
    assert [operation for operation, _ in store.log] == ["peek", "read"]
    store.log.clear()
    rows = opened[[49_999, 3, 20_000]]
    assert [operation for operation, _ in store.log] == ["read"]
    assert (rows == data[[49_999, 3, 20_000]]).all()


def test_file_of_other_program_is_read() -> None:
    content = io.BytesIO()
    with h5py.File(content, "w", libver="latest") as file:
        file["x"] = np.arange(12, dtype=">i4").reshape(4, 3)
        file.create_dataset("g/y", data=np.arange(4.0), chunks=(3,), maxshape=(None,), compression="lzf")
        file["g/point"] = np.array([(1, 2.0)], dtype=[("i", "i4"), ("f", "f8")])
    store = MemoryStore({"": content.getvalue()}, WHERE)
    for found in (td_core.load(store), td_core.open(store)):
        assert found["x"][[3, 1]].tolist() == [[9, 10, 11], [3, 4, 5]]
        assert found["g", "y"].tolist() == [0, 1, 2, 3]
        assert found["g", "point", "f"].tolist() == [2.0]


def test_h5py_reads_what_was_uploaded() -> None:
    store = save_in_store(make_data())
    with h5py.File(io.BytesIO(store._objects[""][0])) as file:
        assert file["n/b"][2].tolist() == make_data()["n", "b"][2].tolist()


def test_save_that_fails_writes_nothing() -> None:
    store = MemoryStore({}, WHERE)
    with pytest.raises(ValueError, match='Compression filter "nonsense" is unavailable'):
        save(make_data(), store, compression="nonsense")
    assert store.log == []


def test_replaced_or_damaged_object_is_an_error() -> None:
    store = save_in_store(make_data(), chunks=2)
    opened = td_core.open(store)
    content = store._objects[""][0]
    save(make_data(), store, checksums=True, compression="gzip")
    pickled = pickle.loads(pickle.dumps(opened))
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        pickled["a"].clone()
    for size in (0, 100, len(content) // 2):
        with pytest.raises(FormatError):
            load(MemoryStore({"": content[:size]}, WHERE))
    with pytest.raises(FileNotFoundError, match="there is no object at s3://bucket/data.h5"):
        load(MemoryStore({}, WHERE))


REFUSED: dict[str, tuple[Callable[[MemoryStore], Any], type[Exception], str]] = {
    "r+": (
        lambda store: td_core.open(store, mode="r+", format="hdf5"),
        UnsupportedOperationError,
        "mode='c'",
    ),
    "append": (
        lambda store: td_core.append(make_data(), store, format="hdf5"),
        UnsupportedOperationError,
        r"save\(\) the rows to another location",
    ),
    "create": (
        lambda store: td_core.create(make_data(), store),
        UnsupportedOperationError,
        "when it is complete",
    ),
    "to_h5": (
        lambda store: make_data().to_h5(store),
        UnsupportedOperationError,
        r"td_core.save\(\) saves it there",
    ),
    "from_h5": (
        lambda store: TensorDict.from_h5(store),
        UnsupportedOperationError,
        r"td_core.open\(\) reads it",
    ),
    "mmap": (lambda store: load(store, strategy="mmap"), ValueError, "is a URL, which cannot be mapped"),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_operation_sends_no_request(call: Any, error: Any, message: str) -> None:
    store = MemoryStore({}, WHERE)
    with pytest.raises(error, match=message):
        call(store)
    assert store.log == []
