"""Files with wrong JSON in any format: loading raises an error that names the file and the key."""

from __future__ import annotations

import ast
import copy
import json
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import td_core
from td_core import TensorDict, lazy_stack
from td_core.errors import FormatError, MissingPluginError

td_memmap: Any = pytest.importorskip("td_memmap")
td_distributed: Any = pytest.importorskip("td_distributed")
td_tensorclass: Any = pytest.importorskip("td_tensorclass")
_wire: Any = pytest.importorskip("td_distributed._wire")
from_buffer = td_distributed.from_buffer
storage_of = td_distributed.storage_of
MetaData = td_tensorclass.MetaData
NonTensorData = td_tensorclass.NonTensorData
NonTensorStack = td_tensorclass.NonTensorStack
TensorClass = td_tensorclass.TensorClass
UnbatchedTensor = td_tensorclass.UnbatchedTensor


class Record(TensorClass):
    """A tensorclass with a tensor and a value."""

    x: Tensor
    s: str = "a"


SOURCES: dict[str, Callable[[], Any]] = {
    "plain": lambda: TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(2)}, "s": "x"}),
    "class": lambda: Record(x=torch.ones(2), batch_size=[2]),
    "stack": lambda: lazy_stack([TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(2)})]),
    "general": lambda: TensorDict(
        {
            "s": NonTensorStack("a", "b"),
            "shape": torch.ones(2),
            "u": UnbatchedTensor(torch.ones(3)),
            "t": NonTensorData((1, 2)),
            "cls": {"a": torch.ones(2)},
        },
        batch_size=[2],
    ),
    "jagged": lambda: TensorDict(
        {"j": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)}
    ),
}
WRONG = [None, True, "x", [], [1], {}, -1, 1.5, float("nan"), 10**30]
NO_VERSION = [None, True, False, "1", [], [1], {}, 1.5, float("nan"), -1]


def iter_paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in pairs:
        yield from iter_paths(value, (*path, key))


def change(content: Any, path: tuple[Any, ...], value: Any = ...) -> Any:
    """Return a copy of JSON content with the value at a path replaced, or removed if no value is passed."""
    if not path:
        return value
    root = place = copy.deepcopy(content)
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return root


def iter_changes(content: Any) -> Iterator[Any]:
    for path in iter_paths(content):
        for value in WRONG:
            yield change(content, path, value)
        if path:
            yield change(content, path)


def assert_usable_or_error(load: Callable[[], Any], place: Path) -> None:
    """Fail unless ``load`` returns a usable collection or raises an error that names the file."""
    try:
        loaded = load()
    except MissingPluginError:
        return
    except FormatError as error:
        assert str(place) in str(error)
        return
    repr(loaded)


def split_file(path: Path) -> tuple[bytes, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[-8:], "little")
    return content[: -8 - length], content[-8 - length : -8]


def write_file(path: Path, storage: bytes, structure: Any) -> None:
    text = structure if isinstance(structure, bytes) else json.dumps(structure).encode()
    text += b" " * (-(len(storage) + len(text) + 8) % 16)
    path.write_bytes(storage + text + len(text).to_bytes(8, "little"))


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_load_any_changed_metadata_error_names_file(make: Any, tmp_path: Path) -> None:
    make().memmap(path := tmp_path / "save")
    for meta in [each for each in path.rglob("*.json") if each.name != "%manifest.json"]:
        text = meta.read_text()
        for content in iter_changes(json.loads(text)):
            meta.write_text(json.dumps(content))
            assert_usable_or_error(lambda: TensorDict.load_memmap(path), path)
        meta.write_text(text)


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_load_any_changed_structure_error_names_file(make: Any, tmp_path: Path) -> None:
    make().consolidate(path := tmp_path / "file")
    storage, structure = split_file(path)
    for content in iter_changes(json.loads(structure)):
        write_file(path, storage, content)
        assert_usable_or_error(lambda: TensorDict.from_consolidated(path), path)


def write_directory(data: Any, path: Path, file: str, content: bytes) -> Path:
    data.memmap(path)
    (path / file).write_bytes(content)
    return path


def write_archive(data: Any, path: Path, file: str, content: bytes) -> Path:
    write_directory(data, path.with_name("files"), file, content)
    with zipfile.ZipFile(path, "w") as packed:
        for each in path.with_name("files").rglob("*"):
            packed.write(each, each.relative_to(path.with_name("files")))
    return path


def read_metadata(data: Any, path: Path, file: str) -> Any:
    data.memmap(path.with_name("template"))
    return json.loads((path.with_name("template") / file).read_text())


NODES = [("plain", "meta.json"), ("plain", "n/meta.json"), ("stack", "meta.json"), ("stack", "0/meta.json")]
NODES += [("general", "meta.json"), ("class", "_tensordict/meta.json"), ("general", "s/meta.json")]


