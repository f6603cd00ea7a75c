"""Run writes that were checked: one fused call where torch gives the same result, else leaf by leaf.

A :class:`Transaction` holds the writes of one operation. Whoever pairs a target with a source checks each write when it is
added, so that a failed check leaves the collection unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._plans.index import BoundIndex
from .._torch.kernels import PLAIN, Op, foreach, make_op, order_subclasses_first
from .._tree.coerce import NUMBERS
from .._tree.defaults import add_nested, show_path
from .._tree.node import Core, copy_leaf
from .._tree.shared_memory import group_overlapping, is_dense, may_share_memory
from .check import rephrase_error
from .positions import write_rows

Path = tuple[str, ...]

COPY = make_op("copy_", Tensor.copy_, "autograd")

_NO_DISPATCH = Tensor.__torch_dispatch__


class Transaction:
    """The checked writes of one operation, which :meth:`commit` runs.

    Attributes:
        split: the writes belong to several members of a lazy stack, whose values may be other members.
    """

    __slots__ = ("_changes", "_copies", "_values", "non_blocking", "split")

    def __init__(self, non_blocking: bool = False) -> None:
        self.non_blocking = non_blocking
        self.split = False
        self._copies: list[tuple[Tensor, Any, Path, BoundIndex | None]] = []
        self._values: list[tuple[Any, ...]] = []
        self._changes: list[tuple[Any, ...]] = []

    def copy(self, target: Tensor, value: Any, path: Path, place: BoundIndex | None = None) -> None:
        """Add the copy of a value into a leaf, or into its elements at an index; without one, a number fills the leaf."""
        self._copies.append((target, value, path, place))

    def put(self, node: Core, key: str, target: Core, index: object, value: object) -> None:
        """Check the write of a value at an index of a value node, the entry ``key`` of another node, and add it."""
        target._check_index_put(index, value)
        self.put_with(put_value, node, key, target, index, self.non_blocking, value)

    def put_with(self, function: Callable[..., object], *arguments: object) -> None:
        """Add a write of a value, the last argument, into a value node. These run first: they may still raise."""
        self._values.append((function, *arguments))

    def change(self, function: Callable[..., object], *arguments: object) -> None:
        """Add a change of the structure, which cannot fail. These run last."""
        self._changes.append((function, *arguments))

    def commit(self) -> None:
        """Run the writes: value nodes, leaves, then changes of the structure."""
        if self._changes and (self._copies or self._values):
            self._check_stores()
        targets = [copy[0] for copy in self._copies]
        values = [copy[1] for copy in self._copies]
        calls = self._values
        if self.split:  # clone before the first write, which may change another value
            values = clone_overlapping(targets, values)
            calls = [
                (*call, item._map(copy_leaf) if isinstance(item, Core) else item) for *call, item in calls
            ]
        for function, *arguments in calls:
            function(*arguments)
        if any(place is not None or isinstance(value, NUMBERS) for _, value, _, place in self._copies):
            for i in order_subclasses_first(targets):
                self._write(targets[i], values[i], *self._copies[i][2:])
        else:
            copy_leaves(targets, values, lambda i: show_path(self._copies[i][2]), self.non_blocking)
        for function, *arguments in self._changes:
            function(*arguments)

    def _check_stores(self) -> None:
        """Raise an error, before the first write, if a node refuses an entry that is stored last."""
        for function, *arguments in self._changes:
            owner = getattr(function, "__self__", arguments[0])
            if function in (getattr(owner, "_set_child", None), add_nested):
                owner._check_child(*arguments[-2:])

    def _write(self, target: Tensor, value: object, path: Path, place: BoundIndex | None) -> None:
        """Write a tensor or number at an index of a leaf, or into the whole leaf."""
        position = () if place is None else place.move_to_device_of(target)
        try:
            write_at(target, position, value, self.non_blocking)
        except (RuntimeError, TypeError) as error:
            message = f"cannot write {show_path(path)} at an index: {error}"
            raise rephrase_error(error, message) from error


def put_value(node: Core, key: str, target: Core, index: object, non_blocking: bool, value: object) -> None:
    """Write into a value node, and store the result if that is a new node."""
    written = target._index_put(index, value, non_blocking=non_blocking)
    if written is not target:
        node._set_child(key, written)


def write_at(target: Tensor, index: Any, value: Any, non_blocking: bool = False) -> None:
    """Write a number or tensor at an index of a leaf, cast to its dtype and device."""
    # torch converts dtype and device when it writes through a view, but not when it writes at an index tensor.
    # It quantizes float32 values only.
    if isinstance(value, Tensor) and target.is_quantized:
        value = value.dequantize() if value.is_quantized else value.float()
    elif isinstance(value, Tensor):
        value = value.to(target.device, target.dtype, non_blocking=non_blocking)
    elif target.is_cuda and any(
        isinstance(item, Tensor) for item in (index if type(index) is tuple else (index,))
    ):
        # torch would create the scalar on the CPU and synchronize for the copy.
        value = torch.full((), value, dtype=target.dtype, device=target.device)
    try:
        write_rows(target, index, value)
    except RuntimeError:  # torch refuses a value that shares memory with the leaf
        if not isinstance(value, Tensor) or _get_storage_id(target) != _get_storage_id(value):
            raise
        target[index] = value.clone()


def copy_all(targets: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> None:
    """Copy each value into its target; copy in list order if targets share memory.

    >>> target = torch.zeros(2)
    >>> copy_all([target], [torch.ones(2)])
    >>> target
    tensor([1., 1.])
    """
    foreach(COPY if is_order_free(targets) else Op(None, COPY.single), targets, values, non_blocking)


def copy_leaves(
    targets: list[Tensor], values: list[Tensor], name: Callable[[int], str], non_blocking: bool = False
) -> None:
    """Copy each value into its target. ``name`` maps the position of a target to its key, for messages."""
    order = order_subclasses_first(targets, values)
    if type(order) is list:
        targets, values = [targets[i] for i in order], [values[i] for i in order]
    try:
        copy_all(targets, values, non_blocking)
    except (RuntimeError, TypeError) as error:
        for i, target, value in zip(order, targets, values, strict=True):
            try:
                # Copying twice is harmless. torch refuses a value that partly overlaps its target, so clone it.
                target.copy_(value.clone() if is_overlapping(target, value) else value, non_blocking)
            except (RuntimeError, TypeError) as again:
                raise rephrase_error(again, f"cannot write {name(i)} in place: {again}") from error
        if not any(map(is_overlapping, targets, values)):
            raise


def try_copy_fused(targets: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> bool:
    """Copy checked leaves in one call. Return False if torch refuses a leaf; nothing is written then."""
    if COPY.fused is None or not is_order_free(targets):
        return False
    try:
        COPY.fused(targets, values, non_blocking)
    except RuntimeError:
        return False  # torch checks all targets before it writes one; the caller finds the key
    return True


def is_order_free(targets: list[Tensor]) -> bool:
    """Return True if the order of the writes does not matter: the targets do not overlap, or are not on a GPU."""
    # The first leaf is enough: torch does not fuse a call with leaves of several devices.
    if not targets or not targets[0].is_cuda or torch.compiler.is_compiling():
        return True
    return not may_share_memory(targets) or not group_overlapping(targets)


def clone_overlapping(targets: list[Tensor], values: list[Any]) -> list[Any]:
    """Clone each value that shares its storage with another target: that target may be written before the value is read."""
    if torch.compiler.is_compiling():  # fake tensors have no addresses to compare
        return values
    written, read = {*get_storage_ids(targets)}, get_storage_ids(values)
    if written.isdisjoint(read):
        return values
    return [
        value.clone() if value is not target and place in written else value
        for target, value, place in zip(targets, values, read, strict=True)
    ]


def get_storage_ids(leaves: list[Tensor]) -> list[int]:
    """Return one id per leaf; leaves that may overlap have equal ids."""
    if PLAIN.issuperset(map(type, leaves)):
        try:
            return [leaf.untyped_storage().data_ptr() for leaf in leaves]
        except RuntimeError:  # a leaf without storage raises this, or its subclass NotImplementedError
            pass
    return [*map(_get_storage_id, leaves)]


def _get_storage_id(leaf: Tensor) -> int:
    """Return the address of the storage of a leaf, or the id of a leaf without a single storage."""
    if isinstance(leaf, Tensor) and type(leaf).__torch_dispatch__ is _NO_DISPATCH:
        try:
            return leaf.untyped_storage().data_ptr()
        except RuntimeError:
            pass  # the leaf is under a functorch transform, or has no single storage
    return id(leaf)


def is_overlapping(leaf: Tensor, other: object) -> bool:
    """Return True if two tensors partly overlap, so that torch refuses to write to one while it reads the other."""
    if leaf is other or not isinstance(other, Tensor) or not leaf.numel() or not other.numel():
        return False
    if _get_storage_id(leaf) != _get_storage_id(other) or not (is_dense(leaf) and is_dense(other)):
        return False
    begin, end, first, last = *_get_byte_range(leaf), *_get_byte_range(other)
    if (begin, end) == (first, last):
        return leaf.stride() != other.stride()
    return begin < last and first < end


def _get_byte_range(leaf: Tensor) -> tuple[int, int]:
    """Return the first address of a dense leaf and the one after its last."""
    begin = leaf.data_ptr()
    return begin, begin + leaf.numel() * leaf.element_size()
