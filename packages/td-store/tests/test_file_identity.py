"""The identity of a file: it differs after a save, also if the file system uses an inode again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from td_store import files
from td_store.files import identify_file


def test_identify_file_of_path_and_descriptor_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a ü"
    path.write_bytes(b"1")
    status = os.stat(path)
    found = identify_file(str(path))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert identify_file(fd) == identify_file(str(path), status) == found
    finally:
        os.close(fd)
    assert found[:2] == (status.st_dev, status.st_ino)
    path.write_bytes(b"other content")
    os.utime(path, (1, 1))
    assert identify_file(str(path)) == found


def test_identify_file_of_a_later_file_differs(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    first = found = identify_file(str(path))
    if first[2] is None:
        pytest.skip("the file system has no times of birth")
    while found[2] == first[2]:  # until its clock has moved
        path.unlink()
        path.touch()
        found = identify_file(str(path))
    assert found != first
    assert found[2] > first[2]


def test_identify_file_without_times_of_birth_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.stat(tmp_path)
    if hasattr(status, "st_birthtime"):
        pytest.skip("the status has the time")
    for fake in (None, lambda *args: -1, lambda *args: 0):
        monkeypatch.setattr(files, "_STATX", fake)
        assert identify_file(str(tmp_path)) == (status.st_dev, status.st_ino, None)
