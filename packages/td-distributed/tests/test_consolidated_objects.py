"""Consolidated files in object stores: one object, read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import FormatError, TensorDict, UnsupportedOperationError
from td_distributed import is_consolidated
from td_store.testing import MemoryStore


def make_data() -> TensorDict:
    """Return a collection of 400 kB."""
    return TensorDict({"a": torch.arange(50_000), "n": {"b": torch.ones(3, 2).bfloat16()}}, names=[])


def save(**options: Any) -> MemoryStore:
    """Save to a new store."""
    store = MemoryStore({}, "s3://bucket/data")
    td_core.save(make_data(), store, format="consolidated", **options)
    return store


def test_save_writes_the_bytes_of_a_file(tmp_path: Path) -> None:
    store = save(checksums=True)
    assert store.log == [("write", ("",))]
    td_core.save(make_data(), tmp_path / "x", format="consolidated", checksums=True)
    assert store._objects[""][0] == (tmp_path / "x").read_bytes()


def test_load_reads_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("td_distributed._consolidated_objects._PART", 100_000)
    store = save()
    store.log.clear()
    loaded = td_core.load(store, format="consolidated")
    assert (loaded == make_data()).all()
    assert is_consolidated(loaded)
    assert [(operation, len(names)) for operation, names in store.log] == [("peek", 1), ("read", 5)]


@pytest.mark.parametrize("checksums", [False, True])
def test_verify_finds_damage(checksums: bool) -> None:
    store = save(checksums=checksums)
    report = td_core.verify(store, format="consolidated")
    assert (report.ok, report.hashed) == (True, int(checksums))
    content, stamp = store._objects[""]
    store._objects[""] = b"\xff" + content[1:], stamp
    assert td_core.verify(store, format="consolidated").ok is not checksums
    for size in (0, 7, len(content) // 2, len(content) - 1):
        store._objects[""] = content[:size], stamp
        with pytest.raises(FormatError):
            td_core.load(store, format="consolidated")
        assert not td_core.verify(store, format="consolidated").ok


def test_missing_object_and_append_are_errors() -> None:
    with pytest.raises(FileNotFoundError, match="no consolidated file at s3://bucket/data"):
        td_core.load(MemoryStore({}, "s3://bucket/data"), format="consolidated")
    store = MemoryStore()
    with pytest.raises(UnsupportedOperationError, match="does not implement append"):
        td_core.append(make_data(), store, format="consolidated")
    assert store.log == []
