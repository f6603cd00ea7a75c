"""Locking, and undoing the last operation when a ``with`` block ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from .._collection import Core
from .._locking import lock, unlock
from ..errors import StructureError

SelfT = TypeVar("SelfT", bound="LockMixin")


def do_nothing(node: Core) -> None:
    """Undo an operation that changed nothing."""


#: By the id of a collection: what the contexts that it has entered undo. A ``with`` keeps it alive.
_entered: dict[int, list[Callable[[Any], Any] | None]] = {}


def _write_into(
    source: weakref.ref[Any], write: Callable[..., None], args: tuple[Any, ...], result: Any
) -> None:
    """Write a result into the collection that it was taken from.

    Raises:
        StructureError: that is gone.
    """
    owner = source()
    if owner is None:
        raise StructureError(
            f"cannot write back what the context wrote: the collection that this {type(result).__name__} was taken "
            "from is gone; keep it in a variable, and open one context for each operation of a chain"
        )
    write(owner, result, *args)


class LockMixin(Core):
    """``lock_``, ``unlock_`` and the context that undoes the operation which gave a collection."""

    __slots__ = ()

    @property
    def is_locked(self) -> bool:
        """Whether structural changes are refused, in a lazy stack those of every member; settable.

        >>> TensorDict(lock=True).is_locked
        True
        """
        return self._inner()._is_fully_locked()

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self: SelfT) -> SelfT:
        """Refuse structural changes from now on, here and in sub-collections; in-place writes stay legal.

        As a context (``with td.lock_():``) it unlocks on exit.

        >>> td = TensorDict({"a": 1}).lock_()
        >>> td["b"] = 2
        Traceback (most recent call last):
        td_core.errors.LockedError: cannot set key 'b': the TensorDict is locked; ...
        """
        was = self._locked
        lock(self)
        self._undo = do_nothing if was else unlock
        return self

    def unlock_(self: SelfT) -> SelfT:
        """Allow structural changes again.

        As a context (``with td.unlock_():``) it locks again on exit.

        Raises:
            LockedError: a locked collection holds this one.

        >>> td = TensorDict(lock=True)
        >>> with td.unlock_():
        ...     td["a"] = 1
        >>> td.is_locked
        True
        """
        was = self._locked
        unlock(self)
        self._undo = lock if was else do_nothing
        return self

    def _undo_on_exit(self: SelfT, undo: Callable[[Any], Any]) -> SelfT:
        """Remember what ``with self:`` does on exit; called on the fresh result of an operation."""
        self._undo = undo
        return self

    def _write_back_on_exit(self: SelfT, owner: Core, write: Callable[..., None], *args: Any) -> SelfT:
        """Remember that ``with self:`` ends with ``write(owner, self, *args)``; called on what was taken from ``owner``."""
        # Weakly: a chain of results must not keep its first one alive.
        self._undo = partial(_write_into, weakref.ref(owner), write, args)
        return self

    def __enter__(self: SelfT) -> SelfT:
        """Enter the context in which the operation that gave this collection holds."""
        if not torch.compiler.is_compiling():
            _entered.setdefault(id(self), []).append(self._undo)
            self._undo = None
        return self

    def __exit__(
        self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the operation that gave this collection; what was written into it is kept.

        Raises:
            StructureError: the last operation cannot be undone.
        """
        undos = None if torch.compiler.is_compiling() else _entered.get(id(self))
        if undos is None:
            undo, self._undo = self._undo, None
        else:
            undo = undos.pop()
            if not undos:
                del _entered[id(self)]
        if undo is not None:
            undo(self)
        elif kind is None:
            raise StructureError(
                f"leaving the context of a {type(self).__name__} that no undoable operation gave: "
                "use it with lock_(), unlock_(), flatten_keys(), view(), to(), to_module() and the like"
            )

    def clear_refs_for_compile_(self: SelfT) -> SelfT:
        """Forget which locked collections hold this one.

        >>> TensorDict().clear_refs_for_compile_().is_empty()
        True
        """
        inner: Any = self._inner()
        inner._lock_parents = None
        return self
