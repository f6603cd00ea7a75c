"""Open, read and sync files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from td_core.spi import open_regular

#: File systems whose mapped pages are fetched one by one over a network.
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "fuse")


@contextlib.contextmanager
def open_for_reading(path: str, *, write: bool = False) -> Iterator[int]:
    """Open a file for the duration of a block; with ``write`` also for writing."""
    fd = open_regular(path, write)
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
