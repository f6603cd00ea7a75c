"""Move collections between devices and to pinned or shared memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.dtypes import as_dtype
from .._torch.kernels import PLAIN
from .._tree.backends import get_backends
from .._tree.buffers import has_memory
from .._tree.components import move_to_meta
from .._tree.defaults import show_path, type_error, unwrap_entry
from .._tree.devices import as_device, set_device_labels, wait_for
from .._tree.locks import check_in_memory, check_unlocked_below
from .._tree.node import Core, CoreT, identity
from .._tree.stored_leaves import as_memory, is_stored
from .._tree.walks import Position, get_path, has_entries, list_holders, zip_walk
from .._writes.check import LEAF_ERRORS, describe_leaf, rephrase_error
from ..typing import DeviceType, DtypeLike, NestedKey
from .dtypes import CASTS, CastFilter, cast_some
from .locking import do_nothing, undo_on_exit, write_back_on_exit
from .operands import raise_at_leaf
from .shape import write_back

#: Number of dims that a leaf must have for each memory format.
_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


class Target(NamedTuple):
    """Parsed arguments of ``to``."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool | None
    memory_format: torch.memory_format | None
    spec: Core | None = None  # the result of attrs(), which has a device and dtype per leaf


def parse_target(
    args: tuple[Any, ...],
    device: DeviceType | None,
    dtype: DtypeLike | None,
    other: Any,
    non_blocking: bool | None,
    memory_format: torch.memory_format | None,
) -> Target:
    """Parse the arguments of ``to``: ``(device)``, ``(dtype)``, ``(device, dtype)`` or ``(other)``.

    Raise TypeError for any other argument, and for one that is given twice.
    """
    for arg in args:
        if arg is None:
            continue
        if isinstance(as_dtype(arg), torch.dtype) and dtype is None:
            dtype = arg
        elif isinstance(arg, bool) and non_blocking is None:
            non_blocking = arg
        elif isinstance(arg, (str, torch.device, int)) and not isinstance(arg, bool) and device is None:
            device = arg
        elif isinstance(arg, torch.memory_format) and memory_format is None:
            memory_format = arg
        elif isinstance(arg, (Tensor, Core)) and other is None:
            other = arg
        else:
            raise TypeError(
                "to() takes a device, a dtype, both, or another tensor or collection, then non_blocking; "
                f"got {arg!r} in {args!r}"
            )
    if other is not None:
        if not isinstance(other, (Tensor, Core)):
            raise type_error("to", other, "a tensor or a collection as other")
        device = other.device if device is None else device
        dtype = other.dtype if dtype is None else dtype  # type: ignore[union-attr]
    dtype = None if dtype is None else as_dtype(dtype)
    device = None if device is None else as_device(device)
    # A result of attrs() has no leaves, and each entry states a device and a dtype.
    spec = other if isinstance(other, Core) and other._children() and not other._leaves() else None
    return Target(device, dtype, non_blocking, memory_format, spec)


def _move_whole(node: CoreT, target: Target, batch_size: torch.Size | None, inplace: bool) -> CoreT | None:
    """Move all leaves at once; return ``node`` or a copy if its device stays, None if each leaf must be moved."""
    if target.device is None or target.device == node.device:
        if batch_size is not None:
            return _copy_with_batch_size(node, batch_size)
        return node if torch.compiler.is_compiling() else undo_on_exit(node, do_nothing)
    whole: CoreT | None = None if inplace else _move_by_backend(node, target.device, target.non_blocking)
    if whole is None:
        return None
    whole = whole if batch_size is None else _copy_with_batch_size(whole, batch_size)
    return write_back_on_exit(whole, node, _write_back_moved)


def convert_collection(
    node: CoreT,
    target: Target,
    accepts: CastFilter | None,
    batch_size: torch.Size | None,
    inplace: bool,
    pin: bool,
    threads: int | None,
) -> CoreT:
    """Convert a collection to the device, dtype and memory format of ``target``; see ``to``."""
    if target.dtype is None and target.memory_format is None and target.spec is None:
        whole = _move_whole(node, target, batch_size, inplace)
        if whole is not None:
            return whole
    source = node if target.spec is None else cast_by_attrs(node, target.spec, target, accepts)
    if target.dtype is not None and accepts is not None:
        source = cast_some(source, methodcaller("to", target.dtype), accepts)
        target = target._replace(dtype=None)
    result = _convert_entries(source, target, pin, threads)
    if inplace:
        take_over_leaves(node, result)
        result = node
    if target.device is not None and result.device != target.device:
        set_device_labels(result, target.device)
    if batch_size is not None:
        _change_batch_size(result, batch_size)
    return (
        undo_on_exit(result, do_nothing) if inplace else write_back_on_exit(result, node, _write_back_moved)
    )


