"""EnsembleModule: calls, buffers, random numbers, state dicts and resets of the copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from td_core import StructureError, TensorDict, TensorDictParams, lazy_stack
from td_nn import (
    EnsembleModule,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    set_interaction_type,
    set_skip_existing,
)

X = torch.arange(15.0).view(5, 3) / 10


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


class Tied(nn.Module):
    """A module with a tied weight, a frozen bias, and a buffer that each call replaces."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.b(self.a(x)) * self.scale


class Held(nn.Module):
    """A module with a parameter and without reset_parameters()."""

    def __init__(self):
        super().__init__()
        self.held = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) * self.held


class Keyed(nn.Module):
    """A module with keys that does not inherit from TensorDictModuleBase."""

    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y"]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, tensordict):
        return tensordict.set("y", self.layer(tensordict["x"]))


class Base(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y", "z"]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, tensordict):
        y = self.layer(tensordict["x"])
        return tensordict.set("y", y).set("z", y * 2)


def module(*layers, **options):
    return TensorDictModule(nn.Sequential(*layers), ["x"], ["y"], **options)


def sequence():
    return TensorDictSequential(
        {
            "a": TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]),
            "b": TensorDictModule(nn.Linear(4, 2), {"input": "h"}, ["y"]),
        }
    )


MODULES = {
    "linear": lambda: module(nn.Linear(3, 2)),
    "not in place": lambda: module(nn.Linear(3, 2), inplace=False),
    "empty": lambda: module(nn.Linear(3, 2), inplace="empty"),
    "nested keys": lambda: TensorDictModule(nn.Linear(3, 2), "x", ("n", "y")),
    "sequence": sequence,
    "convolution": lambda: module(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(-2)),
    "batch norm in eval mode": lambda: module(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval(),
    "batch norm": lambda: module(nn.Linear(3, 2), nn.BatchNorm1d(2)),
    "layer norm": lambda: module(nn.Linear(3, 8), nn.LayerNorm(8)),
    "tied": lambda: module(Tied()),
    "keyed": Keyed,
    "base": Base,
    "selection": lambda: Base().select_out_keys("z"),
    "function": lambda: WrapModule(double, in_keys=["x"], out_keys=["y"]),
    "ensemble": lambda: EnsembleModule(module(nn.Linear(3, 2)), 3),
}


def double(tensordict):
    return tensordict.set("y", tensordict["x"] * 2)


def collection():
    return TensorDict({"x": X.clone()}, [5])


def copies(ensemble, make):
    """Return one module per copy, with the parameters of that copy."""
    for index in range(ensemble.num_copies):
        each = make().train(ensemble.training)
        params = ensemble.params_td.data[index].clone()
        if not params.is_empty():
            params.to_module(each)
        yield each


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_call_equals_separate_modules(make):
    ensemble = EnsembleModule(make(), 4).train(make().training)
    separate = list(copies(ensemble, make))
    td = collection()
    result = ensemble(td)
    expected = torch.stack([each(collection()) for each in separate])
    assert list(td.keys()) == ["x"]
    assert result.batch_size == expected.batch_size
    assert set(result.keys(True, True)) == set(expected.keys(True, True))
    for key, leaf in expected.items(True, True):
        torch.testing.assert_close(result[key], leaf)
    states = torch.stack([TensorDict.from_module(each).data for each in separate])
    for key, leaf in states.items(True, True):
        torch.testing.assert_close(ensemble.params_td[key].data, leaf)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_parameters_returns_stacked_parameters_only(make):
    source = make()
    ensemble = EnsembleModule(source, 4)
    names = [name for name, _ in source.named_parameters()]
    assert sorted(name for name, _ in ensemble.named_parameters()) == sorted(
        f"params_td.{name}" for name in names
    )
    assert sorted(ensemble.state_dict()) == sorted(f"params_td.{name}" for name in source.state_dict())
    for name, leaf in source.named_parameters():
        stacked = ensemble.get_parameter(f"params_td.{name}")
        assert stacked.shape == (4, *leaf.shape)
        assert stacked.requires_grad is leaf.requires_grad
    assert (ensemble.in_keys, ensemble.out_keys) == (source.in_keys, source.out_keys)


def test_construct_resets_copies_and_keeps_source_module():
    source = module(nn.Linear(3, 2))
    before = copy.deepcopy(source.state_dict())
    ensemble = EnsembleModule(source, 3)
    weights = ensemble.params_td["module", "0", "weight"]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    torch.testing.assert_close(source.state_dict(), before)
    assert isinstance(ensemble.params_td, TensorDictParams)
    assert {leaf.device.type for leaf in ensemble.module.parameters()} == {"meta"}


def test_backward_sets_gradients_of_every_copy():
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 3)
    result = ensemble(collection())
    (result["y"] * torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)).sum().backward()
    expected = torch.tensor([0.0, 5.0, 10.0]).view(3, 1).expand(3, 2)
    torch.testing.assert_close(ensemble.params_td["module", "0", "bias"].grad, expected)


