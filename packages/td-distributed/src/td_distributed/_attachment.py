"""What consolidation attaches to a collection: its storage, and what one storage makes faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core import decode, encode
from td_core._attachments import Attachment
from td_core._buffers import Leaves
from td_core._nodes import Encoded
from td_core._ops.moving import relabel
from td_core.errors import StructureError

from . import _storage
from ._storage import Layout, Leaf, Span

KEY = "consolidated"
#: Of the spans of all leaves: dtypes, shapes, first bytes; (number of spans, ragged dim) of each jagged leaf by position.
Columns = tuple[list[torch.dtype], list[tuple[int, ...]], list[int], dict[int, tuple[int, int]]]


class Consolidated(Attachment):
    """The storage of a consolidated collection.

    Where the leaves lie is looked up when it is asked for, and what was found is checked before it is used again.

    Args:
        storage: one vector of bytes.
        filename: the file behind it, if there is one.

    Attributes:
        planned: a layout, and whether it is the one that :func:`_storage.plan` gives.
        sent: the last message that announced it.
        received: the last message that had its structure and its layout, with that layout and the nodes.
    """

    __slots__ = ("_columns", "_known", "filename", "planned", "received", "sent", "storage")

    def __init__(self, storage: Tensor, filename: Path | None = None) -> None:
        self.storage = storage
        self.filename = filename
        self.sent: Any = None
        self.received: tuple[Any, Layout, list[dict[str, Any]]] | None = None
        self.planned: tuple[Layout, bool] | None = None
        # leaves, (address, shape) of each, where they lie
        self._known: tuple[list[Tensor], list[tuple[int, torch.Size]], Layout] = [], [], Layout([], 0)
        self._columns: tuple[Layout, Columns] | None = None

    def layout(self, encoded: Encoded) -> Layout | None:
        """Return where the leaves of the collection lie in the storage; None if one of them does not."""
        leaves, places, layout = self._known
        if len(leaves) == len(encoded.leaves):
            for leaf, known, (address, shape) in zip(encoded.leaves, leaves, places):
                if (
                    leaf is not known
                    or leaf.data_ptr() != address
                    or leaf.shape != shape
                    or not leaf.is_contiguous()
                ):
                    break
            else:
                return layout
        found = self._look(encoded.leaves)
        if found is not None and all(leaf.ragged_idx is None for leaf in found.leaves):
            self._known = encoded.leaves, [(leaf.data_ptr(), leaf.shape) for leaf in encoded.leaves], found
        return found

    def _look(self, leaves: list[Tensor]) -> Layout | None:
        base, size = self.storage.data_ptr(), len(self.storage)
        found = []
        for leaf in leaves:
            if leaf.device != self.storage.device:
                return None
            pieces, ragged = _storage.pieces_of(leaf)
            spans = []
            for piece in pieces:
                nbytes = piece.numel() * piece.itemsize
                start = piece.data_ptr() - base if nbytes else 0
                if start < 0 or start + nbytes > size or not piece.is_contiguous() or piece.is_conj():
                    return None
                spans.append(Span(piece.dtype, piece.shape, start, start + nbytes, 0))
            found.append(Leaf(tuple(spans), ragged))
        return Layout(found, size)

    def _on(self, storage: Tensor, encoded: Encoded, layout: Layout) -> Any:
        """Return the collection with its leaves on another storage of the same layout."""
        views = _storage.Views(storage)
        result = decode(Encoded(encoded.nodes, views.leaves(layout), encoded.values))
        return result if views.copied else attach(result, Consolidated(storage))

    def _elsewhere(self, node: Any, move: Any) -> Any:
        encoded = encode(node)
        if any(leaf.requires_grad for leaf in encoded.leaves):
            return None
        layout = self.layout(encoded)
        return None if layout is None else self._on(move(self.storage), encoded, layout)

    def cloned(self, node: Any) -> Any:
        """Return an unlocked copy of ``node``; in the memory of the host one call for each leaf is as fast."""
        if self.storage.device.type == "cpu":
            return None
        result = self._elsewhere(node, torch.clone)
        return result if result is None else result.unlock_()

    def moved(self, node: Any, device: torch.device, non_blocking: bool | None) -> Any:
        """Return ``node`` on another device, with one copy."""
        result = self._elsewhere(node, lambda storage: storage.to(device, non_blocking=bool(non_blocking)))
        if result is not None:
            relabel(result, device)
        return result

    def pinned(self, node: Any) -> Any:
        """Return ``node`` in pinned memory, with one copy."""
        return self._elsewhere(node, Tensor.pin_memory)

    def written(
        self, node: Any, source: Any, targets: Sequence[Tensor], values: Sequence[Tensor], non_blocking: bool
    ) -> bool | None:
        """Copy the storage of ``source`` if its leaves lie in it as ours do; between host memory it saves nothing."""
        other = attached(source)
        if other is None or len(other.storage) != len(self.storage):
            return None
        if self.storage.device.type == "cpu" and other.storage.device.type == "cpu":
            return None
        mine, theirs = self.storage.data_ptr(), other.storage.data_ptr()
        every: list[Tensor] = []
        node._collect(every)
        if len(every) != len(targets) or any(
            one.data_ptr() - mine != two.data_ptr() - theirs or one.dtype != two.dtype or one.requires_grad
            for one, two in zip(targets, values, strict=True)
        ):
            return None
        self.storage.copy_(other.storage, non_blocking=non_blocking)
        return True

    def pickled(
        self, node: Any, encoded: Encoded, classes: tuple[type, ...], protocol: int
    ) -> tuple[Any, ...] | None:
        """Return ``node`` as its structure and one buffer."""
        layout = None if any(leaf.requires_grad for leaf in encoded.leaves) else self.layout(encoded)
        if layout is None:
            return None
        storage: Any = Leaves([self.storage], in_place=True) if protocol > 2 else [self.storage]
        if self._columns is None or self._columns[0] is not layout:
            self._columns = layout, _columns(layout)
        return rebuild, (encoded.nodes, self._columns[1], storage, encoded.values, classes)


def _columns(layout: Layout) -> Columns:
    spans = [span for leaf in layout.leaves for span in leaf.spans]
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # a pickle holds an object once
    return (
        [span.dtype for span in spans],
        [shapes.setdefault(shape, shape) for shape in (tuple(span.shape) for span in spans)],
        [span.start for span in spans],
        {i: (len(leaf.spans), leaf.ragged_idx) for i, leaf in enumerate(layout.leaves) if leaf.ragged_idx},
    )


def rebuild(
    nodes: list[dict[str, Any]],
    columns: Columns,
    storage: Leaves | list[Tensor],
    values: list[Any],
    classes: tuple[type, ...],
) -> Any:
    """Return the consolidated collection that :meth:`Consolidated.pickled` took apart."""
    (data,) = storage.tensors if isinstance(storage, Leaves) else storage
    *spans_of, jagged = columns
    spans = (
        Span(dtype, shape, start, start + math.prod(shape) * dtype.itemsize, 0)
        for dtype, shape, start in zip(*spans_of, strict=True)
    )
    leaves: list[Leaf] = []
    for span in spans:
        count, ragged = jagged.get(len(leaves), (1, None))
        leaves.append(Leaf((span, *islice(spans, count - 1)), ragged))
    views = _storage.Views(data)
    result = decode(Encoded(nodes, views.leaves(Layout(leaves, len(data))), values))
    return result if views.copied else attach(result, Consolidated(data))


torch.serialization.add_safe_globals([rebuild])


def attach(collection: Any, state: Consolidated) -> Any:
    """Lock a collection around its storage and return it."""
    collection.lock_()
    node = collection._inner()
    node._attachments = {**(node._attachments or {}), KEY: state}
    return collection


def attached(collection: Any) -> Consolidated | None:
    """Return what consolidation attached to a collection, if it still holds."""
    found: Consolidated | None = (collection._inner()._attachments or {}).get(KEY)
    return found


def storage_of(collection: Any) -> Tensor:
    """Return the storage of a consolidated collection: one vector of bytes, on which all its leaves are views.

    Raises:
        StructureError: the collection is not consolidated.

    >>> from td_core import TensorDict
    >>> storage_of(TensorDict({"a": torch.zeros(3)}).consolidate()).shape
    torch.Size([16])
    """
    state = attached(collection)
    if state is None:
        raise StructureError(
            f"this {type(collection).__name__} is not consolidated: call consolidate() first"
        )
    return state.storage
