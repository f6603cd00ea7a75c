"""all_gather() and gather_and_stack(): collections that all ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_trees import PARTS, TREES, assert_same, catch_error, make_nested, send_in_parts

from td_core import TensorDict, TensorDictParams


def gather_all(rank: int, name: str, parts: bool) -> None:
    with send_in_parts(parts):
        result = TREES[name](rank).all_gather()
    assert len(result) == dist.get_world_size()
    for i, item in enumerate(result):
        assert_same(item, TREES[name](i))
        assert item.is_locked == (name == "frozen")


@PARTS
@pytest.mark.parametrize("name", TREES)
def test_all_gather_every_kind_returns_all_ranks(four: Any, name: str, parts: bool) -> None:
    assert four.run(gather_all, name, parts) == [None] * 4


def gather_to_rank(rank: int, dst: int, lazy: bool) -> Any:
    if rank != dst:
        with send_in_parts(lazy):
            return make_nested(rank).gather_and_stack(dst)
    room = [make_nested(-1) for _ in range(dist.get_world_size() - 1)]
    target = TensorDict.lazy_stack(room) if lazy else TensorDict.stack(room)
    before = target["a"].data_ptr() if not lazy else target[0]["a"].data_ptr()
    with send_in_parts(lazy):
        assert target.gather_and_stack(dst) is target
    assert before == (target["a"].data_ptr() if not lazy else target[0]["a"].data_ptr())
    return target["a"][:, 0].tolist(), target["n", "b"][:, 0, 0].tolist()


@pytest.mark.parametrize("lazy", [False, True])
def test_gather_and_stack_writes_items_of_other_ranks(four: Any, lazy: bool) -> None:
    assert four.run(gather_to_rank, 2, lazy) == [None, None, ([0.0, 1.0, 3.0], [0, 1, 3]), None]


def gather_uneven(rank: int) -> Any:
    rows = TensorDict({"a": torch.full((rank,), float(rank))})
    members = [item["a"].tolist() for item in TensorDict.lazy_stack(rows.all_gather()).tensordicts]
    if rank:
        return members, rows.gather_and_stack(0)
    room = TensorDict.lazy_stack([TensorDict() for _ in range(3)])
    return members, [item["a"].tolist() for item in room.gather_and_stack(0).tensordicts]


def test_uneven_rows_are_gathered_into_a_lazy_stack(four: Any) -> None:
    rows = [[], [1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]
    assert four.run(gather_uneven) == [(rows, rows[1:]), (rows, None), (rows, None), (rows, None)]


def gather_parameters(rank: int) -> Any:
    if rank:
        return TensorDict({"w": torch.full((3,), 5.0)}).gather_and_stack(0)
    target = TensorDictParams(TensorDict({"w": torch.zeros(1, 3)}, [1]))
    parameter = target["w"]
    assert target.gather_and_stack(0) is target
    assert target["w"] is parameter and parameter.requires_grad
    return parameter.tolist()


def test_gather_and_stack_into_parameters_writes_them(two: Any) -> None:
    assert two.run(gather_parameters) == [[[5.0, 5.0, 5.0]], None]


def gather_other_shape(rank: int, lazy: bool) -> Any:
    tree = make_nested(rank) if rank < 3 else make_nested(rank).set("a", torch.ones(2, 5))
    if rank:
        return tree.gather_and_stack(0)
    target = (TensorDict.lazy_stack if lazy else TensorDict.stack)([make_nested(-1) for _ in range(3)])
    before = target.clone()
    message = catch_error(lambda: target.gather_and_stack(0))
    assert_same(target, before)
    return message.partition(":")[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_gather_and_stack_other_shape_changes_nothing(four: Any, lazy: bool) -> None:
    assert four.run(gather_other_shape, lazy) == ["StructureError", None, None, None]


def gather_wrong_first_dim(rank: int) -> Any:
    target = TensorDict({"a": torch.zeros(2 if rank else (2, 2))})
    message = catch_error(lambda: target.gather_and_stack(0))
    return message, target["a"].tolist()


def test_gather_and_stack_wrong_first_dim_raises(four: Any) -> None:
    message, kept = four.run(gather_wrong_first_dim)[0]
    assert message == "BatchSizeError: cannot take 3 items: key 'a' has shape [2, 2]"
    assert kept == [[0, 0], [0, 0]]


def gather_into_empty(rank: int) -> Any:
    target = make_nested(rank) if rank else TensorDict({}, [3])
    result = target.gather_and_stack(0)
    return None if result is None else result["a"].tolist()


def test_gather_and_stack_adds_missing_entries(four: Any) -> None:
    assert four.run(gather_into_empty)[0] == [[1, 1], [2, 2], [3, 3]]
