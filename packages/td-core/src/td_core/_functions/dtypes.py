"""Methods that cast every leaf to a dtype, one method per dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from .._python.method_factories import name_method
from .._torch.dtypes import METHODS, NAMES, ROWS
from .._torch.kernels import PLAIN
from .._tree.node import Core
from ..typing import NestedKey
from .operands import run_each_leaf

SelfT = TypeVar("SelfT", bound="DtypeMixin")
NodeT = TypeVar("NodeT", bound=Core)
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
        return _cast(self, name, leaf, cast_filter)

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


def _cast(node: SelfT, name: str, leaf: Callable[[Tensor], Tensor], cast_filter: CastFilter | None) -> SelfT:
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


class DtypeMixin(Core):
    """The method ``type`` and the casts to one dtype, such as ``float()`` and ``int64()``."""

    __slots__ = ()

    # Begin of casts: written by tools/generate_methods.py from the table in td_core/_torch/dtypes.py.
    bfloat16 = make_cast("bfloat16")
    bool = make_cast("bool")
    complex128 = make_cast("complex128")
    complex32 = make_cast("complex32")
    complex64 = make_cast("complex64")
    double = make_cast("double")
    float = make_cast("float")
    float16 = make_cast("float16")
    float32 = make_cast("float32")
    float64 = make_cast("float64")
    half = make_cast("half")
    int = make_cast("int")
    int16 = make_cast("int16")
    int32 = make_cast("int32")
    int64 = make_cast("int64")
    int8 = make_cast("int8")
    qint32 = make_cast("qint32")
    qint8 = make_cast("qint8")
    quint4x2 = make_cast("quint4x2")
    quint8 = make_cast("quint8")
    uint16 = make_cast("uint16")
    uint32 = make_cast("uint32")
    uint64 = make_cast("uint64")
    uint8 = make_cast("uint8")
    # End of casts.

    def type(self, dst_type: Any, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast the leaves to a dtype.

        Args:
            dst_type: a dtype, or another argument that :meth:`torch.Tensor.type` accepts.
            cast_filter: takes the key path (a tuple) and the leaf; if it returns False, the leaf is not cast.

        >>> TensorDict({"a": torch.zeros(2)}).type(torch.int8)["a"].dtype
        torch.int8
        """
        leaf = CASTS.get(dst_type) or methodcaller("type", dst_type)
        return _cast(self, "type", leaf, cast_filter)
