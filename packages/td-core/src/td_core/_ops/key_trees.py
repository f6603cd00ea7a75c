"""Represent nested keys as a tree: nested dicts in which None marks the end of a key path.

An operation on many nested keys visits each node once, from the root down. It then rebuilds the visited nodes from the
deepest up, so that each is built once from all its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .._collection import Child, Core, make_dense, missing_key_error, show_path
from .._keys import unravel_key_to_tuple
from ..errors import KeyThroughLeafError
from ..typing import NestedKey

KeyTree = dict[str, Any]

Row = tuple[Core, dict[str, Child], "dict[str, Child] | None", str]
"""A node to rebuild: the node, its new entries, the new entries of its parent (None for the root), its key."""


class RequestedKeys(KeyTree):
    """Subtree of a key that is also requested itself; if its entry is a leaf, non-strict operations keep it."""


def build_key_tree(keys: Iterable[NestedKey], *, longest: bool) -> KeyTree:
    """Convert keys to a tree. Of a key path and its prefix, keep the longer if ``longest``, else the shorter."""
    tree: KeyTree = {}
    for key in keys:
        parents: tuple[str, ...] = ()
        last: Any = key
        if type(key) is not str:
            path = unravel_key_to_tuple(key)
            parents, last = path[:-1], path[-1]
        level = tree
        for part in parents:
            below = level.setdefault(part, {})
            if below is None:
                if not longest:
                    break
                below = level[part] = RequestedKeys()
            level = below
        else:
            if longest:
                below = level.setdefault(last, None)
                if below is not None:
                    level[last] = RequestedKeys(below)
            else:
                level[last] = None
    return tree


def _make_level(node: Core, children: dict[str, Child]) -> Any:
    return node._with_children(children)


def build(rows: list[Row], make: Callable[[Core, dict[str, Child]], Any] = _make_level) -> Any:
    """Build the nodes of ``rows`` with ``make``, the deepest first, and return the node of the first row."""
    built: Any = None
    for node, children, parent, key in reversed(rows):
        built = make(node, children)
        if parent is not None:
            parent[key] = built
    return built


def restrict(root: Core, tree: KeyTree, strict: bool, as_tensordict: bool = False) -> Any:
    """Copy ``root`` with only the entries in ``tree``; if ``strict``, raise KeyPathError for a missing key."""
    stacked = root._members_and_dim()
    if stacked is not None:
        return root._with_members([restrict(member, tree, strict, as_tensordict) for member in stacked[0]])
    top: dict[str, Child] = {}
    rows: list[Row] = [(root, top, None, "")]
    todo: list[tuple[Core, KeyTree, dict[str, Child], tuple[str, ...]]] = [(root, tree, top, ())]
    while todo:
        node, wanted, target, path = todo.pop()
        children = node._children()
        for key, below in wanted.items():
            child = children.get(key)
            if child is None:
                if strict:
                    raise missing_key_error(node, key, path)
            elif below is None:
                target[key] = child
            elif isinstance(child, Tensor) or child._is_value:
                if strict:
                    raise KeyThroughLeafError(
                        f"{show_path((*path, key))} has no entries; looked up {list(below)} in it"
                    )
                if isinstance(below, RequestedKeys):
                    target[key] = child
            elif child._members_and_dim() is not None:
                target[key] = restrict(child, below, strict)
            else:
                inner: dict[str, Child] = {}
                target[key] = inner
                rows.append((child, inner, target, key))
                todo.append((child, below, inner, (*path, key)))
    if as_tensordict:
        rows[0] = (make_dense({}, root.batch_size, root.device, root._names), top, None, "")
    return build(rows)


def parse_requested_keys(keys: Sequence[NestedKey] | None) -> KeyTree | None:
    """Convert an argument such as ``keys_to_update`` to a key tree; None means all keys."""
    if keys is None:
        return None
    if isinstance(keys, str):
        raise TypeError(f"keys_to_update is a sequence of keys; got the single key {keys!r}")
    return build_key_tree(keys, longest=False)


def filter_entries(source: Any, tree: KeyTree) -> Any:
    """Return the entries of a mapping or collection whose keys are in a key tree."""
    if isinstance(source, Core):
        return restrict(source, tree, False)
    kept: dict[Any, Any] = {}
    for key, value in source.items():
        first, *rest = unravel_key_to_tuple(key)
        below: Any = tree.get(first, {})
        for part in rest:
            below = below and below.get(part, {})
        if below is None:
            kept[key] = value
        elif below and isinstance(value, (Core, Mapping)):
            kept[key] = filter_entries(value, below)
    return kept
