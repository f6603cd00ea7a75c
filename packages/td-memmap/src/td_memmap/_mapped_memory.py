"""Memory that a file is mapped to, as a tensor; and the memory of a tensor, as a buffer.

torch maps a file by its name only, and creates, extends or follows whatever that name means by then. Here an open file
is mapped, which has been checked, and torch is given the memory. To hand torch the open file as ``/proc/self/fd/<n>``
would be as safe, but takes twice as long: it opens the file once more, through the slowest of all file systems.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
# The last is off_t, which is as wide; the offset is always 0.
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE

#: Up to torch 2.9, a garbage collection that begins while a storage of a class of Python is let go takes it for garbage,
#: and torch ends the process. So the collector is not told of it, which holds nothing that leads back to it.
_untrack: Any = None
if torch.__version__ < (2, 10):  # type: ignore[operator]
    _untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    _untrack.argtypes, _untrack.restype = [ctypes.py_object], None


class _Memory(ctypes.Array):  # type: ignore[type-arg]
    """Memory from an address on; it is made of that alone, so whoever uses it says how long it is.

    Attributes:
        tensor: the tensor whose memory it is, if it is one's.
    """

    __slots__ = ("tensor",)
    _type_ = ctypes.c_ubyte
    _length_ = 1 << 62
    tensor: Tensor


class _Mapping(_Memory):
    """Mapped memory, which is unmapped when the last tensor on it is gone."""

    __slots__ = ("nbytes",)
    nbytes: int

    # Bound here, since the globals of a module may be gone when the interpreter ends.
    def __del__(self, unmap: Any = _munmap, address: Any = ctypes.addressof) -> None:
        unmap(address(self), self.nbytes)


class FileStorage(torch.UntypedStorage):
    """The storage of mapped memory. Other processes share it through its file, so it is never moved to other memory.

    Attributes:
        source: what another process can map the same memory from: the :class:`Place` of a tensor, or a weak reference
            to an :class:`AnonymousFile`; None where there is nothing.
        start: byte of that file at which the storage starts.
    """

    source: Any = None
    start: int = 0

    def is_shared(self) -> bool:
        """Return True."""
        return True

    def share_memory_(self) -> FileStorage:
        """Leave the storage where it is."""
        return self

    def clone(self) -> torch.UntypedStorage:
        """Return a copy in ordinary memory."""
        return torch.UntypedStorage(self.nbytes()).copy_(self)

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "the memory of a mapped file cannot be pickled by itself: pickle a tensor that shows it, or a clone()"
        )


def map_memory(fd: int, nbytes: int, shared: bool, path: str | None = None) -> _Mapping:
    """Map the first bytes of an open file, for :func:`view_elements`; it may be closed afterwards.

    The caller has checked that the file is long enough: loading from pages behind its end would end the process.

    Args:
        fd: the open file.
        nbytes: how many, at least 1.
        shared: stores reach the file; else they stay in this mapping (copy on write).
        path: what the file is known as, for messages.

    Raises:
        OSError: the file cannot be mapped.
    """
    address = _mmap(None, nbytes, _WRITABLE, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}", path)
    memory = _Mapping.from_address(address)
    memory.nbytes = nbytes
    return memory


def view_elements(memory: _Mapping, dtype: torch.dtype, count: int, source: Any, start: int = 0) -> Tensor:
    """Return elements from byte ``start`` on in mapped memory, as a tensor with a storage of its own, of this ``source``."""
    result = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
    storage: Any = result.untyped_storage()
    storage.__class__ = FileStorage
    if _untrack is not None:
        _untrack(storage)
    storage.source = source
    storage.start = start
    return result


def source_of(tensor: Tensor) -> Any:
    """Return the source of the mapped memory that a tensor shows; None where it shows other memory, or none."""
    try:
        return getattr(tensor.untyped_storage(), "source", None)
    except RuntimeError:
        return None  # inside a transform, and of tensors without memory of their own


def map_elements_of(
    fd: int, dtype: torch.dtype, nbytes: int, place: Any, linked: dict[Any, torch.UntypedStorage] | None
) -> Tensor:
    """Return the first elements of an open file, mapped as its ``place`` says.

    ``linked`` holds the memory of the files that have several names, by device and inode: such a file is mapped once, since
    it has tied leaves, which are one tensor.
    """
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
    r"""Return the elements of a contiguous CPU tensor, as they are in memory.

    Every dtype is bytes here. torch needs four calls for it, which is most of the time that writing a small leaf takes.

    >>> bytes(get_buffer(torch.tensor([1, 2], dtype=torch.int16)))
    b'\x01\x00\x02\x00'
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = _Memory.from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory)[:nbytes]
