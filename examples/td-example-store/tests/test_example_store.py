"""The example store, installed with td-core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from td_example_store import RowSource, SqliteFormat

import td_core
from td_core import LockedError, TensorDict, save
from td_core.testing import SerializerTests
from td_store import StoredTensor
from td_store.testing import OpenTests, SourceTests


class TestSqlite(SerializerTests):
    suffix = ".sqlite"

    def serializer(self) -> SqliteFormat:
        return SqliteFormat()

    def collections(self) -> dict[str, Any]:
        return {name: data for name, data in super().collections().items() if name != "jagged"}


class TestRowSource(SourceTests):
    def make(self, array: torch.Tensor, folder: Path) -> RowSource:
        save(TensorDict({"a": array}), folder / "x.sqlite", format="sqlite")
        return RowSource(folder / "x.sqlite", 0, array.shape, array.dtype)


class TestOpenSqlite(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        save(data, folder / "x.sqlite", format="sqlite")
        return td_core.open(folder / "x.sqlite", mode="r+")


def test_plugins_lists_active_record() -> None:
    (record,) = [each for each in td_core.plugins() if each.id == "example-store"]
    assert (record.distribution, record.state, record.hooks) == (
        "td-example-store",
        "active",
        ("td_serializers",),
    )


def test_open_in_mode_r_refuses_writes(tmp_path: Path) -> None:
    save(TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3]), tmp_path / "x.sqlite", format="sqlite")
    opened = td_core.open(tmp_path / "x.sqlite", keys=["a"])
    assert isinstance(opened["a"], StoredTensor)
    with pytest.raises(LockedError, match=r"key 'a'.*x\.sqlite \(array 0\): it is opened with mode='r'"):
        opened.zero_()


def test_save_replaces_a_partial_file_of_a_killed_save(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite.partial").write_bytes(b"rest")
    save(TensorDict({"a": torch.zeros(3)}), tmp_path / "x.sqlite", format="sqlite")
    assert os.listdir(tmp_path) == ["x.sqlite"]
