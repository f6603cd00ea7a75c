"""Rows of one collection in another: the strict comparison of their metadata, and copies into leaves that are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._plans.index import plan_index
from .._torch.private import without_torch_function
from .._tree.node import Core
from .._tree.stored_leaves import index_leaves, is_stored
from .._tree.walks import list_holders, walk
from ..errors import KeyMismatchError, StructureError
from .check import describe_leaf
from .pair import as_plain
from .run import copy_all


def check_rows(storage: Core, rows: Core) -> None:
    """Raise StructureError unless both have the same keys, dtypes and shapes of a row; nothing is read, or cast.

    Args:
        storage: a collection whose first batch dim counts rows.
        rows: rows to be written to it, or to be joined with it.

    >>> check_rows(TensorDict({"a": torch.zeros(9, 2)}, [9]), TensorDict({"a": torch.zeros(3, 2)}, [3]))
    >>> check_rows(TensorDict({"a": torch.zeros(9)}, [9]), TensorDict({"a": torch.arange(3)}, [3]))
    Traceback (most recent call last):
        ...
    td_core.errors.StructureError: key 'a' has dtype torch.float32 and rows of shape []; the other ...
    """
    if not rows.batch_size or storage.batch_size[1:] != rows.batch_size[1:]:
        raise StructureError(
            f"rows have the batch size {['n', *storage.batch_size[1:]]}; that of the other rows is {list(rows.batch_size)}"
        )
    left: list[Tensor] = []
    right: list[Tensor] = []
    try:
        storage._zip_leaves(rows, left, right)
        for key in {*storage.keys(True)} ^ {*rows.keys(True)}:  # of a value, which has no leaf
            raise KeyMismatchError(
                f"only the {'rows' if key in rows.keys(True) else 'other rows'} have the key {key!r}"
            )
    except StructureError:
        sizes = storage.batch_size[0], rows.batch_size[0]
        if sizes[0] == sizes[1] or (_has_rows(storage) and _has_rows(rows)):
            raise
        # A lazy stack has a member for each row: compare as many of both.
        count = min(*sizes, 1)
        check_rows(storage[:count], rows[:count])
    for mine, other in zip(left, right):
        if mine.dtype != other.dtype or mine.shape[1:] != other.shape[1:]:
            raise StructureError(
                f"{describe_leaf(storage, mine)} has dtype {mine.dtype} and rows of shape {list(mine.shape[1:])}; the "
                f"other rows have {other.dtype} and {list(other.shape[1:])}; {_how_to_fit(mine, other)}"
            )


def _how_to_fit(mine: Tensor, other: Tensor) -> str:
    return "cast the rows first" if mine.dtype != other.dtype else "pad the rows to one shape first"


def take_into(data: Core, positions: Tensor, out: Core) -> None:
    """Write the rows of a collection at positions into the leaves of another one, which has as many rows.

    Leaves in memory are gathered without a copy between; stored leaves are read together, and copied.

    Args:
        data: the collection, whose first batch dim counts rows.
        positions: a vector of int64.
        out: rows of the same keys, dtypes and shapes, in contiguous memory.

    >>> out = TensorDict({"a": torch.zeros(2)}, [2])
    >>> take_into(TensorDict({"a": torch.tensor([5.0, 6.0, 7.0])}, [3]), torch.tensor([2, 0]), out)
    >>> out["a"]
    tensor([7., 5.])
    """
    if out.batch_size[:1] != (len(positions),):
        raise StructureError(f"out has the batch size {list(out.batch_size)}, for {len(positions)} positions")
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    if _has_rows(data) and _has_rows(out):
        check_rows(data, out)
        out._zip_leaves(data, targets, sources)
    if not sources or any(map(is_stored, sources)) or not all(map(_can_select, sources, targets)):
        taken: Any = index_leaves(data, plan_index(positions, data.batch_size))
        check_rows(out, taken)
        targets, sources = [], []
        out._zip_leaves(taken, targets, sources)
        copy_all(targets, sources)
        return
    with torch.no_grad(), without_torch_function():
        for source, target in zip(sources, targets):
            torch.index_select(source, 0, positions, out=target)


def _has_rows(root: Core) -> bool:
    """Return True if the first dim of all leaves counts rows: not so for those of the members of a lazy stack."""
    return all(holder is node._inner() for node in walk(root) for holder in list_holders(node))


def _can_select(source: Tensor, target: Tensor) -> bool:
    """Return True if torch can gather the rows of a leaf into another one."""
    return (
        (type(source) is Tensor or as_plain(source, target) is not None)
        and type(target) is Tensor
        and source.layout is torch.strided
        and target.is_contiguous()
        and source.device == target.device
    )
