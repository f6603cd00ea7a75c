"""Indexing: an index is parsed once, against the batch size, into a plan that all leaves share.

The parsed index has no ellipsis (which must expand to batch dims only), no multi-dim mask (converted to integers
once instead of once per leaf) and no item that torch would convert again for each leaf. The new batch size is
computed with the rules of :class:`torch.Tensor`, except that an int selects before the other items: only tensors,
lists and bools count as advanced indices. If those are not adjacent, their dims come first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import index as as_int
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._torch.arrays import as_tensor
from .._torch.dtypes import POSITIONS, ROWS
from .._torch.kernels import PLAIN
from .._torch.private import functorch_level, plain_results
from ..errors import CollectionIndexError
from .plans import REPEATING, ShapePlan, broadcast_shape, cache_plans, slice_length
from .steps import Along, Permute, Range, Reshape, Shape, Step, Take, Whole, check_range, remove_size

_FULL = slice(None)
_MASKS = tuple(dtype for dtype, row in ROWS.items() if row.indexing == "mask")
#: Dtypes that positions in an array, but not in a tensor, can have.
_ARRAYS = tuple(dtype for dtype, row in ROWS.items() if row.array)

#: Minimum number of elements of a leaf for which flattening the dims of a mask is faster.
_MANY = 1000
#: Below this number of positions, min() in Python is as fast as aminmax() of torch.
_FEW = 64

_NOTHING = (
    "the index False selects nothing. A list compared with one value is False: for a mask of a column of values write "
    "data.get(key) == value, or torch.tensor([x == value for x in column])"
)


class IndexPlan(ShapePlan):
    """The plan of an index for one batch size.

    Attributes:
        index: the parsed index, for ``leaf[index]`` and ``leaf[index] = value``.
    """

    __slots__ = ("index", "kept")

    def __init__(
        self, index: Any, lead: Shape, n: int, sources: tuple[int | None, ...], batch: Shape
    ) -> None:
        # Indexing with a tensor inside a tuple takes torch twice as long.
        self.index = index = index[0] if type(index) is tuple and len(index) == 1 else index
        # Hot path: set the slots directly instead of calling super().__init__().
        self.leaf = _make_reader(index)
        self.lead = lead
        self.n = n
        self.kept = sources
        self.batch = batch

    @property
    def is_view(self) -> bool:  # type: ignore[override]
        index = self.index
        return type(index) is int or all(
            _is_scalar(item) or not isinstance(item, (Tensor, bool)) for item in _items(index)
        )

    @property
    def sources(self) -> tuple[int | None, ...]:
        return self.kept

    @property
    def steps(self) -> Sequence[Step]:  # type: ignore[override]
        """The steps of the index, which only lazy stacks and values need; computed on each access."""
        if type(self.index) is int:
            return (Step(0, 1, Take(self.index, 0)),)
        return _list_steps(self._list_items(), self.batch, self.lead)

    def check_range(self) -> None:
        """Raise CollectionIndexError if a position is out of range; torch would raise after a partial write."""
        if torch.compiler.is_compiling() or functorch_level() is not None:
            return
        dim = 0
        for item in _items(self.index):
            if _is_on_host(item) and (count := item.numel()):
                ends = item.flatten().tolist() if count < _FEW else [int(end) for end in item.aminmax()]
                check_range(min(ends), max(ends), self.batch[dim], dim)
            dim += item is not None and type(item) is not bool

    def _list_items(self) -> tuple[object, ...]:
        """Return the items of the index, as lists where a graph can read their positions."""
        return _items(self.index)

    def _find_item(self, dim: int) -> int:
        """Return the position of the item that indexes the batch dim ``dim``."""
        items = _items(self.index)
        return [
            position for position, item in enumerate(items) if item is not None and type(item) is not bool
        ][dim]

    def is_tensor_index(self, dim: int) -> bool:
        """Return True if a tensor indexes the dim: a graph cannot read its content."""
        return dim < self.n and isinstance(self._list_items()[self._find_item(dim)], Tensor)

    def along(self, stack_dim: int) -> Along | None:
        if stack_dim < self.n and type(self.index) is tuple:
            items = self._list_items()
            index = self._find_item(stack_dim)
            # Without the item of the stack dim, torch may put the dims of the tensors elsewhere.
            if _is_split_by_slice(items) != _is_split_by_slice(items[:index] + items[index + 1 :]):
                return None
        return super().along(stack_dim)

    def _make_member_plan(self, stack_dim: int, rest: list[Step]) -> IndexPlan | None:
        items, index = self._list_items(), self._find_item(stack_dim)
        return (
            plan_index(items[:index] + items[index + 1 :], remove_size(self.batch, stack_dim))
            if rest
            else None
        )


class _ListedPlan(IndexPlan):
    """A plan of an index with lists, made in a graph: the positions in lists are known there, those in tensors are not."""

    __slots__ = ("listed",)
    listed: tuple[Any, ...]

    def _list_items(self) -> tuple[object, ...]:
        return self.listed


def _make_reader(index: Any) -> Callable[[Tensor], object]:
    """Return a function that reads a leaf at a parsed index, with ``index_select`` for rows if possible."""
    read = itemgetter(index)
    if not _is_on_host(index) or torch.compiler.is_compiling() or functorch_level() is not None:
        return read
    placed: BoundIndex | None = None
    # index_select is 3 to 30 times as fast as indexing, but supports no negative positions and no other strides.
    selects = type(index) is Tensor and index.ndim == 1

    def read_rows(leaf: Tensor) -> object:
        nonlocal placed, selects
        if type(leaf) in PLAIN or type(leaf).__torch_function__ is plain_results:
            if not leaf.is_cpu:
                placed = placed or BoundIndex(index)
                return leaf[placed.move_to_device_of(leaf)]
            try:
                if selects and leaf.is_contiguous():
                    return leaf.index_select(0, index)
            except (IndexError, RuntimeError):
                selects = False
        return read(leaf)

    return read_rows


class BoundIndex:
    """A parsed index that caches its tensors on the GPU of the leaves; torch would copy them for each leaf."""

    __slots__ = ("index", "sent")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.sent: dict[torch.device, Any] = {}

    def move_to_device_of(self, leaf: Tensor) -> Any:
        """Copy the index to the device of a leaf; CollectionIndexError if it is out of range.

        An out-of-range index inside a kernel would make the CUDA context of the process unusable.
        """
        if leaf.is_cpu or leaf.is_meta or type(leaf) not in PLAIN:
            return self.index
        device = leaf.device
        if device not in self.sent:
            dim, sent = 0, []
            for item in _items(self.index):
                sent.append(_move_item(item, leaf, dim) if _is_on_host(item) else item)
                dim += item is not None and type(item) is not bool
            self.sent[device] = tuple(sent) if type(self.index) is tuple else sent[0]
        return self.sent[device]


def _items(index: object) -> tuple[Any, ...]:
    """Return the items of a parsed index as a tuple; the index is one item or a tuple of items."""
    return index if type(index) is tuple else (index,)


def _is_on_host(index: object) -> bool:
    """Return True if a parsed index has CPU tensors with dims."""
    if type(index) is tuple:
        return any(map(_is_on_host, index))
    return type(index) is Tensor and index.is_cpu and index.ndim > 0


def _move_item(item: Tensor, leaf: Tensor, dim: int) -> Tensor:
    if item.numel():
        low, high = item.aminmax()
        check_range(int(low), int(high), leaf.shape[dim], dim)
    # A non-blocking copy from pageable memory has read its source when the call returns; one from pinned memory has not.
    return item.to(leaf.device, non_blocking=not item.is_pinned())


def _make_mask_reader(index: tuple[Tensor, ...], dims: tuple[int, ...]) -> Callable[[Tensor], Any]:
    """Return a function that reads a leaf at a multi-dim mask; large leaves are flattened and read as rows."""
    read = itemgetter(index)
    if torch.compiler.is_compiling():
        return read
    last = len(dims) - 1
    read_rows: Callable[[Tensor], object] | None = None

    def read_masked(leaf: Tensor) -> object:
        nonlocal read_rows
        if type(leaf) in PLAIN and leaf.numel() >= _MANY:
            try:
                if leaf.is_contiguous():
                    if read_rows is None:
                        rows = index[0]
                        for size, positions in zip(dims[1:], index[1:]):
                            rows = torch.add(positions, rows, alpha=size)
                        read_rows = _make_reader(rows)
                    return read_rows(leaf.flatten(0, last))
            except RuntimeError:
                pass
        return read(leaf)

    return read_masked


def plan_index(index: Any, batch_size: tuple[int, ...]) -> IndexPlan:
    """Parse an index of the batch dims; CollectionIndexError if a dim, position, mask shape or item type is invalid.

    >>> plan_index(slice(1, None), torch.Size([3])).resize_batch(torch.Size([3]))
    torch.Size([2])
    """
    kind = type(index)
    if kind is int:
        if batch_size and -batch_size[0] <= index < batch_size[0]:
            return IndexPlan(index, (), 1, (), batch_size)
    elif kind is slice:
        if batch_size:
            return IndexPlan(index, (slice_length(index, batch_size[0]),), 1, (0,), batch_size)
    elif kind is Tensor and index.dtype is torch.int64 and index.ndim == 1 and batch_size:
        return IndexPlan(index, (len(index),), 1, (0,), batch_size)
    elif index is False and not torch.compiler.is_compiling():
        warnings.warn(_NOTHING, stacklevel=4)
    provided = index if kind is tuple else (index,)
    if REPEATING.issuperset(map(type, provided)):
        return _plan_again(provided, batch_size)
    return _plan_items(provided, batch_size)


def _plan_items(provided: tuple[Any, ...], batch_size: tuple[int, ...]) -> IndexPlan:
    """Check each item of an index against its dims; a mask becomes one integer tensor per dim."""
    parsed = _parse(provided, batch_size)
    items: list[object] = []
    lead: list[int] = []
    kept: list[int | None] = []
    shapes: list[tuple[int, ...]] = []
    names: list[int | None] = []
    front = n = 0
    make_plan: Callable[..., IndexPlan] = IndexPlan
    lists: dict[int, list[int]] = {}
    for item in parsed:
        kind = type(item)
        if kind is list:
            lists[len(items)] = item
            item = as_tensor(item, dtype=torch.int64, device="cpu")
        if kind is slice:
            lead.append(slice_length(item, batch_size[n]))
            kept.append(n)
            n += 1
        elif item is None:
            lead.append(1)
            kept.append(None)
        elif kind is bool or (isinstance(item, Tensor) and item.ndim):
            if not shapes:
                front = len(lead)
            if kind is bool:
                shapes.append((int(item),))
                names.append(None)
            else:
                parts = _positions(item, n, batch_size) if item.dtype in _MASKS else (item,)
                shapes += [tuple(part.shape) for part in parts]
                names += range(n, n + len(parts))
                n += len(parts)
                items += parts
                continue
        else:
            if not isinstance(item, (Tensor, int, torch.SymInt)):
                make_plan = _find_item_plan(item) or IndexPlan
            elif not isinstance(item, Tensor) and not -batch_size[n] <= item < batch_size[n]:
                raise CollectionIndexError(
                    f"index {item} is out of bounds for batch dim {n} of size {batch_size[n]} "
                    f"(index {_show(provided)}, batch size {list(batch_size)})"
                )
            n += 1
        items.append(item)
    if shapes:
        shape = _broadcast(shapes)
        if _is_split_by_slice(items):
            front = 0
        lead[front:front] = shape
        kept[front:front] = names if len(names) == len(shape) == 1 else [None] * len(shape)
    if lists:
        listed = _ListedPlan(tuple(items), tuple(lead), n, tuple(kept), batch_size)
        listed.listed = tuple([lists.get(position, item) for position, item in enumerate(items)])
        return listed
    plan = make_plan(tuple(items), tuple(lead), n, tuple(kept), batch_size)
    if len(parsed) == 1 < len(items):
        plan.leaf = _make_mask_reader(plan.index, batch_size[:n])
    return plan


_plan_again = cache_plans(_plan_items)

#: For items of other packages in an index: a function that returns True for such an item, and the class of the plan.
ITEM_PLANS: list[tuple[Callable[[object], bool], type[IndexPlan]]] = []


def _parse(provided: tuple[Any, ...], batch_size: tuple[int, ...]) -> list[Any]:
    """Convert the items of an index and replace the ellipsis by full slices."""
    items: list[object] = []
    ellipsis = -1
    n = 0
    for item in provided:
        if type(item) is int or type(item) is slice:
            n += 1
        elif item is ...:
            if ellipsis < 0:
                ellipsis = len(items)
            continue
        elif item is not None:
            item = _convert(item)
            if isinstance(item, Tensor) and item.dtype in _MASKS:
                n += item.ndim
                item = item if item.ndim else bool(item)
            elif type(item) is not bool:
                n += 1
        items.append(item)
    ndim = len(batch_size)
    if n > ndim:
        raise CollectionIndexError(
            f"too many indices: {_show(provided)} indexes {n} dims, and the batch size {list(batch_size)} has "
            f"{ndim}; index the entries one by one to reach behind the batch dims"
        )
    if ellipsis >= 0:
        items[ellipsis:ellipsis] = [_FULL] * (ndim - n)
    return items


def _positions(mask: Tensor, dim: int, batch_size: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the positions of the True elements of a mask that starts at ``dim``, one tensor per dim."""
    covered = tuple(batch_size[dim : dim + mask.ndim])
    if tuple(mask.shape) != covered:
        raise CollectionIndexError(
            "the shape of a mask must be that of the dims it covers: got "
            f"{list(mask.shape)} for batch dim {dim} and following, {list(covered)} of the batch "
            f"size {list(batch_size)}"
        )
    return mask.nonzero(as_tuple=True)


