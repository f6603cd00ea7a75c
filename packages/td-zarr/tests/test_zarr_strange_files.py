"""Malformed metadata, links and pipes raise FormatError with the path; groups of others are kept; strange keys come back."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import td_core
from td_core import TensorDict
from td_core.errors import FormatError, MissingPluginError
from td_zarr import from_zarr, inspect, load, save, to_zarr, verify
from td_zarr import open as open_group

BAD: list[Any] = [None, True, -1, 1.5, "x", "a\0", "", [], [1], [None], {}, {"a": 1}, 10**30, "../x"]


def list_places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values of a JSON document."""
    yield place
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items if isinstance(document, (dict, list)) else ():
        yield from list_places(value, (*place, key)) if isinstance(value, (dict, list)) else [(*place, key)]


def put(document: Any, place: tuple[Any, ...], value: object) -> Any:
    """Return a document with another value at a path."""
    if not place:
        return value
    result = below = copy.deepcopy(document)
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = value
    return result


def assert_reads_or_names(path: Path) -> None:
    """Check that a group can be read, or is refused by an error that names it."""
    for read in (load, open_group, inspect):
        try:
            read(path)
        except FormatError as error:
            assert str(path) in str(error)
    verify(path)


@pytest.fixture
def strange(request: pytest.FixtureRequest, path: Path) -> Path:
    """Return a group of td, or one of another program of version 2 or 3."""
    if request.param == "td":
        save(TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.zeros(3).bfloat16()}}), path)
    else:
        group = zarr.open_group(path, mode="w", zarr_format=request.param)
        group.create_array("a", data=np.ones((3, 2)))
        nested = group.create_group("n")
        nested.create_array("b", data=np.ones(3))
        if importlib.util.find_spec("td_tensorclass"):
            values = nested.create_array("v", data=np.frombuffer(b"[1,2,3]", "uint8"))
            values.attrs.update(
                {"__tensordict_non_tensor__": {"encoding": "json"}, "__tensordict_stack__": [3]}
            )
        group.attrs["__tensordict__"] = {"batch_size": [3], "version": 1}
    return path


@pytest.mark.once
@pytest.mark.parametrize("strange", ["td", 2, 3], indirect=True)
def test_read_malformed_metadata_raises_format_error(strange: Path) -> None:
    files = [
        file for file in strange.rglob("*") if file.name in ("zarr.json", ".zgroup", ".zattrs", ".zarray")
    ]
    number = 0
    for file in files:
        good = file.read_text()
        document = json.loads(good)
        for place in list_places(document):
            number += 1
            file.write_text(json.dumps(put(document, place, BAD[number * 5 % len(BAD)])))
            assert_reads_or_names(strange)
        file.write_text(good)


@pytest.mark.parametrize("strange", [2, 3], indirect=True)
@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize(
    "place",
    [("n/v", "__tensordict_stack__"), ("n/v", "__tensordict_non_tensor__"), ("", "__tensordict__")],
    ids=str,
)
def test_read_malformed_attribute_of_tensordict_raises_format_error(
    place: tuple[str, str], bad: Any, strange: Path
) -> None:
    pytest.importorskip("td_tensorclass")
    zarr.open(strange / place[0]).attrs[place[1]] = bad
    assert_reads_or_names(strange)


@pytest.mark.parametrize("repeated", ['"zarr_format":3', '"node_type":"group"'])
def test_load_root_that_repeats_key_raises(repeated: str, path: Path, td: TensorDict) -> None:
    save(td, path)
    root = path / "zarr.json"
    root.write_text(f"{{{repeated},{json.dumps(json.loads(root.read_text()))[1:]}")
    with pytest.raises(FormatError, match=r"data.zarr.*key"):
        load(path)


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize("separator", ["/../../../", "..", "", "\0", "x", None, 3])
def test_load_strange_separator_of_chunks_raises(
    separator: Any, options: Any, path: Path, td: TensorDict
) -> None:
    save(td, path, **options)
    root = json.loads((path / "zarr.json").read_text())
    array = root["consolidated_metadata"]["metadata"]["a"]
    array["chunk_key_encoding"]["configuration"]["separator"] = separator
    (path / "zarr.json").write_text(json.dumps(root))
    for read in (load, open_group):
        with pytest.raises(FormatError, match=r"data.zarr: the metadata of the array 'a' is damaged"):
            read(path)


