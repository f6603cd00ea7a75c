"""Select, split and rename keys, and remove empty nodes: keys, order and shared leaves; a failed call changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.errors import KeyPathError, KeyTakenError, KeyThroughLeafError, LockedError


@pytest.fixture
def td(td: Any) -> Any:
    td.names = ["time"]
    return td


def list_keys(node: Any) -> list[Any]:
    return list(node.keys(True))


SELECTIONS = [
    (["a"], ["a"]),
    (["b", "a"], ["b", ("b", "c"), ("b", "d"), "a"]),
    ([("b", "c")], ["b", ("b", "c")]),
    (["b", ("b", "c")], ["b", ("b", "c")]),
    ([("b", "c"), "b"], ["b", ("b", "c")]),
    ([("b", ("d",)), ("b", "c")], ["b", ("b", "d"), ("b", "c")]),
    ([], []),
]


class TestSelect:
    @pytest.mark.parametrize(("selected", "expected"), SELECTIONS)
    def test_select_keeps_keys_in_given_order(
        self, td: Any, selected: list[Any], expected: list[Any]
    ) -> None:
        result = td.select(*selected)
        assert list_keys(result) == expected
        assert type(result) is type(td)
        assert result.batch_size == td.batch_size
        assert result.names == ["time"]
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    @pytest.mark.parametrize(("selected", "expected"), SELECTIONS)
    def test_select_inplace_keeps_selected_keys(
        self, td: Any, selected: list[Any], expected: list[Any]
    ) -> None:
        assert td.select(*selected, inplace=True) is td
        assert sorted(map(str, list_keys(td))) == sorted(map(str, expected))

    def test_select_shares_leaves_and_nodes(self, make_dense: Any) -> None:
        td = make_dense()
        assert td.select("b")["b"] is td["b"]
        assert td.select(("b", "c"))["b", "c"] is td["b", "c"]

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(
        ("key", "error", "message"),
        [
            ("zz", KeyPathError, r"key 'zz' not found in \w+: existing keys: \['a', 'b'\]"),
            (("b", "zz"), KeyPathError, "key 'zz' not found in key 'b'"),
            (("a", "q"), KeyThroughLeafError, r"key 'a' has no entries; looked up \['q'\] in it"),
            (3, KeyPathError, "a key is a string or a non-empty"),
        ],
    )
    def test_select_missing_key_raises(
        self, td: Any, key: Any, error: type, message: str, inplace: bool
    ) -> None:
        with pytest.raises(error, match=message):
            td.select("a", key, inplace=inplace)
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    def test_select_not_strict_skips_missing_keys(self, td: Any) -> None:
        assert list_keys(td.select("a", "zz", ("b", "zz"), strict=False)) == ["a", "b"]
        assert list_keys(td.select(("a", "q"), "b", strict=False)) == ["b", ("b", "c"), ("b", "d")]

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(
        ("selected", "expected"),
        [
            ([("a", "q")], []),
            (["a", ("a", "q")], ["a"]),
            ([("a", "q"), "a", ("a", "q", "r")], ["a"]),
            ([("b", "c", "q"), ("b", "c"), ("b", "d", "q")], ["b", ("b", "c")]),
        ],
    )
    def test_select_not_strict_keeps_leaf_selected_as_whole(
        self, td: Any, selected: list[Any], expected: list[Any], inplace: bool
    ) -> None:
        assert list_keys(td.select(*selected, strict=False, inplace=inplace)) == expected

    def test_select_uneven_stack_applies_to_members(self) -> None:
        stack = LazyStackedTensorDict(
            *[TensorDict({"a": torch.zeros(n), f"k{n}": torch.zeros(1)}) for n in (1, 2)]
        )
        assert [list(member.keys()) for member in stack.select("a").tensordicts] == [["a"], ["a"]]
        assert [list(member.keys()) for member in stack.select("k1").tensordicts] == [["k1"], []]
        with pytest.raises(KeyPathError, match="key 'k3' not found"):
            stack.select("k1", "k3")

    def test_select_as_tensordict_returns_tensordict(self, make_dense: Any) -> None:
        class Own(TensorDict):
            """A class of a user."""

        own = Own({"a": torch.zeros(3), "b": 1})
        assert type(own.select("a")) is Own
        for source in (make_dense(), own, TensorDictParams(TensorDict({"a": torch.zeros(3)}))):
            assert type(source.select("a", as_tensordict=True)) is TensorDict

    def test_select_locked_inplace_raises(self, td: Any) -> None:
        td.lock_()
        assert not td.select("a").is_locked
        with pytest.raises(LockedError, match="cannot select keys in place"):
            td.select("a", inplace=True)

    def test_select_context_writes_back_selected_keys(self, td: Any) -> None:
        with td.select("a") as part:
            part["a"] = part["a"] * 0
            part["z"] = torch.ones(3)
        assert not td["a"].any()
        assert "z" not in td


class TestExclude:
    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(
        ("excluded", "expected"),
        [
            (["a"], ["b", ("b", "c"), ("b", "d")]),
            ([("b", "c")], ["a", "b", ("b", "d")]),
            ([("b", "c"), ("b", "d")], ["a", "b"]),
            (["b", ("b", "c")], ["a"]),
            ([("b", "c"), "b"], ["a"]),
            (["zz", ("b", "q"), ("a", "q"), ("zz", "q")], ["a", "b", ("b", "c"), ("b", "d")]),
            ([], ["a", "b", ("b", "c"), ("b", "d")]),
        ],
    )
    def test_exclude_removes_keys(
        self, td: Any, excluded: list[Any], expected: list[Any], inplace: bool
    ) -> None:
        result = td.exclude(*excluded, inplace=inplace)
        assert list_keys(result) == expected
        assert (result is td) == inplace
        assert inplace or list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    def test_exclude_invalid_key_raises(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="got 3"):
            td.exclude(3)

    def test_exclude_context_writes_back_kept_keys(self, td: Any) -> None:
        with td.exclude("a") as part:
            part["b", "c"] = torch.zeros(3)
            part["z"] = torch.ones(3)
        assert not td["b", "c"].any()
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]


class TestSplit:
    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(
        ("sets", "expected"),
        [
            ([["a"]], [["a"], ["b", ("b", "c"), ("b", "d")]]),
            ([["a"], {"b"}], [["a"], ["b", ("b", "c"), ("b", "d")], []]),
            ([["a", ("b", "c")]], [["a", "b", ("b", "c")], ["b", ("b", "d")]]),
            ([[("b", "c"), ("b", "d")]], [["b", ("b", "c"), ("b", "d")], ["a"]]),
            ([], [["a", "b", ("b", "c"), ("b", "d")]]),
            ([{"a": "z"}], [["z"], ["b", ("b", "c"), ("b", "d")]]),
            ([{"a": ("z", "w"), ("b", "c"): "y"}], [["z", ("z", "w"), "y"], ["b", ("b", "d")]]),
            ([{"a": ("b", "c"), ("b", "c"): "a"}], [["b", ("b", "c"), "a"], ["b", ("b", "d")]]),
            ([lambda key, leaf: key == ("b", "c")], [["b", ("b", "c")], ["a", "b", ("b", "d")]]),
            ([lambda key, leaf: leaf.ndim == 2], [["a", "b", ("b", "d")], ["b", ("b", "c")]]),
            (
                [["b"], lambda key, leaf: True, lambda key, leaf: True],
                [["b", ("b", "c"), ("b", "d")], ["a"], [], []],
            ),
        ],
    )
    def test_split_keys_returns_one_part_per_set(
        self, td: Any, sets: list[Any], expected: list[Any], inplace: bool
    ) -> None:
        parts = td.split_keys(*sets, inplace=inplace)
        assert [list_keys(part) for part in parts] == expected
        assert {type(part) for part in parts} == {type(td)}
        assert (parts[-1] is td) == inplace

    def test_empty_recurse_keeps_kind_of_nodes(self, td: Any) -> None:
        empty = td.empty(recurse=True)
        assert list_keys(empty) == ["b"]
        assert (type(empty), type(empty["b"])) == (type(td), type(td["b"]))

    def test_split_keys_reproduce_struct_keeps_nodes(self, td: Any) -> None:
        first, _ = td.split_keys(["a"], reproduce_struct=True)
        assert sorted(map(str, list_keys(first))) == ["a", "b"]
        first, rest = td.split_keys([("b", "c"), ("b", "d")], reproduce_struct=True)
        assert list_keys(rest) == ["a", "b"]

    def test_split_keys_mapping_shares_renamed_leaves(self, td: Any) -> None:
        first, _ = td.split_keys({("b", "c"): ("b", "z")}, reproduce_struct=True)
        assert list_keys(first) == ["b", ("b", "z")]
        assert first["b", "z"].tolist() == td["b", "c"].tolist()
        first, _ = td.split_keys({"zz": "y"}, {"zz": "z"}, default=torch.ones(3), strict=False)[1:]
        assert first["z"].tolist() == [1.0] * 3

    def test_split_keys_mapping_collision_changes_nothing(self, td: Any) -> None:
        with pytest.raises(KeyTakenError, match="two entries would have one key"):
            td.split_keys({"a": "z", ("b", "c"): "z"}, inplace=True)
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    @pytest.mark.parametrize("sets", [[["zz"]], [["a"], ["a"]], [["a", ("b", "zz")]], [{"zz": "a"}]])
    def test_split_keys_missing_key_changes_nothing(self, td: Any, sets: list[Any]) -> None:
        with pytest.raises(KeyPathError, match="not found"):
            td.split_keys(*sets, inplace=True)
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    def test_split_keys_default_fills_missing_entries(self, td: Any) -> None:
        first, second, _ = td.split_keys(["a", "zz"], ["zz"], default=torch.ones(3), strict=False)
        assert [list_keys(first), list_keys(second)] == [["a", "zz"], ["zz"]]
        assert second["zz"].tolist() == [1.0] * 3
        first, _ = td.split_keys(["zz"], default=None, strict=False)
        assert list_keys(first) == []

    @pytest.mark.parametrize(
        ("separated", "kwargs", "out", "left"),
        [
            (["a"], {}, ["a"], ["b", ("b", "c"), ("b", "d")]),
            ([("b", "c"), ("b", "d")], {}, ["b", ("b", "c"), ("b", "d")], ["a"]),
            ([("b", "c"), ("b", "d")], {"filter_empty": False}, ["b", ("b", "c"), ("b", "d")], ["a", "b"]),
            (["zz"], {"strict": False}, [], ["a", "b", ("b", "c"), ("b", "d")]),
            (["zz"], {"default": torch.zeros(3)}, ["zz"], ["a", "b", ("b", "c"), ("b", "d")]),
        ],
    )
    def test_separates_moves_entries_to_result(
        self, td: Any, separated: list[Any], kwargs: Any, out: list[Any], left: list[Any]
    ) -> None:
        assert list_keys(td.separates(*separated, **kwargs)) == out
        assert list_keys(td) == left

    def test_separates_missing_key_or_locked_changes_nothing(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.separates("a", "zz")
        td.lock_()
        with pytest.raises(LockedError, match="cannot separate keys"):
            td.separates("a")
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    def test_separates_keeps_nodes_empty_before(self) -> None:
        td = TensorDict({"a": {"b": {}}, "c": {"d": 1}})
        td["a"].lock_()
        td.separates(("a", "b", "x"), ("c", "d"), strict=False)
        assert list_keys(td) == ["a", ("a", "b")]


class TestEmpty:
    def test_filter_empty_removes_empty_nodes(self) -> None:
        td = TensorDict({"a": {}, "b": {"c": {}}, "d": 1, "n": {"x": 1, "y": {}}})
        assert td.filter_empty_() is td
        assert list_keys(td) == ["d", "n", ("n", "x")]

    def test_filter_empty_lazy_stack_applies_to_members(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": {"b": {}}, "c": 1}) for _ in range(2)])
        assert list_keys(stack.filter_empty_()) == ["c"]
        uneven = LazyStackedTensorDict(TensorDict({"only": {"b": {}}, "c": 1}), TensorDict({"c": 1}))
        assert [list_keys(member) for member in uneven.filter_empty_().tensordicts] == [["c"], ["c"]]

    def test_filter_empty_locked_noop_is_allowed(self, make_dense: Any) -> None:
        assert make_dense().lock_().filter_empty_().is_locked
        with pytest.raises(LockedError, match="cannot remove the empty key 'a'"):
            TensorDict({"a": {}}).lock_().filter_empty_()

    def test_filter_empty_locked_node_removes_nothing(self) -> None:
        td = TensorDict({"a": {"b": {}}, "c": {"d": {}}, "e": {"f": {}}})
        td["c"].lock_()
        before = list_keys(td)
        with pytest.raises(LockedError, match="cannot remove the empty key 'd'"):
            td.filter_empty_()
        assert list_keys(td) == before

    def test_filter_empty_shared_node_is_processed_once(self) -> None:
        shared = TensorDict({"x": {"y": 1}, "z": {}})
        td = TensorDict({"a": shared, "b": shared})
        assert td.separates(("a", "x", "y"), ("b", "x", "y"))["b", "x", "y"] == 1
        assert list_keys(td) == ["a", ("a", "z"), "b", ("b", "z")]
        assert list_keys(td.filter_empty_()) == []

    def test_empty_keeps_batch_size_and_names(self, td: Any) -> None:
        assert list_keys(td.empty()) == []
        assert td.empty().batch_size == torch.Size([3])
        assert td.empty().names == ["time"]
        assert list_keys(td.empty(recurse=True)) == ["b"]

    def test_empty_new_batch_size_sets_every_node(self, td: Any) -> None:
        result = td.empty(recurse=True, batch_size=[5, 2], device="cpu", names=["x", "y"])
        assert result.batch_size == result["b"].batch_size == torch.Size([5, 2])
        assert result.names == ["x", "y"]
        assert result.device == torch.device("cpu")

    def test_empty_new_batch_size_keeps_matching_names(self, make_dense: Any) -> None:
        td = make_dense()
        td.names = ["time"]
        assert td.empty(batch_size=[5, 2]).names == ["time", None]


class TestRename:
    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("a", "n", ["b", ("b", "c"), ("b", "d"), "n"]),
            ("a", "b", ["b"]),
            (("b", "c"), "n", ["a", "b", ("b", "d"), "n"]),
            ("a", ("b", "n"), ["b", ("b", "c"), ("b", "d"), ("b", "n")]),
            ("a", "a", ["a", "b", ("b", "c"), ("b", "d")]),
            ("a", ("new", "n"), ["b", ("b", "c"), ("b", "d"), "new", ("new", "n")]),
            (("b", "c"), ("b", "e"), ["a", "b", ("b", "d"), ("b", "e")]),
            (("b", "c"), "b", ["a", "b"]),
        ],
    )
    def test_rename_key_moves_entry(self, td: Any, old: Any, new: Any, expected: list[Any]) -> None:
        assert td.rename_key_(old, new) is td
        assert list_keys(td) == expected

    def test_rename_key_failure_changes_nothing(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.rename_key_("zz", "y")
        with pytest.raises(KeyTakenError, match="cannot rename key 'a': there is an entry key 'b' already"):
            td.rename_key_("a", "b", safe=True)
        td.lock_()
        with pytest.raises(LockedError, match="cannot rename key 'a'"):
            td.rename_key_("a", "y")
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    @pytest.mark.parametrize(
        ("old", "new", "error", "message"),
        [
            (("b", "q"), ("b", "y"), KeyPathError, "key 'q' not found in key 'b'"),
            (("a", "q"), ("a", "y"), KeyThroughLeafError, "key 'a' is a tensor, so it has no entry 'q'"),
            (
                ("b", "c"),
                ("b", "d"),
                KeyTakenError,
                r"cannot rename key \('b', 'c'\): there is an entry key \('b', 'd'\)",
            ),
        ],
    )
    def test_rename_key_nested_failure_names_key_path(
        self, make_dense: Any, old: Any, new: Any, error: Any, message: str
    ) -> None:
        td = make_dense()
        with pytest.raises(error, match=message):
            td.rename_key_(old, new, safe=True)
        with pytest.raises(error):
            LazyStackedTensorDict(td, td.clone()).rename_key_(old, new, safe=True)
        assert list_keys(td) == list_keys(make_dense())

    @pytest.mark.parametrize("first", [True, False])
    def test_rename_key_to_entry_of_some_members_raises(self, first: bool) -> None:
        members = [TensorDict({"a": 1, "b": 2}), TensorDict({"b": 2, "c": 3})]
        stack = LazyStackedTensorDict(*(members if first else reversed(members)))
        before = [list_keys(member) for member in members]
        for old in ("a", "b"):
            with pytest.raises(KeyTakenError, match="there is an entry key 'c' already"):
                stack.rename_key_(old, "c", safe=True)
            assert [list_keys(member) for member in members] == before

    @pytest.mark.parametrize(
        ("mapping", "expected"),
        [
            ({"a": "n", ("b", "c"): ("b", "e")}, ["b", ("b", "d"), ("b", "e"), "n"]),
            ({"a": "b", "b": "a"}, ["b", "a", ("a", "c"), ("a", "d")]),
            ({"a": ("b", "n")}, ["b", ("b", "c"), ("b", "d"), ("b", "n")]),
            ({("b", "c"): "c", ("b", "d"): "d"}, ["a", "c", "d"]),
            ({}, ["a", "b", ("b", "c"), ("b", "d")]),
        ],
    )
    def test_rename_keys_applies_all_at_once(self, td: Any, mapping: Any, expected: list[Any]) -> None:
        result = td.rename_keys(mapping)
        assert sorted(map(str, list_keys(result))) == sorted(map(str, expected))
        assert list_keys(td) == ["a", "b", ("b", "c"), ("b", "d")]

    @pytest.mark.parametrize("mapping", [{"a": "b"}, {"a": "n", "b": "n"}, {"a": ("b", "c")}])
    def test_rename_keys_duplicate_key_raises(self, td: Any, mapping: Any) -> None:
        with pytest.raises(KeyTakenError, match="cannot rename"):
            td.rename_keys(mapping)

    def test_rename_keys_strict_missing_key_raises(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.rename_keys({"zz": "b"})
        assert list_keys(td.rename_keys({"zz": "b"}, strict=False)) == ["a", "b", ("b", "c"), ("b", "d")]
        assert list_keys(td.rename_keys({"zz": "x", "a": "x"}, strict=False)) == [
            "b",
            ("b", "c"),
            ("b", "d"),
            "x",
        ]


def test_structure_methods_deep_tree_do_not_recurse() -> None:
    td = TensorDict({"x": torch.zeros(2)}, [2])
    for _ in range(2000):
        td = TensorDict({"k": td}, [2])
    path = ("k",) * 2000 + ("x",)
    assert path in td.select(path).keys(True)
    assert path not in td.exclude(path).keys(True)
    assert td.flatten_keys().unflatten_keys()[path].tolist() == [0.0, 0.0]
    assert [path in part.keys(True) for part in td.split_keys([path])] == [True, False]
    assert td.rename_keys({path: "y"})["y"].tolist() == [0.0, 0.0]
    empty = td.empty(recurse=True)
    assert len(list(empty.keys(True))) == len(
        [key for key in td.keys(True) if key not in td.keys(True, True)]
    )
    assert empty.filter_empty_().is_empty()
    td.rename_key_(path, "y").filter_empty_()
    assert list(td.keys()) == ["y"]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "derive",
    [
        lambda td: td.split_keys(["a"])[1],
        lambda td: td.split_keys(["n"])[0],
        lambda td: td.split_keys()[0],
        lambda td: td.rename_keys({"a": "z"}),
        lambda td: td.rename_keys({"n": "z"}).rename_keys({"z": "n"}),
        lambda td: td.unflatten_keys(),
    ],
)
def test_derived_collections_do_not_share_nodes(derive, stacked) -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2), "m": {"c": torch.zeros(2)}}}, [2])
    if stacked:
        td = td.to_lazystack()
    keys = list(td.keys(True))
    result = derive(td.lock_())
    result["n", "m", "new"] = torch.ones(2)
    assert list(td.keys(True)) == keys and ("n", "m", "new") in result.keys(True)
    member, mine = (td[0], result[0]) if stacked else (td, result)
    assert mine["n", "b"].data_ptr() == member["n", "b"].data_ptr()


@pytest.mark.parametrize(
    ("old", "new"), [("a", ("a", "b")), ("n", ("n", "deep", "er")), (("n", "b"), ("n", "b", "c"))]
)
def test_rename_key_below_itself_creates_nodes(old, new) -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(2)}}, [2])
    entry = td[old]
    assert td.rename_key_(old, new).get(new) is entry
    assert td.batch_size == td[new[:-1]].batch_size == torch.Size([2])


def test_join_entries_repeated_key_removes_entry_once() -> None:
    td = TensorDict({"a": torch.zeros(2)})
    assert list(td.stack_tensors("a", "a", out_key="b").keys()) == ["b"]
    assert list(td.cat_tensors("b", "b", out_key="c").keys()) == ["c"]


def test_empty_keeps_compatible_batch_size_of_nodes() -> None:
    td = TensorDict({"n": TensorDict(batch_size=[2, 3]), "m": {}}, [2])
    empty = td.empty(recurse=True, batch_size=[2])
    assert empty["n"].batch_size == torch.Size([2, 3])
    assert td.empty(recurse=True, batch_size=[3])["n"].batch_size == torch.Size([3])


def test_auto_batch_size_without_leaves_keeps_batch_size() -> None:
    td = TensorDict({"n": {}}, [2, 3]).auto_batch_size_()
    assert td.batch_size == td["n"].batch_size == torch.Size([2, 3])


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.select("a", ("n", "b"), inplace=True),
        lambda td: td.exclude("a", ("n", "b"), inplace=True),
        lambda td: td.split_keys(["a", ("n", "b")], inplace=True),
        lambda td: td.rename_key_(("n", "b"), "z"),
        lambda td: td.rename_key_(("n", "b"), ("n", "b", "z")),
    ],
)
def test_structure_change_locked_node_changes_nothing(change):
    td = TensorDict({"a": 0, "n": TensorDict({"b": 1, "c": 2}, lock=True)})
    with pytest.raises(LockedError, match="key .*'[bc]'.*: the TensorDict is locked"):
        change(td)
    assert list(td.keys(True)) == ["a", "n", ("n", "b"), ("n", "c")]


@pytest.mark.parametrize("locked", [False, True])
def test_unflatten_context_keeps_existing_nodes(locked) -> None:
    td = TensorDict({"n": {"a": torch.zeros(2)}, "m": {"a": torch.zeros(2)}, "m/c": torch.zeros(2)}, [2])
    before = list(td.keys(True))
    if locked:
        td.lock_()
    with td.unflatten_keys("/") as nested:
        nested["n", "a"].add_(1)
        nested.set_(("m", "c"), torch.ones(2))
        if not locked:
            nested["n", "new"] = torch.ones(2)
            nested["o", "new"] = torch.ones(2)
    assert td["n", "a"].tolist() == td["m/c"].tolist() == [1, 1]
    assert "n/a" not in td
    if locked:
        assert list(td.keys(True)) == before
    else:
        assert {("n", "new"), "o/new"} <= set(td.keys(True))


def test_rename_key_below_leaf_raises() -> None:
    with pytest.raises(KeyThroughLeafError, match="key 'a' is a tensor, so it has no entry 'b'"):
        TensorDict({"a": torch.zeros(2)}).rename_key_(("a", "b"), ("a", "c"))
