"""Memory for storages and messages."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

#: Size in bytes of the largest element (complex128).
WHOLE = 16
#: Below this many bytes huge pages gain nothing: there are too few, and the memory is often already mapped.
LARGE = 1 << 22
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def allocate(nbytes: int, device: torch.device | None = None, *, pin_memory: bool = False) -> Tensor:
    """Allocate an uninitialised 1-D uint8 tensor of ``nbytes``; a large one uses huge pages on Linux."""
    # torch.load() fails if a storage ends within an element, so pad it to whole 16-byte elements.
    storage = torch.empty(nbytes + -nbytes % WHOLE, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    if nbytes % WHOLE:
        storage[nbytes:] = 0
        storage = storage[:nbytes]
    if nbytes < LARGE or pin_memory or type(storage) is not Tensor or storage.device.type != "cpu":
        return storage
    if _HUGE_PAGES is not None:
        start = storage.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        # A page fault per 4 kB takes longer than writing the page; madvise is a hint, so its failure is harmless.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(start + nbytes - first), ctypes.c_int(_HUGE_PAGES)
        )
    return storage


def make_vector(data: bytes) -> Tensor:
    """Copy bytes, at least one, into a new 1-D uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def get_bytes(part: Tensor) -> memoryview:
    """Return a memoryview of a uint8 tensor; of a CPU copy if it is on another device."""
    array: Any = part.cpu().numpy()
    return memoryview(array)
