"""Pointwise operations: how each is computed, and the methods, most of which follow from the table of operations.

:mod:`.operands` defines which values are operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from .._plans.plans import broadcast_shape
from .._python.method_factories import name_method
from .._torch.dtypes import ScalarBeside, dtype_beside
from .._torch.kernels import Op, foreach, make_op
from .._torch.operators import OPERATIONS, Operation
from .._torch.private import foreach_kernel
from .._tree.coerce import build_nested
from .._tree.node import Core, make_dense
from .._writes.check import LEAF_ERRORS
from .._writes.inplace import write_leaves
from ..errors import StructureError
from .broadcasting import align_columns, expand_to_match, find_longer_size
from .flags import combine_flags, combine_logical, invert
from .operands import (
    NUMBERS,
    CoreT,
    Operand,
    check_operand,
    combine,
    combine_inplace,
    compare_values,
    convert_values,
    operand_inplace,
    operand_leaves,
    raise_at_leaf,
    raise_foreign,
    run_each_leaf,
    write_result,
)


def _make_extreme(tensors: str, number: str) -> Op:
    """Build ``maximum`` or ``minimum``. A number clamps instead: forward-mode gradients of torch's maximum would be wrong."""
    of_tensor, of_number = getattr(torch, tensors), getattr(torch, number)
    of_tensors, of_numbers = foreach_kernel(tensors), foreach_kernel(number)

    def call_single(leaf: Tensor, other: object) -> object:
        return (of_tensor if isinstance(other, Tensor) else of_number)(leaf, other)

    def call_fused(leaves: list[Tensor], other: object) -> object:
        return (of_tensors if type(other) is list else of_numbers)(leaves, other)  # type: ignore[misc]

    return Op(call_fused if of_tensors and of_numbers else None, call_single)


def _both(leaf: Tensor, other: object) -> Tensor:
    return torch.logical_and(leaf, torch.as_tensor(other, device=leaf.device))


def _swap_operands(function: Callable[[object, object], object]) -> Op:
    def call_single(leaf: Tensor, other: object) -> object:
        return function(other, leaf)

    return Op(None, call_single)


def _make_ops(row: Operation) -> dict[str, Op]:
    """Build the operation of a row, and the one in place."""
    name, inplace = row.function or row.name, f"{row.kernel or row.name}_"
    plain = (
        _make_extreme(name, row.kernel) if row.kernel else make_op(name, getattr(torch, name), row.loop_in)
    )
    return {
        row.name: plain,
        **({f"{row.name}_": make_op(inplace, getattr(Tensor, inplace))} if row.inplace else {}),
    }


ROWS = {row.name: row for row in OPERATIONS}

#: All operations by name. Methods read them from this global, since torch.compile cannot trace such an object in a
#: closure.
OPS: dict[str, Op] = {
    **{
        row.reflected: _swap_operands(getattr(operator, f"__{row.dunder}__"))
        for row in OPERATIONS
        if row.dunder and row.reflected
    },
    **{name: this for row in OPERATIONS for name, this in _make_ops(row).items()},
    "logical_and": Op(None, _both),
}

#: The operations that also combine values that are bools.
LOGICAL = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "logical_and"})


def apply_unary(node: CoreT, name: str) -> CoreT:
    """Return a collection of the results of an operation on each leaf."""
    this = OPS[name]
    leaves: list[Tensor] = []
    try:
        if this.fused is None:
            return node._map(this.single)
        levels = node._flatten_leaves(leaves)
        return node._unflatten(foreach(this, leaves, plain=type(levels) is dict), levels)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, node._leaves())
    except AttributeError as error:
        raise_foreign(error, name, node)


def apply_unary_inplace(node: CoreT, name: str) -> CoreT:
    """Apply an operation to each leaf in place; return the collection."""
    try:
        leaves = node._leaves()
    except AttributeError as error:
        raise_foreign(error, name, node)
    write_leaves(name, node, OPS[name], leaves)
    return node


