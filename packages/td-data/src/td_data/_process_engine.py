"""Worker processes of torch that read batches in our order."""

from __future__ import annotations

import re
import signal
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data import Sampler as TorchSampler

from td_core.errors import WorkerError

from ._device_buffers import pin
from ._reading import Reader, Task
from ._threads import PATIENCE, Result


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
        pin_memory: bool,
    ) -> None:
        self._sent = _Sent(tasks)
        loader: DataLoader[Any] = DataLoader(
            _Answers(reader),
            batch_size=None,
            sampler=self._sent,
            num_workers=num_workers,
            prefetch_factor=-(-prefetch // num_workers),
            collate_fn=keep,
            multiprocessing_context=context,
            timeout=timeout or 0,
            pin_memory=pin_memory,
        )
        try:
            self._results: Any = iter(loader)
        except Exception:
            if context is not None or get_context().get_start_method() != "fork":
                _name_unpicklable(data=reader.data, transform=reader.transform)
            raise
        self.close = weakref.finalize(self, _stop, self._results, _pause_handler())

    def get_next(self) -> Result[Any] | None:
        """Return the next result, or None after the last one."""
        try:
            answer = next(self._results)
        except StopIteration:
            return None if self._sent.error is None else (None, self._sent.error)
        except (RuntimeError, EOFError, OSError) as error:
            return None, self._explain(error)
        return answer.batch, answer.error

    def _explain(self, error: Exception) -> Exception:
        """Return the error of a worker that was killed, or that did not answer in time."""
        text = str(error)
        if "timed out" in text:
            return TimeoutError(f"no batch from a worker process: {text}")
        killed = re.search(r"killed by signal: (.*?)\.?\s", text + " ")
        workers = self._results._workers
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
        explained = WorkerError(f"a worker process died ({why}){more}")
        explained.__cause__ = error
        return explained

    def is_ready(self) -> bool:
        """Return False: torch does not say whether a result is ready."""
        return False


def _name_unpicklable(**parts: object) -> None:
    for name, part in parts.items():
        try:
            ForkingPickler.dumps(part)
        except Exception as error:
            raise TypeError(
                f"{name} cannot be sent to a worker process: {error}; a worker imports functions and classes by name"
            ) from error


def _pause_handler() -> Any:
    """Take away torch's handler of SIGCHLD, which raises the death of a worker wherever the main thread is; return it."""
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return handler


def _stop(results: Any, handler: Any) -> None:
    """End the worker processes, and give torch its handler back."""
    # torch waits for 5 seconds for each worker that is at work.
    timer = threading.Timer(PATIENCE, lambda: [worker.terminate() for worker in results._workers])
    timer.daemon = True
    timer.start()
    results._shutdown_workers()
    timer.cancel()
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


class _Answer:
    """The batch of a task, or its error. A thread of torch calls ``pin_memory`` in the parent process."""

    def __init__(self, batch: Any, error: Exception | None) -> None:
        self.batch, self.error = batch, error

    def pin_memory(self) -> _Answer:
        """Put the batch into pinned memory."""
        return _Answer(pin(self.batch), self.error)


class _Answers(Dataset[_Answer]):
    """The data set of the worker processes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, task: Task) -> _Answer:
        try:
            return _Answer(self._reader(task), None)
        except Exception as error:
            return _Answer(None, error)


class _Sent(TorchSampler[Task]):
    """The tasks as the sampler of a ``DataLoader``."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Task]:
        try:
            yield from self._tasks
        except Exception as error:
            self.error = error


def keep(batch: Any) -> Any:
    """Return a batch, as the ``collate_fn`` of a ``DataLoader``."""
    return batch
