"""Clone, detach and differentiate collections, and create new ones of the same structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._plans.plans import WholePlan, as_ints
from .._plans.steps import GatherMap, Shape
from .._torch.arrays import as_tensor
from .._torch.dtypes import as_dtype
from .._torch.private import get_base
from .._tree.backends import get_backends
from .._tree.defaults import call_once_per_leaf, check_same_form, show_path
from .._tree.devices import as_device, set_device_labels
from .._tree.node import LEAF_KINDS, Core, copy_leaf
from .._tree.packed import clone_packed
from .._tree.roles import is_buffer
from .._tree.stored_leaves import STORED, as_memory, is_stored
from .._tree.walks import has_entries, list_nested, visit, walk
from .._writes.check import LEAF_ERRORS, describe_leaf, is_sealed
from ..errors import KeyMismatchError, StructureError
from ..typing import NO_DEFAULT, DeviceType, DtypeLike, NoDefault
from .operands import CoreT, raise_at_leaf, transform

Pairs = list[tuple[Tensor, Tensor]]

_REQUIRES_GRAD = attrgetter("requires_grad")


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


def clone_leaves(node: CoreT, recurse: bool, options: dict[str, Any]) -> CoreT:
    """Clone every leaf, with options of ``torch.Tensor.clone``; TypeError for options without ``recurse``."""
    if options and recurse:
        return node._map(partial(copy_leaf, **options))
    if options:
        raise TypeError(f"clone(recurse=False) copies no leaf, so it takes no {', '.join(options)}")
    if node._inner()._backends is not None and (packed := clone_packed(node)) is not None:
        return packed
    for attachment in get_backends(node):
        copied = attachment.clone(node)
        if copied is not None:
            return copied
    if STORED and any(map(is_stored, leaves := node._leaves())):
        return node._unflatten(_copy_together(leaves))
    try:
        return node._map(copy_leaf)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, "clone", node, copy_leaf, node._leaves())


def _copy_together(leaves: list[Tensor]) -> list[Tensor]:
    """Copy leaves, of which those in stores are read together."""
    copies, seen = [], set()
    for leaf, memory in zip(leaves, as_memory(leaves), strict=True):
        copies.append(memory if is_stored(leaf) and id(leaf) not in seen else copy_leaf(memory))
        seen.add(id(leaf))
    return copies


def detach_leaves(node: Core) -> None:
    """Detach the leaves from the autograd graph, in place; RuntimeError, before the first one, for a view."""
    leaves = node._leaves()
    for leaf in leaves:
        if get_base(leaf) is not None:
            raise RuntimeError(
                f"cannot detach {describe_leaf(node, leaf)} in place: it is a view; use detach()"
            )
    for leaf in leaves:
        leaf.detach_()


def set_requires_grad(node: Core, requires_grad: bool) -> None:
    """Set ``requires_grad`` of every leaf but buffers; RuntimeError, before the first one, if a leaf does not allow it."""
    leaves = [leaf for leaf in node._leaves() if not (requires_grad and is_buffer(leaf))]
    for leaf in leaves:
        if leaf.requires_grad != requires_grad:
            _check_requires_grad(node, leaf, requires_grad)
    for level in walk(*list_nested(node)):
        if not has_entries(level):
            level.requires_grad_(requires_grad)
    for leaf in leaves:
        leaf.requires_grad_(requires_grad)


def _check_requires_grad(node: Core, leaf: Tensor, requires_grad: bool) -> None:
    """Raise RuntimeError if ``requires_grad`` of a leaf cannot change to the given value."""
    if not requires_grad:
        if not leaf.is_leaf:
            raise RuntimeError(
                f"cannot stop to record gradients: {describe_leaf(node, leaf)} was computed from what requires them; "
                "detach() the collection"
            )
    elif not (leaf.is_floating_point() or leaf.is_complex()):
        raise RuntimeError(
            f"cannot require gradients: {describe_leaf(node, leaf)} has dtype {leaf.dtype}; only floating point and complex "
            "leaves have gradients: exclude() the key, or take from_modules(..., as_module=True), which keeps buffers apart"
        )
    elif is_sealed(leaf):
        raise RuntimeError(
            f"cannot require gradients: {describe_leaf(node, leaf)} was made under torch.inference_mode(); clone() the "
            "collection first"
        )


def get_gradients(node: CoreT) -> CoreT | None:
    """Return a collection of the gradients of the leaves that have one, or None if no leaf has one."""
    if all(leaf.grad is None for leaf in node._leaves()):
        return None
    gradients: CoreT | None = node.apply(attrgetter("grad"), filter_empty=True)
    return gradients


def set_gradients(node: Core, gradients: object) -> None:
    """Copy the leaves of a collection into existing gradients, and set the missing ones."""
    for leaf, gradient in pair_with_given(node, gradients, "grad"):
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            leaf.grad.detach_().copy_(gradient)


def clear_gradients(node: Core, set_to_none: bool) -> None:
    """Set the gradients of the leaves to None, or fill them with zeros."""
    for leaf in node._leaves():
        if leaf.grad is not None:
            if set_to_none:
                leaf.grad = None
            else:
                leaf.grad.detach_().zero_()


def backpropagate(
    node: Core, gradient: object, retain_graph: bool | None, create_graph: bool, inputs: Any
) -> None:
    """Backpropagate from all leaves that require gradients, in one pass; see ``backward``."""
    if gradient is not None and not isinstance(gradient, Core):
        raise TypeError(f"backward: gradient is a collection; got {type(gradient).__name__}")
    leaves = list(filter(_REQUIRES_GRAD, node._leaves()))
    gradients: list[Tensor | None] = [None] * len(leaves)
    if not leaves:
        raise RuntimeError(f"backward: no leaf of this {type(node).__name__} requires gradients")
    if gradient is not None:
        pairs = pair_leaves(node, gradient, _REQUIRES_GRAD)
        leaves, gradients = [leaf for leaf, _ in pairs], [given for _, given in pairs]
    for leaf, given_gradient in zip(leaves, gradients, strict=True):
        if given_gradient is None and leaf.numel() != 1:
            raise RuntimeError(
                f"backward: {describe_leaf(node, leaf)} has shape {list(leaf.shape)}, and only scalars have an implicit "
                "gradient; give gradient=, a collection of the same structure"
            )
    if isinstance(inputs, Core):
        inputs = inputs._leaves()
    torch.autograd.backward(
        leaves, gradients, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
    )


def keep_ties(node: Core, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap ``fn`` so that tied leaves (one tensor under several keys) are also tied in the result."""
    leaves = node._leaves()
    known = leaves if torch.compiler.is_compiling() else map(id, leaves)
    return fn if len({*known}) == len(leaves) else call_once_per_leaf(fn)


