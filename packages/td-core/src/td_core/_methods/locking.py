"""Methods ``lock_`` and ``unlock_``, and the ``with`` block that undoes the last operation."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._functions.locking import begin_block, do_nothing, end_block, undo_on_exit
from .._tree.locks import lock, unlock
from .._tree.node import Core

if TYPE_CHECKING:
    from typing_extensions import Self


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
        return begin_block(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the operation that returned this collection; values written inside the block are kept.

        Raises:
            StructureError: the last operation cannot be undone.
        """
        end_block(self, kind is not None)

    def clear_refs_for_compile_(self) -> Self:
        """Clear the references to locked collections that contain this one.

        >>> TensorDict().clear_refs_for_compile_().is_empty()
        True
        """
        inner: Any = self._inner()
        inner._lock_parents = None
        return self
