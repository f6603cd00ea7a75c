"""Pairs of a target's entries and a source's: which writes one call can do, and that a refused one writes nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from td_core import KeyPathError, LazyStackedTensorDict, TensorDict
from td_core._plans.index import plan_index
from td_core._writes.pair import (
    Through,
    is_basic,
    is_node,
    is_scalar,
    list_pairs,
    split_pair,
    try_copy_whole,
)


def make_td(value: float = 0.0, size: int = 3) -> TensorDict:
    return TensorDict({"a": torch.full((size,), value), "n": {"b": torch.full((size, 2), value)}}, [size])


def test_list_pairs_turns_nested_keys_into_dicts() -> None:
    pairs = list(list_pairs({"a": 1, ("b", "c"): 2, ("d",): 3}))
    assert pairs == [("a", 1), ("b", {"c": 2}), ("d", 3)]
    assert type(pairs[1][1]) is Through and type(pairs[2][1]) is int
    assert list(list_pairs({"a": {"b": 1}})) == [("a", {"b": 1})]


def test_split_pair_nests_the_other_parts_of_a_path() -> None:
    assert split_pair(("a", "b", "c"), 1) == ("a", {"b": {"c": 1}})
    assert split_pair(("a",), 1) == ("a", 1)


def test_list_pairs_bad_key_raises_with_the_path_above() -> None:
    with pytest.raises(KeyPathError, match="'above'"):
        list(list_pairs({3: 1}, ("above",)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, True),
        (OrderedDict(), True),
        (TensorDict(), True),
        (LazyStackedTensorDict(TensorDict()), True),
        (torch.zeros(2), False),
        (3, False),
        ([1], False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_is_node_of_mappings_and_collections(value: Any, expected: bool) -> None:
    assert is_node(value) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, True),
        (True, True),
        (1j, True),
        (np.float32(1), True),
        (torch.tensor(1), True),
        (np.array(1), True),
        (torch.zeros(1), False),
        (np.zeros(1), False),
        ("a", False),
        (None, False),
    ],
    ids=str,
)
def test_is_scalar_of_values_without_dims(value: Any, expected: bool) -> None:
    assert is_scalar(value) is expected


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, True),
        (slice(2), True),
        (None, True),
        ((0, slice(1)), True),
        ((), True),
        (..., False),
        ([0], False),
        (True, False),
    ],
    ids=str,
)
def test_is_basic_of_indices_that_select_a_view(index: Any, expected: bool) -> None:
    assert is_basic(index) is expected
    assert is_basic(torch.tensor([0])) is False


@pytest.mark.parametrize(
    "source",
    [
        lambda: make_td(7.0),
        lambda: {"n": {"b": torch.full((3, 2), 7.0)}, "a": torch.full((3,), 7.0)},
        lambda: TensorDict({"n": {"b": torch.full((3, 2), 7.0)}, "a": torch.full((3,), 7.0)}, [3]),
    ],
)
def test_try_copy_whole_writes_leaves_in_any_order(source: Any) -> None:
    td = make_td()
    leaves = td._leaves()
    assert try_copy_whole(td, source()) is True
    assert all(found is leaf for found, leaf in zip(td._leaves(), leaves, strict=True))
    assert all((leaf == 7).all() for leaf in leaves)


def test_try_copy_whole_of_many_keys_pairs_by_key() -> None:
    keys = [f"k{i}" for i in range(20)]
    for order in (keys, keys[::-1]):
        td = TensorDict({key: torch.zeros(1) for key in keys})
        assert try_copy_whole(td, TensorDict({key: torch.tensor([float(key[1:])]) for key in order}))
        assert [td[key].item() for key in keys] == list(range(20))


@pytest.mark.parametrize(
    "source",
    [
        {"a": torch.ones(3), "c": torch.ones(3)},
        {"a": torch.ones(3), "n": torch.ones(3, 2)},
        {"a": torch.ones(4)},
        {"a": 1.0},
        {"a": {"x": torch.ones(3)}},
        OrderedDict(a=torch.ones(3)),
        {"a": torch.ones(3, requires_grad=True)},
    ],
)
def test_try_copy_whole_of_other_forms_writes_nothing(source: Any) -> None:
    td = make_td()
    assert try_copy_whole(td, source) is False
    assert not any(leaf.any() for leaf in td._leaves())


@pytest.mark.parametrize(
    ("index", "rows"),
    [(1, 1), (slice(1, 3), 2), (torch.tensor([2, 0]), 2), (torch.tensor([True, False, True]), 2)],
    ids=str,
)
def test_try_copy_whole_at_index_equals_torch(index: Any, rows: int) -> None:
    td, expected = make_td(), make_td()
    source = make_td(7.0, rows)
    source = source[0] if isinstance(index, int) else source
    assert try_copy_whole(td, source, plan=plan_index(index, td.batch_size)) is True
    for leaf in expected._leaves():
        leaf[index] = 7.0
    assert all(map(torch.equal, td._leaves(), expected._leaves()))


def test_try_copy_whole_at_index_of_other_rows_writes_nothing() -> None:
    td = make_td()
    assert try_copy_whole(td, make_td(7.0, 3), plan=plan_index(torch.tensor([0, 1]), td.batch_size)) is False
    assert not any(leaf.any() for leaf in td._leaves())


def test_update_with_leaves_of_target_writes_only_others() -> None:
    target = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    source = TensorDict({"a": target["a"], "b": torch.ones(2)})
    assert target.update_(source) is target
    assert target["a"].tolist() == [0, 0] and target["b"].tolist() == [1, 1]
    versions = target["b"]._version
    assert target.update_(target) is target and target.update_(target.clone(False)) is target
    assert target["b"]._version == versions
    source["a"] = target["a"] = torch.zeros(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        target.update_(source)
