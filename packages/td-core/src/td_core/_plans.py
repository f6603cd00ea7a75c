"""Plans: what an operation does to the leading dims of every leaf, computed once from the batch size.

A plan is a pure function of shapes. It holds the function to call on each leaf (``leaf``), the new leading dims
(``lead``) and how many old dims they replace (``n``). Each leaf and each nested node keeps its remaining dims.

A lazy stack applies a plan to its members: :meth:`ShapePlan.along` returns which members remain, the plan for
each of them, and the new stack dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import index as to_int
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ._dim_names import Names
from ._torch_private import break_graph
from .errors import DimError

Shape = tuple[int, ...]
P = TypeVar("P", bound="ShapePlan")


class Along(NamedTuple):
    """How a lazy stack applies a plan to its members.

    Attributes:
        picks: positions of the members in the result, in order; None: all members. An int: the result is that
            member, no longer a stack. For a plan with several results, a list with one of these per result, or None.
        plan: the plan to apply to each member; None: members are unchanged.
        stack_dim: the new stack dim; None where ``picks`` is an int.
    """

    picks: Any
    plan: ShapePlan | None
    stack_dim: int | None


def read_positions(index: Tensor) -> Any:
    """Return the int or list of ints that a tensor holds; None under vmap and for fake and meta tensors."""
    # Break the graph: in a graph, members would be copied, and writes to the copies would be lost.
    if torch.compiler.is_compiling():
        break_graph(
            "which members of a lazy stack a tensor selects is not known in a graph: index with a list, a range, a slice or "
            "an int, or densify() the stack first"
        )
    try:
        return index.tolist()
    except RuntimeError:
        return None


class ShapePlan:
    """Base of the plans with one result.

    Attributes:
        leaf: function called on each leaf (on the list of leaves, for plans that join).
        lead: the new leading dims.
        n: number of old leading dims that ``lead`` replaces.
        creates_values: True if the result has new (padding) elements, which only tensors can hold.
        is_view: True if the result is a view wherever strides allow it.
    """

    __slots__ = ("lead", "leaf", "n")

    creates_values: ClassVar[bool] = False
    is_view: ClassVar[bool] = False

    def __init__(self, leaf: Callable[[Any], Any], lead: Shape, n: int) -> None:
        self.leaf = leaf
        self.lead = lead
        self.n = n

    def dims(self) -> tuple[int | None, ...]:
        """Return, per new leading dim, the old dim whose name it keeps; the default keeps all."""
        return tuple(range(self.n))

    def resize_batch(self, size: torch.Size) -> torch.Size:
        """Compute the batch size of the result from that of a node."""
        return torch.Size(self.lead + size[self.n :])

    def rename_dims(self, names: Names | None) -> Names | None:
        """Compute the dim names of the result from those of a node."""
        if names is None:
            return None
        moved = tuple([None if dim is None else names[dim] for dim in self.dims()]) + names[self.n :]
        return moved if any(name is not None for name in moved) else None

    def along(self, stack_dim: int) -> Along | None:
        """Return how a lazy stack applies this plan to its members; None if it must be densified first."""
        if stack_dim >= self.n:
            # A nested stack can have more batch dims than the root: each member then has all the replaced dims.
            return Along(None, self, len(self.lead) + stack_dim - self.n)
        return self._along(stack_dim)

    def _along(self, stack_dim: int) -> Along | None:
        """Implement :meth:`along` for a stack dim that the plan replaces."""
        raise NotImplementedError

    def with_fill_value(self, value: float) -> ShapePlan | None:
        """Return this plan with ``value`` as the padding value; None for a plan that does more than padding."""
        return None

    def get_member_plan(self, stack_dim: int) -> tuple[ShapePlan | None, int] | None:
        """Return the plan per member and the new stack dim; None if members are dropped or reordered."""
        along = self.along(stack_dim)
        if along is None or along.picks is not None or along.stack_dim is None:
            return None
        return along.plan, along.stack_dim


class MultiPlan(ShapePlan):
    """Base of the plans whose ``leaf`` returns several tensors, one per part.

    Attributes:
        leads: the new leading dims of each part.
    """

    __slots__ = ("leads",)

    def __init__(self, leaf: Callable[[Any], Any], lead: Shape, n: int, leads: Sequence[Shape]) -> None:
        super().__init__(leaf, lead, n)
        self.leads = leads


_MAX_CACHED = 256
#: Argument types for which equal values give equal plans, so that plans can be cached.
REPEATING = frozenset({int, type(None), type(...)})


def cache_plans(plan: Callable[..., P]) -> Callable[..., P]:
    """Wrap a plan function with an LRU cache, used if all arguments are ints, None, ``...`` or tuples of these."""

    @functools.lru_cache(_MAX_CACHED, typed=True)
    def make_plan(*args: Any) -> P:
        for arg in args:
            if not REPEATING.issuperset(map(type, arg if isinstance(arg, tuple) else (arg,))):
                raise TypeError
        return plan(*args)

    @functools.wraps(plan)
    def get_plan(*args: Any) -> P:
        # torch.compile warns about lru_cache and ignores it.
        if not torch.compiler.is_compiling():
            try:
                return make_plan(*args)
            except TypeError:  # the arguments are invalid or cannot be cached
                args = tuple(
                    [as_ints(arg) if isinstance(arg, (tuple, list)) else as_int(arg) for arg in args]
                )
        return plan(*args)

    return get_plan


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


def as_int(value: Any) -> Any:
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


def wrap_dim(dim: int, ndim: int) -> int:
    """Convert a dim to a non-negative int; DimError if it is out of range, TypeError if it is not an int."""
    if type(dim) is not int:
        dim = as_int(dim)
        if isinstance(dim, bool):
            raise TypeError(f"a dim is an int here; got {dim!r}")
    try:
        if 0 <= dim < ndim:
            return dim
        if -ndim <= dim < 0:
            return dim + ndim
    except TypeError:
        raise TypeError(f"a dim is an int here; got {dim!r}") from None
    if ndim == 0 and dim in (0, -1):
        # torch treats 0-d tensors as 1-d here; a batch without dims has nothing to operate on.
        raise DimError(f"Dimension specified as {dim} but the batch size [] has no dimensions")
    raise DimError(
        f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})"
    )


def remove_size(sizes: Sequence[int], dim: int) -> Shape:
    """Remove the size at ``dim`` from a shape."""
    return (*sizes[:dim], *sizes[dim + 1 :])
