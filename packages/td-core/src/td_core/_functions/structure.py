"""Select, split, flatten and rename keys.

Operations on nested keys process one node at a time; see :mod:`.key_trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._tree.batch_sizes import fit_batch_size
from .._tree.defaults import get_entry, get_parent, show_path
from .._tree.dim_names import resize_names
from .._tree.key_trees import KeyTree, RequestedKeys, build_key_tree, restrict
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core
from .._tree.ragged import find_holders, list_distinct_members
from .._tree.views import is_leaf_or_value
from .._tree.walks import Position, get_path, has_entries, list_holders, list_state_nodes, map_levels, visit
from ..errors import KeyTakenError, StructureError
from ..typing import NO_DEFAULT, NestedKey
from .entries import set_missing

# Default for keys that are not in a key tree. It cannot be None, which marks a requested entry.
_UNWANTED: object = object()


def rebuild(node: Core, fill: Callable[..., dict[str, Child]], *args: object) -> Any:
    """Return a node with the entries ``fill(node, *args)``; for a lazy stack, a stack of such members."""
    if type(node._children()) is dict:
        return node._with_children(fill(node, *args))
    return node._map_members(lambda holder: holder._with_children(fill(holder, *args)))


def take_keys(source: Any, keys: Any, default: object, strict: bool) -> tuple[Any, KeyTree]:
    """Return the entries that one set of keys of ``split_keys`` selects, and the tree of these keys."""
    if not isinstance(keys, Mapping) and callable(keys):
        leaves = source.items(True, True)
        keys = [key for key, leaf in leaves if keys(unravel_key_to_tuple(key), leaf)]
    paths = [unravel_key_to_tuple(key) for key in keys]
    tree = build_key_tree(paths, longest=False)
    part = restrict(source, tree, strict)
    if default is not NO_DEFAULT:
        for path in paths:
            if path not in part.keys(True):
                set_missing(part, path, default)
    return part.rename_keys(keys, strict=False) if isinstance(keys, Mapping) else part, tree


def select_flat(keys: Sequence[Any], node: Core) -> object:
    children = node._children()
    return node._with_children({key: children[key] for key in keys})


def _find_shared_stack(root: Core, old: tuple[str, ...], new: tuple[str, ...]) -> int:
    """Return the depth of the first lazy stack below ``root`` that both key paths lead into; 0 if there is none."""
    node: Any = root
    for depth in range(1, min(len(old), len(new))):
        node = node._children().get(old[depth - 1])
        if old[:depth] != new[:depth] or node is None or not has_entries(node):
            break
        if node._members_and_dim() is not None:
            return depth
    return 0


def _get_movable(node: Core, old: tuple[str, ...], new: tuple[str, ...]) -> Child:
    """Return the entry to rename. Raise StructureError if it would leave a lazy stack of which only some members have it."""
    try:
        return get_entry(node, old)
    except KeyError:
        if not find_holders(node, old):
            raise
        raise StructureError(
            f"cannot rename {show_path(old)} to {show_path(new)}: only some members of a lazy stack have the entry, so "
            "it cannot leave that stack"
        ) from None


def rename_entry(node: Any, old: tuple[str, ...], new: tuple[str, ...]) -> None:
    """Rename an entry of a node, which is not a lazy stack."""
    if depth := _find_shared_stack(node, old, new):
        # Rename in the members of a nested lazy stack, since not all its entries can be read from it.
        get_entry(node, old[:depth]).rename_key_(old[depth:], new[depth:])  # type: ignore[union-attr]
        return
    entry, parent = _get_movable(node, old, new), get_parent(node, old)
    if old == new:
        return
    check_unlocked(parent, f"rename {show_path(old)}")
    if len(old) == len(new) == 1:  # the entry fits its level, and keeps its batch size
        node._set_child(new[0], entry)
        node._del_child(old[0])
        return
    if new[: len(old)] == old:
        # The old key is a prefix of the new one, so remove the entry before its new parent is created.
        try:
            parent._del_child(old[-1])
            node._set_path(new, entry)
        except BaseException:
            parent._set_child(old[-1], entry)
            raise
        return
    node._set_path(new, entry)
    parent._del_child(old[-1])


def rename_all(node: Core, moves: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], strict: bool) -> object:
    """Copy a node with renamed keys, see ``rename_keys``."""
    entries: dict[tuple[str, ...], Child] = {}
    moved: list[tuple[str, ...]] = []
    inside: dict[tuple[str, ...], dict[tuple[str, ...], tuple[str, ...]]] = {}
    for old, new in moves:
        if depth := _find_shared_stack(node, old, new):
            inside.setdefault(old[:depth], {})[old[depth:]] = new[depth:]
        elif strict or find_holders(node, old):
            entry = _get_movable(node, old, new)
            if new in entries:
                raise KeyTakenError(f"cannot rename: two entries would have one key in {dict(moves)!r}")
            entries[new] = entry if isinstance(entry, Tensor) else entry._shallow_copy()
            moved.append(old)
    result = copy_without(node, build_key_tree(moved, longest=False), prune=True)._shallow_copy()
    for path, renamed in inside.items():
        if path in result.keys(True):
            stack: Any = get_entry(result, path)
            result._set_path(path, stack.rename_keys(renamed, strict=strict))
    for new, entry in entries.items():
        if new in result.keys(True):
            raise KeyTakenError(f"cannot rename: there is an entry {show_path(new)} already")
        result._set_path(new, entry)
    return result


def copy_without(root: Core, tree: KeyTree, *, prune: bool) -> Any:
    """Copy ``root`` without the entries of ``tree``; ``prune`` drops nodes that became empty."""
    made = map_levels(root, _fill_rest, tree, _make_unless_empty if prune else None, by_member=True)
    return root._with_children({}) if made is None else made


def _fill_rest(
    node: Core, target: dict[str, Child], unwanted: KeyTree
) -> Iterator[tuple[str, Core, KeyTree]]:
    target.update(node._children())
    for key, below in unwanted.items():
        child = target.get(key)
        if child is None:
            continue
        if below is None:
            del target[key]
        elif has_entries(child):
            yield key, child, below


def _make_unless_empty(node: Core, children: dict[str, Child]) -> Core | None:
    return None if not children and node._children() else node._with_children(children)


def select_in_place(root: Core, tree: KeyTree) -> None:
    unwanted: list[tuple[Core, str]] = []

    def collect(level: Core, wanted: KeyTree) -> Iterator[tuple[object, KeyTree]]:
        for node in list_holders(level):
            for key in list(node._children()):
                below = wanted.get(key, _UNWANTED)
                if below is None:
                    continue
                child = None if below is _UNWANTED else node._get_child(key)
                if child is not None and has_entries(child):
                    yield child, below
                elif not isinstance(below, RequestedKeys):
                    unwanted.append((node, key))

    visit(collect, root, tree)
    _remove_all(unwanted)


def remove_in_place(root: Core, tree: KeyTree, *, prune: bool) -> None:
    levels: list[tuple[Core, KeyTree, Core | None, str]] = [(root, tree, None, "")]
    results: list[tuple[Core, str]] = []
    for level, unwanted, _, _ in levels:
        for node in list_holders(level):
            children = node._children()
            for key, below in unwanted.items():
                if key not in children:
                    continue
                if below is None:
                    results.append((node, key))
                    continue
                child = node._get_child(key)
                if has_entries(child) and not (prune and _is_empty_node(child)):
                    levels.append((child, below, node, key))
    _remove_all(results)
    if prune:
        drop_empty([(node, parent, key) for node, _, parent, key in levels])


def drop_empty(levels: list[tuple[Core, Core | None, str]]) -> None:
    """Remove nodes without entries from their parents, the deepest first."""
    for node, parent, key in reversed(levels):
        # A node with two keys may have been removed from this parent already.
        if parent is not None and _is_empty_node(node) and key in parent._children():
            check_unlocked(parent, f"remove the empty key {key!r}")
            parent._del_child(key)


def _remove_all(entries: list[tuple[Core, str]]) -> None:
    """Remove entries of nodes. Raise before the first removal if one of the nodes is locked."""
    for node, key in entries:
        check_unlocked(node, f"remove {show_path((key,))}")
    for node, key in entries:
        if key in node._children():  # a node that is a member twice is listed twice
            node._del_child(key)


def _is_empty_node(node: Core) -> bool:
    """Return True if a node has no entries; for a lazy stack, if no member has entries."""
    return not any(holder._children() for holder in list_holders(node))


def make_empty(root: Core, recurse: bool, batch_size: torch.Size | None = None, values: bool = True) -> Any:
    """Copy a collection without leaves; ``recurse`` keeps nested nodes, ``values`` also value nodes in them."""
    if batch_size is None:
        return root._map_members(
            lambda node: _fill_empty(node._with_children({}), node, recurse, None, values)
        )
    if has_entries(root):
        names = resize_names(root._names, len(batch_size))
        result: Core = root._with_children({}, batch_size=batch_size, names=names)
    else:
        result = root._with_children({})
        result._change_batch_size(batch_size)
    return _fill_empty(result, root, recurse, batch_size, values)


def _fill_empty(
    result: Core, node: Core, recurse: bool, batch_size: torch.Size | None, values: bool
) -> object:
    for key, child in _empty_entries(node, batch_size, values).items() if recurse else ():
        result._set_child(key, child)
    return result


def _empty_entries(root: Core, batch_size: torch.Size | None, values: bool) -> dict[str, Child]:
    def fill(
        node: Core, children: dict[str, Child], position: Position
    ) -> Iterator[tuple[str, Core, Position]]:
        for key in list(node._children()):
            child = node._peek_child(key)
            if has_entries(child):
                yield key, child, (position, key)
            elif values and not isinstance(child, Tensor) and not child._leaves():
                held: Any = node._get_child(key)  # of the class of ``child``
                children[key] = fit_batch_size(
                    held._shallow_copy(), batch_size or torch.Size(), get_path(position, key)
                )

    def make(node: Core, children: dict[str, Child]) -> object:
        if node is root:
            return children
        size = node.batch_size
        if batch_size is None or (size[: len(batch_size)] == batch_size and -1 not in size):
            return node._with_children(children)
        return node._with_children(children, batch_size=batch_size, names=None)

    entries: dict[str, Child] = map_levels(root, fill, None, make=make)
    return entries


def replace_all(root: Core, other: Core) -> None:
    """Replace the entries of a node by those of another; lazy stacks must have equally many members."""
    with root._edit_together(), restore_on_error(root):
        for node, source in root._zip_members(other):
            _refill(node, dict(source._children()))


@contextmanager
def restore_on_error(root: Core) -> Iterator[None]:
    """Restore the entries of every node if the ``with`` block raises."""
    # Save only nodes that hold entries: restoring a wrapper would wrap its entries again.
    nodes = [node._inner() for node in list_distinct_members(list_state_nodes(root))]
    levels = [node for node in nodes if has_entries(node)]
    before = [(node, dict(node._children())) for node in levels]
    try:
        yield
    except BaseException:  # restore the entries after KeyboardInterrupt too
        for node, entries in before:
            _refill(node, entries)
        raise


def _refill(node: Core, entries: dict[str, Child]) -> None:
    for key in list(node._children()):
        node._del_child(key)
    node._set_children(entries)


def _write_back(owner: Core, result: object) -> None:
    if owner._locked:
        owner.update_(result)
    else:
        owner.update(result)


def write_back_selection(owner: Core, result: Core, keys: tuple[NestedKey, ...]) -> None:
    _write_back(owner, result.select(*keys, strict=False))


def write_back_rest(owner: Core, result: Core) -> None:
    present = [key for key in result.keys(True, True, is_leaf_or_value) if key in owner.keys(True)]
    _write_back(owner, result.select(*present))


def write_back_flat(owner: Core, result: Any, separator: str) -> None:
    _write_back(owner, result.unflatten_keys(separator))


def write_back_deep(owner: Core, result: Any, separator: str) -> None:
    # Nested nodes of the owner stay nested, except for entries that came from its flat keys.
    keys = owner.keys()
    levels = [key for key in keys if not is_leaf_or_value(type(owner._peek_child(key)))]
    below = result.select(*levels, strict=False)
    paths = map(unravel_key_to_tuple, below.keys(True, True, is_leaf_or_value))
    taken = [path for path in paths if separator.join(path) in keys]
    _write_back(owner, below.exclude(*taken))
    for part in (below.select(*taken), result.exclude(*levels)):
        _write_back(owner, part.flatten_keys(separator))
