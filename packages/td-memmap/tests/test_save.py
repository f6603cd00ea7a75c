"""Saving to a directory and loading it again."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import operator
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import td_memmap
from td_core import TensorDict, lazy_stack
from td_core._buffers import as_bytes
from td_core._lazy_stack import LazyStackedTensorDict
from td_core._params import TensorDictParams
from td_core._storage_backends import get_backends
from td_core.errors import CodecError, FormatError, KeyPathError, LockedError, StructureError
from td_memmap import FileTakenError, MemoryMappedTensor, TensorDictFuture, _chunks, _fs
from td_memmap._dtypes import DTYPES

ODD_KEYS = [
    "shape", "device", "_type", "_class", "_format_version", "_names", "_locked", "_members", "type", "dtype", "size",
    "cls", "leaves", "entries", "meta", "meta.json", "a.memmap", ".", "..", "", " ", "a/b", "a\\b", "../x", "%", "%k0",
    "%41", "é中", "😀", "\ud800", "\x00", "\n", "k" * 1000, "é" * 200, "Case", "case", "x", "x.shape", "0", "_tensordict",
    "CON", "a.b", "-", "~", "'", '"', "index", "custom_op", "stack_dim", "members",
]  # fmt: skip


def tree_under(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_memmap_writes_file_per_leaf_and_metadata_per_node(prefix: Path) -> None:
    td = TensorDict({"a": torch.arange(10), "b": {"c": torch.arange(10.0)}}, batch_size=[10])
    td.memmap(prefix)
    assert tree_under(prefix) == {"a.memmap", "b/c.memmap", "b/meta.json", "meta.json", "%manifest.json"}
    assert json.loads((prefix / "meta.json").read_text()) == {
        "a": {"device": "cpu", "shape": [10], "dtype": "torch.int64", "is_nested": False},
        "b": {"type": "TensorDict"},
        "shape": [10],
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:TensorDict",
    }
    assert (prefix / "a.memmap").read_bytes() == td["a"].numpy().tobytes()
    assert os.listdir(prefix.parent) == [prefix.name]


def test_memmap_returns_locked_mapped_collection_on_cpu(nest: Any, prefix: Path, same: Any) -> None:
    saved = nest.memmap(prefix)
    same(saved, nest)
    assert type(saved["a"]) is MemoryMappedTensor
    assert saved["a"].filename == str(prefix / "a.memmap")
    assert saved.device == torch.device("cpu")
    assert saved.is_memmap()
    assert saved.saved_path == prefix
    assert saved["n", "deep"].saved_path == prefix / "n" / "deep"
    assert saved["lazy"].tensordicts[1].saved_path == prefix / "lazy" / "1"
    with pytest.raises(LockedError):
        saved["new"] = torch.zeros(3)
    saved.unlock_()
    assert not saved.is_memmap()
    with pytest.raises(AttributeError, match="has no saved path: it is not memory-mapped"):
        _ = saved.saved_path
    assert not nest.is_memmap()
    assert nest.device is None


def test_load_memmap_returns_saved_values(nest: Any, prefix: Path, same: Any) -> None:
    nest.memmap(prefix)
    loaded = TensorDict.load_memmap(prefix)
    same(loaded, nest)
    assert loaded.device == torch.device("cpu")
    assert not loaded.is_locked
    same(td_memmap.load(prefix), nest)
    same(TensorDict.load(prefix), nest)


def test_memmap_inplace_maps_same_collection(nest: Any, prefix: Path, same: Any) -> None:
    before = nest.clone()
    assert nest.memmap_(prefix) is nest
    same(nest, before)
    assert type(nest["n", "i"]) is MemoryMappedTensor
    nest["n", "i"].zero_()
    assert (TensorDict.load_memmap(prefix)["n", "i"] == 0).all()


def test_memmap_without_prefix_frees_files_with_collection(nest: Any, same: Any) -> None:
    saved = nest.memmap()
    same(saved, nest)
    assert saved.is_memmap()
    assert saved.saved_path is None
    again = saved.memmap()
    assert again["a"] is saved["a"]
    kept = TensorDict({"n": saved["n"], "new": torch.ones(3)}, batch_size=[3]).memmap()
    assert kept["n", "i"] is saved["n", "i"]
    hollow = TensorDict({"a": torch.zeros(0), "b": torch.zeros(0, 3)})
    same(hollow.memmap(), hollow)
    assert again.is_memmap()
    assert nest.memmap_() is nest
    assert nest.memmap_() is nest


def test_memmap_mapped_leaves_links_or_refuses_other_prefix(nest: Any, prefix: Path, same: Any) -> None:
    saved = nest.memmap(prefix)
    inode = os.stat(prefix / "a.memmap").st_ino
    again = saved.memmap(prefix)
    assert again["a"] is saved["a"]
    assert os.stat(prefix / "a.memmap").st_ino == inode
    other = prefix.with_name("other")
    with pytest.raises(
        FileTakenError, match=r"cannot save key 'a' to .*other/a.memmap: it is stored in .*save/a.memmap"
    ):
        saved.memmap(other)
    assert not other.exists()
    for wrong in (saved[1], TensorDict.load_memmap(prefix)[:2]):
        with pytest.raises(FileTakenError, match="pass copy_existing=True to copy it"):
            wrong.memmap(other)
    same(saved.memmap(other, copy_existing=True), nest)
    same(saved[:2].memmap(prefix, copy_existing=True), nest[:2])
    same(saved, nest)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("links", [True, False])
def test_memmap_leaves_already_at_prefix_are_linked(
    inplace: bool, links: bool, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prefix / "n").mkdir(parents=True)
    (prefix / "notes.txt").write_text("mine")
    a = MemoryMappedTensor.zeros(4, 2, filename=prefix / "a.memmap")
    b = MemoryMappedTensor.zeros(4, dtype=torch.bool, filename=prefix / "n" / "b.memmap")
    td = TensorDict({"a": a, "n": {"b": b}, "c": torch.ones(4)}, [4])
    inode = os.stat(prefix / "a.memmap").st_ino

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    saved = td.memmap_(prefix) if inplace else td.memmap(prefix)
    saved[1:3] = TensorDict(
        {"a": torch.ones(2, 2), "n": {"b": torch.ones(2, dtype=torch.bool)}, "c": torch.zeros(2)}, [2]
    )
    loaded = TensorDict.load_memmap(prefix)
    assert (loaded == saved).all()
    assert loaded["a"].sum() == 4
    assert (os.stat(prefix / "a.memmap").st_ino == inode) is links
    assert (prefix / "notes.txt").read_text() == "mine"
    assert os.listdir(prefix.parent) == ["save"]


def test_memmap_over_files_of_other_leaves_raises(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memmap_leaf_transposed_in_place_needs_copy(prefix: Path) -> None:
    saved = TensorDict({"a": torch.arange(9).view(3, 3)}).memmap(prefix)
    saved["a"].t_()
    wanted = torch.arange(9).view(3, 3).t()
    assert torch.equal(pickle.loads(pickle.dumps(saved["a"])), wanted)
    with pytest.raises(FileTakenError, match="pass copy_existing=True"):
        saved.memmap(prefix)
    saved.memmap(prefix, copy_existing=True)
    assert torch.equal(TensorDict.load_memmap(prefix)["a"], wanted)


def test_memmap_file_longer_than_leaf_is_truncated(prefix: Path) -> None:
    TensorDict({"a": torch.ones(2)}).memmap(prefix)
    with open(prefix / "a.memmap", "ab") as file:
        file.write(b"more")
    TensorDict.load_memmap(prefix).memmap(prefix)
    assert os.stat(prefix / "a.memmap").st_size == 8
    assert td_memmap.verify(prefix).problems == []


def test_memmap_slice_to_own_prefix_writes_slice(prefix: Path) -> None:
    td = TensorDict({"a": torch.arange(100_000), "b": {"c": torch.arange(100_000.0)}}, batch_size=[100_000])
    td.memmap(prefix)
    loaded = TensorDict.load_memmap(prefix)
    loaded[1:].memmap(prefix, copy_existing=True)
    now = TensorDict.load_memmap(prefix)
    assert torch.equal(now["a"], td["a"][1:])
    assert torch.equal(now["b", "c"], td["b", "c"][1:])
    assert torch.equal(loaded["a"], td["a"])


def test_memmap_stale_mapping_is_copied(prefix: Path) -> None:
    first = TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    TensorDict({"a": torch.ones(3)}).memmap(prefix)
    first.memmap(prefix)
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [0, 0, 0]


def test_memmap_private_mapping_writes_changes(prefix: Path) -> None:
    TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    private = TensorDict.load_memmap(prefix, mode="r")
    private["a"].fill_(1)
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [0, 0, 0]
    private.memmap(prefix)
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [1, 1, 1]


def test_memmap_replacing_save_keeps_mapped_elements(nest: Any, prefix: Path, same: Any) -> None:
    wanted = nest.clone()
    saved, loaded = nest.memmap(prefix), TensorDict.load_memmap(prefix)
    TensorDict({"z": torch.zeros(2)}).memmap(prefix)
    same(saved, wanted)
    same(loaded, wanted)
    assert tree_under(prefix) == {"z.memmap", "meta.json", "%manifest.json"}


def test_memmap_existsok_false_over_save_raises(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix, existsok=False)
    for call in (nest.memmap, nest.memmap_like, nest.memmap_):
        with pytest.raises(FileTakenError, match="a save exists at .*; pass existsok=True to replace it"):
            call(prefix, existsok=False)


@pytest.mark.parametrize("num_threads", [-1, 0, 1, 4])
def test_memmap_num_threads_writes_same_values(num_threads: int, prefix: Path, same: Any) -> None:
    td = TensorDict({str(i): torch.arange(i * 200_000) for i in range(6)})
    same(td.memmap(prefix, num_threads=num_threads), td)
    same(TensorDict.load_memmap(prefix, num_threads=num_threads), td)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(1 + 2j).conj(),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(60, dtype=torch.int8).view(3, 4, 5).permute(2, 0, 1),
        torch.arange(3).expand(5, 3),
        torch.arange(4, dtype=torch.int8)._neg_view(),
    ],
    ids=lambda leaf: str(list(leaf.shape)),
)
@pytest.mark.parametrize("limit", [16, 1 << 20])
def test_iter_chunks_non_contiguous_limits_chunk_size(
    leaf: torch.Tensor, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chunks, "CHUNK_SIZE", limit)
    found = [bytes(piece) for piece in _chunks.iter_chunks(leaf)]
    assert b"".join(found) == bytes(as_bytes(leaf).numpy())
    assert max(map(len, found)) <= limit


def test_memmap_threads_hold_few_files_open(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("td_memmap._save._WORTH_A_THREAD", 0)
    opened, threads = [], set()

    def slowly(done: int, total: int) -> None:
        opened.append(len(os.listdir("/proc/self/fd")))
        threads.add(threading.current_thread().name.split("_")[0])
        time.sleep(0.002)

    before = len(os.listdir("/proc/self/fd"))
    TensorDict({str(i): torch.ones(2) for i in range(100)}).memmap(prefix, num_threads=2, progress=slowly)
    assert max(opened) - before < 30
    assert threads == {"td-memmap"}


def test_memmap_return_early_returns_future(nest: Any, prefix: Path, same: Any) -> None:
    future = nest.memmap(prefix, num_threads=2, return_early=True)
    assert type(future) is TensorDictFuture
    same(future.result(), nest)
    assert nest.memmap_(prefix, num_threads=2, return_early=True).result() is nest
    assert type(nest.memmap(return_early=True)) is TensorDict


HAS_VALUES = find_spec("td_tensorclass") is not None
needs_values = pytest.mark.skipif(not HAS_VALUES, reason="values are provided by td-tensorclass")

CHANGES = {
    "new": lambda td: td.set("new", torch.ones(3)), "replace": lambda td: td.set("a", torch.ones(3)),
    "delete": lambda td: td.del_("a"), "nested": lambda td: td["n"].set("new", torch.ones(3)),
    "value": lambda td: td.set_non_tensor("value", "y"),
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=needs_values if name == "value" else ()) for name in CHANGES]
)
@pytest.mark.parametrize("call", ["memmap", "memmap_", "memmap_like"])
@pytest.mark.parametrize("named", [True, False])
def test_memmap_return_early_ignores_later_changes(
    change: str, call: str, named: bool, prefix: Path, same: Any
) -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, batch_size=[3])
    wanted = (td.set_non_tensor("value", "x") if HAS_VALUES else td).clone()
    watched, released = threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        watched.set()
        assert released.wait(60)

    future = getattr(td, call)(prefix if named else None, num_threads=1, return_early=True, progress=wait)
    # Nothing is reported where files have no names, or nothing is written.
    if named and call != "memmap_like":
        assert watched.wait(60)
    with pytest.raises(LockedError) if call == "memmap_" else contextlib.nullcontext():
        CHANGES[change](td)
    released.set()
    same(future.result(), wanted)
    if named:
        same(TensorDict.load_memmap(prefix), wanted)


def test_memmap_inplace_background_failure_unlocks(prefix: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("progress")

    for locked in (False, True):
        td = TensorDict({"a": torch.zeros(3)}, lock=locked)
        with pytest.raises(KeyError, match="progress"):
            td.memmap_(prefix, num_threads=1, return_early=True, progress=fail).result()
        assert td.is_locked == locked
        assert not td.is_memmap()


ENDING = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
from td_core import TensorDict

def until_the_end(done, total):
    while True:
        try:
            ThreadPoolExecutor(1).submit(int)
        except RuntimeError:
            return

td = TensorDict({"small": torch.ones(1), "large": torch.ones(1 << 19), "last": torch.ones(1 << 19)})
td.memmap(sys.argv[1], num_threads=2, return_early=True, progress=until_the_end)
"""


