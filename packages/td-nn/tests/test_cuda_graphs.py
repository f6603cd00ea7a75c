"""CudaGraphModule: direct calls without a GPU; capture and replay on a GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from td_core import TensorDict, lazy_stack
from td_nn import (
    CudaGraphModule,
    MissingKeyError,
    TensorDictModule,
    TensorDictSequential,
    WrapModule,
    set_interaction_type,
)

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
WHERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:torch finds no CUDA device")
ONE = torch.ones(3)


def layer():
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 2), ["x"], ["y"]).to(WHERE).requires_grad_(False)


def collection(value=1.0, **more):
    return TensorDict({"x": torch.full((4, 3), value), **more}, [4]).to(WHERE)


def doubled(td):
    return td.set("y", td["x"] * 2)


def added(td, other=1):
    td["n", "z"] = td["x"] + other
    return td


class Recurrent(nn.Module):
    """A recurrent module, whose state is an input and an output."""

    def forward(self, x, h):
        h = torch.tanh(h + x)
        return h.sum(-1, keepdim=True), h


def recurrent():
    return TensorDictModule(Recurrent(), ["x", "h"], ["y", "h"])


def summed(x, *more, scale=1):
    return (x + sum(more)) * scale


def nested(pair, scales=None):
    return {"sum": pair[0] + pair[1], "both": (pair[0] * scales["a"], [pair[1]])}


def changed(x):
    return x.add_(1)


# Each row: a factory of a function, the keys that it reads, and a factory of arguments filled with a number.
CALLS = {
    "module of a collection": (layer, {}, lambda v: ((collection(v),), {})),
    "keyword tensordict": (layer, {}, lambda v: ((), {"tensordict": collection(v)})),
    "module of a tensor": (layer, {}, lambda v: ((torch.full((3,), v, device=WHERE),), {})),
    "module by keyword": (layer, {}, lambda v: ((), {"x": torch.full((3,), v, device=WHERE)})),
    "out of place": (
        lambda: TensorDictModule(torch.exp, ["x"], ["y"], inplace=False),
        {},
        lambda v: ((collection(v),), {}),
    ),
    "rewritten input": (recurrent, {}, lambda v: ((collection(v, h=torch.full((4, 3), v)),), {})),
    "sequence": (
        lambda: TensorDictSequential(layer(), TensorDictModule(torch.exp, ["y"], [("n", "z")])),
        {},
        lambda v: ((collection(v),), {}),
    ),
    "wrapped": (lambda: WrapModule(doubled), {}, lambda v: ((collection(v),), {})),
    "function of a collection": (lambda: doubled, {}, lambda v: ((collection(v),), {})),
    "any entries": (lambda: added, {"in_keys": [], "out_keys": []}, lambda v: ((collection(v),), {})),
    "keyword beside": (
        lambda: added,
        {"in_keys": []},
        lambda v: ((collection(v),), {"other": torch.full((4, 3), v, device=WHERE)}),
    ),
    "keys of a function": (lambda: doubled, {"in_keys": ["x"], "out_keys": ["y"]}, lambda v: ((collection(v),), {})),
    "lazy stack": (layer, {}, lambda v: ((lazy_stack(list(collection(v))),), {})),
    "locked and out of place": (
        lambda: TensorDictModule(torch.exp, ["x"], ["y"], inplace="empty"),
        {},
        lambda v: ((collection(v).lock_(),), {}),
    ),
    "tensordict_out": (
        layer,
        {},
        lambda v: ((collection(v),), {"tensordict_out": TensorDict({}, [4], device=WHERE)}),
    ),
    "tensors": (
        lambda: summed,
        {},
        lambda v: ((torch.full((3,), v, device=WHERE), torch.ones(3, device=WHERE)), {"scale": 3}),
    ),
    "nested arguments": (
        lambda: nested,
        {},
        lambda v: (
            ([torch.full((3,), v, device=WHERE)] * 2,),
            {"scales": {"a": torch.full((3,), v, device=WHERE)}},
        ),
    ),
    "changed in place": (lambda: changed, {}, lambda v: ((torch.full((3,), v, device=WHERE),), {})),
    "entry changed in place": (
        lambda: WrapModule(lambda td: [td["x"].add_(1), td][1]),
        {},
        lambda v: ((collection(v),), {}),
    ),
    "compiled": (
        lambda: torch.compile(summed, backend="aot_eager"),
        {},
        lambda v: ((torch.full((3,), v, device=WHERE),), {}),
    ),
}  # fmt: skip


def plain(value):
    """Convert arguments or results to a structure that torch.testing.assert_close accepts."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value.to_dict() if hasattr(value, "to_dict") else value


