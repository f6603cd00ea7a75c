"""Dim names of a lazy stack: the name of the stack dim differs from all names in its members and nested nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import DimNamesError, StructureError


def make_member(*names: str | None) -> TensorDict:
    return TensorDict({"a": torch.ones(2, 3)[(slice(None),) * len(names)]}, [2, 3][: len(names)], names=names)


def make_nested_member(name: str) -> TensorDict:
    return TensorDict({"n": TensorDict({"a": torch.ones(4)}, [4], names=[name])})


def make_stack(*members: Any, name: str | None = "time") -> Any:
    return LazyStackedTensorDict(*members, stack_dim_name=name)


REFUSED: dict[str, Callable[[], Any]] = {
    "all members": lambda: make_stack(make_member("time"), make_member("time")),
    "the last member": lambda: make_stack(make_member(None), make_member("time")),
    "the last dim": lambda: make_stack(make_member("x", "time")),
    "stack dim in the middle": lambda: LazyStackedTensorDict(
        make_member("x", "time"), stack_dim=1, stack_dim_name="time"
    ),
    "stack of stacks": lambda: make_stack(make_stack(make_member(None))),
    "a nested node": lambda: make_stack(make_nested_member("time")),
    "append": lambda: make_stack(make_member(None)).append(make_member("time")),
    "insert": lambda: make_stack(make_member(None)).insert(0, make_member("time")),
    "extend": lambda: make_stack(make_member(None)).extend([make_member(None), make_member("time")]),
    "append to an empty stack": lambda: make_stack(name="time").append(make_member("time")),
    "lazy_stack": lambda: lazy_stack([make_member("time")], stack_dim_name="time"),
    "names": lambda: LazyStackedTensorDict(make_member("x"), names=["x", "x"]),
    "names and another name": lambda: LazyStackedTensorDict(
        make_member("x"), names=["t", "x"], stack_dim_name="time"
    ),
    "no names and a name": lambda: LazyStackedTensorDict(
        make_member("x"), names=[None, None], stack_dim_name="time"
    ),
    "not a string": lambda: make_stack(make_member("x"), name=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_stack_dim_with_repeated_name_raises(case: str) -> None:
    with pytest.raises(DimNamesError, match="name"):
        REFUSED[case]()


def test_append_member_with_repeated_name_adds_nothing() -> None:
    td = make_stack(make_member("x"))
    with pytest.raises(DimNamesError, match="'time'.*must be unique"):
        td.append(make_member("time"))
    assert len(td) == 1 and td.names == ["time", "x"]


def test_stack_with_distinct_names_keeps_them() -> None:
    td = make_stack(make_member("x"), make_member("x"))
    td.append(make_member("x"))
    assert td.names == ["time", "x"]
    both = LazyStackedTensorDict(make_member("x"), names=["time", "y"], stack_dim_name="time")
    assert both.names == ["time", "y"]
    assert make_stack(make_nested_member("x"))["n"].names == ["time", "x"]


def test_set_node_repeating_name_of_parent_raises() -> None:
    td = TensorDict({}, [2], names=["time"])
    level = TensorDict({"a": torch.ones(2, 4)}, [2, 4], names=[None, "time"])
    with pytest.raises(StructureError, match=r"cannot set key 'n'.*repeat those of its parent"):
        td["n"] = level
    assert td.is_empty()
