"""Defaults of get, pop, separates and related methods, for missing keys of every kind of node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import NO_DEFAULT, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import KeyPathError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, TypedTensorDict


class Record(TensorClass):
    x: Tensor
    note: str = None


class Typed(TypedTensorDict):
    x: Tensor


def make_uneven() -> Any:
    return lazy_stack([TensorDict({"x": torch.zeros(2), "q": 1}), TensorDict({"x": torch.ones(2)})])


NODES: dict[str, Callable[[], Any]] = {
    "TensorDict": lambda: TensorDict({"x": torch.zeros(2), "s": "text", "n": {"y": 1}}),
    "lazy stack": make_uneven,
    "nested lazy stack": lambda: TensorDict({"x": make_uneven()}),
    "parameters": lambda: TensorDictParams(TensorDict({"x": torch.zeros(2), "n": {"y": torch.zeros(1)}})),
    "tensorclass": lambda: Record(torch.zeros(2), batch_size=[2]),
    "stack of tensorclasses": lambda: lazy_stack([Record(torch.zeros(2)), Record(torch.zeros(3))]),
    "TypedTensorDict": lambda: Typed(x=torch.zeros(2)),
    "NonTensorData": lambda: NonTensorData("a"),
    "NonTensorStack": lambda: NonTensorStack("a", "b"),
}

MISSING: list[Any] = ["q", ("q", "r"), ("s", "r"), ("n", "r"), ("n", "y", "r")]

#: Reads of one key with a default.
READS: dict[str, Callable[..., Any]] = {
    "get": lambda td, key, default: td.get(key, default),
    "get by keyword": lambda td, key, default: td.get(key, default=default),
    "get_at": lambda td, key, default: td.get_at(key, 0, default),
    "get_non_tensor": lambda td, key, default: td.get_non_tensor(key, default),
}


@pytest.mark.parametrize("key", MISSING)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", NODES)
def test_get_missing_key_returns_default_or_raises(name: str, read: str, key: Any) -> None:
    td = NODES[name]()
    for default in (None, 0, "text", torch.zeros(1)):
        assert READS[read](td, key, default) is default
    with pytest.raises(KeyPathError, match="key .* not found|has no entry"):
        READS[read](td, key, NO_DEFAULT)
    assert td.get(key) is None


@pytest.mark.parametrize("key", MISSING[1:])
@pytest.mark.parametrize("name", NODES)
def test_pop_missing_key_returns_default_or_raises(name: str, key: Any) -> None:
    td = NODES[name]()
    for default in (None, 0, "text"):
        assert td.pop(key, default) is default
    for arguments in ((), (NO_DEFAULT,)):
        with pytest.raises(KeyPathError):
            td.pop(key, *arguments)


@pytest.mark.parametrize("form", ["as_list", "as_nested_tensor", "as_padded_tensor"])
def test_get_in_form_missing_key_returns_default_or_raises(form: str) -> None:
    for td, key in ((make_uneven(), "q"), (TensorDict({"n": make_uneven()}), ("n", "q"))):
        assert td.get(key, 7, **{form: True}) == 7
        assert td.get(key, **{form: True}) is None
        with pytest.raises(KeyPathError, match="key 'q' not found"):
            td.get(key, NO_DEFAULT, **{form: True})


def test_get_field_without_value_returns_default_or_raises() -> None:
    record = Record(torch.zeros(2), batch_size=[2])
    assert record.get("note") is None and record.get("note", "none") == "none"
    with pytest.raises(KeyPathError, match="key 'note' not found"):
        record.get("note", NO_DEFAULT)


@pytest.mark.parametrize("default", [None, "text", 3.0])
def test_separates_default_stands_for_each_missing_key(default: Any) -> None:
    td = TensorDict({"x": 1, "n": {"y": 1}})
    part = td.separates("x", "q", ("n", "r"), ("m", "r"), default=default)
    assert [part["q"], part["n", "r"], part["m", "r"]] == [default] * 3
    assert part["x"] == 1 and list(td.keys(True)) == ["n", ("n", "y")]


def test_separates_default_none_of_stack_fills_the_gaps() -> None:
    stack = make_uneven()
    part = stack.separates("q", "r", default=None)
    assert [member["q"] for member in part.tensordicts] == [1, None] and part["r"] == [None, None]
    assert [list(member.keys()) for member in stack.tensordicts] == [["x"], ["x"]]


def test_split_keys_default_none_leaves_missing_keys_out() -> None:
    part, _ = TensorDict({"x": 1}).split_keys(["x", "q"], default=None, strict=False)
    assert list(part.keys()) == ["x"]
