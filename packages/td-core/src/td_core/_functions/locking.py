"""Lock collections, and undo the last operation when a ``with`` block ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

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


def undo_on_exit(node: NodeT, undo: Undo) -> NodeT:
    """Set the function that ``with node:`` calls on exit, and return the node."""
    node._undo = undo, node._undo[1] if node._undo else ()
    return node


def write_back_on_exit(node: NodeT, owner: Core, write: Callable[..., None], *args: object) -> NodeT:
    """Make ``with node:`` call ``write(owner, node, *args)`` on exit, and return ``node``."""
    # Keep a weak reference, so that a chain of results does not keep the first one alive.
    node._undo = partial(_write_into, weakref.ref(owner), write, args), node._undo[1] if node._undo else ()
    return node
