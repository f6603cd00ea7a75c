"""Combine the leaves of a collection with operands, and name the key of a leaf on which an operation fails.

An operand is a number, a tensor that broadcasts against the *batch dims* (not the trailing dims of each leaf), or a
collection of the same structure whose batch size broadcasts. If a leaf of the operand has as many dims as the matching
leaf and broadcasts to it, its leading dims count as batch dims, whatever the operand's batch size is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._arrays import as_tensor
from .._collection import Core, Walked, check_keys, check_same_keys, concurrent_change_error, show_path
from .._dtypes import keep_scalar
from .._foreach import (
    PLAIN,
    Op,
    expand_operands,
    foreach,
    is_all_plain,
    is_grad_needed,
    is_grad_shared,
    order_subclasses_first,
)
from .._known_looks import KnownLooks
from .._plans import ShapePlan, broadcast_shape
from .._ragged import get_display_shape
from .._torch_private import functorch_level
from .._walks import has_entries, list_holders, map_levels, visit, zip_walk
from ..errors import BatchSizeError, LockedError, StructureError
from .broadcasting import align_pairs, expand_to_match
from .leaf_writes import (
    check_no_grad,
    check_transforms,
    check_writable,
    clone_overlapping,
    copy_all,
    is_all_contiguous,
    is_overlap_error,
    is_overlapping,
)
from .shared_memory import WRITES_ANEW, change_distinct, may_share_memory

CoreT = TypeVar("CoreT", bound=Core)
Operand = Any  # a collection, tensor, NumPy array or number

NUMBERS = (int, float, complex, np.generic, torch.SymInt, torch.SymFloat, torch.SymBool)

#: Errors that torch raises for an unsupported leaf; they are raised again with the key in the message.
LEAF_ERRORS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError)

_SHAPE = attrgetter("shape")
#: What decides, besides the shape, whether torch can combine tensors.
_FORM = attrgetter("dtype", "device", "layout")

#: Metadata of leaves of one dtype that passed the checks of an in-place write.
_WRITABLE = KnownLooks()


def combine(
    node: CoreT, name: str, this: Op, other: Operand, default: Any = None, foreign: list[Core] | None = None
) -> CoreT:
    """Apply a binary operation to ``node`` and an operand. Return NotImplemented if ``other`` cannot be an operand.

    ``foreign`` is passed to :meth:`Core._zip_leaves`, which appends the nodes that may hold values.
    """
    leaves: list[Tensor] = []
    levels: Walked = None
    operand = other
    # A type check is several times faster than isinstance with an abstract class.
    if type(other) is type(node) or not isinstance(other, NUMBERS):
        if type(other) is type(node) or isinstance(other, Core):
            if default is not None:
                fill = _make_filler(default)
                node, other = reorder_like(node, other, fill, True), reorder_like(other, node, fill, True)
            size = None
            if other.batch_size != node.batch_size:
                size = _broadcast(name, other.batch_size, node.batch_size)
                node, other = expand_to_match(node, other, size), expand_to_match(other, node, size)
            operand = []
            levels = node._zip_leaves(other, leaves, operand, foreign)
            if size is not None:
                leaves, operand = align_pairs(node, other, leaves, operand, len(size))
        else:
            if isinstance(other, np.ndarray):
                other = _move_beside(node, other)
            elif not isinstance(other, Tensor):
                return NotImplemented  # type: ignore[no-any-return]
            if other.ndim and other.shape != node.batch_size:
                size = _broadcast(name, other.shape, node.batch_size)
                if size != node.batch_size:
                    node = node.expand(size)  # type: ignore[attr-defined]
            operand = []
            if other.ndim:  # _beside_each() handles a 0-d tensor, see below
                node._broadcast_to_leaves(other, operand)
    elif isinstance(other, np.generic):
        operand = other.item()
    # Fused kernels need no type check, unless the operand is a tensor, whose views can be of a subclass.
    walked = len(leaves) > 0 or type(operand) is not list
    if not leaves:
        levels = node._flatten_leaves(leaves)
    if type(operand) is list and not operand:
        operand = _beside_each(node, other, leaves, levels)
    try:
        plain = walked and type(levels) is dict
        return node._unflatten(foreach(this, leaves, operand, plain=plain), levels)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, leaves, operand)


def combine_inplace(node: CoreT, name: str, this: Op, other: Operand) -> CoreT:
    """Apply a binary operation in place. Return NotImplemented if ``other`` cannot be an operand."""
    leaves: list[Tensor] = []
    if type(other) is type(node) and other.batch_size == node.batch_size:
        operand: Any = _operand_leaves(node, other, leaves)
    else:
        operand = operand_inplace(node, name, other)
        if operand is NotImplemented:
            return operand  # type: ignore[no-any-return]
        node._flatten_leaves(leaves)
    write_leaves(name, node, this, leaves, operand)
    return node


def operand_inplace(node: Any, name: str, other: Operand) -> Any:
    """Convert an operand to a number or to one tensor per leaf. Raise if it does not broadcast to the batch size."""
    if isinstance(other, np.generic):
        return other.item()
    if isinstance(other, NUMBERS):
        return other
    leaves: list[Tensor]
    operand: list[Tensor] = []
    if isinstance(other, np.ndarray):
        other = _move_beside(node, other)
    is_tensor = isinstance(other, Tensor)
    if not is_tensor and not isinstance(other, Core):
        return NotImplemented
    size, shape = node.batch_size, other.shape if is_tensor else other.batch_size
    if shape != size and len(shape) + (not is_tensor):
        if _broadcast(name, shape, size) != size:
            raise BatchSizeError(
                f"cannot compute {name} in place: an operand of batch size {list(shape)} does not fit into {list(size)}"
            )
        if not is_tensor:
            leaves = []
            other = expand_to_match(other, node, size)
            operand = _operand_leaves(node, other, leaves)
            return align_pairs(node, other, leaves, operand, len(size))[1]
    if is_tensor and not shape:
        leaves = []
        levels = node._flatten_leaves(leaves)
        operand = _beside_each(node, other, leaves, levels)
    elif is_tensor:
        node._broadcast_to_leaves(other, operand)
    else:
        operand = _operand_leaves(node, other, [])
    return operand


def _beside_each(node: Any, scalar: Tensor, leaves: list[Tensor], levels: Walked) -> list[Tensor]:
    """Convert a 0-d tensor to one operand per leaf."""
    if type(levels) is dict or type(levels) is list:
        return [scalar] * len(leaves)
    operand: list[Tensor] = []  # 0-d leaves of a lazy stack's members need a cast scalar, see as_scalar()
    node._broadcast_to_leaves(scalar, operand, keep_scalar)
    return operand


def _operand_leaves(node: Core, other: Core, leaves: list[Tensor]) -> list[Tensor]:
    """Append the leaves of ``node`` to ``leaves``, and return the matching leaves of ``other``, cloned on overlap."""
    operand: list[Tensor] = []
    foreign: list[Core] = []
    node._zip_leaves(other, leaves, operand, foreign)
    # Other kinds, such as lazy stacks, may be combined with their own members in another order, so clone operands.
    return clone_overlapping(leaves, operand) if foreign else operand


def write_leaves(name: str, node: Core, this: Op, leaves: list[Tensor], *operands: Any) -> None:
    """Apply an operation in place to every leaf. Raise before the first write if it would fail on any leaf.

    If leaves or operands have several dtypes, each combination is first tried on empty tensors.
    """
    known = False
    if functorch_level() is not None:
        for i, leaf in enumerate(leaves):
            check_transforms(leaf, _path_of(node, leaf), *_get_operands_at(operands, i))
    # torch.compile traces with fake tensors, so an error occurs before anything is written.
    if not torch.compiler.is_compiling():
        same = _WRITABLE.of(leaves)
        known = same is not None
        mixed = same is None and not _check_writable(name, node, this, leaves, operands)
        if same is None and len(set(map(id, leaves))) < len(leaves):
            # A GPU writes all leaves of a fused call at once, but the second write to a leaf must follow the first.
            this = Op(None, this.single)
        for operand in operands:
            if type(operand) is not list:
                continue
            if len(operand) != len(leaves):
                raise concurrent_change_error(node)
            if same is None or not same(operand):
                known = False
                _check_shapes(name, node, this, leaves, operands, operand)
                mixed = mixed or len({*map(_FORM, operand)}) > 1
        if mixed:
            _check_dtypes(name, node, this, leaves, operands)
            # Autograd of fused kernels fails if integer operands are mixed with leaves that require grad.
            if is_grad_shared(leaves, *operands):
                this = Op(None, this.single)
    if this.single not in WRITES_ANEW and (
        (not known and torch.compiler.is_compiling()) or may_share_memory(leaves, known)
    ):
        leaves, operands = change_distinct(name, this, leaves, operands, partial(_show_keys, node))
    done = 0
    try:
        if known or torch.compiler.is_compiling() or is_all_plain(leaves, *operands):
            foreach(this, leaves, *operands, plain=known)
        else:
            rows = list(zip(leaves, *expand_operands(leaves, operands), strict=True))
            for done in order_subclasses_first(leaves, *operands):
                this.single(*rows[done])
    except (RuntimeError, TypeError) as error:
        if is_overlap_error(error) and not is_grad_needed(leaves, *operands):
            return _finish_without_overlap(this, leaves, operands)
        for leaf in leaves:
            if leaf.requires_grad:
                check_no_grad(leaf, _path_of(node, leaf))
        _check_dtypes(name, node, this, leaves, operands)
        if PLAIN.issuperset(map(type, leaves)):
            raise
        message = f"cannot compute {name} in place: {describe_leaf(node, leaves[done])}: {error}"
        raise rephrase_error(error, message) from error


def _finish_without_overlap(this: Op, leaves: list[Tensor], operands: tuple[Any, ...]) -> None:
    """Resume an in-place operation at the leaf where torch raised, since it overlaps its operand; clone such operands."""
    rows = list(zip(leaves, *expand_operands(leaves, operands), strict=True))
    begun = False
    for i in order_subclasses_first(leaves, *operands):
        leaf, *others = rows[i]
        shared = [is_overlapping(leaf, other) for other in others]
        begun = begun or any(shared)
        if begun:
            this.single(leaf, *[other.clone() if twice else other for other, twice in zip(others, shared)])


def _check_writable(name: str, node: Core, this: Op, leaves: list[Tensor], operands: tuple[Any, ...]) -> bool:
    """Raise StructureError if a leaf cannot be written in place. Return True if all leaves have one dtype and device."""
    item = len({*map(_FORM, leaves)}) < 2
    # Skip checks that cannot fail: contiguous leaves are not expanded.
    needs_grad = any([leaf.requires_grad for leaf in leaves])  # noqa: C419
    sealed = any(map(Tensor.is_inference, leaves)) and not torch.is_inference_mode_enabled()
    odd = not is_all_contiguous(leaves) or any(leaf.is_nested for leaf in leaves)
    # Only a leaf of a class can be in a store, and fused kernels check autograd before they write.
    special = not PLAIN.issuperset(map(type, leaves))
    if sealed or odd or special or (needs_grad and torch.is_grad_enabled()):
        for i, leaf in enumerate(leaves):
            try:
                check_writable(leaf, ())
            except (StructureError, LockedError):
                check_writable(leaf, _path_of(node, leaf))
            if leaf.layout is not torch.strided or leaf.is_nested:
                _try_leaf(name, node, this, leaf, leaf.detach().clone(), _get_operands_at(operands, i))
    elif item and not needs_grad:
        _WRITABLE.add(leaves)
    return item


def _check_shapes(
    name: str, node: Core, this: Op, leaves: list[Tensor], operands: tuple[Any, ...], operand: list[Tensor]
) -> None:
    try:
        # Do not use Tensor.is_same_size: wrapper subclasses often do not implement it.
        if list(map(_SHAPE, leaves)) != list(map(_SHAPE, operand)):
            list(map(Tensor.expand_as, operand, leaves))
        return
    except (RuntimeError, ValueError):
        pass  # the loop below finds the leaf and raises with its key
    for i, (leaf, other) in enumerate(zip(leaves, operand, strict=True)):
        left, right = get_display_shape(leaf), get_display_shape(other)
        if leaf.is_nested and (leaf.layout is torch.strided or not other.is_nested):
            _try_leaf(name, node, this, leaf, leaf.detach().clone(), _get_operands_at(operands, i))
        # The result of a dense and a nested tensor is nested, so it cannot be written to a dense leaf.
        elif other.is_nested != leaf.is_nested or (left != right and broadcast_shape(left, right) != left):
            raise StructureError(
                f"cannot compute {name} in place: {describe_leaf(node, leaf)} has shape {list(left)} "
                f"and the operand {list(right)}"
            )


def _check_dtypes(name: str, node: Core, this: Op, leaves: list[Tensor], operands: tuple[Any, ...]) -> None:
    tried = set()
    for i, leaf in enumerate(leaves):
        others = _get_operands_at(operands, i)
        row = [leaf, *[other for other in others if isinstance(other, Tensor)]]
        combination = tuple([(_FORM(item), item.ndim > 0) for item in row])
        if combination in tried:
            continue
        tried.add(combination)
        # Empty tensors stand for dense ones; a sparse or quantized tensor has no empty one that behaves alike.
        whole = any(item.layout is not torch.strided or item.is_quantized for item in row)
        target, *trial = [_make_trial(item, whole) for item in [leaf, *others]]
        _try_leaf(name, node, this, leaf, target, trial)


def _make_trial(item: Any, whole: bool) -> Any:
    """Return a tensor to try an operation on: an empty one of the same form, or a copy if ``whole``. Keep a number."""
    if not isinstance(item, Tensor):
        return item
    if whole:
        return item.detach().clone()
    return torch.empty((0,) if item.ndim else (), dtype=item.dtype, device=item.device)


def _get_operands_at(operands: tuple[Any, ...], i: int) -> list[Any]:
    return [operand[i] if type(operand) is list else operand for operand in operands]


def _try_leaf(name: str, node: Core, this: Op, leaf: Tensor, target: Tensor, others: list[Any]) -> None:
    """Try an operation on ``target``, a substitute for ``leaf``. If it fails, raise an error with the key of ``leaf``."""
    try:
        this.single(target, *others)
    except LEAF_ERRORS as error:
        if type(error) not in LEAF_ERRORS:
            raise
        raise type(error)(f"cannot compute {name} in place: {describe_leaf(node, leaf)}: {error}") from error


def write_result(out: Any, batch_size: torch.Size, result: Any, *, inplace: bool = True) -> Any:
    """Write a result into ``out`` and return ``out``: into its entries if ``inplace`` or if it is locked, else replace them."""
    if not isinstance(out, Core):
        raise TypeError(f"out= of collections is a collection; got a {type(out).__name__}")
    if out.batch_size != batch_size:
        raise BatchSizeError(f"out= has batch size {list(out.batch_size)}, the result has {list(batch_size)}")
    return out.update(result, inplace=inplace or out.is_locked)  # type: ignore[attr-defined]


def check_operand(result: CoreT, name: str, other: Any) -> CoreT:
    """Return ``result``, or raise TypeError if it is NotImplemented."""
    if result is NotImplemented:
        raise TypeError(
            f"{name}() takes a number, a tensor or a collection; got {type(other).__name__}: {other!r}"
        )
    return result


def _move_beside(node: Any, array: np.ndarray[Any, Any]) -> Tensor:
    """Convert an array to a tensor on the device of a collection, not on torch's default device."""
    device = node.device
    if device is None:
        device = next((leaf.device for leaf in node._leaves()), None)
    return as_tensor(array, device=device)


