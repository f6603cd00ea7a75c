"""Operations on a NonTensorStack, compared with the same operation on a numpy array of objects."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices
from torch.utils import _pytree as pytree

from td_core import TensorDict, group_by, lazy_stack
from td_core._shape_plans import cat_plan, stack_plan
from td_core.errors import BatchSizeError, CollectionIndexError, KeyPathError, LockedError, StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass


class Thing:
    """A value that is equal only to itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Thing({self.number})"


def things(shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    array = np.empty(shape, dtype=object)
    for position in range(array.size):
        array.flat[position] = Thing(start + position)
    return array


def stack_of(array: np.ndarray) -> NonTensorStack:
    return NonTensorStack._of(list(array.flat), torch.Size(array.shape))


def indices(data: st.DataObject, shape: tuple[int, ...], **kwargs: Any) -> Any:
    """Draw an index that numpy and torch both accept; torch has no negative steps."""

    def forward(index: Any) -> bool:
        items = index if isinstance(index, tuple) else (index,)
        return all(not isinstance(item, slice) or item.step is None or item.step > 0 for item in items)

    return data.draw(basic_indices(shape, **kwargs).filter(forward))


def check(node: Any, array: Any) -> None:
    if isinstance(array, np.ndarray) and array.ndim == 0:
        array = array.item()
    if not isinstance(array, np.ndarray):
        assert isinstance(node, NonTensorData)
        assert node.batch_size == ()
        assert node.data is array
        return
    assert isinstance(node, NonTensorStack)
    assert node.batch_size == array.shape
    assert len(node._values) == array.size
    assert all(a is b for a, b in zip(node._values, array.flat))
    assert node.tolist() == array.tolist()


shapes = array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)


@given(st.data())
def test_index_with_ints_and_slices_equals_numpy(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    array = things(shape)
    index = indices(data, shape, allow_newaxis=True)
    check(stack_of(array)[index], array[index])


@given(st.data())
def test_index_with_arrays_and_masks_equals_numpy(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = things(shape)
    stack = stack_of(array)
    count = data.draw(st.integers(0, 5))
    rows = np.array(
        data.draw(st.lists(st.integers(-shape[0], shape[0] - 1), min_size=count, max_size=count)),
        dtype=np.int64,
    )
    check(stack[torch.from_numpy(rows)], array[rows])
    check(stack[rows], array[rows])
    check(stack[rows.tolist()], array[rows.tolist()] if count else array[rows])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=array.size, max_size=array.size))).reshape(
        shape
    )
    check(stack[torch.from_numpy(mask)], array[mask])
    if len(shape) > 1:
        check(stack[:, torch.from_numpy(rows % shape[1])], array[:, rows % shape[1]])
        check(stack[torch.from_numpy(rows), ..., 0], array[rows, ..., 0])


