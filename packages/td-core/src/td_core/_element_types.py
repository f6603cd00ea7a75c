"""Dtypes: the classes of Python that torch takes for one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PYTHON_DTYPES", "as_dtype"]

#: What torch makes of a class of numbers that is given as a dtype, whatever its default dtype is.
PYTHON_DTYPES: dict[Any, torch.dtype] = {
    bool: torch.bool,
    complex: torch.complex128,
    float: torch.float64,
    int: torch.int64,
}


def as_dtype(dtype: Any) -> Any:
    """Return the dtype of a class of numbers, and anything else as it is.

    >>> as_dtype(float), as_dtype(torch.int8), as_dtype(None)
    (torch.float64, torch.int8, None)
    """
    return PYTHON_DTYPES.get(dtype, dtype) if isinstance(dtype, type) else dtype
