"""Steps: the data that shape plans consist of.

A step applies a primitive to neighbouring dims and leaves the other dims unchanged. A primitive computes three things from
the sizes of its dims: those of the result (``resize``), what becomes of a stack dim among them (``along``), and where
the elements of the result come from (``gather``). Names, lazy stacks and values follow from these for every operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.private import break_graph
from ..errors import CollectionIndexError

Shape = tuple[int, ...]
#: The source position of each element of a result, in C order, -1 for padding; and the size of the result.
GatherMap = tuple[Sequence[int], Shape]


class Along(NamedTuple):
    """What becomes of a stack dim.

    Attributes:
        picks: positions of the members in the result, in order; None: all members. An int: the result is that
            member, no longer a stack. For an operation with several results, a sequence with one of these per result.
        plan: what is applied to each member: a plan, or the primitive of a step; None: members are unchanged.
        stack_dim: the new stack dim, for a primitive counted from the first dim of the step; None where ``picks`` is an int.
    """

    picks: Any
    plan: Any
    stack_dim: int | None


class Primitive:
    """Base of the primitives. The defaults are those of one that needs its dims whole."""

    __slots__: tuple[str, ...] = ()

    def resize(self, sizes: Shape) -> Shape:
        """Compute the sizes of the result."""
        raise NotImplementedError

    def rename(self, sources: list[int | None], count: int) -> list[int | None]:
        """Return, per dim of the result, the item of ``sources`` whose name it keeps; here all of them if no dim is new."""
        return sources if len(sources) == count else [None] * count

    def along(self, offset: int, sizes: Shape) -> Along | None:
        """Return what becomes of a stack dim at ``offset``; None if the members must be stacked first."""
        return None

    def gather(self, sizes: Shape) -> Sequence[int] | None:
        """Return the source position of each element, as if there were no other dims; None if only torch knows it."""
        return None

    def list_parts(self, sizes: Shape) -> Sequence[Primitive]:
        """Return a primitive per result."""
        return [self]

    def __repr__(self) -> str:
        names = [name for cls in reversed(type(self).__mro__) for name in getattr(cls, "__slots__", ())]
        return f"{type(self).__name__}({', '.join(repr(getattr(self, name)) for name in names)})"


class Whole(Primitive):
    """Compute elements of ``sizes`` from all elements of the dims. Dims keep their names if their number is the same."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Shape) -> None:
        self.sizes = sizes

    def resize(self, sizes: Shape) -> Shape:
        return self.sizes


class Reshape(Whole):
    """Replace the dims by dims of ``sizes``, and keep the order of the elements."""

    __slots__ = ()

    def rename(self, sources: list[int | None], count: int) -> list[int | None]:
        return [None] * count

    def along(self, offset: int, sizes: Shape) -> Along | None:
        new, outer, inner = self.sizes, prod(sizes[:offset]), prod(sizes[offset + 1 :])
        for place, size in enumerate(new):
            if size == sizes[offset] and prod(new[:place]) == outer and prod(new[place + 1 :]) == inner:
                rest = remove_size(new, place)
                return Along(None, None if rest == remove_size(sizes, offset) else Reshape(rest), place)
        return None

    def gather(self, sizes: Shape) -> Sequence[int]:
        return range(prod(sizes))


class Permute(Primitive):
    """Reorder the dims."""

    __slots__ = ("order",)

    def __init__(self, order: Shape) -> None:
        self.order = order

    def resize(self, sizes: Shape) -> Shape:
        return tuple([sizes[dim] for dim in self.order])

    def rename(self, sources: list[int | None], count: int) -> list[int | None]:
        return [sources[dim] for dim in self.order]

    def along(self, offset: int, sizes: Shape) -> Along:
        rest = tuple([dim - (dim > offset) for dim in self.order if dim != offset])
        is_sorted = rest == tuple(range(len(rest)))
        return Along(None, None if is_sorted else Permute(rest), self.order.index(offset))

    def gather(self, sizes: Shape) -> Sequence[int]:
        positions = [0]
        for dim in self.order:
            block = prod(sizes[dim + 1 :])
            positions = [start + i * block for start in positions for i in range(sizes[dim])]
        return positions


