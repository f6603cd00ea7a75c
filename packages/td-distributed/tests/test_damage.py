"""Damaged and hostile consolidated files: reading always raises FormatError and returns nothing."""

from __future__ import annotations

import errno
import importlib.util
import json
import mmap
import operator
import os
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from td_core import TensorDict
from td_core.errors import FormatError, MissingPluginError
from td_distributed import _wire, from_buffer, from_consolidated, storage_of

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def consolidate_to_bytes(tree: Any) -> bytes:
    """Return the bytes of a consolidated file."""
    return bytes(storage_of(tree.consolidate(metadata=True)).numpy())


def split_file(data: bytes) -> tuple[bytes, Any]:
    """Return (storage, structure) of a file."""
    length = int.from_bytes(data[-8:], "little")
    return data[: -8 - length], json.loads(data[-8 - length : -8])


def join_file(storage: bytes, structure: Any) -> bytes:
    text = structure if isinstance(structure, bytes) else json.dumps(structure).encode()
    return storage + text + len(text).to_bytes(8, "little")


def read_file(data: bytes, tmp_path: Path) -> Any:
    path = tmp_path / "td"
    path.write_bytes(data)
    return from_consolidated(path)


PLAIN = consolidate_to_bytes(
    TensorDict(
        {"a": torch.arange(6.0).view(2, 3), "n": {"b": torch.ones(2, dtype=torch.int64)}}, batch_size=[2]
    )
)
GENERAL = consolidate_to_bytes(
    TensorDict({"cls": {"a": torch.arange(4.0)}, "b": torch.ones(2).to(torch.float8_e5m2)})
)


STACK = consolidate_to_bytes(
    TensorDict.lazy_stack([TensorDict({"a": torch.ones(2, i + 1)}, [2]) for i in range(3)], 1)
)
TREES = {"plain": PLAIN, "general": GENERAL, "lazy": STACK}
if HAS_TENSORCLASS:
    from td_tensorclass import NonTensorStack

    TREES["values"] = consolidate_to_bytes(TensorDict({"l": NonTensorStack("x", ("y", 1)), "s": "text"}, [2]))
    TREES["typed values"] = consolidate_to_bytes(TensorDict({"l": ("x", (1, 2))}, [2]))
    TREES["general values"] = consolidate_to_bytes(TensorDict({"cls": {"l": NonTensorStack("x", "y")}}, [2]))


def read_buffer(data: bytes | bytearray) -> Any:
    return from_buffer(torch.frombuffer(bytearray(data), dtype=torch.uint8).clone())


def edit_structure(change: Any) -> bytes:
    storage, structure = split_file(PLAIN)
    change(structure)
    return join_file(storage, structure)


def edit_leaf(*entry: Any) -> Any:
    return lambda structure: structure["leaves"].__setitem__("a", list(entry))


