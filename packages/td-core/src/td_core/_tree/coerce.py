"""Coercion: how a value that is set becomes a leaf or a node.

Core converts numbers, arrays and sequences of numbers to tensors, and mappings to collections. For all other types,
plugins register coercers by type. Then core reads arrays of other libraries; a coercer for ``object`` is tried last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._python.public_names import set_module
from .._python.settings import RULES
from .._python.type_names import NamedTypes, find_imported, is_type_name
from .._torch.arrays import as_tensor
from .._torch.kernels import PLAIN
from ..errors import BatchSizeError, MissingPluginError, PluginError, StructureError
from .defaults import add_key_note, get_lead, show_path
from .dim_names import lift_names
from .foreign import check_mask, find_package, has_array, missing_coercer_error, read_array
from .keys import NON_STRING_KEY, unravel_key_below
from .lists import check_devices, get_fields, has_tensors, join_uneven, list_error
from .node import Child, Core, make_dense
from .walks import expand, has_entries

GetContent = Callable[[object], "Mapping[Any, Any] | None"]

#: Maximal number of dims of a numpy array.
_MAX_DIMS = 64


@set_module("td_core.spi")
@dataclass(frozen=True, slots=True)
class Coercer:
    """Types, and a function that converts values of these types to a tensor or a collection.

    Attributes:
        types: classes whose instances are converted, including instances of subclasses. A string is the name of a class,
            such as ``"pandas.Series"``, whose library need not be imported; a subclass of Tensor must be a class.
        convert: function ``convert(value, batch_size, device)``. It receives the batch size and device of the
            collection that the value is set into, and its result is checked like any other entry.

    >>> Coercer((frozenset,), lambda value, batch_size, device: torch.tensor(sorted(value))).types
    (<class 'frozenset'>,)
    """

    types: tuple[type | str, ...]
    convert: Callable[[object, torch.Size, torch.device | None], Child]


#: Subclasses of Tensor with a coercer: they are stored as nodes, not as leaves.
WRAPPED: set[type] = set()


class Coercers:
    """The registry of coercers, by type and by name of a type."""

    def __init__(self) -> None:
        self._by_type: dict[type, Coercer] = {}
        self._by_name: NamedTypes[Coercer] = NamedTypes()

    def add(self, coercer: Coercer) -> None:
        """Register a coercer; PluginError if it is malformed, or core or another coercer converts one of its types."""
        if not callable(coercer.convert):
            raise PluginError(f"a coercer converts with a function; got {coercer.convert!r}")
        if not isinstance(coercer.types, tuple) or not all(
            isinstance(kind, type) or is_type_name(kind) for kind in coercer.types
        ):
            raise PluginError(
                f"the types of a coercer are a tuple of classes; got {coercer.types!r}; the name of a class includes "
                "its module, as in 'pandas.Series'"
            )
        for kind in coercer.types:
            self._check_free(kind)
        for kind in coercer.types:
            if isinstance(kind, str):
                self._by_name[kind] = coercer
                continue
            self._by_type[kind] = coercer
            if issubclass(kind, Tensor):
                WRAPPED.add(kind)

    def _check_free(self, kind: type | str) -> None:
        """Raise PluginError if core or another coercer converts values of a type."""
        cls = find_imported(kind) if isinstance(kind, str) else kind
        if isinstance(cls, type):
            if cls is not object and any(issubclass(own, cls) or issubclass(cls, Core) for own in _OWN):
                raise PluginError(f"values of {kind!r} become entries without a coercer")
            if isinstance(kind, str) and (cls is object or issubclass(cls, Tensor)):
                raise PluginError(f"the coercer of {kind!r} needs the class itself, not its name")
            taken = self._by_type.get(cls) or self._by_name.find(cls)
        else:
            taken = self._by_name.get(str(kind))
        if taken is not None:
            raise PluginError(f"values of {kind!r} already have a coercer, {taken.convert!r}")

    def remove(self, coercer: Coercer) -> None:
        """Unregister a coercer."""
        for kind in coercer.types:
            if isinstance(kind, str):
                del self._by_name[kind]
                continue
            self._by_type.pop(kind, None)
            WRAPPED.discard(kind)

    def find(self, cls: type) -> Coercer | None:
        """Return the coercer of the nearest base of ``cls`` except ``object``, or None."""
        exact = self._by_type.get(cls)
        if exact is not None or cls in _WITHOUT_BASES:
            # torch.compile cannot iterate over the __mro__ of a builtin, whose only base is object.
            return exact
        for base in cls.__mro__[:-1]:
            coercer = self._by_type.get(base)
            if coercer is None and base not in _WITHOUT_BASES:
                coercer = self._by_name.find(base)
            if coercer is not None:
                return coercer
        return None

    def get_fallback(self) -> Coercer | None:
        """Return the coercer for ``object``, or None. It accepts every value and is tried last."""
        return self._by_type.get(object)


#: Classes whose only base is ``object``.
_WITHOUT_BASES = frozenset(
    {int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type, type(None), np.ndarray}
)

#: Number types for which torch.compile can trace ``torch.tensor``.
_PLAIN_NUMBERS = (bool, int, float, complex)
NUMBERS = (bool, int, float, complex, np.number, np.bool_)

_CONVERTED = (Tensor, Core, np.ndarray, *NUMBERS)

#: Types of values, mappings and sequences, which td-core or td-tensorclass converts.
_OWN_VALUES = frozenset({dict, list, tuple, str, bytes, bytearray, type(None)})

#: Types that core converts without a coercer.
_OWN = (Tensor, dict, np.ndarray, list, tuple, *NUMBERS)

COERCERS = Coercers()

_NO_BATCH_DIMS = torch.Size()


def coerce(
    value: object,
    batch_size: torch.Size,
    device: torch.device | None,
    path: tuple[str, ...],
    *,
    non_blocking: bool = False,
) -> Child:
    """Convert a value to a leaf or node for the key path ``path`` of a collection with this batch size and device."""
    # Raises BatchSizeError, MissingPluginError without a coercer, or PluginError for a wrong result of a coercer.
    if isinstance(value, Tensor) and type(value) not in WRAPPED:
        leaf: Tensor = value
    else:
        entry = value if isinstance(value, Core) else _convert(value, batch_size, device, path)
        if isinstance(entry, Core):
            try:
                return _coerce_collection(entry, batch_size, device, path, non_blocking)
            except BatchSizeError as error:
                raise BatchSizeError(f"{error}{_hint_at_value(value)}") from None
        if not isinstance(entry, Tensor):
            raise PluginError(
                f"{show_path(path)}: the coercer of {type(value).__name__} gave no tensor or collection, but a "
                f"{type(entry).__name__}"
            )
        leaf = entry
    if batch_size and get_lead(leaf, len(batch_size)) != batch_size:
        hint = (
            ""
            if isinstance(value, Tensor)
            else f"; torch.full({tuple(batch_size)}, {value}) has one number for each element"
        )
        raise BatchSizeError(
            f"{show_path(path)} has shape {list(leaf.shape)}, which does not start with the batch size "
            f"{list(batch_size)}{hint if leaf.ndim == 0 else _hint_at_value(value)}"
        )
    if device is not None and leaf.device != device:
        if leaf.is_meta:
            raise StructureError(
                f"cannot move {show_path(path)} to {device}: it is on the meta device, and has no content"
            )
        return leaf.to(device, non_blocking=non_blocking)
    return leaf


def _hint_at_value(value: object) -> str:
    """Return the part of a message that says how to store an array of another library as one value."""
    if not is_foreign(value):
        return ""
    return (
        f"; a {type(value).__name__} is stored as its elements: wrap it in NonTensorData to store the object"
    )


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
        return fitted.to(device, non_blocking=non_blocking or None)
    return fitted


def is_foreign(value: object) -> bool:
    """Return True for an array or table of another library, and for an object that a plugin converts, except text and None.

    >>> import array
    >>> is_foreign(array.array("d", [1, 2])), is_foreign([1, 2])
    (True, False)
    """
    cls = type(value)
    if cls in _OWN_VALUES or isinstance(value, _CONVERTED):
        return False
    if COERCERS.find(cls) is not None:
        return True
    if (
        RULES.follows_tensordict or torch.compiler.is_compiling()
    ):  # a graph cannot read the buffers of objects
        return False
    return find_package(cls) is not None or has_array(value)


def convert_source(
    value: object,
    batch_size: torch.Size = _NO_BATCH_DIMS,
    device: torch.device | None = None,
    path: tuple[str, ...] = (),
) -> object:
    """Return the tensor or collection that a foreign object becomes, and any other object unchanged.

    >>> import array
    >>> convert_source(array.array("d", [1, 2])), convert_source("text")
    (tensor([1., 2.], dtype=torch.float64), 'text')
    """
    if not is_foreign(value):
        return value
    coercer = COERCERS.find(type(value))
    if coercer is not None:
        return _call(coercer, value, batch_size, device, path)
    return _read_foreign(value, path)


def _call(
    coercer: Coercer,
    value: object,
    batch_size: torch.Size,
    device: torch.device | None,
    path: tuple[str, ...],
) -> Child:
    """Convert a value with a coercer; its error gets the key path."""
    try:
        return coercer.convert(value, batch_size, device)
    except Exception as error:
        shown = show_path(path)
        if not path or shown in str(error):
            raise
        try:
            located = type(error)(f"{shown}: {error}")
        except TypeError:  # its class needs other arguments
            add_key_note(error, path)
            raise error from None
        raise located from error


def _read_foreign(value: object, path: tuple[str, ...]) -> Tensor | None:
    """Convert an array of another library by a protocol; raise MissingPluginError if a package converts its class."""
    _check_package(value, path)
    return read_array(value, path)


def _check_package(value: object, path: tuple[str, ...]) -> None:
    """Raise MissingPluginError for a value of a class that a package converts."""
    package = find_package(type(value))
    if package is not None:
        raise missing_coercer_error(package, value, path)


def _convert(value: Any, batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...]) -> Child:
    cls, follows = type(value), RULES.follows_tensordict
    coercer = COERCERS.find(cls)
    if coercer is not None and not (follows and find_package(cls)):
        return _call(coercer, value, batch_size, device, path)
    # Not asked in a graph, which cannot read the buffers of objects.
    may_be_foreign = not follows and cls not in _WITHOUT_BASES and not torch.compiler.is_compiling()
    if isinstance(value, Mapping):
        if may_be_foreign:
            _check_package(value, path)
        return build_nested(value, batch_size, device, path)
    if isinstance(value, NUMBERS) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        return _convert_number(value, path, may_be_foreign)
    fields = get_struct_fields(value)
    if fields is not None:
        return build_nested(fields, torch.Size(value.shape), device, path)
    if isinstance(value, (list, tuple)):
        value = _convert_items(value, path)
        entry = _convert_list(value, batch_size, device, path)
    else:
        entry = _read_foreign(value, path) if may_be_foreign else None
    return _convert_value(value, batch_size, device, path) if entry is None else entry


def _convert_number(value: object, path: tuple[str, ...], may_be_masked: bool) -> Tensor:
    """Convert a number, or an array of numbers."""
    if may_be_masked:
        check_mask(value, path)
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{show_path(path)}: {error}") from error


def _convert_value(
    value: object, batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...]
) -> Child:
    """Convert a value that is neither a tensor nor a collection to a node of values."""
    coercer = COERCERS.get_fallback()
    if coercer is not None:
        return _call(coercer, value, batch_size, device, path)
    raise MissingPluginError(
        f"{show_path(path)}: a value of type {type(value).__name__} is non-tensor data, provided by "
        + MissingPluginError.describe("td-tensorclass")
    )


def _convert_list(
    value: Any, batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...]
) -> Child | None:
    """Convert a sequence of numbers, arrays or collections; return None for a sequence of values."""
    try:
        tensor = _convert_sequence(value, path)
    except RuntimeError as error:
        check_devices(value, path, error)
        raise
    return tensor if tensor is not None else _read_items(value, batch_size, device, path)


def _read_items(
    value: Any, batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...]
) -> Child | None:
    """Convert a sequence of uneven tensors, or of objects that hold tensors; None for a sequence of values."""
    if isinstance(value, list) and _is_uniform(value):
        return _stack_nodes(value)
    if RULES.follows_tensordict or get_fields(value) is not None:
        return None
    if PLAIN.issuperset(map(type, value)) and value:  # hot path: the cost of a list of 100,000 tensors
        return join_uneven(value, path)
    if _are_values(value) or not has_tensors(value):
        return None
    fields = [_get_node_content(item) for item in value]
    if any(item is None for item in fields):
        rows = [row for item in value if (row := _convert_row(item, path)) is not None]
        if len(rows) < len(value):
            raise list_error(path, "are beside other objects, or in lists of several lengths")
        return join_uneven(rows, path)
    return _stack_nodes([_read_node(item, batch_size[1:], device, path) for item in fields])


def _are_values(value: Any) -> bool:
    """Return True for an empty sequence, and for one with nodes of values or tensors that are stored as nodes."""
    return not value or any(
        type(item) in WRAPPED or (isinstance(item, Core) and not has_entries(item)) for item in value
    )


def _get_node_content(item: object) -> object:
    """Return what a node is built of: a collection, a mapping, or the fields of an object or items of a list as one."""
    if isinstance(item, Core):
        return item
    if isinstance(item, list) and item and all(_get_node_content(inner) is not None for inner in item):
        return item
    return get_fields(item)


def _read_node(item: Any, batch_size: torch.Size, device: torch.device | None, path: tuple[str, ...]) -> Core:
    """Build the node of one item of a list."""
    if isinstance(item, Core):
        return item
    if isinstance(item, list):
        return _stack_nodes(
            [_read_node(_get_node_content(inner), batch_size[1:], device, path) for inner in item]
        )
    return build_nested(item, batch_size, device, path, get_fields)


def _stack_nodes(nodes: list[Any]) -> Core:
    """Stack nodes, lazily if their keys, shapes or kinds differ."""
    try:
        stacked: Any = torch.stack(nodes)
    except (StructureError, BatchSizeError):
        stacked = nodes[0]._stack_lazily(nodes, 0)
    result: Core = stacked
    return result


def _convert_items(values: Any, path: tuple[str, ...]) -> object:
    """Convert the items of a list of foreign objects, such as open groups of a file."""
    if not values or type(values[0]) in _WITHOUT_BASES or not is_foreign(values[0]):
        return values
    return [coerce(value, torch.Size(), None, path) for value in values]


def as_data(value: object) -> object:
    """Convert a value to non-tensor data, even if it is a number or a sequence."""
    coercer = COERCERS.get_fallback()
    return value if coercer is None else coercer.convert(value, torch.Size(), None)


def get_struct_fields(value: object) -> dict[str, object] | None:
    """Return the fields of a structured array or of one of its records, or None for any other object."""
    if not isinstance(value, (np.ndarray, np.void)) or value.dtype.names is None:
        return None
    return {name: _read_field(value[name]) for name in value.dtype.names}


def _read_field(value: Any) -> object:
    """Return a field of a structured array: strings and objects as a list, other dtypes as an array."""
    if value.dtype.names is not None:
        return value
    if value.dtype.kind in "USO":
        return value.tolist()
    return value


def _convert_sequence(value: list[object] | tuple[object, ...], path: tuple[str, ...]) -> Tensor | None:
    """Convert a sequence of numbers, arrays or tensors to a tensor. Return None for a sequence of other values."""
    if any(isinstance(item, Tensor) for item in value):
        # torch, not numpy, has to choose the dtype of numbers in a list that also has tensors.
        return _stack_collections(value, path)
    if value and isinstance(value[0], (str, bytes, dict, type(None), Core)):
        # These are not numbers. numpy would iterate over a collection, and torch.compile cannot trace np.asarray().
        return None
    if torch.compiler.is_compiling() and value and all(type(item) in _PLAIN_NUMBERS for item in value):
        return torch.tensor(value)  # torch.compile can trace it, unlike np.asarray()
    return _convert_with_numpy(value, path)


def _convert_with_numpy(value: list[object] | tuple[object, ...], path: tuple[str, ...]) -> Tensor | None:
    """Convert a sequence without tensors and collections at its first level."""
    first: object = value if isinstance(value, list) else None
    for _ in range(_MAX_DIMS):  # bounded, since a list may contain itself
        if not isinstance(first, list) or not first:
            break
        first = first[0]
    if isinstance(first, (tuple, range)):
        # A list of tuples becomes non-tensor data, not a tensor with the tuples as rows.
        return None
    try:
        array = np.asarray(value)
    except RuntimeError:  # before ValueError: errors of collections are both
        # Nested lists hold tensors of autograd or a transform, which numpy cannot convert.
        return _stack_collections(value, path)
    except ValueError:
        return None
    if array.dtype.kind not in "biufc":
        return None
    # torch, not numpy, has to choose the dtype of Python floats.
    arrays = isinstance(first, np.ndarray) or any(isinstance(item, np.ndarray) for item in value)
    if arrays:
        _check_masks(value, path)
    return as_tensor(array) if arrays else torch.tensor(value)


def _stack_collections(value: list[object] | tuple[object, ...], path: tuple[str, ...]) -> Tensor | None:
    is_plain = PLAIN.issuperset(map(type, value))
    rows: Any = value if is_plain else [_convert_row(item, path) for item in value]
    same = all(row is not None and row.shape == rows[0].shape for row in rows)
    return torch.stack(rows) if same else None


def _convert_row(item: object, path: tuple[str, ...]) -> Tensor | None:
    if isinstance(item, Tensor):
        return item
    if isinstance(item, (*NUMBERS, np.ndarray)):
        _check_masks([item], path)
        return as_tensor(item)
    return _convert_sequence(item, path) if isinstance(item, (list, tuple)) else None


def _check_masks(items: Iterable[object], path: tuple[str, ...]) -> None:
    """Raise ValueError for an array with masked elements among nested items."""
    if not RULES.follows_tensordict:
        for item in expand(items, lambda item: item if isinstance(item, (list, tuple)) else ()):
            check_mask(item, path)


def _is_uniform(items: list[Any]) -> bool:
    """Return True if all items are collections of one kind and batch size, which can be stacked."""
    return (
        bool(items)
        and all(isinstance(item, Core) for item in items)
        and len({(type(item), tuple(item.batch_size)) for item in items}) == 1
    )


def build_nested(
    source: Mapping[Any, object],
    batch_size: torch.Size,
    device: torch.device | None,
    path: tuple[str, ...] = (),
    get_content: GetContent | None = None,
    seen: set[int] | None = None,
) -> Core:
    """Build a TensorDict from a nested mapping. Every node gets this batch size and device."""
    # Values for which ``get_content`` returns items become nodes; by default, dicts do. ``seen`` has the ids of those above.
    entries: dict[str, Child] = {}
    root = make_dense(entries, batch_size, device)
    todo: list[tuple[Mapping[Any, Any], Core, dict[str, Child], tuple[str, ...]]] = [
        (source, root, entries, path)
    ]
    if not torch.compiler.is_compiling():  # torch.compile cannot trace id() before torch 2.13
        seen = {id(source)} if seen is None else seen
    ndim = len(batch_size)
    is_named = False
    fitting: torch.Size | None = None
    # By hand: the row `from_dict` of benchmarks/ops.py.
    while todo:
        mapping, node, entries, prefix = todo.pop()
        first = len(todo)
        for key, value in mapping.items():
            if isinstance(value, Tensor) and type(value) not in WRAPPED:
                if type(key) is str and device is None:
                    try:
                        shape = value.shape
                    except RuntimeError:
                        shape = None  # a strided nested tensor has no shape
                    if shape is not None and (shape == fitting or shape[:ndim] == batch_size):
                        entries[key] = value
                        fitting = shape
                        continue
                content = None
            else:
                content = value if type(value) is dict else get_content and get_content(value)
                if batch_size and get_content and RULES.follows_tensordict and isinstance(value, NUMBERS):
                    value = as_data(value)
            if type(key) is not str:
                if get_content and COERCERS.get_fallback() and not isinstance(key, (str, tuple)):
                    content = {"key": as_data(key), "value": value}
                    key = f"{NON_STRING_KEY}{len(entries)}"
                # A nested key can lead into a node that the loop has not filled yet.
                _fill_levels(todo[first:], batch_size, device, get_content, seen)
                del todo[first:]
            if content is None or (get_content is None and type(key) is not str):
                node._set_path(key, value, prefix)
                is_named = is_named or node._names is not None
                continue
            below = (*prefix, key) if type(key) is str else (*prefix, *unravel_key_below(prefix, key))
            if seen is not None:
                if id(value) in seen and _has_cycle(value, get_content):
                    raise StructureError(f"{show_path(below)} holds a mapping that contains itself")
                seen.add(id(value))
            if type(key) is str:
                inner: dict[str, Child] = {}
                child: Any = make_dense(inner, batch_size, device)
                if key in entries and type(entries[key]) is type(root):  # a nested key has created the node
                    child = entries[key]
                    inner = child._dict
                entries[key] = child
                todo.append((content, child, inner, below))
            else:
                child = build_nested(content, batch_size, device, below, get_content, seen)
                node._set_path(key, child, prefix)
                is_named = is_named or node._names is not None
    if is_named:
        lift_names(root)
    return root


def _fill_levels(
    levels: list[tuple[Mapping[object, object], Core, dict[str, Child], tuple[str, ...]]],
    batch_size: torch.Size,
    device: torch.device | None,
    get_content: GetContent | None,
    seen: set[int] | None,
) -> None:
    """Fill the entries of levels that :func:`build_nested` has not reached yet."""
    for mapping, _, entries, path in levels:
        entries.update(build_nested(mapping, batch_size, device, path, get_content, seen)._children())


def _has_cycle(value: object, get_content: GetContent | None) -> bool:
    """Return True if a value contains itself, directly or through nested items."""
    visited: set[int] = set()

    def below(item: object) -> Iterable[object]:
        content = item if isinstance(item, Mapping) else get_content and get_content(item)
        found = {id(inner): inner for inner in (content or {}).values() if id(inner) not in visited}
        visited.update(found)
        return found.values()

    return any(item is value for item in expand(below(value), below))
