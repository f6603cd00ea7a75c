"""Lazy stacks as pytrees: transforms of torch.func equal those of the dense stack, and tree_map keeps members."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import (
    StructureError,
)

#: torch 2.14 calls deprecated functions at the first use of forward-mode autograd.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def make_weights(first=0.0):
    return TensorDict({"w": torch.arange(3.0) + first, "n": {"b": torch.arange(2.0) - 3 * first}})


def compute_loss(params):
    return (params["w"] ** 3).sum() * params["n", "b"].sum()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [
        lambda params: torch.func.grad(compute_loss)(params),
        lambda params: torch.func.grad(lambda outer: compute_loss(outer["l"]))(TensorDict({"l": params}))[
            "l"
        ],
        lambda params: torch.func.grad(lambda p: torch.vmap(compute_loss)(p).sum())(params),
        lambda params: torch.vmap(torch.func.grad(compute_loss))(params),
        lambda params: torch.vmap(lambda x: torch.func.grad(lambda p: x * compute_loss(p))(params))(
            torch.arange(2)
        ),
        lambda params: torch.func.jacrev(compute_loss)(params),
        lambda params: torch.func.jvp(compute_loss, (params,), (params,))[1],
        lambda params: torch.func.vjp(compute_loss, params)[1](torch.tensor(2.0))[0],
    ],
)
@FORWARD_MODE
def test_func_transforms_equal_dense_stack(transform):
    stack = LazyStackedTensorDict(make_weights(1.0), make_weights(2.0))
    expected, found = transform(stack.to_tensordict()), transform(stack)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected) and found.any()
        return
    assert found.batch_size == expected.batch_size
    for key, leaf in expected.items(True, True):
        assert torch.equal(found[key], leaf) and leaf.any()


def list_leaves(result):
    if isinstance(result, tuple):
        return [leaf for part in result for leaf in list_leaves(part)]
    return [result] if isinstance(result, torch.Tensor) else list(result.values(True, True))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "fn",
    [
        compute_loss,
        lambda params: params * params,
        lambda params: params["n"].clone().mul_(2),
        lambda params: torch.stack([params[0], params[1] * 2]),
        lambda params: (params["w"], {"inner": params["n"]}["inner"]),
    ],
)
@pytest.mark.parametrize(
    "transform",
    [
        lambda fn, params: torch.func.jacfwd(fn)(params),
        lambda fn, params: torch.func.jacrev(fn)(params),
        lambda fn, params: torch.func.hessian(fn)(params),
        lambda fn, params: torch.func.hessian(lambda outer: fn(outer["s"]))(TensorDict({"s": params})),
        lambda fn, params: torch.func.jacrev(lambda x: fn(params * x))(torch.ones(())),
        lambda fn, params: torch.vmap(torch.func.jacfwd(lambda one: fn(torch.stack([one, one]))))(params),
        lambda fn, params: (lambda out, pull: pull(out))(*torch.func.vjp(fn, params)),
    ],
)
@FORWARD_MODE
def test_derivatives_equal_dense_stack(transform, fn, dim):
    members = [torch.stack([make_weights(i), make_weights(2 * i)]) for i in (1.0, 2.0, 3.0)]
    expected = list_leaves(transform(fn, torch.stack(members, dim)))
    found = list_leaves(transform(fn, LazyStackedTensorDict(*members, stack_dim=dim)))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "outer", [lambda stack: stack, lambda stack: TensorDict({"s": stack, "z": torch.ones(3)})]
)
@pytest.mark.parametrize("odd", [{"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3, 2)}])
def test_transform_uneven_members_equals_torch_but_vmap_raises(outer, odd):
    stack = outer(LazyStackedTensorDict(TensorDict({"a": torch.ones(3)}), TensorDict(odd)))
    grads = torch.func.grad(lambda td: sum((leaf**2).sum() for leaf in td._leaves()))(stack)
    assert all(
        torch.equal(grad, 2 * leaf) for grad, leaf in zip(grads._leaves(), stack._leaves(), strict=True)
    )
    doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, stack)
    assert [leaf.tolist() for leaf in doubled._leaves()] == [(leaf * 2).tolist() for leaf in stack._leaves()]
    # The leaves have three rows, which are not members, so vmap cannot split the stack.
    with pytest.raises(StructureError, match=r"torch\.vmap.* cannot take a dim from a lazy stack"):
        torch.vmap(lambda td: sum(leaf.sum() for leaf in td._leaves()))(stack)


@pytest.mark.parametrize("change", [lambda leaf: leaf, torch.clone, lambda leaf: leaf.flip(0)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.float16])
def test_tree_map_keeps_dtypes_of_members(dtype, dim, change):
    first, second = (
        TensorDict({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}, [3]),
        TensorDict({}, [3]),
    )
    # The second member has the other key order, and equally many leaves of each dtype if its dtypes match.
    second["b"] = torch.full((3,), 2**53 + 1)
    second["a"] = torch.full((3,), 2**53 + 1).to(dtype)
    stack = TensorDict({"s": LazyStackedTensorDict(first, second, stack_dim=dim)})
    mapped = torch.utils._pytree.tree_map(change, stack)
    assert mapped["s"].stack_dim == dim
    for found, leaf in zip(mapped._leaves(), stack._leaves(), strict=True):
        assert found.dtype == leaf.dtype and found.equal(change(leaf))


def test_vmap_members_with_other_key_order_keeps_dtypes():
    first = TensorDict({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)})
    second = TensorDict({"b": torch.ones(3, dtype=torch.int64), "a": torch.ones(3)})
    result = torch.vmap(lambda td: td + 1)(LazyStackedTensorDict(first, second))
    assert (result["a"].dtype, result["b"].dtype) == (torch.float32, torch.int64)


def test_tree_map_subclass_returns_subclass() -> None:
    class Own(LazyStackedTensorDict):
        pass

    for rows in ([{"a": 1.0}, {"a": 2.0}], [{"a": 1.0}, {"b": 2.0}]):
        own = Own(*map(TensorDict, rows))
        assert all(type(leaf) is Tensor for leaf in torch.utils._pytree.tree_leaves(own))
        doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, own)
        assert type(doubled) is Own
        assert [leaf.item() for leaf in doubled._leaves()] == [2, 4]
