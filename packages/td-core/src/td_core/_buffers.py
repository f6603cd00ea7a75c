"""Tensors as a few buffers of bytes, which pickle protocol 5 can keep out of band.

torch pickles each tensor through a file of its own, in memory. Here the bytes go into the pickle as they lie in memory,
or, out of band, not at all: the reader gets views on the buffers that it was given. Leaves that share a storage still
share one afterwards. The pickler of :mod:`multiprocessing` gets the tensors themselves, since torch moves those between
processes without copying them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

__all__ = ["Leaves"]

#: Storages below this size are copied into one buffer for each dtype: a buffer costs more than the bytes.
SMALL = 1 << 14


class Leaves:
    """Tensors on their way through a pickle.

    Args:
        tensors: the tensors.
        in_place: a reader may view memory that it must not write, if that is where its pickler put the bytes;
            otherwise it copies them then.

    >>> pickle.loads(pickle.dumps(Leaves([torch.ones(2)]))).tensors
    [tensor([1., 1.])]
    """

    __slots__ = ("in_place", "tensors")

    def __init__(self, tensors: list[Tensor], in_place: bool = False) -> None:
        self.tensors = tensors
        self.in_place = in_place

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return the tensors as buffers, and how each lies in them."""
        places, ranges = _pack(self.tensors)
        arrays: list[Any] = [each.numpy() for each in ranges]
        buffers = [pickle.PickleBuffer(a) if protocol >= 5 else a.tobytes() for a in arrays]
        return _unpack, (places, buffers, self.in_place)


def _share(leaves: Leaves) -> tuple[Any, ...]:
    return Leaves, (leaves.tensors, leaves.in_place)


ForkingPickler.register(Leaves, _share)


def _pack(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """Return a place for each tensor, (buffer, dtype, shape, stride, first element, requires grad), and the buffers.

    A tensor that is more than its bytes (another class, device or layout) is its own place.
    """
    places: list[Any] = list(tensors)
    groups: dict[int, dict[int, list[int]]] = {}
    for i, tensor in enumerate(tensors):
        if _is_plain(tensor):
            groups.setdefault(tensor.untyped_storage().data_ptr(), {}).setdefault(id(tensor), []).append(i)
    ranges: list[Tensor] = []
    small: dict[torch.dtype, list[list[int]]] = {}
    for group in groups.values():
        members = list(group.values())
        first = tensors[members[0][0]]
        if len(members) == 1 and first.numel() * first.itemsize <= SMALL:
            small.setdefault(first.dtype, []).append(members[0])
        else:
            _add_range(tensors, members, places, ranges)
    for dtype, members in small.items():
        _add_copies(tensors, members, places, ranges, dtype)
    return places, ranges


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def _add_range(
    tensors: Sequence[Tensor], members: list[list[int]], places: list[Any], ranges: list[Tensor]
) -> None:
    """Add tensors that share a storage: the bytes that they span, or each alone where those are mostly others'."""
    spans = []
    for same in members:
        tensor = tensors[same[0]]
        start = tensor.storage_offset() * tensor.itemsize
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        spans.append((start, start + (last + 1) * tensor.itemsize))
    start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
    # A whole element of every dtype before the first byte, so that each is reached by counting elements.
    start -= start % 16
    used = sum(tensors[same[0]].numel() * tensors[same[0]].itemsize for same in members)
    if 2 * used < stop - start:
        for same in members:
            _add_copies(tensors, [same], places, ranges, tensors[same[0]].dtype)
        return
    storage = tensors[members[0][0]].untyped_storage()
    ranges.append(torch.empty(0, dtype=torch.uint8).set_(storage, start, (stop - start,), (1,)))
    for same in members:
        tensor = tensors[same[0]]
        offset = tensor.storage_offset() - start // tensor.itemsize
        place = (
            len(ranges) - 1,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            offset,
            tensor.requires_grad,
        )
        for i in same:
            places[i] = place


def _add_copies(
    tensors: Sequence[Tensor],
    members: list[list[int]],
    places: list[Any],
    ranges: list[Tensor],
    dtype: torch.dtype,
) -> None:
    """Add tensors of one dtype as contiguous copies, one after the other, in one buffer."""
    offset = 0
    flat = []
    for same in members:
        tensor = tensors[same[0]].detach().contiguous()
        # Not view(-1): a tensor of one element is contiguous whatever its stride is, and keeps it.
        flat.append(tensor.as_strided((tensor.numel(),), (1,)))
        place = (
            len(ranges),
            dtype,
            tuple(tensor.shape),
            tensor.stride(),
            offset,
            tensors[same[0]].requires_grad,
        )
        offset += tensor.numel()
        for i in same:
            places[i] = place
    together = flat[0] if len(flat) == 1 else torch.cat(flat)
    ranges.append(together.view(torch.uint8))


def _unpack(places: list[Any], buffers: list[Any], in_place: bool) -> Leaves:
    storages = [_as_storage(buffer, in_place) for buffer in buffers]
    typed: dict[tuple[int, torch.dtype], Tensor] = {}
    known: dict[int, Tensor] = {}
    tensors: list[Tensor] = []
    for place in places:
        if isinstance(place, Tensor):
            tensors.append(place)
            continue
        tensor = known.get(id(place))
        if tensor is None:
            number, dtype, shape, stride, offset, requires_grad = place
            base = typed.get((number, dtype))
            if base is None:
                storage = storages[number]
                base = typed[number, dtype] = storage[: len(storage) - len(storage) % dtype.itemsize].view(
                    dtype
                )
            tensor = known[id(place)] = base.as_strided(shape, stride, offset)
            if requires_grad:
                tensor.requires_grad_()
        tensors.append(tensor)
    return Leaves(tensors, in_place)


def _as_storage(buffer: Any, in_place: bool) -> Tensor:
    """Return the bytes of a buffer as a tensor: a view, unless it is read-only or lies across elements."""
    view = memoryview(buffer)
    # Bytes come out of the pickle itself, so nothing else knows them and they may be written after all; the
    # interpreter shares those of one element.
    if view.readonly and (view.nbytes < 2 if isinstance(buffer, bytes) else not in_place):
        buffer = bytearray(view)
    with warnings.catch_warnings():
        # torch warns about memory that must not be written; ``in_place`` asked for it.
        warnings.simplefilter("ignore", UserWarning)
        storage = torch.frombuffer(buffer, dtype=torch.uint8)
    return storage if storage.data_ptr() % 16 == 0 else storage.clone()
