"""Test from_module, from_modules and to_module."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, from_module, from_modules
from td_core.errors import KeyPathError, LockedError, StructureError


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x)) + self.weight.sum()


def test_from_module_returns_same_tensors():
    model = make_net()
    params = TensorDict.from_module(model)
    assert params["0", "weight"] is model[0].weight
    assert params["1", "running_mean"] is model[1].running_mean
    assert list(params.keys()) == ["0", "1", "3"]
    assert list(TensorDict.from_module(model, filter_empty=False).keys()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("function", "locked"), [(from_module, True), (TensorDict.from_module, False)])
def test_from_module_function_locks_and_method_does_not(function, locked):
    assert function(nn.Linear(1, 1)).is_locked is locked


def test_from_module_use_state_dict_runs_hooks():
    model = nn.Linear(1, 1)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(extra=torch.ones(1)))
    assert "extra" in TensorDict.from_module(model, use_state_dict=True)


@pytest.mark.parametrize("raises", [False, True])
def test_to_module_context_restores_same_parameters(raises):
    model = make_net()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    zeros = TensorDict.from_module(model).data.clone().zero_()
    try:
        with zeros.to_module(model):
            assert model[0].weight.sum() == 0
            assert isinstance(model[0].weight, nn.Parameter)
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert raises
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_to_module_returned_swap_restores_parameters():
    model = nn.Linear(2, 1)
    weight = model.weight
    swap = TensorDict.from_module(model).data.clone().to_module(model)
    assert swap["weight"] is weight and model.weight is not weight
    assert swap.to_module(model, return_swap=False) is None
    assert model.weight is weight


def test_to_module_inplace_context_restores_values():
    model = nn.Linear(2, 1)
    weight, values = model.weight, model.weight.detach().clone()
    zeros = TensorDict.from_module(model).data.clone().zero_()
    with zeros.to_module(model, inplace=True) as swap:
        assert model.weight is weight and weight.sum() == 0
        assert torch.equal(swap["weight"], values)
    assert torch.equal(weight, values)


def test_to_module_swap_dest_receives_old_parameters():
    model = nn.Linear(2, 1)
    weight = model.weight
    dest = TensorDict()
    assert TensorDict.from_module(model).data.clone().to_module(model, swap_dest=dest) is dest
    assert dest["weight"] is weight


@pytest.mark.parametrize("how", [{}, {"inplace": True}, {"use_state_dict": True}], ids=str)
def test_to_module_locked_swap_dest_leaves_module_unchanged(how):
    model = nn.Linear(2, 1)
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    zeros = TensorDict.from_module(model).data.clone().zero_()
    with pytest.raises(LockedError, match="cannot update"):
        zeros.to_module(model, swap_dest=TensorDict().lock_(), **how)
    for name, value in model.named_parameters():
        assert value is before[name][0] and torch.equal(value, before[name][1])


class Weights(TensorDict):
    """Subclass of TensorDict without additions."""


@pytest.mark.parametrize("kind", [Weights, TensorDictParams])
def test_from_module_subclass_returns_subclass(kind):
    model = nn.BatchNorm1d(2)
    made = kind.from_module(model)
    assert type(made) is kind
    held = {**model._parameters, **model._buffers}
    # TensorDictParams must keep buffers instead of converting them to parameters.
    assert set(made.keys()) == set(held) and all(made[key] is held[key] for key in held)


def test_from_module_subclass_as_module_wraps_subclass():
    module = Weights.from_module(nn.Linear(1, 2), as_module=True)
    assert type(module) is TensorDictParams and type(module.data) is Weights
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_to_module_without_preserve_sets_plain_tensors():
    model = nn.Linear(2, 1)
    before = dict(model.named_parameters())
    data = TensorDict.from_module(model).data.clone()
    with data.to_module(model, preserve_module_state=False):
        assert model.weight is data["weight"]
        # Plain attributes must not reach an optimizer or a checkpoint.
        assert not list(model.parameters()) and not model.state_dict()
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(map(operator.is_, after.values(), before.values()))


class Held(nn.Module):
    """A module with tied weights, a parameter that is None, a buffer, and parameters in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)
        self.held = TensorDictParams(TensorDict({"w": torch.ones(2)}))
        self.eval()

    def forward(self, x):
        return self.second(self.norm(self.first(x))) * self.held["w"]


def list_state(net):
    """List the tensors of each submodule in order, and those that are plain attributes."""
    attributes = [
        {key: value for key, value in vars(m).items() if isinstance(value, Tensor)} for m in net.modules()
    ]
    slots = [
        [*m._parameters.items(), *m._buffers.items(), *found.items()]
        for m, found in zip(net.modules(), attributes)
    ]
    return [(key, id(value)) for level in slots for key, value in level], [*net.state_dict()]