def _convert_entries(source: CoreT, target: Target, pin: bool, threads: int | None) -> CoreT:
    """Return a collection of the converted leaves; an error of torch names the leaf."""
    leaves: list[Tensor] = []
    levels = source._flatten_leaves(leaves)
    try:
        moved = convert_leaves(leaves, target, pin=pin, threads=threads)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, "to", source, _make_mover(leaves, target.device, target.dtype, False), leaves)
    return source._unflatten(moved, levels)


def pin_collection(node: CoreT, threads: int | None, inplace: bool) -> CoreT:
    """Copy the leaves to pinned memory; see ``pin_memory``."""
    if inplace:
        check_in_memory(node, "pin")
        check_unlocked_below(node, "replace leaves")
    for attachment in get_backends(node):
        whole = attachment.pin(node)
        if whole is not None:
            return whole
    result = node._unflatten(_pin_leaves(node._leaves(), threads))
    if not inplace:
        return result
    take_over_leaves(node, result)
    return node


def share_leaves(node: Core) -> None:
    """Move the leaves to shared memory, in place; a leaf that is stored elsewhere becomes a copy."""
    check_in_memory(node, "share")
    leaves = node._leaves()
    if any(map(is_stored, leaves)):
        # Memory cannot be given to a stored tensor, so a copy in memory takes its place.
        take_over_leaves(node, node._unflatten(as_memory(leaves)))
    for leaf in node._leaves():
        try:
            # torch aborts the process if a leaf has no memory to share.
            if not leaf.is_nested and not has_memory(leaf):
                raise RuntimeError(f"a {type(leaf).__name__} has no memory of its own")
            leaf.share_memory_()
        except RuntimeError as error:
            raise rephrase_error(error, f"cannot share {describe_leaf(node, leaf)}: {error}") from error
    path = _find_values(node)
    if path is not None:
        warnings.warn(
            f"the values of {show_path(path)} are not shared: each process that receives the collection has a copy, in which "
            "writes of others do not appear; memmap(share_non_tensor=True) shares them, and exclude(key) leaves them out",
            stacklevel=3,
        )


def _find_values(node: Core) -> tuple[str, ...] | None:
    """Return the key path of an entry that holds Python values, or None."""
    todo: list[tuple[Core, Position]] = [(node, None)]
    while todo:
        level, position = todo.pop()
        for holder in list_holders(level):  # an uneven stack cannot read its entries
            for key, child in holder._children().items():
                if has_entries(child):
                    todo.append((child, (position, key)))
                elif not isinstance(child, Tensor) and not child._leaves():
                    return get_path(position, key)
    return None


def get_device_to_sync(source: torch.device, target: torch.device) -> torch.device | None:
    """Return the CUDA device to synchronize after an asynchronous copy to or from the host, or None."""
    if source.type == target.type or "cpu" not in (source.type, target.type):
        return None  # the stream, or torch's events between two devices, already order the copies
    device = source if target.type == "cpu" else target
    return device if device.type == "cuda" else None


def _find_devices_to_sync(sources: set[torch.device], target: torch.device) -> set[Any]:
    if torch.compiler.is_compiling():
        return set()  # a compiled graph orders the copies itself
    return {get_device_to_sync(source, target) for source in sources} - {None}


def convert_leaves(
    leaves: list[Tensor], target: Target, *, pin: bool = False, threads: int | None = None
) -> list[Tensor]:
    """Convert the leaves to the device, dtype and memory format of ``target``.

    By default (``non_blocking=None``) the copies run asynchronously, and the host waits once for all of them at the end.
    """
    device, dtype, non_blocking, memory_format, _ = target
    waiting: set[torch.device] = set()
    if device is not None:
        results = {leaf.device for leaf in leaves}
        if dtype is None and memory_format is None and results <= {device}:
            return as_memory(leaves)
        waiting = _find_devices_to_sync(results, device)
    to = _make_mover(leaves, device, dtype, bool(waiting) if non_blocking is None else non_blocking)
    if pin and device is not None and device.type != "cpu":
        # Without threads the map is lazy: one leaf is copied to the device while the next one is pinned.
        pinned: Iterable[Tensor] = _pin_leaves(leaves, threads) if threads else map(_pin, leaves)
        result = list(map(to, pinned))
    else:
        result = list(map(to, leaves))
    if memory_format is not None:
        result = [_set_memory_format(leaf, memory_format) for leaf in result]
    if non_blocking is None:
        wait_for(waiting)
    return result


