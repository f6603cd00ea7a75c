"""Memory for storages and messages."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

#: The size of the largest element.
WHOLE = 16
#: Smaller memory has too few huge pages to matter, and is often memory whose pages are there already.
LARGE = 1 << 22
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def allocate(nbytes: int, device: torch.device | None = None, *, pin_memory: bool = False) -> Tensor:
    """Return a vector of bytes whose content is undefined.

    A new page of memory costs an interrupt when it is first written to, which takes longer than writing it. Linux gives
    pages of 2 MB instead of 4 kB where it is asked to: filling 177 MB took 40 ms instead of 110.

    Elements of every dtype fill the memory behind it: ``torch.save`` writes that with each leaf, and cannot load an element
    that is cut off.

    >>> allocate(3).shape
    torch.Size([3])
    """
    storage = torch.empty(nbytes + -nbytes % WHOLE, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    if nbytes % WHOLE:
        storage[nbytes:] = 0
        storage = storage[:nbytes]
    if nbytes < LARGE or pin_memory or type(storage) is not Tensor or storage.device.type != "cpu":
        return storage
    if _HUGE_PAGES is not None:
        start = storage.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        # It is advice: where the system cannot follow it, nothing changes.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(start + nbytes - first), ctypes.c_int(_HUGE_PAGES)
        )
    return storage


def make_vector(data: bytes) -> Tensor:
    """Return bytes, at least one, as a tensor of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def get_bytes(part: Tensor) -> memoryview:
    """Return the memory of a vector of bytes, of a copy where that lies elsewhere."""
    array: Any = part.cpu().numpy()
    return memoryview(array)
