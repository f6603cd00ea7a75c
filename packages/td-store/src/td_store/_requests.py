"""Plan what a stored tensor reads and writes: one request to its source for a view, or for a view at positions.

A request has an index that every source supports: slices, and at most one tensor of increasing positions. What such an
index cannot express is a larger part of the array, from which torch takes the elements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from td_core.spi import StoredLeaf, is_stored
from td_core.typing import Source, SourceIndex

from ._blocks import count, find_block, get_strides
from ._modes import unwrap

#: A write of more bytes than this is split into several, so that a large array can be filled or copied.
LARGEST_WRITE = 1 << 26


class Request(NamedTuple):
    """A read of one part of a source; ``window`` returns the wanted elements as a view of the result.

    Attributes:
        source: the source.
        part: the index that the source reads.
        window: takes the memory that was read, and returns a view of it with the elements.
        is_exact: True if the view has every element of the memory once, so that a write need not read it first.
        finish: takes the view, and returns the result of the read.
    """

    source: Source
    part: SourceIndex
    window: Callable[[Tensor], Tensor]
    is_exact: bool
    finish: Callable[[Tensor], Tensor] = Tensor.contiguous


@dataclass(frozen=True)
class Points:
    """An index of tensors in normal form.

    Attributes:
        dims: the dims that the tensors index.
        positions: per such dim, an int64 vector of positions, all of the same length.
        shape: the shape that takes the place of these dims.
        place: the dim of the result where this shape starts.
    """

    dims: tuple[int, ...]
    positions: tuple[Tensor, ...]
    shape: torch.Size
    place: int

    def split(self, size: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the sizes of the result before and after the indexed shape, for a view of this size."""
        rest = [n for dim, n in enumerate(size) if dim not in self.dims]
        return rest[: self.place], rest[self.place :]

    @cached_property
    def distinct(self) -> tuple[Tensor, Tensor | None, slice | Tensor]:
        """The distinct positions along the first dim in increasing order, where each one went, and their index."""
        positions, order = _sort_positions(self.positions[0])
        return positions, order, _as_slice(positions)


def find_points(size: Sequence[int], indices: Sequence[Tensor | None]) -> Points:
    """Convert the tensors of an index (positions and masks, None for a whole dim) to vectors of positions."""
    dims: list[int] = []
    tensors: list[Tensor] = []
    at = 0
    for item in indices:
        if item is None:
            at += 1
            continue
        found = [item.to("cpu", torch.int64)]
        if item.dtype in (torch.bool, torch.uint8):
            if item.shape != tuple(size[at : at + item.ndim]):
                raise IndexError(
                    f"the shape of the mask {list(item.shape)} at index {at} does not match the shape of the indexed "
                    f"tensor {list(size)} at index {at}"
                )
            found = list(item.cpu().nonzero(as_tuple=True))
        for tensor in found:
            n = size[at]
            if tensor.numel() and not (-n <= int(tensor.min()) and int(tensor.max()) < n):
                wrong = int(tensor.max()) if int(tensor.max()) >= n else int(tensor.min())
                raise IndexError(f"index {wrong} is out of bounds for dimension {at} with size {n}")
            dims.append(at)
            tensors.append(torch.where(tensor < 0, tensor + n, tensor))
            at += 1
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    tensors = list(torch.broadcast_tensors(*tensors))
    shape = tensors[0].shape
    return Points(tuple(dims), tuple(t.reshape(-1) for t in tensors), shape, dims[0] if together else 0)


def request_view(view: StoredLeaf) -> Request:
    """Plan to read a non-empty view of a source: ``source``, and the sizes, strides and offset of a tensor."""
    block = find_block(view.source.shape, view.shape, view.stride(), int(view.storage_offset()))
    size = tuple(view.shape)
    # The result keeps the order of dims that it has in the store, but not the memory around its elements.
    finish = _keep if block.is_exact else Tensor.clone
    return Request(view.source, block.part, lambda memory: block.view(memory, size), block.is_exact, finish)


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def request_points(view: StoredLeaf, points: Points) -> Request:
    """Plan to read a non-empty view at positions, with one request for the rows that contain them."""
    before, after = points.split(view.shape)
    result = (*before, *points.shape, *after)
    found = _find_increasing(view, points) or _find_rows(view, points)
    if found is not None:
        request, dim, order = found

        def finish(window: Tensor) -> Tensor:
            picked = window if order is None else _pick(window, dim, order)
            return picked.movedim(dim, len(before)).reshape(result)

        return request._replace(finish=finish)
    request, box = _find_box(view, points)
    return request._replace(finish=lambda window: torch.ops.aten.index(window, box).reshape(result))