def test_memmap_return_early_completes_at_interpreter_exit(prefix: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDING, prefix], check=True, timeout=120)
    assert (TensorDict.load_memmap(prefix)["last"] == 1).all()
    assert os.listdir(prefix.parent) == [prefix.name]


def test_future_result_raises_error_of_save(nest: Any, prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("td_memmap._fs.write_all", full)
    with pytest.raises(OSError, match="cannot write key 'a', 24 bytes: No space left"):
        nest.memmap(prefix, num_threads=2, return_early=True).result()
    assert not prefix.exists()


@pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
def test_memmap_odd_key_round_trips(key: str, prefix: Path, same: Any) -> None:
    td = TensorDict({"first": torch.ones(1)})
    td[key] = torch.arange(3)
    td["below", key] = torch.arange(2)
    td["other"] = TensorDict({key: TensorDict({key: torch.ones(1)})})
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)
    assert all(file.resolve().is_relative_to(prefix.resolve()) for file in prefix.parent.rglob("*"))


def test_memmap_all_odd_keys_round_trip_together(prefix: Path, same: Any) -> None:
    td = TensorDict({key: torch.tensor([i]) for i, key in enumerate(ODD_KEYS)}, names=None)
    nested = TensorDict({key: TensorDict({"v": torch.tensor([i])}) for i, key in enumerate(ODD_KEYS)})
    both = TensorDict({"leaves": td, "nodes": nested})
    both.memmap(prefix)
    same(TensorDict.load_memmap(prefix), both)


def test_memmap_keys_with_colliding_file_names_round_trip(prefix: Path, same: Any) -> None:
    td = TensorDict(
        {"a": torch.ones(1), "a.memmap": TensorDict({"b": torch.zeros(1)}), "meta.json": TensorDict()}
    )
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)


def test_memmap_robust_key_false_writes_raw_names(prefix: Path, same: Any) -> None:
    td = TensorDict({"a b": torch.ones(1), "n%n": {"c:d": torch.zeros(1)}})
    saved = td.memmap(prefix, robust_key=False)
    assert saved["n%n"].saved_path == prefix / "n%n"
    assert {"a b.memmap", "n%n/c:d.memmap"} < tree_under(prefix)
    same(TensorDict.load_memmap(prefix), td)
    same(TensorDict.load_memmap(prefix, robust_key=False), td)
    with pytest.raises(CodecError, match="robust_key=False cannot store key '../x': it is no file name"):
        TensorDict({"../x": torch.ones(1)}).memmap(prefix, robust_key=False)


