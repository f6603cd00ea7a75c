"""Operations that choose or replace elements by an index, a mask or a condition, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _element_plans as elements
from .._arrays import as_tensor
from .._collection import Core
from .._element_types import as_it_is
from .._foreach import Op, foreach, op
from .._locking import refuse_if_locked
from .._plans import broadcast_shape
from ..errors import BatchSizeError, StructureError
from .alignment import aligned, expanded
from .joining import written
from .operands import LEAF_ERRORS, each_leaf, raise_at_leaf, with_keys_of, write_leaves
from .shape import Shaping

SelfT = TypeVar("SelfT", bound="Selecting")

_FILL = op("masked_fill_", Tensor.masked_fill_)
_FILLED = op("masked_fill", Tensor.masked_fill)
_WHERE = op("where", lambda leaf, mask, value: torch.where(mask, leaf, value))


class Selecting(Shaping):
    """``gather``, ``masked_select``, ``masked_fill``, ``where`` and ``pad``."""

    __slots__ = ()

    def gather(self: SelfT, dim: int, index: Tensor, out: Any = None, *, inplace: bool = False) -> SelfT:
        """Return elements of a batch dim chosen for each position, as :func:`torch.gather` does.

        Args:
            dim: the batch dim.
            index: int64, one dim for each batch dim; broadcast over the other dims of each leaf.
            out: a collection of the shape of ``index`` to write into.
            inplace: change this collection instead of returning a new one.

        Raises:
            BatchSizeError: ``index`` has not one dim for each batch dim.
            ValueError: there are both ``out`` and ``inplace``.

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
            return written(out, result.batch_size, result)  # type: ignore[no-any-return]
        return self._become(result, "gather") if inplace else result

    def masked_select(self: SelfT, mask: Tensor, *, inplace: bool = False) -> SelfT:
        """Return the elements where a mask is true, in one batch dim.

        Args:
            mask: bool, of the shape of the first batch dims; a tensor, an array or a list.
            inplace: change this collection instead of returning a new one.

        Raises:
            CollectionIndexError: the shape of the mask is another.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_select(torch.tensor([True, False, True]))["a"]
        tensor([0, 2])
        """
        result: SelfT = self._index(_as_mask(mask, device="cpu").bool())
        return self._become(result, "masked_select") if inplace else result

    def masked_fill(self: SelfT, mask: Tensor, value: float | bool) -> SelfT:
        """Return a copy in which every leaf has ``value`` where a mask is true.

        Args:
            mask: bool; its dims are the first batch dims, or of size one.
            value: the number.

        Raises:
            BatchSizeError: the mask does not fit the batch.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_fill(torch.tensor([True, False, True]), -1)["a"]
        tensor([-1,  1, -1])
        """
        return _mapped("masked_fill", self, _FILLED, mask, value)  # type: ignore[no-any-return]

    def masked_fill_(self: SelfT, mask: Tensor, value: float | bool) -> SelfT:
        """Write ``value`` into every leaf, in place, where a mask is true; arguments as for :meth:`masked_fill`.

        Raises:
            BatchSizeError: the mask does not fit the batch.
            StructureError: a leaf cannot be written in place; nothing was written.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_fill_(torch.tensor([True, False, True]), -1)["a"]
        tensor([-1,  1, -1])
        """
        leaves = self._leaves()
        write_leaves("masked_fill_", self, _FILL, leaves, _masks(self, mask), value)
        return self

    def where(
        self: SelfT,
        condition: Tensor,
        other: Tensor | Core | float,
        *,
        out: Any = None,
        pad: float | bool | None = None,
        update_batch_size: bool = False,
    ) -> SelfT:
        """Return the elements of this collection where a condition is true, and those of another elsewhere.

        Args:
            condition: bool; its dims are the first batch dims, or of size one.
            other: a collection whose batch size broadcasts to this one's, a number, or a tensor that broadcasts with every
                leaf.
            out: a collection that gets the result: as its entries, or copied into them where it is locked.
            pad: stands in for the entries that one of the collections lacks; without it they must not.
            update_batch_size: give ``out`` the batch size of the result.

        Raises:
            KeyMismatchError: one collection has a key that the other lacks, and there is no ``pad``.
            BatchSizeError: the batch size of ``other`` does not broadcast.
            BatchSizeError: the condition does not fit the batch.

        >>> td = TensorDict({"a": torch.arange(3)}, [3])
        >>> td.where(torch.tensor([True, False, True]), -1)["a"]
        tensor([ 0, -1,  2])
        """
        size = self.batch_size
        condition = _over_batch(condition, size)
        if condition.ndim != len(size):
            condition = elements.wide(condition, len(size)).expand(size)
        if not isinstance(other, Core):
            result = _choose_or(self, other, condition)
        else:
            mine: Any = self
            theirs: Any = other
            if other.batch_size != size:
                if broadcast_shape(other.batch_size, size) != size:
                    raise BatchSizeError(
                        f"where: the other collection has batch size {list(other.batch_size)}, this one {list(size)}"
                    )
                theirs = expanded(other, mine, size)
            if pad is not None:
                fill = partial(torch.full_like, fill_value=pad)
                mine, theirs = with_keys_of(mine, theirs, fill), with_keys_of(theirs, mine, fill)
            if other.batch_size != size:
                mine, theirs = aligned(mine, theirs)
            result = _choose(mine, theirs, condition)
        if out is None:
            return result  # type: ignore[no-any-return]
        if update_batch_size and out.batch_size != size:
            return out.update(result, update_batch_size=True)  # type: ignore[no-any-return]
        return written(out, size, result, inplace=False)  # type: ignore[no-any-return]

    def pad(
        self: SelfT, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True
    ) -> SelfT:
        """Return a copy with constant elements before and behind those of batch dims.

        Args:
            pad_size: two numbers for each of the first batch dims: how many before, how many behind.
            value: what the new elements are; those of non-tensor data with one value for each element are None.
            inplace: change this collection instead of returning a new one.
            safe: in place, compute every entry before the first one is replaced, so that an error changes
                nothing; otherwise old and new entries are never all in memory together.

        Raises:
            BatchSizeError: there are not two numbers for each dim, or for more dims than there are.

        >>> TensorDict({"a": torch.arange(2)}, [2]).pad([1, 2], value=9)["a"]
        tensor([9, 0, 1, 9, 9])
        """
        plan = elements.pad_plan(self.batch_size, pad_size, value)
        if inplace and not safe and self._stacked() is None:
            refuse_if_locked(self, "pad in place")
            for key, child in dict(self._children()).items():
                self._set_child(
                    key, plan.leaf(child) if isinstance(child, Tensor) else child._transform(plan)
                )
            self._set_batch_size(torch.Size(plan.lead))
            return self
        result = self._transform(plan)
        return self._become(result, "pad") if inplace else result


