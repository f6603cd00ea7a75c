"""Collections of every kind that one process sends to another, and how to compare them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._torch.dtypes import ROWS
from td_core._tree.buffers import as_bytes

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def make_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)], layout=torch.jagged)


DTYPES = [
    *(dtype for dtype, row in ROWS.items() if "cast" not in row.cannot),
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def make_with_values() -> Any:
    from td_tensorclass import NonTensorStack

    return TensorDict(
        {"a": torch.ones(2), "s": "text", "t": (1, 2.5), "l": NonTensorStack("x", "y")},
        batch_size=[2],
        names=["t"],
    )


TREES: dict[str, Callable[[], Any]] = {
    "flat": lambda: TensorDict({"b": torch.arange(6).view(2, 3), "a": torch.ones(2)}, batch_size=[2]),
    "nested": lambda: TensorDict(
        {"z": {"b": torch.ones(3), "a": {"c": torch.arange(4)}}, "a": torch.ones(2)}
    ),
    "lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.full((3,), i)}) for i in range(3)], 0),
    "ragged lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.ones(i + 1)}) for i in range(3)], 0),
    "jagged": lambda: TensorDict({"n": make_jagged(), "a": torch.ones(2)}, batch_size=[2]),
    "dtypes": lambda: TensorDict({str(d): torch.ones(5).to(d) for d in DTYPES}),
    "empty": lambda: TensorDict({"e": {}, "z": torch.zeros(0, 3)}),
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(3), "n": {"b": torch.ones(2)}})),
    "strided": lambda: TensorDict({"t": torch.arange(6).view(2, 3).t(), "e": torch.ones(1).expand(4)}),
    "large and small": lambda: TensorDict(
        {"a": torch.ones(3), "b": torch.ones(100_000), "n": {"c": torch.ones(100_000)}, "d": torch.ones(2)}
    ),
    "odd places": lambda: TensorDict(
        {
            "x": torch.ones(1, dtype=torch.float64),
            "b": torch.ones(1 << 16, dtype=torch.uint8),
            "y": torch.ones(1, dtype=torch.float64),
            "c": torch.tensor([1 + 2j], dtype=torch.complex128),
        }
    ),
    "scalar": lambda: TensorDict({"a": torch.tensor(3)}),
    "a long header": lambda: TensorDict({"k" * 40_000: torch.ones(3), "a": torch.ones(2)}),
    "a long header of large leaves": lambda: TensorDict(
        {"k" * 40_000: torch.ones(100_000), "a": torch.ones(2)}
    ),
    "a long header and nothing": lambda: TensorDict({"k" * 40_000: {}}),
    "conjugate": lambda: TensorDict(
        {"c": torch.tensor([1 + 2j]).conj(), "n": torch._neg_view(torch.ones(2)), "l": torch.ones(3)}
    ),
    "tied": lambda: TensorDict(dict.fromkeys("ab", torch.ones(3))).consolidate(),
}


if HAS_TENSORCLASS:
    TREES["values"] = make_with_values


def make_blank(collection: Any) -> Any:
    """Return a collection of the same structure with other values."""
    with torch.no_grad():
        found = collection.clone().zero_()
    for key, leaf in collection.items() if type(collection) is TensorDict else ():
        if isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg()):
            found.set(key, found[key].conj() if leaf.is_conj() else torch._neg_view(found[key]))
    return found


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert found.batch_size == wanted.batch_size
    if isinstance(wanted, LazyStackedTensorDict):
        for one, other in zip(found.tensordicts, wanted.tensordicts, strict=True):
            assert_same(one, other)
        return
    assert list(found.keys()) == list(wanted.keys())
    for key in list(wanted.keys()):
        one, other = found.get(key), wanted.get(key)
        if not isinstance(other, torch.Tensor):
            if getattr(other, "_is_value", False):
                assert one.tolist() == other.tolist()
            else:
                assert_same(one, other)
        elif other.is_nested:
            assert all(torch.equal(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))
        else:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(as_bytes(one), as_bytes(other))
