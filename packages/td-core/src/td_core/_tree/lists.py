"""Lists of tensors of unequal shapes, and of objects with tensors, which become entries and not values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ..errors import StructureError
from .components import JaggedParts
from .defaults import show_path
from .node import Core
from .walks import expand, has_entries

_DTYPE, _DEVICE, _SHAPE = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")
_IS_NESTED = attrgetter("is_nested")

#: Types of which a list can hold many, and which hold no tensors.
_PLAIN = frozenset({str, bytes, bool, int, float, complex, type(None)})


class NamedFields(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[object, object]: ...


def join_uneven(rows: Sequence[Tensor], path: tuple[str, ...]) -> Tensor:
    """Join tensors whose shapes differ in one dim to a jagged tensor; raise StructureError if they differ in more."""
    if any(map(_IS_NESTED, rows)):
        raise list_error(path, "are nested tensors")
    shapes = list(map(_SHAPE, rows))
    distinct = {*shapes}
    for name, found in (
        ("numbers of dims", {*map(len, distinct)}),
        ("dtypes", {*map(_DTYPE, rows)}),
        ("devices", {*map(_DEVICE, rows)}),
    ):
        if len(found) > 1:
            raise list_error(path, f"have different {name}, {', '.join(sorted(map(str, found)))}")
    uneven = [dim for dim, sizes in enumerate(zip(*distinct)) if len({*sizes}) > 1]
    if len(uneven) != 1:
        raise list_error(
            path, f"have shapes that differ in the dims {uneven}, and a jagged tensor can differ in one"
        )
    (dim,) = uneven
    lengths = [shape[dim] for shape in shapes]
    values = torch.cat(list(rows), dim)
    offsets = torch.tensor([0, *accumulate(lengths)], device=values.device)
    return JaggedParts(dim + 1, values, offsets, None, (min(lengths), max(lengths))).join()


def check_devices(items: Iterable[object], path: tuple[str, ...], error: Exception) -> None:
    """Raise StructureError from an error of torch if the tensors of a list are on several devices."""
    found = {str(item.device) for item in items if isinstance(item, Tensor)}
    if len(found) > 1:
        raise list_error(path, f"have different devices, {', '.join(sorted(found))}") from error


def list_error(path: tuple[str, ...], problem: str) -> StructureError:
    """Build the error for a list that cannot become one entry."""
    return StructureError(
        f"{show_path(path)}: the tensors of a list {problem}; lazy_stack([...]) of collections holds them as entries, and "
        "NonTensorData(...) holds the list as a value"
    )


def get_fields(item: object) -> Mapping[object, object] | None:
    """Return the entries of a mapping, of a named tuple or of an instance of a dataclass; None for other objects."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple):
        return item._asdict() or None if _is_named(item) else None
    if dataclasses.is_dataclass(item) and not isinstance(item, (type, Core)):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return None


def _is_named(item: object) -> TypeGuard[NamedFields]:
    return hasattr(item, "_asdict")


def has_tensors(items: Iterable[object]) -> bool:
    """Return True if items hold a tensor, an array of numbers or a collection at any depth."""
    seen: set[int] = set()

    def below(item: object) -> Iterable[object]:
        if type(item) in _PLAIN or id(item) in seen:
            return ()
        inner = item if isinstance(item, (list, tuple)) else get_fields(item)
        if inner is None:
            return ()
        seen.add(id(item))  # a container may contain itself
        return inner.values() if isinstance(inner, Mapping) else inner

    return any(map(_is_data, expand(items, below)))


def _is_data(item: object) -> bool:
    if isinstance(item, np.ndarray):
        return item.dtype.kind in "biufc"
    if isinstance(item, Core):
        return has_entries(item)
    return isinstance(item, Tensor)
