"""Collections that the suite of formats saves, and their comparison after loading."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._encode.node_kinds import KINDS
from .._encode.value_codec import is_same_value
from .._kinds.lazy_stack import LazyStackedTensorDict
from .._kinds.parameters import TensorDictParams
from .._kinds.tensordict import TensorDict
from .._torch.dtypes import NAMES
from .._tree.buffers import as_bytes
from .._tree.node import Core
from .._tree.stored_leaves import as_memory

__all__ = ["assert_same", "make_samples", "make_value_samples"]


def make_samples() -> dict[str, object]:
    """Build collections of every kind of td-core, by name."""
    return {
        "flat": TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2)}, batch_size=[3]),
        "nested": TensorDict({"a": {"b": {"c": torch.zeros(2, 4)}, "d": torch.ones(2)}}, batch_size=[2]),
        "no batch": TensorDict({"a": torch.tensor(1), "b": torch.tensor(True)}),
        "empty": TensorDict({}, batch_size=[4]),
        "empty level": TensorDict({"a": {}}, batch_size=[4]),
        "no elements": TensorDict({"a": torch.zeros(0, 3)}, batch_size=[0]),
        "order": TensorDict({key: torch.zeros(1) for key in "zbya"}, batch_size=[1]),
        "keys": TensorDict(
            {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "é/": torch.zeros(1), "": torch.ones(1)}
        ),
        "dtypes": TensorDict(_make_leaves_of_all_dtypes(), batch_size=[4]),
        "views": TensorDict({"a": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(1).expand(3)}),
        "shared": _make_shared(),
        "names": TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3], names=["x", None]),
        "even stack": LazyStackedTensorDict(_make_member(2), _make_member(2), stack_dim=0),
        "uneven stack": TensorDict(
            {"s": LazyStackedTensorDict(_make_member(2), _make_member(3), stack_dim=0)}, batch_size=[2]
        ),
        "jagged": TensorDict(
            {"a": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)},
            batch_size=[2],
        ),
        "params": TensorDictParams(TensorDict({"w": torch.ones(2), "n": {"b": torch.zeros(1)}})),
    }


def _make_member(size: int) -> TensorDict:
    return TensorDict({"a": torch.arange(float(size)), "n": {"b": torch.tensor(size)}})


def _make_shared() -> TensorDict:
    leaf = torch.arange(4.0)
    return TensorDict({"a": leaf, "n": {"b": leaf}, "part": leaf[1:3]})


def _make_leaves_of_all_dtypes() -> dict[str, Tensor]:
    """Build a leaf with 4 different elements of each dtype that torch can copy."""
    content = (torch.arange(64) % 2).to(torch.uint8).view(4, 16)  # 0 and 1 are valid bytes of a bool
    leaves = {}
    for dtype in dict.fromkeys(NAMES.values()):
        # torch warns of complex32. It cannot view bytes as quantized dtypes; dtypes of bits have no operations.
        with warnings.catch_warnings(), suppress(RuntimeError, NotImplementedError):
            warnings.simplefilter("ignore")
            if "bits" not in str(dtype):
                part = content[:, : dtype.itemsize].contiguous()
                leaves[str(dtype)] = part.view(dtype).squeeze(-1).clone()
    return leaves


def make_value_samples() -> dict[str, TensorDict]:
    """Build collections of values and tensorclasses, by name; empty if no plugin has registered a kind of values."""
    kind = KINDS.get("NonTensorData")
    if kind is None:
        return {}
    package: Any = sys.modules[kind.type.__module__.partition(".")[0]]
    values = {
        "text": "x",
        "none": None,
        "tuple": (1, "y"),
        "bytes": b"\x00",
        "float": float("inf"),
        "set": {1, 2},
    }
    return {
        "values": TensorDict({"v": {key: package.NonTensorData(value) for key, value in values.items()}}),
        "values by row": TensorDict(
            {"s": package.NonTensorStack("x", "y"), "a": torch.ones(2)}, batch_size=[2]
        ),
        "unbatched": TensorDict({"u": package.UnbatchedTensor(torch.ones(5))}, batch_size=[2]),
        "tensorclass": TensorDict(
            {"c": _get_record(package)(torch.ones(2), "x", batch_size=[2])}, batch_size=[2]
        ),
    }


@cache  # a class that is defined again replaces the first one
def _get_record(package: Any) -> Any:
    """Return a tensorclass with a tensor and a value."""
    fields = {"__annotations__": {"a": Tensor, "b": str}, "__module__": __name__, "__qualname__": "Record"}
    return package.tensorclass(type("Record", (), fields))


def assert_same(result: Any, expected: Any, path: tuple[str, ...] = ()) -> None:
    """Assert that two collections or leaves are equal: kinds, keys in order, leaves, batch sizes, names, values.

    Leaves are equal if they have the same dtype, shape and bytes.

    >>> assert_same(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(2)}))
    """
    if isinstance(expected, Tensor):
        _assert_same_leaf(result, expected, path)
        return
    assert type(result) is type(expected), path
    assert result.names == expected.names, path
    if hasattr(expected, "tensordicts"):
        assert result.stack_dim == expected.stack_dim, path
        pairs = zip(result.tensordicts, expected.tensordicts, strict=True)
        for position, (member, other) in enumerate(pairs):
            assert_same(member, other, (*path, str(position)))
        return
    assert result.batch_size == expected.batch_size, path
    if expected._is_value:
        value, wanted = result._unwrap(), expected._unwrap()
        if isinstance(wanted, Tensor):
            _assert_same_leaf(value, wanted, path)
        else:
            assert is_same_value(value, wanted), (path, value, wanted)
        return
    assert list(result.keys()) == list(expected.keys()), path
    for key, entry in expected._children().items():
        other = result._get_child(key)
        if isinstance(entry, Core):
            assert_same(other, entry, (*path, key))
        else:
            _assert_same_leaf(other, entry, (*path, key))


def _assert_same_leaf(result: Any, expected: Tensor, path: tuple[str, ...]) -> None:
    assert result.dtype == expected.dtype, path
    assert (result.is_nested, result.layout) == (expected.is_nested, expected.layout), path
    if expected.is_nested:
        for part, other in zip(result.unbind(), expected.unbind(), strict=True):
            _assert_same_leaf(part, other, path)
        return
    assert result.shape == expected.shape, path
    # Compare bytes: torch cannot compare some dtypes, and NaN differs from NaN.
    assert _read_bytes(result) == _read_bytes(expected), path


def _read_bytes(leaf: Tensor) -> bytes:
    if not leaf.numel():  # numpy refuses some sizes beside a dim of size zero
        return b""
    content: bytes = as_bytes(*as_memory([leaf])).numpy().tobytes()
    return content
