"""The options of memmap and load_memmap: threads, return_early, existsok, device, out, subpath."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError, LockedError, StructureError
from td_memmap import FileTakenError, MemoryMappedTensor, TensorDictFuture


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


def test_memmap_many_leaves_in_threads_keeps_few_files_open(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_memmap_return_early_saves_entries_of_call(
    change: str, call: str, named: bool, prefix: Path, same: Any
) -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, batch_size=[3])
    wanted = (td.set_non_tensor("value", "x") if HAS_VALUES else td).clone()
    watched, released = threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        watched.set()
        assert released.wait(60)

    future = getattr(td, call)(prefix if named else None, num_threads=1, return_early=True, progress=wait)
    # Progress is reported only if elements are written to named files.
    if named and call != "memmap_like":
        assert watched.wait(60)
    with pytest.raises(LockedError) if call == "memmap_" else contextlib.nullcontext():
        CHANGES[change](td)
    released.set()
    same(future.result(), wanted)
    if named:
        same(TensorDict.load_memmap(prefix), wanted)


def test_memmap_inplace_failure_in_background_unlocks(prefix: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("progress")

    for locked in (False, True):
        td = TensorDict({"a": torch.zeros(3)}, lock=locked)
        with pytest.raises(KeyError, match="progress"):
            td.memmap_(prefix, num_threads=1, return_early=True, progress=fail).result()
        assert td.is_locked == locked
        assert not td.is_memmap()


SAVE_AT_EXIT = """
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
    subprocess.run([sys.executable, "-c", SAVE_AT_EXIT, prefix], check=True, timeout=120)
    assert (TensorDict.load_memmap(prefix)["last"] == 1).all()
    assert os.listdir(prefix.parent) == [prefix.name]


def test_future_result_raises_error_of_save(nest: Any, prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("td_memmap._fs.write_all", full)
    with pytest.raises(OSError, match="cannot write key 'a', 24 bytes: No space left"):
        nest.memmap(prefix, num_threads=2, return_early=True).result()
    assert not prefix.exists()


def test_memmap_robust_key_false_writes_raw_names(prefix: Path, same: Any, list_files: Any) -> None:
    td = TensorDict({"a b": torch.ones(1), "n%n": {"c:d": torch.zeros(1)}})
    saved = td.memmap(prefix, robust_key=False)
    assert saved["n%n"].saved_path == prefix / "n%n"
    assert {"a b.memmap", "n%n/c:d.memmap"} < list_files(prefix)
    same(TensorDict.load_memmap(prefix), td)
    same(TensorDict.load_memmap(prefix, robust_key=False), td)
    with pytest.raises(CodecError, match="robust_key=False cannot store key '../x': it is not a file name"):
        TensorDict({"../x": torch.ones(1)}).memmap(prefix, robust_key=False)


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_memmap_nested_tensor_to_meta_loads_only_jagged(prefix: Path) -> None:
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


def test_load_memmap_out_gets_entries_of_save(nest: Any, prefix: Path, same: Any) -> None:
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


def test_load_memmap_out_stack_drops_entries_of_one_member(prefix: Path, same: Any) -> None:
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


def test_load_memmap_subpath_key_tensordict_returns_node(prefix: Path, same: Any) -> None:
    td = TensorDict({"_tensordict": {"_tensordict": {"a": torch.ones(1)}}, "n": {"b": torch.ones(2)}})
    for place in (prefix, prefix.with_name("save.tdz")):
        td.memmap(place)
        for path in ("_tensordict", ("_tensordict", "_tensordict"), "n"):
            same(TensorDict.load_memmap(place, subpath=path), td[path])


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


def test_memmap_return_early_of_locked_collection_saves_lock(tmp_path):
    td = TensorDict({"a": torch.zeros(2)}).lock_()
    td.memmap(tmp_path / "save", num_threads=1, return_early=True).result()
    assert TensorDict.load_memmap(tmp_path / "save").is_locked


def test_memmap_during_writes_of_other_thread_saves_or_raises(tmp_path):
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
            with contextlib.suppress(StructureError):  # A write during the planning of the save raises.
                saved = td.memmap(tmp_path / "save")
                keys = list(saved.keys(True, True))
                assert sorted(TensorDict.load_memmap(tmp_path / "save").keys(True, True)) == sorted(keys)
                assert len(set(keys) - {("n", "new")}) == 20
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(interval)
