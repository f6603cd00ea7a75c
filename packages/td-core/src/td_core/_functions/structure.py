"""Select, split, flatten and rename keys.

Operations on nested keys process one node at a time; see :mod:`.key_trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from .._plans.plans import as_batch_size
from .._tree.batch_sizes import fit_batch_size
from .._tree.defaults import check_mapping, get_entry, get_parent, show_path
from .._tree.devices import as_device, set_device_labels
from .._tree.dim_names import check_names, resize_names
from .._tree.flat_keys import flatten_entries, unflatten_entries
from .._tree.key_trees import KeyTree, RequestedKeys, build_key_tree, restrict
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core, CoreT
from .._tree.ragged import find_holders, list_distinct_members
from .._tree.views import IsLeaf, is_leaf_or_value
from .._tree.walks import Position, get_path, has_entries, list_holders, list_state_nodes, map_levels, visit
from ..errors import KeyTakenError, StructureError
from ..typing import NO_DEFAULT, BatchSize, DeviceType, NestedKey, NoDefault
from .entries import set_missing
from .locking import undo_on_exit, write_back_on_exit

# Default for keys that are not in a key tree. It cannot be None, which marks a requested entry.
_UNWANTED: object = object()

_STRINGS = frozenset({str})


def select_entries(
    node: CoreT, keys: tuple[NestedKey, ...], inplace: bool, strict: bool, as_tensordict: bool
) -> CoreT:
    """Keep the entries under some keys, see ``select``."""
    if inplace:
        tree = build_key_tree(keys, longest=True)
        if strict:
            restrict(node, tree, True)
        check_unlocked(node, "select keys in place")
        with node._edit_together():
            _select_in_place(node, tree)
        return node
    result: CoreT | None = None
    children = node._children()
    if not as_tensordict and _STRINGS.issuperset(map(type, keys)):
        try:
            if type(children) is dict:
                result = node._with_children({key: children[key] for key in keys})  # type: ignore[misc]
            else:
                result = node._map_members(partial(_select_flat, keys))
        except KeyError:
            result = None  # the slow path raises with the existing keys
    if result is None:
        result = restrict(node, build_key_tree(keys, longest=True), strict, as_tensordict)
    return write_back_on_exit(result, node, _write_back_selection, keys)


def exclude_entries(node: CoreT, keys: tuple[NestedKey, ...], inplace: bool) -> CoreT:
    """Leave out the entries under some keys, see ``exclude``."""
    if inplace:
        check_unlocked(node, "exclude keys in place")
        with node._edit_together():
            _remove_in_place(node, build_key_tree(keys, longest=False), prune=False)
        return node
    result: CoreT
    children = node._children()
    if type(children) is dict and _STRINGS.issuperset(map(type, keys)):
        kept = dict(children)
        for key in keys:
            kept.pop(key, None)
        result = node._with_children(kept)
    else:
        result = _copy_without(node, build_key_tree(keys, longest=False), prune=False)
    return write_back_on_exit(result, node, _write_back_rest)


def split_entries(
    node: CoreT,
    key_sets: tuple[object, ...],
    inplace: bool,
    default: object,
    strict: bool,
    reproduce_struct: bool,
) -> tuple[CoreT, ...]:
    """Split the entries by sets of keys, see ``split_keys``."""
    if inplace:
        check_unlocked(node, "split keys in place")
    shells = [_copy_empty(node, True, values=False) for _ in key_sets] if reproduce_struct else []
    parts: list[Any] = []
    rest = node
    trees: list[KeyTree] = []
    default = NO_DEFAULT if default is None else default
    for keys in key_sets:
        part, tree = _take_keys(rest, keys, default, strict)
        rest = _copy_without(rest, tree, prune=not reproduce_struct)
        parts.append(part)
        trees.append(tree)
    if inplace:
        with node._edit_together():
            for tree in trees:
                _remove_in_place(node, tree, prune=not reproduce_struct)
        rest = node
    else:
        # Copy the nodes, so that setting an entry in one result changes no other collection.
        parts, rest = [part._shallow_copy() for part in parts], rest._shallow_copy()
    if reproduce_struct:
        parts = [shell.update(part) for shell, part in zip(shells, parts, strict=True)]
    return (*parts, rest)


def separate_entries(
    node: CoreT, keys: tuple[NestedKey, ...], default: object, strict: bool, filter_empty: bool
) -> CoreT:
    """Remove entries and return them as a new collection, see ``separates``."""
    check_unlocked(node, "separate keys")
    part, tree = _take_keys(node, keys, default, strict and default is NO_DEFAULT)
    result: CoreT = part._shallow_copy()
    with node._edit_together():
        _remove_in_place(node, tree, prune=filter_empty)
    return result


def remove_empty_levels(node: Core) -> None:
    """Remove nested nodes without entries, and then those that have become empty."""
    levels: list[tuple[Core, Core | None, str]] = [(node, None, "")]
    for level, _, _ in levels:
        for member in list_distinct_members([level]):
            levels.extend(
                (child, member, key) for key, child in dict(member._children()).items() if has_entries(child)
            )
    with node._edit_together(), restore_on_error(node):
        _drop_empty(levels)


def make_empty(
    node: CoreT,
    recurse: bool,
    batch_size: BatchSize | None,
    device: DeviceType | NoDefault | None,
    names: Sequence[str | None] | NoDefault | None,
) -> CoreT:
    """Make a collection of the same kind without entries, see ``empty``."""
    result: CoreT = _copy_empty(node, recurse, None if batch_size is None else as_batch_size(batch_size))
    if device is not NO_DEFAULT:
        set_device_labels(result, None if device is None else as_device(device))
    if names is not NO_DEFAULT:
        result._set_names(check_names(names, len(result.batch_size)))
    return result


def flatten_key_paths(node: CoreT, separator: str, inplace: bool, is_leaf: IsLeaf | None) -> CoreT:
    """Join key paths by a separator, see ``flatten_keys``."""
    if not isinstance(separator, str):
        raise TypeError(f"the separator is a string; got {separator!r}")
    if inplace:
        check_unlocked(node, "flatten the keys in place")
        _replace_all(node, _rebuild(node, flatten_entries, separator, is_leaf))
        return undo_on_exit(node, methodcaller("unflatten_keys", separator, inplace=True))
    result: CoreT = _rebuild(node, flatten_entries, separator, is_leaf)
    return write_back_on_exit(result, node, _write_back_flat, separator)


def split_flat_keys(node: CoreT, separator: str, inplace: bool) -> CoreT:
    """Split the keys of the root at a separator, see ``unflatten_keys``."""
    if not isinstance(separator, str) or not separator:
        raise TypeError(f"the separator is a non-empty string; got {separator!r}")
    if inplace:
        check_unlocked(node, "unflatten the keys in place")
        _replace_all(node, _rebuild(node, unflatten_entries, separator, False))
        return undo_on_exit(node, methodcaller("flatten_keys", separator, inplace=True))
    result: CoreT = _rebuild(node, unflatten_entries, separator, True)
    return write_back_on_exit(result, node, _write_back_deep, separator)


def rename_in_place(node: Core, old_key: NestedKey, new_key: NestedKey, safe: bool) -> None:
    """Rename an entry in a collection of any kind, see ``rename_key_``."""
    old, new = unravel_key_to_tuple(old_key), unravel_key_to_tuple(new_key)
    check_unlocked(node, f"rename {show_path(old)}")
    nodes = list_distinct_members([node])
    with node._edit_together(), restore_on_error(node) if len(nodes) > 1 else nullcontext():
        # An entry that only some members of a lazy stack have is renamed in those; if none has it, an error follows.
        is_plain = len(nodes) == 1 and not safe
        held = nodes if is_plain else _list_members_with(nodes, old)
        if held and safe and old != new and find_holders(node, new):
            raise KeyTakenError(f"cannot rename {show_path(old)}: there is an entry {show_path(new)} already")
        for member in held or nodes:
            _rename_entry(member, old, new)


def _list_members_with(nodes: list[Core], path: tuple[str, ...]) -> list[Core]:
    # Dynamo of torch 2.15 cannot trace a comprehension in a `with` statement of two contexts in Python 3.13.
    return [member for member in nodes if find_holders(member, path)]


def rename_entries(node: CoreT, mapping: Mapping[NestedKey, NestedKey], strict: bool) -> CoreT:
    """Copy a collection with renamed keys, see ``rename_keys``."""
    check_mapping("rename_keys", mapping)
    moves = [(unravel_key_to_tuple(old), unravel_key_to_tuple(new)) for old, new in mapping.items()]
    strict = strict and not all(find_holders(node, old) for old, _ in moves)
    result: CoreT = node._map_members(lambda holder: _rename_all(holder, moves, strict))
    return result


def _rebuild(node: Core, fill: Callable[..., dict[str, Child]], *args: object) -> Any:
    """Return a node with the entries ``fill(node, *args)``; for a lazy stack, a stack of such members."""
    if type(node._children()) is dict:
        return node._with_children(fill(node, *args))
    return node._map_members(lambda holder: holder._with_children(fill(holder, *args)))


def _take_keys(source: Core, keys: Any, default: object, strict: bool) -> tuple[Any, KeyTree]:
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


def _select_flat(keys: Sequence[Any], node: Core) -> object:
    """Return a node with only some of its direct entries."""
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


def _rename_entry(node: Core, old: tuple[str, ...], new: tuple[str, ...]) -> None:
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


def _rename_all(node: Core, moves: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], strict: bool) -> object:
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
    result = _copy_without(node, build_key_tree(moved, longest=False), prune=True)._shallow_copy()
    for path, renamed in inside.items():
        if path in result.keys(True):
            stack: Any = get_entry(result, path)
            result._set_path(path, stack.rename_keys(renamed, strict=strict))
    for new, entry in entries.items():
        if new in result.keys(True):
            raise KeyTakenError(f"cannot rename: there is an entry {show_path(new)} already")
        result._set_path(new, entry)
    return result


def _copy_without(root: Core, tree: KeyTree, *, prune: bool) -> Any:
    """Copy ``root`` without the entries of ``tree``; ``prune`` drops nodes that became empty."""
    made = map_levels(root, _fill_rest, tree, _make_unless_empty if prune else None, by_member=True)
    return root._with_children({}) if made is None else made


def _fill_rest(
    node: Core, target: dict[str, Child], unwanted: KeyTree
) -> Iterator[tuple[str, Core, KeyTree]]:
    """Add the entries of a node that are not in the tree, and yield the nodes of which some entries are."""
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
    """Return a copy of a node, or None if it has become empty."""
    return None if not children and node._children() else node._with_children(children)


def _select_in_place(root: Core, tree: KeyTree) -> None:
    """Remove the entries of a collection that are not in the tree."""
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


def _remove_in_place(root: Core, tree: KeyTree, *, prune: bool) -> None:
    """Remove the entries of the tree from a collection; ``prune`` also removes nodes that became empty."""
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
        _drop_empty([(node, parent, key) for node, _, parent, key in levels])


def _drop_empty(levels: list[tuple[Core, Core | None, str]]) -> None:
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


def _copy_empty(root: Core, recurse: bool, batch_size: torch.Size | None = None, values: bool = True) -> Any:
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
    """Add the empty nested nodes of a node to its empty copy, if ``recurse``."""
    for key, child in _make_empty_entries(node, batch_size, values).items() if recurse else ():
        result._set_child(key, child)
    return result


def _make_empty_entries(root: Core, batch_size: torch.Size | None, values: bool) -> dict[str, Child]:
    """Return copies of the nested nodes of a collection, without leaves."""

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

    def make(node: Core, children: dict[str, Child]) -> Any:
        if node is root:
            return children
        size = node.batch_size
        if batch_size is None or (size[: len(batch_size)] == batch_size and -1 not in size):
            return node._with_children(children)
        return node._with_children(children, batch_size=batch_size, names=None)

    return map_levels(root, fill, None, make=make)


def _replace_all(root: Core, other: Core) -> None:
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
    """Replace the entries of a node."""
    for key in list(node._children()):
        node._del_child(key)
    node._set_children(entries)


def _write_back(owner: Core, result: object) -> None:
    """Write the entries of a result to its source, in place if that is locked."""
    if owner._locked:
        owner.update_(result)
    else:
        owner.update(result)


def _write_back_selection(owner: Core, result: Core, keys: tuple[NestedKey, ...]) -> None:
    """Write the selected entries back."""
    _write_back(owner, result.select(*keys, strict=False))


def _write_back_rest(owner: Core, result: Core) -> None:
    """Write the entries back that were not excluded and that the source has."""
    present = [key for key in result.keys(True, True, is_leaf_or_value) if key in owner.keys(True)]
    _write_back(owner, result.select(*present))


def _write_back_flat(owner: Core, result: Core, separator: str) -> None:
    """Write entries under flat keys back under nested keys, or where the owner has a flat key, under this."""
    keys = {key for holder in list_holders(owner) for key in holder._children()}
    kept = [key for key in keys if separator in key]
    if kept:
        _write_back(owner, result.select(*kept, strict=False))
        result = result.exclude(*kept)
    _write_back(owner, result.unflatten_keys(separator))


def _write_back_deep(owner: Core, result: Core, separator: str) -> None:
    """Write entries under nested keys back; those that came from flat keys, under these."""
    # Nested nodes of the owner stay nested, except for entries that came from its flat keys.
    keys = owner.keys()
    levels = [key for key in keys if not is_leaf_or_value(type(owner._peek_child(key)))]
    below = result.select(*levels, strict=False)
    paths = map(unravel_key_to_tuple, below.keys(True, True, is_leaf_or_value))
    taken = [path for path in paths if separator.join(path) in keys]
    _write_back(owner, below.exclude(*taken))
    for part in (below.select(*taken), result.exclude(*levels)):
        _write_back(owner, part.flatten_keys(separator))
