"""Damaged, missing or hostile files of a save or archive raise FormatError."""

from __future__ import annotations

import json
import os
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
from td_core.errors import FormatError, MissingPluginError
from td_memmap import inspect, is_memmap_archive, pack_memmap, unpack_memmap, verify

ENTRY = {"device": "cpu", "shape": [], "dtype": "torch.int8", "is_nested": False, "file": "a"}


@pytest.mark.parametrize("name", ["n", "x" * 300, "\ud800"])
def test_verify_manifest_with_impossible_names_reports_them(
    name: str, save: Path, edit_metadata: Any
) -> None:
    edit_metadata(save / "%manifest.json", lambda manifest: manifest["files"].update({name: [8, None]}))
    assert [problem.file for problem in verify(save).problems] == [name]
    TensorDict({"n": {"c": torch.ones(2)}}).memmap(save)
    assert sorted(os.listdir(save.parent)) == ["save"]
    assert list(TensorDict.load_memmap(save).keys()) == ["n"]


FILES = {
    "a leaf is missing": (lambda save: (save / "a.memmap").unlink(), "the file of key 'a' is missing"),
    "a leaf is short": (
        lambda save: os.truncate(save / "a.memmap", 23),
        "the size is 23, expected at least 24 bytes",
    ),
    "a leaf is empty": (lambda save: os.truncate(save / "a.memmap", 0), "the size is 0"),
    "a node is missing": (
        lambda save: shutil.rmtree(save / "n"),
        "key 'n' is missing: the directory 'n' is not there",
    ),
    "metadata of a node is missing": (
        lambda save: (save / "n/meta.json").unlink(),
        "key 'n' has no metadata",
    ),
    "a member is missing": (
        lambda save: shutil.rmtree(save / "stack/1"),
        r"key \('stack', '1'\) is missing: the directory '1' is not there",
    ),
    "a node is a file": (
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
    "a leaf is a link that leaves the save": (
        lambda save: ((save / "a.memmap").rename(save.parent / "x"), (save / "a.memmap").symlink_to("../x")),
        "a.memmap is a link that leaves",
    ),
    "a leaf is an absolute link": (
        lambda save: ((save / "a.memmap").unlink(), (save / "a.memmap").symlink_to("/etc/passwd")),
        "a.memmap is a link that leaves",
    ),
    "a node is a link": (
        lambda save: ((save / "n").rename(save.parent / "n"), (save / "n").symlink_to("../n")),
        "n is a file or a link where a directory should be",
    ),
    "a leaf is a link to itself": (
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
def test_load_missing_or_wrong_files_raises(
    damage: Any, message: str, mode: str | None, save: Path, list_stats: Any
) -> None:
    damage(save)
    before, files = list_stats(save.parent), os.listdir("/proc/self/fd")
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(save, mode=mode)
    assert list_stats(save.parent) == before
    assert os.listdir("/proc/self/fd") == files


def test_load_extra_files_and_fields_ignores_them(save: Path, list_stats: Any, edit_metadata: Any) -> None:
    (save / "stray.memmap").write_text("x")
    (save / "stray").mkdir()
    with open(save / "a.memmap", "ab") as file:
        file.write(b"more than the leaf")
    (save / "n" / "b.memmap").rename(save / "n" / "real")
    (save / "n" / "b.memmap").symlink_to("real")
    edit_metadata(save / "meta.json", lambda meta: meta.update(_future=3))
    edit_metadata(save / "meta.json", lambda meta: meta["a"].pop("is_nested"))
    edit_metadata(save / "meta.json", lambda meta: meta.pop("device"))
    before = list_stats(save)
    loaded = TensorDict.load_memmap(save)
    assert (loaded["a"] == 1).all()
    assert (loaded["n", "b"] == 1).all()
    assert loaded.device is None
    assert list_stats(save) == before
    assert os.stat(save / "a.memmap").st_size == 24 + 18


@pytest.mark.parametrize("key", ["n", "n n"])
def test_load_not_strict_skips_missing_node(key: str, tmp_path: Path, assert_load_fails: Any) -> None:
    TensorDict({"a": torch.ones(3), key: {"b": torch.ones(3)}}).memmap(tmp_path)
    shutil.rmtree(tmp_path / key.replace(" ", "%20"))
    assert_load_fails(tmp_path, f"key '{key}' is missing")
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


def test_load_not_strict_skips_overwritten_node(tmp_path: Path, assert_load_fails: Any) -> None:
    TensorDict({"a": torch.ones(3), "n": TensorDict({"b": torch.ones(3)}, [3])}, [3]).memmap(tmp_path)
    TensorDict({"c": torch.ones(2)}).memmap(tmp_path / "n")
    assert_load_fails(tmp_path, r"key 'n': the batch size is \[\], expected one that starts with \[3\]")
    assert list(TensorDict.load_memmap(tmp_path, strict=False).keys()) == ["a"]


def test_load_missing_save_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TensorDict.load_memmap(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="meta.json"):
        TensorDict.load_memmap(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match="is not an archive of a save"):
        TensorDict.load_memmap(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotADirectoryError):
        TensorDict.load_memmap(tmp_path / "pipe")


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


def write_zip(archive: Path, entries: list[tuple[Any, bytes]]) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in entries:
            file.writestr(name, content)


def test_load_hostile_archive_raises(archive: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        entries: list[tuple[Any, bytes]] = [(name, file.read(name)) for name in file.namelist()]
    write_zip(archive, [*entries, ("../evil", b"x")])
    with pytest.raises(FormatError, match="the entry '../evil' would leave the directory it is unpacked to"):
        TensorDict.load_memmap(archive)
    for more in (("x", b""), ("x/y", b"")), (("x/y", b""), ("x", b"")):
        write_zip(archive, [*entries, *more])
        with pytest.raises(FormatError, match="the entry 'x' is a file and a directory"):
            unpack_memmap(archive, archive.with_name("unpacked"))
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_zip(archive, [*entries, entries[-1]])
    with pytest.raises(FormatError, match=f"duplicate entry '{entries[-1][0]}'"):
        TensorDict.load_memmap(archive)
    write_zip(archive, [(name, content[:-1] if name == "a.memmap" else content) for name, content in entries])
    with pytest.raises(FormatError, match="the size is 23, expected"):
        TensorDict.load_memmap(archive)
    write_zip(archive, [pair for pair in entries if pair[0] != "meta.json"])
    with pytest.raises(FormatError, match="with a meta.json at its top is expected"):
        TensorDict.load_memmap(archive)
    bomb = zipfile.ZipInfo("meta.json")
    bomb.compress_type = zipfile.ZIP_DEFLATED
    write_zip(archive, [(bomb, b" " * (1 << 29) + b"{}")])
    with pytest.raises(FormatError, match="bytes, at most 536870912 are read"):
        TensorDict.load_memmap(archive)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"header_offset": 1 << 63}, "the entry 'a.memmap' would start at byte 9223372036854775808"),
        ({"header_offset": 1 << 20}, "the entry 'a.memmap' would start at byte 1048576"),
        (
            {"file_size": 200, "compress_size": 200},
            "the entry 'a.memmap' ends at byte .*, what follows is at",
        ),
    ],
)
def test_load_archive_wrong_zip_directory_raises(damage: dict[str, int], message: str, archive: Path) -> None:
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


