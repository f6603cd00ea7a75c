"""TensorDict: the dense kind, a dict of tensors and nodes with a batch size.

Tree walks iterate over nodes that are exactly TensorDicts, so the depth of nesting is limited only by memory. For a
node of another kind, a walk calls the method of the node. A walk copies the dict of each node first, so that a concurrent writer
cannot disturb it; the copy is reused as the dict of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from .._functions.entries import coerce_for, get_default, show_entry
from .._functions.join_levels import check_even, join_nested_tensors, join_nodes, zip_entries
from .._methods.collection import TensorDictBase
from .._plans.elements import JoinPlan
from .._plans.index import plan_index
from .._plans.plans import MultiPlan, ShapePlan, as_batch_size
from .._torch.dtypes import ScalarBeside
from .._torch.kernels import PLAIN, foreach, make_op
from .._torch.private import new_object
from .._transforms.pytree import register_mapping, register_with_subclasses
from .._tree.coerce import WRAPPED, build_nested, convert_source
from .._tree.components import apply_to_components
from .._tree.defaults import check_same_leaves, get_entry, leaf_node_mismatch_error, unwrap_entry
from .._tree.devices import as_device
from .._tree.dim_names import check_names, resize_names, take_names
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_no_entry
from .._tree.node import (
    FACTORIES,
    Child,
    Core,
    Walked,
    concurrent_change_error,
    copy_leaf,
    get_all_entries,
    replace_leaves,
)
from .._tree.stored_leaves import STORED, index_leaves
from .._tree.walks import has_entries
from ..errors import KeyPathError, KeyTakenError, StructureError
from ..typing import NO_DEFAULT, BatchSize, DeviceType, Names, NestedKey, NoDefault

if TYPE_CHECKING:
    from typing_extensions import Self

SelfT = TypeVar("SelfT", bound="TensorDict")
_COPIES = ("_shallow_copy", "_unflatten")
_CLONE = make_op("clone", copy_leaf)


def _make_node(
    cls: type[SelfT],
    data: dict[str, Child],
    batch_size: torch.Size,
    device: torch.device | None,
    names: Names | None,
) -> SelfT:
    """Build a node that holds the dict ``data`` itself, without checks. A function is faster than a classmethod."""
    node = new_object(cls)
    node._dict = data
    node._batch_size = batch_size
    node._device = device
    node._names = names
    node._locked = False
    node._lock_parents = node._backends = node._undo = None
    return node


def _read_source(
    source: object, batch_size: BatchSize | None, names: Sequence[str | None] | None
) -> tuple[Mapping[Any, object], Sequence[str | None] | None]:
    """Return the entries of the source of a TensorDict, and the dim names; raise ValueError if it has no entries."""
    if not isinstance(source, Core):
        source = convert_source(source, as_batch_size(batch_size))
    if isinstance(source, Core) and has_entries(source):
        if names is None and batch_size is not None and as_batch_size(batch_size) == source.batch_size:
            names = source._names
        return dict(get_all_entries(source)), names
    # After count_as_mapping(), a stack of values is a mapping too.
    if isinstance(source, Core) or not isinstance(source, Mapping):
        found = type(source).__name__
        raise ValueError(f"the source of a TensorDict is a mapping or a collection; got {found}")
    return source, names


class TensorDict(TensorDictBase):
    """A batched, nested ``dict[str, Tensor]`` that behaves like one tensor.

    Args:
        source: a mapping or collection of the entries; nested mappings become nested collections.
        batch_size: leading dims that every entry shares; empty by default.
        device: device to which every entry is moved; None keeps the device of each entry.
        names: a name or None per batch dim.
        non_blocking: as in :meth:`torch.Tensor.to`, for entries that change device.
        lock: lock the new collection.
        **kwargs: entries as keywords, instead of ``source``.

    Raises:
        BatchSizeError: the leading dims of an entry differ from the batch size.
        ValueError: ``source`` is not a mapping, or is combined with keyword entries.

    >>> td = TensorDict({"a": torch.zeros(3, 4), "b": {"c": torch.ones(3)}}, batch_size=[3])
    >>> td
    TensorDict(batch_size=[3], fields={a: f32[4], b: {c: f32[]}})
    >>> td[0]["b", "c"]
    tensor(1.)
    """

    __slots__ = (
        "__weakref__", "_backends", "_batch_size", "_device", "_dict", "_lock_parents", "_locked",
        "_names", "_passed", "_undo",
    )  # fmt: skip

    _dict: dict[str, Child]
    _batch_size: torch.Size
    _device: torch.device | None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # For speed, these copies do not call _map; a class that overrides it gets the defaults, which do.
        for name in _COPIES if "_map" in cls.__dict__ else ():
            if name not in cls.__dict__:
                setattr(cls, name, getattr(Core, name))

    def __init__(
        self,
        source: Mapping[Any, Any] | Core | None = None,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: object,
    ) -> None:
        if source is None:
            source = kwargs
        elif kwargs:
            raise ValueError(
                f"give the entries as a mapping or as keywords, not both; got keywords {list(kwargs)}"
            )
        # Hot path: most sources are dicts.
        if type(source) is not dict:
            source, names = _read_source(source, batch_size, names)
        self._dict = {}
        self._batch_size = size = as_batch_size(batch_size)
        self._device = None if device is None else as_device(device)
        self._names = None if names is None else check_names(names, len(size))
        self._locked = False
        self._lock_parents = self._backends = self._undo = None
        self._fill(source, bool(non_blocking))
        if lock:
            self.lock_()

    def _fill(self, source: Mapping[Any, object], non_blocking: bool) -> None:
        """Check and store the entries of a mapping, with a fast path for plain tensors under string keys."""
        data, size, device, ndim = self._dict, self._batch_size, self._device, len(self._batch_size)
        fitting: torch.Size | None = None
        if len(source) > 8 and ndim == 0 and device is None:  # then one check of all types is faster
            entries = {**source}
            if {*map(type, entries)} == {str} and PLAIN.issuperset(map(type, entries.values())):
                data.update(entries)
                return
        for key, value in source.items():
            if type(key) is not str:
                self._fill_nested(source, key, value, non_blocking)
                continue
            if device is None:
                if isinstance(value, Tensor) and type(value) not in WRAPPED:
                    if ndim == 0:
                        data[key] = value
                        continue
                    # Consecutive leaves often have equal shapes, and comparing two sizes is cheaper than slicing one.
                    try:
                        shape = value.shape
                    except RuntimeError:
                        pass  # a strided nested tensor has no shape
                    else:
                        if shape == fitting or shape[:ndim] == size:
                            data[key] = value
                            fitting = shape
                            continue
                elif type(value) is dict and self._names is None:
                    data[key] = child = build_nested(value, size, None, (key,))
                    if child._names is not None:
                        take_names(self, child)
                    continue
            # Skip the check for cycles: no node can contain this one while it is under construction.
            data[key] = entry = coerce_for(self, value, (key,), non_blocking)
            take_names(self, entry)

    def _fill_nested(
        self, source: Mapping[object, object], key: NestedKey, value: object, non_blocking: bool
    ) -> None:
        """Store an entry under a nested key. Raise KeyTakenError if the mapping also has the first part as a key."""
        path = unravel_key_to_tuple(key)
        if len(path) > 1 and path[0] in source:
            raise KeyTakenError(
                f"the source has both the key {path[0]!r} and the nested key {path!r}; give one of them"
            )
        self._set_path(path, value, non_blocking=non_blocking)

    _make: Any = classmethod(_make_node)

    @classmethod
    def _wrap_dense(cls, result: object) -> Any:
        if not isinstance(result, TensorDict) or isinstance(result, cls):
            return result
        return cls._make(dict(result._dict), result._batch_size, result._device, result._names)

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims that all entries share; settable if the shape of every entry starts with the new value.

        >>> td = TensorDict({"a": torch.zeros(3, 4)})
        >>> td.batch_size = [3]
        >>> td.batch_size
        torch.Size([3])
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        size = as_batch_size(batch_size)
        if self._locked:
            check_no_entry(self, "change the batch size of")
        self._change_batch_size(size)

    @property
    def device(self) -> torch.device | None:
        """Device of every entry, or None if entries may be on different devices."""
        return self._device

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._names = resize_names(self._names, len(batch_size))
        self._batch_size = batch_size

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device

    def _children(self) -> dict[str, Child]:
        return self._dict

    def _get_child(self, key: str) -> Child:
        child = self._dict.get(key, NO_DEFAULT)
        if child is NO_DEFAULT:  # another thread may have removed the key after it was listed
            raise KeyPathError(f"key {key!r} not found in {type(self).__name__}")
        return child

    def _tree_children(self) -> list[Child]:
        return list(self._dict.values())

    def __contains__(self, key: object) -> bool:
        """Return True if the entry ``key``, a string or a key path, exists."""
        return key in self._dict if type(key) is str else super().__contains__(key)

    def _set_child(self, key: str, value: Child) -> None:
        self._dict[key] = value

    def _add_child(self, key: str, value: Core) -> Child:
        return self._dict.setdefault(key, value)

    def _set_children(self, values: Mapping[str, Child]) -> None:
        self._dict.update(values)

    def _del_child(self, key: str) -> None:
        del self._dict[key]

    def _with_children(
        self,
        children: Mapping[str, Child],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        return _make_node(
            type(self),
            dict(children),
            self._batch_size if batch_size is None else batch_size,
            self._device if device is NO_DEFAULT else device,
            self._names if names is NO_DEFAULT else names,
        )

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: object) -> Self: ...
    def __getitem__(self, index: object) -> Any:
        """Return an entry by key, or index all entries along the batch dims and return a collection."""
        if type(index) is str:
            try:
                entry = self._dict[index]
            except KeyError:
                entry = get_entry(self, (index,))
            return entry if isinstance(entry, Tensor) else show_entry(entry)
        if type(index) is tuple:
            result = self._get_nested(index)
            if result is not None:
                return result if isinstance(result, Tensor) else show_entry(result)
        elif not isinstance(index, (str, list)):
            plan = plan_index(index, self._batch_size)
            return index_leaves(self, plan) if STORED else self._transform(plan)
        return super().__getitem__(index)

    def _get_nested(self, path: tuple[object, ...]) -> Child | None:
        """Return the entry at a key path that crosses only TensorDicts, or None if the general path must be used."""
        node: Any = self
        for part in path:
            if type(part) is not str or not isinstance(node, TensorDict):
                return None
            node = node._dict.get(part)
        return None if node is self else node

    def get(self, key: NestedKey, *args: Any, **kwargs: Any) -> Any:
        """Return the entry ``key``, or a default if it is missing; see :meth:`TensorCollection.get`.

        >>> td = TensorDict({"a": {"b": 1}})
        >>> td.get(("a", "b")), td.get("c"), td.get("c", 0)
        (tensor(1), None, 0)
        """
        if not kwargs:
            result = (
                self._dict.get(key)
                if type(key) is str
                else self._get_nested(key)
                if type(key) is tuple
                else None
            )
            if result is not None:
                return result if isinstance(result, Tensor) else unwrap_entry(result)
            if type(key) is str and len(args) < 2:
                if not args:
                    return get_default(self, key)
                if args[0] is not NO_DEFAULT:
                    return args[0]
        return super().get(key, *args, **kwargs)

    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Self:
        """Copy a value into an existing entry, in place; see :meth:`TensorCollection.set_`.

        >>> TensorDict({"a": torch.zeros(2)}).set_("a", torch.ones(2))["a"]
        tensor([1., 1.])
        """
        held = self._dict.get(key) if type(key) is str else None
        if type(held) in PLAIN and type(item) in PLAIN:
            try:
                if item.shape == held.shape:  # type: ignore[union-attr]
                    held.copy_(item, non_blocking)  # type: ignore[union-attr]
                    return self
            except RuntimeError:
                pass  # the general path raises an error that names the entry
        return super().set_(key, item, non_blocking=non_blocking)

    def __setitem__(self, index: object, value: object) -> None:
        """Store an entry by key, or write ``value`` into all entries at an index."""
        if type(index) is str or (type(index) is tuple and index and type(index[0]) is str):
            self._set_path(index, value)
        elif type(index) is tuple or isinstance(index, str):
            super().__setitem__(index, value)
        else:
            self._assign(index, value)

    def _set_path(
        self, key: NestedKey, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        # Fast path for the common case: a plain tensor under a flat key.
        if isinstance(value, Tensor) and type(value) not in WRAPPED:
            node: Any = self
            name: object = key
            if type(key) is not str:
                node = None
                if type(key) is tuple and len(key) > 1 and type(key[-1]) is str:
                    node, name = self._get_nested(key[:-1]), key[-1]
                    if type(node) is not TensorDict:  # a subclass can store its entries elsewhere
                        node = None
            if node is not None and not node._locked and node._device is None:
                size = node._batch_size
                try:
                    if not size or value.shape[: len(size)] == size:
                        node._dict[name] = value
                        return
                except RuntimeError:
                    pass  # a strided nested tensor has no shape
        super()._set_path(key, value, prefix, non_blocking=non_blocking)

    def _flatten_leaves(self, out: list[Tensor]) -> Walked:
        level: dict[str, Any] = {**self._dict}
        if PLAIN.issuperset(map(type, level.values())):
            out += level.values()
            return level
        append, others, treedef = out.append, False, [level]
        todo: list[dict[str, Child]] = []
        # By hand: the row `add scalar` of benchmarks/ops.py.
        while True:
            for child in level.values():
                if isinstance(child, Tensor):
                    append(child)
                elif type(child) is TensorDict:
                    todo.append(child._dict)
                else:
                    others = child._flatten_leaves(out) != [] or others
            if not todo:
                return tuple(treedef) if others else treedef
            level = {**todo.pop()}
            treedef.append(level)

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: ScalarBeside | None = None
    ) -> None:
        shaped: dict[int, Tensor] = {}
        ndim = len(self._batch_size)
        todo = [self._dict]
        while todo:
            for child in list(todo.pop().values()):
                if type(child) is TensorDict:
                    todo.append(child._dict)
                    continue
                if scalar is not None:
                    if isinstance(child, Tensor):
                        out.append(scalar(child, value))
                    else:
                        child._broadcast_to_leaves(value, out, scalar)
                    continue
                extra = (child.ndim if isinstance(child, Tensor) else len(child.batch_size)) - ndim
                part = shaped.get(extra)
                if part is None:
                    part = shaped[extra] = value.reshape((*value.shape, *[1] * extra))
                if isinstance(child, Tensor):
                    out.append(part)
                else:
                    child._broadcast_to_leaves(part, out)

    def _flatten_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        append = out.append
        todo: list[tuple[dict[str, Child], Mapping[str, Child], tuple[str, ...]]] = [
            (self._dict, other._children(), path)
        ]
        while todo:
            left, right, prefix = todo.pop()
            if len(left) != len(right):
                check_same_leaves(left, right, prefix)
            for key, wanted in left.copy().items():
                try:
                    child = right[key]
                except KeyError:
                    check_same_leaves(left, right, prefix)
                    if isinstance(wanted, Tensor) or has_entries(wanted):
                        raise concurrent_change_error(other) from None
                    continue
                if isinstance(wanted, Tensor):
                    if not isinstance(child, Tensor):
                        raise leaf_node_mismatch_error(wanted, child, (*prefix, key))
                    append(child)
                elif isinstance(child, Tensor):
                    raise leaf_node_mismatch_error(wanted, child, (*prefix, key))
                elif type(wanted) is TensorDict:
                    todo.append((wanted._dict, child._children(), (*prefix, key)))
                else:
                    wanted._flatten_other(child, out, (*prefix, key))

    def _zip_leaves(
        self, other: Core, left: list[Tensor], right: list[Tensor], values: list[Core] | None = None
    ) -> Walked:
        if not isinstance(other, TensorDict):
            return super()._zip_leaves(other, left, right, values)
        level: dict[str, Any] = {**self._dict}
        level_other = other._dict
        if PLAIN.issuperset(map(type, level.values())):
            beside: list[Any] = list(map(level_other.get, level))
            if len(level) == len(level_other) and PLAIN.issuperset(map(type, beside)):
                left += level.values()
                right += beside
                return level
        add, add_other = left.append, right.append
        start = len(left)
        treedef = [level]
        todo: list[tuple[dict[str, Child], dict[str, Child]]] = []
        # By hand: the row `add td` of benchmarks/ops.py.
        while len(level) == len(level_other):
            for key, child in level.items():
                result = level_other.get(key)
                if isinstance(child, Tensor):
                    if not isinstance(result, Tensor):
                        break
                    add(child)
                    add_other(result)
                elif type(child) is TensorDict:
                    if type(result) is not TensorDict:
                        break
                    todo.append((child._dict, result._dict))
                elif isinstance(result, Core):
                    try:
                        child._zip_leaves(result, left, right, values)
                    except StructureError:
                        break
                else:
                    break
            else:
                if not todo:
                    return treedef
                data, level_other = todo.pop()
                level = {**data}
                treedef.append(level)
                continue
            break
        # The general walk tracks key paths: it names the difference, or accepts trees that differ only in values or kinds.
        del left[start:], right[start:]
        super()._zip_leaves(other, left, right, values)
        return None

    def _unflatten(self, leaves: Sequence[Tensor], treedef: Walked = None) -> Self:
        if treedef is None:
            return super()._unflatten(leaves)
        if type(treedef) is dict:
            return _make_node(
                type(self), dict(zip(treedef, leaves)), self._batch_size, self._device, self._names
            )
        provided = iter(leaves)
        root = _make_node(type(self), {}, self._batch_size, self._device, self._names)
        todo: list[TensorDict] = [root]
        for level in treedef:
            todo.pop()._dict = level
            for key, child in level.items():
                if isinstance(child, Tensor):
                    level[key] = next(provided)
                elif type(child) is TensorDict:
                    # The loop sets the dict of this node when it pops the node from the stack.
                    level[key] = node = _make_node(
                        TensorDict, level, child._batch_size, child._device, child._names
                    )
                    todo.append(node)
                else:
                    level[key] = replace_leaves(child, provided)
        return root

    def _shallow_copy(self) -> Self:
        root = _copy_node(self)
        todo = [root._dict]
        # By hand: the row `clone shallow` of benchmarks/ops.py.
        while todo:
            level = todo.pop()
            for key, child in level.items():
                if isinstance(child, Tensor):
                    continue
                if type(child) is TensorDict:
                    level[key] = node = _copy_node(child)
                    todo.append(node._dict)
                else:
                    level[key] = child._shallow_copy()
        return root

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        if fn is copy_leaf:
            leaves: list[Tensor] = []
            levels = self._flatten_leaves(leaves)
            if type(levels) is not tuple:  # nodes of other kinds have their own _map
                return self._unflatten(foreach(_CLONE, leaves, plain=type(levels) is dict), levels)
        root = _copy_node(self)
        todo = [root._dict]
        while todo:
            level = todo.pop()
            for key, child in level.items():
                if isinstance(child, Tensor):
                    level[key] = fn(child)
                elif type(child) is TensorDict:
                    level[key] = node = _copy_node(child)
                    todo.append(node._dict)
                else:
                    level[key] = child._map(fn)
        return root

    def _transform(self, plan: ShapePlan) -> Self:
        leaf, lead, n, old = plan.leaf, plan.lead, plan.n, self._batch_size
        # Hot path: slicing and building a torch.Size dominate the time of a small operation, so avoid both.
        size = torch.Size(lead) if n == len(old) else torch.Size((*lead, *old[n:])) if lead else old[n:]
        names = None if self._names is None else plan.rename_dims(self._names)
        level = {**self._dict}
        root = _make_node(type(self), level, size, self._device, names)
        todo: list[dict[str, Child]] = []
        # By hand: the row `view` of benchmarks/ops.py.
        while True:
            for key, child in level.items():
                if isinstance(child, Tensor):
                    try:
                        level[key] = leaf(child)
                    except (RuntimeError, ValueError) as error:
                        level[key] = apply_to_components(plan, key, child, error)
                elif type(child) is TensorDict:
                    data = {**child._dict}
                    inner = child._batch_size
                    level[key] = _make_node(
                        TensorDict,
                        data,
                        size if inner == old else torch.Size(lead + inner[n:]),
                        child._device,
                        None if child._names is None else plan.rename_dims(child._names),
                    )
                    todo.append(data)
                else:
                    level[key] = child._transform(plan)
            if not todo:
                return root
            level = todo.pop()

    def _transform_multi(self, plan: MultiPlan) -> tuple[Self, ...]:
        leaf = plan.leaf
        roots = self._make_empty_parts(plan)
        todo = [(self._dict, [root._dict for root in roots])]
        # By hand: the row `unbind` of benchmarks/ops.py.
        while todo:
            source, targets = todo.pop()
            for key, child in source.copy().items():
                if isinstance(child, Tensor):
                    try:
                        pieces = leaf(child)
                    except (RuntimeError, ValueError) as error:
                        pieces = apply_to_components(plan, key, child, error)
                    for target, piece in zip(targets, pieces):
                        target[key] = piece
                elif type(child) is TensorDict:
                    shells = child._make_empty_parts(plan)
                    for target, shell in zip(targets, shells):
                        target[key] = shell
                    todo.append((child._dict, [shell._dict for shell in shells]))
                else:
                    for target, piece in zip(targets, child._transform_multi(plan)):
                        target[key] = piece
        return tuple(roots)

    def _make_empty_parts(self, plan: MultiPlan) -> list[Self]:
        """Build one empty node per part of a plan that splits leaves."""
        cls, device, n = type(self), self._device, plan.n
        tail = self._batch_size[n:]
        names = None if self._names is None else plan.rename_dims(self._names)
        leads = plan.leads
        if leads and len(leads[0]) < n:
            # All parts of an unbind have the same batch size.
            sizes = [torch.Size(leads[0] + tail)] * len(leads)
        else:
            sizes = [torch.Size(lead + tail) for lead in leads]
        return [_make_node(cls, {}, size, device, names) for size in sizes]

    def _join(self, items: Sequence[Core], plan: JoinPlan, path: tuple[str, ...] = ()) -> Self:
        leaf, lead, n = plan.leaf, plan.lead, plan.n
        names = None if self._names is None else plan.rename_dims(self._names)
        old = self._batch_size
        size = plan.resize_batch(old)
        columns: list[dict[str, Any]] = [
            {**item._dict} if type(item) is TensorDict else item._get_join_entries(self, plan, path)
            for item in items
        ]
        # Reuse the copied dict of the first item for the result, and replace its entries one by one.
        target = columns[0]
        root, prefix = _make_node(type(self), target, size, self._device, names), path
        todo: list[tuple[list[dict[str, object]], tuple[str, ...]]] = []
        # By hand: the row `stack` of benchmarks/ops.py.
        while True:
            for key, values in zip_entries(columns, prefix):
                child = values[0]
                if isinstance(child, Tensor):
                    try:
                        target[key] = leaf(values)
                    except (RuntimeError, TypeError, ValueError) as error:
                        target[key] = join_nested_tensors(values, plan, (*prefix, key), error)
                elif _DENSE.issuperset(map(type, values)):
                    below = [{**value._dict} for value in values]
                    if not below[0]:  # no join of leaves would raise for different sizes
                        check_even(values, n, (*prefix, key))
                    target[key] = _make_node(
                        TensorDict,
                        below[0],
                        size if child._batch_size == old else torch.Size(lead + child._batch_size[n:]),
                        child._device,
                        None if child._names is None else plan.rename_dims(child._names),
                    )
                    todo.append((below, (*prefix, key)))
                else:
                    target[key] = join_nodes(values, plan, (*prefix, key))
            if not todo:
                return root
            columns, prefix = todo.pop()
            target = columns[0]


def _copy_node(node: SelfT) -> SelfT:
    """Return an unlocked shallow copy of one node, whose entries a walk then replaces one by one."""
    # Do not use dict.copy(): torch.compile would keep the old entries as outputs of a region that is compiled once.
    return _make_node(type(node), {**node._dict}, node._batch_size, node._device, node._names)


_DENSE = frozenset({TensorDict})

register_with_subclasses(TensorDict, register_mapping)
FACTORIES.dense = partial(_make_node, TensorDict)
