"""Checksums of tensors: xxh128 if the package xxhash is installed, else CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError

__all__ = ["as_buffer", "choose_algorithm", "compute_digest"]

xxh3_128: Callable[[], Any] | None
try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None


def choose_algorithm() -> str:
    """Return the name of the best installed algorithm."""
    return "crc32" if xxh3_128 is None else "xxh3_128"


def as_buffer(tensor: Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor as a buffer of bytes."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # one element, which is contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy()


def compute_digest(algorithm: str, tensors: Iterable[Tensor]) -> str:
    """Return the hex digest of the bytes of contiguous CPU tensors, one after the other.

    Raises:
        FormatError: the algorithm is not installed.
    """
    if algorithm == "crc32":
        value = 0
        for tensor in tensors:
            value = zlib.crc32(as_buffer(tensor), value)
        return f"{value:08x}"
    if algorithm != "xxh3_128" or xxh3_128 is None:
        raise FormatError(
            f"the checksums are {algorithm!r:.50}, which needs: pip install td-safetensors[checksum]"
        )
    hasher = xxh3_128()
    for tensor in tensors:
        hasher.update(as_buffer(tensor))
    return str(hasher.hexdigest())
