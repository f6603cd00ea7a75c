"""Files of every release of tensordict load with the values that were saved."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from td_core import TensorDict
from td_core.errors import FormatError
from td_memmap import inspect, verify

FIXTURES = Path(__file__).parent / "fixtures"
HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None

WITHOUT_TENSORCLASS = {"tensordict", "tensor", "nested_tensor", "lazy_stack", "", "view"}

#: Definitions of the tensorclasses in the files, for the module name that the files refer to.
CLASSES = """
from typing import Any
from torch import Tensor
from td_tensorclass import tensorclass

@tensorclass
class Point:
    x: Tensor
    y: Any = None
    tag: str = "none"

@tensorclass
class Segment:
    start: Point
    end: Point
    weight: Tensor = None
    meta: Any = None
"""

#: Files that tensordict wrote incompletely, with the reason why the saved values cannot be restored.
LOST = {
    "memmap/keys_reserved": "the entries of three keys were overwritten when the file was written",
    "memmap/keys_not_robust_colon": "tensordict itself cannot find two of the files",
    "memmap/non_tensor_stack_lists": "the batch size of a stack of equally long lists is not in the file",
}


def cases() -> list[Any]:
    found = []
    for folder in ("memmap", "archive"):
        for path in sorted((FIXTURES / folder).glob("*.expected.json")):
            found.append(
                (f"{folder}/{path.name.removesuffix('.expected.json')}", json.loads(path.read_text()))
            )
    for path in sorted((FIXTURES / "legacy").glob("*.expected.json")):
        release = path.name.removesuffix(".expected.json")
        for name, spec in json.loads(path.read_text())["fixtures"].items():
            if spec["format"] in ("memmap-dir", "memmap-archive"):
                found.append((f"legacy/{release}/{name}", spec))
    return [pytest.param(name, spec, id=name) for name, spec in found]


def kinds(tree: Any) -> set[str]:
    if isinstance(tree, dict):
        return (
            {tree["kind"]}
            if "kind" in tree and "entries" not in tree and "members" not in tree
            else ({tree.get("kind", "")}.union(*map(kinds, tree.values())))
        )
    return set().union(*map(kinds, tree)) if isinstance(tree, list) else set()


@pytest.fixture
def unpacked(tmp_path: Path) -> Any:
    def unpack(name: str, spec: dict[str, Any]) -> Path:
        folder, *rest = name.split("/")
        if folder == "legacy":
            with zipfile.ZipFile(FIXTURES / "legacy" / f"{rest[0]}.zip") as archive:
                archive.extractall(tmp_path)
            return tmp_path / spec["data"]
        source = FIXTURES / folder / spec["data"]
        if source.is_file():
            return Path(shutil.copy(source, tmp_path))
        return Path(shutil.copytree(source, tmp_path / rest[0]))

    return unpack


@pytest.fixture(scope="module")
def classes() -> None:
    if HAS_TENSORCLASS:
        module = sys.modules["fixture_classes"] = types.ModuleType("fixture_classes")
        exec(CLASSES, vars(module))


@pytest.mark.parametrize(("name", "spec"), cases())
def test_load_tensordict_file_returns_expected_tree(
    name: str, spec: dict[str, Any], unpacked: Any, classes: None
) -> None:
    tree = spec["tree"]
    if not HAS_TENSORCLASS and not kinds(tree) <= WITHOUT_TENSORCLASS:
        pytest.skip("holds non-tensor data, which needs td-tensorclass")
    if name in LOST:
        pytest.skip(LOST[name])
    path = unpacked(name, spec)
    loaded = TensorDict.load_memmap(path, mode="r", allow_pickle="pickle" in name)
    check(loaded, tree, name, name)


@pytest.mark.parametrize("release", ["v0.2.1", "v0.3.2"])
def test_read_metadata_without_child_nodes_finds_them(release: str, unpacked: Any) -> None:
    path = unpacked(f"legacy/{release}/nested", {"data": "nested"})
    assert set(TensorDict.load_memmap(path, subpath="n").keys()) == {"b", "m"}
    with FakeTensorMode():
        assert all(isinstance(leaf, FakeTensor) for leaf in TensorDict.load_memmap(path)._leaves())
    if release == "v0.2.1":
        for read in (inspect, verify):
            with pytest.raises(FormatError, match="was written by a release before 0.3"):
                read(path)
    else:
        assert set(inspect(path).children["n"].children) == {"b", "m"}
        assert verify(path).files == 8


def test_load_files_named_by_raw_keys_finds_leaves(unpacked: Any) -> None:
    path = unpacked("memmap/keys_not_robust_colon", {"data": "keys_not_robust_colon"})
    for robust_key in (None, False):
        loaded = TensorDict.load_memmap(path, mode="r", robust_key=robust_key)
        assert set(loaded.keys(include_nested=True)) == {"x:y", "ok", "c:d", ("c:d", "x")}


def check(found: Any, tree: dict[str, Any], where: str, name: str) -> None:
    kind = tree["kind"]
    if kind == "view":
        return check(found, tree["result"], where, name)
    if kind == "tensor":
        assert list(found.shape) == tree["shape"], where
        assert str(found.dtype) == f"torch.{tree['dtype']}", where
        assert digest(found) == tree["sha256"], where
    elif kind == "nested_tensor":
        assert [list(part.shape) for part in found.unbind()] == [
            part["shape"] for part in tree["components"]
        ], where
        assert [digest(part) for part in found.unbind()] == [part["sha256"] for part in tree["components"]], (
            where
        )
    elif kind == "none":
        assert found is None, where
    elif kind == "non_tensor":
        same_value(getattr(found, "data", found), tree["value"], where, name)
    elif kind == "non_tensor_stack":
        assert list(found.batch_size) == tree["batch_size"], where
        same_value(found.tolist(), tree["value"], where, name)
    elif kind == "lazy_stack":
        assert found.stack_dim == tree["stack_dim"], where
        assert len(found.tensordicts) == len(tree["members"]), where
        for i, (member, expected) in enumerate(zip(found.tensordicts, tree["members"], strict=True)):
            check(member, expected, f"{where}/{i}", name)
    else:
        assert kind in ("tensordict", "tensorclass"), kind
        check_mapping(found, tree, where, name)
    return None


def check_mapping(found: Any, tree: dict[str, Any], where: str, name: str) -> None:
    assert list(found.batch_size) == tree["batch_size"], where
    if tree["names"] is not None:
        assert list(found.names) == tree["names"], where
    if tree["kind"] == "tensorclass" and not is_old(name):
        assert type(found).__name__ == tree["class"].rpartition(".")[2], where
    if "inner" in tree:
        return check(found._tensordict, tree["inner"], where, name)
    entries = tree["entries"]
    if tree["kind"] == "tensorclass" and is_old(name):
        # These releases stored only the tensor fields of a tensorclass, as a plain collection.
        entries = {
            key: value for key, value in entries.items() if value["kind"] not in ("none", "non_tensor")
        }
    if tree["kind"] != "tensorclass":
        assert set(found.keys()) == set(entries), where
    for key, expected in entries.items():
        value = getattr(found, key) if expected["kind"] == "none" else found.get(key)
        check(value, expected, f"{where}/{key}", name)
    return None


def is_old(name: str) -> bool:
    return name.startswith(("legacy/v0.1.", "legacy/v0.2."))


def digest(leaf: Tensor) -> str:
    if not leaf.numel():
        return hashlib.sha256(b"").hexdigest()
    plain = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()


def same_value(found: Any, spec: Any, where: str, name: str) -> None:
    if "json" in spec:
        assert found == spec["json"] and type(found) is type(spec["json"]), where
    elif "list" in spec or "tuple" in spec:
        assert isinstance(found, (list, tuple)), where
        items = spec.get("list", spec.get("tuple"))
        assert len(found) == len(items)
        for i, (one, other) in enumerate(zip(found, items, strict=True)):
            same_value(one, other, f"{where}[{i}]", name)
    elif "dict" in spec:
        pairs = spec["dict"].items() if isinstance(spec["dict"], dict) else spec["dict"]
        assert len(found) == len(pairs), where
        for key, value in pairs:
            key = key["json"] if isinstance(key, dict) and "json" in key else key
            same_value(found[key], value, f"{where}[{key!r}]", name)
    elif "float" in spec:
        wanted = float(spec["float"])
        # Some releases write NaN and infinity as null.
        assert found is None or found == wanted or (math.isnan(found) and math.isnan(wanted)), where
    elif "bytes_hex" in spec:
        assert found == bytes.fromhex(spec["bytes_hex"]), where
    elif "set" in spec:
        assert isinstance(found, (set, frozenset)), where
        assert len(found) == len(spec["set"]), where
    elif "type" in spec:
        assert found.__name__ == spec["type"].rpartition(".")[2], where
    else:
        assert repr(found) == spec["repr"], where
