"""Shapes of tensors in files: a size, or the table of component shapes of a nested tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import make_nested_view

#: Sizes or, for a nested tensor, a (components, dims) int64 table.
Shape = Union[Sequence[int], Tensor]  # noqa: UP007  evaluated at run time


def element_count(shape: Shape) -> int:
    """Return the number of elements of a shape or of a table of component shapes."""
    if isinstance(shape, Tensor):
        return sum(math.prod(row) for row in shape.tolist())
    return math.prod(shape)


def check_size(where: str, size: int | None, nbytes: int) -> None:
    """Raise FormatError if a file is missing, which has the size None, or is shorter than its elements."""
    if size is None or size < nbytes:
        raise FormatError(f"{where}: the size is {size}, expected at least {nbytes} bytes")


def reshape_flat(flat: Tensor, shape: Shape) -> Tensor:
    """Reshape a flat tensor in place; a table of component shapes makes it a nested tensor."""
    if not isinstance(shape, Tensor):
        # resize_() parses ints much faster than a torch.Size; view() would create a second tensor object.
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
    """Return a tensor without elements, for a shape such as (0, 3)."""
    return reshape_flat(torch.empty(0, dtype=dtype, device="cpu"), shape)


def _integers(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def component_shapes(tensor: Tensor) -> Tensor:
    """Return the component shapes of a nested tensor as a (components, dims) int64 table."""
    rows = [list(part.shape) for part in tensor.unbind()]
    return _integers(rows).view(len(rows), tensor.dim() - 1)


def shape_of(tensor: Tensor) -> Shape:
    """Return the shape of a tensor, or the table of component shapes of a nested tensor."""
    return component_shapes(tensor) if tensor.is_nested else tensor.shape


def show_shape(shape: Shape) -> str:
    """Format a shape for error messages."""
    return str(shape.tolist() if isinstance(shape, Tensor) else list(shape))


def has_prefix(shape: Shape, size: torch.Size) -> bool:
    """Return True if a shape, or the shape of a nested tensor, starts with a batch size."""
    if not isinstance(shape, Tensor):
        return bool(shape[: len(size)] == size)
    count, inner = size[:1], list(size[1:])
    return shape.shape[: len(count)] == count and all(row[: len(inner)] == inner for row in shape.tolist())


def as_shape(shape: Shape) -> Shape:
    """Convert a size, a sequence of ints, an int or a table of component shapes to a shape."""
    if isinstance(shape, Tensor) and shape.ndim == 2:
        return shape
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    # This makes torch raise its error for an invalid size.
    torch.empty(size, dtype=torch.uint8, device="meta")
    return size
