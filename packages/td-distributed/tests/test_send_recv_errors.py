"""Errors of send() and recv(): other structures, unreadable messages, invalid arguments, dead peers."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message_trees import HAS_TENSORCLASS, TREES, assert_same, make_blank, make_jagged

from td_core import TensorDict
from td_core.errors import StructureError
from td_distributed import _wire
from td_distributed._group import MARK
from td_distributed._p2p import WIRES, Channel

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
    "empty": (
        lambda: TensorDict(batch_size=[2]),
        r"missing here.*from_remote_init\(\) send to a process without entries",
    ),
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


def receive_other_structure_later(rank: int) -> Any:
    sent = TREES["large and small"]()
    if rank == 0:
        sent.send(1)
        return (sent + 1).send(1)
    target = make_blank(sent).set("d", torch.zeros(3))
    before = target.clone()
    (coming,) = target.irecv(0, return_premature=True)
    following = make_blank(sent)
    following.recv(0)
    assert_same(following, sent + 1)
    assert coming.is_completed()
    try:
        coming.wait()
    except RuntimeError as error:
        return str(error), bool((target == before).all())
    return None


def test_irecv_other_structure_raises_in_wait(two: Any) -> None:
    message, unchanged = two.run(receive_other_structure_later, limit=20)[1]
    assert unchanged and message.startswith("cannot receive: key 'd' is torch.float32 of shape [3] here")


def receive_other_structure(rank: int, name: str, consolidated: bool) -> Any:
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
    following = make_blank(sent)
    following.recv(0)
    assert_same(following, sent + 1)
    return error


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_recv_other_structure_raises_and_next_recv_works(two: Any, name: str, consolidated: bool) -> None:
    sender, receiver = two.run(receive_other_structure, name, consolidated)
    assert sender is None
    assert isinstance(receiver, str), receiver
    assert receiver.startswith("StructureError: cannot receive: ") and receiver.endswith(
        "nothing was changed"
    )
    with pytest.raises(RuntimeError, match=MISMATCHES[name][1]):
        raise RuntimeError(receiver)


def receive_into_tied_leaves(rank: int, first: float, consolidated: bool) -> Any:
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
    assert two.run(receive_into_tied_leaves, first, consolidated)[1] == wanted


def send_unsendable(rank: int, what: str, wire: str) -> Any:
    if rank == 1:
        target = TensorDict({"a": torch.zeros(2)})
        target.recv(0)
        return target["a"].tolist()
    leaf = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.zeros(3, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": make_jagged,
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
    sender, receiver = two.run(send_unsendable, what, wire)
    assert receiver == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(sender)


def receive_value_of_other_type(rank: int) -> Any:
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
def test_recv_value_of_other_type_raises_before_writing(two: Any) -> None:
    message, kept, value = two.run(receive_value_of_other_type)[1]
    assert message == "MetaData[int] takes a int; got 'x' of type str"
    assert (kept, value) == ([0, 0], 3)


ONE_PEER = "give the peer's rank in the global group, or its rank in the given group: one of the two"


def send_invalid_arguments(rank: int) -> Any:
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
    assert two.run(send_invalid_arguments, ranks=[0]) == [
        [
            f"{ONE_PEER}; got None and None",
            f"{ONE_PEER}; got 1 and 1",
            "wire is one of ('td', 'reference'); got 'other'",
            "a group of 2 has no rank 2",
            "a group of 2 has no rank -1",
            "this process is not part of the group",
        ]
    ]


def call_own_rank(rank: int) -> Any:
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
    for rank, errors in enumerate(two.run(call_own_rank)):
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


def receive_plain_tensor(rank: int) -> Any:
    if rank == 0:
        dist.send(torch.zeros(4, dtype=torch.int64), 1)
        return None
    target = TensorDict({"a": torch.ones(2)})
    try:
        target.recv(0)
    except ValueError as error:
        return type(error).__name__, str(error), target["a"].tolist()


def test_recv_message_of_plain_dist_send_raises(two: Any) -> None:
    assert two.run(receive_plain_tensor)[1] == (
        "FormatError",
        "what arrived is not a message of send(); does the peer use the same wire= and init_tag=?",
        [1.0, 1.0],
    )


def receive_unknown_dtype(rank: int, size: int, consolidated: bool) -> Any:
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
    assert_same(target, td)
    return message


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("size", [1, 1 << 18])
def test_recv_unknown_dtype_raises_and_next_recv_works(two: Any, size: int, consolidated: bool) -> None:
    message = two.run(receive_unknown_dtype, size, consolidated, limit=20)[1]
    assert message == "the header of a message is damaged: unknown dtype 'torch.float99'"


def exit_after_messages(rank: int, after: int) -> Any:
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
    target = make_blank(target)
    try:
        target.recv(0)
    except RuntimeError as error:
        return str(error), [leaf.abs().sum().item() for leaf in target.values(True, True)]


@pytest.mark.once
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_recv_peer_exits_raises_and_changes_nothing(fragile: Any, after: int) -> None:
    sender, receiver = fragile.run(exit_after_messages, after)
    assert sender.kind == "Exit"
    message, sums = receiver
    assert "onnection" in message
    assert sums == [0.0] * 4


def receive_without_send(rank: int, how: str) -> Any:
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


@pytest.mark.once
@pytest.mark.parametrize("how", ["nothing is sent", "another tag", "irecv"])
def test_recv_without_send_raises_within_timeout(fragile: Any, how: str) -> None:
    message, unchanged = fragile.run(receive_without_send, how)[1]
    # With equal timeouts, the first rank that times out would close the connection of the other.
    assert ("imed out" in message or "Connection closed" in message) and unchanged
