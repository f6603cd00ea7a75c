"""Repeat, shift and rotate the elements of a batch along its dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller

from torch import Tensor

from .._plans import elements, shapes
from .._plans.plans import as_ints, wrap_dim
from .._tree.node import CoreT
from ..errors import DimError
from .locking import write_back_on_exit
from .shape import adopt_result, write_back


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


def rotate_batch(node: CoreT, turns: int, dims: Sequence[int]) -> CoreT:
    """Rotate a batch by quarter turns in the plane of two dims; a ``with`` block of the result rotates it back."""
    plane = tuple(wrap_dim(dim, len(node.batch_size)) for dim in dims)
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
