"""Every access to the file system: open, map and read files, and write a file so that it appears complete or not at all."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from td_core.errors import FormatError

__all__ = [
    "NewFile", "is_on_network", "list_all_temporaries", "list_temporaries", "lock_directory", "map_file",
    "open_for_reading", "read_into", "remove_stale", "run_parallel", "sync_directory", "sync_file",
]  # fmt: skip

#: The longest piece that is written or read in one call, so that progress is reported and threads share the work.
PIECE = 1 << 24
#: The most buffers that one call of ``writev`` takes.
_MAX_BUFFERS = 1000
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
#: The end of the name of a temporary file.
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}\Z")
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


class NewFile:
    """A file under a temporary name beside its final name; :meth:`commit` renames it, else the end of the block removes it.

    The temporary file is locked while it is written, so that :func:`remove_stale` removes only those of killed processes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.temporary, self.fd = _create_temporary(path)

    def write(self, buffers: Sequence[Any], position: int, report: Callable[[int], None]) -> None:
        """Write buffers of bytes, one after the other, from a position on."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            count = os.pwritev(self.fd, views[:_MAX_BUFFERS], position)
            position += count
            report(count)
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def extend(self, size: int) -> None:
        """Give the file a size; what was not written is zero, and takes no space on most file systems."""
        os.ftruncate(self.fd, size)

    def commit(self, *, durable: bool) -> None:
        """Give the file its final name."""
        if durable:
            os.fsync(self.fd)
        os.replace(self.temporary, self.path)
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the file, unless it is committed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)


def _create_temporary(path: str) -> tuple[str, int]:
    folder, name = os.path.split(path)
    while True:
        temporary = os.path.join(folder, f".{name}.tmp-{secrets.token_hex(4)}")  # as _TEMPORARY
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        try:
            # Another save can remove the file before it is locked.
            if not _lock(fd) or os.fstat(fd).st_nlink:
                return temporary, fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, *, wait: bool = True) -> bool:
    """Lock an open file. Return False if it is locked elsewhere, or if the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def list_temporaries(path: str) -> list[str]:
    """Return the paths of the temporary files of saves to a file."""
    folder, name = os.path.split(path)
    return [os.path.join(folder, item) for item in _list(folder) if _TEMPORARY.sub("", item) == f".{name}"]


def list_all_temporaries(folder: str) -> list[str]:
    """Return the paths of the temporary files of saves to all safetensors files and indices in a directory."""
    endings = (".safetensors", ".safetensors.index.json")
    return [
        os.path.join(folder, item)
        for item in _list(folder)
        if item.startswith(".")
        and _TEMPORARY.sub("", item) != item
        and _TEMPORARY.sub("", item).endswith(endings)
    ]


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except FileNotFoundError:
        return []


def remove_stale(temporaries: list[str]) -> None:
    """Remove those temporary files that killed saves left behind."""
    for stale in temporaries:
        with contextlib.suppress(OSError), open_for_reading(stale) as fd:
            if _lock(fd, wait=False):
                os.unlink(stale)


@contextlib.contextmanager
def lock_directory(folder: str) -> Iterator[None]:
    """Let only one process at a time write shards into a directory, if the file system has locks."""
    if os.name == "nt":
        yield
        return
    with open_for_reading(folder) as fd:
        _lock(fd)
        yield


def sync_directory(path: str) -> None:
    """Write the names in the directory of a file to the disk."""
    if os.name == "nt":
        return
    with open_for_reading(os.path.dirname(path) or ".") as fd:
        os.fsync(fd)


def run_parallel(work: Sequence[Callable[[], None]], num_threads: int) -> None:
    """Call functions, in threads if ``num_threads`` is more than one; raise the first error."""
    if num_threads <= 1 or len(work) <= 1:
        for call in work:
            call()
        return
    with ThreadPoolExecutor(num_threads, "td-safetensors") as pool:
        for future in [pool.submit(call) for call in work]:
            future.result()
