"""Index, reshape and join a NonTensorStack: each result equals that of a numpy array of objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from td_core import TensorDict
from td_core._plans.shapes import cat_plan, stack_plan
from td_core.errors import CollectionIndexError
from td_tensorclass import NonTensorData, NonTensorStack


class Thing:
    """A value that is equal only to itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Thing({self.number})"


def make_things(shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    array = np.empty(shape, dtype=object)
    for position in range(array.size):
        array.flat[position] = Thing(start + position)
    return array


def make_stack(array: np.ndarray) -> NonTensorStack:
    return NonTensorStack._of(list(array.flat), torch.Size(array.shape))


def draw_index(data: st.DataObject, shape: tuple[int, ...], **kwargs: Any) -> Any:
    """Draw an index that numpy and torch both accept; torch has no negative steps."""

    def forward(index: Any) -> bool:
        items = index if isinstance(index, tuple) else (index,)
        return all(not isinstance(item, slice) or item.step is None or item.step > 0 for item in items)

    return data.draw(basic_indices(shape, **kwargs).filter(forward))


def assert_same_objects(node: Any, array: Any) -> None:
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
def test_non_tensor_stack_index_ints_and_slices_equals_numpy(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    array = make_things(shape)
    index = draw_index(data, shape, allow_newaxis=True)
    assert_same_objects(make_stack(array)[index], array[index])


@given(st.data())
def test_non_tensor_stack_index_arrays_and_masks_equals_numpy(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = make_things(shape)
    stack = make_stack(array)
    count = data.draw(st.integers(0, 5))
    rows = np.array(
        data.draw(st.lists(st.integers(-shape[0], shape[0] - 1), min_size=count, max_size=count)),
        dtype=np.int64,
    )
    assert_same_objects(stack[torch.from_numpy(rows)], array[rows])
    assert_same_objects(stack[rows], array[rows])
    assert_same_objects(stack[rows.tolist()], array[rows.tolist()] if count else array[rows])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=array.size, max_size=array.size))).reshape(
        shape
    )
    assert_same_objects(stack[torch.from_numpy(mask)], array[mask])
    if len(shape) > 1:
        assert_same_objects(stack[:, torch.from_numpy(rows % shape[1])], array[:, rows % shape[1]])
        assert_same_objects(stack[torch.from_numpy(rows), ..., 0], array[rows, ..., 0])


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
def test_non_tensor_stack_shape_operations_equal_numpy(name: str, shape: tuple[int, ...]) -> None:
    ours, numpys = OPERATIONS[name]
    array = make_things(shape)
    assert_same_objects(ours(make_stack(array)), numpys(array))
    # In a collection, values move like the elements of a tensor next to them.
    numbers = torch.arange(array.size).view(shape)
    td = ours(TensorDict({"thing": make_stack(array), "number": numbers}, batch_size=shape))
    shown = np.vectorize(lambda thing: thing.number, otypes=[int])(np.array(td["thing"], dtype=object))
    assert shown.reshape(td.batch_size).tolist() == numpys(numbers.numpy()).tolist()


