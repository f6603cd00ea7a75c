"""Collections of every kind to consolidate, and how to compare them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from td_core import Buffer, LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._torch.dtypes import ROWS

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


DTYPES = [
    *(dtype for dtype, row in ROWS.items() if "store" not in row.cannot),
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def make_jagged(**options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.full((4, 3), 2.0)], layout=torch.jagged, **options
    )


def make_jagged_with_lengths() -> torch.Tensor:
    values, offsets = torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 5])
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([1, 3]))


def make_tied() -> Any:
    weight = torch.arange(4.0)
    return TensorDict({"a": weight, "n": {"b": weight}, "c": weight.clone()})


def make_aliasing_tensors(vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors that start at the address of a vector, with other sizes, strides, dtypes or a neg bit."""
    square = vector.view(2, 2)
    negative = torch._neg_view(vector)
    return {
        "a": vector,
        "b": vector[:2],
        "c": vector.view(torch.int32),
        "d": square,
        "e": square.t(),
        "f": negative,
    }


class OwnDict(TensorDict):
    """A user-defined class."""


TREES: dict[str, Callable[[], Any]] = {
    "flat": lambda: TensorDict({"b": torch.arange(6).view(2, 3), "a": torch.ones(2)}, batch_size=[2]),
    "named": lambda: TensorDict(
        {"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}}, batch_size=[2], names=["t"]
    ),
    "device": lambda: TensorDict({"a": torch.ones(2)}, device="cpu"),
    "level first": lambda: TensorDict({"n": {"b": torch.ones(1)}, "a": torch.ones(2), "e": {}}),
    "deeper batch": lambda: TensorDict({"n": TensorDict({"b": torch.ones(2, 3)}, [2, 3])}, [2]),
    "lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.full((3,), i)}) for i in range(3)], 0),
    "lazy below": lambda: TensorDict({"l": TREES["ragged"](), "a": torch.ones(3)}, [3]),
    "ragged": lambda: TensorDict.lazy_stack(
        [TensorDict({"a": torch.ones(i + 1), str(i): torch.ones(1)}) for i in range(3)]
    ),
    "jagged": lambda: TensorDict({"n": make_jagged(), "a": torch.ones(2)}, [2]),
    "jagged, of vectors": lambda: TensorDict(
        {
            "a": torch.ones(3),
            "n": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
            "b": torch.ones(3),
        }
    ),
    "jagged with lengths": lambda: TensorDict({"n": make_jagged_with_lengths(), "m": make_jagged()}, [2]),
    "dtypes": lambda: TensorDict({str(d): torch.ones(3).to(d) for d in DTYPES}),
    "empty": lambda: TensorDict(
        {"e": {"f": {}}, "z": torch.zeros(0, 3), "y": torch.zeros(2, 0, dtype=torch.int8)}
    ),
    "nothing": lambda: TensorDict({}, [3]),
    "no members": lambda: LazyStackedTensorDict(batch_size=[2, 0], stack_dim=1, device="cpu"),
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(3), "n": {"b": torch.ones(2)}})),
    "roles": lambda: TensorDictParams(
        TensorDict(
            {
                "frozen": Parameter(torch.ones(2), requires_grad=False),
                "n": {"w": Parameter(torch.ones(2)), "buffer": Buffer(torch.ones(2), persistent=False)},
                "plain": torch.ones(2),
                "kept": Buffer(torch.ones(2)),
            }
        ),
        no_convert=True,
    ),
    "strided": lambda: TensorDict({"t": torch.arange(6).view(2, 3).t(), "e": torch.ones(1).expand(4)}),
    "conjugate": lambda: TensorDict(
        {"c": torch.tensor([1 + 2j]).conj(), "n": torch.tensor([1 + 2j]).conj().imag}
    ),
    "tied": make_tied,
    "other looks of one tensor": lambda: TensorDict(make_aliasing_tensors(torch.arange(4.0))),
    "large and odd places": lambda: TensorDict(
        {
            "x": torch.ones(1, dtype=torch.float64),
            "b": torch.arange(1 << 16).to(torch.uint8),
            "y": torch.ones(3, dtype=torch.uint8),
            "c": torch.tensor([1 + 2j], dtype=torch.complex128),
            "t": torch.arange(60_000).view(300, 200).t(),
        }
    ),
    "reserved": lambda: TensorDict(
        {
            "cls": {"a": torch.ones(1)},
            "leaves": {},
            "non_tensors": torch.ones(1),
            "size": {"b": torch.ones(1)},
        }
    ),
    "odd keys": lambda: TensorDict(
        {"": torch.ones(1), "a.b/c~d": {"é": torch.ones(1)}, "<NJT>x": torch.ones(1), "0": {}}
    ),
    "float8": lambda: TensorDict({"a": torch.ones(1).to(torch.float8_e5m2)}),
    "a mark in a key": lambda: TensorDict({"n": {"<NJT_x": torch.ones(1)}}),
    "reserved cls_metadata": lambda: TensorDict({"n": {"cls_metadata": {}}}),
    "reserved size": lambda: TensorDict({"size": {"b": torch.ones(1)}}),
    "subclass": lambda: OwnDict({"a": torch.ones(1)}),
    "locked": lambda: TensorDict({"a": torch.ones(1), "n": {"b": torch.ones(1)}}).lock_(),
    "locked below": lambda: TensorDict({"n": TensorDict({"b": torch.ones(1)}).lock_()}),
}


