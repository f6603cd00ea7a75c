"""Find the save that a loaded collection still equals.

A loaded collection can be changed, but each mapped leaf keeps the Place of its file. If all leaves and values are
unchanged, mapping the collection again needs no new files.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from td_core._collection import Core
from td_core._nested_components import get_parts
from td_core._nodes import KINDS
from td_core.errors import TensorDictError

from . import _file_names
from ._load import LoadOptions, Reader, retry_on_replace
from ._mapped_memory import source_of
from ._memmap_backend import MemmapBackend
from ._plan import KeyPath, encode_node
from ._tensor import MemoryMappedTensor, Place, is_whole
from ._value_file import ValueFile


def origin(tree: Core) -> MemmapBackend | None:
    """Return the MemmapBackend of the save that a collection equals, or None."""
    path = _root(tree)
    if path is None:
        return None
    try:
        loaded, robust = retry_on_replace(path, _load)
    except (OSError, TensorDictError):
        return None
    return MemmapBackend(path, robust, False) if _is_same(tree, loaded) else None


def _load(files: Any) -> tuple[tuple[Any, bool], bool]:
    reader = Reader(files, LoadOptions())
    loaded = reader.load()
    return (
        loaded,
        all(node.level.meta.get(_file_names.ROBUST_KEY) is not False for node in reader.nodes),
    ), True


def _root(tree: Core) -> str | None:
    """Return the root directory of the save of any leaf or value of a collection, or None."""
    todo: list[tuple[Core, KeyPath]] = [(tree, ())]
    while todo:
        node, path = todo.pop()
        record = encode_node(node, path)
        keeper = node._keeper()
        result = keeper.path if isinstance(keeper, ValueFile) and keeper.refused is None else None
        for key, child in record.entries.items():
            if isinstance(child, Tensor):
                for place in _places(child):
                    result = result or (place.filename and os.path.dirname(place.filename))
            else:
                todo.append((child, (*path, key)))
        todo.extend((child, (*path, key)) for key, child in record.members.items())
        if result is not None:
            for _ in path:
                result = os.path.dirname(result)
            return result
    return None


def _places(leaf: Any) -> list[Place]:
    """Return the Places of the tensors of a leaf; an empty list if any is not in a file."""
    parts = [leaf]
    if leaf.is_nested and leaf.layout is not torch.strided:
        parts = get_parts(leaf)
    places: list[Any] = [getattr(part, "_place", None) or source_of(part) for part in parts]
    return places if all(isinstance(place, Place) for place in places) else []


def _is_same(tree: Core, loaded: Core) -> bool:
    """Return True if a collection has the same nodes and values as a loaded one, and its leaves are in the same files."""
    todo: list[tuple[Core, Core]] = [(tree, loaded)]
    while todo:
        left, right = todo.pop()
        if (
            KINDS.of(left) is not KINDS.of(right)
            or left.batch_size != right.batch_size
            or left._names != right._names
        ):
            return False
        if left._is_value and not left._has_equal_values(right):
            return False
        first, other = encode_node(left), encode_node(right)
        if first.entries.keys() != other.entries.keys() or first.members.keys() != other.members.keys():
            return False
        for key, child in first.entries.items():
            there: Any = other.entries[key]
            if isinstance(child, Tensor) != isinstance(there, Tensor):
                return False
            if not isinstance(child, Tensor):
                todo.append((child, there))
            elif not _is_same_leaf(child, there):
                return False
        todo.extend((child, other.members[name]) for name, child in first.members.items())
    return True


def _is_same_leaf(left: Tensor, right: Tensor) -> bool:
    if left.layout is not right.layout or left.dtype != right.dtype or left.is_nested != right.is_nested:
        return False
    places = [
        [(place.filename, place.identity, place.shared) for place in _places(leaf)] for leaf in (left, right)
    ]
    whole = not isinstance(left, MemoryMappedTensor) or is_whole(left)
    shown = left.is_nested or left.shape == right.shape
    return whole and shown and places[0] == places[1] and bool(places[0])
