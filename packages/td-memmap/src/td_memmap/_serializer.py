"""The directory format, as core's ``save`` and ``load`` see it. Light: imported with td-core."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from td_core._serializers import Serializer

__all__ = ["DirectoryFormat"]


def _api() -> Any:
    return importlib.import_module("td_memmap._api")


class DirectoryFormat(Serializer):
    """A directory with one file for each leaf, or an archive of it; the default format.

    >>> DirectoryFormat().detect(Path("nowhere"))
    False
    """

    name = "memmap"
    needs_path = False

    def save(
        self,
        data: Any,
        path: Path | None = None,
        *,
        copy_existing: bool = False,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: Any = False,
        allow_pickle: bool = False,
    ) -> Any:
        """Write ``data`` to files and return the mapped collection; see :meth:`TensorDict.memmap`."""
        return _api().save(
            data,
            path,
            copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            robust_key=robust_key,
            archive=archive,
            compression=compression,
            atomic=atomic,
            durable=durable,
            checksums=checksums,
            progress=progress,
            allow_pickle=allow_pickle,
        )

    def load(
        self,
        path: Path,
        device: Any = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: Any = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: Any = False,
    ) -> Any:
        """Return the collection saved at ``path``; see :meth:`TensorDict.load_memmap`."""
        return _api().load_memmap(
            path,
            device,
            non_blocking,
            out=out,
            robust_key=robust_key,
            subpath=subpath,
            mode=mode,
            num_threads=num_threads,
            allow_pickle=allow_pickle,
            verify=verify,
            strict=strict,
            progress=progress,
        )

    def detect(self, path: Path) -> bool:
        """Tell whether a save is at ``path``: a directory with metadata, or an archive."""
        return bool(_api().detect(path))
