"""Dtypes: Python types that torch accepts as dtypes, and type promotion with 0-d tensors."""

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

#: A function (leaf, 0-d operand) -> operand with the dtype that promotes correctly with the leaf.
ScalarBeside = Callable[[Tensor, Tensor], Tensor]

#: The dtypes to which torch converts Python types, whatever its default dtype is.
PYTHON_DTYPES: dict[Any, torch.dtype] = {
    bool: torch.bool,
    complex: torch.complex128,
    float: torch.float64,
    int: torch.int64,
}


def as_dtype(dtype: Any) -> Any:
    """Convert a Python number type to a dtype; return any other value unchanged."""
    return PYTHON_DTYPES.get(dtype, dtype) if isinstance(dtype, type) else dtype


def dtype_beside(dtype: torch.dtype, scalar: torch.dtype) -> torch.dtype:
    """Return the result dtype of a tensor with dims and a 0-d tensor of dtype ``scalar``, as ``torch.result_type`` does."""
    # A graph cannot call torch.result_type. Only a higher category (bool, int, float, complex) promotes.
    if _category(scalar) <= _category(dtype):
        return dtype
    if dtype.is_floating_point:
        scalar = torch.complex32  # the lowest precision, so that the tensor with dims determines the result
    return torch.promote_types(dtype, scalar)


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def keep_scalar(leaf: Tensor, scalar: Tensor) -> Tensor:
    """Return the 0-d operand of a leaf unchanged."""
    return scalar


def as_scalar(leaf: Tensor, scalar: Tensor) -> Tensor:
    """Convert the 0-d operand of a 0-d leaf that represents a tensor with dims."""
    # Without the cast, torch would promote both 0-d tensors to the larger dtype.
    return scalar if leaf.ndim or leaf.dtype == scalar.dtype else cast_for_promotion(leaf.dtype, scalar)


def cast_for_promotion(dtype: torch.dtype, scalar: Tensor) -> Tensor:
    """Cast a 0-d tensor so that it promotes ``dtype`` as it would promote a tensor with dims."""
    wanted = dtype_beside(dtype, scalar.dtype)
    return scalar if torch.promote_types(dtype, scalar.dtype) == wanted else scalar.to(wanted)
