"""Copies between locations, and the command line."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.typing import ObjectInfo, Range
from td_remote import Remote, copy
from td_remote.__main__ import main
from td_store.testing import MemoryStore, ObjectStoreTests

TREE = {"meta.json": b"{}", "a/b.bin": bytes(range(256)) * 100, "c": b"", "zarr.json": b"1"}


def make_folder(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "tree"


def read_all(store: Any) -> dict[str, bytes]:
    return {info.name: bytes(store.read([Range(info.name, 0)])[0]) for info in store.list()}


def test_tree_is_copied_there_and_back(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/x"
    assert copy(make_folder(tmp_path, TREE), url) == 4
    assert read_all(Remote(url)) == TREE
    assert copy(Remote(url), str(tmp_path / "back")) == 4
    assert {
        path.relative_to(tmp_path / "back").as_posix(): path.read_bytes()
        for path in (tmp_path / "back").rglob("*")
        if path.is_file()
    } == TREE


def test_object_is_copied(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/x.bin"
    (tmp_path / "x.bin").write_bytes(b"0123")
    seen: list[tuple[int, int]] = []
    assert copy(tmp_path / "x.bin", url, progress=lambda done, total: seen.append((done, total))) == 1
    assert seen == [(4, 4)]
    assert copy(url, tmp_path / "y.bin") == 1
    assert (tmp_path / "y.bin").read_bytes() == b"0123"


def test_copy_to_bucket_and_back(s3: Callable[..., Remote], tmp_path: Path) -> None:
    remote = s3("tree")
    copy(make_folder(tmp_path, TREE), remote)
    assert read_all(remote) == TREE
    copy(remote, s3("again"))
    assert read_all(s3("again")) == TREE


def test_root_objects_are_written_last() -> None:
    target = MemoryStore({}, "s3://bucket/x")
    copy(MemoryStore(TREE), target)
    assert [names[0] for operation, names in target.log if operation == "write"][-2:] == [
        "zarr.json",
        "meta.json",
    ]


def test_copy_over_objects_needs_permission() -> None:
    target = MemoryStore({"old": b"1", "c": b"2", "meta.json": b"old"})
    with pytest.raises(FileExistsError, match="has 3 objects: pass overwrite=True to replace them"):
        copy(MemoryStore(TREE), target)
    assert target.stat(["old"]) != [None]
    copy(MemoryStore(TREE), target, overwrite=True)
    assert read_all(target) == TREE
    changes = [row for row in target.log if row[0] in ("delete", "write")]
    assert changes[0] == ("delete", ("meta.json",)) and changes[-1] == ("delete", ("old",))


class LossyStore(MemoryStore):
    """A store that changes what it stores, and gives MD5 as stamps."""

    def write(self, name: str, content: Any, *, create: bool = False) -> ObjectInfo:
        whole = b"".join(map(bytes, content))
        return super().write(name, [self.change(whole)])._replace(stamp='"' + "1" * 32 + '"')

    def change(self, content: bytes) -> bytes:
        return content[:-1]

    def read(self, ranges: Any) -> Any:
        return super().read([item._replace(stamp=None) for item in ranges])


class FlippingStore(LossyStore):
    def change(self, content: bytes) -> bytes:
        return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize("cls", [LossyStore, FlippingStore])
def test_wrong_copy_raises(cls: type[LossyStore]) -> None:
    class Source(MemoryStore):
        def stat(self, names: Any) -> Any:
            return [ObjectInfo("", 4, '"' + "0" * 32 + '"') if name == "" else None for name in names]

        def read(self, ranges: Any) -> Any:
            return [memoryview(b"0123")[item.start : item.stop] for item in ranges]

    with pytest.raises(OSError, match="the copy of '' has other bytes than the original"):
        copy(Source(), cls())


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ("memory://none/x", "memory://none/y", FileNotFoundError, "there is nothing at memory://none/x"),
        ("nowhere://x", "memory://none/y", td_core.MissingPluginError, "none provides the scheme 'nowhere'"),
        (
            MemoryStore({"": b"1"}),
            MemoryStore({"a": b"1"}),
            FileExistsError,
            "is an object and a tree of objects",
        ),
    ],
)
def test_wrong_copy_is_refused_before_it_begins(source: Any, target: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        copy(source, target, overwrite=True)


class TestLocalObjects(ObjectStoreTests):
    @pytest.fixture(autouse=True)
    def prepare(self, tmp_path: Path) -> None:
        type(self).folder = tmp_path  # type: ignore[attr-defined]

    def make(self, contents: Any) -> Any:
        from td_remote._copy_objects import LocalObjects

        path = self.folder / uuid.uuid4().hex  # type: ignore[attr-defined]
        for name, content in contents.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        return LocalObjects(path)


def test_command_line_copies_lists_and_clears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TD_REMOTE_CACHE", raising=False)
    url = f"memory://{uuid.uuid4().hex}/x"
    folder = make_folder(tmp_path, TREE)
    assert main(["cp", str(folder), url]) == 0
    assert main(["cp", str(folder), url]) == 2
    assert main(["cp", str(folder), url, "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["ls", url]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["25,600", "a/b.bin"]
    assert main(["ls", url, "--json"]) == 0
    assert [item["name"] for item in json.loads(capsys.readouterr().out)] == [
        "a/b.bin",
        "c",
        "meta.json",
        "zarr.json",
    ]
    assert main(["ls", f"{url}/none"]) == 1
    Remote(url, cache=tmp_path / "blocks").read([Range("a/b.bin", 0, 10)])
    capsys.readouterr()
    assert main(["cache", str(tmp_path / "blocks")]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path / 'blocks'}: 1 blocks, 25,648 bytes"
    assert main(["cache", str(tmp_path / "blocks"), "--clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 0
    assert main(["cache"]) == 2
    assert "set TD_REMOTE_CACHE" in capsys.readouterr().err


def test_saves_at_locations_are_those_of_paths(tmp_path: Path) -> None:
    pytest.importorskip("td_safetensors")
    data = TensorDict({"a": torch.arange(10)}, [10])
    shelf = Remote(f"memory://{uuid.uuid4().hex}")
    td_core.save(data, shelf / "a.safetensors")
    assert td_core.open(shelf / "a.safetensors")[[9, 2]]["a"].tolist() == [9, 2]
    td_core.save(data, shelf / "shards", format="safetensors", max_shard_size=40)
    assert (td_core.load(shelf / "shards") == data).all()
    assert (td_core.load(shelf / "shards" / "model.safetensors.index.json") == data).all()
