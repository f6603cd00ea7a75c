"""Saving a tree to a directory and loading it returns the same tree."""

from __future__ import annotations

import json
import operator
import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import td_memmap
from td_core import TensorDict
from td_core._kinds.lazy_stack import LazyStackedTensorDict
from td_core._kinds.parameters import TensorDictParams
from td_core.errors import FormatError, LockedError
from td_memmap import MemoryMappedTensor


def test_memmap_writes_file_per_leaf_and_metadata_per_node(prefix: Path, list_files: Any) -> None:
    td = TensorDict({"a": torch.arange(10), "b": {"c": torch.arange(10.0)}}, batch_size=[10])
    td.memmap(prefix)
    assert list_files(prefix) == {"a.memmap", "b/c.memmap", "b/meta.json", "meta.json", "%manifest.json"}
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


def test_memmap_without_prefix_maps_anonymous_file(nest: Any, same: Any) -> None:
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


HAS_VALUES = find_spec("td_tensorclass") is not None


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


class UserTensorDict(TensorDict):
    __slots__ = ()


def test_load_memmap_save_of_subclass_returns_subclass(prefix: Path) -> None:
    for key in ("shape", "a"):  # The key "shape" requires the general form.
        UserTensorDict({key: torch.ones(2)}).memmap(prefix)
        assert type(TensorDict.load_memmap(prefix)) is UserTensorDict
    meta = json.loads((prefix / "meta.json").read_text())
    meta["_type"], meta["_class"] = "<class 'gone.Thing'>", "gone:Thing"
    (prefix / "meta.json").write_text(json.dumps(meta))
    assert type(TensorDict.load_memmap(prefix, strict=False)) is TensorDict
    with pytest.raises(
        FormatError, match="_type is \"<class 'gone.Thing'>\", expected a class that this process has defined"
    ):
        TensorDict.load_memmap(prefix)


def test_load_memmap_redefined_class_returns_latest_class(prefix: Path) -> None:
    one, other = (type("Twice", (TensorDict,), {"__module__": __name__}) for _ in range(2))
    one({"a": torch.ones(2)}).memmap(prefix)
    assert type(TensorDict.load_memmap(prefix)) is other


def test_memmap_parameters_load_as_parameters_on_the_file(prefix: Path) -> None:
    params = TensorDictParams(TensorDict({"w": torch.ones(2), "i": torch.arange(2)}))
    saved = params.memmap(prefix)
    for found in (saved, TensorDict.load_memmap(prefix)):
        assert type(found) is TensorDictParams
        assert type(found["w"]) is torch.nn.Parameter and found["w"].requires_grad
        assert type(found["i"]) is MemoryMappedTensor
        found["w"].data.add_(1)
    assert TensorDict.load_memmap(prefix)["w"].tolist() == [3, 3]


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


def test_memmap_short_system_calls_transfers_all_bytes(
    nest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    real = {name: getattr(os, name) for name in ("read", "write", "pwrite")}
    monkeypatch.setattr(os, "read", lambda fd, size: real["read"](fd, min(size, 7)))
    monkeypatch.setattr(os, "write", lambda fd, data: real["write"](fd, data[:7]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real["pwrite"](fd, data[:7], at))
    same(nest.memmap(tmp_path / "save"), nest)
    same(nest.memmap(), nest)
    same(TensorDict.load_memmap(tmp_path / "save"), nest)


def test_load_memmap_child_with_more_dims_restores_names(prefix: Path, same: Any) -> None:
    inner = TensorDict({"x": torch.zeros(2, 2)}, [2, 2], names=[None, "q"])
    td = TensorDict({"m": TensorDict({"c": inner}, [2, 2])}, [2])
    td.names = ["d"]
    td.memmap(prefix)
    loaded = TensorDict.load_memmap(prefix)
    assert loaded["m", "c"].names == ["d", "q"]
    same(loaded, td)


def test_memmap_deep_tree_round_trips(prefix: Path) -> None:
    td = leaf = TensorDict({"x": torch.ones(1)})
    for _ in range(300):
        td = TensorDict({"n": td})
    td.memmap(prefix)
    found = TensorDict.load_memmap(prefix)
    for _ in range(300):
        found = found._children()["n"]
    assert torch.equal(found["x"], leaf["x"])


def test_memmap_path_over_system_limit_round_trips(prefix: Path, same: Any) -> None:
    td = TensorDict({"x": torch.ones(1)})
    for _ in range(30):
        td = TensorDict({"k" * 200: td})
    saved = td.memmap(prefix)
    for mapped in saved, TensorDict.load_memmap(prefix):
        same(pickle.loads(pickle.dumps(mapped)), td)
        mapped.memmap(prefix)
        same(TensorDict.load_memmap(prefix), td)


@pytest.mark.parametrize("path", [(), ("n",), ("n", "m")])
def test_memmap_records_locks_of_user_not_of_mapping(path, tmp_path):
    td = TensorDict({"n": {"m": {"a": torch.zeros(2)}}})
    (td[path] if path else td).lock_()
    mapped = td.memmap(tmp_path / "first")
    mapped.memmap(tmp_path / "second", copy_existing=True)
    first, second = (TensorDict.load_memmap(tmp_path / name) for name in ("first", "second"))
    assert [first.is_locked, first["n"].is_locked, first["n", "m"].is_locked] == [
        td.is_locked, td["n"].is_locked, td["n", "m"].is_locked
    ]  # fmt: skip
    assert not second.is_locked
