"""The value of a distribution under an interaction type."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributions as dist
from torch import nn

from ._interaction import InteractionType

__all__ = ["average_draws", "compute_deterministic_value", "draw", "rsample", "take_value"]

#: The torch distributions whose deterministic value is the mode; that of the others is the mean.
_BY_MODE = {
    dist.Bernoulli,
    dist.Binomial,
    dist.Categorical,
    dist.OneHotCategorical,
    dist.OneHotCategoricalStraightThrough,
}


def take_value(
    distribution: Any, kind: InteractionType, n_draws: int | None, shape: torch.Size = torch.Size()
) -> Any:
    """Return the value that an interaction type selects, repeated to ``shape`` unless it is drawn.

    Raises:
        NotImplementedError: the distribution has no such value.
    """
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


def draw(distribution: Any, shape: torch.Size = torch.Size()) -> Any:
    """Draw samples, with gradients if the distribution can."""
    return rsample(distribution, shape) if distribution.has_rsample else distribution.sample(shape)


def rsample(distribution: Any, shape: torch.Size = torch.Size()) -> Any:
    """Draw samples with gradients, also of a normal distribution under ``vmap``.

    ``Normal.rsample`` fills a tensor in place, which ``vmap`` cannot do with another value per element.
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


def average_draws(distribution: Any, n_draws: int) -> Any:
    """Return the mean of draws, with gradients if the distribution can."""
    drawn = draw(distribution, torch.Size([n_draws]))
    if isinstance(drawn, torch.Tensor) and not (drawn.is_floating_point() or drawn.is_complex()):
        drawn = drawn.to(torch.get_default_dtype())
    return drawn.mean(0)


def compute_deterministic_value(distribution: Any, n_draws: int | None = None) -> Any:
    """Return the value that stands for a distribution where nothing is drawn.

    Args:
        distribution: its attribute ``deterministic_sample`` comes first. The value of a torch distribution is the mode
            of discrete classes and the mean of the others; that of an ``Independent`` is that of its base, and that of a
            transformed distribution the transform of its base's. Other classes give the mode if their support is
            discrete, else the mean.
        n_draws: number of draws whose average replaces a mean that is not implemented.

    Raises:
        NotImplementedError: there is no such value, and ``n_draws`` is None.

    Warns:
        UserWarning: the class is not known, so that its support decides.
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


def _has_mean(cls: Any) -> bool:
    return cls.mean is not dist.Distribution.mean


def _read_statistic(distribution: Any, name: str) -> Any:
    """Return the attribute of a distribution, or None if it is not implemented."""
    try:
        return getattr(distribution, name, None)
    except NotImplementedError:
        return None


def _compute_mean(distribution: Any, n_draws: int | None) -> Any:
    """Return the mean, or that of draws if it is not implemented."""
    value = _read_statistic(distribution, "mean")
    if value is not None:
        return value
    if n_draws is None or isinstance(distribution, dist.LKJCholesky):
        raise NotImplementedError(
            f"{type(distribution).__name__} has no deterministic value: it implements neither deterministic_sample nor mean; "
            "draw a random value, or define deterministic_sample"
        )
    return average_draws(distribution, n_draws)


def _choose_by_support(distribution: Any, n_draws: int | None) -> Any:
    """Return the mode of a discrete distribution and the mean of another one, with a warning."""
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


def _follow_base(distribution: Any, n_draws: int | None) -> Any:
    """Return the value of the base, or the mode if the class of the base is not known."""
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


def _transform_base(distribution: Any, n_draws: int | None) -> Any:
    """Return the transform of the deterministic value of the base, or the mean of draws if the base has none."""
    try:
        value = compute_deterministic_value(distribution.base_dist)
    except NotImplementedError:
        return _compute_mean(distribution, n_draws)
    for transform in distribution.transforms:
        value = transform(value)
    return value


def _round_probs(distribution: Any, n_draws: int | None) -> Any:
    return (distribution.probs > 0.5).to(distribution.probs.dtype)


def _mark_argmax(distribution: Any, n_draws: int | None) -> Any:
    logits = distribution.logits
    return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


def _take_mode(distribution: Any, n_draws: int | None) -> Any:
    return distribution.mode


def _take_mean(distribution: Any, n_draws: int | None) -> Any:
    return distribution.mean


#: The rule of each class of torch; subclasses do not inherit it.
_RULES: dict[Any, Callable[[Any, int | None], Any]] = {
    **{
        cls: _take_mean
        for cls in vars(dist).values()
        if isinstance(cls, type) and issubclass(cls, dist.Distribution) and _has_mean(cls)
    },
    dist.TransformedDistribution: _transform_base,
    dist.LogisticNormal: _transform_base,
    **dict.fromkeys(_BY_MODE, _take_mode),
    dist.Independent: _follow_base,
    dist.RelaxedBernoulli: _round_probs,
    dist.RelaxedOneHotCategorical: _mark_argmax,
    dist.LKJCholesky: _compute_mean,
}
