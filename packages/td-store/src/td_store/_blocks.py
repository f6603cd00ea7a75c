"""Locate the elements of a strided view in the array that it is a view of, as one block of rows and columns.

A stored array has no memory, but its views have the sizes, strides and offset that they would have in C-contiguous
memory, so torch computes them. This module converts them back to slices of the array's dims: the block that a view needs.

>>> find_block((10, 6), (2, 6), (12, 1), 6)  # x[1:4:2]
Block(part=(slice(1, 4, 2), slice(0, 6, 1)), places=((0, 1), (1, 1)), offset=0, is_exact=True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from td_core.spi import StoredLeaf, is_stored

from ._modes import unwrap


class Block(NamedTuple):
    """The part of an array that contains a view.

    Attributes:
        part: one slice per dim of the array, with a start, a stop and a step of at least 1.
        places: per dim of the view, a dim of the array, and the number of elements of the block along it that one step takes.
        offset: position of the view's first element in the block.
        is_exact: True if every element of the block is exactly one element of the view.
    """

    part: tuple[slice, ...]
    places: tuple[tuple[int, int], ...]
    offset: int
    is_exact: bool

    def view(self, memory: Tensor, size: Sequence[int]) -> Tensor:
        """Return the view of this block, given the block's elements as contiguous memory."""
        strides, first = get_strides(memory.shape), int(memory.storage_offset()) + self.offset
        return memory.as_strided(size, [strides[dim] * n if n else 0 for dim, n in self.places], first)


def count(positions: slice) -> int:
    """Return the number of positions in a slice of a block."""
    return len(range(positions.start, positions.stop, positions.step))


def get_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def find_block(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Block:
    """Find the smallest block of slices with all elements of a non-empty view of an array."""
    strides = get_strides(shape)
    starts = [offset // step % n for step, n in zip(strides, shape)]
    slices = [slice(start, start + 1, 1) for start in starts]
    places = [(0, 0)] * len(size)
    used: dict[
        int, tuple[int, int]
    ] = {}  # dim of the array -> step of the view along it, number of positions
    for k in sorted(range(len(size)), key=stride.__getitem__):
        if size[k] == 1 or stride[k] == 0:
            continue
        dim = next(dim for dim, step in enumerate(strides) if step <= stride[k] and shape[dim] > 1)
        unit, rest = divmod(stride[k], strides[dim])
        step, number = used.get(dim, (unit, 1))
        # Two dims of a view can share a dim of the array only if they split it: one step of the outer is all of the inner.
        if rest or unit != step * number:
            return _find_rows(shape, size, stride, offset)
        places[k] = dim, unit // step
        number *= size[k]
        while starts[dim] + (number - 1) * step >= shape[dim]:
            # The view goes on in the next row: it must use the dim from end to end in even steps.
            inner = -(-(shape[dim] - starts[dim]) // step)
            outer = next((d for d in range(dim - 1, -1, -1) if shape[d] > 1), -1)
            if inner * step != shape[dim] or number % inner or outer < 0 or outer in used or dim in used:
                return _find_rows(shape, size, stride, offset)
            used[dim] = step, inner
            slices[dim] = slice(starts[dim], shape[dim], step)
            dim, step, number = outer, 1, number // inner
        used[dim] = step, number
        slices[dim] = slice(starts[dim], starts[dim] + (number - 1) * step + 1, step)
    is_exact = all(n <= 1 or step for n, step in zip(size, stride))
    return Block(tuple(slices), tuple(places), 0, is_exact)


def _find_rows(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Block:
    """Return the rows of the first dim between the first and the last element of a view."""
    row = math.prod(shape[1:])
    first, last = offset // row, (offset + sum((n - 1) * step for n, step in zip(size, stride))) // row
    part = (slice(first, last + 1, 1), *(slice(0, n, 1) for n in shape[1:]))
    return Block(part, tuple((len(shape) - 1, step) for step in stride), offset - first * row, False)


def find_row_blocks(count: int, leaves: Iterable[Any]) -> list[range]:
    """Return consecutive ranges of ``count`` rows, which end where a chunk of every leaf with chunks ends."""
    edges: set[int] | None = None
    for leaf in leaves:
        chunks = getattr(unwrap(leaf.source), "chunks", None) if is_stored(leaf) else None
        # A leaf of a member has no dim for the stack dim of a lazy stack, and so no part in rows along that.
        if chunks is not None and leaf.numel() and leaf.shape[:1] == (count,):
            found = _find_edges(leaf, chunks)
            edges = found if edges is None else edges & found
    bounds = [0, *sorted(edges or ()), count] if count else []
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _find_edges(view: StoredLeaf, chunks: Sequence[int | Sequence[int]]) -> set[int]:
    """Return the rows of a view that are the first ones of a chunk, except the first row of all."""
    block = find_block(view.source.shape, view.shape, view.stride(), int(view.storage_offset()))
    if not block.is_exact or len(view) < 2:
        return set()
    dim, steps = block.places[0]
    start, step, size = block.part[dim].start, block.part[dim].step * steps, chunks[dim]
    last = start + (len(view) - 1) * step
    if isinstance(size, int):
        edges: Iterable[int] = (number * size for number in range(start // size + 1, last // size + 1))
    else:
        edges = (edge for edge in accumulate(size) if start < edge <= last)
    return {-(-(edge - start) // step) for edge in edges}
