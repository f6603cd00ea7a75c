"""Build collections from Python objects: mappings, tuples, lists, structured arrays, pytrees, schemas.

What is not a mapping is read as one, node by node, while the collection is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._formats.saving import create
from .._formats.serializers import DEFAULT_FORMAT, SERIALIZERS
from .._functions.joining import lazy_stack, maybe_dense_stack, stack
from .._plans.plans import as_batch_size
from .._torch.dtypes import as_dtype
from .._tree.coerce import (
    as_data,
    build_nested,
    coerce,
    convert_source,
    get_struct_fields,
    is_foreign,
)
from .._tree.defaults import check_mapping
from .._tree.devices import as_device
from .._tree.dim_names import check_names
from .._tree.foreign import check_mask
from .._tree.keys import NON_STRING_KEY
from .._tree.node import Core, convert_level, get_all_entries, make_dense
from .._tree.walks import has_entries, map_levels, visit
from ..errors import BatchSizeError, StructureError
from ..typing import BatchSize, DeviceType, DtypeLike, NestedKey

if TYPE_CHECKING:
    import numpy.typing as npt

PYTREE_TYPE = "_pytree_type"
"""Key under which :func:`from_pytree` stores the class of each container."""

#: Types of the leaves of a pytree that are kept as they are.
_VALUES = (bool, int, float, complex, str, bytes, type(None))


def from_any(
    obj: object,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: BatchSize | None = None,
) -> Any:
    """Convert a Python container to a collection, and return any other object unchanged.

    Mappings, tuples, named tuples, structured arrays and dataclasses become collections. Lists become tensors, jagged tensors,
    stacks of collections, or non-tensor data if they hold no tensors. Objects of types with a
    :class:`~td_core.spi.Coercer` of a plugin become what it makes of them, and arrays of others become tensors. Collections,
    tensors, plain arrays, numbers and strings are returned unchanged.

    Args:
        obj: the object.
        auto_batch_size: set the batch size of every node to the leading dims that its leaves share.
        batch_dims: the maximal number of these dims; implies ``auto_batch_size``.
        device: the device to move entries to.
        batch_size: the batch size, instead of ``auto_batch_size``.

    Raises:
        BatchSizeError: the shape of an entry does not start with ``batch_size``.
        ValueError: ``batch_size`` and ``batch_dims`` are both given.

    >>> from_any({"a": [1, 2], "b": (3, 4)})
    TensorDict(batch_size=[], fields={a: i64[2], b: {0: i64[], 1: i64[]}})
    """
    if isinstance(obj, list):
        return coerce(obj, torch.Size(), None if device is None else as_device(device), ())
    if is_foreign(obj):
        return _coerce_object(obj, batch_size, device, auto_batch_size, batch_dims)
    content = _get_content(obj)
    if content is None:
        check_mask(obj, ())
        return obj
    own = obj.shape if isinstance(obj, np.ndarray) else None
    return _build(content, batch_size, device, None, auto_batch_size, batch_dims, own)


def _coerce_object(
    obj: object,
    batch_size: BatchSize | None,
    device: DeviceType | None,
    auto_batch_size: bool,
    batch_dims: int | None,
) -> object:
    """Convert a foreign object; arguments as for :func:`from_any`."""
    _check_one_given(batch_size, batch_dims)
    size = as_batch_size(() if batch_size is None else batch_size)
    place = None if device is None else as_device(device)
    result = coerce(convert_source(obj, size, place), size, place, ())
    is_inferred = batch_size is None and (auto_batch_size or batch_dims is not None)
    if is_inferred and not isinstance(result, Tensor):
        result.auto_batch_size_(batch_dims)
    return result


def from_dict(
    d: Mapping[Any, object] | Core,
    *,
    auto_batch_size: bool | None = None,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: BatchSize | None = None,
    names: Sequence[str | None] | None = None,
) -> Any:
    """Convert a mapping to a collection; nested mappings and tuples become nested collections.

    Args:
        d: the mapping. A key that is not a string, such as a number, is stored with its value below a key of td, and
            ``to_dict`` restores it.
        auto_batch_size: set the batch size of every node to the leading dims that its leaves share.
        batch_dims: the maximal number of these dims; implies ``auto_batch_size``.
        device: the device to move entries to.
        batch_size: the batch size, instead of ``batch_dims``.
        names: a name or None for each batch dim.

    Raises:
        BatchSizeError: the shape of an entry does not start with ``batch_size``.
        ValueError: ``batch_size`` and ``batch_dims`` are both given.

    >>> from_dict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}, auto_batch_size=True).batch_size
    torch.Size([3])
    """
    own = None
    # Hot path: most sources are dicts.
    if type(d) is not dict:
        own = d.batch_size if isinstance(d, Core) else None
        d = _entries("from_dict", d)
    return _build(d, batch_size, device, names, bool(auto_batch_size), batch_dims, own)


def _convert_like(node: Core, key: str, value: object) -> object:
    """Wrap a value in a value node, if ``node`` holds a value node under ``key``; else convert it to the declared type."""
    own = node._children().get(key)
    entry = own._as_value(value) if isinstance(own, Core) else value
    if entry is not value or value is None or isinstance(value, (Tensor, Core, Mapping)):
        return entry
    return node._schema.convert_plain(key, value)


def wrap_values_like(like: Core, mapping: Mapping[object, object]) -> dict[object, object]:
    """Replace the values of a nested mapping by value nodes under keys where ``like`` holds value nodes."""
    mapping = _entries("from_dict_instance", mapping)

    def fill(
        node: Core, out: dict[object, object], source: Mapping[Any, object]
    ) -> Iterator[tuple[object, Core, object]]:
        children = node._children()
        for key, value in source.items():
            child = children.get(key)
            if isinstance(value, Mapping) and child is not None and has_entries(child):
                yield key, child, value
            else:
                out[key] = _convert_like(node, key, value) if isinstance(key, str) else value

    return map_levels(like, fill, mapping, make=lambda _, out: out)


def convert_levels_like(like: Core, root: Core) -> Core:
    """Convert each node of a new collection to the kind of the node under the same keys in ``like``."""
    result = root
    levels: list[tuple[Core, Core, Core | None, str]] = [(root, like, None, "")]
    for node, kind, _, _ in levels:
        for key, child in dict(node._children()).items():
            other = kind._children().get(key)
            if other is not None and has_entries(child) and has_entries(other):
                levels.append((child, other, node, key))
    for node, kind, parent, key in reversed(levels):
        result = kind._schema.add_defaults(convert_level(kind, node))
        if parent is not None:
            parent._set_child(key, result)
    return result


def from_tuple(
    obj: Sequence[object],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: BatchSize | None = None,
) -> Any:
    """Convert a tuple to a collection with the keys ``"0"``, ``"1"`` and so on; arguments as for :func:`from_any`.

    >>> from_tuple((torch.zeros(3), torch.ones(3)))
    TensorDict(batch_size=[], fields={0: f32[3], 1: f32[3]})
    """
    if not isinstance(obj, (tuple, list)):
        raise TypeError(f"from_tuple takes a tuple; got {type(obj).__name__}")
    content = {str(i): value for i, value in enumerate(obj)}
    return _build(content, batch_size, device, None, auto_batch_size, batch_dims)


def from_namedtuple(
    named_tuple: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: BatchSize | None = None,
) -> Any:
    """Convert a named tuple, such as the result of ``torch.max``, to a collection with its fields as keys.

    Arguments as for :func:`from_any`.

    >>> from collections import namedtuple
    >>> from_namedtuple(namedtuple("Point", "x y")(1, 2))
    TensorDict(batch_size=[], fields={x: i64[], y: i64[]})
    """
    kind = type(named_tuple)
    # The classes of torch.return_types are defined in C and lack _fields.
    fields = getattr(kind, "_fields", None) or (hasattr(kind, "n_fields") and kind.__match_args__)
    if not (isinstance(named_tuple, tuple) and fields):
        raise TypeError(f"from_namedtuple takes a named tuple; got {kind.__name__}")
    content = dict(zip(fields, named_tuple, strict=True))
    return _build(content, batch_size, device, None, auto_batch_size, batch_dims)


def from_struct_array(
    struct_array: npt.NDArray[np.void] | np.void,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: BatchSize | None = None,
) -> Any:
    """Convert a structured array to a collection with its fields as keys. The leaves share its memory.

    Args:
        struct_array: the array. Fields of strings become non-tensor data. A field is copied if the size of a record
            is not a multiple of the size of its elements, because tensor strides cannot express that.
        auto_batch_size: as for :func:`from_any`.
        batch_dims: as for :func:`from_any`.
        device: the device to move entries to.
        batch_size: the batch size; by default the shape of the array.

    >>> import numpy
    >>> from_struct_array(numpy.array([(1, 2.0), (3, 4.0)], dtype=[("x", "i4"), ("y", "f8")]))
    TensorDict(batch_size=[2], fields={x: i32[], y: f64[]})
    """
    fields = get_struct_fields(struct_array)
    if fields is None:
        raise TypeError(f"from_struct_array takes a structured array; got {type(struct_array).__name__}")
    return _build(fields, batch_size, device, None, auto_batch_size, batch_dims, struct_array.shape)


def from_list(
    input: Sequence[object],
    *,
    auto_batch_size: bool | None = None,
    batch_size: BatchSize | None = None,
    device: DeviceType | None = None,
    batch_dims: int | None = None,
    names: Sequence[str | None] | None = None,
    lazy: bool | None = None,
) -> Any:
    """Stack a list of mappings or collections along a new first dim.

    Args:
        input: the items.
        auto_batch_size: set the batch size of the stack to the leading dims that its leaves share.
        batch_size: the batch size of the stack, instead of ``auto_batch_size``.
        device: the device to move entries to.
        batch_dims: the maximal number of dims for ``auto_batch_size``; implies it.
        names: a name or None per batch dim of the stack.
        lazy: True makes a lazy stack, False stacks every leaf, None stacks the leaves if keys and shapes agree
            and makes a lazy stack otherwise.

    Raises:
        StructureError: the list is empty, or ``lazy`` is False and the keys or shapes of items differ.

    >>> from_list([{"a": 1}, {"a": 2}])["a"]
    tensor([1, 2])
    """
    items = [_make_item(item, i, device) for i, item in enumerate(input)]
    if not items:
        raise StructureError("from_list needs at least one item, got an empty list")
    _check_one_given(batch_size, batch_dims)
    if batch_size is None and (auto_batch_size or batch_dims is not None):
        most = None if batch_dims is None else max(batch_dims - 1, 0)
        items = [item.copy().auto_batch_size_(most) for item in items]
    elif batch_size is not None:
        size = as_batch_size(batch_size)
        if size[:1] != (len(items),):
            raise BatchSizeError(f"the batch size {list(size)} does not fit a stack of {len(items)} items")
        items = [item._with_batch_size(size[1:]) for item in items]
    result = (maybe_dense_stack if lazy is None else lazy_stack if lazy else stack)(items, 0)
    if names is not None:
        result.names = names
    return result


def _make_item(item: object, position: int, device: DeviceType | None) -> Any:
    """Convert an item of a list to a collection on a device."""
    item = convert_source(item)
    if not isinstance(item, (Mapping, Core)):
        raise TypeError(
            f"from_list takes mappings and collections; item {position} is a {type(item).__name__}"
        )
    if not isinstance(item, Core):
        item = _build(item, None, None, None, False, None)
    return item if device is None else item.to(device)


def fromkeys(keys: Iterable[NestedKey], value: object = 0) -> Any:
    """Build a collection with the same value under each key.

    >>> fromkeys(["a", ("b", "c")])
    TensorDict(batch_size=[], fields={a: i64[], b: {c: i64[]}})
    """
    result: Any = make_dense({}, torch.Size())
    for key in keys:
        result.set(key, value)
    return result


def from_schema(
    schema: Mapping[NestedKey, tuple[Sequence[int] | torch.Size, DtypeLike]],
    *,
    batch_size: BatchSize | None = None,
    storage: str | None = None,
    device: DeviceType | None = None,
    **kwargs: Any,
) -> Any:
    """Build a collection of zeros with the given keys, shapes and dtypes.

    Args:
        schema: mapping from keys to pairs ``(shape without the batch dims, dtype)``.
        batch_size: the batch size; empty by default.
        storage: None for memory, ``"shared"`` for shared memory, ``"memmap"`` for files (needs td-memmap), or the name of
            another format, which creates a save of zeros; see :func:`td_core.create`.
        device: the device of the leaves.
        **kwargs: arguments of ``memmap_like``, such as ``prefix``, with ``storage="memmap"``. With another format the
            location, named ``location``, ``prefix`` or ``filename``, and the options of the format.

    Raises:
        MissingPluginError: ``storage`` is none of these.
        TypeError: an entry of the schema is not a pair of shape and dtype.

    >>> from_schema({"a": ([3], torch.float32)}, batch_size=[2])
    TensorDict(batch_size=[2], fields={a: f32[3]})
    """
    stored = storage not in (None, "shared")
    if kwargs and not stored:
        raise TypeError(f"from_schema() takes no {', '.join(kwargs)} with storage={storage!r}")
    if stored:
        SERIALIZERS.get(storage)
    check_mapping("from_schema", schema)
    size = as_batch_size(batch_size)
    result: Any = make_dense({}, size, None if device is None else as_device(device))
    for key, entry in schema.items():
        try:
            shape, dtype = entry
            full = (*size, *shape)
        except (TypeError, ValueError):
            raise TypeError(f"key {key!r} of a schema is a pair of shape and dtype; got {entry!r}") from None
        if stored:
            # Formats use only shape and dtype, so expand a scalar instead of allocating the full size.
            result.set(key, torch.zeros((), dtype=as_dtype(dtype)).expand(full))
        else:
            result.set(key, torch.zeros(full, dtype=as_dtype(dtype), device=device))
    if storage == DEFAULT_FORMAT:
        return result.memmap_like(**kwargs)
    if stored:
        locations = [kwargs.pop(name) for name in ("location", "prefix", "filename") if name in kwargs]
        if len(locations) != 1:
            raise TypeError(f"from_schema(storage={storage!r}) takes one location; got {len(locations)}")
        return create(result, locations[0], format=storage, **kwargs)
    return result.share_memory_() if storage == "shared" else result


def make_tensordict(
    input_dict: Mapping[Any, object] | None = None,
    batch_size: BatchSize | None = None,
    device: DeviceType | None = None,
    auto_batch_size: bool | None = None,
    **kwargs: object,
) -> Any:
    """Build a collection from a mapping and from keyword arguments.

    Args:
        input_dict: entries.
        batch_size: the batch size; empty by default.
        device: the device to move entries to.
        auto_batch_size: set the batch size of every node to the leading dims that its leaves share.
        **kwargs: more entries, which replace those of ``input_dict``.

    >>> make_tensordict(a=torch.zeros(3), batch_size=[3])
    TensorDict(batch_size=[3], fields={a: f32[]})
    """
    source = {} if input_dict is None else _entries("make_tensordict", input_dict)
    return _build({**source, **kwargs}, batch_size, device, None, bool(auto_batch_size), None)


def _entries(what: str, source: object) -> Mapping[Any, object]:
    given, source = source, convert_source(source)
    if isinstance(source, Core) and has_entries(source):
        return get_all_entries(source)
    if isinstance(source, Core) or not isinstance(source, Mapping):
        raise TypeError(f"{what} takes a mapping or a collection of entries; got {type(given).__name__}")
    return source


def from_pytree(
    pytree: object,
    *,
    batch_size: BatchSize | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
) -> Any:
    """Convert a pytree of dicts, lists, tuples and named tuples to a collection; ``to_pytree`` is the inverse.

    The class of each container is stored as non-tensor data under ``"_pytree_type"`` (needs td-tensorclass). A tensor
    or collection is returned unchanged. Numbers, text and None are non-tensor data too, so that the state of an optimizer, for
    example, is the same after :meth:`to_pytree`.

    Args:
        pytree: the tree; its leaves are tensors, collections, arrays, numbers, text or None.
        batch_size: the batch size; empty by default.
        auto_batch_size: as for :func:`from_any`.
        batch_dims: as for :func:`from_any`.

    Raises:
        TypeError: a leaf has another type.

    >>> from_pytree(torch.ones(2))
    tensor([1., 1.])
    """
    pytree = convert_source(pytree)
    if isinstance(pytree, (Tensor, Core)):
        return pytree
    return _build(_tree_content(pytree), batch_size, None, None, auto_batch_size, batch_dims)


def _tree_content(pytree: object) -> dict[str, object]:
    root: dict[str, object] = {}

    def fill(tree: Core, out: dict[str, object]) -> Iterator[tuple[Any, dict[str, object]]]:
        out[PYTREE_TYPE] = type(tree)
        entries: Iterable[tuple[object, object]]
        below: dict[str, object]
        if isinstance(tree, Mapping):
            entries = tree.items()
        elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
            entries = zip(tree._fields, tree, strict=True)
        elif isinstance(tree, (list, tuple)):
            entries = ((str(i), value) for i, value in enumerate(tree))
        else:
            raise TypeError(f"a pytree is made of dicts, lists and tuples; got {type(tree).__name__}")
        for i, (key, value) in enumerate(entries):
            target = out
            if not isinstance(key, str):
                out[f"{NON_STRING_KEY}{i}"] = target = {"key": as_data(key)}
                key = "value"
            if isinstance(value, (Tensor, Core, np.ndarray, np.generic)) or is_foreign(value):
                target[key] = value
            elif isinstance(value, (Mapping, list, tuple)):
                target[key] = below = {}
                yield value, below
            elif isinstance(value, _VALUES):
                target[key] = as_data(value)
            else:
                raise TypeError(
                    f"the leaf {key!r} of a pytree is a {type(value).__name__}; expected a tensor, a number or text"
                )

    visit(fill, pytree, root)
    return root


def _build(
    content: Any,
    batch_size: BatchSize | None,
    device: DeviceType | None,
    names: Sequence[str | None] | None,
    auto_batch_size: bool,
    batch_dims: int | None,
    own: BatchSize | None = None,
) -> Core:
    """Build a collection from nested content. ``own`` is the batch size if the caller specifies none."""
    _check_one_given(batch_size, batch_dims)
    inferred = batch_size is None and (auto_batch_size or batch_dims is not None)
    size = as_batch_size(own if batch_size is None and not inferred else batch_size)
    place = None if device is None else as_device(device)
    result = build_nested(content, size, place, get_content=_get_content)
    if inferred:
        result.auto_batch_size_(batch_dims)
    if names is not None:
        result._set_names(check_names(names, len(result.batch_size)))
    return result


def _check_one_given(batch_size: BatchSize | None, batch_dims: int | None) -> None:
    if batch_size is not None and batch_dims is not None:
        raise ValueError(f"give batch_size or batch_dims, not both; got {batch_size!r} and {batch_dims}")


def _get_content(value: object) -> Mapping[Any, object] | None:
    """Return the items of a container as a mapping, or None for a leaf or a collection."""
    if isinstance(value, Core) or is_foreign(value):
        return None
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and type(value) is not torch.Size:
        fields = getattr(value, "_fields", None)
        return (
            dict(zip(fields, value, strict=True))
            if fields
            else {str(i): item for i, item in enumerate(value)}
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        # A class whose fields are all private, such as an array of a store, is not a record of them.
        is_record = not names or any(name[0] != "_" for name in names)
        return {name: getattr(value, name) for name in names} if is_record else None
    return get_struct_fields(value)
