"""What ``save`` accepts loads equal, opens, prints, is read by h5py, and takes rows, or refuses them without a change."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import td_core
from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import StructureError, UnsupportedOperationError
from td_core.spi import STORABLE
from td_core.testing import assert_same

HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def make_dtype(dtype: torch.dtype) -> dict[str, Any]:
    """Return a leaf with bytes of 0 and 1, which every dtype can have."""
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    return {"x": bits.view(2, -1).view(dtype)}


def make_nested(layout: torch.layout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a nested tensor of two rows."""
    parts = [torch.ones(2, 3, dtype=dtype), torch.zeros(4, 3, dtype=dtype)]
    return torch.nested.nested_tensor(parts, layout=layout)


def make_stack(*members: dict[str, Any]) -> dict[str, Any]:
    """Return an entry that is a lazy stack."""
    return {"l": LazyStackedTensorDict(*map(TensorDict, members), stack_dim=0)}


def make_class() -> Any:
    """Return an instance of a tensorclass with a value."""

    class Pair:
        a: torch.Tensor
        s: str

    Pair.__annotations__ = {"a": torch.Tensor, "s": str}
    return importlib.import_module("td_tensorclass").tensorclass(Pair)(a=torch.ones(2), s="q", batch_size=[2])


def make_tied() -> dict[str, Any]:
    """Return two entries that are one tensor."""
    leaf = torch.arange(2.0)
    return {"a": leaf, "b": leaf}


Content = Callable[[], dict[str, Any]]
CONTENTS: dict[str, Content] = {
    **{str(dtype): (lambda dtype=dtype: make_dtype(dtype)) for dtype in STORABLE.values()},
    "no elements": lambda: {"x": torch.zeros(2, 0, 3), "y": torch.zeros(2)},
    "empty nodes": lambda: {"n": {}, "m": {"k": {}}},
    "even stack": lambda: make_stack({"a": torch.ones(3)}, {"a": torch.zeros(3)}),
    "uneven stack": lambda: make_stack({"a": torch.ones(3)}, {"a": torch.ones(4), "b": torch.ones(1)}),
    "jagged": lambda: {"x": torch.ones(2), "j": make_nested(torch.jagged)},
    "jagged, converted dtype": lambda: {"j": make_nested(torch.jagged, torch.bfloat16)},
    "strided nested": lambda: {"n": {"j": make_nested(torch.strided)}},
    "expanded": lambda: {"x": torch.ones(1, 1000).expand(2, 1000), "y": torch.ones(2, 1).expand(2, 3)},
    "transposed": lambda: {"x": torch.arange(6.0).view(3, 2).t()},
    "conjugate": lambda: {"x": torch.tensor([1 + 2j, 3 - 1j]).conj()},
    "tied": make_tied,
    "escaped keys": lambda: {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "a%2Fb": torch.ones(2), "a#1": torch.ones(2)},
}  # fmt: skip
VALUES: dict[str, Content] = {
    "text": lambda: {"s": "text", "n": None, "t": (1, "a")},
    "values": lambda: {"s": importlib.import_module("td_tensorclass").NonTensorStack("a", "b")},
    "stack with values": lambda: make_stack({"a": torch.ones(3), "t": "x"}, {"a": torch.ones(3), "t": "y"}),
    "unbatched": lambda: {
        "u": importlib.import_module("td_tensorclass").UnbatchedTensor(torch.ones(3)),
        "v": importlib.import_module("td_tensorclass").UnbatchedTensor(torch.tensor(2.0)),
        "x": torch.zeros(2),
    },
    "tensorclass": lambda: {"c": make_class()},
}
KEYS = [
    "meta.json", "td", "td.0", "td.crc", "td_names", "a.b", "", "ü", "日本", "a/b", "..", ".", "a b", "\0x", "#1", "%", "data",
    "x" * 300, "\ud800", "0",
]  # fmt: skip
CONTENTS.update(
    {
        f"key {key!a:.20}": (lambda key=key: {key: torch.arange(2.0), "z": {key: {key: torch.arange(2)}}})
        for key in KEYS
    }
)
OPTIONS: list[dict[str, Any]] = [{}, {"chunks": 1, "compression": "gzip"}]


@pytest.fixture(params=[*CONTENTS, *VALUES])
def data(request: pytest.FixtureRequest) -> TensorDict:
    """Return a collection of one kind of content, with dim names."""
    if request.param in VALUES and not HAS_VALUES:
        pytest.skip("needs td-tensorclass")
    content = CONTENTS.get(request.param) or VALUES[request.param]
    return TensorDict(content(), [2], names=["time"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saved_content_is_the_same_for_every_reader(
    data: TensorDict, options: dict[str, Any], path: Path
) -> None:
    td_core.save(data, path, format="hdf5", **options)
    assert_same(td_core.load(path), data)
    assert_same(td_core.load(path, strategy="read"), data)
    assert_same(td_core.open(path).clone(), data)
    assert_same(td_core.open(path, mode="c").clone(), data)
    for opened in (td_core.open(path), td_core.open(path)[0], TensorDict.from_h5(path)):
        repr(opened)
        opened.clone()
    try:
        assert_same(td_core.open(path, mode="r+").clone(), data)
    except UnsupportedOperationError as error:
        assert "is a nested tensor, which cannot be written in place" in str(error)
    assert td_core.verify(path).ok
    assert list(td_core.inspect(path).children) == list(data.keys())
    with h5py.File(path) as file:
        read: dict[str, Any] = {}
        file.visititems(lambda name, item: read.update({name: item[()]}) if hasattr(item, "shape") else None)
        assert read or not list(data._leaves())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_append_to_saved_content_adds_rows_or_changes_nothing(
    data: TensorDict, options: dict[str, Any], path: Path
) -> None:
    td_core.save(data, path, format="hdf5", **options)
    before = path.read_bytes()
    try:
        td_core.append(data, path)
    except (UnsupportedOperationError, StructureError) as error:
        assert "key " in str(error)
        assert path.read_bytes() == before
    else:
        assert_same(td_core.load(path), torch.cat([data, data]))
        assert td_core.verify(path).ok


@pytest.mark.skipif(not HAS_VALUES, reason="needs td-tensorclass")
def test_saved_unbatched_tensor_has_no_label_of_a_batch_dim(path: Path) -> None:
    data = TensorDict({**VALUES["unbatched"](), "c": make_class()}, [2])
    data.names = ["time"]
    td_core.save(data, path, format="hdf5")
    with h5py.File(path) as file:
        labels = {key: [dim.label for dim in file[key].dims] for key in ("u", "v", "x", "c/a")}
    assert labels == {"u": [""], "v": [], "x": ["time"], "c/a": ["time"]}
