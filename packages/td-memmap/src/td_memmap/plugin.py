"""Register the methods and the serializer of td-memmap with td-core."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from td_core._class_methods import make_classmethod
from td_core._serializers import Serializer
from td_core.plugins.hookspecs import hookimpl

from ._methods import (
    is_memmap,
    load_as,
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
    """A directory with one file per leaf, or an archive of it; the default format.

    >>> DirectoryFormat().detect(Path("nowhere"))
    False
    """

    name = "memmap"
    needs_path = False
    save = staticmethod(memmap)  # type: ignore[assignment]
    load = staticmethod(load_memmap)  # type: ignore[assignment]

    def load_as(self, cls: type, path: Any, **options: Any) -> Any:
        """Load the collection at ``path`` as an instance of ``cls``, if that class has declared fields."""
        return load_as(cls, path, **options)

    def load_(self, data: Any, path: Any, **options: Any) -> Any:
        """Copy the save at ``path`` into ``data`` in place; entries that the save lacks are kept."""
        with torch.no_grad():
            return data.update(load_as(type(data), path, complete=False, **options), inplace=True)

    def detect(self, path: Path) -> bool:
        """Return True if ``path`` is a save: a directory with metadata, or an archive."""
        from . import _file_names, _fs
        from ._archive import is_memmap_archive

        return is_memmap_archive(path) or any(
            _fs.get_status(os.path.join(path, name)) is not None
            for name in (_file_names.META, _file_names.OLD_META)
        )


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods of memory mapping, saving and loading."""
    methods: tuple[Any, ...] = (
        is_memmap, load_memmap_, make_memmap, make_memmap_from_storage, make_memmap_from_tensor, memmap,
        memmap_, memmap_like, memmap_refresh_,
    )  # fmt: skip
    named = {method.__name__: method for method in methods}
    return {
        **named,
        "load_memmap": make_classmethod(load_memmap, with_class=load_as),
        "saved_path": property(saved_path),
    }


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the serializer of directories and archives."""
    return [DirectoryFormat()]
