"""Checksums of metadata: a changed byte in what describes a save is an error of verify and of load, in each format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
import td_core.__main__
from td_core import TensorDict
from td_core.errors import FormatError, MissingPluginError, TensorDictError
from td_core.spi import compare_check_line

#: The package, file name, options and metadata files of each form of a save.
FORMS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "memmap": ("td_memmap", "save", {}, "*.json"),
    "archive": ("td_memmap", "save.tdz", {"format": "memmap"}, ""),
    "safetensors": ("td_safetensors", "save.safetensors", {}, ""),
    "shards": ("td_safetensors", "shards", {"max_shard_size": 24, "format": "safetensors"}, "*"),
    "zarr": ("td_zarr", "save.zarr", {}, "zarr.json"),
    "hdf5": ("td_hdf5", "save.h5", {}, ""),
}


def make_data() -> Any:
    below = TensorDict({"b": torch.ones(6, 2)}, batch_size=[6], names=["rows"])
    return TensorDict({"w": torch.arange(6.0), "t": torch.ones(6, dtype=torch.int16), "n": below}, [6])


def read_leaves(data: Any) -> list[Any]:
    return [(key, leaf.dtype, leaf.tolist()) for key, leaf in data.items(True, True)] + [data["n"].names]


def save_form(form: str, folder: Path, **options: Any) -> Path:
    package, name, more, _ = FORMS[form]
    pytest.importorskip(package)
    path = folder / name
    folder.mkdir(exist_ok=True)
    td_core.save(make_data(), path, **{"format": form, **more}, **options)
    return path


def list_files(form: str, path: Path) -> list[Path]:
    pattern = FORMS[form][3]
    return sorted(file for file in path.rglob(pattern) if file.is_file()) if pattern else [path]


def find_elements(content: bytes) -> set[int]:
    """Return the positions of the elements of ``make_data()``, which have no hash by default."""
    found = set()
    for leaf in make_data().values(True, True):
        part = leaf.numpy().tobytes()
        start = content.find(part)
        if start >= 0:
            found |= set(range(start, start + len(part)))
    return found


def change_metadata(form: str, path: Path) -> Iterator[tuple[str, int]]:
    """Yield the file and position of one changed byte after another of the metadata, and restore each file."""
    for file in list_files(form, path):
        content = file.read_bytes()
        positions = sorted(set(range(len(content))) - find_elements(content))
        for position in positions[:: max(1, len(positions) // 60)]:
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            yield file.name, position
        file.write_bytes(content)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("hdf5", "archive")])
@pytest.mark.parametrize("checksums", [False, True])
def test_change_any_byte_of_metadata_is_found(form: str, checksums: bool, tmp_path: Path) -> None:
    path = save_form(form, tmp_path, checksums=checksums)
    assert td_core.verify(path).ok
    for place in change_metadata(form, path):
        try:
            assert not td_core.verify(path).ok, place
        except (TensorDictError, FileNotFoundError) as error:
            assert str(path) in str(error)
    assert td_core.verify(path).ok


@pytest.mark.parametrize("form", FORMS)
def test_load_changed_byte_of_metadata_never_returns_other_data(form: str, tmp_path: Path) -> None:
    path = save_form(form, tmp_path)
    right = read_leaves(td_core.load(path))
    for place in change_metadata(form, path):
        try:
            assert read_leaves(td_core.load(path)) == right, place
        except (FormatError, MissingPluginError, FileNotFoundError):
            continue


@pytest.mark.parametrize("form", FORMS)
def test_verify_damaged_copy_with_new_times_is_not_ok(form: str, tmp_path: Path) -> None:
    path = save_form(form, tmp_path / "here", checksums=True)
    copy = tmp_path / path.name
    if path.is_dir():
        shutil.copytree(path, copy, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(path, copy)
    files = [file for file in [copy, *copy.rglob("*")] if file.is_file()]
    later = max(file.stat().st_mtime_ns for file in files) + 10**9
    for file in files:
        os.utime(file, ns=(later, later))
    assert td_core.verify(copy).ok
    for file in files:
        content = file.read_bytes()
        for position in sorted(find_elements(content))[::7]:
            file.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
            os.utime(file, ns=(later, later))
            assert not td_core.verify(copy).ok, (file, position)
            assert td_core.__main__.main(["verify", str(copy)]) == 1
        file.write_bytes(content)
        os.utime(file, ns=(later, later))
    assert td_core.verify(copy).ok


@pytest.mark.parametrize("form", ["memmap", "zarr"])
def test_load_metadata_without_check_line_reads_it(form: str, tmp_path: Path) -> None:
    path = save_form(form, tmp_path)
    right = read_leaves(td_core.load(path))
    for file in list_files(form, path):
        assert compare_check_line(file.read_bytes())
        file.write_text(json.dumps(json.loads(file.read_bytes())))
    assert read_leaves(td_core.load(path)) == right


@pytest.mark.parametrize("form", ["memmap", "safetensors", "hdf5", "zarr"])
def test_verify_leaf_written_in_place_says_so(form: str, tmp_path: Path) -> None:
    path = save_form(form, tmp_path, checksums=True)
    opened = td_core.open(path, mode="r+")
    opened["w"][2] = 9.0
    del opened
    report = td_core.verify(path)
    if form == "zarr":  # a write renews the checksum of its chunk
        assert report.ok
        return
    assert [problem.kind for problem in report.problems] == ["changed" if form == "memmap" else "damaged"]
    assert "was saved" in report.problems[0].detail
    loaded = td_core.load(path)
    assert loaded["w"].tolist() == [0.0, 1.0, 9.0, 3.0, 4.0, 5.0]
    td_core.save(loaded.clone(), tmp_path / f"again{path.suffix}", format=form, checksums=True)
    assert td_core.verify(tmp_path / f"again{path.suffix}").ok
