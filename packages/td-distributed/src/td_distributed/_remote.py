"""Send a collection to a process that has none to receive into; the receiver accepts the size before the bytes are sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import FormatError, StructureError
from td_core.typing import DeviceType

from . import _send_paths, _wire
from ._collectives import Payload, broadcast_from, receive
from ._group import FAILED, MARK, Group, check_mark, device_of
from ._memory import get_bytes, make_vector
from ._p2p import Channel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Default of the largest accepted size in bytes.
LIMIT = 1 << 36


def init_remote(
    self: TensorCollection,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: DeviceType | None = None,
    use_broadcast: bool = False,
) -> None:
    """Send structure and content to a process that calls :func:`from_remote_init`.

    For a memory-mapped collection below the receiver's ``root``, only the path of its files is sent.

    Args:
        dst: rank of the receiver in the global group; with ``use_broadcast`` any of the receivers, or None.
        group: the process group; None is the global one.
        device: move the collection to this device before sending.
        use_broadcast: send to all other ranks of the group, which all call :func:`from_remote_init`.

    Raises:
        StructureError: a leaf cannot be sent, or the receiver refused the size.
        ValueError: ``dst`` is not a rank of the group.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> TensorDict({"a": torch.arange(3)}).init_remote(use_broadcast=True)  # to no other rank
    >>> dist.destroy_process_group()
    """
    link = _Link(group, dst, use_broadcast, dist.get_rank())
    if link.peer is not None and device is None and (folder := _send_paths.get_folder(self)) is not None:
        link.send(link.group.numbers(_send_paths.ASKS, 0, 0))
        header = _send_paths.make_path_header(folder, link.peer)
        if header is not None:
            link.send(link.group.numbers(_send_paths.ASKS, len(header), 0))
            link.send(make_vector(header))
            return
    parcel = Payload(lambda: self if device is None else self.to(device), device_of(group), apart=True)
    link.send(link.group.numbers(MARK, *parcel.front))
    if parcel.error is not None:
        link.send(parcel.data)
        raise parcel.error
    if not link.is_accepted(True):
        raise StructureError(f"the receiver refused {parcel.front[1]} bytes, more than its limit")
    link.send(parcel.data, *parcel.parts)


def from_remote_init(
    src: int,
    group: ProcessGroup | None = None,
    device: DeviceType | None = None,
    use_broadcast: bool = False,
    limit: int = LIMIT,
    *,
    root: str | Path | None = None,
) -> TensorCollection:
    """Receive the collection that the rank ``src`` sends with :func:`init_remote`, and return it.

    Nothing is unpickled or imported: only classes that this process has defined are used.

    Args:
        src: rank of the sender in the global group.
        group: the process group; None is the global one.
        device: device of the result; by default the one that the backend uses for messages.
        use_broadcast: the same as for the sender.
        limit: largest accepted size in bytes; if it is exceeded, the sender raises too.
        root: folder that both processes can read. The sender of a memory-mapped collection below it sends the path
            instead of the bytes; the result maps the files privately, so writing it does not change them. It cannot
            be combined with ``use_broadcast``.

    Raises:
        FormatError: the announced size exceeds ``limit``, the message is damaged, or a path is outside of ``root``.
        StructureError: the sender could not send the collection.
        MissingPluginError: the message contains a path, and td-memmap is not installed.

    >>> from_remote_init(src=0)["a"]  # doctest: +SKIP
    tensor([0, 1, 2])
    """
    return receive_as(None, src, group, device, use_broadcast, limit, root=root)


def receive_as(
    cls: type | None,
    src: int,
    group: ProcessGroup | None = None,
    device: DeviceType | None = None,
    use_broadcast: bool = False,
    limit: int = LIMIT,
    *,
    root: str | Path | None = None,
) -> TensorCollection:
    """Receive the collection of :func:`from_remote_init`, as an instance of ``cls`` if that has declared entries."""
    link = _Link(group, src, use_broadcast, src)
    if use_broadcast and root is not None:
        raise ValueError("use_broadcast sends bytes to every rank of the group, so it has no use for root")
    front = link.recv(link.group.numbers(0, 0, 0)).tolist()
    if front[0] == _send_paths.ASKS and link.peer is not None:
        _send_paths.answer_root(root, link.peer)
        front = link.recv(link.group.numbers(0, 0, 0)).tolist()
        if front[0] == _send_paths.ASKS:
            return _from_files(front[1], link, root, device, cls)
    mark, length, size = front
    check_mark(mark)
    fits = 0 < length <= min(size, _wire.LARGEST_HEADER) and size <= limit
    if length != FAILED and (not link.is_accepted(fits) or not fits):
        raise FormatError(f"rank {src} announced {size} bytes, limit= allows {limit} of this rank")
    return receive(front, src, device, link.group, link.take, cls)


def _from_files(
    length: int, link: _Link, root: str | Path | None, device: DeviceType | None, cls: type | None
) -> TensorCollection:
    if not 0 < length <= _send_paths.LONGEST:
        raise FormatError(f"rank {link.src} announced a path of {length} bytes")
    header = bytes(get_bytes(link.recv(link.group.bytes(length).zero_())))
    saved: TensorCollection = _send_paths.load(root, _send_paths.parse_path(header), cls)
    where = link.group.device if device is None else torch.device(device)
    return saved if where.type == "cpu" else saved.to(where)


class _Link:
    """Connection from one rank to a peer or, with ``use_broadcast``, to all ranks, with the same methods."""

    def __init__(
        self, group: dist.ProcessGroup | None, peer: int | None, use_broadcast: bool, src: int
    ) -> None:
        self.group = Group(group)
        self.src = src
        if use_broadcast and peer is not None:
            self.group.rank_of(peer)
        self.peer = None if use_broadcast else Channel(peer, group, None, iter(range(1 << 30)))

    def send(self, *messages: Tensor) -> None:
        if self.peer is None:
            broadcast_from(
                self.src, self.group.group, *(message.to(self.group.device) for message in messages)
            )
        else:
            self.peer.send(*messages)

    def take(self, *rooms: Tensor) -> None:
        if self.peer is None:
            broadcast_from(self.src, self.group.group, *rooms)
        else:
            self.peer.take(*rooms)

    def recv(self, room: Tensor) -> Tensor:
        self.take(room)
        return room

    def is_accepted(self, fits: bool) -> bool:
        """Return True if every receiver accepts the announced size."""
        if self.peer is None:
            return all(answer for (answer,) in self.group.all_numbers("init_remote", int(fits)))
        word = self.group.numbers(int(fits))
        if self.src == dist.get_rank():
            return bool(self.peer.recv(word).item())
        self.peer.send(word)
        return fits
