"""Coercion: what happens to a value that is neither a tensor nor a collection when it is set.

Core turns numbers, arrays and sequences of numbers into tensors and mappings into collections. Everything else is up to
the coercers that plugins register, by type; an entry for ``object`` is tried last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._arrays import as_tensor
from ._collection import Child, Core, get_lead, make_dense, show_path
from ._missing import describe_missing_package
from ._public_names import set_module
from .errors import BatchSizeError, MissingPluginError, PluginError, StructureError

#: How many dims an array may have.
_MAX_DIMS = 64


@set_module("td_core")
@dataclass(frozen=True, slots=True)
class Coercer:
    """Types, and a function that turns a value of one of them into a leaf or a collection.

    ``convert(value, batch_size, device)`` gets the batch size and device of the collection that the value enters;
    what it returns is checked like any other entry.

    >>> Coercer((frozenset,), lambda value, batch_size, device: torch.tensor(sorted(value))).types
    (<class 'frozenset'>,)
    """

    types: tuple[type, ...]
    convert: Callable[[Any, torch.Size, torch.device | None], Child]


#: Classes of tensors that a coercer takes: they enter collections as nodes, not as leaves.
WRAPPED: set[type] = set()


class Coercers:
    """The registered coercers, by type."""

    def __init__(self) -> None:
        self._by_type: dict[type, Coercer] = {}

    def add(self, coercer: Coercer) -> None:
        """Register a coercer; a type has one at most.

        Raises:
            PluginError: it is malformed, or one of its types is taken, or is what core turns into entries by itself.
        """
        if not callable(coercer.convert):
            raise PluginError(f"a coercer converts with a function; got {coercer.convert!r}")
        if not isinstance(coercer.types, tuple) or not all(isinstance(kind, type) for kind in coercer.types):
            raise PluginError(f"the types of a coercer are a tuple of classes; got {coercer.types!r}")
        for kind in coercer.types:
            if kind is not object and any(issubclass(own, kind) or issubclass(kind, Core) for own in _OWN):
                raise PluginError(f"values of {kind!r} become entries without a coercer")
            if kind in self._by_type:
                raise PluginError(
                    f"values of {kind!r} already have a coercer, {self._by_type[kind].convert!r}"
                )
        for kind in coercer.types:
            self._by_type[kind] = coercer
            if issubclass(kind, Tensor):
                WRAPPED.add(kind)

    def remove(self, coercer: Coercer) -> None:
        """Forget a coercer."""
        for kind in coercer.types:
            self._by_type.pop(kind, None)
            WRAPPED.discard(kind)

    def find(self, cls: type) -> Coercer | None:
        """Return the coercer of the closest base of ``cls`` other than ``object``."""
        exact = self._by_type.get(cls)
        if exact is not None or cls in _BUILTIN:
            # torch.compile cannot walk the bases of a builtin, which has no other than object.
            return exact
        for base in cls.__mro__[:-1]:
            coercer = self._by_type.get(base)
            if coercer is not None:
                return coercer
        return None

    def get_fallback(self) -> Coercer | None:
        """Return the coercer for ``object``, which fits everything and is tried last."""
        return self._by_type.get(object)


_BUILTIN = frozenset({int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type, type(None)})

#: What a graph can make a tensor of.
_PLAIN_NUMBERS = (bool, int, float, complex)
NUMBERS = (bool, int, float, complex, np.number, np.bool_)

#: What becomes an entry without a coercer.
_OWN = (Tensor, dict, np.ndarray, list, tuple, *NUMBERS)

COERCERS = Coercers()


def coerce(
    value: Any,
    batch_size: torch.Size,
    device: torch.device | None,
    path: tuple[str, ...],
    *,
    non_blocking: bool = False,
) -> Child:
    """Return a value as an entry, at the key path ``path``, of a collection with this batch size and device.

    It is a tensor, a collection, a mapping, a number, an array, a sequence, or any object a coercer takes.

    Raises:
        BatchSizeError: the leading dims do not match.
        MissingPluginError: no coercer takes the value.
        PluginError: what the coercer gave is no entry.
    """
    entry = value
    if not isinstance(value, Tensor) or type(value) in WRAPPED:
        if not isinstance(value, Core):
            entry = _convert(value, batch_size, device, path)
        if isinstance(entry, Core):
            return _coerce_collection(entry, batch_size, device, path, non_blocking)
        if not isinstance(entry, Tensor):
            raise PluginError(
                f"{show_path(path)}: the coercer of {type(value).__name__} gave no tensor or collection, but a "
                f"{type(entry).__name__}"
            )
    if batch_size and get_lead(entry, len(batch_size)) != batch_size:
        hint = "" if isinstance(value, Tensor) else "; a number has no dims, so expand it first"
        raise BatchSizeError(
            f"{show_path(path)} has shape {list(entry.shape)}, which does not start with the batch size "
            f"{list(batch_size)}{hint if entry.ndim == 0 else ''}"
        )
    if device is not None and entry.device != device:
        return entry.to(device, non_blocking=non_blocking)
    return entry


def _coerce_collection(
    value: Core,
    batch_size: torch.Size,
    device: torch.device | None,
    path: tuple[str, ...],
    non_blocking: bool,
) -> Core:
    try:
        fitted = value._with_batch_size(batch_size)
    except BatchSizeError as error:
        raise BatchSizeError(f"{show_path(path)}: {error}") from None
    if device is not None and fitted.device != device:
        return fitted._move(device, non_blocking)  # type: ignore[no-any-return]
    return fitted


def _convert(value: Any, batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...]) -> Child:
    coercer = COERCERS.find(type(value))
    if coercer is not None:
        return coercer.convert(value, batch_size, device)
    if isinstance(value, Mapping):
        return build_nested(value, batch_size, device, path)
    if isinstance(value, NUMBERS) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        try:
            return as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{show_path(path)}: {error}") from error
    fields = get_struct_fields(value)
    if fields is not None:
        return build_nested(fields, torch.Size(value.shape), device, path)
    if isinstance(value, (list, tuple)):
        tensor = _convert_sequence(value)
        if tensor is not None:
            return tensor
        if isinstance(value, list) and _is_uniform(value):
            return torch.stack(value)
    coercer = COERCERS.get_fallback()
    if coercer is not None:
        return coercer.convert(value, batch_size, device)
    raise MissingPluginError(
        f"{show_path(path)}: a value of type {type(value).__name__} is non-tensor data, provided by "
        + describe_missing_package("td-tensorclass")
    )


def get_struct_fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a structured array, or of one of its records; None for anything else.

    >>> get_struct_fields(np.array([(1, "a")], dtype=[("x", "i4"), ("y", "U1")]))
    {'x': array([1], dtype=int32), 'y': ['a']}
    """
    if not isinstance(value, (np.ndarray, np.void)) or value.dtype.names is None:
        return None
    return {name: _read_field(value[name]) for name in value.dtype.names}