class Take(Primitive):
    """Take listed positions of one dim: a list or 1-d tensor of them; an int or 0-d tensor removes the dim.

    ``dim`` is the batch dim that the message of an error names.
    """

    __slots__ = ("positions", "dim")  # noqa: RUF023  the order of the arguments, for repr()

    def __init__(self, positions: Any, dim: int) -> None:
        self.positions = positions
        self.dim = dim

    def resize(self, sizes: Shape) -> Shape:
        positions = self.positions
        has_dim = positions.ndim if isinstance(positions, Tensor) else isinstance(positions, list)
        return (len(positions),) if has_dim else ()

    def along(self, offset: int, sizes: Shape) -> Along | None:
        picks = self.positions
        if isinstance(picks, Tensor):
            picks = read_positions(picks)
            if picks is None:
                return None
        if not isinstance(picks, list):
            picks = int(picks)
            check_range(picks, picks, sizes[offset], self.dim)
            return Along(picks, None, None)
        if picks:
            check_range(min(picks), max(picks), sizes[offset], self.dim)
        return Along(picks, None, 0)

    def gather(self, sizes: Shape) -> Sequence[int] | None:
        along = self.along(0, sizes)
        if along is None:
            return None
        return [
            position % sizes[0] for position in ([along.picks] if along.stack_dim is None else along.picks)
        ]


