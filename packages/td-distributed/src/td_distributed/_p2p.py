"""Point-to-point communication: send a collection to a peer, receive into a collection of the same structure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import FormatError

from . import _memory, _reference_wire, _send_paths, _wire
from ._consolidated_backend import get_backend
from ._group import MARK, device_of
from ._memory import allocate, compare_end, compare_tails, expect_end, expect_tails, get_bytes
from ._receive import ReceiveTarget, deliver_files

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

WIRES = ("td", "reference")
_NO_END = bytes(len(_memory.END))


@dataclass(slots=True)
class Channel:
    """One end of a point-to-point exchange: the peer, the group and the message tags.

    Attributes:
        rank: rank of the peer in the global group, or None.
        group: the process group; None is the global one.
        group_rank: rank of the peer in ``group``, instead of ``rank``.
        tags: the tags of the messages, in order.
        last: the last tag that was used.
        asked: the resolved group object.
        place: device of the messages; None until it is first needed.
    """

    rank: int | None
    group: dist.ProcessGroup | None
    group_rank: int | None
    tags: Iterator[int]
    last: int = 0
    asked: Any = None
    place: torch.device | None = None

    def __post_init__(self) -> None:
        if (self.rank is None) == (self.group_rank is None):
            raise ValueError(
                "give the peer's rank in the global group, or its rank in the given group: one of the two; got "
                f"{self.rank} and {self.group_rank}"
            )
        # Call the group's own methods: they also work for groups that were not created by torch.distributed.
        self.asked = dist.group.WORLD if self.group is None else self.group
        known = isinstance(self.asked, dist.ProcessGroup)
        size = self.asked.size() if known else dist.get_world_size(self.group)
        if size < 0:
            raise ValueError("this process is not part of the group")
        if self.group_rank is None:
            assert self.rank is not None
            self.group_rank = self.rank if self.group is None else dist.get_group_rank(self.group, self.rank)
        # Backends do not check the rank and would read out of bounds.
        if not 0 <= self.group_rank < size:
            raise ValueError(f"a group of {size} has no rank {self.group_rank}")
        if known and self.group_rank == self.asked.rank():
            own = self.group_rank if self.rank is None else self.rank
            raise ValueError(f"rank {own} is this process itself; give that of the peer")

    def send(self, *tensors: Tensor) -> None:
        """Send messages from any device, and wait until they are sent."""
        device = self.device()
        for work in [self.isend(tensor.to(device)) for tensor in tensors]:
            work.wait()

    def isend(self, tensor: Tensor) -> dist.Work:
        """Start to send one message."""
        self.last = next(self.tags)
        work: dist.Work = self.asked.send([tensor], self.group_rank, self.last)
        return work

    def recv(self, tensor: Tensor) -> Tensor:
        """Receive one message into ``tensor``."""
        self.irecv(tensor).wait()
        return tensor

    def take(self, *tensors: Tensor) -> None:
        """Receive one message per tensor, concurrently."""
        for work in [self.irecv(tensor) for tensor in tensors]:
            work.wait()

    def irecv(self, tensor: Tensor) -> dist.Work:
        """Start to receive one message into ``tensor``."""
        self.last = next(self.tags)
        work: dist.Work = self.asked.recv([tensor], self.group_rank, self.last)
        return work

    def device(self) -> torch.device:
        """Return the device on which the backend needs its messages."""
        if self.place is None:
            self.place = device_of(self.group)
        return self.place


@dataclass(slots=True, eq=False)  # gather() of asyncio takes what can be hashed
class SendWork:
    """Handle of an asynchronous send, which keeps the sent bytes alive. Call ``wait()`` before the process ends.

    gloo loses the connection if a ``Work`` object is freed before it completes, so a thread waits for handles that are dropped.

    Attributes:
        work: the handle of torch.distributed.
        data: the bytes to send.
        waited: True once ``wait()`` was called.
    """

    work: dist.Work
    data: Tensor
    waited: bool = False

    def wait(self) -> None:
        """Block until the message is sent."""
        self.waited = True
        self.work.wait()

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine, while others run."""
        self.waited = True
        yield from asyncio.to_thread(self.work.wait).__await__()

    def __del__(self) -> None:
        """Finish sending in a background thread, if ``wait()`` was not called."""
        if not self.waited:
            with contextlib.suppress(RuntimeError):  # threads cannot start at interpreter shutdown
                Thread(target=_keep_alive, args=(self.work, self.data), name="td-isend", daemon=True).start()

    def is_completed(self) -> bool:
        """Return True if the message is sent."""
        return bool(self.work.is_completed())


