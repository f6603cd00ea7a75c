"""Sources that wrap another source for the modes in which a store is opened: ``"r"`` and ``"c"``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from td_core.errors import LockedError
from td_core.spi import set_module
from td_core.typing import Source, SourceIndex


class RefusingSource:
    """Base of the sources that refuse writes for the reason ``refusal``."""

    refusal: str

    def write(self, index: SourceIndex, value: Tensor) -> NoReturn:
        """Raise LockedError."""
        raise LockedError(self.refusal)

    def flush(self) -> None:
        """Do nothing."""


@set_module("td_store.store_pickles")
class ReadOnlySource(RefusingSource):
    """A source that reads another source and refuses writes."""

    def __init__(self, source: Source) -> None:
        self.source, self.shape, self.dtype = source, source.shape, source.dtype

    @property
    def refusal(self) -> str:  # type: ignore[override]
        """The reason why writes are refused."""
        return f"cannot write to {self.source!r}: it is opened with mode='r'; open it with mode='r+', or clone() it"

    def __repr__(self) -> str:
        return f"ReadOnlySource({self.source!r})"

    def read(self, index: SourceIndex) -> Tensor:
        """Read from the other source."""
        return self.source.read(index)


@set_module("td_store.store_pickles")
class PrivateSource:
    """A source that reads another source until its first write, which copies the array to memory."""

    def __init__(self, source: Source, memory: Tensor | None = None) -> None:
        self.source, self.shape, self.dtype, self.memory = source, source.shape, source.dtype, memory
        self._writing = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        return PrivateSource, (self.source, self.memory)

    def read(self, index: SourceIndex) -> Tensor:
        """Read from the copy, or from the other source."""
        return self.source.read(index) if self.memory is None else self.memory[index].clone()

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write to the copy."""
        with self._writing:
            memory = self.memory
            if memory is None:
                memory = self.source.read(tuple(slice(0, n, 1) for n in self.shape))
            memory[index] = value
            self.memory = memory

    def hold(self) -> contextlib.AbstractContextManager[object]:
        """Exclude other writers of the copy during a block."""
        return self._writing

    def flush(self) -> None:
        """Do nothing: the store does not change."""


#: Per mode, the function that wraps a source.
WRAPPERS: dict[str, Callable[[Source], Source]] = {
    "r": ReadOnlySource,
    "r+": lambda source: source,
    "c": PrivateSource,
}


def unwrap(source: Source) -> Source:
    """Return the source that the reads of ``source`` go to."""
    while isinstance(source, ReadOnlySource) or (isinstance(source, PrivateSource) and source.memory is None):
        source = source.source
    return source
