"""A process group of one process, and collections to send to it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from td_core import TensorDict


class Done:
    """A finished ``Work`` handle."""

    def wait(self) -> None:
        """Return at once."""


class Loop:
    """A loopback process group: recv returns the messages that were sent."""

    def __init__(self) -> None:
        self.messages: deque[torch.Tensor] = deque()

    def name(self) -> str:
        """Return the name of the backend."""
        return "gloo"

    def size(self) -> int:
        """Return the number of processes."""
        return 1

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        """Store a message."""
        self.messages.append(tensors[0].clone())
        return Done()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
        """Copy the next stored message into the tensor, and check that their sizes are equal."""
        message = self.messages.popleft()
        assert len(message) == len(tensors[0])
        tensors[0].copy_(message)
        return Done()


def send_to(source: Any, target: Any, **options: Any) -> Any:
    """Send ``source`` to ``target``, and return ``target``."""
    loop = Loop()
    source.send(group=loop, group_dst=0, consolidated=True, **options)
    target.recv(group=loop, group_src=0, consolidated=True, **options)
    assert not loop.messages
    return target


def make_tree() -> Any:
    square = torch.arange(9.0).view(3, 3)
    below = {"a": square + 20, "c": torch.ones(3, 3)}
    return TensorDict({"a": square, "b": square + 10, "n": below}, [3], device="cpu")


def replace_entry(node: Any, key: str, value: Any) -> None:
    """Replace an entry of a locked collection, through private attributes."""
    node._children()[key] = value


def assert_same(found: Any, wanted: Any) -> None:
    assert (found.batch_size, found.names, found.device) == (wanted.batch_size, wanted.names, wanted.device)
    assert list(found.keys()) == list(wanted.keys())
    for key in wanted.keys():
        value = wanted[key]
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and found[key].shape == value.shape
            assert torch.equal(found[key], value)
        elif isinstance(value, TensorDict):
            assert_same(found[key], value)
        else:
            assert found[key] == value


def make_blank(td: Any) -> Any:
    """Return a collection of the same structure with other values."""
    return td.apply(lambda leaf: leaf.detach().contiguous() - 100)
