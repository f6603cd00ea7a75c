"""Packed collections: all leaves are views of one storage, so that one kernel can do the work of one for each leaf.

The root has a mark of its storage and of what each leaf was. Before the storage is used in place of the leaves,
everything that could have changed since is compared: keys, entries, addresses, and the forms of the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import (
    Tensor,
    are_deterministic_algorithms_enabled,
    is_autocast_enabled,
    is_inference_mode_enabled,
)
from torch.compiler import is_compiling

from .._torch.kernels import PLAIN
from .._torch.private import (
    find_apart_view,
    find_state_reader,
    functorch_level,
    guard_forms,
    increase_versions,
    is_traced,
)
from .node import Core, CoreT
from .walks import list_levels

#: Key of the mark in ``_backends``. Unlocking a node keeps it: the leaves stay where they are.
PACKED = "packed"

#: Leaves that are less than this number of bytes apart are neighbours: the bytes between them align the second one.
_APART = 16

_REQUIRES_GRAD = attrgetter("requires_grad")
_VERSION = attrgetter("_version")
_DATA_PTR = Tensor.data_ptr


class Place(NamedTuple):
    """The bytes of a leaf in a storage.

    Attributes:
        start: its first byte.
        stop: the byte after its last.
        dtype: its dtype.
        shape: its shape.
        steps: its strides, those of a contiguous tensor.
    """

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size
    steps: tuple[int, ...]


class Packed:
    """The storage of a packed collection, and what its leaves were when it was read.

    Attributes:
        storage: a vector of bytes that all leaves are views of.
        apart: leaves with a version of their own, such as parameters that were moved; None until the first write.
        device: its device.
        places: the place of each leaf, in the order of ``_leaves()``.
        runs: a vector for each run of neighbouring leaves of one dtype, gaps included.
        filled: vectors that together have the elements of all leaves once, without gaps.
        has_scalars: True if a leaf has no dims.
        is_new: True before the first operation, which does not read the leaves.
        requires_grad: True if a leaf requires grad.
        dtypes: the dtypes of the runs.
    """

    __slots__ = (
        "_addresses", "_device_type", "_has_same_forms", "_layout", "_leaves", "_levels", "_memory", "_read_state", "_views",
        "apart", "device", "dtypes", "filled", "has_scalars", "is_new", "places", "requires_grad", "runs", "storage",
    )  # fmt: skip

    apart: list[Tensor] | None
    places: list[Place]
    runs: list[Tensor]
    filled: list[Tensor]
    dtypes: set[torch.dtype]
    has_scalars: bool
    requires_grad: bool

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage
        self.device = storage.device
        self._device_type = self.device.type
        self.is_new = True
        self._leaves: list[Tensor] | None = None

    def is_in_mode(self) -> bool:
        """Return True if torch runs operations in another way than usual."""
        return (
            functorch_level() is not None
            or is_inference_mode_enabled()
            or are_deterministic_algorithms_enabled()
            or is_autocast_enabled(self._device_type)
        )

    def is_unchanged(self, root: Core) -> bool:
        """Return True if keys, entries, addresses and forms are those that were read."""
        leaves = self._leaves
        if leaves is None:
            return False
        read = self._read_state
        for node, state in self._levels:
            if read((root if node is None else node._inner())._children()) != state:
                return False
        return [*map(_DATA_PTR, leaves)] == self._addresses and self._has_same_forms(*leaves)

    def read(self, root: Core) -> bool:
        """Find the places of all leaves in the storage; False if a leaf is elsewhere, or two of them overlap."""
        self._leaves = None
        levels = list_levels(root)
        leaves = root._leaves()
        places = None if levels is None else _find_places(levels, leaves, self.storage)
        used = None if places is None else _order_places(places)
        if levels is None or places is None or used is None:
            return False
        self._read_state = find_state_reader()
        # The mark belongs to the root, so a reference to it would be a cycle.
        self._levels = [
            (None if node is root else node, self._read_state(node._inner()._children()))
            for node, _, _ in levels
        ]
        self.places = places
        self._set_runs(used)
        self.has_scalars = any(not place.shape for place in self.places)
        self.requires_grad = any(map(_REQUIRES_GRAD, leaves))
        self._layout = [
            (keys, [isinstance(entry, Tensor) for entry in entries]) for _, keys, entries in levels
        ]
        self._memory = self.storage.untyped_storage().data_ptr()
        #: The dtypes, shapes, strides and offsets of the leaves, each in a vector of its dtype; None before the first clone.
        self._views: list[list[Any]] | None = None
        distinct = [*{id(leaf): leaf for leaf in leaves}.values()]
        self._addresses = [*map(_DATA_PTR, distinct)]
        self._has_same_forms = guard_forms(distinct)
        self.apart = None
        self._leaves = distinct
        return True

    def _set_runs(self, used: list[Place]) -> None:
        """Make the runs of leaves, and the parts of them without gaps."""
        whole = self.storage.detach()
        self.dtypes = {place.dtype for place in self.places}
        # torch refuses a dtype in leaves without elements, too.
        empty = [whole[:0].view(dtype) for dtype in self.dtypes - {place.dtype for place in used}]
        self.runs = [_view(whole, run[0], run[-1]) for run in _split(used, _APART)] + empty
        self.filled = [_view(whole, run[0], run[-1]) for run in _split(used, 1)] + empty

    def make_leaves(self, storage: Tensor) -> list[Tensor]:
        """Return the leaves in another storage. Autograd takes them for tensors of their own, not for parts of one."""
        return self._place({dtype: _view_whole(storage, dtype) for dtype in self.dtypes})

    def map(self, fn: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
        """Apply a function of single elements to all leaves in one call; None for leaves of several dtypes."""
        # With several, each element would be read as each of the dtypes.
        if len(self.dtypes) > 1:
            return None
        return self._place({dtype: fn(_view_whole(self.storage, dtype)) for dtype in self.dtypes})

    def _place(self, whole: dict[torch.dtype, Tensor]) -> list[Tensor]:
        """Return a tensor at the place of each leaf in the vector of its dtype."""
        if self._views is None:
            starts = [place.start // place.dtype.itemsize for place in self.places]
            self._views = [
                [place.dtype for place in self.places],
                [tuple(place.shape) for place in self.places],
                [place.steps for place in self.places],
                starts,
            ]
        dtypes, *columns = self._views
        return [*map(find_apart_view(), map(whole.__getitem__, dtypes), *columns)]

    def is_like(self, other: Packed) -> bool:
        """Return True if another collection has the same keys, and its leaves the same places in their own storage."""
        if other is self:
            return True
        if other.device != self.device:
            return False
        if self._memory == other._memory:  # torch refuses to write a part while it reads one that overlaps
            return False
        if other._layout is self._layout:
            return True
        if self.places != other.places or self._layout != other._layout:
            return False
        # Share one object from now on: comparing all places costs more than a kernel.
        other._layout = self._layout
        return True

    def read_versions(self) -> list[int] | None:
        """Return the version of each leaf before the first write; None if it is known which ones a write raises."""
        return [*map(_VERSION, self._leaves or ())] if self.apart is None else None

    def raise_versions(self, before: list[int] | None) -> None:
        """Raise the versions of the leaves that a write to the storage left, with the versions before it."""
        if before is not None:
            self.apart = [
                leaf for leaf, version in zip(self._leaves or (), before) if leaf._version == version
            ]
        if self.apart:
            increase_versions(self.apart)


_START_STOP = attrgetter("start", "stop")


def pack_root(root: CoreT, storage: Tensor) -> CoreT:
    """Record that all leaves of a collection may be views of a storage, a vector of bytes; return the collection."""
    node: Any = root._inner()
    node._backends = {**(node._backends or {}), PACKED: Packed(storage)}
    return root


def keep_packed(root: Core, result: CoreT, convert: Callable[[Tensor], Tensor]) -> CoreT:
    """Return a collection of converted leaves in the same memory, which is packed if the collection is."""
    held = root._inner()._backends
    return result if held is None or PACKED not in held else pack_root(result, convert(held[PACKED].storage))


def keep_mark(held: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what is left of the storage backends of a node that is unlocked: the mark of a packed one."""
    return None if held is None or PACKED not in held else {PACKED: held[PACKED]}


