"""Damaged groups raise FormatError with the location and the array; nothing is lost, or read as zeros, silently."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.errors import FormatError
from td_zarr import load, save, verify
from td_zarr import open as open_group

pytestmark = pytest.mark.usefixtures("engine")

Change = Callable[[dict[str, Any]], Any]


def edit(file: Path, change: Change) -> None:
    """Rewrite a JSON file after ``change`` edited it."""
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def edit_header(change: Change) -> Change:
    """Return a function that edits the td header of a root."""

    def edit_root(root: dict[str, Any]) -> None:
        header = json.loads(root["attributes"]["td"])
        change(header)
        root["attributes"]["td"] = json.dumps(header)

    return edit_root


def edit_array(change: Change) -> Change:
    """Return a function that edits the metadata of the array ``a`` in a root."""
    return lambda root: change(root["consolidated_metadata"]["metadata"]["a"])


#: Changes of the root, and a part of the message of each.
ROOTS: dict[str, tuple[Change, str]] = {
    "node type": (lambda r: r.update(node_type="array"), "is not a Zarr group: its node_type is 'array'"),
    "format": (lambda r: r.update(zarr_format=4), "zarr_format 4"),
    "attributes": (lambda r: r.update(attributes=[1]), "attributes of the group are not an object"),
    "header": (lambda r: r["attributes"].update(td="{"), "the td header is not valid JSON"),
    "header type": (lambda r: r["attributes"].update(td=5), "the td header has the version 5; expected 1"),
    "version": (edit_header(lambda h: h.update(version=2)), "the td header has the version 2; expected 1"),
    "nodes": (edit_header(lambda h: h.update(nodes=3)), "nodes of the td header is not a list"),
    "rows": (edit_header(lambda h: h.update(nodes=[{}])), "the nodes of its header are damaged"),
    "check": (edit_header(lambda h: h.update(check=1)), "the td header does not describe the arrays"),
    "missing array": (edit_header(lambda h: h["leaves"].__setitem__(0, "x")), "the array 'x' is missing"),
    "group": (edit_header(lambda h: h["leaves"].__setitem__(0, "n")), "'n' is not an array"),
    "outside": (
        edit_header(lambda h: h["leaves"].__setitem__(0, "../x")),
        "'../x' is not the name of an array",
    ),
    "backslash": (edit_header(lambda h: h["leaves"].__setitem__(0, "..\\x")), "is not the name of an array"),
    "place": (
        edit_header(lambda h: h["leaves"].__setitem__(0, {"tensor": "a", "dtype": 3})),
        "'a'.*is damaged",
    ),
    "unknown kind": (
        edit_header(lambda h: h["nodes"][0].update(kind="nowhere:Kind")),
        "'nowhere:Kind', which no installed package provides",
    ),
    "batch size": (edit_header(lambda h: h["nodes"][0]["meta"].update(batch_size=[9])), "data.zarr: .*"),
    "shape": (edit_array(lambda a: a.update(shape=[4, 4])), "the td header does not describe the arrays"),
    "negative": (edit_array(lambda a: a.update(shape=[-4, 3])), "the metadata of the array 'a' is damaged"),
    "no shape": (edit_array(lambda a: a.pop("shape")), "the metadata of the array 'a' is damaged"),
    "dtype": (edit_array(lambda a: a.update(data_type="int3")), "the metadata of the array 'a' is damaged"),
    "codec": (edit_array(lambda a: a.update(codecs=[{"name": "nothing"}])), "the array 'a' is damaged"),
    "wider dtype": (edit_array(lambda a: a.update(data_type="float64")), "has 48 bytes; expected 96"),
}


@pytest.mark.parametrize("name", ROOTS)
def test_load_damaged_root_raises(name: str, path: Path, td: TensorDict) -> None:
    change, message = ROOTS[name]
    save(td, path)
    edit(path / "zarr.json", change)
    if name == "codec":  # tensorstore reads the metadata of the array
        (path / "a" / "zarr.json").unlink()
    for call in (load, open_group):
        with pytest.raises((FormatError, td_core.MissingPluginError), match=message) as caught:
            call(path)["a"].clone()
        assert str(path) in str(caught.value)
    assert not verify(path).ok


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000], ids=repr)
def test_load_root_that_is_not_json_raises(content: bytes, path: Path, td: TensorDict) -> None:
    save(td, path)
    (path / "zarr.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"data.zarr: zarr.json is not"):
        load(path)


def test_load_directory_without_metadata_raises(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match="is not a Zarr group, or its save is incomplete: it has no zarr.json"
    ):
        load(tmp_path)


def test_load_file_that_is_not_zip_raises(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_text("text")
    with pytest.raises(FormatError, match="neither a directory nor a zip file"):
        load(tmp_path / "x.zip")


OPTIONS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"chunks": 2},
    "checksums": {"checksums": True},
    "shards": {"chunks": 1, "shards": 2},
}


def list_chunks(path: Path) -> list[Path]:
    """Return the chunks of the array ``a``."""
    return sorted(file for file in (path / "a").rglob("*") if file.is_file() and file.name != "zarr.json")


@pytest.mark.parametrize("zeros", [False, True], ids=["numbers", "zeros"])
@pytest.mark.parametrize("name", OPTIONS)
def test_read_missing_chunk_raises(name: str, zeros: bool, path: Path, td: TensorDict) -> None:
    if zeros:  # an array of zeros has chunks, too
        td.zero_()
    save(td, path, **OPTIONS[name])
    list_chunks(path)[-1].unlink()
    with pytest.raises(FormatError, match=r"data.zarr: .*a/c.*is missing"):
        load(path)
    with pytest.raises(FormatError, match=r"data.zarr: .*a/c.*is missing"):
        open_group(path)["a"].clone()
    with pytest.raises(FormatError, match=r"data.zarr: .*a/c.*is missing"):
        load(path, rows=[3])
    assert load(path, keys="n")["n", "b"].shape == (4,)
    (problem,) = verify(path).problems
    assert (problem.file, problem.kind) == ("a", "missing")


@pytest.mark.parametrize(
    ("name", "cut"),
    # zarr and tensorstore ignore what follows the elements.
    [
        (n, cut)
        for n in OPTIONS
        for cut in ("empty", "short", "long")
        if cut != "long" or n in ("one chunk", "shards")
    ],
)
def test_read_chunk_of_wrong_size_raises(name: str, cut: str, path: Path, td: TensorDict) -> None:
    save(td, path, **OPTIONS[name])
    chunk = list_chunks(path)[0]
    content = chunk.read_bytes()
    chunk.write_bytes({"empty": b"", "short": content[:-1], "long": content + b"\0"}[cut])
    with pytest.raises(FormatError, match=r"data.zarr: the (array|chunk) 'a"):
        load(path)
    (problem,) = verify(path).problems
    assert (problem.file, problem.kind) == ("a", "damaged")


@pytest.mark.parametrize("options", [{"checksums": True}, {"checksums": True, "chunks": 2}], ids=str)
def test_read_changed_chunk_with_checksum_raises(options: Any, path: Path, td: TensorDict) -> None:
    save(td, path, **options)
    chunk = list_chunks(path)[0]
    content = bytearray(chunk.read_bytes())
    content[3] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(FormatError, match=r"data.zarr: the array 'a' is damaged.*(checksum|Digest)"):
        load(path)
    assert not verify(path).ok
    assert load(path, keys="n")["n", "b"].shape == (4,)


@pytest.mark.parametrize("change", ["delete", "truncate", "shape", "codecs"])
def test_verify_compares_metadata_of_arrays_with_root(change: str, path: Path, td: TensorDict) -> None:
    save(td, path)
    file = path / "n" / "b" / "zarr.json"
    if change == "delete":
        file.unlink()
    elif change == "truncate":
        file.write_bytes(file.read_bytes()[:20])
    else:
        edit(file, lambda a: a.update({change: [9]}))
    assert (load(path) == td).all()  # the root has the metadata, too
    (problem,) = verify(path).problems
    assert problem.file == "n/b/zarr.json"


def test_group_without_consolidated_metadata_loads(path: Path, td: TensorDict) -> None:
    save(td, path)
    edit(path / "zarr.json", lambda root: root.pop("consolidated_metadata"))
    assert (load(path) == td).all()
    (path / "a" / "zarr.json").unlink()
    with pytest.raises(FormatError, match="the array 'a' is missing"):
        load(path)


def test_open_group_that_is_replaced_raises(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    opened = {mode: open_group(path, mode=mode) for mode in ("r", "r+", "c")}
    save(td.clone().zero_(), path, chunks=2)
    for collection in opened.values():
        with pytest.raises(FormatError, match="was replaced since it was opened: open it again"):
            collection["a"].clone()
    with pytest.raises(FormatError, match="was replaced"):
        opened["r+"]["a"].zero_()
    assert load(path)["a"].sum() == 0


def test_open_group_that_is_replaced_twice_raises(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    opened = open_group(path)
    for i in range(6):  # a file system gives a new directory the number of one that was removed
        save(td.clone().fill_("a", i), path, chunks=2)
        with pytest.raises(FormatError, match="was replaced since it was opened"):
            opened["a"].clone()


def test_mapped_leaves_keep_elements_of_replaced_group(path: Path, td: TensorDict) -> None:
    save(td, path)
    loaded, opened = load(path), open_group(path)
    save(td.clone().zero_(), path)
    assert torch.equal(loaded["a"], td["a"])
    assert torch.equal(opened["a"], td["a"])
    content = pickle.dumps(opened)
    with pytest.raises(FormatError, match="was replaced"):
        pickle.loads(content)
