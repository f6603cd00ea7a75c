"""Files and directories that are complete or absent whenever the process is killed, the identity of files, and checksums.

>>> from td_store.files import Checksum, NewFile
>>> with NewFile("data.bin") as file:
...     file.write([b"abc"])
>>> Checksum("crc32", [b"abc"]).hexdigest()
'352441c2'
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from typing import TYPE_CHECKING, Any

import torch

from td_core.spi import lazy_names

if TYPE_CHECKING:
    from ._checksums import Checksum
    from ._temporary_files import (
        EXCHANGE,
        NO_REPLACE,
        NewDirectory,
        NewFile,
        allocate_file,
        lock,
        read_unreplaced,
        rename_with,
    )

__all__ = [
    "EXCHANGE", "NO_REPLACE", "Checksum", "NewDirectory", "NewFile", "allocate_file", "identify_file", "lock", "map_file",
    "read_unreplaced", "rename_with",
]  # fmt: skip

# Most programs that identify a file neither write one nor compute a checksum.
__getattr__ = lazy_names(
    __name__,
    {
        "td_store._checksums": ["Checksum"],
        "td_store._temporary_files": [
            "EXCHANGE", "NO_REPLACE", "NewDirectory", "NewFile", "allocate_file", "lock", "read_unreplaced", "rename_with",
        ],
    },
)[0]  # fmt: skip

#: Of ``statx``: the working directory, the file of a descriptor, the time of birth, and where that is in the result.
_AT_CWD, _EMPTY_PATH, _BIRTH, _POSITION, _SIZE = -100, 0x1000, 0x800, 80, 256

#: Device, inode and time of birth of a file; None where the system does not have that time.
FileIdentity = tuple[int, int, int | None]


def identify_file(file: str | int, status: os.stat_result | None = None) -> FileIdentity:
    """Return device, inode and time of birth of a file or directory, which another one never has at the same time.

    While a process keeps the file open or mapped, the first two are enough. A pickle needs the third one.

    Args:
        file: a path or a descriptor.
        status: its status, if it is known.

    >>> open("data", "wb").close()
    >>> identify_file("data") == identify_file("data", os.stat("data"))
    True
    """
    if status is None:
        status = os.stat(file)
    return status.st_dev, status.st_ino, _find_birth(file, status)


def _find_birth(file: str | int, status: os.stat_result) -> int | None:
    known = getattr(status, "st_birthtime", None)
    if known is not None:
        return int(known * 1e9)
    if _STATX is None:
        return None
    result = ctypes.create_string_buffer(_SIZE)
    place = (file, b"", _EMPTY_PATH) if isinstance(file, int) else (_AT_CWD, os.fsencode(file), 0)
    mask, birth = ctypes.c_uint(_BIRTH), None
    if _STATX(*place, mask, result) == 0 and struct.unpack_from("I", result)[0] & _BIRTH:
        seconds, rest = struct.unpack_from("qI", result, _POSITION)
        birth = seconds * 10**9 + rest
    return birth


#: ``statx`` of the C library, which Python has since 3.15; None on other systems.
_STATX: Any = getattr(ctypes.CDLL(None), "statx", None) if sys.platform == "linux" else None


def map_file(fd: int, *, shared: bool = False, path: str | None = None) -> torch.UntypedStorage:
    """Map an open file: writes of a private mapping stay in memory, those of a shared one reach the file.

    Raises:
        OSError: the system refuses, as for lack of memory; the error names ``path``.

    >>> with open("data", "w+b") as file:
    ...     _ = file.write(b"abc"), file.flush()
    ...     map_file(file.fileno()).tolist()
    [97, 98, 99]
    """
    # torch treats the result of torch.from_file() as shared memory: share_memory_() would be a no-op and queues would fail.
    access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
    try:
        memory = mmap.mmap(fd, 0, access=access)
    except OSError as error:
        raise OSError(error.errno, f"cannot map it: {os.strerror(error.errno or 0)}", path) from error
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