EDITS: dict[str, tuple[Any, str]] = {
    "shape too large": (edit_leaf("torch.float32", [2, 4], 0, 24, 0), r"needs 32 bytes; bytes 0 to 24"),
    "shape too small": (edit_leaf("torch.float32", [2, 2], 0, 24, 0), r"needs 16 bytes; bytes 0 to 24"),
    "negative shape": (edit_leaf("torch.float32", [-2, -3], 0, 24, 0), r"impossible shape \[-2, -3\]"),
    "huge shape": (edit_leaf("torch.float32", [1 << 40, 1 << 40], 0, 24, 0), r"bytes 0 to 24"),
    "zero by negative": (edit_leaf("torch.float32", [0, -1], 0, 0, 0), r"impossible shape \[0, -1\]"),
    "dtype": (edit_leaf("torch.float64", [2, 3], 0, 24, 0), r"needs 48 bytes"),
    "unknown dtype": (edit_leaf("torch.load", [2, 3], 0, 24, 0), "unknown dtype 'torch.load'"),
    "dunder dtype": (edit_leaf("torch.__builtins__", [2, 3], 0, 24, 0), "unknown dtype"),
    "dtype is not a string": (edit_leaf(["torch.float32"], [2, 3], 0, 24, 0), "unknown dtype"),
    "past the end": (
        edit_leaf("torch.float32", [2, 3], 1000, 1024, 0),
        "lies at bytes 1000 to 1024 of a storage of 40",
    ),
    "before the start": (edit_leaf("torch.float32", [2, 3], -24, 0, 0), "lies at bytes -24 to 0"),
    "overlap": (edit_leaf("torch.float32", [2, 3], 8, 32, 0), "leaves overlap: bytes 8 to 32 and 24 to 40"),
    "negative padding": (edit_leaf("torch.float32", [2, 3], 0, 16, -8), "needs 24 bytes"),
    "float offsets": (edit_leaf("torch.float32", [2, 3], 0.0, 24.0, 0), "not all ints"),
    "bool offsets": (edit_leaf("torch.float32", [2, 3], False, 24, False), "not all ints"),
    "short entry": (edit_leaf("torch.float32", [2, 3]), "TypeError"),
    "no entry": (lambda s: s["leaves"].__setitem__("a", None), "TypeError"),
    "batch size": (
        lambda s: s["cls_metadata"].__setitem__("batch_size", [3]),
        r"batch size \[3\] does not fit: key",
    ),
    "batch size below": (
        lambda s: s["n"]["cls_metadata"].__setitem__("batch_size", [3]),
        r"batch size \[2\] does not fit|batch size \[3\] does not fit",
    ),
    "negative batch size": (lambda s: s["cls_metadata"].__setitem__("batch_size", [-1]), "damaged"),
    "batch size of strings": (lambda s: s["cls_metadata"].__setitem__("batch_size", ["2"]), "damaged"),
    "no batch size": (lambda s: s["cls_metadata"].pop("batch_size"), "batch_size"),
    "names": (lambda s: s["cls_metadata"].__setitem__("names", ["a", "b"]), "damaged"),
    "device": (lambda s: s["cls_metadata"].__setitem__("device", "nowhere"), "damaged"),
    "class": (
        lambda s: s.__setitem__("cls", "os.system"),
        "the root is of the class 'os.system', which no installed package provides; if it is a tensorclass, import the module",
    ),
    "class below": (
        lambda s: s["n"].__setitem__("cls", "Nope"),
        "key 'n' is of the class 'Nope'",
    ),
    "class is a list": (lambda s: s.__setitem__("cls", ["TensorDict"]), "damaged"),
    "a leaf called as a level": (
        lambda s: s["leaves"].__setitem__("n", s["leaves"]["a"]),
        r"the root says a key twice: \['a', 'n', 'n'\]",
    ),
    "no class": (lambda s: s.pop("cls"), "KeyError: 'cls'"),
    "no leaves": (lambda s: s.pop("leaves"), "KeyError: 'leaves'"),
    "leaves are a list": (lambda s: s.__setitem__("leaves", []), "damaged"),
    "metadata is a list": (lambda s: s.__setitem__("cls_metadata", [1]), "damaged"),
    "half a jagged tensor": (
        lambda s: s["leaves"].__setitem__("<NJT_VALUES>j", ["torch.float32", [0], 0, 0, 0]),
        r"jagged tensor \('j',\) lacks its values or offsets",
    ),
    "names as text": (lambda s: s["cls_metadata"].__setitem__("names", "x"), "says that names is 'x'"),
    "batch size as text": (lambda s: s["cls_metadata"].__setitem__("batch_size", ""), "batch_size is ''"),
    "lock as text": (lambda s: s["cls_metadata"].__setitem__("is_locked", "no"), "locked is 'no'"),
    "batch size of a level too short": (
        lambda s: s["n"]["cls_metadata"].update(batch_size=[], names=[]),
        r"the batch size \[2\] does not fit: a level in it has \[\]",
    ),
    "no level": (lambda s: s.__setitem__("n", None), "AttributeError"),
    "number for a level": (lambda s: s.__setitem__("n", 3), "AttributeError"),
    "number for what is beside": (lambda s: s.__setitem__("size", 3), "TypeError"),
    "nothing beside": (lambda s: s.__setitem__("size", {}), "KeyError: 'td'"),
    "no types beside": (lambda s: s.__setitem__("size", {"td": {"order": {}}}), "KeyError: 'values'"),
    "order of some keys": (
        lambda s: s.__setitem__("size", {"td": {"values": {}, "order": {"": ["n"]}}}),
        r"\['n'\] is not an order of the keys \['a', 'n'\]",
    ),
    "order of missing keys": (lambda s: s.__setitem__("size", {"td": {"order": {"": ["x"]}}}), "damaged"),
    "value": (lambda s: s.__setitem__("non_tensors", {"v": [1]}), "damaged"),
}


@pytest.mark.parametrize("name", EDITS)
def test_read_file_with_edited_structure_raises(name: str, tmp_path: Path) -> None:
    change, message = EDITS[name]
    with pytest.raises(FormatError, match=message) as caught:
        read_file(edit_structure(change), tmp_path)
    assert str(tmp_path / "td") in str(caught.value)


