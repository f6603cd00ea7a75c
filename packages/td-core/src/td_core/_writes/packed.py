"""Write the leaves of a packed collection with one kernel for each run of leaves of one dtype.

A function that tries a write returns False, with nothing written, if the leaves have to be checked and written one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._torch.kernels import Op
from .._tree.node import Core
from .._tree.packed import Packed, find_packed
from .check import LEAF_ERRORS


class Beside(NamedTuple):
    """An operand that is made for each run, such as a number as a tensor of the dtype of the run."""

    make: Callable[[Tensor], object]


_NUMBERS = frozenset({int, float, bool, complex})


def try_write_packed(root: Core, this: Op, *operands: object) -> bool:
    """Apply an operation in place to all leaves at once.

    An operand is a number, a tensor without dims, a collection packed in the same way, or a :class:`Beside`.
    """
    mark = find_packed(root)
    if mark is None:
        return False
    columns: list[Sequence[object]] = []
    for operand in operands:
        column = _list_operands(root, mark, operand)
        if column is None:
            return False
        columns.append(column)
    rows = [*zip(mark.runs, *columns)]
    # torch refuses an operation before it writes, but only one run at a time.
    if len(rows) > 1 and not all(_can_run(this, row) for row in rows):
        return False
    before = mark.read_versions() if mark.apart is None else None
    single = this.single
    try:
        for row in rows:
            single(*row)
    except LEAF_ERRORS:
        if len(rows) > 1:
            raise
        return False  # the ordinary way raises an error that names the leaf
    if mark.apart != []:
        mark.raise_versions(before)
    return True


def try_copy_packed(root: Core, source: object, non_blocking: bool) -> bool:
    """Copy all leaves of a collection that is packed in the same way at once."""
    mark = find_packed(root)
    if mark is None or not isinstance(source, Core):
        return False
    runs = _list_runs(root, mark, source)
    if runs is None:
        return False
    before = mark.read_versions() if mark.apart is None else None
    for run, value in zip(mark.runs, runs, strict=True):
        run.copy_(value, non_blocking)
    if mark.apart != []:
        mark.raise_versions(before)
    return True


def _list_operands(root: Core, mark: Packed, operand: object) -> Sequence[object] | None:
    """Return what an operand is beside each run; None if it is not the same for all leaves of the run."""
    if type(operand) in _NUMBERS:
        return [operand] * len(mark.runs)
    if isinstance(operand, Core):
        return _list_runs(root, mark, operand)
    if isinstance(operand, np.generic):
        return [operand.item()] * len(mark.runs)
    if type(operand) is Tensor:
        return [operand] * len(mark.runs) if _is_same_beside_each(mark, operand) else None
    return [operand.make(run) for run in mark.runs] if isinstance(operand, Beside) else None


def _list_runs(root: Core, mark: Packed, operand: Core) -> list[Tensor] | None:
    """Return the runs of a collection that is packed in the same way; None for others."""
    if operand.batch_size != root.batch_size:
        return None
    other = find_packed(operand, is_operand=True)
    return None if other is None or not mark.is_like(other) else other.runs


def _is_same_beside_each(mark: Packed, scalar: Tensor) -> bool:
    """Return True if a tensor without dims means the same beside a run as beside each of its leaves."""
    if (
        scalar.ndim
        or scalar.layout is not torch.strided
        or (scalar.requires_grad and torch.is_grad_enabled())
    ):
        return False
    # Beside a leaf without dims, its dtype counts as that of the leaf.
    if mark.has_scalars and mark.dtypes != {scalar.dtype}:
        return False
    # A leaf of the collection changes before the leaves behind it read it.
    return scalar.untyped_storage().data_ptr() != mark.storage.untyped_storage().data_ptr()


def _can_run(this: Op, row: tuple[object, ...]) -> bool:
    """Return True if torch can apply an operation to a run, as it can to an empty one."""
    empty = [item[:0].clone() if isinstance(item, Tensor) and item.ndim else item for item in row]
    try:
        this.single(*empty)
    except LEAF_ERRORS:
        return False
    return True
