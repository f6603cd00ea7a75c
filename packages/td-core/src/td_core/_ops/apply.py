"""Call a function on every leaf: ``apply``, ``apply_`` and ``named_apply``.

All forms share one iterative traversal. Only a lazy stack is traversed recursively, per member, so that its entries are
not stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._coerce import coerce
from .._collection import (
    LEAF_KINDS,
    Child,
    Core,
    add_key_note,
    leaf_node_mismatch_error,
    missing_key_error,
    replace_leaves,
    show_path,
)
from .._devices import as_device
from .._dim_names import check_names
from .._locking import check_unlocked
from .._mapping_views import IsLeaf
from .._plans import as_batch_size
from .._walks import has_entries
from .._writes.check import check_copied
from .._writes.run import Transaction
from .._writes.update import Update
from ..errors import BatchSizeError, StructureError
from ..typing import NO_DEFAULT, BatchSize, DeviceType, NoDefault
from .batch_size import fit_batch_size
from .operands import write_result
from .parameter_writes import find_data
from .shared_memory import are_equal, get_memory_key, may_share_memory

if TYPE_CHECKING:
    from typing_extensions import Self

Path = tuple[str, ...]

_MISSING: Any = object()
"""Placeholder for a node that another collection does not have."""


class ApplyMixin(Core):
    """The methods ``apply``, ``apply_`` and ``named_apply``."""

    __slots__ = ()

    def apply(
        self,
        fn: Callable[..., object],
        *others: Any,
        batch_size: BatchSize | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Any = None,
        **constructor_kwargs: Any,
    ) -> Any:
        """Call ``fn(leaf, *leaves_of_others)`` on every leaf and return a collection of the results.

        Args:
            fn: called with a leaf and the leaves of ``others`` under the same key; if it returns None, the entry is dropped.
            *others: collections with the same keys.
            batch_size: batch size of all nodes of the result; by default each node keeps its own.
            device: device of the result; by default the device of this collection.
            names: dim names of the result; by default those of this collection, unless the batch size changes.
            inplace: copy the results into the leaves and return this collection, which keeps its batch size and names. For
                a tensor under several keys, such as tied weights, ``fn`` is called once, at the first key.
            default: passed to ``fn`` in place of an entry that one of ``others`` does not have.
            filter_empty: True drops every node without entries, False drops no node, None drops nodes whose entries were
                all dropped. If no entry remains, the result is None.
            propagate_lock: lock the result if this collection is locked.
            call_on_nested: call ``fn`` on nested collections instead of on their leaves.
            is_leaf: takes the class of an entry; if it returns True, ``fn`` is called on the entry as a whole.
            out: collection that stores the results and is returned; if it is locked, they are copied into its entries.
            **constructor_kwargs: ``named=True`` and ``nested_keys`` as in :meth:`named_apply`; others raise TypeError.

        Raises:
            KeyPathError: one of ``others`` does not have an entry, and ``default`` is not given.
            BatchSizeError: the shape of a result does not start with the batch size, or the batch size of ``out`` differs from
                ``batch_size``.
            ValueError: both ``out`` and ``inplace`` are given.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.apply(lambda leaf: leaf + 1)["b", "c"]
        tensor(3)
        """
        named = nested_keys = False
        if constructor_kwargs:
            named = constructor_kwargs.pop("named", False)
            nested_keys = constructor_kwargs.pop("nested_keys", False)
            if constructor_kwargs:
                raise TypeError(f"apply() takes no {', '.join(constructor_kwargs)}")
        walk = _Walk(
            fn,
            named,
            nested_keys,
            inplace,
            default,
            filter_empty,
            _is_any_leaf if call_on_nested else is_leaf,
        )
        return walk.run(self, others, batch_size, device, names, propagate_lock, out)

    def named_apply(
        self,
        fn: Callable[..., object],
        *others: Any,
        nested_keys: bool = False,
        batch_size: BatchSize | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Any = None,
        **constructor_kwargs: object,
    ) -> Any:
        """Call ``fn(key, leaf, *leaves_of_others)`` on every leaf and return a collection of the results.

        ``key`` is the last key of the leaf's key path. With ``nested_keys`` it is the whole key path: a tuple for nested
        entries. The other arguments are those of :meth:`apply`.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.named_apply(lambda key, leaf: leaf if key == ("b", "c") else None, nested_keys=True)
        TensorDict(batch_size=[], fields={b: {c: i64[]}})
        """
        if constructor_kwargs:
            raise TypeError(f"named_apply() takes no {', '.join(constructor_kwargs)}")
        walk = _Walk(
            fn, True, nested_keys, inplace, default, filter_empty, _is_any_leaf if call_on_nested else is_leaf
        )
        return walk.run(self, others, batch_size, device, names, propagate_lock, out)

    def apply_(self, fn: Callable[..., object], *others: object, **kwargs: Any) -> Self:
        """Replace the values of every leaf by ``fn(leaf, *leaves_of_others)``, in place; return this collection.

        If ``fn`` returns None, the leaf is not changed. A tensor under several keys is changed once. The arguments are those
        of :meth:`apply`.

        >>> TensorDict({"a": 1}).apply_(lambda leaf: leaf + 1)["a"]
        tensor(2)
        """
        self.apply(fn, *others, inplace=True, **kwargs)
        return self


@dataclass
class _Walk:
    """Arguments and state of one call of ``apply``."""

    fn: Callable[..., Any]
    named: bool
    nested_keys: bool
    inplace: bool
    default: object
    filter_empty: bool | None
    is_leaf: IsLeaf | None
    size: torch.Size | None = None
    device: Any = NO_DEFAULT
    names: Any = NO_DEFAULT
    writes: list[tuple[Any, str, Child, Child, Path]] = field(default_factory=list)
    #: For in-place calls on leaves that may share memory: memory that was changed -> its key path and operands.
    changed: dict[object, tuple[Path, Sequence[object]]] | None = None

    def run(
        self,
        root: Any,
        others: tuple[object, ...],
        batch_size: BatchSize | None,
        device: Any,
        names: Any,
        propagate_lock: bool,
        out: Core,
    ) -> Any:
        """Traverse ``root`` and return the result of the call."""
        for other in others:
            if not isinstance(other, Core):
                raise TypeError(f"apply() goes through collections side by side; got {type(other).__name__}")
        if self.inplace and out is not None:
            raise ValueError("apply() writes into out= or, with inplace=True, into this collection; got both")
        if self.inplace:  # an in-place call cannot change the batch size and names
            if torch.compiler.is_compiling() or may_share_memory(root._leaves()):
                self.changed = {}
        elif batch_size is not None:
            self.size = as_batch_size(batch_size)
            self.names = None
        elif out is not None and out.batch_size != root.batch_size:
            self.size = out.batch_size
        if device is not NO_DEFAULT:
            self.device = None if device is None else as_device(device)
        if names is not NO_DEFAULT:
            self.names = None
        result = self.level(root, others, ())
        if self.inplace:
            self.write(root)
            return root if result is not None else None
        if result is None:
            return out
        if names is not NO_DEFAULT and names is not None:
            result._set_names(check_names(names, len(result.batch_size)))
        if out is not None:
            return write_result(out, result.batch_size, result, inplace=False)
        if propagate_lock and root._locked:
            result.lock_()
        return result

    def level(self, root: Core, others: tuple[Any, ...], path: Path) -> Any:
        """Apply ``fn`` below a node and return the new node, or None if it is dropped."""
        stacked = root._members_and_dim()
        if stacked is not None and self.size is None:
            return self.members(root, stacked[1], others, path)
        fn, named, nested_keys, is_leaf = self.fn, self.named, self.nested_keys, self.is_leaf
        # Compare lengths: torch.compile cannot trace the truth value of a tuple of nodes.
        plain, single = not self.inplace, len(others) == 0
        alone = single and not named
        # Use an explicit stack of the unfinished ancestors: recursion would limit the depth of a tree.
        above: list[Any] = []
        node, entries, name = root, {}, ""
        items = iter(dict(node._children()).items())
        size = node.batch_size if self.size is None else self.size
        device = node.device if self.device is NO_DEFAULT else self.device
        # By hand: the row `apply` of benchmarks/ops.py.
        while True:
            ndim = len(size)
            fitting: torch.Size | None = None
            free = plain and device is None
            for key, child in items:
                if isinstance(child, Tensor) or (is_leaf is not None and is_leaf(type(child))):
                    if not single:
                        rest = [self.other(other, key, path, child) for other in others]
                    if self.changed is not None and self.is_changed(
                        child, (*path, key), [] if single else rest
                    ):
                        entries[key] = child
                        continue
                    try:
                        if alone:
                            value = fn(child)
                        elif single:
                            value = fn((*path, key) if nested_keys and path else key, child)
                        elif named:
                            value = fn((*path, key) if nested_keys and path else key, child, *rest)
                        else:
                            value = fn(child, *rest)
                    except Exception as error:
                        add_key_note(error, (*path, key))
                        raise
                    if value is None:
                        continue
                    if free and isinstance(value, Tensor):
                        # Compare with the last accepted shape first: cheaper than a slice, and most shapes repeat.
                        try:
                            shape = value.shape
                        except RuntimeError:
                            pass  # a nested tensor of strided layout has no shape
                        else:
                            if shape == fitting or shape[:ndim] == size:
                                fitting = shape
                                entries[key] = value
                                continue
                    entries[key] = self.check_result(value, child, node, key, size, device, path)
                elif child._is_value:
                    kept = child
                    if type(child) in LEAF_KINDS:
                        kept = self.unwrap_child(child, node, key, path, others)
                        if kept is None:
                            continue
                        if isinstance(kept, Tensor):
                            entries[key] = self.check_result(kept, child, node, key, size, device, path)
                            continue
                    if self.size is not None:
                        # A single value accepts any batch size; a stack of values only a prefix of its batch size.
                        if kept._max_batch_size() is None:
                            kept = kept._with_children(kept._children(), batch_size=size)
                        else:
                            kept = fit_batch_size(kept, size, (*path, key))
                    entries[key] = kept
                else:
                    inner = (
                        others if single else tuple([self.other(other, key, path, child) for other in others])
                    )
                    stacked = child._members_and_dim()
                    if stacked is not None and self.size is None:
                        value = self.members(child, stacked[1], inner, (*path, key))
                        if value is not None:
                            entries[key] = value
                        continue
                    above.append((node, entries, items, others, path, size, device, name))
                    node, entries, others, path, name = child, {}, inner, (*path, key), key
                    items = iter(dict(node._children()).items())
                    if self.size is None:
                        size = node.batch_size
                    if self.device is NO_DEFAULT:
                        device = node.device
                    break
            else:
                result = None
                if entries or not self.is_dropped(node):
                    result = self.build(node, entries) if plain else node
                if not above:
                    return result
                key = name
                node, entries, items, others, path, size, device, name = above.pop()
                if result is not None:
                    entries[key] = result

    def unwrap_child(self, child: Any, node: Core, key: str, path: Path, others: tuple[object, ...]) -> Any:
        """Apply ``fn`` to the tensor that a proxy node wraps. Return a node, a tensor, or None if it is dropped."""
        results = [child, *[self.other(other, key, path, child) for other in others]]
        tensors = [item._unwrap() if isinstance(item, Core) else item for item in results]
        name = [(*path, key) if self.nested_keys and path else key] if self.named else []
        if self.changed is not None and self.is_changed(tensors[0], (*path, key), tensors[1:]):
            return child
        try:
            value = self.fn(*name, *tensors)
        except Exception as error:
            add_key_note(error, (*path, key))
            raise
        if value is None:
            return child if self.inplace else None
        if not self.inplace:
            return replace_leaves(child, iter((value,)))
        if value is not tensors[0]:
            self.writes.append((node, key, tensors[0], value, (*path, key)))
        return child

    def members(self, node: Core, dim: int, others: tuple[Any, ...], path: Path) -> Any:
        """Apply ``fn`` to each member of a lazy stack and return a stack of the results, or None if all are dropped."""
        given = [other for other in others if other is not _MISSING]
        for other in given:
            if other.batch_size[dim : dim + 1] != node.batch_size[dim : dim + 1]:
                raise BatchSizeError(
                    f"{show_path(path)} is a lazy stack of {node.batch_size[dim]} along dim {dim}, another collection has "
                    f"batch size {list(other.batch_size)} there"
                )
        kept = []

        def apply_to_part(member: Core, *parts: object) -> Any:
            left = iter(parts)
            rest = tuple([_MISSING if other is _MISSING else next(left) for other in others])
            result = self.level(member, rest, path)
            kept.append(result is not None)
            return self.build(member, {}) if result is None else result

        result = node._map_members(apply_to_part, *given)
        if not any(kept):
            return None
        return node if self.inplace else result

    def other(self, node: Any, key: str, path: Path, child: Child) -> Any:
        """Return the entry ``key`` of another collection; if it is missing, the default or ``_MISSING``."""
        leaf = not has_entries(child) or (self.is_leaf is not None and self.is_leaf(type(child)))
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
        return result

    def is_changed(self, child: Child, path: Path, rest: Sequence[Any]) -> bool:
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

    def check_result(
        self,
        value: Any,
        child: Child,
        node: Core,
        key: str,
        size: torch.Size,
        device: torch.device | None,
        path: Path,
    ) -> Child:
        """Convert a result to an entry. In place, record the write and return the old entry."""
        if self.inplace:
            if value is not child:
                if not isinstance(value, (Tensor, Core)):
                    value = coerce(value, size, device, (*path, key))
                self.writes.append((node, key, child, value, (*path, key)))
            return child
        return coerce(value, size, device, (*path, key))

    def is_dropped(self, node: Core) -> bool:
        """Return True if a node whose result has no entries is dropped."""
        return self.filter_empty is True or (self.filter_empty is None and len(node._children()) > 0)

    def build(self, node: Core, entries: dict[str, Child]) -> Any:
        """Build a node like ``node`` that holds the results."""
        return node._with_children(entries, batch_size=self.size, device=self.device, names=self.names)

    def write(self, root: Core) -> None:
        """Check all recorded results, then copy them into the leaves."""
        writes = Transaction()
        writes.split = True  # a result may overlap a leaf that is written before it is read
        for node, key, child, value, path in self.writes:
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
                writes.change(node._set_child, key, value)
        writes.commit()


def _is_any_leaf(cls: type) -> bool:
    return True