def test_read_file_of_other_device_sets_device_of_storage(tmp_path: Path) -> None:
    def move(structure: dict[str, Any]) -> None:
        structure["cls_metadata"]["device"] = structure["n"]["cls_metadata"]["device"] = "cuda:0"

    tree = read_file(edit_structure(move), tmp_path)
    assert {tree.device, tree["n"].device, tree["n", "b"].device} == {torch.device("cpu")}


def replace_at(structure: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replace the value at a path of a JSON structure."""
    *above, last = path
    reduce(operator.getitem, above, structure)[last] = value


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("lazy", ("0", "cls_metadata"), {"batch_size": []}, r"members of \[0, 1\] batch dims"),
        ("lazy", ("cls_metadata", "stack_dim"), True, "stack_dim is True"),
        ("lazy", ("cls_metadata", "stack_dim_name"), 3, "stack_dim_name is 3"),
        ("values", ("non_tensors", "s", 1), [7], r"\[2\] does not fit: a level in it has \[7\]"),
        ("values", ("non_tensors", "s", 1), 2, "batch_size is 2"),
        ("values", ("cls",), "NonTensorStack", r"a NonTensorStack of batch size \[2\] needs 2 values"),
        ("typed values", ("size", "td", "values", "/l", 0), "TensorDict", r"key \('l',\) is non-tensor data"),
        ("general values", ("td", "nodes", 2, "kind"), "TensorDict", r"no members and no values: \['data'\]"),
        ("general", ("td", "leaves", 1, 0), -2, "or one of a dtype is negative"),
    ],
)
def test_read_file_with_wrong_field_raises(
    name: str, path: tuple[Any, ...], value: Any, message: str
) -> None:
    if name not in TREES:
        pytest.skip("needs td-tensorclass")
    storage, structure = split_file(TREES[name])
    replace_at(structure, path, value)
    with pytest.raises(FormatError, match=message):
        read_buffer(join_file(storage, structure))


@pytest.mark.parametrize(
    ("name", "path", "key"),
    [
        ("typed values", ("size", "td", "values", "/l", 1), "'l'"),
        ("general values", ("td", "values", 0, 1), r"\('cls', 'l'\)"),
    ],
)
@pytest.mark.parametrize(
    ("types", "error", "message"),
    [
        (
            "images.Ratio@td-images==1.2",
            MissingPluginError,
            "of the type 'images.Ratio', was written by 'td-images' 1.2",
        ),
        ("no type", FormatError, "of the unknown type 'no type'"),
    ],
)
def test_read_unknown_value_type_raises_naming_key_and_file(
    name: str, path: Any, key: str, types: str, error: Any, message: str, tmp_path: Path
) -> None:
    if name not in TREES:
        pytest.skip("needs td-tensorclass")
    storage, structure = split_file(TREES[name])
    replace_at(structure, path, types)
    with pytest.raises(error, match=rf"/td( is damaged)?: key {key}: the value at the top level.*{message}"):
        read_file(join_file(storage, structure), tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short for a consolidated file: 0 bytes"),
        (b"1234567", "too short for a consolidated file: 7 bytes"),
        (bytes(8), "say that 0 bytes of 8 are structure"),
        (b"x" * 8, "bytes of 8 are structure"),
        ((-1).to_bytes(8, "little", signed=True), "say that -1 bytes"),
        (PLAIN[:-1], "damaged"),
        (PLAIN[8:], "damaged"),
        (join_file(b"", b"{"), "its structure is no JSON"),
        (join_file(b"", b"[" * 100_000), "its structure is no JSON"),
        (join_file(b"", b"\xff\xfe"), "its structure is no JSON"),
        (join_file(b"", []), "its structure is list, not an object"),
        (join_file(b"", {"cls": "td:general"}), "KeyError: 'td'"),
    ],
)
def test_read_damaged_trailer_raises(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read_file(data, tmp_path)


def test_read_missing_file_or_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no consolidated file at"):
        from_consolidated(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no consolidated file at"):
        from_consolidated(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_read_pipe_raises_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "td")
    with pytest.raises(FormatError, match="td is not a regular file"):
        from_consolidated(tmp_path / "td")


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.float32, torch.int16, torch.uint8])
@pytest.mark.parametrize("skipped", [8, 4, 3])
def test_read_leaf_at_unaligned_offset_returns_it(dtype: torch.dtype, skipped: int) -> None:
    leaf = torch.arange(1, 4).to(dtype)
    data = bytes(skipped) + bytes(leaf.view(torch.uint8).tolist())
    _, structure = split_file(PLAIN)
    structure["leaves"]["a"] = [str(dtype), [3], skipped, len(data), 0]
    del structure["n"]
    structure["cls_metadata"]["batch_size"] = [3]
    assert read_buffer(join_file(data, structure))["a"].tolist() == leaf.tolist()


@pytest.mark.parametrize("data", TREES.values(), ids=TREES)
def test_read_truncated_file_raises(data: bytes, tmp_path: Path) -> None:
    for stop in range(len(data)):
        with pytest.raises(FormatError):
            read_file(data[:stop], tmp_path)


def use_collection(tree: Any) -> None:
    """Run operations that fail if sizes or shapes of a collection are wrong."""
    assert isinstance(tree.batch_size, torch.Size)
    assert isinstance(repr(tree), str)
    copied = tree.clone()
    assert copied.batch_size == tree.batch_size
    if copied.batch_dims and copied.batch_size[0]:
        assert copied[0].batch_size == tree.batch_size[1:]


@pytest.mark.parametrize("data", TREES.values(), ids=TREES)
@given(where=st.integers(0, 1 << 20), value=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_read_flipped_byte_raises_or_returns_collection(data: bytes, where: int, value: int) -> None:
    changed = bytearray(data)
    changed[where % len(data)] = value
    try:
        tree = read_buffer(changed)
    except (FormatError, MissingPluginError):
        return
    use_collection(tree)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below, max_size=3),
    max_leaves=5,
)


def list_paths(structure: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON structure that can be replaced."""
    items: Any = enumerate(structure) if isinstance(structure, list) else ()
    if isinstance(structure, dict):
        items = structure.items()
    return [path, *(spot for key, below in items for spot in list_paths(below, (*path, key)))]


@pytest.mark.parametrize("data", TREES.values(), ids=TREES)
@given(pick=st.integers(0, 1 << 20), value=anything)
@settings(max_examples=400)
@example(pick=3, value={})
def test_read_changed_json_raises_or_returns_collection(data: bytes, pick: int, value: Any) -> None:
    storage, structure = split_file(data)
    choices = list_paths(structure)[1:]
    replace_at(structure, choices[pick % len(choices)], value)
    try:
        tree = read_buffer(join_file(storage, structure))
    except (FormatError, MissingPluginError):
        return
    use_collection(tree)


@pytest.mark.parametrize("name", [name for name in TREES if name != "plain"] + ["flat"])
@given(pick=st.integers(0, 1 << 20), value=anything)
@settings(max_examples=200)
def test_recv_changed_json_raises_or_writes_collection(name: str, pick: int, value: Any) -> None:
    tree = TensorDict({"a": torch.ones(2)}) if name == "flat" else read_buffer(TREES[name])
    message, parts = _wire.make_message(tree, True)
    header = json.loads(message.header)
    choices = list_paths(header)[1:]
    replace_at(header, choices[pick % len(choices)], value)
    try:
        found = _wire.assemble(
            _wire.parse_message(json.dumps(header).encode()),
            torch.cat([*parts, torch.empty(0, dtype=torch.uint8)]),
        )
    except (FormatError, MissingPluginError):
        return
    use_collection(found)


JAGGED = consolidate_to_bytes(
    TensorDict(
        {"j": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)}, [2]
    )
)


