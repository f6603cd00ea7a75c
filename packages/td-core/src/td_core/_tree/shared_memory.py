"""Apply in-place operations once to leaves that share memory, such as tied weights.

Leaves share memory if one tensor is under two keys, if they are views of one tensor (``.data``, overlapping slices), or
if a node or a member of a lazy stack occurs twice. All results are computed from the old values, so each element changes
once. If two keys of one tensor have different operands, the operation raises before it writes anything. Plain copies, as
in ``update_``, are written in the order of the keys.

A graph of ``torch.compile`` has no addresses to compare, so there only identical objects count as shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._torch.kernels import PLAIN, Op, expand_operands
from .._torch.private import batch_dim, functorch_level, unwrap_transforms
from ..errors import StructureError
from .node import Core

#: Operations whose result does not depend on the old values, so that applying them twice is harmless.
WRITES_ANEW = frozenset({Tensor.copy_, Tensor.fill_, Tensor.masked_fill_, Tensor.zero_})

_STORAGE = Tensor.untyped_storage
_NBYTES = attrgetter("nbytes")


def may_share_memory(leaves: list[Tensor], plain: bool = False) -> bool:
    """Return True if two leaves have one storage, or if torch cannot compare them, as for nested tensors.

    ``plain`` means that all leaves are of plain types.
    """
    try:
        if plain or PLAIN.issuperset(map(type, leaves)):
            return len({*map(_STORAGE, leaves)}) < len(leaves)
        kinds: set[Any] = {*map(type, leaves)}
        if all(kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in kinds):
            # Two mapped tensors of one file have different storage objects at one address, so compare both. Addresses
            # come first: torch 2.4 ends the process if reading fails while it holds the storage of a mapped tensor.
            return min(len({*map(read, leaves)}) for read in (Tensor.data_ptr, _STORAGE)) < len(leaves)
    except RuntimeError:
        pass
    return len(leaves) > 1


def group_overlapping(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Return groups of positions of leaves that overlap; leaves without overlap are in no group."""
    if are_apart(leaves):
        return []
    groups: list[list[int]] = []
    last, reach = None, 0
    for block, begin, end, i in sorted((*_place(leaf), i) for i, leaf in enumerate(leaves)):
        if begin == end:
            continue
        if block == last and begin < reach:
            groups[-1].append(i)
            reach = max(reach, end)
        else:
            groups.append([i])
            last, reach = block, end
    return [
        sorted(group) for group in groups if len(group) > 1 and not _is_disjoint([leaves[i] for i in group])
    ]


def are_apart(leaves: Sequence[Tensor]) -> bool:
    """Return True if leaves are plain and contiguous, and use bytes of their own, such as the parts of a flat tensor.

    >>> flat = torch.zeros(4)
    >>> are_apart([flat[2:], flat[:2]]), are_apart([flat[:2], flat[1:]])
    (True, False)
    """
    try:
        if not PLAIN.issuperset(map(type, leaves)) or not all(map(Tensor.is_contiguous, leaves)):
            return False
        ranges = sorted(zip(map(Tensor.data_ptr, leaves), map(_NBYTES, leaves)))
    except RuntimeError:  # a leaf without memory, such as a sparse one
        return False
    return all(start + size <= following for (start, size), (following, _) in pairwise(ranges))


