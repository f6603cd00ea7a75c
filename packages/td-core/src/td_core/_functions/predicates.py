"""Predicates on objects and dtypes."""

from __future__ import annotations

import torch

from .._collection import Core
from .._dtypes import as_dtype

__all__ = ["is_bool", "is_floating", "is_inexact", "is_integer", "is_tensor_collection"]


def is_tensor_collection(datatype: object) -> bool:
    """Return True if an object or a class is a collection.

    >>> is_tensor_collection(TensorDict), is_tensor_collection(TensorDict())
    (True, True)
    >>> is_tensor_collection(torch.zeros(1))
    False
    """
    return issubclass(datatype if isinstance(datatype, type) else type(datatype), Core)


def is_inexact(*args: object) -> bool:
    """Return True if the last argument has a floating point or complex dtype.

    Like the other dtype predicates, it can be a ``cast_filter``, which is called with a key and a leaf.

    Args:
        *args: anything, then a tensor or a dtype.

    >>> is_inexact("key", torch.zeros(1)), is_inexact(torch.complex64)
    (True, True)
    >>> is_inexact(torch.int8)
    False
    """
    dtype = _dtype(args)
    return dtype.is_floating_point or dtype.is_complex


def is_floating(*args: object) -> bool:
    """Return True if the last argument has a floating point dtype; see :func:`is_inexact`.

    >>> is_floating(torch.zeros(1)), is_floating(torch.complex64)
    (True, False)
    """
    return _dtype(args).is_floating_point


def is_integer(*args: object) -> bool:
    """Return True if the last argument has an integer dtype (not bool); see :func:`is_inexact`.

    >>> is_integer(torch.zeros(1).int()), is_integer(torch.bool)
    (True, False)
    """
    dtype = _dtype(args)
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def is_bool(*args: object) -> bool:
    """Return True if the last argument has the bool dtype; see :func:`is_inexact`.

    >>> is_bool(torch.tensor(True)), is_bool(torch.int8)
    (True, False)
    """
    return _dtype(args) == torch.bool


def _dtype(args: tuple[object, ...]) -> torch.dtype:
    value = as_dtype(args[-1]) if args else None
    dtype = value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the last argument is a tensor or a dtype; got {args!r}")
    return dtype
