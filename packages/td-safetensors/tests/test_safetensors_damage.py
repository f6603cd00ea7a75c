"""A damaged or contradictory file raises FormatError with the path and the reason, and never gives wrong data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import FormatError, TensorDict, load
from td_safetensors import save


def edit_td(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return an edit of the header of a file that edits the ``td`` header in it."""

    def edit(header: dict[str, Any]) -> None:
        td = json.loads(header["__metadata__"]["td"])
        header["__metadata__"]["td"] = json.dumps(change(td) or td)

    return edit


def edit_reference(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return an edit of the header of a file that edits the header of tensordict, without the one of td."""

    def edit(header: dict[str, Any]) -> None:
        del header["__metadata__"]["td"]
        reference = json.loads(header["__metadata__"]["tensordict"])
        header["__metadata__"]["tensordict"] = json.dumps(change(reference) or reference)

    return edit


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1, -13])
def test_load_truncated_file_raises_with_sizes(size: int, path: Path, td: TensorDict) -> None:
    save(td, path)
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(FormatError, match=f"{path.name}.*{len(path.read_bytes())} bytes"):
        load(path, format="safetensors")


def test_load_longer_file_raises_with_sizes(path: Path, td: TensorDict) -> None:
    save(td, path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(
        FormatError, match=f"too long: it has {path.stat().st_size} bytes.*{path.stat().st_size - 1}"
    ):
        load(path)


def test_load_flipped_length_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    content = path.read_bytes()
    for position in range(8):
        path.write_bytes(content[:position] + bytes([content[position] ^ 64]) + content[position + 1 :])
        with pytest.raises(FormatError, match=path.name):
            load(path, format="safetensors")


def test_load_flipped_header_raises_or_returns_collection(path: Path, td: TensorDict) -> None:
    save(td, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for position in range(8, 8 + length, 7):
        for bit in (1, 4, 32):
            path.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
            try:
                result = load(path, format="safetensors")
            except FormatError as error:
                assert path.name in str(error)
            else:
                assert isinstance(result, TensorDict)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not an object": (lambda header: [1], "not a JSON object; got list"),
    "unknown dtype": (lambda h: h["a"].update(dtype="F7"), "'a'.*dtype 'F7'"),
    "no dtype": (lambda h: h["a"].__delitem__("dtype"), "row of the tensor 'a' is damaged"),
    "negative shape": (lambda h: h["a"].update(shape=[-4, -3]), "row of the tensor 'a' is damaged"),
    "other shape": (lambda h: h["a"].update(shape=[4, 4]), r"'a'.*\[4, 4\] needs 64 bytes.*48"),
    "offsets": (lambda h: h["a"].update(data_offsets=[1, 49]), "'a' is at 1 to 49"),
    "metadata": (lambda h: h["__metadata__"].update(x=1), "__metadata__.*mapping of strings"),
    "renamed": (lambda h: h.update(z=h.pop("a")), "another program changed names or shapes"),
    "reshaped": (lambda h: h["a"].update(shape=[3, 4]), "another program changed names or shapes"),
    "td not JSON": (lambda h: h["__metadata__"].update(td="{"), "td header is not valid JSON"),
    "td version 2": (
        edit_td(lambda td: td.update(version=2)),
        "version 2; expected 1: upgrade the package of this format",
    ),
    "td list": (edit_td(lambda td: [td]), "td header has the version"),
    "no nodes": (edit_td(lambda td: td.__delitem__("nodes")), "nodes of the td header is not a list"),
    "empty nodes": (edit_td(lambda td: td.update(nodes=[])), "at least one node"),
    "node": (edit_td(lambda td: td.update(nodes=[1])), "nodes of its header are damaged"),
    "meta": (edit_td(lambda td: td["nodes"][0].update(meta=1)), "nodes of its header are damaged"),
    "kind": (edit_td(lambda td: td["nodes"][0].update(kind="x.Y")), "'x.Y'"),
    "batch size": (
        edit_td(lambda td: td["nodes"][0]["meta"].update(batch_size=[5])),
        r"batch size \[5\] does not fit: key 'a' has shape \[4, 3\]",
    ),
    "leaf": (edit_td(lambda td: td["leaves"].__setitem__(0, 7)), "missing|differ|damaged"),
    "select": (edit_td(lambda td: td["leaves"].__setitem__(0, ["a", 0, 9])), "'a'.*its place in the header"),
    "field": (
        edit_td(lambda td: td["leaves"].__setitem__(0, {"tensor": "a", "dtype": "torch.int8"})),
        "'a'.*dtype",
    ),
    "nodes cycle": (edit_td(lambda td: td["nodes"][1]["entries"].append(["n", 0])), "damaged"),
    "values": (edit_td(lambda td: td.update(values=[1])), "values of its header are damaged"),
    "types": (edit_td(lambda td: td.update(values=[[1, "no-such-type"]])), "no-such-type"),
    "both": (
        lambda h: h["__metadata__"].update(tensordict='{"version":1,"root":{}}'),
        "headers td and tensordict differ",
    ),
    "reference version": (edit_reference(lambda r: r.update(version=2)), "version 2; expected 1"),
    "reference not JSON": (
        lambda h: h["__metadata__"].update(tensordict="[") or (h["__metadata__"].pop("td") and None),
        "tensordict header is not valid JSON",
    ),
    "reference unlisted": (
        edit_reference(lambda r: r["root"]["keys"].__delitem__("a")),
        r"not in the header: \['a'\]",
    ),
    "reference missing": (
        edit_reference(lambda r: r["root"]["keys"].update(z={"tensor": "z"})),
        r"missing: \['z'\]",
    ),
    "reference batch size": (
        edit_reference(lambda r: r["root"].update(batch_size=[5])),
        r"batch size \[5\] does not fit: key 'a' has shape \[4, 3\]",
    ),
    "reference entry": (
        edit_reference(lambda r: r["root"]["keys"].update(a={})),
        "damaged at key 'a'.*non_tensor",
    ),
    "reference class": (
        edit_reference(lambda r: r["root"]["keys"]["n"]["td"].update({"class": "<class 'nowhere.Point'>"})),
        r"'n'.*nowhere.Point.*import.*strict=False",
    ),
}


@pytest.mark.parametrize(("change", "message"), HEADERS.values(), ids=HEADERS)
def test_load_damaged_header_raises_with_reason(
    change: Any, message: str, path: Path, td: TensorDict, edit_header: Any
) -> None:
    save(td, path)
    edit_header(path, change)
    with pytest.raises(FormatError, match=message) as caught:
        load(path, format="safetensors")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", ["file", "shard", "index", "single"])
def test_read_pipe_in_place_of_a_file_raises(part: str, path: Path, td: TensorDict) -> None:
    save(td, path, max_shard_size=64)
    place = {
        "file": path.with_name("x.safetensors"), "shard": next(path.glob("*.safetensors")),
        "index": path / "model.safetensors.index.json", "single": path / "model.safetensors",
    }[part]  # fmt: skip
    if part == "single":
        (path / "model.safetensors.index.json").unlink()
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    save_path = place if part == "file" else path
    for read in (load, td_core.open, td_core.inspect):
        with pytest.raises(FormatError, match=f"cannot open .*{place.name}: it is not a regular file"):
            read(save_path, format="safetensors")
    (problem,) = td_core.verify(save_path, format="safetensors").problems
    assert "it is not a regular file" in str(problem)


def test_load_missing_file_raises_file_not_found(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=path.name):
        load(path, format="safetensors")


def test_load_unknown_class_without_strict_returns_tensordict(
    path: Path, td: TensorDict, edit_header: Any, same: Any
) -> None:
    save(td, path)
    edit_header(
        path, edit_reference(lambda r: r["root"]["keys"]["n"]["td"].update({"class": "<class 'nowhere.P'>"}))
    )
    same(load(path, strict=False), td)


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [([0, 2, 9], None), ([0, 3, 2], None), ([-1, 2, 6], None), ([0, 2, 6], [2, 9])],
    ids=["beyond", "backwards", "negative", "length beyond"],
)
def test_load_jagged_leaf_with_wrong_offsets_raises(offsets: list[int], lengths: Any, path: Path) -> None:
    leaf = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 2, 6]), None if lengths is None else torch.tensor([2, 3])
    )
    save(TensorDict({"x": leaf}), path)
    content = path.read_bytes()
    old = torch.tensor([0, 2, 6]).numpy().tobytes()
    assert content.count(old) == 1
    content = content.replace(old, torch.tensor(offsets).numpy().tobytes())
    if lengths is not None:
        content = content.replace(
            torch.tensor([2, 3]).numpy().tobytes(), torch.tensor(lengths).numpy().tobytes()
        )
    path.write_bytes(content)
    with pytest.raises(FormatError, match="'x'.*rows of a jagged tensor lie outside of its"):
        load(path)


@pytest.mark.parametrize("shape", [[1 << 63, 0], [0, 1 << 70], [0, *[1] * 64]])
def test_load_empty_tensor_of_impossible_shape_raises(shape: list[int], path: Path) -> None:
    text = json.dumps({"z": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    for read in (load, td_core.open, td_core.inspect):
        with pytest.raises(FormatError, match=f"{path.name}: the row of the tensor 'z' is damaged"):
            read(path)
