"""The rule of ``update`` and ``update_``: entries that both trees have are merged or written, new ones are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._plans.elements import align_dims
from .._torch.kernels import PLAIN
from .._torch.private import functorch_level
from .._tree.coerce import NUMBERS, WRAPPED, coerce, convert_source
from .._tree.defaults import add_nested, check_cycle, check_keys, missing_key_error, show_path
from .._tree.dim_names import check_tails, inherit_names, join_names, lift_names, set_batch_size
from .._tree.key_trees import KeyTree, filter_entries, parse_requested_keys
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_no_entry, check_unlocked
from .._tree.node import Child, Core, concurrent_change_error, get_all_entries
from .._tree.views import IsLeaf
from .._tree.walks import has_entries
from ..errors import BatchSizeError, DimNamesError, KeyPathError, KeyThroughLeafError, StructureError
from ..typing import Names, NestedKey
from .check import check_copied, is_sealed
from .pair import Through, is_node, list_pairs, pair_rows, split_pair, try_copy_whole
from .run import Transaction

Path = tuple[str, ...]

_DICTS: set[type] = {dict, Through}

#: Target node, source node or mapping, requested keys (None for all), and key path.
Level = tuple[object, object, KeyTree | None, Path]


@dataclass(slots=True)
class NamedNode:
    """A node that gets entries with dim names, its dim names after the update, and these entries."""

    node: Core
    names: Names | None
    entries: list[tuple[Core, Path]] = field(default_factory=list)


@dataclass(slots=True)
class Update:
    """The rules of one update: :meth:`read` checks a source and adds its writes to the transaction ``writes``."""

    writes: Transaction
    clone: bool = False
    inplace: bool = False
    is_leaf: IsLeaf | None = None
    resize: bool = False
    strict: bool = False
    #: Skip entries of the source that the target lacks, unless it has none of them.
    lenient: bool = False
    found: bool = False
    absent: list[KeyPathError] = field(default_factory=list)
    named: list[NamedNode] = field(default_factory=list)

    def read(
        self,
        root: Core,
        source: object,
        keys: Sequence[NestedKey] | None = None,
        path: Path = (),
    ) -> None:
        """Check the entries of a source under ``keys`` (None for all), and add their writes. ``path`` is that of the root."""
        if type(source) is not dict and not isinstance(source, Core):
            source = convert_source(source, root.batch_size, root.device, path)
        if not is_node(source):
            raise TypeError(
                f"a collection is updated from a mapping or a collection of entries; got {type(source).__name__}"
            )
        todo: list[Level] = [(root, source, parse_requested_keys(keys), path)]
        while todo:
            # Reverse the list, since todo is a stack: of several values of one key, the last must be written last.
            todo += [*self._read_level(*todo.pop())][::-1]
        if self.absent and not self.found:
            raise self.absent[0]
        if self.named:
            self.writes.change(self._set_names, root)

    def _read_level(self, node: Any, source: object, wanted: Any, path: Path) -> Iterator[Level]:
        """Add the writes of the leaves of one node, and return the levels below."""
        size, device, aligned = node.batch_size, node.device, False
        items: Any = source
        if isinstance(source, Core):
            parts = node._split_update(self, source, wanted, path)
            if parts is not None:
                self.writes.split = True
                yield from [(member, part, wanted, path) for member, part in parts]
                return
            size = self._resize(node, source, path)
            aligned = device is None and source.batch_size == size
            # A lazy stack raises for keys that some members lack, so filter the source first.
            shown = source if wanted is None else filter_entries(source, dict.fromkeys(wanted))
            items = get_all_entries(shown)
        entries = list(_list_requested(items, wanted, path))
        if not self.inplace:
            check_unlocked(node, f"update {show_path(path)}")
            check_keys(node, {key: None for key, _, _ in entries})
        plain = not (self.inplace or node._schema.converts_tensors)
        for key, value, below in entries:
            if plain and isinstance(value, Tensor) and type(value) not in WRAPPED:
                if not aligned:
                    value = coerce(value, size, device, (*path, key), non_blocking=self.writes.non_blocking)
                self._store(node, key, value)
            elif (level := self._read_entry(node, key, value, below, path, size)) is not None:
                yield *level, below, (*path, key)

    def _read_entry(
        self, node: Any, key: str, value: Any, below: KeyTree | None, prefix: Path, size: torch.Size
    ) -> tuple[object, object] | None:
        """Add the write of one entry, or return the node that it is merged into, and its value."""
        path = (*prefix, key)
        if value is None and node._schema.clears_none and not self.inplace:
            self.writes.change(node._clear_field, key)
            return None
        rows = pair_rows(node, value)
        if rows is not None:
            self.writes.split = True
            for member, row in rows:
                self._read_entry(member, key, row, below, prefix, member.batch_size)
            return None
        current = self._find(node, key, value, prefix)
        if current is None and self.strict:
            return None  # a field without a value stays None
        if is_node(current) and not isinstance(value, (Core, dict)):
            value = convert_source(value, size, node.device, path)
        held = self._find_merged(node, key, current, value, below)
        if held is not None and (self.inplace or not _is_stack_needed(held, value)):
            return held, value
        if below is not None:
            value = filter_entries(value, below)
            if not list(value.keys()):
                return None
        if held is not None:
            self._add_store(node, key, self._make_stack(held, value), path, size, joins=False)
        elif self.inplace and current is not None:
            value = node._schema.convert(key, value)
            if not (isinstance(value, NUMBERS) and isinstance(current, Tensor)):
                value = coerce(value, size, node.device, path, non_blocking=self.writes.non_blocking)
            self.add_copy(node, key, value, path)
        else:
            self._add_store(node, key, value, path, size, joins=True)
        return None

    def _find_merged(
        self, node: Core, key: str, current: object, value: object, below: object
    ) -> Core | None:
        """Return the node into which the entries of a value are merged, or None if the value is written as a whole."""
        # A requested nested key updates only that entry, so merge even if is_leaf would replace the node.
        if not (is_node(current) and is_node(value)) or (below is None and self._is_whole(value)):
            return None
        held = node._get_writable(key)
        if isinstance(held, Tensor):
            raise concurrent_change_error(node)
        return held

    def _find(self, node: Core, key: str, value: object, prefix: Path) -> Child | None:
        """Return the entry of a node, or None if it is missing and may be added."""
        try:
            current = node._peek_child(key)
        except KeyError:
            if self.strict and not (key in node._schema.list_entries(node) and _is_none(value)):
                error = missing_key_error(node, key, prefix)
                if not self.lenient:
                    raise error from None
                self.absent.append(error)
            return None
        self.found = self.found or not is_node(current)
        if type(value) is Through and not has_entries(current):
            raise KeyThroughLeafError(
                f"{show_path((*prefix, key))} is not a collection, so it has no entry {next(iter(value))!r} to update"
            )
        return current

    def _add_store(
        self, node: Core, key: str, value: object, path: Path, size: torch.Size, joins: bool
    ) -> None:
        """Add the store of a new entry. ``joins``: merge with a node that another thread stores concurrently."""
        value = node._schema.convert(key, value)
        check_unlocked(node, f"set {show_path(path)}")
        if self.inplace:
            check_keys(node, {key: value})
        entry = coerce(value, size, node.device, path, non_blocking=self.writes.non_blocking)
        if isinstance(entry, Tensor):
            self._store(node, key, entry)
            return
        check_cycle(node, entry, path)
        names = (
            node._names if entry._names is None and not self.named else self._join_names(node, entry, path)
        )
        if names is not None:
            entry = inherit_names(entry, names, show_path(path))
        joins = joins and has_entries(entry) and not self._is_whole(entry)
        entry = entry._map(node._copy_stored) if self.clone else entry
        if joins:
            self.writes.change(add_nested, node, key, entry)
        else:
            self.writes.change(node._set_child, key, entry)

    def _join_names(self, node: Core, entry: Core, path: Path) -> Names | None:
        """Return the dim names of a node after the update with an entry, and remember them for later entries."""
        held = node._inner()
        place = next((place for place in self.named if place.node is held), None)
        if place is None:
            place = NamedNode(held, held._names)
            self.named.append(place)
        place.names = join_names(held, entry, place.names)
        place.entries.append((entry, path))
        names = place.names
        for other, other_path in () if names is None else place.entries:
            check_tails(other, names or (), other_path)
        return names

    def _set_names(self, root: Core) -> None:
        """Give the nodes the names of their new entries, and their parents, unless these have one for another dim."""
        for place in self.named:
            if place.names is not None:
                place.node._set_names(place.names)
        with suppress(DimNamesError):
            lift_names(root)

    def _store(self, node: Core, key: str, leaf: Tensor) -> None:
        self.writes.change(node._set_child, key, node._copy_stored(leaf) if self.clone else leaf)

    def add_copy(self, node: Core, key: str, value: object, path: Path) -> None:
        """Check the copy of a value into an existing entry, and add it; of a lazy stack, those into its members."""
        parts = node._split_write(value)
        for member, _, part in parts:
            self.add_copy(member, key, part, path)
        if parts:
            self.writes.split = True
            return
        current = node._get_child(key)
        if isinstance(current, Tensor) and not isinstance(value, Core):
            if not isinstance(value, Tensor):
                value = torch.as_tensor(value, device=current.device)
            if not value.is_nested:
                value = align_dims(value, current.ndim, len(node.batch_size))
            check_copied(current, path, value)
            self.writes.copy(current, value, path)
            return
        if (
            isinstance(current, Tensor)
            or isinstance(value, Tensor)
            or has_entries(current) != has_entries(value)
        ):
            raise StructureError(
                f"cannot write {show_path(path)} in place: it is a {type(current).__name__}, the value a "
                f"{type(value).__name__}; use update() to replace it, and NonTensorData(dict) for a dict that is a value"
            )
        self.writes.put(node, key, current, (), value)

    def _make_stack(self, held: object, value: Core) -> object:
        """Convert a dense node to a lazy stack and update its members, since a dense node needs equal members."""

        def update_part(member: Core, part: Core) -> Core:
            update = Update(Transaction(self.writes.non_blocking), self.clone, is_leaf=self.is_leaf)
            update.read(part, member)
            update.writes.commit()
            return part

        return value._map_members(update_part, held)

    def _is_whole(self, value: object) -> bool:
        """Return True if a node replaces an existing one instead of being merged into it."""
        return self.is_leaf is not None and type(value) is not Through and self.is_leaf(type(value))

    def _resize(self, node: Core, source: Core, path: Path) -> torch.Size:
        """Return the batch size of a node after the update, and add its change; BatchSizeError if another entry does not fit."""
        size, right = source.batch_size, source._children()
        if not self.resize or size == node.batch_size:
            return node.batch_size
        for key, child in dict(node._children()).items():
            shape = child.shape if isinstance(child, Tensor) else child.batch_size
            if key not in right and shape[: len(size)] != size:
                raise BatchSizeError(
                    f"the batch size {list(size)} of the source does not fit: {show_path((*path, key))} is not updated "
                    f"and has {list(shape)}"
                )
        check_no_entry(node, "change the batch size of")
        self.writes.change(set_batch_size, node, size)
        return size


def _list_requested(
    items: Mapping[Any, object], wanted: KeyTree | None, path: Path
) -> Iterator[tuple[str, Any, KeyTree | None]]:
    """Iterate over the requested entries: key, value, and the requested keys below it."""
    for key, value in list_pairs(items, path):
        if wanted is None:
            yield key, value, None
        elif key in wanted and (wanted[key] is None or is_node(value)):  # a leaf has no entries below
            yield key, value, wanted[key]


def _is_none(value: object) -> bool:
    """Return True for None, and for a value node that holds only None."""
    if not isinstance(value, Core) or has_entries(value):
        return value is None
    same: Any = value._compare(coerce(None, value.batch_size, value.device, ()), torch.eq)
    return same is not None and bool(same.all())


def _is_stack_needed(held: Core, value: object) -> bool:
    """Return True if a dense node becomes a lazy stack, since the value that is merged into it is one."""
    return (
        isinstance(value, Core)
        and value._members_and_dim() is not None
        and held._members_and_dim() is None
        and not held._schema.converts_tensors
        and held.batch_size == value.batch_size
    )


def write_entry(node: Core, key: str, value: object, path: Path, non_blocking: bool = False) -> None:
    """Copy a value of the form that ``coerce`` returns into an existing entry, in place."""
    children = node._children()
    current: Any = children.get(key) if type(children) is dict else None
    if type(current) in PLAIN and type(value) in PLAIN:
        if functorch_level() is None and not is_sealed(current):
            try:
                if current.is_same_size(value):
                    current.copy_(value, non_blocking)
                    return
            except (RuntimeError, ValueError):
                pass  # torch raised before it wrote; the error below has the key
    elif isinstance(current, Core) and has_entries(value):
        if try_copy_whole(current, value, non_blocking):
            return
    update = Update(Transaction(non_blocking), inplace=True, strict=True)
    if isinstance(value, Core) and has_entries(value):
        update.read(node, {key: value}, path=path[:-1])
    else:
        update.add_copy(node, key, value, path)
    update.writes.commit()


def try_merge(root: Core, source: object) -> bool:
    """Store the entries of ``source`` if none needs conversion. Otherwise return False, with nothing stored."""
    stores: list[tuple[Core, dict[Any, Child]]] = []
    # Of several values of one key, the last must be stored last, so visit the levels in the order of the keys.
    todo: list[tuple[Core, object]] = [(root, source)]
    for node, right in todo:
        leaves = _list_stores(node, right, todo)
        if leaves is None:
            return False
        stores.append((node, leaves))
    if len(stores) > 1 and not root._inner()._schema.is_in_memory:
        return False  # a class around a collection in a store
    for node, leaves in stores:
        node._set_children(leaves)
    return True


def _list_stores(node: Core, source: Any, below: list[tuple[Core, object]]) -> dict[Any, Child] | None:
    """Return the leaves to store in one node, and append the pairs of nodes below; None if an entry needs conversion."""
    left, size = node._children(), node.batch_size
    schema = node._schema
    if node._locked or schema.converts_tensors or node.device is not None or not schema.can_grow:
        return None
    if not schema.is_in_memory:
        return None
    fits = len(size) == 0
    if isinstance(source, Core):
        fits = fits or source.batch_size == size
        source = None if source._is_value else source._children()
        if fits and type(source) is dict is type(left) and PLAIN.issuperset(map(type, source.values())):
            return source.copy()
    if type(source) not in _DICTS or type(left) is not dict:
        return None
    return _split_levels(left, source.copy(), None if fits else size, below)


def _split_levels(
    left: dict[str, Child], source: dict[Any, Any], size: torch.Size | None, below: list[tuple[Core, object]]
) -> dict[Any, Child] | None:
    """Return the leaves of a source, checked against a batch size, and append the pairs of nodes; None if one has no pair."""
    leaves: dict[Any, Child] = {}
    for key, value in source.items():
        if type(key) is not str:
            try:
                key, value = split_pair(unravel_key_to_tuple(key), value)
            except KeyPathError:
                return None  # the slower way raises, with the path of the key
        if isinstance(value, Tensor):
            if type(value) in WRAPPED or value.is_nested:
                return None
            if size is not None and value.shape[: len(size)] != size:
                return None
            leaves[key] = value
            continue
        current = left.get(key)
        if current is None or isinstance(current, Tensor) or current._is_value:
            return None
        below.append((current, value))
    return leaves
