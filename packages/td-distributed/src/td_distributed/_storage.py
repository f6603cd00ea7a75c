"""One storage for many leaves: the layout of leaves in it, and the leaves as views of it.

Leaves are stored in the given order, C-contiguous, each padded with zeros to a multiple of 8 bytes (16 before a leaf of
16-byte elements). Tied leaves share one span. A jagged nested tensor is stored as its values, its offsets and, if it
has them, its lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from td_core.errors import FormatError, StructureError
from td_core.spi import (
    PLAIN,
    STORABLE,
    Encoded,
    JaggedParts,
    as_bytes,
    copy_all,
    identify_view,
    is_stored,
)

from . import _key_paths
from ._memory import allocate

ALIGNMENT = 8
#: Up to this many bytes per leaf, zeroing a whole storage is faster than zeroing the gaps between leaves.
SMALL = 1 << 13
#: Pieces of at least this many bytes are sent without a copy; smaller ones are first gathered into one buffer.
LARGE = 1 << 16


_KIND = attrgetter("__class__", "layout", "is_nested", "is_meta", "is_quantized")
_ORDINARY = {(cls, torch.strided, False, False, False) for cls in PLAIN}
_NEW = tuple.__new__  # twice as fast as the constructor of a NamedTuple


class Span(NamedTuple):
    """Byte range of one piece of a leaf in a storage.

    Attributes:
        dtype: dtype of the elements.
        shape: shape of the piece.
        start: first byte.
        stop: one past the last byte, padding included.
        pad: number of padding bytes at the end.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    start: int
    stop: int
    pad: int


class Leaf(NamedTuple):
    """The spans of one leaf.

    Attributes:
        spans: one span, or those of (values, offsets[, lengths]) of a jagged tensor.
        ragged_idx: the ragged dim of a jagged tensor; None for an ordinary one.
    """

    spans: tuple[Span, ...]
    ragged_idx: int | None = None


class Layout(NamedTuple):
    """The spans of all leaves in one storage.

    Attributes:
        leaves: the leaves, in order.
        nbytes: size of the storage in bytes.
    """

    leaves: list[Leaf]
    nbytes: int


Pieces = tuple[Tensor, ...]

#: A layout without padding, as JSON columns: dtypes; per span its dtype number, shape and first byte;
#: (position, number of spans, ragged dim) per jagged leaf; the size of the storage.
Columns = tuple[list[str], list[int], list[Sequence[int]], list[int], list[tuple[int, int, int]], int]


def to_columns(layout: Layout) -> Columns:
    """Convert a layout to columns, which are short as JSON; see :data:`Columns`."""
    spans = [span for leaf in layout.leaves for span in leaf.spans]
    kinds = {span.dtype: None for span in spans}
    numbers = {kind: i for i, kind in enumerate(kinds)}
    return (
        list(map(str, kinds)),
        [numbers[span.dtype] for span in spans],
        [tuple(span.shape) for span in spans],
        [span.start for span in spans],
        [
            (i, len(leaf.spans), leaf.ragged_idx)
            for i, leaf in enumerate(layout.leaves)
            if leaf.ragged_idx is not None
        ],
        layout.nbytes,
    )


def from_columns(columns: Any) -> Layout:
    """Convert the result of :func:`to_columns` back to a layout; raise FormatError if it is damaged."""
    names, numbers, shapes, starts, ragged, nbytes = columns
    kinds = list(map(parse_dtype, map(str, names)))
    if (
        not {*map(type, chain((nbytes,), numbers, starts, *shapes, *ragged))} <= {int}
        or min(numbers, default=0) < 0
    ):
        raise FormatError(
            "dtypes, shapes and places of leaves are not all ints, or one of a dtype is negative"
        )
    jagged = {i: (count, dim) for i, count, dim in ragged}
    spans = (
        _NEW(Span, (kind, shape, start, start + math.prod(shape) * kind.itemsize, 0))
        for kind, shape, start in zip(
            map(kinds.__getitem__, numbers), map(tuple, shapes), starts, strict=True
        )
    )
    leaves: list[Leaf] = []
    for span in spans:
        count, ragged_idx = jagged.get(len(leaves), (1, None))
        leaves.append(_NEW(Leaf, ((span, *islice(spans, count - 1)), ragged_idx)))
    counts = [count for _, count, _ in ragged]
    if not {*counts} <= {2, 3} or len(leaves) != len(starts) - sum(counts) + len(counts):
        raise FormatError(
            f"{len(starts)} pieces do not make {len(leaves)} leaves, {len(counts)} of them jagged"
        )
    return Layout(leaves, nbytes)