@pytest.mark.filterwarnings("ignore:B?Complex", "ignore:The PyTorch API of nested tensors")
def test_memmap_every_dtype_round_trips(prefix: Path, same: Any) -> None:
    content = torch.arange(64, dtype=torch.uint8) % 2
    td = TensorDict({name: content.view(dtype) for name, dtype in DTYPES.items()})
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
@pytest.mark.parametrize("shape", [(0, 1 << 60), (0, (1 << 63) - 1), (1 << 40, 0, 1 << 40), (1 << 62, 0)])
def test_memmap_empty_tensors_of_any_size_round_trip(
    shape: tuple[int, ...], dtype: torch.dtype, prefix: Path, same: Any
) -> None:
    td = TensorDict({"a": torch.empty(shape, dtype=dtype)}, shape[:1])
    for place in prefix, prefix.with_suffix(".tdz"):
        td.memmap(place)
        same(TensorDict.load_memmap(place), td)
        assert TensorDict.load_memmap(place, device="meta")["a"].shape == shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_nested_tensors_round_trip(prefix: Path) -> None:
    parts = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(1, 4)]
    wide = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)]
    td = TensorDict(
        {
            "strided": torch.nested.nested_tensor(parts),
            "transposed": torch.nested.nested_tensor(parts).transpose(1, 2),
            "no element": torch.nested.nested_tensor([torch.zeros(0, 2), torch.zeros(0, 3)]),
            "no jagged element": torch.nested.nested_tensor([torch.zeros(0, 2)] * 2, layout=torch.jagged),
            "jagged": torch.nested.nested_tensor(wide, layout=torch.jagged),
            "with lengths": torch.nested.narrow(
                torch.arange(12).view(2, 6),
                1,
                torch.tensor([1, 2]),
                torch.tensor([3, 2]),
                layout=torch.jagged,
            ),
            "in another order": torch.nested.nested_tensor_from_jagged(
                torch.arange(6.0), torch.tensor([3, 0, 6]), torch.tensor([2, 3])
            ),
        }
    )
    saved = td.memmap(prefix)
    for found in (saved, TensorDict.load_memmap(prefix), td.memmap()):
        assert list(found.keys()) == list(td.keys())
        for key, leaf in td.items():
            assert found[key].layout == leaf.layout
            for one, other in zip(found[key].unbind(), leaf.unbind(), strict=True):
                assert torch.equal(one, other), key
                assert torch.equal(pickle.loads(pickle.dumps(one)), other), key
    inode = os.stat(prefix / "strided.memmap").st_ino
    saved.memmap(prefix)
    assert os.stat(prefix / "strided.memmap").st_ino == inode


def test_memmap_ties_leaves_across_many_directories(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fs, "_OPEN_DIRECTORIES", 3)
    tied, files = torch.arange(3), os.listdir("/proc/self/fd")
    TensorDict({str(i): {"a": tied} for i in range(9)}).memmap(prefix)
    assert os.listdir("/proc/self/fd") == files
    assert (prefix / "0" / "a.memmap").stat().st_nlink == 9
    assert all((leaf == tied).all() for leaf in TensorDict.load_memmap(prefix)._leaves())


def test_memmap_writes_expanded_leaves_full_and_tied_once(prefix: Path) -> None:
    base = torch.arange(4.0)
    td = TensorDict({"row": base.expand(3, 4), "one": base, "two": base, "view": base.view(2, 2)})
    saved = td.memmap(prefix)
    assert os.stat(prefix / "row.memmap").st_size == 48
    assert os.stat(prefix / "one.memmap").st_ino == os.stat(prefix / "two.memmap").st_ino
    assert os.stat(prefix / "one.memmap").st_ino != os.stat(prefix / "view.memmap").st_ino
    saved["row"][0] = -1
    assert saved["row"][1].tolist() == [0, 1, 2, 3]
    saved["one"].fill_(7)
    assert TensorDict.load_memmap(prefix)["two"].tolist() == [7, 7, 7, 7]
    saved.memmap(prefix)
    assert os.stat(prefix / "one.memmap").st_ino == os.stat(prefix / "two.memmap").st_ino
    assert TensorDict.load_memmap(prefix)["two"].tolist() == [7, 7, 7, 7]


def test_load_memmap_restores_names_sizes_locks_and_stacks(prefix: Path, same: Any) -> None:
    td = TensorDict(
        {"n": TensorDict({"a": torch.zeros(2, 3, 4)}, batch_size=[2, 3], names=["x", "y"])},
        batch_size=[2],
        names=["x"],
    )
    td["stack"] = LazyStackedTensorDict(
        *(TensorDict(batch_size=[2]) for _ in range(3)), stack_dim=1, stack_dim_name="t"
    )
    if HAS_VALUES:
        td.set_non_tensor("value", "v")
        td.set_non_tensor(("n", "value"), "v")
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)
    td.lock_()
    td.memmap(prefix)
    assert TensorDict.load_memmap(prefix).is_locked
    empty = LazyStackedTensorDict(batch_size=[0, 4])
    empty.memmap(prefix)
    same(TensorDict.load_memmap(prefix), empty)


def put_other_memory(td: Any) -> None:
    td["a"].data = torch.ones(2)


def put_other_components(td: Any) -> None:
    td["n", "nested"].data = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


#: How what is mapped ceases to be what is saved.
DEPARTURES = {
    "a name": lambda td: setattr(td, "names", ["t"]),
    "a name below": lambda td: setattr(td["n"], "names", ["t"]),
    "a batch size": lambda td: setattr(td, "batch_size", []),
    "other memory": put_other_memory,
    "other components": put_other_components,
    "another file": lambda td: td.clone().memmap(td.saved_path),
    "no file": lambda td: (td.saved_path / "a.memmap").unlink(),
}


