"""Pointwise operations, their operators and comparisons."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.flags import invert
from .._functions.operands import Operand, check_operand, combine, combine_inplace
from .._functions.pointwise import (
    OPS,
    apply_binary,
    apply_ternary,
    apply_unary,
    bind_options,
    bind_value,
    clamp_elements,
    make_augmented,
    make_binary,
    make_binary_inplace,
    make_comparison,
    make_operator,
    make_unary,
    make_unary_inplace,
    scale_operand,
)
from .._torch.dtypes import ScalarBeside
from .._torch.kernels import Op
from .._tree.node import Core, make_dense


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
    acosh = make_unary("acosh", "[1.5, 2.5]", "tensor([0.9624, 1.5668])")
    angle = make_unary("angle", "[-1.5, 0.5]", "tensor([3.1416, 0.0000])")
    asin = make_unary("asin", "[0.25, 0.5]", "tensor([0.2527, 0.5236])")
    asin_ = make_unary_inplace("asin_")
    asinh = make_unary("asinh", "[-1.5, 0.5]", "tensor([-1.1948,  0.4812])")
    atan = make_unary("atan", "[-1.5, 0.5]", "tensor([-0.9828,  0.4636])")
    atan_ = make_unary_inplace("atan_")
    atanh = make_unary("atanh", "[0.25, 0.5]", "tensor([0.2554, 0.5493])")
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
    erfinv = make_unary("erfinv", "[0.25, 0.5]", "tensor([0.2253, 0.4769])")
    exp = make_unary("exp", "[-1.5, 0.5]", "tensor([0.2231, 1.6487])")
    exp_ = make_unary_inplace("exp_")
    exp2 = make_unary("exp2", "[-1.5, 0.5]", "tensor([0.3536, 1.4142])")
    expm1 = make_unary("expm1", "[-1.5, 0.5]", "tensor([-0.7769,  0.6487])")
    expm1_ = make_unary_inplace("expm1_")
    floor = make_unary("floor", "[-1.5, 0.5]", "tensor([-2.,  0.])")
    floor_ = make_unary_inplace("floor_")
    frac = make_unary("frac", "[-1.5, 0.5]", "tensor([-0.5000,  0.5000])")
    frac_ = make_unary_inplace("frac_")
    isfinite = make_unary("isfinite", "[-torch.inf, 1, torch.inf]", "tensor([False,  True, False])")
    isinf = make_unary("isinf", "[-torch.inf, 1, torch.inf]", "tensor([ True, False,  True])")
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
    logical_not = make_unary("logical_not", "[0.0, 1.5]", "tensor([ True, False])")
    logical_not_ = make_unary_inplace("logical_not_")
    nan_to_num_ = make_unary_inplace("nan_to_num_")
    neg = make_unary("neg", "[-1.5, 0.5]", "tensor([ 1.5000, -0.5000])")
    neg_ = make_unary_inplace("neg_")
    __neg__ = neg
    reciprocal = make_unary("reciprocal", "[-1.5, 0.5]", "tensor([-0.6667,  2.0000])")
    reciprocal_ = make_unary_inplace("reciprocal_")
    relu = make_unary("relu", "[-1.5, 0.5]", "tensor([0.0000, 0.5000])")
    relu_ = make_unary_inplace("relu_")
    round_ = make_unary_inplace("round_")
    rsqrt = make_unary("rsqrt", "[0.25, 0.5]", "tensor([2.0000, 1.4142])")
    rsqrt_ = make_unary_inplace("rsqrt_")
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
    square = make_unary("square", "[-1.5, 0.5]", "tensor([2.2500, 0.2500])")
    square_ = make_unary_inplace("square_")
    tan = make_unary("tan", "[-1.5, 0.5]", "tensor([-14.1014,   0.5463])")
    tan_ = make_unary_inplace("tan_")
    tanh = make_unary("tanh", "[-1.5, 0.5]", "tensor([-0.9051,  0.4621])")
    tanh_ = make_unary_inplace("tanh_")
    trunc = make_unary("trunc", "[-1.5, 0.5]", "tensor([-1.,  0.])")
    trunc_ = make_unary_inplace("trunc_")
    __add__ = make_operator("__add__", "td + x", "add")
    __radd__ = make_operator("__radd__", "x + td", "add")
    __iadd__ = make_augmented("__iadd__", "td += x", "add_")
    atan2 = make_binary("atan2", "tensor([0.2450, 0.9828])")
    bitwise_and = make_binary("bitwise_and", "tensor([0, 4])")
    __and__ = make_operator("__and__", "td & x", "bitwise_and")
    __rand__ = make_operator("__rand__", "x & td", "bitwise_and")
    bitwise_or = make_binary("bitwise_or", "tensor([5, 6])")
    __or__ = make_operator("__or__", "td | x", "bitwise_or")
    __ror__ = make_operator("__ror__", "x | td", "bitwise_or")
    bitwise_xor = make_binary("bitwise_xor", "tensor([5, 2])")
    __xor__ = make_operator("__xor__", "td ^ x", "bitwise_xor")
    __rxor__ = make_operator("__rxor__", "x ^ td", "bitwise_xor")
    clamp_max = make_binary("clamp_max", "tensor([1, 4])")
    clamp_max_ = make_binary_inplace("clamp_max_")
    clamp_min_ = make_binary_inplace("clamp_min_")
    div_ = make_binary_inplace("div_")
    __truediv__ = make_operator("__truediv__", "td / x", "div")
    __rtruediv__ = make_operator("__rtruediv__", "x / td", "rdiv")
    __itruediv__ = make_augmented("__itruediv__", "td /= x", "div_")
    floor_divide = make_binary("floor_divide", "tensor([0, 1])")
    floor_divide_ = make_binary_inplace("floor_divide_")
    __floordiv__ = make_operator("__floordiv__", "td // x", "floor_divide")
    __rfloordiv__ = make_operator("__rfloordiv__", "x // td", "rfloor_divide")
    __ifloordiv__ = make_augmented("__ifloordiv__", "td //= x", "floor_divide_")
    fmax = make_binary("fmax", "tensor([4, 6])")
    fmin = make_binary("fmin", "tensor([1, 4])")
    fmod = make_binary("fmod", "tensor([1, 2])")
    fmod_ = make_binary_inplace("fmod_")
    logaddexp = make_binary("logaddexp", "tensor([4.0486, 6.1269])", "[1.0, 6.0]")
    logical_and = make_binary("logical_and", "tensor([True, True])")
    logical_or = make_binary("logical_or", "tensor([True, True])")
    logical_xor = make_binary("logical_xor", "tensor([False, False])")
    maximum = make_binary("maximum", "tensor([4, 6])")
    maximum_ = make_binary_inplace("maximum_")
    minimum = make_binary("minimum", "tensor([1, 4])")
    minimum_ = make_binary_inplace("minimum_")
    mod = make_binary("mod", "tensor([1, 2])")
    __mod__ = make_operator("__mod__", "td % x", "mod")
    __rmod__ = make_operator("__rmod__", "x % td", "rmod")
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
    eq = __eq__
    __ne__ = make_comparison("__ne__", "td != x", "ne")
    ne = __ne__
    __lt__ = make_comparison("__lt__", "td < x", "lt")
    lt = __lt__
    __le__ = make_comparison("__le__", "td <= x", "le")
    le = __le__
    __gt__ = make_comparison("__gt__", "td > x", "gt")
    gt = __gt__
    __ge__ = make_comparison("__ge__", "td >= x", "ge")
    ge = __ge__
    # End of operations.

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: ScalarBeside | None = None
    ) -> None:
        """Append a view of ``value`` per leaf, aligned with the batch dims, or ``scalar(leaf, value)`` if that is passed."""
        inner: Core = self._inner()
        # Each entry of another kind, such as a lazy stack, has its own part of the value.
        target = make_dense(dict(self._children()), self.batch_size) if inner is self else inner
        target._broadcast_to_leaves(value, out, scalar)

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
        this, operand = scale_operand(OPS["add"], alpha, other)
        return check_operand(combine(self, "add", this, operand, default), "add", other)

    def add_(self, other: Operand, *, alpha: float | None = None) -> Self:
        """Add ``alpha * other`` in place; return self.

        A tensor under several keys is changed once. Values that are not tensors are kept. Operands and errors are those of
        :meth:`add`, but a batch size has to broadcast to this one; a leaf that cannot be written is a StructureError.
        After an error nothing was written.

        >>> TensorDict({"a": torch.ones(2)}).add_(1)["a"]
        tensor([2., 2.])
        """
        this, operand = scale_operand(OPS["add_"], alpha, other)
        return check_operand(combine_inplace(self, "add_", this, operand), "add_", other)

    def sub(self, other: Operand, *, alpha: float | None = None, default: object = None) -> Self:
        """Return ``self - alpha * other``, element by element; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.ones(2)}).sub(1, alpha=2)["a"]
        tensor([-1., -1.])
        """
        this, operand = scale_operand(OPS["sub"], alpha, other)
        return check_operand(combine(self, "sub", this, operand, default), "sub", other)

    def sub_(self, other: Operand, alpha: float | None = None) -> Self:
        """Subtract ``alpha * other`` in place; return self. Arguments are those of :meth:`add_`."""
        this, operand = scale_operand(OPS["sub_"], alpha, other)
        return check_operand(combine_inplace(self, "sub_", this, operand), "sub_", other)

    def rsub(self, other: Operand, *, alpha: float | None = None, default: object = None) -> Self:
        """Return ``other - alpha * self``, element by element; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.ones(2)}).rsub(3, alpha=2)["a"]
        tensor([1., 1.])
        """
        this = OPS["rsub"] if alpha is None else Op(None, partial(torch.rsub, alpha=alpha))
        return check_operand(combine(self, "rsub", this, other, default), "rsub", other)

    def div(self, other: Operand, *, rounding_mode: str | None = None, default: object = None) -> Self:
        """Return ``self / other``, rounded to an integer by "floor" or "trunc"; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).div(4, rounding_mode="floor")["a"]
        tensor([0, 1])
        """
        return apply_binary(self, "div", other, default, bind_options("div", rounding_mode=rounding_mode))

    def logit(self, eps: float | None = None) -> Self:
        """Return the logarithm of the odds of each element, which is first clamped to [``eps``, 1 - ``eps``].

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).logit()["a"]
        tensor([-1.0986,  0.0000])
        """
        return apply_unary(self, "logit", bind_options("logit", eps=eps))

    def nan_to_num(
        self, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
    ) -> Self:
        """Return each element, NaN replaced by 0 or ``nan``, and infinities by these or the limits of the dtype.

        >>> TensorDict({"a": torch.tensor([torch.nan, 0.5])}).nan_to_num(-1)["a"]
        tensor([-1.0000,  0.5000])
        """
        return apply_unary(
            self, "nan_to_num", bind_options("nan_to_num", nan=nan, posinf=posinf, neginf=neginf)
        )

    def round(self, decimals: int = 0) -> Self:
        """Return each element rounded to ``decimals`` places (halves to even).

        >>> TensorDict({"a": torch.tensor([-1.5, 0.52])}).round(decimals=1)["a"]
        tensor([-1.5000,  0.5000])
        """
        return apply_unary(self, "round", bind_options("round", decimals=decimals) if decimals else None)

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
        return clamp_elements(self, min, max, out)

    def lerp(self, end: Operand, weight: Operand) -> Self:
        """Return ``self + weight * (end - self)``, leaf by leaf.

        Args:
            end: a collection, or a tensor or number for all leaves.
            weight: a number, a tensor that broadcasts to the batch size, or a collection.

        >>> TensorDict({"a": torch.zeros(2)}).lerp(TensorDict({"a": torch.ones(2)}), 0.25)["a"]
        tensor([0.2500, 0.2500])
        """
        return apply_ternary(self, "lerp", OPS["lerp"], end, weight, keep_number=True)

    def lerp_(self, end: Operand, weight: Operand) -> Self:
        """Interpolate each element towards ``end`` in place; return self. Arguments are those of :meth:`lerp`."""
        return apply_ternary(self, "lerp_", OPS["lerp_"], end, weight, keep_number=True)

    def addcmul(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """Return ``self + value * other1 * other2``, leaf by leaf; operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcmul(td, td, value=2)["a"]
        tensor([3., 3.])
        """
        return apply_ternary(self, "addcmul", bind_value(OPS["addcmul"], value), other1, other2)

    def addcmul_(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """Add ``value * other1 * other2`` in place; return self. Operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcmul_(td.clone(), td.clone())["a"]
        tensor([2., 2.])
        """
        return apply_ternary(self, "addcmul_", bind_value(OPS["addcmul_"], value), other1, other2)

    def addcdiv(self, other1: Operand, other2: Operand, value: float | None = 1) -> Self:
        """Return ``self + value * other1 / other2``, leaf by leaf; operands are those of :meth:`lerp`.

        >>> td = TensorDict({"a": torch.ones(2)})
        >>> td.addcdiv(td, td * 2)["a"]
        tensor([1.5000, 1.5000])
        """
        return apply_ternary(self, "addcdiv", bind_value(OPS["addcdiv"], value), other1, other2)

    def addcdiv_(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """Add ``value * other1 / other2`` in place; return self. Operands are those of :meth:`lerp`."""
        return apply_ternary(self, "addcdiv_", bind_value(OPS["addcdiv_"], value), other1, other2)
