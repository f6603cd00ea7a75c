"""send() and recv() between two processes: content, handles, order, tags and groups."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message_trees import TREES, assert_same, make_blank

from td_core import TensorDict
from td_core.errors import StructureError
from td_distributed._p2p import WIRES


def exchange(rank: int, name: str, options: dict[str, Any], early: bool) -> Any:
    tree = TREES[name]()
    if rank == 0:
        if early:
            for work in tree.isend(1, return_early=True, **options):
                work.wait()
            return None
        return tree.send(1, **options)
    target = make_blank(tree)
    if early:
        for work in target.irecv(0, return_premature=True, **options):
            work.wait()
    else:
        target.recv(0, **options)
    assert_same(target, TREES[name]())
    return None


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_send_recv_every_kind_keeps_content(two: Any, name: str, consolidated: bool) -> None:
    assert two.run(exchange, name, {"consolidated": consolidated}, False) == [None, None]


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["nested", "lazy"])
def test_isend_irecv_wait_on_handles_completes(two: Any, name: str, wire: str, consolidated: bool) -> None:
    assert two.run(exchange, name, {"wire": wire, "consolidated": consolidated}, True) == [None, None]


def exchange_without_handles(rank: int, wire: str) -> Any:
    tree = TREES["nested"]()
    if rank == 0:
        return tree.isend(1, init_tag=4, wire=wire), tree.isend(1, init_tag=4, wire=wire)
    target, other = make_blank(tree), make_blank(tree)
    result = target.irecv(0, init_tag=4, wire=wire), other.recv(0, init_tag=4, wire=wire)
    assert_same(target, tree)
    assert_same(other, tree)
    return result


@pytest.mark.parametrize(("wire", "last"), [("td", 4), ("reference", 6)])
def test_isend_irecv_without_return_early_waits(two: Any, wire: str, last: int) -> None:
    assert two.run(exchange_without_handles, wire, limit=20) == [(last, last), (None, last)]


def drop_send_handles(rank: int, size: int) -> None:
    following = TREES["flat"]()
    if rank == 0:
        TensorDict({"a": torch.ones(size), "b": torch.ones(3)}).isend(1, return_early=True)
        gc.collect()
        following.send(1)
        return
    time.sleep(1)  # the handles are freed before the peer receives anything
    target = TensorDict({"a": torch.zeros(size), "b": torch.zeros(3)})
    target.recv(0)
    assert target["a"].sum().item() == size
    target = make_blank(following)
    target.recv(0)
    assert_same(target, following)


@pytest.mark.parametrize("size", [10, 1 << 22])
def test_isend_dropped_handles_still_sends(two: Any, size: int) -> None:
    assert two.run(drop_send_handles, size) == [None, None]


def replace_leaf_in_transit(rank: int, fits: bool) -> Any:
    if rank == 0:
        dist.barrier()
        TensorDict({"a": torch.ones(3), "b": torch.ones(2)}).send(1)
        return None
    target = TensorDict({"a": torch.zeros(3), "b": torch.zeros(2)})
    old = target["a"]
    (handle,) = target.irecv(0, return_premature=True)
    time.sleep(0.2)  # time for the thread to encode the collection
    target["a"] = torch.zeros(3 if fits else 4)
    dist.barrier()
    error = None
    try:
        handle.wait()
    except StructureError as caught:
        error = str(caught)
    assert not old.any()
    return target["a"].tolist(), target["b"].tolist(), error


@pytest.mark.parametrize("fits", [True, False])
def test_irecv_leaf_replaced_in_transit_writes_new_leaf(two: Any, fits: bool) -> None:
    first, second, error = two.run(replace_leaf_in_transit, fits)[1]
    if fits:
        assert (first, second, error) == ([1.0] * 3, [1.0] * 2, None)
    else:
        assert (first, second) == ([0.0] * 4, [0.0] * 2)
        assert "key 'a' is torch.float32 of shape [4] here" in error


def send_both_ways(rank: int, consolidated: bool) -> None:
    # Larger than the buffer of a socket, so that two blocking sends would deadlock.
    mine, theirs = (
        TensorDict({"a": torch.full((1 << 22,), i), "b": torch.ones(i + 1)}) for i in (rank, 1 - rank)
    )
    target = make_blank(theirs)
    works = mine.isend(1 - rank, consolidated=consolidated, return_early=True)
    target.recv(1 - rank)
    for work in works:
        work.wait()
        assert work.is_completed()
    assert_same(target, theirs)


@pytest.mark.parametrize("consolidated", [False, True])
def test_isend_irecv_both_ways_does_not_deadlock(two: Any, consolidated: bool) -> None:
    assert two.run(send_both_ways, consolidated) == [None, None]


def receive_before_send(rank: int, size: int, options: dict[str, Any]) -> Any:
    mine, theirs = (TensorDict({"a": torch.full((size,), i), "b": torch.ones(3)}) for i in (rank, 1 - rank))
    target = make_blank(theirs)
    (coming,) = target.irecv(1 - rank, return_premature=True, **options)
    mine.send(1 - rank, **options)
    written = target["b"].sum().item() if options.get("wire") is None else 0
    coming.wait()
    assert coming.is_completed()
    assert_same(target, theirs)
    coming.wait()  # a second wait() is a no-op
    return written


@pytest.mark.parametrize("options", [{}, {"consolidated": True}, {"wire": "reference"}])
@pytest.mark.parametrize("size", [2, 1 << 20])
def test_irecv_before_send_on_both_ranks_does_not_deadlock(
    two: Any, size: int, options: dict[str, Any]
) -> None:
    assert two.run(receive_before_send, size, options, limit=20) == [0, 0]


def receive_several(rank: int, last: str) -> Any:
    trees = [TensorDict({"a": torch.full((1 << 18,), i), "b": torch.ones(i + 1)}) for i in range(4)]
    if rank == 0:
        works = [work for tree in trees for work in tree.isend(1, return_early=True)]
        for work in works:
            work.wait()
        return None
    targets = [make_blank(tree) for tree in trees]
    handles = [target.irecv(0, return_premature=True)[0] for target in targets[:3]]
    if last == "recv":
        targets[3].recv(0)
    else:
        targets[3].irecv(0)
    while not all(handle.is_completed() for handle in handles):
        time.sleep(0.001)
    assert not any(target["b"].any() for target in targets[:3])
    for handle in reversed(handles):
        handle.wait()
    for target, tree in zip(targets, trees, strict=True):
        assert_same(target, tree)


@pytest.mark.parametrize("last", ["recv", "irecv"])
def test_irecv_several_keeps_order_of_calls(two: Any, last: str) -> None:
    assert two.run(receive_several, last, limit=20) == [None, None]


def drop_recv_handle(rank: int, wire: str) -> None:
    sent = TREES["nested"]()
    if rank == 0:
        sent.send(1, wire=wire)
        sent.send(1, wire=wire)
        return
    make_blank(sent).irecv(0, return_premature=True, wire=wire)
    gc.collect()
    target = make_blank(sent)
    target.recv(0, wire=wire)
    assert_same(target, sent)


@pytest.mark.parametrize("wire", WIRES)
def test_irecv_dropped_handle_still_receives(two: Any, wire: str) -> None:
    assert two.run(drop_recv_handle, wire, limit=20) == [None, None]


def receive_repeatedly(rank: int) -> Any:
    sent = TensorDict({"a": torch.ones(3), "n": {"b": torch.arange(4)}})
    if rank == 0:
        for i in range(6):
            (sent + i).send(1)
        return None
    ordered, turned = make_blank(sent), TensorDict({"n": {"b": torch.zeros(4).long()}, "a": torch.zeros(3)})
    strided = TensorDict({"a": torch.zeros(3, 2)[:, 0], "n": {"b": torch.zeros(8).long()[::2]}})
    frozen = TensorDict({"a": torch.zeros(1).expand(3), "n": {"b": torch.zeros(4).long()}})
    errors = []
    for i, target in enumerate(
        [ordered, turned, strided, frozen, TensorDict({"a": torch.zeros(3)}), ordered]
    ):
        try:
            target.recv(0)
            assert bool((target == sent + i).all())
        except StructureError as caught:
            errors.append(str(caught))
    assert not frozen["a"].any() and not frozen["n", "b"].any()
    assert ordered["a"].tolist() == [6.0] * 3 and turned["a"].tolist() == [2.0] * 3
    return errors


def test_recv_same_header_into_other_layouts_keeps_content(two: Any) -> None:
    expanded, missing = two.run(receive_repeatedly)[1]
    assert "key 'a' in place: it is expanded" in expanded
    assert "key 'n' is missing here" in missing


def exchange_on_tensordict_wire(rank: int, name: str, options: dict[str, Any]) -> Any:
    tree = TREES[name]()
    if rank == 0:
        sent = []
        world = dist.group.WORLD

        class Recorder:
            def name(self) -> str:
                return str(world.name())

            def size(self) -> int:
                return int(world.size())

            def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
                sent.extend((tag, str(tensor.dtype), list(tensor.shape)) for tensor in tensors)
                return world.send(tensors, dst, tag)

        tree.send(group=Recorder(), group_dst=1, wire="reference", **options)
        return sent
    target = make_blank(tree)
    last = target.recv(0, wire="reference", **options)
    assert_same(target, TREES[name]())
    return last


@pytest.mark.parametrize(
    ("name", "options", "messages", "last"),
    [
        ("flat", {}, [(0, "torch.float32", [2]), (1, "torch.int64", [2, 3])], 1),
        ("flat", {"init_tag": 7}, [(7, "torch.float32", [2]), (8, "torch.int64", [2, 3])], 8),
        (
            "nested",
            {"init_tag": 5, "pseudo_rand": True},
            [(1262, "torch.float32", [2]), (841, "torch.int64", [4]), (4077, "torch.float32", [3])],
            4077,
        ),
        ("lazy", {}, [(0, "torch.int64", [3]), (1, "torch.int64", [3]), (2, "torch.int64", [3])], 2),
        ("flat", {"consolidated": True}, [(0, "torch.uint8", [56])], 0),
        ("tied", {"consolidated": True}, [(0, "torch.uint8", [32])], 0),
        (
            "conjugate",
            {},
            [(0, "torch.complex64", [1]), (1, "torch.float32", [3]), (2, "torch.float32", [2])],
            2,
        ),
    ],
)
def test_send_recv_tensordict_wire_keeps_content(
    two: Any, name: str, options: dict[str, Any], messages: list[Any], last: int
) -> None:
    assert two.run(exchange_on_tensordict_wire, name, options) == [messages, last]


def exchange_with_tags(rank: int) -> Any:
    group = dist.new_group([0, 1])
    tree = TREES["nested"]()
    if rank == 0:
        tree.send(group_dst=1, group=group, init_tag=30)
        return tree.send(1, group=group, init_tag=5, pseudo_rand=True)
    target = make_blank(tree)
    tags = [
        target.recv(group_src=0, group=group, init_tag=30),
        target.recv(0, group=group, init_tag=5, pseudo_rand=True),
    ]
    assert_same(target, tree)
    return tags


def test_send_recv_with_groups_and_tags_keeps_content(two: Any) -> None:
    sender, tags = two.run(exchange_with_tags)
    assert sender is None
    assert tags == [30, 1262]


def test_send_recv_manual_process_group_keeps_content() -> None:
    store = dist.HashStore()
    answers: list[Any] = []

    def member(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=40))
        tree = TREES["nested"]()
        if rank == 0:
            tree.send(group=group, group_dst=1)
            tree.send(group=group, group_dst=1, wire="reference")
            for work in tree.isend(group=group, group_dst=1, consolidated=True, return_early=True):
                work.wait()
            return
        for options in ({}, {"wire": "reference"}, {}):
            target = make_blank(tree)
            target.recv(group=group, group_src=0, **options)
            assert_same(target, tree)
            answers.append(options)

    threads = [Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3
