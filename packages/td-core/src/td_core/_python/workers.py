"""Worker processes that run one function on many inputs.

Unlike ``multiprocessing.Pool``, the parent monitors each worker: a killed worker is an error, not a hang. Each task
seeds torch with a separate number, so that results do not depend on which worker ran it.
"""

from __future__ import annotations

# torch's thread for shared tensors imports hmac when the first worker requests a tensor. A worker forked during that
# import would wait forever for the import lock.
import hmac  # noqa: F401
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp

from ..errors import WorkerError

Task = tuple[Any, Any]
"""An input, and the collection to write the result into (None: send the result back)."""


class RemoteTraceback(Exception):  # noqa: N818  only the cause of other exceptions, never raised
    """Text of a traceback in a worker; the cause of the exception that the parent raises."""

    def __str__(self) -> str:
        return f"\n\nin the worker:\n{self.args[0]}"


def run_task(fn: Callable[[object], object], seed: int, item: object, target: Any) -> object:
    """Seed torch and return ``fn(item)``; with a target, write the result into it and return True."""
    torch.manual_seed(seed)
    result = fn(item)
    if target is None or result is None:
        return result
    target.update_(result)
    return True


def _work(connection: Connection, parents: Connection, fn: Callable[[object], object], threads: int) -> None:
    # Close the parent's end of the pipe: otherwise a fork never sees EOF when the parent dies.
    parents.close()
    torch.set_num_threads(threads)
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionError):
            return
        if task is None:
            return
        position, seed, item, target = task
        answer: tuple[int, object, str | None]
        # Send any exception of the user's function to the parent, which raises it.
        try:
            answer = (position, run_task(fn, seed, item, target), None)
        except Exception as error:
            answer = (position, error, traceback.format_exc())
        try:
            connection.send(answer)
        except ConnectionError:
            return
        except Exception as error:
            text = answer[2] or traceback.format_exc()
            connection.send((position, WorkerError(f"a worker cannot send what it has: {error!r}"), text))


class _Worker:
    """A worker process, the parent's end of its pipe, and its state."""

    def __init__(self, context: Any, fn: Callable[[Any], object], threads: int) -> None:
        self.connection, right = context.Pipe()
        self.process = context.Process(target=_work, args=(right, self.connection, fn, threads), daemon=True)
        self.process.start()
        right.close()
        self.busy = False
        self.done = 0

    def stop(self) -> None:
        if self.busy:
            self.process.terminate()
        if self.process.is_alive():
            try:
                self.connection.send(None)
            except OSError:
                self.process.terminate()
            self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()
        self.connection.close()


def run(
    fn: Callable[[object], object],
    tasks: Iterable[Task],
    *,
    num_workers: int,
    seed: int,
    max_tasks_per_child: int | None = None,
    worker_threads: int = 1,
    start_method: str | None = None,
) -> Iterator[object]:
    """Yield ``fn(item)`` per task, in order; arguments as in ``ParallelMixin.map``. Raise WorkerError if a worker dies."""
    # Task i runs with torch.manual_seed(seed + i), whichever worker runs it.
    context = mp.get_context(start_method)
    numbered = enumerate(tasks)
    results: dict[int, object] = {}
    following = sent = 0
    exhausted = False
    workers: list[_Worker] = []
    try:
        while True:
            # Bound the tasks in flight, so that results do not accumulate behind one slow task.
            while not exhausted and sent - following < 2 * num_workers:
                worker = next((worker for worker in workers if not worker.busy), None)
                if worker is None and len(workers) >= num_workers:
                    break
                task = next(numbered, None)
                if task is None:
                    exhausted = True
                    break
                if worker is None:
                    worker = _Worker(context, fn, worker_threads)
                    workers.append(worker)
                position, (item, target) = task
                worker.connection.send((position, (seed + position) % 2**63, item, target))
                worker.busy = True
                sent += 1
            while following in results:
                yield results.pop(following)
                following += 1
            if exhausted and following == sent:
                return
            if any(worker.busy for worker in workers):
                _receive(workers, results, max_tasks_per_child)
    finally:
        for worker in workers:
            worker.stop()


def _receive(workers: list[_Worker], results: dict[int, object], max_tasks_per_child: int | None) -> None:
    """Wait until a worker sends a result, or raise WorkerError if one died."""
    busy = [worker for worker in workers if worker.busy]
    ready = wait([*(worker.connection for worker in busy), *(worker.process.sentinel for worker in busy)])
    for worker in busy:
        if worker.connection in ready:
            try:
                position, result, text = worker.connection.recv()
            except EOFError:
                raise _worker_died_error(worker) from None
            if text is not None:
                raise result from RemoteTraceback(text)
            results[position] = result
            worker.busy = False
            worker.done += 1
            if worker.done == max_tasks_per_child:
                workers.remove(worker)
                worker.stop()
        elif worker.process.sentinel in ready:
            raise _worker_died_error(worker)


def _worker_died_error(worker: _Worker) -> WorkerError:
    worker.process.join()
    return WorkerError(
        f"a worker process (pid {worker.process.pid}) died with exit code {worker.process.exitcode} while it ran a "
        "task: it was killed, or crashed"
    )
