"""Damaged files raise FormatError that names file and dataset; inspect and verify describe a save without loading it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from td_core import FormatError, LazyStackedTensorDict, TensorDict, inspect, load, verify
from td_hdf5 import open as open_h5
from td_hdf5 import save


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the header of a file after ``change`` edited it, with its checksum."""
    with h5py.File(path, "r+") as file:
        header = json.loads(file.attrs["td.0"])
        text = json.dumps(change(header) or header).encode()
        file.attrs["td.0"] = np.bytes_(text)
        file.attrs["td.crc"] = np.bytes_(b"%08x" % zlib.crc32(text))


#: Damages of the header: how it is changed, and the message.
HEADERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda header: [1], "the td header has the version"),
    "version": (lambda header: header.update(version=9), "the td header has the version 9; expected 1"),
    "no nodes": (lambda header: header.update(nodes=[]), "has no nodes"),
    "nodes": (lambda header: header.update(nodes=3), "nodes of the td header is not a list"),
    "kind": (lambda header: header["nodes"][0].update(kind=5), "nodes of its header are damaged"),
    "reference": (lambda header: header["nodes"][0].update(entries=[["a", [9]]]), "nodes of its header are damaged"),
    "cycle": (lambda header: header["nodes"][1].update(entries=[["a", 0]]), "nodes of its header are damaged"),
    "batch size": (lambda h: h["nodes"][0]["meta"].update(batch_size=[5]), r"the batch size \[5\] does not fit: key 'a'"),
    "place": (lambda header: header.update(leaves=[None, None, None]), "its place in the header is damaged"),
    "other dataset": (lambda header: header["leaves"].__setitem__(0, "zz"), r"it lacks the datasets \['zz'\]"),
    "no arrays": (lambda header: header.pop("arrays") and None, "the td header is damaged: KeyError"),
    "dtype": (lambda header: header["arrays"]["a"].__setitem__(0, "float31"), "the td header is damaged: KeyError"),
    "lacking dtype": (lambda header: header["arrays"]["a"].__setitem__(0, "bfloat16"), "the dtype of 'a' is 'bfloat16'"),
    "other dtype": (lambda header: header["arrays"]["a"].__setitem__(0, "int32"), "has the dtype torch.float32"),
    "shape": (lambda header: header["arrays"]["a"].__setitem__(1, [-1]), "the shape of 'a' is"),
    "other shape": (lambda header: header["arrays"]["a"].__setitem__(1, [4, 2]), r"its header has .* and \[4, 2\]"),
    "groups": (lambda header: header.update(groups=[]), "it has 0 groups"),
    "group": (lambda header: header.update(groups=["", "m"]), "the td header does not describe the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_header_raises(name: str, path: Path, td: TensorDict) -> None:
    save(td, path)
    change, message = HEADERS[name]
    edit_header(path, change)
    with pytest.raises(FormatError, match=f"data.h5.*{message}"):
        load(path, format="hdf5")
    assert not verify(path).ok


@pytest.mark.parametrize("name", ["td.crc", "td.0", "td.1"])
def test_header_with_a_missing_piece_raises(name: str, path: Path) -> None:
    save(TensorDict({f"key {i}" * 40: torch.tensor(i) for i in range(300)}), path)
    with h5py.File(path, "r+") as file:
        del file.attrs[name]
    if name == "td.0":
        assert len(load(path).keys()) == 300  # a file of another program
        return
    with pytest.raises(FormatError, match="data.h5: the td header is damaged"):
        load(path)


def test_header_that_was_edited_without_checksum_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    with h5py.File(path, "r+") as file:
        file.attrs["td.0"] = np.bytes_(file.attrs["td.0"].replace(b'"batch_size":[4]', b'"batch_size":[2]'))
    with pytest.raises(FormatError, match="the td header is damaged: its checksum differs"):
        load(path)


@pytest.mark.parametrize(
    "content", [b"", b"text", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(1000)], ids=len
)
def test_file_that_is_not_hdf5_raises(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(FormatError, match="data.h5 is not an HDF5 file, or is damaged"):
        load(path, format="hdf5")


def test_directory_raises(path: Path) -> None:
    path.mkdir()
    with pytest.raises(FormatError, match="data.h5 is a directory, not an HDF5 file"):
        load(path, format="hdf5")


def test_missing_dataset_raises_and_names_it(path: Path, td: TensorDict) -> None:
    save(td, path)
    with h5py.File(path, "r+") as file:
        del file["n/b"]
        file["n/other"] = np.arange(4)  # the number of entries is that of the header
    with pytest.raises(FormatError, match="data.h5: the dataset 'n/b' is missing or damaged"):
        load(path)
    with pytest.raises(FormatError, match="the dataset 'n/b' is missing"):
        open_h5(path)["n", "b"].clone()


def test_damaged_chunk_raises_and_names_dataset(path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.arange(1000), "b": torch.zeros(10)})
    save(td, path, chunks=100, fletcher32=True)
    with h5py.File(path) as file:
        place = file["a"].id.get_chunk_info(3).byte_offset
    content = bytearray(path.read_bytes())
    content[place + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="data.h5: the dataset 'a' is damaged: .*(filter|checksum)"):
        load(path)
    with pytest.raises(FormatError, match="data.h5, dataset 'a' is damaged"):
        open_h5(path)["a"][350:360].clone()
    assert open_h5(path)["a"][100:200].sum() == torch.arange(100, 200).sum()
    same(load(path, keys="b"), td.select("b"))
    report = verify(path)
    assert [(problem.file, problem.kind) for problem in report.problems] == [("data.h5: a", "damaged")]
    assert "key 'a'" in report.problems[0].detail


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=["contiguous", "chunks"])
def test_verify_compares_hashes(options: Any, path: Path, td: TensorDict) -> None:
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.full((2,), i)}) for i in range(4)))
    save(td, path, checksums=True, **options)
    report = verify(path)
    assert (report.ok, report.hashed, str(report)) == (True, 4, f"{path}: 1 files, 4 hashes, 0 problems")
    with h5py.File(path, "r+") as file:
        file["s/x"][1] = 9
    (problem,) = verify(path).problems
    assert str(problem).startswith("data.h5: s/x is damaged: the hash of key ('s', 'x') is ")


