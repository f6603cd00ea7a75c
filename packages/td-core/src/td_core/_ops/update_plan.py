"""Plan an update: check and list all writes first, then execute them.

Nodes that both trees have are merged. A lazy stack is updated per member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._coerce import NUMBERS, WRAPPED, coerce
from .._collection import (
    Child,
    Core,
    add_nested,
    align_dims,
    check_keys,
    concurrent_change_error,
    get_all_entries,
    has_lazy_stack,
    missing_key_error,
    show_path,
)
from .._dim_names import inherit_names
from .._keys import unravel_key_to_tuple
from .._locking import check_unlocked
from .._mapping_views import IsLeaf
from .._walks import has_entries
from ..errors import BatchSizeError, KeyThroughLeafError, StructureError
from ..typing import NestedKey
from .entries import check_cycle
from .key_trees import filter_entries, parse_requested_keys
from .leaf_writes import check_copied, clone_overlapping
from .operands import copy_leaves

Path = tuple[str, ...]


class _Through(dict[str, Any]):
    """A nested key as a one-entry dict. Unlike a dict value, it raises instead of replacing a leaf on its path."""


@dataclass(slots=True)
class UpdatePlan:
    """Plan of one ``update``: the writes to execute after all checks."""

    root: Core
    clone: bool
    inplace: bool
    non_blocking: bool
    is_leaf: IsLeaf | None
    resize: bool
    strict: bool = False
    #: (node, key, entry, joins). ``joins``: merge with a node that another thread stores under the key concurrently.
    stores: list[tuple[Core, str, Child, bool]] = field(default_factory=list, init=False)
    copies: list[tuple[Any, str, Any, Path]] = field(default_factory=list, init=False)
    sizes: list[tuple[Core, torch.Size]] = field(default_factory=list, init=False)
    refills: list[tuple[Any, list[Any]]] = field(default_factory=list, init=False)

    def read(self, source: Mapping[Any, Any] | Core, keys: Sequence[NestedKey] | None) -> None:
        """Check the entries of ``source`` under ``keys`` (None for all), and list their writes."""
        if not _is_node(source):
            raise TypeError(
                f"a collection is updated from a mapping or a collection of entries; got {type(source).__name__}"
            )
        clone, append = self.clone, self.stores.append
        todo: list[tuple[Any, Any, Any, Path]] = [(self.root, source, parse_requested_keys(keys), ())]
        while todo:
            node, source, wanted, path = todo.pop()
            size, device, plain = (
                node.batch_size,
                node.device,
                not (self.inplace or node._schema.converts_tensors),
            )
            items: Any = source
            trusted = False
            if isinstance(source, Core):
                parts = node._split_update(self, source, wanted, path)
                if parts is not None:
                    todo.extend((member, part, wanted, path) for member, part in reversed(parts))
                    continue
                right = source.batch_size
                if self.resize and right != size:
                    self._check_resize(node, source, right, path)
                    size = right
                trusted = device is None and right == size
                # A lazy stack raises for keys that some members lack, so filter the source first.
                shown = source if wanted is None else filter_entries(source, dict.fromkeys(wanted))
                items = get_all_entries(shown)
            if not self.inplace:
                check_unlocked(node, f"update {show_path(path)}")
                check_keys(node, items if wanted is None else {key: None for key in items if key in wanted})
            levels: list[tuple[Any, Any, Any, Path]] = []
            for key, value in dict(items).items():
                if type(key) is not str:
                    key, *rest = unravel_key_to_tuple(key)
                    for part in reversed(rest):
                        value = _Through({part: value})
                below = None
                if wanted is not None:
                    if key not in wanted:
                        continue
                    below = wanted[key]
                    if below is not None and not _is_node(value):
                        continue  # a leaf has no entries under the requested nested key
                if plain and isinstance(value, Tensor) and type(value) not in WRAPPED:
                    if not trusted:
                        value = coerce(value, size, device, (*path, key), non_blocking=self.non_blocking)
                    append((node, key, value.clone() if clone else value, False))
                else:
                    level = self._read_entry(node, key, value, below, path, size)
                    if level is not None:
                        levels.append((level, value, below, (*path, key)))
            # Reverse the list, since todo is a stack: of several values of one key, the last must be written last.
            todo += levels[::-1]

    def _read_entry(self, node: Any, key: str, value: Any, below: Any, prefix: Path, size: torch.Size) -> Any:
        """List the write of one entry, or return the existing node that it is merged into."""
        path = (*prefix, key)
        if type(value) in (list, tuple):
            rows = node._rows_for_members(value)
            for member, row in rows or ():
                self._read_entry(member, key, row, below, prefix, member.batch_size)
            if rows is not None:
                return None
        joins = True
        try:
            current = node._peek_child(key)
        except KeyError:
            if self.strict:
                raise missing_key_error(node, key, prefix) from None
            current = None
        leaf_here = current is not None and not has_entries(current)
        if leaf_here and type(value) is _Through:
            raise KeyThroughLeafError(
                f"{show_path(path)} is not a collection, so it has no entry {next(iter(value))!r} to update"
            )
        if _is_node(value):
            # A requested nested key updates only that entry, so merge even if is_leaf would replace the node.
            if current is not None and not leaf_here and (below is not None or not self._whole(value)):
                result = node._get_writable(key)
                if isinstance(result, Tensor):
                    raise concurrent_change_error(node)
                if self.inplace or not self._is_stack_needed(result, value):
                    return result
                value = self._make_stack(result, value if below is None else filter_entries(value, below))
                joins = False
            elif below is not None:
                value = filter_entries(value, below)
                if not list(value.keys()):
                    return None
        value = node._schema.convert(key, value)
        if self.inplace and current is not None:
            if not (isinstance(value, NUMBERS) and isinstance(current, Tensor)):
                value = coerce(value, size, node.device, path, non_blocking=self.non_blocking)
            self.copies.append((node, key, value, path))
            return None
        check_unlocked(node, f"set {show_path(path)}")
        if self.inplace:
            check_keys(node, {key: value})
        entry = coerce(value, size, node.device, path, non_blocking=self.non_blocking)
        if isinstance(entry, Tensor):
            self.stores.append((node, key, entry.clone() if self.clone else entry, False))
            return None
        check_cycle(node, entry, path)
        if node._names is not None:
            entry = inherit_names(entry, node._names, show_path(path))
        joins = joins and has_entries(entry) and not self._whole(entry)
        self.stores.append((node, key, entry._clone_leaves() if self.clone else entry, joins))
        return None

    def _is_stack_needed(self, actual: Any, value: Any) -> bool:
        stacked = value._members_and_dim() if isinstance(value, Core) else None
        return (
            stacked is not None
            and actual._members_and_dim() is None
            and not actual._schema.converts_tensors
            and actual.batch_size == value.batch_size
        )

    def _make_stack(self, actual: Any, value: Any) -> Any:
        """Convert a dense node to a lazy stack and update its members, since a dense node needs equal members."""

        def update_part(member: Any, part: Any) -> Any:
            plan = UpdatePlan(part, self.clone, False, self.non_blocking, self.is_leaf, False)
            plan.read(member, None)
            plan.apply()
            return part

        return value._map_members(update_part, actual)

    def _whole(self, value: Any) -> bool:
        return self.is_leaf is not None and type(value) is not _Through and self.is_leaf(type(value))

    def _check_resize(self, node: Core, source: Core, size: torch.Size, path: Path) -> None:
        right = source._children()
        for key, child in dict(node._children()).items():
            shape = child.shape if isinstance(child, Tensor) else child.batch_size
            if key not in right and shape[: len(size)] != size:
                raise BatchSizeError(
                    f"the batch size {list(size)} of the source does not fit: {show_path((*path, key))} is not updated "
                    f"and has {list(shape)}"
                )
        self.sizes.append((node, size))

    def apply(self) -> None:
        """Execute the listed writes."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        paths: list[Path] = []
        others: list[tuple[Core, str, Any]] = []
        for node, key, value, path in chain.from_iterable(map(_split_copy, self.copies)):
            current = node._get_child(key)
            if isinstance(current, Tensor) and not isinstance(value, Core):
                if not isinstance(value, Tensor):
                    value = torch.as_tensor(value, device=current.device)
                if not value.is_nested:
                    value = align_dims(value, current.ndim, len(node.batch_size))
                check_copied(current, path, value)
                targets.append(current)
                values.append(value)
                paths.append(path)
            elif (
                isinstance(current, Tensor)
                or isinstance(value, Tensor)
                or has_entries(current) != has_entries(value)
            ):
                raise StructureError(
                    f"cannot write {show_path(path)} in place: it is a {type(current).__name__}, the value a "
                    f"{type(value).__name__}; use update() to replace it"
                )
            else:
                others.append((node, key, value))
        if self.copies and has_lazy_stack(self.root):
            values = clone_overlapping(targets, values)
            others = [(node, key, value._clone_leaves()) for node, key, value in others]
        for node, key, value in others:
            current = node._get_child(key)
            if isinstance(current, Core):
                current._check_index_put((), value)
        # Write value nodes before leaves: these writes may still raise, and then no leaf was written.
        for node, key, value in others:
            node._write_child(key, value, non_blocking=self.non_blocking)
        for refilled, members in self.refills:
            refilled.tensordicts[:] = members
        for resized, size in self.sizes:
            resized._set_batch_size(size)
        for store, key, value, joins in self.stores:
            if joins:
                add_nested(store, key, value)
            else:
                store._set_child(key, value)
        copy_leaves(targets, values, lambda i: show_path(paths[i]), self.non_blocking)


