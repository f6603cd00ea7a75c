"""Plans of the operations that move whole dims, split a collection along a dim, or join several collections.

The functions named ``*_plan`` check the arguments as torch does and return a plan; their dims count from the
batch dims. Compositions of these operations (``rot90``, ``tile``) have no separate plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter, methodcaller
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._plans import (
    Along,
    MultiPlan,
    Shape,
    ShapePlan,
    Sizes,
    as_int,
    as_ints,
    cache_plans,
    remove_size,
    slice_length,
    wrap_dim,
)
from .errors import BatchSizeError, DimError


class Reshape(ShapePlan):
    """Plan that changes the batch dims and keeps the order of elements; leaves are views where torch returns one.

    ``kept`` holds how many of the first and of the last dims keep their names.
    """

    __slots__ = ("_copy", "_kept", "_old")

    is_view = True

    def __init__(
        self,
        old: Shape,
        new: Shape,
        kept: tuple[int, int],
        leaf: Callable[[Tensor], Tensor] | None = None,
        *,
        copy: bool = True,
    ) -> None:
        super().__init__(_reshaper(old, new, copy) if leaf is None else leaf, new, len(old))
        self._old = old
        self._copy = copy
        self._kept = kept

    def dims(self) -> tuple[int | None, ...]:
        before, after = self._kept
        changed = len(self.lead) - before - after
        return (*range(before), *[None] * changed, *range(self.n - after, self.n))

    def _along(self, stack_dim: int) -> Along | None:
        old, new = self._old, self.lead
        first, last = self._kept
        before, after = math.prod(old[:stack_dim]), math.prod(old[stack_dim + 1 :])
        in_first, in_last = stack_dim < first, stack_dim >= len(old) - last
        places: Sequence[int] = range(first, len(new) - last)
        if in_first or in_last:
            places = [stack_dim if in_first else stack_dim - len(old) + len(new)]
        for dim in places:
            if (
                new[dim] == old[stack_dim]
                and math.prod(new[:dim]) == before
                and math.prod(new[dim + 1 :]) == after
            ):
                inner_old, inner_new = remove_size(old, stack_dim), remove_size(new, dim)
                inner = None
                if inner_old != inner_new:
                    kept = (first - in_first, last - in_last)
                    inner = Reshape(inner_old, inner_new, kept, copy=self._copy)
                return Along(None, inner, dim)
        return None


def _reshaper(old: Shape, new: Shape, copy: bool) -> Callable[[Tensor], Tensor]:
    sizes = Sizes(new, len(old))
    if torch.compiler.is_compiling():
        return lambda value: (value.reshape if copy else value.view)(*sizes.of(value.shape))
    if copy:
        return lambda value: value.reshape(*sizes[value.shape])
    return lambda value: value.view(*sizes[value.shape])


class Dense(ShapePlan):
    """Plan that keeps the dims, but stacks lazy stacks densely first."""

    __slots__ = ()

    def __init__(self, leaf: Callable[[Tensor], Tensor]) -> None:
        super().__init__(leaf, (), 0)

    def along(self, stack_dim: int) -> None:
        """Return None: the members must be stacked first."""


class Permute(ShapePlan):
    """Plan that reorders the batch dims."""

    __slots__ = ("order",)

    is_view = True

    def __init__(self, lead: Shape, order: Shape, leaf: Callable[[Tensor], Tensor]) -> None:
        super().__init__(leaf, lead, len(lead))
        self.order = order

    def dims(self) -> tuple[int | None, ...]:
        return self.order

    def _along(self, stack_dim: int) -> Along:
        order = tuple(dim - (dim > stack_dim) for dim in self.order if dim != stack_dim)
        new_dim = self.order.index(stack_dim)
        if order == tuple(range(len(order))):
            return Along(None, None, new_dim)
        return Along(None, Permute(remove_size(self.lead, new_dim), order, _permuter(order)), new_dim)


class Unsqueeze(ShapePlan):
    """Plan that inserts a dim of size one."""

    __slots__ = ("_batch", "_dim")

    is_view = True

    def __init__(self, batch: Shape, dim: int) -> None:
        # value[None] is faster than unsqueeze(0).
        leaf = itemgetter(None) if dim == 0 else methodcaller("unsqueeze", dim)
        super().__init__(leaf, (*batch[:dim], 1), dim)
        self._batch = batch
        self._dim = dim

    def dims(self) -> tuple[int | None, ...]:
        return (*range(self._dim), None)

    def _along(self, stack_dim: int) -> Along:
        before = self._dim <= stack_dim
        inner = Unsqueeze(remove_size(self._batch, stack_dim), self._dim - (not before))
        return Along(None, inner, stack_dim + before)


class Squeeze(ShapePlan):
    """Plan that removes some dims of size one."""

    __slots__ = ("_batch", "_dims")

    is_view = True

    def __init__(self, batch: Shape, dims: Shape) -> None:
        n = max(dims, default=-1) + 1
        lead = tuple([batch[dim] for dim in range(n) if dim not in dims])
        super().__init__(methodcaller("squeeze", dims[0] if len(dims) == 1 else dims), lead, n)
        self._batch = batch
        self._dims = dims

    def dims(self) -> tuple[int | None, ...]:
        return tuple(dim for dim in range(self.n) if dim not in self._dims)

    def _along(self, stack_dim: int) -> Along:
        rest = tuple(dim - (dim > stack_dim) for dim in self._dims if dim != stack_dim)
        inner = Squeeze(remove_size(self._batch, stack_dim), rest) if rest else None
        if stack_dim in self._dims:
            return Along(0, inner, None)
        return Along(None, inner, stack_dim - sum(dim < stack_dim for dim in self._dims))


class Expand(ShapePlan):
    """Plan that expands dims of size one and adds leading dims, without copying."""

    __slots__ = ("_old",)

    is_view = True

    def __init__(self, old: Shape, new: Shape) -> None:
        sizes = Sizes(new, len(old))
        super().__init__(lambda value: value.expand(*sizes[value.shape]), new, len(old))
        if torch.compiler.is_compiling():
            self.leaf = lambda value: value.expand(*sizes.of(value.shape))
        self._old = old

    def dims(self) -> tuple[int | None, ...]:
        added = len(self.lead) - self.n
        return (*[None] * added, *range(self.n))

    def _along(self, stack_dim: int) -> Along:
        new_dim = stack_dim + len(self.lead) - self.n
        old, new = remove_size(self._old, stack_dim), remove_size(self.lead, new_dim)
        size = self.lead[new_dim]
        picks = None if size == self._old[stack_dim] else [0] * size
        return Along(picks, None if old == new else Expand(old, new), new_dim)


class Unbind(MultiPlan):
    """Plan that splits into one part per position of a dim, and removes that dim."""

    __slots__ = ("_batch", "_dim")

    is_view = True

    def __init__(self, batch: Shape, dim: int) -> None:
        leaf = torch.unbind if dim == 0 else methodcaller("unbind", dim)
        super().__init__(leaf, batch[:dim], dim + 1, [batch[:dim]] * batch[dim])
        self._batch = batch
        self._dim = dim

    def dims(self) -> tuple[int | None, ...]:
        return tuple(range(self._dim))

    def _along(self, stack_dim: int) -> Along:
        if stack_dim == self._dim:
            return Along(range(self._batch[stack_dim]), None, None)
        before = self._dim < stack_dim
        return Along(
            None, Unbind(remove_size(self._batch, stack_dim), self._dim - (not before)), stack_dim - before
        )


class Split(MultiPlan):
    """Plan that splits one dim into consecutive parts."""

    __slots__ = ("_batch", "_dim", "_sizes")

    is_view = True

    def __init__(self, batch: Shape, dim: int, sizes: Sequence[int]) -> None:
        leaf = methodcaller("split_with_sizes", sizes, dim)
        super().__init__(leaf, batch[: dim + 1], dim + 1, [(*batch[:dim], size) for size in sizes])
        self._batch = batch
        self._dim = dim
        self._sizes = sizes

    def _along(self, stack_dim: int) -> Along:
        if stack_dim == self._dim:
            ends = accumulate(self._sizes)
            return Along(
                [range(end - size, end) for size, end in zip(self._sizes, ends, strict=True)], None, stack_dim
            )
        inner = Split(remove_size(self._batch, stack_dim), self._dim - (self._dim > stack_dim), self._sizes)
        return Along(None, inner, stack_dim)


class Join(ShapePlan):
    """Plan that stacks (``stacks``) or concatenates several collections along ``dim``.

    Lazy stacks with one stack dim and equal member counts are joined per member. ``along`` returns None if
    their stack dim is the concatenated dim: then the lists of members are concatenated.
    """

    __slots__ = ("_batch", "_sizes", "dim", "stacks")

    #: True if all operands must have one class.
    alike: ClassVar[bool] = True

    def __init__(self, batch: Shape, dim: int, sizes: Sequence[int], stacks: bool) -> None:
        join: Callable[..., Tensor] = torch.stack if stacks else torch.cat
        lead = (*batch[:dim], len(sizes) if stacks else sum(sizes), *batch[dim + (not stacks) :])
        # Without a dim argument, torch parses the call faster.
        super().__init__(join if dim == 0 else functools.partial(join, dim=dim), lead, len(batch))
        self.dim = dim
        self.stacks = stacks
        self._batch = batch
        self._sizes = sizes

    def dims(self) -> tuple[int | None, ...]:
        if not self.stacks:
            return tuple(range(self.n))
        return (*range(self.dim), None, *range(self.dim, self.n))

    def of(self, sizes: Sequence[Shape]) -> Join:
        """Return the plan that joins collections of other batch sizes along the same dim."""
        return (
            stack_plan(sizes[0], self.dim, len(sizes))
            if self.stacks
            else cat_plan(sizes[0], self.dim, tuple([size[self.dim] for size in sizes]))
        )

    def _along(self, stack_dim: int) -> Along | None:
        if stack_dim == self.dim and not self.stacks:
            return None
        first = self.dim <= stack_dim
        inner = Join(remove_size(self._batch, stack_dim), self.dim - (not first), self._sizes, self.stacks)
        return Along(None, inner, stack_dim + (first and self.stacks))


@cache_plans
def view_plan(batch: Shape, shape: Sequence[int]) -> Reshape:
    """Build the plan of ``view``; one size may be -1."""
    return _reshape(batch, shape, copy=False)


@cache_plans
def reshape_plan(batch: Shape, shape: Sequence[int]) -> Reshape:
    """Build the plan of ``reshape``; one size may be -1."""
    return _reshape(batch, shape, copy=True)


def _reshape(batch: Shape, shape: Sequence[int], *, copy: bool) -> Reshape:
    new = _infer(batch, shape)
    return Reshape(batch, new, (len(new) if new == batch else 0, 0), copy=copy)


@cache_plans
def flatten_plan(batch: Shape, start_dim: int, end_dim: int) -> Reshape:
    """Build the plan of ``flatten``: merge the dims from ``start_dim`` to ``end_dim`` into one."""
    n = len(batch)
    if not n:
        for dim in (start_dim, end_dim):
            wrap_dim(dim, 1)
        return Reshape((), (1,), (0, 0))
    start, end = wrap_dim(start_dim, n), wrap_dim(end_dim, n)
    if start > end:
        raise DimError(f"flatten() has invalid args: start_dim {start_dim} comes after end_dim {end_dim}")
    sizes = tuple(batch)
    new = (*sizes[:start], math.prod(sizes[start : end + 1]), *sizes[end + 1 :])
    kept = (start, n - 1 - end) if start < end else (n, 0)
    return Reshape(sizes, new, kept, methodcaller("flatten", start, end))


@cache_plans
def unflatten_plan(batch: Shape, dim: int, sizes: Sequence[int]) -> Reshape:
    """Build the plan of ``unflatten``: split one dim into several; one size may be -1."""
    dim = wrap_dim(dim, len(batch))
    if not sizes:
        raise BatchSizeError("unflatten: sizes must be non-empty")
    try:
        inner = _infer(batch[dim : dim + 1], sizes)
    except BatchSizeError:
        raise BatchSizeError(
            f"unflatten: the sizes {list(sizes)} don't multiply up to {batch[dim]}, "
            f"the size of batch dim {dim}"
        ) from None
    new = (*batch[:dim], *inner, *batch[dim + 1 :])
    n = len(batch)
    return Reshape(batch, new, (dim, n - 1 - dim) if len(inner) > 1 else (n, 0), copy=False)


@cache_plans
def permute_plan(batch: Shape, dims: Sequence[int]) -> Permute:
    """Build the plan of ``permute``."""
    n = len(batch)
    order = tuple(dims)
    if sorted(order) != list(range(n)):
        order = tuple([wrap_dim(dim, n) for dim in dims])
        if len(order) != n or len(set(order)) != n:
            raise DimError(
                f"the dims of a permutation must be each of {list(range(n))} once; got {list(dims)}"
            )
    return Permute(tuple(map(batch.__getitem__, order)), order, _permuter(order))


@cache_plans
def transpose_plan(batch: Shape, dim0: int, dim1: int) -> Permute:
    """Build the plan of ``transpose``: swap two dims."""
    n = len(batch)
    first, second = wrap_dim(dim0, n), wrap_dim(dim1, n)
    lead, order = list(batch), list(range(n))
    lead[first], lead[second] = batch[second], batch[first]
    order[first], order[second] = second, first
    return Permute(tuple(lead), tuple(order), methodcaller("transpose", first, second))


def _permuter(order: Shape) -> Callable[[Tensor], Tensor]:
    """Return a function that permutes the leading dims of a leaf."""
    n = len(order)
    moved = [i for i, dim in enumerate(order) if i != dim] if n != 2 or order[0] == 0 else order
    if len(moved) == 2:
        first, second = moved
        return lambda value: value.transpose(first, second)
    by_ndim: dict[int, Any] = {}

    def leaf(value: Tensor) -> Tensor:
        ndim = value.ndim
        full = by_ndim.get(ndim)
        if full is None:
            full = by_ndim[ndim] = (*order, *range(n, ndim)) or ((),)
        return value.permute(*full)

    return leaf


@cache_plans
def movedim_plan(batch: Shape, source: int | Sequence[int], destination: int | Sequence[int]) -> Permute:
    """Build the plan of ``movedim``: move some dims to new positions and keep the order of the others."""
    n = len(batch)
    provided = [as_ints(dims) for dims in (source, destination)]
    if len(provided[0]) != len(provided[1]):
        raise DimError(
            "movedim: source and destination must have the same number of dims; "
            f"got {list(provided[0])} and {list(provided[1])}"
        )
    sources, destinations = ([wrap_dim(dim, n) for dim in dims] for dims in provided)
    for what, dims in (("source", sources), ("destination", destinations)):
        if len(set(dims)) != len(dims):
            raise DimError(f"movedim: repeated dim in {what}: {dims}")
    placed = dict(zip(destinations, sources, strict=True))
    others = iter([dim for dim in range(n) if dim not in sources])
    return permute_plan(batch, [placed[i] if i in placed else next(others) for i in range(n)])


@cache_plans
def unsqueeze_plan(batch: Shape, dim: int) -> Unsqueeze:
    """Build the plan of ``unsqueeze``."""
    return Unsqueeze(batch, wrap_dim(dim, len(batch) + 1))


@cache_plans
def squeeze_plan(batch: Shape, dim: int | Sequence[int] | None) -> Squeeze:
    """Build the plan of ``squeeze``: remove the given dims that have size one."""
    provided = range(len(batch)) if dim is None else as_ints(dim)
    dims = [wrap_dim(d, len(batch)) for d in provided]
    return Squeeze(batch, tuple([d for d in dims if batch[d] == 1]))


@cache_plans
def expand_plan(batch: Shape, shape: Sequence[int]) -> Expand:
    """Build the plan of ``expand``: a size of -1 keeps the size of that dim."""
    added = len(shape) - len(batch)
    if added < 0:
        raise BatchSizeError(
            f"expand: the number of sizes ({len(shape)}: {list(shape)}) must not be smaller than the number "
            f"of batch dims ({len(batch)}: {list(batch)})"
        )
    new = list(shape)
    for dim, size in enumerate(shape):
        old = batch[dim - added] if dim >= added else None
        if size == -1 and old is not None:
            new[dim] = old
        elif size < 0 or (old is not None and old not in (1, size)):
            where = "a new leading dim" if old is None else f"batch dim {dim - added} of size {old}"
            raise BatchSizeError(
                f"expand: size {size} is not possible for {where} ({list(batch)} to {list(shape)})"
            )
    return Expand(batch, tuple(new))


@cache_plans
def unbind_plan(batch: Shape, dim: int) -> Unbind:
    """Build the plan of ``unbind``."""
    return Unbind(batch, wrap_dim(dim, len(batch)))


@cache_plans
def split_plan(batch: Shape, split_size: int | Sequence[int], dim: int) -> Split:
    """Build the plan of ``split``: parts of ``split_size`` elements (the last may be smaller), or of the listed sizes."""
    dim = wrap_dim(dim, len(batch))
    size = batch[dim]
    if not isinstance(split_size, int):
        sizes = list(split_size)
        if sum(sizes) != size or any(part < 0 for part in sizes):
            raise BatchSizeError(
                f"split: the sizes must sum to the size of batch dim {dim}, {size}; got {sizes}"
            )
        return Split(batch, dim, sizes)
    if split_size < 0 or (split_size == 0 and size):
        raise ValueError(f"split: split_size must be positive; got {split_size}")
    if size == 0:
        return Split(batch, dim, [0])
    rest = size % split_size
    return Split(batch, dim, [split_size] * (size // split_size) + ([rest] if rest else []))


@cache_plans
def chunk_plan(batch: Shape, chunks: int, dim: int) -> Split:
    """Build the plan of ``chunk``: at most ``chunks`` parts of equal size; the last may be smaller."""
    if chunks <= 0:
        raise ValueError(f"chunk: chunks must be greater than zero; got {chunks}")
    dim = wrap_dim(dim, len(batch))
    if batch[dim] == 0:
        return Split(batch, dim, [0] * chunks)
    return split_plan(batch, -(-batch[dim] // chunks), dim)


def tensor_split_plan(batch: Shape, indices_or_sections: int | Sequence[int] | Tensor, dim: int) -> Split:
    """Build the plan of ``tensor_split``: sections whose sizes differ by at most one, or the parts between positions."""
    dim = wrap_dim(dim, len(batch))
    size = batch[dim]
    if isinstance(indices_or_sections, Tensor):
        indices_or_sections = indices_or_sections.tolist()
    indices_or_sections = as_int(indices_or_sections)
    if isinstance(indices_or_sections, int):
        sections = indices_or_sections
        if sections <= 0:
            raise BatchSizeError(
                f"tensor_split: the number of sections must be larger than 0; got {sections}"
            )
        least, longer = size // sections, size % sections
        return Split(batch, dim, [least + 1] * longer + [least] * (sections - longer))
    slices = zip([0, *indices_or_sections], [*indices_or_sections, size], strict=True)
    parts = [slice_length(slice(start, stop), size) for start, stop in slices]
    if sum(parts) != size:
        raise BatchSizeError(
            f"tensor_split: the positions must not decrease; got {list(indices_or_sections)}"
        )
    return Split(batch, dim, parts)


@cache_plans
def stack_plan(batch: Shape, dim: int, count: int) -> Join:
    """Build the plan of ``stack``: join ``count`` collections of one batch size along a new dim."""
    return Join(batch, wrap_dim(dim, len(batch) + 1), [1] * count, True)


@cache_plans
def cat_plan(batch: Shape, dim: int, sizes: Sequence[int]) -> Join:
    """Build the plan of ``cat``: concatenate collections that have these sizes at ``dim``."""
    return Join(batch, wrap_dim(dim, len(batch)), sizes, False)


def _infer(batch: Shape, shape: Sequence[int]) -> Shape:
    """Return a shape with -1 replaced by the size that the batch's element count requires."""
    new = tuple(shape)
    numel, product = math.prod(batch), math.prod(new)
    if product == numel and (not new or min(new) >= 0):
        return new
    if product < 0 and new.count(-1) == 1 and min(new) == -1 and numel % product == 0:
        unknown = new.index(-1)
        return (*new[:unknown], numel // -product, *new[unknown + 1 :])
    raise BatchSizeError(f"the shape {list(new)} is invalid for a batch of {numel} elements, {list(batch)}")
