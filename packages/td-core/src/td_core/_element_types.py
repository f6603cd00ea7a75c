"""Dtypes: the classes of Python that torch takes for one, and what two dtypes become beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "PYTHON_DTYPES",
    "ScalarBeside",
    "as_dtype",
    "keep_scalar",
    "as_scalar",
    "cast_for_promotion",
    "dtype_beside",
]

#: What returns what stands beside a leaf in place of a tensor without dims.
ScalarBeside = Callable[[Tensor, Tensor], Tensor]

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


def dtype_beside(dtype: torch.dtype, scalar: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of ``dtype`` that has dims together with one of ``scalar`` that has none.

    This is that of ``torch.result_type``, which a graph cannot compute. Only a higher category promotes: bool, integers,
    real, complex numbers.

    >>> dtype_beside(torch.float32, torch.float64), dtype_beside(torch.int8, torch.float64)
    (torch.float32, torch.float64)
    """
    if _category(scalar) <= _category(dtype):
        return dtype
    if dtype.is_floating_point:
        scalar = torch.complex32  # the precision stays that of the tensor with dims
    return torch.promote_types(dtype, scalar)


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def keep_scalar(leaf: Tensor, scalar: Tensor) -> Tensor:
    """Return a tensor without dims, to stand beside a leaf that is shown as it is."""
    return scalar


def as_scalar(leaf: Tensor, scalar: Tensor) -> Tensor:
    """Return a tensor without dims, to stand beside a leaf that is shown with more dims than it has.

    torch would promote both to the larger dtype where neither has dims.

    >>> as_scalar(torch.zeros(()), torch.tensor(0.5, dtype=torch.float64))
    tensor(0.5000)
    """
    return scalar if leaf.ndim or leaf.dtype == scalar.dtype else cast_for_promotion(leaf.dtype, scalar)


def cast_for_promotion(dtype: torch.dtype, scalar: Tensor) -> Tensor:
    """Return a tensor without dims so that it promotes ``dtype`` as it does that of a tensor with dims.

    >>> cast_for_promotion(torch.float32, torch.tensor(0.5, dtype=torch.float64)).dtype
    torch.float32
    """
    wanted = dtype_beside(dtype, scalar.dtype)
    return scalar if torch.promote_types(dtype, scalar.dtype) == wanted else scalar.to(wanted)
