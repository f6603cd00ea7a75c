"""Checkpoint: the node in which ``save`` stores a mapping, as its tensors and collections by name and its treedef."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._encode.treedefs import unflatten_checkpoint
from .._methods.collection import TensorCollection
from .._tree.node import Child, Walked
from .wrapper import Wrapper


class Checkpoint(Wrapper):
    """A collection of the tensors of a checkpoint, with their places; results of operations are without them."""

    def __init__(self, entries: TensorCollection, treedef: object) -> None:
        self._tensordict = entries
        self.treedef = treedef

    def _set_child(self, key: str, value: Child) -> None:
        self._tensordict._set_child(key, value)

    def _unflatten(self, leaves: Sequence[Tensor], treedef: Walked = None) -> Checkpoint:
        return Checkpoint(self._tensordict._unflatten(leaves, treedef), self.treedef)

    def _shallow_copy(self) -> Checkpoint:
        return Checkpoint(self._tensordict._shallow_copy(), self.treedef)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Checkpoint:
        return Checkpoint(self._tensordict._map(fn), self.treedef)

    def _as_loaded(self) -> Any:
        # The leaves can be mapped from files, which must not change when an optimizer takes a step.
        entries = self._tensordict.clone()
        return unflatten_checkpoint(self.treedef, entries._children())
