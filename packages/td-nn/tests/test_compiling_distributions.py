"""Distribution modules in torch.compile, vmap and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as dist
from torch import nn

from td_core import TensorDict, from_modules
from td_nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    Delta,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TruncatedNormal,
    rand_one_hot,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)

MAP = {"a": dist.Normal, ("n", "b"): dist.Normal}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def normal(**options):
    return ProbabilisticTensorDictModule(["loc", "scale"], ["y"], distribution_class=dist.Normal, **options)


def sequence(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["x"], ["loc", "scale"]), normal(**options)
    )


def parameters():
    return TensorDict(loc=torch.arange(2.0), scale=torch.ones(2))


def composite_params():
    return TensorDict(
        {
            "a": {"loc": torch.zeros(3), "scale": torch.ones(3)},
            ("n", "b"): {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)},
        },
        batch_size=[3],
    )


DRAWING = normal(default_interaction_type="random")


def aggregated(td):
    with set_composite_lp_aggregate(True):
        sample = TensorDict({"a": torch.ones(3), ("n", "b"): torch.ones(3, 2)}, batch_size=[3])
        return CompositeDistribution(td, MAP).log_prob(sample)


def composite_module(**options):
    return ProbabilisticTensorDictModule(
        ["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": MAP},
        **options,
    )


def under(switch, module):
    def call(td):
        with switch():
            return module(td)["y"]

    return call


def location_of(seq):
    return lambda td: seq.get_dist(td).loc


def truncated(x):
    made = TruncatedNormal(x, torch.ones(2), x - 1, 2.0)
    return (
        made.mean,
        made.variance,
        made.log_prob(made.mean),
        made.entropy(),
        made.cdf(x),
        made.icdf(made.cdf(x)),
    )


def one_hot(x):
    made = OneHotCategorical(x)
    return made.mode, made.log_prob(made.mode), made.entropy()


X = torch.arange(6.0).view(2, 3)
ROWS = {
    "module": (lambda: (normal(return_log_prob=True), (parameters(),))),
    "module mean": (lambda: (normal(return_log_prob=True, default_interaction_type="mean"), (parameters(),))),
    "num_samples": (lambda: (normal(num_samples=3), (parameters(),))),
    "sequence": (lambda: (sequence(return_log_prob=True), (TensorDict(x=X),))),
    "get_dist": (lambda: (location_of(sequence()), (TensorDict(x=X),))),
    "log_prob": (lambda: (sequence().log_prob, (TensorDict(x=X, y=torch.zeros(2, 2)),))),
    "composite": (
        lambda: (composite_module(return_log_prob=True), (TensorDict(params=composite_params(), batch_size=[3]),))
    ),
    "aggregated": (lambda: (aggregated, (composite_params(),))),
    "interaction type": (lambda: (under(lambda: set_interaction_type("mode"), DRAWING), (parameters(),))),
    "skip existing": (lambda: (under(lambda: set_skip_existing(True), normal()), (parameters().set("y", torch.zeros(2)),))),
    "delta": (lambda: (lambda x: Delta(x).log_prob(x), (X,))),
    "one hot": (lambda: (one_hot, (X,))),
    "truncated normal": (lambda: (truncated, (torch.arange(2.0),))),
    "extractor": (lambda: (NormalParamExtractor(), (X,))),
    "scale": (lambda: (AddStateIndependentNormalScale(3), (X,))),
}  # fmt: skip


def leaves(result):
    if isinstance(result, TensorDict):
        return {str(key): value for key, value in result.items(True, True)}
    return result if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_compile_fullgraph_equals_eager(make):
    fn, args = make()
    expected = leaves(fn(*[each.clone() for each in args]))
    torch._dynamo.reset()
    torch.testing.assert_close(leaves(torch.compile(fn, fullgraph=True, backend="eager")(*args)), expected)


@pytest.mark.parametrize("draw", [
    lambda x: TruncatedNormal(x, torch.ones(3), -1.0, 1.0).rsample().abs() <= 1,
    lambda x: OneHotCategorical(x).sample().sum(-1) == 1,
    lambda x: OneHotCategorical(x).rsample().sum(-1) == 1,
    lambda x: rand_one_hot(x).sum(-1) == 1,
    lambda x: DRAWING(TensorDict(loc=x, scale=x + 1))["y"].isfinite(),
])  # fmt: skip
def test_compile_random_draw_uses_one_graph(draw):
    assert torch.compile(draw, fullgraph=True, backend="eager")(torch.rand(2, 3)).all()


def test_compile_with_generator_draws_from_it():
    expected = normal(generator=3, default_interaction_type="random")(parameters())["y"]
    module = normal(generator=3, default_interaction_type="random")
    assert torch.equal(torch.compile(module, backend="eager")(parameters())["y"], expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, fullgraph=True, backend="eager")(parameters())


@pytest.mark.parametrize("wrap", [
    lambda make: make,
    lambda make: lambda loc, scale: dist.Independent(make(loc, scale), 1),
    lambda make: lambda loc, scale: dist.TransformedDistribution(make(loc, scale), [dist.ExpTransform()]),
])  # fmt: skip
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_normal_randomness_decides_equality_of_draws(wrap, randomness):
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["y"], distribution_class=wrap(dist.Normal), default_interaction_type="random"
    )
    given = TensorDict(loc=torch.zeros(4, 2), scale=torch.ones(4, 2), batch_size=[4])
    drawn = torch.vmap(module, randomness=randomness)(given)["y"]
    assert torch.equal(drawn[0], drawn[1]) is (randomness == "same")


def test_vmap_over_sequence_parameters_equals_separate_calls():
    members = [sequence() for _ in range(3)]
    with torch.no_grad():
        for place, member in enumerate(members):
            member[0].module[0].bias.fill_(place)
    params = from_modules(*members, as_module=False)

    def call(td, params):
        with params.to_module(members[0]):
            return members[0](td)

    result = torch.vmap(call, (None, 0))(TensorDict(x=X), params)
    for place, member in enumerate(members):
        torch.testing.assert_close(result[place]["y"], member(TensorDict(x=X))["y"])


def test_call_random_normal_same_seed_equals_torch_rsample():
    made = dist.Normal(torch.arange(3.0), torch.ones(3))
    given = TensorDict(loc=made.loc, scale=made.scale)
    torch.manual_seed(0)
    drawn = normal(default_interaction_type="random", num_samples=(2, 5))(given)["y"]
    torch.manual_seed(0)
    assert torch.equal(drawn, made.rsample((2, 5)))


def test_export_called_by_keyword_equals_eager():
    program = torch.export.export(sequence(return_log_prob=True), (), kwargs={"x": X})
    expected = sequence(return_log_prob=True)(x=X)
    torch.testing.assert_close(program.module()(x=X), expected)
