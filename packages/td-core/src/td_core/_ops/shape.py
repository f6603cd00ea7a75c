"""Operations that move, cut or expand batch dims: each makes a plan and applies it.

Arguments are parsed as torch does; dims count from the batch dims. Results are views where a tensor's would
be. As contexts, the operations that move elements without losing any write back on exit what was written into
their result; they refer to their source weakly, so a chain of results does not keep its first one alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _shape_plans as shapes
from .._collection import Core, concurrent_change_error, has_lazy_stack
from .._element_types import as_dtype
from .._indexing import plan_index
from .._keys import unravel_key_to_tuple
from .._locking import check_unlocked
from .._mapping_views import is_leaf_or_value
from .._plans import as_ints
from .._ragged import check_no_hidden_keys, get_display_shape, make_nested_tensor
from .._torch_private import functorch_level, get_base
from ..errors import DepthError, StructureError
from ..typing import DtypeLike, NestedKey
from .entries import EntryMixin
from .locking import LockMixin, do_nothing
from .operands import LEAF_ERRORS, raise_at_leaf

SelfT = TypeVar("SelfT", bound="ShapeMixin")


class ShapeMixin(EntryMixin, LockMixin):
    """``view``, ``permute``, ``expand``, ``unbind`` and their kin, and indexing."""

    __slots__ = ()

    def _index(self, index: Any) -> Any:
        return self._transform(plan_index(index, self.batch_size))

    def view(
        self: SelfT,
        *shape: Any,
        size: Sequence[int] | None = None,
        batch_size: torch.Size | None = None,
        dtype: DtypeLike | None = None,
    ) -> SelfT:
        """Return a view with other batch dims around the same elements.

        As a context, what was written is written back on exit.

        Args:
            *shape: the new batch dims, as ints or one sequence; one may be -1. A dtype instead reinterprets
                the bits of every leaf.
            size: the new batch dims, by keyword.
            batch_size: with a dtype, the batch size of the result.
            dtype: a dtype, by keyword.

        Raises:
            BatchSizeError: the batch has another number of elements.
            RuntimeError: a leaf's strides allow no such view; use ``reshape``.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).view(-1)["a"].shape
        torch.Size([6, 4])
        """
        if size is not None or not shape or type(shape[0]) is not int:
            if len(shape) == 1 and dtype is None and isinstance(as_dtype(shape[0]), torch.dtype):
                (dtype,), shape = shape, ()
            if dtype is not None and not shape and size is None:
                seen_as = methodcaller("view", as_dtype(dtype))
                try:
                    return self.apply(seen_as, batch_size=batch_size)  # type: ignore[attr-defined, no-any-return]
                except LEAF_ERRORS as error:
                    raise_at_leaf(error, "view", self, seen_as, self._leaves())
            shape = parse_ints("view", shape, size)
        if batch_size is not None or dtype is not None:
            raise TypeError("view() takes a dtype, with batch_size=, or new batch dims (size=); it got both")
        return self._transform(shapes.view_plan(self.batch_size, shape))._write_back_on_exit(
            self, _write_reshaped
        )

    def reshape(self: SelfT, *args: Any, size: Sequence[int] | None = None, inplace: bool = False) -> SelfT:
        """Return other batch dims around the same elements, as a view where possible.

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
        result: SelfT = self._transform(shapes.reshape_plan(self.batch_size, shape))
        return self._adopt_result(result, "reshape") if inplace else result

    def flatten(
        self: SelfT, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False
    ) -> SelfT:
        """Return the batch dims from ``start_dim`` to ``end_dim`` as one; all of them by default.

        As a context, what was written is written back on exit.

        Args:
            start_dim: the first dim, 0 by default.
            end_dim: the last dim, -1 by default.
            inplace: change this collection instead of returning a new one.

        Raises:
            DimError: a dim is out of range, or ``start_dim`` comes after ``end_dim``.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).flatten()["a"].shape
        torch.Size([6, 4])
        """
        start = 0 if start_dim is None else start_dim
        end = -1 if end_dim is None else end_dim
        result = self._transform(shapes.flatten_plan(self.batch_size, start, end))
        if inplace:
            return self._adopt_result(result, "flatten")
        return result._write_back_on_exit(self, _write_reshaped)

    def unflatten(self: SelfT, dim: int, unflattened_size: Sequence[int], *, inplace: bool = False) -> SelfT:
        """Return one batch dim as several.

        As a context, what was written is written back on exit.

        Args:
            dim: the dim.
            unflattened_size: what it becomes; one size may be -1.
            inplace: change this collection instead of returning a new one.

        Raises:
            DimError: ``dim`` is out of range.
            BatchSizeError: the sizes do not multiply up to the dim.

        >>> TensorDict({"a": torch.zeros(6, 4)}, [6]).unflatten(0, (2, 3))["a"].shape
        torch.Size([2, 3, 4])
        """
        result = self._transform(shapes.unflatten_plan(self.batch_size, dim, unflattened_size))
        if inplace:
            return self._adopt_result(result, "unflatten")
        return result._write_back_on_exit(self, _write_reshaped)

    def squeeze(self: SelfT, dim: int | Sequence[int] | None = None) -> SelfT:
        """Return the collection without batch dims of size one.

        As a context, what was written is written back on exit.

        Args:
            dim: the dim or a tuple of dims; those of another size stay. All dims by default.

        Raises:
            DimError: a dim is out of range.

        >>> TensorDict({"a": torch.zeros(1, 3, 1)}, [1, 3]).squeeze()["a"].shape
        torch.Size([3, 1])
        """
        return self._transform(shapes.squeeze_plan(self.batch_size, dim))._write_back_on_exit(
            self, _write_reshaped
        )

    def unsqueeze(self: SelfT, dim: int) -> SelfT:
        """Return the collection with a new batch dim of size one.

        As a context, what was written is written back on exit.

        Args:
            dim: the place of the new dim.

        Raises:
            DimError: the dim is out of range.

        >>> TensorDict({"a": torch.zeros(3, 4)}, [3]).unsqueeze(-1)["a"].shape
        torch.Size([3, 1, 4])
        """
        result = self._transform(shapes.unsqueeze_plan(self.batch_size, dim))
        return result._write_back_on_exit(self, _write_reshaped)

    def permute(self: SelfT, *args: Any, dims: Sequence[int] | None = None) -> SelfT:
        """Return a view with the batch dims in another order.

        As a context, what was written is written back on exit.

        Args:
            *args: each batch dim once, as ints or one sequence; nothing leaves them in order.
            dims: the same by keyword.

        Raises:
            DimError: a dim is out of range, missing, or given twice.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).permute(1, 0)["a"].shape
        torch.Size([3, 2, 4])
        """
        size = self.batch_size
        order = tuple(range(len(size))) if dims is None and not args else parse_ints("permute", args, dims)
        return self._permute(shapes.permute_plan(size, order))

    def transpose(self: SelfT, dim0: int, dim1: int) -> SelfT:
        """Return a view with two batch dims swapped.

        As a context, what was written is written back on exit.

        Raises:
            DimError: a dim is out of range.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).transpose(0, 1)["a"].shape
        torch.Size([3, 2, 4])
        """
        return self._permute(shapes.transpose_plan(self.batch_size, dim0, dim1))

    def swapaxes(self: SelfT, axis0: int, axis1: int) -> SelfT:
        """Return :meth:`transpose` of two batch dims, under the name that numpy gives it.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).swapaxes(0, 1).batch_size
        torch.Size([3, 2])
        """
        return self.transpose(axis0, axis1)

    swapdims = swapaxes

    def movedim(self: SelfT, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> SelfT:
        """Return a view with some batch dims at new places and the others in their order.

        As a context, what was written is written back on exit.

        Raises:
            DimError: a dim is out of range, or given twice, or there are not as many places as dims.

        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4]).movedim(0, -1).batch_size
        torch.Size([3, 4, 2])
        """
        return self._permute(shapes.movedim_plan(self.batch_size, source, destination))

    moveaxis = movedim

    def _permute(self: SelfT, plan: shapes.Permute) -> SelfT:
        return self._transform(plan)._write_back_on_exit(self, _write_permuted, plan.order)

    def expand(self: SelfT, *args: Any, size: Sequence[int] | None = None) -> SelfT:
        """Return a view in which batch dims of size one, and new ones in front, repeat without a copy.

        Args:
            *args: the new batch dims, as ints or one sequence; -1 leaves a dim as it is.
            size: the same by keyword.

        Raises:
            BatchSizeError: a dim of another size than one would change.

        >>> TensorDict({"a": torch.zeros(1, 3)}, [1]).expand(5, 2)["a"].shape
        torch.Size([5, 2, 3])
        """
        return self._transform(shapes.expand_plan(self.batch_size, parse_ints("expand", args, size)))

    def expand_as(self: SelfT, other: Core | Tensor) -> SelfT:
        """Return the collection expanded to the shape of a tensor, or to the batch size of a collection.

        Where that has the same key, a leaf is expanded to the shape of the leaf there, and a level to its batch size.

        Raises:
            BatchSizeError: a dim of another size than one would change.
            StructureError: a dim of a leaf would, behind the batch dims.

        >>> TensorDict({"a": torch.zeros(1, 3)}, [1]).expand_as(torch.zeros(4)).batch_size
        torch.Size([4])
        >>> TensorDict({"a": torch.zeros(2, 1)}, [2]).expand_as(TensorDict({"a": torch.zeros(2, 3)}, [2]))["a"].shape
        torch.Size([2, 3])
        """
        if isinstance(other, Tensor):
            return self.expand(other.shape)
        result: Any = self.expand(other.batch_size)
        for key in list(result.keys(True)):
            level: Any = result.get(key)
            goal: Any = other.get(key, None)  # type: ignore[attr-defined]
            # A tensorclass gives plain values for what is no tensor.
            nodes = all(isinstance(item, Core) for item in (level, goal))
            if not nodes or level.batch_size == goal.batch_size:
                continue
            if len(goal.batch_size) < len(level.batch_size):
                level.batch_size = goal.batch_size
            else:
                level = level.expand(goal.batch_size)
            result.set(key, level)
        return result.named_apply(_expand_leaf, other, nested_keys=True, default=None, filter_empty=False)  # type: ignore[no-any-return]

    def broadcast_to(self: SelfT, shape: Sequence[int]) -> SelfT:
        """Return :meth:`expand` of the collection, under the name that numpy gives it.

        >>> TensorDict({"a": torch.zeros(1, 3)}, [1]).broadcast_to((5, 2)).batch_size
        torch.Size([5, 2])
        """
        return self.expand(shape)

    def split(self: SelfT, split_size: int | Sequence[int], dim: int = 0) -> tuple[SelfT, ...]:
        """Return views of consecutive parts of a batch dim.

        Args:
            split_size: the size of each part, the last one shorter where it must be; or a list of sizes.
            dim: the dim.

        Raises:
            DimError: the dim is out of range.
            BatchSizeError: the sizes do not sum to that of the dim.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(3)}, [3]).split(2)]
        [tensor([0, 1]), tensor([2])]
        """
        return self._transform_multi(shapes.split_plan(self.batch_size, split_size, dim))

    def chunk(self: SelfT, chunks: int, dim: int = 0) -> tuple[SelfT, ...]:
        """Return at most ``chunks`` views of parts of one size, the last one shorter where it must be.

        Raises:
            DimError: the dim is out of range.
            ValueError: ``chunks`` is not positive.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(5)}, [5]).chunk(2)]
        [tensor([0, 1, 2]), tensor([3, 4])]
        """
        return self._transform_multi(shapes.chunk_plan(self.batch_size, chunks, dim))

    def tensor_split(
        self: SelfT, indices_or_sections: int | Sequence[int] | Tensor, dim: int = 0
    ) -> tuple[SelfT, ...]:
        """Return views of parts whose sizes differ by one at most, or of those between given positions.

        Raises:
            DimError: the dim is out of range.
            BatchSizeError: no section is asked for, or the positions decrease.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(3)}, [3]).tensor_split([1])]
        [tensor([0]), tensor([1, 2])]
        """
        return self._transform_multi(shapes.tensor_split_plan(self.batch_size, indices_or_sections, dim))

    def unbind(self: SelfT, dim: int) -> tuple[SelfT, ...]:
        """Return one view for each position of a batch dim, without that dim.

        Raises:
            DimError: the dim is out of range.

        >>> [part["a"] for part in TensorDict({"a": torch.arange(2)}, [2]).unbind(0)]
        [tensor(0), tensor(1)]
        """
        return self._transform_multi(shapes.unbind_plan(self.batch_size, dim))

    def atleast_1d(self: SelfT) -> SelfT:
        """Return the collection with one batch dim at least; new ones come first.

        >>> TensorDict({"a": 1}).atleast_1d().batch_size
        torch.Size([1])
        """
        return self._at_least(1)

    def atleast_2d(self: SelfT) -> SelfT:
        """Return the collection with two batch dims at least; new ones come first.

        >>> TensorDict({"a": torch.zeros(3)}, [3]).atleast_2d().batch_size
        torch.Size([1, 3])
        """
        return self._at_least(2)

    def atleast_3d(self: SelfT) -> SelfT:
        """Return the collection with three batch dims at least; new ones come first.

        >>> TensorDict({"a": torch.zeros(3)}, [3]).atleast_3d().batch_size
        torch.Size([1, 1, 3])
        """
        return self._at_least(3)

    def _at_least(self: SelfT, ndim: int) -> SelfT:
        missing = ndim - len(self.batch_size)
        if missing <= 0:
            return self if torch.compiler.is_compiling() else self._undo_on_exit(do_nothing)
        result: SelfT = self._index((None,) * missing)
        return result._write_back_on_exit(self, _write_reshaped)

    def contiguous(self: SelfT, *, canonical: bool = False, inplace: bool = False) -> SelfT:
        """Return a dense collection whose leaves are contiguous; those that are already are shared.

        Args:
            canonical: also give dims of size one the strides of a fresh tensor; torch leaves them alone.
            inplace: change this collection instead of returning a new one.

        Raises:
            StructureError: a lazy stack has ragged entries; see :meth:`densify`.

        >>> td = TensorDict({"a": torch.zeros(2, 3).T}, [3])
        >>> td.contiguous()["a"].is_contiguous()
        True
        """
        result = self._transform(shapes.Dense(_canonical if canonical else Tensor.contiguous))
        return self._adopt_result(result, "make contiguous") if inplace else result

    def densify(self: SelfT, layout: torch.layout = torch.strided) -> SelfT:
        """Return the collection with every lazy stack stacked; ragged entries become nested tensors.

        A tensor that some members of a stack lack, which the stack hides, becomes a nested tensor with a component
        without elements for each of those.

        Args:
            layout: the layout of those nested tensors: ``torch.strided`` or ``torch.jagged``.

        Raises:
            DepthError: the nesting is deeper than Python can call.
            KeyMismatchError: what some members lack is no tensor, or has no dims.

        >>> from td_core import LazyStackedTensorDict
        >>> stack = LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(2)}))
        >>> stack.densify(torch.jagged)["a"].is_nested
        True
        """
        if not has_lazy_stack(self):
            return self._with_children(self._children())
        try:
            return self._densify(layout)  # type: ignore[no-any-return]
        except RecursionError as error:
            raise DepthError(
                f"the levels are too many to be stacked one inside the other: {error}"
            ) from error

    def _densify(self, layout: torch.layout) -> Any:
        if self._is_value:
            return self
        stacked = self._members_and_dim()
        children = self._children()
        entries: dict[str, Any] = {}
        for key in children:
            if stacked is not None and len({_get_shape(member._get_child(key)) for member in stacked[0]}) > 1:
                entries[key] = self._get_as(key, None, as_nested_tensor=True, layout=layout)
            else:
                child = children[key]
                entries[key] = child if isinstance(child, Tensor) else child._densify(layout)
        if stacked is None:
            return self._with_children(entries)
        members, dim = stacked
        for key in dict.fromkeys(chain(*[list(member._children()) for member in members])):
            if key not in children:
                entries[key] = make_nested_tensor(key, _fill_gaps(key, members), dim, layout)
        first = members[0]
        while (below := first._members_and_dim()) is not None:
            first = below[0][0]
        # Of the class that the dense stack would have.
        return first._with_children(
            entries, batch_size=self.batch_size, device=self.device, names=self._names
        )

    def _adopt_result(self: SelfT, result: SelfT, what: str) -> SelfT:
        """Take over the entries, batch size and names of a result of this structure.

        Raises:
            LockedError: the collection is locked.
            StructureError: it is a lazy stack, whose members hold the entries.
        """
        check_unlocked(self, f"{what} in place")
        if self._members_and_dim() is not None:
            raise StructureError(
                f"cannot {what} in place: the members of a {type(self).__name__} hold its entries; leave inplace out"
            )
        for key, child in result._children().items():
            self._set_child(key, child)
        self._set_batch_size(result.batch_size)
        self._names = result._names
        return self


def parse_ints(what: str, args: tuple[Any, ...], named: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return ints given one by one, as one sequence, or by keyword."""
    if named is not None:
        if args:
            raise TypeError(
                f"{what}() takes its sizes by position or by keyword, not both; got {args} and {named}"
            )
        return tuple(named)
    return as_ints(args[0]) if len(args) == 1 else args


def _get_shape(entry: Any) -> Any:
    return get_display_shape(entry) if isinstance(entry, Tensor) else None


def _fill_gaps(key: str, members: Sequence[Core]) -> list[Tensor]:
    """Return what members have under a key, with tensors without elements for those that lack it."""
    results = [member._children().get(key) for member in members]
    first = next((child for child in results if child is not None), None)
    if first is None:
        raise concurrent_change_error(members[0])
    if not isinstance(first, Tensor) or not first.ndim:
        check_no_hidden_keys([member._children().keys() for member in members])
    gap = first.new_empty((0, *first.shape[1:]))
    return [gap if child is None else child for child in results]


def _canonical(leaf: Tensor) -> Tensor:
    leaf = leaf.contiguous()
    return leaf.view(-1).view(leaf.shape) if 1 in leaf.shape else leaf


def _write_reshaped(owner: Any, result: Any) -> None:
    write_back(owner, result.reshape(owner.batch_size))


def _write_permuted(owner: Any, result: Any, order: tuple[int, ...]) -> None:
    write_back(owner, result.permute(sorted(range(len(order)), key=order.__getitem__)))


def write_back(owner: Any, result: Any) -> None:
    """Write the entries that are no views of the owner's own leaves; a locked owner gets them in place."""
    left, right = owner._members_and_dim(), result._members_and_dim()
    if left is not None and right is not None and left[1] == right[1] and len(left[0]) == len(right[0]):
        # Entries of the members need not stack.
        for member, part in zip(left[0], right[0]):
            write_back(member, part)
        return
    for key, value in result.items(True, True, _is_written_whole):
        left = owner.get(key, None)
        if all(isinstance(item, Core) and not item._is_value for item in (left, value)):
            write_back(left, value)
            continue
        if isinstance(left, Tensor) and isinstance(value, Tensor) and same_memory(left, value):
            continue
        if left is not None and not isinstance(value, Tensor):
            # A lazy stack gathers the values of its members, which stay as they are where nothing was written.
            path = unravel_key_to_tuple(key)
            if owner._get_path(path)._has_equal_values(result._get_path(path)):
                continue
        if owner.is_locked and left is not None:
            owner.set_(key, value)
        else:
            owner.set(key, value)


def _is_written_whole(cls: type) -> bool:
    """Tell whether entries of a class are leaves, values, or possibly lazy stacks, whose entries need not stack."""
    return is_leaf_or_value(cls) or cls._members_and_dim is not Core._members_and_dim  # type: ignore[attr-defined]


def same_memory(left: Tensor, value: Tensor) -> bool:
    """Tell whether two tensors are surely the same elements of the same memory, laid out alike.

    >>> leaf = torch.zeros(2)
    >>> same_memory(leaf, leaf.detach()), same_memory(leaf, leaf.clone())
    (True, False)
    """
    if left is value:
        return True
    if torch.compiler.is_compiling() or functorch_level() is not None:
        return False  # neither knows the memory of a tensor
    try:
        same = left.is_set_to(value)
    except RuntimeError:
        # There is no one block of memory: on the meta device, in nested tensors.
        base, right = get_base(left), get_base(value)
        same = right is not None and right is (left if base is None else base)
        same = same and left.shape == value.shape and left.stride() == value.stride()
    return same and left.dtype == value.dtype and left.is_conj() == value.is_conj()


def _expand_leaf(key: NestedKey, leaf: Tensor, other: Any) -> Tensor:
    if not isinstance(other, Tensor):
        return leaf
    try:
        return leaf.expand(other.shape)
    except RuntimeError as error:
        raise StructureError(f"expand_as: key {key!r}: {error}") from error