def add_one(leaf):
    return leaf.detach() + 1 if leaf.is_floating_point() else leaf


GIVEN = {
    "plain": lambda params: params.apply(add_one),
    "parameters": lambda params: params.apply(
        lambda leaf: nn.Parameter(add_one(leaf)) if isinstance(leaf, nn.Parameter) else add_one(leaf)
    ),
    "one parameter": lambda params: params.apply(add_one).set(
        ("first", "bias"), nn.Parameter(add_one(params["first", "bias"]))
    ),
    "computed": lambda params: params.apply(lambda leaf: leaf + 1 if leaf.requires_grad else add_one(leaf)),
    "some": lambda params: params.apply(add_one).select(("first", "bias"), "held"),
}


@pytest.mark.parametrize("before", ["as made", "plain", "plain and back"])
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("given", GIVEN)
def test_to_module_block_computes_with_leaves_and_restores_state(given, preserve, before):
    net, x = Held(), torch.randn(3, 2)
    params = TensorDict.from_module(net)
    new, expected = GIVEN[given](params), Held()
    expected.load_state_dict(net.state_dict())
    TensorDict.from_module(expected).data.update_(new.detach())
    if before != "as made":
        old = params.data.to_module(net, preserve_module_state=False)
    if before == "plain and back":
        old.to_module(net)
        assert [name for name, _ in net.named_parameters()] == [name for name, _ in Held().named_parameters()]
    state = list_state(net)
    with new.to_module(net, preserve_module_state=preserve):
        for module in net.modules():
            assert not {*module._parameters} & {*vars(module)}
        torch.testing.assert_close(net(x), expected(x))
        if given != "computed":
            torch.testing.assert_close(copy.deepcopy(net)(x), expected(x))
        zeros = {"first.bias": torch.zeros(2)}
        called = torch.func.functional_call(net, zeros, (x,))
        none = TensorDict({"first": {"bias": torch.zeros(2)}})
        with none.to_module(net, preserve_module_state=not preserve):
            torch.testing.assert_close(called, net(x))
    assert list_state(net) == state


@pytest.mark.parametrize("inside", [True, False])
def test_functional_call_after_to_module_uses_given_parameters(inside):
    net, x = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), torch.ones(1, 2)
    zeros = {name: torch.zeros_like(leaf) for name, leaf in net.named_parameters()}
    done = TensorDict.from_module(net).data.clone().to_module(net, preserve_module_state=False)
    assert not any(module._parameters for module in net.modules())
    if inside:
        assert torch.func.functional_call(net, zeros, (x,)).item() == 0
    done.to_module(net)
    assert [name for name, _ in net.named_parameters()] == [*zeros]
    assert torch.func.functional_call(net, zeros, (x,)).item() == 0 and net(x).item() != 0


def test_to_module_replaces_plain_tensors_by_parameters():
    layer = nn.Linear(2, 1)
    model = nn.Sequential(layer, nn.BatchNorm1d(1), layer)
    params = TensorDict.from_module(model, as_module=True)
    params.data.to("meta").to_module(model, preserve_module_state=False)
    assert not list(model.parameters()) and len(list(model.buffers())) == 3
    with params.to_module(model):
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert model[2].weight is params["0", "weight"]
    assert not list(model.parameters()) and layer.weight.device.type == "meta"
    stacked = torch.stack([params.data, params.data + 1])
    x = torch.ones(3, 2)

    def call(params):
        with params.to_module(model, preserve_module_state=False):
            return model[0](x)

    assert torch.equal(torch.vmap(call)(stacked)[0], call(params.data))
    assert torch.compile(call, backend="eager", fullgraph=True)(params.data).shape == (3, 1)
    with pytest.raises(RuntimeError, match="meta"):
        layer(x).sum().item()
    params.to_module(model)
    assert next(model.parameters()) is params["0", "weight"] and layer(x).device.type == "cpu"


