"""Checksums: xxh3 if the package xxhash is installed, else CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any


class _Crc32:
    """CRC-32 with the interface of a ``hashlib`` object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


xxh3_128: Callable[[], Any] | None
try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None


def choose_algorithm() -> str:
    """Return the name of the best installed checksum algorithm."""
    return "crc32" if xxh3_128 is None else "xxh3_128"


def make_checksum(name: str) -> Any:
    """Return a new hash object for an algorithm, or None if the algorithm is not installed."""
    if name == "crc32":
        return _Crc32()
    return xxh3_128() if name == "xxh3_128" and xxh3_128 is not None else None


def compute_digest(algorithm: str, content: Iterable[Any]) -> str:
    """Return the hex digest of chunks of bytes."""
    hasher = make_checksum(algorithm)
    for piece in content:
        hasher.update(piece)
    return str(hasher.hexdigest())
