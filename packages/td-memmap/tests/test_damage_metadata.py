"""Loading damaged or hostile metadata raises FormatError, never returns wrong data and changes no file."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from td_core import TensorDict
from td_core.errors import FormatError, MissingPluginError
from td_memmap import PickleRefusedError, inspect, pack_memmap, verify


def set_fields(**fields: Any) -> Any:
    return lambda meta: meta.update(fields)


def set_leaf_fields(**fields: Any) -> Any:
    return lambda meta: meta["a"].update(fields)


EDITS = {
    "no type": (lambda meta: meta.pop("_type"), "the root: _type is None, expected the name of a class"),
    "unknown class": (
        set_fields(_type="<class 'x.Y'>", _class="x:Y"),
        "expected a class that this process has defined",
    ),
    "newer version": (
        set_fields(_format_version=4),
        "_format_version is 4, expected at most 3: upgrade td-memmap",
    ),
    "a list": (lambda meta: [meta], "expected an object"),
    "batch size of a leaf": (
        set_leaf_fields(shape=[2, 2]),
        r"key 'a': shape is \[2, 2\], expected a shape that starts with",
    ),
    "short file": (
        set_leaf_fields(shape=[3, 3]),
        r"a.memmap: key 'a': the size is 24, expected at least 36 bytes",
    ),
    "huge shape": (
        set_leaf_fields(shape=[3, 1 << 61]),
        "key 'a': shape is .* expected a shape that a tensor can have",
    ),
    "huge shape without elements": (
        set_leaf_fields(shape=[3, 0, 1 << 40, 1 << 40]),
        "key 'a': shape is .* expected a shape that a tensor can have",
    ),
    "huge size without elements": (set_leaf_fields(shape=[3, 0, 1 << 63]), "expected a list of sizes"),
    "negative": (set_leaf_fields(shape=[3, -2]), "expected a list of sizes"),
    "bool size": (set_leaf_fields(shape=[3, True]), "expected a list of sizes"),
    "float size": (set_leaf_fields(shape=[3, 2.0]), "expected a list of sizes"),
    "not a list": (set_leaf_fields(shape="3,2"), "expected a list of sizes"),
    "dtype": (
        set_leaf_fields(dtype="torch.float7"),
        "dtype is 'torch.float7', expected a dtype that this torch knows",
    ),
    "dtype type": (set_leaf_fields(dtype=3), "dtype is 3"),
    "quantised": (set_leaf_fields(dtype="torch.qint8"), "a dtype that this torch knows and a file can hold"),
    "nested flag": (set_leaf_fields(is_nested="yes"), "is_nested is 'yes', expected true or false"),
    "nested shape": (set_leaf_fields(is_nested=True, shape=[3]), "the shape of a table of component shapes"),
    "batch size": (set_fields(shape=[-1]), "the root: shape is"),
    **{
        f"batch size {size}": (set_fields(shape=size), f"the root: shape is {size}, expected a list of sizes")
        for size in (None, 3, {})
    },
    "no batch size": (
        lambda meta: meta.pop("shape") and None,
        "the root: shape is None, expected a list of sizes",
    ),
    "an operation": (
        set_fields(custom_op="view"),
        "custom_op is 'view', expected none, or an entry of that name",
    ),
    "batch size of a child node": (set_fields(shape=[3, 2]), "key '(n|stack)': the (batch size|shape) is"),
    "device": (set_fields(device="gpu7"), "device is 'gpu7', expected the name of a device"),
    "null device": (set_fields(device=None), "device is None, expected the name of a device"),
    "names": (set_fields(_names=["x", "x"]), "cannot be put together: .*1 batch dims"),
    "unknown entry": (set_fields(new={"what": 1}), "key 'new': the entry is {'what': 1}, expected a leaf"),
    "missing leaf": (
        lambda meta: meta.update(new=meta["a"]),
        "the file of key 'new' is missing: none of .*'new.memmap'",
    ),
    "missing node": (
        set_fields(new={"type": "TensorDict"}),
        "key 'new' is missing: the directory 'new' is not there",
    ),
    "missing leaf with a long name": (
        lambda meta: meta.update({"k" * 300: meta["a"]}),
        "the file of key 'k{300}' is missing: none of",
    ),
    "missing node with a long name": (
        set_fields(**{"k" * 300: {"type": "TensorDict"}}),
        "key 'k{300}' is missing: the directory 'k{300}' is not there",
    ),
    "general: kind": (lambda meta: {"_format_version": 2}, "kind is None, expected the tag of a node kind"),
    "general: unknown kind": (
        lambda meta: {"_format_version": 2, "kind": "x"},
        "a node kind that an installed package",
    ),
    "general: meta": (
        lambda meta: {"_format_version": 2, "kind": "TensorDict"},
        "meta is None, expected an object",
    ),
    "general: file": (
        lambda meta: {
            "_format_version": 2,
            "kind": "TensorDict",
            "meta": {"batch_size": []},
            "entries": [["a", {"dtype": "torch.int8", "shape": [], "file": "../x"}]],
        },
        "file is '../x', expected a file name",
    ),
    "general: members": (
        lambda meta: {"_format_version": 2, "kind": "TensorDict", "meta": {}, "members": ["../x"]},
        "expected names of directories",
    ),
    "general: no batch size": (
        lambda meta: {"_format_version": 2, "kind": "TensorDict", "meta": {}},
        "cannot be put together: 'batch_size' is missing",
    ),
}


ENTRY = {"device": "cpu", "shape": [], "dtype": "torch.int8", "is_nested": False, "file": "a"}


ROWS = [
    3, "ab", [3], [[]], [["n"]], [["n", 3]], [[[], {}]], [["n", {"type": "TensorDict", "file": "."}]],
    [["n", {"type": "TensorDict", "file": ".."}]], [["n", {"type": "TensorDict", "file": ["n"]}]],
    [["a", {**ENTRY, "dtype": ["x"]}]], [["a", {**ENTRY, "shape": ["x"]}]],
]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        *(
            set_fields(_format_version=2, kind="TensorDict", meta={"batch_size": []}, entries=rows)
            for rows in ROWS
        ),
        *(
            set_fields(_format_version=2, kind="TensorDict", meta={}, entries=[], members=names)
            for names in (3, [3], [[]], ["."])
        ),
        set_fields(_format_version=2, kind="TensorDict", meta=3),
        lambda meta: [],
    ],
)
def test_read_wrong_metadata_raises_in_every_reader(change: Any, save: Path, edit_metadata: Any) -> None:
    edit_metadata(save / "meta.json", change)
    packed = save.with_name("save.tdz")
    with zipfile.ZipFile(packed, "w") as archive:
        for file in save.rglob("*.*"):
            archive.write(file, file.relative_to(save))
    with pytest.raises(FormatError):
        pack_memmap(save, save.with_name("other.tdz"))
    for place in (save, packed):
        with pytest.raises(FormatError):
            inspect(place)
        with pytest.raises(FormatError):
            TensorDict.load_memmap(place, subpath="n")


def test_load_subpath_unknown_metadata_field_is_ignored(save: Path, edit_metadata: Any) -> None:
    edit_metadata(save / "meta.json", set_fields(entries=[[]]))
    assert TensorDict.load_memmap(save, subpath="n")["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_load_wrong_metadata_raises(
    change: Any, message: str, save: Path, list_stats: Any, edit_metadata: Any
) -> None:
    edit_metadata(save / "meta.json", change)
    before = list_stats(save)
    with pytest.raises(FormatError, match=message) as found:
        TensorDict.load_memmap(save)
    assert str(save) in str(found.value)
    assert list_stats(save) == before


BROKEN = {
    "empty": b"",
    "truncated": b'{"a": {"dev',
    "no json": b"\x80\x04\x95",
    "no utf-8": b'{"\xff": 1}',
    "twice": b'{"a": 1, "a": 2}',
    "deep": b"[" * 100_000,
    "long number": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_load_broken_json_raises(content: bytes, save: Path) -> None:
    for name in ("meta.json", "n/meta.json", "stack/1/meta.json"):
        copy = save.with_name(name.replace("/", "-"))
        shutil.copytree(save, copy)
        (copy / name).write_bytes(content)
        with pytest.raises(FormatError, match=f"{name} is not valid metadata"):
            TensorDict.load_memmap(copy)


def test_load_not_strict_skips_damaged_entries(save: Path, edit_metadata: Any) -> None:
    (save / "a.memmap").unlink()
    (save / "stack" / "meta.json").write_text('{"_type": "<class \'gone.Gone\'>"}')
    edit_metadata(save / "meta.json", set_fields(new={"what": 1}))
    loaded = TensorDict.load_memmap(save, strict=False)
    assert list(loaded.keys()) == ["n"]
    # The metadata that a lenient load has cached must still fail a strict load.
    with pytest.raises(FormatError, match="key 'new': the entry is"):
        TensorDict.load_memmap(save)


GENERAL = {"_format_version": 2, "provider": "td-images==1.2", "meta": {"batch_size": []}}


VALUE = {"plain": "1/3", "types": "images.Ratio@td-images==1.2"}


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        ({**GENERAL, "kind": "images.Image"}, "of the kind 'images.Image',"),
        (
            {**GENERAL, "kind": "TensorDict", "values": {"x": VALUE}},
            "the value at the top level, of the type 'images.Ratio',",
        ),
    ],
)
def test_load_node_of_missing_plugin_raises_with_command(
    meta: dict[str, Any], what: str, save: Path, monkeypatch: pytest.MonkeyPatch, edit_metadata: Any
) -> None:
    edit_metadata(save / "n" / "meta.json", lambda _: meta)
    message = rf"n/meta\.json: key 'n'[,:] {what} was written by 'td-images' 1\.2, which is "
    with pytest.raises(
        MissingPluginError, match=message + "not installed: install it from where its authors publish it$"
    ):
        TensorDict.load_memmap(save)
    assert set(TensorDict.load_memmap(save, strict=False).keys()) == {"a", "stack"}
    monkeypatch.setitem(
        MissingPluginError.unavailable, "td-images", "installed but not active: TD_PLUGINS leaves it out"
    )
    with pytest.raises(MissingPluginError, match=message + "installed but not active: TD_PLUGINS"):
        TensorDict.load_memmap(save)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["TD_BOMB"]) / "exploded"),)


def test_load_pickled_value_without_permission_raises(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TD_BOMB", str(save.parent))
    shutil.rmtree(save / "n")
    (save / "n").mkdir()
    (save / "n" / "meta.json").write_text(
        json.dumps(
            {"_format_version": 2, "kind": "TensorDict", "meta": {}, "values": {"v": {"pickled": True}}}
        )
    )
    (save / "n" / "other.pickle").write_bytes(pickle.dumps({"v": Bomb()}))
    for kwargs in ({}, {"allow_pickle": False}, {"device": "meta"}):
        with pytest.raises(
            PickleRefusedError, match="unpickling runs whatever code it names; pass allow_pickle=True"
        ):
            TensorDict.load_memmap(save, **kwargs)
    assert not (save.parent / "exploded").exists()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


FIELDS = ["shape", "device", "_type", "_class", "_format_version", "_names", "a", "n", "stack", "stack_dim", "_members",
          "stack_dim_name", "x", "_locked", "kind", "meta", "entries", "members", "values", "_batch_size", "custom_op", "index",
          "dtype", "is_nested", "type", "file", "layout", "data"]  # fmt: skip


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_load_random_damage_raises_only_format_error(data: st.DataObject, save: Path) -> None:
    copy = save.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(save, copy)
    file = copy / data.draw(
        st.sampled_from(["meta.json", "n/meta.json", "stack/meta.json", "stack/0/meta.json"])
    )
    if data.draw(st.booleans()):
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(content)
    else:
        meta = json.loads(file.read_text())
        for _ in range(data.draw(st.integers(1, 3))):
            place: Any = meta
            field = data.draw(st.sampled_from(FIELDS))
            if isinstance(place.get("a"), dict) and data.draw(st.booleans()):
                place = place["a"]
            place[field] = data.draw(st.one_of(JSON, st.sampled_from([None, *place.values()])))
        file.write_text(json.dumps(meta))
    for kwargs in ({"mode": "r"}, {"device": "meta"}, {"mode": "r", "strict": False}):
        try:
            TensorDict.load_memmap(copy, **kwargs)
        except (FormatError, MissingPluginError):
            pass
    try:
        inspect(copy)
    except FormatError:
        pass


def test_load_node_with_invalid_stack_dim_raises_with_path(save: Path, edit_metadata: Any) -> None:
    edit_metadata(save / "stack" / "meta.json", set_fields(stack_dim=7))
    with pytest.raises(
        FormatError, match="stack/meta.json: key 'stack' cannot be put together: .*stack_dim 7"
    ):
        TensorDict.load_memmap(save)


def test_load_stack_huge_member_count_raises(save: Path, edit_metadata: Any) -> None:
    edit_metadata(save / "stack" / "meta.json", set_fields(_members=1 << 24))
    with pytest.raises(FormatError, match="_members is 16777216, expected a number of members, at most"):
        TensorDict.load_memmap(save)
    edit_metadata(save / "stack" / "meta.json", set_fields(_members=1 << 20))
    with pytest.raises(FormatError, match="_members is 1048576, expected not many more than the"):
        TensorDict.load_memmap(save)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid metadata"),
        ("[]", "expected an object of values"),
        ('{"values": []}', "expected an object of values"),
        ('{"values": {"data": 3}}', "expected an object of values"),
    ],
)
def test_load_wrong_value_types_raises_with_path(content: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    TensorDict({"v": (1, "a")}).memmap(tmp_path / "save")
    (tmp_path / "save" / "v" / "%values.json").write_text(content)
    with pytest.raises(FormatError, match=f"v/%values.json.*{message}"):
        TensorDict.load_memmap(tmp_path / "save")


@pytest.mark.parametrize("content", [["f"], {"g": 1}])
def test_load_pickle_of_other_values_raises(content: Any, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    prefix = tmp_path / "save"
    TensorDict({"v": len, "shape": {"shape": torch.ones(1)}}).memmap(prefix, allow_pickle=True)
    (prefix / "v" / "other.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(FormatError, match="v/other.pickle|key 'v'"):
        TensorDict.load_memmap(prefix, allow_pickle=True)


def test_load_metadata_without_child_nodes_sorts_keys(save: Path, edit_metadata: Any) -> None:
    td = TensorDict({key: {"x": torch.ones(1)} for key in "cab"})
    td.memmap(save)
    edit_metadata(save / "meta.json", lambda meta: {name: meta[name] for name in ("shape", "_type")})
    assert list(TensorDict.load_memmap(save).keys()) == ["a", "b", "c"]


LEAF = {**ENTRY, "shape": [2]}


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
def test_load_wrong_metadata_in_general_form_raises(
    fields: dict[str, Any], message: str, tmp_path: Path, assert_load_fails: Any
) -> None:
    save = tmp_path / "save"
    TensorDict({"a": torch.ones(2, dtype=torch.int8)}).memmap(save)
    level = {"_format_version": 2, "kind": "TensorDict", "meta": {"batch_size": []}, "entries": [["a", LEAF]]}
    (save / "meta.json").write_text(json.dumps(level))
    assert TensorDict.load_memmap(save)["a"].tolist() == [1, 1]
    (save / "meta.json").write_text(json.dumps({**level, **fields}))
    assert_load_fails(save, message, allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no pickle", "other.pickle cannot be unpickled"),
        (b"", "other.pickle cannot be unpickled"),
        (pickle.dumps([1]), r"v is \[1\], expected a value in other.pickle"),
        (pickle.dumps({"w": 1}), "v is {'w': 1}, expected a value in other.pickle"),
    ],
)
def test_load_wrong_pickle_in_general_form_raises(
    content: bytes, message: str, tmp_path: Path, assert_load_fails: Any
) -> None:
    save = tmp_path / "save"
    TensorDict().memmap(save)
    level = {"_format_version": 2, "kind": "TensorDict", "meta": {"batch_size": []}}
    (save / "meta.json").write_text(json.dumps({**level, "values": {"v": {"pickled": True}}}))
    (save / "other.pickle").write_bytes(content)
    assert_load_fails(save, message, allow_pickle=True)
    with pytest.raises(PickleRefusedError, match="pass allow_pickle=True if you trust the save"):
        TensorDict.load_memmap(save)


def write_old_release(save: Path, **leaf: Any) -> None:
    """Write a save as tensordict 0.2 did: next to each leaf a file with its shape and dtype."""
    save.mkdir()
    torch.save({"batch_size": torch.Size([2]), "device": None}, save / "meta.pt")
    (save / "a.memmap").write_bytes(bytes(8))
    torch.save({"shape": torch.Size([2]), "dtype": torch.float32, **leaf}, save / "a.meta.pt")


def torch_save(value: Any) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("meta.pt", b"", "meta.pt is not valid metadata"),
        ("meta.pt", b"PK\x03\x04", "meta.pt is not valid metadata"),
        ("meta.pt", torch_save([1]), r"meta.pt: the root: the content is \[1\], expected a dict"),
        ("meta.pt", torch_save({}), "meta.pt cannot be put together"),
        ("meta.pt", torch_save({"batch_size": "x"}), "meta.pt cannot be put together"),
        (
            "meta.pt",
            torch_save({"batch_size": torch.Size([3])}),
            r"key 'a': the shape is \[2\], expected one that starts",
        ),
        ("meta.pt", torch_save({"stack_dim": 0}), "the members is .*, expected 0, 1, 2... and nothing else"),
        (
            "meta.pt",
            torch_save({"stack_dim": "x"}),
            "the members is .*, expected 0, 1, 2... and nothing else",
        ),
        ("a.meta.pt", torch_save(None), "a.meta.pt: key 'a': the content is None, expected a dict"),
        (
            "a.meta.pt",
            torch_save({"shape": (2,), "dtype": "int8"}),
            "dtype is 'int8', expected a dtype that a file can",
        ),
        (
            "a.meta.pt",
            torch_save({"shape": (2,), "dtype": torch.qint8}),
            "expected a dtype that a file can hold",
        ),
        (
            "a.meta.pt",
            torch_save({"shape": (-2,), "dtype": torch.int8}),
            r"key 'a': shape is \[-2\], expected a list of",
        ),
        ("a.meta.pt", torch_save({"shape": (99,), "dtype": torch.int8}), "a.memmap is too short"),
    ],
)
def test_load_damaged_old_release_raises(
    file: str, content: bytes, message: str, tmp_path: Path, assert_load_fails: Any
) -> None:
    save = tmp_path / "save"
    write_old_release(save)
    assert TensorDict.load_memmap(save)["a"].tolist() == [0, 0]
    (save / file).write_bytes(content)
    assert_load_fails(save, message)


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
def test_load_damaged_saved_view_raises(
    change: dict[str, Any] | None, message: str, tmp_path: Path, edit_metadata: Any, assert_load_fails: Any
) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "lazy_view_unsqueeze", save)
    if change is None:
        shutil.rmtree(save / "_source")
    else:
        edit_metadata(save / "meta.json", lambda meta: meta.update(change))
    assert_load_fails(save, message)


@pytest.mark.parametrize(
    ("code", "index"),
    [
        (1, 1),
        (None, None),
        (["ellipsis"], ...),
        ([1], (1,)),
        (["list", [2, 0]], [2, 0]),
        (["range", {"start": 0, "stop": 3, "step": 2}], range(0, 3, 2)),
        (["tensor", [2, 0], "cpu"], torch.tensor([2, 0])),
        (["slice", {"start": 1}], slice(1, None)),
    ],
)
def test_load_saved_view_equals_indexed_source(
    code: Any, index: Any, tmp_path: Path, same: Any, edit_metadata: Any
) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "sub_td_slice", save)
    edit_metadata(save / "meta.json", lambda meta: meta.update(index=code))
    same(TensorDict.load_memmap(save), TensorDict.load_memmap(save / "_source")[index])


@pytest.mark.parametrize("code", ["x", ["x"], ["list", 1], ["tuple", [[1]]], {}])
def test_load_saved_view_invalid_index_raises(
    code: Any, tmp_path: Path, edit_metadata: Any, assert_load_fails: Any
) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "sub_td_slice", save)
    edit_metadata(save / "meta.json", lambda meta: meta.update(index=code))
    assert_load_fails(save, "a saved view has an index that cannot be one")


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("content", [lambda n: bytes(n), lambda n: bytes(4096), lambda n: b"{" * (n + 1)])
def test_verify_damaged_metadata_is_not_ok(content: Any, checksums: bool, tmp_path: Path) -> None:
    TensorDict({"a": torch.arange(3), "n": {"b": 1}}).memmap(tmp_path / "save", checksums=checksums)
    for meta in tmp_path / "save/n/meta.json", tmp_path / "save/meta.json":
        meta.write_bytes(content(meta.stat().st_size))
        assert not verify(tmp_path / "save").ok
        with pytest.raises(FormatError):
            TensorDict.load_memmap(tmp_path / "save")