@given(shape=shapes, data=st.data())
def test_non_tensor_stack_gather_equals_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = make_things(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    size = [data.draw(st.integers(1, side)) for side in shape]
    index = torch.tensor(
        data.draw(
            st.lists(st.integers(0, shape[dim] - 1), min_size=int(np.prod(size)), max_size=int(np.prod(size)))
        )
    ).view(size)
    positions = torch.arange(array.size).view(shape).gather(dim, index)
    assert_same_objects(make_stack(array).gather(dim, index), array.reshape(-1)[positions.numpy()])


@given(shape=shapes, data=st.data())
def test_non_tensor_stack_unbind_split_chunk_equal_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = make_things(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    stack = make_stack(array)
    for part, wanted in zip(stack.unbind(dim), np.moveaxis(array, dim, 0), strict=True):
        assert_same_objects(part, wanted)
    size = data.draw(st.integers(1, 3))
    for part, wanted in zip(
        stack.split(size, dim), np.split(array, range(size, shape[dim], size), dim), strict=True
    ):
        assert_same_objects(part, wanted)


@given(shape=shapes, data=st.data())
def test_non_tensor_stack_stack_and_cat_equal_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    arrays = [make_things(shape, 100 * i) for i in range(count)]
    stacks = [make_stack(array) for array in arrays]
    assert_same_objects(
        stacks[0]._join(stacks, stack_plan(torch.Size(shape), dim, count)), np.stack(arrays, dim)
    )
    assert_same_objects(
        stacks[0]._join(stacks, cat_plan(torch.Size(shape), dim, [shape[dim]] * count)),
        np.concatenate(arrays, dim),
    )
    one = Thing(-1)
    mixed = [NonTensorData(one, batch_size=shape), *stacks]
    full = np.empty(shape, dtype=object)
    full[...] = one
    assert_same_objects(
        mixed[0]._join(mixed, stack_plan(torch.Size(shape), dim, count + 1)), np.stack([full, *arrays], dim)
    )


@given(st.data())
def test_non_tensor_stack_setitem_equals_numpy(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    array = make_things(shape)
    index = draw_index(data, shape)
    stack, copy = make_stack(array), make_stack(array)
    view, clone = stack[...], stack.clone()
    chosen = array[index]
    if isinstance(chosen, np.ndarray):
        new: Any = make_things(chosen.shape, 1000)
        stack[index] = make_stack(new)
    else:
        new = Thing(1000)
        stack[index] = NonTensorData(new)
    wanted = array.copy()
    wanted[index] = new
    assert_same_objects(stack, wanted)
    assert_same_objects(view, wanted)
    assert_same_objects(clone, array)
    assert_same_objects(copy, array)


VIEWS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda s: s.clone(False), lambda a: a),
    (lambda s: s.unsqueeze(0), lambda a: a[None]),
    (lambda s: s.permute(*reversed(range(s.ndim))), lambda a: a.transpose()),
    (lambda s: s.unbind(0)[-1] if s.ndim > 1 else s, lambda a: a[-1] if a.ndim > 1 else a),
    (lambda s: s.split(1, 0)[0], lambda a: a[:1]),
    (lambda s: s.view(*s.shape, 1).squeeze(-1), lambda a: a),
]


@given(st.data())
def test_write_to_view_of_non_tensor_stack_changes_base(data: st.DataObject) -> None:
    array = make_things(data.draw(shapes))
    stack = make_stack(array)
    view, seen = stack, array
    for of_stack, of_array in data.draw(st.lists(st.sampled_from(VIEWS), max_size=3)):
        view, seen = of_stack(view), of_array(seen)
    index = draw_index(data, seen.shape)
    chosen = seen[index]
    if isinstance(chosen, np.ndarray) and chosen.ndim:
        new: Any = make_things(chosen.shape, 1000)
        view[index][...] = make_stack(new)
    else:
        new = Thing(1000)
        view[index].update_(NonTensorData(new))
    seen[index] = new
    assert_same_objects(view, seen)
    assert_same_objects(stack, array)


@given(shape=shapes, data=st.data())
def test_non_tensor_stack_where_equals_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    first, second = make_things(shape), make_things(shape, 100)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=first.size, max_size=first.size))).reshape(
        shape
    )
    assert_same_objects(
        torch.where(torch.from_numpy(mask), make_stack(first), make_stack(second)),
        np.where(mask, first, second),
    )
    one = TensorDict({"a": NonTensorData("x")}, batch_size=shape)
    assert torch.where(torch.from_numpy(mask), one, one)["a"] == "x"


@given(shape=shapes, data=st.data())
def test_pad_fills_non_tensor_with_none(shape: tuple[int, ...], data: st.DataObject) -> None:
    amounts = [data.draw(st.tuples(st.integers(-1, 2), st.integers(0, 2))) for _ in shape]
    numbers = torch.arange(1, 1 + int(np.prod(shape))).view(shape)
    td = TensorDict({"a": make_stack(make_things(shape, 1)), "b": numbers}, batch_size=shape)
    padded = td.pad([side for pair in amounts for side in pair])
    found = [0 if value is None else value.number for value in padded.get("a")._values]
    assert found == padded["b"].flatten().tolist()
    assert padded.get("a").batch_size == padded.batch_size


def test_index_tensor_on_any_device_selects_values(device: torch.device) -> None:
    td = TensorDict({"a": NonTensorStack("x", "y", "z"), "b": torch.ones(3, device=device)}, batch_size=[3])
    for source in (td, td.to(device)):
        assert source[torch.tensor([2, 0], device=device)]["a"] == ["z", "x"]
        assert source[torch.tensor([True, False, True], device=device)]["a"] == ["x", "z"]
        assert source.gather(0, torch.tensor([1, 1], device=device))["a"] == ["y", "y"]


@pytest.mark.parametrize(
    ("index", "position"),
    [
        ([7], "7 is out of bounds for batch dim 0 of size 3"),
        (torch.tensor([-4]), "-4 is out of bounds for batch dim 0 of size 3"),
        (torch.tensor(3), "3 is out of bounds for batch dim 0 of size 3"),
        (np.array([0, 9]), "9 is out of bounds for batch dim 0 of size 3"),
        ((slice(None), [2]), "2 is out of bounds for batch dim 1 of size 2"),
        ((0, [1, -3]), "-3 is out of bounds for batch dim 1 of size 2"),
    ],
)
def test_non_tensor_stack_index_out_of_bounds_raises(index: Any, position: str) -> None:
    with pytest.raises(CollectionIndexError, match=f"index {position}"):
        NonTensorStack.from_list([["a", "b"], ["c", "d"], ["e", "f"]])[index]
