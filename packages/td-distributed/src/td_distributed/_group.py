"""Helpers around a process group: devices of messages, gathered numbers and bytes, and errors of peers."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from td_core.errors import FormatError, StructureError
from td_core.spi import as_device

from ._memory import END, allocate, compare_end, expect_end, get_bytes, make_vector

#: The first number of every message: "td_wire" in ASCII.
MARK = 0x74645F77697265
FAILED = -1

_HOST = torch.device("cpu")
#: Cache of groups whose backend takes CPU messages: querying the group takes longer than sending.
_ON_HOST: WeakSet[object] = WeakSet()


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the backend of a group needs its messages."""
    asked = dist.group.WORLD if group is None else group
    if asked in _ON_HOST:
        return _HOST
    if group is not None and not isinstance(group, dist.ProcessGroup):
        # A group constructed directly is a Backend, not a ProcessGroup: torch.distributed has no config for it.
        return as_device("cuda" if group.name() == "nccl" else "cpu")
    served = _backends(group)
    if "cpu" not in served:
        return as_device(next(iter(served)))
    _ON_HOST.add(asked)
    return _HOST


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend name per device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    parts = dist.get_backend_config(group).split(",")  # the config is a string such as "cpu:gloo,cuda:nccl"
    return dict(part.split(":")[:2] for part in parts)


class Group:
    """The ranks that take part in a collective.

    Args:
        group: the process group; None is the global one.

    Attributes:
        rank: rank of this process in the group.
        size: number of processes.
        device: device of the messages.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not part of the group")
        self.size = dist.get_world_size(group)
        self.device = device_of(group)

    def rank_of(self, rank: int) -> int:
        """Convert a global rank to a rank in this group; ValueError if the rank is not part of the group."""
        if self.group is not None:
            return dist.get_group_rank(self.group, rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"a group of {self.size} has no rank {rank}")
        return rank

    def numbers(self, *values: int) -> Tensor:
        """Build an int64 tensor of ``values`` on the device of the messages."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def own_device(self) -> torch.device:
        """Return the accelerator that has a separate backend in this group, else the device of the messages."""
        served = _backends(self.group)
        for kind, backend in served.items():
            if backend != served.get("cpu", backend):
                return as_device(kind)
        return self.device

    def bytes(self, size: int) -> Tensor:
        """Allocate an uninitialised message of ``size`` bytes."""
        return allocate(size, self.device)

    def all_numbers(self, call: str, *values: int) -> list[list[int]]:
        """Gather up to six ints from every rank; FormatError if a rank is in another call.

        All calls send the same number of bytes: gloo aborts a process that receives more than it expects.
        """
        left = self.numbers(MARK + crc32(call.encode()), *values, *[0] * (6 - len(values)))
        every = [torch.zeros_like(left) for _ in range(self.size)]
        dist.all_gather(every, left, group=self.group)
        fronts = [item.tolist() for item in every]
        for front in fronts:
            check_mark(front[0], fronts[self.rank][0])
        return [front[1 : len(values) + 1] for front in fronts]

    def all_bytes(self, data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Gather the bytes of every rank, given their sizes without the end that each message has, in messages of one size."""
        largest = max(sizes) + len(END)
        every = [expect_end(self.bytes(largest), size) for size in sizes]
        dist.all_gather(every, self.pad_bytes(data, largest), group=self.group)
        for item, size in zip(every, sizes, strict=True):
            compare_end(item, size)
        return [item[:size] for item, size in zip(every, sizes, strict=True)]

    def pad_bytes(self, data: Tensor, size: int) -> Tensor:
        """Pad ``data`` at the end to ``size`` bytes, on the device of the messages."""
        if len(data) == size:
            return data.to(self.device)
        message = self.bytes(size)
        message[: len(data)] = data
        message[len(data) :] = 0
        return message


def text_to_bytes(text: str, longest: int | None = None) -> Tensor:
    """Encode a non-empty text as a uint8 tensor of at most ``longest`` bytes, and the end of a message."""
    return make_vector(text.encode(errors="replace")[:longest] + END)


def bytes_to_text(data: Tensor) -> str:
    """Decode a uint8 tensor that :func:`text_to_bytes` made."""
    return bytes(get_bytes(data)).decode(errors="replace")


def peer_error(rank: int, data: Tensor) -> StructureError:
    """Build the error for a rank that failed, from the error text that it sent."""
    return StructureError(f"rank {rank} could not take part, so no rank did: {bytes_to_text(data)}")


def check_mark(mark: int, wanted: int = MARK) -> None:
    """Raise FormatError if a message does not start with the expected mark."""
    if mark != wanted:
        raise FormatError(
            "what arrived belongs to another exchange; do all ranks make the same calls, with the same arguments, in one order?"
        )
