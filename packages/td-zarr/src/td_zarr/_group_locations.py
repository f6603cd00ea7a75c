"""Find the objects of the group at a location."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import zarr
import zarr.abc.store
import zarr.storage

from ._local_objects import LocalObjects
from ._zarr_objects import Objects, StoreObjects, ZipObjects, open_url, return_store


def find_local_path(location: object) -> str | None:
    """Return the path of a location in the local file system, or None for another one."""
    if isinstance(location, zarr.Group):
        location = location.store_path
    if isinstance(location, zarr.storage.StorePath) and isinstance(location.store, zarr.storage.LocalStore):
        return os.fspath(Path(location.store.root, *location.path.split("/")))
    if isinstance(location, zarr.storage.LocalStore):
        return str(location.root)
    if isinstance(location, os.PathLike) or (isinstance(location, str) and "://" not in location):
        return os.fspath(location)
    return None


def find_objects(location: Any, storage_options: dict[str, Any] | None = None) -> Objects:
    """Return the objects of the group at a location: a path, a URL, or an object of zarr.

    Raises:
        FileNotFoundError: there is nothing at a local path.
        FormatError: something else than a directory or a file is there.
        MissingPluginError: a URL needs fsspec, or a package of a file system.
    """
    path = find_local_path(location)
    if path is not None and os.path.isdir(path):
        objects = LocalObjects(path)
        objects.pin()
        return objects
    if path is not None:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is nothing at {path!r}")
        return ZipObjects(path)
    if isinstance(location, zarr.Group):
        location = location.store_path
    if isinstance(location, zarr.abc.store.Store):
        location = zarr.storage.StorePath(location)
    if isinstance(location, zarr.storage.StorePath):
        store = location.store
        make = partial(return_store, store)
        # What cannot be removed cannot be written again, as in a ZipStore.
        is_fixed = not store.supports_deletes
        return StoreObjects(str(location), make, location.path, is_own=False, is_read_only=is_fixed)
    return StoreObjects(location, partial(open_url, location, storage_options))
