"""The methods ``to``, ``cpu`` and ``cuda``, and those for pinned and shared memory."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Self

from .._functions.device_moves import convert_collection, parse_target, pin_collection, share_leaves
from .._functions.dtypes import CastFilter
from .._tree.node import Core
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
        accepts = self._schema.cast_filter if cast_filter is NO_DEFAULT else cast_filter
        return convert_collection(self, target, accepts, batch_size, inplace, non_blocking_pin, num_threads)

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
        return pin_collection(self, num_threads, inplace)

    def pin_memory_(self, num_threads: int = 0) -> Self:
        """Replace the leaves by copies in pinned memory and return self: ``pin_memory(num_threads, inplace=True)``.

        >>> TensorDict({"a": torch.zeros(2)}).pin_memory_()["a"].is_pinned()  # doctest: +SKIP
        True
        """
        return self.pin_memory(num_threads, inplace=True)

    def share_memory_(self) -> Self:
        """Move the leaves to shared memory, in place, and lock the collection; return self.

        Processes that receive the collection share its data, so its structure is fixed. Values that are not tensors are not
        shared, and a warning names them: each process has its own copy. ``memmap(share_non_tensor=True)`` shares them as well.

        >>> td = TensorDict({"a": torch.zeros(2)}).share_memory_()
        >>> td.is_shared(), td.is_locked
        (True, True)
        """
        share_leaves(self)
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