@lru_cache(64)
def parse_dtype(name: str) -> torch.dtype:
    """Parse the name of a dtype, with or without ``torch.``. Raise FormatError if it is unknown."""
    try:
        return STORABLE[f"torch.{name.removeprefix('torch.')}"]
    except KeyError:
        raise FormatError(f"unknown dtype {name!r}") from None


class Views:
    """Typed views of a uint8 storage; pieces that are not aligned to their dtype are copied."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage
        self._aligned = storage.storage_offset() % 16 == 0 and (
            storage.is_meta or storage.data_ptr() % 16 == 0
        )
        self._apply_types: dict[torch.dtype, Tensor] = {}
        self._shared: dict[Span, Tensor] = {}

    def of(self, span: Span) -> Tensor:
        """Return the piece at ``span`` as a view of the storage, or as a copy if it is not aligned."""
        dtype, shape, start, stop, pad = span
        if not self._aligned or start % dtype.itemsize:
            return self.storage[start : stop - pad].clone().view(dtype).view(shape)
        base = self._apply_types.get(dtype)
        if base is None:
            whole = len(self.storage) - len(self.storage) % dtype.itemsize
            base = self._apply_types[dtype] = self.storage[:whole].view(dtype)
        return base.as_strided(shape, strides(shape), int(base.storage_offset()) + start // dtype.itemsize)

    def pieces(self, layout: Layout) -> list[Pieces]:
        """Return the pieces of each leaf; tied leaves share the same tuple."""
        places: list[tuple[Span, ...]] = []
        known: dict[int, int] = {}
        order = []
        for spans, _ in layout.leaves:
            start = spans[0][2]
            position = known.get(start)
            if position is None or places[position] != spans:
                position = known[start] = len(places)
                places.append(spans)
            order.append(position)
        made = list(self._iter_pieces(places))
        return [made[position] for position in order]

    def _iter_pieces(self, places: list[tuple[Span, ...]]) -> Iterator[Pieces]:
        """Yield the pieces of each leaf; one split call creates all adjacent 1-D pieces of one dtype."""
        run: list[Span] = []
        for spans in places:
            dtype, shape, start, _, _ = spans[0]
            vector = len(shape) == 1 and len(spans) == 1
            if run and not (vector and dtype is run[-1][0] and start == run[-1][3] - run[-1][4]):
                yield from self._vectors(run)
                run = []
            if vector:
                run.append(spans[0])
            else:
                yield self.of(spans[0]), *map(self._rows, spans[1:])
        if run:
            yield from self._vectors(run)

    def _rows(self, span: Span) -> Tensor:
        """Return offsets or lengths, cached: torch gives jagged tensors the same shape only if they share these."""
        result = self._shared.get(span)
        if result is None:
            result = self._shared[span] = self.of(span)
        return result

    def _vectors(self, run: list[Span]) -> Iterable[Pieces]:
        if len(run) == 1:
            return [(self.of(run[0]),)]
        (dtype, _, start, _, _), stop = run[0], run[-1].stop - run[-1].pad
        whole = self.of(Span(dtype, ((stop - start) // dtype.itemsize,), start, stop, 0))
        # Autograd forbids in-place writes to the outputs of split(), but not to those of unsafe_split().
        return zip(whole.unsafe_split_with_sizes([span[1][0] for span in run]))

    def leaves(self, layout: Layout, like: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return all leaves as views of the storage; ``like`` are the leaves that it was filled from."""
        return join_pieces(layout, self.pieces(layout), like)


