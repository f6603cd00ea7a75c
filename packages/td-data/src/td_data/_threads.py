"""Work in threads whose results come in order: none of the threads outlives its owner, or keeps it alive."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds that the end of threads may take, before they are abandoned.
_PATIENCE = 0.5


class Slot:
    """A result that a thread makes, or its error."""

    __slots__ = ("_call", "_done", "error", "value")

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._done = threading.Event()
        self.value: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the result."""
        call, self._call = self._call, None
        try:
            self.value = call() if call is not None else None
        except BaseException as error:
            self.error = error
        self._done.set()

    def is_ready(self) -> bool:
        """Return True if there is a result."""
        return self._done.is_set() and self.error is None

    def has_failed(self) -> bool:
        """Return True if there is an error."""
        return self._done.is_set() and self.error is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when there is a result or an error, or False after ``timeout`` seconds."""
        return self._done.wait(timeout)

    def get(self) -> object:
        """Return the result, or raise the error."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Threads:
    """Daemon threads that take work from a queue, until the object is closed or collected, or Python ends."""

    def __init__(self, count: int) -> None:
        self._queue: SimpleQueue[Slot | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"td-data-{i}", daemon=True)
            for i in range(count)
        ]
        self.close = weakref.finalize(self, _stop, self._queue, threads)
        for thread in threads:
            thread.start()

    def submit(self, call: Callable[[], object]) -> Slot:
        """Call a function in a thread."""
        slot = Slot(call)
        self._queue.put(slot)
        return slot


def _work(queue: SimpleQueue[Slot | None]) -> None:
    while (slot := queue.get()) is not None:
        slot.run()
        del slot


def _stop(queue: SimpleQueue[Slot | None], threads: list[threading.Thread]) -> None:
    while True:
        try:
            queue.get_nowait()
        except Empty:
            break
    for _ in threads:
        queue.put(None)
    end = time.monotonic() + _PATIENCE
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0))


class Failure(Exception):  # noqa: N818  carries an error and its task to the consumer, and is never raised further
    """An error of a task."""

    def __init__(self, task: object, error: BaseException) -> None:
        self.task, self.error = task, error


class ThreadEngine(Generic[T]):
    """Reads tasks ahead, and gives the results out in the order of the tasks."""

    def __init__(
        self,
        tasks: Iterator[T],
        read: Callable[[T], object],
        num_threads: int,
        depth: int,
        timeout: float | None = None,
    ) -> None:
        self._tasks, self._read, self._depth, self._timeout = tasks, read, depth, timeout
        self._threads = Threads(num_threads) if num_threads else None
        self._slots: deque[tuple[T | None, Slot]] = deque()
        self._is_over = False

    def get_next(self) -> tuple[T, object] | None:
        """Return the next task and its result, or None after the last; raise Failure if it has an error."""
        self._fill(max(self._depth, 1))
        if not self._slots:
            return None
        task, slot = self._slots[0]
        if self._threads is None:
            slot.run()
        if not slot.wait(self._timeout):
            raise Failure(
                task, TimeoutError(f"no batch for {self._timeout} seconds: a thread still reads it")
            )
        self._slots.popleft()
        if slot.error is not None:
            raise Failure(task, slot.error)
        if self._threads is not None:
            self._fill(self._depth)
        assert task is not None  # a slot without a task has an error
        return task, slot.value

    def has_next(self) -> bool:
        """Return True if there is a next result, without waiting for it."""
        return bool(self._slots) and self._slots[0][1].is_ready()

    def _fill(self, depth: int) -> None:
        while len(self._slots) < depth and not self._is_over:
            try:
                task = next(self._tasks)
            except StopIteration:
                self._is_over = True
                return
            except Exception as error:
                # It belongs to this batch, so the earlier ones are given out first.
                slot, self._is_over = Slot(_raise(error)), True
                slot.run()
                self._slots.append((None, slot))
                return
            call = _bind(self._read, task)
            self._slots.append((task, Slot(call) if self._threads is None else self._threads.submit(call)))

    def close(self) -> None:
        """End the threads; one that hangs in a store is abandoned."""
        self._is_over = True
        self._slots.clear()
        if self._threads is not None:
            self._threads.close()


def _bind(read: Callable[[T], object], task: T) -> Callable[[], object]:
    return lambda: read(task)


def _raise(error: BaseException) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call