@pytest.mark.parametrize("warmup", [1, 2, 4])
@pytest.mark.parametrize(("make", "keys", "arguments"), CALLS.values(), ids=CALLS)
def test_call_equals_plain_function(make, keys, arguments, warmup):
    torch._dynamo.reset()
    function, graphed = make(), CudaGraphModule(make(), warmup, **keys)
    # The first call of a kernel allocates memory, which is not allowed during a capture.
    for called in (function, graphed.module):
        args, kwargs = arguments(0.0)
        called(*args, **kwargs)
    results = []
    for value in (1.0, -1.0, 0.5, 2.0, 3.0):
        (args, kwargs), (plain_args, plain_kwargs) = arguments(value), arguments(value)
        found, expected = graphed(*args, **kwargs), function(*plain_args, **plain_kwargs)
        results.append((found, expected))
        torch.testing.assert_close(plain([args, kwargs]), plain([plain_args, plain_kwargs]))
        if isinstance(expected, TensorDict) and plain_args and expected is plain_args[0]:
            assert found is args[0]
    # A later call must not change the results of earlier calls.
    for found, expected in results:
        torch.testing.assert_close(plain(found), plain(expected))
    assert (graphed._captured is not None) is torch.cuda.is_available()


def test_call_function_with_keys_accepts_tensors():
    graphed = CudaGraphModule(doubled, in_keys=["x"], out_keys=["y"])
    for value in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((3,), value, device=WHERE)
        assert graphed(x).tolist() == graphed(x=x).tolist() == [value * 2] * 3


@NO_CUDA
def test_construct_without_gpu_warns():
    with pytest.warns(
        UserWarning, match="torch finds no CUDA device: each call .* runs the function directly"
    ):
        CudaGraphModule(abs)


def test_construct_device_cpu_runs_function_directly():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphed = CudaGraphModule(layer().cpu(), device="cpu")
    assert "runs the function directly" in str(caught[0].message)
    torch.testing.assert_close(graphed(ONE), layer().cpu()(ONE))
    assert graphed.counter == 0


@pytest.mark.parametrize("warmup", [0, -1, 1.5])
def test_construct_wrong_warmup_raises(warmup):
    with pytest.raises(ValueError, match=f"warmup is a positive int; got {warmup}"):
        CudaGraphModule(abs, warmup=warmup)


def test_construct_uncallable_raises():
    with pytest.raises(TypeError, match="takes a module or a function; got 3"):
        CudaGraphModule(3)


@pytest.mark.parametrize(
    "call",
    [
        lambda graphed, x: graphed(x),
        lambda graphed, x: graphed(x=x),
        lambda graphed, x: graphed(TensorDict(x=x)),
        lambda graphed, x: graphed(tensordict=TensorDict(x=x)),
    ],
)
def test_call_input_requires_grad_raises(call):
    with pytest.raises(
        RuntimeError, match="gives its inputs no gradients, and (argument 0|entry 'x') requires them"
    ):
        call(CudaGraphModule(layer()), torch.ones(3, device=WHERE, requires_grad=True))


def test_call_unread_entry_requires_grad_returns_result():
    td = TensorDict(x=torch.ones(3, device=WHERE), z=torch.ones(3, device=WHERE, requires_grad=True))
    assert CudaGraphModule(layer())(td)["z"].requires_grad


