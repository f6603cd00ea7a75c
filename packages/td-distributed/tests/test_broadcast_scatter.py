"""broadcast(), scatter() and from_remote_init(): collections that one rank sends to others."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_trees import PARTS, TREES, assert_same, catch_error, make_nested, send_in_parts

from td_core import TensorDict
from td_core.errors import FormatError
from td_distributed import _wire
from td_distributed._collectives import receive
from td_distributed._group import FAILED, MARK, Group
from td_distributed._p2p import Channel


def broadcast_tree(rank: int, name: str, src: int, parts: bool) -> None:
    mine = TREES[name](rank + 10) if rank == src else TensorDict({"other": torch.ones(1)})
    with send_in_parts(parts):
        result = mine.broadcast(src)
    assert_same(result, TREES[name](src + 10))
    assert result.is_locked == (name == "frozen") or rank == src
    assert (result is mine) == (rank == src)
    assert list(mine.keys()) == ["other"] or rank == src


@PARTS
@pytest.mark.parametrize("src", [0, 1])
@pytest.mark.parametrize("name", TREES)
def test_broadcast_every_kind_returns_equal_collection(two: Any, name: str, src: int, parts: bool) -> None:
    assert two.run(broadcast_tree, name, src, parts) == [None, None]


def scatter_tree(rank: int, name: str, src: int) -> None:
    items = [TREES[name](i) for i in range(dist.get_world_size())] if rank == src else None
    for parts in (False, True):
        with send_in_parts(parts):
            assert_same(TensorDict().scatter(src, items), TREES[name](rank))


@pytest.mark.parametrize("name", TREES)
def test_scatter_every_kind_returns_item_of_rank(four: Any, name: str) -> None:
    assert four.run(scatter_tree, name, 2) == [None] * 4


def scatter_items(rank: int, items: int | None) -> Any:
    return catch_error(
        lambda: make_nested(0).scatter(
            0, None if rank or items is None else [make_nested(0) for _ in range(items)]
        )
    )


@pytest.mark.parametrize("items", [1, 3, None])
def test_scatter_wrong_number_of_items_raises(two: Any, items: int | None) -> None:
    own, other = two.run(scatter_items, items)
    assert own == f"ValueError: scatter() takes one collection for each of the 2 ranks; got {items}"
    assert other.endswith(f"so no rank did: {own}")


def send_remote(rank: int, name: str, use_broadcast: bool, parts: bool, dst: int | None = 1) -> None:
    with send_in_parts(parts):
        if rank == 0:
            return TREES[name](5).init_remote(dst, use_broadcast=use_broadcast)
        found = TensorDict.from_remote_init(0, use_broadcast=use_broadcast)
    return assert_same(found, TREES[name](5))


@PARTS
@pytest.mark.parametrize("use_broadcast", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_from_remote_init_every_kind_returns_equal_collection(
    two: Any, name: str, use_broadcast: bool, parts: bool
) -> None:
    assert two.run(send_remote, name, use_broadcast, parts) == [None, None]


@pytest.mark.parametrize("dst", [None, 0])
def test_init_remote_broadcast_ignores_dst(two: Any, dst: int | None) -> None:
    assert two.run(send_remote, "nested", True, False, dst) == [None, None]


def call_unknown_rank(rank: int, other: int) -> Any:
    td = make_nested(0)
    calls: list[Callable[[int], Any]] = [td.broadcast, td.scatter, td.gather_and_stack, td.reduce]
    return [
        *(catch_error(partial(call, other)) for call in calls),
        catch_error(lambda: td.init_remote(other, use_broadcast=True)),
        *(
            catch_error(partial(call, other))
            for call in (td.send, td.recv, td.init_remote, td.from_remote_init)
        ),
    ]


@pytest.mark.parametrize("other", [2, 9, -1])
def test_init_remote_unknown_rank_raises(two: Any, other: int) -> None:
    message = f"ValueError: a group of 2 has no rank {other}"
    assert two.run(call_unknown_rank, other, limit=20) == [[message] * 9] * 2


def save_received(rank: int) -> list[float]:
    found = []
    for length in range(1, 5):  # vary the size of the header
        tree = TensorDict({"k" * length: torch.ones(3)})
        for each in (
            *tree.all_gather(),
            tree.broadcast(0),
            tree.scatter(0, [tree] * 2 if rank == 0 else None),
        ):
            torch.save(each, file := io.BytesIO())
            file.seek(0)
            found.append(torch.load(file)["k" * length].sum().item())
    return found


def test_torch_save_received_collection_loads_back(two: Any) -> None:
    assert two.run(save_received) == [[3.0] * 16] * 2


def receive_everywhere(rank: int, name: str, parts: bool) -> list[Any]:
    tree = TREES[name](5)
    with send_in_parts(parts):
        received = [tree.scatter(0, [tree] * 2 if rank == 0 else None), *tree.all_gather()]
        if rank == 0:
            tree.broadcast(0)
            tree.init_remote(1)
        else:
            received += [TensorDict().broadcast(0), TensorDict.from_remote_init(0)]
    for item in received:
        assert_same(item.clone(), tree)
    return [item.is_consolidated() for item in received]


@PARTS
@pytest.mark.parametrize("name", TREES)
def test_received_collection_is_consolidated(two: Any, name: str, parts: bool) -> None:
    assert two.run(receive_everywhere, name, parts) == [[True] * 3, [True] * 5]


def receive_with_limit(rank: int, use_broadcast: bool) -> Any:
    tree = TensorDict({"a": torch.ones(1000)})
    if rank == 0:
        return catch_error(
            lambda: tree.init_remote(None if use_broadcast else 1, use_broadcast=use_broadcast)
        )
    return catch_error(lambda: TensorDict.from_remote_init(0, use_broadcast=use_broadcast, limit=1000))


@pytest.mark.parametrize("use_broadcast", [False, True])
def test_from_remote_init_over_limit_raises_on_both_ranks(two: Any, use_broadcast: bool) -> None:
    sender, receiver = two.run(receive_with_limit, use_broadcast)
    assert sender.startswith("StructureError: the receiver refused 4")
    assert receiver.startswith("FormatError: rank 0 announced 4") and "limit= allows 1000" in receiver
    assert two.run(send_remote, "nested", use_broadcast, False) == [None, None]


def announce_sizes(rank: int, length: int, size: int) -> Any:
    """Send invalid sizes to a receiver, and return its error."""
    if rank == 1:
        return catch_error(lambda: TensorDict.from_remote_init(0))
    peer, among = Channel(1, None, None, iter(range(9))), Group(None)
    peer.send(among.numbers(MARK, length, size))
    return None if length == FAILED else peer.recv(among.numbers(7)).item()


@pytest.mark.parametrize(
    ("length", "size", "message"),
    [
        *(
            (length, size, f"rank 0 announced {size} bytes, limit= allows {1 << 36} of this rank")
            for length, size in ((9, 8), (0, 8), (-7, 8), ((1 << 28) + 1, 1 << 30), (8, (1 << 36) + 1))
        ),
        *(
            (FAILED, size, f"rank 0 announced {size} bytes, {FAILED} of them a header")
            for size in (0, -8, 1 << 45)
        ),
    ],
)
def test_from_remote_init_invalid_sizes_raise(two: Any, length: int, size: int, message: str) -> None:
    answer = None if length == FAILED else 0
    assert two.run(announce_sizes, length, size, limit=20) == [answer, f"FormatError: {message}"]


def call_in_subgroup(rank: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    tree = make_nested(rank)
    tree.all_reduce(group=group)
    other = TensorDict().scatter(3, [make_nested(i) for i in (7, 8)] if rank == 3 else None, group=group)
    gathered = make_nested(rank).all_gather(group=group)
    result = make_nested(rank).broadcast(1, group=group)
    return (
        tree["a"][0].item(),
        other["a"][0].item(),
        [t["a"][0].item() for t in gathered],
        result["a"][0].item(),
    )


def test_collective_in_subgroup_uses_ranks_of_group(four: Any) -> None:
    results = four.run(call_in_subgroup)
    assert results[0] is results[2] is None
    assert results[1] == (4.0, 7.0, [1.0, 3.0], 1.0)
    assert results[3] == (4.0, 8.0, [1.0, 3.0], 1.0)


def test_receive_contradictory_sizes_reads_all_messages() -> None:
    length, size, messages = _wire.split_message(
        TensorDict({"a": torch.zeros(1 << 18)}), torch.device("cpu"), True
    )

    def take(*rooms: torch.Tensor) -> None:
        for room in rooms:
            room.copy_(messages.pop(0))

    group: Any = SimpleNamespace(bytes=lambda count: torch.empty(count, dtype=torch.uint8))
    with pytest.raises(FormatError, match=f"rank 1 announced {size + 1} bytes, its header {size}"):
        receive([MARK, length, size + 1], 1, None, group, take)
    assert not messages


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([], "IndexError"),
        ([1], r"1 parts of \[\]"),
        ([-1, 3], r"-1 parts of \[\]"),
        ([1 << 60, 3], "parts of"),
        ([1, -3], r"1 parts of \[-3\]"),
        ([2, 3, 0], r"2 parts of \[3, 0\]"),
        ([1, 9], r"1 parts of \[9\]"),
        ([2, 5, 5], r"2 parts of \[5, 5\] bytes, of 8 at most"),
    ],
)
def test_receive_invalid_part_sizes_raise(
    numbers: list[int], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = torch.tensor(numbers).numpy().tobytes()
    with pytest.raises(FormatError, match=f"the header of a message is damaged: .*{found}"):
        _wire.parts_of(header, 8)
    message = torch.tensor([2, 3, 5]).numpy().tobytes() + b"12345678abcdefgh{}"
    assert _wire.parts_of(message, 8) == ([3, 5], b"12345678abcdefgh", b"{}")
    monkeypatch.setattr(_wire, "PIECE", 4)
    with pytest.raises(FormatError, match=r"2 parts of \[3, 5\]"):
        _wire.parts_of(torch.tensor([2, 3, 5]).numpy().tobytes(), 8)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_receive_sizes_around_part_limit_keeps_content(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TensorDict({"a": torch.arange(5), "b": torch.ones(1)})
    _, size, _ = _wire.split_message(tree, torch.device("cpu"), True)
    monkeypatch.setattr(_wire, "APART", size + more)
    length, size, messages = _wire.split_message(tree, torch.device("cpu"), True)
    assert len(messages) == (1 if more > 0 else 2)

    def take(*rooms: torch.Tensor) -> None:
        for room in rooms:
            room.copy_(messages.pop(0))

    group: Any = SimpleNamespace(bytes=lambda count: torch.empty(count, dtype=torch.uint8))
    assert_same(receive([MARK, length, size], 1, None, group, take), tree)
    assert not messages


@pytest.mark.parametrize(
    ("length", "size"),
    [(FAILED, 1 << 45), (FAILED, 0), (FAILED, -3), (5, -3), (9, 8), (0, 8), (-7, 8), (1 << 40, 1 << 41)],
)
def test_receive_invalid_sizes_raise_before_allocating(length: int, size: int) -> None:
    with pytest.raises(FormatError, match=f"rank 1 announced {size} bytes, {length} of them a header"):
        receive([MARK, length, size], 1, None, None, None)  # type: ignore[arg-type]
