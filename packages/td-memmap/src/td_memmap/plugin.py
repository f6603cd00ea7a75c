"""Register the methods and the serializer of td-memmap with td-core."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from td_core._serializers import Serializer
from td_core.plugins.declarations import implementations
from td_core.plugins.hookspecs import hookimpl
from td_core.plugins.memmap_methods import LoadMemmapOptions

from ._methods import copy_save, load_as, load_memmap, memmap


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
        return load_as(cls, LoadMemmapOptions(path, **options))

    def load_(self, data: Any, path: Any, **options: Any) -> Any:
        """Copy the save at ``path`` into ``data`` in place; entries that the save lacks are kept."""
        return copy_save(data, LoadMemmapOptions(path, **options))

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
    return implementations("td-memmap")


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the serializer of directories and archives."""
    return [DirectoryFormat()]
