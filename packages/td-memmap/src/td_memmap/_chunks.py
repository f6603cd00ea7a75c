"""Check that a leaf can be stored, and iterate over its bytes in chunks, so that no complete copy of a leaf is made.

A contiguous CPU leaf is one chunk: a buffer on its memory. Other leaves are made contiguous in chunks of at most 8
MB. From a GPU the next chunk is copied to pinned memory while the caller writes the previous chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from td_core.errors import CodecError
from td_core.spi import STORABLE, as_bytes, is_stored, show_path

from . import _fs
from ._mapped_memory import get_buffer

CHUNK_SIZE = 8 << 20
#: Below this many bytes, preparing pinned memory takes longer than a synchronous copy.
_SMALL = 1 << 16

_STORABLE = frozenset(STORABLE.values())


def iter_chunks(leaf: Tensor) -> Iterable[Any]:
    """Yield the bytes of a leaf in C order, as buffers that are valid until the next buffer is requested."""
    if leaf.is_nested:
        return itertools.chain.from_iterable(map(iter_chunks, leaf.unbind()))
    if leaf.is_cuda and leaf.nbytes > _SMALL:
        return _iter_cuda_chunks(leaf)
    if (
        leaf.is_cpu
        and leaf.is_contiguous()
        and not (leaf.is_conj() or leaf.is_neg() or (type(leaf) is not Tensor and is_stored(leaf)))
    ):
        return (get_buffer(leaf),)
    return (as_bytes(part.cpu()).numpy() for part in _split_blocks(leaf.detach()))


def write_chunks(fd: int, leaf: Tensor, offset: int) -> None:
    """Write the bytes of a leaf to an open file from byte ``offset``."""
    for piece in iter_chunks(leaf):
        _fs.write_at(fd, piece, offset)
        offset += piece.nbytes


def _split_blocks(leaf: Tensor) -> Iterator[Tensor]:
    """Split a tensor along its leading dims into parts of at most ``CHUNK_SIZE`` bytes."""
    nbytes = leaf.numel() * leaf.element_size()
    if nbytes <= CHUNK_SIZE:
        yield leaf
        return
    row = nbytes // leaf.shape[0]
    if row > CHUNK_SIZE:
        for part in leaf.unbind(0):
            yield from _split_blocks(part)
    else:
        yield from torch.split(leaf, CHUNK_SIZE // row)


def _iter_cuda_chunks(leaf: Tensor) -> Iterator[object]:
    room = min(CHUNK_SIZE, leaf.nbytes)
    # Pass the device: the default device may be a GPU.
    buffers = [torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    stream = torch.cuda.current_stream(leaf.device)
    waiting: tuple[Tensor, torch.cuda.Event] | None = None
    for position, part in enumerate(_split_blocks(leaf.detach())):
        # A part has at most CHUNK_SIZE bytes, so a buffer is large enough for it.
        source = as_bytes(part)
        target = buffers[position % 2][: source.numel()]
        target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(stream)
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0].numpy()
        waiting = (target, arrived)
    if waiting is not None:
        waiting[1].synchronize()
        yield waiting[0].numpy()


def check_storable(leaf: Tensor, where: str | tuple[str, ...], *, content: bool = True) -> None:
    """Raise CodecError if a leaf is sparse, quantized or, with ``content=True``, has no elements in memory."""
    there = not content or _has_memory(leaf)
    if leaf.layout is torch.strided and leaf.dtype in _STORABLE and there:
        return
    check_dtype(leaf.dtype, where)
    position = where if isinstance(where, str) else show_path(where)
    if leaf.layout not in (torch.strided, torch.jagged):
        raise CodecError(
            f"cannot store a tensor of layout {leaf.layout} at {position}: convert it with to_dense() first; "
            f"shape {list(leaf.shape)}, dtype {leaf.dtype}"
        )
    if content and leaf.is_meta:
        raise CodecError(
            f"cannot store the elements of a meta tensor at {position}: it has none; memmap_like() needs only the shape "
            f"{list(leaf.shape)}"
        )
    if leaf.layout is torch.strided:
        raise CodecError(
            f"cannot store the elements of a {type(leaf).__name__} at {position}: it has no memory of its own; take what it is "
            "made of first, of a DTensor its to_local() or full_tensor(), which memmap() and save() do by themselves"
        )


def _has_memory(leaf: Tensor) -> bool:
    """Return True if the elements of a tensor are in memory or a store, which is false for fake tensors and wrappers."""
    if is_stored(leaf):
        return True
    try:
        # data_ptr() of a FakeTensor warns, so check its storage's device instead.
        if type(leaf) is not Tensor and leaf.untyped_storage().device.type == "meta":
            return False
        return leaf.data_ptr() != 0 or (not leaf.is_meta and not leaf.numel())
    except RuntimeError:
        # Tensors inside vmap() and grad() have no address.
        return False


def check_dtype(dtype: torch.dtype, where: str | tuple[str, ...]) -> None:
    """Raise CodecError if elements of a dtype cannot be stored: quantized dtypes cannot."""
    if dtype not in _STORABLE:
        position = where if isinstance(where, str) else show_path(where)
        raise CodecError(f"cannot store the dtype {dtype} at {position}: convert it with dequantize() first")
