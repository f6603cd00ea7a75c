"""Copy values into leaves: checks before a write, and the fused copy."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._buffers import find_refusal
from .._collection import Core, show_path
from .._dtypes import ROWS
from .._foreach import PLAIN, Op, foreach, is_grad_needed, make_op
from .._indexing import BoundIndex, IndexPlan
from .._known_looks import KnownLooks
from .._nested_components import has_same_components
from .._storage_backends import get_backends
from .._torch_private import (
    find_refusing_transform,
    functorch_level,
    get_base,
    is_read_only_view,
    plain_results,
)
from ..errors import LockedError, StructureError
from .shared_memory import group_overlapping, is_dense, may_share_memory

Path = tuple[str, ...]

COPY = make_op("copy_", Tensor.copy_, "autograd")

#: Dtypes for which some versions of torch cannot write at an index tensor or mask.
RARELY_SCATTERED = frozenset(dtype for dtype, row in ROWS.items() if "scatter" in row.cannot)

#: Metadata of targets and values that passed can_fuse(), with grad mode on and off.
_FUSED, _FUSED_UNRECORDED = KnownLooks(), KnownLooks()

#: Metadata of values and targets that passed _can_scatter().
_SCATTERED = KnownLooks()

_REQUIRES_GRAD = attrgetter("requires_grad")

_NO_DISPATCH = Tensor.__torch_dispatch__

# Comparing all keys of two nodes at once is faster only above about this many entries.
_FEW = 8


def copy_all(targets: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> None:
    """Copy each value into its target; copy in list order if targets share memory.

    >>> target = torch.zeros(2)
    >>> copy_all([target], [torch.ones(2)])
    >>> target
    tensor([1., 1.])
    """
    foreach(COPY if is_order_free(targets) else Op(None, COPY.single), targets, values, non_blocking)


def is_order_free(targets: list[Tensor]) -> bool:
    """Return True if the order of the writes does not matter: the targets do not overlap, or are not on a GPU."""
    # The first leaf is enough: torch does not fuse a call with leaves of several devices.
    if not targets or not targets[0].is_cuda or torch.compiler.is_compiling():
        return True
    return not may_share_memory(targets) or not group_overlapping(targets)


def clone_overlapping(targets: list[Tensor], values: list[Any]) -> list[Any]:
    """Clone each value that shares its storage with another target: that target may be written before the value is read."""
    if torch.compiler.is_compiling():  # fake tensors have no addresses to compare
        return values
    written, read = {*get_storage_ids(targets)}, get_storage_ids(values)
    if written.isdisjoint(read):
        return values
    return [
        value.clone() if value is not target and place in written else value
        for target, value, place in zip(targets, values, read, strict=True)
    ]


def get_storage_ids(leaves: list[Tensor]) -> list[int]:
    """Return one id per leaf; leaves that may overlap have equal ids."""
    if PLAIN.issuperset(map(type, leaves)):
        try:
            return [leaf.untyped_storage().data_ptr() for leaf in leaves]
        except RuntimeError:  # a leaf without storage raises this, or its subclass NotImplementedError
            pass
    return [*map(_get_storage_id, leaves)]


def _get_storage_id(leaf: Tensor) -> int:
    if type(leaf).__torch_dispatch__ is _NO_DISPATCH:
        try:
            return leaf.untyped_storage().data_ptr()
        except RuntimeError:
            pass  # the leaf is under a functorch transform, or has no single storage
    return id(leaf)


def is_overlap_error(error: Exception) -> bool:
    """Return True if torch raised the error because the target partly overlaps an operand."""
    return "the input tensor and the written-to tensor" in str(error)


def is_overlapping(leaf: Tensor, other: Any) -> bool:
    """Return True if two tensors partly overlap, so that torch refuses to write to one while it reads the other."""
    if not isinstance(other, Tensor) or not leaf.numel() or not other.numel():
        return False
    if _get_storage_id(leaf) != _get_storage_id(other) or not (is_dense(leaf) and is_dense(other)):
        return False
    begin, end, first, last = *_get_byte_range(leaf), *_get_byte_range(other)
    if (begin, end) == (first, last):
        return leaf.stride() != other.stride()
    return begin < last and first < end


def _get_byte_range(leaf: Tensor) -> tuple[int, int]:
    begin = leaf.data_ptr()
    return begin, begin + leaf.numel() * leaf.element_size()


def check_fits(value: Tensor | Core, shape: torch.Size, path: Path) -> None:
    """Raise StructureError if a value does not broadcast to the shape of its entry."""
    right: torch.Size = value.shape  # type: ignore[union-attr]
    if right == shape:
        return
    ndim = len(right)
    if ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(right, shape[len(shape) - ndim :], strict=True)
    ):
        return
    raise StructureError(
        f"cannot write {show_path(path)} in place: it has shape {list(shape)} there, the value {list(right)}"
    )


def check_writable(target: Tensor, path: Path, value: Tensor | None = None) -> None:
    """Raise StructureError if torch cannot write into an entry, or cannot copy this value into it."""
    check_no_grad(target, path)
    check_not_expanded(target, path)
    check_store(target, path)
    check_transforms(target, path, value)
    if value is not None:
        check_content(target, path, value)


def check_content(target: Tensor, path: Path, value: Tensor) -> None:
    """Raise StructureError if torch cannot copy between the two layouts, or if the value is a meta or quantized tensor."""
    if value.layout is not target.layout or value.is_nested != target.is_nested:
        raise StructureError(
            f"cannot write {show_path(path)} in place: it is {_get_form(target)}, the value {_get_form(value)}; "
            "use set() to replace it"
        )
    if (value.is_meta and not target.is_meta) or (value.is_quantized and not target.is_quantized):
        what = "on the meta device, and has no content" if value.is_meta else "quantized"
        raise StructureError(f"cannot write {show_path(path)} in place: the value is {what}")


def check_copied(target: Tensor, path: Path, value: Tensor) -> None:
    """Raise StructureError if torch cannot copy this value into an entry, with broadcasting."""
    check_writable(target, path, value)
    if not target.is_nested:
        check_fits(value, target.shape, path)
        check_quantized_shape(value, target, path)
    # The shapes of nested tensors compare as unequal unless they share offsets, so compare components.
    elif not has_same_components(value, target):
        raise StructureError(
            f"cannot write {show_path(path)} in place: its components and those of the value have different shapes"
        )


def check_quantized_shape(value: Tensor, target: Tensor, path: Path) -> None:
    """Raise StructureError if an entry is quantized and a value has another shape, which torch does not broadcast."""
    if target.is_quantized and value.shape != target.shape:
        raise StructureError(
            f"cannot write {show_path(path)} in place: it is quantized and has shape {list(target.shape)} there, the "
            f"value {list(value.shape)}"
        )


def check_transforms(target: Tensor, path: Path, *operands: Any) -> None:
    """Raise StructureError if a transform of ``torch.func`` refuses to write operands into an entry."""
    if functorch_level() is None or (refusing := find_refusing_transform(target, operands)) is None:
        return
    why = "which maps over the value" if refusing == "vmap" else "which would not record the write"
    raise StructureError(
        f"cannot write {show_path(path)} in place: it is from outside of torch.func.{refusing}, {why}; pass the "
        "collection as an argument, or clone() it inside"
    )


def check_store(target: Tensor, path: Path) -> None:
    """Raise LockedError if an entry is in a store that refuses writes."""
    if type(target) not in PLAIN and (refusal := find_refusal(target)) is not None:
        raise LockedError(f"cannot write {show_path(path)} in place: {refusal}")


def _get_form(leaf: Tensor) -> str:
    return f"{'a nested tensor' if leaf.is_nested else 'a tensor'} of the layout {leaf.layout}"


def check_no_grad(target: Tensor, path: Path) -> None:
    """Raise StructureError if autograd forbids in-place writes to an entry."""
    if is_sealed(target):
        raise StructureError(
            f"cannot write {show_path(path)} in place: it was made under torch.inference_mode(); write under that, or "
            "clone() the collection first"
        )
    if target.requires_grad and torch.is_grad_enabled():
        base = get_base(target)
        if target.is_leaf or (base is not None and base.is_leaf):
            raise StructureError(
                f"cannot write {show_path(path)} in place: it is a {'leaf' if base is None else 'view of a leaf'} that "
                "requires grad; write under torch.no_grad(), or into td.data"
            )
        if is_read_only_view(target):
            raise StructureError(
                f"cannot write {show_path(path)} in place: it requires grad, and is a view of which autograd lets nobody "
                "write, as those of unbind() and split(); clone() the collection first"
            )


def is_sealed(leaf: Tensor) -> bool:
    """Return True if a leaf is an inference tensor and inference mode is off, so that torch refuses to write it."""
    if torch.compiler.is_compiling():
        return False
    return leaf.is_inference() and not torch.is_inference_mode_enabled()


def check_not_expanded(target: Tensor, path: Path) -> None:
    """Raise StructureError if an entry is expanded."""
    if is_expanded(target):
        raise StructureError(
            f"cannot write {show_path(path)} in place: it is expanded, so several of its elements are one in memory; "
            "clone() the collection first"
        )


def is_expanded(leaf: Tensor) -> bool:
    """Return True if a leaf has a dim of stride zero and size above one.

    >>> is_expanded(torch.zeros(1).expand(3)), is_expanded(torch.zeros(3))
    (True, False)
    """
    if leaf.layout is not torch.strided or leaf.is_contiguous() or leaf.is_nested:
        return False
    return any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True))


def try_copy_whole(
    target: Core, source: Any, non_blocking: bool, view: Callable[[Tensor], Tensor] | None = None
) -> bool:
    """Copy all leaves of a collection or dict in one fused call. Return False if the slow path must copy them.

    ``view`` maps each target leaf to the view that is written. If the result is False, nothing was written.
    """
    targets, values = _pair_leaves(target, source)
    if not targets:
        return False
    plain = False
    if view is not None:
        plain = is_all_contiguous(targets)
        # Indexing a sparse tensor returns a copy, so a write to it would be lost.
        if not (plain or all(leaf.layout is torch.strided for leaf in targets)):
            return False
        try:
            targets = list(map(view, targets))
        except RuntimeError:
            return False
    if not can_fuse(targets, values, plain):
        return False
    for item in () if type(source) is dict else get_backends(target):
        if item.write(target, source, targets, values, non_blocking):
            return True
    return try_copy_fused(targets, values, non_blocking)


def try_scatter_whole(target: Core, source: Any, plan: IndexPlan) -> bool:
    """Write all leaves at an index tensor or mask. Return False if the slow path must write them all."""
    targets, values = _pair_leaves(target, source)
    if torch.compiler.is_compiling() or functorch_level() is not None or not targets:
        return False
    if not _can_scatter(targets, values, plan):
        return False
    plan.check_range()
    place = BoundIndex(plan.index)
    try:
        for leaf, value in zip(targets, values):
            leaf[place.move_to_device_of(leaf)] = value
    except RuntimeError:
        return False  # an indexed write cannot change device or dtype; the slow path can, and writes every leaf again
    return True


def _can_scatter(targets: list[Tensor], values: list[Any], plan: IndexPlan) -> bool:
    """Return True if ``leaf[index] = value`` writes all leaves correctly, or raises so that the slow path takes over."""
    if not PLAIN.issuperset(map(type, values)):
        return False
    lead, n = plan.lead, plan.n
    both = [*values, *targets]
    # Leaves with this metadata passed before and share their batch dims, so checking the first shape is enough.
    if _SCATTERED.of(both) is not None and values[0].shape == (*lead, *targets[0].shape[n:]):
        return True
    if (
        not is_all_contiguous(targets)
        or any(map(_REQUIRES_GRAD, targets))
        or any(map(Tensor.is_inference, targets))
    ):
        return False
    try:
        looks = {(value.shape, leaf.shape, leaf.dtype) for value, leaf in zip(values, targets)}
        if any(right != (*lead, *left[n:]) or dtype in RARELY_SCATTERED for right, left, dtype in looks):
            return False
    except RuntimeError:
        return False  # reading the shape of a strided nested tensor raises
    if any(map(_is_odd, values)):
        return False
    _SCATTERED.add(both)
    return True


def _is_odd(value: Tensor) -> bool:
    """Return True if a value is not strided, on meta, or quantized: torch copies it only into a leaf of the same form."""
    return value.layout is not torch.strided or value.is_meta or value.is_quantized


def _pair_leaves(target: Core, source: Any) -> tuple[list[Tensor], list[Any]]:
    """Pair the leaves of ``target`` with the values of ``source``. Return empty lists if the slow path is needed."""
    targets: list[Tensor] = []
    values: list[Any] = []
    add, add_value = targets.append, values.append
    kind = type(target)
    if type(source) is not kind and type(source) is not dict and not isinstance(source, Core):
        return [], []
    todo: list[tuple[Any, Any]] = [(target, source)]
    # By hand: the row `update_` of benchmarks/ops.py.
    while todo:
        node, right = todo.pop()
        left = node._children()
        if type(right) is not dict:  # torch.compile returns its own proxy class for __class__, so use type()
            right = right._children()
        if type(left) is not dict or type(right) is not dict:
            return [], []
        right = right.copy()
        if (
            len(right) > _FEW
            and list(level := left.copy()) == list(right)
            and PLAIN.issuperset(map(type, level.values()))
        ):
            targets += level.values()
            values += right.values()
            continue
        for key, value in right.items():
            entry: Any = left.get(key)
            if type(entry) in PLAIN:
                add(entry)
                add_value(value)
            elif type(entry) is kind is type(value) or _is_node_pair(entry, value):
                todo.append((entry, value))
            elif type(value) in PLAIN and isinstance(entry, Tensor) and is_written_as_plain(entry):
                add(
                    Tensor.detach(entry)
                )  # a plain view: indexing a tensor subclass would also run the code of the subclass
                add_value(value)
            else:
                return [], []
    return targets, values


def is_written_as_plain(leaf: Tensor) -> bool:
    """Return True if writing to a leaf of a subclass, such as a memory-mapped one, is the same as to a plain one."""
    kind = type(leaf)
    return (
        not torch.compiler.is_compiling()
        and not leaf.requires_grad
        and kind.__torch_function__ is plain_results
        and kind.__torch_dispatch__ is _NO_DISPATCH
        and kind.__setitem__ is Tensor.__setitem__
        and kind.copy_ is Tensor.copy_
    )


def _is_node_pair(entry: Any, value: Any) -> bool:
    """Return True if ``entry`` is a node with entries, and ``value`` is such a node or a dict."""
    if not isinstance(entry, Core) or entry._is_value:
        return False
    return type(value) is dict or (isinstance(value, Core) and not value._is_value)


def can_fuse(targets: list[Tensor], values: list[Tensor], plain: bool = False) -> bool:
    """Return True if one fused call copies every value, or raises before it writes the first target.

    ``plain`` means that the targets are contiguous, or views of contiguous tensors.
    """
    if COPY.fused is None or functorch_level() is not None:
        return False
    if not is_order_free(targets):
        return False
    known = _FUSED if torch.is_grad_enabled() else _FUSED_UNRECORDED
    both = [*targets, *values]  # one cache lookup for targets and values
    if known.of(both) is not None:
        return True
    try:
        if not PLAIN.issuperset(map(type, values)) or not all(map(Tensor.is_same_size, targets, values)):
            return False
        # torch raises at the first such value, after it wrote the targets that precede it.
        if any(map(_is_odd, values)):
            return False
    except (RuntimeError, ValueError):
        return False  # is_same_size raises for a nested tensor and a dense one.
    # For inference tensors, torch raises only after it wrote all of them.
    if (
        not torch.compiler.is_compiling()
        and any(map(Tensor.is_inference, targets))
        and not torch.is_inference_mode_enabled()
    ):
        return False
    if is_grad_needed(targets, values):
        return False
    # A contiguous leaf is not expanded, and is_contiguous() costs a tenth of reading the strides.
    if not (plain or is_all_contiguous(targets) or not any(map(_is_expanded_or_sparse, targets))):
        return False
    known.add(both)
    return True


def is_all_contiguous(leaves: list[Tensor]) -> bool:
    """Return True if all leaves are contiguous; a sparse leaf is not."""
    try:
        return all(map(Tensor.is_contiguous, leaves))
    except RuntimeError:
        return False


def _is_expanded_or_sparse(leaf: Tensor) -> bool:
    return leaf.layout is not torch.strided or is_expanded(leaf)


def try_copy_fused(targets: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> bool:
    """Copy leaves that passed :func:`can_fuse` in one call. Return False if autograd refuses; nothing is written then."""
    try:
        COPY.fused(targets, values, non_blocking)  # type: ignore[misc]
    except RuntimeError:
        # torch checks all targets before it writes one; the slow path raises with the key.
        return False
    return True
