"""Cast leaves to a dtype, and build one method for each dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .._python.public_names import name_method
from .._torch.dtypes import METHODS, NAMES, ROWS
from .._torch.kernels import PLAIN
from .._tree.node import Core
from ..typing import NestedKey
from .operands import run_each_leaf

NodeT = TypeVar("NodeT", bound=Core)
SelfT = TypeVar("SelfT", bound=Core)
T_co = TypeVar("T_co", covariant=True)
CastFilter = Callable[[NestedKey, Tensor], bool]

#: Tensor methods per dtype: they parse their arguments faster than ``to``.
CASTS = {dtype: getattr(Tensor, row.fast) for dtype, row in ROWS.items() if row.fast}


def _make_caster(name: str) -> Callable[[Tensor], Tensor]:
    """Return a function that casts a leaf; it calls ``to`` for tensor subclasses, which may support only that."""
    if (dtype := NAMES.get(name)) is None:
        return partial(_refuse_cast, name)
    fast = CASTS.get(dtype)
    if fast is None:
        # torch.compile can trace a partial that was created outside the graph, but not a methodcaller.
        return partial(Tensor.to, dtype=dtype)
    return lambda leaf: fast(leaf) if type(leaf) in PLAIN else leaf.to(dtype)


def _refuse_cast(name: str, leaf: Tensor) -> Tensor:
    raise NotImplementedError(f"torch {torch.__version__} has no dtype {name}: a newer release may have it")


class BoundCast(Protocol[T_co]):
    """Type of a bound method that casts the leaves."""

    def __call__(self, *, cast_filter: CastFilter | None = None) -> T_co:
        """Cast the leaves that ``cast_filter`` accepts."""


class Cast(Protocol):
    """Type of the methods that :func:`make_cast` builds: they return the type of the collection."""

    def __get__(self, instance: SelfT, owner: type | None = None) -> BoundCast[SelfT]:
        """Return the method bound to ``instance``."""


def make_cast(name: str) -> Cast:
    """Build the casting method ``name`` of the table of dtypes."""
    row = METHODS[name]
    dtype = f"torch.{row.name}"
    leaf: Callable[[Tensor], Tensor] = getattr(Tensor, name, None) or _make_caster(dtype)

    def method(self: SelfT, *, cast_filter: CastFilter | None = None) -> SelfT:
        return cast_leaves(self, name, leaf, cast_filter)

    outcome = f"""
        >>> TensorDict({{"a": torch.zeros(2)}}).{name}()["a"].dtype
        {dtype}
        """
    return name_method(
        method,
        name,
        f"""Cast every leaf to ``{dtype}`` and return the collection of the results.

        Leaves that already have this dtype are not copied. Values that are not tensors are kept.

        Args:
            cast_filter: takes the key path (a tuple) and the leaf; if it returns False, the leaf is not cast.
{"" if "cast" in row.cannot or dtype not in NAMES else outcome}""",
    )


def cast_leaves(
    node: SelfT, name: str, leaf: Callable[[Tensor], Tensor], cast_filter: CastFilter | None
) -> SelfT:
    """Cast the leaves that the filter accepts, by default that of the class, with the function ``leaf``."""
    cast_filter = node._schema.cast_filter if cast_filter is None else cast_filter
    if cast_filter is not None:
        return cast_some(node, leaf, cast_filter)
    return run_each_leaf(name, node, leaf)


def cast_some(node: NodeT, leaf: Callable[[Tensor], Tensor], cast_filter: CastFilter) -> NodeT:
    """Apply ``leaf`` to the leaves for which ``cast_filter`` returns True."""

    def cast_entry(key: NestedKey, value: Tensor) -> Tensor:
        return leaf(value) if cast_filter((key,) if isinstance(key, str) else key, value) else value

    result: NodeT = node.named_apply(cast_entry, nested_keys=True)
    return result
