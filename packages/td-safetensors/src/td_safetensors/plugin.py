"""Register the format ``"safetensors"`` and its methods with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from td_core import Serializer, hookimpl, make_classmethod

if TYPE_CHECKING:
    from td_core import Report, Tree


class SafetensorsFormat(Serializer):
    """Safetensors files, and directories of them with an index.

    >>> SafetensorsFormat().detect(Path("x.safetensors"), b"")
    False
    """

    name = "safetensors"
    suffixes = (".safetensors", ".safetensors.index.json")
    schemes = (
        "abfs", "adl", "az", "blockcache", "filecache", "ftp", "gcs", "github", "gs", "hdfs", "hf", "http", "https",
        "memory", "s3", "s3a", "sftp", "simplecache", "smb", "ssh", "webdav", "webhdfs", "zip",
    )  # fmt: skip

    def save(
        self,
        data: Any,
        location: Any,
        *,
        max_shard_size: int | str | None = None,
        checksums: bool = False,
        durable: bool = False,
        num_threads: int = 0,
        return_early: bool = False,
        progress: Any = False,
    ) -> Any:
        """Write ``data`` to ``location``; see :func:`td_safetensors.save`."""
        from ._write_save import save

        return save(
            data,
            location,
            max_shard_size=max_shard_size,
            checksums=checksums,
            durable=durable,
            num_threads=num_threads,
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
        strict: bool = True,
        num_threads: int = 0,
        progress: Any = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Load the collection at ``location``; see :func:`td_safetensors.load`."""
        from ._read_save import load

        return load(
            location,
            device=device,
            keys=keys,
            rows=rows,
            strategy=strategy,
            strict=strict,
            num_threads=num_threads,
            progress=progress,
            storage_options=storage_options,
        )

    def load_(self, data: Any, location: Any, **options: Any) -> Any:
        """Load the save at ``location`` into the leaves of ``data``; see :func:`td_safetensors.load` for the options."""
        from ._read_save import load_into

        return load_into(data, location, **options)

    def open(  # type: ignore[override]
        self,
        location: Any,
        *,
        mode: str = "r",
        keys: Any = None,
        strict: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Open the save at ``location``, without reading its leaves; see :func:`td_safetensors.open`."""
        from ._open import open_collection

        return open_collection(location, mode=mode, keys=keys, strict=strict, storage_options=storage_options)

    def create(self, like: Any, location: Any, *, durable: bool = False) -> Any:  # type: ignore[override]
        """Write a file of zeros with the structure, shapes and dtypes of ``like``, and open it for writing."""
        from ._open import open_collection
        from ._write_save import create_file

        create_file(like, location, durable=durable)
        return open_collection(location, mode="r+")

    def inspect(self, location: Any, *, storage_options: Mapping[str, Any] | None = None) -> Tree:  # type: ignore[override]
        """Return the tree of a save from its header."""
        from ._tree_and_checks import inspect

        return inspect(location, storage_options=storage_options)

    def verify(  # type: ignore[override]
        self, location: Any, *, progress: Any = False, storage_options: Mapping[str, Any] | None = None
    ) -> Report:
        """Check the structure of a save, and its hashes if it has them."""
        from ._tree_and_checks import verify

        return verify(location, progress=progress, storage_options=storage_options)

    def detect(self, location: Any, head: bytes) -> bool:
        """Return True for a safetensors file, an index of shards, or a directory with one of them."""
        if head:
            if head[8:9] == b"{":
                return int.from_bytes(head[:8], "little") <= 100_000_000
            return head[:1] == b"{" and b'"weight_map"' in head
        if isinstance(location, str):  # a URL, of which td-core has read nothing
            return location.endswith(self.suffixes)
        if not isinstance(location, Path) or not location.is_dir():
            return False
        return any(
            name.endswith(".safetensors.index.json") or name == "model.safetensors"
            for name in os.listdir(location)
        )


_FORMAT = SafetensorsFormat()


def to_safetensors(self: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """Save the collection as a safetensors file; see :func:`td_safetensors.save`.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_safetensors("data.safetensors")
    """
    return _FORMAT.save(self, path, **options)


def from_safetensors(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load a safetensors file; see :func:`td_safetensors.load`. A class with declared entries returns an instance of itself.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_safetensors("data.safetensors")
        >>> TensorDict.from_safetensors("data.safetensors")["a"]
        tensor([1., 1.])
    """
    return _FORMAT.load(path, **options)


def _load_as(cls: type, path: Any, **options: Any) -> Any:
    return _FORMAT.load_as(cls, path, **options)


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that save and load."""
    return {
        "to_safetensors": to_safetensors,
        "from_safetensors": make_classmethod(from_safetensors, with_class=_load_as),
    }


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"safetensors"``."""
    return [_FORMAT]
