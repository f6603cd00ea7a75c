"""TruncatedNormal and TruncatedStandardNormal, compared with numerical integrals of torch's normal density."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as dist

from td_core import TensorDict
from td_core.spi import RULES
from td_nn import ProbabilisticTensorDictModule, TruncatedNormal, TruncatedStandardNormal

CASES = [
    (0.0, 1.0, -1.0, 2.0),
    (1.0, 2.0, -1.0, 2.0),
    (-3.0, 0.5, -1.0, 2.0),
    (0.0, 1.0, 3.0, 4.0),
    (0.0, 1.0, -9.0, -8.0),
    (0.0, 1.0, 8.0, 9.0),
    (5.0, 100.0, 0.0, 1.0),
]

#: Intervals whose probability underflows, for which the code approximates the tail by an exponential.
FAR = [(0.0, 1.0, 45.0, 46.0), (0.0, 1.0, -46.0, -45.0), (0.0, 1.0, 45.0, 45.01)]


def grid(case):
    """Return a grid of values in the interval, the probability of each cell, and the step."""
    loc, scale, low, high = case
    count = 200_000
    step = (high - low) / count
    x = low + (torch.arange(count, dtype=torch.float64) + 0.5) * step
    log_density = dist.Normal(torch.tensor(loc, dtype=torch.float64), scale).log_prob(x)
    weight = (log_density - log_density.max()).exp()
    return x, weight / weight.sum(), step


def make(case, dtype=torch.float64, **options):
    return TruncatedNormal(*torch.tensor(case, dtype=dtype), **options)


@pytest.mark.parametrize("case", CASES)
def test_moments_log_prob_and_cdf_equal_integrals(case):
    x, share, step = grid(case)
    mean = (x * share).sum()
    made = make(case)
    torch.testing.assert_close(made.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.variance, ((x - mean).square() * share).sum(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(made.entropy(), -(share * (share / step).log()).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.log_prob(x[::5000]), (share / step).log()[::5000], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        made.cdf(x[::5000]), (share.cumsum(0) - share / 2)[::5000], rtol=1e-5, atol=1e-6
    )
    assert torch.equal(made.deterministic_sample, made.mean)


@pytest.mark.parametrize("case", FAR)
def test_log_prob_and_cdf_far_in_tail_equal_integrals(case):
    x, share, step = grid(case)
    made = make(case)
    torch.testing.assert_close(made.mean, (x * share).sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(made.log_prob(x[::5000]), (share / step).log()[::5000], rtol=1e-6, atol=1e-6)
    expected = (share.cumsum(0) - share / 2)[::5000]
    torch.testing.assert_close(made.cdf(x[::5000]), expected, rtol=0, atol=1e-3)
    between = (expected > 1e-6) & (expected < 1 - 1e-6)
    torch.testing.assert_close(made.icdf(expected)[between], x[::5000][between], rtol=1e-3, atol=0)


@pytest.mark.parametrize("case", [*CASES, *FAR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rsample_has_mean_and_variance_of_distribution(case, dtype):
    torch.manual_seed(0)
    drawn = make(case, dtype).sample((50_000,))
    x, share, _ = grid(case)
    mean = (x * share).sum()
    std = ((x - mean).square() * share).sum().sqrt()
    assert drawn.dtype is dtype
    assert drawn.min() >= case[2]
    assert drawn.max() <= case[3]
    assert abs(drawn.double().mean() - mean) < 5 * std / 50_000**0.5
    assert abs(drawn.double().std() / std - 1) < 0.05
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    shares = torch.stack(
        [
            (drawn.double() <= edge).double().mean()
            for edge in x[torch.searchsorted(share.cumsum(0), quantiles)]
        ]
    )
    torch.testing.assert_close(shares, quantiles, atol=0.01, rtol=0)


@pytest.mark.parametrize("case", [*CASES, *FAR])
def test_icdf_of_cdf_returns_value(case):
    made = make(case)
    share = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    torch.testing.assert_close(made.cdf(made.icdf(share)), share, rtol=1e-5, atol=1e-6)
    ends = made.icdf(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor(case[2:], dtype=torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_mode_has_highest_density(case):
    x, _, _ = grid(case)
    made = make(case)
    assert (made.log_prob(made.mode) >= made.log_prob(x[::1000])).all()


def test_infinite_interval_equals_torch_normal():
    made = TruncatedNormal(torch.tensor(1.0), torch.tensor(2.0), -torch.inf, torch.inf)
    plain = dist.Normal(1.0, 2.0)
    for name in ("mean", "variance", "mode"):
        torch.testing.assert_close(getattr(made, name), torch.as_tensor(getattr(plain, name)))
    torch.testing.assert_close(made.entropy(), plain.entropy())
    torch.testing.assert_close(made.log_prob(torch.tensor(0.3)), plain.log_prob(torch.tensor(0.3)))


def test_rsample_has_gradients_of_loc_and_scale():
    loc, scale = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    torch.manual_seed(0)
    TruncatedNormal(loc, scale, -1.0, 1.0).rsample((100,)).sum().backward()
    assert loc.grad.abs().min() > 0
    assert torch.isfinite(scale.grad).all()


@pytest.mark.parametrize(
    ("args", "shape"),
    [
        ((0.0, 1.0, -1.0, 2.0), ()),
        ((torch.zeros(3), 1.0, -1.0, 2.0), (3,)),
        ((torch.zeros(3, 1), 1.0, -torch.ones(2), 2.0), (3, 2)),
    ],
)
def test_construct_numbers_and_tensors_broadcasts(args, shape):
    made = TruncatedNormal(*args)
    assert made.batch_shape == shape
    assert made.sample((4,)).shape == (4, *shape)
    assert made.expand((5, *shape)).sample().shape == (5, *shape)
    assert made.has_rsample


@pytest.mark.parametrize(
    ("args", "validate"),
    [((0.0, 1.0, 2.0, 2.0), None), ((torch.zeros(2), torch.ones(2), torch.tensor([0.0, 2.0]), 1.0), False)],
)
def test_construct_empty_interval_raises(args, validate):
    with pytest.raises(ValueError, match="runs from a to a greater b; got a ="):
        TruncatedNormal(*args, validate_args=validate)
    with pytest.raises(ValueError, match="runs from a to a greater b"):
        TruncatedStandardNormal(*args[2:], validate_args=validate)


@pytest.mark.parametrize("value", [-1.5, 2.5])
def test_log_prob_outside_interval_is_minus_infinity_or_raises(value):
    value = torch.tensor(value)
    with pytest.raises(ValueError, match="to be within the support"):
        TruncatedNormal(0.0, 1.0, -1.0, 2.0, validate_args=True).log_prob(value)
    free = TruncatedNormal(0.0, 1.0, -1.0, 2.0, validate_args=False)
    assert free.log_prob(value) == -torch.inf
    assert free.cdf(value) == float(value > 0)
    unit = TruncatedStandardNormal(-1.0, 2.0, validate_args=False)
    assert unit.log_prob(value) == -torch.inf


def test_attributes_a_and_b_are_standardized():
    made = TruncatedNormal(torch.tensor(1.0), torch.tensor(2.0), -1.0, 2.0)
    assert (made.a, made.b, made.loc, made.scale) == (-1.0, 0.5, 1.0, 2.0)
    torch.testing.assert_close(
        made.auc, dist.Normal(1.0, 2.0).cdf(torch.tensor(2.0)) - dist.Normal(1.0, 2.0).cdf(torch.tensor(-1.0))
    )
    assert made.support.check(torch.tensor([-1.5, 0.0, 2.5])).tolist() == [False, True, False]
    assert "loc: 1.0" in repr(made)
    assert TruncatedNormal(0.0, 0.0, -1.0, 1.0).scale == 1e-6


def test_standard_equals_truncated_normal_of_unit_scale():
    unit, made = TruncatedStandardNormal(-1.0, 2.0), TruncatedNormal(0.0, 1.0, -1.0, 2.0)
    for name in ("mean", "variance", "mode", "auc"):
        torch.testing.assert_close(getattr(unit, name), getattr(made, name))
    torch.testing.assert_close(unit.entropy(), made.entropy())
    for name in ("cdf", "log_prob"):
        torch.testing.assert_close(
            getattr(unit, name)(torch.tensor(0.3)), getattr(made, name)(torch.tensor(0.3))
        )
    assert unit.expand((3,)).icdf(torch.tensor(0.5)).shape == (3,)


def test_probabilistic_module_draws_within_bounds():
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=TruncatedNormal,
        distribution_kwargs={"a": -1.0, "b": 1.0}, return_log_prob=True, default_interaction_type="random",
    )  # fmt: skip
    result = module(TensorDict(loc=torch.zeros(100), scale=torch.full((100,), 5.0)))
    assert result["action"].abs().max() <= 1
    assert torch.isfinite(result["action_log_prob"]).all()


def test_log_prob_outside_in_program_of_tensordict_is_that_of_the_formula(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    made = TruncatedNormal(torch.zeros(()), torch.ones(()), -1.0, 1.0, validate_args=False)
    inside, outside = made.log_prob(torch.tensor([0.0, 2.0]))
    assert torch.isclose(inside - outside, torch.tensor(2.0))
