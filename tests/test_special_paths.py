"""Pipes, devices and sockets in place of a save are refused in every format, and missing folders are made."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.errors import FormatError

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")

#: A format and its options, by the name of the save.
SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "x.safetensors": ("safetensors", {}),
    "shards": ("safetensors", {"max_shard_size": 10}),
    "directory": ("memmap", {}),
    "x.tdz": ("memmap", {"archive": True}),
    "x.zarr": ("zarr", {}),
    "x.zarr.zip": ("zarr", {}),
    "x.h5": ("hdf5", {}),
    "consolidated": ("", {}),
}
NAMES = pytest.mark.parametrize("name", SAVES)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device")


def make_link(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


@pytest.fixture(params=["pipe", "socket", "device", "link"])
def make(request: pytest.FixtureRequest, make_special: Mapping[str, Callable[[Path], object]]) -> Any:
    """Return a function that makes what is no file at a path."""
    return {**make_special, "device": make_device, "link": make_link}[request.param]


@pytest.fixture(autouse=True)
def limited() -> Any:
    """End a test that waits for a pipe."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def find_format(name: str) -> str:
    pytest.importorskip(f"td_{SAVES[name][0] or 'distributed'}")
    return SAVES[name][0]


def save(path: Path, operation: str = "save") -> None:
    data = TensorDict({"a": torch.ones(3)}, [3])
    format_name, options = SAVES[path.name]
    if not format_name:
        data.consolidate(path)
    elif operation == "save":
        td_core.save(data, path, format=format_name, **options)
    else:
        td_core.create(data, path, format=format_name)


@NAMES
@pytest.mark.parametrize("operation", ["save", "create"])
def test_save_over_a_special_file_raises(operation: str, make: Any, name: str, tmp_path: Path) -> None:
    find_format(name)
    path = tmp_path / name
    make(path)
    before = {entry.name: entry.stat().st_mode for entry in os.scandir(tmp_path)}
    with pytest.raises(OSError, match=f"{name}|pipe") as error:
        save(path, operation)
    assert isinstance(error.value, (FileExistsError, NotADirectoryError))
    assert {entry.name: entry.stat().st_mode for entry in os.scandir(tmp_path)} == before


@NAMES
def test_read_a_special_file_raises_at_once(make: Any, name: str, tmp_path: Path) -> None:
    format_name, path = find_format(name), tmp_path / name
    make(path)
    reads: list[Callable[[], Any]] = [lambda: TensorDict.from_consolidated(path)]
    if format_name:
        calls = (td_core.load, td_core.open, td_core.inspect)
        reads = [lambda call=call: call(path, format=format_name) for call in calls]  # type: ignore[misc]
        reads.append(lambda: td_core.append(TensorDict({"a": torch.ones(3)}, [3]), path, format=format_name))
        reads.append(lambda: td_core.load(path))
        reads.append(lambda: td_core.open(path, mode="r+", format=format_name))
    for read in reads:
        with pytest.raises((FormatError, OSError, NotImplementedError)):
            read()
    if format_name:
        try:
            assert not td_core.verify(path, format=format_name).ok
        except (FormatError, OSError):
            pass


@NAMES
def test_pipe_in_place_of_any_file_of_a_save_raises(name: str, tmp_path: Path) -> None:
    format_name, path = find_format(name), tmp_path / name
    save(path)
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        if not file.is_file():
            continue
        file.rename(tmp_path / "aside")
        os.mkfifo(file)
        for call in (td_core.load, td_core.open):
            try:
                data = call(path, format=format_name)
                assert data["a"].sum() == 3  # the file is not needed
            except (FormatError, OSError):
                pass
        try:
            td_core.verify(path, format=format_name)
        except (FormatError, OSError):
            pass
        file.unlink()
        (tmp_path / "aside").rename(file)


@NAMES
def test_save_in_a_missing_folder_makes_it(name: str, tmp_path: Path) -> None:
    format_name, path = find_format(name), tmp_path / "runs" / "1" / name
    save(path)
    data: Any = td_core.load(path, format=format_name) if format_name else TensorDict.from_consolidated(path)
    assert data["a"].sum() == 3


@NAMES
def test_save_below_a_file_names_the_path(name: str, tmp_path: Path) -> None:
    find_format(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"file/runs/{name}|file/runs") as error:
        save(tmp_path / "file" / "runs" / name)
    assert ".tmp" not in str(error.value)
    assert os.listdir(tmp_path) == ["file"]
