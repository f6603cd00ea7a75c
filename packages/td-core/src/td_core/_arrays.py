"""Arrays of numpy as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(value: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Return what ``torch.as_tensor`` gives, of an array that torch cannot share the memory of a copy.

    Such are reversed arrays, those of the other byte order, and those that may not be written.

    >>> as_tensor(np.arange(3)[::-1]), as_tensor(np.array([1, 2], ">i2"))
    (tensor([2, 1, 0]), tensor([1, 2], dtype=torch.int16))
    """
    if isinstance(value, np.ndarray) and not torch.compiler.is_compiling() and not _can_share(value):
        value = np.array(value, value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value, dtype=dtype, device=device)


def tensors_in(index: Any) -> Any:
    """Return an index of a tensor with tensors for the arrays in it.

    >>> tensors_in((np.arange(2)[::-1], 0))
    (tensor([1, 0]), 0)
    """
    if isinstance(index, tuple):
        return tuple(map(tensors_in, index))
    return as_tensor(index) if isinstance(index, np.ndarray) else index


def _can_share(array: np.ndarray[Any, Any]) -> bool:
    flags, dtype = array.flags, array.dtype
    # A tensor counts its steps in items; those of a field of records may be others.
    in_items = all(step >= 0 and step % dtype.itemsize == 0 for step in array.strides)
    return in_items and flags.writeable and flags.aligned and dtype.isnative
