"""Collective communication: broadcast, scatter, all_gather, gather_and_stack. Ranks may have different structures.

Each exchange starts with the sizes of the messages. A rank whose collection cannot be sent sends an error instead, and
all ranks raise, so that no rank hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import BatchSizeError, FormatError
from td_core.spi import show_path, unravel_key_to_tuple
from td_core.typing import DeviceType

from . import _wire
from ._consolidated_backend import CollectionT
from ._group import FAILED, MARK, Group, check_mark, peer_error, text_to_bytes
from ._memory import END, compare_end, compare_tails, expect_end, expect_tails, get_bytes, make_vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Limit in bytes of the error text that a rank sends.
LONGEST_TEXT = 1 << 16


class Payload:
    """The messages of one collection: a uint8 tensor of the storage followed by the header.

    Args:
        make: returns the collection; if it raises, the error is sent instead.
        device: device of the messages.
        apart: send a large collection as its header, followed by its storage in parts.

    Attributes:
        front: (bytes of the header, bytes of header and storage), sent first.
        data: the first message after ``front``.
        parts: the remaining messages.
        error: the error that is sent in place of the collection, or None.
    """

    def __init__(
        self, make: Callable[[], TensorCollection], device: torch.device, *, apart: bool = False
    ) -> None:
        self.error: Exception | None = None
        self.parts: list[Tensor] = []
        try:
            length, size, (self.data, *self.parts) = _wire.split_message(make(), device, apart)
        except Exception as error:  # send any error, because the other ranks wait for a message
            self.error = error
            self.data = text_to_bytes(f"{type(error).__name__}: {error}", LONGEST_TEXT)
            length, size = FAILED, len(self.data) - len(END)
        self.front = (length, size)


def unpack(
    front: list[int], data: Tensor, sender: int, device: DeviceType | None = None, named: type | None = None
) -> TensorCollection:
    """Decode the collection that a rank sent, as an instance of ``named`` if given; raise StructureError if it failed."""
    length, size = front
    if length == FAILED:
        raise peer_error(sender, data[:size])
    header, storage = data[size - length : size], data[: size - length]
    return _assemble(_wire.parse_message(bytes(get_bytes(header))), storage, device, named)


def receive(
    front: list[int],
    sender: int,
    device: DeviceType | None,
    among: Group,
    take: Callable[..., None],
    named: type | None = None,
) -> TensorCollection:
    """Receive the messages of a :class:`Payload` with ``take``, and decode the collection; errors as in :func:`unpack`."""
    # ``front`` was received before: (mark, bytes of the header, bytes of header and storage).
    mark, length, size = front
    check_mark(mark)
    if not (0 < size <= LONGEST_TEXT if length == FAILED else 0 < length <= min(size, _wire.LARGEST_HEADER)):
        raise FormatError(f"rank {sender} announced {size} bytes, {length} of them a header")
    if size < _wire.APART or length == FAILED:
        take(data := expect_end(among.bytes(size + len(END)), size))
        compare_end(data, size)
        return unpack([length, size], data, sender, device, named)
    take(header := expect_end(among.bytes(length + len(END)), length))
    compare_end(header, length)
    sizes, tails, text = _wire.parts_of(bytes(get_bytes(header)[:length]), size - length)
    try:
        message = _wire.parse_message(text)
        parts = message.parts()
        if [stop - start for start, stop in parts] != sizes or length + message.layout.nbytes != size:
            raise FormatError(
                f"rank {sender} announced {size} bytes, its header {length + message.layout.nbytes}"
            )
    except Exception:  # on any error, drain the messages, or the next call would receive them
        scratch = among.bytes(max(sizes, default=0))
        for item in sizes:
            take(scratch[:item])
        raise
    storage = among.bytes(message.layout.nbytes)
    rooms = [storage[start:stop] for start, stop in parts]
    expect_tails(rooms, tails)
    take(*rooms)
    compare_tails(rooms, tails)
    return _assemble(message, storage, device, named)


def _assemble(
    message: _wire.Message, storage: Tensor, device: DeviceType | None, named: type | None = None
) -> TensorCollection:
    result: TensorCollection = _wire.assemble(message, storage, named)
    return result if device is None else result.to(device)


def broadcast_from(src: int, group: dist.ProcessGroup | None, *messages: Tensor) -> None:
    """Broadcast several messages from a rank concurrently."""
    for work in [dist.broadcast(message, src, group=group, async_op=True) for message in messages]:
        work.wait()


def broadcast(
    self: CollectionT, src: int, *, group: ProcessGroup | None = None, device: DeviceType | None = None
) -> CollectionT:
    """Broadcast the collection of the rank ``src`` and return it on every rank.

    Args:
        src: rank in the global group.
        group: the process group; None is the global one.
        device: device of the result on the other ranks; by default the one that the backend uses for messages.

    Raises:
        StructureError: the collection cannot be sent; raised on every rank.
        CodecError: no registered serializer can store a value; raised on the rank ``src``, StructureError on the others.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> TensorDict({"a": torch.arange(3)}).broadcast(0)["a"]
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    sends = among.rank == among.rank_of(src)
    parcel = Payload(lambda: self, among.device, apart=True) if sends else None
    front = among.numbers(MARK, *(parcel.front if parcel else (0, 0)))
    transfer = partial(broadcast_from, src, group)
    transfer(front)
    if parcel is None:
        return cast(CollectionT, receive(front.tolist(), src, device, among, transfer))
    transfer(parcel.data.to(among.device), *parcel.parts)
    if parcel.error is not None:
        raise parcel.error
    return self


