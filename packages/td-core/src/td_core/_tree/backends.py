"""Storage backends: objects that a sibling attaches to a node to speed up operations on the whole tree.

``node._backends`` maps names of siblings to attached objects; unlocking the node removes them. Core calls a
:class:`StorageBackend` among them before the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .node import Core
from .packed import pack_root

NodeT = TypeVar("NodeT", bound=Core)


class StorageBackend:
    """Fast implementations of operations on a whole tree. A method returns None to request the general implementation.

    >>> StorageBackend().move(None, torch.device("cpu"), False) is None
    True
    """

    __slots__ = ()

    @staticmethod
    def pack(node: NodeT, storage: Tensor) -> NodeT:
        """Record that all leaves of ``node`` may be views of ``storage``, a vector of bytes; return ``node``.

        This is checked at each use. Operations in place then run one kernel for each run of leaves of one dtype.
        """
        return pack_root(node, storage)

    def clone(self, node: NodeT) -> NodeT | None:
        """Return an unlocked copy of ``node``."""

    def move(self, node: NodeT, device: torch.device, non_blocking: bool | None) -> NodeT | None:
        """Return ``node`` on another device."""

    def pin(self, node: NodeT) -> NodeT | None:
        """Return ``node`` in pinned memory."""

    def write(
        self,
        node: Core,
        source: Core,
        targets: Sequence[Tensor],
        values: Sequence[Tensor],
        non_blocking: bool,
    ) -> bool | None:
        """Copy ``values``, the leaves of ``source``, into ``targets``, the leaves of ``node``. Return True on success."""

    def reduce(
        self, node: Core, protocol: int, encode: Callable[[], tuple[object, ...]]
    ) -> tuple[Any, ...] | None:
        """Return the result of ``node.__reduce_ex__(protocol)``.

        ``encode()`` returns the arguments with which :func:`td_core.pickles.rebuild_collection` rebuilds the node.
        """

    def get_folder(self, node: Core) -> str | None:
        """Return the directory whose files currently hold the leaves of ``node``."""


class Keeper:
    """Store of the Python values of a node outside of memory, such as a file. Nodes that share values share a keeper.

    >>> Keeper().reload(None) is None
    True
    """

    __slots__ = ()

    def reload(self, node: Core, *, writes: bool = False) -> Core | None:
        """Return a node with the values that another process has written, or None if ``node`` is up to date.

        ``writes`` is True before a write, which must not overwrite values of other processes.
        """

    def read_again(self, node: Core) -> Core | None:
        """Return a node with the values that are stored now, or ``node`` if they are those that were read last.

        None means that this store cannot read them again.
        """
        return None

    def check(self, node: Core, values: Sequence[object]) -> None:
        """Raise an error if the values of ``node`` cannot be stored here."""

    def lock(self, node: Core) -> AbstractContextManager[object]:
        """Return a context manager that excludes writes of other processes."""
        return nullcontext()

    def write_rows(
        self,
        node: Core,
        places: Sequence[int],
        values: Sequence[object],
        separate: Sequence[bool] | None = None,
    ) -> bool:
        """Store only the values at ``places`` of a node with one value per element, or return False for :meth:`write`.

        ``separate`` is True for a value that was not the one value of a node; None if none is.
        """
        return False

    def write(self, node: Core) -> None:
        """Store the values of ``node``."""

    def of_each(self) -> Keeper:
        """Return the keeper to use when one value for the batch is replaced by one value per batch element."""
        return self

    def of_part(self) -> Keeper:
        """Return the keeper for a part of the batch of a node that holds one value for the batch."""
        return self


def get_backends(node: Core) -> Sequence[StorageBackend]:
    """Return the storage backends that are attached to a collection."""
    held = node._inner()._backends
    return [item for item in held.values() if isinstance(item, StorageBackend)] if held else ()
