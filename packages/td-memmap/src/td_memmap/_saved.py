"""What a node of a mapped collection knows of its save, and how it keeps the save up to date."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from td_core import _pickling
from td_core._attachments import Attachment
from td_core._collection import ATTACHED, Core
from td_core._lazy_names import set_module
from td_core._locking import lock

from . import _fs, _names
from ._fs import Tree
from ._meta import find
from ._plan import take_apart
from ._tensor import MemoryMappedTensor, is_in_its_file
from ._value_file import ValueFile

#: Where a mapped collection keeps its :class:`Saved`.
ATTACHMENT = "memmap"

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Saved(Attachment):
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

    def files(self, node: Core) -> str | None:
        """Return the directory of a node, unless that now differs from the save, or another save has taken its place."""
        leaves = node._leaves()
        in_place = (isinstance(leaf, MemoryMappedTensor) and is_in_its_file(leaf) for leaf in leaves)
        return directory(node, self) if self.describes(node) and all(in_place) else None

    def describes(self, node: Core) -> bool:
        """Tell whether the save has the levels of a node, with their batch sizes and names, which a lock lets change."""
        if self.path is None:
            return False
        todo: list[Any] = [node]
        while todo:
            each = todo.pop()
            saved = saved_of(each)
            if saved is None or saved.form != _form(each) or not f"{saved.path}/".startswith(f"{self.path}/"):
                return False
            todo.extend(each._nested())
        return True

    def pickled(self, node: Core, protocol: int) -> tuple[Any, ...]:
        """Return a mapped collection for pickle: it is mapped to the same files where it is unpickled."""
        parts = _pickling.take_apart(node, protocol)
        options = self.robust_key, self.allow_pickle, self.shared, self.describes(node)
        return remap_collection, (parts, directory(node, self), *options)


@set_module("td_memmap.memmap_pickles")
def remap_collection(
    parts: tuple[Any, ...],
    path: str | None,
    robust_key: bool,
    allow_pickle: bool = False,
    shared: bool = False,
    as_saved: bool = True,
) -> Any:
    """Return the mapped collection that :meth:`Saved.pickled` took apart."""
    result = _pickling.rebuild_collection(*parts)
    # Where torch.load(map_location="meta") asked for no elements, there are none in files either.
    if any(leaf.is_meta for leaf in result._leaves()):
        return result
    return attach(result, Saved(path, robust_key, allow_pickle, shared), as_saved=as_saved)


#: The name in pickles of earlier releases.
_again = remap_collection


def saved_of(data: Any) -> Saved | None:
    """Return what a collection knows of its save; None where it is not mapped."""
    attachments = data._inner()._attachments
    return None if attachments is None else attachments.get(ATTACHMENT)


def _form(node: Any) -> Any:
    return node.batch_size, node._names


def directory(node: Core, saved: Saved) -> str | None:
    """Return the directory of a node, whose attachments may be those of the node that it wraps."""
    path = saved.path
    if path is None or node._inner() is node or os.path.basename(path) != _names.INNER:
        return path
    return os.path.dirname(path)


def attach(result: Any, saved: Saved, *, as_saved: bool = True) -> Any:
    """Lock a mapped collection and tell every node of it where it is saved, and whether it is as it was saved."""
    lock(result, ATTACHED)
    robust_key, allow_pickle, shared = saved.robust_key, saved.allow_pickle, saved.shared
    todo: list[tuple[Any, str | None, torch.Size]] = [(result, saved.path, saved.above)]
    while todo:
        node, path, above = todo.pop()
        inner = node._inner()
        inner._set_device(_CPU)
        inner._attachments = {
            **(inner._attachments or {}),
            ATTACHMENT: Saved(
                path, robust_key, allow_pickle, shared, above, _form(node) if as_saved else None
            ),
        }
        if node._opaque and path is not None:
            found = _fs.status(path)
            folder = None if found is None else _fs.identity(found)
            node._keep(ValueFile(path, above, allow_pickle, shared, folder))
        if inner is node and not node._opaque and next(node._nested(), None) is None:
            continue  # most levels: there is nothing below
        record = take_apart(node)
        size = node.batch_size
        for key, child in record.entries.items():
            if not isinstance(child, Tensor):
                todo.append((child, None if path is None else _below(path, key, robust_key), size))
        for name, child in record.members.items():
            todo.append((child, None if path is None else os.path.join(path, name), above))
    return result


def _below(path: str, key: str, robust_key: bool) -> str:
    stem = _names.stem(key, robust_key)
    encoded = stem == _names.encode_key(key)
    if (
        not encoded
        or stem.endswith(".memmap")
        or stem in _names.TAKEN
        or not _names.fits(stem + ".lengths.memmap")
    ):
        # It may have another name, which its save knows; if that was replaced already, no name is right.
        with contextlib.suppress(OSError, ValueError), Tree.at_path(path) as tree:
            return tree.show(find(tree, (key,), robust_key=robust_key))
    return os.path.join(path, stem)
