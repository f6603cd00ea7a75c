"""Tables that tensordict, pyarrow and others wrote are read as their ``expected.json`` says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from td_arrow import load
from td_core import TensorDict
from td_core.errors import FormatError

FOLDER = Path(__file__).parent / "fixtures"
FILES = sorted(FOLDER.glob("*/*.expected.json"))
#: The function that reads the files of a folder, if it is not ``load``.
READERS = {
    "csv": TensorDict.from_csv,
    "json": TensorDict.from_json,
    "mds": TensorDict.from_mds,
}
ERRORS = {"FormatError": FormatError, "ValueError": ValueError}
#: Jagged leaves with an inner dim: lists of tensors in these files. tensordict reads them as they were saved, and so does td.
AS_SAVED = {("arrow/jagged", "b"), ("parquet/jagged_parquet", "b")}


def compute_hash(leaf: torch.Tensor) -> str:
    """Return the hash of the bytes of a tensor."""
    content = leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
    return hashlib.sha256(content).hexdigest()


def describe(node: Any) -> dict[str, Any]:
    """Return the tree of a collection."""
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            return {
                "kind": "nested_tensor",
                "dtype": str(node.dtype)[6:],
                "components": [
                    {"shape": list(part.shape), "sha256": compute_hash(part)} for part in node.unbind()
                ],
            }
        dtype = str(node.dtype)[6:]
        return {"kind": "tensor", "shape": list(node.shape), "dtype": dtype, "sha256": compute_hash(node)}
    if type(node).__name__ == "NonTensorStack":
        size = list(node.batch_size)
        return {"kind": "non_tensor_stack", "batch_size": size, "value": describe_value(node.tolist())}
    entries = {key: describe(node._get_child(key)) for key in node.keys()}
    return {"kind": "tensordict", "batch_size": list(node.batch_size), "entries": entries}


def has_tuple(value: Any) -> bool:
    """Return True for a value with a tuple in it."""
    return isinstance(value, tuple) or (isinstance(value, list) and any(map(has_tuple, value)))


def describe_value(value: Any) -> dict[str, Any]:
    """Return a value in the form of the files."""
    try:
        if not has_tuple(value) and json.loads(json.dumps(value, allow_nan=False)) == value:
            return {"json": value}
    except (TypeError, ValueError):
        pass
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [describe_value(item) for item in value]}
    return {"bytes_hex": value.hex()} if isinstance(value, bytes) else {"repr": repr(value)}


def compare(found: dict[str, Any], wanted: dict[str, Any], path: str = "") -> None:
    """Assert that a tree has what another one says, with the same keys in the same order."""
    for name in wanted.keys() & found.keys():
        if name == "entries":
            assert list(found[name]) == list(wanted[name]), path
            for key in wanted[name]:
                compare(found[name][key], wanted[name][key], f"{path}/{key}")
        else:
            assert found[name] == wanted[name], (path, name)


def read(path: Path, options: dict[str, Any]) -> Any:
    """Read a fixture with the function of its folder."""
    kind = path.parent.name
    return READERS[kind](path, **options) if kind in READERS else load(path, format=kind, **options)


@pytest.mark.parametrize(
    "described", FILES, ids=lambda path: f"{path.parent.name}-{path.name.partition('.')[0]}"
)
def test_golden_file_is_read_as_expected(described: Path, reads_null_cells: bool) -> None:
    expected = json.loads(described.read_text())
    path = described.parent / expected["files"][0]["path"].split("/")[0]
    name = f"{path.parent.name}/{path.stem}"
    if name == "parquet/foreign_nulls" and not reads_null_cells:
        pytest.skip("this pyarrow does not read null cells of a fixed size from Parquet")
    if "non_tensor_stack" in json.dumps(expected["read"]):
        pytest.importorskip("td_tensorclass")
    for item in expected["read"]:
        if "raises" in item:
            error = ERRORS[item["raises"]["error"]]
            with pytest.raises(error) as caught:
                read(path, item["options"])
            for key in item["raises"]["names"]:
                assert repr(key[0] if len(key) == 1 else tuple(key)) in str(caught.value)
            continue
        wanted = item["tree"]
        for fixture, key in AS_SAVED:
            if fixture == name:
                wanted["entries"][key] = expected["source"]["entries"][key]
        compare(describe(read(path, item["options"])), wanted)
