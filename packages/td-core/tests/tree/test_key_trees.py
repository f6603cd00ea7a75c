"""Nested keys as a tree, and the parts of collections and mappings that such a tree selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import KeyPathError, KeyThroughLeafError, LazyStackedTensorDict, TensorDict, lazy_stack
from td_core._tree.key_trees import (
    RequestedKeys,
    build_key_tree,
    filter_entries,
    parse_requested_keys,
    restrict,
)


@pytest.mark.parametrize(
    ("keys", "longest", "shortest"),
    [
        ([], {}, {}),
        (["a", ("b", "c")], {"a": None, "b": {"c": None}}, {"a": None, "b": {"c": None}}),
        (
            [("a", ("b", "c")), ("a", "d")],
            {"a": {"b": {"c": None}, "d": None}},
            {"a": {"b": {"c": None}, "d": None}},
        ),
        (["a", ("a", "b")], {"a": {"b": None}}, {"a": None}),
        ([("a", "b"), "a"], {"a": {"b": None}}, {"a": None}),
        (["a", "a"], {"a": None}, {"a": None}),
    ],
)
def test_build_key_tree_keeps_longer_or_shorter_key(keys: Any, longest: Any, shortest: Any) -> None:
    assert build_key_tree(keys, longest=True) == longest
    assert build_key_tree(keys, longest=False) == shortest


@pytest.mark.parametrize("keys", [["a", ("a", "b")], [("a", "b"), "a"]])
def test_build_key_tree_marks_prefixes_that_are_requested_too(keys: Any) -> None:
    assert type(build_key_tree(keys, longest=True)["a"]) is RequestedKeys
    assert type(build_key_tree([("a", "b")], longest=True)["a"]) is dict


def make_td() -> TensorDict:
    return TensorDict(
        {"x": torch.zeros(2), "n": {"y": torch.ones(2), "z": torch.ones(2)}}, [2], names=["row"]
    )


def test_restrict_returns_selected_entries_with_metadata() -> None:
    td = make_td()
    part = restrict(td, {"n": {"z": None}}, strict=True)
    assert list(part.keys(True)) == ["n", ("n", "z")]
    assert part["n", "z"] is td["n", "z"] and part.names == ["row"]


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"w": None}, KeyPathError, "key 'w' not found"),
        ({"n": {"w": None}}, KeyPathError, "key 'w' not found in key 'n'"),
        ({"x": {"w": None}}, KeyThroughLeafError, r"key 'x' has no entries; looked up \['w'\] in it"),
    ],
)
def test_restrict_strict_missing_key_raises(tree: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        restrict(make_td(), tree, strict=True)
    assert not list(restrict(make_td(), tree, strict=False).keys(True, True))


def test_restrict_keeps_leaf_whose_key_is_requested_too() -> None:
    tree = build_key_tree(["x", ("x", "w")], longest=True)
    assert list(restrict(make_td(), tree, strict=False).keys()) == ["x"]


def test_restrict_as_tensordict_makes_the_root_plain() -> None:
    class Own(TensorDict):
        pass

    td = Own({"a": torch.zeros(2), "n": Own({"b": torch.zeros(2)}, [2])}, [2])
    part = restrict(td, {"n": {"b": None}}, strict=True, as_tensordict=True)
    assert (type(part), type(part["n"]), part.batch_size) == (TensorDict, Own, (2,))


def test_restrict_lazy_stack_takes_keys_of_some_members() -> None:
    stack = lazy_stack([TensorDict({"a": 1, "b": 2}), TensorDict({"a": 3})])
    part = restrict(stack, {"a": None, "b": None}, strict=True)
    assert type(part) is LazyStackedTensorDict
    assert [list(member.keys()) for member in part.tensordicts] == [["a", "b"], ["a"]]
    with pytest.raises(KeyPathError, match="'c'"):
        restrict(stack, {"c": None}, strict=True)


def test_parse_requested_keys_refuses_one_string() -> None:
    assert parse_requested_keys(None) is None
    assert parse_requested_keys([("a", "b"), "c"]) == {"a": {"b": None}, "c": None}
    with pytest.raises(TypeError, match="keys_to_update is a sequence of keys; got the single key 'a'"):
        parse_requested_keys("a")


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"n": {"x": 1, "y": 2}}, {"n": {"x": 1}}),
        ({("n", "x"): 1, ("n", "y"): 2}, {("n", "x"): 1}),
        ({("a", "deep"): 1}, {("a", "deep"): 1}),
        ({"n": 5}, {}),
    ],
)
def test_filter_entries_of_mapping(source: Any, kept: Any) -> None:
    assert filter_entries(source, {"a": None, "n": {"x": None}}) == kept


def test_filter_entries_of_collections() -> None:
    td = make_td()
    assert list(filter_entries(td, {"n": {"y": None}}).keys(True, True)) == [("n", "y")]
    inside = filter_entries({"t": td}, {"t": {"x": None}})
    assert list(inside["t"].keys()) == ["x"]
