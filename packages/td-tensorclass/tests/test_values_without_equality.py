"""Values whose ``==`` raises or returns no bool: they are compared by identity, and none is lost."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import td_core
from td_core import TensorDict, assert_close, lazy_stack, maybe_dense_stack
from td_core._encode.value_codec import is_same_value
from td_core.errors import StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, UnbatchedTensor
from td_tensorclass._value_comparisons import is_equal_value


@dataclass(eq=False)
class Boxes:
    corners: torch.Tensor

    def __eq__(self, other: Any) -> bool:  # as in a dataclass, before Python 3.13
        return (self.corners,) == (other.corners,)

    __hash__ = None  # type: ignore[assignment]


class Raising:
    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError("compared")

    __hash__ = None  # type: ignore[assignment]


class Elementwise:
    """A value like a data frame: ``==`` returns an array, which has no truth value."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")

    __len__ = __bool__


class WithoutTruth:
    def __eq__(self, other: object) -> Any:
        return Elementwise()

    __hash__ = None  # type: ignore[assignment]


def contain_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


#: Pairs of different values whose == raises or returns no bool.
VALUES = {
    "dataclass of tensors": lambda: (Boxes(torch.zeros(3, 4)), Boxes(torch.zeros(2, 4))),
    "dataclass of equal tensors": lambda: (Boxes(torch.zeros(3, 4)), Boxes(torch.zeros(3, 4))),
    "arrays": lambda: (np.zeros(3), np.zeros(2)),
    "arrays of objects": lambda: (np.array([Raising()]), np.array([Raising()])),
    "tensors": lambda: (torch.zeros(3), torch.zeros(2)),
    "raising": lambda: (Raising(), Raising()),
    "elementwise": lambda: (Elementwise(), Elementwise()),
    "without truth": lambda: (WithoutTruth(), WithoutTruth()),
    "in containers": lambda: ({"a": [Raising(), np.zeros(2)]}, {"a": [Raising(), np.zeros(2)]}),
    "lists that contain themselves": lambda: (contain_itself(), contain_itself()),
}


class Sample(TensorClass):
    x: torch.Tensor
    v: object = None


def plain(value: Any) -> Any:
    return TensorDict({"x": torch.zeros(2), "v": NonTensorData(value, batch_size=[2])}, [2])


KINDS = {
    "TensorDict": plain,
    "nested": lambda value: TensorDict({"n": plain(value)}, [2]),
    "tensorclass": lambda value: Sample(
        x=torch.zeros(2), v=NonTensorData(value, batch_size=[2]), batch_size=[2]
    ),
    "lazy stack": lambda value: lazy_stack(
        [TensorDict({"x": torch.zeros(()), "v": NonTensorData(value)}) for _ in range(2)]
    ),
    "one for each": lambda value: TensorDict({"x": torch.zeros(2), "v": NonTensorStack(value, value)}, [2]),
}

_FIRST = torch.tensor([True, False])


def _written(a: Any, index: Any, value: Any) -> Any:
    a[index] = value
    return a


