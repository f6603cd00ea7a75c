"""Find the save that a loaded collection still equals.

A loaded collection can be changed, but each mapped leaf keeps the Place of its file. If all leaves and values are
unchanged, mapping the collection again needs no new files.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from torch import Tensor

from td_core import kinds
from td_core.errors import TensorDictError
from td_core.spi import Node, encode, get_parts, is_same_value

from . import _file_names
from ._directory_layouts import FORMAT
from ._fs import DirectoryTree
from ._load import LoadOptions, Reader, retry_on_replace
from ._mapped_memory import source_of
from ._memmap_backend import MemmapBackend
from ._tensor import MemoryMappedTensor, Place, is_whole
from ._value_file import CopiedValues, ValueFile


def origin(tree: Node) -> MemmapBackend | None:
    """Return the MemmapBackend of the save that a collection equals, or None."""
    path = _root(tree)
    if path is None:
        return None
    try:
        loaded, robust = retry_on_replace(path, _load)
    except (OSError, TensorDictError):
        return None
    return MemmapBackend(path, robust, False) if _is_same(tree, loaded) else None


def _load(files: DirectoryTree) -> tuple[tuple[Node, bool], bool]:
    reader = Reader(files, LoadOptions())
    loaded = reader.load()
    return (
        loaded,
        all(node.level.meta.get(_file_names.ROBUST_KEY) is not False for node in reader.nodes),
    ), True


def _root(tree: Node) -> str | None:
    """Return the root directory of the save of any leaf or value of a collection, or None."""
    encoded = encode(tree, format_name=FORMAT)
    keepers = ((node._keeper, path) for node, path in zip(encoded.objects, encoded.node_paths()))
    values = (
        (keeper.path, path)
        for keeper, path in keepers
        if type(keeper) is ValueFile and keeper.refused is None
    )
    leaves = (
        (place.filename, path)
        for leaf, path in zip(encoded.leaves, encoded.leaf_paths())
        for place in _places(leaf)
        if place.filename
    )
    for place, path in chain(values, leaves):
        return _find_root(place, path)
    return None


def find_loaded(tree: Node) -> LoadOptions | None:
    """Return the options of the load of a collection, with its directory, or None if its leaves are not those of one save."""
    encoded = encode(tree, format_name=FORMAT)
    found: set[tuple[str, str | None]] = set()
    for leaf, path in zip(encoded.leaves, encoded.leaf_paths()):
        places = _places(leaf)
        if not places or (isinstance(leaf, MemoryMappedTensor) and not is_whole(leaf)):
            return None
        found |= {(_find_root(place.filename or "", path), place.mode) for place in places}
    if not encoded.leaves:
        keepers = [(node._keeper, path) for node, path in zip(encoded.objects, encoded.node_paths())]
        found |= {
            (_find_root(keeper.path, path), "r" if type(keeper) is CopiedValues else None)
            for keeper, path in keepers
            if isinstance(keeper, ValueFile) and keeper.refused is None
        }
    if len(found) != 1:
        return None
    ((root, mode),) = found
    return (
        LoadOptions(prefix=root, mode=mode, keeper=ValueFile, copier=CopiedValues)
        if os.path.isdir(root)
        else None
    )


def _find_root(place: str, path: tuple[str, ...]) -> str:
    for _ in path:
        place = os.path.dirname(place)
    return place


def _places(leaf: Tensor) -> list[Place]:
    """Return the Places of the tensors of a leaf; an empty list if any is not in a file."""
    places: list[Any] = [getattr(part, "_place", None) or source_of(part) for part in get_parts(leaf)]
    return places if all(isinstance(place, Place) for place in places) else []


def _is_same(tree: Node, loaded: Node) -> bool:
    """Return True if a collection has the same nodes and values as a loaded one, and its leaves are in the same files."""
    trees = [encode(item, format_name=FORMAT) for item in (tree, loaded)]
    nodes, other_nodes = (dict(zip(item.node_paths(), item.objects)) for item in trees)
    leaves, other_leaves = (dict(zip(item.leaf_paths(), item.leaves)) for item in trees)
    return (
        nodes.keys() == other_nodes.keys()
        and leaves.keys() == other_leaves.keys()
        and all(_is_same_node(node, other_nodes[path]) for path, node in nodes.items())
        and all(_is_same_leaf(leaf, other_leaves[path]) for path, leaf in leaves.items())
    )


def _is_same_node(left: Node, right: Node) -> bool:
    return (
        kinds.of(left) is kinds.of(right)
        and left.batch_size == right.batch_size
        and left._names == right._names
        and (not left._is_value or is_same_value(left.tolist(), right.tolist()))
    )


def _is_same_leaf(left: Tensor, right: Tensor) -> bool:
    if left.layout is not right.layout or left.dtype != right.dtype or left.is_nested != right.is_nested:
        return False
    places = [
        [(place.filename, place.identity, place.shared) for place in _places(leaf)] for leaf in (left, right)
    ]
    whole = not isinstance(left, MemoryMappedTensor) or is_whole(left)
    shown = left.is_nested or left.shape == right.shape
    return whole and shown and places[0] == places[1] and bool(places[0])
