"""Run an operation in place on all leaves of a collection, such as ``mul_``: check all leaves, then write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._plans.plans import broadcast_shape
from .._torch.kernels import (
    PLAIN,
    Op,
    expand_operands,
    foreach,
    is_all_plain,
    is_grad_needed,
    is_grad_shared,
    order_subclasses_first,
)
from .._torch.private import functorch_level
from .._tree.node import Child, Core, concurrent_change_error
from .._tree.ragged import get_display_shape
from .._tree.shared_memory import WRITES_ANEW, change_distinct, may_share_memory
from .._tree.walks import has_entries, map_levels, walk
from ..errors import StructureError
from .check import (
    LEAF_ERRORS,
    add_path,
    are_writable,
    describe_leaf,
    find_expansion,
    find_path,
    find_problem,
    has_passed,
    have_same_sizes,
    is_all_contiguous,
    needs_grad,
    remember,
    rephrase_error,
    show_keys,
)
from .run import is_overlapping

#: What decides, besides the shape, whether torch can combine tensors.
_FORM = attrgetter("dtype", "device", "layout")
_SHAPE = attrgetter("shape")
_IS_NESTED = attrgetter("is_nested")


def write_leaves(name: str, node: Core, this: Op, leaves: list[Tensor], *operands: object) -> None:
    """Apply an operation in place to every leaf. Raise before the first write if it would fail on any leaf.

    If leaves or operands have several dtypes, each combination is first tried on empty tensors.
    """
    if not leaves:
        return
    if functorch_level() is not None:
        _check_leaves(node, _list_rows(leaves, operands))
    # torch.compile traces with fake tensors, so an error occurs before anything is written.
    compiling = torch.compiler.is_compiling()
    alike = not compiling and _are_alike(node, leaves, operands)
    if not (compiling or alike):
        this = _check(name, node, this, leaves, operands)
    leaves, operands = _change_shared(name, node, this, leaves, operands, alike)
    done = 0
    try:
        if alike or compiling or is_all_plain(leaves, *operands):
            foreach(this, leaves, *operands, plain=alike)
        else:
            rows = _list_rows(leaves, operands)
            for done in order_subclasses_first(leaves, *operands):
                this.single(*rows[done])
    except (RuntimeError, TypeError) as error:
        rows = _list_rows(leaves, operands)
        order = order_subclasses_first(leaves, *operands)
        if is_grad_needed(leaves, *operands) or not _finish_without_overlap(this, [rows[i] for i in order]):
            _raise_with_key(error, name, node, this, rows, done)


def _change_shared(
    name: str, node: Core, this: Op, leaves: list[Tensor], operands: tuple[object, ...], alike: bool
) -> tuple[list[Tensor], tuple[object, ...]]:
    """Change the leaves that share memory, each element once. Return the other leaves with their operands."""
    if this.single in WRITES_ANEW:
        return leaves, operands
    if not (torch.compiler.is_compiling() or may_share_memory(leaves, alike)):
        return leaves, operands
    return change_distinct(name, this, leaves, operands, partial(show_keys, node))


def _raise_with_key(
    error: Exception, name: str, node: Core, this: Op, rows: list[tuple[Any, ...]], done: int
) -> NoReturn:
    """Raise an error of torch with the key of the leaf that it is about; ``done``: the leaf that was written last."""
    _check_leaves(node, [row for row in rows if row[0].requires_grad])
    _try_rows(name, node, this, rows)
    if all(type(row[0]) in PLAIN for row in rows):
        raise error
    raise _name_leaf(error, name, node, rows[done][0]) from error


def _list_rows(leaves: list[Tensor], operands: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Return each leaf with its operands."""
    return list(zip(leaves, *expand_operands(leaves, operands), strict=True))


