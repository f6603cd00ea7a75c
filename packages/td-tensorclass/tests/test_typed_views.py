"""``TypedTensorDict.from_tensordict``: a view that shares the entries of its source."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
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