def _pick(tensor: Tensor, dim: int, order: Tensor) -> Tensor:
    # index_select lacks vectors of unsigned integers.
    picked: Tensor = torch.ops.aten.index(tensor, [*[None] * dim, order])
    return picked


def write_points(view: StoredLeaf, points: Points, value: Tensor, accumulate: bool) -> None:
    """Write values to a non-empty view at positions; read the rows that contain them where that is needed."""
    before, after = points.split(view.shape)
    value = value.expand(*before, *points.shape, *after).reshape(*before, -1, *after)
    found = _find_increasing(view, points) or _find_rows(view, points)
    if found is None:
        request, box = _find_box(view, points)
        with hold(view.source):
            memory = fetch([request])[0]
            torch.ops.aten.index_put_(request.window(memory), box, value, accumulate)
            view.source.write(request.part, memory)
        return
    request, dim, order = found
    value = value.movedim(len(before), dim)
    if request.is_exact and not accumulate:
        memory = _allocate(request, view.dtype)
        if order is not None:  # of several values for one position, the last one counts
            last = torch.zeros(int(order.max()) + 1, dtype=torch.int64, device="cpu")
            last.scatter_reduce_(0, order, torch.arange(len(order), device="cpu"), "amax", include_self=False)
            value = _pick(value, dim, last.to(value.device))
        request.window(memory).copy_(value)
        view.source.write(request.part, memory)
        return
    order = torch.arange(value.shape[dim], device="cpu") if order is None else order
    with hold(view.source):
        memory = fetch([request])[0]
        torch.ops.aten.index_put_(request.window(memory), [*[None] * dim, order], value, accumulate)
        view.source.write(request.part, memory)


