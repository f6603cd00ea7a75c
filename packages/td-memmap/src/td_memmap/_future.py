"""The future of a collection that is being saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from td_core._collection import ATTACHED
from td_core._devices import wait_for
from td_core._locking import lock


class TensorDictFuture:
    """What ``return_early=True`` gives: the collection, once it is saved.

    Args:
        futures: the work to wait for.
        resulting_td: what to return then; None returns the result of the last future.

    >>> done = Future()
    >>> done.set_result(7)
    >>> TensorDictFuture([done], None).result()
    7
    """

    def __init__(self, futures: Sequence[Future[Any]], resulting_td: Any) -> None:
        self.futures = list(futures)
        self.resulting_td = resulting_td

    def result(self) -> Any:
        """Wait for the save to be complete and return the collection; raise what it raised."""
        results = [future.result() for future in self.futures]
        return results[-1] if self.resulting_td is None and results else self.resulting_td


def run_in_background(data: Any, work: Callable[[], Any]) -> TensorDictFuture:
    """Run the save of a collection in a thread of its own."""
    wait_for({leaf.device for leaf in data._leaves()})
    pool = ThreadPoolExecutor(1, "td-memmap-save")
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return TensorDictFuture([future], None)


def lock_then_run(data: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    """Lock a collection at once, as it will be, so that it does not change while it is written."""
    was_locked = data.is_locked
    lock(data, ATTACHED)

    def run() -> Any:
        try:
            return work()
        except BaseException:
            if not was_locked:
                data.unlock_()
            raise

    return run
