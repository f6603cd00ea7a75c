"""Plans of the operations that move whole dims, split a collection along a dim, or join several collections.

The functions named ``*_plan`` check the arguments as torch does and return a plan; their dims count from the
batch dims. Compositions of these operations (``rot90``, ``tile``) have no separate plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import BatchSizeError, DimError
from .plans import (
    ExpandPlan,
    Leaf,
    ShapePlan,
    Sizes,
    SplitPlan,
    ViewPlan,
    as_int,
    cache_plans,
    check_arguments,
    slice_length,
    wrap_dim,
    wrap_dims,
)
from .steps import Permute, Range, Reshape, Shape, Split, Step, Take, Whole


class Join(ShapePlan):
    """Plan that stacks (``stacks``) or concatenates several collections along ``dim``.

    Lazy stacks with one stack dim and equal member counts are joined per member. ``along`` returns None if
    their stack dim is the concatenated dim: then the lists of members are concatenated.

    >>> plan = stack_plan(torch.Size([3]), 0, 2)
    >>> isinstance(plan, Join), plan.dim, plan.stacks
    (True, 0, True)
    """

    __slots__ = ("dim", "stacks")

    #: True if all operands must have one class.
    alike: ClassVar[bool] = True

    def __init__(self, batch: Shape, steps: Sequence[Step], *spelling: Any) -> None:
        ((self.dim, stop, _),) = steps
        self.stacks = self.dim == stop
        super().__init__(batch, steps, *spelling)

    def of(self, sizes: Sequence[Shape]) -> Join:
        """Return the plan that joins collections of other batch sizes along the same dim."""
        return (
            stack_plan(sizes[0], self.dim, len(sizes))
            if self.stacks
            else cat_plan(sizes[0], self.dim, tuple([size[self.dim] for size in sizes]))
        )


@cache_plans
def view_plan(batch: Shape, shape: Sequence[int]) -> ViewPlan:
    """Build the plan of ``view``; one size may be -1."""
    return _reshape(batch, _infer(batch, shape), _spell_view)


@cache_plans
def reshape_plan(batch: Shape, shape: Sequence[int]) -> ViewPlan:
    """Build the plan of ``reshape``; one size may be -1."""
    return _reshape(batch, _infer(batch, shape), _spell_reshape)


def _reshape(batch: Shape, new: Shape, spell: Callable[[ViewPlan], Leaf]) -> ViewPlan:
    return ViewPlan(batch, () if new == batch else (Step(0, len(batch), Reshape(new)),), spell)


def _call_with_sizes(method: Callable[..., Tensor], plan: ViewPlan) -> Leaf:
    sizes = Sizes(plan.lead, plan.n)
    if torch.compiler.is_compiling():
        return lambda value: method(value, *sizes.of(value.shape))
    return lambda value: method(value, *sizes[value.shape])


_spell_view = functools.partial(_call_with_sizes, Tensor.view)
_spell_reshape = functools.partial(_call_with_sizes, Tensor.reshape)
_spell_expand = functools.partial(_call_with_sizes, Tensor.expand)


@cache_plans
def flatten_plan(batch: Shape, start_dim: int | None, end_dim: int | None) -> ViewPlan:
    """Build the plan of ``flatten``: merge the dims from ``start_dim`` to ``end_dim`` into one; None for 0 and -1."""
    n, end_dim = len(batch), -1 if end_dim is None else end_dim
    start_dim = 0 if start_dim is None else start_dim
    if not n:
        for dim in (start_dim, end_dim):
            wrap_dim(dim, 1)
        return _reshape((), (1,), _spell_reshape)
    start, end = wrap_dim(start_dim, n), wrap_dim(end_dim, n)
    if start > end:
        raise DimError(f"flatten() has invalid args: start_dim {start_dim} comes after end_dim {end_dim}")
    merged = (math.prod(batch[start : end + 1]),)
    steps = (Step(start, end + 1, Reshape(merged)),) if start < end else ()
    return ViewPlan(batch, steps, _spell_reshape, methodcaller("flatten", start, end))


@cache_plans
def unflatten_plan(batch: Shape, dim: int, sizes: Sequence[int]) -> ViewPlan:
    """Build the plan of ``unflatten``: split one dim into several; one size may be -1."""
    dim = wrap_dim(dim, len(batch))
    if sizes in ((), []):
        raise BatchSizeError("unflatten: sizes must be non-empty")
    try:
        inner = _infer(batch[dim : dim + 1], sizes)
    except BatchSizeError:
        raise BatchSizeError(
            f"unflatten: the sizes {list(sizes)} don't multiply up to {batch[dim]}, "
            f"the size of batch dim {dim}"
        ) from None
    steps = (Step(dim, dim + 1, Reshape(inner)),) if len(inner) > 1 else ()
    return ViewPlan(batch, steps, _spell_view)


@cache_plans
def permute_plan(batch: Shape, dims: Sequence[int]) -> ViewPlan:
    """Build the plan of ``permute``."""
    n = len(batch)
    order = tuple(dims)
    if sorted(order) != list(range(n)):
        order = tuple([wrap_dim(dim, n) for dim in dims])
        if len(order) != n or len(set(order)) != n:
            raise DimError(
                f"the dims of a permutation must be each of {list(range(n))} once; got {list(dims)}"
            )
    return ViewPlan(batch, (Step(0, n, Permute(order)),), _spell_permute)


@cache_plans
def transpose_plan(batch: Shape, dim0: int, dim1: int) -> ViewPlan:
    """Build the plan of ``transpose``: swap two dims."""
    n = len(batch)
    first, second = wrap_dim(dim0, n), wrap_dim(dim1, n)
    order = list(range(n))
    order[first], order[second] = second, first
    steps = (Step(0, n, Permute(tuple(order))),)
    return ViewPlan(batch, steps, _spell_permute, methodcaller("transpose", first, second))


def _spell_permute(plan: ViewPlan) -> Leaf:
    n, order = plan.n, plan.sources
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
def movedim_plan(batch: Shape, source: int | Sequence[int], destination: int | Sequence[int]) -> ViewPlan:
    """Build the plan of ``movedim``: move some dims to new positions and keep the order of the others."""
    n = len(batch)
    sources = wrap_dims("movedim: source", source, n)
    destinations = wrap_dims("movedim: destination", destination, n)
    if len(sources) != len(destinations):
        raise DimError(
            "movedim: source and destination must have the same number of dims; "
            f"got {list(sources)} and {list(destinations)}"
        )
    placed = dict(zip(destinations, sources, strict=True))
    others = iter([dim for dim in range(n) if dim not in sources])
    return permute_plan(batch, [placed[i] if i in placed else next(others) for i in range(n)])


@cache_plans
def unsqueeze_plan(batch: Shape, dim: int) -> ExpandPlan:
    """Build the plan of ``unsqueeze``."""
    dim = wrap_dim(dim, len(batch) + 1)
    return ExpandPlan(batch[:dim], (Step(dim, dim, Reshape((1,))),), _spell_unsqueeze)


def _spell_unsqueeze(plan: ViewPlan) -> Leaf:
    dim = plan.steps[0].start
    # value[None] is faster than unsqueeze(0).
    return itemgetter(None) if dim == 0 else methodcaller("unsqueeze", dim)


@cache_plans
def squeeze_plan(batch: Shape, dim: int | Sequence[int] | None) -> ViewPlan:
    """Build the plan of ``squeeze``: remove the given dims that have size one."""
    dims = range(len(batch)) if dim is None else wrap_dims("squeeze", dim, len(batch))
    removed = sorted([d for d in dims if batch[d] == 1], reverse=True)
    steps = tuple([Step(d, d + 1, Take(0, d)) for d in removed])
    return ViewPlan(batch[: max(removed, default=-1) + 1], steps, _spell_squeeze)


def _spell_squeeze(plan: ViewPlan) -> Leaf:
    dims = tuple([step.start for step in plan.steps])
    return methodcaller("squeeze", dims[0] if len(dims) == 1 else dims)


@cache_plans
def expand_plan(batch: Shape, shape: Sequence[int]) -> ExpandPlan:
    """Build the plan of ``expand``: a size of -1 keeps the size of that dim."""
    added = len(shape) - len(batch)
    if added < 0:
        raise BatchSizeError(
            f"expand: the number of sizes ({len(shape)}: {list(shape)}) must not be smaller than the number "
            f"of batch dims ({len(batch)}: {list(batch)})"
        )
    steps = [Step(0, 0, Reshape((1,) * added))] if added else []
    for dim, size in enumerate(shape):
        old = batch[dim - added] if dim >= added else None
        if old is not None and size in (-1, old):
            continue
        if size < 0 or (old is not None and old != 1):
            where = "a new leading dim" if old is None else f"batch dim {dim - added} of size {old}"
            raise BatchSizeError(
                f"expand: size {size} is not possible for {where} ({list(batch)} to {list(shape)})"
            )
        steps.append(Step(dim, dim + 1, Range(0, size)))
    return ExpandPlan(batch, tuple(steps), _spell_expand)


@cache_plans
def unbind_plan(batch: Shape, dim: int) -> SplitPlan:
    """Build the plan of ``unbind``."""
    return SplitPlan.of_dim(batch, wrap_dim(dim, len(batch)), Split(None), _spell_unbind)


def _spell_unbind(dim: int) -> Leaf:
    return torch.unbind if dim == 0 else methodcaller("unbind", dim)


@cache_plans
def split_plan(batch: Shape, split_size: int | Sequence[int], dim: int) -> SplitPlan:
    """Build the plan of ``split``: parts of ``split_size`` elements (the last may be smaller), or of the listed sizes."""
    dim = wrap_dim(dim, len(batch))
    size = batch[dim]
    if not isinstance(split_size, int):
        sizes = list(split_size)
        if sum(sizes) != size or any(part < 0 for part in sizes):
            raise BatchSizeError(
                f"split: the sizes must sum to the size of batch dim {dim}, {size}; got {sizes}"
            )
        return _split(batch, dim, sizes)
    if split_size < 0 or (split_size == 0 and size):
        raise ValueError(f"split: split_size must be positive; got {split_size}")
    if size == 0:
        return _split(batch, dim, [0])
    rest = size % split_size
    return _split(batch, dim, [split_size] * (size // split_size) + ([rest] if rest else []))


def _split(batch: Shape, dim: int, lengths: list[int]) -> SplitPlan:
    return SplitPlan.of_dim(
        batch, dim, Split(lengths), functools.partial(methodcaller, "split_with_sizes", lengths)
    )


@cache_plans
def chunk_plan(batch: Shape, chunks: int, dim: int) -> SplitPlan:
    """Build the plan of ``chunk``: at most ``chunks`` parts of equal size; the last may be smaller."""
    if chunks <= 0:
        raise ValueError(f"chunk: chunks must be greater than zero; got {chunks}")
    dim = wrap_dim(dim, len(batch))
    if batch[dim] == 0:
        return _split(batch, dim, [0] * chunks)
    return split_plan(batch, -(-batch[dim] // chunks), dim)


def tensor_split_plan(batch: Shape, indices_or_sections: int | Sequence[int] | Tensor, dim: int) -> SplitPlan:
    """Build the plan of ``tensor_split``: sections whose sizes differ by at most one, or the parts between positions."""
    check_arguments(tensor_split_plan, (batch, indices_or_sections, dim))
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
        return _split(batch, dim, [least + 1] * longer + [least] * (sections - longer))
    slices = zip([0, *indices_or_sections], [*indices_or_sections, size], strict=True)
    parts = [slice_length(slice(start, stop), size) for start, stop in slices]
    if sum(parts) != size:
        raise BatchSizeError(
            f"tensor_split: the positions must not decrease; got {list(indices_or_sections)}"
        )
    return _split(batch, dim, parts)


@cache_plans
def stack_plan(batch: Shape, dim: int, count: int) -> Join:
    """Build the plan of ``stack``: join ``count`` collections of one batch size along a new dim.

    >>> stack_plan(torch.Size([3]), 1, 2).resize_batch(torch.Size([3]))
    torch.Size([3, 2])
    """
    dim = wrap_dim(dim, len(batch) + 1)
    return Join(batch, (Step(dim, dim, Whole((count,))),), _spell_join)


@cache_plans
def cat_plan(batch: Shape, dim: int, sizes: Sequence[int]) -> Join:
    """Build the plan of ``cat``: concatenate collections that have these sizes at ``dim``."""
    dim = wrap_dim(dim, len(batch))
    return Join(batch, (Step(dim, dim + 1, Whole((sum(sizes),))),), _spell_join)


def _spell_join(plan: Join) -> Leaf:
    join: Callable[..., Tensor] = torch.stack if plan.stacks else torch.cat
    # Without a dim argument, torch parses the call faster.
    return join if plan.dim == 0 else functools.partial(join, dim=plan.dim)


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
