"""Values by row: pair the members of a lazy stack with the items of a nested list."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .._tree.coerce import WRAPPED
from .._tree.node import Core
from .._tree.walks import expand


def pair_rows(node: Core, value: object) -> list[tuple[Any, object]] | None:
    """Pair each member of a lazy stack with its item of a list of tensors of different shapes; None for other values."""
    stacked = node._members_and_dim() if type(value) in (list, tuple) else None
    if stacked is None or getattr(node._inner(), "hook_in", None) is not None:
        return None
    members, dim = stacked
    rows = rows_of_members(value, dim, len(members))
    return None if rows is None else list(zip(members, rows, strict=True))


def rows_of_members(value: object, dim: int, count: int) -> list[object] | None:
    """Split a nested list along ``dim`` into a row per member. Return None unless it has tensors of different shapes."""
    shapes = set()
    for item in expand([value], lambda item: item if isinstance(item, (list, tuple)) else ()):
        if isinstance(item, (Tensor, np.ndarray)) and type(item) not in WRAPPED:
            shapes.add(tuple(item.shape))
        elif not isinstance(item, (list, tuple)):
            return None
    rows = _along(value, dim) if len(shapes) > 1 else None
    return rows if rows is not None and len(rows) == count else None


def _along(value: Any, dim: int) -> list[object] | None:
    """Split a tensor, an array or nested lists along a dim into a list; None if that dim is missing in a part."""
    if isinstance(value, Tensor):
        return list(value.unbind(dim)) if dim < value.ndim else None
    if not isinstance(value, (list, tuple)):
        return list(np.moveaxis(value, dim, 0)) if dim < value.ndim else None
    if dim == 0:
        return list(value)
    columns: list[Any] = [_along(row, dim - 1) for row in value]
    if any(column is None for column in columns):
        return None
    return [list(row) for row in zip(*columns)] if len({*map(len, columns)}) == 1 else None