def pair_with_given(node: Core, value: object, name: str) -> list[tuple[Tensor, Tensor]]:
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


class NewOptions(NamedTuple):
    """The arguments of ``new_zeros`` and the like that describe the new leaves."""

    dtype: DtypeLike | None
    device: Any
    requires_grad: bool
    layout: torch.layout
    pin_memory: bool | None
    empty_lazy: bool


def make_new_like(
    node: CoreT, size: tuple[object, ...], name: str, options: NewOptions, *filled: object
) -> CoreT:
    """Create a collection of the same structure by calling the method ``name``, such as ``new_zeros``, of each leaf."""
    new = as_ints(size[0] if len(size) == 1 else size)
    dtype, device = as_dtype(options.dtype), options.device
    label = node.device if device is NO_DEFAULT else device if device is None else as_device(device)
    place = None if device is NO_DEFAULT else label

    def make(leaf: Tensor, shape: Shape) -> Tensor:
        made: Tensor = getattr(leaf, name)(
            shape,
            *filled,
            dtype=dtype or leaf.dtype,
            device=place or leaf.device,
            requires_grad=options.requires_grad,
            layout=options.layout,
            pin_memory=bool(options.pin_memory),
        )
        return made

    plan = (NewEmptyStacks if options.empty_lazy else NewBatch)(node.batch_size, new, make)
    result = transform(name, node, plan)
    if label != result.device:
        set_device_labels(result, label)
    return result


