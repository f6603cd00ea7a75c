"""Rows that are equal: groups, duplicates, membership."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._collection import missing_key_error
from .._keys import unravel_key_to_tuple
from ..errors import KeyPathError, StructureError
from ..typing import NestedKey

__all__ = ["group_by", "isin", "remove_duplicates"]


def group_by(tensordict: Any, key: NestedKey) -> tuple[Tensor | list[Any], tuple[Any, ...]]:
    """Return the distinct values of an entry along the first batch dim, and the rows that have each.

    Args:
        tensordict: a collection with a batch dim.
        key: a tensor, whose distinct rows come sorted, or non-tensor data, whose values come in order of appearance.

    Raises:
        KeyPathError: there is no such entry.
        ValueError: there is no batch dim.
        TypeError: the entry is a sub-collection, or its values, such as arrays, are not simply equal or different.

    >>> values, groups = group_by(TensorDict({"a": [1, 0, 1]}, batch_size=[3]), "a")
    >>> values, [len(group) for group in groups]
    (tensor([0, 1]), [1, 2])
    """
    entry = tensordict._get_path(unravel_key_to_tuple(key))
    if not tensordict.batch_size:
        raise ValueError("group_by groups the rows along the first batch dim, and the collection has none")
    values: Tensor | list[Any]
    if isinstance(entry, Tensor):
        values, inverse = torch.unique(entry, dim=0, return_inverse=True)
        count = len(values)
    elif entry._is_value:
        rows = entry.maybe_to_stack().tolist()
        values = []
        known: dict[Any, int] = {}
        positions = [_find_or_add(row, values, known, key) for row in rows]
        inverse, count = torch.tensor(positions, dtype=torch.long, device="cpu"), len(values)
    else:
        raise TypeError(f"group_by needs a tensor or non-tensor data; {key!r} is a {type(entry).__name__}")
    order = inverse.argsort(stable=True)
    sizes = torch.bincount(inverse, minlength=count).tolist()
    return values, tuple(tensordict[order].split(sizes)) if sizes else ()


def _find_or_add(row: Any, values: list[Any], known: dict[Any, int], key: NestedKey) -> int:
    """Return where a value stands among the distinct ones, to which it is added; ``known`` tells of those with a hash."""
    try:
        position = known.setdefault(row, len(values))
    except TypeError:
        try:
            position = values.index(row) if row in values else len(values)
        except (ValueError, RuntimeError) as error:
            raise TypeError(
                f"group_by: the values of {key!r} cannot be told apart, {type(row).__name__} among them: {error}; "
                "store arrays as tensors"
            ) from error
    if position == len(values):
        values.append(row)
    return position


def isin(input: Any, reference: Any, key: NestedKey, dim: int = 0) -> Tensor:
    """Tell for each position along a batch dim whether what ``input`` has there is also in ``reference``.

    Args:
        input: a collection.
        reference: a collection with the same entry; its shape may differ along ``dim`` only.
        key: a tensor entry.
        dim: a batch dim.

    Returns:
        a bool tensor with ``input.shape[dim]`` elements.

    Raises:
        KeyPathError: one of them has no such tensor.
        ValueError: there is no such batch dim.

    >>> isin(TensorDict({"a": [1, 0, 2]}, [3]), TensorDict({"a": [2, 1]}, [2]), "a")
    tensor([ True, False,  True])
    """
    left, right = (_rows(td, key, dim) for td in (input, reference))
    if left.shape[1:] != right.shape[1:]:
        raise StructureError(
            f"isin: key {key!r} has rows of {left.shape[1]} elements in the input and "
            f"{right.shape[1]} in the reference"
        )
    _, inverse = torch.unique(torch.cat([right, left]), dim=0, return_inverse=True)
    return torch.isin(inverse[len(right) :], inverse[: len(right)])


def remove_duplicates(input: Any, key: NestedKey, dim: int = 0, *, return_indices: bool = False) -> Any:
    """Return the positions along a batch dim at which an entry has a value for the first time.

    Args:
        input: a collection.
        key: a tensor entry.
        dim: a batch dim.
        return_indices: also return, for each original position, which distinct value it has, in sorted order.

    Returns:
        the collection, its rows in the sorted order of the distinct values; with ``return_indices`` also a tensor.

    Raises:
        KeyPathError: there is no such tensor.
        ValueError: there is no such batch dim.

    >>> remove_duplicates(TensorDict({"a": [1, 0, 1], "b": [4, 5, 6]}, [3]), "a")["b"]
    tensor([5, 4])
    """
    rows = _rows(input, key, dim)
    distinct, inverse = torch.unique(rows, dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(rows), dtype=torch.long, device=rows.device)
    first.scatter_reduce_(0, inverse, torch.arange(len(rows), device=rows.device), "amin")
    result = input[(slice(None),) * (dim % input.batch_dims) + (first,)]
    return (result, inverse) if return_indices else result


def _rows(td: Any, key: NestedKey, dim: int) -> Tensor:
    """Return the tensor entry ``key`` as one flat row for each position along ``dim``."""
    if not -td.batch_dims <= dim < td.batch_dims:
        raise ValueError(f"dim {dim} is no batch dim of a collection of batch size {list(td.batch_size)}")
    entry = td.get(key, None)
    if not isinstance(entry, Tensor):
        raise missing_key_error(td, key) if entry is None else KeyPathError(f"key {key!r} is no tensor")
    rows = entry.movedim(dim % td.batch_dims, 0)
    return rows.reshape(len(rows), -1)