@pytest.mark.parametrize("change", [None, *DEPARTURES])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_get_folder_changed_collection_returns_none(change: str | None, prefix: Path) -> None:
    td = TensorDict({"a": torch.ones(2), "empty": torch.ones(2, 0), "n": {"b": torch.ones(2)}}, [2])
    td["n", "nested"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    saved = td.memmap(prefix)
    (attachment,) = get_backends(saved)
    if change is not None:
        DEPARTURES[change](saved)
    assert attachment.get_folder(saved) == (str(prefix) if change is None else None)


class Sub(TensorDict):
    __slots__ = ()


def test_load_memmap_returns_subclass(prefix: Path) -> None:
    for key in ("shape", "a"):  # the first makes the level one of the general form
        Sub({key: torch.ones(2)}).memmap(prefix)
        assert type(TensorDict.load_memmap(prefix)) is Sub
    meta = json.loads((prefix / "meta.json").read_text())
    meta["_type"], meta["_class"] = "<class 'gone.Thing'>", "gone:Thing"
    (prefix / "meta.json").write_text(json.dumps(meta))
    assert type(TensorDict.load_memmap(prefix, strict=False)) is TensorDict
    with pytest.raises(
        FormatError, match="_type is \"<class 'gone.Thing'>\", expected a class that this process has defined"
    ):
        TensorDict.load_memmap(prefix)


def test_load_memmap_redefined_class_returns_latest(prefix: Path) -> None:
    one, other = (type("Twice", (TensorDict,), {"__module__": __name__}) for _ in range(2))
    one({"a": torch.ones(2)}).memmap(prefix)
    assert type(TensorDict.load_memmap(prefix)) is other


def test_memmap_parameters_load_as_plain_tensors(prefix: Path) -> None:
    params = TensorDictParams(TensorDict({"w": torch.ones(2)}))
    saved = params.memmap(prefix)
    assert type(saved) is TensorDict
    assert not saved["w"].requires_grad
    loaded = TensorDict.load_memmap(prefix)
    assert type(loaded) is TensorDict
    assert type(loaded["w"]) is MemoryMappedTensor


@pytest.mark.parametrize("around", [lambda params: params, lambda params: TensorDict({"p": params})])
@pytest.mark.parametrize("saved", [False, True])
def test_memmap_inplace_keeps_parameters_of_module(saved: bool, around: Any, prefix: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    params = TensorDict.from_module(model, as_module=True)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = [*params.parameters()], [*params.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    tree = around(params)
    assert tree.memmap_(*[prefix] * saved) is tree and tree.is_memmap()
    after = [*params.parameters()], [*params.buffers()]
    assert len(after[0]) == 4 and all(map(operator.is_, before[0], after[0]))
    assert [type(leaf) for leaf in after[1]] == [type(leaf) for leaf in before[1]]
    assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    if saved:
        loaded = TensorDict.load_memmap(prefix)
        loaded = loaded["p"] if tree is not params else loaded
        assert torch.equal(loaded["1", "bias"], model[1].bias) and model[1].bias.tolist() == [-3]
        assert torch.equal(loaded["1", "running_mean"], model[1].running_mean)


def test_memmap_module_state_round_trips(prefix: Path) -> None:
    model = torch.nn.Transformer(
        d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, batch_first=True
    )
    weights = TensorDict.from_module(model)
    on_disk = weights.memmap(prefix, num_threads=2)
    loaded = TensorDict.load_memmap(prefix)
    assert (on_disk == loaded).all()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded.to_module(model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_load_memmap_device_moves_leaves(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    on_cpu = TensorDict.load_memmap(prefix, device="cpu")
    assert type(on_cpu["a"]) is MemoryMappedTensor
    meta = TensorDict.load_memmap(prefix, device="meta")
    assert meta.device == torch.device("meta")
    assert meta["n", "i"].device.type == "meta"
    assert meta["n", "i"].shape == (3, 4)
    for file in prefix.rglob("*.memmap"):
        file.unlink()
    assert TensorDict.load_memmap(prefix, device="meta")["a"].shape == (3, 2)


def test_load_memmap_fake_mode_returns_fake_tensors(nest: Any, prefix: Path) -> None:
    from torch._subclasses import FakeTensorMode

    nest.memmap(prefix)
    with FakeTensorMode():
        fake = TensorDict.load_memmap(prefix)
    assert type(fake["a"]).__name__ == "FakeTensor"
    assert fake["n", "i"].shape == (3, 4)


def test_memmap_jagged_leaf_pads_to_longest(prefix: Path) -> None:
    rows = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged)
    td = TensorDict({"n": rows, "t": rows.transpose(1, 2)}, [2])
    for found in (td.memmap(prefix), TensorDict.load_memmap(prefix), td.memmap()):
        assert {key: found[key].to_padded_tensor(0).shape[1:] for key in "nt"} == {"n": (3, 2), "t": (2, 3)}
    # What is filled later may have other lengths than what it is like.
    like = td.memmap_like(prefix.with_name("like"))["n"]
    like.offsets().copy_(torch.tensor([0, 4, 4]))
    assert like.to_padded_tensor(0).shape[1] >= 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_memmap_nested_tensors_on_meta_device(prefix: Path) -> None:
    from torch._subclasses import FakeTensorMode

    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    TensorDict({"j": torch.nested.nested_tensor(parts, layout=torch.jagged)}).memmap(prefix)
    leaf = TensorDict.load_memmap(prefix, device="meta")["j"]
    assert leaf.is_meta
    assert leaf.layout == torch.jagged
    assert leaf.shape[0] == 2
    assert leaf.shape[2] == 3
    TensorDict({"s": torch.nested.nested_tensor(parts)}).memmap(prefix)
    with pytest.raises(FormatError, match="cannot make key 's' on meta without its content"):
        TensorDict.load_memmap(prefix, device="meta")
    with FakeTensorMode(), pytest.raises(FormatError, match="cannot make key 's' on cpu without its content"):
        TensorDict.load_memmap(prefix)


def test_load_memmap_out_and_inplace_write_target(nest: Any, prefix: Path, same: Any) -> None:
    nest.memmap(prefix)
    out = TensorDict(batch_size=[3])
    assert TensorDict.load_memmap(prefix, out=out) is out
    same(out["n"], nest["n"])
    out.update({"other": torch.ones(3), "gone": {"a": torch.ones(3)}, "n": {"other": torch.ones(3)}})
    nested = out["n"]
    assert TensorDict.load_memmap(prefix, out=out) is out
    assert set(out.keys()) == set(nest.keys())
    assert out["n"] is nested
    same(nested, nest["n"])
    for wrong in ({}, [], torch.zeros(3)):
        with pytest.raises(TypeError, match=f"out is a collection to load into.*{type(wrong).__name__}"):
            TensorDict.load_memmap(prefix, out=wrong)
        assert not len(wrong) or not wrong.any()
    target = TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3])
    TensorDict({"a": nest["a"]}, batch_size=[3]).memmap(prefix)
    leaf = target["a"]
    assert target.load_memmap_(prefix) is target
    assert target["a"] is leaf
    assert torch.equal(leaf, nest["a"])


def test_load_memmap_out_stack_drops_member_only_entries(prefix: Path, same: Any) -> None:
    saved = lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3)})])
    saved.memmap(prefix)
    one = TensorDict({"a": torch.zeros(2), "c": torch.zeros(1)})
    out = lazy_stack([one, TensorDict({"a": torch.zeros(3)})])
    assert TensorDict.load_memmap(prefix, out=out) is out
    assert list(out[0].keys()) == ["a"]
    same(out, saved)


@pytest.mark.parametrize("method", ["load_memmap_", "load_"])
@pytest.mark.parametrize("as_module", [False, True])
def test_load_memmap_inplace_writes_parameters(prefix: Path, method: str, as_module: bool) -> None:
    model = torch.nn.Linear(2, 3)
    params = TensorDict.from_module(model, as_module=as_module)
    wanted = params.data * 2
    wanted.memmap(prefix)
    weight = model.weight
    getattr(params, method)(prefix)
    assert model.weight is weight is params["weight"]
    assert weight.requires_grad and weight.is_leaf
    assert torch.equal(weight, wanted["weight"])


@pytest.mark.parametrize("method", ["load_memmap_", "load_"])
def test_load_memmap_inplace_adds_missing_entries(nest: Any, prefix: Path, same: Any, method: str) -> None:
    nest.memmap(prefix)
    same(getattr(TensorDict(batch_size=nest.batch_size), method)(prefix), nest)
    target = nest.clone().zero_()
    target["n"].del_(list(target["n"].keys())[-1])
    leaf = target["a"]
    same(getattr(target, method)(prefix), nest)
    assert target["a"] is leaf
    empty = TensorDict(batch_size=nest.batch_size).lock_()
    with pytest.raises(LockedError, match="cannot set key"):
        getattr(empty, method)(prefix)
    assert not list(empty.keys())


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


def test_load_memmap_subpath_returns_node(nest: Any, prefix: Path, same: Any) -> None:
    nest["n", "a/b"] = TensorDict({"c": torch.ones(3)}, batch_size=[3])
    nest.memmap(prefix)
    same(TensorDict.load_memmap(prefix, subpath="n"), nest["n"])
    same(TensorDict.load_memmap(prefix, subpath="n/deep"), nest["n", "deep"])
    same(TensorDict.load_memmap(prefix, subpath=("n", "a/b")), nest["n", "a/b"])
    same(TensorDict.load_memmap(prefix / "n"), nest["n"])
    for wrong in ("a", "nothing", "n/nothing", ".."):
        with pytest.raises(ValueError, match=f"no collection is saved under the subpath '{wrong}' of"):
            TensorDict.load_memmap(prefix, subpath=wrong)


def test_load_memmap_subpath_with_key_tensordict_returns_node(prefix: Path, same: Any) -> None:
    td = TensorDict({"_tensordict": {"_tensordict": {"a": torch.ones(1)}}, "n": {"b": torch.ones(2)}})
    for place in (prefix, prefix.with_name("save.tdz")):
        td.memmap(place)
        for path in ("_tensordict", ("_tensordict", "_tensordict"), "n"):
            same(TensorDict.load_memmap(place, subpath=path), td[path])


