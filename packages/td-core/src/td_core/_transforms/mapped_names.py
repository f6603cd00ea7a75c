"""Dim names under vmap, which removes a dim from each leaf and inserts one later without naming it.

Inside vmap, a leaf states which of its dims is mapped. After vmap, a result is a view with that dim in another position.
So the pytree context keeps shape and strides of the first leaf, to compare them with those of the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.private import functorch_level, get_mapped_dim, unmap
from .._tree.node import Core
from ..typing import Names


class Layout(NamedTuple):
    """Sizes and strides of a leaf, and its mapped dim ``at`` (None if none is mapped)."""

    dims: list[tuple[int, int]]
    at: int | None


class PlacedNames(tuple[Any, ...]):
    """Dim names in a pytree context, with the layout of the first leaf; equality compares the names only."""

    layout: Layout


def get_names_before(names: Names | None, children: Iterable[object]) -> Names | None:
    """Return the dim names of a node for its pytree context."""
    if names is None or functorch_level() is None or torch.compiler.is_compiling():
        return names
    leaf = _first_leaf(children)
    if leaf is None:
        return names
    placed = PlacedNames(names)
    placed.layout = Layout(_dims_of(unmap(leaf)), get_mapped_dim(leaf))
    return placed


def get_names_after(
    names: Names | None, batch_size: torch.Size, children: Iterable[object], has_first: bool = False
) -> Names | None:
    """Return the dim names of a node built from ``children``, which may have one dim more or fewer than the context.

    ``has_first``: a dim more or fewer is the first one.
    """
    if names is None:
        return None
    ndim = len(batch_size)
    if len(names) == ndim:
        return tuple(names)
    if has_first and abs(len(names) - ndim) == 1:
        return (None, *names) if len(names) < ndim else tuple(names[1:])
    leaf = None if torch.compiler.is_compiling() else _first_leaf(children)
    if leaf is None:
        # Nested nodes start with the dim names of their parents.
        below = next((child._names for child in children if isinstance(child, Core) and child._names), None)
        result = below and below[:ndim]
    elif len(names) == ndim + 1:
        dim = get_mapped_dim(leaf)
        result = None if dim is None else names[:dim] + names[dim + 1 :]
    else:
        result = _with_new_dim(names, leaf) if isinstance(names, PlacedNames) else None
    return tuple(result) if result and len(result) == ndim and any(result) else None


def _first_leaf(children: Iterable[object]) -> Tensor | None:
    return next(
        (
            child
            for child in children
            if isinstance(child, Tensor) and child.layout is torch.strided and not child.is_nested
        ),
        None,
    )


def _dims_of(leaf: Tensor) -> list[tuple[int, int]]:
    return list(zip(leaf.shape, leaf.stride()))


def _with_new_dim(names: PlacedNames, leaf: Tensor) -> Names | None:
    """Insert None at the position of the mapped dim of a leaf; dims whose name is ambiguous get None too."""
    before, position = names.layout
    after = _dims_of(leaf)
    rest = before if position is None else before[:position] + before[position + 1 :]
    possible = [
        (*names[:dim], None, *names[dim:])
        for dim in range(len(names) + 1)
        if after[:dim] + after[dim + 1 :] == rest and (position is None or after[dim] == before[position])
    ]
    return tuple([item[0] if len({*item}) == 1 else None for item in zip(*possible)])
