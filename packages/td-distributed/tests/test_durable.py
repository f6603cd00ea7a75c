"""``consolidate(durable=True)`` syncs the file before the rename, and the directory after it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_distributed import from_consolidated


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the system calls, in order."""
    found: list[str] = []
    sync, move = os.fsync, os.replace

    def fsync(fd: int) -> None:
        found.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}")
        sync(fd)

    def replace(old: Any, new: Any) -> None:
        found.append(f"name {os.path.basename(new)}")
        move(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_threads": 2},
    {"use_buffer": True},
    {"share_memory": True},
    {"metadata": True},
    {"inplace": True},
    {"return_early": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_consolidate_durable_syncs_file_then_directory(
    options: dict[str, Any], calls: list[str], tmp_path: Path
) -> None:
    made = TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(2)}}).consolidate(
        tmp_path / "file", durable=True, **options
    )
    if options.get("return_early"):
        made = made.result()
    assert calls == [f"file of {(tmp_path / 'file').stat().st_size}", "name file", "directory"]
    assert from_consolidated(tmp_path / "file")["a"].tolist() == made["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("consolidated", [False, True])
def test_consolidate_durable_over_existing_file_syncs(
    consolidated: bool, calls: list[str], tmp_path: Path
) -> None:
    data = TensorDict({"a": torch.arange(3)})
    data = data.consolidate() if consolidated else data
    data.consolidate(tmp_path / "file")
    assert calls == ["name file"]
    data.consolidate(tmp_path / "file", durable=True)
    assert calls[1:] == [f"file of {(tmp_path / 'file').stat().st_size}", "name file", "directory"]


def test_consolidate_durable_without_filename_raises() -> None:
    for data in (TensorDict({"a": 1}), TensorDict({"a": 1}).consolidate()):
        with pytest.raises(ValueError, match="durable=True needs a filename: without one nothing is saved"):
            data.consolidate(durable=True)