@pytest.mark.parametrize("name", ["in_keys", "out_keys"])
def test_construct_keys_differ_from_module_warns(name):
    with pytest.warns(UserWarning, match=rf"has the {name} \['.'\], which count, and not \['other'\]"):
        graphed = CudaGraphModule(layer(), **{name: ["other"]})
    assert (graphed.in_keys, graphed.out_keys) == (["x"], ["y"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch finds no")
        CudaGraphModule(layer(), in_keys=["x"], out_keys=[])


def test_state_dict_equals_that_of_module():
    module = layer()
    graphed = CudaGraphModule(module)
    assert graphed.state_dict().keys() == module.state_dict().keys()
    graphed.load_state_dict({name: leaf * 0 + 1 for name, leaf in module.state_dict().items()})
    assert (module.module.weight == 1).all()
    function = CudaGraphModule(doubled)
    assert function.state_dict() == {}
    function.load_state_dict({"other": 1})


def test_parameters_of_module_are_not_registered_twice():
    holder = nn.Module()
    holder.graphed = CudaGraphModule(nn.Linear(2, 2))
    assert list(holder.parameters()) == []
    assert not isinstance(holder.graphed, nn.Module)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda graphed: pickle.loads(pickle.dumps(graphed))])
def test_copied_wrapper_captures_new_graph(clone):
    graphed = CudaGraphModule(layer())
    for _ in range(3):
        graphed(collection())
    other = clone(graphed)
    assert other.counter == 0 and other.module is not graphed.module
    for value in (1.0, 2.0, 3.0):
        torch.testing.assert_close(other(collection(value))["y"], graphed.module(collection(value))["y"])


def test_delete_wrapper_frees_it_without_gc():
    graphed = CudaGraphModule(layer())
    for _ in range(3):
        graphed(collection())
    seen = weakref.ref(graphed)
    gc.disable()
    try:
        del graphed
        assert seen() is None
    finally:
        gc.enable()


def test_repr_shows_module_and_keys():
    shown = repr(CudaGraphModule(layer(), warmup=3))
    assert "Linear(in_features=3" in shown and "warmup=3" in shown and "in_keys=['x']" in shown


def captured(module, *args, **options):
    """Return a CudaGraphModule that has captured a graph with the arguments."""
    graphed = CudaGraphModule(module, **options)
    for _ in range(2):
        graphed(*args)
    assert graphed._captured is not None
    return graphed


@CUDA
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda: TensorDict({"z": torch.ones(4, 3)}, [4]), MissingKeyError, "misses its input \\['x'\\]"),
        (
            lambda: TensorDict({"x": torch.ones(5, 3)}, [5]),
            ValueError,
            r"entry 'x' of shape \[4, 3\] .*got \[5, 3\]",
        ),
        (
            lambda: TensorDict({"x": torch.ones(4, 3)}),
            ValueError,
            "the batch size = .*4.*a constant of the graph",
        ),
        (
            lambda: TensorDict({"x": torch.ones(4, 3).double()}, [4]),
            ValueError,
            "dtype torch.float32; got .* torch.float64",
        ),
        (lambda: torch.ones(4, 3), ValueError, "was captured with entry 'x'; got argument 0"),
    ],
)
def test_replay_other_structure_raises(given, error, message):
    graphed = captured(layer(), collection())
    with pytest.raises(error, match=message):
        graphed(given().to(WHERE))
    graphed(collection())


@CUDA
def test_replay_other_value_raises():
    graphed = captured(summed, torch.ones(3, device=WHERE), 2)
    with pytest.raises(ValueError, match="argument 1 = 2, which is a constant of the graph; got 3"):
        graphed(torch.ones(3, device=WHERE), 3)
    assert graphed(torch.ones(3, device=WHERE), 2).tolist() == [3, 3, 3]


@CUDA
def test_replay_other_interaction_type_warns():
    graphed = captured(layer(), collection())
    with (
        set_interaction_type("random"),
        pytest.warns(UserWarning, match="captured with the interaction type None"),
    ):
        graphed(collection())


@CUDA
def test_result_is_valid_after_wrapper_is_deleted():
    graphed = captured(layer(), collection())
    result, expected = graphed(collection(2.0))["y"], graphed.module(collection(2.0))["y"]
    del graphed
    _ = [torch.randn(1 << 20, device=WHERE) for _ in range(8)]
    torch.testing.assert_close(result, expected)


