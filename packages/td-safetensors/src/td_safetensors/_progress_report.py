"""Report the progress of a save or load with a progress bar or a callback."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Progress", "make_reporter"]

#: False, True for a progress bar, or a function of (bytes done, total bytes).
Progress = bool | Callable[[int, int], Any]


def make_reporter(progress: Progress, total: int, what: str) -> Callable[[int], None]:
    """Return a thread-safe function that takes the number of bytes just processed."""
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


def _make_bar(total: int, what: str) -> Callable[[int, int], Any]:
    try:
        from tqdm import tqdm
    except ImportError:
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
