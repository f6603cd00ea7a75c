"""What a save finds at its path: pipes, devices and sockets are refused, missing folders are made, and errors name the path."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from td_store.files import NewDirectory, NewFile


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe"])
@pytest.mark.parametrize("new", [NewFile, NewDirectory])
def test_save_over_a_special_file_raises(
    kind: str, new: type, make_special: Mapping[str, Callable[[Path], object]], tmp_path: Path
) -> None:
    make_special[kind](tmp_path / "x")
    before = sorted(os.listdir(tmp_path))
    mode = os.stat(tmp_path / "x").st_mode
    with pytest.raises(FileExistsError, match="cannot save over what is not a file or directory"):
        new(tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == before
    assert stat.S_IFMT(os.stat(tmp_path / "x").st_mode) == stat.S_IFMT(mode)


@pytest.mark.parametrize("new", [NewFile, NewDirectory])
def test_save_in_a_missing_folder_makes_it(new: type, tmp_path: Path) -> None:
    with new(tmp_path / "a" / "b" / "x") as made:
        made.commit()
    assert (tmp_path / "a" / "b" / "x").exists()


@pytest.mark.parametrize("new", [NewFile, NewDirectory])
@pytest.mark.parametrize("below", ["x", "b/x"])
def test_save_below_a_file_names_the_path(new: type, below: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(NotADirectoryError) as error:
        new(tmp_path / "a" / below)
    assert error.value.filename == str(tmp_path / "a" / below)


@pytest.mark.parametrize(
    ("new", "call"),
    [(NewFile, "open"), (NewFile, "replace"), (NewDirectory, "mkdir"), (NewDirectory, "rename")],
)
def test_error_of_a_save_names_its_path(
    new: type, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, *args: object) -> None:
        raise OSError(28, "No space left on device", path)

    def save() -> None:
        with new(tmp_path / "x") as made:
            made.commit()

    monkeypatch.setattr(f"td_store._temporary_files.os.{call}", fail)
    with pytest.raises(OSError, match="cannot write it: No space left") as error:
        save()
    monkeypatch.undo()
    assert error.value.filename == str(tmp_path / "x")
    assert os.listdir(tmp_path) == []