def _read_field(value: Any) -> Any:
    """Return a field of a structured array as a list of strings or objects, or as an array."""
    if value.dtype.names is not None:
        return value
    if value.dtype.kind in "USO":
        return value.tolist()
    return value


def _convert_sequence(value: list[Any] | tuple[Any, ...]) -> Tensor | None:
    """Return the tensor that a sequence of numbers, arrays or tensors stands for; None where it stands for values."""
    if any(isinstance(item, Tensor) for item in value):
        # torch, not numpy, decides what dtype the numbers beside them have.
        return _stack_collections(value)
    if value and isinstance(value[0], (str, bytes, dict, type(None), Core)):
        # No array of numbers starts like this, collections would be taken apart, and torch.compile cannot trace numpy's answer.
        return None
    if torch.compiler.is_compiling() and value and all(type(item) in _PLAIN_NUMBERS for item in value):
        return torch.tensor(value)  # which a graph can trace
    first: Any = value if isinstance(value, list) else None
    for _ in range(_MAX_DIMS):  # a list may contain itself
        if not isinstance(first, list) or not first:
            break
        first = first[0]
    if isinstance(first, (tuple, range)):
        # Values that are tuples are listed, not numbers.
        return None
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    except RuntimeError:
        # There are tensors further down, of autograd or a transform, which numpy cannot have.
        return _stack_collections(value)
    if array.dtype.kind not in "biufc":
        return None
    # torch, not numpy, decides the dtype of Python floats.
    arrays = isinstance(first, np.ndarray) or any(isinstance(item, np.ndarray) for item in value)
    return as_tensor(array) if arrays else torch.tensor(value)


def _stack_collections(value: list[Any] | tuple[Any, ...]) -> Tensor | None:
    rows: list[Any] = [_convert_row(item) for item in value]
    same = all(row is not None and row.shape == rows[0].shape for row in rows)
    return torch.stack(rows) if same else None


def _convert_row(item: Any) -> Tensor | None:
    if isinstance(item, Tensor):
        return item
    if isinstance(item, (*NUMBERS, np.ndarray)):
        return as_tensor(item)
    return _convert_sequence(item) if isinstance(item, (list, tuple)) else None


def _is_uniform(items: list[Any]) -> bool:
    """Tell whether these are collections of one kind and batch size, which are stacked as tensors of one shape are."""
    return (
        bool(items)
        and all(isinstance(item, Core) for item in items)
        and len({(type(item), tuple(item.batch_size)) for item in items}) == 1
    )


def build_nested(
    source: Mapping[Any, Any], batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...] = ()
) -> Any:
    """Return a nested mapping as the canonical collection, every level with this batch size and device."""
    entries: dict[str, Child] = {}
    root = make_dense(entries, batch_size, device)
    todo: list[tuple[Mapping[Any, Any], Any, dict[str, Child], tuple[str, ...]]] = [
        (source, root, entries, path)
    ]
    # The tracer of torch.compile ends no less by a mapping that contains itself, and asks for no identities.
    seen: set[int] | None = None if torch.compiler.is_compiling() else set()
    ndim = len(batch_size)
    fitting: torch.Size | None = None
    while todo:
        mapping, node, entries, prefix = todo.pop()
        if seen is not None:
            if id(mapping) in seen and has_cycle(
                mapping, lambda item: item.values() if isinstance(item, Mapping) else ()
            ):
                raise StructureError(f"{show_path(prefix)} holds a mapping that contains itself")
            seen.add(id(mapping))
        for key, value in mapping.items():
            if type(key) is not str:
                node._set_path(key, value, prefix)
            elif isinstance(value, Tensor) and type(value) not in WRAPPED and device is None:
                try:
                    shape = value.shape
                except RuntimeError:
                    shape = None  # a nested tensor of strided layout has none
                if shape is not None and (shape == fitting or shape[:ndim] == batch_size):
                    entries[key] = value
                    fitting = shape
                else:
                    node._set_path(key, value, prefix)
            elif type(value) is dict:
                below: dict[str, Child] = {}
                entries[key] = child = make_dense(below, batch_size, device)
                todo.append((value, child, below, (*prefix, key)))
            else:
                node._set_path(key, value, prefix)
    return root


def has_cycle(container: Any, items: Callable[[Any], Iterable[Any]]) -> bool:
    """Tell whether a container is among its own items, those of its items, and so on."""
    todo, seen = [container], set()
    while todo:
        for item in items(todo.pop()):
            if item is container:
                return True
            if id(item) not in seen:
                seen.add(id(item))
                todo.append(item)
    return False
