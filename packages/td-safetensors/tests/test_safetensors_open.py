"""Opened saves: nothing but the header is read, and workers map the file again."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import td_core
import td_safetensors
from td_core import FormatError, KeyPathError, LazyStackedTensorDict, LockedError, TensorDict
from td_safetensors import MappedTensor, _read_save, save


@pytest.mark.parametrize("mode", ["r", "c"])
def test_open_collection_equals_save(mode: str, path: Path, td: TensorDict, same: Any) -> None:
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.full((2,), i)}) for i in range(4)))
    td["c"] = torch.ones(4, dtype=torch.complex128)
    save(td, path)
    opened = TensorDict.open(path, mode=mode)
    same(opened.clone() if mode == "r" else opened, td)
    assert {type(leaf) for leaf in opened.values(True, True) if leaf.dim() < 2} == (
        {MappedTensor} if mode == "r" else {torch.Tensor}
    )


def test_open_shards_equals_save(tmp_path: Path, td: TensorDict, same: Any) -> None:
    save(td, tmp_path, max_shard_size=40)
    opened = td_core.open(tmp_path, keys=["a"])
    same(opened.clone(), td.select("a"))
    same(pickle.loads(pickle.dumps(opened)).clone(), td.select("a"))


def test_open_file_reads_no_elements(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(TensorDict({"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}), path)
    read = []
    monkeypatch.setattr(_read_save, "read_into", lambda *args: read.append(args))
    opened = td_core.open(path)
    assert (opened["a"].shape, read) == ((1 << 20,), [])


def test_open_keys_selects_and_names_missing_key(path: Path, td: TensorDict) -> None:
    save(td, path)
    assert list(td_core.open(path, keys=[("n", "b")]).keys(True, True)) == [("n", "b")]
    with pytest.raises(KeyPathError, match=r"data.safetensors: the save has no key 'x'"):
        td_core.open(path, keys="x")


def test_open_for_reading_is_locked_and_private(path: Path, td: TensorDict, same: Any) -> None:
    save(td, path)
    opened = td_core.open(path)
    with pytest.raises(LockedError):
        opened["new"] = torch.ones(4)
    opened["a"].zero_()
    same(td_core.load(path), td)
    private = td_core.open(path, mode="c")
    private["new"] = torch.ones(4)
    private["a"][0] = 5
    same(td_core.load(path), td)


def test_open_unknown_mode_or_option_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    for call in (td_core.open, td_safetensors.open):
        with pytest.raises(ValueError, match=r"mode is one of 'r', 'r\+', 'c'; got 'w'"):
            call(path, mode="w")
    with pytest.raises(TypeError, match="'safetensors' has no option 'rows' for open"):
        td_core.open(path, rows=1)


def test_open_leaf_gives_plain_results(path: Path, td: TensorDict) -> None:
    save(td, path)
    leaf = td_core.open(path)["a"]
    for result in (leaf + 1, leaf[1:], leaf[[2, 1]], leaf.clone(), copy.deepcopy(leaf), leaf.view(-1)):
        assert type(result) is torch.Tensor
    assert torch.equal(leaf[[2, 1]], td["a"][[2, 1]])
    assert torch.equal(copy.deepcopy(leaf), td["a"])


def test_open_pickle_has_place_instead_of_elements(path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.arange(1 << 16), "n": {"c": torch.ones(1 << 12, dtype=torch.complex128)}})
    save(td, path)
    data = pickle.dumps(td_core.open(path))
    assert len(data) < 10_000
    same(pickle.loads(data).clone(), td)


def test_open_pickle_after_replaced_file_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    data = pickle.dumps(td_core.open(path))
    save(td + 1, path)
    with pytest.raises(FormatError, match="was replaced since it was opened: open it again"):
        pickle.loads(data)


@pytest.mark.once
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_open_collection_is_read_by_workers(start: str, path: Path) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} on this system")
    td = TensorDict({"x": torch.arange(40.0).view(20, 2), "n": {"y": torch.arange(20)}}, [20])
    save(td, path)
    loader = DataLoader(
        td_core.open(path),
        batch_size=4,
        num_workers=1 + (start == "fork"),
        multiprocessing_context=start,
        collate_fn=td_core.collate,
        timeout=100,  # a worker that hangs would stop the test run
    )
    rows = torch.cat(list(loader))
    assert torch.equal(rows["x"], td["x"])
    assert torch.equal(rows["n", "y"], td["n", "y"])


def test_open_named_function_is_public(path: Path, td: TensorDict) -> None:
    save(td, path)
    assert td_safetensors.open(path)["n", "b"].sum() == 6
