"""A damaged or hostile save is an error of one class, never wrong data; and loading changes nothing."""

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
from torch._subclasses.fake_tensor import FakeTensorMode

from td_core import TensorDict, lazy_stack
from td_core._lazy_stack import LazyStackedTensorDict
from td_core._missing import UNAVAILABLE
from td_core.errors import FormatError, MissingPluginError
from td_memmap import PickleRefusedError, inspect, is_memmap_archive, pack_memmap, unpack_memmap, verify

Meta = dict[str, Any]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    stack = LazyStackedTensorDict(
        *(TensorDict({"x": torch.ones(3)}, batch_size=[3]) for _ in range(3)), stack_dim=1
    )
    td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3)}, "stack": stack}, batch_size=[3])
    td.memmap(tmp_path / "save")
    return tmp_path / "save"


def edit(path: Path, change: Any) -> None:
    meta = json.loads(path.read_text())
    result = change(meta)
    path.write_text(json.dumps(result if isinstance(result, (dict, list)) else meta))


def snapshot(folder: Path) -> dict[str, Any]:
    return {
        str(file.relative_to(folder)): (
            os.lstat(file).st_size,
            os.lstat(file).st_mtime_ns,
            os.lstat(file).st_ino,
        )
        for file in folder.rglob("*")
    }


def change(**fields: Any) -> Any:
    return lambda meta: meta.update(fields)


def of_leaf(**fields: Any) -> Any:
    return lambda meta: meta["a"].update(fields)


EDITS = {
    "no type": (lambda meta: meta.pop("_type"), "the root: _type is None, expected the name of a class"),
    "unknown class": (
        change(_type="<class 'x.Y'>", _class="x:Y"),
        "expected a class that this process has defined",
    ),
    "newer version": (
        change(_format_version=3),
        "_format_version is 3, expected at most 2: upgrade td-memmap",
    ),
    "a list": (lambda meta: [meta], "expected an object"),
    "batch size of a leaf": (
        of_leaf(shape=[2, 2]),
        r"key 'a': shape is \[2, 2\], expected a shape that starts with",
    ),
    "short file": (of_leaf(shape=[3, 3]), r"a.memmap: key 'a': the size is 24, expected at least 36 bytes"),
    "huge shape": (
        of_leaf(shape=[3, 1 << 61]),
        "key 'a': shape is .* expected a shape that a tensor can have",
    ),
    "huge shape without elements": (
        of_leaf(shape=[3, 0, 1 << 40, 1 << 40]),
        "key 'a': shape is .* expected a shape that a tensor can have",
    ),
    "huge size without elements": (of_leaf(shape=[3, 0, 1 << 63]), "expected a list of sizes"),
    "negative": (of_leaf(shape=[3, -2]), "expected a list of sizes"),
    "bool size": (of_leaf(shape=[3, True]), "expected a list of sizes"),
    "float size": (of_leaf(shape=[3, 2.0]), "expected a list of sizes"),
    "no list": (of_leaf(shape="3,2"), "expected a list of sizes"),
    "dtype": (
        of_leaf(dtype="torch.float7"),
        "dtype is 'torch.float7', expected a dtype that this torch knows",
    ),
    "dtype type": (of_leaf(dtype=3), "dtype is 3"),
    "quantised": (of_leaf(dtype="torch.qint8"), "a dtype that this torch knows and a file can hold"),
    "nested flag": (of_leaf(is_nested="yes"), "is_nested is 'yes', expected true or false"),
    "nested shape": (of_leaf(is_nested=True, shape=[3]), "the shape of a table of component shapes"),
    "batch size": (change(shape=[-1]), "the root: shape is"),
    **{
        f"batch size {size}": (change(shape=size), f"the root: shape is {size}, expected a list of sizes")
        for size in (None, 3, {})
    },
    "no batch size": (
        lambda meta: meta.pop("shape") and None,
        "the root: shape is None, expected a list of sizes",
    ),
    "an operation": (
        change(custom_op="view"),
        "custom_op is 'view', expected none, or an entry of that name",
    ),
    "batch size of a level": (change(shape=[3, 2]), "key '(n|stack)': the (batch size|shape) is"),
    "device": (change(device="gpu7"), "device is 'gpu7', expected the name of a device"),
    "null device": (change(device=None), "device is None, expected the name of a device"),
    "names": (change(_names=["x", "x"]), "cannot be put together: .*1 batch dims"),
    "unknown entry": (change(new={"what": 1}), "key 'new': the entry is {'what': 1}, expected a leaf"),
    "missing leaf": (
        lambda meta: meta.update(new=meta["a"]),
        "the file of key 'new' is missing: none of .*'new.memmap'",
    ),
    "missing level": (
        change(new={"type": "TensorDict"}),
        "key 'new' is missing: the directory 'new' is not there",
    ),
    "missing leaf of a long name": (
        lambda meta: meta.update({"k" * 300: meta["a"]}),
        "the file of key 'k{300}' is missing: none of",
    ),
    "missing level of a long name": (
        change(**{"k" * 300: {"type": "TensorDict"}}),
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
            change(_format_version=2, kind="TensorDict", meta={"batch_size": []}, entries=rows)
            for rows in ROWS
        ),
        *(
            change(_format_version=2, kind="TensorDict", meta={}, entries=[], members=names)
            for names in (3, [3], [[]], ["."])
        ),
        change(_format_version=2, kind="TensorDict", meta=3),
        lambda meta: [],
    ],
)
def test_read_wrong_metadata_raises_in_every_reader(change: Any, save: Path) -> None:
    edit(save / "meta.json", change)
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


