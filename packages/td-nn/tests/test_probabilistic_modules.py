"""ProbabilisticTensorDictModule: the distribution that it builds, and the sample that it stores."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import distributions as dist

from td_core import KeyPathError, TensorDict, TensorDictParams, lazy_stack
from td_core.spi import RULES
from td_nn import (
    CompositeDistribution,
    Delta,
    InteractionType,
    MissingKeyError,
    ProbabilisticTensorDictModule,
    SelectionError,
    TensorDictSequential,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)

LOC, SCALE = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 2.0])


def normal(in_keys=("loc", "scale"), out_keys=("y",), **options):
    keys = in_keys if isinstance(in_keys, dict) else list(in_keys)
    return ProbabilisticTensorDictModule(keys, list(out_keys), distribution_class=dist.Normal, **options)


def data(**entries):
    return TensorDict(loc=LOC, scale=SCALE, **entries)


class Pair(dist.Distribution):
    """A distribution whose samples are tuples."""

    arg_constraints = {}  # noqa: RUF012

    def __init__(self, loc):
        super().__init__(loc.shape, validate_args=False)
        self.loc = loc

    @property
    def deterministic_sample(self):
        return self.loc, self.loc + 1

    def sample(self, shape=()):
        return self.loc.expand(*shape, *self.loc.shape), (self.loc + 1).expand(*shape, *self.loc.shape)

    def log_prob(self, one, other):
        return one + other


@pytest.mark.parametrize(
    ("in_keys", "entries"),
    [
        (["loc", "scale"], {"loc": LOC, "scale": SCALE}),
        ([("n", "loc"), ("n", "m", "scale")], {("n", "loc"): LOC, ("n", "m", "scale"): SCALE}),
        ({"loc": "mu", "scale": ("n", "std")}, {"mu": LOC, ("n", "std"): SCALE}),
        ({"scale": "s", "loc": "s"}, {"s": SCALE}),
    ],
)
def test_get_dist_passes_entries_as_keywords(in_keys, entries):
    made = normal(in_keys).get_dist(TensorDict(entries))
    keywords = dict(zip(normal(in_keys).dist_keys, normal(in_keys).in_keys))
    assert (made.loc == entries[keywords["loc"]]).all()
    assert (made.scale == entries[keywords["scale"]]).all()


@pytest.mark.parametrize("kind", ["deterministic", "mean", "mode"])
@pytest.mark.parametrize("how", ["default", "switch"])
def test_call_stores_value_of_interaction_type(kind, how):
    module = normal(default_interaction_type=kind if how == "default" else "random")
    with set_interaction_type(None if how == "default" else kind):
        assert (module(data())["y"] == LOC).all()


def test_call_random_with_rsample_keeps_gradients():
    torch.manual_seed(0)
    expected = dist.Normal(LOC, SCALE).sample()
    torch.manual_seed(0)
    given = TensorDict(loc=LOC.clone().requires_grad_(), scale=SCALE)
    drawn = normal(default_interaction_type="random")(given)["y"]
    assert torch.equal(drawn.detach(), expected)
    drawn.sum().backward()
    assert (given["loc"].grad == 1).all()


def test_call_random_without_rsample_calls_sample():
    module = ProbabilisticTensorDictModule(
        ["probs"], ["y"], distribution_class=dist.Bernoulli, default_interaction_type="random"
    )
    drawn = module(TensorDict(probs=torch.tensor([0.0, 1.0], requires_grad=True)))["y"]
    assert drawn.tolist() == [0.0, 1.0]
    assert not drawn.requires_grad


@pytest.mark.parametrize("kind", ["median", "mode"])
def test_call_distribution_without_statistic_raises(kind):
    made = dist.TransformedDistribution(dist.Normal(LOC, SCALE), [dist.ExpTransform()])
    module = ProbabilisticTensorDictModule(
        ["x"], ["y"], distribution_class=lambda x: made, default_interaction_type=kind
    )
    with pytest.raises(NotImplementedError, match=f"TransformedDistribution has no {kind}; choose another"):
        module(TensorDict(x=LOC))


def test_call_mean_not_implemented_averages_draws():
    made = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2, requires_grad=True), torch.ones(2)), [dist.ExpTransform()]
    )
    module = ProbabilisticTensorDictModule(
        ["x"], ["y"], distribution_class=lambda x: made, default_interaction_type="mean",
        n_empirical_estimate=20000,
    )  # fmt: skip
    torch.manual_seed(0)
    value = module(TensorDict(x=LOC))["y"]
    assert value.requires_grad
    torch.testing.assert_close(value.detach(), torch.full((2,), 0.5).exp(), atol=0.05, rtol=0)


@pytest.mark.parametrize("kind", [None, "best", 3])
def test_construct_unknown_interaction_type_raises(kind):
    with pytest.raises(ValueError, match="an interaction type is one of .*'random'"):
        normal(default_interaction_type=kind)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["scale"], r"ProbabilisticTensorDictModule\(Normal\) misses its parameter 'scale': existing keys: \['loc'\]"),
        (["loc", "scale"], "misses its parameters 'loc', 'scale'"),
    ],
)  # fmt: skip
def test_call_missing_parameter_raises(missing, message):
    with pytest.raises(MissingKeyError, match=message) as caught:
        normal()(data().exclude(*missing))
    assert caught.value.missing == missing
    assert isinstance(caught.value, KeyError)


def test_call_missing_optional_parameter_passes_none():
    module = ProbabilisticTensorDictModule(["logits", "probs"], ["y"], distribution_class=dist.Categorical)
    assert module(TensorDict(probs=torch.tensor([0.1, 0.9])))["y"] == 1


def test_call_misspelled_key_raises_with_suggestion():
    with pytest.raises(MissingKeyError, match="did you mean 'scales'"):
        normal()(TensorDict(loc=LOC, scales=SCALE))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: normal(["loc", "scael"]), r"the distribution takes \['loc', 'scale', 'validate_args'\], not scael"),
        (lambda: normal(distribution_kwargs={"scale": 1.0}), "scale is in in_keys and in distribution_kwargs"),
    ],
)  # fmt: skip
def test_call_unknown_keyword_of_distribution_raises(make, message):
    given = data(scael=SCALE)
    with pytest.raises(TypeError, match=message):
        make()(given)


def test_call_invalid_parameter_value_adds_note_to_error():
    with pytest.raises(ValueError, match="to satisfy the constraint") as caught:
        normal(distribution_kwargs={"validate_args": True})(TensorDict(loc=LOC, scale=-SCALE))
    assert any("ProbabilisticTensorDictModule(Normal)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: normal({1: "loc"}), ValueError, "a keyword is a string; got 1"),
        (lambda: normal(cache_dist=True), ValueError, "cache_dist=True is not supported"),
        (lambda: ProbabilisticTensorDictModule(["x"], ["y"], distribution_class=3), TypeError, "got 3"),
        (lambda: normal(generator=3.5), TypeError, "or None; got a float"),
        (lambda: normal(generator=True), TypeError, "or None; got a bool"),
        (lambda: normal(7), ValueError, "in_keys is a list of keys"),
    ],
)  # fmt: skip
def test_construct_wrong_argument_raises(make, error, message):
    if message.startswith("in_keys"):
        with pytest.raises(error, match=message):
            ProbabilisticTensorDictModule(7, ["y"])
        return
    with pytest.raises(error, match=message):
        make()


def test_distribution_kwargs_as_params_become_submodule():
    params = TensorDictParams(TensorDict(scale=SCALE))
    module = normal(["loc"], distribution_kwargs=params)
    assert list(module.state_dict()) == ["distribution_kwargs.scale"]
    assert [name for name, _ in module.named_parameters()] == ["distribution_kwargs.scale"]
    module(TensorDict(loc=LOC), _requires_sample=True)
    assert (module.double().get_dist(TensorDict(loc=LOC.double())).scale == SCALE).all()


@pytest.mark.parametrize("of", [dict, TensorDict])
def test_distribution_kwargs_tensors_move_with_module(of):
    module = normal(["loc"], distribution_kwargs=of(scale=SCALE))
    assert list(module.state_dict()) == []
    assert len(list(module.buffers())) == 1
    assert module.double().get_dist(TensorDict(loc=LOC.double())).scale.dtype is torch.float64
    assert module.distribution_kwargs["scale"].dtype is torch.float64


def test_distribution_kwargs_nested_tensors_move_with_module():
    kwargs = {"distribution_map": {"a": dist.Normal}, "extra_kwargs": {"a": {"scale": torch.ones(1)}}}
    module = ProbabilisticTensorDictModule(
        ["params"], distribution_class=CompositeDistribution, distribution_kwargs=kwargs
    ).to(torch.float64)
    made = module.get_dist(TensorDict(params=TensorDict({("a", "loc"): torch.zeros(1, dtype=torch.float64)})))
    assert made["a"].scale.dtype is torch.float64
    assert kwargs["extra_kwargs"]["a"]["scale"].dtype is torch.float32


def test_call_tuple_sample_stores_one_element_per_key():
    module = ProbabilisticTensorDictModule(["loc"], ["a", ("n", "b")], distribution_class=Pair)
    result = module(TensorDict(loc=LOC))
    assert (result["a"] == LOC).all()
    assert (result["n", "b"] == LOC + 1).all()
    assert (module.log_prob(result) == 2 * LOC + 1).all()


@pytest.mark.parametrize(
    ("cls", "keys", "count"), [(Pair, ["a"], 2), (Pair, ["a", "b", "c"], 2), (Delta, ["a", "b"], 1)]
)
def test_call_wrong_number_of_samples_raises(cls, keys, count):
    name = "param" if cls is Delta else "loc"
    module = ProbabilisticTensorDictModule([name], keys, distribution_class=cls)
    with pytest.raises(ValueError, match=f"drew {count} values for the {len(keys)} out_keys"):
        module(TensorDict({name: LOC}))


def test_call_out_key_underscore_stores_no_sample():
    module = ProbabilisticTensorDictModule(["param"])
    assert module.out_keys == ["_"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(module(TensorDict(param=LOC)).keys()) == ["param"]


COMPONENTS = {"a": dist.Normal, ("n", "b"): dist.Categorical}


@pytest.mark.parametrize(
    ("name_map", "expected"),
    [
        (None, ["a", ("n", "b")]),
        ({"a": ("q", "a")}, [("q", "a"), ("n", "b")]),
        ({("n", "b"): "b", "a": "c"}, ["c", "b"]),
    ],
)
def test_composite_without_out_keys_uses_sample_keys(name_map, expected):
    module = ProbabilisticTensorDictModule(
        ["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": COMPONENTS, "name_map": name_map},
    )
    assert module.out_keys == expected
    params = TensorDict({"a": {"loc": LOC, "scale": SCALE}, ("n", "b"): {"logits": LOC}})
    result = module(TensorDict(params=params))
    assert all(key in result.keys(True) for key in expected)


def test_composite_without_out_keys_and_distribution_map_raises():
    with pytest.raises(KeyError, match="give one of the two"):
        ProbabilisticTensorDictModule(["params"], distribution_class=CompositeDistribution)


@pytest.mark.parametrize("partial", [False, True])
def test_composite_with_unwritten_out_key_raises(partial):
    kwargs = {"distribution_map": COMPONENTS}
    cls = functools.partial(CompositeDistribution, **kwargs) if partial else CompositeDistribution
    params = TensorDict({"a": {"loc": LOC, "scale": SCALE}, ("n", "b"): {"logits": LOC}})
    with pytest.raises(
        KeyPathError, match=r"declares the out_keys \['other'\], but its distribution writes \['a'"
    ):
        ProbabilisticTensorDictModule(
            ["params"], ["other"], distribution_class=cls, distribution_kwargs={} if partial else kwargs
        )(TensorDict(params=params))


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("aggregate", "scores"),
    [
        (None, []),
        (False, ["a_log_prob", ("n", "b_log_prob")]),
        (True, ["a_log_prob", ("n", "b_log_prob"), "sample_log_prob"]),
    ],
)
def test_composite_in_program_of_tensordict_writes_components(aggregate, scores, partial, monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    kwargs = {"distribution_map": COMPONENTS, "name_map": {"unknown": "x"}, "extra_kwargs": {"unknown": {}}}
    cls = functools.partial(CompositeDistribution, **kwargs) if partial else CompositeDistribution
    params = TensorDict({"a": {"loc": LOC, "scale": SCALE}, ("n", "b"): {"logits": LOC}})
    with set_composite_lp_aggregate(bool(aggregate)):
        module = ProbabilisticTensorDictModule(
            ["params"],
            ["other"],
            distribution_class=cls,
            distribution_kwargs={} if partial else kwargs,
            return_log_prob=aggregate is not None,
        )
        result = TensorDictSequential(module)(TensorDict(params=params))
    assert module.dist_sample_keys == ["other"]
    assert torch.equal(result["a"], LOC)
    assert torch.equal(result["n", "b"], LOC.argmax())
    written = [key for key in result.keys(True, True) if "params" not in key]
    assert sorted(written, key=str) == sorted(["a", ("n", "b"), *scores], key=str)


@pytest.mark.parametrize("kind", ["random", "mean"])
@pytest.mark.parametrize(("count", "lead"), [(4, (4,)), ((3, 2), (3, 2))])
@pytest.mark.parametrize("out", [False, True])
def test_call_with_num_samples_returns_new_collection(kind, count, lead, out):
    given = TensorDict({"loc": LOC, "scale": SCALE}, batch_size=[2])
    other = TensorDict({"z": LOC}, batch_size=[2]) if out else None
    module = normal(num_samples=count, default_interaction_type=kind, return_log_prob=True)
    result = module(given, tensordict_out=other)
    assert result.batch_size == (*lead, 2)
    assert result["y"].shape == (*lead, 2)
    assert sorted(given.keys()) == ["loc", "scale"]
    assert sorted(result.keys()) == (["y", "y_log_prob", "z"] if out else ["loc", "scale", "y", "y_log_prob"])
    assert out is False or list(other.keys()) == ["z"]
    assert module.get_dist(given).batch_shape == (2,)
    torch.testing.assert_close(result["y_log_prob"], dist.Normal(LOC, SCALE).log_prob(result["y"]))
    if kind == "mean":
        assert (result["y"] == LOC).all()


def test_call_with_tensordict_out_stores_sample_there():
    given, other = data(), TensorDict(z=LOC)
    assert normal()(given, tensordict_out=other) is other
    assert sorted(other.keys()) == ["y", "z"]
    assert "y" not in given


def seeded(seed):
    return dist.Normal(LOC, SCALE).loc + torch.randn(2, generator=torch.Generator().manual_seed(seed)) * SCALE


@pytest.mark.parametrize("form", ["generator", "int"])
def test_call_with_generator_draws_from_it(form):
    source = torch.Generator().manual_seed(3) if form == "generator" else 3
    module = normal(generator=source, default_interaction_type="random")
    before = torch.get_rng_state()
    first, second = module(data())["y"], module(data())["y"]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, seeded(3))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [3, torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
@pytest.mark.parametrize("method", ["set", "set_non_tensor"])
def test_call_with_seed_entry_replaces_seed(seed, method):
    if method == "set_non_tensor":
        pytest.importorskip("td_tensorclass")
    module = normal(generator=("g", "seed"), default_interaction_type="random")
    given = data()
    getattr(given, method)(("g", "seed"), seed)
    before = given["g", "seed"]
    assert torch.equal(module(given)["y"], seeded(3))
    new = given["g", "seed"]
    assert type(new) is type(before)
    assert new != seed
    if isinstance(new, torch.Tensor):
        assert (new.shape, new.dtype) == (before.shape, before.dtype)


def test_call_with_generator_entry_advances_generator():
    pytest.importorskip("td_tensorclass")
    source = torch.Generator().manual_seed(3)
    given = data().set("g", source)
    module = normal(generator="g", default_interaction_type="random")
    assert torch.equal(module(given)["y"], seeded(3))
    assert given["g"] is source
    assert not torch.equal(module(given)["y"], seeded(3))


def test_call_missing_generator_entry_uses_global_state():
    torch.manual_seed(3)
    expected = dist.Normal(LOC, SCALE).rsample()
    torch.manual_seed(3)
    assert torch.equal(normal(generator="g", default_interaction_type="random")(data())["y"], expected)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (torch.tensor([1, 2]), ValueError, r"the tensor at 'g' has shape \[2\]"),
        (torch.tensor(1.0), TypeError, "the tensor at 'g' has dtype torch.float32"),
        ("one", TypeError, "the entry 'g' is a torch.Generator, .* got a str"),
    ],
)
def test_call_wrong_generator_entry_raises(seed, error, message):
    if isinstance(seed, str):
        pytest.importorskip("td_tensorclass")
    module = normal(generator="g", default_interaction_type="random")
    with pytest.raises(error, match=message):
        module(data().set("g", seed))


@pytest.mark.parametrize("kind", ["deterministic", "mean", "mode"])
def test_call_without_draw_does_not_advance_generator(kind):
    source = torch.Generator().manual_seed(3)
    before = source.get_state()
    normal(generator=source, default_interaction_type=kind)(data())
    assert torch.equal(source.get_state(), before)
    assert normal(generator="g", default_interaction_type=kind)(data(g=3))["g"] == 3


def test_call_empirical_mean_with_generator_draws_from_it():
    made = dist.TransformedDistribution(dist.Normal(LOC, SCALE), [dist.ExpTransform()])
    modules = [
        ProbabilisticTensorDictModule(
            ["x"], ["y"], distribution_class=lambda x: made, default_interaction_type="mean", generator=5
        )
        for _ in range(2)
    ]
    one, other = [module(TensorDict(x=LOC))["y"] for module in modules]
    assert torch.equal(one, other)


class Scoring(dist.Normal):
    """A distribution with rsample_and_log_prob(), as distributions of other libraries have."""

    def rsample_and_log_prob(self, sample_shape=()):
        return self.loc.expand(*sample_shape, *self.loc.shape), self.loc * 10


@pytest.mark.parametrize(("kind", "factor"), [("random", 10), ("mean", None)])
def test_call_random_with_log_prob_uses_rsample_and_log_prob(kind, factor):
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["y"],
        distribution_class=Scoring,
        return_log_prob=True,
        default_interaction_type=kind,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = module(data())
    expected = LOC * factor if factor else dist.Normal(LOC, SCALE).log_prob(LOC)
    torch.testing.assert_close(result["y_log_prob"], expected)


@pytest.mark.parametrize("composite", [False, True])
def test_call_requires_sample_false_scores_existing_sample(composite):
    if composite:
        module = ProbabilisticTensorDictModule(
            ["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"y": dist.Normal}},
            return_log_prob=True,
        )
        given = TensorDict(params=TensorDict(y=TensorDict(loc=LOC, scale=SCALE)), y=SCALE)
    else:
        module, given = normal(return_log_prob=True), data(y=SCALE)
    result = module(given, _requires_sample=False)
    assert (result["y"] == SCALE).all()
    torch.testing.assert_close(result["y_log_prob"], dist.Normal(LOC, SCALE).log_prob(SCALE))
    with pytest.raises(MissingKeyError, match="misses the sample 'y'"):
        module(given.exclude("y", "y_log_prob"), _requires_sample=False)


def test_log_prob_reads_samples_from_collection():
    given = data(y=SCALE)
    expected = dist.Normal(LOC, SCALE).log_prob(SCALE)
    torch.testing.assert_close(normal().log_prob(given), expected)
    torch.testing.assert_close(
        normal().log_prob(given, dist=dist.Normal(LOC + 1, SCALE)),
        dist.Normal(LOC + 1, SCALE).log_prob(SCALE),
    )
    assert sorted(given.keys()) == ["loc", "scale", "y"]
    with pytest.raises(MissingKeyError, match="misses the sample 'y'"):
        normal().log_prob(data())


def test_skip_existing_without_log_prob_entry_runs_module():
    module = normal(return_log_prob=True)
    with set_skip_existing(True):
        full = data(y=SCALE, y_log_prob=SCALE)
        assert module(full) is full
        assert (full["y"] == SCALE).all()
        assert (module(data(y=SCALE))["y"] == LOC).all()


def test_call_with_tensors_returns_tensors():
    module = normal({"loc": "mu", "scale": ("n", "std")}, return_log_prob=True)
    for result in (module(LOC, SCALE), module(mu=LOC, n_std=SCALE)):
        assert len(result) == 2
        assert (result[0] == LOC).all()


def test_call_with_lazy_stack_stores_sample():
    stack = lazy_stack([TensorDict(loc=LOC, scale=SCALE), TensorDict(loc=LOC + 1, scale=SCALE)])
    result = normal()(stack)
    assert result is stack
    assert (stack[1]["y"] == LOC + 1).all()


def test_select_out_keys_raises():
    with pytest.raises(SelectionError, match="call select_out_keys\\(\\) of a TensorDictSequential"):
        normal().select_out_keys("y")
    with pytest.raises(AttributeError):
        normal().out_keys = ["z"]


@pytest.mark.parametrize("move", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copied_module_same_seed_draws_same_sample(move):
    module = normal(
        generator=3, default_interaction_type="random", distribution_kwargs={"validate_args": False}
    )
    assert torch.equal(move(module)(data())["y"], module(data())["y"])


def test_repr_lists_options():
    text = repr(normal(num_samples=2, default_interaction_type=InteractionType.MEAN))
    for part in (
        "Normal",
        "distribution_kwargs={}",
        "default_interaction_type=mean",
        "num_samples=torch.Size([2])",
    ):
        assert part in text


def test_cache_dist_in_program_of_tensordict_builds_at_each_call(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    module = normal(cache_dist=True)
    for loc in (LOC, LOC + 1):
        assert torch.equal(module(TensorDict(loc=loc, scale=SCALE))["y"], loc)


def test_distribution_kwargs_in_program_of_tensordict_are_the_dict_of_the_caller(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    kwargs = {"scale": torch.ones(2)}
    module = normal(["loc"], distribution_kwargs=kwargs)
    module.distribution_kwargs["scale"] = SCALE
    assert module.distribution_kwargs is kwargs
    assert torch.equal(module.get_dist(TensorDict(loc=LOC)).scale, SCALE)
    assert not list(module.buffers())


@pytest.mark.parametrize("score", [False, True])
def test_composite_in_program_of_tensordict_draws_without_gradient(score, monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    module = ProbabilisticTensorDictModule(
        ["params"],
        ["a"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": dist.Normal}},
        default_interaction_type="random",
        return_log_prob=score,
    )
    params = TensorDict(a=TensorDict(loc=LOC.clone().requires_grad_(), scale=SCALE))
    assert not module(TensorDict(params=params))["a"].requires_grad
    assert module.get_dist(TensorDict(params=params)).rsample()["a"].requires_grad


@pytest.mark.parametrize(
    ("make", "limit"),
    [(int, 2**62), (torch.tensor, 2**62), (lambda seed: torch.tensor(seed, dtype=torch.int32), 2**31 - 1)],
    ids=["int", "int64", "int32"],
)
def test_next_seed_is_that_of_tensordict(make, limit):
    module = normal(default_interaction_type="random", generator="rng")
    seed = module(data(rng=make(42)))["rng"]
    other = torch.Generator().manual_seed(42)
    torch.randn(2, generator=other)
    assert int(seed) == int(torch.randint(limit, (), generator=other))
