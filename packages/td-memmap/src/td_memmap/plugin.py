"""Register the methods and the serializer of td-memmap with td-core."""

from __future__ import annotations

import inspect
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from td_core import TensorCollection
from td_core.plugins.hookspecs import hookimpl
from td_core.spi import LazyFunction, Serializer, make_classmethod
from td_core.typing import ObjectLocation

from ._methods import (
    copy_save,
    create_memmap,
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
    open_memmap,
    saved_path,
)
from ._options import LoadMemmapOptions, MemmapOptions

_META = "meta.json"


def add_overwrite(function: Any) -> inspect.Signature:
    """Return the signature of a method that saves, with ``self`` and ``overwrite``."""
    parameter, by_keyword = inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
    own = parameter("overwrite", by_keyword, default=False)
    rest = inspect.signature(function).parameters.values()
    return inspect.Signature([parameter("self", parameter.POSITIONAL_ONLY), *rest, own])


class DirectoryFormat(Serializer):
    """A directory with one file per leaf, or an archive of it; the default format.

    >>> DirectoryFormat().detect("nowhere", b"")
    False
    """

    name = "memmap"
    needs_path = False
    stores_kinds = True
    suffixes = (".tdz",)
    reads_stored_tensors = True
    reads_objects = True
    load = staticmethod(load_memmap)  # type: ignore[assignment]
    open = staticmethod(open_memmap)  # type: ignore[assignment]
    create = staticmethod(create_memmap)  # type: ignore[assignment]
    inspect = LazyFunction(__package__, "._inspect", "inspect")
    verify = LazyFunction(__package__, "._manifest", "verify")

    def save(self, data: Any, location: Any, *args: Any, **options: Any) -> Any:
        """Map ``data`` to a save at ``location``; in an object store, write it, over a tree with ``overwrite=True`` alone."""
        overwrite = options.pop("overwrite", False)
        if isinstance(location, ObjectLocation):
            from ._object_saves import save_objects

            return save_objects(data, location, MemmapOptions(None, *args, **options), overwrite=overwrite)
        if overwrite:
            raise ValueError("overwrite=True is for trees in object stores: a local save is always replaced")
        return memmap(data, location, *args, **options)

    save.__signature__ = add_overwrite(memmap)  # type: ignore[attr-defined]

    def load_as(self, cls: type, location: Any, **options: Any) -> TensorCollection:
        """Load the collection at ``location`` as an instance of ``cls``, if that class has declared fields."""
        return load_as(cls, LoadMemmapOptions(location, **options))

    def load_(self, data: TensorCollection, location: Any, **options: Any) -> TensorCollection:
        """Copy the save at ``location`` into ``data`` in place; entries that the save lacks are kept."""
        return copy_save(data, LoadMemmapOptions(location, **options))

    def detect(self, location: Any, head: bytes) -> bool:
        """Return True if ``location`` is a save: a directory with metadata, or an archive."""
        from . import _file_names, _fs
        from ._archive import is_memmap_archive

        if isinstance(location, ObjectLocation):
            # An archive of td begins with its root; after another program has packed it, its name must say what it is.
            is_own = head[30:39] == b"meta.json" or location.where.lower().endswith(".tdz")
            return head.startswith(b"PK") and is_own if head else _META in location.marks
        if head:
            # Other content can precede the data of a zip file, so the first bytes decide nothing.
            return is_memmap_archive(location)
        found = (
            _fs.get_status(os.path.join(location, name)) for name in (_file_names.META, _file_names.OLD_META)
        )
        # A directory of such a name belongs to another format, which has named it after a key.
        return any(status is not None and not stat.S_ISDIR(status.st_mode) for status in found)

    def append(  # type: ignore[override]
        self,
        rows: TensorCollection,
        location: Any,
        *,
        allow_pickle: bool | None = None,
        compatible: bool = False,
    ) -> None:
        """Append rows to a saved directory; see ``td_memmap.append_memmap``."""
        from ._append import append_memmap

        append_memmap(location, rows, allow_pickle=allow_pickle, compatible=compatible)


def _load_memmap_as(cls: type, *args: Any, **options: Any) -> TensorCollection:
    return load_as(cls, LoadMemmapOptions(*args, **options))


@hookimpl
def td_methods() -> Mapping[str, object]:
    """Return the methods of memory mapping, saving and loading."""
    return {
        "memmap": memmap,
        "memmap_": memmap_,
        "memmap_like": memmap_like,
        "load_memmap": make_classmethod(load_memmap, with_class=_load_memmap_as),
        "load_memmap_": load_memmap_,
        "memmap_refresh_": memmap_refresh_,
        "make_memmap": make_memmap,
        "make_memmap_from_storage": make_memmap_from_storage,
        "make_memmap_from_tensor": make_memmap_from_tensor,
        "is_memmap": is_memmap,
        "saved_path": property(saved_path),
    }


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the serializer of directories and archives."""
    return [DirectoryFormat()]
