"""Pause the cyclic garbage collector: for the import, and for tests of freed memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]


@contextmanager
def paused() -> Iterator[None]:
    """Context manager that pauses the garbage collector."""
    # After ``import torch``, a full collection is due, which would take longer than the import of td_core and free nothing.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
