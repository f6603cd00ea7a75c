"""What a sibling keeps beside a collection, and how it makes operations on the whole of it faster.

``node._attachments`` is a dict until the node is unlocked. What stands in it under a sibling's name may be an
:class:`Attachment`; core asks it before it takes the general way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._collection import Core

__all__ = ["Attachment", "attachments"]


class Attachment:
    """Shortcuts through an operation, given by a sibling; each that returns something returns None for the general way.

    >>> Attachment().moved(None, torch.device("cpu"), False) is None
    True
    """

    __slots__ = ()

    def cloned(self, node: Core) -> Core | None:
        """Return an unlocked copy of ``node``."""

    def moved(self, node: Core, device: torch.device, non_blocking: bool | None) -> Core | None:
        """Return ``node`` on another device."""

    def pinned(self, node: Core) -> Core | None:
        """Return ``node`` in pinned memory."""

    def written(
        self,
        node: Core,
        source: Core,
        targets: Sequence[Tensor],
        values: Sequence[Tensor],
        non_blocking: bool,
    ) -> bool | None:
        """Copy ``values``, the leaves of ``source``, into ``targets``, leaves of ``node``; True if it was done."""

    def pickled(self, node: Core, protocol: int) -> tuple[Any, ...] | None:
        """Return ``node`` as ``__reduce_ex__`` does."""

    def files(self, node: Core) -> str | None:
        """Return the folder whose files hold the leaves of ``node`` as they are."""

    def changed(self, node: Core) -> None:
        """Take notice that a value of ``node``, not a leaf, was written in place."""

    def current(self, node: Core) -> Core | None:
        """Return a node with the values that another process wrote to ``node`` in place; None where there are none."""


def attachments(node: Core) -> Sequence[Attachment]:
    """Return what siblings attached to a collection and can take part.

    >>> attachments(TensorDict())
    ()
    """
    held = node._inner()._attachments
    return [each for each in held.values() if isinstance(each, Attachment)] if held else ()
