"""Undo the last operation on a collection when a ``with`` block ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .._tree.node import Core, Undo
from ..errors import StructureError

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


def begin_block(node: NodeT) -> NodeT:
    """Begin a ``with`` block, whose end undoes the last operation, and return the node."""
    undo, blocks = node._undo or (None, ())
    node._undo = None, (undo, *blocks)
    return node


def end_block(node: Any, has_error: bool) -> None:
    """Undo the operation of the innermost ``with`` block; StructureError without one, except after an error."""
    last, (undo, *blocks) = node._undo
    node._undo = (last, (*blocks,)) if last or blocks else None
    if undo is not None:
        undo(node)
    elif not has_error:
        raise StructureError(
            f"leaving the context of a {type(node).__name__} that no undoable operation gave: "
            "use it with lock_(), unlock_(), flatten_keys(), view(), to(), to_module() and the like"
        )


def undo_on_exit(node: NodeT, undo: Undo) -> NodeT:
    """Set the function that ``with node:`` calls on exit, and return the node."""
    node._undo = undo, node._undo[1] if node._undo else ()
    return node


def write_back_on_exit(node: NodeT, owner: Core, write: Callable[..., None], *args: object) -> NodeT:
    """Make ``with node:`` call ``write(owner, node, *args)`` on exit, and return ``node``."""
    # Keep a weak reference, so that a chain of results does not keep the first one alive.
    node._undo = partial(_write_into, weakref.ref(owner), write, args), node._undo[1] if node._undo else ()
    return node
