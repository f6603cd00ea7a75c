"""Pointwise operations. Factories build the methods that follow a pattern; the others are written out.

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

from .._coerce import build_nested
from .._collection import Core
from .._element_plans import append_dims
from .._element_types import ScalarBeside, dtype_beside
from .._foreach import Op, foreach, make_op
from .._torch_private import foreach_kernel
from .broadcasting import align_columns
from .operands import (
    LEAF_ERRORS,
    NUMBERS,
    Operand,
    check_operand,
    combine,
    combine_inplace,
    compare_values,
    operand_inplace,
    raise_at_leaf,
    run_each_leaf,
    write_leaves,
    write_out,
)

SelfT = TypeVar("SelfT", bound="PointwiseMixin")
F = TypeVar("F", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)


def _make_extreme(tensors: str, number: str) -> Op:
    """Build ``maximum`` or ``minimum``. A number clamps instead: forward-mode gradients of torch's maximum would be wrong."""
    of_tensor, of_number = getattr(torch, tensors), getattr(torch, number)
    of_tensors, of_numbers = foreach_kernel(tensors), foreach_kernel(number)

    def call_single(leaf: Tensor, other: Any) -> Any:
        return (of_tensor if isinstance(other, Tensor) else of_number)(leaf, other)

    def call_fused(leaves: list[Tensor], other: Any) -> Any:
        return (of_tensors if type(other) is list else of_numbers)(leaves, other)  # type: ignore[misc]

    return Op(call_fused if of_tensors and of_numbers else None, call_single)


def _both(leaf: Tensor, other: Any) -> Tensor:
    return torch.logical_and(leaf, torch.as_tensor(other, device=leaf.device))


def _swap_operands(function: Callable[[Any, Any], Any]) -> Op:
    def call_single(leaf: Tensor, other: Any) -> Any:
        return function(other, leaf)

    return Op(None, call_single)