@pytest.mark.parametrize("write", [write_directory, write_archive])
@pytest.mark.parametrize("version", NO_VERSION, ids=repr)
@pytest.mark.parametrize(("source", "file"), NODES)
def test_load_version_not_a_number_raises(
    source: str, file: str, version: Any, write: Any, tmp_path: Path
) -> None:
    data, path = SOURCES[source](), tmp_path / "save"
    content = {**read_metadata(data, path, file), "_format_version": version}
    place = write(data, path, file, json.dumps(content).encode())
    with pytest.raises(FormatError, match=f"save/{file}: .*(_format_version is|the entry is)"):
        TensorDict.load_memmap(place)


@pytest.mark.parametrize("version", [None, True, "1", [], 1.5, 2], ids=repr)
def test_verify_manifest_of_other_version_raises(version: Any, tmp_path: Path) -> None:
    TensorDict({"a": 1}).memmap(path := tmp_path / "save")
    manifest = json.loads((path / "%manifest.json").read_text())
    (path / "%manifest.json").write_text(json.dumps({**manifest, "format": version}))
    with pytest.raises(FormatError, match="%manifest.json: format is .*, expected 1"):
        td_memmap.verify(path)


@pytest.mark.parametrize("write", [write_directory, write_archive])
@pytest.mark.parametrize("entry", [None, [], [1], "x", 3, True], ids=repr)
@pytest.mark.parametrize(
    ("source", "file", "key"),
    [
        ("plain", "meta.json", "a"),
        ("plain", "n/meta.json", "b"),
        ("class", "_tensordict/meta.json", "x"),
        ("stack", "1/meta.json", "a"),
    ],
)
def test_load_entry_not_an_object_raises(
    source: str, file: str, key: str, entry: Any, write: Any, tmp_path: Path
) -> None:
    data, path = SOURCES[source](), tmp_path / "save"
    content = {**read_metadata(data, path, file), key: entry}
    place = write(data, path, file, json.dumps(content).encode())
    with pytest.raises(FormatError, match=f"save/{file}: key .*{key}'.*: the entry is .*, expected a leaf"):
        TensorDict.load_memmap(place)


@pytest.mark.parametrize("write", [write_directory, write_archive])
@pytest.mark.parametrize("value", [NonTensorData("x"), MetaData("x"), NonTensorData((1, 2))], ids=repr)
def test_load_value_without_data_raises(value: Any, write: Any, tmp_path: Path) -> None:
    data, path = TensorDict({"s": value}), tmp_path / "save"
    content = read_metadata(data, path, "s/meta.json")
    del content["data"]
    place = write(data, path, "s/meta.json", json.dumps(content).encode())
    with pytest.raises(
        FormatError, match="save/s/meta.json: key 's' cannot be put together: a .* has no data"
    ):
        TensorDict.load_memmap(place)


@pytest.mark.parametrize("flatten", [False, True])
def test_load_state_dict_value_without_data_raises(flatten: bool) -> None:
    data = TensorDict({"s": NonTensorData("x"), "a": torch.ones(2)})
    state = data.state_dict(flatten=flatten)
    metadata = state._metadata["s"] if flatten else state["s"]._metadata[""]
    metadata["_non_tensor"] = OrderedDict({"_is_non_tensor": True})
    with pytest.raises(FormatError, match="a NonTensorData has no data"):
        data.load_state_dict(state)
    assert data["s"] == "x"


DUPLICATES = {
    "leaf": (b'"a": [', b'"a": ["torch.int64", [3], 0, 24, 0], "a": ['),
    "level": (b'"n": {', b'"n": {}, "n": {'),
    "leaves": (b'"leaves": {', b'"leaves": {}, "leaves": {'),
    "class": (b'"cls": ', b'"cls": "TensorDict", "cls": '),
}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize(("old", "new"), DUPLICATES.values(), ids=DUPLICATES.keys())
def test_from_consolidated_duplicate_key_raises(old: bytes, new: bytes, memory: bool, tmp_path: Path) -> None:
    SOURCES["plain"]().consolidate(path := tmp_path / "file")
    storage, structure = split_file(path)
    assert old in structure
    # Without the check of white space at its end, as other programs write it.
    write_file(path, storage, structure.rstrip().replace(old, new, 1))
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    with pytest.raises(FormatError, match="duplicate key '.*'"):
        from_buffer(content) if memory else TensorDict.from_consolidated(path)


@pytest.mark.parametrize("name", ["nodes", "leaves", "values", "together"])
def test_parse_message_duplicate_header_key_raises(name: str) -> None:
    header = _wire.make_message(SOURCES["plain"](), True)[0].header
    old = f'"{name}":'.encode()
    assert old in header
    with pytest.raises(FormatError, match=f"the header of a message is damaged: .*duplicate key '{name}'"):
        _wire.parse_message(header.replace(old, old + b"[]," + old, 1))


def test_parse_message_overlapping_leaves_raises() -> None:
    header = json.loads(_wire.make_message(SOURCES["plain"](), True)[0].header)
    starts = header["leaves"][3]
    starts[1] = starts[0] + 8
    with pytest.raises(FormatError, match="the header of a message is damaged: leaves overlap: bytes"):
        _wire.parse_message(json.dumps(header).encode())