def _broadcast(name: str, shape: torch.Size, size: torch.Size) -> tuple[int, ...]:
    result = broadcast_shape(shape, size)
    if result is None:
        raise BatchSizeError(
            f"cannot compute {name}: an operand of shape {list(shape)} does not broadcast against the batch "
            f"size {list(size)}"
        )
    return result


def describe_leaf(node: Any, leaf: Tensor) -> str:
    """Return the key path of a leaf as text for messages."""
    path = _path_of(node, leaf)
    return show_path(path) if path else "a leaf"


def _path_of(node: Any, leaf: Tensor) -> tuple[str, ...]:
    """Return the first key path of a leaf, or () if it is not in the tree."""
    return next(iter(_paths_of(node, leaf)), ())


def _show_keys(node: Any, leaves: list[Tensor]) -> str:
    return " and ".join(dict.fromkeys(show_path(path) for leaf in leaves for path in _paths_of(node, leaf)))


def _paths_of(node: Any, leaf: Tensor) -> list[tuple[str, ...]]:
    """Return the key paths of a leaf. In a lazy stack, search the members, which hold the leaves."""
    paths: list[tuple[str, ...]] = []

    def collect(level: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
        for holder in list_holders(level):
            children = dict(holder._children())
            if not children and any(own is leaf for own in holder._leaves()):
                paths.append(path)
            for key, child in children.items():
                if child is leaf:
                    paths.append((*path, key))
                elif isinstance(child, Core):
                    yield child, (*path, key)

    visit(collect, node, ())
    return paths


def rephrase_error(error: Exception, message: str) -> Exception:
    """Return an error of the same type with a new message, or the error itself if its type may need other arguments."""
    return type(error)(message) if type(error) in (*LEAF_ERRORS, LockedError) else error


def copy_leaves(
    targets: list[Tensor], values: list[Tensor], name: Callable[[int], str], non_blocking: bool = False
) -> None:
    """Copy each value into its target. ``name`` maps the position of a target to its key, for messages."""
    order = order_subclasses_first(targets, values)
    if type(order) is list:
        targets, values = [targets[i] for i in order], [values[i] for i in order]
    try:
        copy_all(targets, values, non_blocking)
    except (RuntimeError, TypeError) as error:
        for i, target, value in zip(order, targets, values, strict=True):
            try:
                # Copying twice is harmless. torch refuses a value that partly overlaps its target, so clone it.
                target.copy_(value.clone() if is_overlapping(target, value) else value, non_blocking)
            except (RuntimeError, TypeError) as again:
                raise rephrase_error(again, f"cannot write {name(i)} in place: {again}") from error
        if not is_overlap_error(error):
            raise


def raise_at_leaf(
    error: Exception, name: str, node: Core, single: Callable[..., Any], leaves: list[Tensor], *operands: Any
) -> NoReturn:
    """Run an operation leaf by leaf, and raise its error with the key of the leaf that fails."""
    try:
        if any(type(operand) is list and len(operand) != len(leaves) for operand in operands):
            raise concurrent_change_error(node) from error
        for i, leaf in enumerate(leaves):
            others = _get_operands_at(operands, i)
            try:
                single(leaf, *others)
            except LEAF_ERRORS as again:
                shapes = [
                    list(get_display_shape(item)) for item in (leaf, *others) if isinstance(item, Tensor)
                ]
                message = f"cannot compute {name}: {describe_leaf(node, leaf)}: {again} (shapes {shapes})"
                raise rephrase_error(again, message) from error
        raise error
    finally:
        # The traceback of the raised error refers to this frame: break the reference cycle.
        del error


def run_each_leaf(name: str, node: CoreT, single: Callable[[Tensor], Tensor]) -> CoreT:
    """Apply ``single`` to each leaf. An error names the key of the leaf that fails."""
    try:
        return node._map(single)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, single, node._leaves())


