"""Stacking of values for whole batches, and vmap over values per element."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack, maybe_dense_stack
from td_core.errors import StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, TypedTensorDict


class Sample(TensorClass):
    x: torch.Tensor
    task: object = None


class Typed(TypedTensorDict):
    x: torch.Tensor
    task: object = None


def make_task(task: Any) -> Any:
    return TensorDict({"x": torch.zeros(4), "task": task}, [4])


ITEMS = {
    "TensorDict": make_task,
    "nested": lambda task: TensorDict({"n": make_task(task)}, [4]),
    "tensorclass": lambda task: Sample(x=torch.zeros(4), task=task, batch_size=[4]),
    "member": lambda task: TensorDict({"n": Sample(x=torch.zeros(4), task=task, batch_size=[4])}, [4]),
    "TypedTensorDict": lambda task: Typed(x=torch.zeros(4), task=task, batch_size=[4]),
    "NonTensorData": lambda task: NonTensorData(task, batch_size=[4]),
    "one for each": lambda task: make_task([f"{task} {i}" for i in range(4)]),
    "of both kinds": lambda task: make_task([task] * 4 if task == "push" else task),
}


def read_task(item: Any) -> Any:
    """Return the value of the key "task" of an item; lists as their repr."""
    if isinstance(item, (NonTensorData, NonTensorStack)):
        value = item._unwrap()
    else:
        item = item["n"] if "n" in item.keys() else item
        value = item.get("task")
        value = value._unwrap() if hasattr(value, "_unwrap") else value
    return list(value) if isinstance(value, list) else value


def write_and_return(stack: Any, write: Any) -> Any:
    write(stack)
    return stack


#: Round trips that join three items and split the result again.
ROUND_TRIPS = {
    "index": lambda items: [torch.stack(items)[i] for i in range(3)],
    "index with ...": lambda items: [torch.stack(items)[i, ...] for i in range(3)],
    "negative index": lambda items: [torch.stack(items)[i - 3] for i in range(3)],
    "dim 1": lambda items: [torch.stack(items, 1)[:, i] for i in range(3)],
    "dim -1": lambda items: torch.stack(items, -1).unbind(-1),
    "iteration": lambda items: list(torch.stack(items)),
    "unbind": lambda items: torch.stack(items).unbind(0),
    "split": lambda items: [part[0] for part in torch.stack(items).split(1)],
    "chunk and squeeze": lambda items: [part.squeeze(0) for part in torch.stack(items).chunk(3)],
    "lazy_stack": lambda items: list(lazy_stack(items)),
    "densify": lambda items: list(torch.stack(list(lazy_stack(items)))),
    "maybe_dense_stack": lambda items: list(maybe_dense_stack(items)),
    "cat": lambda items: list(torch.cat([torch.stack(items[:1]), torch.stack(items[1:])])),
    "stack of stacks": lambda items: list(torch.stack([torch.stack(items)] * 2, 1)[:, 1]),
    "clone": lambda items: list(torch.stack(items).clone()),
    "shallow clone": lambda items: list(torch.stack(items).clone(False)),
    "deepcopy": lambda items: list(copy.deepcopy(torch.stack(items))),
    "pickle": lambda items: list(pickle.loads(pickle.dumps(torch.stack(items)))),
    "contiguous": lambda items: list(torch.stack(items).contiguous()),
    "pointwise": lambda items: list(torch.stack(items) + 1),
    "tree_map": lambda items: list(torch.utils._pytree.tree_map(torch.neg, torch.stack(items))),
    "transpose": lambda items: list(torch.stack(items, 1).transpose(0, 1)),
    "permute": lambda items: list(torch.stack(items, 1).permute(1, 0)),
    "reshape": lambda items: [part.reshape(4) for part in torch.stack(items).reshape(3, 2, 2)],
    "unflatten": lambda items: [part.flatten(0, 1) for part in torch.stack(items).unflatten(1, (2, 2))],
    "unsqueeze": lambda items: list(torch.stack(items).unsqueeze(1).squeeze(1)),
    "positions": lambda items: list(torch.stack(items)[torch.arange(3)]),
    "mask": lambda items: list(torch.stack(items)[torch.ones(3, dtype=torch.bool)]),
    "expand": lambda items: list(torch.stack(items).expand(2, 3, 4)[1]),
    "repeat": lambda items: list(torch.stack(items).repeat(2, 1)[3:]),
    "flip": lambda items: list(torch.stack(items).flip(0))[::-1],
    "default_collate": lambda items: list(torch.utils.data.default_collate(items)),
    "out": lambda items: list(torch.stack(items, out=torch.stack(items[::-1]))),
    "update_": lambda items: list(
        write_and_return(torch.stack(items[::-1]), lambda to: to.update_(torch.stack(items)))
    ),
    "write each": lambda items: list(
        write_and_return(torch.stack(items[::-1]), lambda to: [to.__setitem__(i, items[i]) for i in range(3)])
    ),
}


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_index_stack_of_one_value_items_returns_items(trip: str, item: str) -> None:
    tasks = ("reach", "push", "walk")
    parts = ROUND_TRIPS[trip]([ITEMS[item](task) for task in tasks])
    assert [read_task(part) for part in parts] == [read_task(ITEMS[item](task)) for task in tasks]
    assert {part.batch_size for part in parts} == {(4,)}


def test_slice_stack_of_one_value_items_returns_lists() -> None:
    stack = torch.stack([make_task("reach"), make_task("push")])
    assert stack[1:]["task"] == [["push"] * 4]
    assert stack[:, 0]["task"] == ["reach", "push"]
    assert stack[1:, 0]["task"] == ["push"]
    assert stack.reshape(-1)[:4]["task"] == ["reach"] * 4
    assert stack[1, :2]["task"] == "push"


def test_write_to_item_of_non_tensor_stack_changes_stack() -> None:
    stack = torch.stack([make_task("reach"), make_task("push")])
    stack[1].update_(make_task("walk"))
    assert stack["task"] == [["reach"] * 4, ["walk"] * 4]
    assert stack[1]["task"] == "walk"
    part = stack[0]
    part[2] = make_task("run")[0]
    assert part["task"] == ["reach", "reach", "run", "reach"]
    assert stack["task"] == [["reach", "reach", "run", "reach"], ["walk"] * 4]
    assert stack[0]["task"] == ["reach", "reach", "run", "reach"]
    stack[0] = make_task(["run"] * 4)
    assert stack[0]["task"] == ["run"] * 4
    stack[0] = make_task("run")
    assert stack[0]["task"] == "run"


def test_write_to_item_of_item_changes_non_tensor_stack() -> None:
    stack = torch.stack([make_task("reach"), make_task("push")])
    stack[1][3].update_(TensorDict({"task": "last"}))
    assert stack["task"][1] == ["push", "push", "push", "last"]
    assert [each["task"] for each in stack[1].unbind(0)] == ["push", "push", "push", "last"]


def make_record(shape: tuple[int, ...]) -> Any:
    def names(at: str, sizes: tuple[int, ...]) -> Any:
        return [names(f"{at}{i}", sizes[1:]) for i in range(sizes[0])] if sizes else at

    size = torch.Size(shape)
    x = torch.arange(size.numel() * 4.0).view(*shape, 4)
    return TensorDict({"x": x, "task": names("v", shape), "one": "of all"}, shape)


def to_tensorclass(td: Any) -> Any:
    return Sample(x=td["x"], task=td.get("task"), batch_size=td.batch_size)


MAPPED = {
    "TensorDict": make_record,
    "nested": lambda shape: TensorDict({"n": make_record(shape)}, shape),
    "tensorclass": lambda shape: to_tensorclass(make_record(shape)),
    "member": lambda shape: TensorDict({"n": to_tensorclass(make_record(shape))}, shape),
    "lazy stack along 0": lambda shape: lazy_stack(make_record(shape).unbind(0)),
    "lazy stack along 1": lambda shape: lazy_stack(make_record(shape).unbind(1), 1),
    "lazy stack of tensorclasses": lambda shape: lazy_stack(to_tensorclass(make_record(shape)).unbind(0)),
    "lazy stack below": lambda shape: TensorDict({"n": lazy_stack(make_record(shape).unbind(0))}, shape),
}


def read_tensor(td: Any) -> torch.Tensor:
    td = td["n"] if "n" in td.keys() else td
    return td.x if isinstance(td, Sample) else td["x"]


DIMS = [((2, 3), dim) for dim in (-2, -1, 0, 1)] + [
    ((3, 3), -1),
    ((3, 3), 0),
    ((2, 2, 2), 1),
    ((2, 2, 2), -2),
]


@pytest.mark.parametrize(("shape", "dim"), DIMS)
@pytest.mark.parametrize("kind", MAPPED)
def test_vmap_with_non_tensor_entries_equals_torch(kind: str, shape: tuple[int, ...], dim: int) -> None:
    data = MAPPED[kind](shape)
    expected = read_tensor(data).movedim(dim % len(shape), 0)
    sizes = []

    def double(each: Any) -> torch.Tensor:
        sizes.append(tuple(each.batch_size))
        return read_tensor(each) * 2

    assert torch.equal(torch.vmap(double, dim)(data), expected * 2)
    assert sizes == [expected.shape[1:-1]]
    assert torch.equal(torch.vmap(double, dim, chunk_size=1)(data), expected * 2)
    noise = torch.vmap(lambda each: read_tensor(each) * 0 + torch.rand(4), dim, randomness="different")(data)
    assert noise.shape == expected.shape and noise.unique().numel() > 4
    programs = [
        lambda each: read_tensor(torch.stack([each, each])[1]),
        lambda each: read_tensor(each.clone().unsqueeze(0).squeeze(0)),
        lambda each: read_tensor(torch.stack(each.unbind(0))),
        lambda each: read_tensor(each.reshape(-1).reshape(each.batch_size)),
        lambda each: read_tensor(torch.cat([each, each])[: each.batch_size[0]]),
    ]
    for program in programs:
        assert torch.equal(torch.vmap(program, dim)(data), expected)


@pytest.mark.parametrize(("shape", "dim"), DIMS)
@pytest.mark.parametrize("kind", MAPPED)
def test_vmap_returns_non_tensor_values_in_order(kind: str, shape: tuple[int, ...], dim: int) -> None:
    data, ndim = MAPPED[kind](shape), len(shape)
    for out in range(-ndim, ndim):
        moved = make_record(shape).movedim(dim % ndim, out % ndim)
        result = torch.vmap(lambda each: each + 0, dim, out)(data)
        assert torch.equal(read_tensor(result), moved["x"])
        assert result.batch_size == moved.batch_size
        assert read_task(result) == list(moved["task"])
        stacked = torch.vmap(lambda each: torch.stack([each, each]), dim, out)(data)
        assert read_task(
            torch.vmap(lambda each: torch.cat([each, each])[: each.batch_size[0]], dim, out)(data)
        ) == list(moved["task"])
        assert len(stacked.batch_size) == ndim + 1


def test_nested_vmap_returns_non_tensor_values_in_order() -> None:
    data = make_record((3, 3))
    for inner in (-1, 0):
        result = torch.vmap(torch.vmap(lambda each: each + 0, inner, inner), 1, 1)(data)
        assert result["task"] == data["task"]
    swapped = torch.vmap(torch.vmap(lambda each: each + 0), 1)(data)
    assert swapped["task"] == data.transpose(0, 1)["task"]


def test_vmap_in_dims_of_pytree_treats_collection_as_leaf() -> None:
    data, other = make_record((2, 3)), torch.zeros(5, 3)
    both = torch.vmap(lambda given: given["td"]["x"].sum() + given["x"], ({"td": -1, "x": -1},), -1)
    expected = data["x"].sum((0, 2)) + other
    assert torch.equal(both({"td": data, "x": other}), expected)
    one = torch.vmap(lambda td, x: (td["x"].sum() + x, td), -1, (-1, 0))(data, other)
    assert torch.equal(one[0], expected)
    assert one[1].batch_size == (3, 2)
    left = torch.vmap(lambda td, x: td["x"].sum() + x, (None, 0))(data, other)
    assert torch.equal(left, data["x"].sum() + other)
    without = TensorDict({"w": torch.zeros(2, 5)})
    assert torch.vmap(lambda td: td["w"], -1)(without).shape == (5, 2)


def test_vmap_chunk_size_joins_non_tensor_along_batch_dim() -> None:
    td = TensorDict({"x": torch.arange(24.0).view(4, 3, 2)}, [4, 3])
    result = torch.vmap(lambda each: each + 0, 0, -1, chunk_size=2)(td)
    assert result.batch_size == (3, 4)
    assert torch.equal(result["x"], td["x"].transpose(0, 1))


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((2, 0), r"in_dims=2 is out of range for a TensorDict of batch size \[2, 3\]"),
        ((-3, 0), r"in_dims=-3 is out of range for a TensorDict of batch size \[2, 3\]"),
        ((0, 2), r"out_dims=2 is out of range for a TensorDict of batch size \[3\]"),
        ((0, -3), r"out_dims=-3 is out of range for a TensorDict of batch size \[3\]"),
    ],
)
def test_vmap_dims_outside_batch_raise(dims: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda td: td, *dims)(make_record((2, 3)))


def test_read_non_tensor_stack_inside_vmap_raises() -> None:
    with pytest.raises(StructureError, match="vmap changed the dims"):
        torch.vmap(lambda td: td["x"] + len(td["task"]))(make_record((2, 3)))
    assert torch.vmap(lambda td: td["x"] + len(td["one"]))(make_record((2, 3))).shape == (2, 3, 4)


def test_vmap_over_collection_of_values_only_keeps_their_order() -> None:
    rows = [["a", "b", "c"], ["d", "e", "f"]]
    data = TensorDict({"v": NonTensorStack.from_list(rows, 2), "w": "s"}, batch_size=[2, 3])
    for in_dim, out_dim, wanted in ((0, 0, rows), (1, 1, rows), (1, 0, [list(row) for row in zip(*rows)])):
        result = torch.vmap(lambda data: data, (in_dim,), out_dim)(data)
        assert result.batch_size == torch.Size([len(wanted), len(wanted[0])])
        assert result.get("v").tolist() == wanted and result["w"] == "s"
