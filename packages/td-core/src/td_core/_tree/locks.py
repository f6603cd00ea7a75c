"""Locks: a locked node refuses changes of structure, and locks the nodes below it.

A node references the locked parents that hold it weakly: after the last of them is freed, the node can be unlocked.

The user locks a collection, or a sibling package locks it with a storage backend. Copies keep only the lock of the user.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from torch import Tensor

from ..errors import LockedError, UnsupportedOperationError
from .node import Core
from .packed import keep_mark
from .walks import list_holders, walk

#: Value of ``_locked`` if a storage backend locked the node, and not the user.
ATTACHED = "attached"

#: Value of ``_locked`` for a node in a store, where only the entry as a whole can be replaced.
STORED_ENTRY = "stored"

# Dead weak references to parents are removed at this length of the list and at each doubling: amortized O(1).
_MANY = 32


def lock(root: Core, *, by_user: bool = True, as_entry: bool = False) -> None:
    """Lock a node and all nodes below it; ``by_user`` is False for a storage backend, whose lock copies do not keep.

    ``as_entry`` is for an entry of a store: nobody can unlock it, and its metadata cannot be changed alone.

    >>> td = TensorDict()
    >>> lock(td, by_user=False)
    >>> td.is_locked, td.clone().is_locked
    (True, False)
    """
    if root._locked:
        return
    how: bool | str = STORED_ENTRY if as_entry else by_user or ATTACHED
    todo: list[tuple[Any, weakref.ref[Core] | None]] = [(root._inner(), None)]
    try:
        # By hand: the row `lock unlock` of benchmarks/ops.py.
        while todo:
            node, parent = todo.pop()
            if parent is not None:
                # Read once: another thread may unlock the node concurrently.
                parents = node._lock_parents
                if parents is None:
                    node._lock_parents = [parent]
                # Compare by identity: == of weak references compares collections, and torch.compile cannot trace it.
                elif not any(parent() is known() for known in parents):
                    _prune_dead_parents(parents)
                    parents.append(parent)
            if node._locked:
                continue
            node._locked = how
            this: weakref.ref[Core] | None = None
            for child in node._tree_children():
                if isinstance(child, Tensor):
                    continue
                if this is None:
                    this = weakref.ref(node)
                todo.append((child._inner(), this))
    except BaseException:
        # Undo the lock also after Ctrl-C: a partly locked tree would count as locked.
        unlock(root)
        raise


def _prune_dead_parents(parents: list[weakref.ref[Core]]) -> None:
    """Remove dead references if the length of the list is a power of two and at least ``_MANY``."""
    count = len(parents)
    if count < _MANY or count & (count - 1):
        return
    for dead in [known for known in parents if known() is None]:
        # Remove single items, since other threads append concurrently. Dead references compare by identity.
        with contextlib.suppress(ValueError):
            parents.remove(dead)


def unlock(root: Core) -> None:
    """Unlock a node and the nodes below that no other locked node holds. Raise LockedError if one holds ``root``."""
    inner: Core = root._inner()
    if inner._locked == STORED_ENTRY:
        check_no_entry(inner, "unlock")
    if _is_part(inner):
        raise LockedError(
            f"cannot unlock this {type(inner).__name__}: it is part of a locked collection; unlock that one first"
        )
    todo: list[Any] = [inner]
    # By hand: the row `lock unlock` of benchmarks/ops.py.
    while todo:
        node = todo.pop()
        if _is_held(node):
            continue
        node._locked = False
        node._lock_parents = None
        node._backends = keep_mark(node._backends)
        todo += [child._inner() for child in node._tree_children() if not isinstance(child, Tensor)]


def check_no_entry(node: Core, what: str) -> None:
    """Raise LockedError if a node is in a store, where only the entry as a whole can be replaced."""
    if node._inner()._locked == STORED_ENTRY:
        raise LockedError(
            f"cannot {what} this {type(node).__name__}: it is an entry of a collection in a store, which would not change; "
            "clone() it, change that, and set the entry again"
        )


def check_in_memory(root: Core, what: str) -> None:
    """Raise UnsupportedOperationError for a node whose leaves cannot be replaced by others in memory.

    >>> check_in_memory(TensorDict({"a": 1}), "map")
    """
    for level in walk(root):
        if not level._inner()._schema.is_in_memory:
            raise UnsupportedOperationError(
                f"cannot {what} this {type(level).__name__} in place: its leaves stay in its store; clone() it first"
            )


def _is_part(node: Core) -> bool:
    """Return True if a locked node holds this node or, for an unlocked lazy stack, one of its members."""
    if _is_held(node):
        return True
    stacked = None if node._locked else node._members_and_dim()
    return stacked is not None and any(_is_part(member._inner()) for member in stacked[0])


def _is_held(node: Core) -> bool:
    """Return True if a locked node holds this node."""
    for held_by in node._lock_parents or ():
        parent = held_by()
        if parent is not None and parent._locked:
            return True
    return False


def check_unlocked(node: Core, what: str) -> None:
    """Raise LockedError if a node, or a member of a lazy stack, is locked. ``what`` describes the refused change.

    >>> check_unlocked(TensorDict(), "set key 'a'")
    """
    for level in (*list_holders(node), node):
        if level._locked:
            raise LockedError(
                f"cannot {what}: the {type(level).__name__} is locked; write in place (set_, update_, copy_), "
                "or call unlock_() first"
            )


def check_unlocked_below(root: Core, what: str) -> None:
    """Raise LockedError if a node or a node below it is locked. ``what`` describes the refused change."""
    for level in walk(root):
        if level is root or level._children():
            check_unlocked(level, what)
