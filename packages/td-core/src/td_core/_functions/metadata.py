"""Metadata of a collection: shape, device, dim names, and summaries of its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._tree.buffers import is_stored
from .._tree.components import get_parts
from .._tree.node import Child, Core, make_dense
from .._tree.walks import has_entries


def fill_ellipsis(names: tuple[object, ...], left: Sequence[str | None]) -> tuple[Any, ...]:
    """Replace ``...`` in new names by the current names of those dims."""
    if ... not in names:
        return names
    position = names.index(...)
    count = len(left) - len(names) + 1
    return (*names[:position], *left[position : position + max(count, 0)], *names[position + 1 :])


def drop_duplicates(leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves without duplicates: leaves with the same memory, dtype, shape and strides."""
    return list({_get_view_id(leaf): leaf for leaf in leaves}.values())


def _get_view_id(leaf: Tensor) -> object:
    """Return an id that is equal for leaves only if they have the same memory, dtype, shape and strides."""
    if leaf.layout is torch.jagged:
        return tuple(map(_get_view_id, get_parts(leaf)))
    if leaf.layout is not torch.strided or leaf.is_nested or is_stored(leaf):
        return id(leaf)  # such a tensor has no single data_ptr() to compare
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.device


def list_addresses(entry: Child, storage: bool) -> Core | Tensor:
    if isinstance(entry, Tensor):
        return torch.tensor(entry.untyped_storage().data_ptr() if storage else entry.data_ptr())
    if not has_entries(entry):
        return entry
    stacked = entry._members_and_dim()
    children = entry._children() if stacked is None else {str(i): item for i, item in enumerate(stacked[0])}
    addresses = {key: list_addresses(child, storage) for key, child in dict(children).items()}
    return make_dense(addresses, torch.Size(), torch.device("cpu"))
