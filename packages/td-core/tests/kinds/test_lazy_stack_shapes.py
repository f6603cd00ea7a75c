"""Lazy stacks: indices, shape operations and batch sizes, compared with the dense stack."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import (
    BatchSizeError,
    CollectionIndexError,
    StructureError,
)


def stack_members(lazy: LazyStackedTensorDict) -> TensorDict:
    return torch.stack(list(lazy.tensordicts), lazy.stack_dim)


def assert_same_entries(result, expected) -> None:
    assert result.batch_size == expected.batch_size
    assert list(result.keys(True, True)) == list(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(result[key], expected[key])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_getitem_entries_equal_dense_stack(dim, make_lazy_stack, make_member):
    lazy = make_lazy_stack(dim)
    assert_same_entries(lazy, torch.stack([make_member(i) for i in range(4)], dim))
    assert lazy["n"].batch_size == lazy.batch_size


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
def test_getitem_equals_dense_stack(dim, index, make_member):
    lazy = lazy_stack([make_member(i)[:3] for i in range(3 if dim else 4)], dim)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        index = index[: lazy.batch_size[0]]
    elif isinstance(index, torch.Tensor):
        index = index % lazy.batch_size[0]
    assert_same_entries(lazy[index], stack_members(lazy)[index])


POSITIONS, MASK = torch.tensor([0, 2]), torch.tensor([True, False, True])

SCATTERED = [
    (POSITIONS, slice(None), POSITIONS),
    (POSITIONS, slice(None), slice(0, 2), POSITIONS),
    (slice(None), POSITIONS, slice(None), POSITIONS),
    (slice(None), POSITIONS, slice(None, None, 2), POSITIONS),
    (slice(None), POSITIONS, None, POSITIONS),
    (slice(None), POSITIONS, POSITIONS),
    (slice(None), slice(None), POSITIONS, slice(1)),
    (0, slice(None), POSITIONS),
    (0, POSITIONS, slice(None), POSITIONS),
    (POSITIONS, 1, slice(None), 0),
    (slice(None), MASK, slice(None), POSITIONS),
    (MASK, slice(None), slice(None), POSITIONS),
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


def test_index_along_stack_dim_shares_leaves(make_lazy_stack):
    lazy = make_lazy_stack()
    assert lazy[2] is lazy.tensordicts[2]
    assert lazy[1:].tensordicts[0]["a"] is lazy.tensordicts[1]["a"]


@pytest.mark.parametrize("index", [4, -5, (0, 0, 0), (slice(None), 3)])
def test_getitem_bad_index_raises(index, make_lazy_stack):
    with pytest.raises(CollectionIndexError):
        make_lazy_stack()[index]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "index", [0, slice(0, 2), (slice(None), 1), torch.tensor([2, 0]), (1, 1), ...], ids=str
)
def test_setitem_writes_members(dim, index, make_member):
    lazy = lazy_stack([make_member(i) for i in range(3)], dim)
    expected = stack_members(lazy)
    value = expected[index].apply(lambda leaf: leaf + 100)
    leaf = lazy.tensordicts[0]["a"]
    lazy[index] = value
    expected[index] = value
    assert_same_entries(lazy, expected)
    assert lazy.tensordicts[0]["a"] is leaf


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
def test_shape_op_keeping_stack_dim_keeps_members(operation, stack_dim, make_lazy_stack):
    lazy = make_lazy_stack()
    result = operation(lazy)
    assert isinstance(result, LazyStackedTensorDict) and result.stack_dim == stack_dim
    assert_same_entries(result, operation(stack_members(lazy)))


@pytest.mark.parametrize(
    "operation", [lambda t: t.reshape(-1), lambda t: t.flatten(0, 1), lambda t: t.contiguous()]
)
def test_shape_op_changing_stack_dim_returns_dense(operation, make_lazy_stack):
    lazy = make_lazy_stack()
    assert_same_entries(operation(lazy), operation(stack_members(lazy)))


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
def test_nested_stack_dim_after_parent_batch_equals_dense(dim, operation, ndim, make_lazy_stack):
    lazy = make_lazy_stack(dim)
    batch = lazy.batch_size[:ndim]
    result = operation(TensorDict({"inner": lazy}, batch_size=batch))["inner"]
    assert_same_entries(
        result, operation(TensorDict({"inner": stack_members(lazy)}, batch_size=batch))["inner"]
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stack_lazy_stacks_returns_lazy_stack(dim, make_lazy_stack):
    lazy = make_lazy_stack()
    result = torch.stack([lazy, lazy], dim)
    assert isinstance(result, LazyStackedTensorDict)
    assert_same_entries(result, torch.stack([stack_members(lazy)] * 2, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_cat_lazy_stacks_returns_lazy_stack(dim, make_lazy_stack):
    lazy = make_lazy_stack()
    result = torch.cat([lazy, lazy], dim)
    assert isinstance(result, LazyStackedTensorDict)
    assert_same_entries(result, torch.cat([stack_members(lazy)] * 2, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_unbind_and_split_equal_dense_stack(dim, make_lazy_stack):
    lazy = make_lazy_stack()
    for part, expected in zip(lazy.unbind(dim), stack_members(lazy).unbind(dim), strict=True):
        assert_same_entries(part, expected)
    for part, expected in zip(lazy.split(2, dim), stack_members(lazy).split(2, dim), strict=True):
        assert_same_entries(part, expected)


@pytest.mark.parametrize("position", [4, -5])
@pytest.mark.parametrize("form", [torch.tensor, lambda i: torch.tensor([i]), lambda i: [0, i]])
def test_index_out_of_bounds_raises_with_position(position, form, make_lazy_stack):
    message = rf"index {position} is out of bounds for batch dim 0 of size 4"
    with pytest.raises(CollectionIndexError, match=message):
        make_lazy_stack()[form(position)]


def test_empty_other_batch_size_is_stack_if_members_match(make_lazy_stack):
    assert isinstance(make_lazy_stack().empty(batch_size=[4]), LazyStackedTensorDict)
    assert isinstance(make_lazy_stack().empty(recurse=True, batch_size=[4])["n"], LazyStackedTensorDict)
    assert isinstance(make_lazy_stack().empty(batch_size=[5]), TensorDict)


def test_batch_size_uneven_members_is_minus_one():
    lazy = lazy_stack([TensorDict({"a": torch.zeros(n, 2)}, [n]) for n in (1, 2)])
    assert lazy.batch_size == torch.Size([2, -1])
    assert lazy[1].batch_size == torch.Size([2])
    assert lazy[:, 0]["a"].shape == (2, 2)
    with pytest.raises(BatchSizeError, match="item 0 has batch size"):
        LazyStackedTensorDict(*lazy.tensordicts, strict_shape=True)


def test_names_include_stack_dim_name():
    lazy = LazyStackedTensorDict(
        *[TensorDict({"a": torch.zeros(3)}, [3], names=["time"]) for _ in range(2)], stack_dim_name="env"
    )
    assert lazy.names == pickle.loads(pickle.dumps(lazy)).names == ["env", "time"]
    assert lazy.transpose(0, 1).names == ["time", "env"]
    assert lazy[0].names == ["time"]
    lazy.names = ["x", "y"]
    assert lazy.tensordicts[0].names == ["y"]


@given(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_repeated_indexing_equals_dense_stack(dim, picks):
    lazy = lazy_stack([TensorDict({"a": torch.randn(4, 4)}, [4, 4]) for _ in range(4)], dim)
    expected = stack_members(lazy)
    for pick in picks:
        lazy, expected = lazy[pick], expected[pick]
    assert_same_entries(lazy, expected)


def test_view_uneven_members_rearranges_elements():
    lazy = lazy_stack([TensorDict({"a": torch.full((2, n), float(n))}, [2]) for n in (2, 3)])
    result = lazy.view(4)
    assert result.batch_size == torch.Size([4])
    assert [part.tolist() for part in result.get("a", as_list=True)] == [[2, 2], [2, 2], [3, 3, 3], [3, 3, 3]]
    assert lazy[torch.tensor([[0, 1], [1, 0]])].batch_size == torch.Size([2, 2, 2])


def test_empty_index_keeps_other_batch_dims(make_lazy_stack):
    assert make_lazy_stack()[0:0].batch_size == torch.Size([0, 3])


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


#: Nodes of batch size [3], whose entries have the shape (3, 4), that hold or are a lazy stack.
NESTED_STACKS = {
    "lazy stack": lambda stack: stack,
    "below a TensorDict": lambda stack: TensorDict({"s": stack}, [3]),
    "of TensorDicts with one": lambda stack: lazy_stack(
        [TensorDict({"s": lazy_stack([TensorDict({"a": torch.zeros(())})] * 4)}) for _ in range(3)]
    ),
}


@pytest.mark.parametrize("name", NESTED_STACKS)
def test_set_parent_batch_size_sets_members_once(name: str) -> None:
    node = NESTED_STACKS[name](lazy_stack([TensorDict({"a": torch.zeros(4)}) for _ in range(3)]))
    td = TensorDict({"n": node}, [3])
    td.batch_size = [3, 4]
    expected = {key: leaf.shape for key, leaf in td.items(True, True)}
    assert set(expected.values()) == {(3, 4)}
    for key in [*td.keys(True)]:
        if key not in expected:
            assert td[key].batch_size == (3, 4), key
    assert td[1].batch_size == td.get("n")[1].batch_size == (4,)


def test_set_batch_size_int_sets_one_dim():
    stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    stack.batch_size = 2
    assert stack.batch_size == (2,)


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


def test_set_batch_size_of_empty_stack_needs_zero_stack_dim():
    empty = LazyStackedTensorDict(stack_dim=0)
    empty.batch_size = [0, 3]
    assert empty.batch_size == (0, 3)
    for size in ([], [2, 3]):
        with pytest.raises(BatchSizeError, match="does not fit a stack of 0 along dim 0"):
            empty.batch_size = size
    assert empty.batch_size == (0, 3)


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
