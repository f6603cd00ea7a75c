"""Open, map and read files, and share work among threads."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError

__all__ = [
    "is_on_network",
    "map_file",
    "open_for_reading",
    "read_bytes",
    "read_into",
    "run_parallel",
    "sync_file",
]

#: The longest piece that is written or read in one call, so that progress is reported and threads share the work.
PIECE = 1 << 24
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
#: File systems whose mapped pages are fetched one by one over a network.
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "fuse")


@contextlib.contextmanager
def open_for_reading(path: str, *, write: bool = False) -> Iterator[int]:
    """Open a file for the duration of a block; with ``write`` also for writing."""
    fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | _BINARY)
    try:
        yield fd
    finally:
        os.close(fd)


def read_bytes(fd: int, size: int, position: int) -> bytes:
    """Read bytes of a file; fewer if it ends before."""
    pieces = []
    while size and (piece := os.pread(fd, size, position)):
        pieces.append(piece)
        size, position = size - len(piece), position + len(piece)
    return b"".join(pieces)


def map_file(fd: int, *, shared: bool = False) -> torch.UntypedStorage:
    """Map an open file: writes of a private mapping stay in memory, those of a shared one reach the file."""
    access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
    return torch.frombuffer(mmap.mmap(fd, 0, access=access), dtype=torch.uint8).untyped_storage()


def read_into(fd: int, tensor: Tensor, position: int, report: Callable[[int], None]) -> None:
    """Read bytes of a file into a contiguous tensor of bytes."""
    view: Any = memoryview(tensor.numpy().data)
    while len(view):
        count = os.preadv(fd, [view[:PIECE]], position)
        if not count:
            raise FormatError(f"the file ends at byte {position}; {len(view)} more bytes were expected")
        view, position = view[count:], position + count
        report(count)


def sync_file(path: str) -> None:
    """Write the content of a file to the disk, with what was written through mappings."""
    with open_for_reading(path, write=True) as fd:
        os.fsync(fd)


def is_on_network(path: str) -> bool:
    """Return True if a file is on a network file system, as far as the system lists its mounts."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
        device = os.stat(path).st_dev
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2:3] == [wanted]:
            return kind.startswith(_NETWORK)
    return False


def run_parallel(work: Sequence[Callable[[], None]], num_threads: int) -> None:
    """Call functions, in threads if ``num_threads`` is more than one; raise the first error."""
    if num_threads <= 1 or len(work) <= 1:
        for call in work:
            call()
        return
    with ThreadPoolExecutor(num_threads, "td-safetensors") as pool:
        for future in [pool.submit(call) for call in work]:
            future.result()