def write_view(view: Any, value: Tensor) -> None:
    """Write a value, which may be a stored tensor itself, to a non-empty view, in parts of limited size."""
    rows = max(1, LARGEST_WRITE * view.shape[0] // max(view.nbytes, 1)) if view.ndim else 1
    if view.ndim and rows < view.shape[0]:
        for part, content in zip(view.split(rows), value.split(rows)):
            write_view(part, content)
        return
    request = request_view(view)
    if request.is_exact:
        memory = _allocate(request, view.dtype)
        request.window(memory).copy_(value)
        view.source.write(request.part, memory)
        return
    value = value.clone() if is_stored(value) else value  # which can be read before others are excluded
    with hold(view.source):
        memory = fetch([request])[0]
        request.window(memory).copy_(value)
        view.source.write(request.part, memory)


def hold(source: Source) -> contextlib.AbstractContextManager[object]:
    """Exclude other writers of a source during a block that reads a part and writes it, if the source has a lock."""
    get_lock = getattr(source, "hold", None)
    return contextlib.nullcontext() if get_lock is None else get_lock()


def fetch(requests: Sequence[Request]) -> list[Tensor]:
    """Read the parts of all requests as contiguous memory; with one call per class of sources that has ``read_many``."""
    results: dict[int, Tensor] = {}
    groups: dict[type, list[int]] = {}
    sources = [unwrap(request.source) for request in requests]
    for i, source in enumerate(sources):
        groups.setdefault(type(source), []).append(i)
    for cls, members in groups.items():
        read_many = getattr(cls, "read_many", None) if len(members) > 1 else None
        if read_many is None:
            results.update((i, sources[i].read(requests[i].part)) for i in members)
        else:
            pairs = [(sources[i], requests[i].part) for i in members]
            results.update(zip(members, read_many(sources[members[0]], pairs), strict=True))
    return [_check(request, results[i]) for i, request in enumerate(requests)]


def _check(request: Request, memory: Tensor) -> Tensor:
    """Raise RuntimeError if a source read something other than it was asked for."""
    shape, dtype = _get_shape(request.part), request.source.dtype
    if memory.shape != shape or memory.dtype != dtype:
        raise RuntimeError(
            f"{type(request.source).__name__}.read({request.part}) returned shape {list(memory.shape)} and "
            f"{memory.dtype}; expected shape {list(shape)} and {dtype}"
        )
    return memory.contiguous()


def _get_shape(part: SourceIndex) -> tuple[int, ...]:
    return tuple(count(item) if isinstance(item, slice) else len(item) for item in part)


def _allocate(request: Request, dtype: torch.dtype) -> Tensor:
    return torch.empty(_get_shape(request.part), dtype=dtype, device="cpu")


def _find_increasing(view: StoredLeaf, points: Points) -> tuple[Request, int, Tensor | None] | None:
    """Plan to read positions along one dim that is a dim of the source, or part of it; None if it is not."""
    if len(points.dims) > 1:
        return None
    dim, shape = points.dims[0], view.source.shape
    size, stride, offset = list(view.shape), list(view.stride()), int(view.storage_offset())
    n, step = size.pop(dim), stride.pop(dim)
    block = find_block(shape, size, stride, offset)
    strides = get_strides(shape)
    owner = next((d for d, unit in enumerate(strides) if unit <= step and shape[d] > 1), -1)
    if owner < 0 or not block.is_exact or step % strides[owner] or count(block.part[owner]) > 1:
        return None
    start, step = block.part[owner].start, step // strides[owner]
    if start + (n - 1) * step >= shape[owner]:
        return None
    positions, order, rows = points.distinct
    index: list[slice | Tensor] = list(block.part)
    index[owner] = rows if (start, step) == (0, 1) else _as_slice(start + positions * step)
    size.insert(dim, len(positions))
    places = (*block.places[:dim], (owner, 1), *block.places[dim:])
    block = block._replace(places=places)
    return Request(view.source, tuple(index), lambda memory: block.view(memory, size), True), dim, order


def _find_rows(view: StoredLeaf, points: Points) -> tuple[Request, int, Tensor | None] | None:
    """Plan to read whole rows of the source's first dim with all positions; None if a position spans several rows."""
    shape, stride = view.source.shape, view.stride()
    row = math.prod(shape[1:])
    firsts = sum(
        (position * stride[dim] for dim, position in zip(points.dims, points.positions)),
        torch.tensor(view.storage_offset(), device="cpu"),
    )
    rest = [(n, stride[dim]) for dim, n in enumerate(view.shape) if dim not in points.dims]
    extent = sum((n - 1) * step for n, step in rest)
    if not shape or int((firsts % row).max()) + extent >= row:
        return None
    rows, order = _sort_positions(firsts // row)
    at = firsts % row + (torch.arange(len(rows), device="cpu") if order is None else order) * row
    sizes, steps = (len(rows) * row - extent, *(n for n, _ in rest)), (1, *(step for _, step in rest))

    def window(memory: Tensor) -> Tensor:
        return memory.as_strided(sizes, steps, int(memory.storage_offset()))

    index = (_as_slice(rows), *(slice(0, n, 1) for n in shape[1:]))
    return Request(view.source, index, window, False), 0, at


def _find_box(view: Any, points: Points) -> tuple[Request, list[Tensor | None]]:
    """Plan to read everything between the first and the last position; return also the index into the result."""
    index: list[Tensor | None] = [None] * view.ndim
    for dim, position in zip(points.dims, points.positions):
        first = int(position.min())
        view = view.narrow(dim, first, int(position.max()) - first + 1)
        index[dim] = position - first
    return request_view(view), index


def _sort_positions(positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the distinct positions in increasing order, and where each one went; None if they are so already."""
    if len(positions) < 2 or bool((positions[1:] > positions[:-1]).all()):
        return positions, None
    distinct, order = positions.unique(return_inverse=True)
    return distinct, order


def _as_slice(positions: Tensor) -> slice | Tensor:
    """Return increasing positions as a slice if they are one."""
    first, last, n = int(positions[0]), int(positions[-1]), len(positions)
    if n == 1 or (last - first) % (n - 1) == 0:
        step = 1 if n == 1 else (last - first) // (n - 1)
        if n < 3 or bool((positions[1:] - positions[:-1] == step).all()):
            return slice(first, last + 1, step)
    return positions
