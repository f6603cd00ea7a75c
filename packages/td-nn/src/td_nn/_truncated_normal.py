"""The normal distribution restricted to an interval.

The formulas of the moments are from Johnson, Kotz and Balakrishnan, "Continuous Univariate Distributions", volume 1,
section 10.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch import distributions as dist
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all, lazy_property
from torch.special import erfc, log_ndtr, ndtri

from td_core.spi import RULES

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF = math.sqrt(0.5)
_MIN_SCALE = 1e-6


def _compute_ndtr(x: Tensor) -> Tensor:
    """Compute the normal cdf; torch.special.ndtr loses precision for small probabilities."""
    tail: Tensor = erfc(-_SQRT_HALF * x)
    return tail.mul(0.5)


def _drop_empty_mask(mask: Tensor) -> Tensor | None:
    """Return the mask, or None if all its elements are False."""
    # A compiled graph computes both cases, because it cannot branch on values.
    return mask if torch.compiler.is_compiling() or bool(mask.any()) else None


class TruncatedStandardNormal(dist.Distribution):
    """A normal distribution of mean 0 and variance 1, restricted to the interval from ``a`` to ``b``.

    Args:
        a: lower end.
        b: upper end.
        validate_args: True raises an error for values outside the interval, False gives them a log-probability of minus
            infinity. None uses the default of torch.

    Raises:
        ValueError: an upper end is not greater than its lower end.

    >>> unit = TruncatedStandardNormal(torch.tensor(-1.0), torch.tensor(1.0))
    >>> unit.mean, unit.cdf(torch.tensor(0.0))
    (tensor(0.), tensor(0.5000))
    """

    # The constructor checks a < b, which needs both ends.
    arg_constraints: dict[str, constraints.Constraint] = {  # noqa: RUF012
        "a": constraints.dependent,
        "b": constraints.dependent,
    }
    has_rsample = True
    a: Tensor
    b: Tensor

    def __init__(self, a: Tensor | float, b: Tensor | float, validate_args: bool | None = None) -> None:
        low, high = broadcast_all(a, b)
        self._set_interval(low, high, validate_args)

    def _set_interval(self, a: Tensor, b: Tensor, validate_args: bool | None) -> None:
        # A compiled graph cannot branch on values, so the check runs in eager mode only.
        if not torch.compiler.is_compiling() and not (a < b).all():
            raise ValueError(
                f"the interval of a truncated normal runs from a to a greater b; got a = {a} and b = {b}"
            )
        self.a, self.b = a, b
        dist.Distribution.__init__(self, a.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """The interval from ``a`` to ``b``."""
        return constraints.interval(self.a, self.b)

    @lazy_property
    def _mirrored_mask(self) -> Tensor | None:
        """Mask of the intervals with positive numbers only, or None if there are none."""
        return _drop_empty_mask(self.a > 0)

    @lazy_property
    def _low(self) -> Tensor:
        # An interval of positive numbers is mirrored, because floats are more precise in the left tail.
        return self.a if self._mirrored_mask is None else torch.where(self._mirrored_mask, -self.b, self.a)

    @lazy_property
    def _high(self) -> Tensor:
        return self.b if self._mirrored_mask is None else torch.where(self._mirrored_mask, -self.a, self.b)

    @lazy_property
    def _below(self) -> Tensor:
        return _compute_ndtr(self._low)

    @lazy_property
    def _mass(self) -> Tensor:
        return _compute_ndtr(self._high) - self._below

    @lazy_property
    def _tiny_mask(self) -> Tensor | None:
        """Mask of the intervals whose probability underflows, or None if there are none."""
        return _drop_empty_mask(self._mass < torch.finfo(self._mass.dtype).tiny)

    @lazy_property
    def _log_auc(self) -> Tensor:
        log_low, log_high = log_ndtr(self._low), log_ndtr(self._high)
        log_auc: Tensor = log_high + torch.log1p(-(log_low - log_high).exp())
        return log_auc

    @property
    def auc(self) -> Tensor:
        """Probability of the interval under the unrestricted normal distribution."""
        return self._log_auc.exp()

    @property
    def _densities(self) -> tuple[Tensor, Tensor]:
        """Densities at the two ends of the interval."""
        log_auc = self._log_auc
        at_a, at_b = [(-0.5 * end.square() - _LOG_SQRT_2PI - log_auc).exp() for end in (self.a, self.b)]
        return at_a, at_b

    @property
    def mean(self) -> Tensor:
        """The mean."""
        return self._compute_standard_mean()

    def _compute_standard_mean(self) -> Tensor:
        at_a, at_b = self._densities
        return at_a - at_b

    @property
    def _end_terms(self) -> Tensor:
        at_a, at_b = self._densities
        # The limit at an infinite end is 0, but inf * 0 is nan.
        return (self.a * at_a).nan_to_num(0.0) - (self.b * at_b).nan_to_num(0.0)

    @property
    def variance(self) -> Tensor:
        """The variance."""
        return self._compute_standard_variance()

    def _compute_standard_variance(self) -> Tensor:
        at_a, at_b = self._densities
        return 1 + self._end_terms - (at_a - at_b).square()

    @property
    def mode(self) -> Tensor:
        """The value of the highest density: 0, or the end that is nearest to 0."""
        return torch.zeros_like(self.a).clamp(self.a, self.b)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mean."""
        return self.mean

    def entropy(self) -> Tensor:
        """Return the entropy."""
        return _LOG_SQRT_2PI + 0.5 + self._log_auc + 0.5 * self._end_terms

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of values less than ``value``: 0 below the interval, 1 above it."""
        return self._compute_standard_cdf(value)

    def _compute_standard_cdf(self, value: Tensor) -> Tensor:
        low, high, is_mirrored, is_tiny = self._low, self._high, self._mirrored_mask, self._tiny_mask
        if is_mirrored is not None:
            value = torch.where(is_mirrored, -value, value)
        value = value.clamp(low, high)
        share = (_compute_ndtr(value) - self._below) / self._mass
        if is_tiny is not None:
            at_low = (high * (high - low)).exp()
            share = torch.where(is_tiny, ((high * (high - value)).exp() - at_low) / (1 - at_low), share)
        return share if is_mirrored is None else torch.where(is_mirrored, 1 - share, share)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the inverse of the cdf at the probability ``value``."""
        return self._compute_standard_icdf(value)

    def _compute_standard_icdf(self, value: Tensor) -> Tensor:
        low, high, is_mirrored, is_tiny = self._low, self._high, self._mirrored_mask, self._tiny_mask
        share = value if is_mirrored is None else torch.where(is_mirrored, 1 - value, value)
        found = ndtri(self._below + share * self._mass)
        if is_tiny is not None:  # so far in the tail, the density is nearly exponential
            at_low = (high * (high - low)).exp()
            found = torch.where(is_tiny, high - (share * (1 - at_low) + at_low).log() / high, found)
        found = found.clamp(low, high)
        return found if is_mirrored is None else torch.where(is_mirrored, -found, found)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density; minus infinity outside the interval."""
        return self._restrict_log_prob(value, self._compute_standard_log_prob(value))

    def _compute_standard_log_prob(self, value: Tensor) -> Tensor:
        return -0.5 * value.square() - (self._log_auc + _LOG_SQRT_2PI)

    def _restrict_log_prob(self, value: Tensor, log_prob: Tensor) -> Tensor:
        """Return minus infinity for values outside the support, or raise ValueError if arguments are validated.

        Programs of tensordict get the log-density of the formula there.
        """
        if self._validate_args:
            self._validate_sample(value)
        if self._validate_args or RULES.follows_tensordict:
            return log_prob
        return torch.where(self.support.check(value), log_prob, -torch.inf)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draw samples of shape ``(*sample_shape, *batch_shape)`` with gradients."""
        shape = self._extended_shape(torch.Size(sample_shape or ()))
        return self.icdf(torch.rand(shape, dtype=self.a.dtype, device=self.a.device))

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> TruncatedStandardNormal:
        """Return a distribution with its batch dims expanded to ``batch_shape``."""
        new: TruncatedStandardNormal = self._get_checked_instance(TruncatedStandardNormal, _instance)  # type: ignore[no-untyped-call]
        for name in self._expanded_names:
            value = getattr(self, name)
            setattr(new, name, value.expand(torch.Size(batch_shape)) if isinstance(value, Tensor) else value)
        dist.Distribution.__init__(new, torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    _expanded_names: tuple[str, ...] = ("a", "b")


class TruncatedNormal(TruncatedStandardNormal):
    """A normal distribution restricted to the interval from ``a`` to ``b``.

    Args:
        loc: mean of the unrestricted distribution.
        scale: standard deviation of the unrestricted distribution; values below 1e-6 are set to 1e-6.
        a: lower end.
        b: upper end.
        validate_args: True raises an error for values outside the interval, False gives them a log-probability of minus
            infinity. None uses the default of torch.

    Attributes:
        loc: the location.
        scale: the scale.
        a: the standardized lower end, ``(a - loc) / scale``.
        b: the standardized upper end, ``(b - loc) / scale``.

    Raises:
        ValueError: an upper end is not greater than its lower end.

    >>> bounded = TruncatedNormal(torch.tensor([0.0, 3.0]), torch.ones(2), -1.0, 1.0)
    >>> bounded.mean
    tensor([0.0000, 0.6294])
    >>> unchecked = TruncatedNormal(0.0, 1.0, -1.0, 1.0, validate_args=False)
    >>> unchecked.log_prob(torch.tensor(2.0))
    tensor(-inf)
    """

    arg_constraints: dict[str, constraints.Constraint] = {  # noqa: RUF012
        "loc": constraints.real,
        "scale": constraints.positive,
        "a": constraints.dependent,
        "b": constraints.dependent,
    }
    loc: Tensor
    scale: Tensor
    _from: Any
    _to: Any

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        a: Tensor | float,
        b: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(a, Number) and isinstance(b, Number) and a >= b:
            raise ValueError(
                f"the interval of a truncated normal runs from a to a greater b; got a = {a} and b = {b}"
            )
        if isinstance(a, Number) and isinstance(b, Number):
            self.loc, self.scale = broadcast_all(loc, scale)
            self._from, self._to = a, b
        else:
            self.loc, self.scale, self._from, self._to = broadcast_all(loc, scale, a, b)
        self.scale = self.scale.clamp_min(_MIN_SCALE)
        self._set_interval(self._standardize(self._from), self._standardize(self._to), validate_args)

    def _standardize(self, value: Tensor | float) -> Tensor:
        return (value - self.loc) / self.scale

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """The interval from ``a`` to ``b``."""
        return constraints.interval(self._from, self._to)

    @property
    def mean(self) -> Tensor:
        """The mean."""
        return (self.loc + self.scale * self._compute_standard_mean()).clamp(self._from, self._to)

    @property
    def variance(self) -> Tensor:
        """The variance."""
        return self.scale.square() * self._compute_standard_variance()

    @property
    def mode(self) -> Tensor:
        """The value of the highest density: the location, or the end that is nearest to it."""
        return self.loc.clamp(self._from, self._to)

    def entropy(self) -> Tensor:
        """Return the entropy."""
        return super().entropy() + self._log_scale

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of values less than ``value``: 0 below the interval, 1 above it."""
        return self._compute_standard_cdf(self._standardize(value))

    def icdf(self, value: Tensor) -> Tensor:
        """Return the inverse of the cdf at the probability ``value``."""
        # A rounding error can move a value out of the interval.
        return (self.loc + self.scale * self._compute_standard_icdf(value)).clamp(self._from, self._to)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density; minus infinity outside the interval."""
        return self._restrict_log_prob(
            value, self._compute_standard_log_prob(self._standardize(value)) - self._log_scale
        )

    @lazy_property
    def _log_scale(self) -> Tensor:
        return self.scale.log()

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> TruncatedNormal:
        """Return a distribution with its batch dims expanded to ``batch_shape``."""
        new = self._get_checked_instance(TruncatedNormal, _instance)  # type: ignore[no-untyped-call]
        return super().expand(batch_shape, new)  # type: ignore[return-value]

    _expanded_names = ("a", "b", "loc", "scale", "_from", "_to")