def test_construct_with_tied_parameters_keeps_them_tied():
    ensemble = EnsembleModule(module(Tied()), 3)
    params = ensemble.params_td["module", "0"]
    assert params["a", "weight"] is params["b", "weight"]
    assert not params["a", "bias"].requires_grad
    ensemble(collection())["y"].sum().backward()
    assert params["a", "weight"].grad.shape == (3, 3, 3)


def test_call_batch_norm_updates_statistics_per_copy():
    ensemble = EnsembleModule(module(nn.BatchNorm1d(3)), 2, expand_input=False)
    x = torch.stack([X, X * 10])
    ensemble(x)
    torch.testing.assert_close(ensemble.params_td["module", "0", "running_mean"], x.mean(1) / 10)
    assert ensemble.params_td["module", "0", "num_batches_tracked"].tolist() == [1, 1]
    assert not ensemble.params_td["module", "0", "running_mean"].requires_grad


def test_call_that_replaces_buffer_stores_it():
    ensemble = EnsembleModule(module(Tied()), 2)
    for _ in range(3):
        ensemble(collection())
    assert ensemble.params_td["module", "0", "calls"].tolist() == [3, 3]
    assert "params_td.module.0.scale" not in ensemble.state_dict()


FORMS = {
    "position": lambda ensemble: ensemble(X),
    "keyword": lambda ensemble: ensemble(x=X),
    "collection": lambda ensemble: ensemble(collection())["y"],
    "tensordict": lambda ensemble: ensemble(tensordict=collection())["y"],
    "no batch dims": lambda ensemble: ensemble(TensorDict(x=X))["y"],
    "lazy stack": lambda ensemble: ensemble(lazy_stack(list(collection())))["y"],
    "locked": lambda ensemble: ensemble(collection().lock_())["y"],
    "vmap": lambda ensemble: torch.vmap(ensemble, out_dims=1)(collection())["y"],
    "vmap of tensors": lambda ensemble: torch.vmap(ensemble, out_dims=1)(X),
    "in a sequence": lambda ensemble: TensorDictSequential(ensemble, WrapModule(lambda td: td))(collection())[
        "y"
    ],
}


@pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
def test_call_with_tensors_or_collection_equals_each_layer(call):
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 4)
    params = ensemble.params_td["module", "0"]
    expected = torch.stack([nn.functional.linear(X, w, b) for w, b in zip(params["weight"], params["bias"])])
    torch.testing.assert_close(call(ensemble), expected)


EACH = {
    "position": lambda ensemble, x: ensemble(x),
    "keyword": lambda ensemble, x: ensemble(x=x),
    "collection": lambda ensemble, x: ensemble(TensorDict(x=x, batch_size=[4, 5]))["y"],
    "no batch dims": lambda ensemble, x: ensemble(TensorDict(x=x))["y"],
}


@pytest.mark.parametrize("call", EACH.values(), ids=EACH)
def test_call_expand_input_false_maps_input_over_copies(call):
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 4, expand_input=False)
    x = torch.randn(4, 5, 3)
    params = ensemble.params_td["module", "0"]
    expected = torch.stack([nn.functional.linear(*each) for each in zip(x, params["weight"], params["bias"])])
    torch.testing.assert_close(call(ensemble, x), expected)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (TensorDict(x=X, batch_size=[5]), r"batch size \[5\]"),
        (TensorDict(x=X), r"leaves of leading sizes \[torch.Size\(\[5\]\)\]"),
        (X, r"leaves of leading sizes \[torch.Size\(\[5\]\)\]"),
    ],
)
def test_call_expand_input_false_wrong_first_dim_raises(given, shown):
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 4, expand_input=False)
    with pytest.raises(ValueError, match=f"4 copies and expand_input=False.*an entry per copy; got {shown}"):
        ensemble(given)


def test_call_keeps_other_entries_dim_names_and_device():
    td = TensorDict({"x": X, "n": {"i": torch.arange(5)}}, [5], names=["time"], device="cpu")
    result = EnsembleModule(module(nn.Linear(3, 2)), 4)(td)
    assert result.names == [None, "time"]
    assert result.device == torch.device("cpu")
    torch.testing.assert_close(result["n", "i"], torch.arange(5).expand(4, 5))
    assert list(td["n"].keys()) == ["i"]


