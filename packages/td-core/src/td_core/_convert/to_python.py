"""Methods that convert between collections and Python objects."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from operator import getitem
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._python.linked_list import LinkedList
from .._tree.defaults import show_path
from .._tree.node import Core, get_all_entries
from .._tree.walks import has_entries, map_levels
from .._writes.check import describe_leaf, rephrase_error
from .from_python import NON_STRING_KEY, PYTREE_TYPE

ConvertTensors = bool | Literal["numpy"]


def _as_entry(node: Core, key: str, value: object) -> object:
    """Wrap a value in a value node, if ``node`` holds a value node under ``key``; else convert it to the declared type."""
    own = node._children().get(key)
    entry = own._as_value(value) if isinstance(own, Core) else value
    if entry is not value or value is None or isinstance(value, (Tensor, Core, Mapping)):
        return entry
    return node._schema.convert_plain(key, value)


def with_values(mapping: Mapping[object, object], like: Core) -> dict[object, object]:
    """Replace the values of a nested mapping by value nodes under keys where ``like`` holds value nodes."""

    def fill(
        node: Core, out: dict[object, object], source: Mapping[Any, object]
    ) -> Iterator[tuple[object, Core, object]]:
        children = node._children()
        for key, value in source.items():
            child = children.get(key)
            if isinstance(value, Mapping) and child is not None and has_entries(child):
                yield key, child, value
            else:
                out[key] = _as_entry(node, key, value) if isinstance(key, str) else value

    values: dict[object, object] = map_levels(like, fill, mapping, make=lambda _, out: out)
    return values


@lru_cache(maxsize=256)
def make_namedtuple(fields: tuple[str, ...]) -> type:
    return namedtuple("GenericDict", fields)


def make_container(entries: dict[str, Any]) -> object:
    """Build the container that ``from_pytree`` converted to ``entries``; a (key, value) pair for a non-string key."""
    cls = entries.pop(PYTREE_TYPE, None)
    if cls is None:
        return (entries["key"], entries["value"])
    if issubclass(cls, Mapping):
        pairs = [value if key.startswith(NON_STRING_KEY) else (key, value) for key, value in entries.items()]
        # from_pytree does not store the default_factory.
        return cls(None, pairs) if issubclass(cls, defaultdict) else cls(pairs)
    return cls(**entries) if hasattr(cls, "_fields") else cls(entries.values())


def convert_value(root: Core, child: Any, convert_tensors: ConvertTensors) -> object:
    """Convert a value node, or a plain value that a kind lists among its entries, for ``to_dict``."""
    value = child._unwrap() if isinstance(child, Core) else child
    if isinstance(value, Tensor) and convert_tensors:
        return convert_tree(root, value, convert_tensors)
    return child.tolist() if isinstance(value, LinkedList) else value


def convert_tree(root: Core, leaf: Tensor, form: ConvertTensors) -> object:
    try:
        if form != "numpy":
            return leaf.tolist()
        return tuple([part.numpy() for part in leaf.unbind()]) if leaf.is_nested else leaf.numpy()
    except (RuntimeError, TypeError) as error:
        raise rephrase_error(error, f"cannot convert {describe_leaf(root, leaf)}: {error}") from error


def list_columns(
    node: Core, ndim: int, path: tuple[str, ...] = ()
) -> tuple[list[object], list[tuple[tuple[str, ...], object]]]:
    """Return the field specs of the structured dtype of ``node``, and its columns as (path, array) pairs."""
    fields: list[object] = []
    columns: list[tuple[tuple[str, ...], object]] = []
    for key, child in dict(get_all_entries(node)).items():
        if isinstance(child, Tensor):
            try:
                array = child.detach().cpu().numpy()
            except (RuntimeError, TypeError) as error:
                raise rephrase_error(error, f"cannot convert {show_path((*path, key))}: {error}") from error
            fields.append(
                (key, array.dtype, array.shape[ndim:]) if array.shape[ndim:] else (key, array.dtype)
            )
            columns.append(((key,), array))
        elif has_entries(child):
            inner, below = list_columns(child, ndim, (*path, key))
            fields.append((key, inner))
            columns.extend(((key, *path), column) for path, column in below)
        else:
            array = _value_column(child, node.batch_size)
            fields.append((key, array.dtype))
            columns.append(((key,), array))
    return fields, columns


def _value_column(node: Core, batch_size: torch.Size) -> np.ndarray[Any, Any]:
    value = node.tolist()
    flat = np.array(value)
    if flat.dtype.kind == "U" and flat.shape == tuple(batch_size):
        return flat
    column = np.empty(tuple(batch_size), dtype=object)
    for position in np.ndindex(*batch_size):
        column[position] = reduce(getitem, position, value)
    return column