@pytest.mark.parametrize("engine", ["zarr-python", "tensorstore"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"chunks": 1, "shards": 2}], ids=str)
@pytest.mark.parametrize("part", ["chunk", "zarr.json", "n/b", "n"])
def test_read_link_out_of_group_raises(
    part: str, options: Any, engine: str, path: Path, td: TensorDict
) -> None:
    save(td, path, **options)
    place = path / part
    if part == "chunk":
        place = next(f for f in (path / "n" / "b").rglob("*") if f.is_file() and f.name != "zarr.json")
    place.rename(path.parent / "moved")
    place.symlink_to(path.parent / "moved")
    for read in (load, open_group, from_zarr):
        with pytest.raises(FormatError, match="is a link that leads out of the group"):
            read(path)["n", "b"].clone()
    assert not verify(path).ok


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
def test_read_link_within_group_follows(options: Any, path: Path, td: TensorDict) -> None:
    save(td, path, **options)
    (path / "a").rename(path / "moved")
    (path / "a").symlink_to("moved")
    assert (load(path) == td).all()
    assert (open_group(path) == td).all()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no pipes")
@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"chunks": 1, "shards": 2}], ids=str)
@pytest.mark.parametrize("part", ["group", "zarr.json", "chunk"])
def test_read_pipe_raises(part: str, options: Any, path: Path, td: TensorDict) -> None:
    if part == "group":
        os.mkfifo(path)
    else:
        save(td, path, **options)
        place = path / part
        if part == "chunk":
            place = next(f for f in (path / "a").rglob("*") if f.is_file() and f.name != "zarr.json")
        place.unlink()
        os.mkfifo(place)
    for read in (load, open_group, from_zarr):
        with pytest.raises(FormatError, match="is not a regular file"):
            read(path)["a"].clone()
    assert not verify(path).ok


CREATED: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"chunks": 3},
    "tuple": {"chunks": (3, 1)},
    "shards": {"chunks": 1, "shards": 2},
    "codec": {"chunks": 2, "compressors": zarr.codecs.GzipCodec()},
}


@pytest.mark.parametrize("filled", [False, True], ids=["zeros", "filled"])
@pytest.mark.parametrize("name", CREATED)
def test_lost_chunk_of_created_group_is_found(name: str, filled: bool, path: Path) -> None:
    like = TensorDict({"a": torch.zeros(8, 2), "s": torch.zeros(()), "e": torch.zeros(0)}, [])
    created = td_core.create(like, path, format="zarr", **CREATED[name])
    assert (load(path) == like).all()
    if filled:
        created["a"].fill_(5)
    assert verify(path).ok
    next(f for f in (path / "a").rglob("*") if f.is_file() and f.name != "zarr.json").unlink()
    with pytest.raises(FormatError, match=r"data.zarr.*a/c.*is missing"):
        load(path)
    assert not verify(path).ok


@pytest.mark.parametrize("where", ["group", "array in save", "array in level", "file in save", "version 2"])
@pytest.mark.parametrize("store", ["directory", "memory"])
def test_save_over_arrays_of_other_program_raises(where: str, store: str, path: Path, td: TensorDict) -> None:
    location: Any = path if store == "directory" else zarr.storage.MemoryStore()
    if where in ("group", "version 2"):
        other = zarr.open_group(location, mode="w", zarr_format=2 if where == "version 2" else 3)
        other.create_array("temperature", data=np.arange(5.0))
    else:
        save(td, location)
        if where == "file in save":
            if store == "memory":
                pytest.skip("a store has objects")
            (path / "notes.txt").write_text("text")
        else:
            name = "temperature" if where == "array in save" else "n/temperature"
            zarr.open_group(location, mode="r+", use_consolidated=False).create_array(
                name, data=np.arange(5.0)
            )
    for write in (save, to_zarr):
        with pytest.raises(FileExistsError, match="cannot save to"):
            write(td, location)
    if where == "file in save":
        assert (path / "notes.txt").read_text() == "text"
    else:
        name = {"array in level": "n/temperature"}.get(where, "temperature")
        assert zarr.open_group(location, mode="r", use_consolidated=False)[name][...].sum() == 10


