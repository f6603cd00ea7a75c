"""Lazy stacks: members, hooks, locks and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import (
    KeyMismatchError,
    KeyPathError,
    LockedError,
    StructureError,
)
from td_core.spi import decode, encode


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