#: Names of operations with a function, an in-place method and fused kernels; then names of those with a function only.
_FUSED = ("add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "lerp", "mul", "pow", "sub")
_SINGLE = (
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "eq", "ge", "gt", "le", "lt", "ne", "rsub",
)  # fmt: skip

#: All operations by name. Methods read them from this global, since torch.compile cannot trace such an object in a
#: closure.
OPS: dict[str, Op] = {
    **{name: make_op(name, getattr(torch, name)) for name in _FUSED},
    **{f"{name}_": make_op(f"{name}_", getattr(Tensor, f"{name}_")) for name in _FUSED},
    **{name: Op(None, getattr(torch, name)) for name in _SINGLE},
    "logical_and": Op(None, _both),
    "maximum": _make_extreme("maximum", "clamp_min"),
    "maximum_": make_op("clamp_min_", Tensor.clamp_min_),
    "minimum": _make_extreme("minimum", "clamp_max"),
    "minimum_": make_op("clamp_max_", Tensor.clamp_max_),
    "mod": Op(None, torch.remainder),
    "rdiv": _swap_operands(operator.truediv),
    "rpow": _swap_operands(operator.pow),
}


class BoundBinary(Protocol[T_co]):
    """Type of a bound method that takes an operand."""

    def __call__(self, other: Operand, *, default: Any = None) -> T_co:
        """Apply the operation to the collection and ``other``."""


class Binary(Protocol):
    """Type of the methods that :func:`binary` builds; their result has the type of the collection."""

    def __get__(self, instance: SelfT, owner: Any = None) -> BoundBinary[SelfT]:
        """Bind the method to a collection."""


def _document(method: F, name: str, summary: str, example: str) -> F:
    """Set the name and docstring of a method that a factory builds."""
    method.__name__ = name
    method.__doc__ = f"""{summary}

        >>> td = TensorDict({{"a": torch.tensor([0.25, 0.5])}})
        >>> {example}
        True
        """
    return method


def unary(name: str, what: str) -> Callable[[SelfT], SelfT]:
    """Build the method ``name`` that returns a collection of ``torch.<name>(leaf)``."""
    OPS[name] = make_op(name, getattr(torch, name))

    def method(self: SelfT) -> SelfT:
        this = OPS[name]
        leaves: list[Tensor] = []
        try:
            if this.fused is None:
                return self._map(this.single)
            levels = self._flatten_leaves(leaves)
            return self._unflatten(foreach(this, leaves, plain=type(levels) is dict), levels)
        except LEAF_ERRORS as error:
            raise_at_leaf(error, name, self, this.single, self._leaves())

    example = f'torch.equal(td.{name}()["a"], torch.{name}(td["a"]))'
    summary = f"""Return {what}; see :func:`torch.{name}`.

        The result is a new collection of the same structure. Values that are not tensors are kept."""
    return _document(method, name, summary, example)


def unary_inplace(name: str, what: str) -> Callable[[SelfT], SelfT]:
    """Build the method ``name`` (ending in ``_``) that calls ``leaf.<name>()`` on each leaf."""
    OPS[name] = make_op(name, getattr(Tensor, name))

    def method(self: SelfT) -> SelfT:
        this = OPS[name]
        leaves = self._leaves()
        write_leaves(name, self, this, leaves)
        return self

    example = f'torch.equal(td.clone().{name}()["a"], td["a"].{name[:-1]}())'
    summary = f"""Replace each element by {what}, in place; return self.

        A tensor under several keys is changed once. Values that are not tensors are kept.

        Raises:
            StructureError: a leaf cannot be written in place; nothing was written."""
    return _document(method, name, summary, example)


def binary(name: str, what: str, like: str | None = None) -> Binary:
    """Build the method ``name`` that combines each leaf with an operand; ``like`` is torch's name of the function."""

    def method(self: SelfT, other: Operand, *, default: Any = None) -> SelfT:
        return check_operand(combine(self, name, OPS[name], other, default), name, other)  # type: ignore[no-any-return]

    summary = f"""Return {what}.

        Args:
            other: a number; a tensor whose dims broadcast against the batch dims, not the last dims of each leaf; or a
                collection with the same keys, whose batch size broadcasts.
            default: value of an entry that only one of two collections has; ``"intersection"`` drops such entries.

        Returns:
            A new collection of the same structure.

        Raises:
            StructureError: the keys differ, and ``default`` is None.
            BatchSizeError: ``other`` does not broadcast against the batch size.
            TypeError: ``other`` is not a number, a tensor or a collection."""
    example = f'torch.equal(td.{name}(td)["a"], torch.{like or name}(td["a"], td["a"]))'
    if name.startswith(("bitwise", "logical")):
        example = f'torch.equal((td > 0).{name}(td > 0.3)["a"], torch.{name}(td["a"] > 0, td["a"] > 0.3))'
    return _document(method, name, summary, example)


def binary_inplace(name: str, what: str) -> Callable[[SelfT, Operand], SelfT]:
    """Build the method ``name`` (ending in ``_``) that combines each leaf with an operand in place."""

    def method(self: SelfT, other: Operand) -> SelfT:
        return check_operand(combine_inplace(self, name, OPS[name], other), name, other)  # type: ignore[no-any-return]

    summary = f"""Replace each element by {what}, in place; return self.

        Args:
            other: a number; a tensor whose dims broadcast to the batch dims, not to the last dims of each leaf; or a
                collection with the same keys, whose batch size broadcasts to this one.

        Raises:
            StructureError: the keys differ, or a leaf cannot be written in place; nothing was written.
            BatchSizeError: ``other`` does not broadcast to the batch size; nothing was written.
            TypeError: ``other`` is not a number, a tensor or a collection."""
    example = f'torch.equal(td.clone().{name}(td)["a"], td.{name[:-1]}(td)["a"])'
    return _document(method, name, summary, example)


def dunder(name: str, key: str, symbol: str) -> Callable[[SelfT, Operand], SelfT]:
    """Build the operator method ``name``; ``symbol`` is its expression in ``td`` and ``x``, such as "td + x"."""

    def method(self: SelfT, other: Operand) -> Any:
        return combine(self, symbol, OPS[key], other)

    if any(sign in symbol for sign in "&|^"):
        example = (
            f'(lambda td, x: torch.equal(({symbol})["a"], (lambda td: {symbol})(td["a"])))(td > 0, True)'
        )
    else:
        example = f'(lambda x: torch.equal(({symbol})["a"], (lambda td: {symbol})(td["a"])))(2.0)'
    summary = f"""Return ``{symbol}``, element by element.

        ``x`` is a number, a tensor that broadcasts against the batch dims, or a collection; see :meth:`mul`."""
    return _document(method, name, summary, example)


def dunder_inplace(name: str, key: str, symbol: str) -> Callable[[SelfT, Operand], SelfT]:
    """Build the augmented assignment method ``name``, such as ``__iadd__``."""

    def method(self: SelfT, other: Operand) -> Any:
        return combine_inplace(self, symbol, OPS[key], other)

    summary = f"""Compute ``{symbol}`` in place, element by element; return self.

        ``x`` is a number, a tensor that broadcasts to the batch dims, or a collection; see :meth:`mul_`."""
    return _document(method, name, summary, f"td.{name}(2.0) is td")


def comparison(name: str, symbol: str) -> Callable[..., Any]:
    """Build the comparison method ``name``, such as ``__eq__``, which returns a collection of bools."""
    key = name.strip("_")

    def method(self: SelfT, other: Operand) -> Any:
        if isinstance(other, dict):
            other = build_nested(other, self.batch_size, None)
        this = OPS[key]
        foreign: list[Core] = []
        result = combine(self, symbol, this, other, None, foreign)
        if foreign and key in ("eq", "ne"):
            return compare_values(result, self, other, this.single)
        return result

    example = f'(lambda x: torch.equal(({symbol})["a"], (lambda td: {symbol})(td["a"])))(0.3)'
    summary = f"""Return ``{symbol}``, element by element, as a collection of bools.

        ``x`` is a number, a tensor that broadcasts against the batch dims, a collection with the same keys, or a
        dict of entries; see :meth:`mul`."""
    return _document(method, name, summary, example)


def _scale_operand(this: Op, alpha: float | None, other: Operand) -> tuple[Op, Operand]:
    """Return an operation and an operand that together apply ``alpha * other``."""
    if alpha is None:
        return this, other
    if type(other) is type(alpha) and type(other) in (int, float):
        return this, other * alpha
    # Fused kernels reject alpha for mixed dtypes, and multiplying first can change the dtype: use the single op.
    return Op(None, partial(this.single, alpha=alpha)), other


class PointwiseMixin(Core):
    """Pointwise operations, their operators and comparisons."""

    __slots__ = ()

    #: None makes numpy return NotImplemented, so that ``array + td`` calls ``td.__radd__``.
    __array_ufunc__ = None

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: ScalarBeside | None = None
    ) -> None:
        """Append a view of ``value`` per leaf, aligned with the batch dims, or ``scalar(leaf, value)`` if that is passed."""
        inner: Any = self._inner()
        if inner is not self:
            inner._broadcast_to_leaves(value, out, scalar)
            return
        leaves = self._leaves()
        if scalar is not None:
            out.extend([scalar(leaf, value) for leaf in leaves])
            return
        more = value.ndim - len(self.batch_size)
        out.extend(append_dims(value, leaf.ndim + more) for leaf in leaves)

    abs = unary("abs", "the absolute value of each element")
    acos = unary("acos", "the arc cosine of each element")
    asin = unary("asin", "the arc sine of each element")
    atan = unary("atan", "the arc tangent of each element")
    ceil = unary("ceil", "the smallest integer not below each element")
    cos = unary("cos", "the cosine of each element")
    cosh = unary("cosh", "the hyperbolic cosine of each element")
    erf = unary("erf", "the error function of each element")
    erfc = unary("erfc", "the complementary error function of each element")
    exp = unary("exp", "the exponential of each element")
    expm1 = unary("expm1", "the exponential of each element, minus one")
    floor = unary("floor", "the largest integer not above each element")
    frac = unary("frac", "the fractional part of each element")
    isfinite = unary("isfinite", "whether each element is finite")
    isnan = unary("isnan", "whether each element is NaN")
    isneginf = unary("isneginf", "whether each element is minus infinity")
    isposinf = unary("isposinf", "whether each element is plus infinity")
    isreal = unary("isreal", "whether the imaginary part of each element is zero")
    lgamma = unary("lgamma", "the logarithm of the gamma function of each element")
    log = unary("log", "the natural logarithm of each element")
    log10 = unary("log10", "the logarithm to base 10 of each element")
    log1p = unary("log1p", "the natural logarithm of one plus each element")
    log2 = unary("log2", "the logarithm to base 2 of each element")
    neg = unary("neg", "the negative of each element")
    reciprocal = unary("reciprocal", "the reciprocal of each element")
    round = unary("round", "each element rounded to the nearest integer (halves to even)")
    sigmoid = unary("sigmoid", "the logistic function of each element")
    sign = unary("sign", "the sign of each element")
    sin = unary("sin", "the sine of each element")
    sinh = unary("sinh", "the hyperbolic sine of each element")
    sqrt = unary("sqrt", "the square root of each element")
    tan = unary("tan", "the tangent of each element")
    tanh = unary("tanh", "the hyperbolic tangent of each element")
    trunc = unary("trunc", "the integer part of each element")

    abs_ = unary_inplace("abs_", "its absolute value")
    acos_ = unary_inplace("acos_", "its arc cosine")
    asin_ = unary_inplace("asin_", "its arc sine")
    atan_ = unary_inplace("atan_", "its arc tangent")
    ceil_ = unary_inplace("ceil_", "the smallest integer not below it")
    cos_ = unary_inplace("cos_", "its cosine")
    cosh_ = unary_inplace("cosh_", "its hyperbolic cosine")
    erf_ = unary_inplace("erf_", "the value of the error function")
    erfc_ = unary_inplace("erfc_", "the value of the complementary error function")
    exp_ = unary_inplace("exp_", "its exponential")
    expm1_ = unary_inplace("expm1_", "its exponential minus one")
    floor_ = unary_inplace("floor_", "the largest integer not above it")
    frac_ = unary_inplace("frac_", "its fractional part")
    lgamma_ = unary_inplace("lgamma_", "the logarithm of its gamma function")
    log_ = unary_inplace("log_", "its natural logarithm")
    log10_ = unary_inplace("log10_", "its logarithm to base 10")
    log1p_ = unary_inplace("log1p_", "the natural logarithm of one plus its value")
    log2_ = unary_inplace("log2_", "its logarithm to base 2")
    neg_ = unary_inplace("neg_", "its negative")
    reciprocal_ = unary_inplace("reciprocal_", "its reciprocal")
    round_ = unary_inplace("round_", "the nearest integer (halves to even)")
    sigmoid_ = unary_inplace("sigmoid_", "the value of the logistic function")
    sign_ = unary_inplace("sign_", "its sign")
    sin_ = unary_inplace("sin_", "its sine")
    sinh_ = unary_inplace("sinh_", "its hyperbolic sine")
    sqrt_ = unary_inplace("sqrt_", "its square root")
    tan_ = unary_inplace("tan_", "its tangent")
    tanh_ = unary_inplace("tanh_", "its hyperbolic tangent")
    trunc_ = unary_inplace("trunc_", "its integer part")

    bitwise_and = binary("bitwise_and", "the bitwise and of each element and ``other``")
    clamp_max = binary("clamp_max", "the smaller of each element and ``other``")
    div = binary("div", "``self / other``, element by element")
    logical_and = binary("logical_and", "the logical and of each element and ``other``, as bools")
    maximum = binary("maximum", "the larger of each element and ``other``")
    minimum = binary("minimum", "the smaller of each element and ``other``")
    mod = binary(
        "mod", "the remainder of ``self / other`` per element, with the sign of ``other``", like="remainder"
    )
    mul = binary("mul", "``self * other``, element by element")
    pow = binary("pow", "``self ** other``, element by element")

    clamp_max_ = binary_inplace("clamp_max_", "the smaller of it and ``other``")
    clamp_min_ = binary_inplace("clamp_min_", "the larger of it and ``other``")
    div_ = binary_inplace("div_", "its quotient with ``other``")
    maximum_ = binary_inplace("maximum_", "the larger of it and ``other``")
    minimum_ = binary_inplace("minimum_", "the smaller of it and ``other``")
    mul_ = binary_inplace("mul_", "its product with ``other``")
    pow_ = binary_inplace("pow_", "its power with the exponent ``other``")

    __add__ = dunder("__add__", "add", "td + x")
    __radd__ = dunder("__radd__", "add", "x + td")
    __sub__ = dunder("__sub__", "sub", "td - x")
    __rsub__ = dunder("__rsub__", "rsub", "x - td")
    __mul__ = dunder("__mul__", "mul", "td * x")
    __rmul__ = dunder("__rmul__", "mul", "x * td")
    __truediv__ = dunder("__truediv__", "div", "td / x")
    __rtruediv__ = dunder("__rtruediv__", "rdiv", "x / td")
    __pow__ = dunder("__pow__", "pow", "td ** x")
    __rpow__ = dunder("__rpow__", "rpow", "x ** td")
    __mod__ = dunder("__mod__", "mod", "td % x")
    __and__ = dunder("__and__", "bitwise_and", "td & x")
    __rand__ = dunder("__rand__", "bitwise_and", "x & td")
    __or__ = dunder("__or__", "bitwise_or", "td | x")
    __ror__ = dunder("__ror__", "bitwise_or", "x | td")
    __xor__ = dunder("__xor__", "bitwise_xor", "td ^ x")
    __rxor__ = dunder("__rxor__", "bitwise_xor", "x ^ td")

    __iadd__ = dunder_inplace("__iadd__", "add_", "td += x")
    __isub__ = dunder_inplace("__isub__", "sub_", "td -= x")
    __imul__ = dunder_inplace("__imul__", "mul_", "td *= x")
    __itruediv__ = dunder_inplace("__itruediv__", "div_", "td /= x")
    __ipow__ = dunder_inplace("__ipow__", "pow_", "td **= x")

    __eq__ = comparison("__eq__", "td == x")
    __ne__ = comparison("__ne__", "td != x")
    __lt__ = comparison("__lt__", "td < x")
    __le__ = comparison("__le__", "td <= x")
    __gt__ = comparison("__gt__", "td > x")
    __ge__ = comparison("__ge__", "td >= x")

    def __neg__(self: SelfT) -> SelfT:
        """Return the negative of each element."""
        return self.neg()

    def __abs__(self: SelfT) -> SelfT:
        """Return the absolute value of each element."""
        return self.abs()

    def __invert__(self: SelfT) -> SelfT:
        """Return the bitwise not of each element; for bools the logical not."""
        return run_each_leaf("~td", self, torch.bitwise_not)  # type: ignore[no-any-return]

    def add(self: SelfT, other: Operand, *, alpha: float | None = None, default: Any = None) -> SelfT:
        """Return ``self + alpha * other``, element by element.

        Args:
            other: a number; a tensor whose dims broadcast against the batch dims, not the last dims of each leaf; or a
                collection with the same keys, whose batch size broadcasts.
            alpha: the factor of ``other``; None for 1.
            default: value of an entry that only one of two collections has; ``"intersection"`` drops such entries.

        Returns:
            A new collection of the same structure.

        Raises:
            StructureError: the keys differ, and ``default`` is None.
            BatchSizeError: ``other`` does not broadcast against the batch size.
            TypeError: ``other`` is not a number, a tensor or a collection.

        >>> TensorDict({"a": torch.ones(2)}).add(1, alpha=2)["a"]
        tensor([3., 3.])
        """
        this, operand = _scale_operand(OPS["add"], alpha, other)
        return check_operand(combine(self, "add", this, operand, default), "add", other)  # type: ignore[no-any-return]

    def add_(self: SelfT, other: Operand, *, alpha: float | None = None) -> SelfT:
        """Add ``alpha * other`` in place; return self.

        Operands and errors are those of :meth:`mul_`.

        >>> TensorDict({"a": torch.ones(2)}).add_(1)["a"]
        tensor([2., 2.])
        """
        this, operand = _scale_operand(OPS["add_"], alpha, other)
        return check_operand(combine_inplace(self, "add_", this, operand), "add_", other)  # type: ignore[no-any-return]

    def sub(self: SelfT, other: Operand, *, alpha: float | None = None, default: Any = None) -> SelfT:
        """Return ``self - alpha * other``, element by element.

        Arguments and errors are those of :meth:`add`.

        >>> TensorDict({"a": torch.ones(2)}).sub(1, alpha=2)["a"]
        tensor([-1., -1.])
        """
        this, operand = _scale_operand(OPS["sub"], alpha, other)
        return check_operand(combine(self, "sub", this, operand, default), "sub", other)  # type: ignore[no-any-return]

    def sub_(self: SelfT, other: Operand, alpha: float | None = None) -> SelfT:
        """Subtract ``alpha * other`` in place; return self.

        Operands and errors are those of :meth:`mul_`.

        >>> TensorDict({"a": torch.ones(2)}).sub_(1)["a"]
        tensor([0., 0.])
        """
        this, operand = _scale_operand(OPS["sub_"], alpha, other)
        return check_operand(combine_inplace(self, "sub_", this, operand), "sub_", other)  # type: ignore[no-any-return]

    def rsub(self: SelfT, other: Operand, *, alpha: float | None = None, default: Any = None) -> SelfT:
        """Return ``other - alpha * self``, element by element.

        Arguments and errors are those of :meth:`add`.

        >>> TensorDict({"a": torch.ones(2)}).rsub(3, alpha=2)["a"]
        tensor([1., 1.])
        """
        this = OPS["rsub"] if alpha is None else Op(None, partial(torch.rsub, alpha=alpha))
        return check_operand(combine(self, "rsub", this, other, default), "rsub", other)  # type: ignore[no-any-return]

    def clamp_min(self: SelfT, other: Operand, default: Any = None) -> SelfT:
        """Return the larger of each element and ``other``.

        Arguments and errors are those of :meth:`mul`.

        >>> TensorDict({"a": torch.arange(3)}).clamp_min(1)["a"]
        tensor([1, 1, 2])
        """
        return check_operand(combine(self, "clamp_min", OPS["clamp_min"], other, default), "clamp_min", other)  # type: ignore[no-any-return]

    def clamp(
        self: SelfT, min: Operand | None = None, max: Operand | None = None, *, out: Any = None
    ) -> SelfT:
        """Clamp each element to an interval.

        Args:
            min: lower limit: a number, a tensor that broadcasts against the batch size, a collection, or None.
            max: upper limit, of the same types; if it is below ``min``, every element becomes ``max``.
            out: a collection of the same structure that the result is written into.

        Raises:
            TypeError: both limits are None.

        >>> TensorDict({"a": torch.arange(4)}).clamp(1, 2)["a"]
        tensor([1, 1, 2, 2])
        """
        if min is None and max is None:
            raise TypeError("clamp() needs min, max or both; got neither")
        if isinstance(min, NUMBERS) and isinstance(max, NUMBERS):
            result: SelfT = run_each_leaf("clamp", self, methodcaller("clamp", min, max))
        else:
            result = self if min is None else self.clamp_min(min)
            result = result if max is None else result.clamp_max(max)
        if out is None:
            return result
        return write_out("clamp", result, out)  # type: ignore[no-any-return]

    def lerp(self: SelfT, end: Operand, weight: Operand) -> SelfT:
        """Return ``self + weight * (end - self)``, leaf by leaf.

        Args:
            end: a collection, or a tensor or number for all leaves.
            weight: a number, a tensor that broadcasts to the batch size, or a collection.

        >>> TensorDict({"a": torch.zeros(2)}).lerp(TensorDict({"a": torch.ones(2)}), 0.25)["a"]
        tensor([0.2500, 0.2500])
        """
        return self._ternary("lerp", OPS["lerp"], end, weight, keep_number=True)

    def lerp_(self: SelfT, end: Operand, weight: Operand) -> SelfT:
        """Interpolate each element towards ``end`` in place; return self. Arguments as for :meth:`lerp`.

        >>> TensorDict({"a": torch.zeros(2)}).lerp_(TensorDict({"a": torch.ones(2)}), 0.25)["a"]
        tensor([0.2500, 0.2500])
        """
        return self._ternary("lerp_", OPS["lerp_"], end, weight, keep_number=True)

    def addcmul(self: SelfT, other1: Operand, other2: Operand, *, value: float | None = 1) -> SelfT:
        """Return ``self + value * other1 * other2``, leaf by leaf; operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcmul(td, td, value=2)["a"]
        tensor([3., 3.])
        """
        return self._ternary("addcmul", _bind_value(OPS["addcmul"], value), other1, other2)

    def addcmul_(self: SelfT, other1: Operand, other2: Operand, *, value: float | None = 1) -> SelfT:
        """Add ``value * other1 * other2`` in place; return self. Operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcmul_(td.clone(), td.clone())["a"]
        tensor([2., 2.])
        """
        return self._ternary("addcmul_", _bind_value(OPS["addcmul_"], value), other1, other2)

    def addcdiv(self: SelfT, other1: Operand, other2: Operand, value: float | None = 1) -> SelfT:
        """Return ``self + value * other1 / other2``, leaf by leaf; operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcdiv(td, td * 2)["a"]
        tensor([1.5000, 1.5000])
        """
        return self._ternary("addcdiv", _bind_value(OPS["addcdiv"], value), other1, other2)

    def addcdiv_(self: SelfT, other1: Operand, other2: Operand, *, value: float | None = 1) -> SelfT:
        """Add ``value * other1 / other2`` in place; return self. Operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcdiv_(td.clone(), td * 2)["a"]
        tensor([1.5000, 1.5000])
        """
        return self._ternary("addcdiv_", _bind_value(OPS["addcdiv_"], value), other1, other2)

    def _ternary(
        self: SelfT, name: str, this: Op, first: Operand, second: Operand, *, keep_number: bool = False
    ) -> SelfT:
        """Apply an operation of three tensors, in place if ``name`` ends in ``_``."""
        operands = [check_operand(operand_inplace(self, name, item), name, item) for item in (first, second)]
        leaves = self._leaves()
        for i, operand in enumerate(operands):
            if type(operand) is not list and not (keep_number and i == 1):
                operands[i] = [_number_beside(leaf, operand) for leaf in leaves]
        if name.endswith("_"):
            write_leaves(name, self, this, leaves, *operands)
            return self
        if any(isinstance(item, Core) and item.batch_size != self.batch_size for item in (first, second)):
            leaves, *operands = align_columns(self, leaves, *operands)
        try:
            return self._unflatten(foreach(this, leaves, *operands))
        except LEAF_ERRORS as error:
            raise_at_leaf(error, name, self, this.single, leaves, *operands)


def _bind_value(this: Op, value: float | None) -> Op:
    """Bind ``value`` to an operation, unless it is the default 1."""
    if value is None or value == 1:
        return this
    call_fused = partial(this.fused, value=value) if this.fused else None
    return this._replace(fused=call_fused, single=partial(this.single, value=value))


def _number_beside(leaf: Tensor, number: Any) -> Tensor:
    """Convert a number to a scalar tensor, in the dtype that torch uses to combine it with ``leaf``."""
    kind = torch.as_tensor(number, device="cpu").dtype
    return torch.as_tensor(number, dtype=dtype_beside(leaf.dtype, kind), device=leaf.device)