def test_call_with_tensordict_out_stores_outputs_only():
    ensemble, out = EnsembleModule(module(nn.Linear(3, 2)), 4), TensorDict({}, [4, 5])
    assert ensemble(collection(), tensordict_out=out) is out
    assert list(out.keys()) == ["y"]


def test_call_with_keyword_passes_it_to_every_copy():
    def scaled(x, by):
        return x * by

    ensemble = EnsembleModule(TensorDictModule(scaled, ["x"], ["y"]), 2)
    torch.testing.assert_close(ensemble(collection(), by=3)["y"], (X * 3).expand(2, 5, 3))


def test_select_out_keys_removes_other_outputs():
    result = EnsembleModule(Base(), 2).select_out_keys("z")(collection())
    assert set(result.keys()) == {"x", "z"}


def test_skip_existing_returns_existing_outputs():
    with set_skip_existing(True):
        result = EnsembleModule(module(nn.Linear(3, 2)), 2)(collection().set("y", X))
    torch.testing.assert_close(result["y"], X.expand(2, 5, 3))


def test_call_random_operation_default_randomness_raises():
    ensemble = EnsembleModule(module(nn.Linear(3, 3), nn.Dropout()), 2)
    message = r"a copy of EnsembleModule\(TensorDictModule\) calls a random operation.*randomness='different'"
    with pytest.raises(RuntimeError, match=message):
        ensemble(collection())
    ensemble.eval()(collection())
    assert not ensemble.module.training


@pytest.mark.parametrize(("randomness", "equal"), [("same", True), ("different", False)])
def test_call_dropout_randomness_decides_equality_of_copies(randomness, equal):
    ensemble = EnsembleModule(module(nn.Dropout()), 2, randomness=randomness)
    dropped = ensemble(torch.ones(100))
    assert bool(0 in dropped[0]) and bool(2 in dropped[0])
    assert torch.equal(dropped[0], dropped[1]) is equal


@pytest.mark.parametrize(("randomness", "equal"), [("same", True), ("different", False)])
def test_call_sampling_randomness_decides_equality_of_copies(randomness, equal):
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["x"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["a"], distribution_class=Normal, return_log_prob=True
        ),
    )
    ensemble = EnsembleModule(policy, 2, randomness=randomness)
    assert torch.equal(ensemble(collection())["a"], ensemble(collection())["a"])
    with set_interaction_type("random"):
        result = ensemble(collection())
    noise = (result["a"] - result["loc"]) / result["scale"]
    assert torch.allclose(noise[0], noise[1], atol=1e-4) is equal
    expected = Normal(result["loc"], result["scale"]).log_prob(result["a"])
    torch.testing.assert_close(result["a_log_prob"], expected)


CLONES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda ensemble: pickle.loads(pickle.dumps(ensemble)),
    "torch.save": lambda ensemble: saved(ensemble),
}


def saved(ensemble):
    buffer = io.BytesIO()
    torch.save(ensemble, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_cloned_ensemble_uses_separate_parameters(make, clone):
    ensemble = EnsembleModule(make(), 2).eval()
    other = clone(ensemble)
    torch.testing.assert_close(other(collection()).to_dict(), ensemble(collection()).to_dict())
    before = ensemble(collection())
    with torch.no_grad():
        for leaf in other.parameters():
            leaf.zero_()
    torch.testing.assert_close(ensemble(collection()).to_dict(), before.to_dict())
    if list(other.parameters()):
        assert not other(collection())[other.out_keys[-1]].any()


def test_to_dtype_converts_every_copy():
    ensemble = EnsembleModule(module(nn.Linear(3, 2), nn.BatchNorm1d(2)), 2).double()
    assert ensemble(X.double()).dtype == torch.float64
    assert ensemble.to("meta")(X.double().to("meta")).shape == (2, 5, 2)


def test_load_state_dict_makes_results_equal():
    first, second = (EnsembleModule(module(nn.Linear(3, 2)), 2) for _ in range(2))
    assert not torch.equal(first(X), second(X))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(X), first(X))


def test_load_state_dict_ignores_keys_of_wrapped_module():
    source = module(nn.Linear(3, 2))
    ensemble = EnsembleModule(source, 2)
    theirs = {f"module.{name}": leaf for name, leaf in source.state_dict().items()}
    state = {**theirs, **{name: leaf + 1 for name, leaf in ensemble.state_dict().items()}}
    outer = nn.Sequential(ensemble)
    outer.load_state_dict({f"0.{name}": leaf for name, leaf in state.items()})
    torch.testing.assert_close(dict(ensemble.state_dict()), {n: state[n] for n in ensemble.state_dict()})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ensemble.load_state_dict({**state, "params_td.other": X})


