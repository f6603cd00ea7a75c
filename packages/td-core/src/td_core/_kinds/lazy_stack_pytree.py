"""Registration of lazy stacks as torch pytree nodes.

vmap removes a dim of every leaf, so the leaves must include the stack dim. If the members have equal keys, shapes and
dtypes, the only child is their dense stack; otherwise the members themselves are the children. Inside grad and vjp,
unflattening returns the dense stack: these transforms differentiate with respect to its leaves, not to slices of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.private import exit_transforms, functorch_level, get_mapped_dim, is_innermost_transform
from .._transforms.mapped_dims import is_mapping, note_whole
from .._transforms.pytree import leaves_below, register, register_with_subclasses
from .._tree.defaults import get_tree_children
from .._tree.node import Core
from .._tree.walks import expand
from ..errors import StructureError
from .lazy_stack import LazyStackedTensorDict
from .lazy_stack_writes import unbind_members


class Whole(NamedTuple):
    """Context of a lazy stack that was flattened into its dense stack."""

    behind: int  # number of batch dims from the stack dim on
    name: str | None
    ndim: int
    depth: int
    hooks: tuple[object, Any] = (None, None)


class Members(NamedTuple):
    """Context of a lazy stack that was flattened into its members."""

    dim: int
    name: str | None
    size: int
    ndims: tuple[int, ...]
    hooks: tuple[Any, Any] = (None, None)


def _flatten(stack: LazyStackedTensorDict) -> tuple[list[Any], Whole | Members]:
    leaves = leaves_below([stack])
    name, hooks = stack._stack_dim_name, (stack._hook_in, stack._hook_out)
    if all(isinstance(leaf, Tensor) for leaf in leaves) and _can_stack(stack._members):
        try:
            # A transform rejects arguments that were created inside it, so stack outside.
            with exit_transforms(leaves):
                whole = stack._stack_members()
        except StructureError:
            pass
        else:
            if _has_same_dtypes(whole, stack._members, leaves):
                ndim = len(whole.batch_size)
                return [whole], Whole(ndim - stack._stack_dim, name, ndim, _measure_depth(whole), hooks)
    ndims = tuple(getattr(leaf, "ndim", 0) for leaf in leaves)
    return list(stack._members), Members(stack._stack_dim, name, len(stack._members), ndims, hooks)


def _has_same_dtypes(whole: object, members: list[Core], leaves: list[Tensor]) -> bool:
    """Return True if stacking kept all dtypes: each member has as many leaves of every dtype as the stack."""
    kinds = {leaf.dtype for leaf in leaves}
    if len(kinds) <= 1:
        return True
    stacked, *item = [[leaf.dtype for leaf in leaves_below([node])] for node in (whole, *members)]
    return all(dtypes.count(kind) == stacked.count(kind) for dtypes in item for kind in kinds)


def _can_stack(members: list[Core]) -> bool:
    """Return True if all members can have equal shapes. A failed stack would remain in the graph."""
    if not torch.compiler.is_compiling():
        return True
    shapes = [[leaf.shape for leaf in leaves_below([member])] for member in members]
    return all(shape == shapes[0] for shape in shapes)


def _measure_depth(node: Core) -> int:
    """Return the depth of the first leaf, or 0 without leaves."""

    def below(item: tuple[object, int]) -> list[tuple[Any, int]]:
        return [(child, item[1] + 1) for child in reversed(get_tree_children(item[0]))]

    return next((depth for item, depth in expand([(node, 0)], below) if not isinstance(item, Core)), 0)


def _unflatten_whole(cls: type[Core], items: list[Any], context: Whole) -> object:
    """Split the one collection of a stack that was flattened as such, unless a transform has changed its stack dim."""
    (whole,) = items
    behind, name, ndim, depth, _ = context
    result = len(whole.batch_size) if isinstance(whole, Core) else 0
    leaves = [leaf for leaf in leaves_below(items) if isinstance(leaf, Tensor)]
    mapped = get_mapped_dim(leaves[0]) if result == ndim - 1 and leaves and is_mapping() else None
    if mapped is not None and mapped >= ndim - behind:
        # vmap took the stack dim, or one behind it, so that the stack dim counts from the front.
        if mapped == ndim - behind:
            note_whole(whole, lambda dense, dim: _split(cls, dense, dim, context))
            return whole
        behind -= 1
    # In a Jacobian, collections replace leaves and add their own dims, so the result is not split along the stack dim.
    if behind > result or _measure_depth(whole) > depth or is_innermost_transform(leaves):
        return whole
    return _split(cls, whole, result - behind, context, name if result == ndim else None)


def _unflatten(cls: Any, children: Any, context: Whole | Members) -> object:
    items = list(children)
    if isinstance(context, Whole):
        return _unflatten_whole(cls, items, context)
    dim, name, _, ndims, _ = context
    leaves = leaves_below(items) if functorch_level() is not None else []
    if any(isinstance(leaf, Tensor) and leaf.ndim != ndim for leaf, ndim in zip(leaves, ndims)):
        raise StructureError(
            "torch.vmap, also inside jacrev, jacfwd and hessian, cannot take a dim from a lazy stack whose members "
            "differ in keys, shapes or dtypes, nor add one: pad or cast them first, see to_padded_tensor() and to(), "
            "or map over each member"
        )
    stack = cls._of(items, dim)
    stack._stack_dim_name = name
    stack._hook_in, stack._hook_out = context.hooks
    return stack


def _split(cls: Any, whole: Any, dim: int, context: Whole, name: str | None = None) -> Any:
    """Build a lazy stack of the slices of a dense stack; ``name`` is that of the stack dim if the dense one has no names."""
    with exit_transforms([leaf for leaf in leaves_below([whole]) if isinstance(leaf, Tensor)]):
        stack = cls._of(unbind_members(whole, dim), dim)
    stack._empty_size = whole.batch_size
    names = whole._names if isinstance(whole, Core) else None
    stack._stack_dim_name = names[dim] if names is not None else name
    stack._hook_in, stack._hook_out = context.hooks
    return stack


def _keys(context: Whole | Members) -> list[str]:
    return ["stacked"] if isinstance(context, Whole) else [str(i) for i in range(context.size)]


def _load(dumped: tuple[Any, ...]) -> Whole | Members:
    return (Members if isinstance(dumped[3], tuple) else Whole)(*dumped)


def _register_stack(cls: Any) -> None:
    def unflatten(children: object, context: Whole | Members) -> Any:
        return _unflatten(cls, children, context)

    register(cls, _flatten, unflatten, _keys, load=_load)


register_with_subclasses(LazyStackedTensorDict, _register_stack)