def test_verify_reports_progress_and_missing_file(path: Path, td: TensorDict) -> None:
    with pytest.raises(FileNotFoundError):
        verify(path, format="hdf5")
    save(td, path)
    seen: list[tuple[int, int]] = []
    assert verify(path, progress=lambda done, total: seen.append((done, total))).ok
    assert seen[-1] == (td.bytes(), td.bytes())


def test_inspect_describes_nodes_leaves_and_storage(path: Path, td: TensorDict) -> None:
    td["h"] = torch.ones(4).bfloat16()
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.full((2,), i)}) for i in range(4)))
    td["j"] = torch.nested.nested_tensor([torch.ones(i) for i in range(4)], layout=torch.jagged)
    save(td, path, chunks=(2, 1), compression="gzip", shuffle=True)
    tree = inspect(path)
    assert str(tree).splitlines()[:4] == [
        "data.h5: TensorDict [4], 248 bytes",
        "    a: leaf [4, 3] torch.float32, 48 bytes",
        "    n: TensorDict [4], 64 bytes",
        "        b: leaf [4] torch.int64, 32 bytes",
    ]
    leaves = {path: leaf for path, leaf in tree.walk() if leaf.dtype}
    assert leaves["a",].place.startswith("/a: chunks [2, 1], shuffle, deflate, ")  # type: ignore[union-attr]
    assert leaves["h",].dtype == "torch.bfloat16"
    assert leaves["s", "1", "x"].shape == [2]
    assert leaves["j",].kind == "nested leaf"
    save(td.select("a"), path)
    (leaf,) = inspect(path).children.values()
    begin, end = map(int, leaf.place.removeprefix("/a: ").split("-"))  # type: ignore[union-attr]
    assert path.read_bytes()[begin:end] == td["a"].numpy().tobytes()