OPERATIONS = {
    "flatten": (lambda s: s.reshape(-1), lambda a: a.reshape(-1)),
    "view": (lambda s: s.view(-1), lambda a: a.reshape(-1)),
    "view ones": (lambda s: s.view(1, -1, 1), lambda a: a.reshape(1, -1, 1)),
    "permute": (lambda s: s.permute(*reversed(range(s.batch_dims))), lambda a: a.transpose()),
    "transpose": (lambda s: s.transpose(0, -1), lambda a: a.swapaxes(0, -1)),
    "unsqueeze": (lambda s: s.unsqueeze(-1), lambda a: a[..., None]),
    "squeeze": (lambda s: s.unsqueeze(0).squeeze(0), lambda a: a),
    "expand": (lambda s: s.expand(2, *s.batch_size), lambda a: np.broadcast_to(a, (2, *a.shape))),
    "repeat": (lambda s: s.repeat(*[2] * s.batch_dims), lambda a: np.tile(a, [2] * a.ndim)),
    "repeat_interleave": (lambda s: s.repeat_interleave(2, dim=0), lambda a: np.repeat(a, 2, 0)),
    "flip": (lambda s: s.flip(0), lambda a: np.flip(a, 0)),
    "roll": (lambda s: s.roll(1, 0), lambda a: np.roll(a, 1, 0)),
    "rot90": (lambda s: s.unsqueeze(1).rot90(1, (0, 1)), lambda a: np.rot90(a[:, None], 1, (0, 1))),
    "contiguous": (lambda s: s.contiguous(), lambda a: a),
    "clone": (lambda s: s.clone(), lambda a: a),
    "to": (lambda s: s.to("cpu"), lambda a: a),
    "dtype": (lambda s: s.to(torch.float64), lambda a: a),
    "exp": (lambda s: s.exp(), lambda a: a),
    "add": (lambda s: s + 1, lambda a: a),
    "apply": (lambda s: s.apply(lambda leaf: leaf + 1), lambda a: a),
    "movedim": (lambda s: s.movedim(0, -1), lambda a: np.moveaxis(a, 0, -1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(shape=shapes)
def test_shape_operations_equal_numpy(name: str, shape: tuple[int, ...]) -> None:
    ours, numpys = OPERATIONS[name]
    array = things(shape)
    check(ours(stack_of(array)), numpys(array))
    # In a collection, values move like the elements of a tensor next to them.
    numbers = torch.arange(array.size).view(shape)
    td = ours(TensorDict({"thing": stack_of(array), "number": numbers}, batch_size=shape))
    shown = np.vectorize(lambda thing: thing.number, otypes=[int])(np.array(td["thing"], dtype=object))
    assert shown.reshape(td.batch_size).tolist() == numpys(numbers.numpy()).tolist()


@given(shape=shapes, data=st.data())
def test_gather_equals_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = things(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    size = [data.draw(st.integers(1, side)) for side in shape]
    index = torch.tensor(
        data.draw(
            st.lists(st.integers(0, shape[dim] - 1), min_size=int(np.prod(size)), max_size=int(np.prod(size)))
        )
    ).view(size)
    positions = torch.arange(array.size).view(shape).gather(dim, index)
    check(stack_of(array).gather(dim, index), array.reshape(-1)[positions.numpy()])


@given(shape=shapes, data=st.data())
def test_unbind_split_chunk_equal_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = things(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    stack = stack_of(array)
    for part, wanted in zip(stack.unbind(dim), np.moveaxis(array, dim, 0), strict=True):
        check(part, wanted)
    size = data.draw(st.integers(1, 3))
    for part, wanted in zip(
        stack.split(size, dim), np.split(array, range(size, shape[dim], size), dim), strict=True
    ):
        check(part, wanted)


@given(shape=shapes, data=st.data())
def test_stack_and_cat_equal_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    arrays = [things(shape, 100 * i) for i in range(count)]
    stacks = [stack_of(array) for array in arrays]
    check(stacks[0]._join(stacks, stack_plan(torch.Size(shape), dim, count)), np.stack(arrays, dim))
    check(
        stacks[0]._join(stacks, cat_plan(torch.Size(shape), dim, [shape[dim]] * count)),
        np.concatenate(arrays, dim),
    )
    one = Thing(-1)
    mixed = [NonTensorData(one, batch_size=shape), *stacks]
    full = np.empty(shape, dtype=object)
    full[...] = one
    check(
        mixed[0]._join(mixed, stack_plan(torch.Size(shape), dim, count + 1)), np.stack([full, *arrays], dim)
    )


@given(st.data())
def test_setitem_equals_numpy(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = things(shape)
    index = indices(data, shape)
    stack, copy = stack_of(array), stack_of(array)
    view, clone = stack[...], stack.clone()
    chosen = array[index]
    if isinstance(chosen, np.ndarray):
        new: Any = things(chosen.shape, 1000)
        stack[index] = stack_of(new)
    else:
        new = Thing(1000)
        stack[index] = NonTensorData(new)
    wanted = array.copy()
    wanted[index] = new
    check(stack, wanted)
    check(view, wanted)
    check(clone, array)
    check(copy, array)


VIEWS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda s: s.clone(False), lambda a: a),
    (lambda s: s.unsqueeze(0), lambda a: a[None]),
    (lambda s: s.permute(*reversed(range(s.ndim))), lambda a: a.transpose()),
    (lambda s: s.unbind(0)[-1] if s.ndim > 1 else s, lambda a: a[-1] if a.ndim > 1 else a),
    (lambda s: s.split(1, 0)[0], lambda a: a[:1]),
    (lambda s: s.view(*s.shape, 1).squeeze(-1), lambda a: a),
]


@given(st.data())
def test_write_to_view_changes_base(data: st.DataObject) -> None:
    array = things(data.draw(shapes))
    stack = stack_of(array)
    view, seen = stack, array
    for of_stack, of_array in data.draw(st.lists(st.sampled_from(VIEWS), max_size=3)):
        view, seen = of_stack(view), of_array(seen)
    index = indices(data, seen.shape)
    chosen = seen[index]
    if isinstance(chosen, np.ndarray) and chosen.ndim:
        new: Any = things(chosen.shape, 1000)
        view[index][...] = stack_of(new)
    else:
        new = Thing(1000)
        view[index].update_(NonTensorData(new))
    seen[index] = new
    check(view, seen)
    check(stack, array)


@pytest.mark.parametrize(
    "copy",
    [lambda s: s.reshape(4), lambda s: s.flatten(), lambda s: s.contiguous(), lambda s: s.clone()],
)
def test_reshape_of_expanded_stack_copies_like_leaves(copy: Callable[..., Any]) -> None:
    stack = NonTensorStack("a", "b")
    made = copy(stack.expand(2, 2))
    made[0] = "z"
    assert stack.tolist() == ["a", "b"]
    assert made.flatten().tolist() == (["z", "z", "a", "b"] if made.ndim > 1 else ["z", "b", "a", "b"])


def test_write_to_row_or_slice_copies_no_column() -> None:
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
def test_snapshot_is_unchanged_by_later_writes(snapshot: Callable[..., Any]) -> None:
    stack = NonTensorStack("a", "b")
    stack[0] = "z"
    first = snapshot(stack)
    stack[1] = "y"
    second = snapshot(stack)
    stack[0] = "x"
    found = [each if isinstance(each, list) else each.tolist() for each in (first, second)]
    assert (*found, stack.tolist()) == (["z", "b"], ["z", "y"], ["x", "y"])


def test_write_stack_to_itself_permuted_works() -> None:
    stack = NonTensorStack("a", "b", "c")
    for wanted in (["c", "b", "a"], ["a", "b", "c"]):
        stack[[2, 1, 0]] = stack
        assert stack.tolist() == wanted


def test_write_to_flat_view_changes_base() -> None:
    stack = NonTensorStack.from_list([["a", "b"], ["c", "d"]])
    stack.flatten()[2] = "z"
    stack.reshape(4)[3] = "y"
    stack.view(4)[0] = "x"
    assert stack.tolist() == [["x", "b"], ["z", "y"]]


def test_view_after_append_keeps_old_values() -> None:
    stack = NonTensorStack("a", "b", "c")
    view = stack[1:]
    stack.insert(0, "n")
    view[0] = stack[1] = "z"
    assert (stack.tolist(), view.tolist()) == (["n", "z", "b", "c"], ["z", "c"])


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("locked", [False, True])
def test_write_to_stack_from_lazy_stack_changes_members(dims: int, locked: bool) -> None:
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
def test_operation_sharing_leaves_shares_values(kind: Callable[..., Any], share: Callable[..., Any]) -> None:
    td = kind([TensorDict({"n": {"k": name}, "x": torch.zeros(2)}) for name in "ab"])
    nest = TensorDict({"td": td}, [2])
    shared = share(nest)
    shared["td"][0] = TensorDict({"n": {"k": "z"}, "x": torch.ones(2)})
    shared[1].update_({("td", "n", "k"): "y"})
    assert td["n", "k"] == shared["td", "n", "k"] == ["z", "y"] and td["x"][0, 0] == 1
    copied = nest.clone()
    copied["td", "n", "k"][0] = "w"
    assert td["n", "k"] == ["z", "y"]


def test_linked_list_row_after_write_still_writes_back() -> None:
    td = TensorDict({"k": NonTensorStack.from_list([["a", "b"], ["c", "d"], ["e", "f"]])}, [3, 2])
    shown = td["k"]
    shown[0] = ["p", "q"]
    shown[0][1] = "z"
    shown[1:] = [["r", "s"], ["t", "u"]]
    shown[2][0] = "y"
    assert shown == td["k"] == [["p", "z"], ["r", "s"], ["y", "u"]]


def held(kind: str = "dense") -> Any:
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
    written = write(held(kind), taken(held()["k"]))
    assert [row["k"] for row in written] == ["a", "b", "c"]
    written["k"][0] = "z"
    assert written[0]["k"] == "z"


def test_set_linked_list_rows_are_stored_as_lists() -> None:
    td = TensorDict({"k": NonTensorStack.from_list([["a", "b"], ["c", "d"]])}, [2])
    again = TensorDict({"k": td["k"]}, [2])
    td["k"][0][0] = "z"
    assert again["k"] == [["a", "b"], ["c", "d"]] and type(again[0]["k"]) is list


def test_lazy_stack_write_own_values_permuted_works() -> None:
    lazy = lazy_stack([TensorDict({"k": list(names)}, [3]) for names in ("ace", "bdf")], 1)
    lazy[1:] = lazy[1:].flip(1)
    assert lazy["k"] == [["a", "b"], ["d", "c"], ["f", "e"]]
    lazy[1:] = {"k": lazy.get("k")[:-1]}
    assert lazy["k"] == [["a", "b"], ["a", "b"], ["d", "c"]]


def test_write_to_part_of_lazy_stack_changes_members() -> None:
    lazy = lazy_stack([TensorDict({"k": name, "x": torch.zeros(2)}) for name in "abcd"])
    lazy[1:]["k"][0] = "y"
    lazy[2:][0] = TensorDict({"k": "p", "x": torch.ones(2)})
    lazy[:, None][3].update_({"k": "z"})
    assert lazy["k"] == ["a", "y", "p", "z"]


def test_write_to_part_of_single_value_keeps_whole() -> None:
    td = TensorDict({"k": "a"}, batch_size=[3])
    part, whole = td[1:], td.clone(recurse=False)
    part.set_("k", "b")
    assert (td["k"], part["k"]) == ("a", "b")
    whole.set_("k", "c")
    assert (td["k"], part["k"], whole["k"]) == ("c", "b", "c")


def test_setitem_plain_value_writes_each_element() -> None:
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


def test_data_of_equal_values_returns_value() -> None:
    assert NonTensorStack("a", "a").data == "a"
    assert not hasattr(NonTensorStack(), "data")
    with pytest.raises(AttributeError, match="read them with tolist"):
        assert NonTensorStack("a", "b").data


def test_append_insert_extend_add_values() -> None:
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


def test_set_batch_size_misfit_raises() -> None:
    with pytest.raises(BatchSizeError, match=r"batch size \[3\] does not fit"):
        TensorDict({"a": NonTensorStack("a", "b")}, batch_size=[3])
    td = TensorDict({"a": NonTensorStack("a", "b")})
    td.batch_size = [2]
    assert td[1]["a"] == "b"
    with pytest.raises(BatchSizeError, match=r"cannot have the batch size \[\]"):
        NonTensorStack("a").batch_size = []


def test_init_checks_batch_size_and_sets_device_and_names() -> None:
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
def test_auto_batch_size_includes_values(entries, batch_dims, expected) -> None:
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


def test_repr_of_non_tensor_stack() -> None:
    assert repr(NonTensorStack("a", "b")) == (
        "NonTensorStack(\n    ['a', 'b'],\n    batch_size=torch.Size([2]),\n    device=None)"
    )
    values = ["prompt"] * 10_000
    assert str(values)[:50] + "...,\n    batch_size" in repr(NonTensorStack(*values))
    assert str(["a" * 41, "b"]) in repr(NonTensorStack("a" * 41, "b"))
    assert repr(TensorDict({"a": NonTensorStack("a", "b")}, batch_size=[2])) == (
        "TensorDict(batch_size=[2], fields={a: NonTensorStack})"
    )


def test_eq_of_stacks_compares_elements() -> None:
    first, second = NonTensorStack("a", "b"), NonTensorStack("a", "c")
    assert (first == second).tolist() == [True, False]
    assert (first != second).tolist() == [False, True]
    assert (NonTensorData("a", batch_size=[2]) == first).tolist() == [True, False]


@pytest.mark.parametrize(
    "reduce", [lambda td: td.sum(0), lambda td: td.sum(), lambda td: td.all(0), lambda td: td.new_zeros(5)]
)
def test_reduction_with_values_raises(reduce: Any) -> None:
    td = TensorDict({"a": NonTensorStack("x", "y"), "b": torch.ones(2)}, batch_size=[2])
    with pytest.raises(StructureError, match="take them out with filter_non_tensor_data"):
        reduce(td)
    assert reduce(td.filter_non_tensor_data()) is not None


def test_elementwise_operation_keeps_values() -> None:
    td = TensorDict({"a": NonTensorStack("x", "y"), "b": torch.ones(2)}, batch_size=[2])
    for result in (td.exp(), td.zero_(), torch.zeros_like(td), td.new_zeros(2)):
        assert result["a"] == ["x", "y"]


@given(shape=shapes, data=st.data())
def test_where_equals_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    first, second = things(shape), things(shape, 100)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=first.size, max_size=first.size))).reshape(
        shape
    )
    check(
        torch.where(torch.from_numpy(mask), stack_of(first), stack_of(second)), np.where(mask, first, second)
    )
    one = TensorDict({"a": NonTensorData("x")}, batch_size=shape)
    assert torch.where(torch.from_numpy(mask), one, one)["a"] == "x"


@given(shape=shapes, data=st.data())
def test_pad_fills_none(shape: tuple[int, ...], data: st.DataObject) -> None:
    amounts = [data.draw(st.tuples(st.integers(-1, 2), st.integers(0, 2))) for _ in shape]
    numbers = torch.arange(1, 1 + int(np.prod(shape))).view(shape)
    td = TensorDict({"a": stack_of(things(shape, 1)), "b": numbers}, batch_size=shape)
    padded = td.pad([side for pair in amounts for side in pair])
    found = [0 if value is None else value.number for value in padded.get("a")._values]
    assert found == padded["b"].flatten().tolist()
    assert padded.get("a").batch_size == padded.batch_size


def test_to_device_of_values_changes_label_only() -> None:
    td = TensorDict({"a": NonTensorStack("x", "y"), "b": torch.ones(2)}, batch_size=[2]).to("meta")
    assert td.device == torch.device("meta")
    assert td[1]["a"] == "y"
    assert td.flip(0)["a"] == ["y", "x"]
    assert td.pad([1, 0])["a"] == [None, "x", "y"]


def test_index_from_other_device_works(device: torch.device) -> None:
    td = TensorDict({"a": NonTensorStack("x", "y", "z"), "b": torch.ones(3, device=device)}, batch_size=[3])
    for source in (td, td.to(device)):
        assert source[torch.tensor([2, 0], device=device)]["a"] == ["z", "x"]
        assert source[torch.tensor([True, False, True], device=device)]["a"] == ["x", "z"]
        assert source.gather(0, torch.tensor([1, 1], device=device))["a"] == ["y", "y"]


@pytest.mark.parametrize(
    "index", [[7], torch.tensor([-4]), torch.tensor(3), np.array([0, 9]), (slice(None), [2])]
)
def test_index_out_of_bounds_raises(index: Any) -> None:
    with pytest.raises(
        CollectionIndexError, match=r"index -?\d is out of bounds for batch dim 0 of size [23]"
    ):
        NonTensorStack.from_list([["a", "b"], ["c", "d"], ["e", "f"]])[index]


def test_empty_keeps_value_per_element() -> None:
    with pytest.raises(
        BatchSizeError, match=r"one value for each element of \[2\] cannot have the batch size \[\]"
    ):
        NonTensorStack("a", "b").empty(batch_size=[])


@pytest.mark.parametrize(
    "write", [lambda td, new: td.update_(new), lambda td, new: td.update(new, inplace=True)]
)
def test_update_misfit_values_raises_and_changes_nothing(write: Any) -> None:
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
def test_group_by_values_works(values, groups) -> None:
    td = TensorDict({"t": NonTensorStack(*values), "i": torch.arange(3)}, [3])
    distinct, found = group_by(td, "t")
    assert distinct == [values[group[0]] for group in groups]
    assert [group["i"].tolist() for group in found] == groups


def test_group_by_array_values_raises() -> None:
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


def test_join_keeps_subclass() -> None:
    for joined in torch.cat([Labels("x"), Labels("y")]), torch.stack([Labels("x"), Labels("y")]):
        assert type(joined) is Labels


def test_tree_map_keeps_subclass() -> None:
    class Own(NonTensorStack):
        pass

    td = TensorDict({"a": torch.ones(2), "own": Own("x", "y")}, [2])
    doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, td)
    assert doubled["a"].tolist() == [2, 2]
    assert type(doubled.get("own")) is Own
    assert doubled["own"] == ["x", "y"]


def test_apply_with_batch_size_keeps_values() -> None:
    stack = NonTensorStack(NonTensorStack("p", "q"), NonTensorStack("r", "s"))
    td = TensorDict({"a": torch.ones(2, 2), "v": stack, "n": {"v": stack}}, [2, 2])
    for size in ([], [2], [2, 2]):
        result = td.apply(torch.neg, batch_size=size)
        assert result.batch_size == torch.Size(size) and result["v"] == result["n", "v"] == td["v"]
    with pytest.raises(BatchSizeError, match=r"key \('n', 'v'\), a NonTensorStack with one value for each"):
        td.exclude("v", "a").apply(torch.neg, batch_size=[3])
