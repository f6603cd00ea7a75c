"""Worker processes of torch that read batches in our order, and a ``DataLoader`` of the same order."""

from __future__ import annotations

import re
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import Sampler as TorchSampler

from td_core.errors import WorkerError

from ._position import Batches, Position, Sampler, Split, Step
from ._reading import Reader, Task
from ._threads import Failure


class ProcessEngine:
    """Reads tasks in worker processes of a ``DataLoader``, and gives the results out in the order of the tasks."""

    def __init__(
        self,
        tasks: Iterator[Task],
        reader: Reader,
        num_workers: int,
        prefetch: int,
        context: Any,
        timeout: float | None,
    ) -> None:
        self._sent: deque[Task] = deque()
        self._errors: list[Exception] = []
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            sampler=_Sent(tasks, self._sent, self._errors),
            num_workers=num_workers,
            prefetch_factor=-(-prefetch // num_workers),
            collate_fn=keep,
            multiprocessing_context=context,
            timeout=timeout or 0,
        )
        try:
            self._results: Iterator[Any] | None = iter(loader)
        except Exception as error:
            self._name_unpicklable(reader, loader.multiprocessing_context)
            raise error
        self._restore = weakref.finalize(self, _set_handler, _pause_handler())

    def _name_unpicklable(self, reader: Reader, context: Any) -> None:
        if context is None and get_context().get_start_method() == "fork":
            return
        for name, part in (("data", reader.view), ("transform", reader.transform)):
            try:
                ForkingPickler.dumps(part)
            except Exception as error:
                raise TypeError(
                    f"{name} cannot be sent to a worker process: {error}; a worker imports functions and classes by name"
                ) from error

    def get_next(self) -> tuple[Task, object] | None:
        """Return the next task and its result, or None after the last; raise Failure if it has an error."""
        if self._results is None:
            return None
        try:
            is_read, value = next(self._results)
        except StopIteration:
            if self._errors:
                raise Failure(None, self._errors[0]) from None
            return None
        except (RuntimeError, EOFError, OSError) as error:
            task = self._sent[0] if self._sent else None
            raise Failure(task, self._explain(error)) from error
        task = self._sent.popleft()
        if not is_read:
            raise Failure(task, value)
        return task, value

    def _explain(self, error: Exception) -> Exception:
        """Return the error of a worker that was killed, or that did not answer in time."""
        text = str(error)
        if "timed out" in text:
            return TimeoutError(f"no batch from a worker process: {text}")
        killed = re.search(r"killed by signal: (.*?)\.?\s", text + " ")
        workers = getattr(self._results, "_workers", ())
        # A worker that dies while it sends a batch closes the connection first.
        is_cut = isinstance(error, (EOFError, OSError))
        for worker in workers if is_cut else ():
            worker.join(1)
        codes = [code for worker in workers if (code := worker.exitcode)]
        names = [signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes]
        if killed is None and not names and not is_cut and "exited unexpectedly" not in text:
            return error
        why = ", ".join(names) or (killed.group(1) if killed else "unknown")
        more = ""
        if "SIGBUS" in why or "Bus error" in why:
            more = "; shared memory is full: enlarge /dev/shm, or use num_threads= in place of num_workers="
        return WorkerError(f"a worker process died ({why}){more}")

    def has_next(self) -> bool:
        """Return False: torch does not say whether a result is ready."""
        return False

    def close(self) -> None:
        """End the worker processes."""
        results, self._results = self._results, None
        stop = getattr(results, "_shutdown_workers", None)
        if stop is not None:
            stop()
        self._restore()


def _pause_handler() -> Any:
    """Take away torch's handler of SIGCHLD, which raises the death of a worker wherever the main thread is; return it."""
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return handler


def _set_handler(handler: Any) -> None:
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


class _Sent(TorchSampler[Task]):
    """The tasks as the sampler of a ``DataLoader``."""

    def __init__(self, tasks: Iterator[Task], sent: deque[Task], errors: list[Exception]) -> None:
        self._tasks, self._sent, self._errors = tasks, sent, errors

    def __iter__(self) -> Iterator[Task]:
        try:
            for task in self._tasks:
                self._sent.append(task)
                yield task
        except Exception as error:
            self._errors.append(error)


class NumberedBatches(Batches):
    """Batches whose lists carry the batch that they are, for the views and generators of epochs."""

    def __init__(self, sampler: Sampler, split: Split, position: Position) -> None:
        super().__init__(sampler, split)
        self._position = position

    def _make_batch(self, step: Step, positions: list[int]) -> list[int]:
        return _Numbered(step, positions)


class _Numbered(list[int]):
    def __init__(self, step: Step, positions: list[int]) -> None:
        super().__init__(positions)
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        return _Numbered, (self.step, [*self])


class Fetched(Dataset[Any]):
    """The data set of a ``DataLoader``, which reads each batch with one index."""

    def __init__(self, view: Any, transform: Callable[..., Any] | None, seed: int) -> None:
        self._view, self._transform, self._seed = view, transform, seed
        self._held: tuple[int, Reader] | None = None

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: int) -> Any:
        return self._view[index]

    def __getitems__(self, indices: _Numbered) -> Any:
        """Return a batch."""
        epoch = indices.step.epoch
        if self._held is None or self._held[0] != epoch:
            self._held = epoch, Reader(get_view(self._view, epoch), self._transform, self._seed)
        return self._held[1](Task(indices.step, torch.tensor(indices, dtype=torch.int64)))


def get_view(data: Any, epoch: int) -> Any:
    """Return the view of an epoch."""
    return data.at_epoch(epoch) if hasattr(data, "at_epoch") else data


def keep(batch: Any) -> Any:
    """Return a batch, as the ``collate_fn`` of a ``DataLoader``."""
    return batch
