"""Lazy stacks as torch pytrees.

vmap removes a dim of every leaf, so leaves must show the stack dim where it stands: members that fit are stacked, the
others are the children themselves. Inside the transforms of ``torch.func`` a stack that was flattened is dense from then
on: grad follows the very leaves that it was given, not what is cut out of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._collection import Core
from ._lazy_stack import LazyStackedTensorDict, unbind_members
from ._pytree import register
from ._torch_private import before_transforms, functorch_level
from .errors import StructureError


def _flatten(stack: LazyStackedTensorDict) -> tuple[list[Any], tuple[Any, ...]]:
    leaves = _leaves_below([stack])
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        try:
            # What a transform makes itself, it refuses to take as an argument.
            with before_transforms(leaves):
                whole = stack._densified()
        except StructureError:
            pass
        else:
            ndim = len(whole.batch_size)
            return [whole], (ndim - stack._stack_dim, stack._stack_dim_name, ndim)
    ndims = tuple(getattr(leaf, "ndim", 0) for leaf in leaves)
    return list(stack._members), (stack._stack_dim, stack._stack_dim_name, len(stack._members), ndims)


def _leaves_below(nodes: list[Any]) -> list[Any]:
    """Return the leaves below some nodes: tensors, and the objects that pytrees have in place of tensors and nodes."""
    leaves: list[Any] = []
    todo = nodes[:]
    while todo:
        node = todo.pop()
        if isinstance(node, Core):
            stacked = node._stacked()
            todo.extend(node._children().values() if stacked is None else stacked[0])
        else:
            leaves.append(node)
    return leaves


def _unflatten(children: Any, context: tuple[Any, ...]) -> Any:
    items = list(children)
    inside = functorch_level() is not None
    if len(context) == 3:
        (whole,) = items
        behind, name, ndim = context
        found = len(whole.batch_size) if isinstance(whole, Core) else 0
        if inside or behind > found:
            return whole
        dim = found - behind
        stack = LazyStackedTensorDict._of(unbind_members(whole, dim), dim)
        stack._empty_size = whole.batch_size
        stack._stack_dim_name = name if found == ndim else None
    else:
        dim, name, _, ndims = context
        leaves = _leaves_below(items) if inside else []
        if any(isinstance(leaf, Tensor) and leaf.ndim != ndim for leaf, ndim in zip(leaves, ndims)):
            raise StructureError(
                "torch.vmap, also inside jacrev, jacfwd and hessian, cannot take a dim from a lazy stack whose members "
                "differ in keys or shapes, nor add one: pad them first, see to_padded_tensor(), or map over each member"
            )
        stack = LazyStackedTensorDict._of(items, dim)
        stack._stack_dim_name = name
    return stack


def _keys(context: tuple[Any, ...]) -> list[str]:
    return ["stacked"] if len(context) == 3 else [str(i) for i in range(context[2])]


register(LazyStackedTensorDict, _flatten, _unflatten, _keys)
