"""Access to entries by key: ``td["a"]``, ``td["a", "b"]``, ``get``, ``set``, ``pop`` and related methods."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .._functions.entries import (
    NOT_GIVEN,
    coerce_for,
    find_last_key,
    get_default,
    get_in_form,
    iter_rows,
    missing_length_error,
    missing_rows_error,
    name_parents,
    parse_get_options,
    pop_entry,
    remove_all_entries,
    remove_entry,
    set_missing,
    set_new,
    set_rows,
    write_held_entry,
)
from .._python.settings import RULES
from .._tree.coerce import build_nested
from .._tree.defaults import check_cycle, get_entry, show_path, unwrap_entry
from .._tree.dim_names import take_names
from .._tree.keys import is_key, unravel_key_below, unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core
from .._tree.views import (
    CollectionItems,
    CollectionKeys,
    CollectionValues,
    IsLeaf,
    LevelKeys,
    has_plain_entries,
)
from .._tree.walks import has_entries
from ..errors import KeyPathError, KeyThroughLeafError, StructureError
from ..typing import NO_DEFAULT, NestedKey

if TYPE_CHECKING:
    from typing_extensions import Self


class EntryMixin(Core):
    """Access to entries by key: ``td["a"]``, ``td["a", "b"]``, ``get``, ``set``, ``pop`` and related methods."""

    __slots__ = ()

    def get(self, key: NestedKey, *args: object, **kwargs: object) -> Any:
        """Return the entry ``key``, or a default if it is missing.

        Args:
            key: a string or nested tuple of strings.
            *args: the default; None if omitted (see ``set_get_defaults_to_none``); with NO_DEFAULT, a missing key raises.
            **kwargs: ``default=``, or for an entry of a lazy stack the form of the result: ``as_list=True``,
                ``as_nested_tensor=True`` (with ``layout``) or ``as_padded_tensor=True`` (with ``padding_value`` and
                ``padding_side``). ``as_padded_tensor`` also applies to entries that are nested tensors.

        Raises:
            KeyPathError: ``key`` is not a string or a nested tuple of strings, or is missing and the default is NO_DEFAULT.

        >>> td = TensorDict({"a": {"b": 1}})
        >>> td.get(("a", "b")), td.get("c"), td.get("c", 0)
        (tensor(1), None, 0)
        """
        default = NOT_GIVEN
        if args or kwargs:
            default, form = parse_get_options(args, kwargs)
            if form:
                return get_in_form(self, key, None if default is NOT_GIVEN else default, form)
        node: Child = self
        for part in (key,) if type(key) is str else unravel_key_to_tuple(key):
            if isinstance(node, Tensor):
                break
            try:
                node = node._get_child(part)
            except KeyError:
                break
        else:
            return unwrap_entry(node)
        return get_default(self, key, default)

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: object) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        """Return an entry by key, the collection of the entries in a list of keys, or index all along the batch dims.

        Raises:
            KeyPathError: the key is missing; the message lists similar keys.
            CollectionIndexError: the index is not valid for the batch dims.

        >>> td = TensorDict({"a": torch.arange(6).view(2, 3)}, batch_size=[2])
        >>> td[1]["a"]
        tensor([3, 4, 5])
        """
        if is_key(index):
            entry = get_entry(self, (index,) if type(index) is str else unravel_key_to_tuple(index))
            return entry._unwrap() if isinstance(entry, Core) else entry
        if type(index) is list and index and all(map(is_key, index)):
            return self.select(*index)
        return self._index(index)

    def set(
        self,
        key: NestedKey,
        item: object,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        **kwargs: object,
    ) -> Self:
        """Store an entry, and create missing nodes along its key path.

        Args:
            key: a string or nested tuple of strings.
            item: a tensor whose leading dims are the batch size, a collection, a mapping, a number, an array, or
                any other value that a registered coercer accepts.
            inplace: if the entry exists, copy the value into it.
            non_blocking: as in :meth:`torch.Tensor.to`, if the value is copied to another device.
            **kwargs: reserved for subclasses; TypeError if given.

        Raises:
            BatchSizeError: the shape of the item does not start with the batch size.
            LockedError: the collection is locked, and the call does not copy into an existing entry.

        >>> TensorDict().set(("a", "b"), torch.ones(2))["a", "b"]
        tensor([1., 1.])
        """
        if kwargs:
            raise TypeError(f"set() takes no {', '.join(kwargs)}")
        if inplace and key in self:
            return self.set_(key, item, non_blocking=non_blocking)
        self._set_path(key, item, non_blocking=non_blocking)
        return self

    def __setitem__(self, index: Any, value: object) -> None:
        """Store an entry by key, or write ``value`` into all entries at an index."""
        if is_key(index):
            self._set_path(index, value)
        else:
            self._assign(index, value)

    def _set_path(
        self, key: NestedKey, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        """Check ``value``, then store it under ``key``; ``prefix`` is the key path of this node, for messages."""
        if type(key) is str:
            if self._locked:
                check_unlocked(self, f"set {show_path((*prefix, key))}")
            if type(value) in (list, tuple) and set_rows(self, (key,), value, prefix, non_blocking):
                return
            entry = coerce_for(self, value, (*prefix, key), non_blocking)
            if isinstance(entry, Tensor):
                self._set_child(key, entry)
                return
            check_cycle(self, entry, (*prefix, key))
            self._set_child(key, entry)
            if entry._names is not None:
                take_names(self, entry)
            return
        path = unravel_key_below(prefix, key)
        node: Core = self
        above: list[Core] = []
        for depth, part in enumerate(path[:-1]):
            try:
                child = node._get_writable(part)
            except KeyError:
                set_new(node, path[depth:], value, prefix + path[:depth], non_blocking)
                name_parents(above, node)
                return
            if not has_entries(child):
                raise KeyThroughLeafError(
                    f"{show_path(prefix + path[: depth + 1])} is not a collection, so {show_path(prefix + path)} cannot be set"
                )
            above.append(node)
            node = child
        node._set_path(path[-1], value, prefix + path[:-1], non_blocking=non_blocking)
        if node._names is not None and not isinstance(node._peek_child(path[-1]), Tensor):
            name_parents(above, node)

    def set_(self, key: NestedKey, item: object, *, non_blocking: bool = False) -> Self:
        """Copy a value into an existing entry, in place; allowed on a locked collection.

        Raises:
            KeyPathError: the entry does not exist.
            BatchSizeError: the shape of the value does not start with the batch size.
            StructureError: the value cannot be copied into the entry: its kind or shape differs.

        >>> td = TensorDict({"a": torch.zeros(2)}).lock_()
        >>> td.set_("a", torch.ones(2))["a"]
        tensor([1., 1.])
        """
        write_held_entry(self, unravel_key_to_tuple(key), item, non_blocking)
        return self

    def setdefault(self, key: NestedKey, default: object, inplace: bool = False) -> Any:
        """Return the entry ``key``; if it is missing, store ``default`` first, in a lazy stack in the members that lack it.

        ``inplace`` has no effect: only a missing entry is written.

        >>> TensorDict().setdefault("a", 1)
        tensor(1)
        """
        if key not in self:
            set_missing(self, unravel_key_to_tuple(key), default)
        return self.get(key)

    def del_(self, key: NestedKey) -> Self:
        """Remove an entry; from a lazy stack also one that only some members have.

        Raises:
            KeyPathError: the key is missing.
            LockedError: the collection is locked.

        >>> list(TensorDict({"a": 1, "b": 2}).del_("a").keys())
        ['b']
        """
        remove_entry(self, unravel_key_to_tuple(key))
        return self

    def __delitem__(self, key: NestedKey) -> None:
        """Remove an entry: ``del td[key]`` is ``td.del_(key)``."""
        if not is_key(key):
            raise KeyPathError(f"only keys can be deleted, not the index {key!r}")
        self.del_(key)

    def pop(self, key: NestedKey, default: object = NO_DEFAULT) -> Any:
        """Remove an entry and return it, or return the default if it is missing.

        A value that is not a tensor is returned as its node, as by ``get``. An entry that only some members of a lazy stack
        have is returned as a list: for each member its entry, or the default (None if it is not given).

        Raises:
            KeyPathError: the key is missing, and ``default`` is not given.

        >>> TensorDict({"a": 1}).pop("a")
        tensor(1)
        """
        return pop_entry(self, unravel_key_to_tuple(key), default)

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry and return its key and value.

        Raises:
            KeyPathError: the collection has no entries.

        >>> TensorDict({"a": 1}).popitem()
        ('a', tensor(1))
        """
        key = find_last_key(self)
        return key, self.pop(key)

    def clear(self) -> Self:
        """Remove every entry.

        >>> TensorDict({"a": 1}).clear().is_empty()
        True
        """
        remove_all_entries(self)
        return self

    def create_nested(self, key: NestedKey) -> Self:
        """Store an empty collection under ``key``.

        >>> list(TensorDict().create_nested(("a", "b")).keys(include_nested=True))
        ['a', ('a', 'b')]
        """
        self._set_path(key, build_nested({}, self.batch_size, self.device))
        return self

    @overload
    def keys(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> KeysView[str]: ...
    @overload
    def keys(
        self,
        include_nested: bool,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> KeysView[NestedKey]: ...
    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return a live view of the keys, in insertion order.

        Args:
            include_nested: also yield the keys of nested entries, as tuples; a parent precedes its children.
            leaves_only: yield only the keys of leaves, which are tensors, not values such as strings.
            is_leaf: takes the class of an entry, returns True if it is a leaf; by default all but collections.
            sort: sort the keys of each node.

        >>> td = TensorDict({"a": {"b": 1}})
        >>> list(td.keys(include_nested=True)), ("a", "b") in td.keys(include_nested=True)
        (['a', ('a', 'b')], True)
        """
        children = self._children()
        return (
            LevelKeys(children)
            if type(children) is dict and not (include_nested or leaves_only or sort)
            else CollectionKeys(self, include_nested, leaves_only, is_leaf, sort)
        )

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> ValuesView[Any]:
        """Return a live view of the entries; arguments as for :meth:`keys`.

        >>> list(TensorDict({"a": {"b": 1}}).values(include_nested=True, leaves_only=True))
        [tensor(1)]
        """
        children = self._children()
        return (
            CollectionValues(self, include_nested, leaves_only, is_leaf, sort)  # type: ignore[return-value]
            if include_nested or leaves_only or sort or not has_plain_entries(children)
            else children.values()
        )

    @overload
    def items(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> ItemsView[str, Any]: ...
    @overload
    def items(
        self,
        include_nested: bool,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> ItemsView[NestedKey, Any]: ...
    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return a live view of (key, entry) pairs; arguments as for :meth:`keys`.

        >>> list(TensorDict({"a": {"b": 1}}).items(include_nested=True, leaves_only=True))
        [(('a', 'b'), tensor(1))]
        """
        children = self._children()
        return (
            CollectionItems(self, include_nested, leaves_only, is_leaf, sort)
            if include_nested or leaves_only or sort or not has_plain_entries(children)
            else children.items()
        )

    def __contains__(self, key: object) -> bool:
        """Return True if the entry ``key``, a string or a key path, exists."""
        if type(key) is not str:
            return key in self.keys(include_nested=True)
        return key in self._children()

    def __len__(self) -> int:
        """Return the size of the first batch dim; without batch dims, 0 after ``td.install_as_tensordict()``.

        Raises:
            TypeError: the collection has no batch dims. With a length of 0, ``torch.tensor`` would convert a list of
                such collections to an empty tensor.
        """
        if not self.batch_size and not RULES.follows_tensordict:
            raise missing_length_error(self)
        return self.batch_size[0] if self.batch_size else 0

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the slices along the first batch dim.

        Raises:
            StructureError: the collection has no batch dims.
        """
        if batch_size := self.batch_size:
            return iter_rows(self, batch_size[0])
        raise missing_rows_error(self)

    def __reversed__(self) -> Iterator[Any]:
        """Iterate over the slices along the first batch dim, from the last to the first."""
        return iter(tuple(self)[::-1])

    def __getitems__(self, indices: list[int]) -> Any:
        """Index the first batch dim with a list of positions; a ``DataLoader`` calls this to read a whole batch."""
        return self._index(indices)

    def __bool__(self) -> bool:
        """Raise StructureError: like a tensor with several elements, a collection has no single truth value."""
        raise StructureError(
            f"the truth value of a {type(self).__name__} is ambiguous; use is_empty(), or (a == b).all()"
        )
