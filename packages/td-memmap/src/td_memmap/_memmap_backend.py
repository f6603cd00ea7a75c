"""State of the nodes of a mapped collection: the directory of each node, and the options of the save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.pickles import rebuild_collection
from td_core.spi import Node, StorageBackend, lock, set_module, visit, walk

from . import _file_names, _fs
from ._fs import DirectoryTree
from ._meta import find_directory
from ._plan import encode_node
from ._tensor import MemoryMappedTensor, is_backed_by_path
from ._value_file import ValueFile

CollectionT = TypeVar("CollectionT", bound=TensorCollection)

#: Key of the :class:`MemmapBackend` among a node's storage backends.
ATTACHMENT = "memmap"

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MemmapBackend(StorageBackend):
    """Storage backend of a mapped node: the directory and options of its save.

    Attributes:
        path: directory of the node; None for anonymous files.
        robust_key: whether keys are encoded as file names.
        allow_pickle: whether values may be pickled, as passed to the save.
        shared: whether values are reloaded whenever their file changes.
        above: batch size of the parent.
        form: batch size and dim names of the node in the save; None if unknown.
        rows: whether one value for a batch may become values by rows when a part of the batch is written.
    """

    path: str | None
    robust_key: bool
    allow_pickle: bool
    shared: bool = False
    above: torch.Size = torch.Size()
    form: object = None
    rows: bool = False

    def get_folder(self, node: Node) -> str | None:
        """Return the directory of a node, or None if the node differs from the save there."""
        leaves = node._leaves()
        in_place = (isinstance(leaf, MemoryMappedTensor) and is_backed_by_path(leaf) for leaf in leaves)
        return get_directory(node, self) if self.is_current(node) and all(in_place) else None

    def is_current(self, node: Node) -> bool:
        """Return True if the node and all nodes below still have the batch sizes and dim names of the save."""
        if self.path is None:
            return False
        for item in walk(node):
            saved = get_backend(item)
            if (
                saved is None
                or saved.form != _get_form(item)
                or not f"{saved.path}/".startswith(f"{self.path}/")
            ):
                return False
        return True

    def reduce(self, node: Node, protocol: int, encode: Callable[[], tuple[object, ...]]) -> tuple[Any, ...]:
        """Return the pickle reduction of a mapped collection, which maps the same files when it is unpickled."""
        parts = encode()
        options = self.robust_key, self.allow_pickle, self.shared, self.is_current(node), self.rows
        return remap_collection, (parts, get_directory(node, self), *options)


@set_module("td_memmap.memmap_pickles")
def remap_collection(
    parts: tuple[Any, ...],
    path: str | None,
    robust_key: bool,
    allow_pickle: bool = False,
    shared: bool = False,
    as_saved: bool = True,
    rows: bool = False,
) -> Any:
    """Rebuild a pickled mapped collection from :meth:`MemmapBackend.reduce`."""
    result = rebuild_collection(*parts)
    # With torch.load(map_location="meta") the leaves have no elements, so the result is not mapped.
    if any(leaf.is_meta for leaf in result._leaves()):
        return result
    return attach_backend(
        result, MemmapBackend(path, robust_key, allow_pickle, shared, rows=rows), as_saved=as_saved
    )


#: Name in the pickles of earlier releases.
_again = remap_collection


def get_backend(data: Any) -> MemmapBackend | None:
    """Return the MemmapBackend of a collection, or None if it is not mapped."""
    attachments = data._inner()._backends
    return None if attachments is None else attachments.get(ATTACHMENT)


def _get_form(node: Node) -> object:
    return node.batch_size, node._names


def get_directory(node: Node, saved: MemmapBackend) -> str | None:
    """Return the directory of a node; a wrapper shares the backend of the node that it wraps."""
    path = saved.path
    if path is None or node._inner() is node or os.path.basename(path) != _file_names.INNER:
        return path
    return os.path.dirname(path)


def attach_backend(result: CollectionT, saved: MemmapBackend, *, as_saved: bool = True) -> CollectionT:
    """Lock a mapped collection and attach a MemmapBackend to each of its nodes."""
    lock(result, by_user=False)
    robust_key, allow_pickle, shared = saved.robust_key, saved.allow_pickle, saved.shared

    def attach(
        node: Any, path: str | None, above: torch.Size
    ) -> Iterator[tuple[object, str | None, torch.Size]]:
        inner = node._inner()
        inner._set_device(_CPU)
        inner._backends = {
            **(inner._backends or {}),
            ATTACHMENT: MemmapBackend(
                path,
                robust_key,
                allow_pickle,
                shared,
                above,
                _get_form(node) if as_saved else None,
                saved.rows,
            ),
        }
        if node._is_value:
            if path is not None:
                node._keeper = ValueFile(
                    path, above, allow_pickle, shared, _fs.identify_path(path), rows=saved.rows
                )
        elif inner is node and all(isinstance(child, Tensor) for child in node._tree_children()):
            return  # Skip encoding: most nodes have no child nodes.
        record = encode_node(node)
        size = node.batch_size
        for key, child in record.entries.items():
            if not isinstance(child, Tensor):
                yield child, None if path is None else _find_below(path, key, robust_key), size
        for name, child in record.members.items():
            yield child, None if path is None else os.path.join(path, name), above

    visit(attach, result, saved.path, saved.above)
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
        # The key may be stored under another file name; only the metadata of the save has it.
        with contextlib.suppress(OSError, ValueError), DirectoryTree.at_path(path) as tree:
            return tree.show(find_directory(tree, (key,), robust_key=robust_key))
    return os.path.join(path, stem)
