"""``TypedTensorDict.from_tensordict``: a view that shares the entries of its source."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core.errors import LockedError
from td_tensorclass import TensorClass, TypedTensorDict


class State(TypedTensorDict):
    x: torch.Tensor
    y: torch.Tensor
    extra: torch.Tensor = None


class Record(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


def make_source(*size: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(*size), "y": torch.zeros(*size)}, size)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda td: td.set("x", torch.ones(3)),
    "set item": lambda td: td.__setitem__("new", torch.ones(3)),
    "update": lambda td: td.update({"x": torch.ones(3), "n": {"z": torch.ones(3)}}),
    "delete": lambda td: td.del_("x"),
    "rename": lambda td: td.rename_key_("x", "z"),
    "write": lambda td: td.fill_("x", 1),
    "index": lambda td: td.__setitem__(0, TensorDict({"x": 1.0, "y": 1.0})),
}


@pytest.mark.parametrize("by_view", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_change_of_view_or_source_is_seen_in_both(change: str, by_view: bool) -> None:
    source, expected = make_source(3), make_source(3)
    view = State.from_tensordict(source)
    CHANGES[change](view if by_view else source)
    CHANGES[change](expected)
    for td in (view, source):
        assert list(td.keys(True, True)) == list(expected.keys(True, True))
        assert (TensorDict(td, td.batch_size) == expected).all()


def test_set_attribute_of_view_reaches_source() -> None:
    source = make_source(3)
    view = State.from_tensordict(source)
    view.x, view.extra = torch.ones(3), torch.ones(3)
    assert source["x"].tolist() == source["extra"].tolist() == [1.0] * 3


def test_view_of_tensorclass_reaches_its_fields() -> None:
    record = Record(torch.zeros(3), torch.zeros(3), batch_size=[3])
    State.from_tensordict(record).x = torch.ones(3)
    assert record.x.tolist() == [1.0] * 3


def test_view_of_parameters_has_own_entries() -> None:
    params = TensorDictParams(make_source(3))
    State.from_tensordict(params).x = torch.ones(3)
    assert params["x"].tolist() == [0.0] * 3 and params["x"].requires_grad


@pytest.mark.parametrize(
    "make", [lambda view: view.clone(), lambda view: view + 0, lambda view: view[:2], copy.deepcopy]
)
def test_result_of_view_is_independent(make: Callable[[Any], Any]) -> None:
    source = make_source(3)
    made = make(State.from_tensordict(source))
    assert type(made) is State
    made["new"] = torch.ones(made.batch_size)
    assert list(source.keys()) == ["x", "y"]


def test_view_of_locked_source_is_locked_with_it() -> None:
    source = make_source(3).lock_()
    view = State.from_tensordict(source)
    with pytest.raises(LockedError, match="the State is locked"):
        view.x = torch.ones(3)
    with pytest.raises(LockedError, match="part of a locked collection"):
        view.unlock_()
    del source
    gc.collect()
    assert not view.unlock_().is_locked


def test_view_without_check_may_lack_keys() -> None:
    view = State.from_tensordict(TensorDict(batch_size=[3]), check=False)
    assert view.batch_size == (3,)
    with pytest.raises(AttributeError, match="the State has no entry 'x'"):
        str(view.x)
    with pytest.raises(TypeError, match=r"State misses the required keys \['x', 'y'\]"):
        State.from_tensordict(TensorDict(batch_size=[3]))


def test_expected_keys_are_all_declared_keys() -> None:
    assert State.__expected_keys__ == frozenset({"x", "y", "extra"})


def make_uneven() -> Any:
    return lazy_stack([TensorDict({"x": torch.zeros(n), "y": torch.zeros(1)}) for n in (1, 2)])


def test_view_of_uneven_stack_has_typed_members() -> None:
    source = make_uneven()
    view = State.from_tensordict(source)
    assert type(view[1]) is State and view[1].x.shape == (2,) and view.y.shape == (2, 1)
    assert view.extra is None and view.batch_size == (2,) and view.stack_dim == 0
    view.y = torch.ones(2, 1)
    view[0].x = torch.ones(1)
    assert source["y"].tolist() == [[1.0], [1.0]] and source.tensordicts[0]["x"].tolist() == [1.0]
    with pytest.raises(TypeError, match=r"misses the required keys \['x'\]"):
        State.from_tensordict(lazy_stack([TensorDict({"y": torch.zeros(1)})] * 2))


@pytest.mark.parametrize(
    "make", [lambda view: pickle.loads(pickle.dumps(view)), copy.deepcopy, lambda view: view.clone()]
)
def test_copy_of_stack_view_keeps_attributes(make: Callable[[Any], Any]) -> None:
    made = make(State.from_tensordict(make_uneven()))
    assert made[1].x.shape == (2,) and made.y.shape == (2, 1) and type(made[0]) is State


class Walk(State):
    LIMIT = 3
    more: torch.Tensor = None

    def add_up(self) -> torch.Tensor:
        return self.x.sum() + self.y.sum()

    @property
    def twice(self) -> torch.Tensor:
        return self.x * 2

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__


class Fixed(TypedTensorDict, frozen=True):
    x: torch.Tensor


class Trip(TypedTensorDict):
    walk: Walk
    z: torch.Tensor


def make_members(*sizes: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.ones(3, n), "y": torch.ones(3)}, [3]) for n in sizes]


STACKS: dict[str, Callable[[], Any]] = {
    "stack": lambda: lazy_stack(make_members(2, 2, 2, 2)),
    "second dim": lambda: lazy_stack(make_members(2, 2, 2), 1),
    "stack of stacks": lambda: lazy_stack([lazy_stack(make_members(2, 2)) for _ in range(3)]),
    "uneven": lambda: lazy_stack(make_members(1, 2, 3)),
    "typed members": lambda: lazy_stack([Walk.from_tensordict(member) for member in make_members(2, 2)]),
    "parameters": lambda: TensorDictParams(make_members(2)[0]),
    "tensorclass": lambda: Record.from_tensordict(lazy_stack(make_members(2, 2))),
    "dense": lambda: make_members(2)[0],
}


def save_and_load(view: Any) -> Any:
    torch.save(view, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


KEEPING: dict[str, Callable[[Any], Any]] = {
    "from_tensordict": lambda view: view,
    "again": Walk.from_tensordict,
    "clone": lambda view: view.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda view: pickle.loads(pickle.dumps(view)),
    "torch.save": save_and_load,
    "slice": lambda view: view[:2],
    "element": lambda view: view[0],
    "mask": lambda view: view[torch.ones(view.shape[0], dtype=torch.bool)],
    "iteration": lambda view: next(iter(view)),
    "unbind": lambda view: view.unbind(0)[0],
    "split": lambda view: view.split(1)[0],
    "stack": lambda view: lazy_stack([view, view]),
    "maybe dense stack": lambda view: view.maybe_dense_stack([view, view]),
    "cat": lambda view: torch.cat([view, view]),
    "to": lambda view: view.to(torch.float64),
    "add": lambda view: view + 1,
    "apply": lambda view: view.apply(lambda leaf: leaf.clone()),
    "unsqueeze": lambda view: view.unsqueeze(0),
    "select": lambda view: view.select("x", "y"),
}


@pytest.mark.parametrize("operation", KEEPING)
@pytest.mark.parametrize("source", STACKS)
def test_result_of_view_is_an_instance_of_its_class(source: str, operation: str) -> None:
    made = KEEPING[operation](Walk.from_tensordict(STACKS[source]()))
    assert isinstance(made, Walk) and isinstance(made, State) and isinstance(made, TypedTensorDict)
    assert not isinstance(made, (Fixed, Trip)) and made.LIMIT == 3 and made.more is None
    made.y = torch.zeros(made.shape)
    assert (made["y"] == 0).all() and (made.y == 0).all()
    if source != "uneven":
        assert made.add_up() == made.x.sum() and (made.twice == made["x"] * 2).all()


def test_stack_of_other_collections_is_not_an_instance() -> None:
    assert not isinstance(lazy_stack(make_members(2, 2)), State)
    assert not isinstance(lazy_stack([State.from_tensordict(make_members(2)[0]), make_members(2)[0]]), State)
    view = State.from_tensordict(lazy_stack(make_members(2, 2)))
    assert isinstance(view, State) and not isinstance(view, (Walk, TensorDict))


def test_lazy_stack_of_typed_members_stacks_nested_ones() -> None:
    walk = Walk.from_tensordict(make_members(2)[0])
    trips = lazy_stack([Trip(walk=walk.clone(), z=torch.ones(3), batch_size=[3]) for _ in range(2)])
    assert isinstance(trips, Trip) and isinstance(trips.walk, Walk) and trips.walk.x.shape == (2, 3, 2)
    trips.walk.x = torch.zeros(2, 3, 2)
    assert (trips["walk", "x"] == 0).all() and (trips[1].walk.x == 0).all()


def test_view_of_stack_with_frozen_class_cannot_change() -> None:
    view: Any = Fixed.from_tensordict(lazy_stack(make_members(2, 2)))
    with pytest.raises(FrozenInstanceError, match="cannot unlock: Fixed is frozen"):
        view.unlock_()
    with pytest.raises(FrozenInstanceError, match="cannot assign to 'x'"):
        view.x = torch.zeros(2, 3, 2)
    assert not view.clone().is_locked


def test_compile_instance_test_of_stack_is_one_graph() -> None:
    torch._dynamo.reset()
    member = State.from_tensordict(make_source(3))

    def run(a: Any, b: Any) -> Any:
        stack = lazy_stack([a, b])
        return stack + 1 if isinstance(stack, State) else stack

    made = torch.compile(run, fullgraph=True, backend="eager")(member, member)
    assert isinstance(made, State) and (made.x == 1).all()
