"""Functions of torch along one batch dim, with positions in it, and over the matrices in the feature dims of leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from .._plans.elements import align_dims, append_dims
from .._plans.plans import ShapePlan, WholePlan
from .._plans.reductions import scan_plan
from .._plans.steps import Shape
from .._tree.defaults import check_same_keys, show_path, type_error
from .._tree.node import Core, CoreT, identity
from .._tree.walks import zip_walk
from .._writes.check import LEAF_ERRORS, rephrase_error
from ..errors import BatchSizeError
from .joining import cat
from .operands import operand_leaves, raise_at_leaf, transform
from .reductions import parse_dim, reduce_pair
from .select import gather_elements

Dim = int | str
Leafwise = Callable[[Tensor, int, Tensor, Tensor], Tensor]


def apply_along(node: CoreT, name: str, dim: Dim, sizes: Shape | None = None, **options: object) -> CoreT:
    """Call a method of tensors along a batch dim, whose size ``sizes`` replaces."""
    return transform(name, node, _plan_along(node, name, dim, sizes, options))


def apply_pair_along(
    node: CoreT, name: str, dim: Dim, sizes: Shape | None = None, **options: object
) -> tuple[CoreT, CoreT]:
    """Call a method of tensors that returns values and indices along a batch dim, whose size ``sizes`` replaces."""
    plan = _plan_along(node, name, dim, sizes, options)
    pair: tuple[CoreT, CoreT] = reduce_pair(node, name, plan, None, getattr(torch.return_types, name))
    return pair


def _plan_along(
    node: Core, name: str, dim: Dim, sizes: Shape | None, options: dict[str, object]
) -> ShapePlan:
    place = parse_dim(node, name, dim)
    if options.get("dtype", name) is None:  # torch parses a position faster than a keyword
        return scan_plan(tuple(node.batch_size), place, partial(methodcaller, name), sizes)
    return scan_plan(
        tuple(node.batch_size), place, lambda position: methodcaller(name, dim=position, **options), sizes
    )


def diff_along(node: CoreT, n: int, dim: Dim, prepend: CoreT | None, append: CoreT | None) -> CoreT:
    """Compute differences of neighbours along a batch dim, see ``diff``."""
    place = parse_dim(node, "diff", dim)
    joined: CoreT = cat([item for item in (prepend, node, append) if item is not None], place)
    size = max(joined.batch_size[place] - n, 0)
    return apply_along(joined, "diff", place, (size,), n=n)


def combine_along(
    name: str, node: CoreT, dim: Dim, index: Tensor, source: Core, call: Leafwise, full: bool = False
) -> CoreT:
    """Compute ``call(leaf, dim, index, operand)`` with the operand of each leaf; a ``full`` index has all batch dims."""
    place, n = parse_dim(node, name, dim), len(node.batch_size)
    _check_index(name, index)
    if not isinstance(source, Core) or len(source.batch_size) != n or index.ndim != (n if full else 1):
        raise BatchSizeError(
            f"{name} takes an index with {f'{n} dims' if full else 'one dim'} and a collection with {n} batch dims; got "
            f"an index of shape {list(index.shape)} and {source!r}"
        )
    # A lazy stack has no leaves along its stack dim, so stack it.
    size, length = tuple(node.batch_size), tuple(source.batch_size)
    whole = node._transform(WholePlan(size, size, identity))
    other = source._transform(WholePlan(length, length, identity))
    leaves: list[Tensor] = []
    operands = operand_leaves(whole, other, leaves)

    def single(leaf: Tensor, operand: Tensor) -> Tensor:
        where = append_dims(index, leaf.ndim).expand(*index.shape, *leaf.shape[n:]) if full else index
        return call(leaf, place, where, operand)

    try:
        return whole._unflatten(list(map(single, leaves, operands)))
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, single, leaves, operands)


def _check_index(name: str, index: object) -> None:
    if not isinstance(index, Tensor):
        raise type_error(name, index, "a tensor as index")


def copy_along(node: CoreT, dim: Dim, index: Tensor, source: object) -> CoreT:
    """Copy the elements of a collection to positions along a batch dim, see ``index_copy``."""
    place = parse_dim(node, "index_copy", dim)
    _check_index("index_copy", index)
    size, count = node.batch_size[place], len(index)
    here, there = torch.arange(size + count, device=index.device).split([size, count])
    positions = here.index_copy(0, index, there)
    items: list[Any] = [node, source]
    result: CoreT = cat(items, place)._index((slice(None),) * place + (positions,))
    return result


def take_along(node: Core, indices: Tensor, dim: Dim | None) -> Any:
    """Take elements at positions along a batch dim, see ``take_along_dim``."""
    _check_index("take_along_dim", indices)
    if dim is None:
        return take_along(node.reshape(-1), indices.reshape(-1), 0)
    place = parse_dim(node, "take_along_dim", dim)
    size = [*node.batch_size]
    size[place] = -1
    return gather_elements(
        node, place, indices.expand(size) if indices.ndim == len(size) else indices, None, False
    )


def multiply_matrices(node: CoreT, other: object, reflected: bool = False) -> CoreT:
    """Multiply the matrix or vector in the feature dims of each leaf by an operand, see ``matmul``."""
    if not (isinstance(other, Core) or (isinstance(other, Tensor) and other.ndim in (1, 2))):
        raise TypeError(
            f"matmul takes a matrix or a vector for all leaves, or a collection; got {getattr(other, 'shape', other)!r}"
        )
    if isinstance(other, Core) and other.batch_size != node.batch_size:
        sizes = f"{list(node.batch_size)} and {list(other.batch_size)}"
        raise BatchSizeError(f"matmul: both collections have one batch size; got {sizes}")
    result = node._map(identity)
    for level, *beside in zip_walk(result, *([other] if isinstance(other, Core) else [])):
        n = len(level.batch_size)
        operands = beside[0]._children() if beside else dict.fromkeys(level._children(), other)
        check_same_keys(level._children(), operands, ())
        for key, child in dict(level._children()).items():
            operand = operands[key]
            if isinstance(child, Tensor) and isinstance(operand, Tensor):
                level._set_child(key, _multiply(key, child, operand, n, n * len(beside), reflected))
    return result


def _multiply(key: str, left: Tensor, right: Tensor, n_left: int, n_right: int, reflected: bool) -> Tensor:
    """Multiply matrices or vectors; the first dims, ``n_left`` and ``n_right`` of them, are those of a batch."""
    if reflected:
        left, right, n_left, n_right = right, left, n_right, n_left
    features, shapes = (
        (left.ndim - n_left, right.ndim - n_right),
        f"{list(left.shape)} and {list(right.shape)}",
    )
    left = left.unsqueeze(-2) if features[0] == 1 else left
    right = right.unsqueeze(-1) if features[1] == 1 else right
    if n_left == n_right:
        ndim = max(left.ndim, right.ndim)
        left, right = align_dims(left, ndim, n_left), align_dims(right, ndim, n_right)
    try:
        if 0 in features:
            raise ValueError("a matrix or a vector has one feature dim at least")
        result = torch.matmul(left, right)
    except LEAF_ERRORS as error:
        raise rephrase_error(error, f"matmul: {show_path((key,))} of shapes {shapes}: {error}") from error
    result = result.squeeze(-1) if features[1] == 1 else result
    return result.squeeze(-2 + (features[1] == 1)) if features[0] == 1 else result