def find_packed(root: Core, is_operand: bool = False) -> Packed | None:
    """Return the mark of a packed collection if the storage can be used in place of the leaves, else None.

    ``is_operand``: only read the storage, in an operation on another packed collection.
    """
    node: Any = root._inner()
    held = node._backends
    mark: Packed | None = None if held is None else held.get(PACKED)
    if mark is None or (not is_operand and is_compiling()):
        return None
    if mark.is_new:
        # Many collections, such as those of ``td.data``, are used once, and reading costs more than that.
        mark.is_new = False
        return None
    if not is_operand and mark.is_in_mode():
        return None
    if not mark.is_unchanged(node) and not mark.read(node):
        # What was replaced or moved does not come back, so the next operation must not look again.
        node._backends = {key: item for key, item in (node._backends or {}).items() if key != PACKED} or None
        return None
    return None if mark.requires_grad and torch.is_grad_enabled() else mark


def is_packed(root: Core) -> bool:
    """Return True if all leaves are views of one storage, see :attr:`TensorCollection.is_packed`."""
    node = root._inner()
    held = node._backends
    mark: Packed | None = None if held is None else held.get(PACKED)
    if mark is None or is_traced():
        return False
    mark.is_new = False
    return mark.is_unchanged(node) or mark.read(node)


