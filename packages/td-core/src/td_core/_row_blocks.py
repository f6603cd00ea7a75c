"""Split the rows of stored leaves where their chunks end, for samplers that read each chunk once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from ._stored import StoredTensor
from ._stored_blocks import find_block
from ._stored_modes import unwrap

__all__ = ["find_row_blocks"]


def find_row_blocks(count: int, leaves: Iterable[Any]) -> list[range]:
    """Return consecutive ranges of ``count`` rows, which end where a chunk of every leaf with chunks ends."""
    edges: set[int] | None = None
    for leaf in leaves:
        chunks = getattr(unwrap(leaf.source), "chunks", None) if isinstance(leaf, StoredTensor) else None
        # A leaf of a member has no dim for the stack dim of a lazy stack, and so no part in rows along that.
        if chunks is not None and leaf.numel() and leaf.shape[:1] == (count,):
            found = _find_edges(leaf, chunks)
            edges = found if edges is None else edges & found
    bounds = [0, *sorted(edges or ()), count] if count else []
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _find_edges(view: StoredTensor, chunks: tuple[int, ...]) -> set[int]:
    """Return the rows of a view that are the first ones of a chunk, except the first row of all."""
    block = find_block(view.source.shape, view.shape, view.stride(), int(view.storage_offset()))
    if not block.is_exact or len(view) < 2:
        return set()
    dim, steps = block.places[0]
    start, step, size = block.part[dim].start, block.part[dim].step * steps, chunks[dim]
    last = start + (len(view) - 1) * step
    return {-(-(number * size - start) // step) for number in range(start // size + 1, last // size + 1)}
