"""Convert collections to dicts, lists, named tuples, pytrees and structured arrays, and to plain TensorDicts."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._python.linked_list import LinkedList
from .._python.settings import RULES
from .._tree.coerce import coerce
from .._tree.defaults import show_path
from .._tree.keys import is_pair_key
from .._tree.node import Child, Core, copy_leaf, get_all_entries, make_dense
from .._tree.walks import has_entries, map_levels
from .._writes.check import describe_leaf, rephrase_error
from ..errors import DepthError
from .from_python import PYTREE_TYPE

if TYPE_CHECKING:
    import numpy.typing as npt

ConvertTensors = bool | Literal["numpy"]


def make_namedtuples(root: Core, dest_cls: type | None) -> object:
    """Convert a collection to nested named tuples, the outermost of class ``dest_cls``; see ``to_namedtuple``."""

    def fill(node: Core, out: dict[str, object], _: None) -> Iterator[tuple[str, Core, None]]:
        for key, child in dict(node._schema.list_entries(node)).items():
            if isinstance(child, Core) and has_entries(child):
                yield key, child, None
            else:
                out[key] = child._unwrap() if isinstance(child, Core) else child

    def make(node: Core, out: dict[str, object]) -> object:
        wanted = dest_cls is not None and (node is root or {*out} == {*getattr(dest_cls, "_fields", ())})
        cls: Any = dest_cls if wanted else _make_namedtuple(tuple(out))
        return cls(**out)

    return map_levels(root, fill, make=make)


@lru_cache(maxsize=256)
def _make_namedtuple(fields: tuple[str, ...]) -> type:
    return namedtuple("GenericDict", fields)


def restore_pytree(root: Core) -> object:
    """Convert a collection that ``from_pytree`` made back to the containers that it names."""

    def fill(node: Core, out: dict[str, object], _: None) -> Iterator[tuple[str, Core, None]]:
        for key, child in dict(node._children()).items():
            if isinstance(child, Tensor):
                out[key] = child
            elif PYTREE_TYPE in child._children() or is_pair_key(key):
                yield key, child, None
            else:
                out[key] = child._unwrap()

    return map_levels(root, fill, make=lambda _, out: _make_container(out))


def _make_container(entries: dict[str, Any]) -> object:
    """Build the container that ``from_pytree`` converted to ``entries``; a (key, value) pair for a non-string key."""
    cls = entries.pop(PYTREE_TYPE, None)
    if cls is None:
        return (entries["key"], entries["value"])
    if issubclass(cls, Mapping):
        pairs = [value if is_pair_key(key) else (key, value) for key, value in entries.items()]
        # from_pytree does not store the default_factory.
        return cls(None, pairs) if issubclass(cls, defaultdict) else cls(pairs)
    return cls(**entries) if hasattr(cls, "_fields") else cls(entries.values())


def restore_keys(levels: Iterable[dict[Any, Any]]) -> None:
    """Replace the pairs of a key that is not a string and its value by entries, in dicts that ``to_dict`` made."""
    for level in levels:
        entries = list(level.items())
        level.clear()
        for key, value in entries:
            if is_pair_key(key) and value.keys() == {"key", "value"}:
                key, value = value["key"], value["value"]
            level[key] = value


def convert_value(root: Core, child: Any, convert_tensors: ConvertTensors) -> object:
    """Convert a value node, or a plain value that a kind lists among its entries, for ``to_dict``."""
    value = child._unwrap() if isinstance(child, Core) else child
    if isinstance(value, Tensor) and convert_tensors:
        return convert_tensor(root, value, convert_tensors)
    return child.tolist() if isinstance(value, LinkedList) else value


def convert_tensor(root: Core, leaf: Tensor, form: ConvertTensors) -> object:
    """Convert a tensor to a number or list, or to an array; an error of torch names the leaf."""
    try:
        if form != "numpy":
            return leaf.tolist()
        return tuple([part.numpy() for part in leaf.unbind()]) if leaf.is_nested else leaf.numpy()
    except (RuntimeError, TypeError) as error:
        raise rephrase_error(error, f"cannot convert {describe_leaf(root, leaf)}: {error}") from error


def list_elements(
    node: Core,
    convert_nodes: bool,
    convert_tensors: ConvertTensors,
    tolist_first: bool,
    as_linked_list: bool,
) -> object:
    """Convert a collection to nested lists over the batch dims; see ``tolist``."""
    if convert_tensors and not convert_nodes:
        raise TypeError("convert_tensors needs convert_nodes: a collection holds tensors")
    if not node.batch_size:
        if not convert_nodes:
            return node
        found: Any = node.to_dict(convert_tensors=convert_tensors, tolist_first=tolist_first)
        # Chat templates ask which fields a message has.
        return _leave_out_unset(node, found) if RULES.follows_tensordict else found
    items = [
        part.tolist(convert_nodes=convert_nodes, convert_tensors=convert_tensors, tolist_first=tolist_first)
        for part in node.unbind(0)
    ]
    return LinkedList(items, td=node) if as_linked_list else items


def _leave_out_unset(node: Core, found: dict[str, object]) -> dict[str, object]:
    """Leave the fields of a tensorclass that are not set out of a dict."""
    entries = node._children()
    return {key: value for key, value in found.items() if key in entries}


def copy_to_tensordicts(root: Core, retain_none: bool) -> object:
    """Copy a collection into plain TensorDicts at every node; ``retain_none`` keeps declared fields that are None."""

    def fill(node: Core, out: dict[str, Child], _: None) -> Iterator[tuple[str, Core, None]]:
        entries = node._schema.list_entries(node) if retain_none else get_all_entries(node)
        for key, child in dict(entries).items():
            if isinstance(child, Tensor):
                out[key] = child.clone()
            elif child is None:
                out[key] = coerce(None, node.batch_size, node.device, (key,))
            elif has_entries(child):
                yield key, child, None
            else:
                out[key] = child._map(copy_leaf)

    return map_levels(
        root, fill, make=lambda node, out: make_dense(out, node.batch_size, node.device, node._names)
    )


def copy_to_struct_array(node: Core) -> npt.NDArray[np.void]:
    """Copy the entries into a structured array; DepthError if numpy cannot nest it as deep."""
    try:
        dtype, columns = _list_columns(node, len(node.batch_size))
    except RecursionError as error:
        raise DepthError(
            f"a structured array cannot be nested as deep as this collection, {error}"
        ) from error
    result = np.empty(tuple(node.batch_size), dtype=dtype)
    for path, column in columns:
        target = result
        for part in path:
            target = target[part]
        target[...] = column
    return result


def _list_columns(
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
            inner, below = _list_columns(child, ndim, (*path, key))
            fields.append((key, inner))
            columns.extend(((key, *path), column) for path, column in below)
        else:
            array = _value_column(child, node.batch_size)
            fields.append((key, array.dtype))
            columns.append(((key,), array))
    return fields, columns


def _value_column(node: Core, batch_size: torch.Size) -> npt.NDArray[np.generic]:
    value = node.tolist()
    flat = np.array(value)
    if flat.dtype.kind == "U" and flat.shape == tuple(batch_size):
        return flat
    column = np.empty(tuple(batch_size), dtype=object)
    for position in np.ndindex(*batch_size):
        column[position] = reduce(getitem, position, value)
    return column
