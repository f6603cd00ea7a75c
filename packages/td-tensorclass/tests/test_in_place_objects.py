"""Shape operations with inplace=True keep the objects of a collection, and give the values of the operation without it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorCollection, TensorDict, lazy_stack, pad
from td_core.errors import StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, UnbatchedTensor


class Point(TensorClass):
    x: Tensor
    note: str


def make_point(i: int = 0) -> Point:
    return Point(torch.arange(12.0).view(4, 3) + i, f"t{i}", batch_size=[4])


def make() -> TensorDict:
    words = NonTensorStack.from_list([[f"{i}{j}" for j in range(3)] for i in range(4)], 2)
    deep = TensorDict({"y": torch.arange(24).view(4, 3, 2)}, [4, 3, 2])
    rows = [TensorDict({"x": torch.arange(3) + i}, [3]) for i in range(4)]
    return TensorDict(
        {
            "x": torch.arange(12).view(4, 3),
            "dense": {"deep": deep, "words": words.clone()},
            "words": words,
            "value": NonTensorData("v"),
            "tensor": UnbatchedTensor(torch.ones(7)),
            "rows": lazy_stack(rows),
            "columns": lazy_stack([TensorDict({"x": torch.arange(4) + i}, [4]) for i in range(3)], 1),
            "behind": lazy_stack([TensorDict({"x": torch.ones(4, 3) + i}, [4, 3]) for i in range(2)], 2),
            "point": Point(torch.arange(12.0).view(4, 3), "a", batch_size=[4, 3]),
            "points": lazy_stack([make_point(i) for i in range(3)], 1),
        },
        [4, 3],
    )


def list_nodes(td: TensorDict) -> list[list[Any]]:
    """Return the nodes of ``make()`` that are the same objects on each read, and the members of each lazy stack."""
    keys = [
        ("dense", "deep"),
        ("dense", "words"),
        "words",
        "value",
        "rows",
        "columns",
        "behind",
        "point",
        "points",
    ]
    return [
        [td["dense"], *map(td.get, keys)],
        *[list(td[key].tensordicts) for key in ("rows", "columns", "behind")],
    ]


def read(td: Any) -> dict[str, Any]:
    """Return the leaves and values of a collection as lists, and the batch sizes of its nodes."""
    found: dict[str, Any] = {"": td.batch_size}
    for key in td.keys():
        entry = td.get(key)
        if isinstance(entry, Tensor):
            found[key] = entry.tolist()
        elif not isinstance(entry, TensorCollection) or isinstance(entry, (NonTensorData, NonTensorStack)):
            found[key] = td[key]
        else:
            found.update({f"{key}.{below}": value for below, value in read(entry).items()})
    return found


OPERATIONS: dict[str, Callable[..., Any]] = {
    "pad": lambda td, **how: td.pad([1, 2, 0, 1], 5, **how),
    "pad, not safe": lambda td, **how: td.pad([0, 2], 5, safe=False, **how),
    "pad, less": lambda td, **how: td.pad([-1, 0], 5, **how),
    "repeat": lambda td, **how: td.repeat(2, 1, **how),
    "repeat_interleave": lambda td, **how: td.repeat_interleave(2, dim=1, **how),
    "repeat_interleave flat": lambda td, **how: td.repeat_interleave(2, **how),
    "roll": lambda td, **how: td.roll(1, 0, **how),
    "reshape": lambda td, **how: td.reshape(3, 4, **how),
    "flatten": lambda td, **how: td.flatten(**how),
    "unflatten": lambda td, **how: td.unflatten(0, (2, 2), **how),
    "gather": lambda td, **how: td.gather(0, torch.tensor([[1, 2, 3], [0, 0, 0]]), **how),
    "masked_select": lambda td, **how: td.masked_select(torch.tensor([True, False, True, True]), **how),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_in_place_keeps_objects(name: str) -> None:
    td, operate = make(), OPERATIONS[name]
    expected, before = read(operate(make())), list_nodes(td)
    assert operate(td, inplace=True) is td
    assert read(td) == expected
    # A lazy stack gets more members or loses some; those at the same positions stay.
    assert all(old is new for old, new in zip(before[0], list_nodes(td)[0], strict=True))
    for old, new in zip(before[1:], list_nodes(td)[1:], strict=True):
        assert all(map(operator.is_, old, new))


def test_contiguous_in_place_makes_lazy_stacks_dense() -> None:
    td = make()
    point, points, dense = td["point"], td["points"], td["dense"]
    td.contiguous(inplace=True)
    assert td["point"] is point and td["points"] is points and td["dense"] is dense
    assert td.is_contiguous() and read(td) == read(make())


@pytest.mark.parametrize("safe", [True, False])
def test_pad_stack_of_values_in_place_returns_it(safe: bool) -> None:
    words = NonTensorStack("a", "b")
    assert pad(words, [1, 0], inplace=True, safe=safe) is words
    assert words.tolist() == [None, "a", "b"] and words.batch_size == (3,)
    value = NonTensorData("a", batch_size=[2])
    assert pad(value, [0, 1], inplace=True, safe=safe) is value
    assert value.tolist() == ["a"] * 3


@pytest.mark.parametrize("name", ["roll", "repeat", "flatten", "gather", "masked_select"])
def test_operation_on_stack_of_values_in_place_returns_it(name: str) -> None:
    words, operate = make().get("words"), OPERATIONS[name]
    expected = operate(words.clone()).tolist()
    assert operate(words, inplace=True) is words
    assert words.tolist() == expected


def test_pad_view_of_values_in_place_leaves_its_source() -> None:
    words = NonTensorStack("a", "b", "c")
    part = words[1:]
    part.pad([0, 1], inplace=True)
    assert (part.tolist(), words.tolist()) == (["b", "c", None], ["a", "b", "c"])


def test_pad_in_place_replaces_locked_nodes() -> None:
    locked = TensorDict({"x": torch.ones(2)}, [2]).lock_()
    td = TensorDict({"n": locked}, [2]).pad([0, 1], inplace=True)
    assert td["n", "x"].tolist() == [1, 1, 0] and locked.batch_size == (2,)


def test_roll_in_place_of_member_that_occurs_twice_is_right() -> None:
    first, second = (TensorDict({"x": torch.full((2,), i)}, [2]) for i in range(2))
    td = TensorDict({"s": lazy_stack([first, first, second])}, [3])
    assert td.roll(1, 0, inplace=True)["s", "x"].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_operation_on_lazy_stack_in_place_raises() -> None:
    for stack in (make()["rows"], make()["points"]):
        with pytest.raises(StructureError, match="cannot pad in place: the members of a"):
            stack.pad([0, 1], inplace=True)
