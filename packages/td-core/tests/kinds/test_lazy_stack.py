"""Lazy stacks: members, hooks, locks, copies and transforms of torch.func."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from td_core import Encoded, LazyStackedTensorDict, TensorDict, decode, encode, lazy_stack
from td_core.errors import (
    FormatError,
    KeyMismatchError,
    KeyPathError,
    LockedError,
    StructureError,
)

#: torch 2.14 calls deprecated functions at the first use of forward-mode autograd.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def test_keys_missing_in_some_members_are_hidden(make_ragged_stack):
    lazy = make_ragged_stack()
    assert list(lazy.keys()) == ["a"] and "only0" not in lazy
    assert lazy.get("only0") is None
    with pytest.raises(KeyPathError, match="key 'only0' not found"):
        lazy["only0"]
    assert list(lazy[0].keys()) == ["a", "only0"]


def test_get_nestedtensor_unsupported_raises():
    mixed = LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": {"b": 1}}))
    with pytest.raises(StructureError, match="key 'a' is not a tensor in every member"):
        mixed.get_nestedtensor("a")
    rows = [TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 2)]
    with pytest.raises(StructureError, match="a nested tensor stacks along dim 0, this stack is along dim 1"):
        lazy_stack(rows, 1).get("a", as_nested_tensor=True)


def test_get_with_two_form_options_raises(make_ragged_stack):
    with pytest.raises(TypeError, match="exactly one of"):
        make_ragged_stack().get("a", as_list=True, as_nested_tensor=True)
    with pytest.raises(TypeError, match="only lazy stacks do"):
        TensorDict().get("a", as_list=True)


def test_lazy_stack_access_one_member_does_not_read_others(monkeypatch, make_lazy_stack, make_member):
    asked = []
    whole = TensorDict.batch_size
    counted = property(lambda td: asked.append(td) or whole.fget(td), whole.fset)
    lazy, row = make_lazy_stack(count=50), make_member(1)
    monkeypatch.setattr(TensorDict, "batch_size", counted)
    assert len(lazy) == 50
    assert all(one is mine for one, mine in zip(lazy, lazy.tensordicts, strict=True))
    assert lazy[-1] is lazy.tensordicts[-1]
    lazy[7] = row
    lazy.append(row)
    assert len(asked) < 2 * 50, "the first member alone, or all of them once"


@pytest.mark.parametrize("dims", [[0], [1], [0, 1]], ids=str)
def test_node_of_locked_stack_is_locked(dims, make_lazy_stack):
    lazy = make_lazy_stack(dims[0])
    if len(dims) == 2:
        lazy = lazy_stack([lazy, make_lazy_stack(dims[0])], dims[1])
    node = lazy.lock_()["n"]
    assert node.is_locked
    with pytest.raises(LockedError, match="part of a locked collection"):
        node.unlock_()
    assert node.is_locked
    with pytest.raises(LockedError, match="cannot add a member"):
        node.append(node.tensordicts[0])
    lazy.unlock_()
    assert not node.is_locked


def test_lock_stack_locks_members(make_lazy_stack):
    lazy = make_lazy_stack().lock_()
    with pytest.raises(LockedError, match="locked"):
        lazy.tensordicts[0]["z"] = torch.zeros(3)
    with pytest.raises(LockedError, match="part of a locked collection"):
        lazy.tensordicts[0].unlock_()
    lazy.unlock_()
    lazy.tensordicts[0]["z"] = torch.zeros(3)


def test_lazy_stack_hooks_apply_to_reads_and_writes():
    lazy = LazyStackedTensorDict(
        *[TensorDict({"a": torch.zeros(2)}) for _ in range(2)],
        hook_out=lambda value: value + 1,
        hook_in=lambda value: value * 10,
    )
    assert lazy["a"].tolist() == [[1, 1], [1, 1]]
    lazy["b"] = torch.ones(2, 3)
    assert lazy.tensordicts[0]["b"].tolist() == [10, 10, 10]


@pytest.mark.parametrize("wrap", [lambda stack: stack, lambda stack: TensorDict({"n": stack})])
@pytest.mark.parametrize("odd", [{"a": 1.0}, {"b": 1.0}])
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda td: td.clone(),
        lambda td: pickle.loads(pickle.dumps(td)),
        lambda td: pickle.loads(pickle.dumps(td, 2)),
        lambda td: decode(encode(td)),
        lambda td: torch.utils._pytree.tree_map(torch.clone, td),
    ],
)
def test_copy_keeps_hooks(copied, odd, wrap):
    stack = LazyStackedTensorDict(*map(TensorDict, [{"a": 1.0}, odd]), hook_out=torch.exp, hook_in=torch.log)
    again = copied(wrap(stack))
    again = again if wrap(stack) is stack else again["n"]
    assert again.hook_out is torch.exp and again.hook_in is torch.log


def test_pickle_unnamed_hook_raises_but_deepcopy_works():
    stack = LazyStackedTensorDict(TensorDict({"a": 1}), hook_out=lambda value: value + 1)
    assert copy.deepcopy(stack)["a"].tolist() == [2]
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(stack)


@pytest.mark.parametrize("values", [{"hook_in": 3}, {"_members": list}])
def test_decode_bad_hook_raises(values):
    encoded = encode(lazy_stack([TensorDict({"a": 1})]))
    encoded.nodes[0]["values"] = [[name, i] for i, name in enumerate(values)]
    with pytest.raises(FormatError, match=f"a lazy stack has no {next(iter(values))} that is"):
        decode(Encoded(encoded.nodes, encoded.leaves, list(values.values())))


def test_empty_stack_accepts_first_member():
    lazy = LazyStackedTensorDict()
    assert lazy.batch_size == torch.Size([0]) and list(lazy.keys()) == []
    lazy.append(TensorDict({"a": 1}))
    assert lazy["a"].tolist() == [1]


def test_empty_stack_keeps_device():
    lazy = LazyStackedTensorDict(batch_size=[0, 3], device="meta")
    for each in (lazy, lazy.clone(), pickle.loads(pickle.dumps(lazy)), lazy.contiguous(), lazy[:, 0]):
        assert each.device == torch.device("meta")
    assert lazy.to("cpu").device == torch.device("cpu") and LazyStackedTensorDict().device is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_get_nested_tensor_returns_requested_layout():
    stack = LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(2)}))
    assert stack.get("a", as_nested_tensor=True).layout is torch.jagged
    assert stack.get_nestedtensor("a").layout is torch.strided
    assert stack.get_nestedtensor("a", layout=torch.jagged).layout is torch.jagged


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


def test_jacobian_batch_size_is_prefix_of_every_shape():
    td = TensorDict({"n": {"b": torch.ones(2)}, "w": torch.ones(2, 3)}, [2])
    jacobian = torch.func.jacrev(lambda params: params * 2)(td)
    for entry in jacobian.values():
        assert entry.shape[: jacobian.ndim] == jacobian.shape
    assert jacobian[0].batch_size == jacobian.batch_size[1:]


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


@pytest.mark.parametrize(
    "read",
    [
        lambda td: td.state_dict(),
        lambda td: td.to_dict(),
        lambda td: td.to_tensordict(),
        lambda td: td.to_namedtuple(),
        lambda td: td.numpy(),
        lambda td: td.pack(),
        lambda td: TensorDict({"outer": td}).flatten_keys(),
        lambda td: torch.stack([td, td]).contiguous(),
        lambda td: TensorDict({"outer": td}, [2]).sum(0),
    ],
)
def test_read_stack_with_hidden_keys_raises(read):
    members = TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(KeyMismatchError, match="'b'"):
        read(LazyStackedTensorDict(*members))


@pytest.mark.parametrize("make", [TensorDict, TensorDict.from_dict])
def test_make_dense_with_hidden_keys_raises(make):
    with pytest.raises(KeyMismatchError, match=r"\['only0'\], which some lack, would be lost"):
        make(lazy_stack([TensorDict({"a": 1, "only0": 1}), TensorDict({"a": 2})]))


def test_densify_returns_class_of_members() -> None:
    class Own(TensorDict):
        pass

    rows = [Own({"a": torch.zeros(n)}) for n in (1, 2)]
    for stack in (LazyStackedTensorDict(*rows), LazyStackedTensorDict(LazyStackedTensorDict(rows[0]))):
        dense = stack.densify(torch.jagged)
        assert type(dense) is type(LazyStackedTensorDict(rows[0]).contiguous()) is Own
        assert dense.batch_size == stack.batch_size


def test_tree_map_subclass_returns_subclass() -> None:
    class Own(LazyStackedTensorDict):
        pass

    for rows in ([{"a": 1.0}, {"a": 2.0}], [{"a": 1.0}, {"b": 2.0}]):
        own = Own(*map(TensorDict, rows))
        assert all(type(leaf) is Tensor for leaf in torch.utils._pytree.tree_leaves(own))
        doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, own)
        assert type(doubled) is Own
        assert [leaf.item() for leaf in doubled._leaves()] == [2, 4]


def test_get_missing_key_returns_default() -> None:
    assert LazyStackedTensorDict(stack_dim=0).get("a", 5) == 5
    assert lazy_stack([TensorDict({"a": torch.zeros(2)})]).get_nestedtensor("b", 5) == 5


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_member_is_in_its_stack_and_equal_one_is_not(stack_dim):
    members = [TensorDict({"a": torch.zeros(2)}, batch_size=[2]) for _ in range(3)]
    stack = LazyStackedTensorDict(*members, stack_dim=stack_dim)
    assert [member in stack for member in members] == [True] * 3
    assert members[1].clone() not in stack
    assert "a" in stack and "b" not in stack and ("a", "b") not in stack
