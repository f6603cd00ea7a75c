"""Select or replace elements by an index, a mask or a condition, and pad batch dims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .._plans import elements
from .._plans.plans import broadcast_shape
from .._torch.arrays import as_tensor
from .._torch.dtypes import keep_scalar
from .._torch.kernels import Op, foreach, make_op
from .._tree.components import join_components
from .._tree.dim_names import set_batch_size
from .._tree.node import Core
from .._tree.walks import visit
from .._writes.check import LEAF_ERRORS
from .._writes.inplace import write_leaves
from ..errors import BatchSizeError, StructureError
from .broadcasting import align_collections, expand_to_match, find_longer_size, stack_like
from .operands import raise_at_leaf, reorder_like, run_each_leaf, write_result
from .shape import ShapeMixin, adopt_result, check_adoptable, replace_node

if TYPE_CHECKING:
    from typing_extensions import Self

SelfT = TypeVar("SelfT", bound="SelectMixin")

_FILL = make_op("masked_fill_", Tensor.masked_fill_)
_FILLED = make_op("masked_fill", Tensor.masked_fill)
_WHERE = make_op("where", lambda leaf, mask, value: torch.where(mask, leaf, value))


class SelectMixin(ShapeMixin):
    """Methods ``gather``, ``masked_select``, ``masked_fill``, ``where`` and ``pad``."""

    __slots__ = ()

    def gather(self, dim: int, index: Tensor, out: object = None, *, inplace: bool = False) -> Self:
        """Gather elements along a batch dim, as :func:`torch.gather` does.

        Args:
            dim: the batch dim.
            index: an int64 tensor with as many dims as the batch; broadcast over the feature dims of each leaf.
            out: a collection of the shape of ``index`` to write into.
            inplace: change this collection instead of returning a new one.

        Raises:
            BatchSizeError: the number of dims of ``index`` differs from the number of batch dims.
            ValueError: both ``out`` and ``inplace`` are set.

        >>> td = TensorDict({"a": torch.tensor([[1, 2], [3, 4]])}, [2, 2])
        >>> td.gather(1, torch.tensor([[0], [1]]))["a"]
        tensor([[1],
                [4]])
        """
        if out is not None and inplace:
            raise ValueError(
                "gather() writes into out= or, with inplace=True, into this collection; got both"
            )
        result = self._transform(elements.gather_plan(self.batch_size, dim, index))
        if out is not None:
            written: Self = write_result(out, result.batch_size, result)
            return written
        return adopt_result(self, result, "gather") if inplace else result

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        """Select the elements where a mask is true; the masked dims become one batch dim.

        Args:
            mask: a bool tensor, array or list of the shape of the first batch dims.
            inplace: change this collection instead of returning a new one.

        Raises:
            CollectionIndexError: the shape of the mask is not that of the first batch dims.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_select(torch.tensor([True, False, True]))["a"]
        tensor([0, 2])
        """
        result: Self = self._index(_as_mask("masked_select", mask, device="cpu").bool())
        return adopt_result(self, result, "masked_select") if inplace else result

    def masked_fill(self, mask: Tensor, value: float | bool) -> Self:
        """Copy the collection and fill every leaf with ``value`` where a mask is true.

        Args:
            mask: a bool tensor; its dims are the first batch dims, or of size one.
            value: the number.

        Raises:
            BatchSizeError: the mask does not broadcast to the first batch dims.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_fill(torch.tensor([True, False, True]), -1)["a"]
        tensor([-1,  1, -1])
        """
        filled: Self = _apply_masked("masked_fill", self, _FILLED, mask, _check_fill("masked_fill", value))
        return filled

    def masked_fill_(self, mask: Tensor, value: float | bool) -> Self:
        """Fill every leaf with ``value`` in place where a mask is true; arguments as for :meth:`masked_fill`.

        Raises:
            BatchSizeError: the mask does not broadcast to the first batch dims.
            StructureError: a leaf cannot be written in place; nothing was written.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_fill_(torch.tensor([True, False, True]), -1)["a"]
        tensor([-1,  1, -1])
        """
        leaves, masks = self._leaves(), _broadcast_mask("masked_fill_", self, mask)
        write_leaves("masked_fill_", self, _FILL, leaves, masks, _check_fill("masked_fill_", value))
        return self

    def where(
        self,
        condition: Tensor,
        other: Tensor | Core | float,
        *,
        out: Any = None,
        pad: float | bool | None = None,
        update_batch_size: bool = False,
    ) -> Self:
        """Select elements of this collection where a condition is true, and of ``other`` elsewhere.

        Args:
            condition: a bool tensor; its dims are the first batch dims. If it has as many dims as the batch, or more, both are
                broadcast.
            other: a collection, a number, or a tensor that broadcasts with every leaf. The batch size of a collection
                broadcasts with this one's; if one of them starts with the other and the leaves have the longer one's
                dims, both are read from the first dim on. A member of a lazy stack that the condition replaces as a
                whole takes the entries of ``other`` in their shapes.
            out: a collection whose entries are replaced by the result, or overwritten in place if it is locked.
            pad: the value of entries that only the other collection has; None raises for such entries.
            update_batch_size: give ``out`` the batch size of the result.

        Raises:
            KeyMismatchError: one collection has a key that the other lacks, and ``pad`` is None.
            BatchSizeError: the batch size of ``other`` does not broadcast.
            BatchSizeError: the condition does not broadcast.

        >>> td = TensorDict({"a": torch.arange(3)}, [3])
        >>> td.where(torch.tensor([True, False, True]), -1)["a"]
        tensor([ 0, -1,  2])
        """
        longer, given = None, self.batch_size
        if isinstance(other, Core):
            given = other.batch_size
            longer = None if given == self.batch_size else find_longer_size(self, other)
        condition, size = _broadcast_condition(condition, self.batch_size, given, longer)
        if not isinstance(other, Core):
            left = self if size == self.batch_size else self.expand(size)
            result: Self = _select_or_value(left, other, condition)
        else:
            right = expand_to_match(other, self, size)
            left = expand_to_match(self, other, size)
            if pad is not None:
                fill = partial(torch.full_like, fill_value=pad)
                left, right = reorder_like(left, right, fill), reorder_like(right, left, fill)
            is_even = other.batch_size == self.batch_size
            try:
                result = _select_aligned(left, right, condition, is_even)
            except StructureError:
                stacked = stack_like(left, right)
                if stacked is left:
                    raise
                result = _select_aligned(stacked, right, condition, is_even)
        if out is None:
            return result
        if update_batch_size and out.batch_size != size:
            out.update(result, update_batch_size=True)
        else:
            write_result(out, size, result, inplace=False)
        written: Self = out
        return written

    def pad(
        self, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True
    ) -> Self:
        """Copy the collection and pad its batch dims with constant elements.

        Args:
            pad_size: two numbers per batch dim, from the first dim on: elements to add at the start and at the end.
            value: the value of the padding elements; padding of non-tensor data with one value per element is None.
            inplace: change this collection instead of returning a new one.
            safe: with ``inplace``, compute all entries before the first is replaced, so that an error changes nothing.
                If False, entries are replaced one by one, which needs less memory.

        Raises:
            BatchSizeError: ``pad_size`` has an odd length, or more pairs than the batch has dims.

        >>> TensorDict({"a": torch.arange(2)}, [2]).pad([1, 2], value=9)["a"]
        tensor([9, 0, 1, 9, 9])
        """
        plan = elements.pad_plan(self.batch_size, pad_size, value)
        if inplace:
            check_adoptable(self, "pad")
        if inplace and not safe and not self._is_value:
            with self._edit_together():
                for key, child in dict(self._children()).items():
                    if isinstance(child, Tensor):
                        self._set_child(key, plan.leaf(child))
                    else:
                        place = partial(self._set_child, key)
                        visit(partial(replace_node, self, False), child, child._transform(plan), place)
                set_batch_size(self, torch.Size(plan.lead))
            return self
        result = self._transform(plan)
        return adopt_result(self, result, "pad") if inplace else result


def pad(
    tensordict: SelfT, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True
) -> SelfT:
    """Pad the batch dims of a collection with constant elements; see :meth:`TensorDict.pad`.

    >>> pad(TensorDict({"a": torch.arange(2)}, [2]), [1, 0], value=9)["a"]
    tensor([9, 0, 1])
    """
    return tensordict.pad(pad_size, value, inplace, safe)


def _apply_masked(name: str, node: Core, this: Op, mask: Tensor, value: float | complex) -> Any:
    """Apply ``this(leaf, mask, value)`` to every leaf, with the mask aligned to the batch dims."""
    leaves: list[Tensor] = []
    levels = node._flatten_leaves(leaves)
    masks = _broadcast_mask(name, node, mask)
    try:
        return node._unflatten(foreach(this, leaves, masks, value), levels)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, leaves, masks, value)


def _broadcast_mask(name: str, node: Core, mask: Tensor) -> list[Tensor]:
    """Return the mask per leaf, with dims of size one for its feature dims, in the order of ``_flatten_leaves``."""
    size = node.batch_size
    masks: list[Tensor] = []
    node._broadcast_to_leaves(elements.append_dims(_expand_mask(name, mask, size), len(size)), masks)
    return masks


def _check_fill(name: str, value: object) -> Any:
    """Return the value of ``masked_fill``; TypeError for several values, which one leaf each would get."""
    if isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: value is a number or a 0-d tensor; got {value!r}")
    return value


def _as_mask(name: str, mask: object, **options: Any) -> Tensor:
    """Convert a mask to a tensor. Raise for a collection, which torch would read as an empty sequence."""
    if isinstance(mask, Core):
        raise TypeError(
            f"a mask is one tensor for all leaves; got a {type(mask).__name__}. With a mask for each leaf: "
            "masks.apply(torch.where, this, other)"
        )
    if isinstance(mask, Tensor):
        return mask
    try:
        return as_tensor(mask, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}: a mask is a bool tensor, or an array or list of bools; got {mask!r}"
        ) from error


def _expand_mask(name: str, mask: Tensor, batch_size: torch.Size) -> Tensor:
    """Expand a mask to the sizes of the first batch dims."""
    mask = _as_mask(name, mask)
    if mask.shape == batch_size:
        return mask
    if not _fits_first_dims(mask, batch_size):
        raise BatchSizeError(
            f"{name}: the dims of a mask must be the first batch dims, or of size one: got shape {list(mask.shape)} for the "
            f"batch size {list(batch_size)}"
        )
    return mask.expand(batch_size[: mask.ndim])


def _fits_first_dims(mask: Tensor, batch_size: torch.Size) -> bool:
    """Return True if each dim of a mask has the size of the batch dim at its position, or one."""
    return mask.ndim <= len(batch_size) and all(a in (1, b) for a, b in zip(mask.shape, batch_size))


def _broadcast_condition(
    condition: object, batch_size: torch.Size, other_size: torch.Size, longer: torch.Size | None
) -> tuple[Tensor, torch.Size]:
    """Expand the condition of ``where`` to the batch size of the result, and return both."""
    mask = _as_mask("where", condition)
    if longer is not None and _fits_first_dims(mask, longer):
        return elements.append_dims(mask, len(longer)).expand(longer), longer
    is_uneven = -1 in batch_size  # each member of a lazy stack then broadcasts its part of the condition
    if mask.ndim < len(batch_size) or is_uneven:
        mask = _expand_mask("where", mask, batch_size)
        mask = elements.append_dims(mask, len(batch_size)).expand(batch_size)
    size = batch_size
    for name, shape in (
        ("other collection", other_size),
        ("condition", size if is_uneven else mask.shape),
    ):
        if shape != size and (broadcast := broadcast_shape(shape, size)) is not None:
            size = torch.Size(broadcast)
        elif shape != size:
            raise BatchSizeError(
                f"where: the {name} of shape {list(shape)} does not broadcast against the batch size {list(size)}"
            )
    return (mask if mask.shape == size else mask.expand(size)), size


def _expand_to_leaf(leaf: Tensor, value: Any) -> Tensor:
    """Expand a number or tensor to the shape of a leaf, in the promoted dtype of both."""
    if leaf.is_nested:
        dtype = torch.result_type(leaf, value)
        parts = [torch.full_like(part, value, dtype=dtype) for part in leaf.unbind()]
        return join_components(leaf, parts)
    if torch.compiler.is_compiling():  # torch.compile cannot trace torch.result_type
        return torch.where(torch.zeros_like(leaf, dtype=torch.bool), leaf, value)
    dtype = torch.result_type(leaf, value)
    return as_tensor(value, dtype=dtype, device=leaf.device).expand(leaf.shape)


def _select_or_value(node: Any, value: object, condition: Tensor) -> Any:
    """Select elements of ``node`` where ``condition`` is true, and of a number or tensor elsewhere."""
    if isinstance(value, (int, float, complex)):
        try:
            return _apply_masked("where", node, _WHERE, condition, value)
        except (ValueError, RuntimeError) as error:
            # Torch cannot mask a nested tensor; for one tensor for the whole batch, the path below raises with its key.
            if not isinstance(error, StructureError) and not any(leaf.is_nested for leaf in node._leaves()):
                raise
    if isinstance(value, Tensor) and value.ndim:
        try:
            node = node.contiguous()
        except StructureError as error:
            raise StructureError(
                "where: a tensor is broadcast with whole leaves, which these lazy stacks do not have; give a number or a "
                f"collection: {error}"
            ) from error
    if isinstance(value, Tensor) and not value.ndim:
        leaves: list[Tensor] = []
        values: list[Tensor] = []
        levels = node._flatten_leaves(leaves)
        node._broadcast_to_leaves(value, values, keep_scalar)
        other = node._unflatten(list(map(_expand_to_leaf, leaves, values)), levels)
    else:
        other = run_each_leaf("where", node, lambda leaf: _expand_to_leaf(leaf, value))
    return _select_nodes(node, other, condition)


def _select_aligned(left: Core, right: Core, condition: Tensor, is_even: bool) -> Any:
    """Select between collections of one batch size; ``is_even``: neither was expanded to it."""
    if not is_even:
        left, right = align_collections(left, right)
    return _select_nodes(left, right, condition, is_even)


def _select_nodes(chosen: Any, otherwise: object, condition: Tensor, has_same_size: bool = True) -> Any:
    """Select elements of ``chosen`` where ``condition`` is true, of ``otherwise`` elsewhere; lazy stacks stay lazy."""
    # If no batch size was broadcast, a member can take an entry of another shape as it is.
    is_stack = chosen._members_and_dim() is not None
    takes_whole = (is_stack or None) if has_same_size else False
    return chosen._map_members(partial(_select_holders, takes_whole), otherwise, condition)


def _select_holders(takes_whole: bool | None, chosen: Any, otherwise: object, condition: Tensor) -> object:
    plan = elements.Where(condition, takes_whole)
    left: list[Tensor] = []
    right: list[Tensor] = []
    foreign: list[Core] = []
    levels = chosen._zip_leaves(otherwise, left, right, foreign)
    if levels is not None and not foreign:
        try:
            return chosen._unflatten(list(map(plan.leaf, zip(left, right))), levels)
        except (RuntimeError, ValueError):
            pass  # the join below raises with the key of the entry
    return chosen._join([chosen, otherwise], plan)