def test_memmap_short_reads_and_writes_complete(
    nest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    real = {name: getattr(os, name) for name in ("read", "write", "pwrite")}
    monkeypatch.setattr(os, "read", lambda fd, size: real["read"](fd, min(size, 7)))
    monkeypatch.setattr(os, "write", lambda fd, data: real["write"](fd, data[:7]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real["pwrite"](fd, data[:7], at))
    same(nest.memmap(tmp_path / "save"), nest)
    same(nest.memmap(), nest)
    same(TensorDict.load_memmap(tmp_path / "save"), nest)


def test_memmap_like_creates_sparse_files(tmp_path: Path) -> None:
    datum = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": 0})
    data = datum.expand(1_000_000).memmap_like(tmp_path / "data")
    assert data["image"].shape == (1_000_000, 3, 64, 64)
    stat = os.stat(tmp_path / "data" / "image.memmap")
    assert stat.st_size == 12_288_000_000
    assert stat.st_blocks * 512 < 1_000_000
    data[500_000] = TensorDict({"image": torch.ones(3, 64, 64, dtype=torch.uint8), "label": 7})
    loaded = TensorDict.load_memmap(tmp_path / "data")
    assert loaded[500_000]["label"] == 7
    assert loaded["image"][500_000].sum() == 12_288


def test_memmap_like_keeps_same_structure_refuses_other(nest: Any, prefix: Path, same: Any) -> None:
    nest.memmap(prefix)
    again = nest.memmap_like(prefix)
    same(again, nest)
    assert again.is_memmap()
    again["a"].fill_(3)
    assert (TensorDict.load_memmap(prefix)["a"] == 3).all()
    with pytest.raises(
        FileTakenError, match=r"key 'a' is shape \[3, 2\] of torch.float32 in the save that is there"
    ):
        TensorDict({"a": torch.zeros(4)}).memmap_like(prefix)
    with pytest.raises(FileTakenError, match="has other leaves too"):
        TensorDict({"a": torch.zeros(3, 2)}).memmap_like(prefix)
    assert (TensorDict.load_memmap(prefix)["a"] == 3).all()
    with pytest.raises(FileTakenError, match="key 'b' is nothing in the save"):
        TensorDict({"b": torch.zeros(3, 2)}).memmap_like(prefix)


@pytest.mark.parametrize("changes", [
    {}, {"batch_size": [3, 2]}, {"names": ["t"]},
    *[pytest.param({"value": value}, marks=needs_values) for value in ("b", ["a"])],
], ids=str)  # fmt: skip
def test_memmap_like_over_save_updates_names_and_values(
    changes: dict[str, Any], prefix: Path, same: Any
) -> None:
    def make(number: int, value: Any = ("a",), batch_size: Any = (3,), **options: Any) -> Any:
        td = TensorDict({"a": torch.full((3, 2), number)}, batch_size, **options)
        return td.set_non_tensor("value", value) if HAS_VALUES else td

    make(7).memmap(prefix)
    metadata = os.stat(prefix / "meta.json").st_ino
    like, loaded = make(0, **changes).memmap_like(prefix), TensorDict.load_memmap(prefix)
    same(like, make(7, **changes))
    same(loaded, make(7, **changes))
    like["a"].fill_(1)
    assert (loaded["a"] == 1).all()
    # Without a difference nothing is written.
    assert (os.stat(prefix / "meta.json").st_ino == metadata) == (not changes)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("where", ["save", "save.tdz", None])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_like_keeps_nested_tensor_shapes(
    where: str | None, layout: torch.layout, tmp_path: Path
) -> None:
    td = TensorDict({"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)})
    place = None if where is None else tmp_path / where
    found = [td.memmap_like(place)]
    if place is not None:
        found.append(TensorDict.load_memmap(place))
    for like in found:
        assert like["x"].layout == layout
        assert [part.tolist() for part in like["x"].unbind()] == [[[0, 0, 0]] * 2, [[0, 0, 0]]]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_like_other_nested_shapes_raises(layout: torch.layout, prefix: Path) -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    td = TensorDict({"x": torch.nested.nested_tensor(parts, layout=layout)})
    td.memmap(prefix)
    like = td.memmap_like(prefix)["x"].unbind()
    assert all(torch.equal(one, other) for one, other in zip(like, parts, strict=True))
    other = TensorDict({"x": torch.nested.nested_tensor(parts[::-1], layout=layout)})
    with pytest.raises(FileTakenError, match=r"is shape \[\[2, 3\], \[1, 3\]\] of torch.float32 in the save"):
        other.memmap_like(prefix)
    (prefix / "meta.json").write_text("no metadata")
    with pytest.raises(FileTakenError, match="what is there is damaged: .* is no valid metadata"):
        td.memmap_like(prefix)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def test_load_memmap_restores_names_of_longer_child(prefix: Path, same: Any) -> None:
    inner = TensorDict({"x": torch.zeros(2, 2)}, [2, 2], names=[None, "q"])
    td = TensorDict({"m": TensorDict({"c": inner}, [2, 2])}, [2])
    td.names = ["d"]
    td.memmap(prefix)
    loaded = TensorDict.load_memmap(prefix)
    assert loaded["m", "c"].names == ["d", "q"]
    same(loaded, td)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("method", ["memmap", "memmap_like"])
@pytest.mark.parametrize(
    ("make", "fill", "elements"),
    [
        (lambda: torch.ones(5), Tensor.fill_, lambda found: found),
        (partial(nested, torch.strided), Tensor.fill_, lambda found: torch.cat(found.unbind())),
        (
            partial(nested, torch.jagged),
            lambda mapped, value: mapped.values().fill_(value),
            lambda found: found.values(),
        ),
    ],
    ids=["plain", "strided", "jagged"],
)
def test_memmap_tied_leaf_maps_one_tensor(
    make: Any, fill: Any, elements: Any, method: str, saved: bool, prefix: Path
) -> None:
    leaf = make()
    mapped = getattr(TensorDict({"a": leaf, "b": leaf}), method)(*[prefix] * saved)
    for key, value in ("a", 2), ("b", 3):
        fill(mapped[key], value)
        found = TensorDict.load_memmap(prefix) if saved else mapped
        assert [elements(found[other]).tolist() for other in "ab"] == [[value] * 5] * 2


def test_memmap_like_tied_leaf_over_two_files_raises(prefix: Path) -> None:
    leaf = torch.ones(2)
    TensorDict({"a": torch.ones(2), "b": torch.ones(2)}).memmap(prefix)
    with pytest.raises(FileTakenError, match="key 'b' is the same tensor as another leaf here"):
        TensorDict({"a": leaf, "b": leaf}).memmap_like(prefix)


def test_memmap_without_prefix_copies_private_mapping(prefix: Path) -> None:
    TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    private = TensorDict.load_memmap(prefix, mode="r")
    private["a"].fill_(3)
    shared = private.memmap()
    assert pickle.loads(pickle.dumps(shared))["a"].tolist() == [3, 3, 3]
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [0, 0, 0]


def test_memmap_like_accepts_meta_tensors(prefix: Path) -> None:
    like = TensorDict({"a": torch.zeros(3, device="meta")}).memmap_like(prefix)
    assert like["a"].tolist() == [0, 0, 0]
    assert TensorDict({"a": torch.ones(3)}).memmap_like()["a"].tolist() == [0, 0, 0]


def test_make_memmap_adds_entries_to_save(nest: Any, prefix: Path) -> None:
    saved = nest.memmap(prefix)
    leaf = saved.make_memmap("new", (3, 4), dtype=torch.int32)
    assert leaf.filename == str(prefix / "new.memmap")
    leaf.fill_(5)
    saved.make_memmap(("n", "inner"), (3,))
    saved.make_memmap(("far", "away"), (3, 1)).fill_(2)
    saved.make_memmap_from_tensor("copy", torch.ones(3))
    saved.make_memmap_from_tensor("shape only", torch.ones(3), copy_data=False)
    saved.make_memmap_from_storage("storage", torch.arange(3.0).untyped_storage(), (3,))
    assert saved.is_locked
    for td in (saved, TensorDict.load_memmap(prefix)):
        assert (td["new"] == 5).all()
        assert td["n", "inner"].tolist() == [0, 0, 0]
        assert (td["far", "away"] == 2).all()
        assert td["copy"].tolist() == [1, 1, 1]
        assert td["shape only"].tolist() == [0, 0, 0]
        assert td["storage"].tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="cannot add key 'new': it is there already"):
        saved.make_memmap("new", (3,))
    with pytest.raises(RuntimeError, match=r"its shape \[5, 4\] does not start with the batch size \[3\]"):
        saved.make_memmap("bad", (5, 4))
    with pytest.raises(KeyError, match=r"cannot add key \('n', 'i', 'x'\): key \('n', 'i'\) is a tensor"):
        saved.make_memmap(("n", "i", "x"), (3,))
    with pytest.raises(RuntimeError, match="is not memory-mapped: call memmap"):
        nest.make_memmap("new", (3,))
    anonymous = nest.memmap()
    assert anonymous.make_memmap("new", (3,)).tolist() == [0, 0, 0]
    assert anonymous.make_memmap(("level", "new"), (3,)).tolist() == [0, 0, 0]
    assert anonymous["level"].is_memmap()


UNFIT = [
    ("shape", "x"), ("far", "shape"), ("meta.json", "x"), ("k" * 300, "x"), "k" * 300, "node", ("leaf.memmap", "x"),
]  # fmt: skip


@pytest.mark.parametrize("key", UNFIT, ids=str)
def test_make_memmap_unstorable_key_changes_nothing(key: Any, prefix: Path) -> None:
    saved = TensorDict({"node.memmap": {"a": torch.ones(1)}, "leaf": torch.ones(1)}).memmap(prefix)
    files = tree_under(prefix)
    with pytest.raises(KeyError, match="a live save cannot hold this key"):
        saved.make_memmap(key, (2,))
    assert tree_under(prefix) == files
    assert set(TensorDict.load_memmap(prefix).keys()) == set(saved.keys()) == {"node.memmap", "leaf"}


def test_make_memmap_in_changed_save_raises(prefix: Path, same: Any) -> None:
    mapped = TensorDict({"a": torch.zeros(3)}, [3]).memmap(prefix)
    td_memmap.append_memmap(prefix, TensorDict({"a": torch.ones(2)}, [2]))
    files = tree_under(prefix)
    with pytest.raises(StructureError, match=r"cannot add key 'x': .*shape is \[3\].*batch size \[5\]"):
        mapped.make_memmap("x", (3,))
    assert tree_under(prefix) == files
    same(TensorDict.load_memmap(prefix), TensorDict({"a": torch.tensor([0.0, 0, 0, 1, 1])}, [5]))
    mapped.memmap_refresh_().make_memmap("x", (5,))
    assert TensorDict.load_memmap(prefix)["x"].shape == (5,)


@pytest.mark.parametrize("first", ["a b", "shape"])
@pytest.mark.parametrize("saved_robust", [True, False])
@pytest.mark.parametrize("robust", [True, False])
def test_make_memmap_other_robust_key_keeps_entries_apart(
    first: str, saved_robust: bool, robust: bool, prefix: Path
) -> None:
    mapped = TensorDict({first: torch.ones(2)}).memmap(prefix, robust_key=saved_robust)
    for key in "a%20b", "c d", ("x y", "e f"), ("x y", "g"):
        with contextlib.suppress(KeyPathError):
            mapped.make_memmap(key, (2,), robust_key=robust).fill_(len(mapped.keys(True, True)))
    assert mapped["x y"].saved_path.is_dir()
    loaded = TensorDict.load_memmap(prefix)
    for key, leaf in mapped.items(True, True):
        assert loaded[key].tolist() == leaf.tolist(), key
    assert loaded[first].tolist() == [1, 1]


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


def test_make_memmap_concurrent_entries_are_all_kept(prefix: Path) -> None:
    saved = TensorDict({"n": {}}).memmap(prefix)
    keys = [(*level, str(number)) for level in ((), ("n",)) for number in range(30)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda key: saved.make_memmap(key, (1,)), keys))
    assert set(TensorDict.load_memmap(prefix).keys(include_nested=True, leaves_only=True)) == {
        key if len(key) > 1 else key[0] for key in keys
    }


@pytest.mark.parametrize("key", ["n", "a/b"])
def test_make_memmap_processes_share_new_nodes(key: str, prefix: Path) -> None:
    saved = TensorDict({"a": torch.zeros(3), "s": {}}).memmap(prefix)
    one, other, third = (pickle.loads(pickle.dumps(saved)) for _ in range(3))
    one.make_memmap((key, "x"), (3,)).fill_(1)
    # What a process that was killed leaves is no entry.
    (prefix / "s" / "left").mkdir()
    other.make_memmap(("s", "left", "z"), (3,))
    other.make_memmap((key, "m", "y"), (3,)).fill_(2)
    third.make_memmap((key, "m", "z"), (3,)).fill_(3)
    third[key, "x"].add_(10)
    loaded = TensorDict.load_memmap(prefix)
    assert {path: int(loaded[path].sum()) for path in loaded.keys(True, True) if path[0] == key} == {
        (key, "x"): 33,
        (key, "m", "y"): 6,
        (key, "m", "z"): 9,
    }
    for taken in ((key, "x"), (key, "m"), (key, "x", "deep")):
        with pytest.raises(StructureError, match="another process added it to .* call memmap_refresh_"):
            pickle.loads(pickle.dumps(saved)).make_memmap(taken, (3,))
    assert (one[key, "x"] == 11).all()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(("make", "content"), [
    (quantized, True), (quantized, False), (lambda: torch.eye(2).to_sparse(), True),
    (lambda: torch.empty(2, device="meta"), True),
])  # fmt: skip
def test_make_memmap_unstorable_tensor_changes_nothing(
    make: Callable[[], torch.Tensor], content: bool, prefix: Path
) -> None:
    saved = TensorDict({"leaf": torch.ones(1)}).memmap(prefix)
    files = tree_under(prefix)
    for td in (saved, TensorDict({"leaf": torch.ones(1)}).memmap()):
        with pytest.raises(CodecError, match=r"at key \('far', 'x'\)"):
            td.make_memmap_from_tensor(("far", "x"), make(), copy_data=content)
        assert list(td.keys(include_nested=True)) == ["leaf"]
    assert tree_under(prefix) == files


def test_make_memmap_in_stack_raises(nest: Any, prefix: Path) -> None:
    saved = nest.memmap(prefix)
    files = tree_under(prefix)
    for key in ("lazy", "new"), ("lazy", "new", "x"):
        with pytest.raises(RuntimeError, match="a LazyStackedTensorDict gets no new entries"):
            saved.make_memmap(key, (3,))
    assert tree_under(prefix) == files


@pytest.mark.parametrize("key", ["k" * 300, "meta.json", "leaf.memmap", "\ud800"], ids=ascii)
def test_memmap_node_with_fallback_name_has_saved_path(key: str, prefix: Path, same: Any) -> None:
    saved = TensorDict({"leaf": torch.ones(1), key: {"n": {"a": torch.ones(1)}}}).memmap(prefix)
    for mapped in (saved, pickle.loads(pickle.dumps(saved)) if key != "\ud800" else saved):
        assert mapped[key, "n"].saved_path.parent == mapped[key].saved_path
        assert mapped[key].saved_path.is_dir()
        mapped[key, "n"].memmap_refresh_()
    saved.make_memmap((key, "n", "b"), (2,)).fill_(7)
    same(TensorDict.load_memmap(prefix), saved)
    same(saved.memmap(prefix), TensorDict.load_memmap(prefix))


@pytest.mark.parametrize("keys", [("entries",), ("kind",), ("entries", "kind"), ("shape",)])
def test_make_memmap_next_to_odd_keys_adds_entry(keys: tuple[str, ...], prefix: Path) -> None:
    saved = TensorDict(dict.fromkeys(keys, torch.ones(2))).memmap(prefix)
    saved.make_memmap("new", (2,)).fill_(7)
    loaded = TensorDict.load_memmap(prefix)
    assert list(loaded.keys()) == [*keys, "new"]
    assert loaded["new"].tolist() == [7, 7]


def test_make_memmap_new_node_over_other_save_raises(prefix: Path, same: Any) -> None:
    mine = TensorDict({"z": torch.arange(5)})
    mine.memmap(prefix / "mine")
    saved = TensorDict({"a": torch.ones(2)}).memmap(prefix)
    with pytest.raises(
        FileTakenError, match="cannot add key 'mine': another save is in the way, .*save/mine"
    ):
        saved.make_memmap(("mine", "x"), ())
    same(TensorDict.load_memmap(prefix / "mine"), mine)
    same(TensorDict.load_memmap(prefix), saved)
    # What a process that was killed left is not in the way, and neither is what belongs to no save.
    TensorDict().memmap(prefix / "left")
    (prefix / "left" / "%manifest.json").unlink()
    (prefix / "left" / "%new-0123abcd").touch()
    (prefix / "notes").mkdir()
    (prefix / "notes" / "notes.txt").touch()
    for key in "left", "notes":
        saved.make_memmap((key, "x"), ())
        same(TensorDict.load_memmap(prefix), saved)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_make_memmap_nested_tensor_adds_entry(prefix: Path) -> None:
    parts = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(1, 4)]
    shapes = torch.tensor([[2, 3], [1, 4]])
    saved = TensorDict({"s.shape": torch.ones(2)}, batch_size=[2]).memmap(prefix)
    saved.make_memmap("x", shapes)[0].fill_(1)
    saved.make_memmap_from_tensor("y", torch.nested.nested_tensor(parts))
    saved.make_memmap_from_storage("z", torch.arange(10.0).untyped_storage(), shapes)
    wanted = {"x": [torch.ones(2, 3), torch.zeros(1, 4)], "y": parts, "z": [parts[0], parts[1] + 6]}
    for td in (saved, TensorDict.load_memmap(prefix), saved.clone(False).unlock_().memmap()):
        for key, components in wanted.items():
            assert all(
                torch.equal(one, other) for one, other in zip(td[key].unbind(), components, strict=True)
            )
    with pytest.raises(RuntimeError, match=r"its shape \[\[2\]\] does not start with the batch size \[2\]"):
        saved.make_memmap("three", torch.tensor([[2]]))
    for name, shape in (("x.shape", (2,)), ("s", shapes)):
        with pytest.raises(KeyError, match="a live save cannot hold this key"):
            saved.make_memmap(name, shape)
    assert TensorDict.load_memmap(prefix)["s.shape"].tolist() == [1, 1]


def test_memmap_refresh_reloads_replaced_save(nest: Any, prefix: Path) -> None:
    saved = nest.memmap(prefix)
    TensorDict({"z": torch.zeros(2)}, batch_size=[2]).memmap(prefix)
    assert saved.memmap_refresh_() is saved
    assert list(saved.keys()) == ["z"]
    assert saved.batch_size == (2,)
    assert saved.is_memmap()
    with pytest.raises(RuntimeError, match="is not memory-mapped"):
        nest.memmap_refresh_()
    with pytest.raises(RuntimeError, match="mapped to anonymous files"):
        nest.memmap().memmap_refresh_()


def test_memmap_refresh_updates_names_refuses_other_kind(prefix: Path) -> None:
    mapped = TensorDict({"a": torch.zeros(2)}, [2], names=["x"]).memmap(prefix)
    TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["u", "v"]).memmap(prefix)
    assert mapped.memmap_refresh_().names == ["u", "v"]
    lazy_stack([TensorDict({"a": torch.zeros(())}), TensorDict({"a": torch.ones(())})]).memmap(prefix)
    with pytest.raises(StructureError, match="holds a LazyStackedTensorDict now"):
        mapped.memmap_refresh_()
    assert mapped["a"].shape == (2, 3)


