"""Shapes of what a file holds: of a tensor, or the table of the component shapes of a nested one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from td_core._torch_private import make_nested_view

Shape = Any  # torch.Size, or the 2-d integer table of the component shapes of a nested tensor


def element_count(shape: Shape) -> int:
    """Return the number of elements of a shape or of a table of component shapes.

    >>> element_count(torch.Size([2, 3])), element_count(torch.tensor([[1, 2], [3, 4]]))
    (6, 14)
    """
    if isinstance(shape, Tensor):
        return sum(math.prod(row) for row in shape.tolist())
    return math.prod(shape)


def reshape_flat(flat: Tensor, shape: Shape) -> Tensor:
    """Give a flat tensor its shape and return it; a table of component shapes makes it a nested tensor.

    >>> reshape_flat(torch.arange(4), torch.Size([2, 2])).shape
    torch.Size([2, 2])
    """
    if not isinstance(shape, Tensor):
        # Numbers are taken apart much faster than a torch.Size, and a view would be another tensor.
        return flat if len(shape) == 1 else flat.resize_(*shape) if shape else flat.resize_(())
    rows = shape.tolist()
    strides = [[math.prod(row[i + 1 :]) for i in range(len(row))] for row in rows]
    offsets, total = [], 0
    for row in rows:
        offsets.append(total)
        total += math.prod(row)
    table = _integers(rows).view(shape.shape)
    return make_nested_view(flat, table, _integers(strides).view(shape.shape), _integers(offsets))


def make_empty(dtype: torch.dtype, shape: Shape) -> Tensor:
    """Return a tensor without elements.

    >>> make_empty(torch.int8, torch.Size([0, 2])).shape
    torch.Size([0, 2])
    """
    return reshape_flat(torch.empty(0, dtype=dtype, device="cpu"), shape)


def _integers(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def component_shapes(tensor: Tensor) -> Tensor:
    """Return the shapes of the components of a strided nested tensor, one a row.

    >>> component_shapes(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))
    tensor([[2],
            [3]])
    """
    rows = [list(part.shape) for part in tensor.unbind()]
    return _integers(rows).view(len(rows), tensor.dim() - 1)


def shape_of(tensor: Tensor) -> Shape:
    """Return the shape of a tensor, or the component shapes of a nested one."""
    return component_shapes(tensor) if tensor.is_nested else tensor.shape


def show_shape(shape: Shape) -> str:
    """Return a shape for messages."""
    return str(shape.tolist() if isinstance(shape, Tensor) else list(shape))


def has_prefix(shape: Shape, size: torch.Size) -> bool:
    """Tell whether a leaf of a shape, or with a table of component shapes, starts with a batch size.

    >>> has_prefix(torch.Size([2, 3]), torch.Size([2])), has_prefix(torch.tensor([[3, 1], [3, 2]]), torch.Size([2, 3]))
    (True, True)
    """
    if not isinstance(shape, Tensor):
        return bool(shape[: len(size)] == size)
    count, inner = size[:1], list(size[1:])
    return shape.shape[: len(count)] == count and all(row[: len(inner)] == inner for row in shape.tolist())


def as_shape(shape: Any) -> Shape:
    """Return what a caller gave as a shape: a size, numbers, one number, or a table of component shapes."""
    if isinstance(shape, Tensor) and shape.ndim == 2:
        return shape
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    # torch says what is wrong with one that no tensor can have.
    torch.empty(size, dtype=torch.uint8, device="meta")
    return size
