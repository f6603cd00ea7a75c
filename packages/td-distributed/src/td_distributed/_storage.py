"""One storage for many leaves: where each leaf lies in it, and the leaves as views on it.

Leaves stand in the order in which they are given, each C-contiguous, each padded with zeros to a multiple of 8 bytes
(16 before a leaf of 16-byte elements). Leaves that are one tensor (tied weights) share one place. A jagged nested
tensor is stored as its values, its offsets and, where it has them, its lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from td_core._nodes import Encoded
from td_core.errors import FormatError, StructureError

from . import _paths

ALIGNMENT = 8
#: Up to this size, clearing a storage is faster than clearing the gaps between its leaves one by one.
SMALL = 1 << 20


class Span(NamedTuple):
    """Where one piece of a leaf lies.

    Attributes:
        dtype: of the elements.
        shape: of the piece.
        start: first byte.
        stop: one past the last byte, padding included.
        pad: how many of these bytes are padding.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    start: int
    stop: int
    pad: int


class Leaf(NamedTuple):
    """How a leaf is put together from its spans.

    Attributes:
        spans: one, or (values, offsets[, lengths]) of a jagged tensor.
        ragged_idx: the ragged dim of a jagged tensor; None for an ordinary one.
    """

    spans: tuple[Span, ...]
    ragged_idx: int | None = None

    def made_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the leaf of its pieces."""
        if self.ragged_idx is None:
            return pieces[0]
        lengths = pieces[2] if len(pieces) == 3 else None
        return torch.nested.nested_tensor_from_jagged(
            pieces[0], pieces[1], lengths, jagged_dim=self.ragged_idx
        )


class Layout(NamedTuple):
    """Where all leaves lie.

    Attributes:
        leaves: in order.
        nbytes: size of the storage.
    """

    leaves: list[Leaf]
    nbytes: int


Pieces = tuple[Tensor, ...]


class Views:
    """Typed views on one storage of bytes.

    Args:
        storage: a vector of bytes.

    Attributes:
        copied: some pieces are copies, because their bytes are not aligned to their dtype.
    """

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage
        self.copied = False
        self._aligned = storage.storage_offset() % 16 == 0 and (
            storage.is_meta or storage.data_ptr() % 16 == 0
        )
        self._typed: dict[torch.dtype, tuple[Tensor, int]] = {}

    def of(self, span: Span) -> Tensor:
        """Return a piece as a view on the storage, or as a copy."""
        dtype, shape, start, stop, pad = span
        itemsize = dtype.itemsize
        if not self._aligned or start % itemsize:
            self.copied = True
            return self.storage[start : stop - pad].clone().view(dtype).view(shape)
        typed = self._typed.get(dtype)
        if typed is None:
            whole = len(self.storage) - len(self.storage) % itemsize
            base = self.storage[:whole].view(dtype)
            typed = self._typed[dtype] = (base, int(base.storage_offset()))
        return typed[0].as_strided(shape, strides(shape), typed[1] + start // itemsize)

    def pieces(self, layout: Layout) -> list[Pieces]:
        """Return the pieces of each leaf; those of tied leaves are the same tuple."""
        known: dict[int, tuple[tuple[Span, ...], Pieces]] = {}
        result = []
        for spans, _ in layout.leaves:
            start = spans[0].start
            found = known.get(start)
            if found is None or found[0] != spans:
                found = known[start] = spans, tuple(map(self.of, spans))
            result.append(found[1])
        return result

    def leaves(self, layout: Layout) -> list[Tensor]:
        """Return all leaves as views on the storage; tied leaves are one tensor."""
        return together(layout, self.pieces(layout))


def together(layout: Layout, pieces: list[Pieces]) -> list[Tensor]:
    """Return the leaves that pieces make; tied leaves are one tensor."""
    jagged: dict[int, Tensor] = {}
    result = []
    for leaf, parts in zip(layout.leaves, pieces, strict=True):
        if leaf.ragged_idx is None:
            result.append(parts[0])
        else:
            made = jagged.get(id(parts))
            if made is None:
                made = jagged[id(parts)] = leaf.made_of(parts)
            result.append(made)
    return result


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous tensor.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    if len(shape) == 1:
        return (1,)
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def pieces_of(leaf: Tensor) -> tuple[Pieces, int | None]:
    """Return the dense tensors that make a leaf, and the ragged dim of a jagged one.

    Raises:
        StructureError: no dense pieces (sparse, strided nested, meta, DTensor).
    """
    if leaf.is_nested:
        if leaf.layout is not torch.jagged:
            raise StructureError(
                "a nested tensor of strided layout cannot be consolidated; convert it to torch.jagged"
            )
        jagged: Any = leaf
        parts = [jagged.values(), jagged.offsets()]
        if jagged.lengths() is not None:
            parts.append(jagged.lengths())
        return tuple(parts), jagged._ragged_idx
    if leaf.layout is not torch.strided:
        raise StructureError(
            f"a tensor of layout {leaf.layout} cannot be consolidated; call to_dense() on it first"
        )
    if leaf.is_meta:
        raise StructureError("a tensor on the meta device has no data to consolidate")
    if leaf.__class__ is not Tensor and hasattr(leaf, "__tensor_flatten__"):
        raise StructureError(
            f"a {type(leaf).__name__} has no bytes of its own; take what it is made of first, of a DTensor its "
            "to_local() or full_tensor()"
        )
    return (leaf,), None


def plan(encoded: Encoded) -> Layout:
    """Return where each leaf of a tree goes: depth first, a level's leaves where the level is.

    Raises:
        StructureError: a leaf has no dense form; names its key.

    >>> from td_core import TensorDict, encode
    >>> layout = plan(encode(TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.uint8)})))
    >>> [(leaf.spans[0].start, leaf.spans[0].pad) for leaf in layout.leaves], layout.nbytes
    ([(0, 4), (16, 6)], 24)
    """
    name = partial(_paths.of_leaf, encoded)
    if len(encoded.nodes) == 1:
        return plan_leaves(encoded.leaves, name)
    order = [leaf for _, leaf in _paths.walk(encoded.nodes) if isinstance(leaf, int)]
    leaves, nbytes = plan_leaves([encoded.leaves[i] for i in order], lambda i: name(order[i]))
    placed = dict(zip(order, leaves, strict=True))
    return Layout([placed[i] for i in range(len(order))], nbytes)


def plan_leaves(leaves: Sequence[Tensor], name: Callable[[int], str] = "leaf {}".format) -> Layout:
    """Return where each of some leaves goes, in the order in which they are given.

    Raises:
        StructureError: a leaf has no dense form.
    """
    at = 0
    placed: list[Leaf] = []
    known: dict[int, tuple[Tensor, Span]] = {}
    for i, leaf in enumerate(leaves):
        try:
            pieces, ragged = pieces_of(leaf)
        except StructureError as error:
            raise StructureError(f"{name(i)}: {error}") from error
        spans = []
        for piece in pieces:
            dtype, shape = piece.dtype, piece.shape
            itemsize = dtype.itemsize
            size = piece.numel() * itemsize
            address = piece.data_ptr() if size else 0
            tied = known.get(address)
            if tied is not None and size and _same(tied[0], piece):
                spans.append(tied[1])
                continue
            at += -at % itemsize
            stop = at + size
            pad = -stop % ALIGNMENT
            span = Span(dtype, shape, at, stop + pad, pad)
            at = stop + pad
            known[address] = piece, span
            spans.append(span)
        placed.append(Leaf(tuple(spans), ragged))
    return Layout(placed, at)


def _same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg(), one.device) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.is_conj(),
        other.is_neg(),
        other.device,
    )


def fill(
    storage: Tensor,
    layout: Layout,
    pieces: list[Pieces],
    leaves: Sequence[Tensor],
    num_threads: int = 0,
    non_blocking: bool = False,
) -> None:
    """Copy leaves into the pieces of a storage; what lies between them becomes zeros."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    gaps: list[tuple[int, int]] = []
    end = 0
    rows = sorted(zip(layout.leaves, pieces, leaves, strict=True), key=_first_byte)
    for (spans, ragged), parts, leaf in rows:
        if spans[-1].stop <= end:
            continue  # tied to an earlier one, or empty
        for span, part, piece in zip(
            spans, parts, (leaf,) if ragged is None else pieces_of(leaf)[0], strict=True
        ):
            if span.start < end:
                continue
            if end < span.start:
                gaps.append((end, span.start))
            end = span.stop - span.pad
            targets.append(part)
            sources.append(piece)
    if end < len(storage):
        gaps.append((end, len(storage)))
    if len(gaps) > 2 and len(storage) <= SMALL:
        storage.zero_()
    else:
        for start, stop in gaps:
            storage[start:stop].zero_()
    with torch.no_grad():
        if num_threads > 1:
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(partial(_copy, non_blocking), targets, sources))
        elif targets:
            torch._foreach_copy_(targets, sources, non_blocking)


