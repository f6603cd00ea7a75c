"""Names of files of other libraries: save refuses to make a directory of such a name, and load says what reads the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.errors import FormatError

READERS = {
    "model.pt": r"torch\.load\(\)",
    "model.PTH": r"torch\.load\(\)",
    "a.npy": r"numpy\.load\(\)",
    "a.npz": r"numpy\.load\(\)",
    "a.pkl": r"pickle\.load\(\)",
    "a.pickle": r"pickle\.load\(\)",
    "a.json": r"json\.load\(\)",
}

#: What is at a path, and what the error says that it is.
DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty hdf5": ("a.h5", Path.touch, "by its name it is a save of the format 'hdf5', which is empty or damaged"),
    "other content": ("a.H5", lambda path: path.write_bytes(b"other" * 200), "of the format 'hdf5', which is empty"),
    "empty safetensors": ("a.safetensors", Path.touch, "of the format 'safetensors', which is empty or damaged"),
    "empty archive": ("a.tdz", Path.touch, "of the format 'memmap', which is empty or damaged"),
    "empty zarr": ("a.zarr", Path.mkdir, "of the format 'zarr', which is empty or damaged"),
    "empty directory": ("run", Path.mkdir, "the directory is empty"),
    "directory": ("run", lambda path: (path / "a").mkdir(parents=True), "no metadata of a save, such as a meta.json"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _formats() -> None:
    for package in ("td_memmap", "td_safetensors", "td_hdf5", "td_zarr"):
        pytest.importorskip(package)


@pytest.mark.parametrize(("name", "reader"), READERS.items())
def test_save_refuses_a_name_of_a_foreign_file_without_format(name: str, reader: str, tmp_path: Path) -> None:
    data, path = TensorDict({"a": torch.ones(2)}), tmp_path / name
    calls = [td_core.save, TensorDict.save, TensorDict.dumps, td_core.create]
    for call in calls:
        with pytest.raises(FormatError, match=f"{reader} reads.*format='memmap'.*\\.safetensors"):
            call(data, path)
        assert not path.exists()
    with pytest.raises(FormatError, match=reader):
        td_core.save({"epoch": 1}, path)
    td_core.save(data, path, format="memmap")
    assert td_core.load(path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("name", READERS)
def test_memmap_makes_a_directory_of_any_name(name: str, tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(2)}).memmap(tmp_path / name)
    assert TensorDict.load_memmap(tmp_path / name)["a"].tolist() == [1, 1]
    assert td_core.load(tmp_path / name)["a"].tolist() == [1, 1]


@pytest.mark.parametrize(("name", "reader"), READERS.items())
def test_load_of_a_foreign_file_names_what_reads_it(name: str, reader: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(FormatError, match=f"no registered format recognises .*{reader} reads"):
        td_core.load(tmp_path / name)


@pytest.mark.parametrize(("name", "make", "said"), DAMAGED.values(), ids=DAMAGED)
def test_load_of_something_damaged_says_what_its_name_suggests(
    name: str, make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    make(tmp_path / name)
    for call in (td_core.load, td_core.open, td_core.inspect, td_core.verify, TensorDict.load):
        with pytest.raises(FormatError, match=said):
            call(tmp_path / name)
