"""``PersistentTensorDict``: every change of entries, batch sizes and names reaches the file, and nothing else changes it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from td_core import (
    CodecError,
    FormatError,
    LazyStackedTensorDict,
    LockedError,
    StructureError,
    TensorDict,
    UnsupportedOperationError,
    load,
)
from td_core.spi import encode
from td_hdf5 import PersistentTensorDict, from_h5, save, to_h5, verify
from td_store import StoredTensor

HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None
needs_values = pytest.mark.skipif(not HAS_VALUES, reason="needs td-tensorclass")


def wrap(value: Any) -> Any:
    return importlib.import_module("td_tensorclass").NonTensorData(value)


def make_stack() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*(TensorDict({"x": torch.full((i,), i)}) for i in range(4)))


#: Changes of structure by name; each is applied to the collection in memory and to the stored one.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda td: td.set("new", torch.arange(4)),
    "set_nested": lambda td: td.set(("n", "new"), torch.arange(8).view(4, 2)),
    "set_new_level": lambda td: td.set(("x", "y", "z"), torch.zeros(4)),
    "set_again": lambda td: td.set("a", torch.zeros(4, 3)),
    "set_again_with_other_shape": lambda td: td.set("a", torch.zeros(4)),
    "set_again_with_other_dtype": lambda td: td.set(("n", "b"), torch.zeros(4, dtype=torch.bfloat16)),
    "set_level": lambda td: td.set("m", TensorDict({"x": torch.ones(4), "y": {}}, [4])),
    "set_level_in_place_of_leaf": lambda td: td.set("a", TensorDict({"x": torch.ones(4)}, [4])),
    "set_leaf_in_place_of_level": lambda td: td.set("n", torch.ones(4)),
    "set_own_leaf": lambda td: td.set("again", td["a"]),
    "set_own_level": lambda td: td.set("again", td["n"]),
    "set_expanded": lambda td: td.set("e", torch.ones(1).expand(4)),
    "set_key_with_slash": lambda td: td.set("p/q", torch.ones(4)),
    "set_stack": lambda td: td.set("s", make_stack()),
    "setitem": lambda td: td.__setitem__(("n", "b"), torch.ones(4, 1)),
    "setdefault": lambda td: td.setdefault("new", torch.ones(4)),
    "update": lambda td: td.update({"a": torch.zeros(4, 3), "n": {"d": torch.ones(4)}, "k": torch.ones(4)}),
    "del_": lambda td: td.del_("a"),
    "del_nested": lambda td: td.del_(("n", "b")),
    "del_level": lambda td: td.__delitem__("n"),
    "pop": lambda td: td.pop("a"),
    "rename_key_": lambda td: td.rename_key_("a", "z"),
    "rename_nested": lambda td: td.rename_key_(("n", "b"), ("n", "z")),
    "rename_to_other_level": lambda td: td.rename_key_(("n", "b"), "z"),
    "rename_level": lambda td: td.rename_key_("n", "z"),
    "rename_to_old_name": lambda td: td.rename_key_("a", "z").rename_key_("z", "a"),
    "delete_and_set": lambda td: td.del_("a").set("a", torch.ones(4, 5)),
    "select_inplace": lambda td: td.select("a", inplace=True),
    "exclude_inplace": lambda td: td.exclude(("n", "b"), inplace=True),
    "set_part_of_itself": lambda td: td.set("a", td["a"][:, 1:]),
    "set_selection_of_itself": lambda td: td.set("n", td["n"].select("c")),
    "replace_level": lambda td: td.set("n", TensorDict({"only": torch.ones(4)}, [4])),
    "create_nested": lambda td: td.create_nested("deep"),
    "batch_size": lambda td: setattr(td, "batch_size", []),
    "nested_batch_size": lambda td: setattr(td["n"], "batch_size", [4]),
    "names": lambda td: setattr(td, "names", ["time"]),
    "clear": lambda td: td.clear(),
    "write_in_place": lambda td: td["n"].zero_(),
    "write_row": lambda td: td.__setitem__(1, TensorDict({"a": torch.ones(3), "n": {"b": torch.tensor(9), "c": torch.zeros(2)}})),
    "apply_": lambda td: td.apply_(lambda leaf: leaf.mul_(2)),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"chunks": 2, "compression": "gzip"}], ids=["contiguous", "chunks"])
@pytest.mark.parametrize("name", CHANGES)
def test_change_reaches_the_file(name: str, options: Any, path: Path, td: TensorDict, same: Any) -> None:
    stored = to_h5(td, path, **options)
    expected = td.clone()
    CHANGES[name](expected)
    CHANGES[name](stored)
    same(stored.clone(), expected)
    same(load(path), expected)
    same(from_h5(path).clone(), expected)
    with h5py.File(path) as file:
        assert not any("#" in name for name in list_names(file))


def list_names(group: Any) -> list[str]:
    names: list[str] = []
    group.visit(names.append)
    return names


@needs_values
@pytest.mark.parametrize("value", ["text", 3, None, (1, "a"), {"k": b"x"}], ids=repr)
def test_set_value_reaches_the_file(value: Any, path: Path, td: TensorDict) -> None:
    stored = to_h5(td, path)
    stored["v"] = wrap(value)
    stored["n", "v"] = wrap(value)
    for found in (stored, load(path), from_h5(path)):
        assert (found["v"], found["n", "v"], type(found["v"])) == (value, value, type(value))
        assert found.batch_size == (4,)
    stored["v"] = wrap("other")
    assert (stored["v"], load(path)["v"]) == ("other", "other")
    del stored["v"]
    assert "v" not in load(path)


@needs_values
def test_checkpoint_of_a_replay_buffer(path: Path, td: TensorDict, same: Any) -> None:
    data = PersistentTensorDict.from_dict(td, path)
    data["_len"] = wrap(3)
    data.close()
    found = PersistentTensorDict.from_h5(path)
    assert (found["_len"], type(found["_len"]), found.batch_size) == (3, int, (4,))
    row = found[0]
    assert type(row) is TensorDict
    target = td.clone().zero_()
    target.copy_(found.exclude("_len"))
    same(target, td)
    assert "_len" in found.to_tensordict()


@pytest.mark.parametrize(
    "name", [name for name in CHANGES if name not in ("nested_batch_size", "names", "batch_size")]
)
def test_change_of_file_opened_for_reading_raises(name: str, path: Path, td: TensorDict) -> None:
    save(td, path)
    content = path.read_bytes()
    stored = from_h5(path)
    with pytest.raises(LockedError, match=r"data.h5.*opened with mode='r'; open it with mode='r\+'"):
        CHANGES[name](stored)
    assert path.read_bytes() == content


def test_error_of_mode_names_key_and_file(path: Path, td: TensorDict) -> None:
    save(td, path)
    with pytest.raises(LockedError) as caught:
        from_h5(path)["n", "new"] = torch.ones(4)
    assert str(caught.value) == (
        f"cannot set key ('n', 'new') in {path}: it is opened with mode='r'; open it with mode='r+'"
    )


def test_results_of_operations_are_in_memory_or_views(path: Path, td: TensorDict, same: Any) -> None:
    stored = to_h5(td, path)
    results: list[tuple[Any, Any]] = [
        (stored.clone(), td),
        (copy.deepcopy(stored), td),
        (stored + 1, td + 1),
        (stored[1:3], td[1:3]),
        (stored[[3, 0]], td[[3, 0]]),
        (stored.select("n"), td.select("n")),
        (stored.view(2, 2), td.view(2, 2)),
        (stored.unsqueeze(0).permute(1, 0), td.unsqueeze(0).permute(1, 0)),
        (stored.flatten_keys("."), td.flatten_keys(".")),
        (stored.to_tensordict(), td),
        (torch.stack([stored, stored]), torch.stack([td, td])),
        (torch.cat([stored, td]), torch.cat([td, td])),
        (stored.apply(lambda leaf: leaf * 2), td * 2),
    ]
    for found, wanted in results:
        assert type(found) is TensorDict
        same(found.clone(), wanted)
    same(load(path), td)


def test_nested_level_is_persistent_and_other_kinds_are_locked(path: Path, td: TensorDict) -> None:
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.ones(i)}) for i in range(4)))
    stored = to_h5(td, path)
    assert type(stored["n"]) is PersistentTensorDict
    assert all(isinstance(leaf, StoredTensor) for leaf in stored["n"].values())
    with pytest.raises(LockedError):
        stored["s"]["new"] = torch.ones(4)


@pytest.mark.parametrize("key", [None, "n"])
def test_pickle_opens_the_file(key: Any, path: Path, td: TensorDict, same: Any) -> None:
    stored = to_h5(td, path)
    part = stored if key is None else stored[key]
    data = pickle.dumps(part)
    assert b"td_hdf5._" not in data
    assert len(data) < 1000
    found = pickle.loads(data)
    assert (type(found), found.mode) == (PersistentTensorDict, "r+")
    found["new"] = torch.ones(4)
    assert list(load(path).keys(True, True))[-1] == ("new" if key is None else (key, "new"))
    save(td, path)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        pickle.loads(data)


def test_pickle_in_another_collection_has_stored_leaves(path: Path, td: TensorDict, same: Any) -> None:
    found = pickle.loads(pickle.dumps(TensorDict({"p": to_h5(td, path)})))
    assert type(found["p"]) is TensorDict
    same(found["p"].clone(), td)


def test_encoded_collection_is_a_tensordict(path: Path, td: TensorDict) -> None:
    assert [row["kind"] for row in encode(to_h5(td, path)).nodes] == ["TensorDict", "TensorDict"]


def test_save_of_a_persistent_collection_loads_without_the_file(
    path: Path, tmp_path: Path, td: TensorDict, same: Any
) -> None:
    save(to_h5(td, path), tmp_path / "copy.h5")
    path.unlink()
    same(load(tmp_path / "copy.h5"), td)


@pytest.mark.parametrize("mode", ["w", "a", "w-", "x"])
def test_create_file_and_set_entries(mode: str, path: Path, same: Any) -> None:
    stored = PersistentTensorDict(filename=path, batch_size=[3], mode=mode, compression="gzip")
    stored["x"] = torch.arange(3)
    stored["n", "y"] = torch.ones(3, 2)
    same(load(path), TensorDict({"x": torch.arange(3), "n": {"y": torch.ones(3, 2)}}, [3]))
    assert (stored.filename, stored.mode, stored.kwargs) == (str(path), "r+", {"compression": "gzip"})
    with h5py.File(path) as file:
        assert file["x"].compression == "gzip"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "takes a filename or a group, and not both"),
        ({"mode": "rb"}, ValueError, "mode is one of 'r', 'r\\+', 'a', 'w', 'w-', 'x'; got 'rb'"),
        ({"backend": "zarr"}, ValueError, "has the backend 'h5' alone; got 'zarr'"),
        ({"allow_pickle": True}, ValueError, "never reads or writes pickles"),
        ({"mode": "x"}, FileExistsError, "it exists"),
    ],
)
def test_invalid_arguments_raise(
    arguments: Any, error: Any, message: str, path: Path, td: TensorDict
) -> None:
    save(td, path)
    with pytest.raises(error, match=message):
        PersistentTensorDict(**({"filename": path} if arguments else {}), **arguments)


def test_open_missing_file_raises(path: Path) -> None:
    for mode in ("r", "r+"):
        with pytest.raises(FileNotFoundError):
            PersistentTensorDict(filename=path, mode=mode)
    assert not path.exists()


def test_open_h5py_group_uses_its_file(path: Path, td: TensorDict, same: Any) -> None:
    save(td, path)
    with h5py.File(path) as file:
        same(PersistentTensorDict(group=file).to_tensordict(), td)
        same(PersistentTensorDict(group=file["n"]).to_tensordict(), td["n"])
        assert PersistentTensorDict(group=file["n"]).batch_size == (4,)


def test_context_manager_closes_the_file(path: Path, td: TensorDict) -> None:
    with PersistentTensorDict.from_dict(td, path) as stored:
        stored["new"] = torch.ones(4)
    with h5py.File(path, "r+") as file:  # which fails while the file is open
        assert "new" in file
    assert stored["new"].sum() == 4


def test_file_is_an_h5py_file(path: Path, td: TensorDict) -> None:
    stored = to_h5(td, path)
    assert stored.file["n/b"][()].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, [4]),
        ({"batch_size": []}, []),
        ({"auto_batch_size": True}, [4]),
        ({"auto_batch_size": True, "batch_dims": 0}, []),
    ],
    ids=str,
)
def test_batch_size_of_opened_file(options: Any, size: list[int], path: Path, td: TensorDict) -> None:
    save(td, path)
    assert from_h5(path, **options).batch_size == torch.Size(size)
    assert TensorDict.from_h5(path, **options).batch_size == torch.Size(size)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, [2]),
        ({"batch_size": [2]}, [2]),
        ({"batch_size": []}, []),
        ({"auto_batch_size": True, "batch_dims": 1}, [2]),
    ],
    ids=str,
)
def test_from_dict_sets_batch_size(options: Any, size: list[int], path: Path) -> None:
    stored = PersistentTensorDict.from_dict(
        {"a": torch.ones(2, 3), "n": {"b": torch.zeros(2)}}, path, **options
    )
    assert stored.batch_size == load(path).batch_size == torch.Size(size)


def test_structure_of_tensorclass_file_is_opened_locked(path: Path) -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3)}))
    stored = to_h5(stack, path)
    assert type(stored) is LazyStackedTensorDict
    stored[0]["a"].zero_()
    assert load(path)[0]["a"].tolist() == [0, 0]
    with pytest.raises(TypeError, match="has a LazyStackedTensorDict: open it with td_core.open"):
        PersistentTensorDict(filename=path)


def test_leaf_of_removed_entry_keeps_its_elements(path: Path, td: TensorDict) -> None:
    stored = to_h5(td, path)
    leaf = stored["a"]
    assert leaf.sum() == 66
    del stored["a"]
    stored["other"] = torch.zeros(4, 3)  # can get the space
    assert leaf.sum() == 66
    leaf[1:].fill_(7)
    assert (leaf.sum(), pickle.loads(pickle.dumps(leaf)).sum()) == (3 + 63, 3 + 63)
    assert stored["other"].sum() == 0


def test_new_entry_of_save_with_checksums_drops_them(path: Path, td: TensorDict) -> None:
    stored = to_h5(td, path, checksums=True)
    assert verify(path).ok and verify(path).hashed
    stored["new"] = torch.ones(4)
    del stored
    report = verify(path)
    assert (report.ok, report.hashed) == (True, 0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_set_unsupported_leaf_raises_and_changes_nothing(
    wrapped: bool, path: Path, td: TensorDict, same: Any
) -> None:
    stored = to_h5(td, path)
    nested = torch.nested.nested_tensor([torch.ones(i) for i in range(4)], layout=torch.jagged)
    for leaf, error, message in (
        (nested, UnsupportedOperationError, "a nested tensor cannot be written in place"),
        (torch.ones(4).to_sparse(), CodecError, "a tensor with the layout torch.sparse_coo"),
    ):
        with pytest.raises(error, match=message):
            stored["a"] = TensorDict({"x": leaf}, [4]) if wrapped else leaf
    same(stored.clone(), td)
    same(load(path), td)


#: Writes of values in place: the operation, and the values of both entries afterwards.
VALUE_WRITES: dict[str, tuple[Callable[[Any], Any], list[str], Any]] = {
    "row": (lambda td: td.__setitem__(1, td[0].clone()), ["a", "a", "c"], "one"),
    "rows": (lambda td: td.__setitem__([2, 0], td[:2].clone()), ["b", "b", "a"], "one"),
    "update_": (lambda td: td.update_(td.clone().set("s", stack("x", "y", "z"))), ["x", "y", "z"], "one"),
    "set_": (lambda td: td.set_("s", stack("x", "y", "z")), ["x", "y", "z"], "one"),
    "value": (lambda td: td.set_("v", wrap("two")), ["a", "b", "c"], "two"),
    "view": (lambda td: td[1:].set_("s", stack("y", "z")), ["a", "y", "z"], "one"),
}  # fmt: skip


def stack(*values: Any) -> Any:
    return importlib.import_module("td_tensorclass").NonTensorStack(*values)


@needs_values
@pytest.mark.parametrize("name", VALUE_WRITES)
def test_write_of_values_in_place_reaches_the_file(name: str, path: Path) -> None:
    operation, many, one = VALUE_WRITES[name]
    td = TensorDict({"a": torch.ones(3), "s": stack("a", "b", "c"), "v": wrap("one")}, [3])
    stored = to_h5(td, path)
    operation(stored)
    for found in (stored, load(path)):
        assert (list(found["s"]), found["v"]) == (many, one)
    with pytest.raises(LockedError, match="it is opened with mode='r'"):
        operation(from_h5(path).set_("s", stack("q", "r", "s")))
    back = pickle.loads(pickle.dumps(stored[1:]))
    assert list(back["s"]) == many[1:]


def test_functions_of_torch_see_a_pytree(path: Path, td: TensorDict, same: Any) -> None:
    stored = to_h5(td, path)
    mapped = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, stored)
    same(mapped, td + 1)
    assert torch.vmap(lambda row: row["a"] * 2)(stored).tolist() == (td["a"] * 2).tolist()
    same(torch.vmap(lambda row: row.apply(lambda leaf: leaf * 2))(stored), td * 2)
    same(load(path), td)


@needs_values
def test_write_of_values_in_other_kinds_raises(path: Path) -> None:
    def make(value: str) -> Any:
        members = (TensorDict({"x": torch.ones(i + 1), "v": wrap(value)}) for i in range(3))
        return TensorDict({"s": LazyStackedTensorDict(*members)}, [3])

    stored = to_h5(make("old"), path)
    with pytest.raises(StructureError, match=r"cannot write the values of key 's' in .*data.h5 in place"):
        stored["s"][0] = make("new")["s"][0]
    stored["s"] = make("new")["s"]
    assert stored["s"][0]["v"] == load(path)["s"][0]["v"] == "new"


def test_set_named_entry_names_dims_in_file(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    save(TensorDict({"a": torch.ones(5), "n": TensorDict({"b": torch.ones(5)}, [5])}, [5]), path)
    live: Any = from_h5(path, mode="r+")
    named = TensorDict({"y": torch.zeros(5, 3)}, [5, 3], names=["time", "space"])
    live["n", "m"] = named
    live.close()
    stored = load(path)
    assert (stored.names, stored["n"].names, stored["n", "m"].names) == (
        ["time"],
        ["time"],
        ["time", "space"],
    )
    live = from_h5(path, mode="r+")
    with pytest.raises(ValueError, match="'space' is that of another dim"):
        live.names = ["space"]
    live.close()
    assert load(path).names == ["time"]
