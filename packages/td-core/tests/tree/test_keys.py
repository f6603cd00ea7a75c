"""Keys: which are valid, their flat form, subclasses of str, and suggestions for missing ones."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    unravel_key,
)
from td_core.errors import (
    KeyPathError,
)


@pytest.mark.parametrize(
    "key", ["a", "", ("a",), ("a", "b"), ("a", ("b", ("c",))), (), ["a"], ("a", ["b"]), ("a", ()), ("a", 1), 1, None, NestedKey],
    ids=repr,
)  # fmt: skip
def test_isinstance_nested_key_agrees_with_unravel_key(key):
    try:
        unravel_key(key)
    except KeyPathError:
        assert not isinstance(key, NestedKey)
    else:
        assert isinstance(key, NestedKey)


def test_set_nested_tuple_key_equals_flat_key():
    td = TensorDict()
    td["a", ("b", ("c",))] = 1
    assert td[("a",), "b", (("c",),)] == 1 and (("a",), ("b", "c")) in td.keys(True)
    assert ("a",) in td.keys() and ("a", "b") not in td.keys() and ("b",) not in td.keys()


class Name(str, enum.Enum):
    A, B, DOTTED = "a", "b", "a.b"


NAMED: dict[str, Callable[[], Any]] = {
    "constructor": lambda: TensorDict({Name.A: {Name.B: torch.ones(2)}}),
    "constructor of a nested key": lambda: TensorDict({("a", Name.B): torch.ones(2)}),
    "constructor with a device": lambda: TensorDict({Name.A: {Name.B: 1}}, device="cpu"),
    "set": lambda: TensorDict().set(Name.A, torch.ones(2)),
    "set a number": lambda: TensorDict().set(Name.A, 1),
    "set below": lambda: TensorDict(a={}).set(("a", Name.B), torch.ones(2)),
    "set in a lazy stack": lambda: LazyStackedTensorDict(TensorDict(), TensorDict()).set(
        Name.A, torch.ones(2)
    ),
    "set a key of numpy": lambda: TensorDict().set(np.array(["a"])[0], torch.ones(2)),
    "update": lambda: TensorDict(b=1).update({Name.A: {Name.B: 1}}),
    "rename_key_": lambda: TensorDict(b=1).rename_key_(Name.B, Name.A),
    "select": lambda: TensorDict(a={"b": 1}, c=2).select((Name.A, Name.B)),
    "create_nested": lambda: TensorDict().create_nested((Name.A, "b")),
    "from_dict": lambda: TensorDict.from_dict({Name.A: {Name.B: torch.ones(2)}}),
    "unflatten_keys": lambda: TensorDict({Name.DOTTED: 1}).unflatten_keys(),
    "write at an index": lambda: set_item(TensorDict(batch_size=[2]), 0, {Name.A: torch.ones(())}),
}


def set_item(td: Any, index: Any, value: Any) -> Any:
    td[index] = value
    return td


@pytest.mark.parametrize("make", NAMED.values(), ids=NAMED)
def test_set_str_subclass_key_stores_plain_str(make: Callable[[], Any]) -> None:
    td = make()
    assert Name.A in td and td[Name.A].shape == td.get("a").shape
    parts = [part for key in td.keys(True) for part in (key if isinstance(key, tuple) else (key,))]
    assert {type(part) for part in parts} == {str}
