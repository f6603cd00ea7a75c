"""Arrays in local files: map and read them, and leaves whose pickles have their place in a file instead of their elements."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._buffers import as_bytes
from .._public_names import set_module
from .._torch_private import plain_results
from ..errors import FormatError

#: The longest piece that is read in one call, so that progress is reported.
READ_PIECE = 1 << 24


@set_module("td_core.array_formats")
class MappedTensor(Tensor):
    """A leaf of an opened save: a tensor mapped from a file. A pickle has its place in the save instead of its elements.

    Results of operations are plain tensors; so are views, whose elements a pickle contains.
    """

    # The operations of a plain tensor, at their speed.
    __torch_function__ = plain_results

    def __reduce_ex__(self, protocol: object) -> Any:
        """Reduce to the function that maps the leaf again, and its arguments."""
        return self._origin  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy in memory."""
        copied: Tensor = memo.setdefault(id(self), self.clone())
        return copied


def as_mapped(leaf: Tensor, rebuild: Callable[..., Tensor], *place: object) -> MappedTensor:
    """Return a mapped leaf whose pickle calls ``rebuild`` with its place.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(as_mapped(torch.ones(2), torch.zeros, 3)))
    tensor([0., 0., 0.])
    """
    mapped = leaf.as_subclass(MappedTensor)
    mapped._origin = (rebuild, place)  # type: ignore[attr-defined]
    return mapped


def map_file(fd: int, *, shared: bool = False) -> torch.UntypedStorage:
    """Map an open file: writes of a private mapping stay in memory, those of a shared one reach the file."""
    access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
    return torch.frombuffer(mmap.mmap(fd, 0, access=access), dtype=torch.uint8).untyped_storage()


def view_mapped(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], begin: int = 0
) -> Tensor:
    """Return the tensor at a position of a mapped file; a copy if its elements are not aligned there.

    >>> storage = torch.tensor([1, 2], dtype=torch.int16).untyped_storage()
    >>> view_mapped(storage, torch.int16, [1], 2)
    tensor([2], dtype=torch.int16)
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    part = storage[begin : begin + nbytes]
    if begin % dtype.itemsize:
        part = part.clone()
    return torch.empty(0, dtype=dtype).set_(part, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]


def read_into(fd: int, target: Tensor, position: int, report: Callable[[int], None]) -> None:
    """Read bytes of an open file into a contiguous CPU tensor; ``report`` receives the number of bytes.

    Raises:
        FormatError: the file ends before.
    """
    view = as_bytes(target).numpy().data
    while len(view):
        count = os.preadv(fd, [view[:READ_PIECE]], position)
        if not count:
            raise FormatError(f"the file ends at byte {position}; {len(view)} more bytes were expected")
        view, position = view[count:], position + count
        report(count)