def _set_memory_format(leaf: Tensor, memory_format: torch.memory_format) -> Tensor:
    dims = _CHANNELS_LAST.get(memory_format, leaf.ndim)
    return leaf.contiguous(memory_format=memory_format) if dims == leaf.ndim else leaf


def _make_mover(
    leaves: list[Tensor], device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool
) -> Callable[[Tensor], Tensor]:
    """Return the fastest function that converts each of the leaves to a device and dtype."""
    if device is None:
        if dtype is None:
            return identity
        # Tensor subclasses often implement only to(), not the methods of single dtypes.
        return (PLAIN.issuperset(map(type, leaves)) and CASTS.get(dtype)) or methodcaller("to", dtype)
    if device.type == "meta" and any(leaf.is_nested for leaf in leaves):
        return partial(move_to_meta, dtype=dtype)
    return methodcaller("to", device, dtype, non_blocking=non_blocking)


def _pin_leaves(leaves: list[Tensor], threads: int | None) -> list[Tensor]:
    """Copy CPU leaves to pinned memory, with ``threads`` threads; other leaves are returned unchanged."""
    if not threads:
        return list(map(_pin, leaves))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_pin, leaves))


def _pin(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.is_cpu else leaf


def _move_by_backend(node: Core, device: torch.device, non_blocking: bool | None) -> Any:
    """Let a storage backend move a collection as a whole; None if none does."""
    for backend in get_backends(node):
        moved = backend.move(node, device, non_blocking)
        if moved is not None:
            return moved
    return None


def take_over_leaves(target: Core, source: Core) -> None:
    """Replace the leaves of ``target`` by those of ``source`` under the same keys.

    Raise LockedError, before any leaf is replaced, if a node of ``target`` is locked.
    """
    check_unlocked_below(target, "replace leaves")
    for left, right in zip_walk(target, source):
        for key, child in dict(right._children()).items():
            if isinstance(unwrap_entry(child), Tensor):
                left._set_child(key, child)


def _write_back_moved(owner: Core, result: Core) -> None:
    """Write a result back to its source, on the devices and in the dtypes of the leaves there."""

    def back(leaf: Tensor, left: object) -> Tensor:
        return leaf.to(left.device, left.dtype) if isinstance(left, Tensor) else leaf

    write_back(owner, result.apply(back, owner, default=None))


def cast_by_attrs(node: CoreT, attrs: Core, target: Target, accepts: CastFilter | None) -> CoreT:
    """Cast each leaf to the device and dtype of its entry in ``attrs``, unless ``target`` sets them."""

    def cast_entry(key: NestedKey, leaf: Tensor) -> Tensor:
        told = attrs.get(key, None)
        if not isinstance(told, Core):
            return leaf
        # The fields of a TensorAttrs.
        device, dtype = getattr(told, "tgt_device", None), getattr(told, "tgt_dtype", None)
        if accepts is not None and not accepts((key,) if isinstance(key, str) else key, leaf):
            dtype = None
        return leaf.to(
            leaf.device if target.device is not None else device or leaf.device,
            leaf.dtype if target.dtype is not None else dtype or leaf.dtype,
            non_blocking=bool(target.non_blocking),
        )

    result: CoreT = node.named_apply(cast_entry, nested_keys=True, device=None, filter_empty=False)
    if node.device is not None and all(leaf.device == node.device for leaf in result._leaves()):
        set_device_labels(result, node.device)
    return result


def _copy_with_batch_size(node: CoreT, batch_size: torch.Size) -> CoreT:
    """Return a shallow copy with another batch size."""
    result = node._shallow_copy()
    _change_batch_size(result, batch_size)
    return result


def _change_batch_size(node: Any, batch_size: torch.Size) -> None:
    """Set the batch size by the setter of the kind."""
    node.batch_size = batch_size
