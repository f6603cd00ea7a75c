"""Nested tensors as leaves: torch cannot index, cut or join them, but their components can be put in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ._collection import show_path
from ._torch_private import get_ragged_dim
from .errors import StructureError

#: Whether torch takes the least and the greatest length of a jagged tensor: from 2.5 on.
_BOUNDS = ("min_seqlen", "max_seqlen")
_TAKES_BOUNDS = _BOUNDS[1] in signature(torch.nested.nested_tensor_from_jagged).parameters


def apply_to_components(plan: Any, key: str, leaf: Tensor, error: Exception) -> Any:
    """Return what a plan gives for a leaf that torch refuses; unless it is nested, raise the error, with the key in it."""
    if plan.creates_values or not leaf.is_nested:
        if type(error) in (RuntimeError, NotImplementedError, ValueError):
            shape = "" if leaf.is_nested else f" of shape {list(leaf.shape)}"
            raise type(error)(f"{show_path((key,))}{shape}: {error}") from error
        raise error
    try:
        return map_components(leaf, plan.leaf)
    except StructureError as reason:
        raise StructureError(f"{show_path((key,))}: {reason}") from error


def map_components(leaf: Tensor, move: Callable[[Tensor], Any]) -> Any:
    """Return a nested tensor with its components moved, copied or left out as ``move`` does it with elements.

    >>> ragged = torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)], layout=torch.jagged)
    >>> [part.tolist() for part in map_components(ragged, lambda rows: rows.flip(0)).unbind()]
    [[0.0, 0.0], [1.0]]
    """
    moved = move(torch.arange(leaf.size(0), device="cpu"))
    if isinstance(moved, (tuple, list)):
        return tuple(_select_components(leaf, moved))
    return _select_components(leaf, [moved])[0]


def _select_components(leaf: Tensor, choices: Sequence[Tensor]) -> list[Tensor]:
    count = leaf.size(0)
    dims = {positions.ndim for positions in choices}
    if dims and max(dims) > 1:
        raise StructureError(
            f"a nested tensor has one batch dim, of its {count} components; the result would have "
            f"{choices[0].ndim}, {list(choices[0].shape)}"
        )
    everything = torch.arange(count, device="cpu")
    values = _get_compact_values(leaf) if dims == {1} else None
    choose = _by_component(leaf) if values is None else _by_offset(leaf, values)
    return [leaf if torch.equal(position, everything) else choose(position) for position in choices]


def _by_component(leaf: Tensor) -> Callable[[Tensor], Tensor]:
    parts = leaf.unbind()
    return lambda position: (
        join_components(leaf, [parts[i] for i in position.tolist()])
        if position.ndim
        else parts[int(position)]
    )


def _by_offset(leaf: Any, values: Tensor) -> Callable[[Tensor], Tensor]:
    offsets, dim = leaf.offsets(), get_ragged_dim(leaf) - 1
    ends, sizes = offsets[1:], offsets.diff()

    def choose(position: Tensor) -> Tensor:
        position = position.to(offsets.device)
        lengths = sizes[position]
        # What each position along the ragged dim moves by, and so where its content comes from.
        steps = (ends[position] - lengths.cumsum(0)).repeat_interleave(lengths)
        rows = steps + torch.arange(len(steps), device=steps.device)
        return _make_jagged_like(leaf, values.index_select(dim, rows), lengths)

    return choose


def _get_compact_values(leaf: Any) -> Tensor | None:
    """Return the values of a jagged tensor whose components stand one after the other; None for other nested ones."""
    if leaf.layout is not torch.jagged or leaf.lengths() is not None:
        return None
    values, offsets = leaf.values(), leaf.offsets()
    return values if values.size(get_ragged_dim(leaf) - 1) == offsets[-1] - offsets[0] else None


def get_parts(leaf: Any) -> list[Tensor]:
    """Return the tensors that a leaf consists of: the values, offsets and lengths of a jagged one, any other itself.

    >>> ragged = torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)], layout=torch.jagged)
    >>> [part.tolist() for part in get_parts(ragged)]
    [[1.0, 0.0, 0.0], [0, 1, 3]]
    """
    if leaf.layout is not torch.jagged:
        return [leaf]
    return [part for part in (leaf.values(), leaf.offsets(), leaf.lengths()) if part is not None]


def _make_jagged_like(like: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Return the jagged tensor whose components have these lengths; its ragged dim is that of ``like``."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return make_jagged(get_ragged_dim(like), values, offsets, told=compute_min_max(lengths))


def compute_min_max(lengths: Tensor) -> tuple[int | None, int | None]:
    """Return the least and the greatest of the lengths of components; None where there are none."""
    known = lengths.tolist()
    return (min(known), max(known)) if known else (None, None)


def compute_lengths(
    dim: int, values: Tensor, offsets: Tensor, lengths: Tensor | None = None
) -> Tensor | None:
    """Return the lengths of the components that these parts make; None where one lies outside of the values.

    torch itself does not look, so whoever takes parts from outside must.

    >>> compute_lengths(1, torch.ones(3), torch.tensor([0, 1, 3])), compute_lengths(1, torch.ones(3), torch.tensor([0, 4]))
    (tensor([1, 2]), None)
    """
    result = offsets.diff() if lengths is None else lengths
    if len(offsets) != len(result) + 1:
        return None
    starts = offsets[:-1]
    # Not the sum of both, which could overflow.
    inside = (starts >= 0) & (result >= 0) & (starts <= values.size(dim - 1) - result)
    return result if bool(inside.all()) else None


def make_jagged(
    dim: int,
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None = None,
    *,
    told: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Return the jagged tensor of these parts, ragged along ``dim``; see torch.nested.nested_tensor_from_jagged.

    It is told the least and the greatest length of its components, since torch pads one that was not told to the length of all
    values.

    >>> make_jagged(1, torch.ones(3), torch.tensor([0, 1, 3]), told=(1, 2)).to_padded_tensor(0)
    tensor([[1., 0.],
            [1., 1.]])
    """
    bounds = dict(zip(_BOUNDS, told)) if _TAKES_BOUNDS else {}
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim, **bounds)


