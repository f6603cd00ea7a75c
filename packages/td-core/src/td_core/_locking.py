"""Locks: a locked collection refuses structural change, and its sub-collections lock with it.

A child remembers who locked it by weak reference only: dropping the parent frees the child to be unlocked.

The owner of a collection locks it, or a sibling does, around what it attaches: of that lock no copy knows.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ._collection import Core, iter_nodes
from .errors import LockedError

# So many parents, and each time twice as many, are looked through for those that are gone.
_MANY = 32


def lock(root: Core, how: bool | str = True) -> None:
    """Lock a collection and everything below it; ``how`` is ``ATTACHED`` where not the owner does."""
    if root._locked:
        return
    todo: list[tuple[Any, weakref.ref[Core] | None]] = [(root._inner(), None)]
    try:
        while todo:
            node, parent = todo.pop()
            if parent is not None:
                # Read once: another thread may unlock the node meanwhile.
                parents = node._lock_parents
                if parents is None:
                    node._lock_parents = [parent]
                # == would compare the collections, and torch.compile does not compare references.
                elif not any(parent() is known() for known in parents):
                    _prune_dead_parents(parents)
                    parents.append(parent)
            if node._locked:
                continue
            node._locked = how
            this: weakref.ref[Core] | None = None
            for child in node._iter_nested():
                if this is None:
                    this = weakref.ref(node)
                todo.append((child._inner(), this))
    except BaseException:
        # A Ctrl-C too: what is locked is taken to be locked as a whole.
        unlock(root)
        raise


def _prune_dead_parents(parents: list[weakref.ref[Core]]) -> None:
    """Remove the parents that are gone, whenever there are twice as many again."""
    count = len(parents)
    if count < _MANY or count & (count - 1):
        return
    for dead in [known for known in parents if known() is None]:
        # One by one, since other threads append meanwhile. Dead references are compared by identity.
        with contextlib.suppress(ValueError):
            parents.remove(dead)


def unlock(root: Core) -> None:
    """Unlock a collection and what no other locked collection holds.

    Raises:
        LockedError: a locked collection holds ``root``.
    """
    inner: Any = root._inner()
    if _is_part(inner):
        raise LockedError(
            f"cannot unlock this {type(inner).__name__}: it is part of a locked collection; unlock that one first"
        )
    todo: list[Any] = [inner]
    while todo:
        node = todo.pop()
        if _is_held(node):
            continue
        node._locked = False
        node._lock_parents = None
        node._backends = None
        todo.extend(child._inner() for child in node._iter_nested())


def _is_part(node: Any) -> bool:
    """Tell whether a locked collection holds a node, or members of a stack that was made to read an entry."""
    if _is_held(node):
        return True
    stacked = None if node._locked else node._members_and_dim()
    return stacked is not None and any(_is_part(member._inner()) for member in stacked[0])


def _is_held(node: Core) -> bool:
    """Tell whether a locked collection holds a node."""
    for held_by in node._lock_parents or ():
        parent = held_by()
        if parent is not None and parent._locked:
            return True
    return False


def check_unlocked(node: Core, what: str) -> None:
    """Raise LockedError naming the change that was tried; a change of a stack is one of each of its members."""
    if (stacked := node._members_and_dim()) is not None:
        for member in stacked[0]:
            check_unlocked(member, what)
    if node._locked:
        raise LockedError(
            f"cannot {what}: the {type(node).__name__} is locked; write in place (set_, update_, copy_), "
            "or call unlock_() first"
        )


def check_unlocked_below(root: Core, what: str) -> None:
    """Raise LockedError naming the change that was tried, if this collection or one in it is locked."""
    for level in iter_nodes(root):
        if level is root or not level._is_value:
            check_unlocked(level, what)