def _keep_alive(work: dist.Work, data: Tensor) -> None:
    """Hold references to a handle and its data until the send completes; ignore its errors."""
    with contextlib.suppress(RuntimeError):
        work.wait()


#: The last receiving thread per (group, peer rank, first tag): receives with the same key run in the order of the calls.
_TAKING: WeakValueDictionary[tuple[object, int | None, int], Thread] = WeakValueDictionary()


class RecvWork:
    """Handle of an asynchronous receive. ``wait()`` writes the leaves; on the tensordict wire they are written earlier.

    A background thread receives the messages, because a peer may block until they are received. With nccl, which runs
    operations in the order of the calls, ``wait()`` receives them.

    Args:
        steps: iterator whose first step receives the messages and whose second step writes them.
        peer: the channel to the sender.
        tag: tag of the first message.
    """

    def __init__(self, steps: Iterator[None], peer: Channel, tag: int) -> None:
        self.steps = steps
        self.written = False
        self.error: Exception | None = None
        self.thread: Thread | None = None
        if peer.device().type == "cpu":
            key = (peer.asked, peer.group_rank, tag)
            self.thread = Thread(target=self._take, args=(_TAKING.get(key),), name="td-irecv", daemon=True)
            _TAKING[key] = self.thread
            self.thread.start()

    def _take(self, before: Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            next(self.steps, None)
        except Exception as error:
            self.error = error

    def wait(self) -> None:
        """Block until all messages have arrived, then write them into the collection."""
        if self.thread is not None:
            self.thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error
        for _ in self.steps:
            pass
        self.written = True

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine, while others run, and write the messages in its thread."""
        if self.thread is not None:
            yield from asyncio.to_thread(self.thread.join).__await__()
        self.wait()

    def is_completed(self) -> bool:
        """Return True if all messages have arrived; :meth:`wait` writes them."""
        return self.written if self.thread is None else not self.thread.is_alive()


def send(
    self: TensorCollection,
    dst: int | Any | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    consolidated: bool = False,
    wire: str = "td",
) -> None:
    """Send this collection to a process that calls :meth:`recv`.

    For the result of ``memmap`` or ``load_memmap(path).memmap_()`` below the receiver's ``root``, only the path is sent.

    Args:
        dst: rank of the receiver in the global group.
        group: the process group; None is the global one.
        group_dst: rank of the receiver in ``group``, instead of ``dst``.
        init_tag: tag of the first message; each following message has the next tag.
        pseudo_rand: draw the tags from a generator seeded with ``init_tag`` instead.
        consolidated: send one payload message for all leaves.
        wire: ``"td"`` sends the structure first, so that a receiver with another structure raises. ``"reference"`` is
            the protocol of tensordict: the peer may use that library, and a mismatch hangs or is not detected. On
            this wire the storage of a consolidated collection is sent without checking each leaf, unless its number
            of references changed, as after ``leaf.data = ...``. Changes that keep this number are not detected:
            ``leaf.t_()``, swapping the ``data`` of leaves, ``leaf.data = ...`` while the old ``data`` is referenced.

    Raises:
        StructureError: a leaf cannot be sent (sparse, strided nested); nothing was sent.
        CodecError: no registered serializer can store a value; the message names its key; nothing was sent.

    >>> TensorDict({"a": torch.ones(3)}).send(dst=1)  # doctest: +SKIP
    """
    peer = Channel(dst, group, group_dst, _make_tags(init_tag, pseudo_rand))
    if _check_wire(wire) == "reference":
        peer.send(*_reference_wire.make_messages(self, consolidated, peer.device()))
        return
    if _send_path(self, peer):
        return
    announced, payload = _wire.make_message(self, consolidated)
    if announced.spare is None:
        payload = [part.to(peer.device()) for part in payload]
        peer.send(*_wire.pack_message(MARK, announced.header, payload))
        return
    whole = announced.whole(payload[0])
    peer.send(whole[0])
    announced.spare.append(whole)


def isend(
    self: TensorCollection,
    dst: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    return_early: bool = False,
    consolidated: bool = False,
    wire: str = "td",
) -> int | list[Work] | None:
    """Start to send this collection; arguments as for :meth:`send`.

    With ``return_early``, return a list of handles with ``wait()``, which a coroutine can also await; otherwise wait and return
    the last tag. A background thread waits for dropped handles. A memory-mapped collection is sent as bytes, not as a path.
    """
    peer = Channel(dst, group, group_dst, _make_tags(init_tag, pseudo_rand))
    if _check_wire(wire) == "reference":
        messages = _reference_wire.make_messages(self, consolidated, peer.device())
    else:
        announced, payload = _wire.make_message(self, consolidated)
        payload = [part.to(peer.device()) for part in payload]
        packed = _wire.pack_message(MARK, announced.header, payload)
        messages = [message.to(peer.device()) for message in packed]
    sending = [SendWork(peer.isend(message), message) for message in messages]
    if return_early:
        return cast("list[Work]", sending)
    for message in sending:
        message.wait()
    return peer.last


def recv(
    self: TensorCollection,
    src: int | Any | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    consolidated: bool = False,
    wire: str = "td",
    root: str | Path | None = None,
) -> int:
    """Receive a collection that a process sent with :meth:`send`, into this collection in place.

    All messages are received into a buffer first, so a peer that dies leaves the collection unchanged. A consolidated
    collection keeps a buffer of up to 64 MiB for the next message.

    Args:
        src: rank of the sender in the global group.
        group: the process group; None is the global one.
        group_src: rank of the sender in ``group``, instead of ``src``.
        init_tag: tag of the first message, the same as for the sender.
        pseudo_rand: the same as for the sender.
        consolidated: the same as for the sender; needed with ``wire="reference"`` only.
        wire: the same as for the sender; with ``"reference"``, :meth:`send` lists the changes that are not detected.
        root: folder that both processes can read. The sender of a memory-mapped collection below it sends the path
            instead of the bytes, and this process reads the files.

    Returns:
        The last tag.

    Raises:
        StructureError: the structure of the message differs, or leaves that are tied here have different elements in
            the message; the message of the error names the first key. The collection is unchanged, and the message
            was received completely, so the next ``recv`` works.
        FormatError: the received bytes are not a message of :meth:`send`, or a path is outside of ``root``.
        MissingPluginError: the message contains a path, and td-memmap is not installed.

    >>> TensorDict({"a": torch.zeros(3)}).recv(src=0)  # doctest: +SKIP
    0
    """
    peer = Channel(src, group, group_src, _make_tags(init_tag, pseudo_rand))
    steps = _steps(self, peer, consolidated, wire, root)
    earlier = _TAKING.get((peer.asked, peer.group_rank, init_tag))
    if earlier is not None:
        earlier.join()
    for _ in steps:
        pass
    return peer.last


def irecv(
    self: TensorCollection,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    return_premature: bool = False,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    consolidated: bool = False,
    wire: str = "td",
    root: str | Path | None = None,
) -> tuple[int, list[Any]] | list[Any] | None:
    """Start to receive into this collection; arguments as for :meth:`recv`.

    With ``return_premature``, return a list with one handle. The messages arrive in the background; ``is_completed()``
    returns True once they have. ``wait()`` writes them, and so does ``await handle`` in a coroutine; do not change the structure
    of the collection before that. If the handle is dropped, the received data is discarded. Otherwise receive before returning.
    """
    peer = Channel(src, group, group_src, _make_tags(init_tag, pseudo_rand))
    handle = RecvWork(_steps(self, peer, consolidated, wire, root), peer, init_tag)
    if return_premature:
        return [handle]
    handle.wait()
    return None


def _send_path(collection: TensorCollection, peer: Channel) -> bool:
    """Send the path of a memory-mapped collection, if it is below the receiver's root. Return True if it was sent."""
    folder = _send_paths.get_folder(collection)
    if folder is None:
        return False
    peer.send(_wire.pack_message(_send_paths.ASKS, b"", [])[0])
    header = _send_paths.make_path_header(folder, peer)
    if header is None:
        return False
    peer.send(*_wire.pack_message(MARK, header, []))
    return True


def _steps(
    collection: TensorCollection, peer: Channel, consolidated: bool, wire: str, root: str | Path | None
) -> Iterator[None]:
    if _check_wire(wire) == "reference":
        return _reference_wire.receive(collection, consolidated, peer)
    return _receive(collection, peer, root)


def _receive(collection: TensorCollection, peer: Channel, root: str | Path | None) -> Iterator[None]:
    """Receive a message in two steps: the iterator yields once all bytes have arrived, then writes them."""
    device = peer.device()
    arrival = _take_arrival(collection, device)
    if arrival is None:
        first = expect_end(allocate(_wire.FIRST, device), _wire.ROOM)
    else:
        first = arrival[0]
        # gloo accepts a shorter message, which would leave the previous header or end in the buffer.
        arrival[1][:], arrival[3][:] = _wire.NOTHING, _NO_END
    coming = peer.irecv(first)
    # Encode the collection while the message is in transit.
    target = ReceiveTarget(collection)
    known = target.get_expected()
    if known is not None and arrival is None:
        arrival = known.arrival(first)
    target.prepare()
    coming.wait()
    if (
        known is not None
        and arrival is not None
        and arrival[1] == known.front()
        and arrival[3] == _memory.END
    ):
        yield
        target.deliver(known, arrival[2])
        known.arrivals.append(arrival)
        return
    header, tails, count, nbytes = _parse_first(first, peer, root)
    if not count and (named := _send_paths.parse_path(header)) is not None:
        saved = _send_paths.load(root, named)
        yield
        deliver_files(collection, saved)
        return
    stop = _wire.FRONT.size + len(header)
    inside_first = _wire.fits_in_first(len(header), nbytes)
    message = _read_header(target, header, count, nbytes, None if inside_first else peer)
    parts = message.parts()
    storage = allocate(message.layout.nbytes, device)
    if inside_first:
        for begin, end in parts:
            storage[begin:end] = first[stop : stop + end - begin]
            stop += end - begin
    else:
        rooms = [storage[begin:end] for begin, end in parts]
        expect_tails(rooms, tails)
        peer.take(*rooms)
        compare_tails(rooms, tails)
    yield
    target.deliver(message, storage)


def _take_arrival(
    collection: object, device: torch.device
) -> tuple[Tensor, memoryview, Tensor, memoryview] | None:
    """Return the buffer of the last message into a collection, with its front, payload and end, if it can be used again."""
    state = get_backend(collection)
    received = None if state is None or device.type != "cpu" else state.get_received()
    return received.arrivals.pop() if received is not None and received.arrivals else None


def _read_header(target: ReceiveTarget, header: bytes, count: int, nbytes: int, peer: Channel | None) -> Any:
    """Parse the header of a message and check it. On an error, drain the payload that ``peer`` has still to send, if any."""
    try:
        message = target.parse_header(header)
    except FormatError:  # such as a dtype that only the sender's torch has
        if peer is not None and peer.device().type == "cpu":
            # gloo accepts messages shorter than the buffer, so their exact sizes are not needed.
            _drain(peer, min(nbytes, _wire.PIECE), repeat(_wire.PIECE, count))
        raise
    parts = message.parts()
    if len(parts) != count or sum(stop - start for start, stop in parts) != nbytes:
        raise FormatError(f"a message announced {count} parts of {nbytes} bytes, its header {parts!r:.100}")
    try:
        target.check(message)
    except Exception:  # on any error, drain this message, or the next recv would receive it
        if peer is not None:
            sizes = [end - begin for begin, end in parts]
            _drain(peer, max(sizes, default=0), sizes)
        raise
    return message


def _parse_first(first: Tensor, peer: Channel, root: str | Path | None) -> tuple[bytes, bytes, int, int]:
    """Parse a first message: (header, ends of the payload messages, their number, their bytes). Send the root if requested."""
    data = get_bytes(first)
    mark, length, count, nbytes, digest = _wire.FRONT.unpack_from(data)
    if mark == _send_paths.ASKS:
        compare_end(first, _wire.ROOM)
        _send_paths.answer_root(root, peer)
        data = get_bytes(peer.recv(expect_end(first, _wire.ROOM)))
        mark, length, count, nbytes, digest = _wire.FRONT.unpack_from(data)
    if mark != MARK or not (0 < length <= _wire.LARGEST_HEADER and 0 <= count <= length):
        raise FormatError(
            "what arrived is not a message of send(); does the peer use the same wire= and init_tag=?"
        )
    compare_end(first, _wire.ROOM)
    size = length if _wire.fits_in_first(length, nbytes) else length + count * _memory.TAIL
    stop = _wire.FRONT.size + size
    inside = data[_wire.FRONT.size : stop]
    described = bytes(inside if stop <= _wire.ROOM else get_bytes(peer.recv(allocate(size, peer.device()))))
    header = described[:length]
    if stop > _wire.ROOM and _wire.compute_digest(header) != digest:
        raise _memory.cut_error("the header of a message", length)
    return header, described[length:], count, nbytes


def _drain(peer: Channel, largest: int, sizes: Iterable[int]) -> None:
    """Receive and discard messages of the given sizes, in one buffer."""
    scratch = allocate(largest, peer.device())
    for size in sizes:
        peer.recv(scratch[:size])


def _make_tags(first: int, pseudo_rand: bool) -> Iterator[int]:
    if pseudo_rand:
        return _reference_wire.pseudo_random_tags(first)
    return iter(range(first, 1 << 31))


def _check_wire(wire: str) -> str:
    if wire not in WIRES:
        raise ValueError(f"wire is one of {WIRES}; got {wire!r}")
    return wire
