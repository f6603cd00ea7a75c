"""Names of a lazy stack: the stack dim has none of those of its members, nor of the levels below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import DimNamesError, StructureError


def member(*names: str | None) -> TensorDict:
    return TensorDict({"a": torch.ones(2, 3)[(slice(None),) * len(names)]}, [2, 3][: len(names)], names=names)


def below(name: str) -> TensorDict:
    return TensorDict({"n": TensorDict({"a": torch.ones(4)}, [4], names=[name])})


def stack(*members: Any, name: str | None = "time") -> Any:
    return LazyStackedTensorDict(*members, stack_dim_name=name)


REFUSED: dict[str, Callable[[], Any]] = {
    "all members": lambda: stack(member("time"), member("time")),
    "the last member": lambda: stack(member(None), member("time")),
    "the last dim": lambda: stack(member("x", "time")),
    "stack dim in the middle": lambda: LazyStackedTensorDict(
        member("x", "time"), stack_dim=1, stack_dim_name="time"
    ),
    "stack of stacks": lambda: stack(stack(member(None))),
    "a level below": lambda: stack(below("time")),
    "append": lambda: stack(member(None)).append(member("time")),
    "insert": lambda: stack(member(None)).insert(0, member("time")),
    "extend": lambda: stack(member(None)).extend([member(None), member("time")]),
    "append to an empty stack": lambda: stack(name="time").append(member("time")),
    "lazy_stack": lambda: lazy_stack([member("time")], stack_dim_name="time"),
    "names": lambda: LazyStackedTensorDict(member("x"), names=["x", "x"]),
    "names and another name": lambda: LazyStackedTensorDict(
        member("x"), names=["t", "x"], stack_dim_name="time"
    ),
    "no names and a name": lambda: LazyStackedTensorDict(
        member("x"), names=[None, None], stack_dim_name="time"
    ),
    "not a string": lambda: stack(member("x"), name=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_stack_dim_with_repeated_name_raises(case: str) -> None:
    with pytest.raises(DimNamesError, match="name"):
        REFUSED[case]()


def test_refused_member_is_not_added() -> None:
    td = stack(member("x"))
    with pytest.raises(DimNamesError, match="'time'.*must be unique"):
        td.append(member("time"))
    assert len(td) == 1 and td.names == ["time", "x"]


def test_names_that_differ_are_kept() -> None:
    td = stack(member("x"), member("x"))
    td.append(member("x"))
    assert td.names == ["time", "x"]
    both = LazyStackedTensorDict(member("x"), names=["time", "y"], stack_dim_name="time")
    assert both.names == ["time", "y"]
    assert stack(below("x"))["n"].names == ["time", "x"]


def test_set_level_that_repeats_names_of_parent_raises() -> None:
    td = TensorDict({}, [2], names=["time"])
    level = TensorDict({"a": torch.ones(2, 4)}, [2, 4], names=[None, "time"])
    with pytest.raises(StructureError, match=r"cannot set key 'n'.*repeat those of its parent"):
        td["n"] = level
    assert td.is_empty()
