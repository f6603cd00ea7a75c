"""Lock collections, and undo the last operation when a ``with`` block ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .._tree.locks import lock, unlock
from .._tree.node import Core, Undo
from ..errors import StructureError

if TYPE_CHECKING:
    from typing_extensions import Self

NodeT = TypeVar("NodeT", bound=Core)


def do_nothing(node: Core) -> None:
    """Leave a collection unchanged: the undo function of an operation that changed nothing."""


def _write_into(
    source: weakref.ref[object], write: Callable[..., None], args: tuple[object, ...], result: object
) -> None:
    """Write a result back into its source collection. Raise StructureError if the source was freed."""
    owner = source()
    if owner is None:
        raise StructureError(
            f"cannot write back what the context wrote: the collection that this {type(result).__name__} was taken "
            "from is gone; keep it in a variable, and open one context for each operation of a chain"
        )
    write(owner, result, *args)


class LockMixin(Core):
    """Methods ``lock_`` and ``unlock_``, and the ``with`` block that undoes the last operation."""

    __slots__ = ()

    @property
    def is_locked(self) -> bool:
        """Whether structural changes are refused; settable. A lazy stack is locked if every member is.

        >>> TensorDict(lock=True).is_locked
        True
        """
        inner = self._inner()
        return bool(inner._locked) if inner is self else inner.is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self) -> Self:
        """Lock this collection and its sub-collections: structural changes raise, in-place writes work.

        As a context manager (``with td.lock_():``) it unlocks on exit.

        >>> td = TensorDict({"a": 1}).lock_()
        >>> td["b"] = 2
        Traceback (most recent call last):
        td_core.errors.LockedError: cannot set key 'b': the TensorDict is locked; ...
        """
        was = self._locked
        lock(self)
        return undo_on_exit(self, do_nothing if was else unlock)

    def unlock_(self) -> Self:
        """Allow structural changes again.

        As a context manager (``with td.unlock_():``) it locks again on exit.

        Raises:
            LockedError: this collection is an entry of a locked one.

        >>> td = TensorDict(lock=True)
        >>> with td.unlock_():
        ...     td["a"] = 1
        >>> td.is_locked
        True
        """
        was = self._locked
        unlock(self)
        return undo_on_exit(self, lock if was else do_nothing)

    def __enter__(self) -> Self:
        """Start a ``with`` block; its exit undoes the operation that returned this collection."""
        undo, blocks = self._undo or (None, ())
        node: Any = self  # the kinds have the slot
        node._undo = None, (undo, *blocks)
        return self

    def __exit__(
        self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the operation that returned this collection; values written inside the block are kept.

        Raises:
            StructureError: the last operation cannot be undone.
        """
        last, (undo, *blocks) = self._undo
        self._undo = (last, (*blocks,)) if last or blocks else None
        if undo is not None:
            undo(self)
        elif kind is None:
            raise StructureError(
                f"leaving the context of a {type(self).__name__} that no undoable operation gave: "
                "use it with lock_(), unlock_(), flatten_keys(), view(), to(), to_module() and the like"
            )

    def clear_refs_for_compile_(self) -> Self:
        """Clear the references to locked collections that contain this one.

        >>> TensorDict().clear_refs_for_compile_().is_empty()
        True
        """
        inner: Any = self._inner()
        inner._lock_parents = None
        return self


def undo_on_exit(node: NodeT, undo: Undo) -> NodeT:
    """Set the function that ``with node:`` calls on exit, and return the node."""
    node._undo = undo, node._undo[1] if node._undo else ()
    return node


def write_back_on_exit(node: NodeT, owner: Core, write: Callable[..., None], *args: object) -> NodeT:
    """Make ``with node:`` call ``write(owner, node, *args)`` on exit, and return ``node``."""
    # Keep a weak reference, so that a chain of results does not keep the first one alive.
    node._undo = partial(_write_into, weakref.ref(owner), write, args), node._undo[1] if node._undo else ()
    return node