def _convert(item: Any) -> object:
    """Convert an item of a less common type to an int, bool or tensor. In a graph, a sequence of ints becomes a list."""
    if isinstance(item, Tensor):
        tensor = item
    elif isinstance(item, (bool, np.bool_)):
        return bool(item)
    elif isinstance(item, torch.SymInt):
        return item
    elif isinstance(item, (list, tuple, range, np.ndarray)):
        return _convert_sequence(item)
    elif _find_item_plan(item) is not None:
        return item
    else:
        try:
            return as_int(item)
        except TypeError:
            raise CollectionIndexError(
                "an index is made of ints, slices, ..., None, bools, and tensors, arrays, lists or ranges "
                f"of ints or bools; got {type(item).__name__} {item!r}"
            ) from None
    return _check_dtype(tensor)


def _find_item_plan(item: object) -> type[IndexPlan] | None:
    """Return the class of plans for an index with an item of another package, or None."""
    return next((plan for is_item, plan in ITEM_PLANS if is_item(item)), None)


def _convert_sequence(item: Any) -> object:
    """Convert a list, tuple, range or array of ints or bools to a tensor, in a graph to a list of ints."""
    is_array = isinstance(item, np.ndarray)
    if torch.compiler.is_compiling() and not is_array and all(type(position) is int for position in item):
        return list(item)
    try:
        # A CPU index works for leaves on any device; torch.set_default_device must not move it elsewhere.
        tensor = as_tensor(list(item) if isinstance(item, range) else item, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "; update() sets the entries of several keys" if str in map(type, item) else ""
        raise CollectionIndexError(f"{_show((item,))} cannot be an index: {error}{hint}") from error
    if not is_array and tensor.numel() == 0:
        return tensor.long()
    return _check_dtype(tensor.long() if is_array and tensor.dtype in _ARRAYS else tensor)


def _check_dtype(tensor: Tensor) -> Tensor:
    if tensor.dtype not in POSITIONS and tensor.dtype not in _MASKS:
        raise CollectionIndexError(
            f"a tensor used as an index must have an int64, int32 or bool dtype; got {tensor.dtype}"
        )
    return tensor


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    if len(shapes) == 1:
        return shapes[0]
    shape = broadcast_shape(*shapes)
    if shape is None:
        raise CollectionIndexError(
            f"the tensors of an index cannot be broadcast together: got shapes {list(map(list, shapes))}"
        )
    return shape


def _is_scalar(item: Any) -> bool:
    """Return True if an item selects one position: an int, or an integer tensor without dims."""
    return not isinstance(item, bool) and (
        isinstance(item, (int, torch.SymInt)) or (isinstance(item, Tensor) and item.ndim == 0)
    )


def _list_steps(items: Sequence[Any], batch: Shape, lead: Shape) -> list[Step]:
    """Return the steps of a parsed index. Several tensors, or one with several dims, replace their dims together."""
    ndims = [1 if type(item) is list else getattr(item, "ndim", 0) for item in items if _is_advanced(item)]
    is_joined = ndims not in ([], [1])
    steps: list[Step] = []
    joined: list[int] = []
    front: int | None = None
    place = dim = 0
    for item in items:
        has_dim = item is not None and type(item) is not bool
        if is_joined and _is_advanced(item):
            front = place if front is None else front
            joined += [place] * has_dim
        elif type(item) is not slice or item != _FULL:
            steps.append(_make_step(item, place, dim, batch))
        dim += has_dim
        # The dim of a scalar is removed before the other items apply.
        place += type(item) is not bool and not _is_scalar(item)
    if front is None:
        return steps
    if _is_split_by_slice(items):
        front = 0
        steps.append(Step(0, place, Permute((*joined, *[i for i in range(place) if i not in joined]))))
    stop = front + len(lead) - (place - len(joined))
    return [*steps, Step(front, front + len(joined), Whole(lead[front:stop]))]


def _make_step(item: Any, place: int, dim: int, batch: Shape) -> Step:
    """Return the step of one item, which indexes the batch dim ``dim``, now at ``place``."""
    if item is None:
        return Step(place, place, Reshape((1,)))
    if type(item) is slice:
        size, start, step = batch[dim], item.start or 0, item.step or 1
        start = (
            max(start + size, 0) if start < 0 else min(start, size)
        )  # torch 2.11 cannot compile slice.indices()
        return Step(place, place + 1, Range(start, slice_length(item, size), step))
    return Step(place, place + 1, Take(item, dim))


def _is_advanced(item: Any) -> bool:
    return isinstance(item, (Tensor, list, bool)) and not _is_scalar(item)


def _is_split_by_slice(items: Sequence[Any]) -> bool:
    """Return True if a slice or None separates two advanced indices."""
    kinds = "".join("" if _is_scalar(item) else "a" if _is_advanced(item) else "-" for item in items).strip(
        "-"
    )
    return "-" in kinds


def _show(index: tuple[Any, ...]) -> str:
    """Format an index for messages, with tensors and arrays as shapes."""
    shown = [
        f"{type(item).__name__} of shape {list(item.shape)}"
        if isinstance(item, (Tensor, np.ndarray))
        else repr(item)
        for item in index
    ]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"
