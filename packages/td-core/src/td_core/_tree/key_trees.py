"""Represent nested keys as a tree: nested dicts in which None marks the end of a key path.

An operation on many nested keys visits each node once, from the root down. It then rebuilds the visited nodes from the
deepest up, so that each is built once from all its entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import KeyThroughLeafError
from ..typing import NestedKey
from .defaults import missing_key_error, show_path
from .keys import unravel_key_to_tuple
from .node import Child, Core, make_dense
from .ragged import find_holders
from .walks import Position, get_path, has_entries, map_levels, visit

KeyTree = dict[str, Any]


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


def restrict(root: Core, tree: KeyTree, strict: bool, as_tensordict: bool = False) -> Any:
    """Copy ``root`` with only the entries in ``tree``; if ``strict``, raise KeyPathError for a missing key."""
    if strict:
        try:
            return _restrict(root, tree, True, as_tensordict)
        except KeyError:
            # An entry that only some members of a lazy stack have is not missing.
            if not all(find_holders(root, path) for path in _list_paths(tree)):
                raise
    return _restrict(root, tree, False, as_tensordict)


def _list_paths(tree: KeyTree) -> list[tuple[str, ...]]:
    """Return the key paths of a tree."""
    paths: list[tuple[str, ...]] = []

    def step(prefix: tuple[str, ...], level: KeyTree) -> Iterator[tuple[object, ...]]:
        for key, below in level.items():
            if below is None:
                paths.append((*prefix, key))
            else:
                yield (*prefix, key), below

    visit(step, (), tree)
    return paths


def _restrict(root: Core, tree: KeyTree, strict: bool, as_tensordict: bool) -> object:
    if as_tensordict:
        return root._map_members(
            lambda node: map_levels(
                node, _fill_requested, (tree, strict, None), partial(_make_plain_root, node), by_member=True
            )
        )
    return map_levels(root, _fill_requested, (tree, strict, None), None, by_member=True)


def _fill_requested(
    node: Core, target: dict[str, Child], state: tuple[KeyTree, bool, Position]
) -> Iterator[tuple[str, Core, tuple[KeyTree, bool, Position]]]:
    wanted, strict, position = state
    children = node._children()
    for key, below in wanted.items():
        child = children.get(key)
        if child is None:
            if strict:
                raise missing_key_error(node, key, get_path(position))
        elif below is None:
            target[key] = child
        elif not has_entries(child):
            if strict:
                raise KeyThroughLeafError(
                    f"{show_path(get_path(position, key))} has no entries; looked up {list(below)} in it"
                )
            if isinstance(below, RequestedKeys):
                target[key] = child
        else:
            yield key, child, (below, strict, (position, key))


def _make_plain_root(root: Core, node: Core, children: dict[str, Child]) -> Core:
    if node is root:
        return make_dense(children, root.batch_size, root.device, root._names)
    return node._with_children(children)


def parse_requested_keys(keys: Sequence[NestedKey] | None) -> KeyTree | None:
    """Convert an argument such as ``keys_to_update`` to a key tree; None means all keys."""
    if keys is None:
        return None
    if isinstance(keys, str):
        raise TypeError(f"keys_to_update is a sequence of keys; got the single key {keys!r}")
    return build_key_tree(keys, longest=False)


def filter_entries(source: Core | Mapping[Any, object], tree: KeyTree) -> Any:
    """Return the entries of a mapping or collection whose keys are in a key tree."""
    if isinstance(source, Core):
        return restrict(source, tree, False)
    kept: dict[object, object] = {}
    for key, value in source.items():
        first, *rest = unravel_key_to_tuple(key)
        below = tree.get(first, {})
        for part in rest:
            below = below and below.get(part, {})
        if below is None:
            kept[key] = value
        elif below and isinstance(value, (Core, Mapping)):
            kept[key] = filter_entries(value, below)
    return kept
