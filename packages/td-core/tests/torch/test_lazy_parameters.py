"""from_modules and lazy modules, whose parameters have no shape before the first call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from td_core import StructureError, TensorDict, TensorDictParams, from_modules, lazy_stack


def make() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))


#: Lazy modules, and the shape of their input.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.LazyLinear(3), (4, 5)),
    "without bias": (lambda: nn.LazyLinear(3, bias=False), (4, 5)),
    "sequence": (lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 1)), (6, 2)),
    "convolution": (lambda: nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(2)), (4, 3, 5, 5)),
    "batch norm": (lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), (4, 5)),
    "instance norm": (lambda: nn.LazyInstanceNorm1d(affine=True), (4, 5, 3)),
}


def call_each(params: Any, module: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    def call(member: Any, x: torch.Tensor) -> torch.Tensor:
        with member.to_module(module, **options):
            return module(x)

    return torch.vmap(call, (0, None))(params, x)


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_first_call_under_vmap_gives_parameters_shapes(name, as_module):
    build, size = MODULES[name]
    params = from_modules(*[build() for _ in range(3)], as_module=as_module)
    assert isinstance(params, TensorDictParams) is as_module
    assert params.batch_size == (3,)
    held = dict(params.items(True, True))
    assert any(map(is_lazy, held.values()))
    x = torch.randn(size)
    module = build()
    results = call_each(params, module, x)

    known = build()
    known(x)
    wanted = TensorDict.from_module(known)
    assert params.keys(True, True) == wanted.keys(True, True)
    for key, leaf in wanted.items(True, True):
        stacked = params[key]
        assert stacked is held[key] and not is_lazy(stacked)
        assert stacked.shape == (3, *leaf.shape) and type(stacked) is type(leaf)
        assert stacked.requires_grad == leaf.requires_grad
    # Each member computes what a module with its parameters computes, and the members differ.
    if "norm" not in name:
        for i, result in enumerate(results):
            with params.data[i].to_module(known):
                torch.testing.assert_close(known(x), result)
        assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(call_each(params, module, x), results)
    results.sum().backward()
    assert all(leaf.grad is not None for leaf in params._leaves() if leaf.requires_grad)


def test_first_call_initialises_each_member_like_its_module():
    torch.manual_seed(0)
    params = from_modules(nn.LazyLinear(400), nn.LazyLinear(400))
    call_each(params, nn.LazyLinear(400), torch.randn(2, 100))
    bound = 100**-0.5
    for leaf in (*params["weight"], *params["bias"]):
        assert 0.9 * bound < leaf.abs().max() <= bound


def test_first_call_updates_statistics_of_each_member():
    params = from_modules(nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d())
    module, x = nn.LazyBatchNorm1d(), torch.randn(2, 8, 3) + 2

    def call(member: Any, x: torch.Tensor) -> torch.Tensor:
        with member.to_module(module):
            return module(x)

    torch.vmap(call)(params, x)
    for i in range(2):
        known = nn.BatchNorm1d(3)
        known(x[i])
        torch.testing.assert_close(params["running_mean"][i], known.running_mean)
        torch.testing.assert_close(params["running_var"][i], known.running_var)
    assert params["num_batches_tracked"].tolist() == [1, 1]


def test_plain_attributes_of_module_receive_lazy_parameters():
    # Multi-agent networks of TorchRL do this.
    module = nn.LazyLinear(2)
    TensorDict.from_module(module).data.to_module(module, preserve_module_state=False)
    params = from_modules(nn.LazyLinear(2), nn.LazyLinear(2), as_module=True)
    result = call_each(params, module, torch.ones(4, 5), preserve_module_state=False)
    assert result.shape == (2, 4, 2) and params["weight"].shape == (2, 2, 5)


@pytest.mark.parametrize(
    "use", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"]
)
def test_copy_of_lazy_stack_gets_its_own_shape(use):
    params = from_modules(nn.LazyLinear(2), nn.LazyLinear(2))
    copied = use(params)
    call_each(copied, nn.LazyLinear(2), torch.ones(4, 5))
    assert copied["weight"].shape == (2, 2, 5) and is_lazy(params["weight"])


def test_same_module_twice_expands_nothing():
    module = nn.LazyLinear(2)
    assert is_lazy(from_modules(module, module, expand_identical=True)["weight"])


@pytest.mark.parametrize("first_is_lazy", [True, False])
def test_modules_with_and_without_shapes_raise_naming_key(first_is_lazy):
    modules = [make(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))]
    with pytest.raises(StructureError) as caught:
        from_modules(*(modules if first_is_lazy else modules[::-1]))
    assert str(caught.value) == (
        "cannot stack the modules: key ('0', 'weight') has no shape yet in some of them; call these once before"
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda params: params[0],
        lambda params: params.clone(),
        lambda params: lazy_stack([params, params])["weight"],
    ],
    ids=["index", "clone", "stack"],
)
def test_operation_on_lazy_stack_raises(use):
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        use(from_modules(nn.LazyLinear(2), nn.LazyLinear(2)))
    assert "weight: f32[-1]" in repr(from_modules(nn.LazyLinear(2), nn.LazyLinear(2)))


def test_from_modules_after_first_call_stacks_parameters():
    modules = [make(), make()]
    kept = from_modules(*modules, lazy_stack=True)
    for module in modules:
        module(torch.ones(2, 3))
    params = from_modules(*modules)
    assert params["0", "weight"].shape == kept["0", "weight"].shape == (2, 4, 3)
    assert torch.equal(params["0", "weight"][1], modules[1][0].weight)
