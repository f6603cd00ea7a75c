"""Methods on keys, such as ``select``, ``exclude``, ``split_keys``, ``flatten_keys`` and ``rename_key_``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._functions.locking import undo_on_exit, write_back_on_exit
from .._functions.structure import (
    copy_without,
    drop_empty,
    make_empty,
    rebuild,
    remove_in_place,
    rename_all,
    rename_entry,
    replace_all,
    restore_on_error,
    select_flat,
    select_in_place,
    take_keys,
    write_back_deep,
    write_back_flat,
    write_back_rest,
    write_back_selection,
)
from .._plans.plans import as_batch_size
from .._tree.defaults import show_path
from .._tree.devices import as_device, set_device_labels
from .._tree.dim_names import check_names
from .._tree.flat_keys import flatten_entries, unflatten_entries
from .._tree.key_trees import KeyTree, build_key_tree, restrict
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Core
from .._tree.ragged import find_holders, list_distinct_members
from .._tree.views import IsLeaf
from .._tree.walks import has_entries
from ..errors import KeyTakenError
from ..typing import NO_DEFAULT, BatchSize, NestedKey

if TYPE_CHECKING:
    from typing_extensions import Self


_STRINGS = frozenset({str})


class StructureMixin(Core):
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
                select_in_place(self, tree)
            return self
        result: Self | None = None
        children = self._children()
        if not as_tensordict and _STRINGS.issuperset(map(type, keys)):
            try:
                if type(children) is dict:
                    result = self._with_children({key: children[key] for key in keys})  # type: ignore[misc]
                else:
                    result = self._map_members(partial(select_flat, keys))
            except KeyError:
                result = None  # the slow path raises with the existing keys
        if result is None:
            result = restrict(self, build_key_tree(keys, longest=True), strict, as_tensordict)
        return write_back_on_exit(result, self, write_back_selection, keys)

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
                remove_in_place(self, build_key_tree(keys, longest=False), prune=False)
            return self
        result: Self
        children = self._children()
        if type(children) is dict and _STRINGS.issuperset(map(type, keys)):
            kept = dict(children)
            for key in keys:
                kept.pop(key, None)
            result = self._with_children(kept)
        else:
            result = copy_without(self, build_key_tree(keys, longest=False), prune=False)
        return write_back_on_exit(result, self, write_back_rest)

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
        shells = [make_empty(self, True, values=False) for _ in key_sets] if reproduce_struct else []
        parts: list[Any] = []
        rest = self
        trees: list[KeyTree] = []
        default = NO_DEFAULT if default is None else default
        for keys in key_sets:
            part, tree = take_keys(rest, keys, default, strict)
            rest = copy_without(rest, tree, prune=not reproduce_struct)
            parts.append(part)
            trees.append(tree)
        if inplace:
            with self._edit_together():
                for tree in trees:
                    remove_in_place(self, tree, prune=not reproduce_struct)
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
        part, tree = take_keys(self, keys, default, strict and default is NO_DEFAULT)
        result: Self = part._shallow_copy()
        with self._edit_together():
            remove_in_place(self, tree, prune=filter_empty)
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
            drop_empty(levels)
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
        result: Self = make_empty(self, recurse, None if batch_size is None else as_batch_size(batch_size))
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
            replace_all(self, self.flatten_keys(separator, is_leaf=is_leaf))
            return undo_on_exit(self, methodcaller("unflatten_keys", separator, inplace=True))
        result: Self = rebuild(self, flatten_entries, separator, is_leaf)
        return write_back_on_exit(result, self, write_back_flat, separator)

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
            replace_all(self, rebuild(self, unflatten_entries, separator, False))
            return undo_on_exit(self, methodcaller("flatten_keys", separator, inplace=True))
        result: Self = rebuild(self, unflatten_entries, separator, True)
        return write_back_on_exit(result, self, write_back_deep, separator)

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
                rename_entry(node, old, new)
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
        result: Self = self._map_members(lambda node: rename_all(node, moves, strict))
        return result