if HAS_TENSORCLASS:
    from td_tensorclass import MetaData, NonTensorData, NonTensorStack, UnbatchedTensor, tensorclass

    @tensorclass
    class Sample:
        x: torch.Tensor
        y: str = "none"
        z: Any = None

    def make_samples() -> Any:
        return torch.stack([Sample(x=torch.ones(2), y="a"), Sample(x=torch.zeros(2), y="b")])

    TREES |= {
        "named values": lambda: TensorDict(
            {"s": "x", "l": NonTensorStack("x", "y"), "n": {"m": MetaData(1)}}, [2], names=["t"]
        ),
        "values": lambda: TensorDict(
            {"s": "text", "a": torch.ones(2), "j": NonTensorData({"k": [1, None, 2.5]})}, [2]
        ),
        "rich values": lambda: TensorDict(
            {"t": NonTensorData((1, "a")), "d": NonTensorData({1: {2, 3}}), "b": b"\xff"}
        ),
        "stack": lambda: TensorDict({"l": NonTensorStack("x", "y"), "a": torch.ones(2)}, [2]),
        "stack of tuples": lambda: TensorDict({"l": NonTensorStack(("x", 1), ("y", 2))}, [2]),
        "deep stack": lambda: TensorDict(
            {"l": NonTensorStack.from_list([["x", "y", "w"], ["z", "u", "v"]], 2)}, [2]
        ),
        "named deep stack": lambda: TensorDict(
            {
                "l": NonTensorStack.from_list([["x", "y", "w"], ["z", "u", "v"]], 2),
                "n": TensorDict({"l": NonTensorStack.from_list([["x"], ["y"]], 2)}, [2, 1], names=["t", "v"]),
            },
            [2],
            names=["t"],
        ),
        "metadata": lambda: TensorDict({"m": MetaData("x"), "a": torch.ones(2)}, [2]),
        "unbatched": lambda: TensorDict(
            {"u": UnbatchedTensor(torch.ones(3)), "n": {"a": torch.ones(2)}}, [2]
        ),
        "tensorclass": lambda: Sample(x=torch.ones(2), y="text", batch_size=[2]),
        "tensorclass below": lambda: TensorDict(
            {"c": Sample(x=torch.ones(2), batch_size=[2]), "a": torch.ones(2)}, [2]
        ),
        "stacked tensorclass": make_samples,
        "lazy tensorclass": lambda: TensorDict.lazy_stack(
            [Sample(x=torch.ones(i + 1), y=str(i)) for i in range(2)]
        ),
        "value": lambda: NonTensorData("x", batch_size=[2]),
    }


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """Assert that two collections are equal in everything except locks."""
    assert type(found) is type(wanted), where
    assert found.batch_size == wanted.batch_size, where
    assert found.names == wanted.names, where
    assert found.device == wanted.device, where
    if getattr(wanted, "_is_value", False):
        assert found.tolist() == wanted.tolist(), where
        assert list(map(type, found.tolist() or ())) == list(map(type, wanted.tolist() or ())), where
        return
    stacked = wanted._members_and_dim()
    if stacked is not None:
        mine = found._members_and_dim()
        assert mine[1] == stacked[1], where
        for i, (one, other) in enumerate(zip(mine[0], stacked[0], strict=True)):
            assert_same(one, other, f"{where}/{i}")
        return
    one, other = found._children(), wanted._children()
    assert list(one) == list(other), where
    for key in other:
        if isinstance(other[key], torch.Tensor):
            assert_same_leaf(one[key], other[key], f"{where}/{key}")
            if isinstance(wanted, TensorDictParams):
                assert type(one[key]) is type(other[key]), where
                assert one[key].requires_grad == other[key].requires_grad, where
        else:
            assert_same(one[key], other[key], f"{where}/{key}")


def assert_same_leaf(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    assert found.dtype == wanted.dtype, where
    assert found.is_nested == wanted.is_nested, where
    if wanted.is_nested:
        assert found._ragged_idx == wanted._ragged_idx, where
        for one, other in zip(found.unbind(), wanted.unbind(), strict=True):
            assert_same_leaf(one, other, where)
        return
    assert found.shape == wanted.shape, where
    assert read_bytes(found) == read_bytes(wanted), where


def read_bytes(leaf: torch.Tensor) -> bytes:
    plain = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
