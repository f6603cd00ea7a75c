"""Groups that are opened for writing, whose structure is in the group."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError, KeyPathError, StructureError, UnsupportedOperationError
from td_core.testing import kill_after, kill_at_os_call
from td_store import _temporary_files
from td_zarr import ZarrTensorDict, _local_objects, from_zarr, load, save, to_zarr, verify


def set_new(td: Any) -> None:
    td["x"] = torch.arange(8).view(4, 2)


def set_nested(td: Any) -> None:
    td["n", "deep", "x"] = torch.ones(4, 1)


def set_node(td: Any) -> None:
    td["m"] = TensorDict({"p": torch.zeros(4), "q": {"r": torch.ones(4, 2).bfloat16()}}, [4])


def set_stack(td: Any) -> None:
    td["s"] = lazy_stack([TensorDict({"a": torch.full((2,), i)}) for i in range(4)])


def set_tied(td: Any) -> None:
    td["t"] = TensorDict({"one": td["a"].clone()}, [4])
    td["t", "two"] = td["t", "one"]


def replace_by_other_shape(td: Any) -> None:
    td["a"] = torch.arange(4.0)


def replace_by_same_shape(td: Any) -> None:
    td["a"] = torch.full((4, 3), 7.0)


def replace_node_by_leaf(td: Any) -> None:
    td["n"] = torch.full((4,), 2)


def replace_leaf_by_node(td: Any) -> None:
    td["a"] = TensorDict({"b": torch.ones(4)}, [4])


def remove_leaf(td: Any) -> None:
    del td["n", "b"]


def remove_node(td: Any) -> None:
    td.del_("n")


def rename(td: Any) -> None:
    td.rename_key_("a", "z").rename_key_(("n", "b"), ("n", "c2"))


def pop(td: Any) -> None:
    td.pop("a")


def update(td: Any) -> None:
    td.update({"a": torch.ones(4, 3), "new": torch.zeros(4), "n": {"b": torch.full((4,), 9)}})


def set_key_with_slash(td: Any) -> None:
    td["n/b"] = torch.ones(4)


def change_batch_size(td: Any) -> None:
    td["n"].batch_size = [4]
    td.batch_size = []
    td["scalar"] = torch.tensor(1.5)


def change_names(td: Any) -> None:
    td.names = ["time"]
    td["x"] = torch.zeros(4)


def write_rows(td: Any) -> None:
    td[1:3] = td[0].clone()
    td["y"] = td["a"] + 1
    td["y"].zero_()


CHANGES: list[Callable[[Any], None]] = [
    set_new, set_nested, set_node, set_stack, set_tied, replace_by_other_shape, replace_by_same_shape, replace_node_by_leaf,
    replace_leaf_by_node, remove_leaf, remove_node, rename, pop, update, set_key_with_slash, change_batch_size, change_names,
    write_rows,
]  # fmt: skip


@pytest.mark.parametrize("place", ["directory", "store"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_reaches_the_group(change: Any, place: str, path: Path, td: TensorDict) -> None:
    location: Any = path if place == "directory" else zarr.storage.MemoryStore()
    options: dict[str, Any] = {} if place == "directory" else {"chunks": 2}
    expected = td.clone()
    change(expected)
    live = to_zarr(td, location, **options)
    assert type(live) is type(live["n"]) is ZarrTensorDict
    change(live)
    for found in (live, load(location), from_zarr(location), from_zarr(location, mode="r+")):
        assert (found.batch_size, found.names) == (expected.batch_size, expected.names)
        assert list(found.keys(True, True)) == list(expected.keys(True, True)) or change in (
            rename,
            write_rows,
        )
        assert set(found.keys(True, True)) == set(expected.keys(True, True))
        for key, leaf in expected.items(True, True):
            assert found.get(key).dtype == leaf.dtype
            assert torch.equal(found.get(key).clone().float(), leaf.float()), key
    assert verify(location).ok
    group = zarr.open_group(location, mode="r")
    arrays = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    stored = zarr.open_group(location, mode="r", use_consolidated=False)
    assert arrays == {name for name, node in stored.members(max_depth=None) if isinstance(node, zarr.Array)}


def test_change_after_other_instance_keeps_its_entries(path: Path, td: TensorDict) -> None:
    first = to_zarr(td, path)
    second = from_zarr(path, mode="r+")
    first["new"] = torch.ones(td.batch_size)
    second["n", "new"] = torch.ones(td.batch_size)
    assert {"new", ("n", "new")} < set(load(path).keys(True, True))
    del first["n"]
    with pytest.raises(
        KeyPathError, match="key 'n' was removed since the collection was opened: open it again"
    ):
        second["n", "other"] = torch.ones(td.batch_size)
    first.batch_size = []
    with pytest.raises(StructureError, match=r"cannot set key 'other': the batch size is \[\] now, and was "):
        second["other"] = torch.ones(td.batch_size)
    assert verify(path).ok


def test_batch_size_of_opening_reaches_the_group(path: Path, td: TensorDict) -> None:
    to_zarr(td, path)
    from_zarr(path, mode="r+", batch_size=[])["new"] = torch.ones(1)
    assert (load(path).batch_size, load(path)["new"].tolist()) == ((), [1])


def test_replace_level_by_its_leaf(path: Path, td: TensorDict) -> None:
    live = to_zarr(TensorDict({"n": td.clone()}), path)
    live["n"] = live["n", "n"]
    assert set(load(path).keys(True, True)) == {("n", key) for key in td["n"].keys()}
    assert torch.equal(load(path)["n", "b"], td["n", "b"])


def test_results_of_operations_are_collections_in_memory(path: Path, td: TensorDict) -> None:
    live = to_zarr(td, path)
    for result in (
        live.clone(),
        live + 1,
        live[:2],
        live[[1, 0]],
        live.to_tensordict(),
        live.select("a"),
        live.view(2, 2),
    ):
        assert type(result) is TensorDict
    assert (live + 1 == td + 1).all()
    assert (torch.stack([live, live])[1] == td).all()


def test_values_reach_the_header(path: Path, td: TensorDict) -> None:
    pytest.importorskip("td_tensorclass")
    live = to_zarr(td.set("s", "old"), path)
    live["s"] = "new"
    live["n", "t"] = (1, None)
    assert (load(path)["s"], load(path)["n", "t"]) == ("new", (1, None))
    live.update({"s": "third"}, inplace=True)
    assert load(path)["s"] == "third"
    del live["s"]
    assert "s" not in load(path)
    assert verify(path).ok


def test_value_that_cannot_be_stored_changes_nothing(path: Path, td: TensorDict) -> None:
    live = to_zarr(td, path)
    with pytest.raises(CodecError, match="cannot save.*'x'.*layout"):
        live["a"] = TensorDict({"x": torch.ones(4).to_sparse()}, [4])
    with pytest.raises(UnsupportedOperationError, match=r"cannot set key \('n', 'x'\).*nested tensor"):
        live["n", "x"] = torch.nested.nested_tensor([torch.ones(i) for i in range(4)], layout=torch.jagged)
    assert (load(path) == td).all()
    assert list(load(path).keys(True, True)) == list(td.keys(True, True))


def test_pickle_opens_group_again(path: Path, td: TensorDict) -> None:
    live = to_zarr(td, path)
    content = pickle.dumps(live["n"])
    assert b"td_zarr._" not in content
    again = pickle.loads(content)
    again["x"] = torch.ones(4)
    assert list(load(path)["n"].keys()) == ["b", "c", "x"]
    save(td, path)
    with pytest.raises(ValueError, match="was replaced since it was opened"):
        pickle.loads(content)
    with pytest.raises(ValueError, match="was replaced since it was opened"):
        live["y"] = torch.ones(4)


@pytest.mark.once
def test_change_killed_at_any_moment_leaves_group_that_loads(path: Path, td: TensorDict) -> None:
    for moment in range(12):
        to_zarr(td, path)

        def work() -> None:
            live = from_zarr(path, mode="r+")
            for number in range(100):
                live["x"] = torch.full((4, 5), number)
                del live["x"]

        kill_after(work, 0.01 + 0.004 * moment)
        found = load(path)
        assert (found.select("a", "n") == td).all()
        if "x" in found.keys():
            assert found["x"].min() == found["x"].max()


def replace_several(td: Any) -> None:
    td.update({"a": torch.ones(4), "new": torch.zeros(4), "n": {"b": torch.ones(4, 2)}})


def swap(td: Any) -> None:
    td.update({"a": td["n", "b"], ("n", "b"): td["a"]})


def flatten(td: Any) -> None:
    td.flatten_keys("/", inplace=True)


def show_content(td: Any) -> list[Any]:
    leaves = [(key, leaf.dtype, leaf.tolist()) for key, leaf in td.items(True, True)]
    return [td.batch_size, sorted(map(repr, leaves))]


@pytest.mark.once
@pytest.mark.parametrize(
    "change",
    [
        set_node, replace_by_other_shape, replace_node_by_leaf, replace_leaf_by_node, remove_node, replace_several, swap, flatten,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_change_killed_at_any_file_operation_leaves_old_or_new(
    change: Any, path: Path, td: TensorDict
) -> None:
    kept, clean = path.with_name("kept.zarr"), path.with_name("clean.zarr")
    save(td, kept)
    shutil.copytree(kept, clean)
    change(from_zarr(clean, mode="r+"))
    old, new, found = show_content(load(kept)), show_content(load(clean)), []

    def start() -> Any:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(kept, path)
        return from_zarr(path, mode="r+")

    for number in itertools.count(len(change.__name__) % 9, 9):
        live = start()
        killed = kill_at_os_call(
            lambda live=live: change(live),  # type: ignore[misc]
            number,
            _temporary_files,
            _local_objects,
            shutil,
        )
        found.append(show_content(load(path)))
        assert verify(path).ok
        if number % 4 < 2:
            td.to_zarr(path)  # which has no objection to what is left
        else:
            from_zarr(path, mode="r+")["last"] = torch.ones(4)
            left = [name for name in os.listdir(path) if ".td-" in name or ".tmp-" in name]
            # A process that was killed before the second write leaves the array under its other name.
            assert left == [] or (left == ["%.td-tmp-0"] and found[-1] == new)
            assert verify(path).ok
        if not killed:
            break
    assert found[-1] == new
    assert all(item in (old, new) for item in found)
    assert not [name for name in os.listdir(clean) if ".td-" in name]


def test_set_other_shape_repeatedly_leaves_one_array(path: Path) -> None:
    live = to_zarr(TensorDict({"a": torch.tensor(0.0)}), path, chunks=1)
    for value in (torch.ones(7, 7), torch.tensor(0.0), torch.ones(2, 3)):
        live["a"] = value
        assert torch.equal(load(path)["a"], value)
        assert sorted(os.listdir(path)) == ["a", "zarr.json"]


@pytest.mark.parametrize("options", [{}, {"chunks": 1}], ids=["raw", "chunks"])
def test_replaced_array_in_store_after_error_at_any_request_is_old_or_new(
    options: Any, td: TensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = td.clone()
    replace_several(changed)
    old, new = show_content(td), show_content(changed)
    found = []
    for number in range(100):
        store = zarr.storage.MemoryStore()
        live = to_zarr(td, store, **options)
        left = number

        async def fail(self: Any, key: str, *args: Any, method: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError("no space")
            return await method(self, key, *args, **kwargs)

        with monkeypatch.context() as patch:
            for name in ("set", "delete"):
                method = getattr(zarr.storage.MemoryStore, name)
                patch.setattr(zarr.storage.MemoryStore, name, partialmethod(fail, method=method))
            with contextlib.suppress(OSError, FormatError):
                replace_several(live)
        found.append(show_content(load(store)))
        assert show_content(from_zarr(store)) == found[-1]
        assert show_content(live) == found[-1]
        from_zarr(store, mode="r+")["last"] = torch.ones(4)
        assert not [key for key in store._store_dict if ".td-" in key] or found[-1] == new
        save(td, store)
        if left >= 0:
            break
    assert old in found
    assert found[-1] == new
    assert all(item in (old, new) for item in found)


def test_set_named_entry_names_dims_in_group(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    save(TensorDict({"a": torch.ones(5), "n": TensorDict({"b": torch.ones(5)}, [5])}, [5]), path)
    live: Any = from_zarr(path, mode="r+")
    live["n", "m"] = TensorDict({"y": torch.zeros(5, 3)}, [5, 3], names=["time", "space"])
    stored = load(path)
    assert (stored.names, stored["n"].names, stored["n", "m"].names) == (
        ["time"],
        ["time"],
        ["time", "space"],
    )
    with pytest.raises(ValueError, match="'space' is that of another dim"):
        live.names = ["space"]
    assert load(path).names == ["time"]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_group_has_its_place_mode_and_zarr_group(mode, tmp_path):
    path = str(tmp_path / "data.zarr")
    TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3)}}, [3]).to_zarr(path, chunks=2)
    data = TensorDict.from_zarr(path, mode=mode)
    for node in (data, data["n"]):
        assert (node.filename, node.mode) == (path, mode)
        assert node.file["a"][:].tolist() == [0, 1, 2]
        assert node.file.read_only is (mode == "r")
    TensorDict({"b": torch.ones(3)}).to_zarr(tmp_path / "packed.zarr.zip")
    assert TensorDict.from_zarr(tmp_path / "packed.zarr.zip", mode="r").file.read_only
    handed = TensorDict.from_zarr(zarr.open_group(path, mode="r")["n"])
    assert sorted(handed.file.keys()) == ["b"]