def test_load_subpath_plain_key_entries_is_ignored(save: Path) -> None:
    edit(save / "meta.json", change(entries=[[]]))
    assert TensorDict.load_memmap(save, subpath="n")["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["n", "x" * 300, "\ud800"])
def test_verify_manifest_of_impossible_files_does_not_raise(name: str, save: Path) -> None:
    edit(save / "%manifest.json", lambda manifest: manifest["files"].update({name: [8, None]}))
    assert [problem.file for problem in verify(save).problems] == [name]
    TensorDict({"n": {"c": torch.ones(2)}}).memmap(save)
    assert sorted(os.listdir(save.parent)) == ["save"]
    assert list(TensorDict.load_memmap(save).keys()) == ["n"]


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_load_wrong_metadata_raises(change: Any, message: str, save: Path) -> None:
    edit(save / "meta.json", change)
    before = snapshot(save)
    with pytest.raises(FormatError, match=message) as found:
        TensorDict.load_memmap(save)
    assert str(save) in str(found.value)
    assert snapshot(save) == before


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
        with pytest.raises(FormatError, match=f"{name} is no valid metadata"):
            TensorDict.load_memmap(copy)


FILES = {
    "a leaf is missing": (lambda save: (save / "a.memmap").unlink(), "the file of key 'a' is missing"),
    "a leaf is short": (
        lambda save: os.truncate(save / "a.memmap", 23),
        "the size is 23, expected at least 24 bytes",
    ),
    "a leaf is empty": (lambda save: os.truncate(save / "a.memmap", 0), "the size is 0"),
    "a level is missing": (
        lambda save: shutil.rmtree(save / "n"),
        "key 'n' is missing: the directory 'n' is not there",
    ),
    "metadata of a level is missing": (
        lambda save: (save / "n/meta.json").unlink(),
        "key 'n' has no metadata",
    ),
    "a member is missing": (
        lambda save: shutil.rmtree(save / "stack/1"),
        r"key \('stack', '1'\) is missing: the directory '1' is not there",
    ),
    "a level is a file": (
        lambda save: (shutil.rmtree(save / "n"), (save / "n").write_text("x")),
        "n is a file or a link where a directory should be",
    ),
    "a leaf is a directory": (
        lambda save: ((save / "a.memmap").unlink(), (save / "a.memmap").mkdir()),
        "a.memmap(: key 'a': the size is| is not a regular file)",
    ),
    "a leaf is a pipe": (
        lambda save: ((save / "a.memmap").unlink(), os.mkfifo(save / "a.memmap")),
        "a.memmap(: key 'a': the size is| is not a regular file)",
    ),
    "metadata is a pipe": (
        lambda save: ((save / "meta.json").unlink(), os.mkfifo(save / "meta.json")),
        "meta.json is not a regular file",
    ),
    "a leaf is a link to the outside": (
        lambda save: ((save / "a.memmap").rename(save.parent / "x"), (save / "a.memmap").symlink_to("../x")),
        "a.memmap is a link that leaves",
    ),
    "a leaf is an absolute link": (
        lambda save: ((save / "a.memmap").unlink(), (save / "a.memmap").symlink_to("/etc/passwd")),
        "a.memmap is a link that leaves",
    ),
    "a level is a link": (
        lambda save: ((save / "n").rename(save.parent / "n"), (save / "n").symlink_to("../n")),
        "n is a file or a link where a directory should be",
    ),
    "a link in a circle": (
        lambda save: ((save / "a.memmap").unlink(), (save / "a.memmap").symlink_to("a.memmap")),
        "a.memmap is a link that leaves",
    ),
    "metadata is a link": (
        lambda save: (
            (save / "meta.json").rename(save.parent / "m"),
            (save / "meta.json").symlink_to("../m"),
        ),
        "meta.json is a link that leaves",
    ),
}


@pytest.mark.parametrize(("damage", "message"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("mode", [None, "r", "r+"])
def test_load_wrong_files_raises(damage: Any, message: str, mode: str | None, save: Path) -> None:
    damage(save)
    before, files = snapshot(save.parent), os.listdir("/proc/self/fd")
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(save, mode=mode)
    assert snapshot(save.parent) == before
    assert os.listdir("/proc/self/fd") == files


@pytest.mark.parametrize("offsets", [[-1, 2, 3], [1, 2, 4], [0, 3, 2], [0, -1, 3], [0, 2, 1 << 62]])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_offsets_raises(offsets: list[int], tmp_path: Path) -> None:
    parts = [torch.ones(2, 2), torch.ones(1, 2)]
    TensorDict({"j": torch.nested.nested_tensor(parts, layout=torch.jagged)}).memmap(tmp_path / "save")
    (file,) = (tmp_path / "save").glob("*.offsets.memmap")
    file.write_bytes(torch.tensor(offsets).numpy().tobytes())
    with pytest.raises(FormatError, match="the offsets is .*, expected increasing, within 3"):
        TensorDict.load_memmap(tmp_path / "save")


@pytest.mark.parametrize("lengths", [[-1, 2], [13, 1], [1, 1 << 62], [1, -(1 << 62)], [3, 6]])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_lengths_raises(lengths: list[int], tmp_path: Path) -> None:
    leaf = torch.nested.narrow(
        torch.arange(12).view(2, 6), 1, torch.tensor([1, 2]), torch.tensor([3, 2]), layout=torch.jagged
    )
    TensorDict({"j": leaf}).memmap(tmp_path / "save")
    (file,) = (tmp_path / "save").glob("*.lengths.memmap")
    file.write_bytes(torch.tensor(lengths).numpy().tobytes())
    with pytest.raises(FormatError, match="the lengths is .*, expected from the offsets, within 12"):
        TensorDict.load_memmap(tmp_path / "save")


def test_load_unusual_but_legal_files_returns_values(save: Path) -> None:
    (save / "stray.memmap").write_text("x")
    (save / "stray").mkdir()
    with open(save / "a.memmap", "ab") as file:
        file.write(b"more than the leaf")
    (save / "n" / "b.memmap").rename(save / "n" / "real")
    (save / "n" / "b.memmap").symlink_to("real")
    edit(save / "meta.json", change(_future=3))
    edit(save / "meta.json", lambda meta: meta["a"].pop("is_nested"))
    edit(save / "meta.json", lambda meta: meta.pop("device"))
    before = snapshot(save)
    loaded = TensorDict.load_memmap(save)
    assert (loaded["a"] == 1).all()
    assert (loaded["n", "b"] == 1).all()
    assert loaded.device is None
    assert snapshot(save) == before
    assert os.stat(save / "a.memmap").st_size == 24 + 18


def test_load_not_strict_skips_damaged_entries(save: Path) -> None:
    (save / "a.memmap").unlink()
    (save / "stack" / "meta.json").write_text('{"_type": "<class \'gone.Gone\'>"}')
    edit(save / "meta.json", change(new={"what": 1}))
    loaded = TensorDict.load_memmap(save, strict=False)
    assert list(loaded.keys()) == ["n"]
    # What was read leniently before is no less wrong.
    with pytest.raises(FormatError, match="key 'new': the entry is"):
        TensorDict.load_memmap(save)


@pytest.mark.parametrize("key", ["n", "n n"])
def test_load_not_strict_skips_missing_node(key: str, tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(3), key: {"b": torch.ones(3)}}).memmap(tmp_path)
    shutil.rmtree(tmp_path / key.replace(" ", "%20"))
    refused(tmp_path, f"key '{key}' is missing")
    assert list(TensorDict.load_memmap(tmp_path, strict=False).keys()) == ["a"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_load_not_strict_skips_stack_without_member(lost: int, tmp_path: Path) -> None:
    stack = lazy_stack([TensorDict({"q": torch.full((1,), i)}) for i in range(3)])
    stack.memmap(tmp_path / "stack")
    TensorDict({"a": torch.ones(3), "n": {"l": stack, "b": torch.ones(3)}}, [3]).memmap(tmp_path / "save")
    for folder in tmp_path / "stack", tmp_path / "save" / "n" / "l":
        (folder / str(lost) / "meta.json").unlink()
    assert set(TensorDict.load_memmap(tmp_path / "save", strict=False).keys(True, True)) == {"a", ("n", "b")}
    with pytest.raises(FormatError, match="the root: the members is .*, expected all 3"):
        TensorDict.load_memmap(tmp_path / "stack", strict=False)


def test_load_not_strict_skips_overwritten_node(tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(3), "n": TensorDict({"b": torch.ones(3)}, [3])}, [3]).memmap(tmp_path)
    TensorDict({"c": torch.ones(2)}).memmap(tmp_path / "n")
    refused(tmp_path, r"key 'n': the batch size is \[\], expected one that starts with \[3\]")
    assert list(TensorDict.load_memmap(tmp_path, strict=False).keys()) == ["a"]


def test_load_missing_save_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TensorDict.load_memmap(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="meta.json"):
        TensorDict.load_memmap(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match="is no archive of a save"):
        TensorDict.load_memmap(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotADirectoryError):
        TensorDict.load_memmap(tmp_path / "pipe")


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
def test_load_missing_plugin_error_has_install_command(
    meta: dict[str, Any], what: str, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(save / "n" / "meta.json", lambda _: meta)
    message = rf"n/meta\.json: key 'n'[,:] {what} was written by 'td-images' 1\.2, which is "
    with pytest.raises(MissingPluginError, match=message + "not installed: pip install td-images$"):
        TensorDict.load_memmap(save)
    assert set(TensorDict.load_memmap(save, strict=False).keys()) == {"a", "stack"}
    monkeypatch.setitem(UNAVAILABLE, "td-images", "installed but not active: TD_PLUGINS leaves it out")
    with pytest.raises(MissingPluginError, match=message + "installed but not active: TD_PLUGINS"):
        TensorDict.load_memmap(save)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["TD_BOMB"]) / "exploded"),)


