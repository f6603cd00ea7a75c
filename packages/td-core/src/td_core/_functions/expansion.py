"""Expand to the right: new dims come after the existing ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._collection import Core
from .._element_plans import append_dims

__all__ = ["expand_as_right", "expand_right"]


def expand_right(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand a tensor to a shape that starts with its own shape.

    Args:
        tensor: the tensor.
        shape: the shape to expand to.

    Raises:
        RuntimeError: a size is neither 1 nor the size in ``shape``.

    >>> expand_right(torch.zeros(2), (2, 3)).shape
    torch.Size([2, 3])
    """
    missing = len(shape) - tensor.ndim
    if missing < 0:
        raise RuntimeError(
            f"cannot expand to the right: the tensor has {tensor.ndim} dims, {list(tensor.shape)}, the shape "
            f"{list(shape)} has fewer"
        )
    return append_dims(tensor, len(shape)).expand(tuple(shape))


def expand_as_right(tensor: Any, dest: Any) -> Any:
    """Expand a tensor or collection to the shape of another one, which starts with its own shape.

    Args:
        tensor: a tensor, or a collection, whose leaves are expanded after their batch dims.
        dest: a tensor or collection.

    Raises:
        RuntimeError: the shape of ``dest`` does not start with that of ``tensor``.

    >>> expand_as_right(torch.zeros(2), torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    if not isinstance(tensor, Core):
        return expand_right(tensor, dest.shape)
    size, target = tensor.batch_size, torch.Size(dest.shape)
    if target[: len(size)] != size:
        raise RuntimeError(
            f"cannot expand to the right: the batch size {list(size)} does not start {list(target)}"
        )
    ndim, extra = len(size), target[len(size) :]
    return tensor.apply(
        lambda leaf: leaf[(slice(None),) * ndim + (None,) * len(extra)].expand(*target, *leaf.shape[ndim:]),
        batch_size=target,
    )
