"""Opened groups: modes, locks, the methods ``to_zarr`` and ``from_zarr``, and classes with declared entries."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import td_core
from td_core import TensorDict
from td_core.errors import KeyPathError, LockedError, StructureError, UnsupportedOperationError
from td_store import StoredTensor
from td_zarr import MappedTensor, ZarrTensorDict, load, save, verify
from td_zarr import open as open_group

CHUNKS: list[dict[str, Any]] = [{}, {"chunks": 2}]


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_mode_decides_class_of_leaves_and_lock(options: Any, path: Path, td: TensorDict) -> None:
    save(td, path, **options)
    plain = not options
    classes = {
        "r": MappedTensor if plain else StoredTensor,
        "r+": StoredTensor,
        "c": torch.Tensor if plain else StoredTensor,
    }
    for mode, cls in classes.items():
        opened = open_group(path, mode=mode)
        assert type(opened["a"]) is cls
        assert opened.is_locked == (mode != "c")
    with pytest.raises(ValueError, match="mode is one of 'r', 'r\\+', 'c'; got 'w'"):
        open_group(path, mode="w")


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_write_goes_where_mode_says(options: Any, path: Path, td: TensorDict) -> None:
    save(td, path, **options)
    private = open_group(path, mode="c")
    private[1] = td[0]
    private["new"] = torch.ones(4)
    assert torch.equal(private["a"].clone(), td["a"][[0, 0, 2, 3]])
    assert (load(path) == td).all()
    shared = open_group(path, mode="r+")
    shared[1] = td[0]
    shared["n"].zero_()
    shared["a"].flush()
    assert torch.equal(load(path)["a"], td["a"][[0, 0, 2, 3]])
    assert load(path)["n", "c"].sum() == 0
    with pytest.raises(LockedError):
        shared["new"] = torch.ones(4)
    assert verify(path).ok


def test_write_to_read_only_chunks_raises_with_location(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    with pytest.raises(LockedError, match=r"cannot write to ChunkSource\('.*data.zarr', 'a'\).*mode='r\+'"):
        open_group(path)["a"].zero_()
    store = zarr.storage.MemoryStore()
    save(td, store, chunks=2)
    opened = open_group(store.with_read_only(True), mode="r+")
    with pytest.raises((LockedError, td_core.FormatError), match="read-only"):
        opened["a"].zero_()
    assert (load(store) == td).all()


def test_write_to_file_without_permission_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    chunk = path / "a" / "c.0.0"
    chunk.chmod(stat.S_IREAD)
    opened = open_group(path, mode="r+")
    try:
        opened["a"].zero_()
    except LockedError as error:
        assert "a/c.0.0" in str(error)
    else:
        pytest.skip("this user can write every file")


NESTED: dict[str, Callable[[], Any]] = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("name", NESTED)
def test_open_nested_tensor_for_writing_raises_with_key(name: str, path: Path) -> None:
    save(TensorDict({"n": {"a": NESTED[name]()}, "b": torch.ones(2)}), path)
    with pytest.raises(UnsupportedOperationError, match=r"'n', 'a'.*nested tensor.*leave it out with keys="):
        open_group(path, mode="r+")
    open_group(path, mode="r+", keys="b")["b"].zero_()
    assert load(path)["b"].sum() == 0
    assert open_group(path)["n", "a"].is_nested


def test_open_keys_selects_and_names_missing_key(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    assert list(open_group(path, keys=["n", "a"]).keys()) == ["n", "a"]
    assert list(open_group(path, keys=("n", "b"))["n"].keys()) == ["b"]
    for call in (load, open_group):
        with pytest.raises(KeyPathError, match=r"data.zarr: the save has no .*'x'"):
            call(path, keys=["a", "x"])


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_methods_save_and_open(options: Any, path: Path, td: TensorDict) -> None:
    opened = td.to_zarr(path, **options)
    assert type(opened) is ZarrTensorDict
    opened["a"][1] = 0.0
    assert load(path)["a"][1].sum() == 0
    for found in (TensorDict.from_zarr(path), td.from_zarr(path, mode="r")):
        assert type(found) is ZarrTensorDict
        assert isinstance(found["a"], StoredTensor)
        with pytest.raises(LockedError):
            found["a"].zero_()
        with pytest.raises(LockedError):
            found["x"] = torch.zeros(4)
        found.close()
        assert found.batch_size == (4,)
    assert TensorDict.from_zarr(path, batch_size=[]).batch_size == ()
    assert TensorDict.from_zarr(path, auto_batch_size=True, batch_dims=1).batch_size == (4,)
    assert TensorDict.from_zarr(path, mode="c").is_locked is False
    with pytest.raises(ValueError, match="td-zarr never pickles values"):
        td.to_zarr(path, allow_pickle=True)
    zipped = td.to_zarr(path.with_suffix(".zip"))
    assert (zipped.clone() == td).all()


def test_class_with_declared_entries_is_returned(path: Path) -> None:
    tensorclass = pytest.importorskip("td_tensorclass").tensorclass

    @tensorclass
    class Point:
        x: torch.Tensor
        label: str

    point = Point(x=torch.arange(3.0), label="p", batch_size=[3])
    opened = point.to_zarr(path, chunks=1)
    assert type(opened) is Point
    for found in (load(path), open_group(path), Point.from_zarr(path), TensorDict.from_zarr(path)):
        assert type(found) is Point
        assert (found.x.tolist(), found.label, found.batch_size) == ([0, 1, 2], "p", (3,))
    TensorDict({"y": torch.ones(2)}).to_zarr(path)
    with pytest.raises((StructureError, TypeError)):
        Point.from_zarr(path)


def test_class_that_is_not_defined_needs_strict_false(path: Path) -> None:
    tensorclass = pytest.importorskip("td_tensorclass").tensorclass

    @tensorclass
    class Gone:
        x: torch.Tensor

    save(TensorDict({"g": Gone(x=torch.ones(2), batch_size=[2])}), path)
    text = (path / "zarr.json").read_text().strip()
    (path / "zarr.json").write_text(text.replace("Gone", "Lost"))
    for call in (load, open_group):
        with pytest.raises(
            td_core.TensorDictError,
            match="import the module that defines the class first, or pass strict=False",
        ):
            call(path)
        assert type(call(path, strict=False)["g"]) is TensorDict


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_progress_is_reported_to_the_end(options: Any, path: Path, td: TensorDict) -> None:
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    save(td, path, progress=note, **options)
    assert seen[-1] == (112, 112)
    for call in (load, verify):
        seen.clear()
        call(path, progress=note)
        assert seen[-1] == (112, 112)


def test_save_in_background_returns_future(path: Path, td: TensorDict) -> None:
    assert save(td, path, return_early=True, num_threads=2, durable=True).result() is td
    assert (load(path) == td).all()
    with pytest.raises(FileExistsError):
        save(td, path.parent.parent, return_early=True).result()


def test_load_to_device_and_meta(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    meta = load(path, device="meta")
    assert all(leaf.is_meta for leaf in meta.values(True, True))
    assert load(path, device="meta", rows=slice(2)).batch_size == (2,)
    loaded = load(path, device="cpu")
    assert loaded.device == torch.device("cpu")
    assert (loaded == td).all()
    assert load(path, device="cpu", rows=[1]).device == torch.device("cpu")


def test_load_into_leaves_writes_them(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=3)
    target = td.clone().zero_()
    leaf = target["n", "b"]
    assert target.load_(path, format="zarr") is target
    assert target["n", "b"] is leaf
    assert (target == td).all()


def test_loaded_leaves_are_private(path: Path, td: TensorDict) -> None:
    td = TensorDict({"a": torch.zeros(100, 100), "b": torch.zeros(3)})
    save(td, path)
    load(path).apply_(lambda leaf: leaf.add_(1))
    assert load(path)["a"].sum() == load(path)["b"].sum() == 0


@pytest.mark.parametrize("name", ["safetensors", "memmap"])
def test_convert_between_formats_keeps_everything(name: str, tmp_path: Path, td: TensorDict) -> None:
    if not any(record.id == name for record in td_core.plugins()):
        pytest.skip(f"td-{name} is not installed")
    td_core.save(td, tmp_path / f"x.{name}", format=name)
    save(td_core.open(tmp_path / f"x.{name}"), tmp_path / "x.zarr", chunks=2)
    td_core.save(open_group(tmp_path / "x.zarr"), tmp_path / f"y.{name}", format=name)
    assert (td_core.load(tmp_path / f"y.{name}") == td).all()


def test_save_opened_group_over_itself_keeps_it(path: Path, td: TensorDict) -> None:
    for options in CHUNKS:
        save(td, path, **options)
        save(open_group(path), path, **options)
        assert (load(path) == td).all()
