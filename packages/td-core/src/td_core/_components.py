"""Nested tensors as leaves: torch cannot index, cut or join them, but their components can be put in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._collection import show_path
from ._torch_private import ragged_dim
from .errors import StructureError


def of_components(plan: Any, key: str, leaf: Tensor, error: Exception) -> Any:
    """Return what a plan gives for a leaf that torch refuses; unless it is nested, raise the error, with the key in it."""
    if plan.invents or not leaf.is_nested:
        if type(error) in (RuntimeError, NotImplementedError, ValueError):
            shape = "" if leaf.is_nested else f" of shape {list(leaf.shape)}"
            raise type(error)(f"{show_path((key,))}{shape}: {error}") from error
        raise error
    try:
        return rearranged(leaf, plan.leaf)
    except StructureError as reason:
        raise StructureError(f"{show_path((key,))}: {reason}") from error


def rearranged(leaf: Tensor, move: Callable[[Tensor], Any]) -> Any:
    """Return a nested tensor with its components moved, copied or left out as ``move`` does it with elements.

    >>> ragged = torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)], layout=torch.jagged)
    >>> [part.tolist() for part in rearranged(ragged, lambda rows: rows.flip(0)).unbind()]
    [[0.0, 0.0], [1.0]]
    """
    count = leaf.size(0)
    moved = move(torch.arange(count, device="cpu"))
    if isinstance(moved, (tuple, list)):
        return tuple([_chosen(leaf, positions) for positions in moved])
    return _chosen(leaf, moved)


def _chosen(leaf: Tensor, positions: Tensor) -> Tensor:
    if positions.ndim > 1:
        raise StructureError(
            f"a nested tensor has one batch dim, of its {leaf.size(0)} components; the result would have "
            f"{positions.ndim}, {list(positions.shape)}"
        )
    parts = leaf.unbind()
    if positions.ndim == 0:
        return parts[int(positions)]
    wanted = positions.tolist()
    if wanted == list(range(len(parts))):
        return leaf
    return together(leaf, [parts[i] for i in wanted])


def together(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return components as one nested tensor, whose layout and ragged dim are those of ``like``."""
    if like.layout is not torch.jagged:
        if not parts:
            raise StructureError("a nested tensor of strided layout has at least one component")
        return torch.nested.as_nested_tensor(list(parts), layout=like.layout)
    ragged = ragged_dim(like)  # torch builds along the first dim of the components
    if not parts:
        values = like.values().transpose(0, ragged - 1)[:0]
        offsets = torch.zeros(1, dtype=torch.int64, device=like.device)
        result = torch.nested.nested_tensor_from_jagged(values, offsets)
    else:
        rows = [part.transpose(0, ragged - 1) for part in parts]
        result = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return result if ragged == 1 else result.transpose(1, ragged)


def same_components(first: Tensor, second: Tensor) -> bool:
    """Tell whether two nested tensors have components of the same shapes.

    >>> ragged = [torch.nested.nested_tensor([torch.ones(n) for n in (1, 2)], layout=torch.jagged) for _ in range(2)]
    >>> ragged[0].shape == ragged[1].shape, same_components(*ragged)
    (False, True)
    """
    if not (first.is_nested and second.is_nested) or first.layout is not second.layout:
        return False
    return [part.shape for part in first.unbind()] == [part.shape for part in second.unbind()]


def chained_components(plan: Any, leaves: Sequence[Any]) -> Tensor | None:
    """Return nested tensors one after the other, as a plan of ``cat`` asks for; None where it asks for something else."""
    if (
        plan.stacks
        or plan.dim != 0
        or not all(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves)
    ):
        return None
    return together(leaves[0], [part for leaf in leaves for part in leaf.unbind()])