def scatter(
    self: CollectionT,
    src: int,
    tensordicts: list[Any] | None = None,
    *,
    group: ProcessGroup | None = None,
    device: DeviceType | None = None,
) -> CollectionT:
    """Scatter the list of collections of the rank ``src``: return the item of this rank.

    Args:
        src: rank in the global group.
        tensordicts: on the rank ``src`` one collection per rank of the group, in the order of the ranks.
        group: the process group; None is the global one.
        device: device of the result; by default the one that the backend uses for messages.

    Raises:
        StructureError: an item cannot be sent; raised on every rank.
        ValueError: the list does not have one item per rank; raised on the rank ``src``, StructureError on the others.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> TensorDict().scatter(0, [TensorDict({"a": torch.arange(3)})])["a"]
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    error: Exception | None = None
    fronts: list[Tensor] | None = None
    messages: list[Tensor] | None = None
    if among.rank == among.rank_of(src):
        make = partial(_item, tensordicts, among.size)
        parcels = [Payload(partial(make, i), among.device) for i in range(among.size)]
        for parcel in parcels:
            if parcel.error is not None:
                error, parcels = parcel.error, [parcel] * among.size
                break
        largest = max(len(parcel.data) for parcel in parcels)
        fronts = [among.numbers(MARK, *parcel.front, largest) for parcel in parcels]
        messages = [among.pad_bytes(parcel.data, largest) for parcel in parcels]
    front = among.numbers(0, 0, 0, 0)
    dist.scatter(front, fronts, src=src, group=group)
    mark, *arrived, largest = front.tolist()
    check_mark(mark)
    if not 0 < arrived[1] <= largest - len(END):
        raise FormatError(f"rank {src} announced {arrived[1]} bytes in a message of {largest}")
    data = expect_end(among.bytes(largest), arrived[1])
    dist.scatter(data, messages, src=src, group=group)
    if error is not None:
        raise error
    compare_end(data, arrived[1])
    return cast(CollectionT, unpack(arrived, data, src, device))


def _item(items: list[TensorCollection] | None, size: int, i: int) -> TensorCollection:
    if items is None or len(items) != size:
        raise ValueError(
            f"scatter() takes one collection for each of the {size} ranks; got {None if items is None else len(items)}"
        )
    return items[i]


def all_gather(self: TensorCollection, *, group: ProcessGroup | None = None) -> list[Any]:
    """Gather the collections of all ranks. Return them as a list in the order of the ranks, on every rank.

    Args:
        group: the process group; None is the global one.

    Raises:
        StructureError: a collection cannot be sent; raised on every rank.
        CodecError: no registered serializer can store a value; raised on its rank, StructureError on the others.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> [item["a"] for item in TensorDict({"a": torch.arange(3)}).all_gather()]
    [tensor([0, 1, 2])]
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    parcel = Payload(lambda: self, among.device)
    fronts = among.all_numbers("all_gather", *parcel.front)
    every = among.all_bytes(parcel.data, [size for _, size in fronts])
    _check_all_sent(fronts, every, parcel)
    return [unpack(front, data, rank) for rank, (front, data) in enumerate(zip(fronts, every, strict=True))]


