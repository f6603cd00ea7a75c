"""Copies of batches to a device: through pinned buffers that are kept, on a side stream, one batch ahead."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import repeat
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from td_core import StructureError, is_tensor_collection
from td_core.spi import row_buffers
from td_core.typing import DeviceType

from ._reading import Reader
from ._threads import Failure, ThreadEngine

_END = object()


class _Buffer:
    """Pinned memory like a batch, and the event after the last copy from it."""

    def __init__(self) -> None:
        self.rows: Any = None
        self.copied: Any = None


class _Staged:
    """A batch in a buffer: the first ``count`` rows."""

    def __init__(self, buffer: _Buffer, count: int) -> None:
        self.buffer, self.count = buffer, count


class DeviceCopies:
    """Moves batches to a device; for CUDA with buffers that live as long as the loader."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "meta":
            raise ValueError("device 'meta' has no memory, so batches cannot be copied to it")
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        self._count = 0
        self._can_pin = True

    def prepare(self, reader: Reader, count: int) -> None:
        """Make a reader gather into buffers, of which ``count`` are in use at most."""
        if self._stream is None:
            return
        # Buffers of an iteration that was broken off are not returned, so each one begins with new places for them.
        self._free, kept = SimpleQueue(), [self._free.get() for _ in range(self._free.qsize())]
        for buffer in [*kept, *(_Buffer() for _ in range(count))][:count]:
            self._free.put(buffer)
        if reader.transform is None:
            reader.gather = self._gather
        else:
            reader.finish = self._stage

    def _gather(self, view: Any, positions: Tensor) -> Any:
        """Read rows straight into a buffer; without a buffer that fits, read them and put them into one."""
        if not is_tensor_collection(view):
            return self._stage(view[positions])
        buffer = self._take()
        if buffer.rows is not None and len(positions) <= len(buffer.rows):
            row_buffers.take_into(view, positions, buffer.rows[: len(positions)])
            return _Staged(buffer, len(positions))
        return self._fill(buffer, view[positions])

    def _stage(self, batch: Any) -> Any:
        """Put a batch into a buffer; return it as it is if it is no collection of plain tensors with rows."""
        if (
            not is_tensor_collection(batch)
            or not batch.batch_size
            or not all(map(_is_plain, batch.values(True, True)))
        ):
            return batch
        return self._fill(self._take(), batch)

    def _fill(self, buffer: _Buffer, batch: Any) -> Any:
        count = len(batch)
        try:
            if buffer.rows is None or count > len(buffer.rows):
                raise StructureError("the buffer has fewer rows")
            row_buffers.check_rows(buffer.rows, batch)
        except StructureError:
            buffer.rows = self._pin(batch)
        else:
            buffer.rows[:count].update_(batch)
        return _Staged(buffer, count)

    def _take(self) -> _Buffer:
        buffer = self._free.get()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def _pin(self, batch: Any) -> Any:
        if self._can_pin:
            try:
                return batch.pin_memory()
            except RuntimeError as error:
                self._can_pin = False
                warnings.warn(
                    f"batches are copied from pageable memory, since it cannot be pinned: {error}",
                    stacklevel=2,
                )
        return batch.clone()

    def start(self, batch: Any) -> Any:
        """Begin the copy of a batch that was read."""
        if self._stream is None:
            return move(batch, self.device)
        with torch.cuda.stream(self._stream):
            if not isinstance(batch, _Staged):
                pinned = batch.pin_memory() if hasattr(batch, "pin_memory") and self._can_pin else batch
                return move(pinned, self.device, non_blocking=True), self._stream.record_event()
            rows = batch.buffer.rows
            rows = rows if batch.count == len(rows) else rows[: batch.count]
            moved = rows.to(self.device, non_blocking=True)
            batch.buffer.copied = event = self._stream.record_event()
        self._free.put(batch.buffer)
        return moved, event

    def finish(self, started: Any) -> Any:
        """Make the stream of the consumer wait for a copy, and return the batch."""
        if self._stream is None:
            return started
        batch, event = started
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        leaves = batch.values(True, True) if is_tensor_collection(batch) else [batch]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                leaf.record_stream(stream)
        return batch


def _is_plain(leaf: object) -> bool:
    return type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"


def move(batch: Any, device: torch.device, **options: bool) -> Any:
    """Return a batch on a device; what has no ``to()`` is returned as it is."""
    return batch.to(device, **options) if hasattr(batch, "to") else batch


def prefetch(batches: Iterable[Any], depth: int = 2, *, device: DeviceType | None = None) -> Iterator[Any]:
    """Iterate over batches that are made in a thread, ahead of their use.

    Args:
        batches: any iterable of batches.
        depth: batches that are ready or under way ahead of the consumer; 0 makes them in its thread.
        device: device to which batches are copied; from pinned memory and beside the computation for a CUDA device.

    An error of the iterable is raised after the batches before it. The thread ends with the iteration.

    >>> from td_data import prefetch
    >>> [batch["a"].item() for batch in prefetch(TensorDict({"a": torch.tensor(i)}) for i in range(3))]
    [0, 1, 2]
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth is an integer of 0 or more; got {depth!r}")
    return _run_ahead(iter(batches), depth, None if device is None else DeviceCopies(torch.device(device)))


def _run_ahead(batches: Iterator[Any], depth: int, copies: DeviceCopies | None) -> Iterator[Any]:
    def read(_: int) -> Any:
        return next(batches, _END)

    engine: ThreadEngine[int] = ThreadEngine(repeat(0), read, min(depth, 1), depth)
    try:
        while True:
            try:
                found = engine.get_next()
            except Failure as failure:
                raise failure.error from failure.error.__cause__
            if found is None or found[1] is _END:
                return
            yield found[1] if copies is None else copies.finish(copies.start(found[1]))
            del found
    finally:
        engine.close()
