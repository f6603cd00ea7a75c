"""Handles of isend and irecv in coroutines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from loopback import Done, Loop

from td_core import TensorDict
from td_core.errors import StructureError


class SlowDone(Done):
    """A handle that is finished when the event is set."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def wait(self) -> None:
        assert self.event.wait(30)


class SlowLoop(Loop):
    """A loopback group whose messages arrive when its event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        super().send(tensors, rank, tag)
        return SlowDone(self.event)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        super().recv(tensors, rank, tag)
        return SlowDone(self.event)


def test_await_lets_other_coroutines_run() -> None:
    source, target = TensorDict({"a": torch.arange(3)}), TensorDict({"a": torch.zeros(3, dtype=torch.int64)})
    group: Any = SlowLoop()

    async def release() -> None:
        await asyncio.sleep(0)
        group.event.set()

    async def wait(handles: Any) -> None:
        group.event.clear()
        await asyncio.gather(*handles, release())

    asyncio.run(wait(source.isend(group=group, group_dst=0, return_early=True)))
    handles = target.irecv(group=group, group_src=0, return_premature=True)
    assert target["a"].tolist() == [0, 0, 0]
    asyncio.run(wait(handles))
    assert target["a"].tolist() == [0, 1, 2]
    assert [handle.is_completed() for handle in handles] == [True]


def test_await_raises_the_error_of_wait() -> None:
    group: Any = SlowLoop()
    group.event.set()
    TensorDict({"a": torch.arange(3)}).send(group=group, group_dst=0)
    (handle,) = TensorDict({"b": torch.arange(3)}).irecv(group=group, group_src=0, return_premature=True)

    async def wait() -> None:
        await handle

    with pytest.raises(StructureError, match="cannot receive"):
        asyncio.run(wait())