def gather_and_stack(self: CollectionT, dst: int, group: ProcessGroup | None = None) -> CollectionT | None:
    """Stack the collections of all other ranks into the collection of the rank ``dst``, in place.

    On the rank ``dst`` the first dim of this collection has one position per other rank; missing entries are added.
    The items may have different keys and shapes if this collection is a lazy stack of empty collections; entries that
    are there are written in place, and need equal shapes. ``lazy_stack(td.all_gather())`` needs no room for them.

    Args:
        dst: rank in the global group.
        group: the process group; None is the global one.

    Returns:
        This collection on the rank ``dst``, None elsewhere.

    Raises:
        StructureError: a collection cannot be sent (raised on every rank), or those that arrive do not fit (raised on the
            rank ``dst``, where nothing was changed).
        BatchSizeError: the first dim does not have one position per other rank; raised on the rank ``dst``, where
            nothing was changed.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> room = TensorDict({"a": torch.zeros(0, 3)}, batch_size=[0])  # for no other rank
    >>> room.gather_and_stack(0) is room
    True
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    receiver = among.rank_of(dst)
    receives = among.rank == receiver
    parcel = None if receives else Payload(lambda: self, among.device)
    front, data = (parcel.front, parcel.data) if parcel else ((0, 0), make_vector(END))
    fronts = among.all_numbers(f"gather_and_stack to {dst}", *front)
    if any(length == FAILED for length, _ in fronts):
        _check_all_sent(fronts, among.all_bytes(data, [size for _, size in fronts]), parcel)
    largest = max(size for _, size in fronts) + len(END)
    left = among.pad_bytes(data, largest)
    room = [expect_end(among.bytes(largest), size) for _, size in fronts] if receives else None
    dist.gather(left, room, dst=dst, group=group)
    if room is None:
        return None
    for (_, size), item in zip(fronts, room, strict=True):
        compare_end(item, size)
    items = [unpack(fronts[rank], room[rank], rank) for rank in range(among.size) if rank != receiver]
    if items:
        _write_stacked(self, items)
    return self


def _write_stacked(target: TensorCollection, items: list[TensorCollection]) -> None:
    """Write the stack of collections into another one, whose first dim has their number."""
    if not target.batch_dims:
        for key, leaf in target.items(True, True):
            if leaf.shape[:1] != (len(items),):
                raise BatchSizeError(
                    f"cannot take {len(items)} items: {show_path(unravel_key_to_tuple(key))} has shape {list(leaf.shape)}"
                )
    join = target.lazy_stack if getattr(target, "stack_dim", None) == 0 else target.stack
    with torch.no_grad():  # no_grad() allows in-place writes to parameters
        target.update(join(items, 0), inplace=True)


def _check_all_sent(fronts: list[list[int]], every: list[Tensor], own: Payload | None) -> None:
    if own is not None and own.error is not None:
        raise own.error
    for rank, (length, _) in enumerate(fronts):
        if length == FAILED:
            raise peer_error(rank, every[rank])
