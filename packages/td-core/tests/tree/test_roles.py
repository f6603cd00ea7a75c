"""Roles of leaves: parameters stay parameters and buffers stay buffers through copies, writes and modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from td_core import Buffer, TensorDict, TensorDictParams, from_module, from_modules

TORCH_BUFFER: Any = getattr(nn, "Buffer", Buffer)
PARAMETERS = {"weight", "frozen", "norm.weight", "norm.bias"}
STATISTICS = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
PASSING = {"cache", "passing"}
BUFFERS = {"mean", "steps", "kept", *PASSING, *STATISTICS}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("steps", torch.tensor(1))
        self.register_buffer("kept", TORCH_BUFFER(torch.ones(2)))
        self.register_buffer("passing", TORCH_BUFFER(torch.ones(2), persistent=False), persistent=False)
        self.norm = nn.BatchNorm1d(2)


def name_leaves(td: Any) -> dict[str, Tensor]:
    return {".".join(key) if isinstance(key, tuple) else key: leaf for key, leaf in td.items(True, True)}


def assert_roles(params: Any) -> None:
    assert isinstance(params, TensorDictParams)
    assert {name for name, _ in params.named_parameters()} == PARAMETERS
    assert {name for name, _ in params.named_buffers()} == BUFFERS
    assert {*params.state_dict()} == PARAMETERS | BUFFERS - PASSING
    for name, leaf in name_leaves(params).items():
        assert isinstance(leaf, nn.Parameter) is (name in PARAMETERS)
        assert isinstance(leaf, Buffer) is isinstance(leaf, TORCH_BUFFER) is (name in BUFFERS)
        assert name not in BUFFERS or leaf.persistent is (name not in PASSING)
        assert (
            leaf.requires_grad is (name in PARAMETERS - {"frozen"}) or leaf.dtype.is_floating_point is False
        )


MADE: dict[str, Callable[[nn.Module], Any]] = {
    "as_module": lambda module: TensorDict.from_module(module, as_module=True),
    "function": lambda module: from_module(module, as_module=True),
    "classmethod": TensorDictParams.from_module,
    "no_convert": lambda module: TensorDictParams(TensorDict.from_module(module), no_convert=True),
    "convert": lambda module: TensorDictParams(TensorDict.from_module(module)),
    "of params": lambda module: TensorDictParams(TensorDictParams(TensorDict.from_module(module))),
    "from_modules": lambda module: from_modules(module, Model(), as_module=True),
}
NEW = ("mean", "cache", "kept", "passing", ("norm", "running_mean"))


def save_and_load(params: Any) -> Any:
    torch.save(params, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def pass_module(change: Callable[[nn.Module], nn.Module]) -> Callable[[Any], Any]:
    """Return a function that puts parameters into a module, changes the module, and returns its parameters."""

    def changed(params: Any) -> Any:
        holder = nn.Module()
        holder.held = params
        return change(holder).held

    return changed


def set_plain(params: Any) -> Any:
    for key in NEW:
        params[key] = torch.zeros_like(params[key].data)
    return params


def update_plain(params: Any) -> Any:
    return params.update({key: torch.zeros_like(params[key].data) for key in NEW})


def set_level(params: Any) -> Any:
    entries = {
        key: nn.Parameter(leaf.detach().clone()) if isinstance(leaf, nn.Parameter) else leaf.clone()
        for key, leaf in params["norm"].items()
    }
    params["norm"] = TensorDict(entries, params.batch_size)
    return params


def assign_state(module: Any) -> Any:
    module.load_state_dict({key: leaf.clone() for key, leaf in module.state_dict().items()}, assign=True)
    return module


def write_in_place(params: Any) -> Any:
    params.zero_().apply_(lambda leaf: leaf + 1)
    params.update_({"mean": torch.zeros_like(params["mean"].data)})
    params["mean"].add_(1)
    return params.copy_(params.data)


KEPT: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda params: params,
    "clone": lambda params: params.clone(),
    "shallow clone": lambda params: params.clone(False),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda params: pickle.loads(pickle.dumps(params)),
    "torch.save": save_and_load,
    "dtype": lambda params: params.to(torch.float64),
    "meta": lambda params: params.to("meta"),
    "dtype in place": lambda params: params.to(torch.float64, inplace=True),
    "set": set_plain,
    "set level": set_level,
    "update": update_plain,
    "replace": lambda params: params.replace({key: torch.zeros_like(params[key].data) for key in NEW}),
    "in place": write_in_place,
    "load": lambda params: params.load_state_dict(params.clone().state_dict()),
    "assign": assign_state,
    "module load": pass_module(assign_state),
    "module deepcopy": pass_module(copy.deepcopy),
    "module to": pass_module(lambda module: module.to(torch.float64)),
    "module meta": pass_module(lambda module: module.to("meta").to_empty(device="cpu")),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("made", MADE)
def test_operation_keeps_roles_of_parameters_and_buffers(made: str, kept: str) -> None:
    assert_roles(KEPT[kept](MADE[made](Model()).unlock_()))


#: Writes of ones over the parameters "w" and ("n", "w").
PLAIN_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda params, ones: params.set("w", ones["w"]).set(("n", "w"), ones["n", "w"]),
    "item": lambda params, ones: [params.__setitem__(key, leaf) for key, leaf in ones.items(True, True)],
    "level": lambda params, ones: params.set("w", ones["w"]).set("n", ones["n"]),
    "update": lambda params, ones: params.update(ones),
    "update with a dict": lambda params, ones: params.update(ones.to_dict()),
    "update with a clone": lambda params, ones: params.update(ones, clone=True),
    "nested module": lambda params, ones: [params.n.set("w", ones["n", "w"]), params.set("w", ones["w"])],
    "in a collection": lambda params, ones: TensorDict({"p": params}).update({"p": ones}),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("write", PLAIN_WRITES)
@pytest.mark.parametrize("converts", [True, False])
def test_write_plain_tensor_over_parameter_freezes_it_without_convert(
    converts: bool, write: str, trains: bool
) -> None:
    leaves = {key: nn.Parameter(torch.zeros(2), requires_grad=trains) for key in ("w", "v", "x")}
    td = TensorDict({"w": leaves["w"], "v": leaves["v"], "n": {"w": leaves["x"]}})
    params = TensorDictParams(td, no_convert=not converts)
    PLAIN_WRITES[write](params, TensorDict({"w": torch.ones(2), "n": {"w": torch.ones(2)}}))
    kept = ["v"] if not converts else ["w", "v", "n.w"]
    assert sorted(name for name, _ in params.named_parameters()) == sorted(kept)
    assert [name for name, _ in params.named_buffers()] == ([] if converts else ["w", "n.w"])
    assert sorted(params.state_dict()) == ["n.w", "v", "w"]
    for key in ("w", ("n", "w")):
        assert params[key].requires_grad is (converts and trains) and (params[key] == 1).all()


def test_update_clone_of_parameters_without_convert_keeps_them_parameters() -> None:
    params = TensorDictParams(TensorDict({"w": nn.Parameter(torch.zeros(2))}), no_convert=True)
    new = nn.Parameter(torch.ones(2))
    params.update({"w": new, "n": TensorDict({"w": new})}, clone=True)
    assert [name for name, _ in params.named_parameters()] == ["w", "n.w"]
    assert params["w"] is not new and params["w"].is_leaf and params["n", "w"].is_leaf


def test_write_plain_tensor_over_parameter_of_module_does_not_train_it() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    params = TensorDict.from_module(net, as_module=True)
    params.set(("0", "weight"), net[0].weight.data)
    held = net[0].weight
    with params.to_module(net):
        net(torch.ones(1, 2)).sum().backward()
    assert net[0].weight is held and held.grad is None and net[1].weight.grad is not None


@pytest.mark.parametrize("use_state_dict", [False, True])
def test_from_module_buffers_are_buffers(use_state_dict: bool) -> None:
    model = Model()
    taken = name_leaves(TensorDict.from_module(model, use_state_dict=use_state_dict))
    for name, leaf in taken.items():
        assert isinstance(leaf, Buffer) is isinstance(leaf, TORCH_BUFFER) is (name in BUFFERS)
    if not use_state_dict:
        assert all(leaf is model.get_buffer(name) for name, leaf in taken.items() if name in BUFFERS)
    params = TensorDict.from_module(model, as_module=True, use_state_dict=use_state_dict)
    assert {name for name, _ in params.named_parameters()} == PARAMETERS
    assert all(leaf is model.get_parameter(name) for name, leaf in params.named_parameters())


@pytest.mark.parametrize("no_convert", [False, True])
def test_init_params_does_not_mark_given_tensors(no_convert: bool) -> None:
    given = {"x": torch.zeros(2), "n": {"i": torch.tensor(1)}}
    td = TensorDict(given)
    params = TensorDictParams(td, no_convert=no_convert)
    assert isinstance(params["n", "i"], Buffer) and isinstance(params["x"], Buffer) is no_convert
    assert not isinstance(given["x"], Buffer) and not isinstance(given["n"]["i"], Buffer)
    assert td["x"] is given["x"] and params["x"].data_ptr() == given["x"].data_ptr()


def test_buffer_requiring_grad_passes_gradients() -> None:
    leaf = torch.ones(2, requires_grad=True)
    params = TensorDictParams(TensorDict({"leaf": leaf, "computed": leaf * 2}), no_convert=True)
    assert {name for name, _ in params.named_buffers()} == {"leaf", "computed"}
    (params["leaf"] + params["computed"]).sum().backward()
    assert leaf.grad.tolist() == [3, 3]


def test_init_params_tied_tensors_become_one_parameter() -> None:
    weight, steps = torch.ones(2), torch.tensor(1)
    td = TensorDict({"a": weight, "n": {"b": weight, "i": steps}, "j": steps})
    for no_convert in (False, True):
        params = TensorDictParams(td, no_convert=no_convert)
        assert params["a"] is params["n", "b"] and params["n", "i"] is params["j"]


def test_set_buffer_or_parameter_replaces_role() -> None:
    params = TensorDictParams(TensorDict({"w": torch.ones(2), "b": Buffer(torch.ones(2))}))
    params["w"], params["b"] = Buffer(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert [name for name, _ in params.named_parameters()] == ["b"]
    assert [name for name, _ in params.named_buffers()] == ["w"]


def test_result_computed_from_buffer_is_not_a_buffer() -> None:
    buffer = Buffer(torch.ones(2))
    assert type(buffer) is Tensor and isinstance(buffer, Buffer)
    for result in (buffer + 1, buffer.detach(), buffer.clone(), buffer[0]):
        assert not isinstance(result, Buffer)
    assert Buffer().shape == (0,) and not isinstance(torch.zeros(2), Buffer) and not isinstance(3, Buffer)
    assert Buffer(torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_to_module_parameter_in_buffer_slot_is_buffer(trained: bool, preserve: bool) -> None:
    model = Model()
    given = nn.Parameter(torch.zeros(2), requires_grad=trained)
    source = TensorDict({"mean": given, "norm": {"running_mean": given}})
    swap = source.to_module(model, preserve_module_state=preserve)
    for module, name in ((model, "mean"), (model.norm, "running_mean")):
        held = module.get_buffer(name)
        assert type(held) is Tensor and held.data_ptr() == given.data_ptr()
    assert model.mean is model.norm.running_mean
    assert {name for name, _ in model.named_buffers()} == BUFFERS - {"norm.running_mean"}
    assert {name for name, _ in model.named_parameters()} == PARAMETERS
    if trained:
        (model.mean * 3).sum().backward()
        assert given.grad.tolist() == [3, 3]
    assert isinstance(given, nn.Parameter) and not isinstance(given, Buffer)
    swap.to_module(model)
    assert model.mean.tolist() == [1, 1]


def test_to_module_buffer_in_parameter_slot_is_parameter() -> None:
    model = Model()
    TensorDict({"weight": Buffer(torch.zeros(2))}).to_module(model)
    assert type(model.weight) is nn.Parameter and model.weight.requires_grad
    assert {name for name, _ in model.named_parameters()} == PARAMETERS


class Exported(nn.Module):
    def __init__(self, no_convert: bool) -> None:
        super().__init__()
        entries = {"w": nn.Parameter(torch.ones(2)), "n": {"b": nn.Parameter(torch.ones(2), False)}}
        entries["n"] |= {"mean": Buffer(torch.ones(2)), "m": {"w": nn.Parameter(torch.ones(2))}}
        self.held = TensorDictParams(TensorDict(entries), no_convert=no_convert)

    def forward(self, x: Tensor) -> Tensor:
        n = self.held["n"]
        return x * self.held["w"] + n["b"] + n["mean"] + self.held.n.m.w


@pytest.mark.parametrize("no_convert", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_parameters_of_caller(strict: bool, no_convert: bool) -> None:
    module = Exported(no_convert)
    held, inner = module.held, module.held.data
    before = {name: (id(leaf), type(leaf), leaf.requires_grad) for name, leaf in name_leaves(held).items()}
    program = torch.export.export(module, (torch.ones(2),), strict=strict)
    after = {name: (id(leaf), type(leaf), leaf.requires_grad) for name, leaf in name_leaves(held).items()}
    assert after == before and module.held is held
    assert [name for name, _ in held.named_parameters()] == ["w", "n.b", "n.m.w"]
    assert [name for name, _ in held.named_buffers()] == ["n.mean"]
    assert program.module()(torch.ones(2)).tolist() == module(torch.ones(2)).tolist() == [4, 4]
    module(torch.ones(2)).sum().backward()
    assert held["n", "m", "w"].grad.tolist() == [1, 1] and inner["w"].data_ptr() == held["w"].data_ptr()


@pytest.mark.parametrize(
    "write",
    [
        lambda td, new: [td.set(("p", *key), leaf) for key, leaf in new.items()],
        lambda td, new: td.update({("p", *key): leaf for key, leaf in new.items()}),
        lambda td, new: td.update({"p": TensorDict(dict(new.items()))}),
        lambda td, new: td.update({"p": TensorDict(dict(new.items()))}, clone=True),
        lambda td, new: td["p"].update(TensorDict(dict(new.items()))),
        lambda td, new: TensorDict({"q": td}).update({"q": {"p": TensorDict(dict(new.items()))}}),
    ],
)
def test_write_nested_entries_of_params_keeps_roles(write: Callable[[Any, Any], Any]) -> None:
    entries = {
        "w": torch.ones(2),
        "n": {"b": torch.ones(2), "mean": Buffer(torch.ones(2)), "m": {"c": torch.ones(2)}},
    }
    td = TensorDict({"p": TensorDictParams(TensorDict(entries))})
    params = td["p"]
    keys = [("w",), ("n", "b"), ("n", "mean"), ("n", "m", "c"), ("n", "m", "new")]
    write(td, {key: torch.zeros(2) for key in keys})
    assert td["p"] is params and all((leaf == 0).all() for leaf in params.values(True, True))
    assert {name for name, _ in params.named_parameters()} == {"w", "n.b", "n.m.c", "n.m.new"}
    assert [name for name, _ in params.named_buffers()] == ["n.mean"]


def test_to_module_parameter_in_both_slots_keeps_roles() -> None:
    model, given = Model(), nn.Parameter(torch.zeros(2))
    with TensorDict({"mean": given, "weight": given, "cache": given}).to_module(model):
        assert model.weight is given and model.mean is model.cache is not given
        (model.mean + model.weight).sum().backward()
    assert given.grad.tolist() == [2, 2]
