"""The methods ``to``, ``cpu`` and ``cuda``, and those for pinned and shared memory."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.device_moves import (
    cast_by_attrs,
    move,
    move_by_backend,
    move_leaves,
    parse_target,
    pin_leaves,
    resize_batch,
    write_moved,
    write_moved_back,
)
from .._functions.dtypes import CastFilter, cast_some
from .._functions.locking import do_nothing, undo_on_exit, write_back_on_exit
from .._functions.operands import raise_at_leaf
from .._tree.backends import get_backends
from .._tree.buffers import as_memory, has_memory, is_stored
from .._tree.devices import set_device_labels
from .._tree.locks import check_in_memory, check_unlocked_below
from .._tree.node import Core
from .._writes.check import LEAF_ERRORS, describe_leaf, rephrase_error
from ..typing import NO_DEFAULT, DeviceType, DtypeLike, NoDefault


class DeviceMixin(Core):
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
            source = cast_by_attrs(self, target.spec, target, accepts)
        if target.dtype is not None and accepts is not None:
            source = cast_some(source, methodcaller("to", target.dtype), accepts)
            target = target._replace(dtype=None)
        elif moves_only and (goal is None or goal == self.device):
            if batch_size is not None:
                return resize_batch(self, batch_size)
            return self if torch.compiler.is_compiling() else undo_on_exit(self, do_nothing)
        elif moves_only and goal is not None and not inplace:
            whole: Self | None = move_by_backend(self, goal, non_blocking)
            if whole is not None:
                whole = whole if batch_size is None else resize_batch(whole, batch_size)
                return write_back_on_exit(whole, self, write_moved)
        leaves: list[Tensor] = []
        levels = source._flatten_leaves(leaves)
        try:
            moved = move(leaves, target, pin=non_blocking_pin, threads=num_threads)
        except LEAF_ERRORS as error:
            raise_at_leaf(error, "to", source, move_leaves(leaves, goal, target.dtype, False), leaves)
        result: Any = source._unflatten(moved, levels)
        if inplace:
            write_moved_back(self, result)
            result = self
        if goal is not None and result.device != goal:
            set_device_labels(result, goal)
        if batch_size is not None:
            result.batch_size = batch_size
        return undo_on_exit(result, do_nothing) if inplace else write_back_on_exit(result, self, write_moved)  # type: ignore[no-any-return]

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
