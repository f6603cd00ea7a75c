"""Checksums of leaves: xxh3 if the package xxhash is installed, else CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import FormatError


class _Crc32:
    """CRC-32 with the interface of a ``hashlib`` object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


xxh3_128: Callable[[], object] | None
try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None


def choose_algorithm() -> str:
    """Return the name of the best installed algorithm, which a save stores beside its checksums.

    >>> choose_algorithm() in ("crc32", "xxh3_128")
    True
    """
    return "crc32" if xxh3_128 is None else "xxh3_128"


def make_checksum(algorithm: str) -> Any:
    """Return a new object with the methods ``update(data)`` and ``hexdigest()`` of ``hashlib``.

    Raises:
        FormatError: the algorithm is not installed.

    >>> make_checksum("crc32").hexdigest()
    '00000000'
    """
    if algorithm == "crc32":
        return _Crc32()
    if algorithm != "xxh3_128" or xxh3_128 is None:
        raise FormatError(f"the hashes are {algorithm!r:.50}, which needs: pip install xxhash")
    return xxh3_128()


def compute_digest(algorithm: str, buffers: Iterable[object]) -> str:
    """Return the hex digest of buffers of bytes, one after the other; raise as :func:`make_checksum`.

    >>> compute_digest("crc32", [b"a", as_buffer(torch.tensor([98, 99], dtype=torch.uint8))])
    '352441c2'
    """
    checksum = make_checksum(algorithm)
    for buffer in buffers:
        checksum.update(buffer)
    return str(checksum.hexdigest())


def as_buffer(tensor: Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor of any dtype as a buffer of bytes.

    >>> bytes(as_buffer(torch.ones(2, dtype=torch.bfloat16))).hex()
    '803f803f'
    """
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # one element, which is contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy()
