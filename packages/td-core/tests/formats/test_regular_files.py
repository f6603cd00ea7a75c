"""Pipes, devices, sockets and directories in place of a file: refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from td_core.errors import FormatError
from td_core.spi import check_regular, open_regular


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe"])
@pytest.mark.parametrize("write", [False, True])
def test_open_regular_of_a_special_file_raises(
    kind: str, write: bool, make_special: Mapping[str, Callable[[Path], object]], tmp_path: Path
) -> None:
    make_special[kind](tmp_path / "x")
    opened = os.listdir("/dev/fd")
    for call in (lambda: open_regular(tmp_path / "x", write), lambda: check_regular(tmp_path / "x")):
        with pytest.raises(FormatError, match="cannot open .*x: it is not a regular file"):
            call()
    assert os.listdir("/dev/fd") == opened


@pytest.mark.parametrize("write", [False, True])
def test_open_regular_of_a_directory_raises(write: bool, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="it is not a regular file"):
        open_regular(tmp_path, write)
    with pytest.raises(FormatError, match="it is not a regular file"):
        check_regular(tmp_path)


def test_open_regular_of_a_file_opens_it(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab")
    (tmp_path / "link").symlink_to("x")
    for name in ("x", "link"):
        fd = open_regular(tmp_path / name, write=True)
        assert os.pread(fd, 9, 0) == b"ab"
        os.close(fd)
        assert check_regular(tmp_path / name).st_size == 2
    for call in (open_regular, check_regular):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "missing")
