"""What a node of a mapped collection knows of its save, and how it keeps the save up to date."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from td_core._attachments import Attachment
from td_core._collection import Core

from . import _names
from ._fs import Tree
from ._plan import plan_values

__all__ = ["ATTACHMENT", "Saved"]

#: Where a mapped collection keeps its :class:`Saved`.
ATTACHMENT = "memmap"


@dataclass(frozen=True, slots=True)
class Saved(Attachment):
    """What a node of a mapped collection knows of its save.

    Attributes:
        path: its directory; None for anonymous files.
        robust_key: whether keys are encoded as file names there.
        allow_pickle: whether values may be pickled, as when it was saved.
        above: batch size of the level above.
    """

    path: str | None
    robust_key: bool = True
    allow_pickle: bool = False
    above: torch.Size = torch.Size()

    def changed(self, node: Core) -> None:
        """Write the values of a node to its save, those that describe them last, in one step.

        Raises:
            CodecError: a value cannot be stored; the save is as before.
        """
        if self.path is None:
            return
        texts: dict[str, Any] = plan_values(node, self.above, allow_pickle=self.allow_pickle)
        with Tree.at_path(self.path) as tree:
            meta = texts.pop(_names.META)
            for name, content in texts.items():
                tree.replace((), name, content)
            tree.replace((), _names.META, meta)
            for name in (_names.PICKLE, _names.STACK_PICKLE, _names.JSON_TYPES, _names.VALUES):
                if name not in texts:
                    tree.remove((), name)
