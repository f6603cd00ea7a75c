"""Short messages: what did not arrive is an error, and never filled with what was in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loopback import Done, Loop

from td_core import TensorDict
from td_core.errors import FormatError
from td_distributed import _wire
from td_distributed._collectives import Payload, receive
from td_distributed._group import MARK
from td_distributed._memory import allocate

CPU = torch.device("cpu")
#: Trees by how they are sent: in the first message, as one part or several parts, and with a header of its own message.
TREES: dict[str, Any] = {
    "small": lambda: TensorDict({"a": torch.full((7,), 3.0), "b": torch.arange(5)}),
    "parts": lambda: TensorDict({"a": torch.full((1 << 16,), 3.0), "b": torch.full((1 << 16,), 3.0)}),
    "one part": lambda: TensorDict({"a": torch.full((1 << 16,), 3.0)}).consolidate(),
    "header": lambda: TensorDict({f"key{i}": torch.full((40,), 3.0) for i in range(900)}),
}


class CutLoop(Loop):
    """A group that delivers only the first bytes of one message; the rest of the buffer keeps what was in it."""

    def __init__(self, number: int, cut: int) -> None:
        super().__init__()
        self.number, self.cut = number, cut

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        """Copy the next message, without its end if it is the one to cut."""
        message = self.messages.popleft()
        length = len(message) - (self.cut if self.number == 0 else 0)
        self.number -= 1
        tensors[0][:length] = message[:length]
        return Done()


@pytest.fixture
def old_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new buffers with what a message of other leaves could have left there."""

    def allocate_used(*args: Any, **options: Any) -> torch.Tensor:
        return allocate(*args, **options).fill_(65)

    for module in ("_p2p", "_group"):
        monkeypatch.setattr(f"td_distributed.{module}.allocate", allocate_used)


@pytest.mark.usefixtures("old_memory")
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("cut", [1, 8, 9])
def test_recv_cut_message_raises_and_writes_nothing(name: str, cut: int) -> None:
    source = TREES[name]()
    probe = Loop()
    source.send(group=probe, group_dst=0)
    for number, message in enumerate(probe.messages):
        loop, target = CutLoop(number, min(cut, len(message))), TREES[name]().apply(torch.zeros_like)
        source.send(group=loop, group_dst=0)
        with pytest.raises(FormatError, match="cut|not a message"):
            target.recv(group=loop, group_src=0)
        assert all(not leaf.any() for leaf in target.values())
    whole = CutLoop(-1, 0)
    source.send(group=whole, group_dst=0)
    target.recv(group=whole, group_src=0)
    assert all(torch.equal(target[key], source[key]) for key in source.keys())


@pytest.mark.parametrize("name", ["small", "parts", "one part"])
def test_recv_cut_reference_message_keeps_what_did_not_arrive(name: str) -> None:
    source, target = TREES[name](), TREES[name]().apply(torch.zeros_like)
    loop, cut = CutLoop(0, 4), 4
    source.send(group=loop, group_dst=0, wire="reference")
    target.recv(group=loop, group_src=0, wire="reference")
    wanted = [leaf.clone() for leaf in source.values()]
    wanted[0][-cut:] = 0
    assert all(map(torch.equal, target.values(), wanted))


@pytest.mark.usefixtures("old_memory")
@pytest.mark.parametrize("cut", [1, 30000])
def test_recv_cut_message_after_same_one_raises(cut: int) -> None:
    source, target = TREES["small"]().consolidate(), TREES["small"]().consolidate()
    for number in (-1, -1, 0, -1):
        loop = CutLoop(number, cut)
        source.send(group=loop, group_dst=0)
        if number:
            target.recv(group=loop, group_src=0)
        else:
            with pytest.raises(FormatError, match="was cut"):
                target.recv(group=loop, group_src=0)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("cut", [1, 8, 9])
def test_receive_cut_message_of_collective_raises(
    name: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wire, "APART", 1 << 17)
    parcel = Payload(TREES[name], CPU, apart=True)

    class Among:
        """What ``receive`` needs of a group."""

        @staticmethod
        def bytes(size: int) -> torch.Tensor:
            """Return a buffer with old content."""
            return torch.full((size,), 64, dtype=torch.uint8)

    for number in range(1 + len(parcel.parts)):
        messages = [parcel.data, *parcel.parts]
        messages[number] = messages[number][:-cut]

        def take(*rooms: torch.Tensor, messages: list[torch.Tensor] = messages) -> None:
            for room in rooms:
                message = messages.pop(0)
                room[: len(message)] = message

        with pytest.raises(FormatError, match="was cut"):
            receive([MARK, *parcel.front], 1, None, Among, take)  # type: ignore[arg-type]


def receive_short(rank: int, name: str) -> Any:
    real = dist.ProcessGroup.send
    source = TREES[name]()
    if rank == 1:
        # The first message of large leaves is complete: without it, the receiver would not expect the others.
        least = _wire.FIRST if name == "small" else _wire.FIRST + 1
        dist.ProcessGroup.send = lambda group, tensors, *rest: real(
            group, [tensors[0][:-64] if len(tensors[0]) >= least else tensors[0]], *rest
        )
        try:
            source.send(0)
        finally:
            dist.ProcessGroup.send = real
        return None
    target = source.apply(torch.zeros_like)
    try:
        target.recv(1)
    except FormatError as error:
        return "cut" in str(error), sum(bool(leaf.any()) for leaf in target.values())


@pytest.mark.parametrize("name", ["small", "parts"])
def test_recv_short_message_of_peer_raises(fragile: Any, name: str) -> None:
    assert fragile.run(receive_short, name)[0] == (True, 0)
