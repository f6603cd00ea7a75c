"""NonTensorStack: one value per element, its constructors, writes and views."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from td_core import TensorDict, group_by, lazy_stack
from td_core._plans.shapes import cat_plan
from td_core.errors import BatchSizeError, KeyPathError, LockedError, StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass


@pytest.mark.parametrize(
    "copy",
    [lambda s: s.reshape(4), lambda s: s.flatten(), lambda s: s.contiguous(), lambda s: s.clone()],
)
def test_reshape_expanded_non_tensor_stack_copies(copy: Callable[..., Any]) -> None:
    stack = NonTensorStack("a", "b")
    made = copy(stack.expand(2, 2))
    made[0] = "z"
    assert stack.tolist() == ["a", "b"]
    assert made.flatten().tolist() == (["z", "z", "a", "b"] if made.ndim > 1 else ["z", "b", "a", "b"])


def test_setitem_row_or_slice_does_not_copy_all_values() -> None:
    td = TensorDict({"k": NonTensorStack.from_list(["a"] * 100_000), "x": torch.zeros(100_000)}, [100_000])
    row, rows = TensorDict({"k": "z", "x": 1}), TensorDict({"k": ["y", "w"], "x": torch.ones(2)}, [2])
    td[0] = row
    tracemalloc.start()
    td[7], td[8:10], td[[11, 12]] = row, rows, rows
    td[13:].get("k")[1] = "v"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert td["k"][6:16] == ["a", "z", "y", "w", "a", "y", "w", "a", "v", "a"]
    assert peak < 400_000  # a list of the values takes 800,000 bytes


@pytest.mark.parametrize(
    "snapshot",
    [
        lambda s: s.clone(),
        lambda s: s[...].clone(),
        lambda s: s.to_tensordict(),
        copy.deepcopy,
        lambda s: pytree.tree_map(lambda leaf: leaf, s),
        lambda s: TensorDict({"k": s}, [2]).to_dict()["k"],
        lambda s: TensorDict({"k": s}, [2]).load_state_dict(TensorDict({"k": s}, [2]).state_dict()).get("k"),
        lambda s: s.tolist(),
        lambda s: s[[0, 1]],
    ],
)
def test_copy_of_non_tensor_stack_ignores_later_writes(snapshot: Callable[..., Any]) -> None:
    stack = NonTensorStack("a", "b")
    stack[0] = "z"
    first = snapshot(stack)
    stack[1] = "y"
    second = snapshot(stack)
    stack[0] = "x"
    found = [each if isinstance(each, list) else each.tolist() for each in (first, second)]
    assert (*found, stack.tolist()) == (["z", "b"], ["z", "y"], ["x", "y"])


def test_setitem_permuted_with_stack_itself_permutes_values() -> None:
    stack = NonTensorStack("a", "b", "c")
    for wanted in (["c", "b", "a"], ["a", "b", "c"]):
        stack[[2, 1, 0]] = stack
        assert stack.tolist() == wanted


def test_write_to_flattened_non_tensor_stack_changes_base() -> None:
    stack = NonTensorStack.from_list([["a", "b"], ["c", "d"]])
    stack.flatten()[2] = "z"
    stack.reshape(4)[3] = "y"
    stack.view(4)[0] = "x"
    assert stack.tolist() == [["x", "b"], ["z", "y"]]


def test_insert_into_stack_keeps_values_of_earlier_view() -> None:
    stack = NonTensorStack("a", "b", "c")
    view = stack[1:]
    stack.insert(0, "n")
    view[0] = stack[1] = "z"
    assert (stack.tolist(), view.tolist()) == (["n", "z", "b", "c"], ["z", "c"])


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("locked", [False, True])
def test_write_to_entry_of_lazy_stack_changes_members(dims: int, locked: bool) -> None:
    rows = [TensorDict({"n": {"k": name}, "x": torch.zeros(3)}, [3][: dims - 1]) for name in "abc"]
    lazy = lazy_stack(rows, dims - 1)
    if locked:
        lazy.lock_()
    at = (1,) * dims
    shown = lazy["n", "k"]
    for i in at[:-1]:
        shown = shown[i]
    shown[at[-1]] = "z"
    assert lazy[at]["n", "k"] == lazy.tensordicts[1][at[1:]]["n", "k"] == "z"
    lazy.get(("n", "k"))[at] = 5
    assert lazy[at]["n", "k"] == 5


@pytest.mark.parametrize("kind", [torch.stack, lazy_stack])
@pytest.mark.parametrize(
    "share",
    [
        lambda td: td.clone(False),
        copy.copy,
        lambda td: td.detach(),
        lambda td: td.data,
        lambda td: td.narrow(0, 0, 2),
    ],
)
def test_shallow_copy_shares_non_tensor_values(kind: Callable[..., Any], share: Callable[..., Any]) -> None:
    td = kind([TensorDict({"n": {"k": name}, "x": torch.zeros(2)}) for name in "ab"])
    nest = TensorDict({"td": td}, [2])
    shared = share(nest)
    shared["td"][0] = TensorDict({"n": {"k": "z"}, "x": torch.ones(2)})
    shared[1].update_({("td", "n", "k"): "y"})
    assert td["n", "k"] == shared["td", "n", "k"] == ["z", "y"] and td["x"][0, 0] == 1
    copied = nest.clone()
    copied["td", "n", "k"][0] = "w"
    assert td["n", "k"] == ["z", "y"]


def test_linked_list_replaced_row_still_writes_back() -> None:
    td = TensorDict({"k": NonTensorStack.from_list([["a", "b"], ["c", "d"], ["e", "f"]])}, [3, 2])
    shown = td["k"]
    shown[0] = ["p", "q"]
    shown[0][1] = "z"
    shown[1:] = [["r", "s"], ["t", "u"]]
    shown[2][0] = "y"
    assert shown == td["k"] == [["p", "z"], ["r", "s"], ["y", "u"]]


def make_rows(kind: str = "dense") -> Any:
    rows = [TensorDict({"k": name}) for name in "abc"]
    return lazy_stack(rows) if kind == "lazy" else torch.stack(rows)


@pytest.mark.parametrize("taken", [lambda values: values, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "write",
    [
        lambda td, values: td.set("k", values),
        lambda td, values: td.set_("k", values),
        lambda td, values: td.update({"k": values}),
        lambda td, values: td.update_({"k": values}),
        lambda td, values: td.replace(k=values),
        lambda td, values: td.__setitem__(slice(None), {"k": values}) or td,
        lambda td, values: TensorDict({"k": values}, [3]),
        lambda td, values: TensorDict.from_dict({"k": values}, batch_size=[3]),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_set_linked_list_stores_value_per_element(
    kind: str, write: Callable[..., Any], taken: Callable[[Any], Any]
) -> None:
    written = write(make_rows(kind), taken(make_rows()["k"]))
    assert [row["k"] for row in written] == ["a", "b", "c"]
    written["k"][0] = "z"
    assert written[0]["k"] == "z"


def test_set_linked_list_rows_are_stored_as_lists() -> None:
    td = TensorDict({"k": NonTensorStack.from_list([["a", "b"], ["c", "d"]])}, [2])
    again = TensorDict({"k": td["k"]}, [2])
    td["k"][0][0] = "z"
    assert again["k"] == [["a", "b"], ["c", "d"]] and type(again[0]["k"]) is list


def test_lazy_stack_setitem_own_permuted_values_writes_them() -> None:
    lazy = lazy_stack([TensorDict({"k": list(names)}, [3]) for names in ("ace", "bdf")], 1)
    lazy[1:] = lazy[1:].flip(1)
    assert lazy["k"] == [["a", "b"], ["d", "c"], ["f", "e"]]
    lazy[1:] = {"k": lazy.get("k")[:-1]}
    assert lazy["k"] == [["a", "b"], ["a", "b"], ["d", "c"]]


def test_write_to_slice_of_lazy_stack_changes_members() -> None:
    lazy = lazy_stack([TensorDict({"k": name, "x": torch.zeros(2)}) for name in "abcd"])
    lazy[1:]["k"][0] = "y"
    lazy[2:][0] = TensorDict({"k": "p", "x": torch.ones(2)})
    lazy[:, None][3].update_({"k": "z"})
    assert lazy["k"] == ["a", "y", "p", "z"]


def test_write_to_slice_of_one_value_keeps_original() -> None:
    td = TensorDict({"k": "a"}, batch_size=[3])
    part, whole = td[1:], td.clone(recurse=False)
    part.set_("k", "b")
    assert (td["k"], part["k"]) == ("a", "b")
    whole.set_("k", "c")
    assert (td["k"], part["k"], whole["k"]) == ("c", "b", "c")


def test_setitem_slice_with_one_value_writes_each_element() -> None:
    stack = NonTensorStack("a", "b", "c")
    stack[0] = "z"
    assert stack.tolist() == ["z", "b", "c"]
    stack[1:] = "y"
    assert stack.tolist() == ["z", "y", "y"]
    stack[:2] = ["p", "q"]
    assert stack.tolist() == ["p", "q", "y"]
    with pytest.raises(BatchSizeError, match=r"values of batch size \[2\] do not fill \[3\]"):
        stack[:] = ["a", "b"]


def test_init_non_tensor_stack_sets_values() -> None:
    assert NonTensorStack().batch_size == (0,)
    assert NonTensorStack("a", ["b"]).tolist() == ["a", ["b"]]
    assert NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), stack_dim=1).tolist() == [
        ["a", "c"],
        ["b", "d"],
    ]
    with pytest.raises(BatchSizeError, match=r"item 0 has batch size \[2\], item 1 has \[\]"):
        NonTensorStack(NonTensorStack("a", "b"), "c")
    with pytest.raises(BatchSizeError, match=r"got lengths \[1, 2\] at level 1"):
        NonTensorStack.from_list([["a"], ["b", "c"]], 2)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([], [0]),
        (["a", "b"], [2]),
        ([["a"], ["b"]], [2, 1]),
        ([[["a"]]], [1, 1, 1]),
        ([["a"], ["b", "c"]], [2]),
        ([["a"], "b"], [2]),
        ([[[1], [2, 3]], [[4], [5]]], [2, 2]),
    ],
)
def test_from_list_ndim_limits_batch_dims(values: list[Any], size: list[int]) -> None:
    stack = NonTensorStack.from_list(values)
    assert list(stack.batch_size) == size
    assert stack.tolist() == values
    assert NonTensorStack.from_list(values, 1).batch_size == (len(values),)


def test_from_list_with_nodes_uses_their_values() -> None:
    values = [[], [0.5], {"a": 1}, "x"]
    assert NonTensorStack.from_list([NonTensorData(value) for value in values]).tolist() == values
    assert NonTensorStack.from_list([[NonTensorData("a")], ["b"]]).tolist() == [["a"], ["b"]]
    stack = NonTensorStack.from_list([NonTensorStack("a", "b"), NonTensorData("c", batch_size=[2])])
    assert (stack.batch_size, stack.tolist()) == ((2, 2), [["a", "b"], ["c", "c"]])
    with pytest.raises(BatchSizeError, match=r"item 0 has batch size \[2\], item 1 has \[\]"):
        NonTensorStack.from_list([NonTensorStack("a", "b"), "c"])


def test_non_tensor_stack_data_equal_values_returns_value() -> None:
    assert NonTensorStack("a", "a").data == "a"
    assert not hasattr(NonTensorStack(), "data")
    with pytest.raises(AttributeError, match="read them with tolist"):
        assert NonTensorStack("a", "b").data


def test_non_tensor_stack_append_insert_extend_add_values() -> None:
    stack = NonTensorStack("a", "b")
    stack.append("c")
    stack.insert(0, NonTensorData("z"))
    stack.extend(NonTensorStack("d", "e"))
    stack.insert(-1, "y")
    assert stack.tolist() == ["z", "a", "b", "c", "d", "y", "e"]
    with pytest.raises(BatchSizeError, match=r"the elements have batch size \[\], the new one has \[2\]"):
        stack.append(NonTensorStack("a", "b"))
    with pytest.raises(LockedError, match="cannot add a value"):
        stack.lock_().append("x")


def test_non_tensor_stack_other_batch_size_raises() -> None:
    with pytest.raises(BatchSizeError, match=r"batch size \[3\] does not fit"):
        TensorDict({"a": NonTensorStack("a", "b")}, batch_size=[3])
    td = TensorDict({"a": NonTensorStack("a", "b")})
    td.batch_size = [2]
    assert td[1]["a"] == "b"
    with pytest.raises(BatchSizeError, match=r"cannot have the batch size \[\]"):
        NonTensorStack("a").batch_size = []


def test_non_tensor_stack_init_wrong_batch_size_raises() -> None:
    stack = NonTensorStack("a", "b", batch_size=[2], device="cpu", names=["t"])
    assert (stack.batch_size, stack.device, stack.names) == ((2,), torch.device("cpu"), ["t"])
    assert NonTensorStack(batch_size=[0, 2]).batch_size == (0, 2)
    for values, made in ((("a", "b"), r"\[2\]"), ((), "none")):
        with pytest.raises(BatchSizeError, match=rf"batch_size \[3\] was given, the values make {made}"):
            NonTensorStack(*values, batch_size=[3])


@pytest.mark.parametrize(
    ("entries", "batch_dims", "expected"),
    [
        ({"a": ["x", "y", "z"]}, None, [3]),
        ({"a": ["x", "y", "z"], "n": torch.zeros(3, 4)}, None, [3]),
        ({"a": ["x", "y", "z"], "n": torch.zeros(2, 4)}, None, []),
        ({"a": [["x", "y"]] * 3, "n": torch.zeros(3, 4)}, None, [3]),
        ({"a": [["x", "y"]] * 3, "n": torch.zeros(3, 2)}, None, [3, 2]),
        ({"a": [["x", "y"]] * 3, "n": torch.zeros(3, 2)}, 1, [3]),
        ({"b": {"a": ["x", "y"]}}, None, [2]),
        ({"b": {"a": ["x", "y"]}, "n": torch.zeros(2, 4)}, 2, [2]),
        ({"a": "x", "n": torch.zeros(3, 4)}, None, [3, 4]),
    ],
)
def test_auto_batch_size_includes_non_tensor_stack(entries, batch_dims, expected) -> None:
    for td in (
        TensorDict.from_dict(entries, auto_batch_size=True, batch_dims=batch_dims),
        TensorDict(entries).auto_batch_size_(batch_dims),
    ):
        assert list(td.batch_size) == expected
        assert td["a" if "a" in entries else ("b", "a")] == entries.get("a", entries.get("b", {}).get("a"))


def test_set_batch_size_more_dims_splits_lists() -> None:
    values = [["a", "b"], ["c", "d"]]
    td = TensorDict.from_dict({"a": values, "x": torch.zeros(2, 2)}, auto_batch_size=True)
    assert td.batch_size == td.get("a").batch_size == (2, 2)
    assert td[1, 0]["a"] == "c"
    with pytest.raises(BatchSizeError, match="with one value for each element of"):
        NonTensorStack(["a"], ["b", "c"])._with_batch_size(torch.Size([2, 2]))


def test_non_tensor_stack_has_no_entries() -> None:
    stack = NonTensorStack("a")
    assert list(stack.keys(True, True)) == []
    with pytest.raises(KeyPathError):
        stack["k"] = 1
    with pytest.raises(StructureError, match="a NonTensorStack there, a TensorDict here"):
        NonTensorStack("a")._join(
            [stack, TensorDict({"a": torch.zeros(1)}, [1])], cat_plan(torch.Size([1]), 0, [1, 1])
        )


def test_repr_non_tensor_stack_truncates_values() -> None:
    assert repr(NonTensorStack("a", "b")) == (
        "NonTensorStack(\n    ['a', 'b'],\n    batch_size=torch.Size([2]),\n    device=None)"
    )
    values = ["prompt"] * 10_000
    assert str(values)[:50] + "...,\n    batch_size" in repr(NonTensorStack(*values))
    assert str(["a" * 41, "b"]) in repr(NonTensorStack("a" * 41, "b"))
    assert repr(TensorDict({"a": NonTensorStack("a", "b")}, batch_size=[2])) == (
        "TensorDict(batch_size=[2], fields={a: list[str]})"
    )


def test_eq_of_non_tensor_stacks_compares_elements() -> None:
    first, second = NonTensorStack("a", "b"), NonTensorStack("a", "c")
    assert (first == second).tolist() == [True, False]
    assert (first != second).tolist() == [False, True]
    assert (NonTensorData("a", batch_size=[2]) == first).tolist() == [True, False]


@pytest.mark.parametrize("reduce", [lambda td: td.sum(0), lambda td: td.sum(), lambda td: td.all(0)])
def test_reduction_with_non_tensor_stack_raises(reduce: Any) -> None:
    td = TensorDict({"a": NonTensorStack("x", "y"), "b": torch.ones(2)}, batch_size=[2])
    with pytest.raises(
        StructureError, match=r"batch size from \[\d+\] to .* take them out with filter_non_tensor_data"
    ):
        reduce(td)
    assert reduce(td.filter_non_tensor_data()) is not None


def test_elementwise_operation_keeps_non_tensor_stack() -> None:
    td = TensorDict({"a": NonTensorStack("x", "y"), "b": torch.ones(2)}, batch_size=[2])
    for result in (td.exp(), td.zero_(), torch.zeros_like(td), td.new_zeros(2)):
        assert result["a"] == ["x", "y"]


def test_to_device_non_tensor_stack_keeps_values() -> None:
    td = TensorDict({"a": NonTensorStack("x", "y"), "b": torch.ones(2)}, batch_size=[2]).to("meta")
    assert td.device == torch.device("meta")
    assert td[1]["a"] == "y"
    assert td.flip(0)["a"] == ["y", "x"]
    assert td.pad([1, 0])["a"] == [None, "x", "y"]


def test_non_tensor_stack_empty_other_batch_size_raises() -> None:
    with pytest.raises(
        BatchSizeError, match=r"one value for each element of \[2\] cannot have the batch size \[\]"
    ):
        NonTensorStack("a", "b").empty(batch_size=[])


@pytest.mark.parametrize(
    "write", [lambda td, new: td.update_(new), lambda td, new: td.update(new, inplace=True)]
)
def test_update_inplace_other_batch_size_changes_nothing(write: Any) -> None:
    td = TensorDict({"a": torch.zeros(1, 2), "s": "old"}, [1])
    values = NonTensorStack.from_list([["x", "y"]], 2)
    with pytest.raises(BatchSizeError, match=r"values of batch size \[1, 2\] do not fill \[1\]"):
        write(td, TensorDict({"a": torch.ones(1, 2), "s": values}, [1, 2]))
    assert not td["a"].any() and td["s"] == "old"


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        (["b", "a", "b"], [[0, 2], [1]]),
        ([{"x": 1}, {"x": 2}, {"x": 1}], [[0, 2], [1]]),
        ([[1], "a", [1]], [[0, 2], [1]]),
        ([None, None, 0], [[0, 1], [2]]),
    ],
)
def test_group_by_non_tensor_returns_groups(values, groups) -> None:
    td = TensorDict({"t": NonTensorStack(*values), "i": torch.arange(3)}, [3])
    distinct, found = group_by(td, "t")
    assert distinct == [values[group[0]] for group in groups]
    assert [group["i"].tolist() for group in found] == groups


def test_group_by_numpy_arrays_raises() -> None:
    td = TensorDict({"t": NonTensorStack(*[np.zeros(2), np.ones(2)])}, [2])
    with pytest.raises(TypeError, match="the values of 't' cannot be told apart, ndarray among them"):
        group_by(td, "t")


@pytest.mark.parametrize("size", [(0,), (0, 3), (2, 0, 3)])
def test_state_dict_empty_stack_keeps_batch_size(size) -> None:
    whole = torch.Size(1 if n == 0 else n for n in size)
    stack = lazy_stack([NonTensorData("x", batch_size=whole[1:])] * whole[0])
    empty = stack[tuple(slice(n) for n in size)]
    td = TensorDict({"t": empty}, size)
    loaded = td.clone().load_state_dict(td.state_dict())
    assert loaded.get("t").batch_size == size and loaded["t"] == td["t"]


class Tagged(TensorClass):
    x: torch.Tensor
    tags: Any = None


@pytest.mark.parametrize("held", [None, NonTensorData("k"), ["1", "2", "3"]])
def test_state_dict_of_tensorclass_restores_stack(held: Any) -> None:
    source = Tagged(torch.zeros(3), ["u", "v", "w"], batch_size=[3])
    target = Tagged(torch.zeros(3), held, batch_size=[3])
    target.load_state_dict(source.state_dict())
    assert [target[i].tags for i in range(3)] == ["u", "v", "w"]


class Labels(NonTensorStack):
    pass


def test_stack_and_cat_keep_non_tensor_stack_subclass() -> None:
    for joined in torch.cat([Labels("x"), Labels("y")]), torch.stack([Labels("x"), Labels("y")]):
        assert type(joined) is Labels


def test_tree_map_keeps_non_tensor_stack_subclass() -> None:
    class Own(NonTensorStack):
        pass

    td = TensorDict({"a": torch.ones(2), "own": Own("x", "y")}, [2])
    doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, td)
    assert doubled["a"].tolist() == [2, 2]
    assert type(doubled.get("own")) is Own
    assert doubled["own"] == ["x", "y"]


def test_apply_with_batch_size_keeps_non_tensor_stack() -> None:
    stack = NonTensorStack(NonTensorStack("p", "q"), NonTensorStack("r", "s"))
    td = TensorDict({"a": torch.ones(2, 2), "v": stack, "n": {"v": stack}}, [2, 2])
    for size in ([], [2], [2, 2]):
        result = td.apply(torch.neg, batch_size=size)
        assert result.batch_size == torch.Size(size) and result["v"] == result["n", "v"] == td["v"]
    with pytest.raises(BatchSizeError, match=r"key \('n', 'v'\), a NonTensorStack with one value for each"):
        td.exclude("v", "a").apply(torch.neg, batch_size=[3])
