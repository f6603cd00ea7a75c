"""What a node of a mapped collection knows of its save, and how it keeps the save up to date."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from td_core import _pickling
from td_core._collection import ATTACHED, Core
from td_core._locking import lock
from td_core._public_names import set_module
from td_core._storage_backends import StorageBackend

from . import _file_names, _fs
from ._fs import DirectoryTree
from ._meta import find_directory
from ._plan import encode_node
from ._tensor import MemoryMappedTensor, is_backed_by_path
from ._value_file import ValueFile

#: Where a mapped collection keeps its :class:`MemmapBackend`.
ATTACHMENT = "memmap"

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MemmapBackend(StorageBackend):
    """What a node of a mapped collection knows of its save.

    Attributes:
        path: its directory; None for anonymous files.
        robust_key: whether keys are encoded as file names there.
        allow_pickle: whether values may be pickled, as when it was saved.
        shared: whether values are read from the save each time it changes.
        above: batch size of the level above.
        form: batch size and names of the node in the save; None where they are not known.
    """

    path: str | None
    robust_key: bool
    allow_pickle: bool
    shared: bool = False
    above: torch.Size = torch.Size()
    form: Any = None

    def get_folder(self, node: Core) -> str | None:
        """Return the directory of a node, unless that now differs from the save, or another save has taken its place."""
        leaves = node._leaves()
        in_place = (isinstance(leaf, MemoryMappedTensor) and is_backed_by_path(leaf) for leaf in leaves)
        return get_directory(node, self) if self.is_current(node) and all(in_place) else None

    def is_current(self, node: Core) -> bool:
        """Tell whether the save has the levels of a node, with their batch sizes and names, which a lock lets change."""
        if self.path is None:
            return False
        todo: list[Any] = [node]
        while todo:
            item = todo.pop()
            saved = get_backend(item)
            if (
                saved is None
                or saved.form != _get_form(item)
                or not f"{saved.path}/".startswith(f"{self.path}/")
            ):
                return False
            todo.extend(item._iter_nested())
        return True

    def reduce(self, node: Core, protocol: int) -> tuple[Any, ...]:
        """Return a mapped collection for pickle: it is mapped to the same files where it is unpickled."""
        parts = _pickling.encode_for_pickle(node, protocol)
        options = self.robust_key, self.allow_pickle, self.shared, self.is_current(node)
        return remap_collection, (parts, get_directory(node, self), *options)


@set_module("td_memmap.memmap_pickles")
def remap_collection(
    parts: tuple[Any, ...],
    path: str | None,
    robust_key: bool,
    allow_pickle: bool = False,
    shared: bool = False,
    as_saved: bool = True,
) -> Any:
    """Return the mapped collection that :meth:`MemmapBackend.pickled` took apart."""
    result = _pickling.rebuild_collection(*parts)
    # Where torch.load(map_location="meta") asked for no elements, there are none in files either.
    if any(leaf.is_meta for leaf in result._leaves()):
        return result
    return attach_backend(result, MemmapBackend(path, robust_key, allow_pickle, shared), as_saved=as_saved)


#: The name in pickles of earlier releases.
_again = remap_collection


def get_backend(data: Any) -> MemmapBackend | None:
    """Return what a collection knows of its save; None where it is not mapped."""
    attachments = data._inner()._backends
    return None if attachments is None else attachments.get(ATTACHMENT)


def _get_form(node: Any) -> Any:
    return node.batch_size, node._names


def get_directory(node: Core, saved: MemmapBackend) -> str | None:
    """Return the directory of a node, whose attachments may be those of the node that it wraps."""
    path = saved.path
    if path is None or node._inner() is node or os.path.basename(path) != _file_names.INNER:
        return path
    return os.path.dirname(path)


def attach_backend(result: Any, saved: MemmapBackend, *, as_saved: bool = True) -> Any:
    """Lock a mapped collection and tell every node of it where it is saved, and whether it is as it was saved."""
    lock(result, ATTACHED)
    robust_key, allow_pickle, shared = saved.robust_key, saved.allow_pickle, saved.shared
    todo: list[tuple[Any, str | None, torch.Size]] = [(result, saved.path, saved.above)]
    while todo:
        node, path, above = todo.pop()
        inner = node._inner()
        inner._set_device(_CPU)
        inner._backends = {
            **(inner._backends or {}),
            ATTACHMENT: MemmapBackend(
                path, robust_key, allow_pickle, shared, above, _get_form(node) if as_saved else None
            ),
        }
        if node._is_value and path is not None:
            match = _fs.get_status(path)
            folder = None if match is None else _fs.get_identity(match)
            node._keep(ValueFile(path, above, allow_pickle, shared, folder))
        if inner is node and not node._is_value and next(node._iter_nested(), None) is None:
            continue  # most levels: there is nothing below
        record = encode_node(node)
        size = node.batch_size
        for key, child in record.entries.items():
            if not isinstance(child, Tensor):
                todo.append((child, None if path is None else _find_below(path, key, robust_key), size))
        for name, child in record.members.items():
            todo.append((child, None if path is None else os.path.join(path, name), above))
    return result


def _find_below(path: str, key: str, robust_key: bool) -> str:
    stem = _file_names.get_stem(key, robust_key)
    encoded = stem == _file_names.encode_key(key)
    if (
        not encoded
        or stem.endswith(".memmap")
        or stem in _file_names.RESERVED_STEMS
        or not _file_names.is_valid_name(stem + ".lengths.memmap")
    ):
        # It may have another name, which its save knows; if that was replaced already, no name is right.
        with contextlib.suppress(OSError, ValueError), DirectoryTree.at_path(path) as tree:
            return tree.show(find_directory(tree, (key,), robust_key=robust_key))
    return os.path.join(path, stem)