def apply_binary(node: CoreT, name: str, other: Operand, default: object = None) -> CoreT:
    """Combine each leaf with an operand; raise TypeError if it is not one."""
    combined = combine_logical if name in LOGICAL else combine
    return check_operand(combined(node, name, OPS[name], other, default), name, other)


def apply_binary_inplace(node: CoreT, name: str, other: Operand) -> CoreT:
    """Combine each leaf with an operand in place; raise TypeError if it is not one."""
    return check_operand(combine_inplace(node, name, OPS[name], other), name, other)


def compare(node: Core, name: str, symbol: str, other: Operand) -> object:
    """Compare each leaf with an operand, and the values that are not tensors with those of another collection."""
    if isinstance(other, dict):
        other = build_nested(other, node.batch_size, None)
    this = OPS[name]
    foreign: list[Core] = []
    equality = name in ("eq", "ne")
    try:
        result = combine(node, symbol, this, other, None, foreign)
    except StructureError:
        if not isinstance(other, Core):
            raise
        # One may have a tensor where the other has a number that was kept as a value.
        strict = not equality
        try:
            node, other = (
                convert_values(node, other, strict=strict),
                convert_values(other, node, strict=strict),
            )
        except AttributeError as error:
            raise_foreign(error, symbol, node, other)
        foreign.clear()
        result = combine(node, symbol, this, other, None, foreign)
    if not foreign or result is NotImplemented:
        return result
    if not isinstance(other, Core):
        return combine_flags(result, node, symbol, this, other)
    return compare_values(result, node, other, lambda a, b, _: a._compare(b, this.single), equality)


def _scale_operand(this: Op, alpha: float | None, other: Operand) -> tuple[Op, Operand]:
    """Return an operation and an operand that together apply ``alpha * other``."""
    if alpha is None:
        return this, other
    if type(other) is type(alpha) and type(other) in (int, float):
        return this, other * alpha
    # Fused kernels reject alpha for mixed dtypes, and multiplying first can change the dtype: use the single op.
    return Op(None, partial(this.single, alpha=alpha)), other


T_co = TypeVar("T_co", covariant=True)


class UnaryMethod(Protocol):
    """Type of the methods of unary operations."""

    def __get__(self, instance: CoreT, owner: type | None = None) -> Callable[[], CoreT]:
        """Return the method bound to ``instance``."""


class BoundBinary(Protocol[T_co]):
    """Type of the bound method of a binary operation."""

    def __call__(self, other: Operand, *, default: object = None) -> T_co:
        """Combine the leaves with ``other``."""


class BinaryMethod(Protocol):
    """Type of the methods of binary operations."""

    def __get__(self, instance: CoreT, owner: type | None = None) -> BoundBinary[CoreT]:
        """Return the method bound to ``instance``."""


class BoundOperator(Protocol[T_co]):
    """Type of the bound method of an operator, or of a binary operation in place."""

    def __call__(self, other: Operand) -> T_co:
        """Combine the leaves with ``other``."""


class OperatorMethod(Protocol):
    """Type of the methods of operators, and of binary operations in place."""

    def __get__(self, instance: CoreT, owner: type | None = None) -> BoundOperator[CoreT]:
        """Return the method bound to ``instance``."""


def make_unary(name: str, elements: str, result: str) -> UnaryMethod:
    """Build the method of a unary operation; the example has a leaf of these elements."""

    def method(self: CoreT) -> CoreT:
        return apply_unary(self, name)

    return name_method(
        method,
        name,
        f"""Return {ROWS[name].returns}.

        >>> TensorDict({{"a": torch.tensor({elements})}}).{name}()["a"]
        {result}
        """,
    )


def make_unary_inplace(name: str) -> UnaryMethod:
    """Build the method ``name``, which ends in ``_``, of a unary operation."""

    def method(self: CoreT) -> CoreT:
        return apply_unary_inplace(self, name)

    return name_method(method, name, f"Compute :meth:`{name[:-1]}` in place; return self.")


