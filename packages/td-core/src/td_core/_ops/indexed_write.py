"""Plans of ``td[index] = value``: check and list all writes first, then run them.

A missing entry is created with zeros at the other positions and added to its node after all writes. For a lazy stack, the
plan contains one plan per member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._coerce import NUMBERS, WRAPPED, coerce
from .._collection import Child, Core, align_dims, check_keys, make_dense, show_path
from .._foreach import order_subclasses_first
from .._indexing import BoundIndex, IndexPlan
from .._keys import unravel_key_to_tuple
from .._locking import check_unlocked
from .._torch_private import assert_in_graph
from .._walks import get_path, has_entries, list_holders, walk_levels
from ..errors import BatchSizeError, StructureError
from .leaf_writes import (
    RARELY_SCATTERED,
    check_content,
    check_fits,
    check_no_grad,
    check_not_expanded,
    check_quantized_shape,
    check_store,
    check_transforms,
    clone_overlapping,
    is_overlap_error,
)
from .operands import copy_leaves, rephrase_error

Path = tuple[str, ...]

#: Target node, value to write, key path of the node, and number of batch dims in values of new entries, if known.
Level = tuple[Any, Any, Path, int | None]

#: Unknown number of batch dims: a new value has all of them if its shape starts with the batch size, else none.
ANY = -1

_ARRAYS = (Tensor, np.ndarray, list, tuple, *NUMBERS)

_BASIC = {int, slice, type(None)}


class Entries(dict[str, Any]):
    """Entries of a collection whose batch size differs from that of the indexed target."""


class IndexedWrite:
    """Plan of one ``td[index] = value``."""

    def __init__(
        self, plan: IndexPlan, root: Core, value: Any, non_blocking: bool, dims: int | None = None
    ) -> None:
        self.index = plan.index
        self.basic = is_basic(plan.index)
        if not self.basic:
            plan.check_range()
        self.eager = not torch.compiler.is_compiling()
        size = root.batch_size
        self.lead = (*plan.lead, *size[plan.n :])
        self.n = len(size)
        self.non_blocking = non_blocking
        self.targets: list[Tensor] = []
        self.paths: list[Path] = []
        self.values: list[Any] = []
        self.made: list[tuple[Core, str, Child]] = []
        self.others: list[tuple[Core, str, Any, Any]] = []
        self.members: list[IndexedWrite] = []
        self.rows: list[tuple[Tensor, Any]] = []
        self.stacks: list[tuple[Any, Any]] = []
        self._read(root, value, dims)

    def _read(self, root: Core, value: Any, dims: int | None) -> None:
        """Check ``value`` against ``root`` and list the writes."""
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value[()]
        if isinstance(value, NUMBERS) or (isinstance(value, Tensor) and value.ndim == 0):
            self._fill(root, value)
            return
        if isinstance(value, Core) and has_entries(value):
            value = as_rows(value, torch.Size(self.lead))
        elif not isinstance(value, Mapping):
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            if isinstance(value, (list, tuple)) and any(isinstance(item, Core) for item in value):
                what = f"a {type(value).__name__} of {len(value)}: stack() or lazy_stack() it first"
            raise StructureError(
                f"a collection takes a collection of entries, a mapping or a number at an index; got {what}"
            )
        lead, n = self.lead, self.n
        # Last pair of shapes that passed: skip the checks if it repeats. A set would hash symbolic sizes, which raises.
        fitting: tuple[torch.Size, torch.Size] | None = None
        todo: list[Level] = [(root, value, (), dims)]
        new: list[Level] = []
        result: set[int | None] = set()
        while todo or new:
            if not todo:
                # The values of existing entries determine the number of batch dims, so new entries are handled last.
                node, entry, path, dims = new.pop(0)
                self._make(node, entry, path, todo, find_common_dims(result, dims))
                continue
            node, source, path, dims = todo.pop()
            children = node._children()
            entries, told = source, False
            if isinstance(source, Core):
                entries = source._children()
                told = len(lead) > 0 and source.batch_size[: len(lead)] == lead
                dims = len(lead) if told else ANY if dims is None else dims
            elif isinstance(source, Entries):
                dims = ANY if dims is None else dims
            for key, entry in dict(entries).items():
                if type(key) is not str:
                    key, *rest = unravel_key_to_tuple(key)
                    for part in reversed(rest):
                        entry = {part: entry}
                target = children.get(key)
                if isinstance(target, Tensor):
                    if not isinstance(entry, Tensor):
                        entry = self._as_leaf(entry, target, (*path, key))
                    if target.is_nested:
                        self._list_components(target, entry, (*path, key))
                        continue
                    result.add(len(lead) if told else count_leading_dims(entry, target.ndim - n))
                    shapes = (entry.shape, target.shape)
                    if shapes != fitting:
                        wanted = torch.Size(lead + tuple(target.shape[n:]))
                        if torch.compiler.is_compiling() and not self.basic:
                            check_broadcast(wanted, entry.shape)
                        if told and entry.ndim < len(wanted):
                            entry = align_dims(entry, len(wanted), len(lead))
                        elif entry.ndim > len(wanted):
                            entry = drop_leading_ones(entry, len(wanted))
                        else:
                            fitting = shapes
                        check_fits(entry, wanted, (*path, key))
                    self._list(target, entry, (*path, key))
                elif target is None:
                    check_unlocked(node, f"make {show_path((*path, key))}")
                    check_keys(node, {key: entry})
                    new.append((node, entry, (*path, key), dims))
                else:
                    self._read_level(node, key, target, entry, (*path, key), todo)
        for stack, entry in self.stacks:
            self.members += stack._plan_writes(
                self.index, entry, self.non_blocking, find_common_dims(result, None)
            )

    def _fill(self, root: Core, value: Any, path: Path = ()) -> None:
        taken: set[torch.dtype] = set()
        if isinstance(value, np.generic):
            value = value.item()
        for _, position, entries in walk_levels(root):
            prefix = path + get_path(position)
            for key, child in list(entries.items()):
                if isinstance(child, Tensor):
                    if child.dtype not in taken and isinstance(value, NUMBERS) and not child.is_quantized:
                        _as_number(value, child.dtype, None, (*prefix, key))
                        taken.add(child.dtype)
                    if child.is_nested:
                        self._list_components(child, value, (*prefix, key))
                        continue
                    self._list(child, value, (*prefix, key))
                elif child._members_and_dim() is not None:
                    self.members += child._plan_writes(self.index, value, self.non_blocking)
                    del entries[key]

    def _list(self, target: Tensor, value: Any, path: Path) -> None:
        """List one write into a leaf; for a basic index, into the view that it selects."""
        if target.requires_grad or (self.eager and target.is_inference()):
            check_no_grad(target, path)
        if target.layout is not torch.strided:
            raise StructureError(
                f"cannot write {show_path(path)} at an index: its layout, {target.layout}, has no views"
            )
        check_store(target, path)
        check_transforms(target, path, value, *(self.index if type(self.index) is tuple else (self.index,)))
        if isinstance(value, Tensor):
            check_content(target, path, value)
        if self.basic:
            try:
                target = target[self.index]
            except (RuntimeError, TypeError) as error:
                raise rephrase_error(error, f"cannot write {show_path(path)} at an index: {error}") from error
            if isinstance(value, Tensor):
                check_quantized_shape(value, target, path)
        else:
            _check_scatter(target, path)
        check_not_expanded(target, path)
        self.targets.append(target)
        self.paths.append(path)
        self.values.append(value)

    def _list_components(self, target: Tensor, value: Any, path: Path) -> None:
        """List the writes into the components of a nested tensor that the index selects."""
        check_no_grad(target, path)
        positions = torch.arange(target.size(0), device=target.device)[self.index]
        if positions.ndim > 1:
            raise StructureError(
                f"cannot write {show_path(path)} at an index: it is a nested tensor, whose components have one batch "
                f"dim, and the index gives {positions.ndim}"
            )
        parts = target.unbind()
        rows = [parts[i] for i in positions.flatten().tolist()]
        values = [value] * len(rows)
        if isinstance(value, Tensor) and value.ndim and positions.ndim:
            values = list(value.unbind())
            if len(values) != len(rows):
                raise StructureError(
                    f"cannot write {show_path(path)} at an index: it names {len(rows)} components, the value has "
                    f"{len(values)}"
                )
        for row, part in zip(rows, values, strict=True):
            if isinstance(part, Tensor):
                check_content(row, path, part)
                check_fits(part, row.shape, path)
        self.rows += zip(rows, values, strict=True)

    def _read_level(
        self, node: Core, key: str, target: Any, entry: Any, path: Path, todo: list[Level]
    ) -> None:
        stacked, is_level = target._members_and_dim() is not None, has_entries(target)
        if isinstance(entry, NUMBERS) and is_level:
            if stacked:
                self.members += target._plan_writes(self.index, entry, self.non_blocking)
            else:
                self._fill(target, entry, path)
            return
        if not isinstance(entry, (Core, Mapping)):
            entry = coerce(entry, torch.Size(self.lead), target.device, path)
        if (not isinstance(entry, Core) or has_entries(entry)) != is_level or isinstance(entry, Tensor):
            raise StructureError(
                f"cannot write {show_path(path)} at an index: it is a {type(target).__name__}, the value a "
                f"{type(entry).__name__}"
            )
        if not is_level:
            check_fits(entry, torch.Size((*self.lead, *target.batch_size[self.n :])), path)
            target._check_index_put(self.index, entry)
            self.others.append((node, key, target, entry))
        elif stacked:
            self.stacks.append((target, entry))
        else:
            todo.append((target, entry, path, None))

    def _as_leaf(self, entry: Any, target: Tensor, path: Path) -> Tensor:
        if isinstance(entry, NUMBERS):
            return _as_number(entry, target.dtype, target.device, path)
        leaf = entry if isinstance(entry, (Core, Mapping)) else coerce(entry, torch.Size(), None, path)
        if not isinstance(leaf, Tensor):
            raise StructureError(
                f"cannot write {show_path(path)} at an index: it is a tensor, the value a {type(leaf).__name__}"
            )
        return leaf

    def _make(self, node: Any, entry: Any, path: Path, todo: list[Level], dims: int | None) -> None:
        """Create a new entry and list its write: zeros of the full batch size, or a new node whose entries are read next."""
        key, batch, device = path[-1], node.batch_size, node.device
        lead = torch.Size((*self.lead, *batch[self.n :]))
        made: Any
        if isinstance(entry, Mapping) or (
            isinstance(entry, Core) and has_entries(entry) and entry.batch_size[: len(lead)] != lead
        ):
            made = _make_empty_like(entry, batch, device)
            todo.append((made, entry, path, dims))
            self.made.append((node, key, made))
            return
        entry = as_new_rows(entry, lead, dims, device, path, len(batch) - self.n)
        if isinstance(entry, Tensor) and entry.is_nested:
            raise StructureError(
                f"cannot make {show_path(path)} at an index: it is a nested tensor, which says nothing of the sizes "
                "elsewhere; use set()"
            )
        tail = tuple(entry.shape[len(lead) :])
        if isinstance(entry, Tensor):
            made = entry.new_zeros(batch + tail)
            self._list(made, entry, path)
        elif not has_entries(entry):
            try:
                made = entry._with_children(entry._children(), batch_size=batch + tail, names=None)
            except (
                BatchSizeError
            ):  # the entry holds one value per element, so the other positions become None
                self.others.append((node, key, coerce(None, batch + tail, device, path), entry))
                return
        else:
            made = _make_empty_like(entry, batch + tail, device)
            todo.append((made, entry, path, dims))
        self.made.append((node, key, made))

    def apply(self) -> None:
        """Run the listed writes."""
        # Write value nodes first: these writes were not checked, and if one fails, no leaf is changed.
        for node, key, level, entry in self.others:
            written = level._index_put(self.index, entry)
            if written is not level:
                node._set_child(key, written)
        targets, values = self.targets, self.values
        if self.basic and not any(isinstance(value, NUMBERS) for value in values):
            copy_leaves(targets, values, lambda i: show_path(self.paths[i]), self.non_blocking)
        else:
            place = BoundIndex(() if self.basic else self.index)
            for i in order_subclasses_first(targets):
                target, value = targets[i], values[i]
                # torch converts dtype and device when it writes through a view, but not when it writes at an index tensor.
                # It quantizes float32 values only.
                if isinstance(value, Tensor) and target.is_quantized:
                    value = value.dequantize() if value.is_quantized else value.float()
                elif isinstance(value, Tensor) and (
                    value.dtype != target.dtype or value.device != target.device
                ):
                    value = value.to(target.device, target.dtype, non_blocking=self.non_blocking)
                elif target.is_cuda and not self.basic and isinstance(value, NUMBERS):
                    # torch would create the scalar on the CPU and synchronize for the copy.
                    value = torch.full((), value, dtype=target.dtype, device=target.device)  # type: ignore[arg-type]
                position = place.move_to_device_of(target)
                try:
                    target[position] = value
                except (RuntimeError, TypeError) as error:
                    if is_overlap_error(error):
                        target[position] = value.clone()
                        continue
                    raise rephrase_error(
                        error, f"cannot write {show_path(self.paths[i])} at an index: {error}"
                    ) from error
        for row, value in self.rows:
            row[...] = value
        for write in self.members:
            write.apply()
        for node, key, made in self.made:
            node._set_child(key, made)


def _check_scatter(target: Tensor, path: Path) -> None:
    """Raise StructureError if torch cannot write into a leaf at positions."""
    if target.dtype in RARELY_SCATTERED:
        nothing = torch.empty(0, dtype=target.dtype, device=target.device)
        try:
            nothing[torch.empty(0, dtype=torch.int64, device="cpu")] = nothing.clone()
        except RuntimeError as error:
            raise StructureError(f"cannot write {show_path(path)} at positions: {error}") from error


def _make_empty_like(entry: Any, batch_size: torch.Size, device: torch.device | None) -> Any:
    """Return an empty node of the kind of a node; of a mapping or a lazy stack without members, a TensorDict."""
    for holder in list_holders(entry) if isinstance(entry, Core) else ():
        return holder._with_children({}, batch_size=batch_size, names=None)
    return make_dense({}, batch_size, device)


def run_writes(writes: list[IndexedWrite]) -> None:
    """Run plans. First clone the values that an earlier write would overwrite before they are read.

    For example, a lazy stack may be assigned its own members in another order.
    """
    flat = list(writes)
    for write in flat:
        flat += write.members
    if len(flat) > 1:
        _clone_overlapping_values(flat)
    for write in writes:
        write.apply()


def _clone_overlapping_values(writes: list[IndexedWrite]) -> None:
    targets: list[Tensor] = []
    values: list[Any] = []
    for write in writes:
        for target, value in (*zip(write.targets, write.values), *write.rows):
            if isinstance(value, Tensor):
                targets.append(target)
                values.append(value)
        write.others = [(node, key, level, entry._clone_leaves()) for node, key, level, entry in write.others]
    own = iter(clone_overlapping(targets, values))
    for write in writes:
        write.values = [next(own) if isinstance(value, Tensor) else value for value in write.values]
        write.rows = [(row, next(own) if isinstance(value, Tensor) else value) for row, value in write.rows]


def as_rows(value: Any, wanted: torch.Size) -> Any:
    """Broadcast a collection to the batch size ``wanted`` of the indexed target; BatchSizeError if it cannot.

    If its batch size is empty or a prefix of ``wanted``, return ``Entries``, which broadcast one by one.
    """
    size = value.batch_size
    if size and size == wanted:
        return value
    if not size or (
        len(size) < len(wanted) and size == wanted[: len(size)] and _has_leading_size(value, wanted)
    ):
        return Entries(value._children())
    extra = len(size) - len(wanted)
    if extra > 0 and not (wanted and size[: len(wanted)] == wanted) and size[:extra].numel() == 1:
        value = value._index((0,) * extra)
    size = value.batch_size
    try:
        return value if size == wanted or not wanted else value.expand(wanted)
    except (RuntimeError, ValueError) as error:
        if size[: len(wanted)] == wanted:
            return value  # the additional batch dims of the value are feature dims of the target
        raise BatchSizeError(
            f"the value has batch size {list(size)}, which does not broadcast to that of the indexed collection, "
            f"{list(wanted)}"
        ) from error


def _has_leading_size(value: Core, lead: torch.Size) -> bool:
    """Return True if the shapes of all entries start with ``lead``."""
    try:
        value._check_batch_size(lead)
    except BatchSizeError:
        return False
    return True


def drop_leading_ones(entry: Tensor, ndim: int) -> Tensor:
    """Remove leading dims of size one until ``ndim`` dims remain, as torch does for a value in ``x[i] = value``."""
    extra = entry.ndim - ndim
    return entry[(0,) * extra] if extra > 0 and entry.shape[:extra].numel() == 1 else entry


def count_leading_dims(entry: Tensor, behind: int) -> int | None:
    """Return the number of dims of a value before its last ``behind`` dims; None if it has fewer or is a scalar."""
    return entry.ndim - behind if entry.ndim and entry.ndim >= behind else None


def find_common_dims(actual: set[int | None], default: int | None) -> int | None:
    """Return the number of batch dims on which all values agree, or ``default`` if they do not."""
    told = actual - {None}
    return told.pop() if len(told) == 1 else default


def as_new_rows(
    entry: Any, lead: torch.Size, dims: int | None, device: torch.device | None, path: Path, more: int = 0
) -> Child:
    """Broadcast the value of a new entry, of which ``dims`` dims are batch dims, to the batch dims ``lead``.

    ``more`` is the number of batch dims that the node has beyond the root's. Raise BatchSizeError if it cannot broadcast.
    """
    leaf = coerce(entry, torch.Size(), device, path) if isinstance(entry, _ARRAYS) else entry
    if not isinstance(leaf, Tensor) or type(leaf) in WRAPPED or leaf.is_nested:
        return coerce(entry, lead, device, path)
    if dims == ANY:
        dims = len(lead) if leaf.shape[: len(lead)] == lead else more
    elif dims is not None:
        dims += more
    if dims is None or leaf.shape[:dims] == lead:
        return coerce(leaf, lead, device, path)
    tail = leaf.shape[dims:]
    try:
        return drop_leading_ones(leaf, len(lead) + len(tail)).expand((*lead, *tail))
    except RuntimeError as error:
        raise BatchSizeError(
            f"cannot make {show_path(path)} at an index: it has shape {list(leaf.shape)}, of which {list(leaf.shape[:dims])} "
            f"are batch dims as beside it, and these do not broadcast to {list(lead)}"
        ) from error


def check_broadcast(wanted: Sequence[Any], provided: Sequence[Any]) -> None:
    """Assert with ``torch._check`` that a value broadcasts: a graph cannot read how many elements a mask selects."""
    if len(wanted) == len(provided):
        for a, b in zip(wanted, provided):
            assert_in_graph((a == b) | (b == 1))


def _as_number(value: Any, dtype: torch.dtype, device: torch.device | None, path: Path) -> Tensor:
    """Convert a number to a scalar tensor of the dtype of a leaf; StructureError if the dtype cannot represent it."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise StructureError(f"cannot write {show_path(path)} at an index: {error}") from error


def is_basic(index: Any) -> bool:
    """Return True if an index is basic: ints, slices and None, which select a view."""
    items = index if type(index) is tuple else (index,)
    return {*map(type, items)} <= _BASIC
