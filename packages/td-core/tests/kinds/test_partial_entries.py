"""Entries that only some members of a lazy stack have can be removed and renamed, and defaults fill only the gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import KeyPathError, KeyTakenError, LockedError, StructureError


def make_stack() -> Any:
    """Return a stack whose members share "o"; only the first has "l", only the second ("s", "c") and ("s", "v")."""
    first = TensorDict({"o": torch.zeros(2), "l": torch.arange(3.0)})
    return lazy_stack(
        [first, TensorDict({"o": torch.ones(2), "s": {"c": torch.ones(3), "v": torch.ones(1)}})]
    )


#: Ways to the stack: what makes the collection, and the key path of the stack in it.
PLACES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "root": (make_stack, ()),
    "nested": (lambda: TensorDict({"n": make_stack(), "x": 1}), ("n",)),
    "stack of stacks": (lambda: lazy_stack([make_stack()]), ()),
}


def list_leaves(root: Any) -> list[list[str]]:
    """Return the keys of the leaves of each member, key paths joined by dots."""
    stack = root["n"] if "n" in root.keys() else root
    members = stack.tensordicts[0].tensordicts if stack.batch_dims > 1 else stack.tensordicts
    return [
        [".".join(key) if isinstance(key, tuple) else key for key in member.keys(True, True)]
        for member in members
    ]


LEAVES = [["o", "l"], ["o", "s.c", "s.v"]]

#: Operations on the entries of the stack, whose keys begin with the path ``p``, and the leaves of the members afterwards.
REMOVALS: dict[str, tuple[Callable[[Any, tuple[str, ...]], Any], list[list[str]]]] = {
    "del": (lambda td, p: td.__delitem__((*p, "l")), [["o"], LEAVES[1]]),
    "del_": (lambda td, p: td.del_((*p, "s", "c")), [LEAVES[0], ["o", "s.v"]]),
    "del_ node": (lambda td, p: td.del_((*p, "s")), [LEAVES[0], ["o"]]),
    "pop": (lambda td, p: td.pop((*p, "s", "v")), [LEAVES[0], ["o", "s.c"]]),
    "pop with default": (lambda td, p: td.pop((*p, "l"), None), [["o"], LEAVES[1]]),
    "exclude": (lambda td, p: td.exclude((*p, "l"), (*p, "s", "c"), inplace=True), [["o"], ["o", "s.v"]]),
    "separates": (lambda td, p: td.separates((*p, "l"), (*p, "s", "c")), [["o"], ["o", "s.v"]]),
    "split_keys": (lambda td, p: td.split_keys([(*p, "s", "c")], inplace=True), [LEAVES[0], ["o", "s.v"]]),
    "select": (lambda td, p: td.select((*p, "l"), (*p, "s", "v"), inplace=True), [["l"], ["s.v"]]),
    "rename_key_": (lambda td, p: td.rename_key_((*p, "l"), (*p, "z")), [["o", "z"], LEAVES[1]]),
    "rename_key_ below": (
        lambda td, p: td.rename_key_((*p, "s", "c"), (*p, "s", "z"), safe=True),
        [LEAVES[0], ["o", "s.v", "s.z"]],
    ),
    "rename_key_ up": (
        lambda td, p: td.rename_key_((*p, "s", "c"), (*p, "z")),
        [LEAVES[0], ["o", "s.v", "z"]],
    ),
}


@pytest.mark.parametrize("name", REMOVALS)
@pytest.mark.parametrize("place", PLACES)
def test_remove_entry_of_some_members_changes_those(place: str, name: str) -> None:
    make, path = PLACES[place]
    root = make()
    remove, expected = REMOVALS[name]
    remove(root, path)
    assert list_leaves(root) == expected


RESULTS: dict[str, tuple[Callable[[Any, tuple[str, ...]], Any], list[list[str]]]] = {
    "select": (lambda td, p: td.select((*p, "l"), (*p, "s", "c")), [["l"], ["s.c"]]),
    "select as TensorDict": (lambda td, p: td.select((*p, "l"), as_tensordict=True), [["l"], []]),
    "separates": (lambda td, p: td.separates((*p, "l"), (*p, "s", "c")), [["l"], ["s.c"]]),
    "split_keys": (lambda td, p: td.split_keys([(*p, "s", "c")])[0], [[], ["s.c"]]),
    "split_keys, renamed": (lambda td, p: td.split_keys({(*p, "l"): (*p, "z")})[0], [["z"], []]),
    "split_keys, rest": (lambda td, p: td.split_keys([(*p, "l")])[1], [["o"], LEAVES[1]]),
    "exclude": (lambda td, p: td.exclude((*p, "l")), [["o"], LEAVES[1]]),
    "rename_keys": (
        lambda td, p: td.rename_keys({(*p, "l"): (*p, "z"), (*p, "o"): (*p, "l")}),
        [["z", "l"], ["s.c", "s.v", "l"]],
    ),
    "rename_keys, not strict": (
        lambda td, p: td.rename_keys({(*p, "s", "c"): (*p, "s", "z"), "q": "r"}, strict=False),
        [LEAVES[0], ["o", "s.v", "s.z"]],
    ),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("place", PLACES)
def test_take_entry_of_some_members_returns_it_in_those(place: str, name: str) -> None:
    make, path = PLACES[place]
    take, expected = RESULTS[name]
    assert [sorted(keys) for keys in list_leaves(take(make(), path))] == [sorted(keys) for keys in expected]


NAMES = ["del_", "pop", "select", "separates", "rename_key_", "rename_keys", "split_keys"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES)
def test_operation_on_key_of_no_member_raises_and_changes_nothing(place: str, name: str) -> None:
    make, path = PLACES[place]
    root, key = make(), (*path, "q")
    arguments: dict[str, Any] = {
        "rename_key_": (key, "r"),
        "rename_keys": ({key: "r"},),
        "split_keys": ([key],),
    }
    with pytest.raises(KeyPathError, match="key 'q' not found"):
        getattr(root, name)(*arguments.get(name, (key,)))
    assert list_leaves(root) == LEAVES


def test_pop_entry_of_some_members_returns_list_with_defaults() -> None:
    first, second = make_stack().pop("l")
    assert first.tolist() == [0, 1, 2] and second is None
    assert TensorDict({"n": make_stack()}).pop(("n", "s", "v"), 7) == [7, torch.ones(1)]
    assert make_stack().pop("q", 7) == 7


def test_clear_and_popitem_reach_entries_of_some_members() -> None:
    assert list_leaves(make_stack().clear()) == [[], []]
    stack = make_stack()
    assert [stack.popitem()[0] for _ in range(3)] == ["o", "s", "l"]
    with pytest.raises(KeyPathError, match="is empty"):
        stack.popitem()


@pytest.mark.parametrize("place", ["root", "nested"])
def test_setdefault_entry_of_some_members_fills_the_gaps(place: str) -> None:
    make, path = PLACES[place]
    root = make()
    assert root.setdefault((*path, "l"), torch.full((2, 3), 7.0)).tolist() == [[0, 1, 2], [7, 7, 7]]
    assert root.setdefault((*path, "s", "v"), torch.full((2, 1), 7.0)).tolist() == [[7], [1]]


def test_separates_default_fills_the_gaps() -> None:
    part = make_stack().separates("l", ("s", "v"), "q", default=torch.full((2, 3), 7.0))
    assert part["l"].tolist() == [[0, 1, 2], [7, 7, 7]] and part["q"].tolist() == [[7] * 3] * 2
    assert part.get(("s", "v"), as_list=True)[0].tolist() == [7, 7, 7]


def test_rename_entry_of_some_members_out_of_their_stack_raises() -> None:
    root = TensorDict({"n": make_stack()})
    for rename in (root.rename_key_, lambda old, new: root.rename_keys({old: new})):
        with pytest.raises(StructureError, match="it cannot leave that stack"):
            rename(("n", "l"), "z")
    assert list_leaves(root) == LEAVES


def test_rename_entry_of_some_members_to_taken_key_raises_if_safe() -> None:
    stack = make_stack()
    with pytest.raises(KeyTakenError, match="there is an entry key 's' already"):
        stack.rename_key_("l", "s", safe=True)
    assert list_leaves(stack) == LEAVES


@pytest.mark.parametrize("name", ["del_", "pop"])
def test_remove_entry_of_locked_member_raises_and_changes_nothing(name: str) -> None:
    stack = make_stack()
    stack.tensordicts[1].lock_()
    with pytest.raises(LockedError, match="cannot remove key"):
        getattr(stack, name)(("s", "c"))
    assert list_leaves(stack) == LEAVES
