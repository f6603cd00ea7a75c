"""Clone, detach and differentiate collections, and create new ones of the same structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._plans.plans import WholePlan, as_ints
from .._plans.steps import GatherMap, Shape
from .._torch.dtypes import as_dtype
from .._tree.defaults import call_once_per_leaf
from .._tree.devices import as_device, set_device_labels
from .._tree.gradients import pair_leaves
from .._tree.node import Core
from .._writes.check import describe_leaf
from ..errors import StructureError
from ..typing import NO_DEFAULT, DtypeLike
from .operands import CoreT, transform


class NewBatch(WholePlan):
    """Plan that makes new leaves of another batch size with the feature dims of the old leaves."""

    __slots__ = ("make",)
    creates_values = True

    def __init__(self, old: Shape, new: Shape, make: Callable[[Tensor, Shape], Tensor]) -> None:
        n = len(old)
        super().__init__(old, new, lambda leaf: make(leaf, (*new, *leaf.shape[n:])))
        self.make = make

    def apply_unbatched(self, value: Tensor) -> Tensor:
        """Make a new tensor of the same shape."""
        return self.make(value, tuple(value.shape))

    def locate(self, size: Shape, device: torch.device | None = None) -> list[GatherMap]:
        """Return no position, so that values stay, for an equal batch size, and otherwise -1 for each element: None."""
        new = (*self.lead, *size[self.n :])
        return [] if new == size else [([-1] * torch.Size(new).numel(), new)]


class NewEmptyStacks(NewBatch):
    """Plan that makes new leaves, but replaces each lazy stack by one whose members have no leaves."""

    __slots__ = ()
    empties_stacks = True

    def of_member(self, old: Shape, new: Shape) -> NewEmptyStacks:
        """Return the plan for a member without leaves of a new lazy stack."""
        return NewEmptyStacks(old, new, self.make)


def keep_ties(node: Core, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap ``fn`` so that tied leaves (one tensor under several keys) are also tied in the result."""
    leaves = node._leaves()
    known = leaves if torch.compiler.is_compiling() else map(id, leaves)
    return fn if len({*known}) == len(leaves) else call_once_per_leaf(fn)


def iter_pairs(node: Core, value: object, name: str) -> list[tuple[Tensor, Tensor]]:
    """Pair the leaves of ``node`` and ``value`` by key; StructureError if shapes, or the dtypes of gradients, differ."""
    if not isinstance(value, Core):
        raise TypeError(f"{name} is a collection of the same structure; got {type(value).__name__}")
    pairs = [(leaf, given) for given, leaf in pair_leaves(value, node, lambda _: True)]
    for leaf, pair in pairs:
        if leaf.shape != pair.shape or (name == "grad" and leaf.dtype != pair.dtype):
            raise StructureError(
                f"cannot assign {name}: {describe_leaf(node, leaf)} has shape {list(leaf.shape)} and dtype {leaf.dtype}, "
                f"the {name} {list(pair.shape)} and {pair.dtype}"
            )
    return pairs


def make_new(
    node: CoreT,
    size: tuple[object, ...],
    name: str,
    dtype: DtypeLike | None,
    device: Any,
    requires_grad: bool,
    layout: torch.layout,
    pin_memory: bool | None,
    empty_lazy: bool,
    *filled: object,
) -> CoreT:
    """Create a collection of the same structure by calling the method ``name``, such as ``new_zeros``, of each leaf."""
    new = as_ints(size[0] if len(size) == 1 else size)
    dtype = as_dtype(dtype)
    label = node.device if device is NO_DEFAULT else device if device is None else as_device(device)
    place = None if device is NO_DEFAULT else label

    def make(leaf: Tensor, shape: Shape) -> Tensor:
        made: Tensor = getattr(leaf, name)(
            shape,
            *filled,
            dtype=dtype or leaf.dtype,
            device=place or leaf.device,
            requires_grad=requires_grad,
            layout=layout,
            pin_memory=bool(pin_memory),
        )
        return made

    plan = (NewEmptyStacks if empty_lazy else NewBatch)(node.batch_size, new, make)
    result = transform(name, node, plan)
    if label != result.device:
        set_device_labels(result, label)
    return result


def as_plain(leaf: Tensor) -> Tensor:
    cls = type(leaf)
    # A subclass that intercepts dispatch, such as a nested tensor, has no single storage for a plain tensor.
    if (
        cls is Tensor
        or isinstance(leaf, Parameter)
        or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return leaf
    return leaf.as_subclass(Tensor)
