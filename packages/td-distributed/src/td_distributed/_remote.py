"""A collection for a process that knows nothing about it, with the receiver's word before the bytes go out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from td_core.errors import FormatError, StructureError

from . import _wire
from ._collectives import Parcel, unpack
from ._group import FAILED, Group, check_mark, device_of
from ._p2p import Peer

#: Bytes that a receiver takes unless it says otherwise.
LIMIT = 1 << 36


def init_remote(
    self: Any,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    use_broadcast: bool = False,
) -> None:
    """Send structure and content to a process that calls :func:`from_remote_init`.

    Args:
        self: the collection.
        dst: rank of the receiver in the global group; not with ``use_broadcast``.
        group: the process group; None is the global one.
        device: move the collection there first.
        use_broadcast: send to all other ranks of the group, which all call :func:`from_remote_init`.

    Raises:
        StructureError: a leaf cannot be sent, or the receiver refused the size.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from td_core import TensorDict
    >>> TensorDict({"a": torch.arange(3)}).init_remote(use_broadcast=True)  # to no other rank
    >>> dist.destroy_process_group()
    """
    parcel = Parcel(lambda: self if device is None else self.to(device), device_of(group))
    link = _Link(group, dst, use_broadcast, dist.get_rank())
    link.send(link.group.numbers(*parcel.front))
    if parcel.error is not None:
        link.send(parcel.data)
        raise parcel.error
    if not link.answers(True):
        raise StructureError(f"the receiver refused {parcel.front[2]} bytes, more than its limit")
    link.send(parcel.data)


def from_remote_init(
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    use_broadcast: bool = False,
    limit: int = LIMIT,
) -> Any:
    """Return the collection that the rank ``src`` sends with :func:`init_remote`.

    Nothing is unpickled or imported: classes are those that this process has defined.

    Args:
        src: rank of the sender in the global group.
        group: the process group; None is the global one.
        device: where the result lies; by default where messages of the backend do.
        use_broadcast: as the sender.
        limit: refuse more bytes than this; the sender raises too.

    Raises:
        FormatError: more bytes than ``limit`` are announced, or what arrives is damaged.
        StructureError: the sender could not send it.

    >>> from_remote_init(src=0)["a"]  # doctest: +SKIP
    tensor([0, 1, 2])
    """
    link = _Link(group, src, use_broadcast, src)
    front = link.recv(link.group.numbers(0, 0, 0)).tolist()
    mark, length, size = front
    check_mark(mark)
    if length == FAILED:
        unpack(front, link.recv(link.group.bytes(size)), src)
    fits = 0 < length <= min(size, _wire.LARGEST_HEADER) and size <= limit
    if not link.answers(fits) or not fits:
        raise FormatError(f"rank {src} announced {size} bytes, limit= allows {limit} of this rank")
    return unpack(front, link.recv(link.group.bytes(size)), src, device)


class _Link:
    """From one rank to another, or from one to all; each takes the same steps."""

    def __init__(self, group: Any, peer: int | None, use_broadcast: bool, src: int) -> None:
        self.group = Group(group)
        self.src = src
        if use_broadcast and src == dist.get_rank() and peer not in (None, src):
            raise ValueError(
                f"use_broadcast sends to every rank of the group, so there is no dst; got {peer}"
            )
        self.peer = None if use_broadcast else Peer(peer, group, None, iter(range(1 << 30)))

    def send(self, data: Any) -> None:
        data = data.to(self.group.device)
        if self.peer is None:
            dist.broadcast(data, self.src, group=self.group.group)
        else:
            self.peer.send(data)

    def recv(self, room: Any) -> Any:
        if self.peer is None:
            dist.broadcast(room, self.src, group=self.group.group)
        else:
            self.peer.recv(room)
        return room

    def answers(self, fits: bool) -> bool:
        """Tell whether every receiver takes what was announced."""
        if self.peer is None:
            return all(answer for (answer,) in self.group.all_numbers(int(fits)))
        word = self.group.numbers(int(fits))
        if self.src == dist.get_rank():
            return bool(self.peer.recv(word).item())
        self.peer.send(word)
        return fits
