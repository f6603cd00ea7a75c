"""Compare rows of collections: group equal rows, remove duplicates, test membership."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tree.defaults import check_collection, get_entry, missing_key_error
from .._tree.dim_names import find_dims
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core
from .._tree.views import is_leaf_or_value
from .._tree.walks import has_entries
from ..errors import KeyPathError, StructureError
from ..typing import NestedKey
from .reductions import parse_dim


def group_by(tensordict: Core, key: NestedKey) -> tuple[Tensor | list[object], tuple[Any, ...]]:
    """Group rows along the first batch dim by an entry; return the distinct values and the rows of each.

    Args:
        tensordict: a collection with a batch dim.
        key: a tensor entry (distinct rows are sorted) or non-tensor data (values keep their order of appearance).

    Raises:
        KeyPathError: the collection has no such entry.
        ValueError: the collection has no batch dims.
        TypeError: the entry is a node, or ``==`` of its values does not return a bool (arrays).

    >>> values, groups = group_by(TensorDict({"a": [1, 0, 1]}, batch_size=[3]), "a")
    >>> values, [len(group) for group in groups]
    (tensor([0, 1]), [1, 2])
    """
    check_collection("group_by", tensordict)
    entry: Any = get_entry(tensordict, unravel_key_to_tuple(key))
    if not tensordict.batch_size:
        raise ValueError("group_by groups the rows along the first batch dim, and the collection has none")
    values: Tensor | list[object]
    if isinstance(entry, Tensor):
        values, inverse = torch.unique(entry, dim=0, return_inverse=True)
        count = len(values)
    elif not has_entries(entry):
        rows = entry.maybe_to_stack().tolist()
        values = []
        known: dict[object, int] = {}
        positions = [_find_or_add(row, values, known, key) for row in rows]
        inverse, count = torch.tensor(positions, dtype=torch.long, device="cpu"), len(values)
    else:
        raise TypeError(f"group_by needs a tensor or non-tensor data; {key!r} is a {type(entry).__name__}")
    order = inverse.argsort(stable=True)
    sizes = torch.bincount(inverse, minlength=count).tolist()
    return values, tuple(tensordict[order].split(sizes)) if sizes else ()


def _find_or_add(row: object, values: list[object], known: dict[object, int], key: NestedKey) -> int:
    """Return the position of a value in ``values``, and append it if it is new; ``known`` caches hashable values."""
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


def isin(input: object, reference: object, key: NestedKey, dim: int | str = 0) -> Tensor:
    """Check for each position along a batch dim whether its entry in ``input`` also occurs in ``reference``.

    Args:
        input: a collection.
        reference: a collection with the same entry, whose shape may differ only along ``dim``.
        key: a tensor entry.
        dim: a batch dim.

    Returns:
        A bool tensor of shape ``(input.shape[dim],)``.

    Raises:
        KeyPathError: one of the collections has no such tensor.
        ValueError: ``dim`` is not a batch dim.

    >>> isin(TensorDict({"a": [1, 0, 2]}, [3]), TensorDict({"a": [2, 1]}, [2]), "a")
    tensor([ True, False,  True])
    """
    for data in (input, reference):
        check_collection("isin", data)
    left, right = (_rows(td, key, dim) for td in (input, reference))
    if left.shape[1:] != right.shape[1:]:
        raise StructureError(
            f"isin: key {key!r} has rows of {left.shape[1]} elements in the input and "
            f"{right.shape[1]} in the reference"
        )
    _, inverse = torch.unique(torch.cat([right, left]), dim=0, return_inverse=True)
    return torch.isin(inverse[len(right) :], inverse[: len(right)])


def remove_duplicates(
    input: Core, key: NestedKey, dim: int | str = 0, *, return_indices: bool = False
) -> Any:
    """Keep the first row of each distinct value of an entry along a batch dim.

    Args:
        input: a collection.
        key: a tensor entry.
        dim: a batch dim.
        return_indices: also return, per original position, the index of its value in the result.

    Returns:
        The collection, sorted by the distinct values; with ``return_indices`` also an int64 tensor.

    Raises:
        KeyPathError: the collection has no such tensor.
        ValueError: ``dim`` is not a batch dim.

    >>> remove_duplicates(TensorDict({"a": [1, 0, 1], "b": [4, 5, 6]}, [3]), "a")["b"]
    tensor([5, 4])
    """
    check_collection("remove_duplicates", input)
    place = find_dims(input, "remove_duplicates", dim)
    rows = _rows(input, key, place)
    distinct, inverse = torch.unique(rows, dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(rows), dtype=torch.long, device=rows.device)
    first.scatter_reduce_(0, inverse, torch.arange(len(rows), device=rows.device), "amin")
    result = input[(slice(None),) * (place % input.batch_dims) + (first,)]
    return (result, inverse) if return_indices else result


def find_unique(
    node: Core, is_sorted: bool, return_inverse: bool, return_counts: bool, dim: int | str | None
) -> Any:
    """Return each row along a batch dim once, see ``unique``."""
    if dim is None:
        node, dim = node.reshape(-1), 0
    place = parse_dim(node, "unique", dim)
    codes = [_number_rows(key, entry, place) for key, entry in node.items(True, True, is_leaf_or_value)]
    if not codes:
        raise ValueError(f"unique() compares entries; this {type(node).__name__} has none")
    rows = torch.stack([code.to(codes[0].device) for code in codes], 1)
    _, inverse, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    positions = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(counts, len(rows)).scatter_reduce_(0, inverse, positions, "amin")
    if not is_sorted:
        order = first.argsort()
        first, counts, inverse = first[order], counts[order], order.argsort()[inverse]
    results = (
        node[(slice(None),) * place + (first,)],
        *[inverse] * return_inverse,
        *[counts] * return_counts,
    )
    return results if len(results) > 1 else results[0]


def _number_rows(key: NestedKey, entry: Any, dim: int) -> Tensor:
    """Return a number for each row of an entry along a dim; equal rows have equal numbers, in the order of tensors."""
    rows = entry.movedim(dim, 0)
    if isinstance(entry, Tensor):
        numbers: Tensor = torch.unique(rows.reshape(len(rows), -1), dim=0, return_inverse=True)[1]
        return numbers
    values: list[object] = []
    known: dict[object, int] = {}
    return torch.tensor([_find_or_add(row, values, known, key) for row in rows.maybe_to_stack().tolist()])


def _rows(td: Any, key: NestedKey, dim: int | str) -> Tensor:
    """Flatten the tensor entry ``key`` to one row per position along ``dim``."""
    dim = find_dims(td, "isin", dim)
    if not -td.batch_dims <= dim < td.batch_dims:
        raise ValueError(f"dim {dim} is not a batch dim of a collection of batch size {list(td.batch_size)}")
    entry = td.get(key, None)
    if not isinstance(entry, Tensor):
        raise missing_key_error(td, key) if entry is None else KeyPathError(f"key {key!r} is not a tensor")
    rows = entry.movedim(dim % td.batch_dims, 0)
    return rows.reshape(len(rows), -1)
