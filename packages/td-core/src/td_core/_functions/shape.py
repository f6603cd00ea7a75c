"""Reshape, permute, split and expand batch dims: each operation builds a plan and applies it.

Arguments are parsed as torch does, with negative dims relative to the batch dims. Results are views if those of a
tensor would be. Used as context managers, operations that keep all elements write changes of their result back to
the source on exit. They refer to the source weakly, so a chain of results does not keep the first one alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._encode.value_codec import is_same_value
from .._plans.elements import append_dims
from .._plans.plans import ShapePlan, as_ints
from .._torch.private import functorch_level, get_base
from .._tree.defaults import unwrap_entry
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core, CoreT
from .._tree.walks import has_entries, visit
from ..errors import StructureError
from ..typing import NestedKey
from .locking import do_nothing, undo_on_exit, write_back_on_exit

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


def as_canonical(leaf: Tensor) -> Tensor:
    leaf = leaf.contiguous()
    return leaf.view(-1).view(leaf.shape) if 1 in leaf.shape else leaf


def write_reshaped(owner: Core, result: Any) -> None:
    write_back(owner, result.reshape(owner.batch_size))


def _write_permuted(owner: object, result: Any, plan: ShapePlan) -> None:
    write_back(owner, result.permute([plan.sources.index(dim) for dim in range(plan.n)]))


def write_back(owner: object, result: object) -> None:
    """Write entries of ``result`` back to ``owner``, in place if locked; skip leaves that share the owner's memory."""
    visit(_write_entries, owner, result)


def _write_entries(owner: Core, result: Core) -> Iterator[tuple[object, object]]:
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


def expand_leaf(key: NestedKey, leaf: Tensor, other: object) -> Tensor:
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
    return write_back_on_exit(node._transform(plan), node, _write_permuted, plan)


def at_least(node: CoreT, ndim: int) -> CoreT:
    missing = ndim - len(node.batch_size)
    if missing <= 0:
        return node if torch.compiler.is_compiling() else undo_on_exit(node, do_nothing)
    result: CoreT = node._index((None,) * missing)
    return write_back_on_exit(result, node, write_reshaped)


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
