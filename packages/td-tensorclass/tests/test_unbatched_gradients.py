"""Autograd through an UnbatchedTensor in a collection."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_tensorclass import TensorClass, UnbatchedTensor


class Model(TensorClass):
    a: Tensor
    u: Tensor


def make() -> TensorDict:
    return TensorDict({"a": torch.ones(4), "u": UnbatchedTensor(torch.ones(3))}, [4])


def make_of_entry_that_was_read() -> TensorDict:
    td = make()
    td["u"], td.get("u"), list(td.items())
    return td


#: A collection of leaves that require grad, with "a" and "u" in it.
MADE: dict[str, Callable[[], Any]] = {
    "collection": lambda: make().requires_grad_(),
    "read before": lambda: make_of_entry_that_was_read().requires_grad_(),
    "entry": lambda: require_grad_of_entries(make()),
    "tensor that requires grad": lambda: TensorDict(
        {"a": torch.ones(4, requires_grad=True), "u": UnbatchedTensor(torch.ones(3)).requires_grad_()}, [4]
    ),
    "around a leaf": lambda: TensorDict(
        {"a": torch.ones(4, requires_grad=True), "u": UnbatchedTensor(torch.ones(3, requires_grad=True))}, [4]
    ),
    "set later": lambda: (
        TensorDict({"a": torch.ones(4)}, [4]).set("u", UnbatchedTensor(torch.ones(3))).requires_grad_()
    ),
    "params": lambda: TensorDictParams(make()),
    "tensorclass": lambda: Model(
        torch.ones(4), UnbatchedTensor(torch.ones(3)), batch_size=[4]
    ).requires_grad_(),
    "clone": lambda: make_of_entry_that_was_read().clone().requires_grad_(),
    "shallow clone": lambda: make().requires_grad_().clone(False),
    "selection": lambda: make().requires_grad_().select("a", "u"),
    "deepcopy": lambda: copy.deepcopy(make().requires_grad_()),
    "pickle": lambda: pickle.loads(pickle.dumps(make().requires_grad_())),
    "cast": lambda: make().double().requires_grad_(),
    "indexed": lambda: make()[:4].requires_grad_(),
    "reshaped": lambda: make().view(2, 2).requires_grad_().view(4).detach().requires_grad_(),
    "mapped": lambda: make().apply(lambda leaf: leaf + 0).requires_grad_(),
    "stacked": lambda: torch.stack([make()[0]] * 4).requires_grad_(),
    "updated": lambda: make().update({"u": UnbatchedTensor(torch.ones(3))}).requires_grad_(),
}


def require_grad_of_entries(td: Any) -> Any:
    td["u"].requires_grad_()
    td["a"].requires_grad_()
    return td


@pytest.mark.parametrize("made", MADE)
def test_backward_sets_grad_of_unbatched_tensor(made: str) -> None:
    td = MADE[made]()
    out = td * 2
    out.backward(torch.ones_like(out))
    assert td.get("u").grad.tolist() == [2, 2, 2] and td.get("a").grad.tolist() == [2, 2, 2, 2]
    assert list(td.grad.keys()) == ["a", "u"] and td.grad.get("u").tolist() == [2, 2, 2]
    assert type(td.grad.get("u")) is UnbatchedTensor
    td.zero_grad()
    assert td.grad is None and td.get("u").grad is None
    (td.get("u") * torch.arange(3)).sum().backward()
    assert td.get("u").grad.tolist() == [0, 1, 2]
    td.grad = td.grad * 2
    assert td.get("u").grad.tolist() == [0, 2, 4]


@pytest.mark.parametrize("made", MADE)
def test_autograd_grad_of_unbatched_tensor_equals_torch(made: str) -> None:
    td = MADE[made]()
    out = td * 2
    found = torch.autograd.grad(out, td, torch.ones_like(out), retain_graph=True)
    assert list(found.keys()) == ["a", "u"] and found.get("u").tolist() == [2, 2, 2]
    entries = [td.get("a"), td.get("u")]
    for gradient in torch.autograd.grad([out.get("a").sum(), out.get("u").sum()], entries, retain_graph=True):
        assert (gradient == 2).all()
    # Entries that are not autograd leaves also have a grad.
    (gradient,) = torch.autograd.grad((out * 3).get("u").sum(), [out.get("u")])
    assert gradient.tolist() == [3, 3, 3]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=lambda cls: cls.__name__)
def test_optimizer_step_changes_unbatched_tensor(optimizer: Any, made: str) -> None:
    td = MADE[made]()
    plain = [torch.ones(n, dtype=td.get("a").dtype, requires_grad=True) for n in (4, 3)]
    trained = [td.get("a"), td.get("u")]
    for leaves, read in (
        (trained, lambda: [(td * 2).get("a"), (td * 2).get("u")]),
        (plain, lambda: [p * 2 for p in plain]),
    ):
        optimize = optimizer(leaves, lr=0.1)
        for _ in range(3):
            optimize.zero_grad()
            sum(value.pow(2).sum() for value in read()).backward()
            optimize.step()
    for key, expected in zip("au", plain, strict=True):
        torch.testing.assert_close(td.get(key).detach().as_subclass(Tensor), expected.detach())


SHAPED: dict[str, Callable[[Any], Any]] = {
    "index": lambda td: td[0],
    "slice": lambda td: td[:2],
    "view": lambda td: td.view(2, 2),
    "expand": lambda td: td.expand(2, 4),
    "unbind": lambda td: td.unbind(0)[1],
    "split": lambda td: td.split(2)[0],
    "stack": lambda td: torch.stack([td, td]),
    "lazy stack": lambda td: LazyStackedTensorDict(td, td),
    "select": lambda td: td.select("u"),
    "flatten_keys": lambda td: TensorDict({"n": td}, [4]).flatten_keys("."),
}


@pytest.mark.parametrize("shaped", SHAPED)
def test_backward_through_shape_operations_reaches_entry(shaped: str) -> None:
    td = make().requires_grad_()
    part = SHAPED[shaped](td)
    key = "n.u" if shaped == "flatten_keys" else "u"
    (part.get(key) * 3).sum().backward()
    assert td["u"].grad.tolist() == [3, 3, 3]
    assert td["u"].batch_size == (4,) and part.get(key).batch_size == part.batch_size
    td.grad = None
    (part * 2).get(key).sum().backward()
    assert td["u"].grad.tolist() == [2, 2, 2]


def test_get_requiring_grad_returns_same_object() -> None:
    tensor = UnbatchedTensor(torch.ones(3)).requires_grad_()
    td = TensorDict({"n": {"u": tensor}}, [4])
    assert td["n", "u"] is td.get(("n", "u")) is tensor
    (td * 2)["n", "u"].sum().backward()
    assert tensor.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("whose", ["given", "read"])
@pytest.mark.parametrize("require", ["tensor", "collection"])
def test_requires_grad_applies_to_shared_unbatched_tensor(require: str, whose: str) -> None:
    given = UnbatchedTensor(torch.ones(3))
    td = TensorDict({"n": {"u": given}}, [4])
    tensor = given if whose == "given" else td["n", "u"]
    (tensor if require == "tensor" else td).requires_grad_()
    (td * 2)["n", "u"].sum().backward()
    assert td["n", "u"] is tensor and tensor.grad.tolist() == [2, 2, 2] and td.requires_grad
    td["n"].zero_grad()
    assert tensor.grad is None


def test_set_data_replaces_unbatched_tensor() -> None:
    td = make()
    read = td["u"]
    td.data = TensorDict({"a": torch.zeros(4), "u": UnbatchedTensor(torch.zeros(3))}, [4])
    assert td["u"].tolist() == [0, 0, 0]
    td["u"].fill_(2)
    assert (td + 1)["u"].tolist() == [3, 3, 3] and read.shape == (3,)


def test_backward_reaches_leaf_wrapped_in_no_grad() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        td = TensorDict({"u": UnbatchedTensor(leaf)}, [4])
    (td * 2)["u"].sum().backward()
    assert leaf.grad.tolist() == td["u"].grad.tolist() == [2, 2, 2]
    assert type(leaf) is Tensor


def test_requires_grad_of_index_result_keeps_original() -> None:
    td = make()
    part = td[0].requires_grad_()
    assert part["u"].requires_grad and not td["u"].requires_grad
    assert td.requires_grad_().requires_grad_(False)["u"].requires_grad is False


def test_tensordict_params_lists_unbatched_tensor() -> None:
    td = make()
    td["i"] = UnbatchedTensor(torch.tensor(1))
    params = TensorDictParams(td)
    loaded = pickle.loads(pickle.dumps(params))
    for copied in (params.clone(), copy.deepcopy(params), loaded, params.to(torch.float64), params):
        assert [name for name, _ in copied.named_parameters()] == ["a", "u"]
        assert [name for name, _ in copied.named_buffers()] == ["i"]
        assert isinstance(copied["u"], nn.Parameter) and type(copied["u"]) is UnbatchedTensor
        torch.optim.SGD(copied.parameters(), lr=1.0)
    assert not isinstance(td["u"], nn.Parameter) and not td["u"].requires_grad
    params.requires_grad_(False)
    for copied in (params, params.clone(), copy.deepcopy(params)):
        assert [(name, leaf.requires_grad) for name, leaf in copied.named_parameters()] == [
            ("a", False),
            ("u", False),
        ]


def test_to_module_ensemble_uses_unbatched_tensor() -> None:
    net = nn.Linear(2, 1)
    weights = TensorDict(
        {"weight": torch.ones(3, 1, 2), "bias": UnbatchedTensor(torch.ones(1))}, [3]
    ).requires_grad_()

    def call(weights: Any, x: Tensor) -> Tensor:
        with weights.to_module(net):
            return net(x)

    out = torch.vmap(call, (0, None))(weights, torch.ones(2))
    assert type(out) is Tensor and out.flatten().tolist() == [3, 3, 3]
    out.sum().backward()
    assert weights["bias"].grad.tolist() == [3] and weights["weight"].grad.shape == (3, 1, 2)
    single = TensorDict({"bias": UnbatchedTensor(torch.zeros(1))})
    with single.to_module(net):
        assert type(net.bias) is nn.Parameter and net.bias.item() == 0


def test_func_grad_of_unbatched_tensor_equals_torch() -> None:
    def compute(td: Any) -> Tensor:
        return (td * 3)["u"].sum() + td["a"].sum()

    found = torch.func.grad(lambda u: compute(make().set("u", UnbatchedTensor(u))))(torch.ones(3))
    assert found.tolist() == [3, 3, 3]


def test_compile_backward_reaches_unbatched_tensor() -> None:
    td = make().requires_grad_()
    td["u"]
    out = torch.compile(lambda td: td * 2, backend="eager", fullgraph=True)(td)
    out.backward(torch.ones_like(out))
    assert td["u"].grad.tolist() == [2, 2, 2] and td["a"].grad.tolist() == [2, 2, 2, 2]