class Range(Primitive):
    """Take ``length`` positions of one dim by arithmetic: ``(start + i // each * step) % size`` for each ``i``."""

    __slots__ = ("start", "length", "step", "each")  # noqa: RUF023  the order of the arguments, for repr()

    def __init__(self, start: int, length: int, step: int = 1, each: int = 1) -> None:
        self.start = start
        self.length = length
        self.step = step
        self.each = each

    def resize(self, sizes: Shape) -> Shape:
        return (self.length,)

    def along(self, offset: int, sizes: Shape) -> Along:
        picks = self.gather(sizes)
        return Along(None if picks == range(sizes[0]) else picks, None, 0)

    def gather(self, sizes: Shape) -> Sequence[int]:
        start, length, step, each, size = self.start, self.length, self.step, self.each, sizes[0]
        last = start + (length - 1) * step
        if each == 1 and (length == 0 or (0 <= start < size and 0 <= last < size)):
            return range(start, start + length * step, step)
        return [(start + i // each * step) % size for i in range(length)]


class Pad(Primitive):
    """Add new elements before and after those of one dim; negative amounts remove elements."""

    __slots__ = ("before", "after")  # noqa: RUF023  the order of the arguments, for repr()

    def __init__(self, before: int, after: int) -> None:
        self.before = before
        self.after = after

    def resize(self, sizes: Shape) -> Shape:
        return (sizes[0] + self.before + self.after,)

    def gather(self, sizes: Shape) -> Sequence[int]:
        positions = [-1] * self.before + [*range(sizes[0])] + [-1] * self.after
        return positions[max(-self.before, 0) : len(positions) + min(self.after, 0)]


class Split(Primitive):
    """Split one dim into parts of ``lengths``; None: into single elements without the dim."""

    __slots__ = ("lengths",)

    def __init__(self, lengths: Sequence[int] | None) -> None:
        self.lengths = lengths

    def resize(self, sizes: Shape) -> Shape:
        return () if self.lengths is None else sizes

    def along(self, offset: int, sizes: Shape) -> Along:
        if self.lengths is None:
            return Along(range(sizes[0]), None, None)
        return Along([part.gather(sizes) for part in self.list_parts(sizes)], None, 0)

    def list_parts(self, sizes: Shape) -> Sequence[Primitive]:
        if self.lengths is None:
            return [Take(i, 0) for i in range(sizes[0])]
        ends = accumulate(self.lengths)
        return [Range(end - length, length) for length, end in zip(self.lengths, ends)]


class Step(NamedTuple):
    """A primitive that is applied to the dims from ``start`` to ``stop``."""

    start: int
    stop: int
    primitive: Primitive

    def resize(self, size: Shape) -> Shape:
        """Compute the size of the result of a batch of ``size``."""
        start, stop, primitive = self
        return (*size[:start], *primitive.resize(size[start:stop]), *size[stop:])

    def rename(self, sources: list[int | None], size: Shape) -> list[int | None]:
        """Return, per dim of the result of a batch of ``size``, the item of ``sources`` whose name it keeps, or None."""
        start, stop, primitive = self
        new = primitive.rename(sources[start:stop], len(primitive.resize(size[start:stop])))
        return [*sources[:start], *new, *sources[stop:]]

    def along(self, stack_dim: int, size: Shape) -> Along | None:
        """Return what becomes of a stack dim of a batch of ``size``; None if the members must be stacked first."""
        start, stop, primitive = self
        if stack_dim < start:
            return Along(None, Step(start - 1, stop - 1, primitive), stack_dim)
        window = size[start:stop]
        if stack_dim >= stop:
            return Along(None, self, stack_dim + len(primitive.resize(window)) - len(window))
        inside = primitive.along(stack_dim - start, window)
        if inside is None:
            return None
        rest = None if inside.plan is None else Step(start, stop - 1, inside.plan)
        return Along(inside.picks, rest, None if inside.stack_dim is None else start + inside.stack_dim)

    def list_parts(self, size: Shape) -> list[Step]:
        """Return a step per result, for a batch of ``size``."""
        start, stop, primitive = self
        return [Step(start, stop, part) for part in primitive.list_parts(size[start:stop])]

    def locate(self, size: Shape) -> GatherMap | None:
        """Compute the gather map of this step for a batch of ``size``; None if only torch knows it."""
        before, window, behind = size[: self.start], size[self.start : self.stop], size[self.stop :]
        positions = self.primitive.gather(window)
        if positions is None:
            return None
        new = self.resize(size)
        outer, block, inner = prod(before), prod(window), prod(behind)
        if positions == range(block):
            return range(prod(size)), new
        if outer == 1 and inner == 1:
            return positions, new
        rows = [-1 if i < 0 else place * block + i for place in range(outer) for i in positions]
        if inner == 1:
            return rows, new
        if len(rows) == 1 and rows[0] >= 0:  # a range can be read as a slice, which is faster
            return range(rows[0] * inner, (rows[0] + 1) * inner), new
        return [-1 if row < 0 else row * inner + i for row in rows for i in range(inner)], new


def locate_all(steps: Sequence[Step], size: Shape) -> GatherMap | None:
    """Compute the gather map of several steps, one after the other; None if only torch knows it."""
    positions: Sequence[int] = range(prod(size))
    for step in steps:
        found = step.locate(size)
        if found is None:
            return None
        if positions == range(prod(size)):
            positions = found[0]
        elif found[0] != range(prod(size)):
            positions = [-1 if i < 0 else positions[i] for i in found[0]]
        size = found[1]
    return positions, size


def make_positions(size: Shape, device: torch.device | None) -> Tensor:
    """Return the flat position of each element of a batch, as an int64 tensor of the shape of the batch."""
    # Callers read the positions, and tensors on the meta device cannot be read.
    place = "cpu" if device is None or device.type == "meta" else device
    return torch.arange(prod(size), device=place).view(size)


def read_positions(index: Tensor) -> object:
    """Return the int or list of ints that a tensor holds; None under vmap and for fake and meta tensors."""
    # Break the graph: in a graph, members would be copied, and writes to the copies would be lost.
    if torch.compiler.is_compiling():
        break_graph(
            "which members of a lazy stack a tensor selects is not known in a graph, nor which values of a column of strings: "
            "index with a list, a range, a slice or an int; or first densify() the stack, and exclude() the key of the column "
            "or call filter_non_tensor_data()"
        )
    try:
        return index.tolist()
    except RuntimeError:
        return None


def check_range(low: int, high: int, size: int, dim: int) -> None:
    """Raise CollectionIndexError if the lowest or highest position is out of range for a batch dim of this size."""
    if low < -size or high >= size:
        raise CollectionIndexError(
            f"index {high if high >= size else low} is out of bounds for batch dim {dim} of size {size}"
        )


def remove_size(sizes: Sequence[int], dim: int) -> Shape:
    """Remove the size at ``dim`` from a shape."""
    return (*sizes[:dim], *sizes[dim + 1 :])
