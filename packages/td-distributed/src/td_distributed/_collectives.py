"""Collections from one rank to all, from all to one, from all to all: the structure travels, so it may differ.

Each exchange starts with numbers that say how much comes. A rank whose collection cannot be sent says so in their place
and all ranks raise, so that none waits for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from td_core.errors import CodecError, StructureError

from . import _wire
from ._group import FAILED, MARK, Group, check_mark, failed, text_to_bytes


class Parcel:
    """A collection on its way: one vector of bytes, the storage first and then the header.

    Args:
        make: returns the collection; what it raises is sent instead.
        device: where the bytes have to lie.
    """

    def __init__(self, make: Any, device: torch.device) -> None:
        self.error: Exception | None = None
        try:
            length, self.data = _wire.in_one(make(), device)
        except (StructureError, CodecError, ValueError) as error:
            self.error = error
            self.data = text_to_bytes(f"{type(error).__name__}: {error}")
            self.front = (MARK, FAILED, len(self.data))
            return
        self.front = (MARK, length, len(self.data))


def unpack(front: list[int], data: Tensor, sender: int, device: Any = None) -> Any:
    """Return the collection that arrived from a rank.

    Raises:
        StructureError: the rank sent an error instead.
        FormatError: it is damaged.
    """
    mark, length, size = front
    check_mark(mark)
    if length == FAILED:
        raise failed(sender, data[:size])
    header, storage = data[size - length : size], data[: size - length]
    result = _wire.assemble(_wire.incoming(bytes(header.cpu().numpy())), storage)
    return result if device is None else result.to(device)


def broadcast(
    self: Any, src: int, *, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> Any:
    """Return the collection of the rank ``src`` on every rank.

    Args:
        self: what is sent, on the rank ``src``; elsewhere any collection, which stays as it is.
        src: rank in the global group.
        group: the process group; None is the global one.
        device: where the result lies on the other ranks; by default where messages of the backend do.

    Raises:
        StructureError: the collection cannot be sent; on every rank.
        CodecError: a value that no registered serializer stores, on the rank ``src``; StructureError on the others.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from td_core import TensorDict
    >>> TensorDict({"a": torch.arange(3)}).broadcast(0)["a"]
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    sends = among.rank == among.rank_of(src)
    parcel = Parcel(lambda: self, among.device) if sends else None
    front = among.numbers(*(parcel.front if parcel else (0, 0, 0)))
    dist.broadcast(front, src, group=group)
    arrived = front.tolist()
    check_mark(arrived[0])
    data = parcel.data.to(among.device) if parcel else among.bytes(arrived[2])
    dist.broadcast(data, src, group=group)
    if parcel is None:
        return unpack(arrived, data, src, device)
    if parcel.error is not None:
        raise parcel.error
    return self


def scatter(
    self: Any,
    src: int,
    tensordicts: list[Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Return on each rank its item of the list that the rank ``src`` has.

    Args:
        self: any collection, which stays as it is.
        src: rank in the global group.
        tensordicts: on the rank ``src``: one collection for each rank of the group, in their order.
        group: the process group; None is the global one.
        device: where the result lies; by default where messages of the backend do.

    Raises:
        StructureError: an item cannot be sent; on every rank.
        ValueError: the list has not one item for each rank, on the rank ``src``; StructureError on the others.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from td_core import TensorDict
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
        parcels = [Parcel(partial(make, i), among.device) for i in range(among.size)]
        for parcel in parcels:
            if parcel.error is not None:
                error, parcels = parcel.error, [parcel] * among.size
                break
        largest = max(len(parcel.data) for parcel in parcels)
        fronts = [among.numbers(*parcel.front, largest) for parcel in parcels]
        messages = [among.padded(parcel.data, largest) for parcel in parcels]
    front = among.numbers(0, 0, 0, 0)
    dist.scatter(front, fronts, src=src, group=group)
    *arrived, largest = front.tolist()
    check_mark(arrived[0])
    data = among.bytes(largest)
    dist.scatter(data, messages, src=src, group=group)
    if error is not None:
        raise error
    return unpack(arrived, data, src, device)


def _item(items: list[Any] | None, size: int, i: int) -> Any:
    if items is None or len(items) != size:
        raise ValueError(
            f"scatter() takes one collection for each of the {size} ranks; got {None if items is None else len(items)}"
        )
    return items[i]


def all_gather(self: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the list of the collections of all ranks, in their order, on every rank.

    Args:
        self: the collection of this rank.
        group: the process group; None is the global one.

    Raises:
        StructureError: a collection cannot be sent; on every rank.
        CodecError: a value that no registered serializer stores, on its rank; StructureError on the others.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from td_core import TensorDict
    >>> [item["a"] for item in TensorDict({"a": torch.arange(3)}).all_gather()]
    [tensor([0, 1, 2])]
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    parcel = Parcel(lambda: self, among.device)
    fronts = among.all_numbers(*parcel.front)
    every = among.all_bytes(parcel.data, [size for _, _, size in fronts])
    if parcel.error is not None:
        raise parcel.error
    _refuse_failed(fronts, every)
    return [unpack(front, data, rank) for rank, (front, data) in enumerate(zip(fronts, every, strict=True))]


def gather_and_stack(self: Any, dst: int, group: dist.ProcessGroup | None = None) -> Any:
    """Stack the collections of all other ranks into that of the rank ``dst``, in place.

    On the rank ``dst`` this collection has room for one item for each other rank along its first dim; entries that it
    lacks are added. The items may differ if it is a lazy stack.

    Args:
        self: what is sent; on the rank ``dst`` what is written.
        dst: rank in the global group.
        group: the process group; None is the global one.

    Returns:
        This collection on the rank ``dst``, None elsewhere.

    Raises:
        StructureError: a collection cannot be sent; on every rank. Those that arrive do not fit; on the rank ``dst``.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from td_core import TensorDict
    >>> room = TensorDict({"a": torch.zeros(0, 3)}, batch_size=[0])  # for no other rank
    >>> room.gather_and_stack(0) is room
    True
    >>> dist.destroy_process_group()
    """
    among = Group(group)
    receiver = among.rank_of(dst)
    receives = among.rank == receiver
    parcel = None if receives else Parcel(lambda: self, among.device)
    fronts = among.all_numbers(*(parcel.front if parcel else (MARK, 0, 0)))
    for mark, _, _ in fronts:
        check_mark(mark)
    if any(length == FAILED for _, length, _ in fronts):
        every = among.all_bytes(parcel.data if parcel else among.bytes(0), [size for _, _, size in fronts])
        if parcel is not None and parcel.error is not None:
            raise parcel.error
        _refuse_failed(fronts, every)
    largest = max(size for _, _, size in fronts)
    mine = among.padded(parcel.data if parcel else among.bytes(0), largest)
    room = [among.bytes(largest) for _ in fronts] if receives else None
    dist.gather(mine, room, dst=dst, group=group)
    if room is None:
        return None
    items = [unpack(fronts[rank], room[rank], rank) for rank in range(among.size) if rank != receiver]
    stacked = self._stacked()
    if stacked is not None and stacked[1] == 0 and len(stacked[0]) == len(items):
        for member, item in zip(stacked[0], items, strict=True):
            member.update(item, inplace=True)
    elif items:
        self.update(self.stack(items, 0), inplace=True)
    return self


def _refuse_failed(fronts: list[list[int]], every: list[Tensor]) -> None:
    for rank, (mark, length, _) in enumerate(fronts):
        check_mark(mark)
        if length == FAILED:
            raise failed(rank, every[rank])
