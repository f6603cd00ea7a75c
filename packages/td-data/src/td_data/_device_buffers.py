"""Copies of batches to a device: through pinned buffers that are kept, on a side stream, one batch ahead."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from td_core import StructureError, is_tensor_collection
from td_core.spi import check_rows, take_into
from td_core.typing import DeviceType

from ._order import check_count
from ._threads import ThreadEngine

#: Set when memory could not be pinned; then it is not tried again.
_CANNOT_PIN = threading.Event()


def pin(batch: Any) -> Any:
    """Return a batch in pinned memory; if memory cannot be pinned, warn once, and return the batch itself."""
    if hasattr(batch, "pin_memory") and not _CANNOT_PIN.is_set():
        try:
            return batch.pin_memory()
        except RuntimeError as error:
            _CANNOT_PIN.set()
            warnings.warn(
                f"batches are copied from pageable memory, since it cannot be pinned: {error}", stacklevel=2
            )
    return batch


@dataclass(slots=True)
class _Buffer:
    """Pinned memory like a batch, the event after the last copy from it, and the rows that are in use."""

    rows: Any = None
    copied: Any = None
    count: int = 0


class DeviceCopies:
    """Moves batches to a device; for CUDA with buffers that live as long as the loader."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "meta":
            raise ValueError("device 'meta' has no memory, so batches cannot be copied to it")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"device '{device}' is not there: torch finds no CUDA device; pass another one, or leave out device="
            )
        self.device = device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: SimpleQueue[_Buffer] = SimpleQueue()

    def prepare(self, count: int) -> DeviceCopies | None:
        """Provide ``count`` buffers for the reads of an iteration; None without a stream, where reads need none."""
        # Buffers of an iteration that was broken off are not returned, so each one begins with new places for them.
        self._free, kept = SimpleQueue(), [self._free.get() for _ in range(self._free.qsize())]
        for buffer in [*kept, *(_Buffer() for _ in range(count))][:count]:
            self._free.put(buffer)
        return None if self.stream is None else self

    def gather(self, view: Any, positions: Tensor) -> Any:
        """Read rows straight into a buffer; without a buffer that fits, read them and put them into one."""
        if not is_tensor_collection(view):
            return self.stage(view[positions])
        buffer = self._take()
        buffer.count = len(positions)
        if buffer.rows is not None and buffer.count <= len(buffer.rows):
            # The rows of a lazy stack may have other shapes than those that the buffer is like.
            with contextlib.suppress(StructureError):
                take_into(view, positions, buffer.rows[: buffer.count])
                return buffer
        return self._fill(buffer, view[positions])

    def stage(self, batch: Any) -> Any:
        """Put a batch into a buffer; return it as it is if it is no collection of plain tensors with rows."""
        has_rows = is_tensor_collection(batch) and batch.batch_size
        return self._fill(self._take(), batch) if has_rows and _is_plain(batch) else batch

    def _fill(self, buffer: _Buffer, batch: Any) -> _Buffer:
        buffer.count = len(batch)
        try:
            if buffer.rows is None or buffer.count > len(buffer.rows):
                raise StructureError("the buffer has fewer rows")
            check_rows(buffer.rows, batch)
        except StructureError:
            buffer.rows = pin(batch.clone())
        else:
            buffer.rows[: buffer.count].update_(batch)
        return buffer

    def _take(self) -> _Buffer:
        buffer = self._free.get()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def start(self, batch: Any) -> Any:
        """Begin the copy of a batch that was read."""
        if self.stream is None:
            return move(batch, self.device)
        with torch.cuda.stream(self.stream):
            if not isinstance(batch, _Buffer):
                return move(pin(batch), self.device, non_blocking=True), self.stream.record_event()
            rows = batch.rows if batch.count == len(batch.rows) else batch.rows[: batch.count]
            moved = move(rows, self.device, non_blocking=True)
            batch.copied = self.stream.record_event()
        self._free.put(batch)
        return moved, batch.copied

    def finish(self, started: Any) -> Any:
        """Make the stream of the consumer wait for a copy, and return the batch."""
        if self.stream is None:
            return started
        batch, event = started
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for leaf in batch._leaves() if is_tensor_collection(batch) else [batch]:
            if isinstance(leaf, Tensor):
                leaf.record_stream(stream)
        return batch


def _is_plain(batch: Any) -> bool:
    """Return True if all leaves can lie in a flat buffer."""
    return all(
        type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
        for leaf in batch._leaves()
    )


def move(batch: Any, device: torch.device, **options: bool) -> Any:
    """Return a batch on a device; what has no ``to()`` is returned as it is."""
    return batch.to(device, **options) if hasattr(batch, "to") else batch


def prefetch(batches: Iterable[Any], depth: int = 2, *, device: DeviceType | None = None) -> Iterator[Any]:
    """Iterate over batches that are made in a thread, ahead of their use; an error comes after the batches before it.

    Args:
        batches: any iterable of batches.
        depth: batches that are ready or under way ahead of the consumer; 0 makes them in its thread.
        device: device to which batches are copied; from pinned memory and beside the computation for a CUDA device.

    Raises:
        ValueError: ``depth`` is below 0.

    >>> from td_data import prefetch
    >>> [batch["a"].item() for batch in prefetch(TensorDict({"a": torch.tensor(i)}) for i in range(3))]
    [0, 1, 2]
    """
    copies = None if device is None else DeviceCopies(torch.device(device))
    return _run_ahead(iter(batches), check_count(depth, "depth", 0), copies)


def _run_ahead(batches: Iterator[Any], depth: int, copies: DeviceCopies | None) -> Iterator[Any]:
    engine = ThreadEngine(repeat(batches.__next__), min(depth, 1), depth)
    try:
        while (found := engine.get_next()) is not None:
            batch, error = found
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            del found
            yield batch if copies is None else copies.finish(copies.start(batch))
            del batch
    finally:
        engine.close()