def join_pieces(layout: Layout, pieces: list[Pieces], like: Sequence[Tensor] = ()) -> list[Tensor]:
    """Build leaves from pieces, tied ones as one tensor. Pieces that are not copies of the leaves ``like`` are untrusted."""
    known: dict[int, Tensor] = {}
    result = []
    for i, (leaf, parts) in enumerate(zip(layout.leaves, pieces, strict=True)):
        dim = leaf.ragged_idx
        if dim is None:
            result.append(parts[0])
            continue
        made = known.get(id(parts))
        if made is None:
            # Without ``like`` the pieces are untrusted, so check that the rows are inside of the values.
            jagged = JaggedParts.of_tensors(dim, parts)
            jagged = (
                jagged._replace(seqlens=JaggedParts.of(like[i]).seqlens) if like else _check_jagged(jagged)
            )
            made = known[id(parts)] = jagged.join()
        result.append(made)
    return result


@lru_cache(1024)
def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Compute the strides of a C-contiguous tensor."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def _has_bytes(leaf: Tensor) -> bool:
    """Return True if a strided tensor has elements in memory or in a store; False for a subclass that wraps other tensors."""
    if not leaf.numel() or is_stored(leaf):
        return True
    # data_ptr() of a FakeTensor warns, so check its storage's device first.
    return leaf.untyped_storage().device.type == "meta" or leaf.data_ptr() != 0


def pieces_of(leaf: Tensor) -> tuple[Pieces, int | None]:
    """Split a leaf into dense tensors, returned with its ragged dim; raise StructureError if it is sparse, meta or similar."""
    if _KIND(leaf) in _ORDINARY:
        return (leaf,), None
    if leaf.is_nested:
        if leaf.layout is not torch.jagged:
            raise StructureError(
                "a nested tensor of strided layout cannot be consolidated; convert it to torch.jagged"
            )
        dim, values, offsets, lengths, _ = JaggedParts.of(leaf)
        return (values, offsets) if lengths is None else (values, offsets, lengths), dim
    if leaf.layout is not torch.strided:
        raise StructureError(
            f"a tensor of layout {leaf.layout} cannot be consolidated; call to_dense() on it first"
        )
    if leaf.is_quantized:
        raise StructureError("a quantized tensor cannot be consolidated; call dequantize() on it first")
    if leaf.is_meta:
        raise StructureError("a tensor on the meta device has no data to consolidate")
    if (hasattr(leaf, "__tensor_flatten__") and not is_stored(leaf)) or not _has_bytes(leaf):
        raise StructureError(
            f"a {type(leaf).__name__} has no bytes of its own; take what it is made of first, of a DTensor its "
            "to_local() or full_tensor()"
        )
    return (leaf,), None


def is_all_plain(leaves: Sequence[Tensor]) -> bool:
    """Return True if all leaves are plain strided tensors: no subclasses, nested, meta or quantized ones."""
    return _ORDINARY.issuperset(map(_KIND, leaves))


def plan(encoded: Encoded, *, tie: bool = True) -> Layout:
    """Plan the layout of a tree's leaves in one storage, depth first. With ``tie``, tied leaves share one span."""
    name = partial(_key_paths.format_leaf_path, encoded)
    if len(encoded.nodes) == 1:
        return plan_leaves(encoded.leaves, name, tie)
    order = _key_paths.leaves(encoded.nodes)
    leaves, nbytes = plan_leaves([encoded.leaves[i] for i in order], lambda i: name(order[i]), tie)
    placed = leaves.copy()
    for i, leaf in zip(order, leaves, strict=True):
        placed[i] = leaf
    return Layout(placed, nbytes)


