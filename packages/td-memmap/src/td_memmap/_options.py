"""The options of saving and loading, as the functions of :mod:`td_memmap._methods` describe them, in one object each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from td_core.spi import RULES
from td_core.typing import DeviceType, NestedKey, Progress


@dataclass(frozen=True, eq=False)
class MemmapOptions:
    """Options of a save."""

    prefix: str | Path | None = None
    copy_existing: bool = False
    _: KW_ONLY
    num_threads: int = 0
    return_early: bool = False
    share_non_tensor: bool = False
    existsok: bool = True
    robust_key: bool | None = True
    archive: bool | None = None
    compression: str | int | None = None
    atomic: bool = False
    durable: bool = False
    checksums: bool = False
    progress: Progress = False
    allow_pickle: bool = False
    compatible: bool = False
    #: True if the collection itself is mapped, True if no elements are written, and True if the files need no space then.
    inplace: bool = False
    like: bool = False
    sparse: bool = False

    @property
    def is_robust(self) -> bool:
        """True if keys that are not safe file names are encoded."""
        return self.robust_key is not False

    @property
    def rows(self) -> int | None:
        """The number of the files of values by rows in a new save; None if tensordict must read it."""
        return None if self.compatible or RULES.follows_tensordict else 0


@dataclass(frozen=True, eq=False)
class LoadMemmapOptions:
    """Options of a load."""

    prefix: str | Path
    device: DeviceType | None = None
    non_blocking: bool = False
    _: KW_ONLY
    out: Any = None
    robust_key: bool | None = True
    subpath: NestedKey | None = None
    keys: Iterable[NestedKey] | NestedKey | None = None
    mode: str | None = None
    num_threads: int = 0
    allow_pickle: bool | None = None
    verify: bool = False
    strict: bool = True
    progress: Progress = False

    @property
    def is_robust(self) -> bool:
        """True if keys that are not safe file names are encoded."""
        return self.robust_key is not False
