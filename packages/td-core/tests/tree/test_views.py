"""Views of keys, values and items: order, membership, later changes, leaves by class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
)
from td_core.errors import (
    StructureError,
)


def test_keys_view_shows_later_changes_parents_first():
    td = TensorDict({"a": {"b": 1}})
    keys, items = td.keys(True), td.items(True, True)
    td["a", "c"] = 2
    td["z"] = 3
    assert list(keys) == ["a", ("a", "b"), ("a", "c"), "z"]
    assert [key for key, _ in items] == [("a", "b"), ("a", "c"), "z"]
    assert list(td.keys(True, sort=True)) == sorted(
        keys, key=lambda key: key if isinstance(key, tuple) else (key,)
    )


@pytest.mark.parametrize("make", [lambda td: td, lambda td: LazyStackedTensorDict(td, td.clone())])
def test_reversed_views_return_reverse_order(make: Callable[[TensorDict], Any]) -> None:
    td = make(TensorDict({"a": 1, "n": {"b": 2}, "c": 3}))
    assert list(reversed(td.keys())) == ["c", "n", "a"]
    assert list(reversed(td.keys(True, True))) == ["c", ("n", "b"), "a"]
    assert [key for key, _ in reversed(td.items())] == ["c", "n", "a"]
    assert [value.max().item() for value in reversed(td.values(True, True))] == [3, 2, 1]


@pytest.mark.parametrize("view", [TensorDict.values, TensorDict.items])
def test_iterate_values_reads_ragged_entry_only_when_reached(view, make_ragged_stack):
    walk = iter(view(TensorDict({"x": torch.zeros(1), "s": make_ragged_stack()}), True))
    next(walk), next(walk)
    with pytest.raises(StructureError, match="cannot stack key 'a'"):
        next(walk)
