"""Lazy stacks: writes of entries and members; a failed write changes no member."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import (
    BatchSizeError,
    KeyMismatchError,
    KeyPathError,
    LockedError,
    StructureError,
)


@pytest.mark.parametrize("keys", [None, [("s", "a"), ("s", "only0"), ("s", "only1"), ("s", "only2")]])
@pytest.mark.parametrize("wrap", [lambda stack: {"s": stack}, lambda stack: TensorDict({"s": stack}, [3])])
def test_update_dense_node_from_stack_becomes_stack(wrap, keys, make_ragged_stack):
    td = TensorDict({"s": {"a": torch.zeros(3), "b": torch.arange(3)}}, [3])
    node = td["s"]
    assert td.update(wrap(make_ragged_stack()), keys_to_update=keys) is td
    assert isinstance(td["s"], LazyStackedTensorDict) and list(node.keys()) == ["a", "b"]
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


@pytest.mark.parametrize("index", [lambda i: i, lambda i: (i, ...), lambda i: slice(i, i + 1), lambda i: [i]])
def test_setitem_new_key_creates_key_in_indexed_members(index, make_lazy_stack):
    lazy = make_lazy_stack(count=3)
    for i in (2, 0, 1):
        assert "new" not in lazy and "new" not in lazy[i]
        lazy[index(i)] = lazy[index(i)].empty().set("new", torch.full(lazy[index(i)].batch_size, float(i)))
    assert lazy["new"].tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_set_entry_writes_part_to_each_member(make_lazy_stack):
    lazy = make_lazy_stack(1)
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


def test_append_insert_and_extend_add_members(make_lazy_stack, make_member):
    lazy = make_lazy_stack(count=1)
    lazy.append(make_member(7))
    lazy.insert(0, make_member(8))
    lazy.extend([make_member(9)])
    assert lazy["a"][:, 0, 0].tolist() == [8, 0, 7, 9]
    with pytest.raises(BatchSizeError, match=r"the members have batch size \[3\], the new one has \[\]"):
        lazy.append(TensorDict())
    with pytest.raises(TypeError, match="the members of a lazy stack are collections; got Tensor"):
        lazy.append(torch.zeros(3))
    with pytest.raises(LockedError, match="add a member"):
        lazy.lock_().append(make_member(0))


def test_append_to_locked_stack_raises_but_locked_member_allowed(make_lazy_stack, make_member):
    lazy = make_lazy_stack()
    lazy.tensordicts[0].lock_()
    lazy.append(make_member(7))
    assert len(lazy) == 5
    levels = lazy_stack([TensorDict({"n": {"x": torch.zeros(2)}}) for _ in range(2)]).lock_()["n"]
    with pytest.raises(LockedError, match="add a member"):
        levels.append(TensorDict({"x": torch.zeros(2)}))


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


def list_state(node):
    """Return the entries of every node and their values, to detect changes."""
    if isinstance(node, torch.Tensor):
        return id(node), node.tolist()
    stacked = node._members_and_dim()
    return (
        [list_state(member) for member in stacked[0]]
        if stacked
        else {k: list_state(v) for k, v in node.items()}
    )


def lock_node(last):
    last["n"].lock_()
    return last


def lock_member_of_node(last):
    last["n"] = lazy_stack([TensorDict({"b": torch.zeros(())}, lock=i == 2) for i in range(3)])
    return last


def lock_member(last):
    parts = [last[i].clone() for i in range(3)]
    parts[2].lock_()
    return lazy_stack(parts)


def leaf_for_node(last):
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
def test_change_failing_in_later_member_changes_nothing(change, make_lazy_stack, make_member):
    change(make_lazy_stack(count=3))
    refused = 0
    for spoil in (lock_node, lock_member_of_node, lock_member, leaf_for_node):
        members = [make_member(0), make_member(1), spoil(make_member(2))]
        before = [list_state(each) for each in members]
        try:
            change(LazyStackedTensorDict(*members))
        except (KeyError, RuntimeError):
            refused += 1
            assert [list_state(each) for each in members] == before
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


ORDER = torch.tensor([2, 0, 1])

WRITES = {
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


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("change", [lambda x: x[ORDER], lambda x: x.flip(0), lambda x: x.roll(1, 0)])
def test_write_stack_from_own_members_equals_torch(write, holder, change):
    wanted = torch.arange(6.0).view(3, 2)
    stack = holder([TensorDict({"a": row.clone(), "m": {"b": row.clone()}}) for row in wanted])
    write(wanted, change(wanted))
    write(stack, change(stack))
    assert torch.equal(stack["a"], wanted) and torch.equal(stack["m", "b"], wanted)


def test_write_nested_stack_from_own_members_reads_first():
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


def make_columns() -> LazyStackedTensorDict:
    """Return rows [0, 1], [2, 3], [4, 5] under "a", whose columns are the members."""
    columns = [TensorDict({"a": torch.tensor([i, i + 2, i + 4])}, [3]) for i in range(2)]
    return LazyStackedTensorDict(*columns, stack_dim=1)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("index", "source"), [(0, 0), (1, 1), (slice(0, 2), slice(1, 3)), (slice(1, 3), slice(1, 3))]
)
def test_setitem_own_members_reordered_equals_torch(index: Any, source: Any, wrapped: bool) -> None:
    stack, wanted = make_columns(), make_columns()["a"].clone()
    wanted[index] = wanted[source].flip(-1)
    flipped = stack[source].flip(-1)
    if wrapped:
        TensorDict({"n": stack}, [3, 2])[index] = TensorDict({"n": flipped}, flipped.batch_size)
    else:
        stack[index] = flipped
    assert stack["a"].tolist() == wanted.tolist()


def test_update_inplace_own_members_reads_before_writing() -> None:
    stack = make_columns()
    stack[0:2].update_(stack[1:3].flip(1))
    assert stack["a"].tolist() == [[3, 2], [5, 4], [4, 5]]


def test_setitem_nested_stacks_from_own_members_reads_first() -> None:
    stack = make_columns()
    outer = LazyStackedTensorDict(*[TensorDict({"n": m}, [3]) for m in stack.tensordicts], stack_dim=1)
    outer[:] = TensorDict({"n": outer["n"].flip(1)}, [3, 2])
    assert outer["n", "a"].tolist() == [[1, 0], [3, 2], [5, 4]]


@pytest.mark.parametrize("nested", [False, True])
def test_setitem_mapping_of_own_members_reads_first(nested: bool) -> None:
    stack = make_columns()
    if nested:
        outer = LazyStackedTensorDict(*[TensorDict({"n": m}, [3]) for m in stack.tensordicts], stack_dim=1)
        outer[1:] = {"n": outer["n"][1:].flip(1)}
    else:
        TensorDict({"n": stack}, [3, 2])[1:] = {"n": stack[1:].flip(1)}
    assert stack["a"].tolist() == [[0, 1], [3, 2], [5, 4]]


def test_setitem_members_that_view_value_reads_first() -> None:
    td = TensorDict({"a": torch.arange(4), "n": {"b": torch.arange(4)}}, [4])
    stack = td.to_lazystack()
    stack[1:] = td[:-1]
    assert td["a"].tolist() == td["n", "b"].tolist() == [0, 0, 1, 2]


def test_setitem_subclass_leaves_reads_before_writing() -> None:
    class Leaf(torch.Tensor):
        pass

    stack = make_columns()
    for member in stack.tensordicts:
        member["a"] = member["a"].as_subclass(Leaf)
    stack[1:] = stack[1:].flip(1)
    assert stack["a"].tolist() == [[0, 1], [3, 2], [5, 4]]


def test_apply_inplace_returning_own_members_reads_first() -> None:
    stack = make_columns()
    stack[0:2].apply_(lambda leaf, other: other, stack[1:3].flip(1))
    assert stack["a"].tolist() == [[3, 2], [5, 4], [4, 5]]


def make_nested(node: TensorDict, kind: str) -> TensorDict:
    """Build a collection of batch size [2] with two levels above a node, which is dense or a lazy stack."""
    if kind != "dense":
        dim = 1 if kind == "stack of dim 1" else 0
        parts = [part.clone() for part in node.unbind(dim)]
        if kind == "stack of stacks":
            parts = [lazy_stack([inner.clone() for inner in part.unbind(0)]) for part in parts]
        node = lazy_stack(parts, dim)
    return TensorDict({"up": {"s": node}}, [2])


@pytest.mark.parametrize("index", [0, slice(None), torch.tensor([1]), torch.tensor([True, False])], ids=str)
@pytest.mark.parametrize(
    ("entries", "key"),
    [
        ({"a": torch.ones(5)}, "a"),
        ({"a": {"b": 1}}, "a"),
        ({"n": torch.ones(3)}, "n"),
        ({"n": {"i": 1j}}, ("n", "i")),
        ({("n", "i"): torch.ones(3, 3, 3, 3)}, ("n", "i")),
        (1j, "a"),
        ({"new": torch.ones(7, 7)}, "new"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["dense", "stack of dim 0", "stack of dim 1", "stack of stacks"])
def test_setitem_bad_value_below_stack_raises_with_key_path(
    kind: str, entries: Any, key: Any, index: Any
) -> None:
    node = TensorDict({"a": torch.zeros(2, 2, 3), "n": {"i": torch.zeros(2, 2, dtype=torch.int64)}}, [2, 2])
    td = make_nested(node, kind)
    path = ("up", "s", *((key,) if isinstance(key, str) else key))
    before = td.clone()
    if key == "new":
        td.lock_()
    with pytest.raises((StructureError, BatchSizeError, LockedError), match=re.escape(f"key {path}")):
        td[index] = {"up": {"s": entries}}
    assert (td == before).all()
