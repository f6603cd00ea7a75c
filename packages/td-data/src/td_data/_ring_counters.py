"""How many rows of a ring were begun and completed: two counters, in memory, shared, or mapped from a file."""

from __future__ import annotations

import contextlib
import os
import platform
import weakref
from collections.abc import Iterator
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Processors whose stores become visible in their order, so that readers need no lock.
_IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")


class RingCounters:
    """The counters ``reserved``, ``written`` and the capacity."""

    def __init__(self, capacity: int, path: str | None, is_shared: bool, is_memory: bool) -> None:
        self.capacity, self.path = capacity, path
        self._is_guarded = path is not None and fcntl is not None and not (_IS_ORDERED and is_memory)
        self._handle: int | None = None
        # A list is read ten times as fast as a tensor of one element.
        self._numbers: Any = [0, 0, capacity]
        if path is not None:
            self._map(path)
        elif is_shared:
            self._numbers = torch.tensor(self._numbers).share_memory_()

    def _map(self, path: str) -> None:
        with open(path, "ab") as file:
            if not file.tell():
                file.truncate(24)
        self._numbers = torch.from_file(path, shared=True, size=3, dtype=torch.int64)
        held = int(self._numbers[2])
        if held not in (0, self.capacity):
            raise ValueError(
                f"{path} counts the rows of a buffer of {held} rows; this one has {self.capacity}"
            )
        self._numbers[2] = self.capacity

    @property
    def is_private(self) -> bool:
        """True if no other process has these counters."""
        return type(self._numbers) is list

    def read(self) -> tuple[int, int]:
        """Return the numbers of the oldest row that is valid, and after the newest one."""
        numbers = self._numbers
        reserved, written, capacity = numbers if type(numbers) is list else numbers.tolist()
        return max(reserved - capacity, 0), written

    @property
    def reserved(self) -> int:
        """Number after the newest row that was begun."""
        return int(self._numbers[0])

    def reserve(self, stop: int) -> None:
        """Make the rows invalid that will be overwritten."""
        self._numbers[0] = max(self.reserved, stop)

    def publish(self, stop: int) -> None:
        """Make rows valid that were written."""
        self._numbers[1] = stop

    def reset(self) -> None:
        """Forget all rows, for private counters."""
        self._numbers[:2] = [0, 0]

    def claim(self) -> None:
        """Become the one writer; RuntimeError if another process is. A forked process must claim by itself."""
        if self.path is None or fcntl is None or self._handle is not None:
            return
        handle = os.open(self.path, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise RuntimeError(
                f"the buffer of {self.path} has a writer, in another process or in this one: a buffer has one; `del` ends it"
            ) from None
        self._handle = handle
        _OWNERS.add(self)

    @contextlib.contextmanager
    def _lock(self, exclusive: bool) -> Iterator[None]:
        with open(f"{self.path}.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield

    def guard(self, exclusive: bool) -> contextlib.AbstractContextManager[None]:
        """Exclude the writer from reads, where the order of stores does not do so."""
        return self._lock(exclusive) if self._is_guarded else contextlib.nullcontext()

    def close(self) -> None:
        """Let another process write."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        numbers = None if self.path is not None else self._numbers
        return {**self.__dict__, "_handle": None, "_numbers": numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path is not None:
            self._map(self.path)


#: Those whose process writes. A forked process gives up its copy of the lock, which would outlive the writer.
_OWNERS: weakref.WeakSet[RingCounters] = weakref.WeakSet()


def _close_all() -> None:
    for counters in list(_OWNERS):
        counters.close()
    _OWNERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