KEYS = [
    "meta.json",
    "zarr.json",
    ".zarray",
    ".zgroup",
    "c",
    "a.b",
    "",
    "é",
    " ",
    "a/b",
    "..",
    "__x",
    "%41",
    "packed_float32",
]


@pytest.mark.parametrize("options", [{}, {"chunks": 1}, {"pack": 100}], ids=str)
def test_group_with_strange_keys_opens_in_zarr_with_all_entries(options: Any, path: Path) -> None:
    def make_level() -> dict[str, torch.Tensor]:
        return {key: torch.full((2,), float(i)) for i, key in enumerate(KEYS)}

    branches = {name: {"x": make_level(), "y": make_level()} for name in ("one", "two")}
    data = TensorDict({**make_level(), **branches})
    save(data, path, **options)
    for read in (load, open_group, from_zarr):
        assert (read(path) == data).all()
    if "pack" not in options:
        for group in (
            zarr.open_group(path, mode="r"),
            zarr.open_group(path, use_consolidated=False, mode="r"),
        ):
            arrays = [item for _, item in group.members(max_depth=None) if isinstance(item, zarr.Array)]
            assert sorted(item[0] for item in arrays) == sorted([*map(float, range(len(KEYS)))] * 5)


def test_stores_that_open_themselves_are_opened(tmp_path: Path, td: TensorDict) -> None:
    store = zarr.storage.ZipStore(tmp_path / "x.zip", mode="w")
    opened = td.to_zarr(store)
    assert (opened == td).all()
    opened.close()
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        from_zarr(store)
    store = zarr.storage.ZipStore(tmp_path / "x.zip", mode="r")
    loaded = from_zarr(store)
    assert (loaded == td).all()
    loaded.close()
    store.close()
    store = zarr.storage.ZipStore(tmp_path / "x.zip", mode="a")
    with pytest.raises(FileExistsError, match="cannot remove"):
        save(td, store)
    store.close()


def test_levels_of_other_program_have_shared_batch_dims(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("a", data=np.zeros((5, 2)))
    level = group.create_group("n")
    level.create_array("b", data=np.zeros((5, 3)))
    level.create_array("c", data=np.zeros((5, 3, 4)))
    group.create_group("empty")
    for td in (load(path), open_group(path), from_zarr(path)):
        assert (td.batch_size, td["n"].batch_size, td["empty"].batch_size) == ((5,), (5, 3), (5,))
    assert load(path, rows=[4, 1])["n", "b"].shape == (2, 3)
    assert inspect(path).shape == [5]


@pytest.mark.parametrize("options", [{}, {"chunks": 2, "checksums": True}], ids=str)
def test_read_zip_with_changed_byte_raises_format_error_or_gives_the_data(
    options: Any, tmp_path: Path, td: TensorDict
) -> None:
    path = tmp_path / "data.zarr.zip"
    save(td, path, **options)
    good = path.read_bytes()
    for position in range(0, len(good), 31):
        changed = bytearray(good)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            assert (load(path) == td).all()
        except FormatError as error:
            assert str(path) in str(error)
            assert not verify(path).ok


def test_verify_zip_with_damaged_member_reports_it(tmp_path: Path, td: TensorDict) -> None:
    path = tmp_path / "data.zarr.zip"
    save(td, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"a/zarr.json", b"a/zarr.jsoN", 1))
    assert not verify(path).ok and not td_core.verify(path).ok


def test_read_zip_of_unknown_version_raises_format_error(tmp_path: Path, td: TensorDict) -> None:
    path = tmp_path / "data.zarr.zip"
    save(td, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 6] = 200
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"data.zarr.zip"):
        load(path)
    with pytest.raises(
        (FormatError, MissingPluginError), match=r"no registered format recognises .*data.zarr.zip"
    ):
        td_core.load(path)