def _is_node(value: Any) -> bool:
    # Check the most common type first: isinstance with the abstract class Mapping is slow.
    if isinstance(value, Tensor):
        return False
    return isinstance(value, Mapping) or (isinstance(value, Core) and has_entries(value))


def _split_copy(copy: tuple[Core, str, Any, Path]) -> Iterator[tuple[Core, str, Any, Path]]:
    """Split a copy to a lazy stack into copies to its members."""
    node, key, value, path = copy
    parts = node._split_value(value)
    if not parts:
        yield copy
    for member, part in parts:
        yield from _split_copy((member, key, part, path))


def try_merge(root: Core, source: Any) -> bool:
    """Store the entries of ``source`` if none needs conversion. Otherwise return False and store nothing."""
    levels: list[tuple[Core, dict[str, Child]]] = []
    todo: list[tuple[Core, Any]] = [(root, source)]
    below: list[str] = []
    # By hand: the row `update` of benchmarks/ops.py.
    while todo:
        node, right = todo.pop()
        left = node._children()
        if node._locked or node._schema.converts_tensors or node.device is not None or type(left) is not dict:
            return False
        if not node._grows:
            return False  # such a node does not accept new entries directly
        size = node.batch_size
        ndim = len(size)
        known = ndim == 0
        item = size[0] if ndim == 1 else None
        if isinstance(right, Core):
            if right._is_value:
                return False
            known = known or right.batch_size == size
            right = right._children()
        if type(right) is not dict:
            return False
        leaves = dict(right)
        for key, value in leaves.items():
            if type(key) is not str:
                # Only a leaf under a key of two parts is supported here, if the source does not also have its parent.
                if type(key) is not tuple or len(key) != 2 or type(key[1]) is not str or key[0] in leaves:
                    return False
                if not isinstance(value, Tensor):
                    return False
                value = {key[1]: value}
            if isinstance(value, Tensor):
                if type(value) in WRAPPED:
                    return False
                if not known:
                    shape = value.shape
                    if not (shape and shape[0] == item) if ndim == 1 else shape[:ndim] != size:
                        return False
                continue
            current = left.get(key if type(key) is str else key[0])
            if current is None or isinstance(current, Tensor) or current._is_value:
                return False
            todo.append((current, value))
            below.append(key)
        for key in below:
            del leaves[key]
        below.clear()
        levels.append((node, leaves))
    for node, entries in levels:
        node._set_children(entries)
    return True
