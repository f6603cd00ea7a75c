"""Compute the value of a distribution for an interaction type: a draw, or a statistic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributions as dist
from torch import nn

from td_core.spi import RULES

from ._interaction import InteractionType

#: The torch distributions whose deterministic value is the mode; the others use the mean.
_BY_MODE = {
    dist.Bernoulli,
    dist.Binomial,
    dist.Categorical,
    dist.OneHotCategorical,
    dist.OneHotCategoricalStraightThrough,
}


def take_value(
    distribution: dist.Distribution,
    kind: InteractionType,
    n_draws: int | None,
    shape: torch.Size = torch.Size(),
) -> Any:
    """Draw samples of ``shape``, or compute a statistic and expand it by ``shape``; NotImplementedError if it is missing."""
    if kind is InteractionType.RANDOM:
        return draw(distribution, shape)
    if kind is InteractionType.DETERMINISTIC:
        value = compute_deterministic_value(distribution, n_draws)
    elif kind is InteractionType.MEAN:
        value = _compute_mean(distribution, n_draws)
    else:
        value = _read_statistic(distribution, kind.value)
        if value is None:
            raise NotImplementedError(
                f"{type(distribution).__name__} has no {kind.value}; choose another interaction type"
            )
    if not shape:
        return value
    if isinstance(value, tuple):
        return tuple([each.expand(*shape, *each.shape) for each in value])
    return value.expand(*shape, *value.shape)


def draw(distribution: dist.Distribution, shape: torch.Size = torch.Size()) -> Any:
    """Draw samples, with gradients if the distribution supports them."""
    return rsample(distribution, shape) if distribution.has_rsample else distribution.sample(shape)


def rsample(distribution: Any, shape: torch.Size = torch.Size()) -> Any:
    """Draw samples with gradients, also of a normal distribution under ``vmap``.

    ``Normal.rsample`` fills a tensor in place, which fails under ``vmap`` if each element needs a different value.
    """
    method = getattr(type(distribution), "rsample", None)
    if method is dist.Normal.rsample:
        loc = distribution.loc
        drawn = torch.randn(distribution._extended_shape(shape), dtype=loc.dtype, device=loc.device)
        return loc + drawn * distribution.scale
    if method is dist.Independent.rsample:
        return rsample(distribution.base_dist, shape)
    if method is dist.TransformedDistribution.rsample:
        value = rsample(distribution.base_dist, shape)
        for transform in distribution.transforms:
            value = transform(value)
        return value
    return distribution.rsample(shape)


def average_draws(distribution: dist.Distribution, n_draws: int) -> Any:
    """Return the average of draws, with gradients if the distribution supports them."""
    drawn = draw(distribution, torch.Size([n_draws]))
    if isinstance(drawn, torch.Tensor) and not (drawn.is_floating_point() or drawn.is_complex()):
        drawn = drawn.to(torch.get_default_dtype())
    return drawn.mean(0)


def compute_deterministic_value(distribution: dist.Distribution, n_draws: int | None = None) -> Any:
    """Compute the deterministic value of a distribution.

    The attribute ``deterministic_sample`` is returned if there is one. The value of a torch distribution is the mode of
    discrete classes and the mean of the others. An ``Independent`` has the value of its base distribution, a transformed
    distribution the transform of it. Other classes have the mode if their support is discrete, else the mean.

    Args:
        distribution: the distribution.
        n_draws: number of draws whose average replaces a mean that is not implemented.

    Raises:
        NotImplementedError: the statistic is not implemented, and ``n_draws`` is None.

    Warns:
        UserWarning: the class is not one of torch, so that its support decides.
    """
    rule = _RULES.get(type(distribution))
    if rule is not None:
        return rule(distribution, n_draws)
    own = getattr(distribution, "deterministic_sample", None)
    if own is not None:
        return own
    if isinstance(distribution, dist.TransformedDistribution) and not _has_mean(type(distribution)):
        return _transform_base(distribution, n_draws)
    return _choose_by_support(distribution, n_draws)


def _has_mean(cls: type[dist.Distribution]) -> bool:
    return cls.mean is not dist.Distribution.mean


def _read_statistic(distribution: dist.Distribution, name: str) -> Any:
    """Read a statistic of a distribution; None if it is not implemented."""
    try:
        return getattr(distribution, name, None)
    except NotImplementedError:
        return None


def _compute_mean(distribution: dist.Distribution, n_draws: int | None) -> Any:
    """Return the mean, or the average of draws if the mean is not implemented."""
    value = _read_statistic(distribution, "mean")
    if value is not None:
        return value
    if n_draws is None or isinstance(distribution, dist.LKJCholesky):
        raise NotImplementedError(
            f"{type(distribution).__name__} has no deterministic value: it implements neither deterministic_sample nor mean; "
            "draw a random value, or define deterministic_sample"
        )
    return average_draws(distribution, n_draws)


def _choose_by_support(distribution: dist.Distribution, n_draws: int | None) -> Any:
    """Return the mode if the support is discrete, else the mean; warn that the class has no rule."""
    support = _read_statistic(distribution, "support")
    is_discrete = support is not None and support.is_discrete
    value = _read_statistic(distribution, "mode") if is_discrete else None
    if value is None:
        is_discrete, value = False, _compute_mean(distribution, n_draws)
    warnings.warn(
        f"{type(distribution).__name__} does not define deterministic_sample; its deterministic value is its "
        f"{'mode' if is_discrete else 'mean'}, because its support is {'' if is_discrete else 'not '}discrete. "
        "Define deterministic_sample to choose",
        stacklevel=2,
    )
    return value


def _follow_base(distribution: dist.Independent[dist.Distribution], n_draws: int | None) -> Any:
    """Return the value of the base distribution; the mode if there is no rule for the class of the base."""
    base = distribution.base_dist
    is_known = (
        type(base) in _RULES
        or hasattr(base, "deterministic_sample")
        or isinstance(base, dist.TransformedDistribution)
    )
    value = None if is_known else _read_statistic(base, "mode")
    if value is None:
        return compute_deterministic_value(base, n_draws)
    warnings.warn(
        f"{type(base).__name__}, the base of an Independent, does not define deterministic_sample; the deterministic value "
        "is its mode. Define deterministic_sample to choose",
        stacklevel=2,
    )
    return value


def _transform_base(distribution: dist.TransformedDistribution, n_draws: int | None) -> Any:
    """Transform the deterministic value of the base; return the average of draws if the base has no such value.

    Programs of tensordict get the average of draws of the class of torch itself.
    """
    if (
        RULES.follows_tensordict
        and type(distribution) is dist.TransformedDistribution
        and n_draws is not None
    ):
        return average_draws(distribution, n_draws)
    try:
        value = compute_deterministic_value(distribution.base_dist)
    except NotImplementedError:
        return _compute_mean(distribution, n_draws)
    for transform in distribution.transforms:
        value = transform(value)
    return value


def _mark_argmax(distribution: dist.RelaxedOneHotCategorical, n_draws: int | None) -> torch.Tensor:
    logits = distribution.logits
    return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


#: The function that computes the deterministic value of each torch class; it does not apply to subclasses.
_RULES: dict[type[dist.Distribution], Callable[..., Any]] = {
    **{
        cls: lambda distribution, n_draws: distribution.mean
        for cls in vars(dist).values()
        if isinstance(cls, type) and issubclass(cls, dist.Distribution) and _has_mean(cls)
    },
    dist.TransformedDistribution: _transform_base,
    dist.LogisticNormal: _transform_base,
    **dict.fromkeys(_BY_MODE, lambda distribution, n_draws: distribution.mode),
    dist.Independent: _follow_base,
    dist.RelaxedBernoulli: lambda distribution, n_draws: (distribution.probs > 0.5).to(
        distribution.probs.dtype
    ),
    dist.RelaxedOneHotCategorical: _mark_argmax,
    dist.LKJCholesky: _compute_mean,
}
