"""The deterministic value of a distribution, by class."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import distributions as dist

from td_core import TensorDict
from td_core.spi import RULES
from td_nn import ProbabilisticTensorDictModule, set_interaction_type

P, ONE = torch.tensor([0.3, 0.8]), torch.ones(2)
LOGITS = torch.tensor([[0.3, -0.2, 0.1]])


class Sub(dist.Normal):
    """A subclass of a torch distribution, to which no rule applies."""


class SubBernoulli(dist.Bernoulli):
    """A discrete subclass of a torch distribution, to which no rule applies."""


class Own(dist.Normal):
    """A distribution that defines deterministic_sample."""

    @property
    def deterministic_sample(self):
        return self.loc + 100


def value_of(made, kind="deterministic", **options):
    module = ProbabilisticTensorDictModule(
        ["x"], ["y"], distribution_class=lambda x: made, default_interaction_type=kind, **options
    )
    return module(TensorDict(x=ONE))["y"]


BY_MODE = [
    dist.Bernoulli(P),
    dist.Binomial(5, P),
    dist.Categorical(logits=LOGITS),
    dist.OneHotCategorical(logits=LOGITS),
    dist.OneHotCategoricalStraightThrough(logits=LOGITS),
]
BY_MEAN = [
    dist.Beta(ONE * 2, ONE * 3),
    dist.Chi2(ONE * 3),
    dist.ContinuousBernoulli(P),
    dist.Dirichlet(torch.tensor([1.0, 2.0])),
    dist.Exponential(P),
    dist.FisherSnedecor(ONE * 3, ONE * 5),
    dist.Gamma(ONE * 2, ONE),
    dist.Geometric(P),
    dist.Gumbel(P, ONE),
    dist.HalfNormal(P),
    dist.InverseGamma(ONE * 3, ONE),
    dist.Kumaraswamy(ONE * 2, ONE * 3),
    dist.Laplace(P, ONE),
    dist.LogNormal(P, ONE),
    dist.LowRankMultivariateNormal(P, torch.ones(2, 1), ONE),
    dist.MixtureSameFamily(dist.Categorical(ONE), dist.Normal(P, ONE)),
    dist.Multinomial(4, P),
    dist.MultivariateNormal(P, torch.eye(2)),
    dist.NegativeBinomial(4, P),
    dist.Normal(P, ONE),
    dist.Pareto(ONE, ONE * 3),
    dist.Poisson(P),
    dist.StudentT(ONE * 3, P, ONE),
    dist.Uniform(P, ONE * 2),
    dist.VonMises(P, ONE),
    dist.Weibull(ONE, ONE * 2),
    dist.Wishart(torch.tensor(3.0), torch.eye(2)),
]


@pytest.mark.parametrize("made", [*BY_MODE, *BY_MEAN], ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("independent", [False, True])
def test_deterministic_value_of_torch_class_is_mode_or_mean(made, independent):
    expected = made.mode if type(made) in {type(each) for each in BY_MODE} else made.mean
    if independent:
        if not made.batch_shape:
            pytest.skip("has no batch dims")
        made = dist.Independent(made, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(value_of(made), expected)


NORMAL = dist.Normal(P, ONE)
TRANSFORMED = [
    (dist.TransformedDistribution(NORMAL, [dist.ExpTransform()]), P.exp()),
    (
        dist.TransformedDistribution(NORMAL, [dist.TanhTransform(), dist.AffineTransform(1.0, 2.0)]),
        1 + 2 * P.tanh(),
    ),
    (dist.TransformedDistribution(dist.Independent(NORMAL, 1), [dist.ExpTransform()]), P.exp()),
    (dist.Independent(dist.TransformedDistribution(NORMAL, [dist.ExpTransform()]), 1), P.exp()),
    (
        dist.TransformedDistribution(
            dist.TransformedDistribution(NORMAL, [dist.ExpTransform()]), [dist.AffineTransform(1.0, 1.0)]
        ),
        P.exp() + 1,
    ),
    (dist.LogisticNormal(P, ONE), dist.StickBreakingTransform()(P)),
    (dist.RelaxedBernoulli(torch.tensor(0.5), logits=torch.tensor([0.3, -0.2])), torch.tensor([1.0, 0.0])),
    (dist.RelaxedOneHotCategorical(torch.tensor(0.5), logits=LOGITS), torch.tensor([[1.0, 0.0, 0.0]])),
]


@pytest.mark.parametrize(("made", "expected"), TRANSFORMED)
def test_deterministic_value_of_transformed_is_transform_of_base(made, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(value_of(made), expected)


def test_deterministic_value_of_base_without_one_averages_draws():
    class Bare(dist.Distribution):
        arg_constraints = {}  # noqa: RUF012
        support = dist.constraints.real
        has_rsample = False

        def sample(self, shape=()):
            return torch.full((*shape, 2), 3.0)

    made = dist.TransformedDistribution(
        Bare(torch.Size([2]), validate_args=False), [dist.AffineTransform(1.0, 2.0)]
    )
    assert torch.equal(value_of(made, n_empirical_estimate=5), torch.full((2,), 7.0))


@pytest.mark.parametrize(
    ("made", "expected", "word"),
    [
        (Sub(P, ONE), P, "mean"),
        (SubBernoulli(P), torch.tensor([0.0, 1.0]), "mode"),
        (dist.Independent(Sub(P, ONE), 1), P, "mode"),
    ],
)
def test_deterministic_value_of_subclass_warns(made, expected, word):
    with pytest.warns(UserWarning, match=f"does not define deterministic_sample; .* is its {word}"):
        assert torch.equal(value_of(made), expected)


@pytest.mark.parametrize("made", [Own(P, ONE), dist.Independent(Own(P, ONE), 1)])
def test_deterministic_sample_attribute_takes_precedence(made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(value_of(made), P + 100)


@pytest.mark.parametrize("kind", ["deterministic", "mean", "mode"])
def test_deterministic_value_of_lkj_cholesky_raises(kind):
    with pytest.raises(RuntimeError, match="LKJCholesky has no"):
        value_of(dist.LKJCholesky(3), kind)


def test_import_does_not_change_torch_classes():
    for cls in (dist.RelaxedBernoulli, dist.RelaxedOneHotCategorical, dist.LogisticNormal, dist.Distribution):
        assert not hasattr(cls, "deterministic_sample")


def test_set_interaction_type_default_is_deterministic():
    with set_interaction_type():
        assert torch.equal(value_of(dist.Normal(P, ONE), "random"), P)


def test_transformed_distribution_in_program_of_tensordict_has_average_of_draws(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    made = dist.TransformedDistribution(dist.Normal(torch.zeros(2), torch.ones(2)), [dist.ExpTransform()])
    module = ProbabilisticTensorDictModule([], ["x"], distribution_class=lambda: made, n_empirical_estimate=7)
    torch.manual_seed(0)
    result = module(TensorDict())["x"]
    torch.manual_seed(0)
    assert torch.equal(result, made.sample((7,)).mean(0))