def raise_at_entry(error: Exception, name: str, node: Any, leaf: Callable[[Tensor], Any]) -> NoReturn:
    """Run a function entry by entry, and raise its error with the key of the entry that fails."""
    try:
        if type(error) in LEAF_ERRORS:
            for key, entry in node.items(True, True):
                try:
                    if isinstance(entry, Tensor):
                        leaf(entry)
                except LEAF_ERRORS as again:
                    message = f"cannot compute {name}: key {key!r}: {again} (shape {list(get_display_shape(entry))})"
                    raise rephrase_error(again, message) from error
        raise error
    finally:
        del error


def transform(name: str, node: CoreT, plan: ShapePlan) -> CoreT:
    """Apply a shape plan to a collection. An error names the key of the entry that fails."""
    try:
        return node._transform(plan)
    except LEAF_ERRORS as error:
        raise_at_entry(error, name, node, plan.leaf)


def _make_filler(default: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a function that builds the value of a missing entry, or None if such entries are dropped."""
    if not isinstance(default, str):
        filler = default if isinstance(default, Tensor) else torch.as_tensor(default, device="cpu")
        return lambda leaf: filler
    if default != "intersection":
        raise TypeError(f"default= is a number, a tensor, 'intersection' or None; got {default!r}")
    return None


def reorder_like(
    node: Any, ref: Any, fill: Callable[[Tensor], Tensor] | None, keeps_kinds: bool = False
) -> Any:
    """Copy ``node``, with ``fill(entry)`` for each entry that only ``ref`` has; without ``fill``, keep the common entries.

    ``keeps_kinds``: raise if a node's kind does not accept a new key; if False, such a node becomes a plain one.
    """
    if node.batch_size != ref.batch_size:
        return _reorder_level(node, ref, fill, keeps_kinds)
    # Go through the members of either tree: a lazy stack does not list entries that some members lack.
    return node._map_members(
        lambda own, given: given._map_members(
            lambda part, holder: _reorder_level(holder, part, fill, keeps_kinds), own
        ),
        ref,
    )


def _reorder_level(node: Any, ref: Any, fill: Callable[[Tensor], Tensor] | None, keeps_kinds: bool) -> Any:
    def fill_level(own: Core, out: dict[str, Any], given_node: Any) -> Iterator[Any]:
        a, b = own._children(), given_node._children()
        for key in list(a):
            child, other = a[key], b.get(key)
            if other is None:
                if fill is not None:
                    out[key] = child
            elif isinstance(other, Tensor) or not has_entries(child):
                out[key] = child
            elif any(node._members_and_dim() for node in (child, other)):
                out[key] = reorder_like(child, other, fill, keeps_kinds)
            else:
                yield key, child, other
        if fill is not None:
            more = {key: b[key] for key in list(b) if key not in a}
            if keeps_kinds:
                check_keys(own, more)
            for key, child in more.items():
                out[key] = fill(child) if isinstance(child, Tensor) else child._map(fill)

    return map_levels(node, fill_level, ref)


def compare_values(result: Any, first: Any, second: Any, single: Callable[..., Any]) -> Any:
    """Compare the value nodes of two collections, and add the bools to ``result``, which holds those of the leaves."""
    size = result.batch_size
    first, second = [item if item.batch_size == size else item.expand(size) for item in (first, second)]
    compared = first._compare(second, single)
    if compared is not None:
        return compared
    for left, right, target in zip_walk(first, second, result):
        check_same_keys(left._children(), right._children(), ())
        for key, a in dict(left._children()).items():
            if isinstance(a, Tensor):
                continue
            b = right._get_child(key)
            if isinstance(b, Tensor):
                raise concurrent_change_error(right)
            compared = a._compare(b, single)
            if compared is not None:
                target._set_child(key, compared)
    return result
