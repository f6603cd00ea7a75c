"""Register the format ``"hdf5"``, its methods and its kind with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from td_core.spi import Coercer, LazyFunction, Serializer, hookimpl, make_classmethod
from td_core.typing import ObjectLocation

if TYPE_CHECKING:
    import torch

#: The signature of HDF5, at byte 0, 512, 1024, 2048 and so on.
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class Hdf5Format(Serializer):
    """HDF5 files.

    >>> Hdf5Format().detect(Path("x.h5"), b"")
    False
    """

    name = "hdf5"
    stores_kinds = True
    suffixes = (".h5", ".hdf5")
    reads_objects = True
    locations = ("h5py.Group",)
    reads_stored_tensors = True

    save = LazyFunction(__package__, "._write_h5", "save")
    load = LazyFunction(__package__, "._read_h5", "load")
    open = LazyFunction(__package__, "._read_h5", "open_collection")
    create = LazyFunction(__package__, "._read_h5", "create")
    append = LazyFunction(__package__, "._append_h5", "append")
    inspect = LazyFunction(__package__, "._check_h5", "inspect")
    verify = LazyFunction(__package__, "._check_h5", "verify")

    def detect(self, location: object, head: bytes) -> bool:
        """Return True for a file with the signature of HDF5, which can be after a block of another program; or for a group."""
        if isinstance(location, ObjectLocation):
            return any(head.startswith(_SIGNATURE, at) for at in (0, *(512 << i for i in range(7))))
        if not isinstance(location, Path):
            return True
        if head.startswith(_SIGNATURE):
            return True
        if len(head) < 512:
            return False
        with location.open("rb", buffering=0) as file:
            position, size = 512, os.fstat(file.fileno()).st_size
            while position < size and position <= 1 << 20:
                file.seek(position)
                if file.read(8) == _SIGNATURE:
                    return True
                position *= 2
        return False


_FORMAT = Hdf5Format()


def to_h5(self: object, filename: str | os.PathLike[str], **options: object) -> Any:
    """Save the collection as an HDF5 file, and return it opened for writing; see :func:`td_hdf5.to_h5`.

    Example:
        >>> stored = TensorDict({"a": torch.ones(2)}).to_h5("data.h5")
        >>> stored["a"].zero_().tolist()
        [0.0, 0.0]
    """
    from ._persistent import to_h5

    return to_h5(self, filename, **options)


def from_h5(
    filename: str | os.PathLike[str],
    *,
    mode: str = "r",
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: object = None,
    non_tensor_as_stack: bool = True,
) -> Any:
    """Open an HDF5 file; see :func:`td_hdf5.from_h5`. A class with declared entries returns an instance of itself.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_h5("data.h5")
        >>> TensorDict.from_h5("data.h5")["a"].tolist()
        [1.0, 1.0]
    """
    from ._persistent import from_h5

    return from_h5(
        filename,
        mode=mode,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        non_tensor_as_stack=non_tensor_as_stack,
    )


def _open_as(cls: type, filename: object, **options: object) -> object:
    from ._persistent import open_as

    return open_as(cls, filename, **options)


def _to_entry(item: object, batch_size: torch.Size, device: torch.device | None) -> Any:
    from ._read_h5 import read_object

    return read_object(item)


@hookimpl
def td_coercers() -> Iterable[Coercer]:
    """Return the coercer that reads open files, groups and datasets."""
    return [Coercer(("h5py.Group", "h5py.Dataset"), _to_entry)]


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that save and open."""
    return {"to_h5": to_h5, "from_h5": make_classmethod(from_h5, with_class=_open_as)}


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"hdf5"``."""
    return [_FORMAT]
