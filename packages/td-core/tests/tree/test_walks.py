"""The functions that visit, compare and rebuild trees: order, positions, depth, shared nodes, changes during a walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core._tree.walks import expand, get_path, list_nested, map_levels, visit, walk, walk_levels, zip_walk

DEEP = 20_000


def make_chain(depth: int) -> Any:
    """Build nested nodes of a depth, with a leaf at each."""
    node = TensorDict({"x": 0})
    for _ in range(depth):
        node = TensorDict({"x": 1})._with_children({"x": torch.tensor(0), "n": node})
    return node


def make_tree() -> Any:
    return TensorDict({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {}})


def test_expand_visits_parents_first_and_last_sibling_first() -> None:
    below = {"r": "ab", "a": "cd", "b": "e"}
    assert "".join(expand("r", lambda item: below.get(item, ""))) == "rbeadc"


def test_expand_calls_below_after_the_item_was_used() -> None:
    items: list[list[Any]] = [[]]
    visited = 0
    for item in expand(items, list):
        visited += 1
        if visited == 1:
            item.append([])
    assert visited == 2


def test_expand_without_items_yields_nothing() -> None:
    assert list(expand([], list)) == []


def test_visit_runs_requested_steps_last_one_first() -> None:
    calls = []

    def step(name: str, depth: int) -> Any:
        calls.append(name)
        if depth < 2:
            yield name + "a", depth + 1
            yield name + "b", depth + 1
            calls.append(name + "!")

    visit(step, "r", 0)
    assert calls == ["r", "r!", "rb", "rb!", "rbb", "rba", "ra", "ra!", "rab", "raa"]


def test_visit_stops_at_an_error_of_a_step() -> None:
    calls = []

    def step(n: int) -> Any:
        calls.append(n)
        if n == 3:
            raise KeyError(n)
        yield (n + 1,)

    with pytest.raises(KeyError):
        visit(step, 0)
    assert calls == [0, 1, 2, 3]


def test_walk_visits_every_node_of_several_roots() -> None:
    td = make_tree()
    assert [list(node.keys()) for node in walk(td)] == [["a", "b", "f"], [], ["c", "d"], ["e"]]
    assert len(list(walk(td, td["b"]))) == 6


def test_walk_descends_into_members_of_lazy_stack() -> None:
    members = [TensorDict({"n": {"a": i}}) for i in range(2)]
    stack = lazy_stack(members)
    nodes = list(walk(stack))
    assert nodes[0] is stack
    assert {id(node) for node in nodes[1:]} == {id(node) for m in members for node in (m, m.get("n"))}


def test_walk_levels_yields_positions_of_nodes() -> None:
    found = {get_path(position): list(entries) for _, position, entries in walk_levels(make_tree())}
    assert found == {(): ["a", "b", "f"], ("b",): ["c", "d"], ("b", "d"): ["e"], ("f",): []}


def test_get_path_appends_keys() -> None:
    assert get_path(None) == ()
    assert get_path(((None, "a"), "b"), "c", "d") == ("a", "b", "c", "d")


def test_walk_levels_skips_removed_entries() -> None:
    paths = []
    for _, position, entries in walk_levels(make_tree()):
        paths.append(get_path(position))
        entries.pop("d", None)
    assert sorted(paths) == [(), ("b",), ("f",)]


def test_walk_levels_tolerates_changes_of_the_node() -> None:
    td = make_tree()
    for node, _, entries in walk_levels(td):
        for key in entries:
            del node[key]
    assert td.is_empty() and not list(td.keys())


def test_shared_node_is_visited_at_each_key_path() -> None:
    shared = TensorDict({"x": 1})
    td = TensorDict({"a": shared, "b": shared})
    assert [get_path(p) for node, p, _ in walk_levels(td) if node is td.get("a") or node is td.get("b")] == [
        ("b",),
        ("a",),
    ]


def test_zip_walk_pairs_nodes_that_all_trees_have() -> None:
    left, right = make_tree(), TensorDict({"b": {"d": {"z": 1}}, "a": {"q": 1}, "f": 1})
    pairs = [(sorted(a.keys()), sorted(b.keys())) for a, b in zip_walk(left, right)]
    assert pairs == [(["a", "b", "f"], ["a", "b", "f"]), (["c", "d"], ["d"]), (["e"], ["z"])]


@pytest.mark.parametrize("dim", [0, 1])
def test_zip_walk_splits_other_tree_along_stack_dim(dim: int) -> None:
    members = [TensorDict({"a": torch.arange(3) + 3 * i}, [3]) for i in range(2)]
    stack = lazy_stack(members, dim)
    dense = TensorDict({"a": torch.stack([m["a"] for m in members], dim)}, stack.batch_size)
    pairs = list(zip_walk(stack, dense, stack))
    assert len(pairs) == 2
    for node, part, member in pairs:
        assert node is member
        assert torch.equal(node["a"], part["a"])


def test_zip_walk_refuses_stacks_of_different_lengths() -> None:
    stacks = [lazy_stack([TensorDict({"a": 1})] * n) for n in (2, 3)]
    with pytest.raises(ValueError, match="zip"):
        list(zip_walk(*stacks))


def test_map_levels_keeps_order_and_drops_nodes() -> None:
    def fill(node: Any, entries: dict[str, Any], depth: int) -> Any:
        for key, child in node.items():
            if isinstance(child, dict):
                yield key, child, depth + 1
            else:
                entries[key] = (child, depth)

    tree = {"b": {"c": 1, "n": {}}, "a": 2}
    made = map_levels(tree, fill, 0, make=lambda _, entries: entries)
    assert made == {"b": {"c": (1, 1), "n": {}}, "a": (2, 0)}
    assert list(made) == ["b", "a"]
    assert map_levels(tree, fill, 0, make=lambda _, entries: entries or None) == {
        "b": {"c": (1, 1)},
        "a": (2, 0),
    }


def test_map_levels_builds_nodes_of_the_same_kind() -> None:
    def fill(node: Any, entries: dict[str, Any], _: None) -> Any:
        for key, child in node._children().items():
            if isinstance(child, torch.Tensor):
                entries[key] = child + 1
            else:
                yield key, child, None

    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(2)}}, [2])
    result = map_levels(td, fill)
    assert result.batch_size == td.batch_size
    assert result["a"].tolist() == [1, 1] and result["n", "b"].tolist() == [2, 2]


def test_every_walk_visits_a_deep_tree() -> None:
    td = make_chain(DEEP)
    assert len(list(walk(td))) == DEEP + 1
    assert sum(1 for _ in zip_walk(td, td)) == DEEP + 1
    *_, (_, last, _) = walk_levels(td)
    assert get_path(last) == ("n",) * DEEP

    def fill(node: Any, entries: dict[str, Any], _: None) -> Any:
        entries["x"] = node.get("x")
        if "n" in node.keys():
            yield "n", node.get("n"), None

    assert map_levels(td, fill).depth == DEEP
    depths = []

    def step(node: Any, depth: int) -> Any:
        depths.append(depth)
        yield from ((below, depth + 1) for below in list_nested(node))

    visit(step, td, 0)
    assert depths == list(range(DEEP + 1))
