"""What a sibling keeps beside a collection, and how it makes operations on the whole of it faster.

``node._backends`` is a dict until the node is unlocked. What stands in it under a sibling's name may be an
:class:`StorageBackend`; core asks it before it takes the general way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ._collection import Core

__all__ = ["StorageBackend", "Keeper", "get_backends"]


class StorageBackend:
    """Shortcuts through an operation, given by a sibling; each that returns something returns None for the general way.

    >>> StorageBackend().move(None, torch.device("cpu"), False) is None
    True
    """

    __slots__ = ()

    def clone(self, node: Core) -> Core | None:
        """Return an unlocked copy of ``node``."""

    def move(self, node: Core, device: torch.device, non_blocking: bool | None) -> Core | None:
        """Return ``node`` on another device."""

    def pin(self, node: Core) -> Core | None:
        """Return ``node`` in pinned memory."""

    def write(
        self,
        node: Core,
        source: Core,
        targets: Sequence[Tensor],
        values: Sequence[Tensor],
        non_blocking: bool,
    ) -> bool | None:
        """Copy ``values``, the leaves of ``source``, into ``targets``, leaves of ``node``; True if it was done."""

    def reduce(self, node: Core, protocol: int) -> tuple[Any, ...] | None:
        """Return ``node`` as ``__reduce_ex__`` does."""

    def get_folder(self, node: Core) -> str | None:
        """Return the folder whose files hold the leaves of ``node`` as they are."""


class Keeper:
    """Where a sibling keeps the values of a node beside its memory; all nodes that show these values share it.

    >>> Keeper().reload(None) is None
    True
    """

    __slots__ = ()

    def reload(self, node: Core, *, writes: bool = False) -> Core | None:
        """Return a node with the values that another process wrote meanwhile; None where ``node`` has them.

        One who is to write values needs those of others in any case, which would be overwritten.
        """

    def check(self, node: Core, values: Sequence[Any]) -> None:
        """Raise where these values cannot be written there, for ``node``."""

    def lock(self, node: Core) -> AbstractContextManager[Any]:
        """Keep others from writing meanwhile."""
        return nullcontext()

    def write(self, node: Core) -> None:
        """Write the values of ``node``."""

    def of_each(self) -> Keeper:
        """Return what keeps one value for each element in the place of the one for the whole batch."""
        return self

    def of_part(self) -> Keeper:
        """Return what keeps the value of a part of the batch that a node of one value stands for."""
        return self


def get_backends(node: Core) -> Sequence[StorageBackend]:
    """Return what siblings attached to a collection and can take part.

    >>> get_backends(TensorDict())
    ()
    """
    held = node._inner()._backends
    return [item for item in held.values() if isinstance(item, StorageBackend)] if held else ()
