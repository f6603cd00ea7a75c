"""Sending between two processes: values, mismatches, dead peers, and no deadlocks."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._buffers import as_bytes
from td_core.errors import StructureError
from td_distributed import _wire
from td_distributed._group import MARK
from td_distributed._p2p import WIRES, Channel

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)], layout=torch.jagged)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def with_values() -> Any:
    from td_tensorclass import NonTensorStack

    return TensorDict(
        {"a": torch.ones(2), "s": "text", "t": (1, 2.5), "l": NonTensorStack("x", "y")},
        batch_size=[2],
        names=["t"],
    )


TREES: dict[str, Callable[[], Any]] = {
    "flat": lambda: TensorDict({"b": torch.arange(6).view(2, 3), "a": torch.ones(2)}, batch_size=[2]),
    "nested": lambda: TensorDict(
        {"z": {"b": torch.ones(3), "a": {"c": torch.arange(4)}}, "a": torch.ones(2)}
    ),
    "lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.full((3,), i)}) for i in range(3)], 0),
    "ragged lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.ones(i + 1)}) for i in range(3)], 0),
    "jagged": lambda: TensorDict({"n": jagged(), "a": torch.ones(2)}, batch_size=[2]),
    "dtypes": lambda: TensorDict({str(d): torch.ones(5).to(d) for d in DTYPES}),
    "empty": lambda: TensorDict({"e": {}, "z": torch.zeros(0, 3)}),
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(3), "n": {"b": torch.ones(2)}})),
    "strided": lambda: TensorDict({"t": torch.arange(6).view(2, 3).t(), "e": torch.ones(1).expand(4)}),
    "large and small": lambda: TensorDict(
        {"a": torch.ones(3), "b": torch.ones(100_000), "n": {"c": torch.ones(100_000)}, "d": torch.ones(2)}
    ),
    "odd places": lambda: TensorDict(
        {
            "x": torch.ones(1, dtype=torch.float64),
            "b": torch.ones(1 << 16, dtype=torch.uint8),
            "y": torch.ones(1, dtype=torch.float64),
            "c": torch.tensor([1 + 2j], dtype=torch.complex128),
        }
    ),
    "scalar": lambda: TensorDict({"a": torch.tensor(3)}),
    "a long header": lambda: TensorDict({"k" * 40_000: torch.ones(3), "a": torch.ones(2)}),
    "a long header of large leaves": lambda: TensorDict(
        {"k" * 40_000: torch.ones(100_000), "a": torch.ones(2)}
    ),
    "a long header and nothing": lambda: TensorDict({"k" * 40_000: {}}),
    "conjugate": lambda: TensorDict(
        {"c": torch.tensor([1 + 2j]).conj(), "n": torch._neg_view(torch.ones(2)), "l": torch.ones(3)}
    ),
    "tied": lambda: TensorDict(dict.fromkeys("ab", torch.ones(3))).consolidate(),
}
if HAS_TENSORCLASS:
    TREES["values"] = with_values

#: Structures of a receiver that do not match TREES["flat"], and the expected error.
MISMATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (
        lambda: TensorDict({"b": torch.zeros(2, 4), "a": torch.zeros(2)}, batch_size=[2]),
        r"key 'b' is torch.float32 of shape \[2, 4\] here, torch.int64 of shape \[2, 3\]",
    ),
    "dtype": (
        lambda: TensorDict({"b": torch.zeros(2, 3), "a": torch.zeros(2)}, batch_size=[2]),
        r"key 'b' is torch.float32 of shape \[2, 3\] here, torch.int64",
    ),
    "missing": (lambda: TensorDict({"a": torch.zeros(2)}, batch_size=[2]), "key 'b' is missing here"),
    "extra": (
        lambda: TensorDict(
            {"b": torch.zeros(2, 3, dtype=torch.int64), "a": torch.zeros(2), "c": torch.zeros(2)},
            batch_size=[2],
        ),
        r"key 'c' is torch.float32 of shape \[2\] here, missing in the message",
    ),
    "batch size": (
        lambda: TensorDict({"b": torch.zeros(2, 3, dtype=torch.int64), "a": torch.zeros(2)}),
        r"the root is a TensorDict of batch size \[\] here, a TensorDict of batch size \[2\] in the message",
    ),
    "kind": (
        lambda: TensorDict.lazy_stack(
            [TensorDict({"b": torch.zeros(3, dtype=torch.int64), "a": torch.zeros(())})] * 2
        ),
        "the root is a LazyStackedTensorDict",
    ),
    "longer": (
        lambda: TensorDict({"b": torch.zeros(2, 300), "a": torch.zeros(2)}, batch_size=[2]),
        r"\[2, 300\] here",
    ),
    "shorter": (
        lambda: TensorDict({"b": torch.zeros(2), "a": torch.zeros(2)}, batch_size=[2]),
        r"of shape \[2\] here",
    ),
}


def blank(collection: Any) -> Any:
    """Return a collection of the same structure with other values."""
    with torch.no_grad():
        found = collection.clone().zero_()
    for key, leaf in collection.items() if type(collection) is TensorDict else ():
        if isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg()):
            found.set(key, found[key].conj() if leaf.is_conj() else torch._neg_view(found[key]))
    return found


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert found.batch_size == wanted.batch_size
    if isinstance(wanted, LazyStackedTensorDict):
        for one, other in zip(found.tensordicts, wanted.tensordicts, strict=True):
            same(one, other)
        return
    assert list(found.keys()) == list(wanted.keys())
    for key in list(wanted.keys()):
        one, other = found.get(key), wanted.get(key)
        if not isinstance(other, torch.Tensor):
            if getattr(other, "_is_value", False):
                assert one.tolist() == other.tolist()
            else:
                same(one, other)
        elif other.is_nested:
            assert all(torch.equal(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))
        else:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(as_bytes(one), as_bytes(other))


def exchange(rank: int, name: str, options: dict[str, Any], early: bool) -> Any:
    tree = TREES[name]()
    if rank == 0:
        if early:
            for work in tree.isend(1, return_early=True, **options):
                work.wait()
            return None
        return tree.send(1, **options)
    target = blank(tree)
    if early:
        for work in target.irecv(0, return_premature=True, **options):
            work.wait()
    else:
        target.recv(0, **options)
    same(target, TREES[name]())
    return None


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_send_recv_every_kind_keeps_content(two: Any, name: str, consolidated: bool) -> None:
    assert two.run(exchange, name, {"consolidated": consolidated}, False) == [None, None]


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["nested", "lazy"])
def test_isend_irecv_handles_wait_finishes(two: Any, name: str, wire: str, consolidated: bool) -> None:
    assert two.run(exchange, name, {"wire": wire, "consolidated": consolidated}, True) == [None, None]


def at_once(rank: int, wire: str) -> Any:
    tree = TREES["nested"]()
    if rank == 0:
        return tree.isend(1, init_tag=4, wire=wire), tree.isend(1, init_tag=4, wire=wire)
    target, other = blank(tree), blank(tree)
    result = target.irecv(0, init_tag=4, wire=wire), other.recv(0, init_tag=4, wire=wire)
    same(target, tree)
    same(other, tree)
    return result


@pytest.mark.parametrize(("wire", "last"), [("td", 4), ("reference", 6)])
def test_isend_irecv_without_handles_waits(two: Any, wire: str, last: int) -> None:
    assert two.run(at_once, wire, limit=20) == [(last, last), (None, last)]


def dropped(rank: int, size: int) -> None:
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
    target = blank(following)
    target.recv(0)
    same(target, following)


@pytest.mark.parametrize("size", [10, 1 << 22])
def test_isend_dropped_handles_still_sends(two: Any, size: int) -> None:
    assert two.run(dropped, size) == [None, None]


def replaces_while_it_comes(rank: int, fits: bool) -> Any:
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
    first, second, error = two.run(replaces_while_it_comes, fits)[1]
    if fits:
        assert (first, second, error) == ([1.0] * 3, [1.0] * 2, None)
    else:
        assert (first, second) == ([0.0] * 4, [0.0] * 2)
        assert "key 'a' is torch.float32 of shape [4] here" in error


def crosswise(rank: int, consolidated: bool) -> None:
    # Larger than the buffer of a socket, so that two blocking sends would deadlock.
    mine, theirs = (
        TensorDict({"a": torch.full((1 << 22,), i), "b": torch.ones(i + 1)}) for i in (rank, 1 - rank)
    )
    target = blank(theirs)
    works = mine.isend(1 - rank, consolidated=consolidated, return_early=True)
    target.recv(1 - rank)
    for work in works:
        work.wait()
        assert work.is_completed()
    same(target, theirs)


@pytest.mark.parametrize("consolidated", [False, True])
def test_isend_irecv_both_ways_does_not_deadlock(two: Any, consolidated: bool) -> None:
    assert two.run(crosswise, consolidated) == [None, None]


def awaited(rank: int, size: int, options: dict[str, Any]) -> Any:
    mine, theirs = (TensorDict({"a": torch.full((size,), i), "b": torch.ones(3)}) for i in (rank, 1 - rank))
    target = blank(theirs)
    (coming,) = target.irecv(1 - rank, return_premature=True, **options)
    mine.send(1 - rank, **options)
    written = target["b"].sum().item() if options.get("wire") is None else 0
    coming.wait()
    assert coming.is_completed()
    same(target, theirs)
    coming.wait()  # a second wait() is a no-op
    return written


@pytest.mark.parametrize("options", [{}, {"consolidated": True}, {"wire": "reference"}])
@pytest.mark.parametrize("size", [2, 1 << 20])
def test_irecv_before_send_on_both_ranks_does_not_deadlock(
    two: Any, size: int, options: dict[str, Any]
) -> None:
    assert two.run(awaited, size, options, limit=20) == [0, 0]


def in_turn(rank: int, last: str) -> Any:
    trees = [TensorDict({"a": torch.full((1 << 18,), i), "b": torch.ones(i + 1)}) for i in range(4)]
    if rank == 0:
        works = [work for tree in trees for work in tree.isend(1, return_early=True)]
        for work in works:
            work.wait()
        return None
    targets = [blank(tree) for tree in trees]
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
        same(target, tree)


@pytest.mark.parametrize("last", ["recv", "irecv"])
def test_irecv_several_keeps_order_of_calls(two: Any, last: str) -> None:
    assert two.run(in_turn, last, limit=20) == [None, None]


def refused_later(rank: int) -> Any:
    sent = TREES["large and small"]()
    if rank == 0:
        sent.send(1)
        return (sent + 1).send(1)
    target = blank(sent).set("d", torch.zeros(3))
    before = target.clone()
    (coming,) = target.irecv(0, return_premature=True)
    following = blank(sent)
    following.recv(0)
    same(following, sent + 1)
    assert coming.is_completed()
    try:
        coming.wait()
    except RuntimeError as error:
        return str(error), bool((target == before).all())
    return None


def test_irecv_misfit_raises_in_wait(two: Any) -> None:
    message, unchanged = two.run(refused_later, limit=20)[1]
    assert unchanged and message.startswith("cannot receive: key 'd' is torch.float32 of shape [3] here")


def awaited_by_nobody(rank: int, wire: str) -> None:
    sent = TREES["nested"]()
    if rank == 0:
        sent.send(1, wire=wire)
        sent.send(1, wire=wire)
        return
    blank(sent).irecv(0, return_premature=True, wire=wire)
    gc.collect()
    target = blank(sent)
    target.recv(0, wire=wire)
    same(target, sent)


@pytest.mark.parametrize("wire", WIRES)
def test_irecv_dropped_handle_still_receives(two: Any, wire: str) -> None:
    assert two.run(awaited_by_nobody, wire, limit=20) == [None, None]


def mismatch(rank: int, name: str, consolidated: bool) -> Any:
    sent = TREES["flat"]()
    if rank == 0:
        sent.send(1, consolidated=consolidated)
        (sent + 1).send(1)
        return None
    target = MISMATCHES[name][0]()
    before = target.clone()
    error = None
    try:
        target.recv(0)
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    assert bool((target == before).all())
    following = blank(sent)
    following.recv(0)
    same(following, sent + 1)
    return error


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_recv_other_structure_raises_and_next_recv_works(two: Any, name: str, consolidated: bool) -> None:
    sender, receiver = two.run(mismatch, name, consolidated)
    assert sender is None
    assert isinstance(receiver, str), receiver
    assert receiver.startswith("StructureError: cannot receive: ") and receiver.endswith(
        "nothing was changed"
    )
    with pytest.raises(RuntimeError, match=MISMATCHES[name][1]):
        raise RuntimeError(receiver)


def repeated(rank: int) -> Any:
    sent = TensorDict({"a": torch.ones(3), "n": {"b": torch.arange(4)}})
    if rank == 0:
        for i in range(6):
            (sent + i).send(1)
        return None
    ordered, turned = blank(sent), TensorDict({"n": {"b": torch.zeros(4).long()}, "a": torch.zeros(3)})
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
    expanded, missing = two.run(repeated)[1]
    assert "key 'a' is expanded" in expanded
    assert "key 'n' is missing here" in missing


def receives_into_one_tensor(rank: int, first: float, consolidated: bool) -> Any:
    sent = TensorDict({"a": torch.full((3,), first), "b": torch.full((3,), 2.0)})
    if rank == 0:
        sent.send(1)
        sent.replace(a=sent["b"].clone()).send(1)
        return None
    target = TensorDict(dict.fromkeys("ab", torch.zeros(3)))
    target = target.consolidate() if consolidated else target
    error = None
    try:
        target.recv(0)
    except StructureError as caught:
        error = str(caught)
        assert not target["a"].any()
    target.recv(0)
    assert target["a"].tolist() == target["b"].tolist() == [2.0] * 3
    return error


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("first", [1.0, 2.0])
def test_recv_tied_leaves_with_different_elements_raises(two: Any, first: float, consolidated: bool) -> None:
    one = "cannot receive: key 'b' is the same tensor as key 'a' here"
    message = f"{one}, and has other elements in the message; nothing was changed"
    wanted = message if first == 1.0 else None
    assert two.run(receives_into_one_tensor, first, consolidated)[1] == wanted


def unsendable(rank: int, what: str, wire: str) -> Any:
    if rank == 1:
        target = TensorDict({"a": torch.zeros(2)})
        target.recv(0)
        return target["a"].tolist()
    leaf = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.zeros(3, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": jagged,
        "value": object,
    }[what]()
    try:
        TensorDict({"a": torch.ones(2), "bad": leaf}).send(1, wire=wire)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    TensorDict({"a": torch.ones(2)}).send(1)
    return message


@pytest.mark.parametrize(
    ("what", "wire", "message"),
    [
        *(
            (what, wire, "StructureError: key 'bad'")
            for what in ("sparse", "meta", "nested")
            for wire in WIRES
        ),
        ("jagged", "reference", "StructureError: key 'bad'"),
        ("value", "td", "CodecError: key 'bad'"),
    ],
)
def test_send_unsendable_raises_before_sending(two: Any, what: str, wire: str, message: str) -> None:
    if what == "value" and not HAS_TENSORCLASS:
        pytest.skip("needs td-tensorclass")
    sender, receiver = two.run(unsendable, what, wire)
    assert receiver == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(sender)


def receives_a_value_of_another_type(rank: int) -> Any:
    from td_tensorclass import MetaData

    if rank == 0:
        TensorDict({"a": torch.ones(2), "m": MetaData("x")}).send(1)
        return None
    target = TensorDict({"a": torch.zeros(2), "m": MetaData[int](3)})
    try:
        target.recv(0)
    except TypeError as error:
        return str(error), target["a"].tolist(), target["m"]
    return None


@pytest.mark.skipif(not HAS_TENSORCLASS, reason="needs td-tensorclass")
def test_recv_misfit_value_raises_before_writing_leaves(two: Any) -> None:
    message, kept, value = two.run(receives_a_value_of_another_type)[1]
    assert message == "MetaData[int] takes a int; got 'x' of type str"
    assert (kept, value) == ([0, 0], 3)


def reference_wire(rank: int, name: str, options: dict[str, Any]) -> Any:
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
    target = blank(tree)
    last = target.recv(0, wire="reference", **options)
    same(target, TREES[name]())
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
def test_send_recv_reference_wire_keeps_content(
    two: Any, name: str, options: dict[str, Any], messages: list[Any], last: int
) -> None:
    assert two.run(reference_wire, name, options) == [messages, last]


def tagged(rank: int) -> Any:
    group = dist.new_group([0, 1])
    tree = TREES["nested"]()
    if rank == 0:
        tree.send(group_dst=1, group=group, init_tag=30)
        return tree.send(1, group=group, init_tag=5, pseudo_rand=True)
    target = blank(tree)
    tags = [
        target.recv(group_src=0, group=group, init_tag=30),
        target.recv(0, group=group, init_tag=5, pseudo_rand=True),
    ]
    same(target, tree)
    return tags


def test_send_recv_with_groups_and_tags_keeps_content(two: Any) -> None:
    sender, tags = two.run(tagged)
    assert sender is None
    assert tags == [30, 1262]


ONE_PEER = "give the peer's rank in the global group, or its rank in the given group: one of the two"


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
            target = blank(tree)
            target.recv(group=group, group_src=0, **options)
            same(target, tree)
            answers.append(options)

    threads = [Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3


def peers(rank: int) -> Any:
    errors = []
    outside = dist.GroupMember.NON_GROUP_MEMBER
    for options in (
        {},
        {"dst": 1, "group_dst": 1},
        {"dst": 1, "wire": "other"},
        {"dst": 2},
        {"group_dst": -1},
        {"group_dst": 1, "group": outside},
    ):
        try:
            TensorDict().send(**options)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_send_invalid_arguments_raise(two: Any) -> None:
    assert two.run(peers, ranks=[0]) == [
        [
            f"{ONE_PEER}; got None and None",
            f"{ONE_PEER}; got 1 and 1",
            "wire is one of ('td', 'reference'); got 'other'",
            "there is no rank 2 in a group of 2",
            "there is no rank -1 in a group of 2",
            "this process is not part of the group",
        ]
    ]


def to_oneself(rank: int) -> Any:
    group = dist.new_group([1, 0])
    errors = []
    td = TensorDict({"a": torch.zeros(1)})
    for call in (td.send, td.isend, td.recv, td.irecv, td.init_remote, TensorDict.from_remote_init):
        for options in ({}, {"group": group}):
            try:
                call(rank, **options)
            except ValueError as error:
                errors.append(str(error))
    return errors


def test_send_to_self_raises(two: Any) -> None:
    for rank, errors in enumerate(two.run(to_oneself)):
        assert errors == [f"rank {rank} is this process itself; give that of the peer"] * 12


@pytest.mark.parametrize("call", ["send", "recv", "isend", "irecv", "broadcast", "init_remote"])
def test_send_without_process_group_raises(call: str) -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        getattr(TensorDict({"a": torch.zeros(1)}), call)(0)


def test_send_outside_group_raises() -> None:
    td = TensorDict()
    for call in (lambda: td.send(1), lambda: td.recv(1), td.all_reduce, td.all_gather):
        with pytest.raises(ValueError, match="process group has not been initialized"):
            call()


def no_message(rank: int) -> Any:
    if rank == 0:
        dist.send(torch.zeros(4, dtype=torch.int64), 1)
        return None
    target = TensorDict({"a": torch.ones(2)})
    try:
        target.recv(0)
    except ValueError as error:
        return type(error).__name__, str(error), target["a"].tolist()


def test_recv_foreign_message_raises(two: Any) -> None:
    assert two.run(no_message)[1] == (
        "FormatError",
        "what arrived is no message of send(); does the peer use the same wire= and init_tag=?",
        [1.0, 1.0],
    )


def of_another_torch(rank: int, size: int, consolidated: bool) -> Any:
    td = TensorDict({"a": torch.ones(size), "b": torch.ones(1), "c": torch.ones(1 << 16)})
    if rank == 0:
        message, payload = _wire.make_message(td, consolidated)
        header = message.header.replace(b"torch.float32", b"torch.float99")
        for tag, each in enumerate(_wire.pack_message(MARK, header, payload)):
            dist.send(each, 1, tag=tag)
        return td.send(1)
    target = td.apply(torch.zeros_like)
    try:
        target.recv(0)
    except ValueError as error:
        message = str(error)
    assert not any(leaf.any() for leaf in target.values())
    target.recv(0)
    same(target, td)
    return message


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("size", [1, 1 << 18])
def test_recv_unreadable_header_raises_and_drains(two: Any, size: int, consolidated: bool) -> None:
    message = two.run(of_another_torch, size, consolidated, limit=20)[1]
    assert message == "the header of a message is damaged: unknown dtype 'torch.float99'"


def dies(rank: int, after: int) -> Any:
    target = TREES["large and small"]()
    if rank == 0:
        original, count = Channel.isend, 0

        def isend(*args: Any) -> Any:
            nonlocal count
            if count == after:
                os._exit(3)
            count += 1
            return original(*args)

        Channel.isend = isend
        target.send(1)
    target = blank(target)
    try:
        target.recv(0)
    except RuntimeError as error:
        return str(error), [leaf.abs().sum().item() for leaf in target.values(True, True)]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_recv_peer_dies_raises_and_changes_nothing(fragile: Any, after: int) -> None:
    sender, receiver = fragile.run(dies, after)
    assert sender.kind == "Exit"
    message, sums = receiver
    assert "onnection" in message
    assert sums == [0.0] * 4


def waits_in_vain(rank: int, how: str) -> Any:
    # The timeout must be long enough for the ranks to connect on a busy machine.
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    target = TREES["flat"]()
    if rank == 0:
        if how == "another tag":
            target.isend(1, group=group, init_tag=3, return_early=True)
        return None
    before = target.zero_().clone()
    try:
        if how == "irecv":
            for work in target.irecv(0, group=group, return_premature=True):
                work.wait()
        else:
            target.recv(0, group=group)
    except RuntimeError as error:
        return str(error), bool((target == before).all())
    return None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nothing is sent", "another tag", "irecv"])
def test_recv_without_send_raises_within_timeout(fragile: Any, how: str) -> None:
    message, unchanged = fragile.run(waits_in_vain, how)[1]
    # With equal timeouts, the first rank that times out would close the connection of the other.
    assert ("imed out" in message or "Connection closed" in message) and unchanged
