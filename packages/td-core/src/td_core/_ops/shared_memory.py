"""Leaves that are one memory, as tied weights are, and operations in place that change it once.

Such leaves are one tensor under two keys, views of one tensor (``.data``, slices that overlap), a level that stands twice,
or a member that is in a lazy stack twice. What an operation makes of each is computed of what was there before it, so each
element is changed once. Where two keys of one tensor have operands that differ there is no such result, and the operation
is refused before anything is written. Plain copies, as those of ``update_``, are written in the order of the keys.

In a graph of ``torch.compile``, which has no memory to look at, leaves are the same where they are the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._collection import Core
from .._foreach import PLAIN, Op, expand_operands
from .._torch_private import batch_dim, functorch_level, unwrap_transforms
from ..errors import StructureError

#: Operations that write what they are given, so that it makes no difference how often they are done.
WRITES_ANEW = frozenset({Tensor.copy_, Tensor.fill_, Tensor.masked_fill_, Tensor.zero_})

_STORAGE = Tensor.untyped_storage


def may_share_memory(leaves: list[Tensor], plain: bool = False) -> bool:
    """Tell whether some leaves are in one storage; also True where torch does not tell, as of nested tensors.

    ``plain`` says that the leaves are known to be of plain types.

    >>> rows = torch.zeros(2, 3)
    >>> may_share_memory([rows, torch.zeros(2)]), may_share_memory([rows[0], rows[1]])
    (False, True)
    """
    try:
        if plain or PLAIN.issuperset(map(type, leaves)):
            return len({*map(_STORAGE, leaves)}) < len(leaves)
        kinds: set[Any] = {*map(type, leaves)}
        if all(kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in kinds):
            # Mapped tensors have storages of their own in one memory.
            return min(len({*map(read, leaves)}) for read in (_STORAGE, Tensor.data_ptr)) < len(leaves)
    except RuntimeError:
        pass
    return len(leaves) > 1


def group_overlapping(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of leaves that have elements in common with others, in groups.

    >>> rows = torch.zeros(3, 4)
    >>> group_overlapping([rows[:2], rows[2:], rows[1:]]), group_overlapping([rows[:, :1], rows[:, 1:]])
    ([[0, 1, 2]], [])
    """
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


def is_same_view(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors have the same elements at the same places of one memory.

    >>> leaf = torch.zeros(2, 3)
    >>> is_same_view(leaf, leaf.data), is_same_view(leaf, leaf.view(3, 2)), is_same_view(leaf, leaf.clone())
    (True, False, False)
    """
    return first is second or (_place(first) == _place(second) and _form(first) == _form(second))


def get_memory_key(leaf: Tensor | Core, any_shape: bool = True) -> Any:
    """Return what is the same for two leaves that have all elements in common; of a collection what is so for itself.

    Without ``any_shape`` they are at the same places, too.

    >>> leaf = torch.zeros(2, 3)
    >>> get_memory_key(leaf) == get_memory_key(leaf.data.view(3, 2)), get_memory_key(leaf) == get_memory_key(leaf[0])
    (True, False)
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
    operands: tuple[Any, ...],
    show: Callable[[list[Tensor]], str],
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return what is left to be changed in place: each memory once; leaves that overlap in part are changed here.

    ``show`` names the keys of leaves.

    Raises:
        StructureError: leaves of one memory would become different; nothing was written.
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


def are_equal(first: Any, second: Any) -> bool:
    """Tell whether two operands are surely equal; NaN equals NaN.

    >>> are_equal(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    True
    """
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
            return True  # there is nothing to differ
        with torch.no_grad():
            return bool(((first == second) | ((first != first) & (second != second))).all())
    except RuntimeError:
        return False


def _change_apart(
    name: str, this: Op, leaves: list[Tensor], operands: tuple[Any, ...], show: Callable[[list[Tensor]], str]
) -> None:
    """Change leaves that overlap: what each becomes is computed before the first one is written."""
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
    positions: Iterable[int], leaves: list[Tensor], operands: tuple[Any, ...]
) -> tuple[list[Tensor], tuple[Any, ...]]:
    position = list(positions)
    rest = tuple([operand[i] for i in position] if type(operand) is list else operand for operand in operands)
    return [leaves[i] for i in position], rest


def _is_twin(first: Tensor, second: Tensor, operands: tuple[Any, ...]) -> bool:
    """Tell whether what changes one of two leaves changes the other, too."""
    if is_same_view(first, second):
        return True
    # Whatever their shapes are: every element is changed in one way.
    return (
        not any(type(operand) is list for operand in operands)
        and first.dtype == second.dtype
        and _place(first) == _place(second)
        and all(_is_full(item) for item in (first, second))
    )


def _is_full(leaf: Tensor) -> bool:
    """Tell whether a leaf has all elements from its first to its last in memory, and reads them as they are."""
    leaf = unwrap_transforms(leaf)
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_conj() or leaf.is_neg():
        return False
    _, begin, end = _place(leaf)
    return end - begin == leaf.numel() * leaf.itemsize


def _place(leaf: Tensor) -> tuple[int, int, int]:
    """Return which memory a leaf is in, and its first and last byte there.

    A sparse one is its own: what torch writes to it may take the place of its values.
    """
    leaf = unwrap_transforms(leaf)
    if leaf.layout is torch.jagged:
        leaf = leaf.values()
    try:
        storage, size = _STORAGE(leaf), leaf.itemsize
        begin = int(leaf.storage_offset()) * size
    except RuntimeError:
        return id(leaf), 0, 1
    span = (
        sum((count - 1) * step for count, step in zip(leaf.shape, leaf.stride())) + 1 if leaf.numel() else 0
    )
    try:
        address = storage.data_ptr()
    except RuntimeError:
        address = 0  # of a fake tensor
    block = leaf.get_device() if address else id(storage)
    return block, address + begin, address + begin + span * size


def _form(leaf: Tensor) -> tuple[Any, ...]:
    level = batch_dim(leaf) if functorch_level() is not None else None
    leaf = unwrap_transforms(leaf)
    if leaf.layout is torch.jagged:
        return leaf.layout, leaf.dtype, level
    if leaf.layout is not torch.strided or leaf.is_nested:
        return (id(leaf),)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, level, leaf.is_conj(), leaf.is_neg()


def _is_disjoint(leaves: list[Tensor]) -> bool:
    """Tell whether leaves of one memory surely have no element in common: they are columns beside each other.

    Each is looked at as pieces that begin every so many bytes, a step that some stride gives.
    """
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
