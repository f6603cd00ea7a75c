"""Which save a collection is, that was loaded and is mapped again.

A loaded collection is free to change, and forgets nothing of its files: each leaf has its place. Where all leaves and
values are those of a save, it is that save.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from td_core._collection import Core
from td_core._components import parts_of
from td_core._nodes import KINDS
from td_core.errors import TensorDictError

from . import _names
from ._load import Loading, Reader, on_one_version
from ._mapping import source_of
from ._plan import KeyPath, take_apart
from ._saved import Saved
from ._tensor import MemoryMappedTensor, Place, is_whole
from ._value_file import ValueFile


def origin(tree: Core) -> Saved | None:
    """Return the save that a collection is; None where it is another, more or less."""
    path = _root(tree)
    if path is None:
        return None
    try:
        loaded, robust = on_one_version(path, _load)
    except (OSError, TensorDictError):
        return None
    return Saved(path, robust, False) if _is_same(tree, loaded) else None


def _load(files: Any) -> tuple[tuple[Any, bool], bool]:
    reader = Reader(files, Loading())
    loaded = reader.load()
    return (loaded, all(node.level.meta.get(_names.ROBUST_KEY) is not False for node in reader.nodes)), True


def _root(tree: Core) -> str | None:
    """Return the directory that a save of this collection would have, by the place of one leaf or value."""
    todo: list[tuple[Core, KeyPath]] = [(tree, ())]
    while todo:
        node, path = todo.pop()
        record = take_apart(node, path)
        keeper = node._keeper()
        found = keeper.path if isinstance(keeper, ValueFile) and keeper.refused is None else None
        for key, child in record.entries.items():
            if isinstance(child, Tensor):
                for place in _places(child):
                    found = found or (place.filename and os.path.dirname(place.filename))
            else:
                todo.append((child, (*path, key)))
        todo.extend((child, (*path, key)) for key, child in record.members.items())
        if found is not None:
            for _ in path:
                found = os.path.dirname(found)
            return found
    return None


def _places(leaf: Any) -> list[Place]:
    """Return the places of the tensors that a leaf is made of; none where not all are in files."""
    parts = [leaf]
    if leaf.is_nested and leaf.layout is not torch.strided:
        parts = parts_of(leaf)
    places: list[Any] = [getattr(part, "_place", None) or source_of(part) for part in parts]
    return places if all(isinstance(place, Place) for place in places) else []


def _is_same(tree: Core, loaded: Core) -> bool:
    """Tell whether a collection has the levels, leaves and values of one that was loaded, and the leaves in the same files."""
    todo: list[tuple[Core, Core]] = [(tree, loaded)]
    while todo:
        mine, theirs = todo.pop()
        if (
            KINDS.of(mine) is not KINDS.of(theirs)
            or mine.batch_size != theirs.batch_size
            or mine._names != theirs._names
        ):
            return False
        if mine._opaque and not mine._holds_same(theirs):
            return False
        one, other = take_apart(mine), take_apart(theirs)
        if one.entries.keys() != other.entries.keys() or one.members.keys() != other.members.keys():
            return False
        for key, child in one.entries.items():
            there: Any = other.entries[key]
            if isinstance(child, Tensor) != isinstance(there, Tensor):
                return False
            if not isinstance(child, Tensor):
                todo.append((child, there))
            elif not _is_same_leaf(child, there):
                return False
        todo.extend((child, other.members[name]) for name, child in one.members.items())
    return True


def _is_same_leaf(mine: Tensor, theirs: Tensor) -> bool:
    if mine.layout is not theirs.layout or mine.dtype != theirs.dtype or mine.is_nested != theirs.is_nested:
        return False
    places = [
        [(place.filename, place.identity, place.shared) for place in _places(leaf)] for leaf in (mine, theirs)
    ]
    whole = not isinstance(mine, MemoryMappedTensor) or is_whole(mine)
    shown = mine.is_nested or mine.shape == theirs.shape
    return whole and shown and places[0] == places[1] and bool(places[0])
