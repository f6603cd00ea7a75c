"""Lazy stacks: members, stacked entries, uneven shapes and keys."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from td_core import Encoded, LazyStackedTensorDict, TensorDict, decode, encode, lazy_stack
from td_core.errors import (
    BatchSizeError,
    CollectionIndexError,
    FormatError,
    KeyMismatchError,
    KeyPathError,
    LockedError,
    StructureError,
)

#: torch 2.14 calls its own deprecated functions when it compiles decompositions on the first use of forward mode.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def member(i: int) -> TensorDict:
    return TensorDict(
        {"a": torch.full((3, 2), float(i)), "n": {"b": torch.full((3,), 10.0 + i)}}, batch_size=[3]
    )


def stack(dim: int = 0, count: int = 4) -> LazyStackedTensorDict:
    return lazy_stack([member(i) for i in range(count)], dim)


def ragged() -> LazyStackedTensorDict:
    return lazy_stack(
        [TensorDict({"a": torch.full((i + 1,), float(i)), f"only{i}": torch.zeros(1)}) for i in range(3)]
    )


def dense(lazy: LazyStackedTensorDict) -> TensorDict:
    return torch.stack(list(lazy.tensordicts), lazy.stack_dim)


def same(result, expected) -> None:
    assert result.batch_size == expected.batch_size
    assert list(result.keys(True, True)) == list(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(result[key], expected[key])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_getitem_entries_equal_dense_stack(dim):
    lazy = stack(dim)
    same(lazy, torch.stack([member(i) for i in range(4)], dim))
    assert lazy["n"].batch_size == lazy.batch_size


def test_keys_of_some_members_are_hidden():
    lazy = ragged()
    assert list(lazy.keys()) == ["a"] and "only0" not in lazy
    assert lazy.get("only0") is None
    with pytest.raises(KeyPathError, match="key 'only0' not found"):
        lazy["only0"]
    assert list(lazy[0].keys()) == ["a", "only0"]


def test_get_ragged_entry_raises_or_returns_requested_form():
    with pytest.raises(StructureError, match=r"\[\(1,\), \(2,\), \(3,\)\].*as_nested_tensor=True"):
        ragged()["a"]
    nested = ragged().get("a", as_nested_tensor=True)
    assert [part.tolist() for part in nested.unbind()] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    padded = ragged().get("a", as_padded_tensor=True, padding_value=-1.0)
    assert padded.tolist() == [[0, -1, -1], [1, 1, -1], [2, 2, 2]]
    left = ragged().get("a", as_padded_tensor=True, padding_side="left")
    assert left.tolist() == [[0, 0, 0], [0, 1, 1], [2, 2, 2]]
    assert [part.shape for part in ragged().get("a", as_list=True)] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("view", [TensorDict.values, TensorDict.items])
def test_iterate_until_ragged_entry_does_not_read_it(view):
    walk = iter(view(TensorDict({"x": torch.zeros(1), "s": ragged()}), True))
    next(walk), next(walk)
    with pytest.raises(StructureError, match="cannot stack key 'a'"):
        next(walk)


@pytest.mark.parametrize("keys", [None, [("s", "a"), ("s", "only0"), ("s", "only1"), ("s", "only2")]])
@pytest.mark.parametrize("source", [lambda: {"s": ragged()}, lambda: TensorDict({"s": ragged()}, [3])])
def test_update_dense_node_from_stack_becomes_stack(source, keys):
    td = TensorDict({"s": {"a": torch.zeros(3), "b": torch.arange(3)}}, [3])
    level = td["s"]
    assert td.update(source(), keys_to_update=keys) is td
    assert isinstance(td["s"], LazyStackedTensorDict) and list(level.keys()) == ["a", "b"]
    assert [list(member.keys()) for member in td["s"].tensordicts] == [
        ["a", "b", f"only{i}"] for i in range(3)
    ]
    assert [member["a"].shape for member in td["s"].tensordicts] == [(1,), (2,), (3,)]
    assert td["s", "b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", [{}, {"inplace": True}, {"keys_to_update": ["only1"]}], ids=str)
def test_update_dense_from_stack_with_hidden_keys_raises(how):
    source = lazy_stack([TensorDict({"b": torch.tensor(i), f"only{i}": torch.zeros(1)}) for i in range(3)])
    td = TensorDict({"b": torch.zeros(3)}, [3])
    with pytest.raises(KeyMismatchError, match="'only1'"):
        td.update(source, **how)
    assert td["b"].tolist() == [0, 0, 0]
    assert td.update(source, keys_to_update=["b"])["b"].tolist() == [0, 1, 2]


def test_update_inplace_from_stack_keeps_dense_node():
    td = TensorDict({"s": {"a": torch.zeros(2)}}, [2])
    leaf = td["s", "a"]
    td.update({"s": lazy_stack([TensorDict({"a": torch.tensor(i)}) for i in range(2)])}, inplace=True)
    assert td["s", "a"] is leaf and leaf.tolist() == [0, 1]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("path", [("a",), ("s", "a")])
def test_get_form_of_nested_stacks_equals_torch(path, dim):
    stack = LazyStackedTensorDict(ragged(), ragged(), stack_dim=dim)
    if len(path) == 2:
        stack = LazyStackedTensorDict(*[TensorDict({"s": ragged()}) for _ in range(2)])
    assert [[leaf.shape for leaf in part] for part in stack.get(path, as_list=True)] == [
        [(1,), (2,), (3,)]
    ] * 2
    padded = torch.stack(
        [ragged().get("a", as_padded_tensor=True, padding_side="left", padding_value=-1.0)] * 2, 0
    )
    padded = padded.transpose(0, stack.stack_dim)
    form = {"as_padded_tensor": True, "padding_side": "left", "padding_value": -1.0}
    torch.testing.assert_close(stack.get(path, **form), padded)
    with pytest.raises(StructureError, match=r"ragged in stacks inside the stack.*flatten\(\)"):
        stack.get(path, as_nested_tensor=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_get_form_of_dense_entry_returns_it():
    td = TensorDict(
        {"a": torch.ones(2, 3), "r": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, [2]
    )
    assert td.get("a", as_padded_tensor=True, padding_value=5) is td["a"]
    assert td.get("zz", 7, as_padded_tensor=True) == 7
    padded = td.get("r", as_padded_tensor=True, padding_value=5.0, padding_side="left")
    assert padded.tolist() == [[5, 1], [1, 1]]
    for collection in (td, TensorDict.lazy_stack([td, td])):
        assert collection.get("a", as_list=False, as_padded_tensor=False).shape == collection["a"].shape


def test_get_nestedtensor_unsupported_raises():
    mixed = LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": {"b": 1}}))
    with pytest.raises(StructureError, match="key 'a' is not a tensor in every member"):
        mixed.get_nestedtensor("a")
    rows = [TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 2)]
    with pytest.raises(StructureError, match="a nested tensor stacks along dim 0, this stack is along dim 1"):
        lazy_stack(rows, 1).get("a", as_nested_tensor=True)


def test_get_two_forms_raises():
    with pytest.raises(TypeError, match="exactly one of"):
        ragged().get("a", as_list=True, as_nested_tensor=True)
    with pytest.raises(TypeError, match="only lazy stacks do"):
        TensorDict().get("a", as_list=True)


INDICES = [
    0,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    (slice(None), 1),
    (1, 2),
    (0, slice(0, 2)),
    ...,
    (..., 0),
    None,
    (None, 1),
    (slice(None), None, 0),
    [0, 2],
    torch.tensor([3, 0, 3]),
    torch.tensor([[0, 1], [2, 3]]),
    torch.tensor([True, False, True, False]),
    (slice(None), torch.tensor([0, 2])),
    (torch.tensor([0, 1]), torch.tensor([1, 2])),
    (torch.tensor([0, 1]), slice(1)),
    range(2),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_getitem_equals_dense_stack(dim, index):
    lazy = lazy_stack([member(i)[:3] for i in range(3 if dim else 4)], dim)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        index = index[: lazy.batch_size[0]]
    elif isinstance(index, torch.Tensor):
        index = index % lazy.batch_size[0]
    same(lazy[index], dense(lazy)[index])


PAIR, MASK = torch.tensor([0, 2]), torch.tensor([True, False, True])
SCATTERED = [
    (PAIR, slice(None), PAIR),
    (PAIR, slice(None), slice(0, 2), PAIR),
    (slice(None), PAIR, slice(None), PAIR),
    (slice(None), PAIR, slice(None, None, 2), PAIR),
    (slice(None), PAIR, None, PAIR),
    (slice(None), PAIR, PAIR),
    (slice(None), slice(None), PAIR, slice(1)),
    (0, slice(None), PAIR),
    (0, PAIR, slice(None), PAIR),
    (PAIR, 1, slice(None), 0),
    (slice(None), MASK, slice(None), PAIR),
    (MASK, slice(None), slice(None), PAIR),
]


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("index", SCATTERED, ids=str)
def test_index_with_several_tensors_equals_torch(dim, index):
    leaf = torch.arange(3.0**5).view(3, 3, 3, 3, 3)
    lazy = lazy_stack([TensorDict({"a": part}, [3] * 3) for part in leaf.clone().unbind(dim)], dim)
    assert torch.equal(lazy[index]["a"], leaf[index])
    assert lazy[index].batch_size == leaf[index].shape[:-1]
    lazy[index] = lazy[index].neg()
    leaf[index] = leaf[index].neg()
    assert torch.equal(lazy["a"], leaf)


def test_index_along_stack_dim_shares_leaves():
    lazy = stack()
    assert lazy[2] is lazy.tensordicts[2]
    assert lazy[1:].tensordicts[0]["a"] is lazy.tensordicts[1]["a"]


@pytest.mark.parametrize("index", [4, -5, (0, 0, 0), (slice(None), 3)])
def test_getitem_bad_index_raises(index):
    with pytest.raises(CollectionIndexError):
        stack()[index]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "index", [0, slice(0, 2), (slice(None), 1), torch.tensor([2, 0]), (1, 1), ...], ids=str
)
def test_setitem_writes_members(dim, index):
    lazy = lazy_stack([member(i) for i in range(3)], dim)
    expected = dense(lazy)
    value = expected[index].apply(lambda leaf: leaf + 100)
    leaf = lazy.tensordicts[0]["a"]
    lazy[index] = value
    expected[index] = value
    same(lazy, expected)
    assert lazy.tensordicts[0]["a"] is leaf


@pytest.mark.parametrize("index", [lambda i: i, lambda i: (i, ...), lambda i: slice(i, i + 1), lambda i: [i]])
def test_setitem_new_key_creates_it_in_indexed_members(index):
    lazy = stack(count=3)
    for i in (2, 0, 1):
        assert "new" not in lazy and "new" not in lazy[i]
        lazy[index(i)] = lazy[index(i)].empty().set("new", torch.full(lazy[index(i)].batch_size, float(i)))
    assert lazy["new"].tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize(
    ("operation", "stack_dim"),
    [
        (lambda t: t.unsqueeze(0), 1),
        (lambda t: t.unsqueeze(-1), 0),
        (lambda t: t.permute(1, 0), 1),
        (lambda t: t.transpose(0, 1), 1),
        (lambda t: t.unsqueeze(0).squeeze(0), 0),
        (lambda t: t.expand(2, 4, 3), 1),
        (lambda t: t.exp(), 0),
        (lambda t: t + t, 0),
        (lambda t: t.clone(), 0),
        (lambda t: t.to(torch.float64), 0),
        (lambda t: t.select("a"), 0),
        (lambda t: t.flatten_keys("."), 0),
    ],
)
def test_shape_op_keeping_stack_dim_keeps_members(operation, stack_dim):
    lazy = stack()
    result = operation(lazy)
    assert isinstance(result, LazyStackedTensorDict) and result.stack_dim == stack_dim
    same(result, operation(dense(lazy)))


@pytest.mark.parametrize(
    "operation", [lambda t: t.reshape(-1), lambda t: t.flatten(0, 1), lambda t: t.contiguous()]
)
def test_shape_op_changing_stack_dim_returns_dense(operation):
    lazy = stack()
    same(operation(lazy), operation(dense(lazy)))


def test_contiguous_ragged_stack_raises():
    with pytest.raises(
        StructureError, match=r"key 'a' has shape \(1,\) in item 0 and \(2,\).*densify\(\) a lazy stack"
    ):
        lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))]).contiguous()


@pytest.mark.parametrize("ndim", [0, 1])
@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.reshape(1, -1),
        lambda t: t.unsqueeze(0),
        lambda t: t.expand(2, *t.batch_size),
        lambda t: t.repeat(*[2] * t.batch_dims),
        lambda t: t[None],
        lambda t: t.permute(*range(t.batch_dims)),
        lambda t: t.roll(1),
        lambda t: t.gather(0, torch.tensor([1, 0])) if t.batch_dims else t,
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_nested_stack_dim_after_parent_batch_equals_dense(dim, operation, ndim):
    lazy = stack(dim)
    batch = lazy.batch_size[:ndim]
    result = operation(TensorDict({"inner": lazy}, batch_size=batch))["inner"]
    same(result, operation(TensorDict({"inner": dense(lazy)}, batch_size=batch))["inner"])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stack_lazy_stacks_returns_lazy_stack(dim):
    lazy = stack()
    result = torch.stack([lazy, lazy], dim)
    assert isinstance(result, LazyStackedTensorDict)
    same(result, torch.stack([dense(lazy)] * 2, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_cat_lazy_stacks_returns_lazy_stack(dim):
    lazy = stack()
    result = torch.cat([lazy, lazy], dim)
    assert isinstance(result, LazyStackedTensorDict)
    same(result, torch.cat([dense(lazy)] * 2, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_unbind_and_split_equal_dense_stack(dim):
    lazy = stack()
    for part, expected in zip(lazy.unbind(dim), dense(lazy).unbind(dim), strict=True):
        same(part, expected)
    for part, expected in zip(lazy.split(2, dim), dense(lazy).split(2, dim), strict=True):
        same(part, expected)


def test_set_entry_writes_part_to_each_member():
    lazy = stack(1)
    value = torch.arange(12.0).view(3, 4)
    lazy["new"] = value
    lazy.set_("a", torch.ones(3, 4, 2))
    assert torch.equal(lazy.tensordicts[2]["new"], value[:, 2])
    assert all((item["a"] == 1).all() for item in lazy.tensordicts)
    del lazy["new"]
    assert "new" not in lazy.tensordicts[0]


def test_extend_bad_member_adds_nothing():
    lazy = LazyStackedTensorDict()
    with pytest.raises(BatchSizeError, match=r"the members have batch size \[\], the new one has \[2\]"):
        lazy.extend([TensorDict(), TensorDict(batch_size=[2])])
    assert lazy.tensordicts == []


def test_append_insert_and_extend_add_members():
    lazy = stack(count=1)
    lazy.append(member(7))
    lazy.insert(0, member(8))
    lazy.extend([member(9)])
    assert lazy["a"][:, 0, 0].tolist() == [8, 0, 7, 9]
    with pytest.raises(BatchSizeError, match=r"the members have batch size \[3\], the new one has \[\]"):
        lazy.append(TensorDict())
    with pytest.raises(TypeError, match="the members of a lazy stack are collections; got Tensor"):
        lazy.append(torch.zeros(3))
    with pytest.raises(LockedError, match="add a member"):
        lazy.lock_().append(member(0))


def test_append_locked_member_adds_but_locked_stack_raises():
    lazy = stack()
    lazy.tensordicts[0].lock_()
    lazy.append(member(7))
    assert len(lazy) == 5
    levels = lazy_stack([TensorDict({"n": {"x": torch.zeros(2)}}) for _ in range(2)]).lock_()["n"]
    with pytest.raises(LockedError, match="add a member"):
        levels.append(TensorDict({"x": torch.zeros(2)}))


def test_access_one_member_does_not_read_others(monkeypatch):
    asked = []
    whole = TensorDict.batch_size
    counted = property(lambda td: asked.append(td) or whole.fget(td), whole.fset)
    lazy, row = stack(count=50), member(1)
    monkeypatch.setattr(TensorDict, "batch_size", counted)
    assert len(lazy) == 50
    assert all(one is mine for one, mine in zip(lazy, lazy.tensordicts, strict=True))
    assert lazy[-1] is lazy.tensordicts[-1]
    lazy[7] = row
    lazy.append(row)
    assert len(asked) < 2 * 50, "the first member alone, or all of them once"


@pytest.mark.parametrize(
    "lazy", [stack(), stack(1), lazy_stack([stack(), stack()], 1)], ids=["0", "1", "both"]
)
def test_node_of_locked_stack_is_locked(lazy):
    level = lazy.lock_()["n"]
    assert level.is_locked
    with pytest.raises(LockedError, match="part of a locked collection"):
        level.unlock_()
    assert level.is_locked
    with pytest.raises(LockedError, match="cannot add a member"):
        level.append(level.tensordicts[0])
    lazy.unlock_()
    assert not level.is_locked


@pytest.mark.parametrize("position", [4, -5])
@pytest.mark.parametrize("form", [torch.tensor, lambda i: torch.tensor([i]), lambda i: [0, i]])
def test_index_out_of_bounds_raises_with_position(position, form):
    message = rf"index {position} is out of bounds for batch dim 0 of size 4"
    with pytest.raises(CollectionIndexError, match=message):
        stack()[form(position)]


def test_empty_other_batch_size_is_stack_if_members_match():
    assert isinstance(stack().empty(batch_size=[4]), LazyStackedTensorDict)
    assert isinstance(stack().empty(recurse=True, batch_size=[4])["n"], LazyStackedTensorDict)
    assert isinstance(stack().empty(batch_size=[5]), TensorDict)


def test_lock_stack_locks_members():
    lazy = stack().lock_()
    with pytest.raises(LockedError, match="locked"):
        lazy.tensordicts[0]["z"] = torch.zeros(3)
    with pytest.raises(LockedError, match="part of a locked collection"):
        lazy.tensordicts[0].unlock_()
    lazy.unlock_()
    lazy.tensordicts[0]["z"] = torch.zeros(3)


def test_batch_size_uneven_members_is_minus_one():
    lazy = lazy_stack([TensorDict({"a": torch.zeros(n, 2)}, [n]) for n in (1, 2)])
    assert lazy.batch_size == torch.Size([2, -1])
    assert lazy[1].batch_size == torch.Size([2])
    assert lazy[:, 0]["a"].shape == (2, 2)
    with pytest.raises(BatchSizeError, match="item 0 has batch size"):
        LazyStackedTensorDict(*lazy.tensordicts, strict_shape=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda stack: stack.create_nested(("n", "x")),
        lambda stack: stack.set("n", {"x": {}}),
        lambda stack: stack.update({"n": {"x": {}}}),
    ],
)
def test_set_nested_uses_batch_size_of_each_member(write):
    stack = LazyStackedTensorDict(TensorDict(batch_size=[2]), TensorDict(batch_size=[3]))
    write(stack)
    for item, size in zip(stack.tensordicts, (2, 3), strict=True):
        assert item["n"].batch_size == item["n", "x"].batch_size == (size,)


def test_names_include_stack_dim_name():
    lazy = LazyStackedTensorDict(
        *[TensorDict({"a": torch.zeros(3)}, [3], names=["time"]) for _ in range(2)], stack_dim_name="env"
    )
    assert lazy.names == pickle.loads(pickle.dumps(lazy)).names == ["env", "time"]
    assert lazy.transpose(0, 1).names == ["time", "env"]
    assert lazy[0].names == ["time"]
    lazy.names = ["x", "y"]
    assert lazy.tensordicts[0].names == ["y"]


def test_hooks_apply_to_reads_and_writes():
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


@pytest.mark.parametrize(
    "write",
    [
        lambda td, value: td.set("a", value["a"]),
        lambda td, value: td.set_("a", value["a"]),
        lambda td, value: td.update(value),
        lambda td, value: td.update(value, inplace=True),
        lambda td, value: td.update({"a": value["a"]}),
        lambda td, value: td.update_(value),
        lambda td, value: td.update_({"a": value["a"]}),
        lambda td, value: td.update_(value.to_lazystack()),
        lambda td, value: td.copy_(value),
        lambda td, value: TensorDict({"n": td}, [2]).update_({"n": value}),
    ],
)
def test_write_all_entries_applies_hook_in(write):
    lazy = LazyStackedTensorDict(
        *[TensorDict({"a": torch.zeros(2)}) for _ in range(2)], hook_in=lambda value: value * 10
    )
    write(lazy, TensorDict({"a": torch.ones(2, 2)}, [2]))
    assert [member["a"].tolist() for member in lazy.tensordicts] == [[10, 10], [10, 10]]


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


@given(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_repeated_indexing_equals_dense_stack(dim, picks):
    lazy = lazy_stack([TensorDict({"a": torch.randn(4, 4)}, [4, 4]) for _ in range(4)], dim)
    expected = dense(lazy)
    for pick in picks:
        lazy, expected = lazy[pick], expected[pick]
    same(lazy, expected)


def test_view_uneven_members_rearranges_elements():
    lazy = lazy_stack([TensorDict({"a": torch.full((2, n), float(n))}, [2]) for n in (2, 3)])
    result = lazy.view(4)
    assert result.batch_size == torch.Size([4])
    assert [part.tolist() for part in result.get("a", as_list=True)] == [[2, 2], [2, 2], [3, 3, 3], [3, 3, 3]]
    assert lazy[torch.tensor([[0, 1], [1, 0]])].batch_size == torch.Size([2, 2, 2])


def test_empty_index_keeps_other_batch_dims():
    assert stack()[0:0].batch_size == torch.Size([0, 3])


@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack.set("new", torch.ones(2, 3)),
        lambda stack: stack.set(("n", "new"), torch.ones(2, 3)),
        lambda stack: stack.update({"new": torch.ones(2, 3)}),
        lambda stack: stack.update({"a": torch.ones(2, 3)}),
        lambda stack: stack.__setitem__(slice(None), {"new": torch.ones(2, 3)}),
        lambda stack: stack.del_("a"),
        lambda stack: stack.pop("a"),
        lambda stack: stack.popitem(),
        lambda stack: stack.clear(),
        lambda stack: stack.rename_key_("a", "z"),
        lambda stack: stack.select("n", inplace=True),
        lambda stack: stack.exclude("a", inplace=True),
        lambda stack: stack.flatten_keys(inplace=True),
        lambda stack: stack.split_keys(["a"], inplace=True),
        lambda stack: stack.separates("a"),
    ],
)
def test_change_stack_with_locked_member_raises(change):
    members = [TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3]) for _ in range(2)]
    members[1].lock_()
    leaf = members[0]["a"]
    with pytest.raises(LockedError, match="the TensorDict is locked"):
        change(LazyStackedTensorDict(*members))
    for member in members:
        assert list(member.keys(True)) == ["a", "n", ("n", "b")]
    assert members[0]["a"] is leaf


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_get_nested_tensor_returns_requested_layout():
    stack = LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(2)}))
    assert stack.get("a", as_nested_tensor=True).layout is torch.jagged
    assert stack.get_nestedtensor("a").layout is torch.strided
    assert stack.get_nestedtensor("a", layout=torch.jagged).layout is torch.jagged


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.exclude(("s", "a")).filter_empty_(),
        lambda td: (td.separates(("s", "a")), td)[1],
        lambda td: td.split_keys([("s", "a")], inplace=True)[1],
        lambda td: td.split_keys([("s", "a")])[1],
    ],
)
def test_change_keeps_hidden_keys_of_nested_stack(change):
    hidden = LazyStackedTensorDict(TensorDict({"a": 0, "b": 1}), TensorDict({"a": 0}))
    assert change(TensorDict({"s": hidden}))["s"][0]["b"] == 1


def test_set_batch_size_without_stack_dim_raises():
    inner = LazyStackedTensorDict(TensorDict({"a": 0}), TensorDict({"a": 0}))
    stack = LazyStackedTensorDict(inner, TensorDict({"a": torch.zeros(2)}, [2]))
    for size in ([], [2]):
        with pytest.raises(
            BatchSizeError, match=r"does not fit a stack of 2 along dim 0: the stack dim stays"
        ):
            stack.batch_size = size
    assert stack.batch_size == (2, 2)


def test_set_parent_batch_size_mismatching_stack_dim_raises():
    td = TensorDict({"n": {"s": LazyStackedTensorDict(TensorDict({"a": 0}), TensorDict({"a": 0}))}})
    with pytest.raises(
        BatchSizeError, match=r"\[3\] does not fit key \('n', 's'\), a lazy stack of 2 along dim 0"
    ):
        td.batch_size = [3]
    td.batch_size = [2]
    assert td["n"].batch_size == (2,)


def test_set_batch_size_accepts_int():
    stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    stack.batch_size = 2
    assert stack.batch_size == (2,)


def weights(first=0.0):
    return TensorDict({"w": torch.arange(3.0) + first, "n": {"b": torch.arange(2.0) - 3 * first}})


def loss(params):
    return (params["w"] ** 3).sum() * params["n", "b"].sum()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [
        lambda params: torch.func.grad(loss)(params),
        lambda params: torch.func.grad(lambda outer: loss(outer["l"]))(TensorDict({"l": params}))["l"],
        lambda params: torch.func.grad(lambda p: torch.vmap(loss)(p).sum())(params),
        lambda params: torch.vmap(torch.func.grad(loss))(params),
        lambda params: torch.vmap(lambda x: torch.func.grad(lambda p: x * loss(p))(params))(torch.arange(2)),
        lambda params: torch.func.jacrev(loss)(params),
        lambda params: torch.func.jvp(loss, (params,), (params,))[1],
        lambda params: torch.func.vjp(loss, params)[1](torch.tensor(2.0))[0],
    ],
)
@FORWARD_MODE
def test_func_transforms_equal_dense_stack(transform):
    stack = LazyStackedTensorDict(weights(1.0), weights(2.0))
    expected, found = transform(stack.to_tensordict()), transform(stack)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected) and found.any()
        return
    assert found.batch_size == expected.batch_size
    for key, leaf in expected.items(True, True):
        assert torch.equal(found[key], leaf) and leaf.any()


def plain(result):
    if isinstance(result, tuple):
        return [leaf for part in result for leaf in plain(part)]
    return [result] if isinstance(result, torch.Tensor) else list(result.values(True, True))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "fn",
    [
        loss,
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
    members = [torch.stack([weights(i), weights(2 * i)]) for i in (1.0, 2.0, 3.0)]
    expected = plain(transform(fn, torch.stack(members, dim)))
    found = plain(transform(fn, LazyStackedTensorDict(*members, stack_dim=dim)))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_jacobian_batch_size_fits_every_entry():
    td = TensorDict({"n": {"b": torch.ones(2)}, "w": torch.ones(2, 3)}, [2])
    jacobian = torch.func.jacrev(lambda params: params * 2)(td)
    for entry in jacobian.values():
        assert entry.shape[: jacobian.ndim] == jacobian.shape
    assert jacobian[0].batch_size == jacobian.batch_size[1:]


@pytest.mark.parametrize(
    "outer", [lambda stack: stack, lambda stack: TensorDict({"s": stack, "z": torch.ones(3)})]
)
@pytest.mark.parametrize("odd", [{"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3, 2)}])
def test_transforms_of_uneven_members_work_or_raise(outer, odd):
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


def test_vmap_members_in_any_key_order():
    first = TensorDict({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)})
    second = TensorDict({"b": torch.ones(3, dtype=torch.int64), "a": torch.ones(3)})
    result = torch.vmap(lambda td: td + 1)(LazyStackedTensorDict(first, second))
    assert (result["a"].dtype, result["b"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.stack([x, x], 0),
        lambda x: torch.stack([x, x], 2),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x, x]),
        lambda x: x.unflatten(1, (3, 1)),
        lambda x: torch.utils._pytree.tree_map(torch.neg, x),
    ],
)
def test_empty_stack_shape_ops_equal_torch(operation):
    empty = LazyStackedTensorDict(batch_size=[0, 3], names=["a", None])
    assert empty.names == ["a", None]
    assert operation(empty).batch_size == operation(torch.zeros(0, 3)).shape


def test_empty_stack_set_batch_size():
    empty = LazyStackedTensorDict(stack_dim=0)
    empty.batch_size = [0, 3]
    assert empty.batch_size == (0, 3)
    for size in ([], [2, 3]):
        with pytest.raises(BatchSizeError, match="does not fit a stack of 0 along dim 0"):
            empty.batch_size = size
    assert empty.batch_size == (0, 3)


@pytest.mark.parametrize("inplace", [True, False])
def test_select_missing_keys_inplace_equals_out_of_place(inplace):
    def members():
        return LazyStackedTensorDict(TensorDict({"n": {"a": 0, "b": 1}, "c": 2}), TensorDict({"n": {"a": 0}}))

    for change, expected in (
        (lambda td: td.select(("n", "a"), inplace=inplace), [["n", ("n", "a")]] * 2),
        (lambda td: td.exclude("c", ("n", "b"), inplace=inplace), [["n", ("n", "a")]] * 2),
        (lambda td: td.flatten_keys(".", inplace=inplace), [["c", "n.a", "n.b"], ["n.a"]]),
        (
            lambda td: td.flatten_keys(".").unflatten_keys(".", inplace=inplace),
            [["c", "n", ("n", "a"), ("n", "b")], ["n", ("n", "a")]],
        ),
    ):
        stack = members()
        result = change(stack)
        assert [sorted(member.keys(True), key=str) for member in result.tensordicts] == [
            sorted(keys, key=str) for keys in expected
        ]


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


@pytest.mark.parametrize("index", [0, (0, ...), slice(0, 1), [0, 1], ...])
def test_update_at_writes_hidden_keys(index):
    stack = LazyStackedTensorDict(
        TensorDict({"a": torch.zeros(2, 3), "only": torch.zeros(2)}, [2]),
        TensorDict({"a": torch.zeros(2, 4)}, [2]),
    )
    stack.update_at_(stack[index].apply(lambda leaf: leaf + 1), index)
    assert stack[0]["only"].all() and stack[0]["a"].all()
    with pytest.raises(KeyPathError, match="key 'only' not found"):
        stack.update_at_(stack[0], 1)


def test_rearranged_elements_keep_hidden_keys():
    inner = LazyStackedTensorDict(TensorDict({"a": 0, "b": 1}), TensorDict({"a": 0}))
    stack = LazyStackedTensorDict(inner, TensorDict({"a": torch.zeros(2)}, [2]))
    for flat in (
        stack.reshape(4),
        stack.permute(1, 0).reshape(4),
        stack.gather(0, torch.zeros(1, 2, dtype=int))[0],
    ):
        assert sum("b" in flat[i] for i in range(len(flat))) == 1


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_nested_entry_has_dim_names_of_stack(dim):
    members = [TensorDict({"n": {"a": torch.zeros(2, 3)}}, [2, 3], names=["x", "y"]) for _ in range(4)]
    lazy = lazy_stack(members, dim, stack_dim_name="s")
    expected = ["x", "y"]
    expected.insert(dim, "s")
    assert lazy.names == lazy["n"].names == expected


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("positions", [torch.tensor([1, 0]), torch.tensor([[1, 0], [1, 1]])])
def test_index_with_vmapped_positions_equals_torch(dim: int, positions: torch.Tensor) -> None:
    stack = LazyStackedTensorDict(*[TensorDict({"a": torch.arange(2) + i}, [2]) for i in (0, 5)])
    found = torch.vmap(lambda at: stack[(slice(None),) * dim + (at,)]["a"])(positions)
    assert torch.equal(found, torch.stack([stack["a"][(slice(None),) * dim + (at,)] for at in positions]))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda stack: stack.del_("a"), ["n", ("n", "b")]),
        (lambda stack: stack.del_(("n", "b")), ["a", "n"]),
        (lambda stack: stack.pop("a"), ["n", ("n", "b")]),
        (lambda stack: stack.popitem(), ["a"]),
        (lambda stack: stack.clear(), []),
        (lambda stack: stack.rename_key_("a", "z"), ["n", ("n", "b"), "z"]),
        (lambda stack: stack.rename_key_(("n", "b"), ("n", "z")), ["a", "n", ("n", "z")]),
        (lambda stack: stack.exclude("a", inplace=True), ["n", ("n", "b")]),
    ],
)
@pytest.mark.parametrize("nest", [False, True])
def test_change_stack_with_repeated_member_applies_once(change, keys, nest):
    one = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    stack = lazy_stack([one, one])
    if nest:
        stack = lazy_stack([stack, lazy_stack([one, one.clone()])])
    change(stack)
    assert list(stack.keys(True)) == keys == list(one.keys(True))


@pytest.mark.parametrize("make", [TensorDict, TensorDict.from_dict])
def test_make_dense_with_hidden_keys_raises(make):
    with pytest.raises(KeyMismatchError, match=r"\['only0'\], which some lack, would be lost"):
        make(lazy_stack([TensorDict({"a": 1, "only0": 1}), TensorDict({"a": 2})]))


def state_of(node):
    """Return the entries of every node and their values, to detect changes."""
    if isinstance(node, torch.Tensor):
        return id(node), node.tolist()
    stacked = node._members_and_dim()
    return (
        [state_of(member) for member in stacked[0]] if stacked else {k: state_of(v) for k, v in node.items()}
    )


def lock_level(last):
    last["n"].lock_()
    return last


def lock_member_of_level(last):
    last["n"] = lazy_stack([TensorDict({"b": torch.zeros(())}, lock=i == 2) for i in range(3)])
    return last


def lock_member(last):
    parts = [last[i].clone() for i in range(3)]
    parts[2].lock_()
    return lazy_stack(parts)


def leaf_for_level(last):
    return last.set("n", torch.zeros(3))


@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack.set(("n", "z"), torch.ones(3, 3)),
        lambda stack: stack.create_nested(("n", "z")),
        lambda stack: stack.update({"z": torch.ones(3, 3), "n": {"z": torch.ones(3, 3)}}),
        lambda stack: stack.update_({"a": torch.ones(3, 3, 2), "n": {"b": torch.ones(3, 3)}}),
        lambda stack: stack.del_(("n", "b")),
        lambda stack: stack.pop(("n", "b")),
        lambda stack: stack.rename_key_(("n", "b"), ("n", "z")),
        lambda stack: stack.rename_key_(("n", "b"), "z"),
        lambda stack: stack.rename_key_("a", ("n", "z")),
        lambda stack: stack.select("n", inplace=True),
        lambda stack: stack.exclude("a", ("n", "b"), inplace=True),
        lambda stack: stack.split_keys(["a", ("n", "b")], inplace=True),
        lambda stack: stack.unflatten_keys("a", inplace=True),
        lambda stack: stack[:].set_at_(("n", "b"), torch.ones(3), (slice(None), 0)),
    ],
)
def test_failing_change_of_later_member_changes_nothing(change):
    change(stack(count=3))
    refused = 0
    for spoil in (lock_level, lock_member_of_level, lock_member, leaf_for_level):
        members = [member(0), member(1), spoil(member(2))]
        before = [state_of(each) for each in members]
        try:
            change(LazyStackedTensorDict(*members))
        except (KeyError, RuntimeError):
            refused += 1
            assert [state_of(each) for each in members] == before
    assert refused


def test_set_inplace_jagged_member_rejects_dense_value():
    leaves = [
        torch.zeros(2),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(1)], layout=torch.jagged),
    ]
    stack = LazyStackedTensorDict(*[TensorDict({"a": leaf}, [2]) for leaf in leaves])
    with pytest.raises(
        StructureError, match="it is a nested tensor of the layout torch.jagged, the value a tensor"
    ):
        stack.set_("a", torch.ones(2, 2))
    assert not leaves[0].any()


@pytest.mark.parametrize(
    ("size", "dim", "expected"),
    [
        (None, 0, [0]), ([], 0, [0]), ([3], 0, [0, 3]), ([3], 1, [3, 0]), ([3], -1, [3, 0]), ([3, 4], 1, [3, 0, 4]),
        ([0, 3], 0, [0, 3]), ([3, 0], -1, [3, 0]), ([3, 0, 4], 1, [3, 0, 4]),
    ],
)  # fmt: skip
def test_empty_stack_has_size_zero_at_stack_dim(size, dim, expected):
    stack = LazyStackedTensorDict(batch_size=size, stack_dim=dim)
    assert list(stack.batch_size) == expected and stack.batch_size[stack.stack_dim] == 0
    member = [n for at, n in enumerate(expected) if at != stack.stack_dim]
    stack.append(TensorDict(batch_size=member))
    assert stack.batch_size[stack.stack_dim] == 1


@pytest.mark.parametrize(
    "call", [lambda td: td.reshape(-1), lambda td: td.flatten(), lambda td: td.flatten(0, -1)]
)
def test_flatten_ragged_batch_keeps_element_order(call):
    members = [TensorDict({"a": torch.arange(n * 2).view(n, 2) + 10 * n}, [n, 2]) for n in (1, 3)]
    ragged = LazyStackedTensorDict(*members)
    rows = call(ragged)
    assert rows.batch_size == (8,)
    assert rows["a"].tolist() == torch.cat([member["a"].flatten() for member in members]).tolist()
    rows[0]["a"].zero_()
    assert members[0]["a"][0, 0] == 0
    stacks = LazyStackedTensorDict(ragged, ragged)
    assert call(stacks)["a"].tolist() == rows["a"].tolist() * 2


ORDER = torch.tensor([2, 0, 1])
WRITES_OF_ITSELF = {
    "td[:]": lambda x, y: x.__setitem__(slice(None), y),
    "td[positions]": lambda x, y: x.__setitem__(torch.arange(3), y),
    "td[mask]": lambda x, y: x.__setitem__(torch.ones(3, dtype=torch.bool), y),
    "update_": lambda x, y: x.copy_(y),
    "update": lambda x, y: x.copy_(y) if isinstance(x, Tensor) else x.update(y, inplace=True),
    "add_": lambda x, y: x.add_(y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
}
HOLDERS = {
    "itself": lambda members: lazy_stack(members),
    "below": lambda members: TensorDict({"n": lazy_stack(members)}, [3])["n"],
    "of views": lambda members: lazy_stack([lazy_stack(members)], 1)[:, 0],
}


@pytest.mark.parametrize("write", WRITES_OF_ITSELF.values(), ids=WRITES_OF_ITSELF)
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("change", [lambda x: x[ORDER], lambda x: x.flip(0), lambda x: x.roll(1, 0)])
def test_write_stack_from_own_members_equals_torch(write, holder, change):
    wanted = torch.arange(6.0).view(3, 2)
    stack = holder([TensorDict({"a": row.clone(), "m": {"b": row.clone()}}) for row in wanted])
    write(wanted, change(wanted))
    write(stack, change(stack))
    assert torch.equal(stack["a"], wanted) and torch.equal(stack["m", "b"], wanted)


def test_write_collection_from_own_nested_members():
    td = TensorDict({"n": lazy_stack([TensorDict({"a": float(i)}) for i in range(3)])}, [3])
    assert td.add_(td[ORDER])["n", "a"].tolist() == [2, 1, 3]
    td[:] = td.flip(0)
    assert td["n", "a"].tolist() == [3, 1, 2]


def test_setitem_shifted_members_equals_torch():
    stack = lazy_stack([TensorDict({"a": i}) for i in range(4)])
    stack[1:] = stack[:-1]
    assert stack["a"].tolist() == [0, 0, 1, 2]
    stack[:-1] = stack[1:]
    assert stack["a"].tolist() == [0, 1, 2, 2]


def _columns() -> LazyStackedTensorDict:
    """Return rows [0, 1], [2, 3], [4, 5] under "a", whose columns are the members."""
    columns = [TensorDict({"a": torch.tensor([i, i + 2, i + 4])}, [3]) for i in range(2)]
    return LazyStackedTensorDict(*columns, stack_dim=1)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("index", "source"), [(0, 0), (1, 1), (slice(0, 2), slice(1, 3)), (slice(1, 3), slice(1, 3))]
)
def test_setitem_own_members_reordered_equals_torch(index: Any, source: Any, wrapped: bool) -> None:
    stack, wanted = _columns(), _columns()["a"].clone()
    wanted[index] = wanted[source].flip(-1)
    flipped = stack[source].flip(-1)
    if wrapped:
        TensorDict({"n": stack}, [3, 2])[index] = TensorDict({"n": flipped}, flipped.batch_size)
    else:
        stack[index] = flipped
    assert stack["a"].tolist() == wanted.tolist()


def test_update_inplace_own_members_reads_before_writing() -> None:
    stack = _columns()
    stack[0:2].update_(stack[1:3].flip(1))
    assert stack["a"].tolist() == [[3, 2], [5, 4], [4, 5]]


def test_setitem_nested_stacks_from_own_members() -> None:
    stack = _columns()
    outer = LazyStackedTensorDict(*[TensorDict({"n": m}, [3]) for m in stack.tensordicts], stack_dim=1)
    outer[:] = TensorDict({"n": outer["n"].flip(1)}, [3, 2])
    assert outer["n", "a"].tolist() == [[1, 0], [3, 2], [5, 4]]


@pytest.mark.parametrize("nested", [False, True])
def test_setitem_mapping_of_own_members(nested: bool) -> None:
    stack = _columns()
    if nested:
        outer = LazyStackedTensorDict(*[TensorDict({"n": m}, [3]) for m in stack.tensordicts], stack_dim=1)
        outer[1:] = {"n": outer["n"][1:].flip(1)}
    else:
        TensorDict({"n": stack}, [3, 2])[1:] = {"n": stack[1:].flip(1)}
    assert stack["a"].tolist() == [[0, 1], [3, 2], [5, 4]]


def test_setitem_members_that_view_the_value() -> None:
    td = TensorDict({"a": torch.arange(4), "n": {"b": torch.arange(4)}}, [4])
    stack = td.to_lazystack()
    stack[1:] = td[:-1]
    assert td["a"].tolist() == td["n", "b"].tolist() == [0, 0, 1, 2]


def test_setitem_subclass_leaves_reads_before_writing() -> None:
    class Leaf(torch.Tensor):
        pass

    stack = _columns()
    for member in stack.tensordicts:
        member["a"] = member["a"].as_subclass(Leaf)
    stack[1:] = stack[1:].flip(1)
    assert stack["a"].tolist() == [[0, 1], [3, 2], [5, 4]]


def test_apply_inplace_results_are_own_members() -> None:
    stack = _columns()
    stack[0:2].apply_(lambda leaf, other: other, stack[1:3].flip(1))
    assert stack["a"].tolist() == [[3, 2], [5, 4], [4, 5]]


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