RAGGED = consolidate_to_bytes(
    TensorDict(
        {
            "j": torch.nested.nested_tensor_from_jagged(
                torch.ones(6, 2), torch.tensor([0, 2, 6]), lengths=torch.tensor([1, 3])
            )
        },
        [2],
    )
)


@pytest.mark.parametrize(
    ("data", "mark", "numbers"),
    [
        *(
            (JAGGED, "<NJT_OFFSETS>j", offsets)
            for offsets in ([0, 2, 7], [-1, 2, 6], [0, 5, 3], [1 << 62, 2, 6], [0, 6, 1 << 62])
        ),
        *((RAGGED, "<NJT_LENGTHS>j", lengths) for lengths in ([1, -3], [1, 5], [7, 1], [1, 1 << 62])),
    ],
)
def test_read_jagged_rows_outside_values_raises(
    data: bytes, mark: str, numbers: list[int], tmp_path: Path
) -> None:
    storage, structure = split_file(data)
    new = torch.tensor(numbers).numpy().tobytes()
    start = structure["leaves"][mark][2]
    changed = storage[:start] + new + storage[start + len(new) :]
    with pytest.raises(FormatError, match="rows of a jagged tensor lie outside of its 6 values"):
        read_file(join_file(changed, structure), tmp_path)
    message, (storage, *_) = _wire.make_message(read_buffer(data), True)
    storage[start : start + len(new)] = torch.tensor(numbers).view(torch.uint8)
    with pytest.raises(FormatError, match="a message is damaged: the rows of a jagged tensor"):
        _wire.assemble(message, storage)


