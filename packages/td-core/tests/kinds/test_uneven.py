"""Lazy stacks whose members differ in keys, shapes or batch sizes: operations apply per member."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import CollectionIndexError, KeyMismatchError, KeyPathError, LockedError, StructureError


def make_uneven_keys() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        TensorDict({"a": torch.arange(2.0), "n": {"b": torch.ones(3)}, "only": torch.ones(3)}),
        TensorDict({"a": torch.arange(2.0) + 5, "n": {"b": torch.ones(3), "rare": torch.ones(1)}}),
    )


def make_uneven_shapes() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        *[TensorDict({"a": torch.arange(n + 2.0), "n": {"b": torch.ones(n, 2)}}) for n in (1, 2)]
    )


def make_uneven_sizes() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        *[TensorDict({"a": torch.arange(2.0 * n).view(n, 2), "n": {"b": torch.ones(n)}}, [n]) for n in (2, 3)]
    )


STACKS = {"keys": make_uneven_keys, "shapes": make_uneven_shapes, "sizes": make_uneven_sizes}
MASK = torch.tensor([True, False])


def list_members(result) -> list[dict]:
    return [
        {"batch_size": member.batch_size, **dict(member.items(True, True))} for member in result.tensordicts
    ]


def assert_members_equal(result, expected) -> None:
    for mine, wanted in zip(list_members(result), expected, strict=True):
        assert mine.keys() == {"batch_size", *wanted.keys(True, True)}
        assert mine.pop("batch_size") == wanted.batch_size
        for key, leaf in mine.items():
            assert torch.equal(leaf, wanted[key])


#: An operation on a stack, and the equivalent operation on each member.
BY_MEMBER = {
    "stack": (lambda td: torch.stack([td, td.clone()], 1), lambda td, i: torch.stack([td, td], 0)),
    "stack at the front": (lambda td: torch.stack([td, td]), lambda td, i: torch.stack([td, td])),
    "unsqueeze": (lambda td: td.unsqueeze(0), lambda td, i: td.unsqueeze(0)),
    "where, filled": (
        lambda td: td.where(MASK, td.exclude("a").apply(torch.zeros_like), pad=7),
        lambda td, i: td if i == 0 else td.apply(torch.zeros_like).update({"a": torch.full_like(td["a"], 7)}),
    ),
    "where, filled on the other side": (
        lambda td: td.exclude("a").where(MASK, td.apply(torch.zeros_like), pad=7),
        lambda td, i: (
            td.apply(torch.zeros_like) if i else td.clone().update({"a": torch.full_like(td["a"], 7)})
        ),
    ),
    "split_keys": (lambda td: td.split_keys(["a"])[1], lambda td, i: td.exclude("a")),
    "split_keys without any": (lambda td: td.split_keys()[0], lambda td, i: td),
    "set_at_": (
        lambda td: td.clone().set_at_("a", 9, 1),
        lambda td, i: (
            td.clone().apply_(lambda leaf: leaf).set_("a", torch.full_like(td["a"], 9)) if i else td
        ),
    ),
    "set_at_ a mask": (
        lambda td: td.clone().set_at_("a", 9, 0),
        lambda td, i: td if i else td.clone().set_("a", torch.full_like(td["a"], 9)),
    ),
    "rename_key_ into itself": (
        lambda td: td.clone().rename_key_("a", ("a", "deep")),
        lambda td, i: td.exclude("a").update({"a": {"deep": td["a"]}}),
    ),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("operation", BY_MEMBER)
def test_operation_applies_to_each_member(operation, stack):
    on_stack, on_member = BY_MEMBER[operation]
    td = STACKS[stack]()
    assert_members_equal(on_stack(td), [on_member(member, i) for i, member in enumerate(td.tensordicts)])


@pytest.mark.parametrize("dim", [1, -1])
def test_cat_uneven_members_concatenates_per_member(dim):
    td = make_uneven_sizes()
    assert_members_equal(
        torch.cat([td, td], dim), [torch.cat([member, member], 0) for member in td.tensordicts]
    )


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["sum", "mean", "std", "prod", "amax", "nansum"])
def test_reduce_all_equals_torch_on_all_elements(name, stack):
    td = STACKS[stack]()
    together = torch.cat([leaf.flatten() for member in td.tensordicts for leaf in member.values(True, True)])
    torch.testing.assert_close(getattr(td, name)(reduce=True), getattr(together, name)())


@pytest.mark.parametrize(
    ("size", "read"),
    [
        (5, lambda td: td.numel()),
        ([2], lambda td: list(td.empty(recurse=True, batch_size=[2])["n"].batch_size)),
        ([2, 4], lambda td: list(td.new_zeros(2, 4, empty_lazy=True)["n"].batch_size)),
        (["n"], lambda td: list(td.new_zeros(2, 4, empty_lazy=True).keys(True))),
    ],
)
def test_size_methods_of_uneven_stack_return_expected(read, size):
    assert read(make_uneven_sizes()) == size


@pytest.mark.parametrize("stack", STACKS)
def test_data_ptr_returns_addresses_of_members(stack):
    td = STACKS[stack]()
    addresses = td.data_ptr()
    for i, member in enumerate(td.tensordicts):
        for key, leaf in member.items(True, True):
            key = (key,) if isinstance(key, str) else key
            assert addresses[(str(i), *key)] == leaf.data_ptr()


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td.cummax(1),
        lambda td: td.cummin(1, return_indices=False),
        lambda td: td.unbind(1),
        lambda td: td.split(1, 1),
        lambda td: td.unsqueeze(-1),
        lambda td: td.flip(1),
    ],
)
def test_operation_on_uneven_dim_raises(operation):
    with pytest.raises(StructureError, match=r"different batch sizes, \[\[2\], \[3\]\]"):
        operation(make_uneven_sizes())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_densify_keeps_hidden_keys(layout):
    dense = make_uneven_keys().densify(layout)
    assert [part.tolist() for part in dense["only"].unbind()] == [[1, 1, 1], []]
    assert [part.tolist() for part in dense["n", "rare"].unbind()] == [[], [1]]


@pytest.mark.parametrize("hidden", [torch.tensor(1.0), TensorDict({"b": torch.ones(2)})])
def test_densify_hidden_value_without_empty_form_raises(hidden):
    stack = LazyStackedTensorDict(TensorDict({"only": hidden}), TensorDict())
    with pytest.raises(KeyMismatchError, match="'only'"):
        stack.densify()


@pytest.mark.parametrize("dim", [0, 1])
def test_unlock_node_of_locked_stack_raises(dim):
    stack = TensorDict({"n": {"b": torch.zeros(2, 3)}}, [2, 3]).to_lazystack(dim).lock_()
    with pytest.raises(LockedError, match="part of a locked collection"):
        stack["n"].unlock_()
    stack.unlock_()
    assert not stack["n"].unlock_().is_locked


@pytest.mark.parametrize("outer", [lambda td: {"s": td}, lambda td: {"x": {"s": td}}])
def test_get_forms_of_nested_stack_entry_equal_those_of_stack(outer):
    stack = make_uneven_shapes()
    td = TensorDict(outer(stack), [2])
    path = next(key for key in td.keys(True) if key[-1] == "s")
    path = (path,) if isinstance(path, str) else path
    assert [leaf.shape for leaf in td.get((*path, "a"), as_list=True)] == [(3,), (4,)]
    assert torch.equal(
        td.get((*path, "a"), as_padded_tensor=True, padding_value=-1.0),
        stack.get("a", as_padded_tensor=True, padding_value=-1.0),
    )
    assert td.get((*path, "n", "b"), as_nested_tensor=True).is_nested
    assert td.get((*path, "zz"), 3, as_list=True) == 3
    with pytest.raises(TypeError, match="takes no as_list: only lazy stacks do"):
        td.get("zz", as_list=True)


def test_get_from_lazy_stack_two_defaults_raises() -> None:
    with pytest.raises(TypeError, match="takes a key and one default, got 2 defaults"):
        make_uneven_keys().get("a", 1, 2)


def test_get_padded_from_parameters_runs_hook_once() -> None:
    leaf = torch.nested.nested_tensor([torch.zeros(1), torch.ones(2)], layout=torch.jagged)
    params = TensorDictParams(TensorDict({"w": leaf}, [2]))
    params.register_get_post_hook(lambda params, value: value + 1)
    expected = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    torch.testing.assert_close(params.get("w", as_padded_tensor=True), expected, check_device=False)


@pytest.mark.parametrize(
    "index", [slice(0, 0), [], (slice(5, None), slice(0, 1)), torch.zeros(2, dtype=torch.bool)]
)
def test_empty_index_of_uneven_members_keeps_ndim(index):
    empty = make_uneven_sizes()[index]
    assert empty.batch_size[0] == 0 and empty.ndim == 2 and empty.numel() == 0


#: An index of the stack, and the equivalent index per selected member.
UNEVEN_INDICES = [
    ((1, 2), {1: 2}),
    ((0, -1), {0: -1}),
    ((1, slice(1, None)), {1: slice(1, None)}),
    ((0, torch.tensor([True, False])), {0: torch.tensor([True, False])}),
    ((slice(1, 2), 2), {1: 2}),
    (([1], [0, 2]), None),
    (([1, 0], slice(0, 1)), {1: slice(0, 1), 0: slice(0, 1)}),
    ((..., 0), {0: 0, 1: 0}),
    (slice(None), {0: ..., 1: ...}),
]


@pytest.mark.parametrize(("index", "meaning"), UNEVEN_INDICES)
def test_index_equals_index_of_selected_members(index, meaning):
    td = make_uneven_sizes()
    if meaning is None:
        with pytest.raises(StructureError, match="cannot be indexed together"):
            td[index]
        return
    result = td[index]
    got = result.tensordicts if isinstance(result, LazyStackedTensorDict) else [result]
    for mine, (i, inner) in zip(got, meaning.items(), strict=True):
        assert torch.equal(mine["a"], td.tensordicts[i]["a"][inner])


@pytest.mark.parametrize(("index", "meaning"), [case for case in UNEVEN_INDICES if case[1] is not None])
@pytest.mark.parametrize("value", [lambda td: -1, lambda td: td.apply(lambda leaf: leaf * 0 - 1)])
def test_setitem_writes_selected_elements(index, meaning, value):
    td, expected = make_uneven_sizes(), make_uneven_sizes()
    for i, inner in meaning.items():
        expected.tensordicts[i]["a"][inner] = -1
        expected.tensordicts[i]["n", "b"][inner] = -1
    td[index] = value(td[index])
    assert_members_equal(td, expected.tensordicts)


@pytest.mark.parametrize("index", [(0, 2), (slice(None), 2), ([0, 1], -3), (2, 0)])
@pytest.mark.parametrize("use", [lambda td, index: td[index], lambda td, index: td.__setitem__(index, 0)])
def test_index_out_of_range_for_member_raises(index, use):
    td = make_uneven_sizes()
    with pytest.raises(CollectionIndexError, match="out of bounds"):
        use(td, index)
    assert_members_equal(td, make_uneven_sizes().tensordicts)


@pytest.mark.parametrize("value", [{"a": torch.zeros(2)}, TensorDict({"a": torch.zeros(3, 1, 2)}, [3, 1])])
def test_setitem_ambiguous_value_raises(value):
    td = make_uneven_sizes()
    with pytest.raises(StructureError, match="members of different batch sizes are written one at a time"):
        td[:] = value


def make_with_hidden_keys() -> LazyStackedTensorDict:
    return lazy_stack(
        [
            TensorDict({"a": torch.zeros(3, i), "n": {"b": torch.zeros(3), f"{i}": 0 * torch.ones(3)}}, [3])
            for i in (1, 2)
        ]
    )


@pytest.mark.parametrize(
    ("index", "size"),
    [
        (torch.zeros(2, dtype=torch.bool), (0, 3)),
        ([], (0, 3)),
        (slice(0, 0), (0, 3)),
        (torch.zeros(2, 0, dtype=torch.int64), (2, 0, 3)),
        (torch.zeros(2, 3, dtype=torch.bool), (0,)),
        ((slice(0, 0), slice(0, 2)), (0, 2)),
        ((slice(2, None), None), (0, 1, 3)),
    ],
)
def test_empty_index_has_common_keys(index, size):
    found = make_with_hidden_keys()[index]
    assert found.batch_size == size
    assert list(found.keys(True)) == ["a", "n", ("n", "b")]
    assert found["a"].shape == (*size, 1) and found["n", "b"].shape == size


def test_cat_with_empty_parts_keeps_members():
    stack = make_with_hidden_keys()
    mask = torch.tensor([False, False])
    again = torch.cat([stack[mask], stack[~mask], stack[2:]])
    assert again.batch_size == (2, 3)
    assert [list(member["n"].keys()) for member in again.tensordicts] == [["b", "1"], ["b", "2"]]


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(
    ("move", "names"),
    [
        (lambda td: td.flatten(1, 2), ["x", None]),
        (lambda td: td.unflatten(1, (2, 1)), ["x", None, None, "z"]),
        (lambda td: td.flatten(0, 1).unflatten(0, (2, 2)), [None, None, "z"]),
        (lambda td: td[:, torch.zeros(2, dtype=torch.bool)].unflatten(2, (3, 1)), ["x", "y", None, None]),
        (lambda td: td.gather(0, torch.zeros(2, 2, 3, dtype=torch.int64)), ["x", "y", "z"]),
    ],
)
def test_rearranged_elements_keep_dim_names(move, names, below):
    unlike = [TensorDict({"a": torch.zeros(2, 3, i), "n": {"b": torch.zeros(2, 3)}}, [2, 3]) for i in (1, 2)]
    stack = lazy_stack(unlike, 1)
    td = TensorDict({"s": stack}, [2, 2, 3], names=["x", "y", "z"])
    stack = td["s"]
    moved = move(td)["s"] if below else move(stack)
    assert moved.names == moved.get("n").names == names
    assert stack.names == ["x", "y", "z"] and stack.tensordicts[0].names == ["x", "z"]


def test_empty_index_keeps_dim_names():
    stack = make_with_hidden_keys()
    stack.names = ["x", "y"]
    assert stack[0:0].names == ["x", "y"]


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.permute(1, 0),
        lambda td: td.transpose(0, 1),
        lambda td: td.unsqueeze(0),
        lambda td: td.unsqueeze(-1),
        lambda td: td.squeeze(),
        lambda td: td.view(*td.batch_size, 1),
        lambda td: td.flatten_keys(),
    ],
)
def test_context_writes_back_to_uneven_members(change, dim, locked) -> None:
    stack = lazy_stack(
        [TensorDict({"a": torch.zeros(3, i + 1), f"only {i}": torch.zeros(3)}, [3]) for i in range(2)], dim
    )
    leaves = [member["a"] for member in stack.tensordicts]
    if locked:
        stack.lock_()
    with change(stack) as changed:
        changed.apply_(lambda leaf: leaf.add_(1))
        if not locked:
            changed["new"] = torch.ones(changed.batch_size)
    for i, (member, leaf) in enumerate(zip(stack.tensordicts, leaves, strict=True)):
        assert member["a"] is leaf
        assert (leaf == 1).all()
        assert (member[f"only {i}"] == 1).all()
        assert ("new" in member) is not locked


def test_keys_of_some_members_are_not_in_keys() -> None:
    for members in ([{"x": 1, "only": 1}, {"x": 1}], [{"x": 1}, {"x": 1, "only": 1}]):
        stack = LazyStackedTensorDict(*map(TensorDict, members))
        assert list(stack.keys()) == ["x"] and "x" in stack.keys()
        assert "only" not in stack.keys() and "only" not in stack
        assert ("s", "only") not in TensorDict({"s": stack}).keys(True)


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td.unsqueeze(0),
        lambda td: td.view(1, 2),
        lambda td: td.permute(0),
        lambda td: td.flip(0),
        lambda td: td.roll(1, 0),
        lambda td: td.to(torch.float64),
        lambda td: td.unflatten_keys("."),
    ],
)
@pytest.mark.parametrize("locked", [False, True])
def test_context_on_parent_writes_back_to_uneven_stack(operation, locked):
    below = [TensorDict({"x": torch.zeros(1)}), TensorDict({"x": torch.zeros(2), "y": torch.zeros(())})]
    td = TensorDict({"a": torch.zeros(2), "n": {"l": lazy_stack(below)}}, [2])
    if locked:
        td.lock_()
    with operation(td) as result:
        result.add_(1)
    members = td["n", "l"].tensordicts
    assert td["a"].tolist() == [1, 1]
    assert [member["x"].tolist() for member in members] == [[1.0], [1.0, 1.0]]
    assert members[1]["y"] == 1


@pytest.mark.parametrize("dense_first", [False, True])
def test_cat_uneven_stack_and_dense_keeps_both(dense_first: bool) -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (3, 4)], 1)
    dense = TensorDict({"a": torch.ones(2, 2, 3)}, [2, 2])
    items = [dense, stack] if dense_first else [stack, dense]
    result = torch.cat(items, 1)
    assert isinstance(result, LazyStackedTensorDict)
    assert result.batch_size == (2, 4)
    rows = [tuple(member["a"].shape) for member in result.unbind(1)]
    assert rows == ([(2, 3)] * 3 + [(2, 4)] if dense_first else [(2, 3), (2, 4), (2, 3), (2, 3)])
    below = torch.cat([TensorDict({"n": {"x": item}}, [2, 2]) for item in items], 1)["n", "x"]
    assert [tuple(member["a"].shape) for member in below.unbind(1)] == rows
    assert torch.cat([stack, dense[:, :0]], 1).batch_size == (2, 2)
    with pytest.raises(StructureError, match="key 'a'"):
        torch.cat(items, 0)


@pytest.mark.parametrize("index", [0, -1, slice(0, 1), slice(None), (), [0], (..., 0)])
@pytest.mark.parametrize("stacked", [False, True])
def test_setitem_uneven_nodes_equals_members(index: Any, stacked: bool) -> None:
    def make(start: float) -> Any:
        members = [
            TensorDict({"a": torch.full((2, 3), start), "b": torch.full((2, 1), start)}, [2]),
            TensorDict({"b": torch.full((2, 2), start), "only": torch.full((2,), start)}, [2]),
        ]
        td = TensorDict({"q": torch.full((2,), start), "m": lazy_stack(members)}, [2])
        return lazy_stack([td, td.clone()]) if stacked else td

    td, other, wanted = make(0.0), make(1.0), make(0.0)
    wanted[index] = other[index]
    assert td.update_at_(other[index], index) is td
    assert (td == wanted).all() and not (td == make(0.0)).all()
    more = other[index]
    more["m", "new"] = torch.ones(more["m"].batch_size)
    with pytest.raises(KeyPathError, match=r"'new' not found in key 'm'"):
        td.update_at_(more, index)
