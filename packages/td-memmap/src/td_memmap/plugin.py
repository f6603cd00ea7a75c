"""What td-memmap registers with td-core."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from td_core._class_methods import of_class
from td_core._serializers import Serializer
from td_core.plugins.hookspecs import hookimpl

from ._methods import (
    is_memmap,
    load_memmap,
    load_memmap_,
    make_memmap,
    make_memmap_from_storage,
    make_memmap_from_tensor,
    memmap,
    memmap_,
    memmap_like,
    memmap_refresh_,
    saved_path,
)


class DirectoryFormat(Serializer):
    """A directory with one file for each leaf, or an archive of it; the default format.

    >>> DirectoryFormat().detect(Path("nowhere"))
    False
    """

    name = "memmap"
    needs_path = False
    save = staticmethod(memmap)  # type: ignore[assignment]
    load = staticmethod(load_memmap)  # type: ignore[assignment]

    def detect(self, path: Path) -> bool:
        """Tell whether a save is at ``path``: a directory with metadata, or an archive."""
        from . import _fs, _names
        from ._archive import is_memmap_archive

        return is_memmap_archive(path) or any(
            _fs.status(os.path.join(path, name)) is not None for name in (_names.META, _names.OLD_META)
        )


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods of memory mapping, saving and loading."""
    methods: tuple[Any, ...] = (
        is_memmap, load_memmap_, make_memmap, make_memmap_from_storage, make_memmap_from_tensor, memmap,
        memmap_, memmap_like, memmap_refresh_,
    )  # fmt: skip
    named = {method.__name__: method for method in methods}
    return {**named, "load_memmap": of_class(load_memmap), "saved_path": property(saved_path)}


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the directory format."""
    return [DirectoryFormat()]