@pytest.mark.parametrize(
    ("mark", "at", "value", "message"),
    [
        ("<NJT_OFFSETS>j", 0, "torch.float64", "are not a vector of integers"),
        ("<NJT_LENGTHS>j", 0, "torch.float64", "are not a vector of integers"),
        ("<NJT_LENGTHS>j", 1, [2, 1], "are not a vector of integers"),
        ("<NJT_LENGTHS>j", 3, 1 << 40, "needs 16 bytes"),
        ("<NJT_OFFSETS>j", 5, 0, "jagged_dim >=1, but got 0|the ragged dim of a jagged tensor is 0, of 3"),
        ("<NJT_OFFSETS>j", 5, 2, "lie outside of its 2 values"),
        ("<NJT_OFFSETS>j", 5, 3, "IndexError|the ragged dim of a jagged tensor is 3, of 3"),
        ("<NJT_OFFSETS>j", 5, None, r"the ragged dim of \('j',\) is None"),
        ("<NJT_OFFSETS>j", 5, True, r"the ragged dim of \('j',\) is True"),
        ("<NJT_OFFSETS>j", 1, [], "IndexError|needs 8 bytes"),
    ],
)
def test_read_edited_jagged_tensor_raises(mark: str, at: int, value: Any, message: str) -> None:
    storage, structure = split_file(RAGGED)
    replace_at(structure, ("leaves", mark, at), value)
    replace_at(structure, ("cls_metadata", "batch_size"), [])
    replace_at(structure, ("cls_metadata", "names"), [])
    with pytest.raises(FormatError, match=message):
        read_buffer(join_file(storage, structure))


def test_read_jagged_offsets_not_vector_raises(tmp_path: Path) -> None:
    storage, structure = split_file(JAGGED)
    place = structure["leaves"]["<NJT_OFFSETS>j"]
    place[1], place[3] = [], place[2] + 8  # a number instead of a vector
    with pytest.raises(
        FormatError, match="is damaged: the offsets or lengths of a jagged tensor are not a vector"
    ):
        read_file(join_file(storage, structure), tmp_path)


@pytest.mark.parametrize("header", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b"{}", b"null"])
def test_parse_message_damaged_header_raises(header: bytes) -> None:
    with pytest.raises(FormatError, match="the header of a message is damaged"):
        _wire.parse_message(header)


@pytest.mark.parametrize("buffer", [torch.zeros(9), torch.zeros(9, 9, dtype=torch.uint8)])
def test_from_buffer_not_uint8_vector_raises(buffer: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="a vector of bytes is needed; got torch"):
        from_buffer(buffer)


def test_read_deep_nesting_raises_without_crash(tmp_path: Path) -> None:
    meta = {"device": None, "names": [], "batch_size": [], "is_locked": False}
    level: dict[str, Any] = {"cls": "TensorDict", "non_tensors": {}, "leaves": {}, "cls_metadata": meta}
    text, end = json.dumps(level).encode(), b"}"
    deep = (text[:-1] + b', "n": ') * 200_000 + text + end * 200_000
    with pytest.raises(FormatError, match="its structure is no JSON"):
        read_file(join_file(b"", deep), tmp_path)


def test_check_partly_overlapping_leaves_raises(tmp_path: Path) -> None:
    storage, structure = split_file(PLAIN)
    structure["leaves"]["c"] = structure["leaves"]["a"]
    tied = read_file(join_file(storage, structure), tmp_path)
    tied["a"].zero_()
    assert tied["c"].sum() == 0
    structure["leaves"]["c"] = ["torch.float32", [2], 0, 8, 0]
    with pytest.raises(FormatError, match="leaves overlap: bytes 0 to 8 and 0 to 24"):
        read_file(join_file(storage, structure), tmp_path)


