"""Register the format ``"zarr"`` and its methods with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from td_core.spi import (
    Coercer,
    LazyFunction,
    Serializer,
    as_named,
    hookimpl,
    make_classmethod,
)
from td_core.typing import ObjectLocation


class ZarrFormat(Serializer):
    """Zarr groups in directories, zip files and object stores.

    >>> ZarrFormat().detect(Path("x.zarr"), b"")
    False
    """

    name = "zarr"
    stores_kinds = True
    suffixes = (".zarr", ".zarr.zip")
    reads_objects = True
    locations = ("zarr.abc.store.Store", "zarr.storage.StorePath", "zarr.Group")

    save = LazyFunction(__package__, "._write_groups", "save")
    load = LazyFunction(__package__, "._read_collections", "load")
    open = LazyFunction(__package__, "._read_collections", "open_collection")
    create = LazyFunction(__package__, "._write_groups", "create")
    append = LazyFunction(__package__, "._append_rows", "append")
    inspect = LazyFunction(__package__, "._group_checks", "inspect")
    verify = LazyFunction(__package__, "._group_checks", "verify")

    def detect(self, location: object, head: bytes) -> bool:
        """Return True for a directory, zip file or store with the metadata of a group."""
        if isinstance(location, ObjectLocation):
            return not head and not location.marks.isdisjoint(("zarr.json", ".zgroup"))
        if not isinstance(location, Path):
            from ._local_objects import find_objects

            return find_objects(location).get_many(["zarr.json", ".zgroup"]) != [None, None]
        if head.startswith(b"PK"):
            try:
                with zipfile.ZipFile(location) as archive:
                    return not {"zarr.json", ".zgroup"}.isdisjoint(archive.namelist())
            except (
                zipfile.BadZipFile,
                NotImplementedError,
                ValueError,
                struct.error,
                EOFError,
                OverflowError,
            ):
                return False
        return location.is_dir() and any((location / name).is_file() for name in ("zarr.json", ".zgroup"))


_FORMAT = ZarrFormat()


def to_zarr(self: Any, filename: object, **options: Any) -> Any:
    """Save the collection as a Zarr group, and open that for writing; see :func:`td_zarr.to_zarr`.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_zarr("data.zarr")
    """
    from ._live_groups import to_zarr

    return to_zarr(self, filename, **options)


def from_zarr(filename: Any, **options: Any) -> Any:
    """Open a Zarr group; see :func:`td_zarr.from_zarr`.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_zarr("data.zarr")
        >>> TensorDict.from_zarr("data.zarr")["a"].tolist()
        [1.0, 1.0]
    """
    from ._live_groups import from_zarr

    return from_zarr(filename, **options)


def _open_as(cls: type, filename: object, **options: object) -> object:
    return as_named(cls, from_zarr(filename, **options), f"what is saved at {str(filename)!r}")


def _to_entry(item: object, batch_size: object, device: object) -> Any:
    from ._read_collections import read_object

    return read_object(item)


@hookimpl
def td_coercers() -> Iterable[Coercer]:
    """Return the coercer that opens arrays and groups of zarr."""
    return [Coercer(("zarr.Group", "zarr.Array"), _to_entry)]


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that save and open."""
    return {"to_zarr": to_zarr, "from_zarr": make_classmethod(from_zarr, with_class=_open_as)}


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"zarr"``."""
    return [_FORMAT]
