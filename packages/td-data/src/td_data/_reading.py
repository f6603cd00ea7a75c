"""Read the rows of a batch, and transform it: in a thread, a worker process, or the thread of the consumer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from td_core import cat, is_tensor_collection

from ._blocks import BlockSampler, Window
from ._order import Order, make_generator, mix
from ._position import Sampler, Step
from ._threads import Slot, Threads


@dataclass(frozen=True, slots=True)
class Task:
    """A batch to read: its positions, or windows in memory and places in them."""

    step: Step
    positions: Tensor
    windows: Sequence[tuple[Slot, Tensor]] = ()


class Reader(Dataset[Any]):
    """Reads the batch of a task. A pickle of it goes to worker processes."""

    def __init__(
        self, view: Any, transform: Callable[..., Any] | None, seed: int, in_process: bool = False
    ) -> None:
        self.view, self.transform, self.seed, self.in_process = view, transform, seed, in_process
        self.gather: Callable[[Any, Tensor], object] | None = None
        self.finish: Callable[[Any], object] | None = None
        self.takes_generator = transform is not None and takes_generator(transform)

    def __call__(self, task: Task) -> Any:
        """Return the batch of a task."""
        if task.windows:
            batch = join_batches([slot.get()[places] for slot, places in task.windows])  # type: ignore[index]
        elif self.gather is not None:
            batch = self.gather(self.view, task.positions)
        else:
            batch = self.view[task.positions]
        batch = batch if self.transform is None else self._apply(task.step, batch)
        return batch if self.finish is None else self.finish(batch)

    def _apply(self, step: Step, batch: Any) -> Any:
        assert self.transform is not None
        seed = mix(self.seed, step.epoch, "batch", step.start, step.rank)
        if self.in_process:
            torch.manual_seed(seed)
        if self.takes_generator:
            return self.transform(batch, generator=make_generator(seed))
        return self.transform(batch)

    def __getitem__(self, task: Task) -> tuple[bool, Any]:
        """Return the batch of a task, or its error: the form of a data set of torch's worker processes."""
        try:
            return True, self(task)
        except Exception as error:
            return False, error


def takes_generator(function: Callable[..., Any]) -> bool:
    """Return True if a function has a parameter ``generator``."""
    try:
        return "generator" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # such as a function in C
        return False


def join_batches(parts: list[Any]) -> Any:
    """Concatenate batches of one kind."""
    if len(parts) == 1:
        return parts[0]
    if is_tensor_collection(parts[0]):
        return cat(parts, 0)
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    raise TypeError(f"cannot join batches of {type(parts[0]).__name__}: return a collection or a tensor")


def make_positions(sampler: Sampler, order: Order, step: Step, limit: int | None) -> Tensor:
    """Return the positions of a batch; of a user's sampler, check their form and range."""
    parts = [sampler._take(order, rows) for rows in step.rows]
    positions = parts[0] if len(parts) == 1 else torch.cat(parts)
    if not type(sampler).__module__.startswith(f"{__package__}."):
        _check_positions(type(sampler).__name__, positions, sum(map(len, step.rows)), step.start, limit)
    return positions


def _check_positions(name: str, positions: Tensor, count: int, start: int, limit: int | None) -> None:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.shape != (count,):
        raise TypeError(
            f"{name}.order returned {_show(positions)} from row {start} on; it must be a vector of {count} positions of int64"
        )
    wrong = positions < 0 if limit is None else (positions < 0) | (positions >= limit)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise IndexError(
            f"{name}.order returned position {int(positions[place])} for row {start + place}; the data has {limit} rows"
        )


def _show(value: object) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


class WindowReader:
    """Reads the windows of blocks, each once, and the next one of a lane while one is used."""

    def __init__(self, view: Any, sampler: BlockSampler, order: Order, num_threads: int) -> None:
        self._view, self._sampler, self._order = view, sampler, order
        self._threads = Threads(num_threads) if num_threads else None
        self._slots: dict[tuple[int, int], Slot] = {}

    def make_task(self, step: Step) -> Task:
        """Return the task of a batch; forget windows that no later batch needs."""
        found = [item for rows in step.rows for item in self._sampler._locate(self._order, rows)]
        windows = [(self._get(window), places) for window, places in found]
        latest = {window.key[0]: window for window, _ in found}
        for lane, window in latest.items():
            for key in [key for key in self._slots if key[0] == lane and key[1] != window.key[1]]:
                if key[1] != window.key[1] + 1:
                    del self._slots[key]
            following = self._order.get_lane(lane).get_window(window.key[1] + 1)  # type: ignore[attr-defined]
            if following is not None and self._threads is not None:
                self._get(following)
        return Task(step, torch.cat([window.positions[places] for window, places in found[:1]]), windows)

    def _get(self, window: Window) -> Slot:
        slot = self._slots.get(window.key)
        # A window that could not be read is tried again.
        if slot is None or slot.has_failed():
            call = partial(_read_window, self._view, window.positions)
            slot = Slot(call) if self._threads is None else self._threads.submit(call)
            if self._threads is None:
                slot.run()
            self._slots[window.key] = slot
        return slot

    def close(self) -> None:
        """End the threads."""
        self._slots.clear()
        if self._threads is not None:
            self._threads.close()


def _read_window(view: Any, positions: Tensor) -> Any:
    load = getattr(view, "load_rows", None)
    return view[positions] if load is None else load(positions)