@pytest.mark.parametrize("added", [False, True])
def test_memmap_refresh_node_of_other_batch_size_raises(added: bool, prefix: Path, same: Any) -> None:
    def make(count: int, value: int) -> TensorDict:
        return TensorDict({"n": TensorDict({"b": torch.full((count,), value)}, [count])}, [count])

    if added:
        mapped = TensorDict({}, [2]).memmap(prefix)
        mapped.make_memmap(("n", "b"), (2,), dtype=torch.int64)
    else:
        mapped = make(2, 0).memmap(prefix)
    for value in (1, 2):
        make(2, value).memmap(prefix)
        assert mapped["n"].memmap_refresh_()["b"].tolist() == [value] * 2
    make(3, 3).memmap(prefix)
    with pytest.raises(StructureError, match=r"the batch size \[3\] now, .* of \[2\], could not hold"):
        mapped["n"].memmap_refresh_()
    same(mapped, make(2, 2))
    same(mapped.memmap_refresh_(), make(3, 3))


def test_pickle_replaced_save_contains_elements(prefix: Path) -> None:
    mapped = TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    TensorDict({"a": torch.ones(3)}).memmap(prefix)
    assert pickle.loads(pickle.dumps(mapped))["a"].tolist() == [0, 0, 0]


def test_pickle_mapped_collection_contains_paths(prefix: Path, same: Any) -> None:
    td = TensorDict({"a": torch.zeros(100_000), "n": {"b": torch.ones(100_000)}})
    saved = td.memmap(prefix)
    content = pickle.dumps(saved)
    assert len(content) < 5_000
    other = pickle.loads(content)
    same(other, td)
    other["a"].fill_(1)
    assert (saved["a"] == 1).all()
    assert other.is_memmap()
    assert other["n"].saved_path == prefix / "n"
    other.make_memmap("new", (2,))
    assert "new" in TensorDict.load_memmap(prefix)
    anonymous = pickle.loads(pickle.dumps(td.memmap()))
    assert anonymous.is_memmap()
    assert anonymous.saved_path is None


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_torch_load_meta_map_location_is_not_mapped(protocol: int) -> None:
    mapped = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(2)}}, device="cpu").memmap()
    torch.save(mapped, file := io.BytesIO(), pickle_protocol=protocol)
    file.seek(0)
    found = torch.load(file, map_location="meta", weights_only=False)
    assert (
        {leaf.device.type for leaf in found._leaves()}
        == {found.device.type, found["n"].device.type}
        == {"meta"}
    )
    assert not found.is_memmap() and not found.is_locked


