"""Move collections between devices and to pinned or shared memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from .._torch.dtypes import as_dtype
from .._torch.kernels import PLAIN
from .._tree.backends import get_backends
from .._tree.buffers import as_memory, has_memory, is_stored
from .._tree.defaults import unwrap_entry
from .._tree.devices import as_device, set_device_labels, wait_for
from .._tree.locks import check_in_memory, check_unlocked_below
from .._tree.node import Core, identity
from .._tree.walks import zip_walk
from .._writes.check import LEAF_ERRORS, describe_leaf, rephrase_error
from ..typing import NO_DEFAULT, DeviceType, DtypeLike, NestedKey, NoDefault
from .dtypes import CASTS, CastFilter, DtypeMixin, cast_some
from .locking import do_nothing, undo_on_exit, write_back_on_exit
from .operands import raise_at_leaf
from .shape import write_back

SelfT = TypeVar("SelfT", bound="DeviceMixin")


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
    spec = None
    if other is not None:
        if isinstance(other, Core) and other._children() and not other._leaves():
            spec = other
        device = other.device if device is None else device
        dtype = other.dtype if dtype is None else dtype
    dtype = None if dtype is None else as_dtype(dtype)
    return Target(None if device is None else as_device(device), dtype, non_blocking, memory_format, spec)


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


def move(
    leaves: list[Tensor], target: Target, *, pin: bool = False, threads: int | None = None
) -> list[Tensor]:
    """Convert the leaves to the device, dtype and memory format of ``target``.

    By default (``non_blocking=None``) the copies run asynchronously, and the host waits once for all of them at the end.
    """
    device, dtype, non_blocking, memory_format, _ = target
    waiting: set[Any] = set()
    if device is not None:
        results = {leaf.device for leaf in leaves}
        if dtype is None and memory_format is None and results <= {device}:
            return as_memory(leaves)
        waiting = _find_devices_to_sync(results, device)
    to = _move_leaves(leaves, device, dtype, bool(waiting) if non_blocking is None else non_blocking)
    if pin and device is not None and device.type != "cpu":
        # Without threads the map is lazy: one leaf is copied to the device while the next one is pinned.
        leaves = pin_leaves(leaves, threads) if threads else map(_pin, leaves)  # type: ignore[assignment]
    result = list(map(to, leaves))
    if memory_format is not None:
        result = [_set_memory_format(leaf, memory_format) for leaf in result]
    if non_blocking is None:
        wait_for(waiting)
    return result


def _set_memory_format(leaf: Tensor, memory_format: torch.memory_format) -> Tensor:
    dims = _CHANNELS_LAST.get(memory_format, leaf.ndim)
    return leaf.contiguous(memory_format=memory_format) if dims == leaf.ndim else leaf


def _move_leaves(
    leaves: list[Tensor], device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool
) -> Callable[[Tensor], Tensor]:
    if device is None:
        if dtype is None:
            return identity
        # Tensor subclasses often implement only to(), not the methods of single dtypes.
        return (PLAIN.issuperset(map(type, leaves)) and CASTS.get(dtype)) or methodcaller("to", dtype)
    return methodcaller("to", device, dtype, non_blocking=non_blocking)


def pin_leaves(leaves: list[Tensor], threads: int | None) -> list[Tensor]:
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


def write_moved_back(target: Core, source: Core) -> None:
    """Replace the leaves of ``target`` by those of ``source`` under the same keys.

    Raise LockedError, before any leaf is replaced, if a node of ``target`` is locked.
    """
    check_unlocked_below(target, "replace leaves")
    for left, right in zip_walk(target, source):
        for key, child in dict(right._children()).items():
            if isinstance(unwrap_entry(child), Tensor):
                left._set_child(key, child)


def _write_moved(owner: Core, result: Core) -> None:
    def back(leaf: Tensor, left: object) -> Tensor:
        return leaf.to(left.device, left.dtype) if isinstance(left, Tensor) else leaf

    write_back(owner, result.apply(back, owner, default=None))


class DeviceMixin(DtypeMixin):
    """The methods ``to``, ``cpu`` and ``cuda``, and those for pinned and shared memory."""

    __slots__ = ()

    def to(
        self,
        *args: object,
        device: DeviceType | None = None,
        dtype: DtypeLike | None = None,
        other: object = None,
        non_blocking: bool | None = None,
        memory_format: torch.memory_format | None = None,
        batch_size: Any = None,
        inplace: bool = False,
        non_blocking_pin: bool = False,
        num_threads: int | None = None,
        cast_filter: CastFilter | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        """Convert the leaves to another device or dtype; return this collection itself if no leaf changes.

        As a context manager (``with td.to(device) as moved:``), the result is copied back into this collection on exit, in
        the original dtypes.

        Args:
            *args: ``(device)``, ``(dtype)``, ``(device, dtype)`` or ``(other)``, then ``non_blocking``.
            device: device of every leaf and of the resulting collection.
            dtype: dtype of every leaf; Python types are accepted as in torch, so ``float`` means float64.
            other: a tensor or collection whose device and dtype are used, or the result of :meth:`attrs`, which has a device
                and dtype per leaf. Explicit ``device`` and ``dtype`` arguments take precedence.
            non_blocking: return before the copies are complete, as in :meth:`torch.Tensor.to`. By default they run
                concurrently and are complete on return.
            memory_format: applied to the leaves with the number of dims that the format requires.
            batch_size: batch size of the result.
            inplace: replace the leaves of this collection instead of returning a new one.
            non_blocking_pin: copy CPU leaves to pinned memory first.
            num_threads: number of threads that copy leaves to pinned memory.
            cast_filter: takes the key path (a tuple) and the leaf; if it returns False, the leaf keeps its dtype. None casts
                all leaves and overrides the filter that a class declares.

        Raises:
            TypeError: a positional argument has another type, or is given twice.

        >>> td = TensorDict({"a": torch.zeros(2)}).to("cpu", torch.float64)
        >>> td.device, td["a"].dtype, td.to("cpu") is td
        (device(type='cpu'), torch.float64, True)
        """
        target = parse_target(args, device, dtype, other, non_blocking, memory_format)
        goal = target.device
        source = self
        accepts = self._schema.cast_filter if cast_filter is NO_DEFAULT else cast_filter
        moves_only = target.dtype is None and target.memory_format is None and target.spec is None
        if target.spec is not None:
            source = _cast_by_attrs(self, target.spec, target, accepts)
        if target.dtype is not None and accepts is not None:
            source = cast_some(source, methodcaller("to", target.dtype), accepts)
            target = target._replace(dtype=None)
        elif moves_only and (goal is None or goal == self.device):
            if batch_size is not None:
                return _resize_batch(self, batch_size)
            return self if torch.compiler.is_compiling() else undo_on_exit(self, do_nothing)
        elif moves_only and goal is not None and not inplace:
            whole: Self | None = _move_by_backend(self, goal, non_blocking)
            if whole is not None:
                whole = whole if batch_size is None else _resize_batch(whole, batch_size)
                return write_back_on_exit(whole, self, _write_moved)
        leaves: list[Tensor] = []
        levels = source._flatten_leaves(leaves)
        try:
            moved = move(leaves, target, pin=non_blocking_pin, threads=num_threads)
        except LEAF_ERRORS as error:
            raise_at_leaf(error, "to", source, _move_leaves(leaves, goal, target.dtype, False), leaves)
        result: Any = source._unflatten(moved, levels)
        if inplace:
            write_moved_back(self, result)
            result = self
        if goal is not None and result.device != goal:
            set_device_labels(result, goal)
        if batch_size is not None:
            result.batch_size = batch_size
        return undo_on_exit(result, do_nothing) if inplace else write_back_on_exit(result, self, _write_moved)  # type: ignore[no-any-return]

    def cpu(self, **kwargs: Any) -> Self:
        """Move the collection to CPU memory: ``to("cpu", **kwargs)``.

        >>> TensorDict({"a": 1}).cpu().device
        device(type='cpu')
        """
        return self.to("cpu", **kwargs)

    def cuda(self, device: DeviceType | None = None, **kwargs: Any) -> Self:
        """Move the collection to a CUDA device, by default the current one: ``to(device, **kwargs)``.

        >>> TensorDict({"a": 1}).cuda().device.type  # doctest: +SKIP
        'cuda'
        """
        if device is None:
            device = "cuda"
        return self.to(f"cuda:{device}" if isinstance(device, int) else device, **kwargs)

    def pin_memory(self, num_threads: int | None = None, inplace: bool = False) -> Self:
        """Copy the leaves to pinned memory, from which copies to a GPU can be asynchronous.

        Args:
            num_threads: number of threads that copy leaves; None or 0: copy them in the calling thread.
            inplace: replace the leaves of this collection instead of returning a new one.

        >>> TensorDict({"a": torch.zeros(2)}).pin_memory()["a"].is_pinned()  # doctest: +SKIP
        True
        """
        if inplace:
            check_in_memory(self, "pin")
            check_unlocked_below(self, "replace leaves")
        for attachment in get_backends(self):
            whole = attachment.pin(self)
            if whole is not None:
                return whole
        leaves = self._leaves()
        result = self._unflatten(pin_leaves(leaves, num_threads))
        if not inplace:
            return result
        write_moved_back(self, result)
        return self

    def pin_memory_(self, num_threads: int = 0) -> Self:
        """Replace the leaves by copies in pinned memory and return self: ``pin_memory(num_threads, inplace=True)``.

        >>> TensorDict({"a": torch.zeros(2)}).pin_memory_()["a"].is_pinned()  # doctest: +SKIP
        True
        """
        return self.pin_memory(num_threads, inplace=True)

    def share_memory_(self) -> Self:
        """Move the leaves to shared memory, in place, and lock the collection; return self.

        Processes that receive the collection share its data, so its structure is fixed. Values that are not tensors are not
        shared: each process has its own copy. ``memmap(share_non_tensor=True)`` shares them as well.

        >>> td = TensorDict({"a": torch.zeros(2)}).share_memory_()
        >>> td.is_shared(), td.is_locked
        (True, True)
        """
        check_in_memory(self, "share")
        leaves = self._leaves()
        if any(map(is_stored, leaves)):
            # Memory cannot be given to a stored tensor, so a copy in memory takes its place.
            write_moved_back(self, self._unflatten(as_memory(leaves)))
        for leaf in self._leaves():
            try:
                # torch aborts the process if a leaf has no memory to share.
                if not leaf.is_nested and not has_memory(leaf):
                    raise RuntimeError(f"a {type(leaf).__name__} has no memory of its own")
                leaf.share_memory_()
            except RuntimeError as error:
                raise rephrase_error(error, f"cannot share {describe_leaf(self, leaf)}: {error}") from error
        return self.lock_()

    def record_stream(self, stream: torch.cuda.Stream) -> Self:
        """Record in the CUDA allocator that a stream uses the leaves; return self. See :meth:`torch.Tensor.record_stream`.

        >>> td = TensorDict({"a": torch.zeros(2)}).cuda()  # doctest: +SKIP
        >>> td.record_stream(torch.cuda.current_stream()) is td  # doctest: +SKIP
        True
        """
        for leaf in self._leaves():
            leaf.record_stream(stream)
        return self


def _cast_by_attrs(node: SelfT, attrs: Core, target: Target, accepts: CastFilter | None) -> SelfT:
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

    result: SelfT = node.named_apply(cast_entry, nested_keys=True, device=None, filter_empty=False)
    if node.device is not None and all(leaf.device == node.device for leaf in result._leaves()):
        set_device_labels(result, node.device)
    return result


def _resize_batch(node: SelfT, batch_size: torch.Size) -> SelfT:
    result = node._shallow_copy()
    inner: Any = result  # each kind has its own setter
    inner.batch_size = batch_size
    return result
