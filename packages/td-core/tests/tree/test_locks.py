"""Locks: what they refuse, which node holds which, and how blocks and freed parents end them."""

from __future__ import annotations

import pytest
import torch

from td_core import (
    TensorDict,
)
from td_core.errors import (
    LockedError,
)


def test_lock_refuses_structural_changes_but_not_writes():
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3], lock=True)
    td.set_("a", torch.ones(3))
    td.set(("n", "b"), torch.ones(3), inplace=True)
    assert td["a"].sum() == 3 and td["n", "b"].sum() == 3
    for change in (
        lambda: td.set("a", torch.zeros(3)),
        lambda: td["n"].set("z", torch.zeros(3)),
        lambda: td.pop("a"),
        lambda: td.clear(),
        lambda: td.set(("n", "m", "k"), torch.zeros(3)),
    ):
        with pytest.raises(LockedError, match="locked"):
            change()


def test_unlock_child_of_locked_parent_raises():
    inner = TensorDict({"b": torch.zeros(1)})
    outer, other = TensorDict({"n": inner}, lock=True), TensorDict({"m": inner}, lock=True)
    with pytest.raises(LockedError, match="part of a locked collection"):
        inner.unlock_()
    outer.unlock_()
    assert inner.is_locked
    del other
    inner.unlock_()
    assert not inner.is_locked


@pytest.mark.parametrize("locked", [False, True])
def test_lock_context_exit_restores_lock(locked):
    td = TensorDict(lock=locked)
    with td.unlock_():
        td["a"] = 1
    assert td.is_locked is locked
    with td.lock_():
        assert td.is_locked
    assert td.is_locked is locked


def test_lock_context_nested_restores_lock() -> None:
    td = TensorDict({"a": torch.zeros(2)}).lock_()
    with td.unlock_():
        with td.unlock_():
            td["b"] = 1
        with td.lock_():
            assert td.is_locked
        td["c"] = 1
    assert td.is_locked and set(td.keys()) == {"a", "b", "c"}
    with td.unlock_():
        td.lock_()
    assert td.is_locked
    with pytest.raises(ZeroDivisionError), td.unlock_(), td.unlock_():
        raise ZeroDivisionError
    assert td.is_locked


def test_set_is_locked_locks_and_unlocks_tree() -> None:
    td = TensorDict({"n": {"a": 0}})
    td.is_locked = True
    assert td.is_locked and td["n"].is_locked
    td.is_locked = False
    assert not td.is_locked and not td["n"].is_locked


def test_lock_drops_references_to_deleted_parents() -> None:
    shared = TensorDict({"a": torch.ones(1)})
    for _ in range(1000):
        TensorDict({"s": shared}).lock_()
    assert len(shared._lock_parents) < 100
    held = [TensorDict({"s": shared}).lock_() for _ in range(100)]
    with pytest.raises(LockedError, match="part of a locked collection"):
        shared.unlock_()
    del held
    assert not shared.unlock_().is_locked
