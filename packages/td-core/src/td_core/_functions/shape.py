"""Reshape, permute, split, expand, repeat and rotate batch dims: each operation builds a plan and applies it.

Arguments are parsed as torch does, with negative dims relative to the batch dims. Results are views if those of a
tensor would be. Used as context managers, operations that keep all elements write changes of their result back to
the source on exit. They refer to the source weakly, so a chain of results does not keep the first one alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, cast

import torch
from torch import Tensor

from .._encode.value_codec import is_same_value
from .._plans import elements, shapes
from .._plans.elements import append_dims
from .._plans.plans import ShapePlan, as_ints, check_ints, wrap_dim
from .._torch.dtypes import as_dtype
from .._torch.private import functorch_level, get_base
from .._tree.defaults import has_lazy_stack, type_error, unwrap_entry
from .._tree.dim_names import find_dims, set_batch_size
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core, CoreT
from .._tree.ragged import build_dense, list_dense_entries
from .._tree.walks import has_entries, map_levels, visit
from .._writes.check import LEAF_ERRORS
from ..errors import DimError, StructureError
from ..typing import DtypeLike, NestedKey
from .locking import do_nothing, undo_on_exit, write_back_on_exit
from .operands import raise_at_leaf

#: A node, its result of an operation, and a function that stores the result in place of the node.
Replacement = tuple[Any, Any, Callable[[Any], None]]


def parse_ints(what: str, args: tuple[Any, ...], named: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return ints that were passed as positional arguments, as one sequence, or by keyword."""
    if named is not None:
        if args:
            raise TypeError(
                f"{what}() takes its sizes by position or by keyword, not both; got {args} and {named}"
            )
        return tuple(named)
    try:
        return as_ints(args[0]) if len(args) == 1 else args
    except TypeError:
        raise TypeError(f"{what}() takes ints, or one sequence of ints; got {args[0]!r}") from None


def parse_order(node: Core, args: tuple[Any, ...], dims: Sequence[int] | None) -> tuple[int, ...]:
    """Return the order of the dims for ``permute``, where names have become positions."""
    args, dims = find_dims(node, "permute", args), find_dims(node, "permute", dims)
    return (
        tuple(range(len(node.batch_size))) if dims is None and not args else parse_ints("permute", args, dims)
    )


def view_batch(
    node: CoreT,
    shape: tuple[Any, ...],
    size: Sequence[int] | None,
    batch_size: torch.Size | None,
    dtype: DtypeLike | None,
) -> CoreT:
    """View the batch dims in another shape, or the bits of every leaf as another dtype; see ``view``."""
    if size is not None or not shape or type(shape[0]) is not int:
        if len(shape) == 1 and dtype is None and isinstance(as_dtype(shape[0]), torch.dtype):
            (dtype,), shape = shape, ()
        if dtype is not None and not shape and size is None:
            seen_as = methodcaller("view", as_dtype(dtype))
            try:
                seen: CoreT = node.apply(seen_as, batch_size=batch_size)
                return seen
            except LEAF_ERRORS as error:
                raise_at_leaf(error, "view", node, seen_as, node._leaves())
        shape = parse_ints("view", shape, size)
    if batch_size is not None or dtype is not None:
        raise TypeError("view() takes a dtype, with batch_size=, or new batch dims (size=); it got both")
    result = node._transform(shapes.view_plan(node.batch_size, shape))
    return write_back_on_exit(result, node, write_reshaped)


def as_canonical(leaf: Tensor) -> Tensor:
    """Return a contiguous leaf whose dims of size one have the strides of a new tensor."""
    leaf = leaf.contiguous()
    return leaf.view(-1).view(leaf.shape) if 1 in leaf.shape else leaf


def write_reshaped(owner: Core, result: Core) -> None:
    """Write the result of an operation back to its source, in the shape of the source."""
    write_back(owner, result.reshape(owner.batch_size))


