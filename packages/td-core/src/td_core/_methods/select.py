"""Methods ``gather``, ``masked_select``, ``masked_fill``, ``where`` and ``pad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .._functions.select import (
    apply_masked,
    as_mask,
    broadcast_mask,
    check_fill,
    choose_elements,
    gather_elements,
    pad_batch,
)
from .._functions.shape import adopt_result
from .._torch.kernels import make_op
from .._tree.dim_names import find_dims
from .._tree.node import Core
from .._writes.inplace import write_leaves

if TYPE_CHECKING:
    from typing_extensions import Self


_FILL = make_op("masked_fill_", Tensor.masked_fill_)

_FILLED = make_op("masked_fill", Tensor.masked_fill)


class SelectMixin(Core):
    """Methods ``gather``, ``masked_select``, ``masked_fill``, ``where`` and ``pad``."""

    __slots__ = ()

    def gather(self, dim: int | str, index: Tensor, out: object = None, *, inplace: bool = False) -> Self:
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
        return gather_elements(self, find_dims(self, "gather", dim), index, out, inplace)

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
        result: Self = self._index(as_mask("masked_select", mask, device="cpu").bool())
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
        filled: Self = apply_masked("masked_fill", self, _FILLED, mask, check_fill("masked_fill", value))
        return filled

    def masked_fill_(self, mask: Tensor, value: float | bool) -> Self:
        """Fill every leaf with ``value`` in place where a mask is true; arguments as for :meth:`masked_fill`.

        Raises:
            BatchSizeError: the mask does not broadcast to the first batch dims.
            StructureError: a leaf cannot be written in place; nothing was written.

        >>> TensorDict({"a": torch.arange(3)}, [3]).masked_fill_(torch.tensor([True, False, True]), -1)["a"]
        tensor([-1,  1, -1])
        """
        leaves, masks = self._leaves(), broadcast_mask("masked_fill_", self, mask)
        write_leaves("masked_fill_", self, _FILL, leaves, masks, check_fill("masked_fill_", value))
        return self

    def where(
        self,
        condition: Tensor,
        other: Tensor | Core | float,
        *,
        out: Tensor | Core | None = None,
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
        return choose_elements(self, condition, other, out, pad, update_batch_size)

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
        return pad_batch(self, pad_size, value, inplace, safe)
