"""all_gather() and gather_and_stack(): collections that all ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_trees import PARTS, TREES, apart, caught, nested, same

from td_core import TensorDict, TensorDictParams


def gathers_all(rank: int, name: str, parts: bool) -> None:
    with apart(parts):
        result = TREES[name](rank).all_gather()
    assert len(result) == dist.get_world_size()
    for i, item in enumerate(result):
        same(item, TREES[name](i))
        assert item.is_locked == (name == "frozen")


@PARTS
@pytest.mark.parametrize("name", TREES)
def test_all_gather_every_kind_returns_all_ranks(four: Any, name: str, parts: bool) -> None:
    assert four.run(gathers_all, name, parts) == [None] * 4


def gathers(rank: int, dst: int, lazy: bool) -> Any:
    if rank != dst:
        with apart(lazy):
            return nested(rank).gather_and_stack(dst)
    room = [nested(-1) for _ in range(dist.get_world_size() - 1)]
    target = TensorDict.lazy_stack(room) if lazy else TensorDict.stack(room)
    before = target["a"].data_ptr() if not lazy else target[0]["a"].data_ptr()
    with apart(lazy):
        assert target.gather_and_stack(dst) is target
    assert before == (target["a"].data_ptr() if not lazy else target[0]["a"].data_ptr())
    return target["a"][:, 0].tolist(), target["n", "b"][:, 0, 0].tolist()


@pytest.mark.parametrize("lazy", [False, True])
def test_gather_and_stack_writes_items_of_other_ranks(four: Any, lazy: bool) -> None:
    assert four.run(gathers, 2, lazy) == [None, None, ([0.0, 1.0, 3.0], [0, 1, 3]), None]


def gathers_parameters(rank: int) -> Any:
    if rank:
        return TensorDict({"w": torch.full((3,), 5.0)}).gather_and_stack(0)
    target = TensorDictParams(TensorDict({"w": torch.zeros(1, 3)}, [1]))
    parameter = target["w"]
    assert target.gather_and_stack(0) is target
    assert target["w"] is parameter and parameter.requires_grad
    return parameter.tolist()


def test_gather_and_stack_into_parameters_writes_them(two: Any) -> None:
    assert two.run(gathers_parameters) == [[[5.0, 5.0, 5.0]], None]


def gathers_what_does_not_fit(rank: int, lazy: bool) -> Any:
    tree = nested(rank) if rank < 3 else nested(rank).set("a", torch.ones(2, 5))
    if rank:
        return tree.gather_and_stack(0)
    target = (TensorDict.lazy_stack if lazy else TensorDict.stack)([nested(-1) for _ in range(3)])
    before = target.clone()
    message = caught(lambda: target.gather_and_stack(0))
    same(target, before)
    return message.partition(":")[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_gather_and_stack_other_shape_changes_nothing(four: Any, lazy: bool) -> None:
    assert four.run(gathers_what_does_not_fit, lazy) == ["StructureError", None, None, None]


def gathers_into_another_number(rank: int) -> Any:
    target = TensorDict({"a": torch.zeros(2 if rank else (2, 2))})
    message = caught(lambda: target.gather_and_stack(0))
    return message, target["a"].tolist()


def test_gather_and_stack_wrong_first_dim_raises(four: Any) -> None:
    message, kept = four.run(gathers_into_another_number)[0]
    assert message == "BatchSizeError: cannot take 3 items: key 'a' has shape [2, 2]"
    assert kept == [[0, 0], [0, 0]]


def gathers_into_nothing(rank: int) -> Any:
    target = nested(rank) if rank else TensorDict({}, [3])
    result = target.gather_and_stack(0)
    return None if result is None else result["a"].tolist()


def test_gather_and_stack_adds_missing_entries(four: Any) -> None:
    assert four.run(gathers_into_nothing)[0] == [[1, 1], [2, 2], [3, 3]]
