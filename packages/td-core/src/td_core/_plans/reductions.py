"""Shape plans of reductions and scans along batch dims."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from torch import Tensor

from .plans import ComputedPlan, Leaf, MultiPlan, ShapePlan
from .steps import Shape, Step, Whole

Dims = tuple[int, ...]

#: Number of leading dims that a full reduction removes: more than any leaf has, so that feature dims are included.
ALL_DIMS = sys.maxsize


def scan_plan(
    batch: Shape, dim: int, make: Callable[[int], Leaf], sizes: Shape | None = None
) -> ComputedPlan:
    """Build the plan of an operation along one dim, which ``sizes`` replaces; ``make(dim)`` returns the leaf function."""
    step = Step(dim, dim + 1, Whole((batch[dim],) if sizes is None else sizes))
    return ComputedPlan(batch, (step,), lambda plan: make(plan.steps[0].start))


def reduce_plan(
    batch: Shape,
    dims: Dims | None,
    keepdim: bool,
    make: Callable[[Dims | None], Leaf],
    front: int | None = None,
) -> ShapePlan:
    """Build the plan of a reduction over some batch dims, or over all dims of a leaf (``dims`` None).

    ``make(dims)`` returns the function to call on a leaf. ``front`` is the size of the leading dim that it adds, or None.
    """
    kept = (1,) if keepdim else ()
    added = () if front is None else (Step(0, 0, Whole((front,))),)
    if dims is None:
        whole = Step(0, ALL_DIMS, Whole(kept * len(batch)))
        plan = ComputedPlan(batch, (whole, *added), lambda plan: make(None))
        plan.n = ALL_DIMS
        return plan
    # From the last dim to the first, so that no step moves the dims of the next one.
    steps = [Step(dim, dim + 1, Whole(kept)) for dim in sorted(dims, reverse=True)]
    return ComputedPlan(batch, (*steps, *added), partial(_spell_reduce, make), make(dims))


def _spell_reduce(make: Callable[[Dims | None], Leaf], plan: ShapePlan) -> Leaf:
    return make(tuple([start for start, stop, _ in reversed(plan.steps) if start < stop]))


class Pair(MultiPlan):
    """Plan of a scan or reduction that returns two results, values and indices."""

    __slots__ = ()

    creates_values = True

    def __init__(self, batch: Shape, steps: Sequence[Step], *spelling: Any) -> None:
        super().__init__(batch, steps, *spelling)
        self.leads = [self.lead, self.lead]


def flatten_features(leaf: Tensor, n: int) -> Tensor:
    """Flatten all dims after the first ``n`` to one dim: (2, 3, 4) to (2, 12), and (2,) to (2, 1), for ``n=1``."""
    return leaf.flatten(n) if leaf.ndim > n else leaf.unsqueeze(-1)


def make_call(
    name: str, keepdim: bool, options: Mapping[str, object]
) -> Callable[[tuple[int, ...] | None], Leaf]:
    """Return a function ``make(dims)`` that builds the leaf function of a tensor method that accepts several dims."""

    def make(dims: tuple[int, ...] | None) -> Leaf:
        if keepdim:
            if dims is None:
                return lambda leaf: getattr(leaf, name)(tuple(range(leaf.ndim)), keepdim=True, **options)
            return methodcaller(name, dims, keepdim=True, **options)
        where = dims[0] if dims is not None and len(dims) == 1 else dims
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
