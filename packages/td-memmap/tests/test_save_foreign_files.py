"""Paths, links and files that a save must not overwrite, and tensors that it cannot store."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import td_memmap
from td_core import TensorDict
from td_core.errors import CodecError, FormatError
from td_memmap import FileTakenError, MemoryMappedTensor, _fs


def test_memmap_over_file_of_other_leaf_raises(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix.mkdir()
    a = MemoryMappedTensor.from_tensor(torch.arange(4), filename=prefix / "a.memmap")
    in_the_way = pytest.raises(FileTakenError, match="'a.memmap' exists and is not part of a save")
    with in_the_way:
        TensorDict(a=torch.zeros(4)).memmap(prefix)
    with in_the_way:
        TensorDict(a=a[:2]).memmap(prefix, copy_existing=True)
    monkeypatch.setattr(_fs, "is_mount", lambda path: True)
    with in_the_way:
        TensorDict(a=a).memmap(prefix)
    assert os.listdir(prefix) == ["a.memmap"]
    assert MemoryMappedTensor.from_filename(prefix / "a.memmap", torch.int64, (4,)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("path", [b"save", 3])
@pytest.mark.parametrize(
    "work",
    [
        lambda path: TensorDict({"a": 1}).memmap(path),
        lambda path: TensorDict({"a": 1}).memmap_(path, existsok=False),
        lambda path: TensorDict({"a": 1}).memmap(path, archive=True),
        lambda path: TensorDict({"a": 1}).memmap_like(path),
        TensorDict.load_memmap,
        lambda path: td_memmap.append_memmap(path, TensorDict({"a": torch.ones(1)}, batch_size=[1])),
        lambda path: td_memmap.pack_memmap(path, "save.tdz"),
        lambda path: td_memmap.pack_memmap("save", path),
        lambda path: td_memmap.unpack_memmap(path, "save"),
        lambda path: td_memmap.unpack_memmap("save.tdz", path),
        td_memmap.is_memmap_archive,
        td_memmap.refresh_archive_checksums,
        td_memmap.inspect,
        td_memmap.verify,
        td_memmap.print_directory_tree,
        lambda path: MemoryMappedTensor.from_filename(path, torch.int8, (0,)),
        lambda path: MemoryMappedTensor.from_tensor(torch.ones(2), filename=path),
    ],
)
def test_memmap_path_of_wrong_type_raises(
    work: Any, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    TensorDict({"a": 1}).memmap("save")
    td_memmap.pack_memmap("save", "save.tdz")
    with pytest.raises(TypeError, match=f"os.PathLike object.*{type(path).__name__}"):
        work(path)
    assert sorted(os.listdir()) == ["save", "save.tdz"]


def test_memmap_replacing_save_keeps_permissions(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.ones(2)})
    saved = td.memmap(tmp_path / "save")
    for name, write in (
        ("save", lambda: td.memmap(tmp_path / "save")),
        ("save/meta.json", lambda: saved.make_memmap("b", (2,))),
        ("save.tdz", lambda: td.memmap(tmp_path / "save.tdz")),
        ("t", lambda: MemoryMappedTensor.from_tensor(td["a"], filename=tmp_path / "t", existsok=True)),
    ):
        if not (tmp_path / name).exists():
            write()
        (tmp_path / name).chmod(0o740)
        write()
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o740


def test_memmap_unstorable_leaf_writes_nothing(nest: Any, prefix: Path, list_files: Any) -> None:
    nest.memmap(prefix)
    files = {name: os.stat(prefix / name).st_mtime_ns for name in list_files(prefix)}
    nest["n", "deep", "bad"] = torch.eye(3).to_sparse()
    with pytest.raises(CodecError, match=r"layout torch.sparse_coo at key \('n', 'deep', 'bad'\)"):
        nest.memmap(prefix)
    for where in (prefix, None):
        with pytest.raises(CodecError, match=r"elements of a meta tensor at key \('n', 'a'\)"):
            TensorDict({"n": {"a": torch.empty(2, device="meta")}}).memmap(where)
    assert files == {name: os.stat(prefix / name).st_mtime_ns for name in list_files(prefix)}
    assert os.listdir(prefix.parent) == [prefix.name]


def make_fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def make_masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(3), torch.ones(3, dtype=torch.bool))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [make_fake, make_masked])
def test_memmap_tensor_without_memory_raises(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    td = TensorDict({"n": {"a": make()}})
    for prefix in (tmp_path / "save", tmp_path / "save.tdz", None):
        with pytest.raises(
            CodecError, match=r"elements of a \w+ at key \('n', 'a'\): it has no memory of its own"
        ):
            td.memmap(prefix)
        assert td.memmap_like(prefix)["n", "a"].tolist() == [0, 0, 0]
    with pytest.raises(CodecError, match="at an anonymous file: it has no memory of its own"):
        MemoryMappedTensor.from_tensor(td["n", "a"])

    def save(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CodecError, match="key 'a': it has no memory of its own"):
            TensorDict({"a": row}).memmap()
        return row

    torch.vmap(save)(torch.ones(2, 3))


@pytest.mark.parametrize("link", ["save", "save/meta.json"])
def test_memmap_cyclic_symlink_raises_with_path(nest: Any, tmp_path: Path, link: str) -> None:
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to((tmp_path / link).name)
    for create in (nest.memmap_like, partial(nest.memmap, existsok=False)):
        with pytest.raises(FormatError, match=f"{tmp_path / link}.* is a link that leads back to itself"):
            create(tmp_path / "save")


def test_memmap_to_symlink_or_relative_path_saves(
    nest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    nest.memmap(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    same(TensorDict.load_memmap(tmp_path / "real"), nest)
    monkeypatch.chdir(tmp_path / "real")
    nest.memmap(".")
    nest.memmap(".")
    assert os.path.samefile(os.getcwd(), tmp_path / "real")
    same(TensorDict.load_memmap("."), nest)
    monkeypatch.chdir(tmp_path)
    nest.memmap("some/where")
    same(TensorDict.load_memmap(tmp_path / "some" / "where"), nest)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        nest.memmap(tmp_path / "file")


def test_load_through_symlink_resolves_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/in")
    monkeypatch.chdir(tmp_path)
    TensorDict({"a": 1}).memmap("link/../save")
    assert (tmp_path / "real/save/meta.json").exists()
    assert TensorDict.load_memmap(os.path.join("link", "..", "save"))["a"] == 1
