"""Work in threads whose results come in order: none of the threads outlives its owner, or keeps it alive."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from queue import Empty, SimpleQueue
from typing import Generic, Optional, TypeVar

T = TypeVar("T")
Call = Callable[[], T]
Result = tuple[Optional[T], Optional[BaseException]]  # noqa: UP045
"""A value, or an error."""
Work = SimpleQueue[Optional[tuple[Future[object], Call[object]]]]  # noqa: UP045
"""Functions to call; None ends a thread."""

#: Seconds that the end of threads and workers may take, before they are abandoned or killed.
PATIENCE = 0.4


class Threads:
    """Daemon threads that call functions, until the object is closed or collected, or Python ends; 0 call at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: Work = SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"td-data-{i}", daemon=True)
            for i in range(count)
        ]
        self.close = weakref.finalize(self, _stop, self._queue, threads)
        for thread in threads:
            thread.start()

    def submit(self, call: Call[T]) -> Future[T]:
        """Call a function in a thread."""
        future: Future[T] = Future()
        if self._count:
            self._queue.put((future, call))  # type: ignore[arg-type]
        else:
            _run(future, call)
        return future


def _run(future: Future[T], call: Call[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        # The traceback of an error has this frame: a future in it would be a circle, which keeps the data.
        del future, call


def _work(queue: Work) -> None:
    while (item := queue.get()) is not None:
        _run(*item)
        del item


def _stop(queue: Work, threads: list[threading.Thread]) -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        pass
    for _ in threads:
        queue.put(None)
    end = time.monotonic() + PATIENCE
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0))


class ThreadEngine(Generic[T]):
    """Calls functions ahead in threads, and gives their results out in order."""

    def __init__(
        self, calls: Iterator[Call[T]], num_threads: int, depth: int, timeout: float | None = None
    ) -> None:
        self._calls, self._depth, self._timeout = calls, depth, timeout
        self._threads = Threads(num_threads)
        self._futures: deque[Future[T]] = deque()

    def get_next(self) -> Result[T] | None:
        """Return the next result, or None after the last one."""
        self._fill(max(self._depth, 1))
        if not self._futures:
            return None
        try:
            error = self._futures[0].exception(self._timeout)
        except NotDone:
            return None, TimeoutError(f"no batch for {self._timeout} seconds: a thread still reads it")
        future = self._futures.popleft()
        self._fill(self._depth)
        return (future.result(), None) if error is None else (None, error)

    def is_ready(self) -> bool:
        """Return True if there is a next value, without waiting for it."""
        return bool(self._futures) and self._futures[0].done() and self._futures[0].exception() is None

    def _fill(self, depth: int) -> None:
        while len(self._futures) < depth:
            try:
                call = next(self._calls)
            except StopIteration:
                return
            except Exception as error:
                # It belongs to this batch, so the earlier ones are given out first.
                self._calls = iter(())
                self._futures.append(Future())
                self._futures[-1].set_exception(error)
            else:
                self._futures.append(self._threads.submit(call))

    def close(self) -> None:
        """End the threads; one that hangs in a store is abandoned."""
        self._calls = iter(())
        self._futures.clear()
        self._threads.close()
