"""Shape plans of reductions and scans along batch dims."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

from torch import Tensor

from .._plans import Along, MultiPlan, Shape, ShapePlan, remove_size

Leaf = Callable[[Any], Any]

#: Number of leading dims that a full reduction removes: more than any leaf has, so that feature dims are included.
ALL_DIMS = sys.maxsize


class Scan(ShapePlan):
    """Plan of an operation along one dim that keeps the shape; ``make(dim)`` returns the function to call on a leaf."""

    __slots__ = ("_dim", "_make")
    creates_values = True

    def __init__(self, batch: Shape, dim: int, make: Callable[[int], Leaf]) -> None:
        super().__init__(make(dim), batch, len(batch))
        self._dim = dim
        self._make = make

    def along(self, stack_dim: int) -> Along | None:
        if stack_dim == self._dim:
            return None
        inner = Scan(remove_size(self.lead, stack_dim), self._dim - (stack_dim < self._dim), self._make)
        return Along(None, inner, stack_dim)


class Reduce(ShapePlan):
    """Plan of a reduction over some batch dims, or over all dims of a leaf (``dims`` None).

    ``make(dims)`` returns the function to call on a leaf. ``front`` is the size of the leading dim that it adds, or None.
    """

    __slots__ = ("_batch", "_dims", "_front", "_keepdim", "_kept", "_make")
    creates_values = True

    def __init__(
        self,
        batch: Shape,
        dims: tuple[int, ...] | None,
        keepdim: bool,
        make: Callable[[tuple[int, ...] | None], Leaf],
        front: int | None = None,
    ) -> None:
        gone: Sequence[int] = range(len(batch)) if dims is None else dims
        kept = tuple([dim for dim in range(len(batch)) if keepdim or dim not in gone])
        lead = tuple([1 if dim in gone else batch[dim] for dim in kept])
        self._kept: tuple[int | None, ...] = kept
        if front is not None:
            lead, self._kept = (front, *lead), (None, *kept)
        super().__init__(make(dims), lead, ALL_DIMS if dims is None else len(batch))
        self._batch = batch
        self._dims = dims
        self._keepdim = keepdim
        self._make = make
        self._front = front

    def dims(self) -> tuple[int | None, ...]:
        return self._kept

    def along(self, stack_dim: int) -> Along | None:
        dims = self._dims
        if dims is None or stack_dim in dims:
            return None
        inner_dims = tuple([dim - (stack_dim < dim) for dim in dims])
        inner = Reduce(
            remove_size(self._batch, stack_dim), inner_dims, self._keepdim, self._make, self._front
        )
        return Along(None, inner, self._kept.index(stack_dim))


class Pair(MultiPlan):
    """Plan of a scan or reduction that returns two results, values and indices."""

    __slots__ = ("_plan",)
    creates_values = True

    def __init__(self, plan: ShapePlan) -> None:
        super().__init__(plan.leaf, plan.lead, plan.n, [plan.lead, plan.lead])
        self._plan = plan

    def dims(self) -> tuple[int | None, ...]:
        return self._plan.dims()

    def along(self, stack_dim: int) -> Along | None:
        along = self._plan.along(stack_dim)
        if along is None or along.plan is None:
            return along
        return Along(along.picks, Pair(along.plan), along.stack_dim)


def flatten_features(leaf: Tensor, n: int) -> Tensor:
    """Flatten all dims after the first ``n`` to one dim: (2, 3, 4) to (2, 12), and (2,) to (2, 1), for ``n=1``."""
    return leaf.flatten(n) if leaf.ndim > n else leaf.unsqueeze(-1)


def make_call(name: str, keepdim: bool, options: dict[str, Any]) -> Callable[[tuple[int, ...] | None], Leaf]:
    """Return a function ``make(dims)`` that builds the leaf function of a tensor method that accepts several dims."""

    def make(dims: tuple[int, ...] | None) -> Leaf:
        if keepdim:
            if dims is None:
                return lambda leaf: getattr(leaf, name)(tuple(range(leaf.ndim)), keepdim=True, **options)
            return methodcaller(name, dims, keepdim=True, **options)
        where: Any = dims[0] if dims is not None and len(dims) == 1 else dims
        if options:
            return methodcaller(name, **options) if where is None else methodcaller(name, where, **options)
        # Speed: look the method up once, not once per leaf.
        function = getattr(Tensor, name)
        return function if where is None else lambda leaf: function(leaf, where)

    return make


def make_single_dim_call(
    call: Callable[[Tensor, int], Tensor], keepdim: bool, front: bool = False
) -> Callable[[tuple[int, ...] | None], Leaf]:
    """Return a function ``make(dims)`` that builds the leaf function of a ``call`` that reduces only one dim.

    The leaf function flattens several dims to one first. ``front``: ``call`` adds a leading dim to its result.
    """

    def make(dims: tuple[int, ...] | None) -> Leaf:
        def leaf(value: Tensor) -> Tensor:
            ndim = value.ndim
            these: Sequence[int] = range(ndim) if dims is None else dims
            if len(these) == 1:
                result = call(value, these[0])
            else:
                rest = [dim for dim in range(ndim) if dim not in these]
                result = call(
                    value.permute(*rest, *these).flatten(len(rest)) if these else value.unsqueeze(-1), -1
                )
            if keepdim:
                for dim in sorted(these):
                    result = result.unsqueeze(dim + front)
            return result

        return leaf

    return make
