"""Plans: what an operation does to the leading dims of every leaf, computed once from the batch size.

A plan is a pure function of shapes. It consists of steps (:mod:`._plan_steps`), from which the new leading dims
(``lead``), their names, the plan for the members of a lazy stack and the positions of values are computed, and of one
function that applies all steps to a leaf (``leaf``). Each leaf and each nested node keeps its remaining dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import index as to_int
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._python.settings import RULES
from ..errors import BatchSizeError, DimError
from ..typing import BatchSize, Names
from .steps import (
    Along,
    GatherMap,
    Primitive,
    Reshape,
    Shape,
    Step,
    Whole,
    locate_all,
    make_positions,
    remove_size,
)

P = TypeVar("P", bound="ShapePlan")
Leaf = Callable[[Any], Any]


class ShapePlan:
    """Plan of an operation with one result, a copy.

    Attributes:
        batch: the sizes of the old leading dims.
        n: their number.
        steps: what the plan does to them.
        lead: the new leading dims.
        spell: returns the function to call on a leaf, for this plan or for that of a member.
        leaf: function called on each leaf (on the list of leaves, for plans that join).
        creates_values: True if the result has new elements, which only tensors can hold.
        empties_stacks: True if the result has lazy stacks without leaves in place of lazy stacks.
        is_view: True if the result is a view wherever strides allow it.
        repeats: True if the result repeats one element, as of ``unsqueeze`` and ``expand``.
    """

    __slots__ = ("batch", "lead", "leaf", "n", "spell", "steps")

    creates_values: ClassVar[bool] = False
    empties_stacks: ClassVar[bool] = False
    is_view: ClassVar[bool] = False
    repeats: ClassVar[bool] = False

    def __init__(
        self, batch: Shape, steps: Sequence[Step], spell: Callable[[Any], Leaf], leaf: Leaf | None = None
    ) -> None:
        sizes = batch
        for step in steps:
            sizes = step.resize(sizes)
        self.batch = batch
        self.n = len(batch)
        self.steps = steps
        self.lead = tuple(sizes)
        self.spell = spell
        self.leaf = spell(self) if leaf is None else leaf

    @classmethod
    def of_dim(cls: type[P], batch: Shape, dim: int, primitive: Primitive, spell: Callable[[int], Leaf]) -> P:
        """Build a plan that applies one primitive to one dim; ``spell(dim)`` returns the function to call on a leaf."""
        steps = (Step(dim, dim + 1, primitive),)
        return cls(batch[: dim + 1], steps, lambda plan: spell(plan.steps[0].start))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.batch)} -> {list(self.lead)}: {list(self.steps)})"

    @property
    def sources(self) -> tuple[int | None, ...]:
        """Per new leading dim, the old dim whose name it keeps, or None; computed on each access."""
        sources: list[int | None] = [*range(len(self.batch))]
        sizes = self.batch
        for step in self.steps:
            sizes, sources = step.resize(sizes), step.rename(sources, sizes)
        return tuple(sources)

    def resize_batch(self, size: torch.Size) -> torch.Size:
        """Compute the batch size of the result from that of a node."""
        return torch.Size(self.lead + size[self.n :])

    def apply_unbatched(self, value: Tensor) -> Tensor:
        """Return the result for a tensor that stands for the whole batch and has no batch dims."""
        return value

    def rename_dims(self, names: Names | None) -> Names | None:
        """Compute the dim names of the result from those of a node."""
        if names is None:
            return None
        moved = tuple([None if dim is None else names[dim] for dim in self.sources]) + names[self.n :]
        return moved if any(name is not None for name in moved) else None

    def along(self, stack_dim: int) -> Along | None:
        """Return how a lazy stack applies this plan to its members; None if it must be densified first."""
        if stack_dim >= self.n:
            # A nested stack can have more batch dims than the root: each member then has all the replaced dims.
            return Along(None, self, len(self.lead) + stack_dim - self.n)
        place: int | None = stack_dim
        sizes, picks = self.batch, None
        rest: list[Step] = []
        for step in self.steps:
            if place is None:  # one member is left, which has the remaining dims
                rest.append(step)
                continue
            found = step.along(place, sizes)
            if found is None:
                return None
            if found.plan is not None:
                rest.append(found.plan)
            if found.picks is not None:
                picks = found.picks if picks is None else [picks[i] for i in found.picks]
            place = found.stack_dim
            sizes = step.resize(sizes)
        return Along(picks, self._make_member_plan(stack_dim, rest), place)

    def _make_member_plan(self, stack_dim: int, rest: list[Step]) -> ShapePlan | None:
        """Return the plan that applies the remaining steps to a member; None if it would return the member."""
        if not rest and self.is_view:
            return None
        batch = remove_size(self.batch, stack_dim)
        return type(self)(batch, tuple(rest), self.spell, None if rest else Tensor.clone)

    def locate(self, size: Shape, device: torch.device | None = None) -> list[GatherMap]:
        """Compute the gather map of each result for a batch of ``size``; none if the elements of the result are new."""
        found = locate_all(self.steps, size)
        if found is None and self.creates_values:
            return []
        if found is None:
            # Only torch knows it: apply the plan to positions, on the device of the tensors in the index.
            index = getattr(self, "index", None)
            tensors = [
                item for item in (index if type(index) is tuple else [index]) if isinstance(item, Tensor)
            ]
            moved = self.leaf(make_positions(size, tensors[0].device if tensors else device))
            found = moved.flatten().tolist(), tuple(moved.shape)
        return [found]

    def is_reshape(self) -> bool:
        """Return True if the plan merges or splits dims, so that the result can be a copy where a view would be expected."""
        return any(type(primitive) is Reshape and start < stop for start, stop, primitive in self.steps)


class ViewPlan(ShapePlan):
    """Plan of an operation whose result is a view."""

    __slots__ = ()

    is_view = True


class ExpandPlan(ViewPlan):
    """Plan of ``unsqueeze`` or ``expand``."""

    __slots__ = ()

    repeats = True


class ComputedPlan(ShapePlan):
    """Plan of an operation that computes new elements, which only tensors can hold."""

    __slots__ = ()

    creates_values = True


class WholePlan(ShapePlan):
    """Plan that needs every leaf whole, so that a lazy stack is stacked first; maybe with a tensor of positions, ``index``."""

    __slots__ = ("index",)

    def __init__(self, batch: Shape, lead: Shape, leaf: Leaf, index: Tensor | None = None) -> None:
        self.batch = batch
        self.n = len(batch)
        self.lead = lead
        self.leaf = leaf
        self.index = index

    @property
    def steps(self) -> Sequence[Step]:  # type: ignore[override]
        """One step, or none for an operation that changes no dim."""
        return (Step(0, len(self.batch), Whole(self.lead)),) if self.n or self.lead else ()

    def along(self, stack_dim: int) -> None:
        """Return None: the members must be stacked first."""


class MultiPlan(ShapePlan):
    """Base of the plans whose ``leaf`` returns several tensors, one per part.

    Attributes:
        leads: the new leading dims of each part.
    """

    __slots__ = ("leads",)

    leads: Sequence[Shape]


class SplitPlan(MultiPlan):
    """Plan that splits a dim into views; its only step is a :class:`~._plan_steps.Split`."""

    __slots__ = ()

    is_view = True

    def __init__(self, batch: Shape, steps: Sequence[Step], *spelling: Any) -> None:
        super().__init__(batch, steps, *spelling)
        self.leads = [part.resize(batch) for part in steps[0].list_parts(batch)]

    def locate(self, size: Shape, device: torch.device | None = None) -> list[GatherMap]:
        if not self.lead:  # unbind() of a long list is common
            block = prod(size[1:])
            return [(range(i * block, i * block + block), size[1:]) for i in range(size[0])]
        parts = [part.locate(size) for part in self.steps[0].list_parts(size)]
        return [part for part in parts if part is not None]


_MAX_CACHED = 256
#: Argument types for which equal values give equal plans, so that plans can be cached.
REPEATING = frozenset({int, type(None), type(...)})


def cache_plans(plan: Callable[..., P]) -> Callable[..., P]:
    """Wrap a plan function with an LRU cache, used if all arguments are ints, None, ``...`` or tuples of these."""

    @functools.lru_cache(_MAX_CACHED, typed=True)
    def make_plan(*args: object) -> P:
        for arg in args:
            if not REPEATING.issuperset(map(type, arg if isinstance(arg, tuple) else (arg,))):
                raise TypeError
        return plan(*args)

    @functools.wraps(plan)
    def get_plan(*args: object) -> P:
        # torch.compile warns about lru_cache and ignores it.
        if not torch.compiler.is_compiling():
            try:
                return make_plan(*args)
            except TypeError:  # an argument is invalid, or a list or another int
                args = tuple(
                    [as_ints(arg) if isinstance(arg, (tuple, list)) else as_int(arg) for arg in args]
                )
            try:
                return make_plan(*args)
            except TypeError:  # an argument is invalid or cannot be cached
                check_arguments(plan, args)
        return plan(*args)

    return get_plan


def check_arguments(plan: Callable[..., object], args: Sequence[object]) -> None:
    """Raise TypeError if an argument of a plan function, except the batch, has another type than its annotation says."""
    what = plan.__name__.removesuffix("_plan")
    for (name, annotation), value in list(zip(plan.__annotations__.items(), args))[1:]:
        check_ints(what, name, value, annotation)


#: The types that the annotations of plan functions name, in words.
_IN_WORDS = {"int": "an int", "Sequence[int]": "a sequence of ints", "Tensor": "a tensor", "None": "None"}
_INTS = (int, np.integer, torch.SymInt)


def check_ints(what: str, name: str, value: object, annotation: str = "Sequence[int]") -> None:
    """Raise TypeError if the argument ``name`` of the operation ``what`` is not of the annotated type."""
    taken = [part for part in annotation.split(" | ") if part in _IN_WORDS]
    if (
        not taken
        or ("int" in taken and isinstance(as_int(value), _INTS))
        or ("None" in taken and value is None)
        or ("Tensor" in taken and isinstance(value, Tensor))
        or ("Sequence[int]" in taken and _is_ints(value))
    ):
        return
    words = " or ".join(_IN_WORDS[part] for part in taken)
    raise TypeError(f"{what}: {name} is {words}; got {value!r}")


def _is_ints(value: object) -> bool:
    """Return True for several ints: a sequence, an array or a tensor."""
    return (
        isinstance(value, Iterable)
        and not isinstance(value, (str, dict))
        and all(isinstance(as_int(item), _INTS) for item in value)
    )


class Sizes(dict[Shape, tuple[Any, ...]]):
    """Cache from a leaf's shape to ``(*lead, *shape[n:])``, the arguments of a call such as ``leaf.view(*sizes)``.

    torch parses starred ints three times as fast as a concatenated size, and most leaves share a few shapes.
    """

    __slots__ = ("_lead", "_n")

    def __init__(self, lead: Shape, n: int) -> None:
        self._lead = lead
        self._n = n

    def __missing__(self, shape: Shape) -> tuple[Any, ...]:
        if len(self) >= _MAX_CACHED:
            self.clear()
        sizes = self[shape] = self.of(shape)
        return sizes

    def of(self, shape: Shape) -> tuple[Any, ...]:
        """Compute the sizes of a shape without caching: a graph would treat a dict key as a constant."""
        # With no ints to star, the method would be called without a size, so pass an empty tuple.
        return (*self._lead, *shape[self._n :]) or ((),)


def broadcast_shape(*shapes: Shape) -> Shape | None:
    """Return the broadcast shape; None if the shapes do not broadcast or one has a size of -1."""
    if torch.compiler.is_compiling():
        # torch.broadcast_shapes accepts symbolic sizes, which the comparisons below would guard on.
        try:
            return tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            return None
    # The first call of torch.broadcast_shapes imports sympy, which is slow, so compute the shape here.
    ndim = max(map(len, shapes))
    result = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape, ndim - len(shape)):
            if size == -1 or (size != 1 and result[i] not in (1, size)):
                return None
            if size != 1:
                result[i] = size
    return tuple(result)


#: Types of slice bounds that need no conversion.
_ENDS = frozenset({int, type(None), torch.SymInt})


def slice_length(item: slice, size: int) -> int:
    """Return the number of positions that a slice selects from a dim; ValueError if its step is not positive."""
    start, stop, step = item.start, item.stop, item.step
    if step is not None and step <= 0:
        raise ValueError(f"the step of a slice must be greater than zero; got {item}")
    if type(start) not in _ENDS or type(stop) not in _ENDS or type(step) not in _ENDS:
        return len(range(size)[item])
    # This is faster than len(range(...)), which would also turn a dynamic size into a constant of the graph.
    if start is None:
        start = 0
    elif start < 0:
        start = max(start + size, 0)
    if stop is None:
        stop = size
    elif stop < 0:
        stop += size
    elif stop > size:
        stop = size
    length: int = stop - start if stop > start else 0
    return length if step is None else -(-length // step)


def compute_coordinates(position: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Convert flat positions (ints or int tensors) to coordinates in a batch of ``sizes``."""
    # The first call of torch.unravel_index imports sympy, which is slow.
    where = []
    for size in reversed(sizes):
        where.append(position % size)
        position = position // size
    return tuple(reversed(where))


