"""Leaves whose elements are in a store: their base class, and what a tree does with them.

td-store has the class of such leaves, and td-core never imports it: the first class that derives from the base registers itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .._plans.index import IndexPlan
from .._torch.kernels import PLAIN
from .._torch.private import forbid_data_pointer, make_tracing_error, make_wrapper
from ..typing import Source
from .coerce import WRAPPED
from .node import Core

if TYPE_CHECKING:
    from typing_extensions import Self

#: The first class of stored leaves, once it is defined; empty in programs without them, where hot paths test no leaf.
STORED: list[type[StoredLeaf]] = []


class StoredLeaf(Tensor):
    """Base of the tensors whose elements are in a store. The first class that derives from it reads the leaves of a tree.

    >>> issubclass(StoredLeaf, torch.Tensor), is_stored(torch.ones(2))
    (True, False)
    """

    source: Source

    def __init_subclass__(cls) -> None:
        """Register the first subclass, and note one that is also of a class with a coercer, such as UnbatchedTensor."""
        if not STORED:
            STORED.append(cls)
        if not WRAPPED.isdisjoint(cls.__mro__):
            WRAPPED.add(cls)

    @classmethod
    def _like(cls, twin: Tensor, device: torch.device) -> Self:
        """Return a tensor with the geometry of a meta tensor, and without memory."""
        # An inference tensor could not be a view of a tensor from outside of inference mode.
        with torch.inference_mode(False):
            self: Self = make_wrapper(
                cls,
                twin.shape,
                strides=twin.stride(),
                storage_offset=twin.storage_offset(),
                dtype=twin.dtype,
                device=device,
            )
        forbid_data_pointer(self)
        return self

    @staticmethod
    def _as_memory(leaves: Sequence[object]) -> list[Tensor]:
        """Return the leaves with those in a store read, each of them once; autograd records the reads."""
        raise NotImplementedError

    @staticmethod
    def _index_together(node: Core, plan: IndexPlan) -> object:
        """Apply an index plan with positions to a node, and read the rows of all stored leaves together."""
        raise NotImplementedError

    @staticmethod
    def _find_row_blocks(count: int, leaves: Iterable[Tensor]) -> list[range]:
        """Return consecutive ranges of ``count`` rows, which end where a chunk of every leaf with chunks ends."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> NoReturn:
        """Raise an error: torch.compile calls this to trace an input."""
        raise make_tracing_error(
            "a stored tensor cannot be traced by torch.compile: clone() it, or the collection, before the compiled function"
        )

    @staticmethod
    def __tensor_unflatten__(*parts: object) -> NoReturn:
        """Do nothing: torch looks for this method before it calls ``__tensor_flatten__``."""
        raise NotImplementedError


def is_stored(leaf: object) -> bool:
    """Return True for a :class:`~td_core.StoredTensor`.

    >>> is_stored(torch.zeros(2))
    False
    """
    return bool(STORED) and isinstance(leaf, StoredLeaf)


def find_refusal(leaf: Any) -> str | None:
    """Return the reason why the store of a leaf refuses writes; None if it accepts them, or if the leaf is in memory."""
    return getattr(leaf.source, "refusal", None) if is_stored(leaf) else None


def as_memory(leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves, with stored tensors read into memory, each of them once.

    >>> as_memory([torch.tensor(1)])
    [tensor(1)]
    """
    return STORED[0]._as_memory(leaves) if STORED and not PLAIN.issuperset(map(type, leaves)) else leaves


def index_leaves(node: Core, plan: IndexPlan) -> object:
    """Apply an index plan to a node; read its stored tensors together."""
    return STORED[0]._index_together(node, plan) if STORED and not plan.is_view else node._transform(plan)


def list_row_blocks(count: int, leaves: list[Tensor]) -> list[range]:
    """Return consecutive ranges of ``count`` rows, which end where a chunk of every stored leaf with chunks ends."""
    if not STORED:
        return [range(count)] if count else []
    return STORED[0]._find_row_blocks(count, leaves)
