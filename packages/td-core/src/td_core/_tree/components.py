"""Nested tensors as leaves: torch cannot index, split or join them, so their components are rearranged here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._plans.elements import JoinPlan, Where
from .._plans.plans import ShapePlan
from .._torch.private import get_cached_seqlens, get_ragged_dim
from ..errors import StructureError
from .defaults import show_path

#: Arguments for the minimum and maximum length of a jagged tensor, which exist from torch 2.5 on.
_BOUNDS = ("min_seqlen", "max_seqlen")
TAKES_BOUNDS = _BOUNDS[1] in signature(torch.nested.nested_tensor_from_jagged).parameters


def apply_to_components(plan: ShapePlan, key: str, leaf: Tensor, error: Exception) -> Any:
    """Apply a plan to the components of a nested leaf; for other leaves, re-raise ``error`` with the key."""
    if plan.creates_values or not leaf.is_nested:
        if type(error) in (RuntimeError, NotImplementedError, ValueError):
            shape = "" if leaf.is_nested else f" of shape {list(leaf.shape)}"
            raise type(error)(f"{show_path((key,))}{shape}: {error}") from error
        raise error
    try:
        return map_components(leaf, plan.leaf)
    except StructureError as reason:
        raise StructureError(f"{show_path((key,))}: {reason}") from error


def map_components(leaf: Tensor, move: Callable[[Tensor], Any]) -> Tensor | tuple[Tensor, ...]:
    """Rearrange the components of a nested tensor as ``move`` rearranges the elements of a vector."""
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
    values = _get_compact_values(leaf) if dims == {1} and not leaf.is_meta else None
    choose = _by_component(leaf) if values is None else _by_offset(leaf, values)
    return [leaf if torch.equal(position, everything) else choose(position) for position in choices]


def move_to_meta(leaf: Any, dtype: torch.dtype | None) -> Tensor:
    """Move a leaf to the meta device; a jagged tensor takes its lengths along, which its offsets there lack."""
    moved: Tensor = leaf.to("meta", dtype)
    if leaf.is_nested and leaf.layout is torch.jagged and not leaf.is_meta:
        lengths = leaf.offsets().diff() if leaf.lengths() is None else leaf.lengths()
        _take_lengths(moved, lengths)
    return moved


def _take_lengths(moved: Any, lengths: Tensor) -> None:
    """Let a jagged tensor on the meta device take its lengths along."""
    moved.td_lengths = lengths.tolist()


def _list_components(leaf: Tensor) -> Sequence[Tensor]:
    """Return the components of a nested tensor; on the meta device, if its lengths were taken along."""
    if not leaf.is_meta or leaf.layout is not torch.jagged:
        parts: Sequence[Tensor] = leaf.unbind()
        return parts
    lengths, dim = getattr(leaf, "td_lengths", None), get_ragged_dim(leaf) - 1
    if lengths is None:
        raise StructureError(
            "a jagged tensor on the meta device has no lengths: index it before it is moved there"
        )
    sizes = leaf.values().shape
    return [leaf.values().new_empty((*sizes[:dim], length, *sizes[dim + 1 :])) for length in lengths]


def _by_component(leaf: Tensor) -> Callable[[Tensor], Tensor]:
    parts = _list_components(leaf)
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
        # Source row of each output row: the output position plus the shift of its component.
        steps = (ends[position] - lengths.cumsum(0)).repeat_interleave(lengths)
        rows = steps + torch.arange(len(steps), device=steps.device)
        return _make_jagged_like(leaf, values.index_select(dim, rows), lengths)

    return choose


def _get_compact_values(leaf: Any) -> Tensor | None:
    """Return the values of a jagged tensor whose components are contiguous; None for other nested tensors."""
    if leaf.layout is not torch.jagged or leaf.lengths() is not None:
        return None
    values, offsets = leaf.values(), leaf.offsets()
    return values if values.size(get_ragged_dim(leaf) - 1) == offsets[-1] - offsets[0] else None


class JaggedParts(NamedTuple):
    """The parts of a jagged tensor.

    Attributes:
        dim: the ragged dim.
        values: the elements of all components.
        offsets: the first row of each component, and the end of the last one.
        lengths: the number of rows of each component, if there are gaps between components.
        seqlens: (min, max) of the numbers of rows, as far as they are known.

    >>> parts = JaggedParts(1, torch.arange(3), torch.tensor([0, 1, 3]))
    >>> [part.tolist() for part in parts.join().unbind()]
    [[0], [1, 2]]
    """

    dim: int
    values: Tensor
    offsets: Tensor
    lengths: Tensor | None = None
    seqlens: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(cls, leaf: Any) -> JaggedParts:
        """Split a jagged tensor.

        >>> JaggedParts.of(JaggedParts(1, torch.arange(3), torch.tensor([0, 1, 3])).join()).offsets
        tensor([0, 1, 3])
        """
        seqlens = get_cached_seqlens(leaf)
        return cls(get_ragged_dim(leaf), leaf.values(), leaf.offsets(), leaf.lengths(), seqlens)

    @classmethod
    def of_tensors(cls, dim: int, tensors: Sequence[Tensor]) -> JaggedParts:
        """Return the parts with these values, offsets and maybe lengths."""
        values, offsets, *rest = tensors
        return cls(dim, values, offsets, rest[0] if rest else None)

    def join(self) -> Tensor:
        """Build the jagged tensor."""
        # Without the maximum length, torch pads each component to the length of all values.
        bounds = dict(zip(_BOUNDS, self.seqlens)) if TAKES_BOUNDS else {}
        return torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets, self.lengths, jagged_dim=self.dim, **bounds
        )

    def check(self) -> JaggedParts:
        """Return untrusted parts with their ``seqlens``; without elements, on the meta device, return them unchanged.

        Raises:
            ValueError: the parts do not belong together, which torch does not check: it would read other memory.

        >>> JaggedParts(1, torch.arange(3), torch.tensor([0, 1, 3])).check().seqlens
        (1, 2)
        >>> JaggedParts(1, torch.arange(3), torch.tensor([0, 1, 9])).check()
        Traceback (most recent call last):
        ValueError: the rows of a jagged tensor lie outside of its 3 values: [0, 1, 9]
        """
        dim, values, offsets, lengths, _ = self
        if values.is_meta:
            return self
        tables = [offsets] if lengths is None else [offsets, lengths]
        if any(table.dim() != 1 or table.dtype not in (torch.int32, torch.int64) for table in tables):
            raise ValueError("the offsets or lengths of a jagged tensor are not a vector of integers")
        if not 1 <= dim <= values.dim():
            raise ValueError(f"the ragged dim of a jagged tensor is {dim}, of {values.dim() + 1} dims")
        result, starts, most = (
            offsets.diff() if lengths is None else lengths,
            offsets[:-1],
            values.size(dim - 1),
        )
        # The sum starts + result could overflow.
        if len(offsets) != len(result) + 1 or not bool(
            ((starts >= 0) & (result >= 0) & (starts <= most - result)).all()
        ):
            raise ValueError(
                f"the rows of a jagged tensor lie outside of its {most} values: {offsets.tolist()!r:.60}"
            )
        return self._replace(seqlens=_compute_bounds(result))


def get_parts(leaf: Any) -> list[Tensor]:
    """Return the tensors of a leaf: values, offsets and lengths of a jagged one; any other leaf itself."""
    if leaf.layout is not torch.jagged:
        return [leaf]
    return [part for part in (leaf.values(), leaf.offsets(), leaf.lengths()) if part is not None]


def _make_jagged_like(like: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Build a jagged tensor from values and component lengths, with the ragged dim of ``like``."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(values.device)
    result = JaggedParts(get_ragged_dim(like), values, offsets, None, _compute_bounds(lengths)).join()
    if values.is_meta:
        _take_lengths(result, lengths)
    return result


def _compute_bounds(lengths: Tensor) -> tuple[int | None, int | None]:
    """Return the minimum and maximum of component lengths; (None, None) without components."""
    known = lengths.tolist()
    return (min(known), max(known)) if known else (None, None)


def join_components(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Build a nested tensor from components, with the layout and ragged dim of ``like``."""
    if like.layout is not torch.jagged:
        if not parts:
            raise StructureError("a nested tensor of strided layout has at least one component")
        return torch.nested.as_nested_tensor(list(parts), layout=like.layout)
    dim = get_ragged_dim(like) - 1
    values = torch.cat(list(parts), dim) if parts else like.values().narrow(dim, 0, 0)
    lengths = torch.tensor(
        [part.size(dim) for part in parts], dtype=torch.int64, device="cpu" if like.is_meta else like.device
    )
    return _make_jagged_like(like, values, lengths)


