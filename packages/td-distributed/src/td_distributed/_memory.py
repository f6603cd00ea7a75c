"""Memory for storages and messages, and the ends of messages, by which one is found that is shorter than announced.

Backends such as gloo say nothing of a message that was cut. So a receiver fills the end of its buffer with other bytes than those
that it expects there, before a message arrives. Small messages end with :data:`END`. The last bytes of a part, which is sent from
where it is, are announced in the message before it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError

#: The end of a message; no byte is zero.
END = b"td_end\r\n"
#: Number of bytes of a part that are announced.
TAIL = 8
_OTHER = bytes(255 - byte for byte in range(256))

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


def make_vector(data: bytes | memoryview) -> Tensor:
    """Copy bytes, at least one, into a new 1-D uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def get_bytes(part: Tensor) -> memoryview:
    """Return a memoryview of a uint8 tensor; of a CPU copy if it is on another device."""
    array: Any = part.cpu().numpy()
    return memoryview(array)


def list_tails(parts: Sequence[Tensor]) -> bytes:
    """Return the last bytes of each part, those of a shorter one after zeros; zeros for parts on other devices than the CPU."""
    return b"".join(
        bytes(get_bytes(part[-TAIL:])).rjust(TAIL, b"\0") if part.is_cpu else bytes(TAIL) for part in parts
    )


def expect_tails(rooms: Sequence[Tensor], tails: bytes) -> None:
    """Fill the end of each buffer on the CPU with other bytes than its part will have there."""
    for number, room in enumerate(rooms):
        if room.is_cpu:
            last = get_bytes(room[-TAIL:])
            last[:] = tails[number * TAIL : (number + 1) * TAIL][TAIL - len(last) :].translate(_OTHER)


def compare_tails(rooms: Sequence[Tensor], tails: bytes) -> None:
    """Raise FormatError if a part did not arrive to its end."""
    for number, room in enumerate(rooms):
        if room.is_cpu:
            last = get_bytes(room[-TAIL:])
            if last != tails[number * TAIL : (number + 1) * TAIL][TAIL - len(last) :]:
                raise cut_error(f"part {number} of a message", len(room))


def expect_end(room: Tensor, size: int) -> Tensor:
    """Clear what follows the first ``size`` bytes of a buffer, where the message will have its end; return the buffer."""
    room[size : size + len(END)] = 0
    return room


def compare_end(room: Tensor, size: int) -> None:
    """Raise FormatError if the message of ``size`` bytes in a buffer did not arrive to its end."""
    if get_bytes(room[size : size + len(END)]) != END:
        raise cut_error("a message", size)


def cut_error(what: str, size: int) -> FormatError:
    """Return the error for a message that is shorter than announced."""
    return FormatError(
        f"{what} was cut: {size} bytes were announced, and its end did not arrive; nothing was changed"
    )
