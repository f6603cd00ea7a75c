"""Open a save: its leaves are mapped, so that nothing but the header is read before an element is used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from td_core import NestedKey
from td_core.errors import FormatError

from ._files import open_for_reading
from ._format import read_header
from ._leaves import Place, restore
from ._load import File, build, list_names, open_save, prepare

__all__ = ["MappedTensor", "open_collection", "rebuild_mapped"]

Stamp = tuple[int, int, int]


class MappedTensor(Tensor):
    """A leaf of an opened save: a tensor mapped from a file. A pickle has its place in the file instead of its elements.

    Results of operations are plain tensors; so are views, whose elements a pickle contains.
    """

    # The operations of a plain tensor, at their speed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the place in the file."""
        return rebuild_mapped, self._origin  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy in memory."""
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]


def open_collection(
    path: str | os.PathLike[str],
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    strict: bool = True,
) -> Any:
    """Open a safetensors file, or a directory of shards, without reading its leaves.

    The leaves are mapped: an element is read when it is used. A pickle of an opened collection, as one that a DataLoader sends
    to a worker, has the places of the leaves instead of their elements.

    Args:
        path: the file, the index of shards, or their directory.
        mode: ``"r"`` and ``"c"`` keep writes in the memory of this process; with ``"r"`` the collection is locked.
        keys: keys or key paths to open, with all that is below them.
        strict: False opens a tensorclass that is not defined as a TensorDict.

    Raises:
        FormatError: the save is damaged; the message has the path and the key.
        KeyPathError: the save has no such key.

    >>> from td_safetensors import save
    >>> _ = save(TensorDict({"a": torch.arange(1000)}, [1000]), "data.safetensors")
    >>> open_collection("data.safetensors")[[7, 5]]["a"]
    tensor([7, 5])
    """
    with open_save(path) as save:
        header = prepare(save, keys=keys, strict=strict)
        places = header["leaves"]

        def read(name: str) -> Tensor:
            file, array = save.arrays[name]
            return file.map(name, array)

        def wrap(ref: int, leaf: Tensor) -> Tensor:
            files = {save.arrays[name][0] for name in list_names(places[ref])}
            if mode == "c" or leaf.is_nested or len(files) != 1:
                return leaf
            (file,) = files
            mapped = leaf.as_subclass(MappedTensor)
            mapped._origin = (os.path.abspath(file.path), _stamp(file.fd), places[ref])  # type: ignore[attr-defined]
            return mapped

        result = build(save, header, read, None, wrap)
    return result if mode == "c" else result.lock_()


def _stamp(fd: int) -> Stamp:
    """Return what distinguishes the file from another one that is later saved under its name."""
    status = os.fstat(fd)
    return status.st_ino, status.st_size, status.st_mtime_ns


def rebuild_mapped(path: str, stamp: Stamp, place: Place) -> Tensor:
    """Map a leaf again, in another process.

    Raises:
        FormatError: another save has replaced the file.
    """
    with open_for_reading(path) as fd:
        if _stamp(fd) != stamp:
            raise FormatError(f"{path} was replaced since it was opened: open it again")
        file = File(path, fd, read_header(fd, path))
        mapped = restore(place, lambda name: file.map(name, file.header.arrays[name])).as_subclass(
            MappedTensor
        )
    mapped._origin = (path, stamp, place)  # type: ignore[attr-defined]
    return mapped