def make_binary(name: str, result: str) -> BinaryMethod:
    """Build the method of a binary operation."""

    def method(self: CoreT, other: Operand, *, default: object = None) -> CoreT:
        return apply_binary(self, name, other, default)

    return name_method(
        method,
        name,
        f"""Return {ROWS[name].returns}; arguments are those of :meth:`add`.

        >>> TensorDict({{"a": torch.tensor([1, 6])}}).{name}(4)["a"]
        {result}
        """,
    )


def make_binary_inplace(name: str) -> OperatorMethod:
    """Build the method ``name``, which ends in ``_``, of a binary operation."""

    def method(self: CoreT, other: Operand) -> CoreT:
        return apply_binary_inplace(self, name, other)

    doc = f"Compute :meth:`{name[:-1]}` in place; return self. Operands and errors are those of :meth:`add_`."
    return name_method(method, name, doc)


def make_operator(name: str, expression: str, operation: str) -> OperatorMethod:
    """Build the special method ``name`` of an operator, for an expression such as ``td + x``."""

    def method(self: CoreT, other: Operand) -> CoreT:
        return combine(self, expression, OPS[operation], other)

    def logical(self: CoreT, other: Operand) -> CoreT:
        return combine_logical(self, expression, OPS[operation], other)

    made = logical if operation in LOGICAL else method
    return name_method(made, name, f"Return ``{expression}``; ``x`` is an operand of :meth:`add`.")


def make_augmented(name: str, expression: str, operation: str) -> OperatorMethod:
    """Build the special method ``name`` of an augmented assignment, such as ``td += x``."""

    def method(self: CoreT, other: Operand) -> CoreT:
        return combine_inplace(self, expression, OPS[operation], other)

    doc = f"Compute ``{expression}`` in place; ``x`` is an operand of :meth:`add_`."
    return name_method(method, name, doc)


def make_comparison(name: str, expression: str, operation: str) -> Callable[[Any, object], Any]:
    """Build the special method ``name`` of a comparison, such as ``td < x``."""

    def method(self: Core, other: object) -> object:
        return compare(self, operation, expression, other)

    doc = f"Return ``{expression}`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."
    return name_method(method, name, doc)


