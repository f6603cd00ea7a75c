"""Entries of collections from arrays and groups of zarr that a program has opened."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import zarr
import zarr.storage

from td_core import from_any
from td_core.errors import UnsupportedOperationError
from td_store.arrays import build_leaves

from ._array_documents import read_array_document
from ._chunk_access import as_tensor
from ._foreign_groups import ForeignGroup
from ._group_header import GroupContent, find_documents, find_old_document
from ._read_collections import Opener, open_collection
from ._zarr_objects import StoreObjects, return_store


def read_object(item: zarr.Group | zarr.Array[Any]) -> Any:
    """Open an array or group of zarr in the mode of its store: its elements stay there.

    An array at the root of a store that is not a directory has no group, and is read.

    Raises:
        FormatError: the group is damaged, or torch lacks the dtype of an array.
    """
    mode = "r" if item.read_only else "r+"
    if isinstance(item, zarr.Group):
        try:
            return open_collection(item, mode=mode)
        except UnsupportedOperationError:  # it has nested tensors, or is in a zip file
            return open_collection(item, mode="r")
    store, (above, _, name) = item.store, item.path.rpartition("/")
    if not name and isinstance(store, zarr.storage.LocalStore):
        store, name = zarr.storage.LocalStore(store.root.parent, read_only=item.read_only), store.root.name
    if not name:
        elements = np.asarray(item[...])
        return as_tensor(elements) if elements.dtype.kind in "biufcmM" else from_any(elements.tolist())
    return _open_array(
        StoreObjects(str(item.store_path), partial(return_store, store), above, is_own=False), name, mode
    )


def _open_array(objects: StoreObjects, name: str, mode: str) -> Any:
    """Return the entry of an array: a leaf in the store, or its text as values."""
    if objects.get(f"{name}/zarr.json") is None:
        document = find_old_document(objects, name)
    else:
        document = find_documents(objects, {}, [name])[name]
    infos = {name: read_array_document(name, document, objects.where)}
    table = ForeignGroup(objects, {name: document}, infos, allow_pickle=False, stack_values=True).build({})
    opener = Opener(GroupContent(objects, infos, table, False, False), table, mode)
    return build_leaves(table, objects.where, opener.open)._children()[name]
