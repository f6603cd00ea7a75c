"""Register the format ``"zarr"`` and its methods with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from td_core import Serializer, hookimpl, make_classmethod
from td_core.spi import as_named

if TYPE_CHECKING:
    from td_core import Report, Tree


class ZarrFormat(Serializer):
    """Zarr groups in directories, zip files and object stores.

    >>> ZarrFormat().detect(Path("x.zarr"), b"")
    False
    """

    name = "zarr"
    suffixes = (".zarr", ".zarr.zip")
    schemes = (
        "abfs", "abfss", "adl", "az", "blockcache", "filecache", "ftp", "gcs", "gs", "hf", "http", "https", "memory", "oci",
        "oss", "r2", "s3", "s3a", "sftp", "simplecache", "ssh", "webhdfs",
    )  # fmt: skip
    locations = ("zarr.abc.store.Store", "zarr.storage.StorePath", "zarr.Group")

    def save(
        self,
        data: Any,
        location: Any,
        *,
        chunks: Any = None,
        shards: Any = None,
        filters: Any = None,
        compressors: Any = None,
        serializer: Any = None,
        checksums: bool = False,
        durable: bool = False,
        num_threads: int = 0,
        return_early: bool = False,
        storage_options: dict[str, Any] | None = None,
        progress: Any = False,
    ) -> Any:
        """Write ``data`` to ``location``; see :func:`td_zarr.save`."""
        from ._write_groups import save

        return save(
            data,
            location,
            chunks=chunks,
            shards=shards,
            filters=filters,
            compressors=compressors,
            serializer=serializer,
            checksums=checksums,
            durable=durable,
            num_threads=num_threads,
            return_early=return_early,
            storage_options=storage_options,
            progress=progress,
        )

    def load(
        self,
        location: Any,
        *,
        device: Any = None,
        keys: Any = None,
        rows: Any = None,
        strict: bool = True,
        allow_pickle: bool = False,
        storage_options: dict[str, Any] | None = None,
        progress: Any = False,
    ) -> Any:
        """Load the collection at ``location``; see :func:`td_zarr.load`."""
        from ._read_collections import load

        return load(
            location,
            device=device,
            keys=keys,
            rows=rows,
            strict=strict,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
            progress=progress,
        )

    def open(  # type: ignore[override]
        self,
        location: Any,
        *,
        mode: str = "r",
        keys: Any = None,
        strict: bool = True,
        allow_pickle: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> Any:
        """Open the group at ``location``, without reading its arrays; see :func:`td_zarr.open`."""
        from ._read_collections import open_collection

        return open_collection(
            location,
            mode=mode,
            keys=keys,
            strict=strict,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
        )

    def create(  # type: ignore[override]
        self,
        like: Any,
        location: Any,
        *,
        chunks: Any = None,
        shards: Any = None,
        filters: Any = None,
        compressors: Any = None,
        serializer: Any = None,
        storage_options: dict[str, Any] | None = None,
    ) -> Any:
        """Write a group of zeros with the structure, shapes and dtypes of ``like``, and open it for writing."""
        from ._read_collections import open_collection
        from ._write_groups import create

        create(
            like,
            location,
            chunks=chunks,
            shards=shards,
            filters=filters,
            compressors=compressors,
            serializer=serializer,
            storage_options=storage_options,
        )
        return open_collection(location, mode="r+", storage_options=storage_options)

    def append(self, rows: Any, location: Any, *, storage_options: dict[str, Any] | None = None) -> None:  # type: ignore[override]
        """Add the rows of a collection to the group; see :func:`td_zarr.append`."""
        from ._append_rows import append

        append(rows, location, storage_options=storage_options)

    def inspect(self, location: Any, *, storage_options: dict[str, Any] | None = None) -> Tree:  # type: ignore[override]
        """Return the tree of a group from its metadata."""
        from ._group_checks import inspect

        return inspect(location, storage_options=storage_options)

    def verify(  # type: ignore[override]
        self, location: Any, *, storage_options: dict[str, Any] | None = None, progress: Any = False
    ) -> Report:
        """Read all chunks of a group, and report those that are missing or damaged."""
        from ._group_checks import verify

        return verify(location, storage_options=storage_options, progress=progress)

    def detect(self, location: Any, head: bytes) -> bool:
        """Return True for a directory, zip file or store with the metadata of a group."""
        if not isinstance(location, Path):
            from ._zarr_objects import find_objects

            return find_objects(location).get_many(["zarr.json", ".zgroup"]) != [None, None]
        if head.startswith(b"PK"):
            try:
                with zipfile.ZipFile(location) as archive:
                    return not {"zarr.json", ".zgroup"}.isdisjoint(archive.namelist())
            except zipfile.BadZipFile:
                return False
        return location.is_dir() and any((location / name).is_file() for name in ("zarr.json", ".zgroup"))


_FORMAT = ZarrFormat()


def to_zarr(self: Any, filename: Any, **options: Any) -> Any:
    """Save the collection as a Zarr group, and open that for writing; see :func:`td_zarr.to_zarr`.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_zarr("data.zarr")
    """
    from ._write_groups import to_zarr

    return to_zarr(self, filename, **options)


def from_zarr(filename: Any, **options: Any) -> Any:
    """Open a Zarr group; see :func:`td_zarr.from_zarr`.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_zarr("data.zarr")
        >>> TensorDict.from_zarr("data.zarr")["a"].tolist()
        [1.0, 1.0]
    """
    from ._read_collections import from_zarr

    return from_zarr(filename, **options)


def _open_as(cls: type, filename: Any, **options: Any) -> Any:
    return as_named(cls, from_zarr(filename, **options), f"what is saved at {str(filename)!r}")


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that save and open."""
    return {"to_zarr": to_zarr, "from_zarr": make_classmethod(from_zarr, with_class=_open_as)}


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"zarr"``."""
    return [_FORMAT]