def _are_alike(node: Core, leaves: list[Tensor], operands: tuple[object, ...]) -> bool:
    """Return True if leaves and operands are writable, plain, of one dtype and device and, row by row, of one shape."""
    tensors = leaves.copy()
    for operand in operands:
        if type(operand) is list:
            if len(operand) != len(leaves):
                raise concurrent_change_error(node)
            tensors += operand
    if has_passed(node, "alike", tensors):
        return True
    if not (are_writable(leaves) and PLAIN.issuperset(map(type, tensors))):
        return False
    if len({*map(_FORM, tensors)}) != 1 or len({*map(id, leaves)}) != len(leaves):
        return False
    count = len(leaves)
    if needs_grad(tensors) or not have_same_sizes(leaves * (len(tensors) // count - 1), tensors[count:]):
        return False
    remember(node, "alike", tensors)
    return True


def _check(name: str, node: Core, this: Op, leaves: list[Tensor], operands: tuple[object, ...]) -> Op:
    """Raise if the operation would fail on any leaf. Return it without its fused form where that gives other results."""
    rows = _list_rows(leaves, operands)
    every = [leaves, *[operand for operand in operands if type(operand) is list]]
    # Skip checks that cannot fail: contiguous leaves are not expanded, and only a leaf of a class can be in a store.
    sealed = any(map(Tensor.is_inference, leaves)) and not torch.is_inference_mode_enabled()
    odd = not is_all_contiguous(leaves) or any(map(_IS_NESTED, leaves))
    if sealed or odd or needs_grad(leaves) or not PLAIN.issuperset(map(type, leaves)):
        _check_leaves(node, rows)
    for operand in every[1:]:
        _check_shapes(name, node, leaves, operand)
    mixed = any(len({*map(_FORM, item)}) > 1 for item in every)
    if odd or mixed:
        _try_rows(name, node, this, rows)
    # A GPU writes all leaves of a fused call at once, but the second write to a leaf must follow the first. Autograd of
    # fused kernels fails if integer operands are mixed with leaves that require grad.
    is_twice = len({*map(id, leaves)}) < len(leaves)
    return Op(None, this.single) if is_twice or (mixed and is_grad_shared(leaves, *operands)) else this


def _check_leaves(node: Core, rows: list[tuple[Any, ...]]) -> None:
    """Raise StructureError if a leaf cannot be written in place."""
    for leaf, *others in rows:
        if (problem := find_problem(leaf, None, *others) or find_expansion(leaf)) is not None:
            raise add_path(problem, find_path(node, leaf))


def _check_shapes(name: str, node: Core, leaves: list[Tensor], operand: list[Tensor]) -> None:
    """Raise an error that names the first leaf whose operand does not broadcast to its shape."""
    try:
        # Do not use Tensor.is_same_size: wrapper subclasses often do not implement it.
        if list(map(_SHAPE, leaves)) != list(map(_SHAPE, operand)):
            list(map(Tensor.expand_as, operand, leaves))
        return
    except (RuntimeError, ValueError):
        pass  # the loop below finds the leaf and raises with its key
    for leaf, other in zip(leaves, operand, strict=True):
        if leaf.is_nested and (leaf.layout is torch.strided or not other.is_nested):
            continue  # the operation is tried on these
        left, right = get_display_shape(leaf), get_display_shape(other)
        # The result of a dense and a nested tensor is nested, so it cannot be written to a dense leaf.
        if other.is_nested != leaf.is_nested or (left != right and broadcast_shape(left, right) != left):
            raise StructureError(
                f"cannot compute {name} in place: {describe_leaf(node, leaf)} has shape {list(left)} "
                f"and the operand {list(right)}"
            )


def _try_rows(name: str, node: Core, this: Op, rows: list[tuple[Any, ...]]) -> None:
    """Try an operation on substitutes for each leaf and its operands. If it fails, raise an error with the key of the leaf."""
    tried = set()
    for row in rows:
        tensors = [item for item in row if isinstance(item, Tensor)]
        form = tuple([(_FORM(item), item.ndim > 0) for item in tensors])
        # Empty tensors stand for dense ones; a sparse, nested or quantized tensor has no empty one that behaves alike.
        if any(map(_is_tried_whole, tensors)):
            target, *others = row[0].detach().clone(), *row[1:]
        elif form in tried:
            continue
        else:
            target, *others = map(_make_empty, row)
        tried.add(form)
        try:
            this.single(target, *others)
        except LEAF_ERRORS as error:
            if type(error) not in LEAF_ERRORS:
                raise
            raise _name_leaf(error, name, node, row[0]) from error


def _is_tried_whole(item: Tensor) -> bool:
    """Return True if an empty tensor cannot stand in for a tensor in a trial of the operation."""
    return item.layout is not torch.strided or item.is_nested or item.is_quantized


def _make_empty(item: object) -> object:
    """Return an empty tensor of the dtype and device of a tensor. Keep a number."""
    if not isinstance(item, Tensor):
        return item
    return torch.empty((0,) if item.ndim else (), dtype=item.dtype, device=item.device)


def _name_leaf(error: Exception, name: str, node: Core, leaf: Tensor) -> Exception:
    """Return the error of an in-place operation, rephrased to name the key path of the leaf."""
    return rephrase_error(error, f"cannot compute {name} in place: {describe_leaf(node, leaf)}: {error}")


def _finish_without_overlap(this: Op, rows: list[tuple[Any, ...]]) -> bool:
    """Resume an operation at the leaf where torch raised, since it overlaps its operand; False if there is no such leaf."""
    begun = False
    for leaf, *others in rows:
        shared = [is_overlapping(leaf, other) for other in others]
        begun = begun or any(shared)
        if begun:
            this.single(leaf, *[other.clone() if twice else other for other, twice in zip(others, shared)])
    return begun


def write_unrecorded(root: Core, write: Callable[[Any], object]) -> None:
    """Call ``write(root)``. If it raises and modules are below ``root``, write the data of their parameters instead."""
    copied: list[tuple[Core, Core]] = []
    try:
        write(root)
        return
    except StructureError:
        if not any(isinstance(node, nn.Module) for node in walk(root)):
            raise
        data = _replace_parameters(root, copied)
    write(data)
    # A write may replace a value node in its parent, which is a copy here.
    for node, copy in copied:
        for key, child in copy._children().items():
            if (
                not (isinstance(child, Tensor) or has_entries(child))
                and node._children().get(key) is not child
            ):
                node._set_child(key, child)


def _replace_parameters(root: Core, copied: list[tuple[Core, Core]]) -> object:
    """Return a shallow copy with detached leaves in place of those of modules; list each node with its copy."""

    def fill(node: Core, entries: dict[str, Child], inside: bool) -> Iterator[tuple[str, Core, bool]]:
        inside = inside or isinstance(node, nn.Module)
        for key, child in dict(node._children()).items():
            if has_entries(child):
                yield key, child, inside
            else:
                entries[key] = child.detach() if inside and isinstance(child, Tensor) else child

    def make(node: Core, entries: dict[str, Child]) -> Core:
        copy = node._with_children(entries)
        copied.append((node, copy))
        return copy

    return map_levels(root, fill, False, make, by_member=True)


def find_data(root: Core, leaf: Tensor) -> Tensor | None:
    """Return the data of a leaf if a module at or below ``root`` has it, else None."""
    modules = (node for node in walk(root) if isinstance(node, nn.Module))
    inside = any(own is leaf for node in modules if isinstance(node, Core) for own in node._leaves())
    return leaf.detach() if inside else None
