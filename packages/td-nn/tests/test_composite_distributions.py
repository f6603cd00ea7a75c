"""CompositeDistribution: samples, log-probabilities, entropies and statistics of several distributions."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as dist

from td_core import KeyPathError, TensorDict, lazy_stack
from td_nn import CompositeDistribution, Delta, MissingKeyError, ModuleKeysError, set_composite_lp_aggregate

B = ("n", "b")
NORMAL = dist.Normal(torch.zeros(3), torch.ones(3))
PAIRS = dist.Normal(torch.zeros(3, 2), torch.ones(3, 2))
MAP = {"a": dist.Normal, B: dist.Normal}
ROWS = [lambda: TensorDict(loc=torch.zeros(3), scale=torch.ones(3), batch_size=[3])]


def params(**more):
    return TensorDict(
        {
            "a": {"loc": torch.zeros(3), "scale": torch.ones(3)},
            B: {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)},
            **more,
        },
        batch_size=[3],
    )


def composite(**options):
    return CompositeDistribution(params(), MAP, **options)


def sample(shape=()):
    return TensorDict(
        {"a": torch.ones(*shape, 3), B: torch.full((*shape, 3, 2), 2.0), "other": torch.zeros(*shape, 3)},
        batch_size=[*shape, 3],
    )


LP_A, LP_B = NORMAL.log_prob(torch.ones(3)), PAIRS.log_prob(torch.full((3, 2), 2.0))


def keys_of(td):
    return set(td.keys(True, True))


def test_composite_is_mapping_from_sample_key_to_distribution():
    made = CompositeDistribution(
        params(unused=torch.zeros(3)), {"a": dist.Normal, ("n", ("b",)): dist.Normal}
    )
    assert list(made) == ["a", B]
    assert len(made) == 2
    assert "a" in made
    assert B in made
    assert made.get("z") is None
    assert dict(made.items()) == made.dists
    assert (made.batch_shape, made.event_shape) == ((3,), ())
    with pytest.raises(KeyError):
        made[0]
    assert made != composite()
    assert hash(made) == hash(made)
    assert isinstance(made, dist.Distribution)


@pytest.mark.parametrize(
    ("name_map", "expected"),
    [({"a": "c"}, ["c", B]), ({B: ("q", "b"), "a": ("q", "a")}, [("q", "a"), ("q", "b")])],
)
def test_construct_with_name_map_changes_sample_keys(name_map, expected):
    made = composite(name_map=name_map)
    assert list(made) == expected
    assert keys_of(made.sample()) == set(expected)


def test_construct_with_extra_kwargs_passes_them_to_component():
    made = CompositeDistribution(
        params(), {"a": dist.Normal, B: dist.Normal}, extra_kwargs={"a": {"validate_args": False}}
    )
    assert made["a"]._validate_args is False


def test_construct_params_with_int_value_passes_it_to_component():
    pytest.importorskip("td_tensorclass")
    given = TensorDict({"a": TensorDict(total_count=4, probs=torch.tensor([0.5]))})
    given["a"].set_non_tensor("total_count", 4)
    made = CompositeDistribution(given, {"a": dist.Binomial})
    assert made["a"].total_count == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CompositeDistribution({"a": {}}, MAP), TypeError, "are a collection .*; got a dict"),
        (lambda: CompositeDistribution(params(), {"z": dist.Normal}), MissingKeyError, "misses the parameters 'z'"),
        (lambda: CompositeDistribution(params(x=torch.ones(3)), {"x": dist.Normal}), TypeError, "got a tensor of shape"),
        (lambda: composite(name_map={"z": "a"}), ModuleKeysError, "name_map has 'z', which is not the name of a comp"),
        (lambda: composite(extra_kwargs={"z": {}}), ModuleKeysError, "extra_kwargs has 'z'"),
        (lambda: composite(name_map={"a": B}), ModuleKeysError, "have one sample key"),
        (lambda: composite(extra_kwargs={"a": {"loc": 1.0}}), TypeError, "'a' has loc in params and in extra_kwargs"),
        (lambda: CompositeDistribution.from_distributions({}, {}), TypeError, "are a collection"),
    ],
)  # fmt: skip
def test_construct_wrong_argument_raises(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("method", ["sample", "rsample"])
@pytest.mark.parametrize(
    ("shape", "lead"), [(None, ()), ((), ()), (4, (4,)), ((2, 5), (2, 5)), (torch.Size([1]), (1,))]
)
def test_sample_with_shape_prepends_it_to_batch_size(method, shape, lead):
    drawn = getattr(composite(), method)(shape)
    assert drawn.batch_size == (*lead, 3)
    assert drawn["n"].batch_size == (*lead, 3)
    assert drawn[B].shape == (*lead, 3, 2)


def test_sample_same_seed_equals_torch():
    torch.manual_seed(0)
    drawn = composite().sample()
    torch.manual_seed(0)
    assert torch.equal(drawn["a"], NORMAL.sample())
    assert torch.equal(drawn[B], PAIRS.sample())


def test_rsample_component_without_rsample_raises():
    made = CompositeDistribution(params(c={"logits": torch.zeros(3, 4)}), {**MAP, "c": dist.Categorical})
    assert composite().has_rsample
    assert not made.has_rsample
    with pytest.raises(NotImplementedError):
        made.rsample()
    assert made.sample()["c"].dtype is torch.int64


@pytest.mark.parametrize("name", ["mode", "mean", "deterministic_sample"])
def test_mean_and_mode_equal_those_of_components(name):
    assert (getattr(composite(), name)["a"] == 0).all()
    assert (getattr(composite(), name)[B] == 0).all()


def test_deterministic_sample_equals_that_of_each_component():
    given = params(c={"probs": torch.full((3,), 0.7)}, d={"param": torch.ones(3, 1)})
    made = CompositeDistribution(given, {"c": dist.Bernoulli, "d": Delta})
    assert (made.deterministic_sample["c"] == 1).all()
    assert (made.deterministic_sample["d"] == 1).all()


@pytest.mark.parametrize("name", ["mean", "mode", "deterministic_sample"])
def test_statistic_missing_in_component_raises(name):
    made = CompositeDistribution.from_distributions(
        TensorDict(), {"c": dist.LKJCholesky(2), "a": dist.Normal(0.0, 1.0)}
    )
    with pytest.raises(NotImplementedError, match="LKJCholesky"):
        getattr(made, name)


@pytest.mark.parametrize("name", ["median", "variance", "support", "stddev"])
def test_median_variance_support_and_expand_raise(name):
    with pytest.raises(NotImplementedError, match="a CompositeDistribution has no"):
        getattr(composite(), name)
    with pytest.raises(NotImplementedError, match="expand its params"):
        composite().expand((4, 3))


@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
@pytest.mark.parametrize("how", ["switch", "argument"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_log_prob_returns_sum_or_entry_per_component(shape, how, aggregate):
    given = sample(shape)
    with set_composite_lp_aggregate(aggregate if how == "switch" else not aggregate):
        found = composite(aggregate=None if how == "switch" else aggregate).log_prob(given)
    if aggregate:
        torch.testing.assert_close(found, (LP_A + LP_B.sum(-1)).expand(*shape, 3))
    else:
        assert found.batch_size == (*shape, 3)
        assert keys_of(found) == {"a_log_prob", ("n", "b_log_prob")}
        torch.testing.assert_close(found["n", "b_log_prob"], LP_B.expand(*shape, 3, 2))
    assert keys_of(given) == {"a", B, "other"}


def test_log_prob_missing_value_raises():
    with pytest.raises(MissingKeyError, match="CompositeDistribution misses its input"):
        composite().log_prob(sample().exclude(B))


@pytest.mark.parametrize("include_sum", [None, False, True])
@pytest.mark.parametrize("mode", ["off", "switch", "argument"])
def test_log_prob_composite_writes_into_sample_only_under_switch(include_sum, mode):
    given = sample()
    with set_composite_lp_aggregate(mode == "switch"):
        made = composite(aggregate=True if mode == "argument" else None, log_prob_key=("n", "sum"))
        found = made.log_prob_composite(given, include_sum=include_sum)
    has_sum = mode != "off" if include_sum is None else include_sum
    entries = {"a_log_prob", ("n", "b_log_prob"), *([("n", "sum")] if has_sum else [])}
    if mode == "switch":
        assert found is given
        assert keys_of(found) == {"a", B, "other", *entries}
    else:
        assert keys_of(given) == {"a", B, "other"}
        assert keys_of(found) == entries
    if has_sum:
        torch.testing.assert_close(found["n", "sum"], LP_A + LP_B.sum(-1))


@pytest.mark.parametrize("include_sum", [None, False, True])
@pytest.mark.parametrize("aggregate", [False, True])
def test_entropy_returns_sum_or_entry_per_component(include_sum, aggregate):
    made = composite(aggregate=aggregate)
    total = NORMAL.entropy() + PAIRS.entropy().sum(-1)
    plain = made.entropy(include_sum=include_sum)
    entries = {"a_entropy", ("n", "b_entropy")}
    if aggregate:
        torch.testing.assert_close(plain, total)
    else:
        assert keys_of(plain) == entries | ({"entropy"} if include_sum else set())
    has_sum = aggregate if include_sum is None else include_sum
    found = made.entropy_composite(include_sum=include_sum)
    assert keys_of(found) == entries | ({"entropy"} if has_sum else set())
    torch.testing.assert_close(found["n", "b_entropy"], PAIRS.entropy())
    if has_sum:
        torch.testing.assert_close(found["entropy"], total)


def test_entropy_without_closed_form_averages_draws():
    unknown = dist.TransformedDistribution(dist.Normal(torch.zeros(3), torch.ones(3)), [dist.ExpTransform()])
    made = CompositeDistribution.from_distributions(params(), {"x": unknown})
    torch.manual_seed(0)
    estimate = made.entropy(samples_mc=20000)["x_entropy"]
    torch.testing.assert_close(estimate, NORMAL.entropy(), atol=0.05, rtol=0)


def test_set_log_prob_key_and_entropy_key_to_none_restores_defaults():
    made = composite(entropy_key="h", aggregate=True)
    made.log_prob_key = ("x", ("y",))
    assert made.log_prob_key == ("x", "y")
    assert "h" in made.entropy_composite()
    made.log_prob_key = made.entropy_key = None
    assert (made.log_prob_key, made.entropy_key) == ("sample_log_prob", "entropy")


def test_cdf_and_icdf_write_into_sample():
    given = sample()
    assert composite().cdf(given) is given
    torch.testing.assert_close(given["n", "b_cdf"], PAIRS.cdf(given[B]))
    assert composite().icdf(given) is given
    torch.testing.assert_close(given["n", "b_icdf"], given[B])
    fresh = sample()
    composite().icdf(fresh)
    torch.testing.assert_close(fresh["a_icdf"], fresh["a"])
    with pytest.raises(MissingKeyError, match="misses its inputs 'a_cdf', 'a'"):
        composite().icdf(TensorDict(batch_size=[3]))
    with pytest.raises(MissingKeyError, match="misses its input 'a'"):
        composite().cdf(TensorDict(batch_size=[3]))


class Both(dist.Normal):
    """A distribution with sample_and_log_prob(), as distributions of other libraries have."""

    def sample_and_log_prob(self, shape=()):
        return torch.full((*shape, *self.loc.shape), 5.0), torch.full((*shape, *self.loc.shape), 6.0)


@pytest.mark.parametrize("method", ["sample_and_log_prob", "rsample_and_log_prob"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_sample_and_log_prob_returns_layout_of_log_prob(method, aggregate):
    made = CompositeDistribution(params(), {"a": Both, B: dist.Normal}, aggregate=aggregate)
    drawn, scores = getattr(made, method)((4,))
    assert drawn.batch_size == (4, 3)
    scored = PAIRS.log_prob(drawn[B])
    one = torch.full((4, 3), 6.0) if method == "sample_and_log_prob" else NORMAL.log_prob(drawn["a"])
    if aggregate:
        torch.testing.assert_close(scores, one + scored.sum(-1))
    else:
        torch.testing.assert_close(scores["a_log_prob"], one)
        torch.testing.assert_close(scores["n", "b_log_prob"], scored)


def test_construct_with_composite_component_nests_keys():
    inner = {"params": params()}
    made = CompositeDistribution(
        TensorDict({"c": inner, "a": params()["a"]}, batch_size=[3]),
        {"c": CompositeDistribution, "a": dist.Normal},
        extra_kwargs={"c": {"distribution_map": MAP}},
    )
    drawn = made.sample()
    assert keys_of(drawn) == {"a", ("c", "a"), ("c", "n", "b")}
    scores = made.log_prob(drawn)
    assert keys_of(scores) == {"a_log_prob", ("c_log_prob", "a_log_prob"), ("c_log_prob", "n", "b_log_prob")}
    with set_composite_lp_aggregate(True):
        total = made.log_prob(drawn)
    parts = [
        scores["a_log_prob"],
        scores["c_log_prob", "a_log_prob"],
        scores["c_log_prob", "n", "b_log_prob"].sum(-1),
    ]
    torch.testing.assert_close(total, sum(parts))


def test_construct_and_log_prob_accept_lazy_stacks():
    rows = lazy_stack(list(params().unbind(0)))
    made = CompositeDistribution(rows, MAP)
    assert made.batch_shape == (3,)
    scores = made.log_prob(lazy_stack(list(sample().unbind(0))))
    torch.testing.assert_close(scores["a_log_prob"], LP_A)


def test_log_prob_empty_sample_raises_key_path_error():
    with pytest.raises(KeyPathError):
        composite().log_prob(TensorDict(batch_size=[3]))
