"""Indexing, and shape operations such as ``view``, ``permute``, ``expand`` and ``unbind``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.locking import write_back_on_exit
from .._functions.shape import (
    Replacement,
    adopt_result,
    apply_permutation,
    as_canonical,
    expand_like,
    parse_ints,
    parse_order,
    prepend_dims,
    reshape_batch,
    stack_lazy_levels,
    take_over_entries,
    view_batch,
    write_reshaped,
)
from .._plans import shapes
from .._plans.index import plan_index
from .._plans.plans import WholePlan, check_ints
from .._tree.dim_names import find_dims
from .._tree.node import Core
from .._tree.stored_leaves import index_leaves
from ..typing import DtypeLike


class ShapeMixin(Core):
    """Indexing, and shape operations such as ``view``, ``permute``, ``expand`` and ``unbind``."""

    __slots__ = ()

    def _take_over(self, result: Core) -> list[Replacement] | None:
        """Take over a result, and return the nodes below that take over theirs themselves; None if this kind cannot."""
        return take_over_entries(self, result)

    def _index(self, index: object) -> Any:
        return index_leaves(self, plan_index(index, self.batch_size))

    def view(
        self,
        *shape: object,
        size: Sequence[int] | None = None,
        batch_size: torch.Size | None = None,
        dtype: DtypeLike | None = None,
    ) -> Self:
        """Return a view with another batch shape of the same number of elements.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            *shape: the new batch dims, as ints or one sequence; one may be -1. A dtype instead reinterprets
                the bits of every leaf.
            size: the new batch dims, by keyword.
            batch_size: with a dtype, the batch size of the result.
            dtype: a dtype, by keyword.

        Raises:
            BatchSizeError: the batch has another number of elements.
            RuntimeError: a leaf's strides do not allow such a view; use ``reshape``.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).view(-1)["a"].shape
        torch.Size([6, 4])
        """
        return view_batch(self, shape, size, batch_size, dtype)

    def reshape(self, *args: object, size: Sequence[int] | None = None, inplace: bool = False) -> Self:
        """Reshape the batch dims; the result is a view if the strides allow it.

        Args:
            *args: the new batch dims, as ints or one sequence; one may be -1.
            size: the same by keyword.
            inplace: change this collection instead of returning a new one.

        Raises:
            BatchSizeError: the batch has another number of elements.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).reshape(3, 2)["a"].shape
        torch.Size([3, 2, 4])
        """
        shape = parse_ints("reshape", args, size)
        result: Self = self._transform(shapes.reshape_plan(self.batch_size, shape))
        return adopt_result(self, result, "reshape") if inplace else result

    def flatten(
        self, start_dim: int | str | None = None, end_dim: int | str | None = None, *, inplace: bool = False
    ) -> Self:
        """Flatten the batch dims from ``start_dim`` to ``end_dim`` into one; all by default.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            start_dim: the first dim, 0 by default.
            end_dim: the last dim, -1 by default.
            inplace: change this collection instead of returning a new one.

        Raises:
            DimError: a dim is out of range, or ``start_dim`` comes after ``end_dim``.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).flatten()["a"].shape
        torch.Size([6, 4])
        """
        if type(start_dim) is str or type(end_dim) is str:
            start_dim, end_dim = find_dims(self, "flatten", (start_dim, end_dim))
        return reshape_batch(
            self, shapes.flatten_plan(self.batch_size, start_dim, end_dim), "flatten", inplace
        )

    def unflatten(self, dim: int | str, unflattened_size: Sequence[int], *, inplace: bool = False) -> Self:
        """Split one batch dim into several.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            dim: the batch dim to split.
            unflattened_size: the sizes of the new dims; one may be -1.
            inplace: change this collection instead of returning a new one.

        Raises:
            DimError: ``dim`` is out of range.
            BatchSizeError: the product of the sizes is not the size of the dim.

        >>> TensorDict({"a": torch.zeros(6, 4)}, [6]).unflatten(0, (2, 3))["a"].shape
        torch.Size([2, 3, 4])
        """
        place = dim if type(dim) is int else find_dims(self, "unflatten", dim)
        plan = shapes.unflatten_plan(self.batch_size, place, unflattened_size)
        return reshape_batch(self, plan, "unflatten", inplace)

    def squeeze(self, dim: int | str | Sequence[int | str] | None = None) -> Self:
        """Remove batch dims of size one.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            dim: the dim or a tuple of dims; a dim of another size is kept. All dims by default.

        Raises:
            DimError: a dim is out of range.

        >>> TensorDict({"a": torch.zeros(1, 3, 1)}, [1, 3]).squeeze()["a"].shape
        torch.Size([3, 1])
        """
        place = dim if dim is None or type(dim) is int else find_dims(self, "squeeze", dim)
        result = self._transform(shapes.squeeze_plan(self.batch_size, place))
        return write_back_on_exit(result, self, write_reshaped)

    def unsqueeze(self, dim: int) -> Self:
        """Insert a batch dim of size one.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            dim: the position of the new dim.

        Raises:
            DimError: the dim is out of range.

        >>> TensorDict({"a": torch.zeros(3, 4)}, [3]).unsqueeze(-1)["a"].shape
        torch.Size([3, 1, 4])
        """
        result = self._transform(shapes.unsqueeze_plan(self.batch_size, dim))
        return write_back_on_exit(result, self, write_reshaped)

    def permute(self, *args: object, dims: Sequence[int] | None = None) -> Self:
        """Return a view with the batch dims in another order.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Args:
            *args: each batch dim once, as ints or one sequence; without arguments the order is kept.
            dims: the same by keyword.

        Raises:
            DimError: a dim is out of range, missing, or repeated.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).permute(1, 0)["a"].shape
        torch.Size([3, 2, 4])
        """
        is_parsed = len(args) > 1 and self._names is None and dims is None and {*map(type, args)} == {int}
        order = args if is_parsed else parse_order(self, args, dims)
        return apply_permutation(self, shapes.permute_plan(self.batch_size, order))

    def transpose(self, dim0: int | str, dim1: int | str) -> Self:
        """Return a view with two batch dims swapped.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Raises:
            DimError: a dim is out of range.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).transpose(0, 1)["a"].shape
        torch.Size([3, 2, 4])
        """
        if type(dim0) is str or type(dim1) is str:
            dim0, dim1 = find_dims(self, "transpose", (dim0, dim1))
        return apply_permutation(self, shapes.transpose_plan(self.batch_size, dim0, dim1))

    def swapaxes(self, axis0: int | str, axis1: int | str) -> Self:
        """Return a view with two batch dims swapped: numpy's name for :meth:`transpose`.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).swapaxes(0, 1).batch_size
        torch.Size([3, 2])
        """
        return self.transpose(axis0, axis1)

    swapdims = swapaxes

    def movedim(self, source: int | str | tuple[int | str, ...], destination: int | tuple[int, ...]) -> Self:
        """Return a view with some batch dims at new positions; the others keep their order.

        In a ``with`` block, changes of the result are written back to this collection on exit.

        Raises:
            DimError: a dim is out of range or repeated, or ``source`` and ``destination`` differ in length.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4]).movedim(0, -1).batch_size
        torch.Size([3, 4, 2])
        """
        place = source if type(source) is int else find_dims(self, "movedim", source)
        return apply_permutation(self, shapes.movedim_plan(self.batch_size, place, destination))

    moveaxis = movedim

    def expand(self, *args: object, size: Sequence[int] | None = None) -> Self:
        """Return a view with batch dims of size one expanded, and new leading dims added, without a copy.

        Args:
            *args: the new batch dims, as ints or one sequence; -1 keeps the size of a dim.
            size: the same by keyword.

        Raises:
            BatchSizeError: a dim that would change has a size other than one.

        >>> TensorDict({"a": torch.zeros(1, 3)}, [1]).expand(5, 2)["a"].shape
        torch.Size([5, 2, 3])
        """
        return self._transform(shapes.expand_plan(self.batch_size, parse_ints("expand", args, size)))

    def expand_as(self, other: Core | Tensor) -> Self:
        """Expand the collection to the shape of a tensor, or to the batch size of a collection.

        If a collection has the same key, a leaf is expanded to the shape of that leaf, and a nested collection to that
        batch size.

        Raises:
            BatchSizeError: a batch dim that would change has a size other than one.
            StructureError: a feature dim that would change has a size other than one.

        >>> TensorDict({"a": torch.zeros(1, 3)}, [1]).expand_as(torch.zeros(4)).batch_size
        torch.Size([4])
        >>> TensorDict({"a": torch.zeros(2, 1)}, [2]).expand_as(TensorDict({"a": torch.zeros(2, 3)}, [2]))["a"].shape
        torch.Size([2, 3])
        """
        return expand_like(self, other)

    def broadcast_to(self, shape: Sequence[int]) -> Self:
        """Return a view expanded to ``shape``: numpy's name for :meth:`expand`.

        >>> TensorDict({"a": torch.zeros(1, 3)}, [1]).broadcast_to((5, 2)).batch_size
        torch.Size([5, 2])
        """
        check_ints("broadcast_to", "shape", shape, "int | Sequence[int]")
        return self.expand(shape)

    def split(self, split_size: int | Sequence[int], dim: int | str = 0) -> tuple[Self, ...]:
        """Split a batch dim into consecutive parts, which are views.

        Args:
            split_size: the size of each part, where the last one may be smaller; or a list of sizes.
            dim: the batch dim to split.

        Raises:
            DimError: the dim is out of range.
            BatchSizeError: the sum of the sizes is not the size of the dim.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(3)}, [3]).split(2)]
        [tensor([0, 1]), tensor([2])]
        """
        place = dim if type(dim) is int else find_dims(self, "split", dim)
        return self._transform_multi(shapes.split_plan(self.batch_size, split_size, place))

    def chunk(self, chunks: int, dim: int | str = 0) -> tuple[Self, ...]:
        """Split a batch dim into at most ``chunks`` views of equal size; the last one may be smaller.

        Raises:
            DimError: the dim is out of range.
            ValueError: ``chunks`` is not positive.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(5)}, [5]).chunk(2)]
        [tensor([0, 1, 2]), tensor([3, 4])]
        """
        place = dim if type(dim) is int else find_dims(self, "chunk", dim)
        return self._transform_multi(shapes.chunk_plan(self.batch_size, chunks, place))

    def tensor_split(
        self, indices_or_sections: int | Sequence[int] | Tensor, dim: int | str = 0
    ) -> tuple[Self, ...]:
        """Split a batch dim into views of nearly equal size, or at given indices, as :func:`torch.tensor_split` does.

        Raises:
            DimError: the dim is out of range.
            BatchSizeError: the number of sections is not positive, or the indices decrease.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(3)}, [3]).tensor_split([1])]
        [tensor([0]), tensor([1, 2])]
        """
        place = dim if type(dim) is int else find_dims(self, "tensor_split", dim)
        return self._transform_multi(shapes.tensor_split_plan(self.batch_size, indices_or_sections, place))

    def unbind(self, dim: int | str = 0) -> tuple[Self, ...]:
        """Return one view per index of a batch dim, without that dim.

        Raises:
            DimError: the dim is out of range.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(2)}, [2]).unbind(0)]
        [tensor(0), tensor(1)]
        """
        place = dim if type(dim) is int else find_dims(self, "unbind", dim)
        return self._transform_multi(shapes.unbind_plan(self.batch_size, place))

    def atleast_1d(self) -> Self:
        """Prepend batch dims of size one until the collection has at least one batch dim.

        >>> TensorDict({"a": 1}).atleast_1d().batch_size
        torch.Size([1])
        """
        return prepend_dims(self, 1)

    def atleast_2d(self) -> Self:
        """Prepend batch dims of size one until the collection has at least two batch dims.

        >>> TensorDict({"a": torch.zeros(3)}, [3]).atleast_2d().batch_size
        torch.Size([1, 3])
        """
        return prepend_dims(self, 2)

    def atleast_3d(self) -> Self:
        """Prepend batch dims of size one until the collection has at least three batch dims.

        >>> TensorDict({"a": torch.zeros(3)}, [3]).atleast_3d().batch_size
        torch.Size([1, 1, 3])
        """
        return prepend_dims(self, 3)

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """Return a dense collection whose leaves are contiguous; contiguous leaves are shared, not copied.

        Args:
            canonical: also set the strides of dims of size one to those of a new tensor, which torch does not.
            inplace: change this collection instead of returning a new one.

        Raises:
            StructureError: a lazy stack has ragged entries; see :meth:`densify`.

        >>> td = TensorDict({"a": torch.zeros(2, 3).T}, [3])
        >>> td.contiguous()["a"].is_contiguous()
        True
        """
        result = self._transform(WholePlan((), (), as_canonical if canonical else Tensor.contiguous))
        return adopt_result(self, result, "make contiguous", dense=True) if inplace else result

    def densify(self, layout: torch.layout = torch.strided) -> Self:
        """Stack every lazy stack; ragged entries become nested tensors.

        A leaf that some members lack, which the lazy stack does not list, becomes a nested tensor with an empty
        component per such member.

        Args:
            layout: the layout of those nested tensors: ``torch.strided`` or ``torch.jagged``.

        Raises:
            KeyMismatchError: an entry that some members lack is not a tensor, or has no dims.

        >>> from td_core import LazyStackedTensorDict
        >>> stack = LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(2)}))
        >>> stack.densify(torch.jagged)["a"].is_nested
        True
        """
        return stack_lazy_levels(self, layout)