#: Operation on ``a`` and ``b``, and the operand whose value each element of the result has.
OPERATIONS = {
    "cat": (lambda a, b: torch.cat([a, b]), "aabb"),
    "cat with out": (lambda a, b: torch.cat([a, b], out=torch.cat([b, a])), "aabb"),
    "stack": (lambda a, b: torch.stack([a, b]).reshape(-1), "aabb"),
    "stack along 1": (lambda a, b: torch.stack([a, b], 1).reshape(-1), "abab"),
    "stack with out": (lambda a, b: torch.stack([a, b], out=torch.stack([b, a])).reshape(-1), "aabb"),
    "lazy_stack": (lambda a, b: lazy_stack([a, b]).densify().reshape(-1), "aabb"),
    "cat of lazy stacks": (lambda a, b: torch.cat([lazy_stack([a]), lazy_stack([b])]).reshape(-1), "aabb"),
    "maybe_dense_stack": (lambda a, b: maybe_dense_stack([a, b]).reshape(-1), "aabb"),
    "default_collate": (lambda a, b: torch.utils.data.default_collate([a, b]).reshape(-1), "aabb"),
    "collate": (lambda a, b: td_core.collate([a, b]).reshape(-1), "aabb"),
    "pad_sequence": (lambda a, b: td_core.pad_sequence([a, b]).reshape(-1), "aabb"),
    "write at an int": (lambda a, b: _written(a, 0, b[0]), "ba"),
    "write at a mask": (lambda a, b: _written(a, _FIRST, b[:1]), "ba"),
    "write at positions": (lambda a, b: _written(a, torch.tensor([1]), b[:1]), "ab"),
    "write at a slice": (lambda a, b: _written(a, slice(None), b), "bb"),
    "write at ...": (lambda a, b: _written(a, ..., b), "bb"),
    "write to a lazy stack": (lambda a, b: _written(lazy_stack([a, a.clone()]), 0, b).reshape(-1), "bbaa"),
    "write to an empty one": (lambda a, b: _written(_written(a.empty(), 0, a[0]), 1, b[0]), "ab"),
    "update": (lambda a, b: a.update(b), "bb"),
    "update in place": (lambda a, b: a.update(b, inplace=True), "bb"),
    "update_": (lambda a, b: a.update_(b), "bb"),
    "update_ of a locked one": (lambda a, b: a.lock_().update_(b), "bb"),
    "update_at_": (lambda a, b: a.update_at_(b[0], 0), "ba"),
    "copy_": (lambda a, b: a.copy_(b), "bb"),
    "where": (lambda a, b: a.where(_FIRST, b), "ab"),
    "torch.where": (lambda a, b: torch.where(_FIRST, b, a), "ba"),
    "where with out": (lambda a, b: a.where(_FIRST, b, out=torch.cat([b, a])[1:3]), "ab"),
    "split": (lambda a, b: torch.cat(torch.cat([a, b]).split(1)), "aabb"),
    "unbind": (lambda a, b: torch.stack(torch.cat([a, b]).unbind(0)), "aabb"),
    "gather": (lambda a, b: torch.cat([a, b]).gather(0, torch.tensor([3, 0])), "ba"),
    "mask": (lambda a, b: torch.cat([a, b])[torch.tensor([True, False, True, True])], "abb"),
    "expand": (lambda a, b: torch.cat([a, b]).expand(2, 4).reshape(-1), "aabbaabb"),
    "zeros_like": (lambda a, b: torch.zeros_like(torch.cat([a, b])), "aabb"),
    "new_empty": (lambda a, b: torch.cat([a, b]).new_empty(4), "aabb"),
    "pointwise": (lambda a, b: torch.cat([a, b]) + torch.cat([b, a]), "aabb"),
    "a context": (lambda a, b: _through_view(torch.cat([a, b])), "aabb"),
}


def _through_view(td: Any) -> Any:
    with td.view(2, 2) as viewed:
        viewed.update_(viewed.clone())
    return td


