"""Plans of the operations that repeat, reorder or select elements within the batch dims.

As in ``_shape_plans``, the functions named ``*_plan`` check the arguments and return a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._plans import Along, Shape, ShapePlan, as_int, as_ints, read_positions, remove_size, wrap_dim
from .errors import BatchSizeError, DimError


class Repeat(ShapePlan):
    """Plan that repeats the batch along its dims; additional repeats make new leading dims."""

    __slots__ = ("_batch", "_repeats")

    def __init__(self, batch: Shape, repeats: Shape) -> None:
        n = len(batch)

        def leaf(value: Tensor) -> Tensor:
            # With no ints to star, the method would be called without a size, so pass an empty tuple.
            return value.repeat(*(*repeats, *[1] * (value.ndim - n)) or ((),))

        added = len(repeats) - n
        repeated = [size * times for size, times in zip(batch, repeats[added:], strict=True)]
        super().__init__(leaf, (*repeats[:added], *repeated), n)
        self._batch = batch
        self._repeats = repeats

    def dims(self) -> tuple[int | None, ...]:
        return (*[None] * (len(self._repeats) - self.n), *range(self.n))

    def _along(self, stack_dim: int) -> Along:
        new_dim = stack_dim + len(self._repeats) - self.n
        times = self._repeats[new_dim]
        return Along(
            None if times == 1 else list(range(self._batch[stack_dim])) * times,
            Repeat(remove_size(self._batch, stack_dim), remove_size(self._repeats, new_dim)),
            new_dim,
        )


class Flip(ShapePlan):
    """Plan that reverses some dims."""

    __slots__ = ("_dims",)

    def __init__(self, batch: Shape, dims: Shape) -> None:
        super().__init__(methodcaller("flip", dims), batch, len(batch))
        self._dims = dims

    def _along(self, stack_dim: int) -> Along:
        rest = tuple(dim - (dim > stack_dim) for dim in self._dims if dim != stack_dim)
        inner = Flip(remove_size(self.lead, stack_dim), rest) if rest else None
        picks = range(self.lead[stack_dim])[::-1] if stack_dim in self._dims else None
        return Along(picks, inner, stack_dim)


class Roll(ShapePlan):
    """Plan that shifts some dims; elements that leave at one end enter at the other."""

    __slots__ = ("_dims", "_shifts")

    def __init__(self, batch: Shape, shifts: Shape, dims: Shape) -> None:
        super().__init__(methodcaller("roll", shifts, dims), batch, len(batch))
        self._shifts = shifts
        self._dims = dims

    def _along(self, stack_dim: int) -> Along:
        rest = [
            (s, d - (d > stack_dim)) for s, d in zip(self._shifts, self._dims, strict=True) if d != stack_dim
        ]
        inner = None
        if rest:
            shifts, dims = zip(*rest, strict=True)
            inner = Roll(remove_size(self.lead, stack_dim), shifts, dims)
        # torch accepts repeated dims and adds their shifts.
        shift = sum(s for s, d in zip(self._shifts, self._dims, strict=True) if d == stack_dim)
        size = self.lead[stack_dim]
        picks = [(i - shift) % size for i in range(size)] if shift else None
        return Along(picks, inner, stack_dim)


class RollFlat(ShapePlan):
    """Plan that shifts the elements as if the batch were flattened to one dim."""

    __slots__ = ("_shift",)

    def __init__(self, batch: Shape, shift: int) -> None:
        n = len(batch)

        def leaf(value: Tensor) -> Tensor:
            return (
                value.reshape(-1, *value.shape[n:]).roll(shift, 0).view(value.shape)
                if value.numel()
                else value.clone()
            )

        super().__init__(leaf, batch, n)
        self._shift = shift

    def _along(self, stack_dim: int) -> Along | None:
        return Roll(self.lead, (self._shift,), (0,)).along(stack_dim) if self.n == 1 else None


class Take(ShapePlan):
    """Plan that selects positions of one dim, as ``index_select``; ``picks`` returns the list of positions."""

    __slots__ = ("_batch", "_dim", "_method", "_picks")

    def __init__(
        self,
        batch: Shape,
        dim: int,
        size: int,
        method: Callable[[int], Callable[[Tensor], Tensor]],
        picks: Callable[[], Sequence[int] | None],
    ) -> None:
        super().__init__(method(dim), (*batch[:dim], size), dim + 1)
        self._batch = batch
        self._dim = dim
        self._method = method
        self._picks = picks

    def _along(self, stack_dim: int) -> Along | None:
        if stack_dim == self._dim:
            picks = self._picks()
            return None if picks is None else Along(picks, None, stack_dim)
        dim = self._dim - (stack_dim < self._dim)
        inner = type(self)(remove_size(self._batch, stack_dim), dim, self.lead[-1], self._method, self._picks)
        return Along(None, inner, stack_dim)


class Narrow(Take):
    """Plan that selects a contiguous range of one dim, as a view."""

    __slots__ = ()

    is_view = True


class Gather(ShapePlan):
    """Plan that selects an element of one dim per position, as :meth:`torch.Tensor.gather`."""

    __slots__ = ("index",)

    def __init__(self, batch: Shape, dim: int, index: Tensor) -> None:
        self.index = index
        n = len(batch)
        by_shape: dict[Shape, Tensor] = {}
        keeps = not torch.compiler.is_compiling()  # a graph would treat a dict key as a constant

        def leaf(value: Tensor) -> Tensor:
            shape = value.shape
            full = by_shape.get(shape) if keeps else None
            if full is None:
                full = append_dims(index, len(shape)).expand((*index.shape, *shape[n:]))
                if keeps:
                    by_shape[shape] = full
            return value.gather(dim, full)

        super().__init__(leaf, tuple(index.shape), n)

    def _along(self, stack_dim: int) -> None:
        """Return None: positions select from different members, so these must be stacked first."""


class Pad(ShapePlan):
    """Plan that adds constant elements before and after those of some dims; negative amounts remove elements."""

    __slots__ = ("_amounts", "_batch", "_value")
    creates_values = True

    def __init__(self, batch: Shape, amounts: Sequence[tuple[int, int]], value: float) -> None:
        n = len(batch)
        # torch.nn.functional.pad lists the last dim first.
        backwards = [side for amount in reversed(amounts) for side in amount]

        def leaf(tensor: Tensor) -> Tensor:
            return pad(tensor, [0] * 2 * (tensor.ndim - n) + backwards, value=value)

        lead = [size + before + after for size, (before, after) in zip(batch, amounts, strict=True)]
        super().__init__(leaf, tuple(lead), n)
        self._batch = batch
        self._amounts = amounts
        self._value = value

    def with_fill_value(self, value: float) -> Pad:
        return Pad(self._batch, self._amounts, value)

    def _along(self, stack_dim: int) -> Along | None:
        if self._amounts[stack_dim] != (0, 0):
            return None
        rest = [amount for dim, amount in enumerate(self._amounts) if dim != stack_dim]
        return Along(None, Pad(remove_size(self._batch, stack_dim), rest, self._value), stack_dim)


class Where(ShapePlan):
    """Plan that selects each element from one of two collections by a condition; a join without a new dim."""

    __slots__ = ()

    #: Attributes as in :class:`~._shape_plans.Join`: this join adds no dim and enlarges none.
    stacks: ClassVar[bool] = False
    dim: ClassVar[int] = -1

    #: The operands may have different classes; the result has the class of the first.
    alike: ClassVar[bool] = False

    def __init__(self, condition: Tensor) -> None:
        by_ndim: dict[int, Tensor] = {}

        def leaf(pair: Sequence[Tensor]) -> Tensor:
            left, right = pair
            ndim = left.ndim
            full = by_ndim.get(ndim)
            if full is None:
                full = by_ndim[ndim] = append_dims(condition, ndim)
            return torch.where(full, left, right)

        super().__init__(leaf, (), 0)

    def along(self, stack_dim: int) -> None:
        """Return None: each member would need its part of the condition, so members must be stacked first."""


def append_dims(prefix: Tensor, ndim: int) -> Tensor:
    """Append dims of size one to a tensor until it has ``ndim`` dims."""
    index: tuple[Any, ...] = (...,) + (None,) * (ndim - prefix.ndim)
    return prefix[index]


def repeat_plan(batch: Shape, repeats: Sequence[int]) -> Repeat:
    """Build the plan of ``repeat``."""
    if len(repeats) < len(batch):
        raise ValueError(
            "repeat: the number of repeats must not be smaller than the number of batch dims; "
            f"got {list(repeats)} for the batch size {list(batch)}"
        )
    if any(times < 0 for times in repeats):
        raise BatchSizeError(f"repeat: repeats must not be negative; got {list(repeats)}")
    return Repeat(batch, as_ints(repeats))


def repeat_interleave_plan(batch: Shape, repeats: int | Tensor, dim: int, output_size: int | None) -> Take:
    """Build the plan of ``repeat_interleave`` along one dim."""
    dim = wrap_dim(dim, len(batch))
    if isinstance(repeats, Tensor) and repeats.numel() != 1:
        if repeats.ndim != 1 or len(repeats) != batch[dim]:
            raise BatchSizeError(
                f"repeat_interleave: repeats must have the size of batch dim {dim}, {batch[dim]}; "
                f"got shape {list(repeats.shape)}"
            )
        # Compute the positions once instead of once per leaf.
        index = torch.repeat_interleave(repeats, output_size=output_size)

        def order() -> Any:
            # In a graph, densify the stack instead: reading the positions would break the graph.
            return None if torch.compiler.is_compiling() else read_positions(index)

        return Take(batch, dim, len(index), lambda d: methodcaller("index_select", d, index), order)
    times = int(repeats)
    if times < 0:
        raise BatchSizeError(f"repeat_interleave: repeats must not be negative; got {times}")
    size = batch[dim] * times
    if output_size is not None and output_size != size:
        raise BatchSizeError(
            f"repeat_interleave: output_size is {output_size}, but the result has size {size}"
        )
    return Take(
        batch,
        dim,
        size,
        lambda d: methodcaller("repeat_interleave", times, d),
        lambda: [i // times for i in range(size)],
    )


def narrow_plan(batch: Shape, dim: int, start: int | Tensor, length: int) -> Take:
    """Build the plan of ``narrow``: select ``length`` elements of one dim from ``start`` on."""
    dim = wrap_dim(dim, len(batch))
    start, length, size = int(start), as_int(length), batch[dim]
    if not -size <= start <= size:
        raise DimError(f"start out of range (expected to be in range of [{-size}, {size}], but got {start})")
    begin = start + size if start < 0 else start
    if length < 0:
        raise BatchSizeError(f"narrow: length must be non-negative; got {length}")
    if begin + length > size:
        raise BatchSizeError(
            f"start ({begin}) + length ({length}) exceeds the size of batch dim {dim}, {size}"
        )
    return Narrow(
        batch,
        dim,
        length,
        lambda d: methodcaller("narrow", d, begin, length),
        lambda: range(begin, begin + length),
    )


def flip_plan(batch: Shape, dims: int | Sequence[int]) -> Flip:
    """Build the plan of ``flip``."""
    provided = as_ints(dims)
    wrapped = tuple([wrap_dim(dim, len(batch)) for dim in provided])
    if len(set(wrapped)) != len(wrapped):
        raise DimError(f"flip: a dim appears several times in {list(provided)}")
    return Flip(batch, wrapped)


def roll_plan(batch: Shape, shifts: int | Sequence[int], dims: int | Sequence[int] | None) -> Roll | RollFlat:
    """Build the plan of ``roll`` along some dims; None rolls the flattened batch."""
    by = as_ints(shifts)
    if dims is None:
        if len(by) != 1:
            raise BatchSizeError(f"roll: without dims there is one shift; got {list(by)}")
        return RollFlat(batch, by[0])
    along = as_ints(dims)
    if len(by) != len(along):
        raise BatchSizeError(
            f"roll: shifts and dims must align; got shifts {list(by)} and dims {list(along)}"
        )
    return Roll(batch, by, tuple([wrap_dim(dim, len(batch)) for dim in along]))


def pad_plan(batch: Shape, pad_size: Sequence[int], value: float) -> Pad:
    """Build the plan of ``pad``: amounts before and after, listed from the first batch dim on."""
    pad_size = as_ints(pad_size)
    if len(pad_size) % 2:
        raise BatchSizeError(f"pad: pad_size has two numbers for each dim; got {list(pad_size)}")
    amounts = list(zip(pad_size[::2], pad_size[1::2], strict=True))
    if len(amounts) > len(batch):
        raise BatchSizeError(
            f"pad: pad_size has numbers for {len(amounts)} dims, {list(pad_size)}, and the batch size "
            f"{list(batch)} has {len(batch)}"
        )
    amounts += [(0, 0)] * (len(batch) - len(amounts))
    for dim, (size, amount) in enumerate(zip(batch, amounts, strict=True)):
        if size + sum(amount) < 0:
            raise BatchSizeError(f"pad: {amount} takes more from batch dim {dim} than its size, {size}")
    return Pad(batch, amounts, value)


def gather_plan(batch: Shape, dim: int, index: Tensor) -> Gather:
    """Build the plan of ``gather``: the index has one dim per batch dim and is broadcast over the feature dims."""
    dim = wrap_dim(dim, len(batch))
    if index.ndim != len(batch):
        raise BatchSizeError(
            f"gather: the index must have one dim for each batch dim; got shape {list(index.shape)} "
            f"for the batch size {list(batch)}"
        )
    return Gather(batch, dim, index)
