"""ProbabilisticTensorDictSequential: calls, get_dist(), log_prob() and keys."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as dist
from torch import nn

from td_core import TensorDict, lazy_stack
from td_core.spi import RULES
from td_nn import (
    CompositeDistribution,
    InteractionType,
    MissingKeyError,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    interaction_type,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)

X = torch.arange(3.0)


def net(source, name, **options):
    """Return a module that computes loc = source + 1 and scale = 1."""
    return TensorDictModule(
        lambda x, shift=1: (x + shift, torch.ones_like(x)), [source], [f"l{name}", f"s{name}"], **options
    )


def prob(name, **options):
    options.setdefault("distribution_class", dist.Normal)
    return ProbabilisticTensorDictModule({"loc": f"l{name}", "scale": f"s{name}"}, [name], **options)


def chain(inner=None, **options):
    """Return a sequence that draws ``a`` from ``x``, then ``b`` from ``a``."""
    return ProbabilisticTensorDictSequential(net("x", "a"), prob("a"), net("a", "b"), prob("b"), **options)


def given(**entries):
    return TensorDict(x=X, **entries)


def log_prob(value, loc):
    return dist.Normal(torch.as_tensor(loc).expand(3), 1.0).log_prob(torch.as_tensor(value).expand(3))


NESTED = {
    "flat": chain,
    "first is a sequence": lambda **o: ProbabilisticTensorDictSequential(
        TensorDictSequential(net("x", "a"), prob("a")), net("a", "b"), prob("b"), **o
    ),
    "last is a sequence": lambda **o: ProbabilisticTensorDictSequential(
        net("x", "a"), prob("a"), ProbabilisticTensorDictSequential(net("a", "b"), prob("b")), **o
    ),
    "both are": lambda **o: ProbabilisticTensorDictSequential(
        ProbabilisticTensorDictSequential(net("x", "a"), prob("a")),
        ProbabilisticTensorDictSequential(net("a", "b"), prob("b")),
        **o,
    ),
    "named": lambda **o: ProbabilisticTensorDictSequential(
        {"na": net("x", "a"), "pa": prob("a"), "nb": net("a", "b"), "pb": prob("b")}, **o
    ),
}


def test_construct_empty_raises():
    with pytest.raises(ValueError, match="needs at least one member"):
        ProbabilisticTensorDictSequential()


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (lambda: [net("x", "a"), prob("a")], False),
        (lambda: [net("x", "a"), prob("a"), net("a", "b"), prob("b")], True),
        (lambda: [net("x", "a"), prob("a"), net("a", "b")], True),
        (lambda: [net("x", "a")], True),
        (lambda: [net("x", "a"), ProbabilisticTensorDictSequential(prob("a"))], False),
    ],
)
def test_return_composite_default_depends_on_members(members, expected):
    assert ProbabilisticTensorDictSequential(*members()).return_composite is expected


def test_return_composite_false_without_last_distribution_raises():
    message = "with return_composite=False is a ProbabilisticTensorDictModule .*; got a TensorDictModule"
    with pytest.raises(TypeError, match=message):
        ProbabilisticTensorDictSequential(prob("a"), net("a", "b"), return_composite=False)
    made = chain(return_composite=False)
    with pytest.raises(TypeError, match=message):
        del made[-1]
    with pytest.raises(TypeError, match=message):
        made.append(net("b", "c"))
    with pytest.raises(ValueError, match="needs at least one member"):
        del made[:]
    assert len(made) == 4
    assert made.out_keys == chain().out_keys


def test_call_runs_members_in_order():
    result = chain()(given())
    assert (result["a"] == X + 1).all()
    assert (result["b"] == X + 2).all()


def test_call_passes_keywords_to_modules_only():
    assert (chain()(given(), shift=10)["b"] == X + 20).all()
    assert (chain().get_dist(given(), shift=10)["b"].loc == X + 20).all()
    assert (chain(return_composite=False).get_dist_params(given(), shift=10)["lb"] == X + 20).all()
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        chain().log_prob(given(a=X, b=X), other=1)


def test_call_keeps_samples_that_members_write():
    three = TensorDictModule(lambda x: (x, torch.ones_like(x), x + 9), ["x"], ["la", "sa", "a"])
    made = ProbabilisticTensorDictSequential(three, prob("a", return_log_prob=True))
    result = made(given())
    assert (result["a"] == X + 9).all()
    torch.testing.assert_close(result["a_log_prob"], log_prob(X + 9, X))


def test_call_overwrites_samples_of_input():
    assert (chain()(given(a=X * 100, b=X * 100))["b"] == X + 2).all()


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_get_dist_of_last_distribution_stores_member_outputs(make):
    made, data = make(return_composite=False), given()
    found = made.get_dist(data)
    assert isinstance(found, dist.Normal)
    assert (found.loc == X + 2).all()
    assert set(data.keys()) == {"x", "la", "sa", "a", "lb", "sb"}
    other = TensorDict()
    data = given()
    assert (made.get_dist(data, tensordict_out=other).loc == X + 2).all()
    assert set(data.keys()) == {"x"}
    assert set(other.keys()) == {"la", "sa", "a", "lb", "sb"}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_get_dist_composite_does_not_change_input(make):
    data = given()
    found = make(return_composite=True).get_dist(data)
    assert list(found) == ["a", "b"]
    assert (found["a"].loc == X + 1).all()
    assert (found["b"].loc == X + 2).all()
    assert set(data.keys()) == {"x"}
    other = TensorDict()
    make(return_composite=True).get_dist(data, tensordict_out=other)
    assert set(other.keys()) == {"la", "sa", "a", "lb", "sb"}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize("kind", [None, "random", "mean"])
def test_log_prob_conditions_on_samples_in_collection(make, composite, kind):
    data = given(a=torch.full((3,), 7.0), b=torch.full((3,), 3.0))
    made = make(return_composite=composite)
    with set_interaction_type(kind):
        found = made.log_prob(data)
        built = made.get_dist(data)
    assert (data["a"] == 7).all()
    if composite:
        torch.testing.assert_close(found["a_log_prob"], log_prob(7.0, X + 1))
        torch.testing.assert_close(found["b_log_prob"], log_prob(3.0, 8.0))
        assert (built["b"].loc == 8).all()
    else:
        torch.testing.assert_close(found, log_prob(3.0, 8.0))
        assert (built.loc == 8).all()


def test_log_prob_draws_missing_samples_only():
    data = given(b=torch.full((3,), 3.0))
    torch.testing.assert_close(chain(return_composite=False).log_prob(data), log_prob(3.0, X + 2))
    with pytest.raises(MissingKeyError, match="misses its inputs 'a', 'b'|misses its input 'a'"):
        chain().log_prob(given(b=X))
    with pytest.raises(MissingKeyError, match="misses the sample 'b'"):
        chain(return_composite=False).log_prob(given(a=X))


def test_log_prob_custom_keys_or_aggregate_returns_these_entries():
    members = [
        net("x", "a"),
        prob("a", log_prob_keys=["pa"]),
        net("a", "b"),
        prob("b", log_prob_keys=[("n", "pb")]),
    ]
    found = ProbabilisticTensorDictSequential(*members).log_prob(given(a=X, b=X))
    assert set(found.keys(True, True)) == {"pa", ("n", "pb")}
    with set_composite_lp_aggregate(True):
        data = TensorDict(x=X, a=X, b=X, batch_size=[3])
        total = chain().log_prob(data)
    torch.testing.assert_close(total, log_prob(X, X + 1) + log_prob(X, X + 1))
    assert set(data.keys()) == {"x", "a", "b"}


def test_log_prob_with_tensordict_out_keeps_input_unchanged():
    data, other = given(a=X, b=X), TensorDict()
    chain(return_composite=False).log_prob(data, other)
    assert set(data.keys()) == {"x", "a", "b"}
    assert set(other.keys()) == {"la", "sa", "a", "lb", "sb"}


def test_log_prob_with_dist_equals_log_prob_without():
    data = given(a=X, b=X)
    for made in (chain(), chain(return_composite=False)):
        built = made.get_dist(data)
        once = made.log_prob(data, dist=built)
        again = made.log_prob(data)
        assert torch.equal(
            *[each if isinstance(each, torch.Tensor) else each["b_log_prob"] for each in (once, again)]
        )


@pytest.mark.parametrize(("switch", "expected"), [(None, False), ("mean", True)])
def test_call_earlier_draws_use_interaction_type_of_last(switch, expected):
    made = ProbabilisticTensorDictSequential(
        net("x", "a"),
        prob("a"),
        net("a", "b"),
        prob("b", default_interaction_type="random"),
        return_composite=False,
    )
    for call in (made, made.get_dist_params):
        with set_interaction_type(switch):
            assert torch.equal(call(given())["a"], X + 1) is expected


def test_call_composite_draws_use_type_of_each_member():
    made = ProbabilisticTensorDictSequential(
        net("x", "a"), prob("a"), net("a", "b"), prob("b", default_interaction_type="random")
    )
    assert (made.get_dist(given())["b"].loc == X + 2).all()


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_build_dist_from_params_after_get_dist_params_equals_get_dist(make):
    data = given()
    made = make()
    assert made.get_dist_params(data) is data
    assert set(data.keys()) == {"x", "la", "sa", "a", "lb", "sb"}
    assert (made.build_dist_from_params(data).loc == X + 2).all()
    other = TensorDict()
    assert made.get_dist_params(given(), other) is other
    assert "lb" in other


@pytest.mark.parametrize("method", ["get_dist", "get_dist_params", "log_prob", "build_dist_from_params"])
def test_method_of_sequence_without_distribution_raises(method):
    made = ProbabilisticTensorDictSequential(net("x", "a"))
    with pytest.raises(RuntimeError, match="so it has no distribution; it writes"):
        getattr(made, method)(given())


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_sample_and_parameter_keys_list_last_distribution_first(make):
    made = make()
    assert made.dist_sample_keys == ["b", "a"]
    assert made.dist_params_keys == ["lb", "sb", "la", "sa"]
    assert made.log_prob_keys == ["b_log_prob", "a_log_prob"]
    with pytest.raises(AttributeError, match="read log_prob_keys"):
        _ = made.log_prob_key
    assert made[:1].in_keys == ["x"]


def test_log_prob_key_single_distribution_returns_it():
    assert ProbabilisticTensorDictSequential(net("x", "a"), prob("a")).log_prob_key == "a_log_prob"


def test_num_samples_returns_leading_dims_of_all_distributions():
    members = [net("x", "a"), prob("a", num_samples=3), net("a", "b"), prob("b", num_samples=(4, 2))]
    made = ProbabilisticTensorDictSequential(*members)
    assert made.num_samples == (4, 2, 3)
    result = made(TensorDict(x=X, batch_size=[3]))
    assert result.batch_size == (4, 2, 3, 3)
    assert chain().num_samples == ()
    scores = made.log_prob(result)
    assert scores["b_log_prob"].shape == (4, 2, 3, 3)


def test_default_interaction_type_is_that_of_last_distribution():
    made = ProbabilisticTensorDictSequential(
        prob("a"), prob("b", default_interaction_type="mean"), net("b", "c")
    )
    assert made.default_interaction_type is InteractionType.MEAN
    with set_interaction_type("mode"):
        assert (
            ProbabilisticTensorDictSequential(net("x", "a")).default_interaction_type is InteractionType.MODE
        )


@pytest.mark.parametrize(
    ("index", "options", "expected"),
    [
        (slice(0, 2), {}, (ProbabilisticTensorDictSequential, True)),
        (slice(0, 1), {}, (TensorDictSequential, None)),
        (slice(0, 3), {}, (ProbabilisticTensorDictSequential, True)),
        (slice(0, 3), {"return_composite": False}, (TensorDictSequential, None)),
        (slice(2, 4), {"return_composite": False}, (ProbabilisticTensorDictSequential, False)),
        (slice(0, 0), {}, (TensorDictSequential, None)),
    ],
)
@pytest.mark.parametrize("make", [chain, NESTED["named"]])
def test_getitem_slice_with_distribution_is_probabilistic(index, options, expected, make):
    part = make(partial_tolerant=True, **options)[index]
    assert (type(part), getattr(part, "return_composite", None)) == expected
    assert part.partial_tolerant


def test_select_subsequence_is_probabilistic():
    made = chain().select_subsequence(out_keys=["a"])
    assert type(made) is ProbabilisticTensorDictSequential
    assert (made.get_dist(given()).loc == X + 1).all()
    assert len(chain(return_composite=False).select_subsequence(out_keys=["la"])) == 1


def test_partial_tolerant_skips_members_without_inputs():
    made = ProbabilisticTensorDictSequential(
        net("x", "a"), prob("a"), net("z", "b"), prob("b"), partial_tolerant=True
    )
    assert set(made(given()).keys()) == {"x", "la", "sa", "a"}
    first = ProbabilisticTensorDictSequential(
        net("z", "a"), prob("a"), net("x", "b"), prob("b"), partial_tolerant=True
    )
    assert list(first.get_dist(given())) == ["b"]
    stack = lazy_stack([TensorDict(x=X), TensorDict(x=X, z=X)])
    assert "b" in made(stack)[1]
    assert "b" not in stack[0]
    with pytest.raises(MissingKeyError, match="misses its parameters 'lb', 'sb'"):
        made.get_dist(given())


def test_call_requires_sample_false_scores_last_distribution():
    made = ProbabilisticTensorDictSequential(net("x", "a"), prob("a", return_log_prob=True))
    result = made(given(a=X), _requires_sample=False)
    assert (result["a"] == X).all()
    torch.testing.assert_close(result["a_log_prob"], log_prob(X, X + 1))


def test_skip_existing_returns_input_unchanged():
    data = given(la=X, sa=X, a=X, lb=X, sb=X, b=X)
    with set_skip_existing(True):
        assert chain()(data) is data
        assert (data["b"] == X).all()


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
def test_call_applies_inplace_and_selected_out_keys(inplace):
    made = chain(inplace=inplace, selected_out_keys=["b"])
    data = given()
    result = made(data)
    assert (result["b"] == X + 2).all()
    assert set(result.keys()) == ({"b"} if inplace in (False, "empty") else {"x", "b"})
    assert (result is data) is (inplace in (None, True))
    assert (made(X) == X + 2).all()
    data = given()
    chain(inplace=inplace, return_composite=False).get_dist(data)
    assert ("lb" in data) is (inplace in (None, True))


def test_error_of_member_has_its_path():
    made = ProbabilisticTensorDictSequential({"net": net("x", "a"), "draw": prob("b")})
    with pytest.raises(
        MissingKeyError, match=r'seq\["draw"\], a ProbabilisticTensorDictModule\(Normal\), misses'
    ):
        made(given())
    with pytest.raises(MissingKeyError, match=r'seq\["draw"\]'):
        made.get_dist(given())


def test_get_dist_composite_member_merges_its_components():
    params = TensorDict({("p", "a", "loc"): X, ("p", "a", "scale"): torch.ones(3)})
    both = ProbabilisticTensorDictModule(
        {"params": "p"},
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": dist.Normal}},
    )
    made = ProbabilisticTensorDictSequential(both, net("a", "b"), prob("b"))
    assert list(made.get_dist(params)) == ["a", "b"]
    assert set(made.log_prob(params.set("a", X).set("b", X)).keys()) == {"a_log_prob", "b_log_prob"}


class WithoutSelection(TensorDictSequential):
    """A sequence whose constructor does not accept every argument."""

    def __init__(self, *modules, partial_tolerant=False, inplace=None):
        super().__init__(*modules, partial_tolerant=partial_tolerant, inplace=inplace)


class Between(ProbabilisticTensorDictSequential, WithoutSelection):
    """A class in whose MRO WithoutSelection is between the two sequences."""


class Bare(ProbabilisticTensorDictSequential):
    """A sequence that does not call the constructors of sequences."""

    def __init__(self, *modules):
        in_keys, out_keys = self._compute_in_and_out_keys(modules)
        TensorDictModule.__init__(self, nn.ModuleList(modules), in_keys, out_keys)


@pytest.mark.parametrize("cls", [Between, Bare])
def test_call_subclass_with_other_constructor_runs_members(cls):
    made = cls(net("x", "a"), prob("a"))
    assert (made(given())["a"] == X + 1).all()
    assert (made.get_dist(given()).loc == X + 1).all()
    assert made.inplace in (None, True)


def test_dist_sample_draws_from_last_distribution():
    made = chain(return_composite=False)
    built = made.get_dist(given())
    assert (made._dist_sample(built, interaction_type=InteractionType.MEAN) == X + 2).all()


def watch(seen, source="x", name="p"):
    """Return a module that records the interaction type."""

    def run(x):
        seen.append(interaction_type())
        return x

    return TensorDictModule(run, [source], [name])


def draw(name, kind, **options):
    return ProbabilisticTensorDictModule(
        {"logits": "p"}, [name], distribution_class=dist.Categorical, default_interaction_type=kind, **options
    )


RANDOM, MODE = InteractionType.RANDOM, InteractionType.MODE
#: A sequence, and the type under which its members run: in a call, and in get_dist_params().
TYPED = {
    "one": (lambda seen: [watch(seen), draw("a", RANDOM)], RANDOM, RANDOM),
    "nested members": (
        lambda seen: [TensorDictSequential(watch(seen), watch(seen)), draw("a", MODE)],
        MODE,
        MODE,
    ),
    "nested distribution": (
        lambda seen: [watch(seen), ProbabilisticTensorDictSequential(watch(seen), draw("a", RANDOM))],
        RANDOM,
        RANDOM,
    ),
    "in a plain sequence": (
        lambda seen: [watch(seen), TensorDictSequential(watch(seen), draw("a", MODE))],
        MODE,
        MODE,
    ),
    "wrapped member": (
        lambda seen: [TensorDictModuleWrapper(watch(seen)), draw("a", RANDOM)],
        RANDOM,
        RANDOM,
    ),
    "member after it": (lambda seen: [watch(seen), draw("a", RANDOM), watch(seen, "a", "b")], RANDOM, RANDOM),
    "two of one type": (
        lambda seen: [watch(seen), draw("a", RANDOM), watch(seen), draw("b", RANDOM)],
        RANDOM,
        RANDOM,
    ),
    "two types": (lambda seen: [watch(seen), draw("a", RANDOM), watch(seen), draw("b", MODE)], None, MODE),
}
CALLS = {
    "call": lambda seq, td: seq(td),
    "call with tensors": lambda seq, td: seq(x=td["x"]),
    "forward": lambda seq, td: seq.forward(td),
    "get_dist": lambda seq, td: seq.get_dist(td),
    "log_prob": lambda seq, td: seq.log_prob(td.set("a", torch.tensor(1)).set("b", torch.tensor(1))),
    "get_dist_params": lambda seq, td: seq.get_dist_params(td),
    "tensordict_out": lambda seq, td: seq(td, tensordict_out=TensorDict()),
    "subsequence": lambda seq, td: seq.select_subsequence(out_keys=["a", "b"])(td),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", TYPED)
def test_members_run_under_interaction_type_of_distribution(name, call):
    seen = []
    make, in_call, in_params = TYPED[name]
    seq = ProbabilisticTensorDictSequential(*make(seen))
    expected = in_params if call == "get_dist_params" else in_call
    CALLS[call](seq, TensorDict(x=torch.zeros(3)))
    assert seen and {*seen} == {expected} and interaction_type() is None
    seen.clear()
    with set_interaction_type("mean" if call in ("get_dist", "get_dist_params") else "mode"):
        CALLS[call](seq, TensorDict(x=torch.zeros(3)))
        assert seen and None not in seen and {*seen} == {interaction_type()}


def test_members_run_under_interaction_type_of_last_without_composite():
    seen = []
    members = [watch(seen), draw("a", RANDOM), watch(seen), draw("b", MODE)]
    seq = ProbabilisticTensorDictSequential(*members, return_composite=False)
    seq(TensorDict(x=torch.zeros(3)))
    seq.get_dist(TensorDict(x=torch.zeros(3)))
    members[-1].default_interaction_type = "random"
    seq(TensorDict(x=torch.zeros(3)))
    assert seen == [MODE] * 4 + [RANDOM] * 2


@pytest.mark.parametrize("call", ["__call__", "get_dist", "get_dist_params", "log_prob"])
def test_error_of_member_restores_interaction_type(call):
    def fail(x):
        raise ZeroDivisionError

    seq = ProbabilisticTensorDictSequential(TensorDictModule(fail, ["x"], ["p"]), draw("a", RANDOM))
    with pytest.raises(ZeroDivisionError):
        getattr(seq, call)(TensorDict(x=torch.zeros(3)))
    assert interaction_type() is None
    with set_interaction_type("mean"):
        with pytest.raises(ZeroDivisionError):
            getattr(seq, call)(TensorDict(x=torch.zeros(3)))
        assert interaction_type() is InteractionType.MEAN


def test_build_dist_from_params_uses_interaction_type_of_distribution():
    seen = []

    def make(logits):
        seen.append(interaction_type())
        return dist.Categorical(logits=logits)

    last = ProbabilisticTensorDictModule(
        {"logits": "x"}, ["a"], distribution_class=make, default_interaction_type="mode"
    )
    seq = ProbabilisticTensorDictSequential(last)
    for call in (seq, seq.get_dist, seq.build_dist_from_params):
        call(TensorDict(x=torch.zeros(3)))
    assert seen == [MODE] * 3


@pytest.mark.parametrize("return_composite", [True, False])
def test_program_of_tensordict_draws_earlier_samples_again(return_composite, monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    kwargs = {"distribution_class": dist.Normal, "distribution_kwargs": {"scale": 1.0}}
    seq = ProbabilisticTensorDictSequential(
        ProbabilisticTensorDictModule({"loc": "a"}, ["x"], **kwargs),
        ProbabilisticTensorDictModule({"loc": "x"}, ["y"], **kwargs),
        return_composite=return_composite,
    )
    data = TensorDict(a=torch.ones(1), x=torch.full((1,), 5.0), y=torch.full((1,), 4.0))
    score = seq.log_prob(data)
    expected = dist.Normal(1.0, 1.0).log_prob(torch.tensor([4.0]))
    assert torch.equal(score["y_log_prob"] if return_composite else score, expected)