def test_memmap_incompatible_options_raise(nest: Any, prefix: Path) -> None:
    for where in (None, prefix.with_name("save.tdz")):
        with pytest.raises(ValueError, match="share_non_tensor=True needs a prefix that is a directory"):
            nest.memmap(where, share_non_tensor=True)
    for call, name in ((nest.memmap, "checksums"), (nest.memmap_, "durable"), (nest.memmap_like, "durable")):
        with pytest.raises(ValueError, match=f"{name}=True needs a prefix"):
            call(**{name: True})
    assert not nest.is_memmap()
    with pytest.raises(ValueError, match="only an archive can be compressed"):
        nest.memmap(prefix, compression="deflate")
    for call in nest.memmap, nest.memmap_like:
        with pytest.raises(ValueError, match="and it needs a path; got prefix=None, archive=True"):
            call(archive=True)
    with pytest.raises(ValueError, match="mode must be"):
        TensorDict.load_memmap(prefix, mode="w")
    with pytest.raises(TypeError, match="atomic is a bool"):
        nest.memmap(prefix, atomic="yes")


def test_memmap_unstorable_leaf_writes_nothing(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    files = {name: os.stat(prefix / name).st_mtime_ns for name in tree_under(prefix)}
    nest["n", "deep", "bad"] = torch.eye(3).to_sparse()
    with pytest.raises(CodecError, match=r"layout torch.sparse_coo at key \('n', 'deep', 'bad'\)"):
        nest.memmap(prefix)
    for where in (prefix, None):
        with pytest.raises(CodecError, match=r"elements of a meta tensor at key \('n', 'a'\)"):
            TensorDict({"n": {"a": torch.empty(2, device="meta")}}).memmap(where)
    assert files == {name: os.stat(prefix / name).st_mtime_ns for name in tree_under(prefix)}
    assert os.listdir(prefix.parent) == [prefix.name]


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(3), torch.ones(3, dtype=torch.bool))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [fake, masked])
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
def test_memmap_cyclic_link_error_has_path(nest: Any, tmp_path: Path, link: str) -> None:
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to((tmp_path / link).name)
    for create in (nest.memmap_like, partial(nest.memmap, existsok=False)):
        with pytest.raises(FormatError, match=f"{tmp_path / link}.* is a link that leads back to itself"):
            create(tmp_path / "save")