def _values(td: Any) -> list[Any]:
    """Return the value of each element."""
    while "n" in td.keys():
        td = td["n"]
    node = (td._tensordict if isinstance(td, Sample) else td)._get_child("v")
    return list(node._expand_values(node.batch_size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_join_incomparable_values_keeps_each(operation: str, kind: str) -> None:
    apply, expected = OPERATIONS[operation]
    for value in VALUES:
        a, b = VALUES[value]()
        found = _values(apply(KINDS[kind](a), KINDS[kind](b)))
        assert [id(each) for each in found] == [id({"a": a, "b": b}[name]) for name in expected], value


@pytest.mark.parametrize("value", VALUES)
def test_compare_incomparable_values_uses_identity(value: str) -> None:
    a, b = VALUES[value]()
    same, other = plain(a) == plain(a), plain(a) == plain(b)
    assert same["v"].tolist() == [True, True]
    assert other["v"].tolist() == [False, False]
    assert (plain(a) != plain(b))["v"].tolist() == [True, True]
    assert assert_close(plain(a), plain(a))


def test_assert_close_different_values_raises_naming_key() -> None:
    with pytest.raises(AssertionError, match="key 'v' differs"):
        assert_close(plain(Raising()), plain(Raising()))


def test_capture_stack_incomparable_values_uses_identity() -> None:
    from td_tensorclass import set_capture_non_tensor_stack

    a, b = Raising(), Raising()
    with set_capture_non_tensor_stack(True):
        assert type(torch.stack([plain(a), plain(a)]).get("v")) is NonTensorData
        assert type(torch.stack([plain(a), plain(b)]).get("v")) is NonTensorStack
    assert NonTensorStack(a, a).data is a
    assert not hasattr(NonTensorStack(a, b), "data")


def test_set_self_referencing_list_stores_one_value() -> None:
    value = contain_itself()
    assert TensorDict({"v": NonTensorData(value)})["v"] is value
    assert TensorDict({"v": value}, [1]).batch_size == (1,)


NAN = float("nan")

#: Two values, and whether is_same_value() returns True.
SAME = [
    (NAN, float("nan"), True),
    (complex(NAN, 0), complex(NAN, 0), True),
    (np.float32(NAN), np.float32(NAN), True),
    (np.array([NAN, 1.0]), np.array([NAN, 1.0]), True),
    (np.array([NAN, 1.0]), np.array([NAN, 2.0]), False),
    (np.array([NAN, 1.0]), np.array([[NAN, 1.0]]), False),
    (np.array(["NaT"], "datetime64[s]"), np.array(["NaT"], "datetime64[s]"), True),
    (np.array(["a"]), np.array(["a"]), True),
    (np.array([NAN, "a"], object), np.array([NAN, "a"], object), True),
    (np.array([(1, "a")], "i4,U1"), np.array([(1, "a")], "i4,U1"), True),
    (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
    (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), False),
    (torch.tensor([NAN]), torch.tensor([NAN], dtype=torch.float64), False),
    (torch.zeros(2, device="meta"), torch.zeros(2, device="meta"), False),
    ([NAN, {"a": NAN}], [float("nan"), {"a": float("nan")}], True),
    ([1, 2], [1], False),
    (Boxes(torch.zeros(1)), Boxes(torch.zeros(1)), True),
    (Boxes(torch.zeros(2)), Boxes(torch.zeros(2)), False),
    (contain_itself(), contain_itself(), False),
    (1, True, False),
]


@pytest.mark.parametrize(("a", "b", "expected"), SAME)
def test_is_same_value_returns_expected(a: Any, b: Any, expected: bool) -> None:
    assert is_same_value(a, b) is expected
    assert is_same_value(a, a)


def test_compare_comparable_objects_uses_their_equality() -> None:
    class Answer:
        def __eq__(self, other: object) -> Any:
            return np.bool_(True)

        __hash__ = None  # type: ignore[assignment]

    assert is_same_value(Answer(), Answer())
    assert is_equal_value(np.array([1, 2]), [1, 2])
    assert not is_equal_value(np.array([1, 2]), [1, 3])
    assert not is_equal_value(np.zeros(0), np.zeros(1))
    assert not is_equal_value(Raising(), 1)


def limits(x: float, limit: float, dtype: torch.dtype) -> Any:
    tensor = UnbatchedTensor(torch.tensor([0.0, limit]).to(dtype))
    return TensorDict({"x": torch.full((2,), x), "l": tensor}, [2])


def nested_limits(*args: Any) -> Any:
    return TensorDict({"n": limits(*args)}, [2])


UNBATCHED = {
    "stack": lambda a, b: torch.stack([a, b]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack with out": lambda a, b: torch.stack([a, b], out=torch.stack([b, a])),
    "lazy_stack": lambda a, b: lazy_stack([a, b]).densify(),
    "maybe_dense_stack": lambda a, b: maybe_dense_stack([a, b]).densify(),
    "default_collate": lambda a, b: torch.utils.data.default_collate([a, b]).densify(),
    "where": lambda a, b: a.where(_FIRST, b),
    "write at an int": lambda a, b: _written(a, 0, b[0]),
    "write at a mask": lambda a, b: _written(a, _FIRST, b[:1]),
    "update_at_": lambda a, b: a.update_at_(b[0], 0),
    "lazy update_at_": lambda a, b: lazy_stack([a, b]).densify().update_at_(a, 0),
    "gather": lambda a, b: torch.stack([a, b]).gather(0, torch.tensor([[1, 0]])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("make", [limits, nested_limits])
@pytest.mark.parametrize("operation", UNBATCHED)
def test_join_equal_unbatched_tensors_with_nan_keeps_one(operation: str, make: Any, dtype: Any) -> None:
    result = UNBATCHED[operation](make(0.0, NAN, dtype), make(1.0, NAN, dtype))
    kept = result["n", "l"] if make is nested_limits else result["l"]
    assert torch.isnan(kept.to(torch.complex64)).tolist() == [False, True]
    with pytest.raises(StructureError, match="UnbatchedTensor"):
        UNBATCHED[operation](make(0.0, NAN, dtype), make(1.0, 1.0, dtype)).densify()


def test_set_at_index_equal_unbatched_tensor_is_no_op() -> None:
    td, same = limits(0.0, NAN, torch.float32), UnbatchedTensor(torch.tensor([0.0, NAN]))
    assert td.set_at_("l", same, 0)["l"].isnan().tolist() == [False, True]
    with pytest.raises(StructureError, match="is the same for the whole batch"):
        td.set_at_("l", UnbatchedTensor(torch.tensor([0.0, 1.0])), 0)


def test_deepcopy_incomparable_values_copies_them() -> None:
    td = plain(Raising())
    assert isinstance(copy.deepcopy(td)["v"], Raising)


def test_list_that_contains_itself_stays_a_value():
    value: list[Any] = []
    value += [value, value]
    data = TensorDict({"v": NonTensorStack([value], [value])}, [2])
    assert data.batch_size == (2,)
    assert data[0]["v"][0] is value
    nested = [[1, 2], [3, 4]]
    assert NonTensorStack.from_list([nested, nested]).batch_size == (2, 2, 2)
