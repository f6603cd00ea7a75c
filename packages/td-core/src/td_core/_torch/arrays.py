"""Convert NumPy arrays to tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..typing import DeviceType

if TYPE_CHECKING:
    import numpy.typing as npt


def as_tensor(value: object, dtype: torch.dtype | None = None, device: DeviceType | None = None) -> Tensor:
    """Convert a value with ``torch.as_tensor``; copy an array whose memory torch cannot share.

    >>> as_tensor([1, 2])
    tensor([1, 2])
    """
    # torch cannot share arrays with negative strides or a foreign byte order, and warns about read-only arrays.
    if isinstance(value, np.ndarray) and not torch.compiler.is_compiling() and not _can_share(value):
        value = np.array(value, value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value, dtype=dtype, device=device)


def tensors_in(index: object) -> object:
    """Replace the arrays in an index by tensors."""
    if isinstance(index, tuple):
        return tuple(map(tensors_in, index))
    return as_tensor(index) if isinstance(index, np.ndarray) else index


def _can_share(array: npt.NDArray[np.generic]) -> bool:
    flags, dtype = array.flags, array.dtype
    # Tensor strides count elements, but strides of a field in a structured array may not be multiples of the element size.
    in_items = all(step >= 0 and step % dtype.itemsize == 0 for step in array.strides)
    return in_items and flags.writeable and flags.aligned and dtype.isnative
