"""Writes of values into a mapped collection: they reach the files and other processes, or raise."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.errors import CodecError, StructureError

td_memmap = pytest.importorskip("td_memmap")

NonTensorData = pytest.importorskip("td_tensorclass").NonTensorData

NonTensorStack = pytest.importorskip("td_tensorclass").NonTensorStack


def test_set_inplace_unsupported_value_raises_with_path(tmp_path: Path) -> None:
    saved = TensorDict({"n": {"v": "a"}}).memmap(tmp_path / "save")
    with pytest.raises(CodecError, match=r"what is saved at .*/save/n/v: .*no serializer is registered"):
        saved.set_(("n", "v"), NonTensorData(object()))
    assert saved["n", "v"] == TensorDict.load_memmap(tmp_path / "save")["n", "v"] == "a"


def test_set_inplace_value_of_replaced_save_raises(tmp_path: Path) -> None:
    saved = TensorDict({"v": "a"}, batch_size=[2]).memmap(tmp_path / "save")
    TensorDict({"v": {"x": torch.ones(2)}}).memmap(tmp_path / "save")
    with pytest.raises(
        StructureError, match="cannot write a NonTensorData: .*/v holds something else by now"
    ):
        saved.set_("v", "b")
    assert saved["v"] == "a"
    assert TensorDict.load_memmap(tmp_path / "save")["v", "x"].tolist() == [1, 1]


def test_set_inplace_value_of_a_save_with_the_inode_of_another_raises(tmp_path: Path) -> None:
    TensorDict({"v": "a"}, batch_size=[2]).memmap(tmp_path / "save")
    saved = TensorDict.load_memmap(tmp_path / "save")
    keeper = saved._children()["v"]._keeper
    if keeper.folder[2] is None:
        pytest.skip("the file system has no times of birth")
    # The directory of an earlier save, which had the inode of this one.
    saved._children()["v"]._keeper = replace(keeper, folder=(*keeper.folder[:2], keeper.folder[2] - 1))
    with pytest.raises(StructureError, match="holds something else by now"):
        saved.set_("v", "b")
    saved._children()["v"]._keeper = replace(keeper, folder=keeper.folder[:2])  # of an older pickle
    saved.set_("v", "b")
    assert TensorDict.load_memmap(tmp_path / "save")["v"] == "b"


def test_set_inplace_value_writes_to_files(tmp_path: Path) -> None:
    td = TensorDict(
        {
            "n": TensorDict({"v": NonTensorData("a", batch_size=[2])}, batch_size=[2]),
            "column": NonTensorStack(NonTensorData("p"), NonTensorData("q")),
            "x": torch.zeros(2),
        },
        batch_size=[2],
    )
    saved = td.memmap(tmp_path / "save")

    def read_saved(key: Any) -> Any:
        return TensorDict.load_memmap(tmp_path / "save")[key]

    saved.set_(("n", "v"), "b")
    assert saved["n", "v"] == read_saved(("n", "v")) == "b"
    saved.set_(("n", "v"), (1, b"x"))
    assert saved["n", "v"] == read_saved(("n", "v")) == (1, b"x")
    saved.set_(("n", "v"), "c")
    assert read_saved(("n", "v")) == "c"
    assert [file.name for file in (tmp_path / "save" / "n" / "v").iterdir()] == ["meta.json"]
    saved.set_("column", ["r", "s"])
    assert read_saved("column") == ["r", "s"]
    saved[0] = TensorDict({"n": {"v": "one"}, "column": "t", "x": torch.ones(())})
    assert read_saved("column") == ["t", "s"]
    assert read_saved(("n", "v")) == saved["n", "v"] == ["one", "c"]
    assert read_saved("x").tolist() == [1, 0]
    with pytest.raises(CodecError):
        saved.set_("column", [object(), "s"])
    assert saved["column"] == read_saved("column") == ["t", "s"]
    td.memmap()["n"].set_("v", "anonymous")
    for key in ("k" * 300, "meta.json"):
        TensorDict({key: NonTensorData("a")}).memmap(tmp_path / "save").set_(key, "b")
        assert read_saved(key) == "b"


def _write_values(saved: Any) -> None:
    assert saved["v"] == (1, "parent")
    assert saved["column"] == ["p", "second"]
    saved.set_("v", "child")
    saved.set_("column", ["first", "second"])


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_share_non_tensor_processes_see_writes(method: str, tmp_path: Path) -> None:
    td = TensorDict(
        {"v": NonTensorData("a", batch_size=[2]), "column": NonTensorStack("p", "q")}, batch_size=[2]
    )
    saved = td.memmap(tmp_path / "save", share_non_tensor=True)
    alone = TensorDict.load_memmap(tmp_path / "save")
    context = multiprocessing.get_context(method)
    child = context.Process(target=_write_values, args=(saved,))
    saved.set_("v", (1, "parent"))
    saved.set_("column", ["p", "second"])
    child.start()
    child.join()
    assert child.exitcode == 0
    entry = saved.get("v")
    assert saved["v"] == entry.data == saved[0]["v"] == "child"
    assert entry.tolist() == ["child", "child"]
    assert saved["column"] == saved.get("column").tolist() == ["first", "second"]
    assert torch.stack([saved, saved])["column"] == [["first", "second"]] * 2
    assert alone["v"] == "a"
    TensorDict.load_memmap(tmp_path / "save")
    other = pickle.loads(pickle.dumps(saved))
    other[0] = TensorDict({"v": "one", "column": "x"})
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"by a NonTensorStack: call memmap_refresh_\(\) on the collection"
        ):
            saved["v"]
    assert saved["column"] == ["x", "second"]
    assert saved.memmap_refresh_()["v"] == ["one", "child"]


def test_write_shared_stack_keeps_writes_of_other_processes(
    tmp_path: Path,
) -> None:
    td = TensorDict({"column": NonTensorStack("p", "q")}, batch_size=[2])
    saved = td.memmap(tmp_path / "save", share_non_tensor=True)
    other = pickle.loads(pickle.dumps(saved))
    saved.set_("column", ["x", "y"])
    other[0] = TensorDict({"column": "z"})
    assert other["column"] == saved["column"] == ["z", "y"]
