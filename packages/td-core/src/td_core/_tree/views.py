"""Live views of keys, values and items, flat or nested.

A node comes before its children in all three views. Non-tensor entries are not leaves by default (pass
``is_leaf=is_leaf_nontensor`` to include them), and the views do not descend into them.
"""

# ruff: noqa: RUF005 -- hot path: concatenating tuples is faster than unpacking them
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from operator import itemgetter
from typing import Any, TypeGuard

from torch import Tensor

from .._torch.kernels import PLAIN
from ..errors import StructureError
from .defaults import unwrap_entry
from .keys import unravel_key, unravel_key_to_tuple
from .node import LEAF_KINDS, Child, Core
from .walks import expand, has_entries

IsLeaf = Callable[[type], bool]


class StackedEntries(Mapping[str, Child]):
    """Mapping of the entries that all members of a lazy stack have; each is stacked when it is read."""

    __slots__ = ("_stack",)

    def __init__(self, stack: Any) -> None:
        self._stack = stack

    def __iter__(self) -> Iterator[str]:
        return iter(self._stack._common_keys())

    def __len__(self) -> int:
        return len(self._stack._common_keys())

    def __contains__(self, key: object) -> bool:
        members = self._stack._members
        return bool(members) and all(key in member._children() for member in members)

    def __getitem__(self, key: str) -> Any:
        return self._stack._get_child(key)


def default_is_leaf(cls: type) -> bool:
    """Return True if a class is a leaf: every class except collections.

    >>> default_is_leaf(torch.Tensor)
    True
    """
    return not issubclass(cls, Core) or cls in LEAF_KINDS


def is_leaf_or_value(cls: type) -> bool:
    """Return True if a class is a leaf or a value node: every class without entries."""
    return not issubclass(cls, Core) or cls._is_value


def _level(node: Core) -> Iterator[tuple[str, Child]]:
    children = node._children()
    # Copy a dict at once, so that a writer in another thread cannot disturb the iteration.
    if type(children) is dict:
        return iter(children.copy().items())
    return _peek_entries(node, children)


def _peek_entries(node: Core, keys: Iterable[str]) -> Iterator[tuple[str, Child]]:
    """Yield entries of a mapping that builds them on access; skip those that another thread removes."""
    for key in keys:
        try:
            child = node._peek_child(key)
        except KeyError:
            continue
        yield key, child


def _list_keys(node: Core, nested: bool, leaves_only: bool) -> Iterable[object]:
    children = node._children()
    if not (nested or leaves_only):
        return list(children)
    if type(children) is dict and PLAIN.issuperset(map(type, (flat := children.copy()).values())):
        return flat
    out: list[object] = []
    append, stack = out.append, []
    prefix: tuple[str, ...] = ()
    level = _level(node)
    # By hand: the row `keys nested leaves` of benchmarks/ops.py.
    while True:
        for key, child in level:
            if isinstance(child, Tensor) or type(child) in LEAF_KINDS:
                append(prefix + (key,) if prefix else key)
                continue
            if not leaves_only:
                append(prefix + (key,) if prefix else key)
            if nested:
                stack.append((prefix, level))
                children, prefix = child._children(), prefix + (key,)
                level = iter(children.copy().items()) if type(children) is dict else _level(child)
                break
        else:
            if not stack:
                return out
            prefix, level = stack.pop()


def has_plain_entries(children: Mapping[str, Child]) -> TypeGuard[dict[str, Child]]:
    """Return True for a dict without nodes that represent leaves: its values can be returned unchanged."""
    return type(children) is dict and (
        not LEAF_KINDS or LEAF_KINDS.isdisjoint(map(type, list(children.values())))
    )


def _list_items(node: Core, nested: bool, leaves_only: bool) -> Iterable[tuple[object, object]]:
    entries: dict[str, Child] = dict(node._children())
    if PLAIN.issuperset(map(type, entries.values())):
        return entries.items()
    out: list[tuple[object, object]] = []
    append, stack = out.append, []
    prefix: tuple[str, ...] = ()
    level = iter(entries.items())
    # By hand: the row `items nested leaves` of benchmarks/ops.py.
    while True:
        for key, child in level:
            if isinstance(child, Tensor):
                append((prefix + (key,) if prefix else key, child))
                continue
            leaf = unwrap_entry(child)
            if not leaves_only or leaf is not child:
                append((prefix + (key,) if prefix else key, leaf))
            if nested and leaf is child:
                stack.append((prefix, level))
                prefix, level = prefix + (key,), iter(dict(child._children()).items())
                break
        else:
            if not stack:
                return out
            prefix, level = stack.pop()


def _list_values(node: Core, nested: bool, leaves_only: bool) -> list[Any]:
    out: list[object] = []
    append, stack = out.append, []
    entries = list(node._children().values())
    if PLAIN.issuperset(map(type, entries)):
        return entries
    level = iter(entries)
    while True:
        for child in level:
            if isinstance(child, Tensor):
                append(child)
                continue
            leaf = unwrap_entry(child)
            if not leaves_only or leaf is not child:
                append(leaf)
            if nested and leaf is child:
                stack.append(level)
                level = iter(list(child._children().values()))
                break
        else:
            if not stack:
                return out
            level = stack.pop()


def _count(node: Core, nested: bool, leaves_only: bool) -> int:
    count, todo = 0, [node]
    for node in todo:
        children = node._children()
        if not (nested or leaves_only):
            return len(children)
        if type(children) is dict:
            entries = list(children.values())
        else:
            entries = [child for _, child in _peek_entries(node, children)]
        count += len(entries)
        for child in entries:
            if isinstance(child, Tensor) or type(child) in LEAF_KINDS:
                continue
            if hasattr(child, "_children"):
                count -= leaves_only
                if nested:
                    todo.append(child)
    return count


