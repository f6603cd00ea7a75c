"""What a plan is: one operation on the leading dims of every leaf, worked out once from the batch size.

A plan is a pure function of shapes. It says what to call on a leaf (``leaf``), which leading dims come out
(``lead``) and how many old ones they replace (``n``); every leaf and every sub-collection keeps its own tail
behind them.

A lazy stack applies a plan to its members: :meth:`ShapePlan.along` says which members remain, what happens to
each of them, and where the stack dim goes.
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
    """A plan seen from a stack of members along one batch dim.

    Attributes:
        picks: which members the result has, in order; None: all of them. An int: the result is that one
            member, no longer a stack. For an exploding plan a list with one of these for each part, or None.
        plan: what happens to each member; None: nothing.
        stack_dim: where the stack dim is afterwards; None where ``picks`` is an int.
    """

    picks: Any
    plan: ShapePlan | None
    stack_dim: int | None


def read_positions(index: Tensor) -> Any:
    """Return the position, or the list of them, that a tensor holds; None where it cannot be known.

    That is so under vmap, and of fake and meta tensors. A graph ends here: to go on without the positions would copy
    members that share their tensors outside it, and what is written to the copy would be lost.
    """
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
    """Base of the plans that give one result.

    Attributes:
        leaf: what is called on each leaf (on the list of leaves, for plans that join).
        lead: the new leading dims.
        n: how many leading dims they replace.
        invents: whether elements of the result come from nowhere, so that values which are no numbers cannot
            follow.
        shares: whether the result is a view, as far as strides allow it.
    """

    __slots__ = ("lead", "leaf", "n")

    creates_values: ClassVar[bool] = False
    is_view: ClassVar[bool] = False

    def __init__(self, leaf: Callable[[Any], Any], lead: Shape, n: int) -> None:
        self.leaf = leaf
        self.lead = lead
        self.n = n

    def dims(self) -> tuple[int | None, ...]:
        """For each new leading dim, the old dim whose name it keeps; here every dim keeps its own."""
        return tuple(range(self.n))

    def resize_batch(self, size: torch.Size) -> torch.Size:
        """Return what becomes of the batch size of a node."""
        return torch.Size(self.lead + size[self.n :])

    def rename_dims(self, names: Names | None) -> Names | None:
        """Return what becomes of the dim names of a node."""
        if names is None:
            return None
        moved = tuple([None if dim is None else names[dim] for dim in self.dims()]) + names[self.n :]
        return moved if any(name is not None for name in moved) else None

    def along(self, stack_dim: int) -> Along | None:
        """Say what a lazy stack does with its members; None: they must be stacked first."""
        if stack_dim >= self.n:
            # A stack whose batch is longer than that of the root: each member has all the dims that are replaced.
            return Along(None, self, len(self.lead) + stack_dim - self.n)
        return self._along(stack_dim)

    def _along(self, stack_dim: int) -> Along | None:
        """Say it for a stack dim that is among the dims that are replaced."""
        raise NotImplementedError

    def with_fill_value(self, value: float) -> ShapePlan | None:
        """Return the plan with ``value`` for the elements that come from nowhere, if it only adds such elements."""
        return None

    def get_member_plan(self, stack_dim: int) -> tuple[ShapePlan | None, int] | None:
        """Return the plan for the members and the new stack dim, where every member stays in its place."""
        along = self.along(stack_dim)
        if along is None or along.picks is not None or along.stack_dim is None:
            return None
        return along.plan, along.stack_dim


class MultiPlan(ShapePlan):
    """Base of the plans whose ``leaf`` gives one tensor for each part.

    Attributes:
        leads: the new leading dims of each part.
    """

    __slots__ = ("leads",)

    def __init__(self, leaf: Callable[[Any], Any], lead: Shape, n: int, leads: Sequence[Shape]) -> None:
        super().__init__(leaf, lead, n)
        self.leads = leads


_MAX_CACHED = 256
#: Of such arguments, equal ones mean the same.
REPEATING = frozenset({int, type(None), type(...)})


def cache_plans(plan: Callable[..., P]) -> Callable[..., P]:
    """Return a function that works out each plan once, for the batch sizes and arguments that came lately.

    Programs repeat their operations, and working out a plan takes as long as applying it to some leaves. Plans are kept for
    ints, None, ``...`` and tuples of them; no other argument leaves anything behind. Ints of numpy become ints.

    >>> plan = cache_plans(lambda batch, dim: object())
    >>> plan((2, 3), 0) is plan((2, 3), 0), plan((2, 3), [0]) is plan((2, 3), [0])
    (True, False)
    """

    @functools.lru_cache(_MAX_CACHED, typed=True)
    def make_plan(*args: Any) -> P:
        for arg in args:
            if not REPEATING.issuperset(map(type, arg if isinstance(arg, tuple) else (arg,))):
                raise TypeError
        return plan(*args)

    @functools.wraps(plan)
    def get_plan(*args: Any) -> P:
        # The compiler does not see caches, and says so.
        if not torch.compiler.is_compiling():
            try:
                return make_plan(*args)
            except TypeError:  # what is not kept, or wrong
                args = tuple(
                    [as_ints(arg) if isinstance(arg, (tuple, list)) else as_int(arg) for arg in args]
                )
        return plan(*args)

    return get_plan


class Sizes(dict[Shape, tuple[Any, ...]]):
    """For a leaf's shape, the sizes ``lead`` followed by those of the leaf from dim ``n`` on, to be starred.

    Starred ints are three times as fast for torch to parse as a size that was put together; most leaves of a
    collection share a few shapes, so each is put together once.
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
        """Return the sizes for a shape without keeping them: a key of a dict is a constant of a graph."""
        # Starring no ints at all would call the method without a size.
        return (*self._lead, *shape[self._n :]) or ((),)


