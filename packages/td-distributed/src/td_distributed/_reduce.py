"""Reductions over ranks: check that all ranks have the same structure, then reduce the leaves in a few buckets."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import StructureError
from td_core.spi import copy_all, encode, is_stored, parse_json, show_path

from . import _consolidated_file, _key_paths, _storage, _wire
from ._group import Group, bytes_to_text, peer_error, text_to_bytes
from ._memory import END

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Leaves of one dtype are reduced together in buckets of up to this many bytes.
BUCKET_BYTES = 1 << 25
#: A leaf of at least this many bytes is reduced alone: copying it to a bucket and back takes longer than one call.
ALONE = 1 << 20
#: Dtypes that gloo can sum.
GLOO_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class ReduceWork:
    """Handle of a bucket that is reduced asynchronously: call ``wait`` before reading the leaves.

    Args:
        work: the handle of torch.distributed.
        flat: 1-D tensor of the bucket's elements.
        leaves: leaves to write the result to; empty if ``flat`` is a view of its leaf, or this rank gets no result.
        divisor: the number that the result is divided by.
    """

    def __init__(self, work: dist.Work, flat: Tensor, leaves: list[Tensor], divisor: int = 1) -> None:
        self.work = work
        self.flat = flat
        self.leaves = leaves
        self.divisor = divisor

    def wait(self) -> None:
        """Block until the result has arrived, and write it into the leaves."""
        self.work.wait()
        if self.divisor != 1:
            self.flat /= self.divisor
            self.divisor = 1
        if self.leaves:
            pieces = self.flat.split([leaf.numel() for leaf in self.leaves])
            shaped = [
                piece if leaf.ndim == 1 else piece.view(leaf.shape)
                for piece, leaf in zip(pieces, self.leaves, strict=True)
            ]
            copy_all(self.leaves, shaped)
            self.leaves = []

    def is_completed(self) -> bool:
        """Return True if the result has arrived; ``wait`` writes it."""
        return bool(self.work.is_completed())


def all_reduce(
    self: TensorCollection,
    op: object = None,
    *,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    bucket_bytes: int | None = None,
) -> list[ReduceWork] | None:
    """Reduce every leaf over all ranks, in place; non-tensor data is not changed.

    Args:
        op: "sum", "mean", "max", "min", "product" or a ``torch.distributed.ReduceOp``; a sum by default.
        group: the process group; None is the global one.
        async_op: return a list of handles to ``wait()`` on.
        bucket_bytes: largest size in bytes of a bucket of leaves below 1 MiB; 32 MiB by default.

    Raises:
        StructureError: the structures of the ranks differ, or a leaf cannot be reduced; raised on every rank, and
            nothing was changed.
        FormatError: the ranks make different calls, or pass different arguments; raised on every rank.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> td = TensorDict({"a": torch.arange(3)})
    >>> td.all_reduce()  # of one rank
    >>> td["a"]
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    among, (op, mean) = Group(group), _parse_op(op)
    leaves, place = _agree(self, among, op, f"all_reduce{mean} with bucket_bytes={bucket_bytes}", mean)
    divisor = among.size if mean else 1
    buckets = [
        ReduceWork(dist.all_reduce(flat, op, group, async_op=True), flat, targets, divisor)
        for flat, targets in _iter_flat(leaves, bucket_bytes, place, True)
    ]
    return _handles(buckets, async_op)


