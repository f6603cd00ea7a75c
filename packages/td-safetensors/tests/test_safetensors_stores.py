"""Files and shards in object stores: how many requests an operation sends, and what a pickle contains."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import FormatError, TensorDict
from td_core.typing import ObjectLocation, Range
from td_safetensors import save
from td_store.testing import MemoryStore


@pytest.fixture
def store(td: TensorDict, path: Path) -> MemoryStore:
    """Return a store whose location is a file."""
    save(td, path, checksums=True)
    return MemoryStore({"": path.read_bytes()}, "s3://bucket/data.safetensors")


@pytest.fixture
def shards(tmp_path: Path, td: TensorDict) -> MemoryStore:
    """Return a store whose location is a directory of shards."""
    save(td, tmp_path / "shards", max_shard_size=40)
    return MemoryStore(
        {file.name: file.read_bytes() for file in (tmp_path / "shards").iterdir()}, "s3://bucket/shards"
    )


def test_every_operation_reads_store(store: MemoryStore, td: TensorDict, path: Path, same: Any) -> None:
    same(td_core.load(store), td)
    same(td_core.load(store, rows=[3, 1]), td[[3, 1]])
    same(td.clone().zero_().load_(store), td)
    same(td_core.open(store)[1:3].clone(), td[1:3])
    assert td_core.inspect(store).as_dict() == td_core.inspect(path).as_dict()
    report = td_core.verify(store)
    assert (report.ok, report.hashed) == (True, 3)


def test_open_sends_one_request_and_rows_one(store: MemoryStore, td: TensorDict, same: Any) -> None:
    opened = td_core.open(store)
    assert store.log == [("peek", ("",))]
    store.log.clear()
    same(opened[[3, 0]].clone(), td[[3, 0]])
    assert store.log == [("read", ("",))]  # close to each other, the rows of all leaves are one range


def test_open_shards_reads_all_headers_together(shards: MemoryStore, td: TensorDict, same: Any) -> None:
    files = [name for name in shards._objects if name.endswith(".safetensors")]
    assert len(files) == 3
    opened = td_core.open(shards)
    operations = [(operation, len(names)) for operation, names in shards.log]
    # The location, the marks of a tree, the index, then the shards.
    assert operations == [
        ("peek", 1),
        ("stat", len(ObjectLocation.MARKS)),
        ("read", 1),
        ("stat", 3),
        ("read", 3),
    ]
    shards.log.clear()
    same(opened[[3, 0]].clone(), td[[3, 0]])
    assert [operation for operation, _ in shards.log] == ["read"]


def test_header_longer_than_first_bytes_is_read(path: Path) -> None:
    td = TensorDict({f"{i:05}" * 20: torch.tensor([i]) for i in range(700)})
    save(td, path)
    assert path.stat().st_size > 1 << 17
    store = MemoryStore({"": path.read_bytes()})
    assert (td_core.load(store) == td).all()


def test_read_of_replaced_object_raises(store: MemoryStore) -> None:
    opened = td_core.open(store)
    store.write("", [bytes(store.read([Range("", 0)])[0])])
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        opened["a"].clone()


def test_damaged_index_in_store_raises(shards: MemoryStore) -> None:
    shards.write("model.safetensors.index.json", [b'{"weight_map": {"a": "../secret"}}'])
    with pytest.raises(FormatError, match=r"weight_map of 'a' names a file outside of its directory"):
        td_core.load(shards)


def test_missing_shard_in_store_raises(shards: MemoryStore) -> None:
    shards.delete([next(name for name in shards._objects if name.endswith(".safetensors"))])
    with pytest.raises(FormatError, match="a shard that it names is missing"):
        td_core.load(shards)


def test_index_as_store_has_no_shards_beside_it(shards: MemoryStore) -> None:
    content = bytes(shards.read([Range("model.safetensors.index.json", 0)])[0])
    with pytest.raises(ValueError, match="pass the store of the folder above it"):
        td_core.load(MemoryStore({"": content}))


def test_options_reach_server_that_detects_and_pickles_have_none(
    urls: None, path: Path, td: TensorDict
) -> None:
    fsspec = pytest.importorskip("fsspec")
    save(td, path)
    fsspec.filesystem("memory").pipe_file("/secrets/x.safetensors", path.read_bytes())
    options = {"key": "secret", "client": {"token": "secret"}}
    opened = td_core.open("memory://secrets/x.safetensors", storage_options=options)
    content = pickle.dumps(opened)
    assert b"secret" not in content.replace(b"memory://secrets/x", b"")
    again = pickle.loads(content)
    with pytest.raises(OSError, match="a pickle does not contain storage options"):
        again["a"].clone()
    assert (td_core.reopen(again, storage_options=options).clone() == td).all()


def test_error_of_library_is_os_error(
    urls: None, path: Path, td: TensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    save(td, path)
    fsspec.filesystem("memory").pipe_file("/cut/x.safetensors", path.read_bytes())
    opened = td_core.open("memory://cut/x.safetensors")

    def cut(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the payload is not complete")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", cut)
    for read in (lambda: opened["a"].clone(), lambda: td_core.load("memory://cut/x.safetensors")):
        with pytest.raises(OSError, match=r"memory://cut/x.safetensors: .*RuntimeError: the payload is not"):
            read()


def test_save_writes_one_object(td: TensorDict, path: Path, same: Any) -> None:
    store, seen = MemoryStore(), []
    td_core.save(
        td, store, format="safetensors", checksums=True, progress=lambda *counts: seen.append(counts)
    )
    assert store.log == [("write", ("",))]
    same(td_core.load(store), td)
    save(td, path, checksums=True)
    assert bytes(store.read([Range("", 0)])[0]) == path.read_bytes()
    assert seen[-1] == (td.bytes(), td.bytes())
    save(td[:2], store)
    same(td_core.load(store), td[:2])


def test_save_of_shards_writes_index_last(td: TensorDict, same: Any) -> None:
    store = MemoryStore()
    save(td, store, max_shard_size=40)
    names = [name for operation, (name, *_) in store.log if operation == "write"]
    index = "model.safetensors.index.json"
    assert names == [index, *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), index]
    same(td_core.load(store), td)
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it"):
        save(td, store, max_shard_size=40)
    opened = td_core.open(store)
    save(td[:2], store, max_shard_size=20, overwrite=True)
    same(td_core.load(store), td[:2])
    assert len(store._objects) == 1 + len({*td.keys(True, True)})
    with pytest.raises(FileNotFoundError, match="there is no object"):  # the shards of the old save
        opened.clone()


def test_shards_of_save_that_was_interrupted_are_refused(td: TensorDict, same: Any) -> None:
    class Full(MemoryStore):
        def write(self, name: str, content: Any, *, create: bool = False) -> Any:
            if name.startswith("model-00002"):
                raise OSError("the disk is full")
            return super().write(name, content, create=create)

    store = Full()
    with pytest.raises(OSError, match="the disk is full"):
        save(td, store, max_shard_size=40)
    with pytest.raises(FormatError, match="a save to this location has not ended: save it again"):
        td_core.load(store)
    again = MemoryStore({name: content for name, (content, _) in store._objects.items()})
    save(td, again, max_shard_size=40, overwrite=True)
    same(td_core.load(again), td)


def test_shards_beside_single_file_are_refused(td: TensorDict) -> None:
    with pytest.raises(FileExistsError, match="which other programs read instead of the shards"):
        save(td, MemoryStore({"model.safetensors": b""}), max_shard_size=40)
