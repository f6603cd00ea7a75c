"""Methods on keys, such as ``select``, ``exclude``, ``split_keys``, ``flatten_keys`` and ``rename_key_``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._functions.structure import (
    exclude_entries,
    flatten_key_paths,
    make_empty,
    remove_empty_levels,
    rename_entries,
    rename_in_place,
    select_entries,
    separate_entries,
    split_entries,
    split_flat_keys,
)
from .._tree.node import Core
from .._tree.views import IsLeaf
from ..typing import NO_DEFAULT, BatchSize, NestedKey

if TYPE_CHECKING:
    from typing_extensions import Self


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
        return select_entries(self, keys, inplace, strict, as_tensordict)

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
        return exclude_entries(self, keys, inplace)

    def split_keys(
        self,
        *key_sets: Iterable[NestedKey] | Mapping[NestedKey, NestedKey] | Callable[[Any, Tensor], object],
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
        return split_entries(self, key_sets, inplace, default, strict, reproduce_struct)

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
        return separate_entries(self, keys, default, strict, filter_empty)

    def filter_empty_(self) -> Self:
        """Remove nested collections without entries, and then those that have become empty.

        >>> list(TensorDict({"a": {"b": {}}, "c": 1}).filter_empty_().keys())
        ['c']
        """
        remove_empty_levels(self)
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
        return make_empty(self, recurse, batch_size, device, names)

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
        return flatten_key_paths(self, separator, inplace, is_leaf)

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
        return split_flat_keys(self, separator, inplace)

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
        rename_in_place(self, old_key, new_key, safe)
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
        return rename_entries(self, mapping, strict)
