"""Consolidated files of every tensordict release, read and compared with the expected content."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core.errors import FormatError

FIXTURES = Path(__file__).parent / "fixtures"
HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None
NAMES = sorted(path.name.removesuffix(".expected.json") for path in FIXTURES.glob("*.expected.json"))


def load_expected(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.expected.json").read_text())


def has_tensorclass_entries(tree: Any) -> bool:
    if isinstance(tree, list):
        return any(map(has_tensorclass_entries, tree))
    if not isinstance(tree, dict):
        return False
    return tree.get("kind") in ("tensorclass", "non_tensor", "non_tensor_stack") or any(
        map(has_tensorclass_entries, tree.values())
    )


@pytest.mark.parametrize("name", NAMES)
def test_from_consolidated_tensordict_file_returns_content(name: str, request: pytest.FixtureRequest) -> None:
    tree = load_expected(name)["tree"]
    if has_tensorclass_entries(tree):
        request.getfixturevalue("fixture_classes")
    assert_matches(TensorDict.from_consolidated(FIXTURES / f"{name}.bin"), tree, name)


def test_from_consolidated_locked_file_is_locked() -> None:
    locked = TensorDict.from_consolidated(FIXTURES / "device_locked.bin")
    assert locked.is_locked
    assert locked.is_consolidated()
    assert locked.device == torch.device("cpu")
    assert not TensorDict.from_consolidated(FIXTURES / "plain.bin").is_locked


def test_from_consolidated_node_named_size_is_read(tmp_path: Path) -> None:
    """tensordict skips a node named ``size``, and its files contain keys that sending added to the structure."""
    meta = {"device": None, "names": [], "batch_size": [], "is_locked": False}
    level = {"cls": "TensorDict", "non_tensors": {}, "cls_metadata": meta}
    below = {**level, "leaves": {"q": ["torch.int64", [2], 0, 16, 0]}}
    sent = {"_total_bytes": 16, "_storage_device": "cpu"}
    text = json.dumps(
        {**level, "leaves": {}, "size": below, "n": {**level, "leaves": {}, "size": below}, **sent}
    )
    data = torch.tensor([5, 6]).numpy().tobytes() + text.encode() + len(text).to_bytes(8, "little")
    (tmp_path / "td").write_bytes(data)
    found = TensorDict.from_consolidated(tmp_path / "td")
    assert found["size", "q"].tolist() == found["n", "size", "q"].tolist() == [5, 6]
    assert list(found.keys()) == ["size", "n"]


@pytest.mark.parametrize("name", ["Once", "nce", "Twice", None])
def test_from_consolidated_unqualified_class_name_is_found(
    name: Any, fixture_classes: Any, tmp_path: Path
) -> None:
    """tensordict 0.5 and 0.6 wrote the names of tensorclasses without their module."""
    from td_tensorclass import tensorclass

    # Classes with the fields of the one in the file, but other names: other tests define classes with that name.
    fields = {"__annotations__": {"x": Tensor, "y": Any, "tag": str}, "y": None, "tag": "none"}
    classes = [
        tensorclass(type(name, (), {**fields, "__module__": module}))
        for name, module in [("Once", "one"), ("Twice", "one"), ("Twice", "two")]
    ]
    data = (FIXTURES / "tensorclass_in_td.bin").read_bytes()
    start = -8 - int.from_bytes(data[-8:], "little")
    point = json.dumps("<class 'fixture_classes.Point'>").encode()
    text = data[start:-8].replace(point, json.dumps(name).encode())
    (tmp_path / "td").write_bytes(data[:start] + text + len(text).to_bytes(8, "little"))
    if name == "Once":
        found = TensorDict.from_consolidated(tmp_path / "td")
        assert type(found.get("t")) is classes[0]
        plain = TensorDict.from_consolidated(FIXTURES / "tensorclass_in_td.bin")
        assert torch.equal(found["t"].x, plain["t"].x) and found["t"].tag == plain["t"].tag
        return
    with pytest.raises(FormatError, match=f"is of the class {name!r}, which no installed package provides"):
        TensorDict.from_consolidated(tmp_path / "td")


def test_from_consolidated_missing_package_raises_naming_it() -> None:
    if HAS_TENSORCLASS:
        pytest.skip("td-tensorclass is installed")
    with pytest.raises(ValueError, match="pip install ./packages/td-tensorclass"):
        TensorDict.from_consolidated(FIXTURES / "non_tensor.bin")


def assert_matches(found: Any, tree: dict[str, Any], where: str) -> None:
    kind = tree["kind"]
    if kind == "tensor":
        assert list(found.shape) == tree["shape"], where
        assert str(found.dtype) == f"torch.{tree['dtype']}", where
        assert compute_digest(found) == tree["sha256"], where
    elif kind == "nested_tensor":
        assert [list(part.shape) for part in found.unbind()] == [
            part["shape"] for part in tree["components"]
        ], where
        assert [compute_digest(part) for part in found.unbind()] == [
            part["sha256"] for part in tree["components"]
        ], where
        assert found._ragged_idx == tree["ragged_idx"], where
    elif kind == "none":
        assert found is None, where
    elif kind == "non_tensor":
        assert_value_matches(getattr(found, "data", found), tree["value"], where)
    elif kind == "non_tensor_stack":
        assert list(found.batch_size) == tree["batch_size"], where
        assert_value_matches(found.tolist(), tree["value"], where)
    elif kind == "lazy_stack":
        assert found.stack_dim == tree["stack_dim"], where
        for i, (member, below) in enumerate(zip(found.tensordicts, tree["members"], strict=True)):
            assert_matches(member, below, f"{where}/{i}")
    else:
        assert_mapping_matches(found, tree, where)


def assert_mapping_matches(found: Any, tree: dict[str, Any], where: str) -> None:
    assert list(found.batch_size) == tree["batch_size"], where
    assert str(found.device) == str(tree["device"]), where
    if tree["names"] is not None:
        assert list(found.names) == tree["names"], where
    if tree["kind"] == "tensorclass":
        assert type(found).__name__ == tree["class"].rpartition(".")[2], where
    else:
        assert type(found).__name__ == "TensorDict", where
        assert set(found.keys()) == set(tree["entries"]), where
    for key, below in tree["entries"].items():
        value = getattr(found, key) if below["kind"] == "none" else found.get(key)
        assert_matches(value, below, f"{where}/{key}")


def compute_digest(leaf: Tensor) -> str:
    if not leaf.numel():
        return hashlib.sha256(b"").hexdigest()
    plain = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()


def assert_value_matches(found: Any, spec: Any, where: str) -> None:
    if "json" in spec:
        assert found == spec["json"] and type(found) is type(spec["json"]), where
    elif "list" in spec or "tuple" in spec:
        items = spec.get("list", spec.get("tuple"))
        assert isinstance(found, (list, tuple)) and len(found) == len(items), where
        for i, (one, other) in enumerate(zip(found, items, strict=True)):
            assert_value_matches(one, other, f"{where}[{i}]")
    elif "dict" in spec:
        pairs = spec["dict"].items() if isinstance(spec["dict"], dict) else spec["dict"]
        assert len(found) == len(pairs), where
        for key, value in pairs:
            assert_value_matches(
                found[key["json"] if isinstance(key, dict) else key], value, f"{where}[{key!r}]"
            )
    else:
        wanted = float(spec["float"])
        assert found == wanted or (math.isnan(found) and math.isnan(wanted)), where