def broadcast_shape(*shapes: Shape) -> Shape | None:
    """Return the shape that shapes broadcast to; None where they do not, or where one is uneven.

    The first call of :func:`torch.broadcast_shapes` imports sympy, which takes longer than importing the package.

    >>> broadcast_shape((2, 1), (3,)), broadcast_shape((2,), (3,))
    ((2, 3), None)
    """
    if torch.compiler.is_compiling():
        # It takes sizes that depend on data, of which a graph cannot tell whether they are one.
        try:
            return tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            return None
    ndim = max(map(len, shapes))
    result = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape, ndim - len(shape)):
            if size == -1 or (size != 1 and result[i] not in (1, size)):
                return None
            if size != 1:
                result[i] = size
    return tuple(result)


#: What a slice may be made of that needs no conversion.
_ENDS = frozenset({int, type(None), torch.SymInt})


def slice_length(item: slice, size: int) -> int:
    """Return how many positions of a dim a slice has.

    Raises:
        ValueError: its step is not positive.

    >>> slice_length(slice(1, None, 2), 4)
    2
    """
    start, stop, step = item.start, item.stop, item.step
    if step is not None and step <= 0:
        raise ValueError(f"the step of a slice must be greater than zero; got {item}")
    if type(start) not in _ENDS or type(stop) not in _ENDS or type(step) not in _ENDS:
        return len(range(size)[item])
    # Faster than a range, which would also make a constant of a size that varies from call to call of a graph.
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
    """Return where in a batch an element stands that has this position in the flattened one; ints or int tensors.

    The first call of :func:`torch.unravel_index` imports sympy too.

    >>> compute_coordinates(5, (2, 3))
    (1, 2)
    """
    where = []
    for size in reversed(sizes):
        where.append(position % size)
        position = position // size
    return tuple(reversed(where))


def as_int(value: Any) -> Any:
    """Return an int of numpy, or a tensor that holds one, as the int for which torch takes it; anything else as it is."""
    if isinstance(value, np.integer) or (isinstance(value, Tensor) and not value.ndim):
        return to_int(value)
    return value


def as_ints(provided: Any) -> Shape:
    """Return one int, or several, as a tuple.

    >>> as_ints(2), as_ints([torch.tensor(2), 3])
    ((2,), (2, 3))
    """
    provided = provided if type(provided) in (int, tuple, list) else as_int(provided)
    if isinstance(provided, (int, torch.SymInt)):
        return (provided,)  # type: ignore[return-value]
    return tuple([item if type(item) is int else as_int(item) for item in provided])


def wrap_dim(dim: int, ndim: int) -> int:
    """Return a dim as a non-negative int.

    Raises:
        DimError: out of range, in the words of torch.
        TypeError: it is no int.
    """
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
        # torch lets 0-d tensors pass as 1-d here; a batch without dims has nothing to operate on.
        raise DimError(f"Dimension specified as {dim} but the batch size [] has no dimensions")
    raise DimError(
        f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})"
    )


def remove_size(sizes: Sequence[int], dim: int) -> Shape:
    """Return sizes without the one at ``dim``."""
    return (*sizes[:dim], *sizes[dim + 1 :])
