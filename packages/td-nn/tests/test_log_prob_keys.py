"""The keys of log-probabilities, and the switch set_composite_lp_aggregate that sums them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import distributions as dist

from td_core import TensorDict
from td_nn import (
    CompositeDistribution,
    ModuleKeysError,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
)

PARAMS = TensorDict(
    {
        "a": {"loc": torch.zeros(3), "scale": torch.ones(3)},
        ("n", "b"): {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)},
    },
    batch_size=[3],
)
SAMPLES = TensorDict({"a": torch.ones(3), ("n", "b"): torch.full((3, 2), 2.0)}, batch_size=[3])
LP_A = dist.Normal(0.0, 1.0).log_prob(torch.ones(3))
LP_B = dist.Normal(0.0, 1.0).log_prob(torch.full((3, 2), 2.0))


def single(key="a", **options):
    return ProbabilisticTensorDictModule(["loc", "scale"], [key], distribution_class=dist.Normal, **options)


def composite(**options):
    kwargs = {"distribution_map": {"a": dist.Normal, ("n", "b"): dist.Normal}}
    return ProbabilisticTensorDictModule(
        ["params"], distribution_class=CompositeDistribution, distribution_kwargs=kwargs, **options
    )


def keys_of(td):
    return {key for key in td.keys(True, True) if "params" not in key}


@pytest.mark.parametrize(
    ("make", "aggregate", "options", "keys"),
    [
        (lambda **o: single("a", **o), False, {}, ["a_log_prob"]),
        (lambda **o: single(("n", "a"), **o), False, {}, [("n", "a_log_prob")]),
        (lambda **o: single("a", **o), True, {}, ["sample_log_prob"]),
        (composite, False, {}, ["a_log_prob", ("n", "b_log_prob")]),
        (composite, True, {}, ["sample_log_prob"]),
        (single, False, {"log_prob_key": "lp"}, ["lp"]),
        (single, False, {"log_prob_key": ("n", ("lp",))}, [("n", "lp")]),
        (single, False, {"log_prob_keys": "lp"}, ["lp"]),
        (single, False, {"log_prob_keys": ["lp"]}, ["lp"]),
        (single, False, {"log_prob_keys": ["lp"], "log_prob_key": "other"}, ["lp"]),
        (single, True, {"log_prob_key": "lp"}, ["lp"]),
        (composite, True, {"log_prob_key": ("n", "lp")}, [("n", "lp")]),
        (composite, False, {"log_prob_keys": ["one", ("q", "two")]}, ["one", ("q", "two")]),
    ],
)
@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("how", ["switch", "argument"])
def test_log_prob_keys_default_or_custom_are_out_keys(make, aggregate, options, keys, returned, how):
    if how == "switch":
        with set_composite_lp_aggregate(aggregate):
            module = make(return_log_prob=returned, **options)
            found = module.log_prob_keys, module.out_keys, keys_of(module(parameters(make)))
    else:
        module = make(return_log_prob=returned, aggregate=aggregate, **options)
        found = module.log_prob_keys, module.out_keys, keys_of(module(parameters(make)))
    samples = module.dist_sample_keys
    assert found[0] == keys
    assert found[1] == samples + (keys if returned else [])
    entries = (
        {"a_log_prob", ("n", "b_log_prob")} if how == "switch" and aggregate and make is composite else set()
    )
    written = found[2] - {"loc", "scale"}
    assert written == {*samples, *(keys if returned else []), *(entries if returned else [])}


def parameters(make):
    if make is composite:
        return TensorDict(params=PARAMS, batch_size=[3])
    return TensorDict(loc=torch.zeros(3), scale=torch.ones(3))


@pytest.mark.parametrize(
    ("make", "aggregate", "options", "message"),
    [
        (
            composite,
            False,
            {"log_prob_key": "lp"},
            "log_prob_key is one key for the 2 samples .* give log_prob_keys",
        ),
        (
            single,
            True,
            {"log_prob_keys": ["lp"]},
            "log_prob_keys are .* not aggregated, .* give log_prob_key",
        ),
        (composite, True, {"log_prob_keys": ["lp", "lq"]}, "log_prob_keys are .* not aggregated"),
        (
            single,
            True,
            {"log_prob_keys": ["lp"], "log_prob_key": "lp"},
            "log_prob_keys are .* not aggregated",
        ),
    ],
)
def test_construct_log_prob_key_of_other_mode_raises(make, aggregate, options, message):
    with set_composite_lp_aggregate(aggregate), pytest.raises(RuntimeError, match=message):
        make(**options)
    with pytest.raises(RuntimeError, match=message):
        make(aggregate=aggregate, **options)


@pytest.mark.parametrize(
    ("sample", "key"), [("a", "a"), ("a", ("a", "b")), (("a", "b"), "a"), (("n", "a"), ("n", "a"))]
)
def test_construct_log_prob_key_equal_to_sample_key_raises(sample, key):
    with pytest.raises(ValueError, match="so that writing it would overwrite the sample; choose another key"):
        single(sample, return_log_prob=True, log_prob_key=key)
    assert single(sample, log_prob_key=key).log_prob_key == key


def test_read_log_prob_key_with_several_keys_raises():
    with pytest.raises(RuntimeError, match=r"has 2 log-probability keys, .* read log_prob_keys"):
        _ = composite().log_prob_key
    assert composite(aggregate=True).log_prob_key == "sample_log_prob"


def test_call_fewer_log_prob_keys_than_components_raises():
    module = composite(return_log_prob=True, log_prob_keys=["lp"])
    with pytest.raises(ModuleKeysError, match="give one per sample"):
        module(TensorDict(params=PARAMS, batch_size=[3]))


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda module: module.out_keys,
        lambda module: module.log_prob_keys,
        lambda module: module.log_prob_key,
        lambda module: module(parameters(single)),
        lambda module: module.log_prob(parameters(single).set("a", torch.zeros(3))),
    ],
)
def test_use_after_aggregate_mode_changed_raises(built, use):
    with set_composite_lp_aggregate(built):
        module = single(return_log_prob=True)
        use(module)
    message = f"was {built} when this ProbabilisticTensorDictModule was built and is {not built} now"
    with set_composite_lp_aggregate(not built), pytest.raises(RuntimeError, match=message):
        use(module)
    fixed = single(return_log_prob=True, aggregate=built)
    with set_composite_lp_aggregate(not built):
        use(fixed)
        assert "Normal" in repr(module)


def test_log_prob_of_normal_under_aggregate_is_not_summed():
    for mode in (False, True):
        given = TensorDict(loc=torch.zeros(3, 2), scale=torch.ones(3, 2), a=torch.ones(3, 2), batch_size=[3])
        module = single(return_log_prob=True, aggregate=mode)
        torch.testing.assert_close(module.log_prob(given), dist.Normal(0.0, 1.0).log_prob(torch.ones(3, 2)))
        assert module(given)[module.log_prob_key].shape == (3, 2)


@pytest.mark.parametrize("how", ["switch", "argument"])
def test_aggregated_log_prob_writes_entries_only_under_switch(how):
    given = SAMPLES.copy().set("params", PARAMS)
    if how == "switch":
        with set_composite_lp_aggregate(True):
            total = composite().log_prob(given)
    else:
        total = composite(aggregate=True).log_prob(given)
    torch.testing.assert_close(total, LP_A + LP_B.sum(-1))
    entries = {"a_log_prob", ("n", "b_log_prob")} if how == "switch" else set()
    assert keys_of(given) == {"a", ("n", "b"), *entries}
    for key, value in (("a_log_prob", LP_A), (("n", "b_log_prob"), LP_B)):
        if entries:
            torch.testing.assert_close(given[key], value)


def test_log_prob_custom_keys_creates_no_empty_node():
    given = SAMPLES.copy().set("params", PARAMS)
    found = composite(log_prob_keys=["one", ("q", "two")]).log_prob(given)
    assert set(found.keys()) == {"one", "q"}
    torch.testing.assert_close(found["q", "two"], LP_B)


def test_update_td_lp_renames_in_place():
    module = composite(log_prob_keys=["one", ("q", "two")])
    scores = TensorDict({"a_log_prob": LP_A, ("n", "b_log_prob"): LP_B}, batch_size=[3])
    assert module._update_td_lp(scores) is scores
    assert set(scores.keys(True, True)) == {"one", ("q", "two")}
    assert "n" not in scores


def test_construct_torch_distribution_with_two_sample_keys_raises():
    with pytest.raises(ModuleKeysError, match=r"returns one log-probability for the samples \['a', 'b'\]"):
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["a", "b"], distribution_class=dist.Normal, return_log_prob=True
        )


def test_set_aggregate_block_restores_mode_and_is_thread_local():
    found = []
    with set_composite_lp_aggregate(True):
        thread = threading.Thread(target=lambda: found.append(composite_lp_aggregate()))
        thread.start()
        thread.join()
        with set_composite_lp_aggregate(False):
            found.append(composite_lp_aggregate())
        found.append(composite_lp_aggregate())
    assert [*found, composite_lp_aggregate()] == [False, False, True, False]


def test_set_aggregate_block_is_reentrant():
    switch = set_composite_lp_aggregate(True)
    with switch:
        with switch:
            assert composite_lp_aggregate(nowarn=True)
        assert composite_lp_aggregate()
    assert not composite_lp_aggregate()


def test_set_aggregate_set_changes_default_of_process():
    found = []
    switch = set_composite_lp_aggregate(True)
    switch.set()
    try:
        thread = threading.Thread(target=lambda: found.append(composite_lp_aggregate()))
        thread.start()
        thread.join()
        with set_composite_lp_aggregate(False):
            assert not composite_lp_aggregate()
        assert composite_lp_aggregate()
    finally:
        switch.unset()
    assert found == [True]
    assert not composite_lp_aggregate()
    switch.unset()
    assert not composite_lp_aggregate()


def test_set_aggregate_decorates_functions_and_none_is_false():
    assert set_composite_lp_aggregate(True, thread_local=True)(composite_lp_aggregate)()
    assert set_composite_lp_aggregate(True).clone()(composite_lp_aggregate)()
    with set_composite_lp_aggregate(True), set_composite_lp_aggregate(None):
        assert composite_lp_aggregate() is False


@pytest.mark.parametrize(("word", "expected"), [("1", "True"), ("off", "False"), ("maybe", "ValueError")])
def test_set_aggregate_environment_variable_sets_default(word, expected):
    program = "import td_nn; print(td_nn.composite_lp_aggregate())"
    environment = {**os.environ, "COMPOSITE_LP_AGGREGATE": word}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert expected in done.stdout + done.stderr


def make_agents(root, node):
    """Return parameters of two components of agents: actions of 4 features, and a direction."""
    move = {"loc": torch.zeros(*node, 4), "scale": torch.ones(*node, 4)}
    params = {"move": move, "turn": {"logits": torch.zeros(*node, 6)}}
    agents = TensorDict({"params": TensorDict(params, node)}, node)
    return TensorDict({"agents": agents, "done": torch.zeros(*root, 1)}, root)


def make_policy(move, **options):
    return ProbabilisticTensorDictModule(
        {"params": ("agents", "params")},
        [("agents", "move"), ("agents", "turn")],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"move": move, "turn": dist.Categorical},
            "name_map": {"move": ("agents", "move"), "turn": ("agents", "turn")},
        },
        return_log_prob=True,
        default_interaction_type="random",
        **options,
    )


def sum_log_probs(td):
    lp = dist.Normal(0.0, 1.0).log_prob(td["agents", "move"]).sum(-1)
    return lp + dist.Categorical(logits=torch.zeros(6)).log_prob(td["agents", "turn"])


MOVES = {
    "features": dist.Normal,
    "independent": lambda loc, scale: dist.Independent(dist.Normal(loc, scale), 1),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("aggregate", [True, None])
@pytest.mark.parametrize(("root", "node"), [([], [3]), ([5], [5, 3]), ([5], [5]), ([], [])], ids=str)
def test_aggregated_log_prob_has_batch_shape_of_distribution(root, node, aggregate, move):
    data = make_agents(root, node)
    with set_composite_lp_aggregate(aggregate is None):
        policy = make_policy(MOVES[move], aggregate=aggregate)
        result = policy(data.clone())
        expected = sum_log_probs(result)
        assert expected.shape == torch.Size(node) == policy.get_dist(data).batch_shape
        torch.testing.assert_close(result["sample_log_prob"], expected)
        torch.testing.assert_close(policy.log_prob(result.clone()), expected)
        for is_composite in (True, False):
            seq = ProbabilisticTensorDictSequential(policy, return_composite=is_composite)
            torch.testing.assert_close(seq.log_prob(result.clone()), expected)
            assert seq.get_dist(result).batch_shape == torch.Size(node)
        policy.num_samples = torch.Size([7])
        drawn = policy(data.clone())
        assert drawn["sample_log_prob"].shape == (7, *node)
        torch.testing.assert_close(drawn["sample_log_prob"], sum_log_probs(drawn))


@pytest.mark.parametrize(("root", "node"), [([], [3]), ([5], [5, 3]), ([], [])], ids=str)
def test_aggregated_composite_sums_over_features_only(root, node):
    data = make_agents(root, node)
    maps = {"move": dist.Normal, "turn": dist.Categorical}
    names = {name: ("agents", name) for name in maps}
    composite = CompositeDistribution(data["agents", "params"], maps, name_map=names, aggregate=True)
    sample = data.update(composite.sample())
    expected = sum_log_probs(sample)
    torch.testing.assert_close(composite.log_prob(sample), expected)
    torch.testing.assert_close(composite.log_prob_composite(sample)["sample_log_prob"], expected)
    entropy = composite["agents", "move"].entropy().sum(-1) + composite["agents", "turn"].entropy()
    torch.testing.assert_close(composite.entropy(), entropy)
    torch.testing.assert_close(composite.entropy_composite()["entropy"], entropy)
    several = composite.sample([7])
    torch.testing.assert_close(composite.log_prob(several), sum_log_probs(several))
    nested = CompositeDistribution.from_distributions(
        TensorDict(batch_size=root), {"all": composite}, aggregate=True
    )
    total = nested.log_prob(TensorDict({"all": sample}, root))
    torch.testing.assert_close(
        total, expected.sum(tuple(range(len(root) - len(node), 0))) if node != root else expected
    )


def test_aggregated_log_prob_of_two_distributions_of_agents_keeps_agents():
    def make(name):
        return ProbabilisticTensorDictModule(
            {"loc": ("agents", "loc"), "scale": ("agents", "scale")},
            [("agents", name)],
            distribution_class=dist.Normal,
        )

    with set_composite_lp_aggregate(True):
        seq = ProbabilisticTensorDictSequential(make("a"), make("b"))
        params = {"loc": torch.zeros(3, 4), "scale": torch.ones(3, 4)}
        td = seq(TensorDict({"agents": TensorDict(params, [3])}))
        lp = dist.Normal(0.0, 1.0).log_prob(torch.zeros(3, 4)).sum(-1)
        torch.testing.assert_close(seq.log_prob(td), 2 * lp)


def test_aggregated_log_prob_of_class_without_batch_shape_sums_to_batch_size():
    class Zeros(dist.Distribution):
        has_rsample = False
        arg_constraints = {}  # noqa: RUF012  torch declares it as a dict

        def __init__(self, loc):
            super().__init__(validate_args=False)

        def log_prob(self, value):
            return torch.ones_like(value)

    params = TensorDict({"a": {"loc": torch.zeros(3, 2)}}, [3])
    composite = CompositeDistribution(params, {"a": Zeros}, aggregate=True)
    assert composite.log_prob(TensorDict({"a": torch.zeros(3, 2)}, [3])).tolist() == [2, 2, 2]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "keys", [("a_lp", "b_lp"), ("a_lp", ("n", "b_lp")), (("m", "a"), ("m", "b"))], ids=str
)
def test_log_prob_keys_are_a_list_or_a_tuple_of_one_key_per_sample(keys, kind):
    module = composite(return_log_prob=True, log_prob_keys=kind(keys))
    assert module.log_prob_keys == list(keys)
    td = module(TensorDict({"params": PARAMS}, [3]))
    for key in keys:
        assert key in td.keys(True)
    assert {*module.log_prob(td).keys(True, True)} == {*keys}


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("lp", "lp"),
        (["lp"], "lp"),
        (("lp",), "lp"),
        (("n", "lp"), ("n", "lp")),
        ([("n", "lp")], ("n", "lp")),
    ],
)
def test_log_prob_keys_of_one_sample_are_one_key(keys, key):
    module = single(return_log_prob=True, log_prob_keys=keys)
    assert module.log_prob_keys == [key]
    assert key in module(TensorDict(loc=torch.zeros(3), scale=torch.ones(3))).keys(True)


def test_out_keys_tuple_of_components_is_several_keys():
    kwargs = {"distribution_map": {"a": dist.Normal, ("n", "b"): dist.Normal}}
    module = ProbabilisticTensorDictModule(
        ["params"], ("a", ("n", "b")), distribution_class=CompositeDistribution, distribution_kwargs=kwargs
    )
    assert module.out_keys == ["a", ("n", "b")]