def test_memmap_prefix_may_be_link_or_relative(
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


def test_memmap_deep_tree_round_trips(prefix: Path) -> None:
    td = leaf = TensorDict({"x": torch.ones(1)})
    for _ in range(300):
        td = TensorDict({"n": td})
    td.memmap(prefix)
    found = TensorDict.load_memmap(prefix)
    for _ in range(300):
        found = found._children()["n"]
    assert torch.equal(found["x"], leaf["x"])


def test_memmap_path_over_limit_pickles_and_saves_again(prefix: Path, same: Any) -> None:
    td = TensorDict({"x": torch.ones(1)})
    for _ in range(30):
        td = TensorDict({"k" * 200: td})
    saved = td.memmap(prefix)
    for mapped in saved, TensorDict.load_memmap(prefix):
        same(pickle.loads(pickle.dumps(mapped)), td)
        mapped.memmap(prefix)
        same(TensorDict.load_memmap(prefix), td)


@pytest.mark.slow
def test_memmap_does_not_copy_whole_leaves(tmp_path: Path) -> None:
    """Contiguous leaves are written as they are, others in pieces: memory grows by little."""
    code = f"""
import resource, torch
from td_core import TensorDict
row = torch.arange(1 << 20, dtype=torch.uint8)
big = torch.zeros(128 << 20, dtype=torch.uint8)
td = TensorDict({{"expanded": row.expand(200, 1 << 20), "strided": big.view(1 << 13, 1 << 14).t(), "plain": big}})
TensorDict({{"a": row, "s": row.view(4, -1).t()}}).memmap({str(tmp_path / "warm")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
saved = td.memmap({str(tmp_path / "save")!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10
    assert os.stat(tmp_path / "save" / "expanded.memmap").st_size == 200 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memmap_cuda_leaves_round_trip(prefix: Path, same: Any) -> None:
    td = TensorDict(
        {"a": torch.arange(10_000_000), "b": torch.arange(12).view(3, 4).t(), "c": torch.tensor(2.5)}
    )
    saved = td.to("cuda").memmap(prefix)
    same(saved, td)
    loaded = TensorDict.load_memmap(prefix, device="cuda")
    assert loaded["a"].is_cuda
    same(loaded.cpu(), td)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options", [{}, {"num_threads": 4}, {"num_threads": 4, "return_early": True}], ids=str
)
def test_memmap_waits_for_cuda_stream_of_caller(tmp_path: Path, options: dict[str, Any]) -> None:
    side = torch.cuda.Stream()
    for number in (3.0, 5.0):
        big = torch.randn(4096, 4096, device="cuda")
        td = TensorDict({str(i): torch.zeros(1 << 18, device="cuda") for i in range(8)})
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(60):
                big = torch.mm(big, big).clamp_(-1, 1)
            td += number + big[0, 0] * 0
            saved: Any = td.memmap(tmp_path / str(number), **options)
            saved = saved.result() if "return_early" in options else saved
            assert all((leaf == number).all() for leaf in saved._leaves())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memmap_cuda_leaves_under_cuda_default_device(prefix: Path, same: Any) -> None:
    with torch.device("cuda"):
        td = TensorDict({"a": torch.arange(10), "b": torch.ones(3, 4).t()})
        same(td.memmap(prefix), td.cpu())
        same(TensorDict.load_memmap(prefix), td.cpu())
        td.save(f"{prefix}.tdz")
        same(TensorDict.load(f"{prefix}.tdz"), td.cpu())


@st.composite
def leaves(draw: st.DrawFn, batch: tuple[int, ...]) -> Any:
    shape = (*batch, *draw(st.lists(st.integers(0, 3), max_size=2)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    leaf = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    form = draw(st.sampled_from(["plain", "strided", "expanded", "nested"]))
    if form == "nested" and not batch:
        # Whole rows of it, so that the first dim is the ragged one for both layouts.
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        layout = draw(st.sampled_from([torch.strided, torch.jagged]))
        parts = [torch.arange(2.0 * size).view(size, 2) for size in sizes]
        return torch.nested.nested_tensor(parts, layout=layout)
    if form == "strided" and leaf.ndim > len(batch) + 1:
        return leaf.view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    return leaf[..., None].expand(*shape, 3) if form == "expanded" else leaf


@st.composite
def dense(draw: st.DrawFn, batch: tuple[int, ...], depth: int) -> Any:
    td = TensorDict(batch_size=batch)
    for key in draw(
        st.lists(st.one_of(st.sampled_from(ODD_KEYS), st.text(max_size=5)), max_size=4, unique=True)
    ):
        kind = draw(st.sampled_from(["leaf", "tied", "dense", "stack"])) if depth < 2 else "leaf"
        if kind == "dense":
            child = draw(dense((*batch, *draw(st.lists(st.integers(0, 2), max_size=1))), depth + 1))
        elif kind == "stack":
            child = draw(stacks(batch, depth + 1))
        else:
            leaf = draw(leaves(batch))
            if kind == "tied":
                td._set_child(key + "'", leaf)
            child = leaf
        td._set_child(key, child)
    return td


@st.composite
def stacks(draw: st.DrawFn, batch: tuple[int, ...], depth: int) -> Any:
    """A stack whose batch size starts with ``batch``: stacked behind it, or along one of its dims."""
    dim = draw(st.integers(0, len(batch)))
    count = batch[dim] if dim < len(batch) else draw(st.integers(1, 3))
    inner = batch[:dim] + batch[dim + 1 :]
    if not count:
        return LazyStackedTensorDict(batch_size=batch, stack_dim=dim)
    return LazyStackedTensorDict(*[draw(dense(inner, depth)) for _ in range(count)], stack_dim=dim)


@given(
    tree=st.sampled_from([(), (2,), (0,)]).flatmap(lambda batch: st.one_of(dense(batch, 0), stacks(batch, 0)))
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@pytest.mark.filterwarnings("ignore:B?Complex", "ignore:The PyTorch API of nested tensors")
def test_memmap_random_tree_round_trips(
    tree: Any, tmp_path_factory: pytest.TempPathFactory, same: Any
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    for name in ("directory", "archive.tdz"):
        same(tree.memmap(folder / name), tree)
        same(TensorDict.load_memmap(folder / name), tree)


def test_memmap_empty_tied_leaves_save_again(tmp_path: Path) -> None:
    leaf = torch.zeros(0, 2)
    saved = TensorDict({"a": leaf, "b": leaf}).memmap(tmp_path / "save")
    for found in (saved.memmap(tmp_path / "save"), saved.memmap(tmp_path / "other")):
        assert found["b"].shape == (0, 2)


def test_memmap_return_early_keeps_lock(tmp_path):
    td = TensorDict({"a": torch.zeros(2)}).lock_()
    td.memmap(tmp_path / "save", num_threads=1, return_early=True).result()
    assert TensorDict.load_memmap(tmp_path / "save").is_locked


@pytest.mark.parametrize("path", [(), ("n",), ("n", "m")])
def test_memmap_saves_user_locks_not_mapping_locks(path, tmp_path):
    td = TensorDict({"n": {"m": {"a": torch.zeros(2)}}})
    (td[path] if path else td).lock_()
    mapped = td.memmap(tmp_path / "first")
    mapped.memmap(tmp_path / "second", copy_existing=True)
    first, second = (TensorDict.load_memmap(tmp_path / name) for name in ("first", "second"))
    assert [first.is_locked, first["n"].is_locked, first["n", "m"].is_locked] == [
        td.is_locked, td["n"].is_locked, td["n", "m"].is_locked
    ]  # fmt: skip
    assert not second.is_locked


def test_memmap_during_thread_writes_saves_initial_entries(tmp_path):
    td = TensorDict({"n": {f"k{i}": torch.full((2,), i) for i in range(20)}}, [2])
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            td["n", "new"] = torch.zeros(2)
            del td["n", "new"]

    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer.start()
    try:
        for _ in range(50):
            with contextlib.suppress(StructureError):  # says that it was changed right then
                saved = td.memmap(tmp_path / "save")
                keys = list(saved.keys(True, True))
                assert sorted(TensorDict.load_memmap(tmp_path / "save").keys(True, True)) == sorted(keys)
                assert len(set(keys) - {("n", "new")}) == 20
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(interval)


def test_memmap_inplace_repeated_stack_member_maps_once() -> None:
    one = TensorDict({"a": torch.ones(2)}, [2])
    stack = lazy_stack([one, one]).memmap_()
    assert stack.is_memmap() and stack["a"].tolist() == [[1.0, 1.0]] * 2


def _set_value(node: Any) -> None:
    node.set_("v", pytest.importorskip("td_tensorclass").NonTensorData("new"))


@pytest.mark.parametrize(
    "change", [_set_value, lambda node: node.make_memmap("new", ())], ids=["value", "entry"]
)
@pytest.mark.parametrize("locked", [False, True])
def test_memmap_inplace_node_under_two_keys_is_split(
    change: Any, locked: bool, prefix: Path, same: Any
) -> None:
    level = TensorDict({"b": torch.ones(2), "v": pytest.importorskip("td_tensorclass").NonTensorData("old")})
    td = TensorDict({"x": level, "n": {"y": level}})
    if locked:
        td.lock_()
    assert td.memmap_(prefix)["x"] is level
    td["x", "b"].fill_(3)
    assert td["n", "y", "b"].tolist() == [3, 3]
    for node in td["x"], td["n", "y"]:
        change(node)
        loaded = TensorDict.load_memmap(prefix)
        same(loaded, td)
        assert (loaded["x", "v"], loaded["n", "y", "v"]) == (td["x", "v"], td["n", "y", "v"])
    td.unlock_()
    assert not td["n", "y"].is_locked
