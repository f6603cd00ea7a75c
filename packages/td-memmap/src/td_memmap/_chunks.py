"""The elements of a leaf, piece by piece: nothing is copied whole.

A contiguous CPU leaf is one piece, its own memory. Anything else is made contiguous in pieces of at most 8 MB. From a
GPU the next piece travels into pinned memory while the caller writes the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from td_core._buffers import as_bytes

from . import _fs
from ._mapped_memory import get_buffer

CHUNK_SIZE = 8 << 20
#: For so few bytes from a GPU to prepare pinned memory takes longer than to wait for them.
_SMALL = 1 << 16


def iter_chunks(leaf: Tensor) -> Iterable[Any]:
    """Return the bytes of a leaf in C order, in buffers; each is valid until the next is asked for.

    >>> [piece.tolist() for piece in iter_chunks(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t())]
    [[1, 3, 2, 4]]
    """
    if leaf.is_nested:
        return itertools.chain.from_iterable(map(iter_chunks, leaf.unbind()))
    if leaf.is_cuda and leaf.nbytes > _SMALL:
        return _iter_cuda_chunks(leaf)
    if leaf.is_cpu and leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg():
        return (get_buffer(leaf),)
    return (as_bytes(part.cpu()).numpy() for part in _split_blocks(leaf.detach()))


def write_chunks(fd: int, leaf: Tensor, offset: int) -> None:
    """Write the bytes of a leaf to an open file, from byte ``offset`` on."""
    for piece in iter_chunks(leaf):
        _fs.write_at(fd, piece, offset)
        offset += piece.nbytes


def _split_blocks(leaf: Tensor) -> Iterator[Tensor]:
    """Split along the leading dims into parts of at most ``CHUNK_SIZE`` bytes."""
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


def _iter_cuda_chunks(leaf: Tensor) -> Iterator[Any]:
    room = min(CHUNK_SIZE, leaf.nbytes)
    # Said, since the default device may be the GPU.
    buffers = [torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    stream = torch.cuda.current_stream(leaf.device)
    waiting: tuple[Tensor, Any] | None = None
    for position, part in enumerate(_split_blocks(leaf.detach())):
        # A contiguous part of at most PIECE bytes fits one buffer; a 1-d leaf is split to such parts too.
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
