"""Pausing the cyclic garbage collector: for the import, and for tests of what is freed without it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector for the length of a ``with`` block.

    All that the import creates lives on, so there is nothing to find; but ``import torch`` leaves the collector
    so near to its next full pass that the pass, twice as long as the import itself, would fall into it.

    >>> with paused():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