def reshape_batch(node: CoreT, plan: ShapePlan, what: str, inplace: bool) -> CoreT:
    """Let a node take over its result of another batch shape, or return one that a ``with`` block writes back."""
    result = node._transform(plan)
    if inplace:
        return adopt_result(node, result, what)
    return write_back_on_exit(result, node, write_reshaped)


def _write_permuted(owner: object, result: Core, plan: ShapePlan) -> None:
    """Write a permuted result back to its source, in the order of the source."""
    write_back(owner, result.permute([plan.sources.index(dim) for dim in range(plan.n)]))


def write_back(owner: object, result: object) -> None:
    """Write entries of ``result`` back to ``owner``, in place if locked; skip leaves that share the owner's memory."""
    visit(_write_entries, owner, result)


def _write_entries(owner: Core, result: Core) -> Iterator[tuple[object, object]]:
    """Write the changed entries of one node back, and yield the pairs of nodes below."""
    same_size = owner.batch_size == result.batch_size
    for node, part in owner._zip_members(result) if same_size else [(owner, result)]:
        for key in list(part._children()):
            value, left = part.get(key), node.get(key, None)
            if (
                isinstance(left, Core)
                and isinstance(value, Core)
                and has_entries(left)
                and has_entries(value)
            ):
                yield node._get_writable(key), value
            elif not _is_unchanged(node, part, key, left, value):
                if node.is_locked and left is not None:
                    node.set_(key, value)
                else:
                    node.set(key, value)


def _is_unchanged(node: Core, part: Core, key: str, left: object, value: object) -> bool:
    """Return True if an entry of a result has the memory, or the values, of the entry ``left`` of its owner."""
    if isinstance(value, Tensor):
        return isinstance(left, Tensor) and same_memory(left, value)
    own, other = node._children().get(key), part._get_child(key)
    # A lazy stack builds a new value node on each read, so compare values.
    return isinstance(own, Core) and isinstance(other, Core) and _has_equal_values(own, other)


def _has_equal_values(own: Core, other: Core) -> bool:
    """Return True if two value nodes certainly hold the same values."""
    if has_entries(own) or unwrap_entry(own) is not own or own.batch_size != other.batch_size:
        return False
    return is_same_value(own.tolist(), other.tolist())


def same_memory(left: Tensor, value: Tensor) -> bool:
    """Return True if two tensors surely have the same storage, offset, shape, strides and dtype."""
    if left is value:
        return True
    if torch.compiler.is_compiling() or functorch_level() is not None:
        return False  # tensors have no real storage in a graph or under functorch
    try:
        same = left.is_set_to(value)
    except RuntimeError:
        # Meta and nested tensors have no single storage, so compare their view bases.
        base, right = get_base(left), get_base(value)
        same = right is not None and right is (left if base is None else base)
        same = same and left.shape == value.shape and left.stride() == value.stride()
    return same and left.dtype == value.dtype and left.is_conj() == value.is_conj()


def expand_like(node: CoreT, other: Core | Tensor) -> CoreT:
    """Expand a collection to a tensor, or level by level to another collection; see ``expand_as``."""
    if isinstance(other, Tensor):
        return node.expand(other.shape)
    if not isinstance(other, Core):
        raise type_error("expand_as", other, "a tensor or a collection")
    result = node.expand(other.batch_size)
    for key in list(result.keys(True)):
        level = result.get(key)
        goal = other.get(key, None)
        # A tensorclass returns bare Python values for value nodes, which are not expanded.
        nodes = all(isinstance(item, Core) for item in (level, goal))
        if not nodes or level.batch_size == goal.batch_size:
            continue
        if len(goal.batch_size) < len(level.batch_size):
            level.batch_size = goal.batch_size
        else:
            level = level.expand(goal.batch_size)
        result._set_path(key, level)
    expanded: CoreT = result.named_apply(
        _expand_leaf, other, nested_keys=True, default=None, filter_empty=False
    )
    return expanded


