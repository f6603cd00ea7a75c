"""Errors that every collective raises on all ranks: bad content, other calls, and dead ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_trees import (
    HAS_TENSORCLASS,
    PARTS,
    TREES,
    assert_same,
    catch_error,
    make_nested,
    send_in_parts,
)

from td_core import TensorDict
from td_core.errors import FormatError, StructureError
from td_distributed import _consolidated_file, _storage, _wire
from td_distributed._collectives import Payload, unpack
from td_distributed._group import FAILED

UNSENDABLE = {
    "sparse": lambda: TensorDict({"x": torch.eye(2).to_sparse()}),
    "meta": lambda: TensorDict({"x": torch.zeros(2, device="meta")}),
}


if HAS_TENSORCLASS:
    UNSENDABLE["value"] = lambda: TensorDict({"x": object()})


def list_calls(rank: int, mine: Any, item: Any) -> dict[str, Callable[[], Any]]:
    """Return all calls in which rank 1 sends ``mine``, or a list with ``item``."""
    everyone = {"use_broadcast": True}
    return {
        "broadcast": lambda: mine.broadcast(1),
        "scatter": lambda: mine.scatter(1, [make_nested(0), item] if rank == 1 else None),
        "all_gather": lambda: mine.all_gather(),
        "gather_and_stack": lambda: mine.gather_and_stack(0),
        "all_reduce": lambda: mine.all_reduce(),
        "init_remote": lambda: mine.init_remote(0) if rank == 1 else TensorDict.from_remote_init(1),
        "init_remote to all": lambda: (
            mine.init_remote(**everyone) if rank == 1 else TensorDict.from_remote_init(1, **everyone)
        ),
    }


def send_unsendable(rank: int, what: str, call: str) -> Any:
    bad = UNSENDABLE[what]()
    message = catch_error(list_calls(rank, bad if rank == 1 else make_nested(rank), bad)[call])
    assert make_nested(rank).all_gather()[0]["a"].tolist() == [0.0, 0.0]
    return message


@pytest.mark.parametrize("call", list_calls(0, None, None))
@pytest.mark.parametrize("what", UNSENDABLE)
def test_collective_unsendable_leaf_raises_on_all_ranks(two: Any, what: str, call: str) -> None:
    if what == "value" and call == "all_reduce":
        pytest.skip("values are not reduced")
    other, own = two.run(send_unsendable, what, call)
    assert other.startswith("StructureError: rank 1 could not take part, so no rank did: ")
    assert "key 'x'" in own and other.endswith(own)
    assert (own == other) == (call == "all_reduce")


def send_unknown_dtype(rank: int, call: str, parts: bool) -> str:
    """Exchange a collection with a dtype that the torch of the receiver does not have."""

    def unknown(name: str) -> Any:
        raise FormatError(f"unknown dtype {name!r}")

    tree = TREES["large"](rank)
    with send_in_parts(parts), pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(_storage, "parse_dtype", unknown)
        message = catch_error(list_calls(rank, tree, tree)[call])
    assert make_nested(rank).all_gather()[0]["a"].tolist() == [0.0, 0.0]
    return message


@PARTS
@pytest.mark.parametrize("call", [call for call in list_calls(0, None, None) if call != "all_reduce"])
def test_collective_unknown_dtype_raises_and_next_call_works(two: Any, call: str, parts: bool) -> None:
    assert two.run(send_unknown_dtype, call, parts, limit=20) == [
        "FormatError: the header of a message is damaged: unknown dtype 'torch.float32'",
        "nothing was raised",
    ]


def move_to_missing_device(rank: int) -> str:
    if rank == 1:
        return catch_error(lambda: make_nested(0).init_remote(0, device=torch.device("cuda", 99)))
    return catch_error(lambda: TensorDict.from_remote_init(1))


def test_collective_torch_error_raises_on_all_ranks(two: Any) -> None:
    other, own = two.run(move_to_missing_device)
    # The class of the error depends on the build of torch.
    assert own != "nothing was raised"
    assert other == f"StructureError: rank 1 could not take part, so no rank did: {own}"


def call_outside_group(rank: int) -> list[str]:
    group: Any = dist.GroupMember.NON_GROUP_MEMBER
    tree = make_nested(rank)
    calls = (tree.all_gather, tree.all_reduce, partial(tree.broadcast, 0), partial(tree.init_remote, 1))
    return [catch_error(partial(call, group=group)) for call in calls]


def test_collective_outside_group_raises(two: Any) -> None:
    assert two.run(call_outside_group, ranks=[0]) == [
        ["ValueError: this process is not part of the group"] * 4
    ]


#: Calls that rank 0 makes while rank 1 is missing.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast": lambda tree, group: tree.broadcast(1, group=group),
    "scatter": lambda tree, group: tree.scatter(1, group=group),
    "all_gather": lambda tree, group: tree.all_gather(group=group),
    "gather_and_stack": lambda tree, group: tree.gather_and_stack(0, group=group),
    "all_reduce": lambda tree, group: tree.all_reduce(group=group),
    "async all_reduce": lambda tree, group: [
        work.wait() for work in tree.all_reduce(group=group, async_op=True)
    ],
    "reduce": lambda tree, group: tree.reduce(0, group=group),
    "init_remote": lambda tree, group: tree.init_remote(1, group=group),
    "from_remote_init": lambda tree, group: tree.from_remote_init(1, group=group),
    "from_remote_init of all": lambda tree, group: tree.from_remote_init(1, group=group, use_broadcast=True),
}


def call_without_peer(rank: int, dies: bool) -> Any:
    """Return per call the error on rank 0, and whether its collection is unchanged."""
    # The timeout must be long enough for the ranks to connect on a busy machine.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3)) for _ in CALLS]
    dist.barrier()  # until rank 0 has connected to all groups
    if rank == 1:
        return os._exit(3) if dies else None
    tree = make_nested(0)
    with ThreadPoolExecutor(len(CALLS)) as pool:  # so that the calls wait for their timeouts at the same time
        work = [partial(call, tree, group) for call, group in zip(CALLS.values(), groups, strict=True)]
        results = dict(zip(CALLS, pool.map(catch_error, work), strict=True))
    assert bool((tree == make_nested(0)).all())
    return results


@pytest.mark.once
@pytest.mark.parametrize("dies", [True, False], ids=["dead", "absent"])
def test_collective_missing_rank_raises_within_timeout(fragile: Any, dies: bool) -> None:
    messages, _ = fragile.run(call_without_peer, dies)
    for name, message in messages.items():
        assert message.startswith(("RuntimeError", "DistBackendError")), (name, message)
        assert "onnect" in message if dies else "imed out" in message, (name, message)


def exit_midway(rank: int, call: str, after: int) -> Any:
    tree = make_nested(rank)
    if rank == 1:
        for name in ("broadcast", "scatter", "all_gather", "gather", "all_reduce", "reduce"):
            setattr(dist, name, exit_after(getattr(dist, name), after))
    message = catch_error(lambda: CALLS[call](tree, None))
    assert bool((tree == make_nested(rank)).all())
    return message


def exit_after(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        COUNTED.append(function)
        if len(COUNTED) > after:
            os._exit(3)
        return function(*args, **kwargs)

    return call


COUNTED: list[Any] = []


@pytest.mark.once
@pytest.mark.parametrize(
    "call", ["broadcast", "scatter", "all_gather", "gather_and_stack", "all_reduce", "reduce"]
)
def test_collective_peer_exits_midway_raises(fragile: Any, call: str) -> None:
    message, dead = fragile.run(exit_midway, call, 1)
    assert dead.kind == "Exit"
    assert message.startswith(("RuntimeError", "DistBackendError")) and "onnect" in message, message


ANOTHER = (
    "FormatError: what arrived belongs to another exchange; do all ranks make the same calls, with the same arguments, "
    "in one order?"
)


def broadcast_plain_tensor(rank: int) -> Any:
    if rank == 0:
        dist.broadcast(torch.zeros(3, dtype=torch.int64), 0)
        return None
    return catch_error(lambda: make_nested(0).broadcast(0))


def test_collective_message_of_plain_broadcast_raises(two: Any) -> None:
    assert two.run(broadcast_plain_tensor)[1] == ANOTHER


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda td: td.all_gather(),
    "gather_and_stack": lambda td: td.gather_and_stack(0),
    "gather_and_stack elsewhere": lambda td: td.gather_and_stack(1),
    "all_reduce": lambda td: td.all_reduce(),
    "all_reduce otherwise": lambda td: td.all_reduce(dist.ReduceOp.MAX),
    "all_reduce in small buckets": lambda td: td.all_reduce(bucket_bytes=1),
    "reduce": lambda td: td.reduce(0),
    "reduce elsewhere": lambda td: td.reduce(1),
}


def make_different_calls(rank: int) -> Any:
    tree, found = make_nested(rank), []
    for pair in combinations(VARIANTS.values(), 2):
        found.append(catch_error(lambda: pair[rank](tree)))  # noqa: B023
    assert_same(tree, make_nested(rank))
    return {*found}


def test_collective_different_calls_raise_on_all_ranks(two: Any) -> None:
    assert two.run(make_different_calls) == [{ANOTHER}] * 2


def test_send_error_text_is_truncated_and_encodable() -> None:
    def make() -> Any:
        raise ValueError("\ud800" + "x" * (1 << 17))

    parcel = Payload(make, torch.device("cpu"))
    assert parcel.front == (FAILED, 1 << 16)
    with pytest.raises(
        StructureError, match=r"rank 1 could not take part, so no rank did: ValueError: \?x+$"
    ):
        unpack(list(parcel.front), parcel.data, 1)


def test_send_too_long_structure_raises_on_sender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    td = TensorDict({str(i): torch.zeros(1) for i in range(100)})
    monkeypatch.setattr(_wire, "LARGEST_HEADER", 1000)
    monkeypatch.setattr(_consolidated_file, "LARGEST_JSON", 1000)
    with pytest.raises(
        StructureError, match=r"structure and values take \d+ bytes as JSON; a reader takes 1000"
    ):
        _wire.make_message(td, False)
    with pytest.raises(StructureError, match="a reader takes 1000"):
        td.consolidate(tmp_path / "td")
    assert not list(tmp_path.iterdir())