def test_load_pickled_value_is_refused(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def archive(save: Path) -> Path:
    TensorDict.load_memmap(save).memmap(save.with_name("save.tdz"))
    return save.with_name("save.tdz")


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_load_random_archive_raises_only_format_error(data: st.DataObject, archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    copy = archive.with_name("copy.tdz")
    copy.write_bytes(content)
    try:
        TensorDict.load_memmap(copy)
    except (FormatError, MissingPluginError):
        pass


def rewrite(archive: Path, entries: list[tuple[Any, bytes]]) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in entries:
            file.writestr(name, content)


def test_load_hostile_archive_raises(archive: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        entries: list[tuple[Any, bytes]] = [(name, file.read(name)) for name in file.namelist()]
    rewrite(archive, [*entries, ("../evil", b"x")])
    with pytest.raises(FormatError, match="the entry '../evil' would leave the directory it is unpacked to"):
        TensorDict.load_memmap(archive)
    for more in (("x", b""), ("x/y", b"")), (("x/y", b""), ("x", b"")):
        rewrite(archive, [*entries, *more])
        with pytest.raises(FormatError, match="the entry 'x' is a file and a directory"):
            unpack_memmap(archive, archive.with_name("unpacked"))
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewrite(archive, [*entries, entries[-1]])
    with pytest.raises(FormatError, match=f"duplicate entry '{entries[-1][0]}'"):
        TensorDict.load_memmap(archive)
    rewrite(archive, [(name, content[:-1] if name == "a.memmap" else content) for name, content in entries])
    with pytest.raises(FormatError, match="the size is 23, expected"):
        TensorDict.load_memmap(archive)
    rewrite(archive, [pair for pair in entries if pair[0] != "meta.json"])
    with pytest.raises(FormatError, match="with a meta.json at its top is expected"):
        TensorDict.load_memmap(archive)
    bomb = zipfile.ZipInfo("meta.json")
    bomb.compress_type = zipfile.ZIP_DEFLATED
    rewrite(archive, [(bomb, b" " * (1 << 29) + b"{}")])
    with pytest.raises(FormatError, match="bytes, at most 536870912 are read"):
        TensorDict.load_memmap(archive)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"header_offset": 1 << 63}, "the entry 'a.memmap' would start at byte 9223372036854775808"),
        ({"header_offset": 1 << 20}, "the entry 'a.memmap' would start at byte 1048576"),
        ({"file_size": 200, "compress_size": 200}, "the entry 'a.memmap' ends at byte .*, the files at"),
    ],
)
def test_load_archive_wrong_directory_raises(damage: dict[str, int], message: str, archive: Path) -> None:
    meta = {"a": {**ENTRY, "shape": [200]}, "shape": [], "_type": "<class 'tensordict._td.TensorDict'>"}
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("meta.json", json.dumps(meta))
        file.writestr("a.memmap", bytes(100 if "file_size" in damage else 200))
        for name, value in damage.items():
            setattr(file.getinfo("a.memmap"), name, value)
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(archive)
    with pytest.raises(FormatError, match="the entry 'a.memmap'"):
        unpack_memmap(archive, archive.with_name("unpacked"))


