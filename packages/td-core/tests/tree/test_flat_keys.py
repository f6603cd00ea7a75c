"""flatten_keys and unflatten_keys: keys, order and shared leaves; a failed call changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_core import TensorDict
from td_core.errors import KeyTakenError, LockedError


@pytest.fixture
def td(td: Any) -> Any:
    td.names = ["time"]
    return td


def list_keys(node: Any) -> list[Any]:
    return list(node.keys(True))


class TestFlatten:
    @pytest.mark.parametrize("inplace", [False, True])
    def test_flatten_keys_joins_key_paths(self, td: Any, inplace: bool) -> None:
        flat = td.flatten_keys("/", inplace=inplace)
        assert list_keys(flat) == ["a", "b/c", "b/d"]
        assert (flat is td) == inplace
        assert type(flat) is type(td)
        assert flat.names == ["time"]

    @pytest.mark.parametrize("inplace", [False, True])
    def test_unflatten_keys_inverts_flatten_keys(self, td: Any, inplace: bool) -> None:
        again = td.flatten_keys().unflatten_keys(inplace=inplace)
        assert list_keys(again) == ["a", "b", ("b", "c"), ("b", "d")]
        assert again["b"].batch_size == torch.Size([3])
        assert again["b"].names == td["b"].names if "b" in td else True

    def test_flatten_keys_shares_leaves(self, make_dense: Any) -> None:
        td = make_dense()
        assert td.flatten_keys()["b.c"] is td["b", "c"]
        assert td.flatten_keys().unflatten_keys()["b", "c"] is td["b", "c"]

    def test_flatten_keys_is_leaf_keeps_node(self, make_dense: Any) -> None:
        td = make_dense()
        assert td.flatten_keys(is_leaf=lambda cls: True)["b"] is td["b"]

    def test_flatten_keys_drops_empty_nodes(self) -> None:
        assert list_keys(TensorDict({"a": {"b": {"c": 1}, "e": {}}}).flatten_keys("/")) == ["a/b/c"]

    @pytest.mark.parametrize("inplace", [False, True])
    def test_flatten_keys_collision_raises(self, inplace: bool) -> None:
        td = TensorDict({"a.b": 1, "a": {"b": 2}})
        with pytest.raises(
            KeyTakenError, match=r"'a.b' and \('a', 'b'\) would both be 'a.b'; use another separator"
        ):
            td.flatten_keys(inplace=inplace)
        assert list_keys(td) == ["a.b", "a", ("a", "b")]

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ({"a.b.c": 1, "a.b.d": 1, "e": 1}, ["a", ("a", "b"), ("a", "b", "c"), ("a", "b", "d"), "e"]),
            ({".b": 1, "a.": 1, "..": 1}, ["", ("", "b"), ("", ""), ("", "", ""), "a", ("a", "")]),
            ({"a.b": 1, "a": {"c": 1}}, ["a", ("a", "b"), ("a", "c")]),
            ({"a": {"c": 1}, "a.b": 1}, ["a", ("a", "c"), ("a", "b")]),
            ({"n": {"a.b": 1}}, ["n", ("n", "a.b")]),
        ],
    )
    def test_unflatten_keys_splits_and_merges_nodes(self, source: Any, expected: list[Any]) -> None:
        td = TensorDict(source)
        before = list_keys(td)
        assert list_keys(td.unflatten_keys()) == expected
        assert list_keys(td) == before

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(
        "source",
        [
            {"a.b": 1, "a": 1},
            {"a": 1, "a.b": 1},
            {"a.b": 1, "a": {"b": 1}},
            {"a": {"b": 1}, "a.b": 1},
            {"a.b": 1, "a.b.c": 1},
        ],
    )
    def test_unflatten_keys_collision_changes_nothing(self, source: Any, inplace: bool) -> None:
        td = TensorDict(source)
        before = list_keys(td)
        with pytest.raises(
            KeyTakenError,
            match=r"cannot unflatten the keys: key '.*' needs '.*' where there is another entry",
        ):
            td.unflatten_keys(inplace=inplace)
        assert list_keys(td) == before

    @pytest.mark.parametrize("separator", [3, None, ""])
    def test_unflatten_keys_invalid_separator_raises(self, make_dense: Any, separator: Any) -> None:
        with pytest.raises(TypeError, match="the separator is a non-empty string"):
            make_dense().unflatten_keys(separator)

    def test_flatten_keys_locked_inplace_raises(self, td: Any) -> None:
        td.lock_()
        assert not td.flatten_keys().is_locked
        with pytest.raises(LockedError, match="cannot flatten the keys in place"):
            td.flatten_keys(inplace=True)

    def test_flatten_keys_context_writes_back(self, td: Any) -> None:
        with td.flatten_keys(".") as flat:
            flat["q"] = torch.ones(3)
            flat["b.c"] = flat["b.c"] + 5
            flat["x.y"] = torch.zeros(3)
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d"), "q", "x", ("x", "y")]
        assert td["b", "c"].tolist() == [6.0] * 3

    def test_flatten_keys_context_locked_writes_leaves(self, make_dense: Any) -> None:
        td = make_dense().lock_()
        with td.flatten_keys(".") as flat:
            flat["b.c"] = flat["b.c"] + 5
        assert td["b", "c"].tolist() == [6.0] * 3
        assert td.is_locked

    def test_flatten_keys_inplace_context_restores_keys(self, make_dense: Any) -> None:
        td = make_dense()
        with td.flatten_keys(inplace=True):
            assert list_keys(td) == ["a", "b.c", "b.d"]
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    def test_unflatten_keys_context_writes_back(self) -> None:
        td = TensorDict({"a.b": torch.arange(6)}, batch_size=[6])
        with td.unflatten_keys(".") as nested:
            nested["a", "c"] = torch.ones(6)
        assert list_keys(td) == ["a.b", "a.c"]

    @given(
        st.recursive(
            st.just(0),
            lambda inner: st.dictionaries(
                st.text("abc", min_size=1, max_size=2), inner, min_size=1, max_size=3
            ),
            max_leaves=8,
        ).filter(lambda tree: isinstance(tree, dict))
    )
    def test_flatten_keys_round_trip_keeps_keys(self, tree: dict[str, Any]) -> None:
        td = TensorDict(tree)
        assert list_keys(td.flatten_keys("/").unflatten_keys("/")) == list_keys(td)
