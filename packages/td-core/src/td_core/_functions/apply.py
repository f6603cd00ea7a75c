"""Call a function on every leaf: ``apply``, ``apply_`` and ``named_apply``.

All forms share one iterative traversal. Only a lazy stack is traversed recursively, per member, so that its entries are
not stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._plans.plans import as_batch_size
from .._tree.batch_sizes import fit_batch_size
from .._tree.coerce import coerce
from .._tree.defaults import (
    add_key_note,
    check_collection,
    leaf_node_mismatch_error,
    missing_key_error,
    show_path,
)
from .._tree.devices import as_device
from .._tree.dim_names import check_names
from .._tree.locks import check_unlocked
from .._tree.node import LEAF_KINDS, Child, Core, replace_leaves
from .._tree.shared_memory import are_equal, get_memory_key, may_share_memory
from .._tree.views import IsLeaf
from .._tree.walks import has_entries
from .._writes.check import check_copied
from .._writes.inplace import find_data
from .._writes.run import Transaction
from .._writes.update import Update
from ..errors import BatchSizeError, StructureError
from ..typing import NO_DEFAULT, BatchSize, DeviceType, NoDefault
from .operands import write_result

Path = tuple[str, ...]

_MISSING: Any = object()
"""Placeholder for a node that another collection does not have."""


@dataclass(slots=True)
class Walk:
    """Arguments and state of one call of ``apply``."""

    fn: Callable[..., Any]
    named: bool
    nested_keys: bool
    inplace: bool
    default: object
    filter_empty: bool | None
    is_leaf: IsLeaf | None
    size: torch.Size | None = None
    device: torch.device | NoDefault | None = NO_DEFAULT
    names: NoDefault | None = NO_DEFAULT
    writes: list[tuple[Core, Child, Child, Path]] = field(default_factory=list)
    #: For in-place calls on leaves that may share memory: memory that was changed -> its key path and operands.
    changed: dict[object, tuple[Path, Sequence[object]]] | None = None
    #: ``fn`` takes the leaf alone, or the key and the leaf.
    alone: bool = False
    keyed: bool = False

    def run(
        self,
        root: Core,
        others: tuple[object, ...],
        batch_size: BatchSize | None,
        device: DeviceType | NoDefault | None,
        names: Sequence[str | None] | NoDefault | None,
        propagate_lock: bool,
        out: Core | None,
    ) -> Any:
        """Traverse ``root`` and return the result of the call."""
        for other in others:
            if not isinstance(other, Core):
                raise TypeError(f"apply() goes through collections side by side; got {type(other).__name__}")
        if out is not None:
            check_collection("apply", out)
        if not self.inplace:
            self.set_metadata(root, batch_size, names, out)
        elif out is not None:
            raise ValueError("apply() writes into out= or, with inplace=True, into this collection; got both")
        elif torch.compiler.is_compiling() or may_share_memory(root._leaves()):
            self.changed = {}
        if device is not NO_DEFAULT:
            self.device = None if device is None else as_device(device)
        # Compare lengths: torch.compile cannot trace the truth value of a tuple of nodes.
        if len(others) == 0 and self.changed is None:
            self.alone, self.keyed = not self.named, not self.nested_keys
        result = self.apply_below(root, others, ())
        if self.inplace:
            self.write(root)
            return root if result is not None else None
        return out if result is None else self.name_and_store(root, result, names, propagate_lock, out)

    def set_metadata(self, root: Core, batch_size: BatchSize | None, names: object, out: Core | None) -> None:
        """Set the batch size and names of the new nodes, where these differ from those of the old ones."""
        if batch_size is not None:
            self.size = as_batch_size(batch_size)
            self.names = None
        elif out is not None and out.batch_size != root.batch_size:
            self.size = out.batch_size
        if names is not NO_DEFAULT:
            self.names = None

    def name_and_store(
        self,
        root: Core,
        result: Core,
        names: Sequence[str | None] | NoDefault | None,
        propagate_lock: bool,
        out: Core | None,
    ) -> object:
        """Name the dims of a new result, then write it into ``out`` or lock it."""
        if names is not NO_DEFAULT and names is not None:
            result._set_names(check_names(names, len(result.batch_size)))
        if out is not None:
            return write_result(out, result.batch_size, result, inplace=False)
        return result.lock_() if propagate_lock and root._locked else result

    def apply_below(self, root: Core, others: tuple[Any, ...], path: Path) -> Core | None:
        """Apply ``fn`` below a node and return the new node, or None if it is dropped."""
        if self.size is None and (stacked := root._members_and_dim()) is not None:
            return self.apply_to_members(root, stacked[1], others, path)
        fn, alone, keyed, is_leaf = self.fn, self.alone, self.keyed, self.is_leaf
        # Use an explicit stack of the unfinished ancestors: recursion would limit the depth of a tree.
        above: list[tuple[Core, dict[str, Child], Iterator[tuple[str, Child]], tuple[Any, ...], Path]] = []
        entries: dict[str, Child] = {}
        node, items = root, iter(dict(root._children()).items())
        # By hand: the row `apply` of benchmarks/ops.py.
        while True:
            size, device = self.get_metadata(node)
            ndim, free = len(size), device is None and not self.inplace
            fitting: torch.Size | None = None
            for key, child in items:
                if isinstance(child, Tensor) or (is_leaf is not None and is_leaf(type(child))):
                    try:
                        if alone:
                            value = fn(child)
                        else:
                            value = fn(key, child) if keyed else self.call(child, key, path, others)
                    except Exception as error:
                        add_key_note(error, (*path, key))
                        raise
                    if value is None:
                        continue
                    if free and isinstance(value, Tensor):
                        # Compare with the last accepted shape first: cheaper than a slice, and most shapes repeat.
                        try:
                            if (shape := value.shape) == fitting or shape[:ndim] == size:
                                fitting = shape
                                entries[key] = value
                                continue
                        except RuntimeError:
                            pass  # a nested tensor of strided layout has no shape
                    entries[key] = self.check_result(value, child, node, (*path, key))
                elif child._is_value:
                    self.read_value(child, node, (*path, key), others, entries)
                elif (inner := self.descend(child, (*path, key), others, entries)) is not None:
                    above.append((node, entries, items, others, path))
                    node, entries, others, path = child, {}, inner, (*path, key)
                    items = iter(dict(node._children()).items())
                    break
            else:
                result = self.close(node, entries)
                if not above:
                    return result
                key = path[-1]
                node, entries, items, others, path = above.pop()
                if result is not None:
                    entries[key] = result

    def call(self, leaf: Child, key: str, path: Path, others: tuple[Any, ...]) -> Any:
        """Return the result of ``fn`` for a leaf, or the leaf itself if an earlier key changed it."""
        rest = [self.get_other(other, key, path, leaf) for other in others]
        if self.changed is not None and self.is_changed(leaf, (*path, key), rest):
            return leaf
        if not self.named:
            return self.fn(leaf, *rest)
        return self.fn((*path, key) if self.nested_keys and path else key, leaf, *rest)

    def read_value(
        self, child: Core, node: Core, path: Path, others: tuple[Any, ...], entries: dict[str, Child]
    ) -> None:
        """Add a value node to the result; apply ``fn`` to the tensor that a proxy node wraps."""
        kept = child
        if type(child) in LEAF_KINDS:
            leaf: Any = child._unwrap()
            try:
                value = self.call(leaf, path[-1], path[:-1], others)
            except Exception as error:
                add_key_note(error, path)
                raise
            if value is None and not self.inplace:
                return
            if not self.inplace:
                kept = replace_leaves(child, iter((value,)))
            elif value is not None:
                self.check_result(value, leaf, node, path)
        if isinstance(kept, Tensor):
            kept = self.check_result(kept, child, node, path)
        elif self.size is not None:
            # A single value accepts any batch size; a stack of values only a prefix of its batch size.
            if kept._max_batch_size() is None:
                kept = kept._with_children(kept._children(), batch_size=self.size)
            else:
                kept = fit_batch_size(kept, self.size, path)
        entries[path[-1]] = kept

    def descend(
        self, child: Core, path: Path, others: tuple[Any, ...], entries: dict[str, Child]
    ) -> tuple[Any, ...] | None:
        """Return the part of the other collections that belongs to a node; for a lazy stack, add its result and return None."""
        if len(others) > 0:  # torch.compile cannot trace the truth value of a tuple of nodes
            others = tuple([self.get_other(other, path[-1], path[:-1], child) for other in others])
        stacked = child._members_and_dim()
        if stacked is None or self.size is not None:
            return others
        value = self.apply_to_members(child, stacked[1], others, path)
        if value is not None:
            entries[path[-1]] = value
        return None

    def apply_to_members(self, node: Core, dim: int, others: tuple[Any, ...], path: Path) -> Core | None:
        """Apply ``fn`` to each member of a lazy stack and return a stack of the results, or None if all are dropped."""
        given = [other for other in others if other is not _MISSING]
        for other in given:
            if other.batch_size[dim : dim + 1] != node.batch_size[dim : dim + 1]:
                raise BatchSizeError(
                    f"{show_path(path)} is a lazy stack of {node.batch_size[dim]} along dim {dim}, another collection has "
                    f"batch size {list(other.batch_size)} there"
                )
        kept = []

        def apply_to_part(member: Core, *parts: object) -> object:
            left = iter(parts)
            rest = tuple([_MISSING if other is _MISSING else next(left) for other in others])
            result = self.apply_below(member, rest, path)
            kept.append(result is not None)
            return self.build(member, {}) if result is None else result

        result = node._map_members(apply_to_part, *given)
        if not any(kept):
            return None
        return node if self.inplace else result

    def get_other(self, node: Any, key: str, path: Path, child: Child) -> Any:
        """Return the entry ``key`` of another collection; if it is missing, the default or ``_MISSING``."""
        leaf = not has_entries(child) or self.is_whole(child)
        if node is _MISSING:
            return self.default if leaf else _MISSING
        try:
            result = node._get_child(key)
        except KeyError:
            if self.default is NO_DEFAULT:
                raise missing_key_error(node, key, path) from None
            return self.default if leaf else _MISSING
        if isinstance(result, Tensor) and not leaf:
            raise leaf_node_mismatch_error(child, result, (*path, key))
        return result._unwrap() if type(result) in LEAF_KINDS and isinstance(child, Tensor) else result

    def is_whole(self, child: Child) -> bool:
        """Return True if ``fn`` is called on a node as on a leaf."""
        return self.is_leaf is not None and self.is_leaf(type(child))

    def is_changed(self, child: Child, path: Path, rest: Sequence[object]) -> bool:
        """Return True if an earlier key changed this memory; StructureError if the operands of the two keys differ."""
        assert self.changed is not None
        memory = get_memory_key(child, not rest)
        if memory not in self.changed:
            self.changed[memory] = path, rest
            return False
        first, beside = self.changed[memory]
        if not torch.compiler.is_compiling() and not all(map(are_equal, beside, rest)):
            raise StructureError(
                f"cannot change {show_path(path)} in place: it is the tensor of {show_path(first)}, and what the other "
                "collections have beside the two differs; give them equal ones, or exclude() all keys but one"
            )
        return True

    def check_result(self, value: object, child: Child, node: Core, path: Path) -> Child:
        """Convert a result to an entry. In place, record the write and return the old entry."""
        if not self.inplace:
            return coerce(value, *self.get_metadata(node), path)
        if value is not child:
            if not isinstance(value, (Tensor, Core)):
                value = coerce(value, *self.get_metadata(node), path)
            self.writes.append((node, child, value, path))
        return child

    def get_metadata(self, node: Core) -> tuple[torch.Size, torch.device | None]:
        """Return the batch size and device of the result of a node."""
        size = node.batch_size if self.size is None else self.size
        return size, node.device if self.device is NO_DEFAULT else self.device

    def close(self, node: Core, entries: dict[str, Child]) -> Core | None:
        """Return the result of a node, or None if it has no entries and is dropped."""
        if not entries and (self.filter_empty or (self.filter_empty is None and len(node._children()) > 0)):
            return None
        return node if self.inplace else self.build(node, entries)

    def build(self, node: Core, entries: dict[str, Child]) -> Core:
        """Build a node like ``node`` that holds the results."""
        return node._with_children(entries, batch_size=self.size, device=self.device, names=self.names)

    def write(self, root: Core) -> None:
        """Check all recorded results, then copy them into the leaves."""
        writes = Transaction()
        writes.split = True  # a result may overlap a leaf that is written before it is read
        for node, child, value, path in self.writes:
            if isinstance(child, Tensor) and isinstance(value, Tensor):
                try:
                    check_copied(child, path, value)
                except StructureError:
                    if (data := find_data(root, child)) is None:
                        raise
                    check_copied(child := data, path, value)
                writes.copy(child, value, path)
            elif isinstance(child, Tensor) or isinstance(value, Tensor):
                raise leaf_node_mismatch_error(child, value, path)
            elif has_entries(child):
                Update(writes, inplace=True, strict=True).read(child, value)
            else:
                check_unlocked(node, f"replace {show_path(path)}")
                writes.change(node._set_child, path[-1], value)
        writes.commit()


def accept_any_leaf(cls: type) -> bool:
    """Return True: the ``is_leaf`` of a call on nested collections."""
    return True


def parse_key_options(options: dict[str, bool]) -> tuple[bool, bool]:
    """Return the options ``named`` and ``nested_keys`` of ``apply``; TypeError if there are others."""
    named, nested_keys = options.pop("named", False), options.pop("nested_keys", False)
    if options:
        raise TypeError(f"apply() takes no {', '.join(options)}")
    return named, nested_keys
