"""Non-tensor values through every transport: values, types, order and classes are kept."""

from __future__ import annotations

import datetime
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import FormatError, TensorDict
from td_core.spi import decode, encode

pytest.importorskip("td_tensorclass", reason="td-tensorclass is not installed")

from td_tensorclass import MetaData, NonTensorData, NonTensorStack, TensorClass, UnbatchedTensor

VALUES: dict[str, Any] = {
    "text": "x",
    "none": None,
    "tuple": (1, ("a",)),
    "bytes": b"\x00x",
    "int keys": {1: "a", (2, 3): 4},
    "set": {1, 2},
    "datetime": datetime.datetime(2020, 1, 2, 3, 4),
    "path": PurePosixPath("/a"),
    "numpy scalar": np.float32(1.5),
    "list": [1, (2,), None],
    "nested": {"a": [{"b": (1.5, True)}]},
    "dtype": torch.float32,
    "container": dict,
    "containers": [tuple, {"a": list}],
}


class Frozen(TensorClass, frozen=True):
    x: Tensor
    s: str = None


class Label(NonTensorData):
    """A user-defined subclass of NonTensorData."""


class Labels(NonTensorStack):
    """A user-defined subclass of NonTensorStack."""


class Counted(TensorClass):
    x: Tensor
    n: int = 0
    tags: list = None


def make_sample() -> TensorDict:
    td = TensorDict({"t": torch.arange(2)}, batch_size=[2], names=["time"])
    for name, value in VALUES.items():
        td.set_non_tensor(name, value)
    td["stack"] = NonTensorStack((1, 2), b"x")
    td["lists"] = NonTensorStack([1, 2], [3, 4])
    td["deep"] = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    td["meta"] = MetaData("m")
    td["typed"] = MetaData[str]("m")
    td["label"] = Label("l")
    td["labels"] = Labels("k", "l")
    td["unbatched"] = UnbatchedTensor(torch.arange(3.0))
    td["frozen"] = Frozen(torch.zeros(2), "z", batch_size=[2])
    td["counted"] = Counted(torch.zeros(2), tags=["p", "q"], batch_size=[2])
    td["lazy"] = TensorDict.lazy_stack([Counted(torch.zeros(i + 1), n=i, tags=["r"]) for i in range(2)])
    return td


def save_and_load_memmap(td: TensorDict, folder: Path) -> Any:
    td.memmap(folder)
    return TensorDict.load_memmap(folder)


def save_and_load_consolidated(td: TensorDict, folder: Path) -> Any:
    td.consolidate(folder / "file")
    return TensorDict.from_consolidated(folder / "file")


def copy_by_state_dict(td: TensorDict, folder: Path) -> Any:
    return td.clone().load_state_dict(td.state_dict())


TRANSPORTS: dict[str, Callable[[TensorDict, Path], Any]] = {
    "pickle": lambda td, folder: pickle.loads(pickle.dumps(td)),
    "encode": lambda td, folder: decode(encode(td)),
    "state dict": copy_by_state_dict,
    "memmap": save_and_load_memmap,
    "consolidate": lambda td, folder: td.consolidate(),
    "file": save_and_load_consolidated,
}
NEEDS = {"memmap": "td-memmap", "consolidate": "td-distributed", "file": "td-distributed"}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transport_keeps_values_and_types(name: str, tmp_path: Path, installed: set[str]) -> None:
    if name in NEEDS and NEEDS[name] not in installed:
        pytest.skip(f"{NEEDS[name]} is not installed")
    before = make_sample()
    if name == "state dict":
        # The state dict of a lazy stack has stacked leaves, so ragged members raise.
        del before["lazy"]
    after = TRANSPORTS[name](before, tmp_path)
    assert list(after.keys()) == list(before.keys())
    assert after.names == ["time"]
    for key in before.keys():
        left, right = before[key], after[key]
        if isinstance(left, Tensor):
            assert type(right) is type(left) or key == "t"
            assert right.as_subclass(Tensor).equal(left.as_subclass(Tensor))
        elif isinstance(left, TensorClass):
            assert type(right) is type(left)
            assert right.batch_size == left.batch_size
        else:
            assert right == left
            assert type(right) is type(left)
            assert type(after.get(key)) is type(before.get(key))
            assert after.get(key).batch_size == before.get(key).batch_size
    assert after["frozen"].is_locked
    assert after["frozen"].s == "z"
    assert (after["counted"].n, after["counted"].tags) == (0, ["p", "q"])
    if "lazy" in before:
        assert [member.x.shape[0] for member in after["lazy"].unbind(0)] == [1, 2]
        assert [member.tags for member in after["lazy"].unbind(0)] == [["r"], ["r"]]


def test_write_value_through_view_reaches_files(tmp_path: Path) -> None:
    pytest.importorskip("td_memmap", reason="td-memmap is not installed")
    mapped = TensorDict({"k": NonTensorStack("a", "b", "c"), "one": "x"}, batch_size=[3]).memmap(tmp_path)
    mapped[1:]["k"][0] = "y"
    mapped.clone(recurse=False).set_("one", "z")
    last = mapped[2]
    del mapped
    last.update_({"k": "w"})
    loaded = TensorDict.load_memmap(tmp_path)
    assert (loaded["k"], loaded["one"]) == (["a", "y", "w"], "z")


def test_verify_value_without_types_file_reports_modified(tmp_path: Path) -> None:
    td_memmap = pytest.importorskip("td_memmap", reason="td-memmap is not installed")
    pair = NonTensorData((1, 2))
    TensorDict({"k": pair, "n": {"k": pair}}).memmap(tmp_path).set_("k", "x")
    report = td_memmap.verify(tmp_path)
    assert [(each.file, each.kind) for each in report.problems] == [
        ("k/%values.json", "modified"),
        ("k/meta.json", "modified"),
    ]
    assert TensorDict.load_memmap(tmp_path, verify=True)["k"] == "x"
    (tmp_path / "n" / "k" / "%values.json").unlink()
    with pytest.raises(FormatError, match="n/k/%values.json is missing"):
        TensorDict.load_memmap(tmp_path, verify=True)


def test_load_value_rewritten_by_tensordict_ignores_types(tmp_path: Path) -> None:
    pytest.importorskip("td_memmap", reason="td-memmap is not installed")
    TensorDict({"k": (1, "a")}).memmap(tmp_path)
    assert TensorDict.load_memmap(tmp_path)["k"] == (1, "a")
    # tensordict rewrites meta.json of a value set in place, but not %values.json.
    meta = json.loads((tmp_path / "k" / "meta.json").read_text())
    (tmp_path / "k" / "meta.json").write_text(json.dumps({**meta, "data": [3, "b"]}))
    assert TensorDict.load_memmap(tmp_path)["k"] == [3, "b"]


def test_verify_truncated_value_file_reports_damaged(tmp_path: Path) -> None:
    td_memmap = pytest.importorskip("td_memmap", reason="td-memmap is not installed")
    mapped = TensorDict({"k": "a long value"}).memmap(tmp_path)
    mapped.update_({"k": ""})
    report = td_memmap.verify(tmp_path)
    assert [(each.file, each.kind) for each in report.problems] == [("k/meta.json", "modified")]
    TensorDict.load_memmap(tmp_path, verify=True)
    os.truncate(tmp_path / "k" / "meta.json", 20)
    report = td_memmap.verify(tmp_path)
    assert [(each.file, each.kind) for each in report.problems] == [("k/meta.json", "damaged")]