def _first_byte(row: tuple[Leaf, Pieces, Tensor]) -> tuple[int, int]:
    # An empty leaf may stand where the next one starts.
    return row[0].spans[0].start, row[0].spans[0].stop


def _copy(non_blocking: bool, target: Tensor, source: Tensor) -> None:
    with torch.no_grad():  # a switch of each thread
        target.copy_(source, non_blocking=non_blocking)


def check(layout: Layout, nbytes: int) -> None:
    """Raise FormatError unless every span lies in the storage, has the size of its shape, and overlaps no other.

    Raises:
        FormatError: naming the leaf by position, what was found and what was expected.
    """
    spans: list[tuple[int, int]] = []
    for i, leaf in enumerate(layout.leaves):
        for span in leaf.spans:
            if any(dim < 0 for dim in span.shape):
                raise FormatError(f"leaf {i} has the impossible shape {list(span.shape)}")
            size = span.dtype.itemsize
            for dim in span.shape:
                size *= dim
            if span.pad < 0 or span.stop - span.start - span.pad != size:
                raise FormatError(
                    f"leaf {i} of shape {list(span.shape)} and dtype {span.dtype} needs {size} bytes; bytes "
                    f"{span.start} to {span.stop} with {span.pad} of padding were given"
                )
            if span.start < 0 or span.stop > nbytes:
                raise FormatError(
                    f"leaf {i} lies at bytes {span.start} to {span.stop} of a storage of {nbytes}"
                )
            if size:
                spans.append((span.start, span.stop - span.pad))
    end, owner = 0, (0, 0)
    for start, stop in sorted(set(spans)):
        # The same bytes twice are tied leaves; bytes shared in part are damage.
        if start < end:
            raise FormatError(f"leaves overlap: bytes {owner[0]} to {owner[1]} and {start} to {stop}")
        end, owner = stop, (start, stop)


def check_rows(leaf: Tensor) -> Tensor:
    """Return a leaf that was read; torch itself does not look where the rows of a jagged tensor lie.

    Raises:
        FormatError: they lie outside of its values.

    >>> check_rows(torch.ones(2))
    tensor([1., 1.])
    """
    if not leaf.is_nested:
        return leaf
    (values, offsets, *rest), ragged = pieces_of(leaf)
    if any(piece.dim() != 1 or piece.dtype not in (torch.int64, torch.int32) for piece in (offsets, *rest)):
        raise FormatError("the offsets or lengths of a jagged tensor are no vector of integers")
    if ragged is None or not 1 <= ragged <= values.dim():
        raise FormatError(f"the ragged dim of a jagged tensor is {ragged}, of {values.dim() + 1} dims")
    starts, size = offsets[:-1], values.shape[ragged - 1]
    lengths = rest[0] if rest else offsets.diff()
    if (
        len(offsets) < 1
        or len(lengths) != len(starts)
        or bool((starts < 0).any())
        or bool((lengths < 0).any())
        or bool((starts > size - lengths).any())
    ):
        raise FormatError(
            f"the rows of a jagged tensor lie outside of its {size} values: {offsets.tolist()!r:.60}"
        )
    return leaf