def _expand_leaf(key: NestedKey, leaf: Tensor, other: object) -> Tensor:
    """Expand a leaf to the shape of the leaf under the same key, if there is one."""
    if not isinstance(other, Tensor):
        return leaf
    try:
        return leaf.expand(other.shape)
    except RuntimeError as error:
        raise StructureError(f"expand_as: key {key!r}: {error}") from error


def expand_right(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand a tensor to a shape that starts with its own shape.

    Args:
        tensor: the tensor.
        shape: the shape to expand to.

    Raises:
        RuntimeError: a size is neither 1 nor the size in ``shape``.

    >>> expand_right(torch.zeros(2), (2, 3)).shape
    torch.Size([2, 3])
    """
    missing = len(shape) - tensor.ndim
    if missing < 0:
        raise RuntimeError(
            f"cannot expand to the right: the tensor has {tensor.ndim} dims, {list(tensor.shape)}, the shape "
            f"{list(shape)} has fewer"
        )
    return append_dims(tensor, len(shape)).expand(tuple(shape))


def expand_as_right(tensor: Any, dest: Any) -> Any:
    """Expand a tensor or collection to the shape of another one, which starts with its own shape.

    Args:
        tensor: a tensor, or a collection, whose leaves are expanded after their batch dims.
        dest: a tensor or collection.

    Raises:
        RuntimeError: the shape of ``dest`` does not start with that of ``tensor``.

    >>> expand_as_right(torch.zeros(2), torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    if not isinstance(tensor, Core):
        return expand_right(tensor, dest.shape)
    size, target = tensor.batch_size, torch.Size(dest.shape)
    if target[: len(size)] != size:
        raise RuntimeError(
            f"cannot expand to the right: the batch size {list(size)} does not start {list(target)}"
        )
    ndim, extra = len(size), target[len(size) :]
    return tensor.apply(
        lambda leaf: leaf[(slice(None),) * ndim + (None,) * len(extra)].expand(*target, *leaf.shape[ndim:]),
        batch_size=target,
    )


def apply_permutation(node: CoreT, plan: ShapePlan) -> CoreT:
    """Permute the batch dims, and write changes of the result back in a ``with`` block."""
    return write_back_on_exit(node._transform(plan), node, _write_permuted, plan)


def prepend_dims(node: CoreT, ndim: int) -> CoreT:
    """Prepend batch dims of size one until there are ``ndim``."""
    missing = ndim - len(node.batch_size)
    if missing <= 0:
        return node if torch.compiler.is_compiling() else undo_on_exit(node, do_nothing)
    result: CoreT = node._index((None,) * missing)
    return write_back_on_exit(result, node, write_reshaped)


def stack_lazy_levels(node: CoreT, layout: torch.layout) -> CoreT:
    """Stack every lazy stack, with nested tensors of ``layout`` for ragged entries; see ``densify``."""
    if not has_lazy_stack(node):
        return node._with_children(node._children())
    fill: Any = partial(list_dense_entries, layout=layout)
    return cast("CoreT", map_levels(node, fill, make=build_dense))


def take_over_entries(node: Any, result: Core) -> list[Replacement] | None:
    """Give a node the entries, batch size and names of a result, see ``_take_over`` of a kind."""
    if not has_entries(result):
        return None
    held = node._children()
    below: list[Replacement] = []
    for key, child in dict(result._children()).items():
        old = None if isinstance(child, Tensor) else held.get(key)
        if isinstance(old, Core):
            below.append((old, child, partial(node._set_child, key)))
        else:
            node._set_child(key, child)
    set_batch_size(node, result.batch_size)
    node._names = result._names
    return below


def adopt_result(node: CoreT, result: CoreT, what: str, *, dense: bool = False) -> CoreT:
    """Replace the entries, batch size and names of a node by those of ``result``, see ``check_adoptable``.

    The nodes below stay the same objects, but for locked ones, those whose kind changes and, if ``dense``, lazy stacks.
    """
    check_adoptable(node, what)

    def refuse(result: object) -> None:
        raise StructureError(
            f"cannot {what} in place: the result of a {type(node).__name__} is a {type(result).__name__}; leave "
            "inplace out"
        )

    with node._edit_together():
        visit(partial(replace_node, node, dense), node, result, refuse)
    return node


def replace_node(
    root: Core, dense: bool, node: Any, result: Child, store: Callable[[Any], None]
) -> list[Replacement]:
    """Let a node take over a result of an operation on it, or store the result in its place. Return the nodes below."""
    becomes_dense = dense and node._inner() is node and node._members_and_dim() is not None
    stays = node is root or not (node.is_locked or becomes_dense)
    below = node._take_over(result) if stays and not isinstance(result, Tensor) else None
    if below is None:
        store(result)
    return below or []


def check_adoptable(node: Core, what: str) -> None:
    """Raise an error for a locked node, and for a lazy stack, which holds no entries itself."""
    check_unlocked(node, f"{what} in place")
    if node._members_and_dim() is not None:
        raise StructureError(
            f"cannot {what} in place: the members of a {type(node).__name__} hold its entries; leave inplace out"
        )


def repeat_batch(node: CoreT, times: tuple[int, ...], inplace: bool) -> CoreT:
    """Repeat a collection along each batch dim; ValueError unless there is one number for each dim."""
    if len(times) != len(node.batch_size):
        raise ValueError(
            f"repeat: there must be one number for each batch dim; got {list(times)} for the batch size "
            f"{list(node.batch_size)}"
        )
    result = node._transform(elements.repeat_plan(node.batch_size, times))
    return adopt_result(node, result, "repeat") if inplace else result


def repeat_elements(
    node: CoreT, repeats: Tensor | int, dim: int | None, output_size: int | None, inplace: bool
) -> CoreT:
    """Repeat each element along a batch dim, or along the flattened batch dims."""
    source = node._transform(shapes.reshape_plan(node.batch_size, (-1,))) if dim is None else node
    along = 0 if dim is None else dim
    plan = elements.repeat_interleave_plan(source.batch_size, repeats, along, output_size)
    result = source._transform(plan)
    return adopt_result(node, result, "repeat_interleave") if inplace else result


def tile_batch(node: CoreT, times: tuple[int, ...]) -> CoreT:
    """Repeat a collection along its last batch dims."""
    times = (1,) * (len(node.batch_size) - len(times)) + times
    return node._transform(elements.repeat_plan(node.batch_size, times))


def roll_batch(
    node: CoreT, shifts: int | tuple[int, ...], dims: int | tuple[int, ...] | None, inplace: bool
) -> CoreT:
    """Shift the elements along batch dims; a ``with`` block of the result shifts them back."""
    result = node._transform(elements.roll_plan(node.batch_size, shifts, dims))
    if inplace:
        return adopt_result(node, result, "roll")
    back = tuple([-shift for shift in as_ints(shifts)])
    return write_back_on_exit(result, node, write_back_inverse, methodcaller("roll", back, dims))


def rotate_batch(node: CoreT, turns: int, dims: Sequence[int | str]) -> CoreT:
    """Rotate a batch by quarter turns in the plane of two dims; a ``with`` block of the result rotates it back."""
    given = find_dims(node, "rot90", dims)
    check_ints("rot90", "dims", given)
    plane = tuple(wrap_dim(dim, len(node.batch_size)) for dim in given)
    if len(set(plane)) != 2 or len(plane) != 2:
        raise DimError(f"rot90: the plane is given by two different dims; got {dims}")
    flipped = ((), plane[1], plane, plane[0])[turns % 4]
    result = node._transform(elements.flip_plan(node.batch_size, flipped))
    if turns % 2:
        result = result._transform(shapes.transpose_plan(result.batch_size, *plane))
    return write_back_on_exit(result, node, write_back_inverse, methodcaller("rot90", -turns, dims))


def write_back_inverse(owner: object, result: object, inverse: Callable[[object], object]) -> None:
    """Write ``inverse(result)`` back to the source of an operation."""
    write_back(owner, inverse(result))