def pad(
    tensordict: SelfT, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True
) -> SelfT:
    """Return a collection with constant elements added along its batch dims; see :meth:`TensorDict.pad`.

    >>> pad(TensorDict({"a": torch.arange(2)}, [2]), [1, 0], value=9)["a"]
    tensor([9, 0, 1])
    """
    return tensordict.pad(pad_size, value, inplace, safe)


def _mapped(name: str, node: Any, this: Op, mask: Tensor, value: float | complex) -> Any:
    """Return what an operation of a leaf, a mask and a number makes of every leaf."""
    leaves: list[Tensor] = []
    levels = node._collect(leaves)
    masks = _masks(node, mask)
    try:
        return node._with_leaves(foreach(this, leaves, masks, value), levels)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, leaves, masks, value)


def _masks(node: Any, mask: Tensor) -> list[Tensor]:
    """Return a mask of the first batch dims as it broadcasts with each leaf, in the order of ``_collect``."""
    size = node.batch_size
    masks: list[Tensor] = []
    node._spread(elements.wide(_over_batch(mask, size), len(size)), masks)
    return masks


def _as_mask(mask: Any, **options: Any) -> Tensor:
    """Return a mask as a tensor; torch would take a collection for an empty sequence."""
    if isinstance(mask, Core):
        raise TypeError(
            f"a mask is one tensor for all leaves; got a {type(mask).__name__}. With a mask for each leaf: "
            "masks.apply(torch.where, this, other)"
        )
    return mask if isinstance(mask, Tensor) else as_tensor(mask, **options)


def _over_batch(mask: Tensor, batch_size: torch.Size) -> Tensor:
    """Return a mask expanded to the first batch dims."""
    mask = _as_mask(mask)
    if mask.shape == batch_size:
        return mask
    covered = batch_size[: mask.ndim]
    if mask.ndim > len(batch_size) or any(a not in (1, b) for a, b in zip(mask.shape, covered, strict=True)):
        raise BatchSizeError(
            f"the dims of a mask must be the first batch dims, or of size one: got shape {list(mask.shape)} for the "
            f"batch size {list(batch_size)}"
        )
    return mask.expand(covered)


def _filled(leaf: Tensor, value: Any) -> Tensor:
    """Return a number or tensor in the shape of a leaf, and the dtype of both together."""
    if torch.compiler.is_compiling():  # which cannot trace torch.result_type
        return torch.where(torch.zeros_like(leaf, dtype=torch.bool), leaf, value)
    dtype = torch.result_type(leaf, value)
    return as_tensor(value, dtype=dtype, device=leaf.device).expand(leaf.shape)


def _choose_or(node: Any, value: Any, condition: Tensor) -> Any:
    """Return the elements of ``node`` where ``condition`` is true, and those of a number or tensor elsewhere."""
    if isinstance(value, (int, float, complex)):
        try:
            return _mapped("where", node, _WHERE, condition, value)
        except StructureError:
            pass  # one tensor may stand for the whole batch, with nothing to choose: what fails is said with its key below
    if isinstance(value, Tensor) and value.ndim:
        node = node.contiguous()
    if isinstance(value, Tensor) and not value.ndim:
        leaves: list[Tensor] = []
        values: list[Tensor] = []
        levels = node._collect(leaves)
        node._spread(value, values, as_it_is)
        other = node._with_leaves(list(map(_filled, leaves, values)), levels)
    else:
        other = each_leaf("where", node, lambda leaf: _filled(leaf, value))
    return _choose(node, other, condition)


def _choose(mine: Any, theirs: Any, condition: Tensor) -> Any:
    """Return the elements of ``mine`` where ``condition`` is true; lazy stacks stay what they are."""
    stacked, other = mine._stacked(), theirs._stacked()
    if stacked is None or other is None or stacked[1] != other[1]:
        plan = elements.Where(condition)
        left: list[Tensor] = []
        right: list[Tensor] = []
        foreign: list[Core] = []
        levels = mine._collect_both(theirs, left, right, foreign)
        if levels is not None and not foreign:
            try:
                return mine._with_leaves(list(map(plan.leaf, zip(left, right))), levels)
            except (RuntimeError, ValueError):
                pass  # a join says which entry it is
        return mine._join([mine, theirs], plan)
    members, dim = stacked
    return mine._like(
        [
            _choose(member, partner, part)
            for member, partner, part in zip(members, other[0], condition.unbind(dim), strict=True)
        ]
    )