def reduce(
    self: TensorCollection,
    dst: int,
    op: object = None,
    async_op: bool = False,
    return_premature: bool = False,
    group: ProcessGroup | None = None,
    *,
    bucket_bytes: int | None = None,
) -> list[ReduceWork] | None:
    """Reduce every leaf over all ranks into the collection of the rank ``dst``, in place; other ranks keep theirs.

    Args:
        dst: rank in the global group.
        op: "sum", "mean", "max", "min", "product" or a ``torch.distributed.ReduceOp``; a sum by default.
        async_op: start all buckets before waiting for the first.
        return_premature: with ``async_op``, return a list of handles to ``wait()`` on instead of waiting.
        group: the process group; None is the global one.
        bucket_bytes: largest size in bytes of a bucket of leaves below 1 MiB; 32 MiB by default.

    Raises:
        StructureError, FormatError: as for :func:`all_reduce`.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> td = TensorDict({"a": torch.arange(3)})
    >>> td.reduce(0, dist.ReduceOp.MAX)
    >>> td["a"]
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    among, (op, mean) = Group(group), _parse_op(op)
    receives = among.rank == among.rank_of(dst)
    call = f"reduce{mean} to rank {dst} with bucket_bytes={bucket_bytes}"
    leaves, place = _agree(self, among, op, call, mean)
    buckets = []
    for flat, targets in _iter_flat(leaves, bucket_bytes, place, receives):
        work = dist.reduce(flat, dst, op, group, async_op=True)
        buckets.append(ReduceWork(work, flat, targets if receives else [], among.size if mean else 1))
        if not async_op:
            buckets[-1].wait()
    return _handles(buckets, async_op and return_premature)


def _parse_op(op: object) -> tuple[Any, str]:
    """Return the operation of torch.distributed, and " of the mean" if its result is divided by the number of ranks."""
    if not isinstance(op, str):
        return dist.ReduceOp.SUM if op is None else op, ""
    if op in ("mean", "avg"):  # gloo of older releases has no average
        return dist.ReduceOp.SUM, " of the mean"
    found = getattr(dist.ReduceOp, "PRODUCT" if op == "prod" else op.upper(), None)
    if found is None:
        raise ValueError(f"op is 'sum', 'mean', 'max', 'min', 'product' or a ReduceOp; got {op!r}")
    return found, ""


def _handles(buckets: list[ReduceWork], wanted: bool) -> list[ReduceWork] | None:
    """Return the handles if ``wanted``, else wait for all of them."""
    if wanted:
        return buckets
    for bucket in buckets:
        bucket.wait()
    return None


def _iter_flat(
    leaves: list[Tensor], limit: int | None, place: torch.device, receives: bool
) -> Iterable[tuple[Tensor, list[Tensor]]]:
    """Yield per bucket a flat tensor, and the leaves to copy the result to; none if it is a view of its leaf."""
    overlap = _has_overlap(leaves)

    def flat(bucket: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        first = bucket[0]
        alone = len(bucket) == 1 and receives and not overlap
        if alone and first.device == place and _storage.is_plain(first):
            return first.as_strided((first.numel(),), (1,)), []
        return torch.cat([leaf.flatten().to(place) for leaf in bucket]), bucket

    flats = map(flat, _buckets(leaves, limit))
    # If leaves overlap, read all of them before the first result is written.
    return list(flats) if overlap else flats


def _has_overlap(leaves: list[Tensor]) -> bool:
    """Return True if the address ranges of two leaves overlap."""
    end = 0
    for start, leaf in sorted(((leaf.data_ptr(), leaf) for leaf in leaves), key=itemgetter(0)):
        if start < end:
            return True
        last = leaf.numel() - 1
        if not leaf.is_contiguous():
            last = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
        end = start + (last + 1) * leaf.itemsize
    return False


def _buckets(leaves: list[Tensor], limit: int | None) -> Iterator[list[Tensor]]:
    """Group leaves by dtype into buckets of at most ``limit`` bytes; large leaves are alone in theirs."""
    limit = BUCKET_BYTES if limit is None else limit
    groups: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.dtype, []).append(leaf)
    for group in groups.values():
        bucket: list[Tensor] = []
        size = 0
        for leaf in group:
            nbytes = leaf.numel() * leaf.itemsize
            if nbytes >= ALONE:
                yield [leaf]
                continue
            if bucket and size + nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(leaf)
            size += nbytes
        if bucket:
            yield bucket


def _agree(
    collection: TensorCollection, among: Group, op: Any, call: str, mean: str
) -> tuple[list[Tensor], torch.device]:
    """Check that all ranks have the same structure. Return the leaves in one order for all ranks, and the device to use."""
    by = getattr(op, "op", op).name
    call = f"{call} by {by}"
    own = among.own_device()
    leaves, words = _digest_order(collection)
    fronts = among.all_numbers(call, _ready(leaves, own), 0, *words)
    if not any(words) or any(front[2:] != words for front in fronts):
        # The ranks may still have the same keys in another order, so compare them sorted by key.
        leaves, fronts = _agree_by_key(collection, among, own, call)
    if mean:
        _check_means(collection)
    place = own if all(front[0] == 2 for front in fronts) else among.device
    if place.type == "cpu" and not all(
        _can_gloo_reduce(by, dtype) for dtype in {leaf.dtype for leaf in leaves}
    ):
        for path, leaf in _describe_structure(collection)[1].items():
            if not _can_gloo_reduce(by, leaf.dtype):
                raise StructureError(
                    f"{show_path(path)} is of dtype {leaf.dtype}, which gloo cannot reduce by {by}"
                )
    return leaves, place


def _check_means(collection: TensorCollection) -> None:
    """Raise StructureError for a leaf of integers, which have no mean."""
    for path, leaf in _describe_structure(collection)[1].items():
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise StructureError(
                f"{show_path(path)} is of dtype {leaf.dtype}, which has no mean; reduce it by sum"
            )


def _ready(leaves: list[Tensor], place: torch.device) -> int:
    return 2 if {leaf.device for leaf in leaves} == {place} else 1


def _digest_order(collection: TensorCollection) -> tuple[list[Tensor], list[int]]:
    """Return the leaves, tied ones once, and a digest of structure and order; zeros if some leaf is not plain."""
    with contextlib.suppress(
        Exception
    ):  # _agree_by_key() then raises the same error and sends it to all ranks
        encoded = encode(collection)
        if _storage.is_all_plain(encoded.leaves) and all(map(Tensor.is_contiguous, encoded.leaves)):
            layout = _storage.plan(encoded)
            once = {
                place.spans[0].start: leaf
                for leaf, place in zip(encoded.leaves, layout.leaves)
                if leaf.numel()
            }
            words = _digest(json.dumps([encoded.nodes, _storage.to_columns(layout)]))
            return [*map(Tensor.detach, once.values())], words
    return [], [0] * 4


def _digest(text: str) -> list[int]:
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]


def _agree_by_key(
    collection: TensorCollection, among: Group, place: torch.device, call: str
) -> tuple[list[Tensor], list[list[int]]]:
    """Check that all ranks have the same keys, in any order. Return the leaves sorted by key path, and each rank's numbers."""
    leaves: dict[_key_paths.Path, Tensor] = {}
    outline: _wire.Outline = {}
    problem = None
    try:
        outline, leaves = _describe_structure(collection)
    except Exception as error:  # send any error, because the other ranks wait for a message
        problem = str(error)
    text = json.dumps({json.dumps(path): result for path, result in outline.items()}, sort_keys=True)
    words = _digest(text)
    message = text_to_bytes(problem or text)
    ready = _ready(list(leaves.values()), place) if problem is None else 0
    fronts = among.all_numbers(call, ready, len(message) - len(END), *words)
    if all(front[0] and front[2:] == words for front in fronts):
        return list(leaves.values()), fronts
    every = among.all_bytes(message, [front[1] for front in fronts])
    for rank, front in enumerate(fronts):
        if not front[0]:
            raise peer_error(rank, every[rank])
    raise _structure_error(every)