def plan_leaves(
    leaves: Sequence[Tensor], name: Callable[[int], str] = "leaf {}".format, tie: bool = True
) -> Layout:
    """Plan the layout of leaves in one storage, in the given order; ``name`` returns the name of a leaf for errors."""
    if is_all_plain(leaves):
        spans, nbytes = _spans(leaves, tie)
        return Layout([_NEW(Leaf, ((span,), None)) for span in spans], nbytes)
    parts = []
    for i, leaf in enumerate(leaves):
        try:
            parts.append(pieces_of(leaf))
        except StructureError as error:
            raise StructureError(f"{name(i)}: {error}") from error
    spans, nbytes = _spans([piece for pieces, _ in parts for piece in pieces], tie, _get_address)
    rest = iter(spans)
    return Layout([Leaf(tuple(islice(rest, len(pieces))), ragged) for pieces, ragged in parts], nbytes)


def _spans(
    pieces: Sequence[Tensor], tie: bool, address: Callable[[Tensor], int] = Tensor.data_ptr
) -> tuple[list[Span], int]:
    position = 0
    spans: list[Span] = []
    known: dict[int, int] = {}
    looks: tuple[Callable[[Tensor], object], ...] = (address, attrgetter("dtype"), Tensor.size, Tensor.numel)
    for i, (place, dtype, shape, count) in enumerate(zip(*(map(look, pieces) for look in looks))):
        itemsize = dtype.itemsize
        size = count * itemsize
        # Tensors without memory, such as fake tensors, all have address 0 and are not tied.
        tied = known.setdefault(place, i) if size and tie and place else i
        if tied != i and identify_view(pieces[tied]) == identify_view(pieces[i]):
            spans.append(spans[tied])
            continue
        position += -position % itemsize
        stop = position + size
        pad = -stop % ALIGNMENT
        spans.append(_NEW(Span, (dtype, shape, position, stop + pad, pad)))
        position = stop + pad
    return spans, position


def _get_address(piece: Tensor) -> int:
    return 0 if is_stored(piece) else piece.data_ptr()


def fill(
    storage: Tensor,
    layout: Layout,
    pieces: list[Pieces],
    leaves: Sequence[Tensor],
    num_threads: int = 0,
    non_blocking: bool = False,
) -> None:
    """Copy leaves into the pieces of a storage; zero the bytes between them."""
    if len(storage) <= SMALL * len(leaves):
        storage.zero_()
    else:
        end = 0
        for start, stop in [*list_used_spans(layout), (len(storage), len(storage))]:
            if end < start:
                storage[end:start].zero_()
            end = stop
    # Tied leaves share a tuple of pieces, so each tuple is copied once.
    chosen = {id(parts): i for i, parts in enumerate(pieces)}.values()
    targets = [piece for i in chosen for piece in pieces[i]]
    sources = [
        piece for i in chosen for piece in (pieces_of(leaves[i])[0] if len(pieces[i]) > 1 else (leaves[i],))
    ]
    with torch.no_grad():
        if num_threads > 1:
            with ThreadPoolExecutor(num_threads) as pool:
                copy = partial(_copy, non_blocking, torch.is_inference_mode_enabled())
                list(pool.map(copy, targets, sources))
        elif targets:
            copy_all(targets, sources, non_blocking)


def list_used_spans(layout: Layout) -> list[tuple[int, int]]:
    """Return the sorted, distinct (first byte, one past the last) of all non-empty pieces, without padding."""
    return sorted(
        {
            (span[2], span[3] - span[4])
            for leaf in layout.leaves
            for span in leaf[0]
            if span[3] - span[4] > span[2]
        }
    )


def list_runs(layout: Layout) -> list[list[tuple[int, int]]]:
    """Group the byte ranges of a layout into messages: each large piece alone, adjacent small ones together."""
    results: list[list[tuple[int, int]]] = []
    small = False
    for start, stop in list_used_spans(layout):
        if small and stop - start < LARGE:
            results[-1].append((start, stop))
        else:
            results.append([(start, stop)])
        small = stop - start < LARGE
    return results


