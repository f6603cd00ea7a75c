"""Arrays in local files: map and read them, and leaves whose pickles have their place in a file instead of their elements."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import as_bytes, open_regular, set_module
from td_core.typing import SourceIndex

from .._stored_tensor import StoredTensor

#: The longest piece that is read in one call, so that progress is reported.
READ_PIECE = 1 << 24


@set_module("td_store.arrays")
class MappedTensor(Tensor):
    """A leaf of an opened save: a tensor mapped from a file. A pickle has its place in the save instead of its elements.

    Results of operations are plain tensors; so are views, whose elements a pickle contains.
    """

    _origin: tuple[Callable[..., Tensor], tuple[object, ...]]

    # The operations of a plain tensor, at their speed, as those of a Parameter.
    __torch_function__ = torch.nn.Parameter.__torch_function__
    # torch formats the element of a tensor without dims only if its class is exactly Tensor.
    __format__ = StoredTensor.__format__

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        """Reduce to the function that maps the leaf again, and its arguments."""
        return self._origin

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
    mapped._origin = (rebuild, place)
    return mapped


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


class MappedSource(ABC):
    """Base of the sources of leaves in a file that is opened for writing, which each process maps itself.

    Attributes:
        path: the file.
        shape: shape of the leaf.
        dtype: dtype of the leaf.
    """

    path: str
    shape: torch.Size
    dtype: torch.dtype
    _mapped: Tensor | None = None

    @abstractmethod
    def _open(self) -> Tensor:
        """Map the leaf from the file, shared with other processes."""

    def map(self) -> Tensor:
        """Return the leaf as memory: what is written to it reaches the file."""
        if self._mapped is None:
            self._mapped = self._open()
        return self._mapped

    def read(self, index: SourceIndex) -> Tensor:
        """Return a copy of a part of the leaf."""
        return self.map()[index].clone()

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write a part of the leaf into the file."""
        self.map()[index] = value

    def flush(self) -> None:
        """Return when what was written has reached the disk."""
        sync_file(self.path)


@set_module("td_store.arrays")
class KeptSource(MappedSource):
    """The elements of a leaf whose array was removed from its save: they are in memory.

    >>> KeptSource(torch.arange(3)).read((slice(1, 3, 1),))
    tensor([1, 2])
    """

    def __init__(self, memory: Tensor) -> None:
        self.shape, self.dtype, self._mapped = memory.shape, memory.dtype, memory

    def _open(self) -> Tensor:
        raise NotImplementedError  # it is open

    def flush(self) -> None:
        """Do nothing: no save has the elements."""


def sync_file(path: str) -> None:
    """Return when the content of a file, with what was written through mappings, has reached the disk."""
    fd = open_regular(path, write=True)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
