"""Pack tensors into a few byte buffers, which pickle protocol 5 can keep out of band.

torch pickles each tensor through a separate in-memory file. Here the bytes are written to the pickle unchanged, or
out of band without a copy; unpickled tensors are then views on the buffers that ``pickle.loads`` receives. Leaves that
share a storage still share one after unpickling. The pickler of :mod:`multiprocessing` gets the tensors themselves,
since torch moves tensors between processes without a copy.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections import Counter
from collections.abc import Mapping
from itertools import repeat
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter, mul, sub
from typing import Any

import torch
from torch import Tensor

from .._python.public_names import set_module
from .._torch.dtypes import STAND_INS
from .._torch.kernels import PLAIN
from .._torch.private import map_location
from .stored_leaves import is_stored

#: Storages of up to this many bytes are copied into one buffer per dtype: a separate buffer costs more.
SMALL = 1 << 14
_KIND = attrgetter("__class__", "layout", "is_cpu", "is_nested", "dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")

#: dtype, positions and shapes of tensors that are concatenated in one buffer (row i describes buffer i).
Row = tuple[torch.dtype, list[int], list[tuple[int, ...]]]
#: dtype, and for each tensor its position, the address of its storage and the number of its elements.
_Plain = tuple[torch.dtype, list[int], list[int], list[int]]
#: position, buffer number, dtype, shape, stride and first element of a tensor that shares its buffer.
Place = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], int]


@set_module("td_core.pickles")
class Leaves:
    """Container that pickles a list of tensors as byte buffers.

    Args:
        tensors: the tensors.
        in_place: if the unpickler passes read-only buffers, view them instead of copying them.
    """

    __slots__ = ("in_place", "tensors")

    def __init__(self, tensors: list[Tensor], in_place: bool = False) -> None:
        self.tensors = tensors
        self.in_place = in_place

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        """Return the buffers, and the dtype, shape and offset of each tensor in them."""
        one_each = {id(tensor): tensor for tensor in self.tensors}
        tensors = list(one_each.values())
        order = None
        if len(tensors) < len(self.tensors):
            position = {key: i for i, key in enumerate(one_each)}
            order = [position[id(tensor)] for tensor in self.tensors]
        rows, places, others, ranges = _pack(tensors)
        grads = [i for i, grad in enumerate(map(_REQUIRES_GRAD, tensors)) if grad and i not in others]
        attributes = {
            i: provided for i, provided in enumerate(map(vars, tensors)) if provided and i not in others
        }
        arrays: list[Any] = [buffer.numpy() for buffer in ranges]
        buffers = [pickle.PickleBuffer(a) if protocol >= 5 else a.tobytes() for a in arrays]
        # Omit an empty argument, so that older releases can read the pickle.
        more = (attributes,) if attributes else ()
        return unpack_leaves, (rows, places, others, grads, order, buffers, self.in_place, *more)


def _reduce_for_process(leaves: Leaves) -> tuple[Any, ...]:
    # torch sends only the memory of a tensor; the conjugate and negative bits would be lost.
    tensors = [
        leaf.resolve_conj().resolve_neg() if leaf.is_conj() or leaf.is_neg() else leaf
        for leaf in leaves.tensors
    ]
    return Leaves, (tensors, leaves.in_place)


ForkingPickler.register(Leaves, _reduce_for_process)


def _pack(tensors: list[Tensor]) -> tuple[list[Row], list[Place], dict[int, Tensor], list[Tensor]]:
    """Pack tensors into byte buffers. Return rows, places, unpacked tensors by position, and the buffers."""
    in_row, spans, others = _group_tensors(tensors)
    rows: list[Row] = []
    buffers: list[Tensor] = []
    for dtype, positions in in_row:
        same = [tensors[i] for i in positions]
        known: dict[torch.Size, tuple[int, ...]] = {}  # pickle stores a repeated object only once
        shapes = [known.get(size) or known.setdefault(size, tuple(size)) for size in map(Tensor.size, same)]
        rows.append((dtype, positions, shapes))
        buffers.append(_concat_bytes(same, all(len(size) == 1 for size in known)))
    places: list[Place] = []
    for group, start, buffer in spans:
        for i in group:
            tensor = tensors[i]
            first = int(tensor.storage_offset()) - start // tensor.itemsize
            places.append((i, len(buffers), tensor.dtype, tuple(tensor.shape), tensor.stride(), first))
        buffers.append(buffer)
    return rows, places, others, buffers


def _sort_by_kind(tensors: list[Tensor]) -> tuple[list[_Plain], dict[int, Tensor], Counter[int]]:
    """Return the plain tensors by dtype, the other tensors by position, and how many plain ones share each storage."""
    kinds: dict[Any, list[int]] = {}
    for i, kind in enumerate(map(_KIND, tensors)):
        kinds.setdefault(kind, []).append(i)
    # Bytes cannot describe a tensor subclass, or a tensor of another device or layout, so these get no buffer.
    others: dict[int, Tensor] = {}
    plain: list[_Plain] = []
    sharing: Counter[int] = Counter()
    for (cls, layout, cpu, nested, dtype), positions in kinds.items():
        same = [tensors[i] for i in positions]
        if cls is not Tensor or layout is not torch.strided or not cpu or nested or same[0].is_quantized:
            others.update(zip(positions, same))
            continue
        starts = map(mul, map(Tensor.storage_offset, same), repeat(dtype.itemsize))
        storages = list(map(sub, map(Tensor.data_ptr, same), starts))
        sharing.update(storages)
        plain.append((dtype, positions, storages, list(map(Tensor.numel, same))))
    return plain, others, sharing


def _group_tensors(
    tensors: list[Tensor],
) -> tuple[list[tuple[torch.dtype, list[int]]], list[tuple[list[int], int, Tensor]], dict[int, Tensor]]:
    """Group tensors by dtype for concatenation and by storage span; return the remaining tensors by position."""
    plain, others, sharing = _sort_by_kind(tensors)
    together: dict[torch.dtype, list[int]] = {}
    groups: dict[int, list[int]] = {}
    for dtype, positions, storages, counts in plain:
        most = SMALL // dtype.itemsize
        small = [
            i
            for i, storage, count in zip(positions, storages, counts)
            if not count or (count <= most and sharing[storage] == 1)
        ]
        if small:
            together[dtype] = small
        if len(small) < len(positions):
            rest = set(small)
            for i, storage in zip(positions, storages):
                if i not in rest:
                    groups.setdefault(storage, []).append(i)
    shared: list[tuple[list[int], int, Tensor]] = []
    alone: list[tuple[torch.dtype, list[int]]] = []
    for group in groups.values():
        result = _find_span([tensors[i] for i in group])
        if result is not None:
            shared.append((group, *result))
            continue
        for i in group:
            dtype = tensors[i].dtype
            if tensors[i].numel() * dtype.itemsize <= SMALL:
                together.setdefault(dtype, []).append(i)
            else:
                alone.append((dtype, [i]))
    return [*together.items(), *alone], shared, others


def _concat_bytes(tensors: list[Tensor], flat: bool) -> Tensor:
    """Concatenate the C-contiguous bytes of tensors of one dtype; ``flat``: all tensors are vectors."""
    with torch.no_grad():
        vectors = tensors if flat else list(map(Tensor.flatten, tensors))
        if len(vectors) > 1:
            return torch.cat(vectors).view(torch.uint8)
        return as_bytes(vectors[0])


def as_bytes(piece: Tensor) -> Tensor:
    """Return the C-contiguous bytes of a dense tensor as a uint8 vector; a view if possible.

    >>> as_bytes(torch.tensor([1, 2], dtype=torch.int16)).tolist()
    [1, 0, 2, 0]
    """
    plain = piece.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        # torch cannot copy some dtypes (sub-byte integers); integers of the same size always can be copied.
        plain = plain.view(STAND_INS.get(plain.itemsize, plain.dtype)).contiguous()
    # view(-1) would keep the stride of a one-element tensor, which may be any number; view(uint8) needs stride 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def has_memory(leaf: Tensor) -> bool:
    """Return True if a dense tensor has memory or is a fake tensor; False for a subclass that only wraps other tensors."""
    if type(leaf) in PLAIN or not leaf.numel():
        return True
    if is_stored(leaf):
        return False
    try:
        # data_ptr() of a FakeTensor warns, so check its storage's device instead.
        return leaf.untyped_storage().device.type == "meta" or leaf.data_ptr() != 0
    except RuntimeError:  # tensors with first-class dims have no storage
        return False


def _find_span(tensors: list[Tensor]) -> tuple[int, Tensor] | None:
    """Return start and bytes of the part of a storage that tensors use; None if they use less than half of that part."""
    spans = []
    for tensor in tensors:
        start = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        spans.append((start, start + (last + 1) * tensor.itemsize))
    start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
    # Align the start to 16 bytes, so that the offset of each tensor is a whole number of elements of any dtype.
    start -= start % 16
    used = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    if 2 * used < stop - start or any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return None
    storage = tensors[0].untyped_storage()
    # Align the end too, within the storage: torch.save() writes the whole span and cannot load half an element.
    stop = min(stop + (start - stop) % 16, storage.nbytes())
    return start, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, start, (stop - start,), (1,)
    )


@set_module("td_core.pickles")
def unpack_leaves(
    rows: list[Row],
    places: list[Place],
    others: dict[int, Tensor],
    grads: list[int],
    order: list[int] | None,
    buffers: list[object],
    in_place: bool,
    attributes: dict[int, dict[str, object]] | None = None,
) -> Leaves:
    """Rebuild the tensors that :meth:`Leaves.__reduce_ex__` packed into buffers."""
    storages = [_as_storage(buffer, in_place) for buffer in buffers]
    place = map_location()
    if place is not None:
        storages = [_move_storage(storage, place) for storage in storages]
    result = others
    for storage, (dtype, positions, shapes) in zip(storages, rows):
        pieces = storage.view(dtype).unsafe_split_with_sizes(list(map(math.prod, shapes)))
        for i, piece, shape in zip(positions, pieces, shapes, strict=True):
            result[i] = piece if len(shape) == 1 else piece.view(shape)
    for i, number, dtype, shape, stride, first in places:
        storage = storages[number]
        whole = storage[: len(storage) - len(storage) % dtype.itemsize].view(dtype)
        result[i] = whole.as_strided(shape, stride, first)
    for i in grads:
        result[i].requires_grad_()
    for i, provided in (attributes or {}).items():
        vars(result[i]).update(provided)
    return Leaves([result[i] for i in (range(len(result)) if order is None else order)], in_place)


def _move_storage(storage: Tensor, place: Any) -> Tensor:
    """Apply the ``map_location`` of ``torch.load`` to a buffer; torch applies it only to storages that it loads itself."""
    if isinstance(place, Mapping):
        place = place.get("cpu", "cpu")
    if not callable(place):
        return storage.to(place)
    provided = place(storage.untyped_storage(), "cpu")
    return (
        storage
        if provided is None
        else torch.empty(0, dtype=torch.uint8, device=provided.device).set_(provided)
    )


def _as_storage(buffer: Any, in_place: bool) -> Tensor:
    """Convert a buffer to a uint8 tensor: a view, unless the buffer is read-only or not aligned."""
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # A bytes object was created by the unpickler and has no other reader, so writing to it is safe. CPython shares
    # bytes objects of length one, so those are copied.
    if view.readonly and (view.nbytes < 2 if isinstance(buffer, bytes) else not in_place):
        buffer = bytearray(view)
    with warnings.catch_warnings():
        # torch warns about read-only memory, which ``in_place`` accepts.
        warnings.simplefilter("ignore", UserWarning)
        storage = torch.frombuffer(buffer, dtype=torch.uint8)
    return storage if storage.data_ptr() % 16 == 0 else storage.clone()
