"""The table of pointwise operations: a row each, from which the methods, torch functions, pages and tests are made.

``tools/generate_methods.py`` lists the methods. It runs this file by itself, so the file imports nothing of the package.
"""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """A pointwise operation.

    Attributes:
        name: the method, and torch's function unless ``function`` is another one.
        kind: "unary", "binary", "comparison" or "ternary". The tool lists the methods of the first three kinds, except for
            those that ``_functions/pointwise.py`` defines because they have parameters that others lack.
        returns: what the method returns, as a noun phrase.
        inplace: True if there is a method ``name_``, and for an operator the augmented assignment.
        named: False if there are only the methods of the operator.
        dunder: the name of the operator's method without underscores and without "r" or "i".
        symbol: the operator.
        reflected: the operation with exchanged operands; "" if the collection must be the first one.
        function: torch's function, if it has another name.
        aliases: further functions of torch that lead to the method.
        loop_in: "autocast" or "autograd" if the result of torch's fused kernel differs from that of ``function`` there.
        kernel: the operation that torch has with numbers and in place, if ``function`` only combines tensors.
        of_tensors: True if ``function`` only combines tensors, and torch has no such operation with numbers.
    """

    name: str
    kind: str
    returns: str
    inplace: bool = True
    named: bool = True
    dunder: str = ""
    symbol: str = ""
    reflected: str = ""
    function: str = ""
    aliases: tuple[str, ...] = ()
    loop_in: str = ""
    kernel: str = ""
    of_tensors: bool = False

    @property
    def method(self) -> str:
        """Return the name of the method that computes a new collection."""
        return self.name if self.named else f"__{self.dunder}__"

    @property
    def method_of_second(self) -> str:
        """Return the name of the method of a second operand, "" if only the first may be a collection."""
        if self.kind == "binary" and self.dunder and self.reflected:
            return f"__r{self.dunder}__"
        return f"__{self.reflected}__" if self.kind == "comparison" else self.reflected

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the names of the torch functions that lead to the method."""
        return (self.function or self.name, *self.aliases)


# fmt: off
OPERATIONS = (
    Operation("abs", "unary", "the absolute value of each element", dunder="abs", symbol="abs", aliases=("absolute",)),
    Operation("acos", "unary", "the arc cosine of each element", aliases=("arccos",), loop_in="autocast"),
    Operation("acosh", "unary", "the inverse hyperbolic cosine of each element", inplace=False, aliases=("arccosh",)),
    Operation("angle", "unary", "the angle of each element in radians", inplace=False),
    Operation("asin", "unary", "the arc sine of each element", aliases=("arcsin",), loop_in="autocast"),
    Operation("asinh", "unary", "the inverse hyperbolic sine of each element", inplace=False, aliases=("arcsinh",)),
    Operation("atan", "unary", "the arc tangent of each element", aliases=("arctan",)),
    Operation("atanh", "unary", "the inverse hyperbolic tangent of each element", inplace=False, aliases=("arctanh",)),
    Operation("bitwise_not", "unary", "the bitwise not of each element", False, False, dunder="invert", symbol="~"),
    Operation("ceil", "unary", "the smallest integer not below each element"),
    Operation("cos", "unary", "the cosine of each element"),
    Operation("cosh", "unary", "the hyperbolic cosine of each element", loop_in="autocast"),
    Operation("erf", "unary", "the error function of each element"),
    Operation("erfc", "unary", "the complementary error function of each element"),
    Operation("erfinv", "unary", "the inverse error function of each element", inplace=False),
    Operation("exp", "unary", "the exponential of each element", loop_in="autocast"),
    Operation("exp2", "unary", "two to the power of each element", inplace=False),
    Operation("expm1", "unary", "the exponential of each element, minus one", loop_in="autocast"),
    Operation("floor", "unary", "the largest integer not above each element"),
    Operation("frac", "unary", "the fractional part of each element"),
    Operation("isfinite", "unary", "whether each element is finite", inplace=False),
    Operation("isinf", "unary", "whether each element is infinite", inplace=False),
    Operation("isnan", "unary", "whether each element is NaN", inplace=False),
    Operation("isneginf", "unary", "whether each element is minus infinity", inplace=False),
    Operation("isposinf", "unary", "whether each element is plus infinity", inplace=False),
    Operation("isreal", "unary", "whether the imaginary part of each element is zero", inplace=False),
    Operation("lgamma", "unary", "the logarithm of the gamma function of each element"),
    Operation("log", "unary", "the natural logarithm of each element", loop_in="autocast"),
    Operation("log10", "unary", "the logarithm to base 10 of each element", loop_in="autocast"),
    Operation("log1p", "unary", "the natural logarithm of one plus each element", loop_in="autocast"),
    Operation("log2", "unary", "the logarithm to base 2 of each element", loop_in="autocast"),
    Operation("logical_not", "unary", "the logical not of each element, as bools"),
    Operation("logit", "unary", "the logarithm of the odds of each element", inplace=False),
    Operation("nan_to_num", "unary", "each element, NaN and infinities replaced by numbers"),
    Operation("neg", "unary", "the negative of each element", dunder="neg", symbol="-", aliases=("negative",)),
    Operation("reciprocal", "unary", "the reciprocal of each element", loop_in="autocast"),
    Operation("relu", "unary", "each element, zero where it is negative"),
    Operation("round", "unary", "each element rounded to the nearest integer (halves to even)"),
    Operation("rsqrt", "unary", "the reciprocal square root of each element", loop_in="autocast"),
    Operation("sigmoid", "unary", "the logistic function of each element"),
    Operation("sign", "unary", "the sign of each element"),
    Operation("sin", "unary", "the sine of each element"),
    Operation("sinh", "unary", "the hyperbolic sine of each element", loop_in="autocast"),
    Operation("sqrt", "unary", "the square root of each element"),
    Operation("square", "unary", "the square of each element"),
    Operation("tan", "unary", "the tangent of each element", loop_in="autocast"),
    Operation("tanh", "unary", "the hyperbolic tangent of each element"),
    Operation("trunc", "unary", "the integer part of each element", aliases=("fix",)),

    Operation("add", "binary", "``self + alpha * other``", dunder="add", symbol="+", reflected="add"),
    Operation("atan2", "binary", "the angle of the point ``(other, self)``", False, aliases=("arctan2",), of_tensors=True),
    Operation("bitwise_and", "binary", "the bitwise and of each element and ``other``", False, dunder="and", symbol="&",
              reflected="bitwise_and"),
    Operation("bitwise_or", "binary", "the bitwise or of each element and ``other``", False, True, "or", "|", "bitwise_or"),
    Operation("bitwise_xor", "binary", "the bitwise xor of each element and ``other``", False, True, "xor", "^", "bitwise_xor"),
    Operation("clamp_max", "binary", "the smaller of each element and ``other``"),
    Operation("clamp_min", "binary", "the larger of each element and ``other``"),
    Operation("div", "binary", "``self / other``", dunder="truediv", symbol="/", reflected="rdiv", aliases=("divide",
              "true_divide")),
    Operation("floor_divide", "binary", "the floor of ``self / other``", dunder="floordiv", symbol="//",
              reflected="rfloor_divide"),
    Operation("fmax", "binary", "the larger of both that is not NaN", False, reflected="fmax", of_tensors=True),
    Operation("fmin", "binary", "the smaller of both that is not NaN", False, reflected="fmin", of_tensors=True),
    Operation("fmod", "binary", "the remainder of ``self / other``, with the sign of ``self``"),
    Operation("logaddexp", "binary", "``log(exp(self) + exp(other))``", False, reflected="logaddexp", of_tensors=True),
    Operation("logical_and", "binary", "the logical and of each element and ``other``, as bools", False, reflected="logical_and",
              of_tensors=True),
    Operation("logical_or", "binary", "the logical or, as bools", False, reflected="logical_or", of_tensors=True),
    Operation("logical_xor", "binary", "the logical xor, as bools", False, reflected="logical_xor", of_tensors=True),
    Operation("maximum", "binary", "the larger of each element and ``other``", reflected="maximum", kernel="clamp_min"),
    Operation("minimum", "binary", "the smaller of each element and ``other``", reflected="minimum", kernel="clamp_max"),
    Operation("mod", "binary", "the remainder of ``self / other``, with the sign of ``other``", False, dunder="mod", symbol="%",
              reflected="rmod", function="remainder"),
    Operation("mul", "binary", "``self * other``", dunder="mul", symbol="*", reflected="mul", aliases=("multiply",)),
    Operation("pow", "binary", "``self ** other``", dunder="pow", symbol="**", reflected="rpow", loop_in="autocast"),
    Operation("rsub", "binary", "``other - alpha * self``", False, reflected="sub"),
    Operation("sub", "binary", "``self - alpha * other``", dunder="sub", symbol="-", reflected="rsub", aliases=("subtract",)),

    Operation("eq", "comparison", "whether elements are equal", False, True, "eq", "==", "eq"),
    Operation("ne", "comparison", "whether elements differ", False, True, "ne", "!=", "ne", aliases=("not_equal",)),
    Operation("lt", "comparison", "whether each element is below ``other``", False, True, "lt", "<", "gt", aliases=("less",)),
    Operation("le", "comparison", "whether each element is at most ``other``", False, True, "le", "<=", "ge",
              aliases=("less_equal",)),
    Operation("gt", "comparison", "whether each element is above ``other``", False, True, "gt", ">", "lt", aliases=("greater",)),
    Operation("ge", "comparison", "whether each element is at least ``other``", False, True, "ge", ">=", "le",
              aliases=("greater_equal",)),

    Operation("addcdiv", "ternary", "``self + value * other1 / other2``", loop_in="autograd"),
    Operation("addcmul", "ternary", "``self + value * other1 * other2``"),
    Operation("clamp", "ternary", "each element clamped to an interval", inplace=False, aliases=("clip",)),
    Operation("lerp", "ternary", "``self + weight * (end - self)``"),
)
# fmt: on