def is_same_view(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have the same memory, shape, strides and dtype."""
    return first is second or (_place(first) == _place(second) and _form(first) == _form(second))


def identify_view(leaf: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two strided leaves with the same memory and elements; the conjugate view has another.

    >>> x = torch.zeros(2)
    >>> identify_view(x) == identify_view(x.view(2)), identify_view(x) == identify_view(x.view(2, 1))
    (True, False)
    """
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.is_conj(), leaf.is_neg()


def is_dense(leaf: Tensor) -> bool:
    """Return True if the elements of a leaf fill one memory range without gaps, in any order of the dims."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(leaf.stride(), leaf.shape) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def get_memory_key(leaf: Tensor | Core, any_shape: bool = True) -> object:
    """Return a key that is equal for two leaves with the same memory; for a node, return its id.

    With ``any_shape`` False, keys are equal only if shapes and strides are equal too.
    """
    if isinstance(leaf, Core):
        return id(leaf._inner())
    if torch.compiler.is_compiling():
        return leaf
    return _place(leaf), leaf.dtype, None if any_shape and leaf.numel() and _is_full(leaf) else _form(leaf)


def change_distinct(
    name: str,
    this: Op,
    leaves: list[Tensor],
    operands: tuple[object, ...],
    show: Callable[[list[Tensor]], str],
) -> tuple[list[Tensor], tuple[object, ...]]:
    """Apply the operation to partly overlapping leaves. Return the remaining leaves and operands without duplicates.

    ``show`` formats the keys of leaves. Raises StructureError, with nothing written, if shared leaves would differ.
    """
    if torch.compiler.is_compiling():
        first: dict[Tensor, int] = {}
        for i, leaf in enumerate(leaves):
            first.setdefault(leaf, i)
        return (leaves, operands) if len(first) == len(leaves) else _only(first.values(), leaves, operands)
    dropped: set[int] = set()
    partly: list[int] = []
    for group in group_overlapping(leaves):
        distinct: list[int] = []
        for i in group:
            twin = next((j for j in distinct if _is_twin(leaves[i], leaves[j], operands)), None)
            if twin is None:
                distinct.append(i)
                continue
            if not all(are_equal(operand[twin], operand[i]) for operand in operands if type(operand) is list):
                raise StructureError(
                    f"cannot compute {name} in place: {show([leaves[twin], leaves[i]])} are one tensor, and have operands "
                    "that differ; give them equal ones, or exclude() all keys but one"
                )
            dropped.add(i)
        if len(distinct) > 1:
            partly += distinct
    if partly:
        _change_apart(name, this, *_only(partly, leaves, operands), show)
        dropped.update(partly)
    return _only([i for i in range(len(leaves)) if i not in dropped], leaves, operands)


def are_equal(first: object, second: object) -> bool:
    """Return True if two operands are surely equal; NaN equals NaN."""
    if isinstance(first, Core) and isinstance(second, Core):
        return all(map(are_equal, first._leaves(), second._leaves()))
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first is second or bool(first == second)
    if is_same_view(first, second):
        return True
    if batch_dim(first) != batch_dim(second):
        return False
    first, second = unwrap_transforms(first), unwrap_transforms(second)
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    try:
        if _STORAGE(first).device.type == "meta":
            return True  # meta tensors have no data that can differ
        with torch.no_grad():
            return bool(((first == second) | ((first != first) & (second != second))).all())
    except RuntimeError:
        return False


def _change_apart(
    name: str,
    this: Op,
    leaves: list[Tensor],
    operands: tuple[object, ...],
    show: Callable[[list[Tensor]], str],
) -> None:
    """Apply an operation to overlapping leaves: compute all results before the first write; undo if they conflict."""
    before = [leaf.clone() for leaf in leaves]
    after = [
        this.single(leaf.clone(), *others)
        for leaf, *others in zip(leaves, *expand_operands(leaves, operands), strict=True)
    ]
    for leaf, value in zip(leaves, after):
        leaf.copy_(value)
    wrong = [leaf for leaf, value in zip(leaves, after) if not are_equal(leaf, value)]
    if not wrong:
        return
    with torch.no_grad():
        for leaf, value in zip(leaves, before):
            leaf.copy_(value)
    raise StructureError(
        f"cannot compute {name} in place: {show(leaves)} overlap in memory, and elements that they share would become "
        "different; clone() the collection first"
    )


def _only(
    positions: Iterable[int], leaves: list[Tensor], operands: tuple[object, ...]
) -> tuple[list[Tensor], tuple[object, ...]]:
    position = list(positions)
    rest = tuple([operand[i] for i in position] if type(operand) is list else operand for operand in operands)
    return [leaves[i] for i in position], rest


def _is_twin(first: Tensor, second: Tensor, operands: tuple[object, ...]) -> bool:
    """Return True if applying the operation to one of two leaves also applies it to the other."""
    if is_same_view(first, second):
        return True
    # Without operands per leaf every element changes alike, so different shapes of one memory are twins too.
    return (
        not any(type(operand) is list for operand in operands)
        and first.dtype == second.dtype
        and _place(first) == _place(second)
        and all(_is_full(item) for item in (first, second))
    )


def _is_full(leaf: Tensor) -> bool:
    """Return True if a leaf is dense, and is not a conjugate or negative view."""
    leaf = unwrap_transforms(leaf)
    is_plain = leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_conj() or leaf.is_neg())
    return is_plain and is_dense(leaf)


def _place(leaf: Tensor) -> tuple[int, int, int]:
    """Return the id of a leaf's memory block, and its byte range. A sparse leaf, whose values may move, has its own id."""
    leaf = unwrap_transforms(leaf)
    if leaf.layout is torch.jagged:
        leaf = leaf.values()
    try:
        storage, size = _STORAGE(leaf), leaf.itemsize
        begin = int(leaf.storage_offset()) * size
    except RuntimeError:
        return id(leaf), 0, 1
    if leaf.is_nested:
        span = storage.nbytes() // size  # of strided layout: its components have strides of their own
    elif leaf.numel():
        span = sum((count - 1) * step for count, step in zip(leaf.shape, leaf.stride())) + 1
    else:
        span = 0
    try:
        address = storage.data_ptr()
    except RuntimeError:
        address = 0  # a fake tensor has no address
    block = leaf.get_device() if address else id(storage)
    return block, address + begin, address + begin + span * size


def _form(leaf: Tensor) -> tuple[object, ...]:
    level = batch_dim(leaf) if functorch_level() is not None else None
    leaf = unwrap_transforms(leaf)
    if leaf.layout is torch.jagged:
        return leaf.layout, leaf.dtype, level
    if leaf.layout is not torch.strided or leaf.is_nested:
        return (id(leaf),)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, level, leaf.is_conj(), leaf.is_neg()


def _is_disjoint(leaves: list[Tensor]) -> bool:
    """Return True if interleaved leaves, such as columns of a matrix, use disjoint byte ranges within each row."""
    if any(leaf.layout is not torch.strided or leaf.is_nested for leaf in map(unwrap_transforms, leaves)):
        return False
    plain = [unwrap_transforms(leaf) for leaf in leaves]
    steps = {step * plain[0].itemsize for step, count in zip(plain[0].stride(), plain[0].shape) if count > 1}
    return any(_has_lanes(plain, step) for step in steps)


def _has_lanes(leaves: list[Tensor], step: int) -> bool:
    lanes = []
    for leaf in leaves:
        size = leaf.itemsize
        strides = [(stride * size, count) for stride, count in zip(leaf.stride(), leaf.shape) if count > 1]
        if any(stride >= step and stride % step for stride, _ in strides):
            return False
        begin = leaf.storage_offset() * size % step
        end = begin + sum((count - 1) * stride for stride, count in strides if stride < step) + size
        if end > step:
            return False
        lanes.append((begin, end))
    lanes.sort()
    return all(end <= begin for (_, end), (begin, _) in pairwise(lanes))
