"""Plans of the operations that repeat, reorder or select elements within the batch dims.

As in ``_shape_plans``, the functions named ``*_plan`` check the arguments and return a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, Union

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import BatchSizeError, DimError
from .plans import (
    ComputedPlan,
    Leaf,
    ShapePlan,
    ViewPlan,
    WholePlan,
    as_int,
    as_ints,
    cache_plans,
    check_arguments,
    check_ints,
    wrap_dim,
    wrap_dims,
)
from .shapes import Join
from .steps import Pad, Range, Reshape, Shape, Step, Take, Whole


class Where(WholePlan):
    """Plan that selects each element from one of two collections by a condition; a join without a new dim.

    ``takes_whole``: leaves of different shapes are not broadcast if the condition is the same for all elements; None applies
    this to the members of lazy stacks only.
    """

    __slots__ = ("_condition", "_takes_whole")

    #: Attributes as in :class:`~._shape_plans.Join`: this join adds no dim and enlarges none.
    stacks: ClassVar[bool] = False
    dim: ClassVar[int] = -1

    #: The operands may have different classes; the result has the class of the first.
    alike: ClassVar[bool] = False

    def __init__(self, condition: Tensor, takes_whole: bool | None = None) -> None:
        by_ndim: dict[int, Tensor] = {}

        def leaf(pair: Sequence[Tensor]) -> Tensor:
            left, right = pair
            if takes_whole and left.shape != right.shape and (every := condition.all()) == condition.any():
                return (left if every else right).to(torch.result_type(left, right))
            ndim = left.ndim
            full = by_ndim.get(ndim)
            if full is None:
                full = by_ndim[ndim] = append_dims(condition, ndim)
            return torch.where(full, left, right)

        super().__init__((), (), leaf)
        self._condition, self._takes_whole = condition, takes_whole

    def split(self, dim: int, count: int) -> list[Where]:
        """Return the plans for the slices of the collections along a dim of size ``count``, such as members of lazy stacks."""
        condition = append_dims(self._condition, max(dim + 1, self._condition.ndim))
        sizes = [-1] * condition.ndim
        sizes[dim] = count
        takes_whole = self._takes_whole is not False
        return [Where(part, takes_whole) for part in condition.expand(sizes).unbind(dim)]


#: Plans that make one collection of several.
JoinPlan = Union[Join, Where]  # noqa: UP007


def append_dims(prefix: Tensor, ndim: int) -> Tensor:
    """Append dims of size one to a tensor until it has ``ndim`` dims."""
    index: tuple[Any, ...] = (...,) + (None,) * (ndim - prefix.ndim)
    return prefix[index]


def align_dims(value: Tensor, ndim: int, batch_dims: int) -> Tensor:
    """Insert dims of size one after the batch dims, so that a value of fewer dims broadcasts to ``ndim`` dims."""
    if not 0 < batch_dims <= value.ndim < ndim:
        return value
    return value[(slice(None),) * batch_dims + (None,) * (ndim - value.ndim)]


@cache_plans
def repeat_plan(batch: Shape, repeats: Sequence[int]) -> ShapePlan:
    """Build the plan of ``repeat``."""
    if len(repeats) < len(batch):
        raise ValueError(
            "repeat: the number of repeats must not be smaller than the number of batch dims; "
            f"got {list(repeats)} for the batch size {list(batch)}"
        )
    if any(times < 0 for times in repeats):
        raise BatchSizeError(f"repeat: repeats must not be negative; got {list(repeats)}")
    times = as_ints(repeats)
    added = len(times) - len(batch)
    steps = [Step(0, 0, Reshape((1,) * added))] if added else []
    for dim, (size, count) in enumerate(zip((1,) * added + tuple(batch), times)):
        steps.append(Step(dim, dim + 1, Range(0, size * count)))
    return ShapePlan(batch, tuple(steps), _spell_repeat)


def _spell_repeat(plan: ShapePlan) -> Leaf:
    n = plan.n
    old = (1,) * (len(plan.lead) - n) + tuple(plan.batch)
    times = [new // size if size else 1 for new, size in zip(plan.lead, old)]
    # With no ints to star, the method would be called without a size, so pass an empty tuple.
    return lambda value: value.repeat(*(*times, *[1] * (value.ndim - n)) or ((),))


def repeat_interleave_plan(
    batch: Shape, repeats: int | Tensor, dim: int, output_size: int | None
) -> ShapePlan:
    """Build the plan of ``repeat_interleave`` along one dim."""
    dim = wrap_dim(dim, len(batch), "repeat_interleave: dim")
    if isinstance(repeats, Tensor) and repeats.numel() != 1:
        if repeats.ndim != 1 or len(repeats) != batch[dim]:
            raise BatchSizeError(
                f"repeat_interleave: repeats must have the size of batch dim {dim}, {batch[dim]}; "
                f"got shape {list(repeats.shape)}"
            )
        # Compute the positions once instead of once per leaf.
        index = torch.repeat_interleave(repeats, output_size=output_size)
        # In a graph, densify a stack along this dim: reading the positions would break the graph.
        taken = Whole((len(index),)) if torch.compiler.is_compiling() else Take(index, dim)
        return ShapePlan.of_dim(batch, dim, taken, lambda d: methodcaller("index_select", d, index))
    check_ints("repeat_interleave", "repeats", repeats, "int | Tensor")
    times = int(repeats)
    if times < 0:
        raise BatchSizeError(f"repeat_interleave: repeats must not be negative; got {times}")
    size = batch[dim] * times
    if output_size is not None and output_size != size:
        raise BatchSizeError(
            f"repeat_interleave: output_size is {output_size}, but the result has size {size}"
        )
    repeated = Range(0, size, each=times)
    return ShapePlan.of_dim(batch, dim, repeated, partial(methodcaller, "repeat_interleave", times))


@cache_plans
def narrow_plan(batch: Shape, dim: int, start: int | Tensor, length: int) -> ViewPlan:
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
    return ViewPlan.of_dim(
        batch, dim, Range(begin, length), lambda d: methodcaller("narrow", d, begin, length)
    )


@cache_plans
def flip_plan(batch: Shape, dims: int | Sequence[int]) -> ShapePlan:
    """Build the plan of ``flip``."""
    flipped = wrap_dims("flip", dims, len(batch))
    steps = tuple([Step(dim, dim + 1, Range(batch[dim] - 1, batch[dim], -1)) for dim in flipped])
    return ShapePlan(batch, steps, lambda plan: methodcaller("flip", [step.start for step in plan.steps]))


@cache_plans
def roll_plan(batch: Shape, shifts: int | Sequence[int], dims: int | Sequence[int] | None) -> ShapePlan:
    """Build the plan of ``roll`` along some dims; None rolls the flattened batch."""
    by = as_ints(shifts)
    if dims is None:
        if len(by) != 1:
            raise BatchSizeError(f"roll: without dims there is one shift; got {list(by)}")
        if len(batch) != 1:
            shift_flat = partial(_roll_flat, shift=by[0], n=len(batch))
            return WholePlan(batch, batch, shift_flat)
        dims = 0
    along = as_ints(dims)
    if len(by) != len(along):
        raise BatchSizeError(
            f"roll: shifts and dims must align; got shifts {list(by)} and dims {list(along)}"
        )
    # torch accepts repeated dims and adds their shifts.
    wrapped = [wrap_dim(dim, len(batch)) for dim in along]
    steps = [Step(dim, dim + 1, Range(-shift, batch[dim])) for shift, dim in zip(by, wrapped)]
    return ShapePlan(batch, tuple(steps), _spell_roll)


def _spell_roll(plan: Any) -> Leaf:
    return methodcaller(
        "roll", [-step.primitive.start for step in plan.steps], [step.start for step in plan.steps]
    )


def _roll_flat(value: Tensor, shift: int, n: int) -> Tensor:
    if not value.numel():
        return value.clone()
    return value.reshape(-1, *value.shape[n:]).roll(shift, 0).view(value.shape)


def pad_plan(batch: Shape, pad_size: Sequence[int], value: float) -> ComputedPlan:
    """Build the plan of ``pad``: amounts before and after, listed from the first batch dim on."""
    if not isinstance(pad_size, (list, tuple)) or any(type(amount) is not int for amount in pad_size):
        check_arguments(pad_plan, (batch, pad_size))
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
    steps = [Step(dim, dim + 1, Pad(*amount)) for dim, amount in enumerate(amounts) if any(amount)]
    return ComputedPlan(batch, tuple(steps), partial(_spell_pad, value=value))


def _spell_pad(plan: Any, value: float) -> Leaf:
    n = plan.n
    # torch.nn.functional.pad lists the last dim first.
    backwards = [0, 0] * n
    for dim, _, amount in plan.steps:
        backwards[2 * (n - dim) - 2 : 2 * (n - dim)] = amount.before, amount.after
    return lambda tensor: pad(tensor, [0] * 2 * (tensor.ndim - n) + backwards, value=value)


def gather_plan(batch: Shape, dim: int, index: Tensor) -> WholePlan:
    """Build the plan of ``gather``: the index has one dim per batch dim and is broadcast over the feature dims."""
    dim = wrap_dim(dim, len(batch), "gather: dim")
    if not isinstance(index, Tensor):
        check_arguments(gather_plan, (batch, dim, index))
    if index.ndim != len(batch):
        raise BatchSizeError(
            f"gather: the index must have one dim for each batch dim; got shape {list(index.shape)} "
            f"for the batch size {list(batch)}"
        )
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

    return WholePlan(batch, tuple(index.shape), leaf, index)