@CUDA
def test_capture_while_gc_frees_wrapper_gives_correct_result():
    class Holder:
        def __init__(self):
            self.step = CudaGraphModule(self.run)

        def run(self, x):
            return x + 1

    holder = Holder()
    for _ in range(3):
        holder.step(torch.ones(3, device=WHERE))
    del holder
    before = gc.get_threshold()

    def allocating(x):
        _ = [[] for _ in range(100)]
        return x * 2

    try:
        graphed = CudaGraphModule(allocating, warmup=1)
        gc.set_threshold(1)
        assert graphed(torch.ones(3, device=WHERE)).tolist() == [2, 2, 2]
    finally:
        gc.set_threshold(*before)
    assert graphed(torch.full((3,), 2.0, device=WHERE)).tolist() == [4, 4, 4]


MOVES = {
    "to another device and back": lambda module: module.cpu().to(WHERE),
    "other parameters": lambda module: setattr(
        module.module, "weight", nn.Parameter(torch.ones(2, 3, device=WHERE), False)
    ),
    "assigned state": lambda module: module.load_state_dict(
        {name: leaf + 1 for name, leaf in module.state_dict().items()}, assign=True
    ),
    "copied state": lambda module: module.load_state_dict(
        {name: leaf + 1 for name, leaf in module.state_dict().items()}
    ),
    "in place": lambda module: module.module.weight.fill_(3),
}


@CUDA
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_replay_after_parameters_moved_captures_again(move):
    graphed = captured(layer(), collection())
    move(graphed.module)
    for value in (1.0, 2.0, 3.0):
        torch.testing.assert_close(graphed(collection(value))["y"], graphed.module(collection(value))["y"])


@CUDA
def test_replay_after_mode_changed_captures_again():
    dropout = nn.Sequential(nn.Dropout(), nn.Softplus())
    graphed = captured(TensorDictModule(dropout, ["x"], ["y"]), collection())
    graphed.module.eval()
    torch.testing.assert_close(graphed(collection())["y"], nn.functional.softplus(collection()["x"]))


@CUDA
def test_replay_draws_new_random_numbers():
    graphed = captured(TensorDictModule(torch.rand_like, ["x"], ["y"]), collection())
    assert not torch.equal(graphed(collection())["y"], graphed(collection())["y"])


@CUDA
@pytest.mark.parametrize("label", [None, "cpu"])
def test_replay_copies_cpu_inputs_to_gpu(label):
    graphed = CudaGraphModule(layer(), device="cuda")
    for value in (1.0, 2.0, 3.0, 4.0):
        td = TensorDict({"x": torch.full((4, 3), value)}, [4], device=label)
        y = graphed(td)["y"]
        assert y.device.type == (label or "cuda") and td["x"].device.type == "cpu"
        torch.testing.assert_close(y.cpu(), graphed.module(collection(value))["y"].cpu())
    graphed = CudaGraphModule(summed, device="cuda")
    for value in (1.0, 2.0, 3.0, 4.0):
        assert graphed(torch.full((3,), value), torch.tensor(2.0)).tolist() == [value + 2] * 3


@CUDA
def test_capture_training_step_updates_parameters():
    torch.manual_seed(0)
    model = nn.Linear(3, 1, device=WHERE)
    other = copy.deepcopy(model)

    def make_step(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1, device=WHERE), capturable=True)

        def step(td):
            optimizer.zero_grad(set_to_none=False)
            loss = (model(td["x"]) - td["x"].sum(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            return td.set("loss", loss.detach())

        return step

    data = torch.randn(8, 4, 3, device=WHERE)
    graphed, eager = CudaGraphModule(make_step(model), warmup=3, in_keys=[]), make_step(other)
    for x in data:
        first, second = graphed(TensorDict(x=x)), eager(TensorDict(x=x))
        torch.testing.assert_close(first["loss"], second["loss"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-4, atol=1e-5)


@CUDA
def test_result_does_not_require_grad():
    module = TensorDictModule(nn.Linear(3, 2), ["x"], ["y"]).to(WHERE)
    graphed = CudaGraphModule(module, warmup=2)
    assert [graphed(collection())["y"].requires_grad for _ in range(4)] == [False] * 4


@CUDA
def test_capture_nested_wrapper_makes_one_graph():
    inner = CudaGraphModule(summed)
    graphed = CudaGraphModule(lambda x: inner(x) * 2)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert graphed(torch.full((3,), value, device=WHERE)).tolist() == [value * 2] * 3