def _structure_error(every: list[Tensor]) -> StructureError:
    """Build the error that names the first key at which the structures of the ranks differ."""
    with _consolidated_file.convert_damage("what a rank says of its structure"):
        first, *others = (
            {
                tuple(map(str, parse_json(path))): result
                for path, result in parse_json(bytes_to_text(item)).items()
            }
            for item in every
        )
    for rank, other in enumerate(others, 1):
        for path in sorted(first.keys() | other.keys()):
            if first.get(path) != other.get(path):
                return StructureError(
                    f"cannot reduce: {show_path(path)} is {first.get(path, 'missing')} on rank 0, "
                    f"{other.get(path, 'missing')} on rank {rank}; nothing was changed on any rank"
                )
    return StructureError("cannot reduce: the structures of the ranks differ")


def _describe_structure(collection: TensorCollection) -> tuple[_wire.Outline, dict[_key_paths.Path, Tensor]]:
    """Return the description of the structure that ranks compare, and the leaves by key path, tied ones once."""
    encoded = encode(collection)
    layout = _storage.plan(encoded)
    outline = _wire.describe_structure(encoded.nodes, layout)
    leaves = {}
    owners: dict[int, _key_paths.Path] = {}
    for path, i in sorted(zip(encoded.leaf_paths(), range(len(encoded.leaves)))):
        leaf, *fixed = _storage.pieces_of(encoded.leaves[i])[0]
        if is_stored(leaf):
            raise StructureError(f"{show_path(path)} is in a store; clone() reads it into memory")
        if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape)):
            raise StructureError(
                f"{show_path(path)} is expanded, so its elements share memory; clone() it first"
            )
        if fixed:
            outline[path] += f" with rows at {[piece.tolist() for piece in fixed]}"
        owner = owners.setdefault(layout.leaves[i].spans[0].start, path) if leaf.numel() else path
        if owner is not path:
            outline[path] += f", the same tensor as {show_path(owner)}"
        elif leaf.numel():
            leaves[path] = leaf.detach()
    return outline, leaves


def _can_gloo_reduce(op: str, dtype: torch.dtype) -> bool:
    if dtype not in GLOO_DTYPES:
        return False
    if op in ("BAND", "BOR", "BXOR"):
        return not dtype.is_floating_point and not dtype.is_complex
    if op == "AVG":
        return dtype.is_floating_point or dtype.is_complex
    return op == "SUM" or not dtype.is_complex