def test_to_module_swaps_parameters_and_restores_them():
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 2)
    before = ensemble(X)
    with TensorDict.from_module(ensemble).data.apply(torch.zeros_like).to_module(ensemble):
        assert not ensemble(X).any()
    torch.testing.assert_close(ensemble(X), before)
    zeros = {name: torch.zeros_like(leaf) for name, leaf in ensemble.state_dict().items()}
    assert not torch.func.functional_call(ensemble, zeros, (X,)).any()


def test_reset_parameters_changes_every_copy():
    ensemble = EnsembleModule(sequence(), 3)
    before = ensemble.params_td.data.clone()
    chain = TensorDictSequential(ensemble)
    chain.reset_parameters_recursive()
    for key, leaf in ensemble.params_td.items(True, True):
        assert (leaf != before[key]).flatten(1).any(1).all()


@pytest.mark.parametrize("size", [(), (2,), (2, 3)])
def test_reset_parameters_recursive_resets_given_values_in_place(size):
    ensemble = EnsembleModule(module(nn.Linear(3, 2), nn.BatchNorm1d(2)), 2)
    own = ensemble.params_td.data.clone()
    params = ensemble.params_td.data[0].expand(*size).clone() * 0
    result = ensemble.reset_parameters_recursive(params)
    assert result.batch_size == torch.Size(size)
    weight = params["module", "0", "weight"].reshape(-1, 6)
    assert len({tuple(row) for row in weight.tolist()}) == len(weight)
    assert (params["module", "1", "running_var"] == 1).all()
    assert result["module", "0", "weight"].data_ptr() == weight.data_ptr()
    assert result["module", "0", "weight"].requires_grad
    assert not result["module", "1", "num_batches_tracked"].requires_grad
    torch.testing.assert_close(ensemble.params_td.data.to_dict(), own.to_dict())


def test_reset_parameters_recursive_without_parameters_raises():
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 2)
    with pytest.raises(ValueError, match="takes the parameters to reset.*reset_parameters()"):
        ensemble.reset_parameters_recursive()


def test_construct_module_without_reset_parameters_warns():
    with pytest.warns(UserWarning, match="the 2 copies .* have equal values of module.0.held, whose module"):
        EnsembleModule(module(Held()), 2)
    EnsembleModule(module(Held()), 1)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((nn.Linear(1, 1), 2), TypeError, "takes a module with in_keys and out_keys; got a Linear"),
        ((module(), 0), ValueError, "num_copies is a positive int; got 0"),
        ((module(), 2.0), ValueError, "num_copies is a positive int; got 2.0"),
        ((module(nn.LazyLinear(2)), 2), StructureError, "cannot stack the modules"),
    ],
)
def test_construct_wrong_argument_raises(args, error, message):
    with pytest.raises(error, match=message):
        EnsembleModule(*args)


def test_construct_unknown_randomness_raises():
    with pytest.raises(ValueError, match="randomness is 'error', 'same' or 'different'; got 'some'"):
        EnsembleModule(module(), 2, randomness="some")


def test_call_that_raises_leaves_module_on_meta():
    ensemble = EnsembleModule(module(nn.Linear(3, 2)), 2)
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions"):
        ensemble(torch.ones(4))
    assert {leaf.device.type for leaf in ensemble.module.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["linear", "sequence", "batch norm", "tied", "nested keys", "selection"])
def test_compile_fullgraph_equals_eager(name):
    torch._dynamo.reset()
    ensemble = EnsembleModule(MODULES[name](), 2)
    other = copy.deepcopy(ensemble)
    compiled = torch.compile(lambda td: other(td), fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(collection()).to_dict(), ensemble(collection()).to_dict())
    torch.testing.assert_close(dict(other.state_dict()), dict(ensemble.state_dict()))
    torch._dynamo.reset()


def test_compile_expand_input_false_equals_eager():
    torch._dynamo.reset()
    ensemble = EnsembleModule(MODULES["sequence"](), 2, expand_input=False)
    td = TensorDict({"x": torch.stack([X, X * 2])}, [2, 5])
    compiled = torch.compile(lambda td: ensemble(td), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(td).to_dict(), ensemble(td).to_dict())
    torch._dynamo.reset()


def test_call_expand_input_false_keeps_other_entries():
    td = TensorDict({"x": torch.stack([X, X * 2]), "n": {"i": torch.arange(2)}}, [2])
    result = EnsembleModule(module(nn.Linear(3, 2)), 2, expand_input=False)(td)
    assert result["x"] is td["x"] and result["n", "i"] is td["n", "i"]
    assert list(td.keys()) == ["x", "n"]


def test_repr_shows_module_parameters_and_keys():
    shown = repr(EnsembleModule(module(nn.Linear(3, 2)), 2))
    assert "TensorDictParams" in shown and "in_keys=['x']" in shown and "Linear(in_features=3" in shown
