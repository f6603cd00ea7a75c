"""to_module with leaves that require grad: they receive gradients, and the context restores the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from td_core import Buffer, LazyStackedTensorDict, TensorDict, TensorDictParams, from_modules

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)) * self.scale + self.shift


def make_leaves(net: nn.Module) -> Any:
    return TensorDict.from_module(net).data.clone().requires_grad_()


def name_leaves(td: Any) -> dict[str, Tensor]:
    return {".".join(key) if isinstance(key, tuple) else key: leaf for key, leaf in td.items(True, True)}


def compute_expected(td: Any, call: Callable[..., Any] = lambda net, x: net(x).sum()) -> dict[str, Tensor]:
    """Compute the gradients of torch.func.functional_call for leaves with the same values."""
    given = {name: leaf.detach().clone().requires_grad_() for name, leaf in name_leaves(td).items()}
    call(lambda x: functional_call(Net(), given, (x,)), X).backward()
    return {name: leaf.grad for name, leaf in given.items()}


def assert_gradients(td: Any, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close({name: leaf.grad for name, leaf in name_leaves(td).items()}, expected)


def collect_state(net: nn.Module) -> list[Any]:
    return [
        (name, [(key, id(value)) for key, value in slots.items()])
        for name, module in net.named_modules()
        for slots in (module._parameters, module._buffers)
    ]


def swap_and_run(net: nn.Module, weights: Any, **options: Any) -> None:
    swap = weights.to_module(net, **options)
    net(X).sum().backward()
    swap.to_module(net)


def run_in_context(net: nn.Module, weights: Any, **options: Any) -> None:
    with weights.to_module(net, **options):
        net(X).sum().backward()


def run_nested(net: nn.Module, weights: Any) -> None:
    with make_leaves(net).to_module(net), weights.to_module(net):
        net(X).sum().backward()


def run_outside_of_nested(net: nn.Module, weights: Any) -> None:
    with weights.to_module(net):
        with make_leaves(net).to_module(net):
            pass
        net(X).sum().backward()


def run_swapped_without_grad(net: nn.Module, weights: Any) -> None:
    with torch.no_grad():
        swap = weights.to_module(net)
    net(X).sum().backward()
    swap.to_module(net)


def run_into_destination(net: nn.Module, weights: Any) -> None:
    held = TensorDict()
    weights.to_module(net, swap_dest=held)
    net(X).sum().backward()
    held.to_module(net)


def run_under_vmap(net: nn.Module, weights: Any) -> None:
    def call(x: Tensor) -> Tensor:
        with weights.to_module(net):
            return net(x)

    vmap(call)(X).sum().backward()


def run_under_grad(net: nn.Module, weights: Any) -> None:
    def call(factor: Tensor) -> Tensor:
        with weights.to_module(net):
            return (net(X) * factor).sum()

    grad(call)(torch.tensor(1.0)).backward()


def run_compiled(net: nn.Module, weights: Any) -> None:
    def call(weights: Any, x: Tensor) -> Tensor:
        with weights.to_module(net):
            return net(x).sum()

    torch.compile(call, backend="eager", fullgraph=True)(weights, X).backward()


RUNS = {
    "context": run_in_context,
    "plain attributes": lambda net, weights: run_in_context(net, weights, preserve_module_state=False),
    "swap": swap_and_run,
    "swap of plain attributes": lambda net, weights: swap_and_run(net, weights, preserve_module_state=False),
    "inner context": run_nested,
    "outer context": run_outside_of_nested,
    "swap under no_grad": run_swapped_without_grad,
    "swap_dest": run_into_destination,
    "vmap": run_under_vmap,
    "grad": run_under_grad,
    "compile": run_compiled,
}
WEIGHTS = {
    "plain leaves": make_leaves,
    "parameters": lambda net: TensorDictParams(make_leaves(net).data),
    "buffers": lambda net: TensorDictParams(make_leaves(net), no_convert=True),
    "member of a lazy stack": lambda net: LazyStackedTensorDict(make_leaves(net), make_leaves(net))[0],
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("run", RUNS)
def test_to_module_leaves_receive_gradients(run: str, kind: str) -> None:
    net = Net()
    weights, before = WEIGHTS[kind](net), collect_state(net)
    RUNS[run](net, weights)
    assert_gradients(weights, compute_expected(weights))
    assert collect_state(net) == before


def test_to_module_leaves_train_with_optimizer_of_module() -> None:
    net = Net()
    weights = make_leaves(net)
    weights.to_module(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before, expected = weights.data.clone(), compute_expected(weights)
    net(X).sum().backward()
    optimizer.step()
    for key in ("first", "inner"):
        for name, leaf in name_leaves(weights[key]).items():
            start = name_leaves(before[key])[name]
            torch.testing.assert_close(leaf.data, start - 0.1 * expected[f"{key}.{name}"])
    # The optimizer of the module trains its parameters, so the buffer is unchanged.
    assert (weights["scale"] == before["scale"]).all()


def test_inner_steps_with_func_grad_reach_leaves() -> None:
    net = Net()
    weights = make_leaves(net)

    def compute_loss(params: Any) -> Tensor:
        with params.to_module(net):
            return net(X).pow(2).mean()

    params = weights
    for _ in range(2):
        params = params - grad(compute_loss)(params) * 0.1
    compute_loss(params).backward()

    start = {name: leaf.detach().clone().requires_grad_() for name, leaf in name_leaves(weights).items()}

    def compute_plainly(given: dict[str, Tensor]) -> Tensor:
        return functional_call(net, given, (X,)).pow(2).mean()

    given = start
    for _ in range(2):
        step = grad(compute_plainly)(given)
        given = {name: leaf - 0.1 * step[name] for name, leaf in given.items()}
    compute_plainly(given).backward()
    assert_gradients(weights, {name: leaf.grad for name, leaf in start.items()})


def test_inner_steps_with_autograd_grad_reach_leaves() -> None:
    net = Net()
    weights = make_leaves(net)
    with weights.to_module(net):
        loss = net(X).pow(2).mean()
    stepped = weights - torch.autograd.grad(loss, weights, create_graph=True) * 0.1
    with stepped.to_module(net):
        net(X).pow(2).mean().backward()
    assert all(leaf.grad is not None for leaf in weights.values(True, True))


def make_stacked(nets: list[Net]) -> Any:
    return from_modules(*nets).data.clone().requires_grad_()


@pytest.mark.parametrize("lazy", [False, True])
def test_to_module_under_vmap_stacked_leaves_receive_gradients(lazy: bool) -> None:
    nets = [Net(), Net()]
    members = [make_leaves(net) for net in nets]
    weights = LazyStackedTensorDict(*members) if lazy else make_stacked(nets)

    def call(params: Any, x: Tensor) -> Tensor:
        with params.to_module(nets[0]):
            return nets[0](x)

    vmap(call, (0, None))(weights, X).sum().backward()
    for i, member in enumerate(members):
        found = member if lazy else weights
        for name, expected in compute_expected(member).items():
            gradient = name_leaves(found)[name].grad
            torch.testing.assert_close(gradient if lazy else gradient[i], expected)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_to_module_tied_leaves_stay_one_parameter(requires_grad: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    leaf = torch.ones(2, 2, requires_grad=requires_grad)
    with TensorDict({"0": {"weight": leaf}, "1": {"weight": leaf}}).to_module(net):
        assert net[0].weight is net[1].weight and len(list(net.parameters())) == 1
        net(torch.ones(2)).sum().backward()
        assert net[0].weight.grad.tolist() == [[4, 4], [4, 4]]
    with TensorDict.from_module(net).data.to_module(net):  # separate tensors on one storage
        assert net[0].weight is net[1].weight and isinstance(net[0].weight, nn.Parameter)
    other = {"0": {"weight": torch.ones(2, 2)}, "1": {"weight": torch.ones(2, 2)}}
    with TensorDict(other).to_module(net):
        assert net[0].weight is not net[1].weight


def test_to_module_leaves_without_grad_become_parameters() -> None:
    net = nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    plain = TensorDict.from_module(net).data.clone()
    with make_leaves(net).to_module(net), plain.to_module(net):
        for name, parameter in net.named_parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.data_ptr() == plain[name].data_ptr()


def make_holder() -> nn.Module:
    holder = nn.Module()
    entries = {"w": torch.ones(2), "n": {"b": torch.ones(2)}, "mean": Buffer(torch.ones(2), persistent=False)}
    holder.held = TensorDictParams(TensorDict({**entries, "i": torch.tensor(1)}))
    return holder


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("make", [lambda td: td.requires_grad_(), TensorDictParams], ids=["leaves", "params"])
def test_to_module_leaves_for_nested_params_receive_gradients(make: Callable[[Any], Any], root: bool) -> None:
    holder = make_holder()
    zeros = TensorDict({"w": torch.zeros(2), "n": {"b": torch.zeros(2)}, "mean": torch.zeros(2)})
    weights = make(zeros if root else TensorDict({"held": zeros}))
    module = holder.held if root else holder
    before = [*holder.named_parameters(), *holder.named_buffers()]
    with weights.to_module(module):
        assert [name for name, _ in holder.named_parameters()] == ["held.w", "held.n.b"]
        assert [name for name, _ in holder.named_buffers()] == ["held.mean", "held.i"]
        assert sorted(holder.state_dict()) == ["held.i", "held.n.b", "held.w"]
        (holder.held["w"] + holder.held.n.b + holder.held["mean"]).sum().backward()
        torch.optim.SGD(holder.parameters(), lr=1.0).step()
    for name, leaf in name_leaves(weights).items():
        assert leaf.grad.tolist() == [1, 1] and leaf.tolist() == ([0, 0] if "mean" in name else [-1, -1])
        assert not isinstance(leaf, Buffer)
    after = [*holder.named_parameters(), *holder.named_buffers()]
    assert [(name, id(leaf)) for name, leaf in before] == [(name, id(leaf)) for name, leaf in after]


def test_to_module_error_in_context_restores_module() -> None:
    net = Net()
    before = collect_state(net)
    with pytest.raises(ZeroDivisionError), make_leaves(net).to_module(net):
        raise ZeroDivisionError
    assert collect_state(net) == before