class PointwiseMixin(Core):
    """Pointwise operations, their operators and comparisons."""

    __slots__ = ()

    #: None makes numpy return NotImplemented, so that ``array + td`` calls ``td.__radd__``.
    __array_ufunc__ = None

    # Begin of operations: written by tools/generate_methods.py from the table in td_core/_torch/operators.py.
    abs = make_unary("abs", "[-1.5, 0.5]", "tensor([1.5000, 0.5000])")
    abs_ = make_unary_inplace("abs_")
    __abs__ = abs
    acos = make_unary("acos", "[0.25, 0.5]", "tensor([1.3181, 1.0472])")
    acos_ = make_unary_inplace("acos_")
    asin = make_unary("asin", "[0.25, 0.5]", "tensor([0.2527, 0.5236])")
    asin_ = make_unary_inplace("asin_")
    atan = make_unary("atan", "[-1.5, 0.5]", "tensor([-0.9828,  0.4636])")
    atan_ = make_unary_inplace("atan_")
    ceil = make_unary("ceil", "[-1.5, 0.5]", "tensor([-1.,  1.])")
    ceil_ = make_unary_inplace("ceil_")
    cos = make_unary("cos", "[-1.5, 0.5]", "tensor([0.0707, 0.8776])")
    cos_ = make_unary_inplace("cos_")
    cosh = make_unary("cosh", "[-1.5, 0.5]", "tensor([2.3524, 1.1276])")
    cosh_ = make_unary_inplace("cosh_")
    erf = make_unary("erf", "[-1.5, 0.5]", "tensor([-0.9661,  0.5205])")
    erf_ = make_unary_inplace("erf_")
    erfc = make_unary("erfc", "[-1.5, 0.5]", "tensor([1.9661, 0.4795])")
    erfc_ = make_unary_inplace("erfc_")
    exp = make_unary("exp", "[-1.5, 0.5]", "tensor([0.2231, 1.6487])")
    exp_ = make_unary_inplace("exp_")
    expm1 = make_unary("expm1", "[-1.5, 0.5]", "tensor([-0.7769,  0.6487])")
    expm1_ = make_unary_inplace("expm1_")
    floor = make_unary("floor", "[-1.5, 0.5]", "tensor([-2.,  0.])")
    floor_ = make_unary_inplace("floor_")
    frac = make_unary("frac", "[-1.5, 0.5]", "tensor([-0.5000,  0.5000])")
    frac_ = make_unary_inplace("frac_")
    isfinite = make_unary("isfinite", "[-torch.inf, 1, torch.inf]", "tensor([False,  True, False])")
    isnan = make_unary("isnan", "[1, torch.nan]", "tensor([False,  True])")
    isneginf = make_unary("isneginf", "[-torch.inf, 1, torch.inf]", "tensor([ True, False, False])")
    isposinf = make_unary("isposinf", "[-torch.inf, 1, torch.inf]", "tensor([False, False,  True])")
    isreal = make_unary("isreal", "[1, 1j]", "tensor([ True, False])")
    lgamma = make_unary("lgamma", "[-1.5, 0.5]", "tensor([0.8600, 0.5724])")
    lgamma_ = make_unary_inplace("lgamma_")
    log = make_unary("log", "[0.25, 0.5]", "tensor([-1.3863, -0.6931])")
    log_ = make_unary_inplace("log_")
    log10 = make_unary("log10", "[0.25, 0.5]", "tensor([-0.6021, -0.3010])")
    log10_ = make_unary_inplace("log10_")
    log1p = make_unary("log1p", "[0.25, 0.5]", "tensor([0.2231, 0.4055])")
    log1p_ = make_unary_inplace("log1p_")
    log2 = make_unary("log2", "[0.25, 0.5]", "tensor([-2., -1.])")
    log2_ = make_unary_inplace("log2_")
    neg = make_unary("neg", "[-1.5, 0.5]", "tensor([ 1.5000, -0.5000])")
    neg_ = make_unary_inplace("neg_")
    __neg__ = neg
    reciprocal = make_unary("reciprocal", "[-1.5, 0.5]", "tensor([-0.6667,  2.0000])")
    reciprocal_ = make_unary_inplace("reciprocal_")
    round = make_unary("round", "[-1.5, 0.5]", "tensor([-2.,  0.])")
    round_ = make_unary_inplace("round_")
    sigmoid = make_unary("sigmoid", "[-1.5, 0.5]", "tensor([0.1824, 0.6225])")
    sigmoid_ = make_unary_inplace("sigmoid_")
    sign = make_unary("sign", "[-1.5, 0.5]", "tensor([-1.,  1.])")
    sign_ = make_unary_inplace("sign_")
    sin = make_unary("sin", "[-1.5, 0.5]", "tensor([-0.9975,  0.4794])")
    sin_ = make_unary_inplace("sin_")
    sinh = make_unary("sinh", "[-1.5, 0.5]", "tensor([-2.1293,  0.5211])")
    sinh_ = make_unary_inplace("sinh_")
    sqrt = make_unary("sqrt", "[0.25, 0.5]", "tensor([0.5000, 0.7071])")
    sqrt_ = make_unary_inplace("sqrt_")
    tan = make_unary("tan", "[-1.5, 0.5]", "tensor([-14.1014,   0.5463])")
    tan_ = make_unary_inplace("tan_")
    tanh = make_unary("tanh", "[-1.5, 0.5]", "tensor([-0.9051,  0.4621])")
    tanh_ = make_unary_inplace("tanh_")
    trunc = make_unary("trunc", "[-1.5, 0.5]", "tensor([-1.,  0.])")
    trunc_ = make_unary_inplace("trunc_")
    __add__ = make_operator("__add__", "td + x", "add")
    __radd__ = make_operator("__radd__", "x + td", "add")
    __iadd__ = make_augmented("__iadd__", "td += x", "add_")
    bitwise_and = make_binary("bitwise_and", "tensor([0, 4])")
    __and__ = make_operator("__and__", "td & x", "bitwise_and")
    __rand__ = make_operator("__rand__", "x & td", "bitwise_and")
    __or__ = make_operator("__or__", "td | x", "bitwise_or")
    __ror__ = make_operator("__ror__", "x | td", "bitwise_or")
    __xor__ = make_operator("__xor__", "td ^ x", "bitwise_xor")
    __rxor__ = make_operator("__rxor__", "x ^ td", "bitwise_xor")
    clamp_max = make_binary("clamp_max", "tensor([1, 4])")
    clamp_max_ = make_binary_inplace("clamp_max_")
    clamp_min_ = make_binary_inplace("clamp_min_")
    div = make_binary("div", "tensor([0.2500, 1.5000])")
    div_ = make_binary_inplace("div_")
    __truediv__ = make_operator("__truediv__", "td / x", "div")
    __rtruediv__ = make_operator("__rtruediv__", "x / td", "rdiv")
    __itruediv__ = make_augmented("__itruediv__", "td /= x", "div_")
    logical_and = make_binary("logical_and", "tensor([True, True])")
    maximum = make_binary("maximum", "tensor([4, 6])")
    maximum_ = make_binary_inplace("maximum_")
    minimum = make_binary("minimum", "tensor([1, 4])")
    minimum_ = make_binary_inplace("minimum_")
    mod = make_binary("mod", "tensor([1, 2])")
    __mod__ = make_operator("__mod__", "td % x", "mod")
    mul = make_binary("mul", "tensor([ 4, 24])")
    mul_ = make_binary_inplace("mul_")
    __mul__ = make_operator("__mul__", "td * x", "mul")
    __rmul__ = make_operator("__rmul__", "x * td", "mul")
    __imul__ = make_augmented("__imul__", "td *= x", "mul_")
    pow = make_binary("pow", "tensor([   1, 1296])")
    pow_ = make_binary_inplace("pow_")
    __pow__ = make_operator("__pow__", "td ** x", "pow")
    __rpow__ = make_operator("__rpow__", "x ** td", "rpow")
    __ipow__ = make_augmented("__ipow__", "td **= x", "pow_")
    __sub__ = make_operator("__sub__", "td - x", "sub")
    __rsub__ = make_operator("__rsub__", "x - td", "rsub")
    __isub__ = make_augmented("__isub__", "td -= x", "sub_")
    __eq__ = make_comparison("__eq__", "td == x", "eq")
    __ne__ = make_comparison("__ne__", "td != x", "ne")
    __lt__ = make_comparison("__lt__", "td < x", "lt")
    __le__ = make_comparison("__le__", "td <= x", "le")
    __gt__ = make_comparison("__gt__", "td > x", "gt")
    __ge__ = make_comparison("__ge__", "td >= x", "ge")
    # End of operations.

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: ScalarBeside | None = None
    ) -> None:
        """Append a view of ``value`` per leaf, aligned with the batch dims, or ``scalar(leaf, value)`` if that is passed."""
        inner: Core = self._inner()
        if inner is not self:
            inner._broadcast_to_leaves(value, out, scalar)
            return
        # Each entry of another kind, such as a lazy stack, has its own part of the value.
        make_dense(dict(self._children()), self.batch_size)._broadcast_to_leaves(value, out, scalar)

    def __invert__(self) -> Self:
        """Return the bitwise not of each element; for bools the logical not."""
        return invert(self)

    def add(self, other: Operand, *, alpha: float | None = None, default: object = None) -> Self:
        """Return ``self + alpha * other``, element by element.

        Args:
            other: a number; a tensor whose dims broadcast against the batch dims, not the last dims of each leaf; or a
                collection with the same keys, whose batch size broadcasts.
            alpha: the factor of ``other``; None for 1.
            default: value of an entry that only one of two collections has; ``"intersection"`` drops such entries.

        Returns:
            A new collection of the same structure. Values that are not tensors are kept.

        Raises:
            StructureError: the keys differ, and ``default`` is None.
            BatchSizeError: ``other`` does not broadcast against the batch size.
            TypeError: ``other`` is not a number, a tensor or a collection.

        >>> TensorDict({"a": torch.ones(2)}).add(1, alpha=2)["a"]
        tensor([3., 3.])
        """
        this, operand = _scale_operand(OPS["add"], alpha, other)
        return check_operand(combine(self, "add", this, operand, default), "add", other)

    def add_(self, other: Operand, *, alpha: float | None = None) -> Self:
        """Add ``alpha * other`` in place; return self.

        A tensor under several keys is changed once. Values that are not tensors are kept.

        Args:
            other: a number; a tensor whose dims broadcast to the batch dims, not to the last dims of each leaf; or a
                collection with the same keys, whose batch size broadcasts to this one.
            alpha: the factor of ``other``; None for 1.

        Raises:
            StructureError: the keys differ, or a leaf cannot be written in place; nothing was written.
            BatchSizeError: ``other`` does not broadcast to the batch size; nothing was written.
            TypeError: ``other`` is not a number, a tensor or a collection.

        >>> TensorDict({"a": torch.ones(2)}).add_(1)["a"]
        tensor([2., 2.])
        """
        this, operand = _scale_operand(OPS["add_"], alpha, other)
        return check_operand(combine_inplace(self, "add_", this, operand), "add_", other)

    def sub(self, other: Operand, *, alpha: float | None = None, default: object = None) -> Self:
        """Return ``self - alpha * other``, element by element; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.ones(2)}).sub(1, alpha=2)["a"]
        tensor([-1., -1.])
        """
        this, operand = _scale_operand(OPS["sub"], alpha, other)
        return check_operand(combine(self, "sub", this, operand, default), "sub", other)

    def sub_(self, other: Operand, alpha: float | None = None) -> Self:
        """Subtract ``alpha * other`` in place; return self. Arguments are those of :meth:`add_`."""
        this, operand = _scale_operand(OPS["sub_"], alpha, other)
        return check_operand(combine_inplace(self, "sub_", this, operand), "sub_", other)

    def rsub(self, other: Operand, *, alpha: float | None = None, default: object = None) -> Self:
        """Return ``other - alpha * self``, element by element; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.ones(2)}).rsub(3, alpha=2)["a"]
        tensor([1., 1.])
        """
        this = OPS["rsub"] if alpha is None else Op(None, partial(torch.rsub, alpha=alpha))
        return check_operand(combine(self, "rsub", this, other, default), "rsub", other)

    def clamp_min(self, other: Operand, default: object = None) -> Self:
        """Return the larger of each element and ``other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.arange(3)}).clamp_min(1)["a"]
        tensor([1, 1, 2])
        """
        return apply_binary(self, "clamp_min", other, default)

    def clamp(self, min: Operand | None = None, max: Operand | None = None, *, out: object = None) -> Self:
        """Clamp each element to an interval.

        Args:
            min: lower limit: a number, a tensor that broadcasts against the batch size, a collection, or None.
            max: upper limit, of the same types; if it is below ``min``, every element becomes ``max``.
            out: a collection that the result is written into; it may be empty.

        Raises:
            TypeError: both limits are None.

        >>> TensorDict({"a": torch.arange(4)}).clamp(1, 2)["a"]
        tensor([1, 1, 2, 2])
        """
        if min is None and max is None:
            raise TypeError("clamp() needs min, max or both; got neither")
        if isinstance(min, NUMBERS) and isinstance(max, NUMBERS):
            result: Self = run_each_leaf("clamp", self, methodcaller("clamp", min, max))
        else:
            result = self if min is None else self.clamp_min(min)
            result = result if max is None else apply_binary(result, "clamp_max", max)
        if out is None:
            return result
        written: Self = write_result(out, result.batch_size, result)
        return written

    def lerp(self, end: Operand, weight: Operand) -> Self:
        """Return ``self + weight * (end - self)``, leaf by leaf.

        Args:
            end: a collection, or a tensor or number for all leaves.
            weight: a number, a tensor that broadcasts to the batch size, or a collection.

        >>> TensorDict({"a": torch.zeros(2)}).lerp(TensorDict({"a": torch.ones(2)}), 0.25)["a"]
        tensor([0.2500, 0.2500])
        """
        return _ternary(self, "lerp", OPS["lerp"], end, weight, keep_number=True)

    def lerp_(self, end: Operand, weight: Operand) -> Self:
        """Interpolate each element towards ``end`` in place; return self. Arguments are those of :meth:`lerp`."""
        return _ternary(self, "lerp_", OPS["lerp_"], end, weight, keep_number=True)

    def addcmul(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """Return ``self + value * other1 * other2``, leaf by leaf; operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcmul(td, td, value=2)["a"]
        tensor([3., 3.])
        """
        return _ternary(self, "addcmul", _bind_value(OPS["addcmul"], value), other1, other2)

    def addcmul_(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """Add ``value * other1 * other2`` in place; return self. Operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcmul_(td.clone(), td.clone())["a"]
        tensor([2., 2.])
        """
        return _ternary(self, "addcmul_", _bind_value(OPS["addcmul_"], value), other1, other2)

    def addcdiv(self, other1: Operand, other2: Operand, value: float | None = 1) -> Self:
        """Return ``self + value * other1 / other2``, leaf by leaf; operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcdiv(td, td * 2)["a"]
        tensor([1.5000, 1.5000])
        """
        return _ternary(self, "addcdiv", _bind_value(OPS["addcdiv"], value), other1, other2)

    def addcdiv_(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """Add ``value * other1 / other2`` in place; return self. Operands are those of :meth:`lerp`."""
        return _ternary(self, "addcdiv_", _bind_value(OPS["addcdiv_"], value), other1, other2)


def _bind_value(this: Op, value: float | None) -> Op:
    """Bind ``value`` to an operation, unless it is the default 1."""
    if value is None or value == 1:
        return this
    call_fused = partial(this.fused, value=value) if this.fused else None
    return this._replace(fused=call_fused, single=partial(this.single, value=value))


def _number_beside(leaf: Tensor, number: object) -> Tensor:
    """Convert a number to a scalar tensor, in the dtype that torch uses to combine it with ``leaf``."""
    kind = torch.as_tensor(number, device="cpu").dtype
    return torch.as_tensor(number, dtype=dtype_beside(leaf.dtype, kind), device=leaf.device)


def _ternary(
    node: CoreT, name: str, this: Op, first: Operand, second: Operand, *, keep_number: bool = False
) -> CoreT:
    """Apply an operation of three tensors, in place if ``name`` ends in ``_``."""
    leaves: list[Tensor] = []
    try:
        if not name.endswith("_"):
            node = _broadcast_batch(node, first, second)
        if type(first) is type(node) and first.batch_size == node.batch_size:
            operands: list[object] = [operand_leaves(node, first, leaves)]
        else:
            operands = [check_operand(operand_inplace(node, name, first), name, first)]
            node._flatten_leaves(leaves)
        operands.append(check_operand(operand_inplace(node, name, second), name, second))
    except AttributeError as error:
        raise_foreign(error, name, node, first, second)
    for i, operand in enumerate(operands):
        if type(operand) is not list and not (keep_number and i == 1):
            operands[i] = [_number_beside(leaf, operand) for leaf in leaves]
    if name.endswith("_"):
        write_leaves(name, node, this, leaves, *operands)
        return node
    if any(isinstance(item, Core) and item.batch_size != node.batch_size for item in (first, second)):
        leaves, *operands = align_columns(node, leaves, *operands)
    try:
        return node._unflatten(foreach(this, leaves, *operands))
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, leaves, *operands)


def _broadcast_batch(node: CoreT, *others: Operand) -> CoreT:
    """Expand a collection to the batch size that it has together with its operands; unchanged if they do not broadcast."""
    for other in others:
        shape = getattr(other, "shape", ())
        if shape == node.batch_size:
            continue
        longer = find_longer_size(node, other) if isinstance(other, Core) else None
        size = longer or broadcast_shape(shape, node.batch_size)
        if size is not None and size != node.batch_size:
            node = expand_to_match(node, other, size) if isinstance(other, Core) else node.expand(size)
    return node