def test_load_archive_of_unknown_zip_version_raises(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = (
        99  # This field is the zip version required to read the file.
    )
    archive.write_bytes(content)
    assert not is_memmap_archive(archive)
    with pytest.raises(FormatError, match="is not an archive of a save: .*version 9.9"):
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


def test_load_stack_missing_member_raises(save: Path, edit_metadata: Any) -> None:
    edit_metadata(
        save / "stack" / "meta.json", lambda meta: {k: v for k, v in meta.items() if k != "_members"}
    )
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


@pytest.mark.parametrize("which", ["0", "1", "2"])
def test_load_equal_metadata_with_other_file_names_finds_files(tmp_path: Path, which: str) -> None:
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": 3}, "files is 3, expected the size of every file"),
        ({"hashes": [1]}, r"hashes is \[1\], expected the hash of every file"),
        ({"algorithm": "rot13"}, "the hashes are 'rot13', which needs: pip install"),
        ({"files": {"a.memmap": 8}}, "the row of 'a.memmap' is 8, expected size and time"),
        (
            {"files": {"a.memmap": [8.0, None]}},
            r"the row of 'a.memmap' is \[8.0, None\], expected size and time",
        ),
        ({"files": {"a.memmap": [8]}}, r"the row of 'a.memmap' is \[8\], expected size and time"),
    ],
)
def test_verify_wrong_manifest_raises(
    change: dict[str, Any], message: str, tmp_path: Path, edit_metadata: Any
) -> None:
    save = tmp_path / "save"
    TensorDict({"a": torch.ones(2)}).memmap(save, checksums=True)
    edit_metadata(save / "%manifest.json", lambda manifest: manifest.update(change))
    with pytest.raises(FormatError, match=f"%manifest.json: {message}"):
        verify(save)
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(save, verify=True)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (b"PK\x03\x04", 0, "has no header at byte"),
        (b"a.memmap", 0, "is called 'b.memmap' in its own header|called b'b.memmap'"),
    ],
)
def test_load_archive_with_wrong_local_header_raises(
    at: bytes, change: int, message: str, tmp_path: Path, assert_load_fails: Any
) -> None:
    TensorDict({"a": torch.ones(200)}).memmap(tmp_path / "save")
    packed = pack_memmap(tmp_path / "save", tmp_path / "save.tdz")
    with zipfile.ZipFile(packed) as file:
        start = file.getinfo("a.memmap").header_offset
    content = bytearray(Path(packed).read_bytes())
    content[content.index(at, start)] += 1
    Path(packed).write_bytes(content)
    assert_load_fails(Path(packed), message)


def test_verify_missing_file_of_added_entry_reports_it(tmp_path: Path) -> None:
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
