"""Write rows at positions of a leaf on the CPU, with numpy where it is faster than torch: it copies each row at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.dtypes import STAND_INS
from .._torch.kernels import PLAIN
from .._torch.private import count_dispatch_modes, increase_versions, is_traced

#: Rows of this many bytes together, and of this many each, are faster with numpy.
_LEAST = 1 << 17
_LEAST_EACH = 32


def write_rows(leaf: Tensor, index: Any, value: Any) -> None:
    """Run ``leaf[index] = value``.

    >>> leaf = torch.zeros(3)
    >>> write_rows(leaf, torch.tensor([2, 0]), torch.tensor([1.0, 2.0]))
    >>> leaf
    tensor([2., 0., 1.])
    """
    if not (type(index) is Tensor and type(value) in PLAIN and _try_rows(leaf, index, value)):
        leaf[index] = value


def _try_rows(leaf: Tensor, index: Tensor, value: Tensor) -> bool:
    """Write rows at positions with numpy; return False, with nothing written, if torch has to write them."""
    # The size excludes most writes.
    if (
        value.numel() * value.itemsize < _LEAST
        or not _is_fitting(leaf, index, value)
        or _is_seen(leaf, value)
        or (arrays := _make_arrays(leaf, index, value)) is None
    ):
        return False
    held, positions, rows = arrays
    first = int(positions.flat[0])
    if _is_range(positions, first, len(leaf)):
        leaf.detach()[first : first + len(positions)].copy_(value.detach())
        return True  # torch raises the version
    try:
        held[positions] = rows
    except IndexError:
        return False  # nothing was written; torch raises an error
    increase_versions([leaf])
    return True


def _is_fitting(leaf: Tensor, index: Tensor, value: Tensor) -> bool:
    """Return True if a value has the rows of a leaf at int64 positions, all in the memory of the CPU."""
    return (
        type(leaf) in PLAIN
        and index.dtype is torch.int64
        and value.dtype is leaf.dtype
        and index.numel() > 0
        and value.numel() * value.itemsize >= _LEAST_EACH * index.numel()
        and not (leaf.is_nested or index.is_nested or value.is_nested)
        and value.shape == index.shape + leaf.shape[1:]
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
    )


def _is_seen(leaf: Tensor, value: Tensor) -> bool:
    """Return True if autograd, a transform or a mode has to see the write, or if both share memory."""
    return bool(
        is_traced()
        or count_dispatch_modes()
        or leaf.is_inference()
        or (torch.is_grad_enabled() and (leaf.requires_grad or value.requires_grad))
        or leaf.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor has elements in the memory of the CPU that numpy reads as they are."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _is_range(positions: Any, first: int, size: int) -> bool:
    """Return True if positions are consecutive rows, none of them counted from the end."""
    if (
        positions.ndim != 1
        or first < 0
        or positions[-1] - first != len(positions) - 1
        or positions[-1] >= size
    ):
        return False
    return bool((positions[1:] - positions[:-1] == 1).all())


def _make_arrays(leaf: Tensor, index: Tensor, value: Tensor) -> tuple[Any, Any, Any] | None:
    """Return arrays of the memory of three tensors; None if one of them is elsewhere, or not as it is in memory."""
    try:
        # numpy() refuses conjugate and negative views, sparse and quantized tensors, and other devices.
        return leaf.numpy(), index.numpy(), value.numpy()
    except (TypeError, RuntimeError):
        if not all(map(_is_dense, (leaf, index, value))):
            return None
    # Integers of the same width stand for dtypes that numpy lacks.
    dtype = STAND_INS.get(leaf.itemsize, leaf.dtype)
    return leaf.detach().view(dtype).numpy(), index.numpy(), value.detach().view(dtype).numpy()