def has_same_components(first: Tensor, second: Tensor) -> bool:
    """Return True if two nested tensors have components of equal shapes."""
    if not (first.is_nested and second.is_nested) or first.layout is not second.layout:
        return False
    return [part.shape for part in first.unbind()] == [part.shape for part in second.unbind()]


def cat_components(plan: JoinPlan, leaves: Sequence[Any]) -> Tensor | None:
    """Concatenate nested tensors along dim 0, or select between two; return None for other plans or leaves."""
    if not all(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        return None
    if isinstance(plan, Where):
        rows = zip(*[leaf.unbind() for leaf in leaves], strict=True)
        parts = plan.split(0, leaves[0].size(0))
        return join_components(leaves[0], [part.leaf(row) for part, row in zip(parts, rows, strict=True)])
    if plan.stacks or plan.dim != 0:
        return None
    dims = {get_ragged_dim(leaf) for leaf in leaves}
    found = [_get_compact_values(leaf) for leaf in leaves] if len(dims) == 1 else []
    values = [value for value in found if value is not None]
    if len(values) < len(leaves):
        return join_components(leaves[0], [part for leaf in leaves for part in leaf.unbind()])
    lengths = torch.cat([leaf.offsets().diff() for leaf in leaves])
    return _make_jagged_like(leaves[0], torch.cat(values, dims.pop() - 1), lengths)
