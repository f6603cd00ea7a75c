"""Functions, found by name, that map the outputs of networks to positive scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Mapped = Callable[[Tensor], Tensor]
NumberT = TypeVar("NumberT", float, Tensor)


def inv_softplus(bias: NumberT) -> NumberT:
    """Compute the inverse of softplus, ``log(exp(bias) - 1)``; the argument of the logarithm is at least 1e-6.

    >>> round(inv_softplus(1.0), 4)
    0.5413
    """
    if isinstance(bias, Tensor):
        return bias.expm1().clamp_min(1e-6).log()
    return math.log(max(math.expm1(bias), 1e-6))


class biased_softplus(nn.Module):  # noqa: N801  tensordict's spelling
    """A softplus that maps 0 to ``bias``, and whose values are greater than ``min_val``.

    Args:
        bias: value at 0.
        min_val: lower bound of the values.

    Attributes:
        bias: the offset that is added to the input, the inverse softplus of ``bias - min_val``.

    >>> biased_softplus(1.0)(torch.zeros(2))
    tensor([1., 1.])
    """

    def __init__(self, bias: float, min_val: float = 0.01) -> None:
        super().__init__()
        self.bias = inv_softplus(bias - min_val)
        self.min_val = min_val

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` to values greater than ``min_val``."""
        return nn.functional.softplus(x + self.bias) + self.min_val


def expln(x: Tensor) -> Tensor:
    """Map ``x`` to positive values: ``exp(x)`` if x <= 0, else ``log(x + 1) + 1``.

    It grows slower than the exponential ("State-Dependent Exploration for Policy Gradient Methods", Rückstieß et al., 2008).

    >>> expln(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 1.6931])
    """
    # Both operands are clamped, because gradients of values that where() drops must be finite.
    return torch.where(x > 0, x.clamp_min(0).log1p() + 1, x.clamp_max(0).exp())


def _identity(x: Tensor) -> Tensor:
    return x


_MAPPINGS: dict[str, Any] = {
    "softplus": nn.functional.softplus,
    "exp": torch.exp,
    "relu": torch.relu,
    "expln": expln,
    "none": _identity,
}


def mappings(key: str) -> Mapped:
    """Return the scale mapping that is registered under a name.

    Args:
        key: ``"softplus"``, ``"exp"``, ``"relu"``, ``"expln"``, ``"none"``, ``"biased_softplus"`` (of bias 1),
            ``"biased_softplus_<bias>"``, ``"biased_softplus_<bias>_<min_val>"``, or a name that
            :func:`add_custom_mapping` defines.

    Raises:
        NotImplementedError: there is no mapping with this name.
        ValueError: the numbers in the name are malformed.

    >>> mappings("biased_softplus_2.0")(torch.zeros(1))
    tensor([2.])
    """
    result: Mapped | None = _MAPPINGS.get(key)
    if result is not None:
        return result
    if key == "biased_softplus":
        return biased_softplus(1.0)
    if isinstance(key, str) and key.startswith("biased_softplus_"):
        numbers = key.removeprefix("biased_softplus_").split("_")
        try:
            bias, *more = map(float, numbers)
            if len(more) > 1:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"the mapping biased_softplus takes one or two numbers, biased_softplus_<bias>_<min_val>; got {key!r}"
            ) from None
        return biased_softplus(bias, *more)
    raise NotImplementedError(
        f"no mapping is named {key!r}; there are {[*_MAPPINGS, 'biased_softplus']}, and add_custom_mapping() adds one"
    )


def add_custom_mapping(name: str, mapping: Mapped) -> None:
    """Register a mapping under a name for the process; replace an earlier one.

    >>> add_custom_mapping("square", torch.square)
    >>> mappings("square")(torch.tensor(3.0))
    tensor(9.)
    """
    if not isinstance(name, str) or not callable(mapping):
        raise TypeError(
            f"a mapping has a string as its name and is a function of a tensor; got {name!r}, {mapping!r}"
        )
    _MAPPINGS[name] = mapping
