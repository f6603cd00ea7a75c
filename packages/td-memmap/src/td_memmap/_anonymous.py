"""Anonymous files: processes share them by file descriptor; freeing the last tensor on a file frees it."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import set_module

from . import _fs
from ._mapped_memory import map_memory, view_elements

#: Alignment of the tensors in an anonymous file, in bytes; a multiple of every dtype's size.
ALIGNMENT = 64


class AnonymousFile:
    """An open file without a name, with its mapping.

    The pickler of ``multiprocessing`` sends it to another process as a duplicate of the file descriptor. A plain
    pickle of it raises TypeError.

    >>> file = AnonymousFile.of_size(16)
    >>> file.elements(torch.int64, 2)
    tensor([0, 0])
    """

    __slots__ = ("__weakref__", "_memory", "fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._memory: Any = None

    @classmethod
    def of_size(cls, nbytes: int, *, sparse: bool = False) -> AnonymousFile:
        """Create a file of ``nbytes`` zeros; with ``sparse=True`` it takes no disk space until it is written to."""
        file = cls(_fs.open_anonymous(), nbytes)
        try:
            (_fs.set_size if sparse else _fs.reserve)(file.fd, nbytes)
        except OSError as error:
            what = f"cannot reserve {nbytes} bytes for a file without a name"
            raise _fs.add_path(error, what, tempfile.gettempdir()) from error
        return file

    # Bind ``close`` as a default: at interpreter exit the module's globals may already be deleted.
    def __del__(self, close: Any = _fs.close) -> None:
        close(self.fd)

    def elements(self, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
        """Return ``count`` elements from byte ``offset``, mapped and shared with every process that has the file.

        Each returned tensor has a separate storage, so ``torch.save`` writes only its elements.

        Raises:
            FormatError: the file is too short.
        """
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        if not 0 <= offset <= self.nbytes - count * dtype.itemsize:
            raise FormatError(
                f"the file is too short: {count} elements of {dtype} from byte {offset} on need "
                f"{offset + count * dtype.itemsize} bytes, it has {self.nbytes}"
            )
        if self._memory is None:
            self._memory = map_memory(self.fd, self.nbytes, True)
        return view_elements(self._memory, dtype, count, weakref.ref(self), offset)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "an anonymous file can only be sent by the pickler of multiprocessing; pickle the tensor to write its "
            "elements"
        )


def align(offset: int) -> int:
    """Round a byte offset up to the next multiple of ``ALIGNMENT``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@set_module("td_memmap.memmap_pickles")
def receive_anonymous_file(descriptor: Any, nbytes: int) -> AnonymousFile:
    """Rebuild the anonymous file that another process sent."""
    return AnonymousFile(descriptor.detach(), nbytes)


@set_module("td_memmap.memmap_pickles")
def remap_anonymous_storage(file: AnonymousFile, start: int, nbytes: int) -> torch.UntypedStorage:
    """Map a storage on an anonymous file that another process sent."""
    return file.elements(torch.uint8, nbytes, start).untyped_storage()


def _send(file: AnonymousFile) -> tuple[Callable[..., AnonymousFile], tuple[object, int]]:
    return receive_anonymous_file, (DupFd(file.fd), file.nbytes)


ForkingPickler.register(AnonymousFile, _send)

if not hasattr(os, "posix_fallocate"):  # pragma: no cover
    raise ImportError("td-memmap needs a POSIX system with posix_fallocate (Linux)")
