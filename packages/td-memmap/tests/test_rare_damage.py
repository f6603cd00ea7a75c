"""Damage in what few saves have: ragged leaves, levels in the general form, views, manifests, old releases, archives."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.errors import FormatError
from td_memmap import PickleRefusedError, pack_memmap, verify

Edit = Callable[[dict[str, Any]], Any]
LEAF = {"device": "cpu", "shape": [2], "dtype": "torch.int8", "is_nested": False, "file": "a"}


def edit(path: Path, change: Edit) -> None:
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def refused(place: Path, message: str, **options: Any) -> None:
    with pytest.raises(FormatError, match=message) as found:
        TensorDict.load_memmap(place, **options)
    assert str(place) in str(found.value)


def ragged(layout: torch.layout) -> TensorDict:
    parts = [torch.ones(2, 2), torch.ones(1, 2)]
    return TensorDict({"j": torch.nested.nested_tensor(parts, layout=layout), "a": torch.ones(2)}, [2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"components": -1}, "key 'j': components is -1, expected a number"),
        ({"components": "2"}, "key 'j': components is '2', expected a number"),
        ({"components": 1 << 60}, "key 'j': components is 1152921504606846976, expected a number"),
        ({"components": 7}, "offsets.memmap: key 'j': the size is 24, expected at least 64 bytes"),
        ({"ragged": True}, "key 'j': ragged is True, expected a number"),
        ({"ragged": 9}, "key 'j'|offsets"),
        (
            {"offsets_dtype": "torch.float32"},
            "key 'j': offsets_dtype is 'torch.float32', expected an integer dtype",
        ),
        ({"offsets_dtype": ["x"]}, r"key 'j': offsets_dtype is \['x'\], expected an integer dtype"),
        ({"lengths": 1}, "key 'j': lengths is 1, expected true or false"),
        ({"lengths": True}, "the file of key 'j' is missing: none of .*lengths.memmap"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_leaves(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    ragged(torch.jagged).memmap(tmp_path / "save")
    edit(tmp_path / "save" / "meta.json", lambda meta: dict(meta["entries"])["j"].update(fields))
    refused(tmp_path / "save", message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([2, 2, -1, 2], r"key 'j': the shape of a component is \[-1, 2\], expected a list of sizes"),
        (
            [2, 2, 1 << 61, 2],
            "key 'j': the shape of a component is .*, expected a shape that a tensor can have",
        ),
        ([2, 2, 1], "key 'j': the size is 24, expected at least 32 bytes"),
        ([2, 2, 9, 2], "j.memmap: key 'j': the size is 24, expected at least 88 bytes"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tables_of_component_shapes(table: list[int], message: str, tmp_path: Path) -> None:
    ragged(torch.strided).memmap(tmp_path / "save")
    (tmp_path / "save" / "j.shape.memmap").write_bytes(torch.tensor(table).numpy().tobytes())
    refused(tmp_path / "save", message)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_components_are_as_many_as_the_batch_size_says(tmp_path: Path) -> None:
    ragged(torch.strided).memmap(tmp_path / "save")
    edit(tmp_path / "save" / "meta.json", lambda meta: meta["j"].update(shape=[3, 2]))
    refused(
        tmp_path / "save",
        r"key 'j': shape is \[3, 2\], expected as many components as the batch size \[2\] says",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entries": [["a", LEAF], ["a", LEAF]]}, "the key is 'a', expected each key once"),
        (
            {"entries": [["a", LEAF], ["a", {"type": "x", "file": "n"}]]},
            "the key is 'a', expected each key once",
        ),
        ({"values": [3]}, r"values is \[3\], expected an object of values"),
        ({"values": {"v": 3}}, "values is {'v': 3}, expected an object of values"),
        ({"values": {"v": {}}}, "v is {}, expected a value"),
        ({"values": {"v": {"plain": 3}}}, "cannot be put together: .*no members and no values"),
        ({"values": {"v": {"pickled": True}}}, "other.pickle is missing"),
        ({"class": "x:Y"}, "class is 'x:Y', expected a subclass of TensorDict that this process has defined"),
    ],
)
def test_the_general_form(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    TensorDict({"a": torch.ones(2, dtype=torch.int8)}).memmap(save)
    level = {"_format_version": 2, "kind": "TensorDict", "meta": {"batch_size": []}, "entries": [["a", LEAF]]}
    (save / "meta.json").write_text(json.dumps(level))
    assert TensorDict.load_memmap(save)["a"].tolist() == [1, 1]
    (save / "meta.json").write_text(json.dumps({**level, **fields}))
    refused(save, message, allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no pickle", "other.pickle cannot be unpickled"),
        (b"", "other.pickle cannot be unpickled"),
        (pickle.dumps([1]), r"v is \[1\], expected a value in other.pickle"),
        (pickle.dumps({"w": 1}), "v is {'w': 1}, expected a value in other.pickle"),
    ],
)
def test_pickles_of_the_general_form(content: bytes, message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    TensorDict().memmap(save)
    level = {"_format_version": 2, "kind": "TensorDict", "meta": {"batch_size": []}}
    (save / "meta.json").write_text(json.dumps({**level, "values": {"v": {"pickled": True}}}))
    (save / "other.pickle").write_bytes(content)
    refused(save, message, allow_pickle=True)
    with pytest.raises(PickleRefusedError, match="pass allow_pickle=True if you trust the save"):
        TensorDict.load_memmap(save)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": 3}, "files is 3, expected the size of every file"),
        ({"hashes": [1]}, r"hashes is \[1\], expected the hash of every file"),
        ({"algorithm": "rot13"}, "its hashes are 'rot13', which needs: pip install"),
        ({"files": {"a.memmap": 8}}, "the row of 'a.memmap' is 8, expected size and time"),
        (
            {"files": {"a.memmap": [8.0, None]}},
            r"the row of 'a.memmap' is \[8.0, None\], expected size and time",
        ),
        ({"files": {"a.memmap": [8]}}, r"the row of 'a.memmap' is \[8\], expected size and time"),
    ],
)
def test_manifests(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    TensorDict({"a": torch.ones(2)}).memmap(save, checksums=True)
    edit(save / "%manifest.json", lambda manifest: manifest.update(change))
    with pytest.raises(FormatError, match=f"%manifest.json: {message}"):
        verify(save)
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(save, verify=True)


def as_old(save: Path, **leaf: Any) -> None:
    """Write what releases up to 0.2 wrote: a file with the shape and dtype of each leaf beside it."""
    save.mkdir()
    torch.save({"batch_size": torch.Size([2]), "device": None}, save / "meta.pt")
    (save / "a.memmap").write_bytes(bytes(8))
    torch.save({"shape": torch.Size([2]), "dtype": torch.float32, **leaf}, save / "a.meta.pt")


def saved(value: Any) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("meta.pt", b"", "meta.pt is no valid metadata"),
        ("meta.pt", b"PK\x03\x04", "meta.pt is no valid metadata"),
        ("meta.pt", saved([1]), r"meta.pt: the root: the content is \[1\], expected a dict"),
        ("meta.pt", saved({}), "meta.pt cannot be put together"),
        ("meta.pt", saved({"batch_size": "x"}), "meta.pt cannot be put together"),
        (
            "meta.pt",
            saved({"batch_size": torch.Size([3])}),
            r"key 'a': the shape is \[2\], expected one that starts",
        ),
        ("meta.pt", saved({"stack_dim": 0}), "the members is .*, expected 0, 1, 2... and nothing else"),
        ("meta.pt", saved({"stack_dim": "x"}), "the members is .*, expected 0, 1, 2... and nothing else"),
        ("a.meta.pt", saved(None), "a.meta.pt: key 'a': the content is None, expected a dict"),
        (
            "a.meta.pt",
            saved({"shape": (2,), "dtype": "int8"}),
            "dtype is 'int8', expected a dtype that a file can",
        ),
        ("a.meta.pt", saved({"shape": (2,), "dtype": torch.qint8}), "expected a dtype that a file can hold"),
        (
            "a.meta.pt",
            saved({"shape": (-2,), "dtype": torch.int8}),
            r"key 'a': shape is \[-2\], expected a list of",
        ),
        ("a.meta.pt", saved({"shape": (99,), "dtype": torch.int8}), "a.memmap is too short"),
    ],
)
def test_old_releases(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    as_old(save)
    assert TensorDict.load_memmap(save)["a"].tolist() == [0, 0]
    (save / file).write_bytes(content)
    refused(save, message)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (b"PK\x03\x04", 0, "has no header at byte"),
        (b"a.memmap", 0, "is called 'b.memmap' in its own header|called b'b.memmap'"),
    ],
)
def test_archives_that_contradict_themselves(at: bytes, change: int, message: str, tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(200)}).memmap(tmp_path / "save")
    packed = pack_memmap(tmp_path / "save", tmp_path / "save.tdz")
    with zipfile.ZipFile(packed) as file:
        start = file.getinfo("a.memmap").header_offset
    content = bytearray(Path(packed).read_bytes())
    content[content.index(at, start)] += 1
    Path(packed).write_bytes(content)
    refused(Path(packed), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_op": "eval"}, "a saved view cannot be made by 'eval'"),
        ({"custom_op": ["view"]}, "expected a class that this process has defined"),
        ({"custom_op_kwargs": {"out": 1}}, "a saved view cannot be made by 'unsqueeze' with {'out': 1}"),
        ({"custom_op_kwargs": None}, "a saved view cannot be made by 'unsqueeze' with None"),
        ({"custom_op_kwargs": {"dim": "x"}}, "cannot be put together"),
        (None, "_source"),
    ],
)
def test_views_of_old_releases(change: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "lazy_view_unsqueeze", save)
    if change is None:
        shutil.rmtree(save / "_source")
    else:
        edit(save / "meta.json", lambda meta: meta.update(change))
    refused(save, message)
