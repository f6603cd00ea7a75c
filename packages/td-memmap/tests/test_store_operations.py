"""The operations of a format on saves of td-memmap: open, create, append, inspect, verify, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_core
import td_memmap
from td_core import LockedError, TensorDict
from td_core.__main__ import main
from td_core._formats.command_line import DAMAGED, GOOD
from td_memmap import MemoryMappedTensor


@pytest.fixture
def data() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3, 2), "c": torch.zeros(3)}}, [3])


@pytest.fixture(params=["save", "save.tdz"])
def save(request: pytest.FixtureRequest, data: TensorDict, tmp_path: Path) -> Path:
    """Save the data as a directory, and as an archive."""
    data.save(tmp_path / request.param)
    return tmp_path / request.param


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_open_maps_leaves_and_mode_decides_where_writes_go(mode: str, save: Path) -> None:
    if mode == "r+" and save.suffix:
        pytest.skip("elements of an archive have hashes")
    for open_save in (td_core.open, TensorDict.open):
        opened = open_save(str(save), mode=mode)
        assert isinstance(opened["a"], Tensor if save.suffix else MemoryMappedTensor)
        assert opened.is_locked is (mode != "c")
        opened["a"][0] = 7
        assert opened["a"].tolist() == [7, 1, 2]
        assert td_core.load(save, mode="r")["a"].tolist() == ([7, 1, 2] if mode == "r+" else [0, 1, 2])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("a", ["a"]),
        (["n"], ["n", ("n", "b"), ("n", "c")]),
        ([("n", "b"), "a"], ["a", "n", ("n", "b")]),
        ([("n", "c")], ["n", ("n", "c")]),
    ],
)
def test_open_keys_opens_only_those(keys: Any, expected: list[Any], save: Path) -> None:
    opened = td_core.open(save, keys=keys)
    assert sorted(opened.keys(True), key=str) == sorted(expected, key=str)
    assert opened.batch_size == (3,)
    with pytest.raises(LockedError):
        opened["new"] = torch.zeros(3)
    with pytest.raises(KeyError, match="missing"):
        td_core.open(save, keys=["missing"])


def test_load_keys_keeps_the_rest_of_the_collection(save: Path) -> None:
    loaded = td_core.load(save, keys="a")
    assert not loaded.is_locked
    assert loaded["a"].tolist() == [0, 1, 2]
    assert td_core.load(save, keys=("n", "b"), device="meta")["n", "b"].is_meta
    out = TensorDict({"a": torch.zeros(3), "n": TensorDict({"old": torch.zeros(3)}, [3])}, [3])
    assert TensorDict.load_memmap(save, keys=["a"], out=out) is out
    assert list(out.keys(True)) == ["a"]
    assert out["a"].tolist() == [0, 1, 2]
    target = TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3])
    assert target.load_(save, keys=["a"])["a"].tolist() == [0, 1, 2]
    assert list(target.keys()) == ["a", "b"]


def test_load_keys_to_device_returns_copies_there(save: Path, device: torch.device) -> None:
    loaded = TensorDict.load_memmap(save, keys=[("n", "b")], device=device)
    assert list(loaded.keys(True)) == ["n", ("n", "b")]
    assert loaded["n", "b"].device.type == device.type
    assert loaded["n", "b"].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("name", ["new", "new.tdz"])
def test_create_makes_zeros_to_be_filled(name: str, data: TensorDict, tmp_path: Path) -> None:
    path = tmp_path / name
    like = data.to("meta")
    created = td_core.create(like, path)
    assert {key: leaf.tolist() for key, leaf in created.items(True, True)} == {
        key: torch.zeros_like(leaf).tolist() for key, leaf in data.items(True, True)
    }
    created["a"][1] = 5
    assert td_core.load(path)["a"].tolist() == [0, 5, 0]
    with pytest.raises(FileExistsError, match="exists"):
        td_core.create(like, path)
    assert td_core.create(like, path, existsok=True)["a"].tolist() == [0, 5, 0]


def test_create_without_location_is_anonymous(data: TensorDict) -> None:
    created = td_core.create(data, None)
    assert created.is_memmap()
    assert created.saved_path is None


def test_append_adds_rows(data: TensorDict, tmp_path: Path) -> None:
    data.save(tmp_path / "save")
    td_core.append(data[:1], tmp_path / "save")
    assert td_core.load(tmp_path / "save")["a"].tolist() == [0, 1, 2, 0]
    data.save(tmp_path / "save.tdz")
    with pytest.raises(td_memmap.AppendError, match="an archive cannot grow"):
        td_core.append(data[:1], tmp_path / "save.tdz")


def test_inspect_returns_place_of_every_leaf(save: Path) -> None:
    tree = td_core.inspect(save)
    assert {path: (leaf.shape, leaf.place) for path, leaf in tree.walk() if leaf.kind == "leaf"} == {
        ("a",): ([3], "a.memmap"),
        ("n", "b"): ([3, 2], "n/b.memmap"),
        ("n", "c"): ([3], "n/c.memmap"),
    }
    assert tree == td_memmap.inspect(save)


def test_verify_reports_damage(save: Path) -> None:
    assert td_core.verify(save).ok
    damaged = save if save.suffix else save / "a.memmap"
    content = damaged.read_bytes()
    damaged.write_bytes(content.replace(torch.arange(3.0).numpy().tobytes(), b""))
    try:
        report = td_core.verify(save)
    except td_core.FormatError:
        return
    assert not report.ok
    assert report.problems[0].file == "a.memmap"


@pytest.mark.parametrize("module", ["td_core", "td_memmap"])
def test_command_lines_agree(module: str, save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from td_memmap.__main__ import main as memmap_main

    run = {"td_core": main, "td_memmap": memmap_main}[module]
    assert run(["inspect", str(save), "--json"]) == GOOD
    assert json.loads(capsys.readouterr().out)["children"]["a"]["place"] == "a.memmap"
    assert run(["verify", str(save)]) == GOOD
    assert ", 0 problems" in capsys.readouterr().out
    if not save.suffix:
        (save / "a.memmap").unlink()
        assert run(["verify", str(save)]) == DAMAGED
        assert "a.memmap is missing" in capsys.readouterr().out


def test_convert_between_directory_and_archive(
    data: TensorDict, save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / ("out" if save.suffix else "out.tdz")
    assert main(["convert", str(save), str(target)]) == GOOD
    assert target.is_file() == (not save.suffix)
    assert (td_core.load(target) == data).all()


def test_save_to_url_without_store_raises(data: TensorDict) -> None:
    for save in (data.save, data.memmap):
        with pytest.raises(td_core.MissingPluginError, match="none provides the scheme 'cellar'"):
            save("cellar://bucket/x")
    assert not Path("cellar:").exists()
