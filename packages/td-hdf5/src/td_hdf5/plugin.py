"""Register the format ``"hdf5"``, its methods and its kind with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from td_core import Serializer, hookimpl, make_classmethod

if TYPE_CHECKING:
    from td_core import Report, Tree

#: The signature of HDF5, at byte 0, 512, 1024, 2048 and so on.
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class Hdf5Format(Serializer):
    """HDF5 files.

    >>> Hdf5Format().detect(Path("x.h5"), b"")
    False
    """

    name = "hdf5"
    suffixes = (".h5", ".hdf5")
    reads_stored_tensors = True

    def save(
        self,
        data: Any,
        location: Any,
        *,
        chunks: int | tuple[int, ...] | bool | None = None,
        compression: str | int | None = None,
        compression_opts: Any = None,
        shuffle: bool | None = None,
        fletcher32: bool | None = None,
        checksums: bool = False,
        durable: bool = False,
        return_early: bool = False,
        progress: Any = False,
    ) -> Any:
        """Write ``data`` to ``location``; see :func:`td_hdf5.save`."""
        from ._write_h5 import save

        return save(
            data,
            location,
            chunks=chunks,
            compression=compression,
            compression_opts=compression_opts,
            shuffle=shuffle,
            fletcher32=fletcher32,
            checksums=checksums,
            durable=durable,
            return_early=return_early,
            progress=progress,
        )

    def load(
        self,
        location: Any,
        *,
        device: Any = None,
        keys: Any = None,
        rows: Any = None,
        strategy: str = "auto",
        strict: bool | None = None,
        num_threads: int = 0,
        progress: Any = False,
    ) -> Any:
        """Load the collection at ``location``; see :func:`td_hdf5.load`."""
        from ._read_h5 import load

        return load(
            location,
            device=device,
            keys=keys,
            rows=rows,
            strategy=strategy,
            strict=strict,
            num_threads=num_threads,
            progress=progress,
        )

    def open(self, location: Any, *, mode: str = "r", keys: Any = None, strict: bool | None = None) -> Any:  # type: ignore[override]
        """Open the save at ``location``, without reading its leaves; see :func:`td_hdf5.open`."""
        from ._read_h5 import open_collection

        return open_collection(location, mode=mode, keys=keys, strict=strict)

    def create(  # type: ignore[override]
        self,
        like: Any,
        location: Any,
        *,
        chunks: int | tuple[int, ...] | bool | None = None,
        compression: str | int | None = None,
        compression_opts: Any = None,
        shuffle: bool | None = None,
        fletcher32: bool | None = None,
    ) -> Any:
        """Write a file of zeros with the structure, shapes and dtypes of ``like``, and open it for writing."""
        from ._read_h5 import open_collection
        from ._write_h5 import create_new

        options = {
            "chunks": chunks,
            "compression": compression,
            "compression_opts": compression_opts,
            "shuffle": shuffle,
            "fletcher32": fletcher32,
        }
        create_new(like, location, options)
        return open_collection(location, mode="r+")

    def append(self, rows: Any, location: Any) -> None:  # type: ignore[override]
        """Add rows along the first batch dim; see :func:`td_hdf5.append`."""
        from ._append_h5 import append

        append(rows, location)

    def inspect(self, location: Any) -> Tree:  # type: ignore[override]
        """Return the tree of a save from its header."""
        from ._check_h5 import inspect

        return inspect(location)

    def verify(self, location: Any, *, progress: Any = False) -> Report:  # type: ignore[override]
        """Check the structure of a save, read its datasets, and compare its hashes if it has them."""
        from ._check_h5 import verify

        return verify(location, progress=progress)

    def detect(self, location: Any, head: bytes) -> bool:
        """Return True for a file with the signature of HDF5, which can be after a block of another program."""
        if head.startswith(_SIGNATURE):
            return True
        if len(head) < 512 or not isinstance(location, Path):
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


def to_h5(self: Any, filename: str | os.PathLike[str], **options: Any) -> Any:
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
    batch_size: Any = None,
    non_tensor_as_stack: bool = False,
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


def _open_as(cls: type, filename: Any, **options: Any) -> Any:
    from ._persistent import open_as

    return open_as(cls, filename, **options)


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that save and open."""
    return {"to_h5": to_h5, "from_h5": make_classmethod(from_h5, with_class=_open_as)}


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"hdf5"``."""
    return [_FORMAT]
