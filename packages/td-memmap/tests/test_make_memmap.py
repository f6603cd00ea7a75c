"""make_memmap adds entries to a save, and memmap_refresh_ loads it again."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
import td_memmap
from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, KeyPathError, StructureError
from td_memmap import FileTakenError


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


UNSTORABLE_KEYS = [
    ("shape", "x"), ("far", "shape"), ("meta.json", "x"), ("k" * 300, "x"), "k" * 300, "node", ("leaf.memmap", "x"),
]  # fmt: skip


@pytest.mark.parametrize("key", UNSTORABLE_KEYS, ids=str)
def test_make_memmap_unstorable_key_changes_nothing(key: Any, prefix: Path, list_files: Any) -> None:
    saved = TensorDict({"node.memmap": {"a": torch.ones(1)}, "leaf": torch.ones(1)}).memmap(prefix)
    files = list_files(prefix)
    with pytest.raises(KeyError, match="a live save cannot hold this key"):
        saved.make_memmap(key, (2,))
    assert list_files(prefix) == files
    assert set(TensorDict.load_memmap(prefix).keys()) == set(saved.keys()) == {"node.memmap", "leaf"}


def test_make_memmap_in_save_with_appended_rows_raises(prefix: Path, same: Any, list_files: Any) -> None:
    mapped = TensorDict({"a": torch.zeros(3)}, [3]).memmap(prefix)
    td_memmap.append_memmap(prefix, TensorDict({"a": torch.ones(2)}, [2]))
    files = list_files(prefix)
    with pytest.raises(StructureError, match=r"cannot add key 'x': .*shape is \[3\].*batch size \[5\]"):
        mapped.make_memmap("x", (3,))
    assert list_files(prefix) == files
    same(TensorDict.load_memmap(prefix), TensorDict({"a": torch.tensor([0.0, 0, 0, 1, 1])}, [5]))
    mapped.memmap_refresh_().make_memmap("x", (5,))
    assert TensorDict.load_memmap(prefix)["x"].shape == (5,)


@pytest.mark.parametrize("first", ["a b", "shape"])
@pytest.mark.parametrize("saved_robust", [True, False])
@pytest.mark.parametrize("robust", [True, False])
def test_make_memmap_other_robust_key_maps_separate_files(
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


def test_make_memmap_concurrent_threads_keeps_all_entries(prefix: Path) -> None:
    saved = TensorDict({"n": {}}).memmap(prefix)
    keys = [(*level, str(number)) for level in ((), ("n",)) for number in range(30)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda key: saved.make_memmap(key, (1,)), keys))
    assert set(TensorDict.load_memmap(prefix).keys(include_nested=True, leaves_only=True)) == {
        key if len(key) > 1 else key[0] for key in keys
    }


@pytest.mark.parametrize("key", ["n", "a/b"])
def test_make_memmap_in_two_processes_shares_new_nodes(key: str, prefix: Path) -> None:
    saved = TensorDict({"a": torch.zeros(3), "s": {}}).memmap(prefix)
    one, other, third = (pickle.loads(pickle.dumps(saved)) for _ in range(3))
    one.make_memmap((key, "x"), (3,)).fill_(1)
    # An empty directory that a killed process left is not an entry.
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


def make_quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(("make", "content"), [
    (make_quantized, True), (make_quantized, False), (lambda: torch.eye(2).to_sparse(), True),
    (lambda: torch.empty(2, device="meta"), True),
])  # fmt: skip
def test_make_memmap_unstorable_tensor_changes_nothing(
    make: Callable[[], torch.Tensor], content: bool, prefix: Path, list_files: Any
) -> None:
    saved = TensorDict({"leaf": torch.ones(1)}).memmap(prefix)
    files = list_files(prefix)
    for td in (saved, TensorDict({"leaf": torch.ones(1)}).memmap()):
        with pytest.raises(CodecError, match=r"at key \('far', 'x'\)"):
            td.make_memmap_from_tensor(("far", "x"), make(), copy_data=content)
        assert list(td.keys(include_nested=True)) == ["leaf"]
    assert list_files(prefix) == files


def test_make_memmap_in_stack_raises(nest: Any, prefix: Path, list_files: Any) -> None:
    saved = nest.memmap(prefix)
    files = list_files(prefix)
    for key in ("lazy", "new"), ("lazy", "new", "x"):
        with pytest.raises(RuntimeError, match="a LazyStackedTensorDict gets no new entries"):
            saved.make_memmap(key, (3,))
    assert list_files(prefix) == files


@pytest.mark.parametrize("key", ["k" * 300, "meta.json", "leaf.memmap", "\ud800"], ids=ascii)
def test_memmap_key_unusable_as_file_name_has_saved_path(key: str, prefix: Path, same: Any) -> None:
    saved = TensorDict({"leaf": torch.ones(1), key: {"n": {"a": torch.ones(1)}}}).memmap(prefix)
    for mapped in (saved, pickle.loads(pickle.dumps(saved)) if key != "\ud800" else saved):
        assert mapped[key, "n"].saved_path.parent == mapped[key].saved_path
        assert mapped[key].saved_path.is_dir()
        mapped[key, "n"].memmap_refresh_()
    saved.make_memmap((key, "n", "b"), (2,)).fill_(7)
    same(TensorDict.load_memmap(prefix), saved)
    same(saved.memmap(prefix), TensorDict.load_memmap(prefix))


@pytest.mark.parametrize("keys", [("entries",), ("kind",), ("entries", "kind"), ("shape",)])
def test_make_memmap_next_to_keys_named_like_fields_adds_entry(keys: tuple[str, ...], prefix: Path) -> None:
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
    # Files of a killed process and directories without a save do not prevent the entry.
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


READERS: dict[str, Any] = {
    "open": td_core.open,
    "open r+": lambda path: td_core.open(path, mode="r+"),
    "load": TensorDict.load_memmap,
    "load r": lambda path: TensorDict.load_memmap(path, mode="r"),
    "locked": lambda path: TensorDict.load_memmap(path).lock_(),
}


@pytest.mark.parametrize("name", READERS)
def test_memmap_refresh_of_loaded_collection_keeps_its_mode(name: str, prefix: Path) -> None:
    pytest.importorskip("td_tensorclass")
    TensorDict({"a": torch.zeros(2), "s": ["u", "v"], "n": {"s": ["u", "v"]}}, [2]).memmap(prefix)
    reader, writer = READERS[name](prefix), TensorDict.load_memmap(prefix)
    was_locked = reader.is_locked
    writer[1] = {"a": 5.0, "s": "new", "n": {"s": "below"}}
    writer.memmap_().make_memmap("b", (2,))
    assert reader["s"] == ["u", "v"]
    assert reader.memmap_refresh_() is reader
    assert reader["s"] == ["u", "new"]
    assert reader["n", "s"] == ["u", "below"]
    assert reader["b"].tolist() == [0, 0]
    assert (reader.is_locked, reader.is_memmap()) == (was_locked, False)
    reader[0] = {"a": 7.0, "s": "mine"}
    is_read_only = name in ("open", "load r")
    found = TensorDict.load_memmap(prefix)
    assert (found["a"].tolist(), found["s"]) == (
        ([0, 5], ["u", "new"]) if is_read_only else ([7, 5], ["mine", "new"])
    )


def test_memmap_refresh_of_loaded_part_reloads_it(prefix: Path) -> None:
    TensorDict({"n": {"a": torch.zeros(2)}, "a": torch.ones(2)}, [2]).memmap(prefix)
    loaded = td_core.open(prefix)
    TensorDict({"n": {"a": torch.ones(2)}, "a": torch.ones(2)}, [2]).memmap(prefix)
    assert loaded["n"].memmap_refresh_()["a"].tolist() == [1, 1]
    for part in (loaded[:1], loaded.clone(), loaded.copy().unlock_().set("b", torch.zeros(2))):
        with pytest.raises(StructureError, match="is not memory-mapped, or it is a part of a save"):
            part.memmap_refresh_()
    TensorDict({"n": {"a": torch.ones(3)}, "a": torch.ones(3)}, [3]).memmap(prefix)
    with pytest.raises(StructureError, match=r"batch size \[3\] now, and the collection \[2\]"):
        loaded.memmap_refresh_()
    assert loaded["a"].tolist() == [1, 1]


def test_memmap_refresh_other_kind_raises(prefix: Path) -> None:
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
