"""Select, split, flatten and rename keys.

Operations on nested keys process one node at a time; see :mod:`.key_trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._plans.plans import as_batch_size
from .._tree.batch_sizes import fit_batch_size
from .._tree.defaults import get_entry, get_parent, show_path
from .._tree.devices import as_device, set_device_labels
from .._tree.dim_names import check_names, resize_names
from .._tree.flat_keys import flatten_entries, unflatten_entries
from .._tree.key_trees import KeyTree, RequestedKeys, build_key_tree, restrict
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core
from .._tree.ragged import find_holders, list_distinct_members
from .._tree.views import IsLeaf, is_leaf_or_value
from .._tree.walks import Position, get_path, has_entries, list_holders, list_state_nodes, map_levels, visit
from ..errors import KeyTakenError, StructureError
from ..typing import NO_DEFAULT, BatchSize, NestedKey
from .entries import set_missing
from .locking import undo_on_exit, write_back_on_exit
from .update import UpdateMixin

if TYPE_CHECKING:
    from typing_extensions import Self


_STRINGS = frozenset({str})

# Default for keys that are not in a key tree. It cannot be None, which marks a requested entry.
_UNWANTED: object = object()


class StructureMixin(UpdateMixin):
    """Methods on keys, such as ``select``, ``exclude``, ``split_keys``, ``flatten_keys`` and ``rename_key_``."""

    __slots__ = ()

    def select(
        self, *keys: NestedKey, inplace: bool = False, strict: bool = True, as_tensordict: bool = False
    ) -> Self:
        """Return a collection with only these entries; leaves are shared.

        In ``with td.select("a") as part:``, changes of these entries are written back on exit.

        Args:
            *keys: the entries to keep, in the order of the result; with a key and its prefix, only the longer key counts.
            inplace: remove the other entries from this collection instead.
            strict: raise if a key is missing; otherwise skip it.
            as_tensordict: return a TensorDict, also from a class with declared fields.

        Raises:
            KeyPathError: a key is missing.
            LockedError: ``inplace`` on a locked collection.

        >>> td = TensorDict({"a": 1, "b": {"c": 2, "d": 3}})
        >>> td.select("a", ("b", "c"))
        TensorDict(batch_size=[], fields={a: i64[], b: {c: i64[]}})
        """
        if inplace:
            tree = build_key_tree(keys, longest=True)
            if strict:
                restrict(self, tree, True)
            check_unlocked(self, "select keys in place")
            with self._edit_together():
                _select_in_place(self, tree)
            return self
        result: Self | None = None
        children = self._children()
        if not as_tensordict and _STRINGS.issuperset(map(type, keys)):
            try:
                if type(children) is dict:
                    result = self._with_children({key: children[key] for key in keys})  # type: ignore[misc]
                else:
                    result = self._map_members(partial(_select_flat, keys))
            except KeyError:
                result = None  # the slow path raises with the existing keys
        if result is None:
            result = restrict(self, build_key_tree(keys, longest=True), strict, as_tensordict)
        return write_back_on_exit(result, self, _write_back_selection, keys)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """Return a collection without these entries; leaves are shared, missing keys are skipped.

        In ``with td.exclude("a") as part:``, changes of the other entries are written back on exit.

        Args:
            *keys: the entries to exclude.
            inplace: remove them from this collection instead.

        Raises:
            LockedError: ``inplace`` on a locked collection.

        >>> TensorDict({"a": 1, "b": {"c": 2, "d": 3}}).exclude("a", ("b", "c"))
        TensorDict(batch_size=[], fields={b: {d: i64[]}})
        """
        if inplace:
            check_unlocked(self, "exclude keys in place")
            with self._edit_together():
                _remove_in_place(self, build_key_tree(keys, longest=False), prune=False)
            return self
        result: Self
        children = self._children()
        if type(children) is dict and _STRINGS.issuperset(map(type, keys)):
            kept = dict(children)
            for key in keys:
                kept.pop(key, None)
            result = self._with_children(kept)
        else:
            result = _copy_without(self, build_key_tree(keys, longest=False), prune=False)
        return write_back_on_exit(result, self, _write_back_rest)

    def split_keys(
        self,
        *key_sets: Iterable[NestedKey] | Mapping[NestedKey, NestedKey] | Callable[[Any, Tensor], Any],
        inplace: bool = False,
        default: object = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Split the entries into one collection per set of keys, and one with the remaining entries; leaves are shared.

        Args:
            *key_sets: sequences or sets of keys; mappings from keys to the keys of the result; or predicates of a key (a
                tuple of strings) and its leaf. An entry belongs to at most one set.
            inplace: keep the remaining entries in this collection, instead of a new one.
            default: the value of a missing entry if ``strict`` is False; without it, or with None, the entry is skipped.
            strict: raise if a key is missing.
            reproduce_struct: give every result all nested collections of this one, possibly empty.

        Raises:
            KeyPathError: a key is missing, or is also in an earlier set.

        >>> a, z, rest = TensorDict({"a": 1, "b": 2, "c": 3}).split_keys(["a"], {"b": "z"})
        >>> list(a.keys()), list(z.keys()), list(rest.keys())
        (['a'], ['z'], ['c'])
        """
        if inplace:
            check_unlocked(self, "split keys in place")
        shells = [_make_empty(self, True, values=False) for _ in key_sets] if reproduce_struct else []
        parts: list[Any] = []
        rest = self
        trees: list[KeyTree] = []
        default = NO_DEFAULT if default is None else default
        for keys in key_sets:
            part, tree = _take_keys(rest, keys, default, strict)
            rest = _copy_without(rest, tree, prune=not reproduce_struct)
            parts.append(part)
            trees.append(tree)
        if inplace:
            with self._edit_together():
                for tree in trees:
                    _remove_in_place(self, tree, prune=not reproduce_struct)
            rest = self
        else:
            # Copy the nodes, so that setting an entry in one result changes no other collection.
            parts, rest = [part._shallow_copy() for part in parts], rest._shallow_copy()
        if reproduce_struct:
            parts = [shell.update(part) for shell, part in zip(shells, parts, strict=True)]
        return (*parts, rest)

    def separates(
        self,
        *keys: NestedKey,
        default: object = NO_DEFAULT,
        strict: bool = True,
        filter_empty: bool = True,
    ) -> Self:
        """Remove these entries and return them as a new collection.

        Args:
            *keys: the entries to move.
            default: the value of a missing entry.
            strict: without a default, raise if a key is missing.
            filter_empty: remove nested collections that became empty.

        Raises:
            KeyPathError: a key is missing.
            LockedError: the collection is locked.

        >>> td = TensorDict({"a": 1, "b": 2})
        >>> td.separates("a"), td
        (TensorDict(batch_size=[], fields={a: i64[]}), TensorDict(batch_size=[], fields={b: i64[]}))
        """
        check_unlocked(self, "separate keys")
        part, tree = _take_keys(self, keys, default, strict and default is NO_DEFAULT)
        result: Self = part._shallow_copy()
        with self._edit_together():
            _remove_in_place(self, tree, prune=filter_empty)
        return result

    def filter_empty_(self) -> Self:
        """Remove nested collections without entries, and then those that have become empty.

        >>> list(TensorDict({"a": {"b": {}}, "c": 1}).filter_empty_().keys())
        ['c']
        """
        levels: list[tuple[Core, Core | None, str]] = [(self, None, "")]
        for level, _, _ in levels:
            for node in list_distinct_members([level]):
                levels.extend(
                    (child, node, key) for key, child in dict(node._children()).items() if has_entries(child)
                )
        with self._edit_together(), restore_on_error(self):
            _drop_empty(levels)
        return self

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: BatchSize | None = None,
        device: Any = NO_DEFAULT,
        names: Any = NO_DEFAULT,
    ) -> Self:
        """Return a collection of the same kind without entries.

        Args:
            recurse: keep nested collections, without their tensors, and non-tensor values.
            batch_size: the batch size of the result; that of this collection by default.
            device: the device of the result; that of this collection by default.
            names: the dim names of the result; those of this collection by default.

        Raises:
            BatchSizeError: ``batch_size`` does not fit a NonTensorStack, which has one value per element.

        >>> TensorDict({"a": 1, "b": {"c": 2}}, batch_size=[]).empty(recurse=True)
        TensorDict(batch_size=[], fields={b: {}})
        """
        result: Self = _make_empty(self, recurse, None if batch_size is None else as_batch_size(batch_size))
        if device is not NO_DEFAULT:
            set_device_labels(result, None if device is None else as_device(device))
        if names is not NO_DEFAULT:
            result._set_names(check_names(names, len(result.batch_size)))
        return result

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None
    ) -> Self:
        """Return a collection without nested collections, whose keys are key paths joined by ``separator``.

        Empty nested collections are dropped. In ``with td.flatten_keys() as flat:``, changes, including new keys, are
        written back on exit.

        Args:
            separator: the string between the parts of a key.
            inplace: change this collection instead.
            is_leaf: a predicate of a class; nested collections for whose class it is True are not flattened.

        Raises:
            KeyTakenError: two entries would have the same key.
            LockedError: ``inplace`` on a locked collection.

        >>> TensorDict({"a": {"b": 1}, "c": 2}).flatten_keys()
        TensorDict(batch_size=[], fields={a.b: i64[], c: i64[]})
        """
        if not isinstance(separator, str):
            raise TypeError(f"the separator is a string; got {separator!r}")
        if inplace:
            check_unlocked(self, "flatten the keys in place")
            _replace_all(self, self.flatten_keys(separator, is_leaf=is_leaf))
            return undo_on_exit(self, methodcaller("unflatten_keys", separator, inplace=True))
        result: Self = _rebuild(self, flatten_entries, separator, is_leaf)
        return write_back_on_exit(result, self, _write_back_flat, separator)

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Return a collection whose keys are split at ``separator`` into nested keys.

        Only keys of the root are split. In ``with td.unflatten_keys() as nested:``, changes, including new keys, are
        written back on exit.

        Args:
            separator: the string at which keys are split.
            inplace: change this collection instead.

        Raises:
            KeyTakenError: two entries would have the same key, or one key would be a prefix of another.
            LockedError: ``inplace`` on a locked collection.

        >>> TensorDict({"a.b": 1, "c": 2}).unflatten_keys()
        TensorDict(batch_size=[], fields={a: {b: i64[]}, c: i64[]})
        """
        if not isinstance(separator, str) or not separator:
            raise TypeError(f"the separator is a non-empty string; got {separator!r}")
        if inplace:
            check_unlocked(self, "unflatten the keys in place")
            _replace_all(self, _rebuild(self, unflatten_entries, separator, False))
            return undo_on_exit(self, methodcaller("flatten_keys", separator, inplace=True))
        result: Self = _rebuild(self, unflatten_entries, separator, True)
        return write_back_on_exit(result, self, _write_back_deep, separator)

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        """Rename a key in place; the entry becomes the last one of its collection.

        Args:
            old_key: the key of the entry.
            new_key: its new key; an entry under this key is replaced.
            safe: raise if ``new_key`` exists.

        Raises:
            KeyPathError: ``old_key`` is missing.
            KeyTakenError: ``safe`` is True and ``new_key`` exists.
            LockedError: the collection is locked.

        >>> list(TensorDict({"a": 1, "b": 2}).rename_key_("a", "c").keys())
        ['b', 'c']
        """
        if not self._locked and type(old_key) is str and type(new_key) is str:
            children = self._children()
            if (
                type(children) is dict
                and old_key in children
                and old_key != new_key
                and not (safe and new_key in children)
                and self._inner()._schema.is_in_memory
            ):
                self._set_child(new_key, children[old_key])
                self._del_child(old_key)
                return self
        old, new = unravel_key_to_tuple(old_key), unravel_key_to_tuple(new_key)
        check_unlocked(self, f"rename {show_path(old)}")
        nodes = list_distinct_members([self])
        with self._edit_together(), restore_on_error(self) if len(nodes) > 1 else nullcontext():
            # An entry that only some members of a lazy stack have is renamed in those; if none has it, an error follows.
            is_plain = len(nodes) == 1 and not safe
            held = nodes if is_plain else [node for node in nodes if find_holders(node, old)]
            if held and safe and old != new and find_holders(self, new):
                raise KeyTakenError(
                    f"cannot rename {show_path(old)}: there is an entry {show_path(new)} already"
                )
            for node in held or nodes:
                _rename_entry(node, old, new)
        return self

    def rename_keys(self, mapping: Mapping[NestedKey, NestedKey], *, strict: bool = True) -> Self:
        """Return a collection with renamed keys, all renamed at once, so that keys can be swapped; leaves are shared.

        A nested collection that becomes empty is dropped.

        Args:
            mapping: old key -> new key; renamed entries become the last ones of their collection.
            strict: raise if an old key is missing; otherwise skip it.

        Raises:
            KeyPathError: an old key is missing.
            KeyTakenError: two entries would have the same key.

        >>> td = TensorDict({"a": 1, "b": 2}).rename_keys({"a": "b", "b": "a"})
        >>> td["a"], td["b"]
        (tensor(2), tensor(1))
        """
        moves = [(unravel_key_to_tuple(old), unravel_key_to_tuple(new)) for old, new in mapping.items()]
        strict = strict and not all(find_holders(self, old) for old, _ in moves)
        result: Self = self._map_members(lambda node: _rename_all(node, moves, strict))
        return result


def _rebuild(node: Core, fill: Callable[..., dict[str, Child]], *args: object) -> Any:
    """Return a node with the entries ``fill(node, *args)``; for a lazy stack, a stack of such members."""
    if type(node._children()) is dict:
        return node._with_children(fill(node, *args))
    return node._map_members(lambda holder: holder._with_children(fill(holder, *args)))


def _take_keys(source: Any, keys: Any, default: object, strict: bool) -> tuple[Any, KeyTree]:
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


def _rename_entry(node: Any, old: tuple[str, ...], new: tuple[str, ...]) -> None:
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


def _select_in_place(root: Core, tree: KeyTree) -> None:
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


def _make_empty(root: Core, recurse: bool, batch_size: torch.Size | None = None, values: bool = True) -> Any:
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
    for key in list(node._children()):
        node._del_child(key)
    node._set_children(entries)


def _write_back(owner: Core, result: object) -> None:
    if owner._locked:
        owner.update_(result)
    else:
        owner.update(result)


def _write_back_selection(owner: Core, result: Core, keys: tuple[NestedKey, ...]) -> None:
    _write_back(owner, result.select(*keys, strict=False))


def _write_back_rest(owner: Core, result: Core) -> None:
    present = [key for key in result.keys(True, True, is_leaf_or_value) if key in owner.keys(True)]
    _write_back(owner, result.select(*present))


def _write_back_flat(owner: Core, result: Any, separator: str) -> None:
    _write_back(owner, result.unflatten_keys(separator))


def _write_back_deep(owner: Core, result: Any, separator: str) -> None:
    # Nested nodes of the owner stay nested, except for entries that came from its flat keys.
    keys = owner.keys()
    levels = [key for key in keys if not is_leaf_or_value(type(owner._peek_child(key)))]
    below = result.select(*levels, strict=False)
    paths = map(unravel_key_to_tuple, below.keys(True, True, is_leaf_or_value))
    taken = [path for path in paths if separator.join(path) in keys]
    _write_back(owner, below.exclude(*taken))
    for part in (below.select(*taken), result.exclude(*levels)):
        _write_back(owner, part.flatten_keys(separator))
