"""Work in threads, also after the call has returned, and reports of its progress."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from .._python.public_names import set_module
from ..typing import Progress


@set_module("td_core")
class TensorDictFuture(Future[Any]):
    """Future that ``return_early=True`` returns: its result is a collection, when all given futures are done.

    Args:
        futures: the futures to wait for; the first exception of one is the exception of this future.
        resulting_td: the result; None for the result of the last future.

    >>> from concurrent.futures import Future
    >>> from td_core import TensorDictFuture
    >>> first, second = Future(), Future()
    >>> both = TensorDictFuture([first, second], TensorDict({"a": 1}))
    >>> first.set_result(None)
    >>> both.done()
    False
    >>> second.set_result(None)
    >>> both.result()["a"]
    tensor(1)
    """

    def __init__(self, futures: Sequence[Future[object]], resulting_td: object) -> None:
        super().__init__()
        self.futures = list(futures)
        self.resulting_td = resulting_td
        self._open = len(self.futures)
        self._counting = threading.Lock()
        if not self.futures:
            self.set_result(resulting_td)
        for future in self.futures:
            # A future keeps its callbacks, so a callback that held this object would keep both alive.
            future.add_done_callback(partial(_count, weakref.ref(self)))

    def _count_done(self) -> None:
        with self._counting:
            self._open -= 1
            if self._open:
                return
        errors = [error for future in self.futures if (error := future.exception()) is not None]
        if errors:
            self.set_exception(errors[0])
        else:
            self.set_result(self.futures[-1].result() if self.resulting_td is None else self.resulting_td)


def _count(owner: weakref.ref[TensorDictFuture], _: Future[object]) -> None:
    future = owner()
    if future is not None:
        future._count_done()


def run_in_background(work: Callable[[], object], name: str, result: object = None) -> TensorDictFuture:
    """Call ``work`` in a new thread of that name, and return a future of ``result``, or else of what ``work`` returns."""
    future: Future[object] = Future()
    threading.Thread(target=partial(_run, work, future), name=name).start()
    return TensorDictFuture([future], result)


def _run(work: Callable[[], object], future: Future[object]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def run_parallel(work: Sequence[Callable[[], object]], num_threads: int) -> None:
    """Call functions, in threads if ``num_threads`` is more than one; raise the first error.

    >>> found = []
    >>> run_parallel([lambda: found.append(1), lambda: found.append(2)], num_threads=2)
    >>> sorted(found)
    [1, 2]
    """
    if num_threads <= 1 or len(work) <= 1:
        for call in work:
            call()
        return
    with ThreadPoolExecutor(num_threads, "td-core") as pool:
        for future in [pool.submit(call) for call in work]:
            future.result()


def make_reporter(progress: Progress, total: int, what: str, unit: str = "bytes") -> Callable[[int], None]:
    """Return a thread-safe function that takes the number of bytes just processed.

    Args:
        progress: the option of the format: False, True for a progress bar, or a function of (bytes done, total bytes).
        total: number of bytes of the whole operation.
        what: name of the operation, shown beside the bar.
        unit: what is counted, if it is not bytes.

    >>> report = make_reporter(lambda done, total: print(done, "of", total), 3, "save")
    >>> report(2), report(1)
    2 of 3
    3 of 3
    (None, None)
    """
    if progress is False:
        return lambda amount: None
    lock, done = threading.Lock(), 0
    show = _make_bar(total, what, unit) if progress is True else progress

    def report(amount: int) -> None:
        nonlocal done
        with lock:
            done += amount
            show(done, total)

    return report


def _make_bar(total: int, what: str, unit: str) -> Callable[[int, int], object]:
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda done, total: print(
            f"\r{what}: {done} of {total} {unit}",
            end="" if done < total else "\n",
            file=sys.stderr,
            flush=True,
        )
    bar = tqdm(total=total, desc=what, unit="B" if unit == "bytes" else unit, unit_scale=True)

    def show(done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show
