"""Operations that a lazy stack runs on its members, and what its holders, parts and results are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, assert_close, lazy_stack
from td_core._tree.walks import list_holders
from td_core.errors import KeyMismatchError, KeyPathError, KeyTakenError, LockedError


def make_member(i: int, **more: Any) -> TensorDict:
    entries = {"a": torch.arange(3) + 3.0 * i, "n": {"b": torch.arange(3) - i, **more}}
    return TensorDict(entries, batch_size=[3])


def make_stack(dim: int = 0) -> Any:
    """Return a lazy stack whose second member has an entry that the first lacks."""
    return lazy_stack([make_member(0), make_member(1, hidden=torch.ones(3))], dim)


def make_nested_stack() -> Any:
    return lazy_stack([make_stack(), make_stack()], 1)


def make_empty_stack() -> Any:
    return LazyStackedTensorDict(batch_size=[0, 3])


HOLDERS: dict[str, tuple[Callable[[], Any], int]] = {
    "dense": (lambda: make_member(0), 1),
    "stack": (make_stack, 2),
    "stack along dim 1": (lambda: make_stack(1), 2),
    "nested stack": (make_nested_stack, 4),
    "stack without members": (make_empty_stack, 0),
    "parameters": (lambda: TensorDictParams(TensorDict({"a": torch.zeros(3)}, [3])), 1),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_list_holders_returns_nodes_with_entries(name: str) -> None:
    make, count = HOLDERS[name]
    node = make()
    holders = list(list_holders(node))
    assert len(holders) == count
    assert all(not isinstance(holder, LazyStackedTensorDict) for holder in holders)
    if not hasattr(node, "tensordicts"):
        assert holders[0] is node


@pytest.mark.parametrize("name", HOLDERS)
def test_zip_members_pairs_holders_with_parts(name: str) -> None:
    node = HOLDERS[name][0]()
    positions = torch.arange(node.batch_size.numel()).view(node.batch_size)
    other = TensorDict({"p": positions}, node.batch_size)
    rows = node._zip_members(other, positions)
    holders = list_holders(node)
    assert len(rows) == len(holders)
    assert all(row[0] is holder for row, holder in zip(rows, holders))
    for holder, part, rest in rows:
        assert holder.batch_size == part.batch_size == rest.shape
        assert torch.equal(part["p"], rest)
    seen = [rest.flatten() for *_, rest in rows]
    assert sorted(torch.cat([*seen, positions.flatten()[:0]]).tolist()) == positions.flatten().tolist()


@pytest.mark.parametrize("name", HOLDERS)
def test_map_members_keeps_structure(name: str) -> None:
    node = HOLDERS[name][0]()
    result = node._map_members(lambda holder: holder.select("a", strict=False))
    assert result.batch_size == node.batch_size
    assert hasattr(result, "tensordicts") == hasattr(node, "tensordicts")
    assert [list(holder.keys()) for holder in list_holders(result)] == [["a"]] * len(list_holders(node))


def test_map_members_without_results_returns_none() -> None:
    assert make_nested_stack()._map_members(lambda holder: None) is None
    assert make_member(0)._map_members(lambda holder: None) is None


def test_map_members_keeps_dropped_member_empty() -> None:
    stack = make_stack()
    first = stack.tensordicts[0]
    result = stack._map_members(lambda holder: None if holder is first else holder)
    assert [list(member.keys()) for member in result.tensordicts] == [[], ["a", "n"]]


def test_map_members_with_parts_of_other_size_raises() -> None:
    with pytest.raises(ValueError, match="zip"):
        make_stack()._map_members(lambda holder, part: holder, torch.zeros(3, 3))


#: Operations on keys, which give the same as the operation on each member.
ON_KEYS: dict[str, Callable[[Any], Any]] = {
    "select": lambda td: td.select(("n", "b")),
    "select in place": lambda td: td.select(("n", "b"), inplace=True),
    "exclude": lambda td: td.exclude("a"),
    "exclude nested": lambda td: td.exclude(("n", "b")),
    "exclude in place": lambda td: td.exclude(("n", "b"), inplace=True),
    "flatten": lambda td: td.flatten_keys(),
    "flatten in place": lambda td: td.flatten_keys(inplace=True),
    "unflatten": lambda td: td.flatten_keys().unflatten_keys(),
    "rename": lambda td: td.rename_key_("a", "z"),
    "rename nested": lambda td: td.rename_key_(("n", "b"), ("n", "z")),
    "move": lambda td: td.rename_key_(("n", "b"), "z"),
    "rename all": lambda td: td.rename_keys({("n", "b"): "z", "a": ("n", "b")}),
    "split": lambda td: td.split_keys(["a"])[1],
    "separate": lambda td: td.separates(("n", "b")),
    "empty": lambda td: td.empty(recurse=True),
    "filter": lambda td: td.exclude(("n", "b"), ("n", "hidden"), inplace=True).filter_empty_(),
    "apply": lambda td: td.apply(torch.neg),
    "apply and drop": lambda td: td.named_apply(lambda key, leaf: leaf if key == "a" else None),
}


def check_equal_members(result: Any, expected: list[Any]) -> None:
    members = list_holders(result)
    assert len(members) == len(expected)
    for member, other in zip(members, expected):
        assert list(member.keys(True)) == list(other.keys(True))
        assert_close(member, other)


@pytest.mark.parametrize("make", [make_stack, lambda: make_stack(1), make_nested_stack])
@pytest.mark.parametrize("operation", ON_KEYS)
def test_key_operation_on_stack_equals_that_on_members(operation: str, make: Callable[[], Any]) -> None:
    run = ON_KEYS[operation]
    expected = [run(member.clone()) for member in list_holders(make())]
    check_equal_members(run(make()), expected)


@pytest.mark.parametrize("make", [make_stack, make_nested_stack])
@pytest.mark.parametrize(
    "operation", ["select", "exclude nested", "rename nested", "split", "empty", "apply"]
)
def test_key_operation_on_nested_stack_keeps_members(operation: str, make: Callable[[], Any]) -> None:
    stack = make()
    outer = TensorDict({"k": stack.clone()}, stack.batch_size[:1])
    run: dict[str, Callable[[Any], Any]] = {
        "select": lambda td: td.select(("k", "n", "b")),
        "exclude nested": lambda td: td.exclude(("k", "n", "b")),
        "rename nested": lambda td: td.rename_key_(("k", "n", "b"), ("k", "n", "z")),
        "split": lambda td: td.split_keys([("k", "a")])[1],
        "empty": lambda td: td.empty(recurse=True),
        "apply": lambda td: td.apply(torch.neg),
    }
    expected = [ON_KEYS[operation](member.clone()) for member in list_holders(stack)]
    check_equal_members(run[operation](outer)["k"], expected)


@pytest.mark.parametrize("key", [("n", "zz"), "zz"])
def test_select_missing_key_in_nested_stack_names_whole_path(key: Any) -> None:
    outer = TensorDict({"k": make_stack()}, [2])
    parts = key if isinstance(key, tuple) else (key,)
    with pytest.raises(
        KeyPathError, match=rf"key 'zz' not found in key .*{parts[0] if len(parts) > 1 else 'k'}"
    ):
        outer.select(("k", *parts))


def test_rename_that_fails_in_one_member_changes_none() -> None:
    stack = lazy_stack([make_member(0), make_member(1, z=torch.ones(3))])
    with pytest.raises(KeyTakenError, match="there is an entry"):
        stack.rename_key_(("n", "b"), ("n", "z"), safe=True)
    assert [sorted(member["n"].keys()) for member in stack.tensordicts] == [["b"], ["b", "z"]]


@pytest.mark.parametrize("other", ["stack", "dense", "number"])
def test_where_on_stack_selects_elements_and_stays_lazy(other: str) -> None:
    stack = lazy_stack([make_member(0), make_member(1)])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    values: Any = {
        "stack": lazy_stack([make_member(4), make_member(5)]),
        "dense": torch.stack([make_member(4), make_member(5)]),
        "number": 7.0,
    }[other]
    result = stack.where(mask, values)
    assert isinstance(result, LazyStackedTensorDict)
    for key in ("a", ("n", "b")):
        expected = torch.where(mask, stack[key], values if other == "number" else values[key])
        assert torch.equal(result[key], expected.to(result[key].dtype))


def test_from_dict_instance_of_stack_keeps_members() -> None:
    stack = lazy_stack([make_member(0), make_member(1)])
    made = stack.from_dict_instance({"a": torch.ones(2, 3)}, batch_size=[2, 3])
    assert isinstance(made, LazyStackedTensorDict)
    assert torch.equal(made["a"], torch.ones(2, 3))


def test_empty_with_batch_size_keeps_names_of_stack() -> None:
    stack = lazy_stack([make_member(0), make_member(1)], stack_dim_name="s")
    assert stack.empty(batch_size=[2, 3]).names == ["s", None]
    assert stack.empty(batch_size=[5]).names == ["s"]


@pytest.mark.parametrize("dense", ["actual", "expected"])
def test_assert_close_stack_with_dense_names_key(dense: str) -> None:
    stack = lazy_stack([make_member(0), make_member(1)])
    whole = torch.stack([make_member(0), make_member(1)])
    pair = (whole, stack) if dense == "actual" else (stack, whole)
    assert assert_close(*pair)
    whole["n", "b"][1, 2] = 9
    with pytest.raises(AssertionError, match=r"key \('n', 'b'\) differs"):
        assert_close(*pair)


def test_assert_close_stacks_of_different_lengths_raises() -> None:
    stacks = [lazy_stack([make_member(0)] * count) for count in (2, 3)]
    with pytest.raises(AssertionError, match="key 'a' differs"):
        assert_close(*stacks)


@pytest.mark.parametrize("keys", [["a"], [("n", "b")]])
def test_update_some_keys_from_stack_with_hidden_keys(keys: Any) -> None:
    target = torch.stack([make_member(2), make_member(3)])
    source, before = make_stack(), target.clone()
    target.update(source, keys_to_update=keys)
    for key in ("a", ("n", "b")):
        assert torch.equal(target[key], (source if key in keys else before)[key])


def test_set_at_writes_members_of_stack() -> None:
    stack = lazy_stack([make_member(0), make_member(1)], 1)
    expected = stack["a"].clone()
    expected[1, 0] = -5
    stack.set_at_("a", -5.0, (1, 0))
    assert torch.equal(torch.stack([member["a"] for member in stack.tensordicts], 1), expected)


@pytest.mark.parametrize("operation", ["select in place", "exclude in place", "rename", "flatten in place"])
def test_operation_in_place_on_stack_with_locked_member_raises(operation: str) -> None:
    stack = make_stack()
    stack.tensordicts[1].lock_()
    keys = [sorted(map(str, member.keys(True))) for member in stack.tensordicts]
    with pytest.raises(LockedError, match="the TensorDict is locked"):
        ON_KEYS[operation](stack)
    assert [sorted(map(str, member.keys(True))) for member in stack.tensordicts] == keys


def test_auto_batch_size_keeps_that_of_nested_stack() -> None:
    td = TensorDict({"k": lazy_stack([make_member(0), make_member(1)]), "b": torch.zeros(2, 3, 4)})
    assert td.auto_batch_size_().batch_size == (2, 3)
    assert td["k"].batch_size == (2, 3)


def test_auto_device_of_stack_sets_members() -> None:
    stack = make_nested_stack().auto_device_()
    assert stack.device == torch.device("cpu")
    assert all(holder.device == torch.device("cpu") for holder in list_holders(stack))


@pytest.mark.parametrize("size", [(4,), (4, 5), (1, 4, 5)])
@pytest.mark.parametrize("make", [make_stack, lambda: make_stack(1), make_nested_stack])
@pytest.mark.parametrize("nested", [False, True])
def test_new_with_empty_lazy_has_nested_nodes_without_leaves(
    nested: bool, make: Callable[[], Any], size: tuple[int, ...]
) -> None:
    stack = make()
    td = TensorDict({"k": stack, "c": torch.ones(stack.batch_size)}, stack.batch_size) if nested else stack
    result = td.new_ones(size, empty_lazy=True)
    assert result.batch_size == size
    if nested:
        assert torch.equal(result["c"], torch.ones(size))
        result = result["k"]
    assert isinstance(result, LazyStackedTensorDict)
    assert result.batch_size == size
    assert result.stack_dim == min(stack.stack_dim, len(size) - 1)
    assert [list(holder.keys(True)) for holder in list_holders(result)] == [["n"]] * len(list_holders(result))


def test_new_with_empty_lazy_of_stack_without_members_is_dense() -> None:
    result = make_empty_stack().new_zeros(4, empty_lazy=True)
    assert result.batch_size == (4,)
    assert result.is_empty()


@pytest.mark.parametrize("keys", [["hidden"], ["a", "hidden"], None])
def test_update_from_stack_with_wanted_hidden_key_raises(keys: Any) -> None:
    target = torch.stack([make_member(2), make_member(3)])
    before = target.clone()
    source = lazy_stack([make_member(0), make_member(1).set("hidden", torch.ones(3))])
    with pytest.raises(KeyMismatchError, match=r"\['hidden'\], which some lack, would be lost"):
        target.update(source, keys_to_update=keys)
    assert_close(target, before)
