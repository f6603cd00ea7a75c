"""Read the rows of a batch, and transform it: in a thread, a worker process, or the thread of the consumer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from td_core import TensorDict, cat, is_tensor_collection
from td_core.spi import is_stored

from ._blocks import BlockOrder, Window, list_windows
from ._device_buffers import DeviceCopies
from ._order import make_generator, mix
from ._position import Numbered, Step
from ._threads import Threads


@dataclass(frozen=True, slots=True)
class Task:
    """A batch to read: its positions, or windows in memory and places in them."""

    step: Step
    positions: Tensor
    windows: Sequence[tuple[Future[Any], Tensor]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # So few bytes are sent to a worker faster in a pipe than in the shared memory that torch makes for a tensor.
        return _unpickle_task, (self.step, self.positions.numpy())


def _unpickle_task(step: Step, positions: Any) -> Task:
    return Task(step, torch.from_numpy(positions))


class Reader(Dataset[Any]):
    """Reads the batch of a task; also the data set of a ``DataLoader``, of which worker processes get a copy."""

    def __init__(self, data: Any, transform: Callable[..., Any] | None, seed: int) -> None:
        self.data, self.transform, self.seed = data, transform, seed
        self.copies: DeviceCopies | None = None
        self._takes_generator = transform is not None and takes_generator(transform)
        self._held: tuple[int, Any] = -1, None

    def get_view(self, epoch: int) -> Any:
        """Return the view of an epoch."""
        if self._held[0] != epoch:
            self._held = epoch, self.data.at_epoch(epoch) if hasattr(self.data, "at_epoch") else self.data
        return self._held[1]

    def __call__(self, task: Task) -> Any:
        """Return the batch of a task."""
        view, copies = self.get_view(task.step.epoch), self.copies
        if task.windows:
            batch = join_batches([future.result()[places] for future, places in task.windows])
        elif copies is not None and self.transform is None:
            return copies.gather(view, task.positions)
        else:
            batch = read_vector(view, task.positions)
            if is_tensor_collection(batch) and not batch.batch_dims:
                raise TypeError(
                    f"a view takes a vector of positions; {type(view).__name__} returned one row: give the Loader the collection "
                    "that it reads, or an object with view[positions]"
                )
        batch = batch if self.transform is None else self._apply(self.transform, task.step, batch)
        return batch if copies is None else copies.stage(batch)

    def _apply(self, transform: Callable[..., Any], step: Step, batch: Any) -> Any:
        seed = mix(self.seed, step.epoch, "batch", step.start, step.rank)
        if get_worker_info() is not None:
            torch.manual_seed(seed)
        return transform(batch, generator=make_generator(seed)) if self._takes_generator else transform(batch)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, indices: Numbered) -> Any:
        """Return a batch."""
        return self(Task(indices.step, torch.tensor(indices, dtype=torch.int64)))


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


def read_vector(view: Any, positions: Tensor, read: Callable[[Tensor], Any] | None = None) -> Any:
    """Read the rows at positions; TypeError with what to do if a user's view takes single ones only."""
    try:
        return view[positions] if read is None else read(positions)
    except TypeError as error:
        if is_tensor_collection(view):
            raise
        raise TypeError(
            f"{error}: {type(view).__name__}[positions] got the positions of a batch, a vector of int64; a data set that takes "
            "one position at a time is for a DataLoader of torch, with batch_sampler=sampler.batches(batch_size)"
        ) from error


def read_in_runs(view: Any, positions: Tensor) -> Any:
    """Read rows by slices of consecutive ones, which stores read several times as fast as positions."""
    cuts = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
    if not cuts or 16 * len(cuts) > len(positions):
        return view[positions]
    bounds = pairwise([0, *cuts, len(positions)])
    parts = [view[int(positions[a]) : int(positions[b - 1]) + 1] for a, b in bounds]
    stored = [leaf for leaf in view._leaves() if is_stored(leaf)] if is_tensor_collection(view) else []
    if stored:
        # A move of one collection reads all of its leaves together.
        together = TensorDict({str(number): part for number, part in enumerate(parts)})
        parts = list(together.to(stored[0].device).values())
    return join_batches(parts)


class WindowReader:
    """Reads the windows of blocks, each once, and the next one of a lane while one is used."""

    def __init__(self, view: Any, order: BlockOrder, num_threads: int) -> None:
        self._order, self._threads = order, Threads(num_threads)
        self._reads_ahead, self._held = num_threads > 0, dict[tuple[int, int], Future[Any]]()
        read = partial(read_in_runs, view) if is_tensor_collection(view) else view.__getitem__
        self._read: Callable[[Tensor], Any] = partial(
            read_vector, view, read=getattr(view, "load_rows", read)
        )

    def make_task(self, step: Step) -> Task:
        """Return the task of a batch; forget windows that no later batch needs."""
        found = list_windows(self._order, step)
        held = {window.key: self._get(window) for window, _ in found}
        windows = [(held[window.key], places) for window, places in found]
        for lane, number in dict(held) if self._reads_ahead else ():
            following = self._order.get_window(lane, number + 1)
            if following is not None:
                held[following.key] = self._get(following)
        self._held = held
        return Task(step, found[0][0].positions[found[0][1]], windows)

    def _get(self, window: Window) -> Future[Any]:
        future = self._held.get(window.key)
        # A window that could not be read is tried again.
        if future is None or (future.done() and future.exception() is not None):
            return self._threads.submit(partial(self._read, window.positions))
        return future

    def close(self) -> None:
        """End the threads."""
        self._held.clear()
        self._threads.close()