def test_load_unreadable_zip_raises(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 99  # the version that is needed to read it
    archive.write_bytes(content)
    assert not is_memmap_archive(archive)
    with pytest.raises(FormatError, match="is no archive of a save: .*version 9.9"):
        TensorDict.load_memmap(archive)


def test_load_archive_encrypted_leaf_raises(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    archive.write_bytes(content)
    with pytest.raises(FormatError, match="the entry 'stack/2/x.memmap' is encrypted"):
        TensorDict.load_memmap(archive)


def test_load_archive_compressed_leaf_wrong_size_raises(archive: Path) -> None:
    meta = {"a": {**ENTRY, "shape": [1 << 60]}, "shape": [], "_type": "<class 'tensordict._td.TensorDict'>"}
    leaf = zipfile.ZipInfo("a.memmap")
    leaf.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("meta.json", json.dumps(meta))
        file.writestr(leaf, b"x")
        leaf.file_size = 1 << 60
    with pytest.raises(FormatError, match="has 1 bytes, its directory says 1152921504606846976"):
        TensorDict.load_memmap(archive)


def test_load_node_refused_by_kind_error_has_file(save: Path) -> None:
    edit(save / "stack" / "meta.json", change(stack_dim=7))
    with pytest.raises(
        FormatError, match="stack/meta.json: key 'stack' cannot be put together: .*stack_dim 7"
    ):
        TensorDict.load_memmap(save)


def test_load_stack_huge_member_count_raises(save: Path) -> None:
    edit(save / "stack" / "meta.json", change(_members=1 << 24))
    with pytest.raises(FormatError, match="_members is 16777216, expected a number of members, at most"):
        TensorDict.load_memmap(save)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no valid metadata"),
        ("[]", "expected an object of values"),
        ('{"values": []}', "expected an object of values"),
        ('{"values": {"data": 3}}', "expected an object of values"),
    ],
)
def test_load_wrong_value_types_error_has_file(content: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    TensorDict({"v": (1, "a")}).memmap(tmp_path / "save")
    (tmp_path / "save" / "v" / "%values.json").write_text(content)
    with pytest.raises(FormatError, match=f"v/%values.json.*{message}"):
        TensorDict.load_memmap(tmp_path / "save")


@pytest.mark.parametrize("content", [["f"], {"g": 1}])
def test_load_pickle_without_values_raises(content: Any, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    prefix = tmp_path / "save"
    TensorDict({"v": len, "shape": {"shape": torch.ones(1)}}).memmap(prefix, allow_pickle=True)
    (prefix / "v" / "other.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(FormatError, match="v/other.pickle|key 'v'"):
        TensorDict.load_memmap(prefix, allow_pickle=True)


def test_load_stack_missing_member_raises(save: Path) -> None:
    edit(save / "stack" / "meta.json", lambda meta: {k: v for k, v in meta.items() if k != "_members"})
    assert TensorDict.load_memmap(save).batch_size == TensorDict.load_memmap(save)["stack"].batch_size[:1]
    shutil.rmtree(save / "stack" / "1")
    for read in (TensorDict.load_memmap, inspect):
        with pytest.raises(FormatError, match=r"the members is \[0, 2\], expected a member 1"):
            read(save)


@pytest.mark.parametrize("damage", ["a leaf is missing", "a leaf is short"])
def test_load_fake_tensors_missing_file_raises(damage: str, save: Path) -> None:
    break_it, message = FILES[damage]
    break_it(save)
    with FakeTensorMode(), pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(save)


def test_load_unlisted_nodes_sorts_keys(save: Path) -> None:
    td = TensorDict({key: {"x": torch.ones(1)} for key in "cab"})
    td.memmap(save)
    edit(save / "meta.json", lambda meta: {name: meta[name] for name in ("shape", "_type")})
    assert list(TensorDict.load_memmap(save).keys()) == ["a", "b", "c"]


@pytest.mark.parametrize("which", ["0", "1", "2"])
def test_load_nodes_of_equal_metadata_finds_each_file(tmp_path: Path, which: str) -> None:
    prefix, key = tmp_path / "save", "x y"
    td = TensorDict({str(i): {key: torch.full((2,), i)} for i in range(3)})
    td.memmap(prefix)
    file = prefix / which / "x y.memmap"
    (prefix / which / "x%20y.memmap").rename(file)
    for strict in (True, False):
        loaded = TensorDict.load_memmap(prefix, mode="r", strict=strict)
        assert all(torch.equal(loaded[str(i), key], td[str(i), key]) for i in range(3))
    os.truncate(file, 8)
    with pytest.raises(FormatError, match=rf"'{which}', '{key}'"):
        TensorDict.load_memmap(prefix)
    loaded = TensorDict.load_memmap(prefix, strict=False)
    assert [str(i) for i in range(3) if key not in loaded[str(i)].keys()] == [which]


LEAF = {**ENTRY, "shape": [2]}


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
def test_load_wrong_jagged_metadata_raises(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
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
def test_load_wrong_component_shapes_raises(table: list[int], message: str, tmp_path: Path) -> None:
    ragged(torch.strided).memmap(tmp_path / "save")
    (tmp_path / "save" / "j.shape.memmap").write_bytes(torch.tensor(table).numpy().tobytes())
    refused(tmp_path / "save", message)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_component_count_raises(tmp_path: Path) -> None:
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
def test_load_wrong_general_metadata_raises(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
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
def test_load_wrong_general_pickle_raises(content: bytes, message: str, tmp_path: Path) -> None:
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
def test_verify_wrong_manifest_raises(change: dict[str, Any], message: str, tmp_path: Path) -> None:
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
def test_load_damaged_old_release_raises(file: str, content: bytes, message: str, tmp_path: Path) -> None:
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
def test_load_contradictory_archive_raises(at: bytes, change: int, message: str, tmp_path: Path) -> None:
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
def test_load_damaged_saved_view_raises(change: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "lazy_view_unsqueeze", save)
    if change is None:
        shutil.rmtree(save / "_source")
    else:
        edit(save / "meta.json", lambda meta: meta.update(change))
    refused(save, message)


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
def test_load_saved_view_index_equals_indexed_source(
    code: Any, index: Any, tmp_path: Path, same: Any
) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "sub_td_slice", save)
    edit(save / "meta.json", lambda meta: meta.update(index=code))
    same(TensorDict.load_memmap(save), TensorDict.load_memmap(save / "_source")[index])


@pytest.mark.parametrize("code", ["x", ["x"], ["list", 1], ["tuple", [[1]]], {}])
def test_load_saved_view_invalid_index_raises(code: Any, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(Path(__file__).parent / "fixtures" / "memmap" / "sub_td_slice", save)
    edit(save / "meta.json", lambda meta: meta.update(index=code))
    refused(save, "a saved view has an index that cannot be one")


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("content", [lambda n: bytes(n), lambda n: bytes(4096), lambda n: b"{" * (n + 1)])
def test_verify_unloadable_save_is_not_ok(content: Any, checksums: bool, tmp_path: Path) -> None:
    TensorDict({"a": torch.arange(3), "n": {"b": 1}}).memmap(tmp_path / "save", checksums=checksums)
    for meta in tmp_path / "save/n/meta.json", tmp_path / "save/meta.json":
        meta.write_bytes(content(meta.stat().st_size))
        assert not verify(tmp_path / "save").ok
        with pytest.raises(FormatError):
            TensorDict.load_memmap(tmp_path / "save")


def test_verify_checks_files_of_added_entries(tmp_path: Path) -> None:
    mapped = TensorDict({"a": torch.arange(3)}).memmap(tmp_path / "save")
    mapped.make_memmap("z", (3,))
    assert verify(tmp_path / "save").ok
    (tmp_path / "save/z.memmap").unlink()
    report = verify(tmp_path / "save")
    assert [(each.file, each.kind) for each in report.problems if each.kind != "modified"] == [
        ("z.memmap", "missing")
    ]


def test_verify_archive_missing_leaf_is_not_ok(tmp_path: Path) -> None:
    TensorDict({"a": torch.arange(3), "b": 1}).memmap(tmp_path / "save.tdz")
    with zipfile.ZipFile(tmp_path / "save.tdz") as old, zipfile.ZipFile(tmp_path / "other.tdz", "w") as new:
        for info in old.infolist():
            if info.filename != "a.memmap":
                new.writestr(info, old.read(info))
    report = verify(tmp_path / "other.tdz")
    assert [(each.file, each.kind) for each in report.problems] == [("a.memmap", "missing")]
