"""Tensorclasses that hold a lazy stack: members of different shapes, fields that only some members have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, dense_stack_tds, group_by, lazy_stack
from td_core.errors import BatchSizeError, StructureError
from td_tensorclass import (
    NonTensorData,
    NonTensorStack,
    TensorClass,
    UnbatchedTensor,
    UnknownFieldError,
    is_leaf_nontensor,
)


class Sample(TensorClass):
    image: Tensor
    caption: str
    boxes: Tensor = None


class Other(TensorClass):
    image: Tensor


class Agent(TensorClass):
    params: TensorDict
    name: str


def make_sample(i: int) -> Sample:
    return Sample(torch.full((i + 1,), float(i)), f"caption {i}", torch.ones(i, 4) if i else None)


def make_lazy_samples(*numbers: int) -> Sample:
    return lazy_stack([make_sample(i) for i in numbers])


def read_captions(stack: Sample) -> list[int]:
    return [int(caption.split()[1]) for caption in stack.caption]


def test_append_insert_extend_lazy_stack_adds_members() -> None:
    stack = make_lazy_samples(1, 2)
    stack.append(make_sample(3))
    stack.insert(0, make_sample(0))
    stack.extend([make_sample(4)])
    stack.extend(make_lazy_samples(5, 6))
    assert read_captions(stack) == [0, 1, 2, 3, 4, 5, 6]
    assert stack.batch_size == (7,)
    with pytest.raises(StructureError, match="cannot join a Sample and a Other"):
        stack.append(Other(torch.zeros(1)))
    with pytest.raises(StructureError, match="only a lazy stack can be extended"):
        torch.stack([make_sample(1), make_sample(1)]).append(make_sample(1))


def test_lazy_stack_tensordicts_are_tensorclass_instances() -> None:
    stack = make_lazy_samples(1, 2)
    assert stack.stack_dim == 0
    assert [type(member) for member in stack.tensordicts] == [Sample, Sample]
    assert stack.tensordicts[1].image.equal(make_sample(2).image)
    assert not hasattr(make_sample(1), "stack_dim")
    assert not hasattr(make_sample(1), "tensordicts")


def test_get_field_that_only_some_members_have_returns_list() -> None:
    stack = make_lazy_samples(0, 2)
    for boxes in (stack.boxes, stack.get("boxes")):
        assert boxes[0] is None
        assert boxes[1].shape == (2, 4)
    assert stack[1].boxes.shape == (2, 4)
    assert make_lazy_samples(0, 0).boxes is None
    stack.boxes = None
    assert stack.boxes is None
    assert stack[1].boxes is None


@pytest.mark.parametrize("index", [1, slice(1, None), [2, 0], torch.tensor([True, False, True]), (None, 1)])
def test_index_lazy_stack_returns_tensorclass(index: object) -> None:
    stack = make_lazy_samples(1, 2, 3)
    wanted = torch.arange(1, 4)[index]
    found = stack[index]
    assert type(found) is Sample
    assert found.batch_size == wanted.shape
    for i, part in zip(wanted.flatten().tolist(), found.reshape(-1).unbind(0) if wanted.ndim else [found]):
        assert (part.caption, part.image.tolist()) == (f"caption {i}", make_sample(i).image.tolist())


def test_lazy_stack_set_non_tensor_sets_every_member() -> None:
    stack = lazy_stack([TensorDict({}, [2]), TensorDict({}, [3])])
    stack["a"] = "x"
    stack.update({"n": {"b": "y"}})
    for member, size in zip(stack.tensordicts, (2, 3), strict=True):
        assert (member["a"], member["n", "b"]) == ("x", "y")
        assert member.get("a").batch_size == member["n"].get("b").batch_size == (size,)


class Nested(TensorClass):
    image: Tensor
    below: TensorDict


def make_nested() -> Nested:
    below = TensorDict({"x": torch.ones(2)}, [2])
    return lazy_stack([Nested(torch.zeros(2, 3), below, batch_size=[2]) for _ in range(3)])


def test_flatten_keys_of_lazy_stack_is_plain_collection() -> None:
    stack = make_nested()
    with stack.flatten_keys() as flat:
        assert type(flat) is LazyStackedTensorDict
        assert list(flat.keys()) == ["image", "below.x"]
        flat["below.x"] = torch.zeros(3, 2)
    assert stack.below["x"].tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    "operation",
    [
        lambda stack: stack.densify(),
        lambda stack: stack.empty(batch_size=[3]),
        lambda stack: stack.empty(batch_size=[5]),
        lambda stack: stack.empty(recurse=True, batch_size=[5]),
    ],
)
def test_operation_on_lazy_stack_keeps_tensorclass(operation) -> None:
    assert type(operation(make_nested())) is Nested


@pytest.mark.parametrize("size", [[], [2], [2, 2]])
def test_set_batch_size_without_stack_dim_raises(size) -> None:
    stack = make_nested()
    with pytest.raises(BatchSizeError, match="does not fit a stack of 3 along dim 0: the stack dim stays"):
        stack.batch_size = size
    assert [member.batch_size for member in stack.tensordicts] == [(2,)] * 3


@pytest.mark.parametrize(
    "entry", [{("no field", "x"): torch.ones(3, 2)}, {"no field": {"x": torch.ones(3, 2)}}]
)
def test_update_unknown_field_changes_nothing(entry) -> None:
    for stack in (make_nested(), torch.stack(list(make_nested().tensordicts))):
        with pytest.raises(UnknownFieldError, match="Nested has no field .*no field"):
            stack.update({"image": torch.ones(3, 2, 3), **entry})
        assert not stack.image.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack.set("z", torch.ones(2, 3)),
        lambda stack: stack.set(("z", "y"), torch.ones(2, 3)),
        lambda stack: stack.update({"image": torch.ones(2, 3), "z": torch.ones(2, 3)}),
        lambda stack: stack.update({"image": torch.ones(2, 3), "z": torch.ones(2, 3)}, inplace=True),
        lambda stack: stack.rename_key_("image", "z"),
        lambda stack: stack.__setitem__(slice(None), {"image": torch.ones(2, 3), "z": torch.ones(2, 3)}),
    ],
)
def test_set_unknown_field_of_one_member_changes_none(change) -> None:
    members = [TensorDict({"image": torch.zeros(3)}, [3]), Other(torch.zeros(3), batch_size=[3])]
    images = [member.get("image") for member in members]
    with pytest.raises(UnknownFieldError, match="Other has no field 'z'"):
        change(LazyStackedTensorDict(*members))
    for member, image in zip(members, images):
        assert list(member.keys()) == ["image"] and member.get("image") is image and not image.any()


def test_repr_entry_of_mixed_classes_lists_classes() -> None:
    class_first = lazy_stack(
        [TensorDict({"s": make_sample(1)}), TensorDict({"s": make_sample(1).to_tensordict()})]
    )
    assert "s: [Sample, TensorDict]" in repr(class_first)


def test_filter_non_tensor_data_in_one_member_removes_it() -> None:
    stack = lazy_stack([TensorDict({"a": 1}), TensorDict({"a": 1, "hidden": "x", "n": {"b": 1, "c": "y"}})])
    filtered = stack.filter_non_tensor_data()
    assert [list(member.keys(True, True)) for member in filtered.tensordicts] == [["a"], ["a", ("n", "b")]]
    assert "hidden" in stack.tensordicts[1]


@pytest.mark.parametrize("key", ["caption", ("n", "caption")])
@pytest.mark.parametrize("stacked", [False, True])
def test_group_by_non_tensor_field_returns_groups(stacked, key) -> None:
    items = [Sample(torch.ones(()), caption) for caption in "xyx"]
    data = (lazy_stack if stacked else torch.stack)(items)
    if isinstance(key, tuple):
        data = TensorDict({"n": data}, [3])
    values, groups = group_by(data, key)
    assert values == ["x", "y"]
    assert [len(group) for group in groups] == [2, 1]
    assert group_by(data[:0], key) == ([], ())


@pytest.mark.parametrize("nested", [False, True])
def test_expand_as_tensorclass_keeps_class(nested) -> None:
    data = Sample(torch.ones(2, 1), "a", batch_size=[2])
    goal = Sample(torch.zeros(3, 2, 4), "b", batch_size=[3, 2])
    if nested:
        data, goal = TensorDict({"n": data}, [2]), TensorDict({"n": goal}, [3, 2])
    expanded = data.expand_as(goal)
    found = expanded["n"] if nested else expanded
    assert type(found) is Sample
    assert found.image.shape == (3, 2, 4)
    assert found.caption == "a"
    assert expanded.batch_size == found.batch_size == (3, 2)


def write_to_flat_view(stack) -> None:
    with stack.view(-1) as flat:
        flat.set_("image" if isinstance(stack, Sample) else ("n", "image"), torch.ones(4))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        write_to_flat_view,
        lambda stack: stack.load_state_dict(stack.apply(torch.ones_like).state_dict()),
        lambda stack: stack.update_(stack.apply(torch.ones_like).to_tensordict()),
        lambda stack: stack.copy_(stack.apply(torch.ones_like).to_tensordict()),
    ],
)
def test_lazy_stack_write_keeps_non_tensor_of_each_member(write, locked, nested) -> None:
    members = [Sample(torch.zeros(2), caption, batch_size=[2]) for caption in "ab"]
    stack = lazy_stack([TensorDict({"n": member}, [2]) if nested else member for member in members])
    if locked:
        stack.lock_()
    write(stack)
    kept = [member["n"] if nested else member for member in stack]
    assert [member.caption for member in kept] == ["a", "b"]
    assert all(member.image.tolist() == [1, 1] for member in kept)


def test_lazy_stack_load_state_dict_writes_each_member() -> None:
    stack = lazy_stack([Sample(torch.zeros(2), caption, batch_size=[2]) for caption in "ab"])
    state = lazy_stack([Sample(torch.zeros(2), caption, batch_size=[2]) for caption in "cb"]).state_dict()
    stack.lock_().load_state_dict(state)
    assert stack.caption == [["c", "c"], ["b", "b"]]
    assert stack[1].caption == "b"


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.__setitem__(slice(None), y),
        lambda x, y: x.__setitem__(torch.arange(3), y),
        lambda x, y: x.update_(y),
        lambda x, y: x.update_at_(y, slice(None)),
        lambda x, y: x.update(y, inplace=True),
    ],
)
@pytest.mark.parametrize("leaves", [False, True])
def test_lazy_stack_update_from_permuted_self_permutes_values(write, leaves) -> None:
    def member(i: int) -> TensorDict:
        td = TensorDict({"label": NonTensorData(str(i))})
        return td.set("x", torch.tensor(i)) if leaves else td

    stack = lazy_stack([member(i) for i in range(3)])
    write(stack, stack[[2, 0, 1]])
    assert stack["label"] == ["2", "0", "1"]
    assert not leaves or stack["x"].tolist() == [2, 0, 1]


COPIES = {
    "itself": lambda agent: agent.clone(),
    "in a collection": lambda agent: TensorDict({"a": agent, "b": 0}).clone()["a"],
    "updated": lambda agent: TensorDict().update({"a": agent}, clone=True)["a"],
    "in a stack": lambda agent: lazy_stack([agent, agent]).clone()[1],
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_deepcopy_parameters_field_stays_parameters(copied) -> None:
    params = TensorDictParams(TensorDict({"w": torch.ones(2)}))
    again = copied(Agent(params, "left"))
    assert type(again) is Agent and again.name == "left"
    assert type(again.params) is TensorDictParams
    (parameter,) = again.params.parameters()
    assert parameter is again.params["w"] is not params["w"]
    assert torch.equal(again.params["w"], params["w"])


def test_append_to_lazy_stack_reads_no_members(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, more = make_lazy_samples(1), [make_sample(2), make_sample(0)]
    with monkeypatch.context() as patch:
        patch.setattr(
            LazyStackedTensorDict, "_members_and_dim", None
        )  # calling it copies the list of members
        stack.append(more[0])
        stack.insert(0, more[1])
    assert read_captions(stack) == [0, 1, 2]


def test_from_tensordict_uneven_stack_stays_lazy() -> None:
    class Noted(TensorClass):
        x: torch.Tensor
        note: Any = None

    stack = lazy_stack([TensorDict({"x": torch.arange(float(n))}) for n in (2, 3)])
    noted = Noted.from_tensordict(stack, {"note": "north"})
    assert [member.x.tolist() for member in noted] == [[0, 1], [0, 1, 2]]
    assert [member.note for member in noted] == ["north", "north"] and "note" not in stack


@pytest.mark.parametrize("wrap", [lambda node: node, lambda node: TensorDict({"o": node, "v": "text"}, [3])])
def test_set_batch_size_above_lazy_instance_sets_members_once(wrap: Any) -> None:
    td = TensorDict({"n": wrap(lazy_stack([Other(torch.zeros(4)) for _ in range(3)]))}, [3])
    td.batch_size = [3, 4]
    node = td["n"] if isinstance(td["n"], Other) else td["n", "o"]
    assert node.batch_size == td["n"].batch_size == (3, 4)
    assert [member.batch_size for member in node.tensordicts] == [(4,)] * 3


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.update_({"image": torch.ones(2, 2)}),
        lambda td: td.set_("image", torch.ones(2, 2)),
        lambda td: td.update_(TensorDict({"image": torch.ones(2, 2)}, [2])),
    ],
)
def test_write_below_instance_applies_hook_of_lazy_stack(write: Any) -> None:
    members = [TensorDict({"image": torch.zeros(2)}) for _ in range(2)]
    stack = LazyStackedTensorDict(*members, hook_in=lambda value: value * 3)
    write(Other.from_tensordict(stack))
    assert [member["image"].tolist() for member in members] == [[3.0, 3.0]] * 2


def test_holders_of_wrapped_stack_are_wrapped() -> None:
    stack = lazy_stack([Sample(torch.zeros(2), caption, batch_size=[2]) for caption in "ab"])
    holders = [holder for (holder,) in stack._zip_members()]
    assert [type(holder) for holder in holders] == [Sample, Sample]
    assert [holder.caption for holder in holders] == ["a", "b"]
    assert [row[0].caption for row in stack._zip_members(torch.zeros(2, 2))] == ["a", "b"]


@pytest.mark.parametrize("nested", [False, True])
def test_map_members_of_wrapped_stack_keeps_class_of_results(nested) -> None:
    stack = lazy_stack([Sample(torch.zeros(2), caption, batch_size=[2]) for caption in "ab"])
    stack = lazy_stack([stack, stack]) if nested else stack
    assert type(stack._map_members(lambda node: node)) is Sample
    assert type(stack._map_members(lambda node: node._inner())) is LazyStackedTensorDict
    assert stack._map_members(lambda node: None) is None


def test_write_back_of_equal_values_keeps_value_of_each_member() -> None:
    members = [
        TensorDict({"v": "a", "x": torch.zeros(2)}, [2]),
        TensorDict({"v": "b", "x": torch.zeros(2)}, [2]),
    ]
    stack = lazy_stack(members)
    with stack.view(-1) as flat:
        flat["x"] = torch.ones(4)
    assert [member["v"] for member in members] == ["a", "b"]
    assert stack["x"].tolist() == [[1, 1], [1, 1]]


def test_dense_stack_tds_keeps_the_class() -> None:
    points = lazy_stack([Other(torch.full((2,), float(i)), batch_size=[2]) for i in range(3)], -1)
    dense = dense_stack_tds(points)
    assert type(dense) is Other and dense.image.tolist() == [[0, 1, 2]] * 2
    assert dense_stack_tds(dense) is dense


def make_record(value: Any, **more: Any) -> TensorDict:
    return TensorDict({"v": value, **more})


#: Members whose entries "v" cannot be joined, and the keys of their lazy stack.
UNEVEN: dict[str, tuple[list[TensorDict], list[Any]]] = {
    "tensors": ([make_record(torch.ones(n)) for n in (1, 2)], ["v"]),
    "tensors of the whole batch": ([make_record(UnbatchedTensor(torch.ones(n))) for n in (1, 2)], ["v"]),
    "values": ([make_record(NonTensorStack(*"ab"[:n])) for n in (1, 2)], ["v"]),
    "values and tensors": ([make_record("a"), make_record(torch.ones(1))], ["v"]),
    "tensors and values": ([make_record(torch.ones(1)), make_record("a")], ["v"]),
    "values and collections": ([make_record("a"), make_record({"x": 1})], ["v"]),
    "collections and values": ([make_record({"x": 1}), make_record("a")], ["v"]),
    "values and whole tensors": ([make_record("a"), make_record(UnbatchedTensor(torch.ones(1)))], ["v"]),
    "whole tensors and values": ([make_record(UnbatchedTensor(torch.ones(1))), make_record("a")], ["v"]),
    "two classes": (
        [make_record(Other(torch.ones(1))), make_record({"image": torch.ones(1)})],
        ["v", ("v", "image")],
    ),
    "class and other keys": ([make_record(Other(torch.ones(1))), make_record({"x": 1})], ["v"]),
    "numbers of dims": (
        [make_record(TensorDict({"x": torch.ones(2, 3)[(0,) * n]}, [2, 3][n:])) for n in (0, 1)],
        ["v", ("v", "x")],
    ),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", UNEVEN)
def test_list_keys_of_stack_of_uneven_entries_joins_nothing(
    name: str, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, keys = UNEVEN[name]
    stack: Any = lazy_stack(members)
    if nested:
        stack, keys = (
            TensorDict({"s": stack}),
            ["s", *[("s", *([key] if isinstance(key, str) else key)) for key in keys]],
        )
    monkeypatch.setattr(torch, "stack", None)
    assert list(stack.keys(True)) == keys and len(stack.keys(True)) == len(keys)
    assert all(key in stack.keys(True) for key in keys) and ("v", "q") not in stack.keys(True)
    assert list(stack.keys(True, sort=True)) == keys and set(stack.keys()) == {keys[0]}
    assert next(iter(stack.keys(True, is_leaf=is_leaf_nontensor))) == keys[0]
    assert {*stack.keys(True, True)} <= {*keys}
    assert isinstance(stack.entry_class(keys[0]), type)
    assert all(isinstance(stack.is_non_tensor(key), bool) for key in keys)
    assert keys[0] in repr(stack)
    stack.values(True), stack.items(True)


def test_list_keys_of_values_that_differ_before_the_stack_dim_joins_nothing() -> None:
    stack = lazy_stack([TensorDict({"v": NonTensorStack(*"abc"[:n])}, [n]) for n in (2, 3)], 1)
    assert list(stack.keys(True)) == ["v"] and "v" in stack
    with pytest.raises(StructureError, match=r"batch size \[-1, 2\] has no length"):
        len(stack)