def as_int(value: object) -> Any:
    """Convert a NumPy int or a 0-d tensor to int; return any other value unchanged."""
    if isinstance(value, np.integer) or (isinstance(value, Tensor) and not value.ndim):
        return to_int(value)
    return value


def as_ints(provided: Any) -> Shape:
    """Convert one int or a sequence of ints to a tuple of ints."""
    provided = provided if type(provided) in (int, tuple, list) else as_int(provided)
    if isinstance(provided, (int, torch.SymInt)):
        return (provided,)  # type: ignore[return-value]
    return tuple([item if type(item) is int else as_int(item) for item in provided])


def as_batch_size(batch_size: BatchSize | None) -> torch.Size:
    """Convert an int, a sequence of ints or None to a ``torch.Size``; BatchSizeError if a dim is invalid.

    >>> as_batch_size([3, 2]), as_batch_size(3), as_batch_size(None)
    (torch.Size([3, 2]), torch.Size([3]), torch.Size([]))
    """
    if batch_size is None:
        return torch.Size()
    if type(batch_size) is not torch.Size:
        try:
            plain = isinstance(batch_size, (list, tuple))
            batch_size = torch.Size(batch_size if plain else as_ints(batch_size))  # type: ignore[arg-type]
        except TypeError as error:
            raise BatchSizeError(
                f"a batch size is an int or a sequence of ints; got {batch_size!r}"
            ) from error
    for dim in batch_size:
        if (
            dim == -1 and RULES.follows_tensordict
        ):  # the ragged dim of nested tensors, which ends the batch dims here
            return batch_size[: batch_size.index(-1)]
        if dim < 0:
            raise BatchSizeError(f"a batch size has no negative dim; got {list(batch_size)}")
        if type(dim) is not int and isinstance(dim, np.integer):
            return as_batch_size(as_ints(batch_size))
    return batch_size


def wrap_dim(dim: int, ndim: int, name: str = "a dim") -> int:
    """Convert a dim to a non-negative int; DimError if it is out of range, TypeError if it is not an int."""
    if type(dim) is not int:
        dim = as_int(dim)
        if isinstance(dim, (bool, float)):
            raise TypeError(f"{name} is an int here; got {dim!r}")
    try:
        if 0 <= dim < ndim:
            return dim
        if -ndim <= dim < 0:
            return dim + ndim
    except TypeError:
        raise TypeError(f"{name} is an int here; got {dim!r}") from None
    if ndim == 0 and dim in (0, -1):
        # torch treats 0-d tensors as 1-d here; a batch without dims has nothing to operate on.
        raise DimError(f"Dimension specified as {dim} but the batch size [] has no dimensions")
    raise DimError(
        f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})"
    )


def wrap_dims(what: str, dims: int | Sequence[int], ndim: int) -> Shape:
    """Convert dims to different non-negative ints; DimError if one is out of range or repeated."""
    provided = as_ints(dims)
    wrapped = tuple([wrap_dim(dim, ndim) for dim in provided])
    if len(set(wrapped)) != len(wrapped):
        raise DimError(f"{what}: a dim appears several times in {list(provided)}")
    return wrapped