OVERLAPS = {
    "shifted": ["torch.int64", [2], 8, 24, 0],
    "inside": ["torch.int64", [1], 8, 16, 0],
    "other dtype": ["torch.float64", [3], 0, 24, 0],
    "other shape": ["torch.int64", [3, 1], 0, 24, 0],
    "other size": ["torch.int32", [6], 0, 24, 0],
}


@pytest.mark.parametrize("entry", OVERLAPS.values(), ids=OVERLAPS.keys())
@pytest.mark.parametrize("level", [False, True])
def test_from_consolidated_overlapping_leaves_raises(entry: Any, level: bool, tmp_path: Path) -> None:
    SOURCES["plain"]().consolidate(path := tmp_path / "file")
    storage, text = split_file(path)
    structure = json.loads(text)
    (structure["n"] if level else structure)["leaves"]["z"] = entry
    write_file(path, storage, structure)
    with pytest.raises(FormatError, match="file is damaged: leaves overlap: bytes"):
        TensorDict.from_consolidated(path)


def test_from_consolidated_jagged_and_plain_leaf_same_key_raises(tmp_path: Path) -> None:
    SOURCES["jagged"]().consolidate(path := tmp_path / "file")
    storage, text = split_file(path)
    for key in ("j", "<NJT>j"):
        structure = json.loads(text)
        structure["leaves"][key] = ["torch.int64", [0], 0, 0, 0]
        write_file(path, storage, structure)
        with pytest.raises(FormatError, match="duplicate key 'j'"):
            TensorDict.from_consolidated(path)


def test_consolidated_tied_leaves_stay_tied(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    TensorDict({"a": weight, "n": {"b": weight}}).consolidate(tmp_path / "file")
    loaded = TensorDict.from_consolidated(tmp_path / "file")
    assert loaded["a"].data_ptr() == loaded["n", "b"].data_ptr() and loaded["a"].tolist() == [0, 1, 2]


def test_consolidate_view_of_leaf_builds_new_storage() -> None:
    one = TensorDict({"a": torch.arange(4)}).consolidate()
    other = one.clone(False).unlock_()
    other["b"] = other["a"].view(2, 2)
    storage = storage_of(other.consolidate(metadata=True))
    loaded = from_buffer(storage)
    assert loaded["b"].tolist() == [[0, 1], [2, 3]] and loaded["a"].tolist() == [0, 1, 2, 3]


def write_twice(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of the header of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(old, new, 1)
    assert header != content[8:end]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def repeat_in_h5(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "r+") as file:
        text = bytes(file.attrs["td.0"]).replace(b'"nodes":', b'"nodes":[],"nodes":', 1)
        file.attrs["td.0"], file.attrs["td.crc"] = np.bytes_(text), np.bytes_(b"%08x" % zlib.crc32(text))


def repeat_in_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


#: The format of a save, its options, and how an object of its JSON gets a key twice.
REPEATED: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
    "rows": ("safetensors", {}, lambda path: write_twice(path, b'"a":{', b'"a":{},"a":{')),
    "td header": ("safetensors", {}, lambda path: write_twice(path, b'\\"nodes\\":', b'\\"nodes\\":[],\\"nodes\\":')),
    "index": (
        "safetensors", {"max_shard_size": 10},
        lambda path: repeat_in_text(path / "model.safetensors.index.json", '"a":', '"a": "x", "a":'),
    ),
    "attributes": ("hdf5", {}, repeat_in_h5),
    "group": ("zarr", {}, lambda path: repeat_in_text(path / "zarr.json", '"attributes":', '"attributes": {}, "attributes":')),
    "meta.json": ("memmap", {}, lambda path: repeat_in_text(path / "meta.json", '"a":', '"a": 1, "a":')),
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "repeat"), REPEATED.values(), ids=REPEATED)
def test_load_repeated_key_raises(name: str, options: Any, repeat: Any, tmp_path: Path) -> None:
    pytest.importorskip(f"td_{name}")
    td_core.save(TensorDict({"a": torch.arange(3)}), tmp_path / "save", format=name, **options)
    repeat(tmp_path / "save")
    for read in (td_core.load, td_core.open, td_core.inspect):
        with pytest.raises(FormatError, match=r"save.*(duplicate key|damaged)"):
            read(tmp_path / "save", format=name)


@pytest.mark.once
def calls_json(source: str) -> bool:
    """Return True if a file calls json.load or json.loads; their names in a message do not count."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(ast.unparse(call) in ("json.load", "json.loads") for call in calls)


def test_json_of_files_is_parsed_in_one_place() -> None:
    root = Path(__file__).parents[1]
    found = {
        path.name
        for path in root.glob("packages/*/src/*/**/*.py")
        if "testing" not in path.parts and calls_json(path.read_text(encoding="utf-8"))
    }
    assert found <= {"_write_save.py", "_array_documents.py", "value_codec.py"}, (
        "use parse_json, which refuses repeated keys"
    )