class _Walk:
    """Base of the three views: a collection with the options of its traversal."""

    __slots__ = ("_how", "_node", "_plain")

    def __init__(
        self, node: Core, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
    ) -> None:
        self._node = node
        self._how = (include_nested, leaves_only, is_leaf or default_is_leaf, sort)
        self._plain = is_leaf is None and not sort

    def _walk(self, *, values: bool) -> Iterator[tuple[object, Child]]:
        """Yield (key, entry); if ``values`` is False, an entry may be any object of the same class."""
        nested, leaves_only, is_leaf, _ = self._how
        stack: list[tuple[tuple[str, ...], Iterator[tuple[str, Child]]]] = [
            ((), self._sort_entries(self._node, values))
        ]
        while stack:
            prefix, level = stack[-1]
            for key, child in level:
                full = (*prefix, key) if prefix else key
                leaf = (isinstance(child, Tensor) and is_leaf is default_is_leaf) or is_leaf(type(child))
                leaf = leaf or not isinstance(child, (Tensor, Core))
                if leaf or not leaves_only:
                    yield full, unwrap_entry(child)
                if nested and not leaf and not isinstance(child, Tensor):
                    stack.append(((*prefix, key), self._sort_entries(child, values)))
                    break
            else:
                stack.pop()

    def _sort_entries(self, node: Core, values: bool) -> Iterator[tuple[str, Child]]:
        children = node._children()
        level = iter(children.items()) if values and type(children) is not dict else _level(node)
        return iter(sorted(level, key=itemgetter(0))) if self._how[3] else level

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class CollectionKeys(_Walk, Set[Any]):
    """Keys of a collection; ``in`` resolves a key path without building a list."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        if self._plain:
            nested, leaves_only, _, _ = self._how
            try:
                return iter(_list_keys(self._node, nested, leaves_only))
            except AttributeError:
                pass  # a pytree function put another object in place of a leaf; the generator below is for them too
        return (key for key, _ in self._walk(values=False))

    def __len__(self) -> int:
        # list() calls len() to preallocate, so counting must be cheap.
        if self._plain:
            nested, leaves_only, _, _ = self._how
            return _count(self._node, nested, leaves_only)
        return sum(1 for _ in self._walk(values=False))

    def __contains__(self, key: object) -> bool:
        path = unravel_key_to_tuple(key)  # type: ignore[arg-type]
        nested, leaves_only, is_leaf, _ = self._how
        if len(path) > 1 and not nested:
            return False
        node: Child = self._node
        for part in path:
            if isinstance(node, Tensor):
                return False
            try:
                node = node._peek_child(part)
            except KeyError:
                return False
        return not leaves_only or is_leaf(type(node))

    @classmethod
    def _from_iterable(cls, it: Any) -> set[Any]:
        return set(it)


class LevelKeys(CollectionKeys):
    """Keys of one node whose entries are a dict; all operations are as fast as those of the dict."""

    __slots__ = ("_level",)

    def __init__(self, level: dict[str, Child]) -> None:
        self._level = level

    def __iter__(self) -> Iterator[str]:
        return iter(self._level)

    def __len__(self) -> int:
        return len(self._level)

    def __contains__(self, key: object) -> bool:
        return (key if type(key) is str else unravel_key(key)) in self._level  # type: ignore[arg-type,operator]


class CollectionValues(_Walk):
    """Entries of a collection, without ``len``, which would need a full traversal."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        if self._plain:
            nested, leaves_only, _, _ = self._how
            try:
                return iter(_list_values(self._node, nested, leaves_only))
            except (StructureError, AttributeError):
                # An entry of a lazy stack is ragged; the generator below raises only when it reaches that entry. Or a pytree
                # function put another object in place of a leaf.
                pass
        return (child for _, child in self._walk(values=True))

    def __contains__(self, value: object) -> bool:
        return any(child is value for child in self)


class CollectionItems(_Walk):
    """(key, entry) pairs of a collection, without ``len``, which would need a full traversal."""

    __slots__ = ()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self._plain:
            nested, leaves_only, _, _ = self._how
            try:
                return iter(_list_items(self._node, nested, leaves_only))
            except (StructureError, AttributeError):
                # An entry of a lazy stack is ragged; the generator below raises only when it reaches that entry. Or a pytree
                # function put another object in place of a leaf.
                pass
        return self._walk(values=True)

    def __contains__(self, pair: object) -> bool:
        if not isinstance(pair, tuple) or len(pair) != 2:
            return False
        return any(key == pair[0] and child is pair[1] for key, child in self)


def list_foreign(root: Core) -> Iterator[tuple[tuple[str, ...], object]]:
    """Iterate over the objects that a pytree function put in place of leaves, with their key paths."""

    def list_below(place: tuple[tuple[str, ...], object]) -> list[tuple[tuple[str, ...], object]]:
        path, node = place
        if isinstance(node, Core) and (stacked := node._members_and_dim()) is not None:
            return [(path, member) for member in stacked[0]]
        if not has_entries(node):
            return []
        entries = dict(node._children()).items()
        return [((*path, key), child) for key, child in entries if not isinstance(child, Tensor)]

    start: list[tuple[tuple[str, ...], object]] = [((), root)]
    return (place for place in expand(start, list_below) if not isinstance(place[1], Core))