def test_read_file_with_class_name_imports_nothing(tmp_path: Path) -> None:
    import sys

    storage, structure = split_file(PLAIN)
    structure["cls"] = "<class 'antigravity.Point'>"
    with pytest.raises(FormatError, match="no installed package provides"):
        read_file(join_file(storage, structure), tmp_path)
    assert "antigravity" not in sys.modules


def test_read_file_with_dtype_name_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append, raising=False)
    with pytest.raises(FormatError, match=r"unknown dtype 'torch\._inductor_of_a_file'"):
        read_file(edit_structure(edit_leaf("torch._inductor_of_a_file", [2, 3], 0, 24, 0)), tmp_path)
    assert not asked


def make_node(entries: Any, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "TensorDict",
        "meta": {"batch_size": []},
        "entries": entries,
        "members": [],
        "values": [],
        **changes,
    }


def make_columns(count: int) -> list[Any]:
    """Return the JSON columns of a layout with this number of leaves."""
    return [["torch.float32"], [0] * count, [[1]] * count, [0] * count, [], 8]


@pytest.mark.parametrize(
    ("nodes", "leaves", "message"),
    [
        ([make_node([["a", 1], ["b", 1]]), make_node([])], 0, r"each node .* there are 2, found \[0, 1, 1\]"),
        ([make_node([["a", [0]], ["b", [0]]])], 1, r"each leaf .* there are 1, found \[0, 0\]"),
        ([make_node([["a", [-1]]])], 1, r"each leaf .* found \[-1\]"),
        ([make_node([["a", [1]]])], 1, r"each leaf .* found \[1\]"),
        ([make_node([["a", [False]]])], 1, r"each leaf .* found \[False\]"),
        ([make_node([["a", 0]])], 0, r"each node .* found \[0, 0\]"),
        ([make_node([]), make_node([])], 0, r"each node .* there are 2, found \[0\]"),
        ([make_node([[1, [0]]])], 1, r"the keys of node 0 are not all strings, or not all different: \[1\]"),
        ([make_node([["a", [0]], ["a", [1]]])], 2, r"not all different: \['a', 'a'\]"),
        ([make_node([], values=[["data", 0]])], 0, r"each value .* there are 0, found \[0\]"),
        ([make_node([], kind=None)], 0, "the root is of the kind None"),
        ([make_node([], kind="Nope")], 0, "'Nope', which no installed package provides"),
    ],
)
def test_check_tree_cycle_or_shared_node_raises(
    nodes: Any, leaves: int, message: str, tmp_path: Path
) -> None:
    table = {"nodes": nodes, "leaves": make_columns(leaves), "values": []}
    with pytest.raises(FormatError, match=message):
        read_file(join_file(bytes(4), {"cls": "td:general", "td": table}), tmp_path)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, ["torch.nn"], "unknown dtype 'torch.nn'"),
        (1, [1, 0], "list index out of range"),
        (1, [0], "shorter|longer"),
        (1, [True, 0], "not all ints"),
        (2, [[1.0], [1]], "not all ints"),
        (2, ["1", [1]], "not all ints"),
        (2, [[-1], [1]], "impossible shape"),
        (3, [-4, 4], "lies at bytes -4 to 0"),
        (3, [0, 8], "lies at bytes 8 to 12 of a storage of 8"),
        (3, [0, None], "not all ints"),
        (4, [[0, 3, 1]], "2 pieces do not make 1 leaves, 1 of them jagged"),
        (4, [[0, 1, 1]], "2 pieces do not make 2 leaves"),
        (4, [[5, 2, 1]], "2 pieces do not make 2 leaves"),
        (4, [[0, 2, 1], [0, 2, 1]], "2 pieces do not make 1 leaves"),
        (5, "8", "not all ints"),
    ],
)
def test_layout_from_damaged_columns_raises(at: int, value: Any, message: str) -> None:
    table = make_columns(2)
    table[at] = value
    header = {"nodes": [make_node([["a", [0]], ["b", [1]]])], "leaves": table, "values": []}
    with pytest.raises(FormatError, match=message):
        _wire.parse_message(json.dumps({**header, "together": True, "consolidated": False}).encode())


def test_read_unmappable_file_raises_naming_it(tmp_path, monkeypatch):
    file = tmp_path / "one.td"
    TensorDict({"a": torch.zeros(3)}).consolidate(file)

    def full(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(OSError, match="cannot map it: Cannot allocate memory") as found:
        from_consolidated(file)
    assert (found.value.errno, found.value.filename) == (errno.ENOMEM, str(file))
