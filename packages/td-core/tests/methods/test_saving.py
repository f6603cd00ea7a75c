"""save, load, open and load_ as methods, with a format in memory; and the blocks of rows of stored leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core._formats.serializers import SERIALIZERS
from td_core.errors import BatchSizeError, StructureError
from td_core.spi import Serializer


class Shelf(Serializer):
    """A format that keeps saves in a dict, by the name of the file."""

    name = "shelf"

    def __init__(self) -> None:
        self.saves: dict[str, Any] = {}
        self.options: list[Any] = []

    def save(self, data: Any, path: Any, *, copy_existing: bool = False, num_threads: int = 0) -> Any:
        self.options.append(("save", copy_existing, num_threads))
        self.saves[path.name] = data.clone()
        path.touch()
        return data

    def load(self, path: Any, *, device: Any = None, non_blocking: bool = False) -> Any:
        self.options.append(("load", device, non_blocking))
        return self.saves[path.name].clone()

    def open(self, path: Any, *, mode: str = "r", keys: Any = None, part: int = 0) -> Any:
        self.options.append(("open", mode, keys, part))
        return self.saves[path.name]

    def detect(self, path: Any, head: bytes) -> bool:
        return path.name in self.saves


class Named(TensorDict):
    """A subclass that reads any save."""

    @classmethod
    def _of_saved(cls, saved: Any) -> Any:
        return cls(saved, saved.batch_size)


class Picky(TensorDict):
    """A subclass that reads no save of another class."""

    @classmethod
    def _of_saved(cls, saved: Any) -> Any:
        raise TypeError("it has no entry 'w'")


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """Register the format alone."""
    monkeypatch.setattr(SERIALIZERS, "_by_name", {})
    SERIALIZERS.add(made := Shelf())
    return made  # type: ignore[return-value]


def make_td(start: float = 0.0) -> TensorDict:
    return TensorDict({"a": torch.arange(3) + start, "n": {"b": torch.full((3, 2), start)}}, [3])


@pytest.mark.parametrize("kind", ["dense", "lazy", "params"])
def test_save_and_load_of_each_kind_round_trips(shelf: Shelf, tmp_path: Path, kind: str) -> None:
    td = make_td(1)
    source = {
        "dense": td,
        "lazy": lazy_stack(list(td.unbind(0))),
        "params": TensorDictParams(td, no_convert=True),
    }[kind]
    assert source.save(tmp_path / "x", format="shelf") is source
    for loaded in (
        TensorDict.load(tmp_path / "x"),
        TensorDict.open(tmp_path / "x"),
        TensorDict.load(tmp_path / "x", format="shelf"),
    ):
        assert loaded.batch_size == (3,) and (loaded == td).all()


def test_save_drops_options_with_default_that_format_lacks(shelf: Shelf, tmp_path: Path) -> None:
    td = make_td()
    td.save(tmp_path / "x", format="shelf", robust_key=None, share_non_tensor=False, num_threads=2)
    td.dumps(tmp_path / "x", True, format="shelf", return_early=False)
    assert shelf.options == [("save", False, 2), ("save", True, 0)]
    with pytest.raises(TypeError, match="'shelf' has no option 'archive' for save"):
        td.save(tmp_path / "y", format="shelf", archive=True)
    assert list(shelf.saves) == ["x"]


def test_load_options_by_position_and_open_options_reach_format(shelf: Shelf, tmp_path: Path) -> None:
    make_td().save(tmp_path / "x", format="shelf")
    TensorDict.load(tmp_path / "x", "meta")
    TensorDict.load(tmp_path / "x", "cpu", non_blocking=True)
    TensorDict.open(tmp_path / "x", mode="r+", keys=["a"], part=4)
    assert shelf.options[1:] == [("load", "meta", False), ("load", "cpu", True), ("open", "r+", ["a"], 4)]


def test_load_inplace_writes_into_leaves(shelf: Shelf, tmp_path: Path) -> None:
    make_td(5).save(tmp_path / "x", format="shelf")
    td = make_td().lock_()
    held = td["n", "b"]
    assert td.load_(tmp_path / "x") is td
    assert td["n", "b"] is held and held.unique().tolist() == [5]
    with pytest.raises(StructureError, match="'a'"):
        TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2, 2)}}).load_(tmp_path / "x")


def test_load_and_open_on_class_return_its_instance(shelf: Shelf, tmp_path: Path) -> None:
    make_td(2).save(tmp_path / "x", format="shelf")
    for loaded in (Named.load(tmp_path / "x"), Named.open(tmp_path / "x")):
        assert type(loaded) is Named and (loaded == make_td(2)).all()
    for read in (Picky.load, Picky.open):
        with pytest.raises(StructureError, match=r"a TensorDict, is not a Picky: it has no entry 'w'"):
            read(tmp_path / "x")


@pytest.mark.parametrize(("rows", "blocks"), [(7, [range(7)]), (0, [])])
def test_row_blocks_of_memory_are_one(rows: int, blocks: list[range]) -> None:
    assert TensorDict({"a": torch.zeros(rows)}, batch_size=[rows]).row_blocks() == blocks


def test_row_blocks_without_batch_dim_raises() -> None:
    with pytest.raises(BatchSizeError, match="has no rows: give it a batch size first"):
        TensorDict({"a": torch.zeros(3)}).row_blocks()