def copy_data_like(
    node: Core,
    data: object,
    dtype: DtypeLike | None,
    device: DeviceType | NoDefault | None,
    requires_grad: bool,
    pin_memory: bool | None,
) -> Any:
    """Create a collection of the structure of ``node`` from copies of ``data``; see ``new_tensor``."""
    shape: Core
    references: list[Tensor] = []
    if isinstance(data, Core):
        shape = data
        data._flatten_other(node, references)
        values = data._leaves()
    else:
        source = as_tensor(data)
        shape = node._transform(NewBatch(node.batch_size, tuple(source.shape), lambda leaf, size: leaf))
        shape._flatten_leaves(references)
        values = [source] * len(references)
    if isinstance(device, NoDefault) or device is None:
        goal = node.device or (None if isinstance(data, Core) else source.device)
    else:
        goal = as_device(device)
    made = []
    for reference, value in zip(references, values, strict=True):
        leaf = value.detach().to(goal or reference.device, as_dtype(dtype) or reference.dtype, copy=True)
        leaf = leaf.pin_memory() if pin_memory else leaf
        # A detached leaf does not require gradients, and vmap forbids requires_grad_(False).
        made.append(leaf.requires_grad_() if requires_grad else leaf)
    result = shape._unflatten(made)
    set_device_labels(result, goal)
    return result


def view_as_plain(leaf: Tensor) -> Tensor:
    """Return a leaf as a plain tensor on the same memory, or itself if that is not possible."""
    cls = type(leaf)
    # A subclass that intercepts dispatch, such as a nested tensor, has no single storage for a plain tensor.
    if (
        cls is Tensor
        or isinstance(leaf, Parameter)
        or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return leaf
    return leaf.as_subclass(Tensor)


def pair_leaves(first: Core, second: Core, is_needed: Callable[[Tensor], object]) -> Pairs:
    """Pair each leaf of ``first`` that ``is_needed`` accepts with the leaf of ``second``; KeyMismatchError if it is missing.

    Values, and nodes without such leaves, may be missing in ``second``, which may have more entries.
    """
    pairs: Pairs = []

    def pair(left: Core, right: Core, path: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        _check_members(left, right, path)
        for own, other in left._zip_members(right):
            missing = []
            for key, child in dict(own._children()).items():
                leaf = _get_leaf(child)
                given = other._get_child(key) if key in other._children() else None
                if has_entries(child) and given is not None and has_entries(given):
                    yield child, given, (*path, key)
                elif not any(map(is_needed, child._leaves() if leaf is None else [leaf])):
                    continue  # values, or a node that holds no such leaf
                elif given is None:
                    missing.append(key)
                else:
                    check_same_form(child, given, (*path, key))
                    pairs.append((leaf, _get_leaf(given)))
            if missing:
                raise KeyMismatchError(
                    f"the structures differ at {show_path(path)}: missing keys {missing}, of which each holds a leaf that "
                    "needs a counterpart"
                )

    visit(pair, first, second, ())
    return pairs


def _get_leaf(child: Tensor | Core) -> Any:
    """Return the tensor of an entry, which may be in a node that represents one leaf; None for any other node."""
    if isinstance(child, Tensor):
        return child
    return child._leaves()[0] if type(child) in LEAF_KINDS else None


def _check_members(left: Core, right: Core, path: tuple[str, ...]) -> None:
    """Raise StructureError if a collection cannot be split along the stack dim of a lazy stack."""
    members, dim = left._members_and_dim() or ((), 0)
    size = right.batch_size
    if members and size[dim : dim + 1] != (len(members),):
        raise StructureError(
            f"the structures differ at {show_path(path)}: a lazy stack of {len(members)} members along dim {dim} there, "
            f"batch size {list(size)} here"
        )
