"""Saving leaves that are mapped already, share a storage or are views."""

from __future__ import annotations

import errno
import io
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_memmap
from td_core import TensorDict, lazy_stack
from td_core._tree.backends import get_backends
from td_memmap import FileTakenError, MemoryMappedTensor, _fs


def test_memmap_mapped_leaves_to_other_prefix_raises(nest: Any, prefix: Path, same: Any) -> None:
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


def test_memmap_leaf_transposed_in_place_raises(prefix: Path) -> None:
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


def test_memmap_leaf_of_replaced_save_is_copied(prefix: Path) -> None:
    first = TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    TensorDict({"a": torch.ones(3)}).memmap(prefix)
    first.memmap(prefix)
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [0, 0, 0]


def test_memmap_privately_mapped_leaf_saves_its_changes(prefix: Path) -> None:
    TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    private = TensorDict.load_memmap(prefix, mode="r")
    private["a"].fill_(1)
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [0, 0, 0]
    private.memmap(prefix)
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [1, 1, 1]


def test_memmap_replacing_save_keeps_mapped_elements(
    nest: Any, prefix: Path, same: Any, list_files: Any
) -> None:
    wanted = nest.clone()
    saved, loaded = nest.memmap(prefix), TensorDict.load_memmap(prefix)
    TensorDict({"z": torch.zeros(2)}).memmap(prefix)
    same(saved, wanted)
    same(loaded, wanted)
    assert list_files(prefix) == {"z.memmap", "meta.json", "%manifest.json"}


def test_memmap_tied_leaves_in_many_directories_links_files(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fs, "_OPEN_DIRECTORIES", 3)
    tied, files = torch.arange(3), os.listdir("/proc/self/fd")
    TensorDict({str(i): {"a": tied} for i in range(9)}).memmap(prefix)
    assert os.listdir("/proc/self/fd") == files
    assert (prefix / "0" / "a.memmap").stat().st_nlink == 9
    assert all((leaf == tied).all() for leaf in TensorDict.load_memmap(prefix)._leaves())


def test_memmap_expanded_leaf_writes_all_elements(prefix: Path) -> None:
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


def replace_memory(td: Any) -> None:
    td["a"].data = torch.ones(2)


def replace_components(td: Any) -> None:
    td["n", "nested"].data = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


#: Changes after which a mapped collection differs from its save.
CHANGES_AFTER_SAVE = {
    "a name": lambda td: setattr(td, "names", ["t"]),
    "a name of a child": lambda td: setattr(td["n"], "names", ["t"]),
    "a batch size": lambda td: setattr(td, "batch_size", []),
    "other memory": replace_memory,
    "other components": replace_components,
    "another file": lambda td: td.clone().memmap(td.saved_path),
    "a missing file": lambda td: (td.saved_path / "a.memmap").unlink(),
}


@pytest.mark.parametrize("change", [None, *CHANGES_AFTER_SAVE])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_get_folder_changed_collection_returns_none(change: str | None, prefix: Path) -> None:
    td = TensorDict({"a": torch.ones(2), "empty": torch.ones(2, 0), "n": {"b": torch.ones(2)}}, [2])
    td["n", "nested"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    saved = td.memmap(prefix)
    (attachment,) = get_backends(saved)
    if change is not None:
        CHANGES_AFTER_SAVE[change](saved)
    assert attachment.get_folder(saved) == (str(prefix) if change is None else None)


def make_nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("method", ["memmap", "memmap_like"])
@pytest.mark.parametrize(
    ("make", "fill", "elements"),
    [
        (lambda: torch.ones(5), Tensor.fill_, lambda found: found),
        (partial(make_nested, torch.strided), Tensor.fill_, lambda found: torch.cat(found.unbind())),
        (
            partial(make_nested, torch.jagged),
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


def test_memmap_without_prefix_copies_private_mapping(prefix: Path) -> None:
    TensorDict({"a": torch.zeros(3)}).memmap(prefix)
    private = TensorDict.load_memmap(prefix, mode="r")
    private["a"].fill_(3)
    shared = private.memmap()
    assert pickle.loads(pickle.dumps(shared))["a"].tolist() == [3, 3, 3]
    assert TensorDict.load_memmap(prefix)["a"].tolist() == [0, 0, 0]


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


def test_memmap_empty_tied_leaves_save_again(tmp_path: Path) -> None:
    leaf = torch.zeros(0, 2)
    saved = TensorDict({"a": leaf, "b": leaf}).memmap(tmp_path / "save")
    for found in (saved.memmap(tmp_path / "save"), saved.memmap(tmp_path / "other")):
        assert found["b"].shape == (0, 2)


def test_memmap_inplace_repeated_member_maps_once() -> None:
    one = TensorDict({"a": torch.ones(2)}, [2])
    stack = lazy_stack([one, one]).memmap_()
    assert stack.is_memmap() and stack["a"].tolist() == [[1.0, 1.0]] * 2


def set_value(node: Any) -> None:
    node.set_("v", pytest.importorskip("td_tensorclass").NonTensorData("new"))


@pytest.mark.parametrize(
    "change", [set_value, lambda node: node.make_memmap("new", ())], ids=["value", "entry"]
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
