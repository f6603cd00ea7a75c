"""Groups in object stores: all operations, the store of zarr on one, and what a pickle contains."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import zarr

import td_core
from td_core import FormatError, TensorDict
from td_core.typing import ObjectLocation
from td_store.testing import MemoryStore
from td_zarr import open as open_group
from td_zarr import save


@pytest.mark.parametrize(
    "options", [{}, {"chunks": 2, "checksums": True}, {"chunks": 1, "shards": 2}], ids=str
)
def test_every_operation_on_store(options: Any) -> None:
    store = MemoryStore({}, "s3://bucket/x.zarr")
    td = TensorDict({"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4)}}, [4])
    td_core.save(td.clone().zero_(), store)
    td_core.save(td, store, **options)
    assert (td_core.load(store) == td).all()
    assert td_core.load(store, keys="n", rows=[3, 1])["n", "b"].tolist() == [3, 1]
    assert td_core.verify(store).ok
    assert [key for key, _ in td_core.inspect(store).walk()] == [(), ("a",), ("n",), ("n", "b")]
    opened = td_core.open(store, mode="r+")
    opened[1] = td[3]
    assert td_core.load(store)["n", "b"].tolist() == [0, 3, 2, 3]
    if options:
        td_core.append(td[:2], store)
        assert td_core.open(store)["n", "b"].tolist() == [0, 3, 2, 3, 0, 1]


def test_two_stores_of_one_name_are_two_groups() -> None:
    first, second = MemoryStore(), MemoryStore()
    save(TensorDict({"a": torch.arange(3)}), first)
    opened = open_group(first)
    save(TensorDict({"a": torch.zeros(3)}), second)
    assert opened["a"].tolist() == [0, 1, 2]
    save(TensorDict({"a": torch.ones(3)}), first)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        opened["a"].clone()


def test_detect_reads_no_object_of_group() -> None:
    store = MemoryStore()
    save(TensorDict({"a": torch.arange(3)}), store)
    store.log.clear()
    td_core.load(store)
    assert [(operation, len(names)) for operation, names in store.log[:2]] == [
        ("peek", 1),
        ("stat", len(ObjectLocation.MARKS)),
    ]
    read = [names for operation, names in store.log[2:] if operation == "read"]
    assert ("zarr.json",) in read
    assert {operation for operation, _ in store.log} == {"peek", "stat", "read"}


def test_store_of_zarr_lists_and_reads_parts() -> None:
    from td_zarr._remote_objects import ObjectZarrStore

    store = ObjectZarrStore(MemoryStore())
    group = zarr.open_group(store, mode="w")
    array = group.create_array("inner/x", shape=(8,), chunks=(2,), shards=(4,), dtype="int64")
    array[:] = range(8)
    assert zarr.open_group(store, mode="r")["inner/x"][3:5].tolist() == [3, 4]
    assert sorted(zarr.open_group(store, mode="r").group_keys()) == ["inner"]
    del group["inner"]
    assert list(zarr.open_group(store, mode="r").members()) == []


def test_pickle_of_opened_group_has_no_secrets(urls: None) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").store.clear()
    td = TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(4).bfloat16()}}, [4])
    options = {"key": "secret", "client": {"token": "secret"}}
    td_core.save(td, "memory://bucket/x.zarr", storage_options=options, chunks=2)
    opened = td_core.open("memory://bucket/x.zarr", storage_options=options)
    content = pickle.dumps(opened)
    assert b"secret" not in content
    again = pickle.loads(content)
    with pytest.raises(OSError, match="a pickle does not contain storage options"):
        again["a"].clone()
    assert (td_core.reopen(again, storage_options=options).clone() == td).all()
    live = TensorDict.from_zarr("memory://bucket/x.zarr", storage_options=options, mode="r+")
    content = pickle.dumps((live, live["n"]))
    assert b"secret" not in content
    for again, expected in zip(pickle.loads(content), (td, td["n"]), strict=True):
        with pytest.raises(OSError, match="or open the save again"):
            list(again.keys())
        with pytest.raises(OSError, match="or open the save again"):
            list(pickle.loads(pickle.dumps(again)).keys())
        assert td_core.reopen(again, storage_options=options) is again
        assert (again.to_tensordict() == expected).all()
    again["z"] = torch.zeros(4)
    assert set(td_core.load("memory://bucket/x.zarr", storage_options=options)["n"].keys()) == {"b", "z"}
    assert (td_core.reopen(live, storage_options=options)["a"] == td["a"]).all()


def list_operations(store: MemoryStore) -> list[str]:
    """Return the requests since the last call."""
    operations = [operation for operation, _ in store.log]
    store.log.clear()
    return operations


@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"chunks": {None: 2, "a": (2, 2)}}], ids=str)
def test_open_takes_one_turn_and_rows_one(options: Any) -> None:
    store = MemoryStore()
    td = TensorDict({"a": torch.arange(30.0).view(10, 3), "n": {"b": torch.arange(10)}}, [10])
    save(td, store, **options)
    assert list_operations(store)[:2] == ["list", "write"]
    opened = td_core.open(store, format="zarr")
    assert list_operations(store) == [
        "read",
        "read",
    ]  # of the two names that a root can have, at the same time
    for rows in ([7, 1], slice(1, 9, 3), slice(2, 4), 5):
        assert (opened[rows].clone() == td[rows]).all()
        assert list_operations(store) == ["read"]
    assert (td_core.load(store, format="zarr") == td).all()
    assert list_operations(store) == ["read", "read", "read"]


def test_second_saver_of_new_location_is_refused() -> None:
    td = TensorDict({"a": torch.arange(3)})

    other = MemoryStore()
    save(-td, other)

    class Racing(MemoryStore):
        def list(self, prefix: str = "") -> Any:
            found = list(super().list(prefix))
            self._objects.update(other._objects)  # as another process writes them
            return iter(found)

    store = Racing()
    with pytest.raises(FileExistsError, match=r"the object 'zarr.json' exists"):
        save(td, store)
    assert (td_core.load(store) == -td).all()


def test_missing_chunk_in_store_is_named() -> None:
    store = MemoryStore()
    save(TensorDict({"a": torch.arange(6)}, [6]), store, chunks=2)
    opened = td_core.open(store)
    store.delete(["a/c/1"])
    for read in (lambda: opened["a"].clone(), lambda: td_core.load(store)):
        with pytest.raises(FormatError, match="the chunk 'a/c/1' is missing"):
            read()
    assert opened["a"][:2].tolist() == [0, 1]
