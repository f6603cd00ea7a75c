"""Report the progress of a save or load with a progress bar or a callback."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from .plugins.memmap_methods import Progress

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

__all__ = ["make_reporter"]


def make_reporter(progress: Progress, total: int, what: str) -> Callable[[int], None]:
    """Return a thread-safe function that takes the number of bytes just processed.

    Args:
        progress: the option of the format: False, True for a progress bar, or a function of (bytes done, total bytes).
        total: number of bytes of the whole operation.
        what: name of the operation, shown beside the bar.

    >>> report = make_reporter(lambda done, total: print(done, "of", total), 3, "save")
    >>> report(2), report(1)
    2 of 3
    3 of 3
    (None, None)
    """
    if progress is False:
        return lambda amount: None
    lock, done = threading.Lock(), 0
    show = _make_bar(total, what) if progress is True else progress

    def report(amount: int) -> None:
        nonlocal done
        with lock:
            done += amount
            show(done, total)

    return report


def _make_bar(total: int, what: str) -> Callable[[int, int], object]:
    if tqdm is None:
        return lambda done, total: print(
            f"\r{what}: {done} of {total} bytes",
            end="" if done < total else "\n",
            file=sys.stderr,
            flush=True,
        )
    bar = tqdm(total=total, desc=what, unit="B", unit_scale=True)

    def show(done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show
