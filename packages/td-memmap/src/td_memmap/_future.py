"""Future of a save in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from td_core.spi import lock, wait_for


class TensorDictFuture:
    """Future returned by ``return_early=True``: its result is the mapped collection.

    Args:
        futures: the futures to wait for.
        resulting_td: the result; None returns the result of the last future.

    >>> done = Future()
    >>> done.set_result(7)
    >>> TensorDictFuture([done], None).result()
    7
    """

    def __init__(self, futures: Sequence[Future[Any]], resulting_td: Any) -> None:
        self.futures = list(futures)
        self.resulting_td = resulting_td

    def result(self) -> Any:
        """Wait until the save is complete and return the collection, or raise the exception of the save."""
        results = [future.result() for future in self.futures]
        return results[-1] if self.resulting_td is None and results else self.resulting_td


def run_in_background(data: Any, work: Callable[[], Any]) -> TensorDictFuture:
    """Run the save of a collection in a new thread."""
    wait_for({leaf.device for leaf in data._leaves()})
    pool = ThreadPoolExecutor(1, "td-memmap-save")
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return TensorDictFuture([future], None)


def lock_then_run(data: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    """Lock a collection now, and return a function that runs ``work`` and unlocks again if it fails."""
    was_locked = data.is_locked
    lock(data, by_user=False)

    def run() -> Any:
        try:
            return work()
        except BaseException:
            if not was_locked:
                data.unlock_()
            raise

    return run