def payload(layout: Layout, leaves: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return (first byte, bytes) per message of :func:`list_runs`: views of large pieces, copies of small ones."""
    match = list_runs(layout)
    # If all pieces are small, the message has the bytes of the layout, so gather all leaves at once.
    if len(match) == 1 and len(match[0]) > 1:
        start, stop = match[0][0][0], match[0][-1][1]
        return [(start, gather_leaves(layout, leaves)[start:stop])]
    placed: dict[tuple[int, int], tuple[Span, Tensor]] = {}
    for leaf, (spans, _) in zip(leaves, layout.leaves, strict=True):
        for span, piece in zip(spans, pieces_of(leaf)[0], strict=True):
            placed.setdefault((span[2], span[3] - span[4]), (span, piece))
    result = []
    for run in match:
        first = run[0][0]
        if len(run) == 1:
            result.append((first, as_bytes(placed[run[0]][1])))
            continue
        spans, pieces = zip(*(placed[place] for place in run), strict=True)
        skipped = first - first % 16  # keep a multiple of 16, so that every dtype stays aligned
        moved = [
            Leaf((span._replace(start=span.start - skipped, stop=span.stop - skipped),)) for span in spans
        ]
        room = gather_leaves(Layout(moved, run[-1][1] - skipped), pieces)
        result.append((first, room[first - skipped :]))
    return result


def gather_leaves(layout: Layout, leaves: Sequence[Tensor]) -> Tensor:
    """Copy leaves into a new storage."""
    device = leaves[0].device if leaves else None
    storage = allocate(layout.nbytes, device)
    fill(storage, layout, Views(storage).pieces(layout), leaves)
    return storage


def is_plain(leaf: Tensor) -> bool:
    """Return True if a dense leaf is contiguous memory without conj or neg bit, so its bytes are its elements in order."""
    return leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg() or is_stored(leaf))


def _copy(non_blocking: bool, inference: bool, target: Tensor, source: Tensor) -> None:
    with (
        torch.inference_mode(inference),
        torch.no_grad(),
    ):  # both modes are thread-local, so set them in each thread
        target.copy_(source, non_blocking=non_blocking)


def check(layout: Layout, nbytes: int) -> None:
    """Raise FormatError unless every span is in the storage, has the size of its shape, and overlaps no other span."""
    for i, leaf in enumerate(layout.leaves):
        for dtype, shape, start, stop, pad in leaf.spans:
            if min(shape, default=0) < 0:
                raise FormatError(f"leaf {i} has the impossible shape {list(shape)}")
            size = math.prod(shape) * dtype.itemsize
            if pad < 0 or stop - start - pad != size:
                raise FormatError(
                    f"leaf {i} of shape {list(shape)} and dtype {dtype} needs {size} bytes; bytes "
                    f"{start} to {stop} with {pad} of padding were given"
                )
            if start < 0 or stop > nbytes:
                raise FormatError(f"leaf {i} lies at bytes {start} to {stop} of a storage of {nbytes}")
    if result := overlap(layout.leaves):
        raise FormatError("leaves overlap: bytes {} to {} and {} to {}".format(*result))


def overlap(leaves: Iterable[Leaf]) -> tuple[int, int, int, int] | None:
    """Find two pieces that overlap without being tied. Return (start, stop, start, stop) of both, or None."""
    spans = {
        (span.start, span.stop - span.pad, span.dtype, tuple(span.shape))
        for leaf in leaves
        for span in leaf.spans
        if span.stop - span.pad > span.start
    }
    end, owner = 0, (0, 0)
    for start, stop in sorted((start, stop) for start, stop, *_ in spans):
        if start < end:
            return *owner, start, stop
        end, owner = stop, (start, stop)
    return None


def _check_jagged(parts: JaggedParts) -> JaggedParts:
    """Return the parts of an untrusted jagged tensor with their ``seqlens``; raise FormatError if they are damaged."""
    try:
        return parts.check()
    except ValueError as error:
        raise FormatError(str(error)) from error
