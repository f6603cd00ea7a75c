# Generated from td_core/_operators.py: change the table, then run tools/generate_methods.py.
"""The pointwise methods that follow from the table of operations."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from .operands import Operand, combine, combine_inplace
from .pointwise import (
    OPS,
    WrittenPointwiseMixin,
    apply_binary,
    apply_binary_inplace,
    apply_unary,
    apply_unary_inplace,
    compare,
)


class PointwiseMixin(WrittenPointwiseMixin):
    """Pointwise operations, their operators and comparisons."""

    __slots__ = ()

    def abs(self) -> Self:
        """Return the absolute value of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).abs()["a"]
        tensor([1.5000, 0.5000])
        """
        return apply_unary(self, "abs")

    def abs_(self) -> Self:
        """Compute :meth:`abs` in place; return self."""
        return apply_unary_inplace(self, "abs_")

    def __abs__(self) -> Self:
        """Return the absolute value of each element."""
        return apply_unary(self, "abs")

    def acos(self) -> Self:
        """Return the arc cosine of each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).acos()["a"]
        tensor([1.3181, 1.0472])
        """
        return apply_unary(self, "acos")

    def acos_(self) -> Self:
        """Compute :meth:`acos` in place; return self."""
        return apply_unary_inplace(self, "acos_")

    def asin(self) -> Self:
        """Return the arc sine of each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).asin()["a"]
        tensor([0.2527, 0.5236])
        """
        return apply_unary(self, "asin")

    def asin_(self) -> Self:
        """Compute :meth:`asin` in place; return self."""
        return apply_unary_inplace(self, "asin_")

    def atan(self) -> Self:
        """Return the arc tangent of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).atan()["a"]
        tensor([-0.9828,  0.4636])
        """
        return apply_unary(self, "atan")

    def atan_(self) -> Self:
        """Compute :meth:`atan` in place; return self."""
        return apply_unary_inplace(self, "atan_")

    def ceil(self) -> Self:
        """Return the smallest integer not below each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).ceil()["a"]
        tensor([-1.,  1.])
        """
        return apply_unary(self, "ceil")

    def ceil_(self) -> Self:
        """Compute :meth:`ceil` in place; return self."""
        return apply_unary_inplace(self, "ceil_")

    def cos(self) -> Self:
        """Return the cosine of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).cos()["a"]
        tensor([0.0707, 0.8776])
        """
        return apply_unary(self, "cos")

    def cos_(self) -> Self:
        """Compute :meth:`cos` in place; return self."""
        return apply_unary_inplace(self, "cos_")

    def cosh(self) -> Self:
        """Return the hyperbolic cosine of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).cosh()["a"]
        tensor([2.3524, 1.1276])
        """
        return apply_unary(self, "cosh")

    def cosh_(self) -> Self:
        """Compute :meth:`cosh` in place; return self."""
        return apply_unary_inplace(self, "cosh_")

    def erf(self) -> Self:
        """Return the error function of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).erf()["a"]
        tensor([-0.9661,  0.5205])
        """
        return apply_unary(self, "erf")

    def erf_(self) -> Self:
        """Compute :meth:`erf` in place; return self."""
        return apply_unary_inplace(self, "erf_")

    def erfc(self) -> Self:
        """Return the complementary error function of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).erfc()["a"]
        tensor([1.9661, 0.4795])
        """
        return apply_unary(self, "erfc")

    def erfc_(self) -> Self:
        """Compute :meth:`erfc` in place; return self."""
        return apply_unary_inplace(self, "erfc_")

    def exp(self) -> Self:
        """Return the exponential of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).exp()["a"]
        tensor([0.2231, 1.6487])
        """
        return apply_unary(self, "exp")

    def exp_(self) -> Self:
        """Compute :meth:`exp` in place; return self."""
        return apply_unary_inplace(self, "exp_")

    def expm1(self) -> Self:
        """Return the exponential of each element, minus one.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).expm1()["a"]
        tensor([-0.7769,  0.6487])
        """
        return apply_unary(self, "expm1")

    def expm1_(self) -> Self:
        """Compute :meth:`expm1` in place; return self."""
        return apply_unary_inplace(self, "expm1_")

    def floor(self) -> Self:
        """Return the largest integer not above each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).floor()["a"]
        tensor([-2.,  0.])
        """
        return apply_unary(self, "floor")

    def floor_(self) -> Self:
        """Compute :meth:`floor` in place; return self."""
        return apply_unary_inplace(self, "floor_")

    def frac(self) -> Self:
        """Return the fractional part of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).frac()["a"]
        tensor([-0.5000,  0.5000])
        """
        return apply_unary(self, "frac")

    def frac_(self) -> Self:
        """Compute :meth:`frac` in place; return self."""
        return apply_unary_inplace(self, "frac_")

    def isfinite(self) -> Self:
        """Return whether each element is finite.

        >>> TensorDict({"a": torch.tensor([-torch.inf, 1, torch.inf, torch.nan])}).isfinite()["a"]
        tensor([False,  True, False, False])
        """
        return apply_unary(self, "isfinite")

    def isnan(self) -> Self:
        """Return whether each element is NaN.

        >>> TensorDict({"a": torch.tensor([-torch.inf, 1, torch.inf, torch.nan])}).isnan()["a"]
        tensor([False, False, False,  True])
        """
        return apply_unary(self, "isnan")

    def isneginf(self) -> Self:
        """Return whether each element is minus infinity.

        >>> TensorDict({"a": torch.tensor([-torch.inf, 1, torch.inf, torch.nan])}).isneginf()["a"]
        tensor([ True, False, False, False])
        """
        return apply_unary(self, "isneginf")

    def isposinf(self) -> Self:
        """Return whether each element is plus infinity.

        >>> TensorDict({"a": torch.tensor([-torch.inf, 1, torch.inf, torch.nan])}).isposinf()["a"]
        tensor([False, False,  True, False])
        """
        return apply_unary(self, "isposinf")

    def isreal(self) -> Self:
        """Return whether the imaginary part of each element is zero.

        >>> TensorDict({"a": torch.tensor([1, 1j])}).isreal()["a"]
        tensor([ True, False])
        """
        return apply_unary(self, "isreal")

    def lgamma(self) -> Self:
        """Return the logarithm of the gamma function of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).lgamma()["a"]
        tensor([0.8600, 0.5724])
        """
        return apply_unary(self, "lgamma")

    def lgamma_(self) -> Self:
        """Compute :meth:`lgamma` in place; return self."""
        return apply_unary_inplace(self, "lgamma_")

    def log(self) -> Self:
        """Return the natural logarithm of each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).log()["a"]
        tensor([-1.3863, -0.6931])
        """
        return apply_unary(self, "log")

    def log_(self) -> Self:
        """Compute :meth:`log` in place; return self."""
        return apply_unary_inplace(self, "log_")

    def log10(self) -> Self:
        """Return the logarithm to base 10 of each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).log10()["a"]
        tensor([-0.6021, -0.3010])
        """
        return apply_unary(self, "log10")

    def log10_(self) -> Self:
        """Compute :meth:`log10` in place; return self."""
        return apply_unary_inplace(self, "log10_")

    def log1p(self) -> Self:
        """Return the natural logarithm of one plus each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).log1p()["a"]
        tensor([0.2231, 0.4055])
        """
        return apply_unary(self, "log1p")

    def log1p_(self) -> Self:
        """Compute :meth:`log1p` in place; return self."""
        return apply_unary_inplace(self, "log1p_")

    def log2(self) -> Self:
        """Return the logarithm to base 2 of each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).log2()["a"]
        tensor([-2., -1.])
        """
        return apply_unary(self, "log2")

    def log2_(self) -> Self:
        """Compute :meth:`log2` in place; return self."""
        return apply_unary_inplace(self, "log2_")

    def neg(self) -> Self:
        """Return the negative of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).neg()["a"]
        tensor([ 1.5000, -0.5000])
        """
        return apply_unary(self, "neg")

    def neg_(self) -> Self:
        """Compute :meth:`neg` in place; return self."""
        return apply_unary_inplace(self, "neg_")

    def __neg__(self) -> Self:
        """Return the negative of each element."""
        return apply_unary(self, "neg")

    def reciprocal(self) -> Self:
        """Return the reciprocal of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).reciprocal()["a"]
        tensor([-0.6667,  2.0000])
        """
        return apply_unary(self, "reciprocal")

    def reciprocal_(self) -> Self:
        """Compute :meth:`reciprocal` in place; return self."""
        return apply_unary_inplace(self, "reciprocal_")

    def round(self) -> Self:
        """Return each element rounded to the nearest integer (halves to even).

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).round()["a"]
        tensor([-2.,  0.])
        """
        return apply_unary(self, "round")

    def round_(self) -> Self:
        """Compute :meth:`round` in place; return self."""
        return apply_unary_inplace(self, "round_")

    def sigmoid(self) -> Self:
        """Return the logistic function of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).sigmoid()["a"]
        tensor([0.1824, 0.6225])
        """
        return apply_unary(self, "sigmoid")

    def sigmoid_(self) -> Self:
        """Compute :meth:`sigmoid` in place; return self."""
        return apply_unary_inplace(self, "sigmoid_")

    def sign(self) -> Self:
        """Return the sign of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).sign()["a"]
        tensor([-1.,  1.])
        """
        return apply_unary(self, "sign")

    def sign_(self) -> Self:
        """Compute :meth:`sign` in place; return self."""
        return apply_unary_inplace(self, "sign_")

    def sin(self) -> Self:
        """Return the sine of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).sin()["a"]
        tensor([-0.9975,  0.4794])
        """
        return apply_unary(self, "sin")

    def sin_(self) -> Self:
        """Compute :meth:`sin` in place; return self."""
        return apply_unary_inplace(self, "sin_")

    def sinh(self) -> Self:
        """Return the hyperbolic sine of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).sinh()["a"]
        tensor([-2.1293,  0.5211])
        """
        return apply_unary(self, "sinh")

    def sinh_(self) -> Self:
        """Compute :meth:`sinh` in place; return self."""
        return apply_unary_inplace(self, "sinh_")

    def sqrt(self) -> Self:
        """Return the square root of each element.

        >>> TensorDict({"a": torch.tensor([0.25, 0.5])}).sqrt()["a"]
        tensor([0.5000, 0.7071])
        """
        return apply_unary(self, "sqrt")

    def sqrt_(self) -> Self:
        """Compute :meth:`sqrt` in place; return self."""
        return apply_unary_inplace(self, "sqrt_")

    def tan(self) -> Self:
        """Return the tangent of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).tan()["a"]
        tensor([-14.1014,   0.5463])
        """
        return apply_unary(self, "tan")

    def tan_(self) -> Self:
        """Compute :meth:`tan` in place; return self."""
        return apply_unary_inplace(self, "tan_")

    def tanh(self) -> Self:
        """Return the hyperbolic tangent of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).tanh()["a"]
        tensor([-0.9051,  0.4621])
        """
        return apply_unary(self, "tanh")

    def tanh_(self) -> Self:
        """Compute :meth:`tanh` in place; return self."""
        return apply_unary_inplace(self, "tanh_")

    def trunc(self) -> Self:
        """Return the integer part of each element.

        >>> TensorDict({"a": torch.tensor([-1.5, 0.5])}).trunc()["a"]
        tensor([-1.,  0.])
        """
        return apply_unary(self, "trunc")

    def trunc_(self) -> Self:
        """Compute :meth:`trunc` in place; return self."""
        return apply_unary_inplace(self, "trunc_")

    def __add__(self, other: Operand) -> Self:
        """Return ``td + x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td + x", OPS["add"], other)

    def __radd__(self, other: Operand) -> Self:
        """Return ``x + td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x + td", OPS["add"], other)

    def __iadd__(self, other: Operand) -> Self:
        """Compute ``td += x`` in place; ``x`` is an operand of :meth:`add_`."""
        return combine_inplace(self, "td += x", OPS["add_"], other)

    def bitwise_and(self, other: Operand, *, default: object = None) -> Self:
        """Return the bitwise and of each element and ``other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).bitwise_and(4)["a"]
        tensor([0, 4])
        """
        return apply_binary(self, "bitwise_and", other, default)

    def __and__(self, other: Operand) -> Self:
        """Return ``td & x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td & x", OPS["bitwise_and"], other)

    def __rand__(self, other: Operand) -> Self:
        """Return ``x & td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x & td", OPS["bitwise_and"], other)

    def __or__(self, other: Operand) -> Self:
        """Return ``td | x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td | x", OPS["bitwise_or"], other)

    def __ror__(self, other: Operand) -> Self:
        """Return ``x | td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x | td", OPS["bitwise_or"], other)

    def __xor__(self, other: Operand) -> Self:
        """Return ``td ^ x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td ^ x", OPS["bitwise_xor"], other)

    def __rxor__(self, other: Operand) -> Self:
        """Return ``x ^ td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x ^ td", OPS["bitwise_xor"], other)

    def clamp_max(self, other: Operand, *, default: object = None) -> Self:
        """Return the smaller of each element and ``other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).clamp_max(4)["a"]
        tensor([1, 4])
        """
        return apply_binary(self, "clamp_max", other, default)

    def clamp_max_(self, other: Operand) -> Self:
        """Compute :meth:`clamp_max` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "clamp_max_", other)

    def clamp_min_(self, other: Operand) -> Self:
        """Compute :meth:`clamp_min` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "clamp_min_", other)

    def div(self, other: Operand, *, default: object = None) -> Self:
        """Return ``self / other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).div(4)["a"]
        tensor([0.2500, 1.5000])
        """
        return apply_binary(self, "div", other, default)

    def div_(self, other: Operand) -> Self:
        """Compute :meth:`div` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "div_", other)

    def __truediv__(self, other: Operand) -> Self:
        """Return ``td / x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td / x", OPS["div"], other)

    def __rtruediv__(self, other: Operand) -> Self:
        """Return ``x / td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x / td", OPS["rdiv"], other)

    def __itruediv__(self, other: Operand) -> Self:
        """Compute ``td /= x`` in place; ``x`` is an operand of :meth:`add_`."""
        return combine_inplace(self, "td /= x", OPS["div_"], other)

    def logical_and(self, other: Operand, *, default: object = None) -> Self:
        """Return the logical and of each element and ``other``, as bools; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).logical_and(4)["a"]
        tensor([True, True])
        """
        return apply_binary(self, "logical_and", other, default)

    def maximum(self, other: Operand, *, default: object = None) -> Self:
        """Return the larger of each element and ``other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).maximum(4)["a"]
        tensor([4, 6])
        """
        return apply_binary(self, "maximum", other, default)

    def maximum_(self, other: Operand) -> Self:
        """Compute :meth:`maximum` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "maximum_", other)

    def minimum(self, other: Operand, *, default: object = None) -> Self:
        """Return the smaller of each element and ``other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).minimum(4)["a"]
        tensor([1, 4])
        """
        return apply_binary(self, "minimum", other, default)

    def minimum_(self, other: Operand) -> Self:
        """Compute :meth:`minimum` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "minimum_", other)

    def mod(self, other: Operand, *, default: object = None) -> Self:
        """Return the remainder of ``self / other``, with the sign of ``other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).mod(4)["a"]
        tensor([1, 2])
        """
        return apply_binary(self, "mod", other, default)

    def __mod__(self, other: Operand) -> Self:
        """Return ``td % x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td % x", OPS["mod"], other)

    def mul(self, other: Operand, *, default: object = None) -> Self:
        """Return ``self * other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).mul(4)["a"]
        tensor([ 4, 24])
        """
        return apply_binary(self, "mul", other, default)

    def mul_(self, other: Operand) -> Self:
        """Compute :meth:`mul` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "mul_", other)

    def __mul__(self, other: Operand) -> Self:
        """Return ``td * x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td * x", OPS["mul"], other)

    def __rmul__(self, other: Operand) -> Self:
        """Return ``x * td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x * td", OPS["mul"], other)

    def __imul__(self, other: Operand) -> Self:
        """Compute ``td *= x`` in place; ``x`` is an operand of :meth:`add_`."""
        return combine_inplace(self, "td *= x", OPS["mul_"], other)

    def pow(self, other: Operand, *, default: object = None) -> Self:
        """Return ``self ** other``; arguments are those of :meth:`add`.

        >>> TensorDict({"a": torch.tensor([1, 6])}).pow(4)["a"]
        tensor([   1, 1296])
        """
        return apply_binary(self, "pow", other, default)

    def pow_(self, other: Operand) -> Self:
        """Compute :meth:`pow` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "pow_", other)

    def __pow__(self, other: Operand) -> Self:
        """Return ``td ** x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td ** x", OPS["pow"], other)

    def __rpow__(self, other: Operand) -> Self:
        """Return ``x ** td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x ** td", OPS["rpow"], other)

    def __ipow__(self, other: Operand) -> Self:
        """Compute ``td **= x`` in place; ``x`` is an operand of :meth:`add_`."""
        return combine_inplace(self, "td **= x", OPS["pow_"], other)

    def __sub__(self, other: Operand) -> Self:
        """Return ``td - x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td - x", OPS["sub"], other)

    def __rsub__(self, other: Operand) -> Self:
        """Return ``x - td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x - td", OPS["rsub"], other)

    def __isub__(self, other: Operand) -> Self:
        """Compute ``td -= x`` in place; ``x`` is an operand of :meth:`add_`."""
        return combine_inplace(self, "td -= x", OPS["sub_"], other)

    def __eq__(self, other: object) -> Any:
        """Return ``td == x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "eq", "td == x", other)

    def __ne__(self, other: object) -> Any:
        """Return ``td != x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "ne", "td != x", other)

    def __lt__(self, other: object) -> Any:
        """Return ``td < x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "lt", "td < x", other)

    def __le__(self, other: object) -> Any:
        """Return ``td <= x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "le", "td <= x", other)

    def __gt__(self, other: object) -> Any:
        """Return ``td > x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "gt", "td > x", other)

    def __ge__(self, other: object) -> Any:
        """Return ``td >= x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "ge", "td >= x", other)