def test_to_module_computed_parameters_pass_gradients():
    model = nn.Linear(2, 1, bias=False)
    scaled = TensorDict.from_module(model).apply(lambda p: p * 2)
    with scaled.to_module(model):
        model(torch.ones(2)).sum().backward()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_to_module_tied_weights_stay_tied():
    model = Tied()
    params = TensorDict.from_module(model)
    assert params["first", "weight"] is params["second", "weight"] is params["weight"]
    zero = torch.zeros(2, 2)
    new = TensorDict(
        {"weight": zero, "first": {"weight": zero, "bias": torch.zeros(2)}, "second": {"weight": zero}}
    )
    with new.to_module(model):
        assert model.weight is model.first.weight
        assert model(torch.ones(2)).sum() == 0
    assert model.weight is params["weight"] and model.first.weight is params["weight"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("root", [False, True])
def test_to_module_swaps_tensordict_params_submodule(root, inplace):
    model = nn.Module()
    model.held = TensorDictParams(TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(3)}}))
    module = model.held if root else model
    before = dict(module.named_parameters())
    zeros = TensorDict.from_module(module).data.clone().zero_()
    with zeros.to_module(module, inplace=inplace):
        assert all((leaf == 0).all() for leaf in model.held.values(True, True))
        assert len(list(model.parameters())) == 2
    assert all((leaf == 1).all() for leaf in model.held.values(True, True))
    assert all(leaf is before[name] for name, leaf in module.named_parameters())
    with pytest.raises(KeyPathError, match="has no parameter or buffer 'c'"):
        TensorDict({"c": torch.ones(2)}).to_module(model.held)


def test_to_module_unknown_key_raises_and_changes_nothing():
    model = make_net()
    weight = model[0].weight
    with pytest.raises(KeyPathError, match=r"key \('3', 'nope'\): Linear has no parameter or buffer 'nope'"):
        TensorDict({"0": {"weight": torch.zeros(3, 2)}, "3": {"nope": torch.zeros(1)}}).to_module(model)
    assert model[0].weight is weight
    with pytest.raises(KeyPathError, match="Sequential has no submodule '9'"):
        TensorDict({"9": {"weight": torch.zeros(1)}}).to_module(model)


def test_to_module_unsupported_arguments_raise():
    params = TensorDict.from_module(nn.Linear(1, 1))
    with pytest.raises(StructureError, match="memo is not an argument"):
        params.to_module(nn.Linear(1, 1), memo={})
    with pytest.raises(StructureError, match="inplace has no meaning"):
        params.to_module(nn.Linear(1, 1), use_state_dict=True, inplace=True)


def test_to_module_use_state_dict_context_restores_values():
    model = make_net()
    values = model[0].weight.detach().clone()
    with TensorDict.from_module(model).data.clone().zero_().to_module(model, use_state_dict=True):
        assert model[0].weight.sum() == 0
    assert torch.equal(model[0].weight, values)


@pytest.mark.parametrize("lazy", [False, True])
def test_from_modules_vmap_equals_single_models(lazy):
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(4)]
    x = torch.randn(5, 3)
    expected = torch.stack([model(x) for model in models])
    params = from_modules(*models, lazy_stack=lazy)
    assert isinstance(params, LazyStackedTensorDict) is lazy

    def call(params, x):
        with params.to_module(models[0]):
            return models[0](x)

    torch.testing.assert_close(vmap(call, (0, None))(params, x), expected)


def test_to_module_func_grad_returns_parameter_gradients():
    model = nn.Linear(2, 1, bias=False)
    params = TensorDict.from_module(model).data.clone()

    def loss(params):
        with params.to_module(model):
            return model(torch.tensor([1.0, 2.0])).sum()

    assert grad(loss)(params)["weight"].tolist() == [[1.0, 2.0]]


def test_from_modules_stacks_parameters_and_expands_shared():
    layer = nn.Linear(2, 3)
    stacked = from_modules(nn.Linear(2, 3), nn.Linear(2, 3))
    assert stacked.batch_size == torch.Size([2]) and isinstance(stacked["weight"], nn.Parameter)
    shared = from_modules(layer, layer, expand_identical=True)
    assert shared["weight"].stride()[0] == 0 and shared["weight"].shape == (2, 3, 2)
    assert isinstance(from_modules(layer, layer, as_module=True), TensorDictParams)
    with pytest.raises(StructureError, match="key 'weight': stack expects each tensor to be equal size"):
        from_modules(nn.Linear(2, 3), nn.Linear(3, 3))
    with pytest.raises(StructureError, match="at least one module"):
        from_modules()


def test_compile_to_module_call_has_no_graph_break():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    params = TensorDict.from_module(model).data.clone()

    def call(params, x):
        with params.to_module(model):
            return model(x)

    x = torch.ones(4, 2)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(params, x), call(params, x))


def test_to_module_inplace_wrong_shape_changes_nothing():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    values = TensorDict({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})
    with pytest.raises(
        StructureError, match=r"key 'bias' in place: it has shape \[2\] there, the value \[3\]"
    ):
        values.to_module(model, inplace=True)
    assert torch.equal(model.weight, before)


def test_to_module_use_state_dict_wrong_shape_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wrong = TensorDict.from_module(model).data.clone().zero_()
    wrong["1", "weight"] = torch.zeros(5, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight"):
        wrong.to_module(model, use_state_dict=True)
    torch.testing.assert_close(dict(model.state_dict()), before)