def join_components(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return components as one nested tensor, whose layout and ragged dim are those of ``like``."""
    if like.layout is not torch.jagged:
        if not parts:
            raise StructureError("a nested tensor of strided layout has at least one component")
        return torch.nested.as_nested_tensor(list(parts), layout=like.layout)
    dim = get_ragged_dim(like) - 1
    values = torch.cat(list(parts), dim) if parts else like.values().narrow(dim, 0, 0)
    lengths = torch.tensor([part.size(dim) for part in parts], dtype=torch.int64, device=like.device)
    return _make_jagged_like(like, values, lengths)


def has_same_components(first: Tensor, second: Tensor) -> bool:
    """Tell whether two nested tensors have components of the same shapes.

    >>> ragged = [torch.nested.nested_tensor([torch.ones(n) for n in (1, 2)], layout=torch.jagged) for _ in range(2)]
    >>> ragged[0].shape == ragged[1].shape, has_same_components(*ragged)
    (False, True)
    """
    if not (first.is_nested and second.is_nested) or first.layout is not second.layout:
        return False
    return [part.shape for part in first.unbind()] == [part.shape for part in second.unbind()]


def cat_components(plan: Any, leaves: Sequence[Any]) -> Tensor | None:
    """Return nested tensors one after the other, as a plan of ``cat`` asks for; None where it asks for something else."""
    if (
        plan.stacks
        or plan.dim != 0
        or not all(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves)
    ):
        return None
    dims = {get_ragged_dim(leaf) for leaf in leaves}
    values = [_get_compact_values(leaf) for leaf in leaves] if len(dims) == 1 else [None]
    if any(value is None for value in values):
        return join_components(leaves[0], [part for leaf in leaves for part in leaf.unbind()])
    lengths = torch.cat([leaf.offsets().diff() for leaf in leaves])
    return _make_jagged_like(leaves[0], torch.cat(values, dims.pop() - 1), lengths)  # type: ignore[arg-type]