def clone_packed(root: CoreT) -> CoreT | None:
    """Return a packed copy of a packed collection; None for others."""
    held = root._inner()._backends
    if held is None or PACKED not in held:
        return None
    held[PACKED].is_new = False
    mark = find_packed(root)
    if mark is None:
        return None
    storage = mark.storage.clone()
    leaves = mark.make_leaves(storage)
    return pack_root(root._unflatten(leaves, root._flatten_leaves([])), storage)


def map_packed(root: CoreT, fn: Callable[[Tensor], Tensor]) -> CoreT | None:
    """Apply a function of single elements, which raises for none, to a packed collection; None for others."""
    mark = find_packed(root)
    leaves = None if mark is None else mark.map(fn)
    return None if leaves is None else root._unflatten(leaves, root._flatten_leaves([]))


def list_filled(root: Core) -> list[Tensor] | None:
    """Return vectors that together have each element of a packed collection once; None for others, and for tied leaves."""
    mark = find_packed(root)
    if mark is None or len({*mark.places}) < len(mark.places):
        return None
    return mark.filled


def _find_places(
    levels: list[tuple[Core, list[str], list[Any]]], leaves: list[Tensor], storage: Tensor
) -> list[Place] | None:
    """Return the place of each leaf in a storage; None if a leaf is elsewhere, or is not an entry of the levels."""
    if not leaves or storage.is_meta or storage.is_inference():
        return None
    entries = {id(entry) for _, _, held in levels for entry in held if isinstance(entry, Tensor)}
    places = [place for leaf in leaves if (place := _find_place(leaf, storage)) is not None]
    # A vector of the dtype from the first byte of the storage on has the elements of each leaf.
    if any(place.start % place.dtype.itemsize for place in places):
        return None
    return places if len(places) == len(leaves) and entries == {*map(id, leaves)} else None


def _order_places(places: list[Place]) -> list[Place] | None:
    """Return the places that have bytes in their order, each once; None if two of them overlap."""
    used = sorted({place for place in places if place.start < place.stop}, key=_START_STOP)
    return None if any(first.stop > second.start for first, second in pairwise(used)) else used


def _find_place(leaf: Tensor, storage: Tensor) -> Place | None:
    """Return the place of a leaf in a storage; None if it is not a plain contiguous view of it."""
    if type(leaf) not in PLAIN or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return None
    if leaf.device != storage.device or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
        return None
    size = leaf.numel() * leaf.itemsize
    start = leaf.data_ptr() - storage.data_ptr() if size else 0
    if start < 0 or start + size > storage.numel() or (storage.storage_offset() + start) % leaf.itemsize:
        return None
    if size and leaf.untyped_storage().data_ptr() != storage.untyped_storage().data_ptr():
        return None
    return Place(start, start + size, leaf.dtype, leaf.shape, leaf.stride())


def _split(places: Iterable[Place], apart: int) -> Iterator[list[Place]]:
    """Split sorted places into runs of one dtype whose neighbours are less than ``apart`` bytes apart."""
    for _, group in groupby(places, attrgetter("dtype")):
        run: list[Place] = []
        for place in group:
            if run and place.start - run[-1].stop >= apart:
                yield run
                run = []
            run.append(place)
        yield run


def _view_whole(storage: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements of a storage, without bytes at the end that are less than one."""
    rest = storage.numel() % dtype.itemsize
    return (storage[:-rest] if rest else storage).view(dtype)


def _view(storage: Tensor, first: Place, last: Place) -> Tensor:
    """Return the elements of a storage from one place to another one of the same dtype."""
    return storage[first.start : last.stop].view(first.dtype)
