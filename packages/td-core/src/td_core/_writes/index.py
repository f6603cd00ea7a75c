"""The rule of ``td[index] = value``: a missing entry is created with zeros at the other positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._plans.elements import align_dims
from .._plans.index import BoundIndex, IndexPlan, plan_index
from .._torch.kernels import PLAIN
from .._torch.private import assert_in_graph, functorch_level
from .._tree.coerce import NUMBERS, WRAPPED, coerce, convert_source
from .._tree.defaults import check_keys, show_path, unwrap_entry
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core, make_dense
from .._tree.walks import has_entries, list_holders
from ..errors import BatchSizeError, LockedError, StructureError
from .check import (
    add_path,
    check_copied,
    check_fits,
    check_trial,
    check_writable,
    find_expansion,
    find_problem,
    is_expanded,
    is_sealed,
    rephrase_error,
)
from .pair import RARELY_SCATTERED, is_basic, is_node, is_scalar, list_pairs
from .run import Transaction, write_at

Path = tuple[str, ...]

#: The number of batch dims of new values in a collection of another batch size: all of those of the index if the shape of
#: the value starts with them, else none.
ANY = -1


class Level(NamedTuple):
    """A node to write to at the index, or a new entry with its node.

    Attributes:
        node: the node.
        value: what is written.
        path: key path of the node, or of the new entry.
        dims: how many leading dims of new values are batch dims, so that the others are those of the entry; None if it is
            the number of those that existing entries get, which is found on the way; or :data:`ANY`.
    """

    node: Any
    value: Any
    path: Path
    dims: int | None


_SCALARS = (Tensor, *NUMBERS)
_ARRAYS = (*_SCALARS, np.ndarray, list, tuple)


class Entries(dict[str, Any]):
    """Entries of a collection whose batch size differs from that of the indexed target."""


class IndexedWrite:
    """One ``root[index] = value``: :meth:`read` checks the value and adds its writes to a transaction."""

    def __init__(self, writes: Transaction, plan: IndexPlan, size: torch.Size) -> None:
        self.writes = writes
        self.index = plan.index
        self.basic = is_basic(plan.index)
        if not self.basic:
            plan.check_range()
        self.place = None if self.basic else BoundIndex(plan.index)
        self.lead = (*plan.lead, *size[plan.n :])
        self.n = len(size)
        self.todo: list[Level] = []
        #: Entries that the target lacks.
        self.new: list[Level] = []
        #: Lazy stacks below the root, with the value and key path of each.
        self.stacks: list[tuple[Core, Any, Path]] = []
        #: Numbers of batch dims that the values of existing entries have.
        self.actual: set[int | None] = set()
        # Last pair of shapes that passed: skip the checks if it repeats. A set would hash symbolic sizes, which raises.
        self.fitting: tuple[torch.Size, torch.Size] | None = None
        #: The last number, and the dtypes that can represent it.
        self.number: tuple[object, set[torch.dtype]] = (None, set())

    def read(self, root: Core, value: object, path: Path = (), dims: int | None = None) -> None:
        """Check a value for ``root``, the node at ``path``; ``dims``: number of batch dims of new values, if known."""
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value[()]
        if type(value) is not dict and not isinstance(value, Core):
            value = convert_source(value, torch.Size(self.lead), root.device, path)
        if isinstance(value, Core) and has_entries(value):
            value = as_rows(value, torch.Size(self.lead))
        elif isinstance(value, Core) or not (isinstance(value, Mapping) or is_scalar(value)):
            raise _source_error(value)
        self.todo.append(Level(root, value, path, dims))
        while self.todo or self.new:
            if self.todo:
                self._read_level(*self.todo.pop())
                continue
            # The values of existing entries determine the number of batch dims, so new entries are handled last.
            node, entry, path, dims = self.new.pop(0)
            self._make(node, entry, path, find_common_dims(self.actual, dims))
        for stack, entry, path in self.stacks:
            stack._plan_writes(self.writes, self.index, entry, path, find_common_dims(self.actual, None))

    def _read_level(self, node: Core, source: Any, path: Path, dims: int | None) -> None:
        """Check the entries of one node; a number is written into all leaves."""
        children = node._children()
        entries, aligned = source, False
        if isinstance(source, Core):
            entries, lead = source._children(), self.lead
            aligned = len(lead) > 0 and source.batch_size[: len(lead)] == lead
            dims = len(lead) if aligned else ANY if dims is None else dims
        elif isinstance(source, Entries):
            dims = ANY if dims is None else dims
        elif not isinstance(source, Mapping):
            entries = {
                key: source
                for key, child in dict(children).items()
                if isinstance(child, Tensor) or has_entries(child)
            }
        for key, entry in list_pairs(entries, path):
            target = children.get(key)
            if isinstance(target, Tensor):
                self._read_leaf(target, entry, (*path, key), aligned)
            elif target is None:
                check_unlocked(node, f"make {show_path((*path, key))}")
                check_keys(node, {key: entry})
                self.new.append(Level(node, entry, (*path, key), dims))
            else:
                self._read_node(node, key, target, entry, (*path, key))

    def _read_leaf(self, target: Tensor, entry: Any, path: Path, aligned: bool) -> None:
        """Check the value of a leaf; ``aligned``: its first dims are those of the indexed batch."""
        if isinstance(entry, NUMBERS):
            entry = self._check_number(entry, target, path)
        elif not isinstance(entry, Tensor):
            entry = as_leaf(entry, target, path)
        if target.is_nested:
            self._add_components(target, entry, path)
            return
        if isinstance(entry, Tensor) and entry.ndim:
            entry = self._fit_dims(target, entry, path, aligned)
        self._add(target, entry, path)

    def _fit_dims(self, target: Tensor, entry: Tensor, path: Path, aligned: bool) -> Tensor:
        """Return a value with dims that broadcast to those of the leaf at the index; StructureError if it has none."""
        lead, n = self.lead, self.n
        self.actual.add(len(lead) if aligned else count_leading_dims(entry, target.ndim - n))
        shapes = (entry.shape, target.shape)
        if shapes == self.fitting:
            return entry
        wanted = torch.Size(lead + tuple(target.shape[n:]))
        if torch.compiler.is_compiling() and not self.basic:
            check_broadcast(wanted, entry.shape)
        if aligned and entry.ndim < len(wanted):
            entry = align_dims(entry, len(wanted), len(lead))
        elif entry.ndim > len(wanted):
            entry = drop_leading_ones(entry, len(wanted))
        else:
            self.fitting = shapes
        check_fits(entry, wanted, path)
        return entry

    def _check_number(self, number: Any, target: Tensor, path: Path) -> object:
        """Convert a NumPy number to one of Python; StructureError if the dtype of a leaf cannot represent the number."""
        value = number.item() if isinstance(number, np.generic) else number
        if number is not self.number[0]:
            self.number = number, set()
        if target.dtype not in self.number[1] and not target.is_quantized:
            try:
                torch.as_tensor(value, dtype=target.dtype, device="cpu")
            except (RuntimeError, TypeError, OverflowError) as error:
                raise add_path(StructureError(str(error)), path, "at an index") from error
            self.number[1].add(target.dtype)
        return value

    def _add(self, target: Tensor, value: object, path: Path) -> None:
        """Add one write into a leaf; for a basic index, into the view that it selects."""
        index = self.index if type(self.index) is tuple else (self.index,)
        problem = find_problem(target, value, *index)
        if problem is not None:
            raise add_path(problem, path)
        if target.layout is not torch.strided:
            raise add_path(StructureError(f"its layout, {target.layout}, has no views"), path, "at an index")
        if self.basic:
            try:
                target = target[self.index]
            except (RuntimeError, TypeError) as error:
                raise rephrase_error(error, f"cannot write {show_path(path)} at an index: {error}") from error
            if isinstance(value, Tensor) and target.is_quantized:
                check_trial(Tensor.copy_, path, "in place", target, value)
        elif target.dtype in RARELY_SCATTERED:
            nothing = torch.empty(0, dtype=target.dtype, device=target.device)
            nowhere = torch.empty(0, dtype=torch.int64, device="cpu")
            check_trial(Tensor.__setitem__, path, "at positions", nothing, nowhere, nothing)
        if (problem := find_expansion(target)) is not None:
            raise add_path(problem, path)
        self.writes.copy(target, value, path, self.place)

    def _add_components(self, target: Tensor, value: object, path: Path) -> None:
        """Add the writes into the components of a nested tensor that the index selects."""
        check_writable(target, path)
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
                check_copied(row, path, part)
                if part.ndim == row.ndim and part.shape != row.shape:  # torch would repeat a row of length 1
                    raise add_path(
                        StructureError(f"it has shape {list(row.shape)} there, the value {list(part.shape)}"),
                        path,
                    )
            self.writes.copy(row, part, path)

    def _read_node(self, node: Core, key: str, target: Core, entry: Child, path: Path) -> None:
        """Check the value of a nested node, whose entries are read next, or of a value node."""
        is_level = has_entries(target)
        if not (is_level and is_scalar(entry)):
            if not isinstance(entry, (Core, Mapping)):
                entry = coerce(entry, torch.Size(self.lead), target.device, path)
            if isinstance(entry, Tensor) or is_node(entry) is not is_level:
                raise form_error(target, entry, path)
        if not is_level:
            check_fits(entry, torch.Size((*self.lead, *target.batch_size[self.n :])), path)
            self.writes.put(node, key, target, self.index, entry)
        elif target._members_and_dim() is not None:
            self.stacks.append((target, entry, path))
        else:
            self.todo.append(Level(target, entry, path, None))

    def _make(self, node: Core, entry: Any, path: Path, dims: int | None) -> None:
        """Create a new entry and add its write: zeros of the full batch size, or a new node whose entries are read next."""
        key, batch, device = path[-1], node.batch_size, node.device
        lead = torch.Size((*self.lead, *batch[self.n :]))
        size, is_split = batch, has_free_entries(entry, lead)
        if not is_split:
            entry = as_new_rows(entry, lead, dims, device, path, len(batch) - self.n)
            _check_dims(entry, path)
            if isinstance(entry, Tensor) and entry.is_nested:
                raise StructureError(
                    f"cannot make {show_path(path)} at an index: it is a nested tensor, which says nothing of the sizes "
                    "elsewhere; use set()"
                )
            size = batch + tuple(entry.shape[len(lead) :])
        made: Any
        if isinstance(entry, Tensor):
            made = entry.new_zeros(size)
            self._add(made, entry, path)
        elif is_split or has_entries(entry):
            made = _make_empty_like(entry, size, device)
            self.todo.append(Level(made, entry, path, dims))
        else:
            try:
                made = entry._with_children(entry._children(), batch_size=size, names=None)
            except BatchSizeError:  # it holds one value per element, so the other positions become None
                level: Any = coerce(None, size, device, path)
                self.writes.put(node, key, level, self.index, entry)
                return
        self.writes.change(node._set_child, key, made)


def has_free_entries(entry: object, lead: torch.Size) -> bool:
    """Return True for a mapping, and for a node whose batch size does not start with ``lead``: its entries broadcast."""
    if isinstance(entry, Core):
        return has_entries(entry) and entry.batch_size[: len(lead)] != lead
    return isinstance(entry, Mapping)


def as_leaf(entry: Child, target: Tensor, path: Path) -> Tensor:
    """Convert the value of a leaf to a tensor; StructureError if it is a node or has first-class dims."""
    leaf = entry if isinstance(entry, (Core, Mapping)) else coerce(entry, torch.Size(), None, path)
    _check_dims(leaf, path)
    if not isinstance(leaf, Tensor):
        raise form_error(target, leaf, path)
    return leaf


def form_error(target: Child, value: object, path: Path) -> StructureError:
    """Return the error for a value that is not of the form of its entry: a leaf, a node or a value."""
    what = "tensor" if isinstance(target, Tensor) else type(target).__name__
    # A dict is a node, unless it is said to be a value.
    hint = (
        ""
        if isinstance(target, Tensor) or has_entries(target)
        else "; a dict that is a value needs NonTensorData(dict)"
    )
    return StructureError(
        f"cannot write {show_path(path)} at an index: it is a {what}, the value a {type(value).__name__}{hint}"
    )


def _check_dims(entry: object, path: Path) -> None:
    """Raise StructureError for a value with first-class dims, which reads as an object that is not a tensor."""
    if isinstance(entry, Core) and not isinstance(unwrap_entry(entry), (Core, Tensor)):
        raise StructureError(
            f"cannot write {show_path(path)} at an index: the value has first-class dims; give them positions by order()"
        )


def _source_error(value: object) -> StructureError:
    """Return the error for a value that cannot be written at an index of a collection."""
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Core) for item in value):
        what = f"a {type(value).__name__} of {len(value)}: stack() or lazy_stack() it first"
    return StructureError(
        f"a collection takes a collection of entries, a mapping or a number at an index; got {what}"
    )


def _make_empty_like(entry: object, batch_size: torch.Size, device: torch.device | None) -> Core:
    """Return an empty node of the kind of a node; of a mapping or a lazy stack without members, a TensorDict."""
    for holder in list_holders(entry) if isinstance(entry, Core) else ():
        return holder._with_children({}, batch_size=batch_size, names=None)
    return make_dense({}, batch_size, device)


def as_rows(value: Core, wanted: torch.Size) -> Core | Entries:
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
    entry: Child, lead: torch.Size, dims: int | None, device: torch.device | None, path: Path, more: int = 0
) -> Child:
    """Broadcast the value of a new entry, of which ``dims`` dims are batch dims, to the batch dims ``lead``.

    ``more`` is the number of batch dims that the node has beyond the root's. Raise BatchSizeError if it cannot broadcast.
    """
    leaf = coerce(entry, torch.Size(), device, path) if isinstance(entry, _ARRAYS) else entry
    if not isinstance(leaf, Tensor) or type(leaf) in WRAPPED or leaf.is_nested:
        return coerce(entry, lead, device, path)
    if leaf.ndim == 0:
        return leaf.expand(lead)
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


def check_broadcast(wanted: Sequence[object], provided: Sequence[object]) -> None:
    """Assert with ``torch._check`` that a value broadcasts: a graph cannot read how many elements a mask selects."""
    if len(wanted) == len(provided):
        for a, b in zip(wanted, provided):
            assert_in_graph((a == b) | (b == 1))


def write_leaf_at(target: Tensor, index: object, value: object, path: Path, non_blocking: bool) -> None:
    """Check the write of a value at an index of one leaf, and write it."""
    if isinstance(value, np.generic):
        value = value.item()
    elif not isinstance(value, _SCALARS):
        value = coerce(value, torch.Size(), None, path)
        if not isinstance(value, Tensor):
            problem = StructureError(f"it is a tensor, the value a {type(value).__name__}")
            raise add_path(problem, path, f"at the index {index!r}")
    _check_leaf_at(target, index, value, path)
    if not target.is_nested and _has_positions(index):
        plan_index(index, target.shape).check_range()
    try:
        write_at(target, index, value, non_blocking)
    except (RuntimeError, TypeError, ValueError) as error:
        kind = LockedError if isinstance(error, LockedError) else StructureError
        found = find_problem(target, value, index) or kind(str(error))
        raise add_path(found, path, f"at the index {index!r}") from error


def _has_positions(index: object) -> bool:
    """Return True if a tensor of positions is in an index: torch writes those before one that is out of range."""
    items = index if type(index) is tuple else (index,)
    return any(isinstance(item, Tensor) and item.dtype is torch.int64 for item in items)


def _check_leaf_at(target: Tensor, index: Any, value: object, path: Path) -> None:
    """Raise an error if a leaf cannot be written at an index, and torch would not find that before it writes."""
    plain = type(target) in PLAIN and functorch_level() is None
    if plain and not (is_sealed(target) or is_expanded(target)):
        return
    problem = find_problem(target, value, index)
    if problem is None and not (is_basic(index) and not is_expanded(target[index])):
        problem = find_expansion(target)
    if problem is not None:
        raise add_path(problem, path, f"at the index {index!r}")
