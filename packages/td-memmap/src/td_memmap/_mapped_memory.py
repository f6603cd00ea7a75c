"""Map open files to tensors, and view the memory of a tensor as a buffer.

torch maps a file only by its name, and creates or extends whichever file has that name by then. This module maps an
open file, which has been checked, and passes the memory to torch. Passing the path ``/proc/self/fd/<n>`` to torch
would be as safe but takes twice as long.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core.typing import DeviceType

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
# The last argument is off_t, which has the same width; the offset is always 0.
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
# With fewer files skip the check of the limit on mappings, since reading the limits from /proc takes time.
_FEW = 10_000
_SPARE = 500

#: Up to torch 2.9, a garbage collection during the deallocation of a storage of a Python subclass aborts the
#: process. Untrack such storages: they hold no reference cycle.
_untrack: Any = None
if torch.__version__ < (2, 10):  # type: ignore[operator]
    _untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    _untrack.argtypes, _untrack.restype = [ctypes.py_object], None


class _Memory(ctypes.Array[ctypes.c_ubyte]):
    """Memory at an address, as an array without a limit; the caller limits the view.

    Attributes:
        tensor: the tensor that owns the memory, if any.
    """

    # ``mmap.mmap`` keeps a copy of the descriptor for each leaf (up to Python 3.12), so 2,000 leaves would need 2,000 open
    # files. An array type for each length takes 19 us, ``from_address`` of this one 0.4 us.
    __slots__ = ("tensor",)
    _type_ = ctypes.c_ubyte
    _length_ = 1 << 62
    tensor: Tensor


class _Mapping(_Memory):
    """Mapped memory, which is unmapped when the last tensor on it is freed."""

    __slots__ = ("nbytes",)
    nbytes: int

    # Bind the functions as defaults: at interpreter exit the module's globals may already be deleted.
    def __del__(self, unmap: Any = _munmap, address: Any = ctypes.addressof) -> None:
        unmap(address(self), self.nbytes)


class FileStorage(torch.UntypedStorage):
    """Storage on mapped memory. Other processes share it through its file, so it is never moved.

    Attributes:
        source: the file, for other processes: the :class:`Place` of a tensor, or a weak reference to an
            :class:`AnonymousFile`; None if they cannot map it.
        start: offset of the storage in that file, in bytes.
    """

    source: Any = None
    start: int = 0

    def is_shared(self) -> bool:
        """Return True: the memory is shared through its file."""
        return True

    def share_memory_(self) -> FileStorage:
        """Return the storage unchanged: it is already shared."""
        return self

    def clone(self) -> torch.UntypedStorage:
        """Return a copy in ordinary memory."""
        return torch.UntypedStorage(self.nbytes()).copy_(self)

    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError(
            "the memory of a mapped file cannot be pickled by itself: pickle a tensor that shows it, or a clone()"
        )


def map_memory(fd: int, nbytes: int, shared: bool, path: str | None = None) -> _Mapping:
    """Map the first ``nbytes`` bytes of an open file, which must be long enough: reading past its end kills the process."""
    address = _mmap(None, nbytes, _WRITABLE, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}", path)
    memory = _Mapping.from_address(address)
    memory.nbytes = nbytes
    return memory


def view_elements(memory: _Mapping, dtype: torch.dtype, count: int, source: object, start: int = 0) -> Tensor:
    """Return ``count`` elements of mapped memory from byte ``start``, as a tensor with a separate storage."""
    result = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
    storage: Any = result.untyped_storage()
    # torch has no constructor of a storage subclass for existing memory, and a weak map from storages to files does not
    # help, since torch.multiprocessing calls methods of the storage.
    storage.__class__ = FileStorage
    if _untrack is not None:
        _untrack(storage)
    storage.source = source
    storage.start = start
    return result


def source_of(tensor: Tensor) -> object:
    """Return the source of the FileStorage of a tensor, or None if the tensor has another storage."""
    try:
        return getattr(tensor.untyped_storage(), "source", None)
    except RuntimeError:
        return None  # Tensors inside a transform and wrapper subclasses have no storage.


def map_elements_of(
    fd: int, dtype: torch.dtype, nbytes: int, place: Any, linked: dict[Any, torch.UntypedStorage] | None
) -> Tensor:
    """Map the first ``nbytes`` bytes of a file as a flat tensor; ``linked`` caches storages of hard-linked files."""
    memory = None if linked is None else linked.get(place.identity)
    if memory is not None and memory.nbytes() >= nbytes:
        shape = (nbytes // dtype.itemsize,)
        return torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, shape, (1,))
    mapped = map_memory(fd, nbytes, place.shared, place.filename)
    result = view_elements(mapped, dtype, nbytes // dtype.itemsize, place)
    if linked is not None:
        linked[place.identity] = result.untyped_storage()
    return result


def get_buffer(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a buffer of bytes; torch would need four slower calls."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = _Memory.from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory)[:nbytes]


def check_mappings(count: int, what: str) -> None:
    """Raise OSError (ENOMEM) if ``count`` more mappings exceed the system's limit per process."""
    if count < _FEW:
        return
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        used = Path("/proc/self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return
    if used + count + _SPARE > limit:
        raise OSError(
            errno.ENOMEM,
            f"cannot {what}: {count} leaves are as many mappings, and this process may have {limit} "
            f"(vm.max_map_count), of which {used} are in use; use an archive (.tdz), which is one mapping, raise the "
            "limit, or stack the leaves",
        )


def check_mode(mode: str | None) -> None:
    """Raise ValueError for an unknown mode."""
    if mode not in (None, "r", "r+"):
        raise ValueError(f"mode must be 'r', 'r+' or None; got {mode!r}")


def check_device(device: DeviceType | None) -> None:
    """Raise RuntimeError for a device that cannot have mapped memory."""
    if device is not None and torch.device(device).type != "cpu":
        raise RuntimeError(f"a memory-mapped tensor is on the CPU; got device={device!r}")
