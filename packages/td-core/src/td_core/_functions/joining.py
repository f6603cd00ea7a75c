"""Join several collections, or several entries, by stacking or concatenation.

``stack`` and ``cat`` make new tensors and require equal structures. ``lazy_stack`` keeps its members unchanged.
``maybe_dense_stack`` makes a lazy stack only if a dense one is impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._plans.plans import wrap_dim
from .._plans.shapes import Join, cat_plan, stack_plan
from .._python.settings import RULES, SETTINGS
from .._tree.coerce import convert_source
from .._tree.defaults import (
    add_key_note,
    check_same_form,
    get_entry,
    get_parent,
    leaf_node_mismatch_error,
    show_path,
)
from .._tree.dim_names import find_dims
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core, CoreT, identity
from .._tree.ragged import convert_form
from .._tree.walks import get_path, has_entries, visit, walk_levels
from ..errors import BatchSizeError, KeyMismatchError, StructureError
from ..typing import NestedKey
from .join_levels import unify_kinds
from .operands import write_result
from .structure import restore_on_error

ItemT = TypeVar("ItemT")


def stack(input: Iterable[ItemT], dim: int = 0, *, out: Any = None) -> ItemT:
    """Stack the leaves of collections of equal structure along a new batch dim.

    Args:
        input: the collections (or tensors), with equal keys, batch sizes and leaf shapes.
        dim: position of the new dim.
        out: a collection to write into, with the batch size of the result; existing entries are written in place.

    Returns:
        The stack, or ``out``.

    Raises:
        BatchSizeError: the batch sizes differ.
        StructureError: keys or shapes differ; the message has the key path and both values.
        DimError: ``dim`` is out of range.

    >>> stack([TensorDict({"a": 0}), TensorDict({"a": 1})])["a"]
    tensor([0, 1])
    """
    if SETTINGS.stacks_lazily and out is None:
        lazy: ItemT = lazy_stack(input, dim)
        return lazy
    return stack_densely(input, dim, out)


def stack_densely(input: Iterable[ItemT], dim: int, out: Any = None) -> ItemT:
    """Stack as :func:`stack` does, but never as a lazy stack."""
    items = _list_items(input)
    first = items[0] if items else None
    if isinstance(first, Tensor):
        return torch.stack(_check_tensors(items, "stack", out), dim, out=out)  # type: ignore[return-value]
    sizes = _get_batch_sizes(items, "stack")
    size = sizes[0]
    if sizes != [size] * len(sizes):
        i, other = next((i, other) for i, other in enumerate(sizes) if other != size)
        start = RULES.begin("stacking tensordicts requires them to have congruent batch sizes")
        raise BatchSizeError(
            f"{start}cannot stack: item 0 has batch size {list(size)} and item {i} has {list(other)}; "
            "use lazy_stack() to keep both"
        )
    result: ItemT = _join_items(items, stack_plan(size, dim, len(items)), out)
    return result


def cat(input: Iterable[ItemT], dim: int | str = 0, *, out: Any = None) -> ItemT:
    """Concatenate the leaves of collections of equal structure along a batch dim.

    Args:
        input: the collections (or tensors), with equal keys, and batch sizes that differ only along ``dim``.
        dim: the batch dim.
        out: a collection to write into, with the batch size of the result; existing entries are written in place.

    Returns:
        The result, or ``out``.

    Raises:
        BatchSizeError: the batch sizes differ along another dim.
        StructureError: keys or shapes differ; the message has the key path and both values.
        DimError: ``dim`` is out of range.

    >>> cat([TensorDict({"a": torch.zeros(1)}, [1]), TensorDict({"a": torch.ones(2)}, [2])])["a"]
    tensor([0., 1., 1.])
    """
    items = _list_items(input)
    first = items[0] if items else None
    if isinstance(first, Tensor):
        return torch.cat(_check_tensors(items, "concatenate", out), dim, out=out)  # type: ignore[return-value, arg-type]
    sizes = _get_batch_sizes(items, "concatenate")
    size = sizes[0]
    place = dim if type(dim) is int else find_dims(items[0], "cat", dim)
    position = wrap_dim(place, len(size), "cat: dim")
    if sizes != [size] * len(sizes):
        before, behind = size[:position], size[position + 1 :]
        for i, other in enumerate(sizes):
            if len(other) <= position or other[:position] != before or other[position + 1 :] != behind:
                raise BatchSizeError(
                    f"cannot concatenate along dim {position}: item 0 has batch size {list(size)} and item {i} has "
                    f"{list(other)}; only dim {position} may differ"
                )
        if any(item._members_and_dim() is not None for item in items):
            # Drop items of size zero: their shapes need not match, and as lazy stacks they would have no members.
            items = [item for item, other in zip(items, sizes) if other[position]]
            sizes = [other for other in sizes if other[position]]
            size = sizes[0]
    plan = cat_plan(size, position, tuple([other[position] for other in sizes]))
    result: ItemT = _join_items(unify_kinds(items, plan), plan, out)
    return result


def lazy_stack(input: Iterable[object], dim: int = 0, *, out: Any = None, **kwargs: Any) -> Any:
    """Create a lazy stack, which keeps the collections as members and stacks an entry when it is read.

    Args:
        input: the collections, with equal numbers of batch dims. Tensors are stacked, or joined by ``as_padded_tensor``,
            ``as_nested_tensor`` or ``as_list``, see :meth:`TensorDict.get`.
        dim: position of the new dim.
        out: a collection to write into, with the batch size of the result; the call returns it instead of a lazy stack.
        **kwargs: ``strict_shape=True`` raises if the batch sizes of members differ; ``stack_dim_name=`` sets the
            name of the new dim.

    Raises:
        BatchSizeError: the numbers of batch dims differ; with ``strict_shape``, also if their sizes differ.
        DimError: ``dim`` is out of range.

    >>> both = lazy_stack([TensorDict({"a": 0, "b": 0}), TensorDict({"a": 1})])
    >>> both["a"], list(both.keys())
    (tensor([0, 1]), ['a'])
    """
    items = _list_items(input)
    tensors = bool(items) and isinstance(items[0], Tensor)
    if tensors and any(option.startswith("as_") for option in kwargs):
        return convert_form("of the list", _check_tensors(items, "stack"), dim, None, **kwargs)
    strict, name = _parse_options("lazy_stack", **kwargs) if kwargs else (False, None)
    if tensors:
        return torch.stack(_check_tensors(items, "stack", out), dim, out=out)
    sizes = _get_batch_sizes(items, "stack")
    check_member_sizes(sizes, strict)
    size = sizes[0]
    position = wrap_dim(dim, len(size) + 1, "lazy_stack: dim")
    result = items[0]._stack_lazily(items, position)
    if out is not None:
        return write_result(out, torch.Size((*size[:position], len(items), *size[position:])), result)
    return _set_dim_name(result, position, name)


def check_member_sizes(sizes: Sequence[torch.Size], strict: bool) -> None:
    """Raise BatchSizeError if the batch sizes of the members of a lazy stack differ, or only their numbers of dims."""
    for i, size in enumerate(sizes):
        if size != sizes[0] and (strict or len(size) != len(sizes[0])):
            raise BatchSizeError(
                f"cannot stack: item 0 has batch size {list(sizes[0])} and item {i} has {list(size)}"
            )


def _parse_options(
    what: str, strict_shape: bool = False, stack_dim_name: str | None = None, **unknown: object
) -> tuple[bool, str | None]:
    if unknown:
        raise TypeError(f"{what}() takes strict_shape and stack_dim_name; got {', '.join(unknown)}")
    return strict_shape, stack_dim_name


def _set_dim_name(result: ItemT, dim: int, name: str | None) -> ItemT:
    if name is not None:
        node: Any = result
        names = list(node._names or (None,) * len(node.batch_size))
        names[dim] = name
        node.names = names
    return result


def maybe_dense_stack(
    input: Iterable[ItemT], dim: int = 0, *, out: object = None, strict: bool = False, **kwargs: Any
) -> ItemT:
    """Stack collections densely if structures and shapes are equal, else as a lazy stack; each level separately.

    A node is dense if its own leaves have equal keys and shapes, also if a node below it is a lazy stack.

    Args:
        input: the collections, with equal numbers of batch dims.
        dim: position of the new dim.
        out: a collection to write into, with the batch size of the result.
        strict: raise if the keys of ``out`` are not those of the collections.
        **kwargs: as for :func:`lazy_stack`.

    Raises:
        KeyMismatchError: ``strict`` is True, and the keys of ``out`` differ.

    >>> zero, one, other = TensorDict({"a": 0}), TensorDict({"a": 1}), TensorDict({"b": 0})
    >>> type(maybe_dense_stack([zero, one])).__name__, type(maybe_dense_stack([zero, other])).__name__
    ('TensorDict', 'LazyStackedTensorDict')
    """
    items = _list_items(input)
    _, name = _parse_options("maybe_dense_stack", **kwargs)
    if items and isinstance(items[0], Core):
        dim = wrap_dim(dim, len(items[0].batch_size) + 1)  # nested nodes may have more dims
    if strict and isinstance(out, Core):
        wanted, actual = {*items[0].keys(True)}, {*out.keys(True)}
        if wanted != actual:
            raise KeyMismatchError(
                f"out= has not the keys of the collections: missing {sorted(map(str, wanted - actual))}, "
                f"extra {sorted(map(str, actual - wanted))}"
            )
    try:
        dense: ItemT = stack(items, dim, out=out)
        return _set_dim_name(dense, dim, name)
    except (StructureError, BatchSizeError):
        if not items or isinstance(items[0], Tensor):
            raise
    made, nested = _stack_level(items, dim) if out is None else (None, [])
    if made is None:
        lazy: ItemT = lazy_stack(items, dim, out=out, **kwargs)
        return lazy
    visit(_stack_nested, made, items, dim, nested)
    mixed: ItemT = _set_dim_name(made, dim, name)
    return mixed


def _stack_level(items: list[Any], dim: int) -> tuple[Any, list[str]]:
    """Stack the leaves and values of nodes, without their nested nodes. Return None for nodes that do not fit."""
    columns = [
        item._children() for item in items if isinstance(item, Core) and item._members_and_dim() is None
    ]
    nested = [key for key, child in columns[0].items() if has_entries(child)] if columns else []
    if len(columns) < len(items) or len({frozenset(column) for column in columns}) > 1:
        return None, []
    if not all(has_entries(column[key]) for column in columns for key in nested):
        return None, []
    own = [{key: child for key, child in column.items() if key not in nested} for column in columns]
    try:
        return stack([item._with_children(rest) for item, rest in zip(items, own)], dim), nested
    except (StructureError, BatchSizeError):
        return None, []


def _stack_nested(
    level: Core, items: list[Core], dim: int, nested: list[str]
) -> Iterator[tuple[object, ...]]:
    """Store the stacks of nested nodes in a dense level: a lazy stack of those that do not fit."""
    for key in nested:
        parts = [item._get_child(key) for item in items]
        result, below = _stack_level(parts, dim)
        level._set_child(key, lazy_stack(parts, dim) if result is None else result)
        if below:
            yield result, parts, dim, below


def dense_stack_tds(td_list: Sequence[object] | Core, dim: int | None = None) -> Any:
    """Stack a list of collections, or the members of a lazy stack, densely; a collection that is dense is returned itself.

    Args:
        td_list: the collections, or one collection.
        dim: position of the new dim; may be omitted for a lazy stack, where it is the stack dim.

    Raises:
        ValueError: ``dim`` is missing for a list, or is not the stack dim of the lazy stack.
        DimError: ``dim`` is out of range.

    >>> type(dense_stack_tds(lazy_stack([TensorDict({"a": 0}), TensorDict({"a": 1})]))).__name__
    'TensorDict'
    """
    if isinstance(td_list, Core):
        stacked = td_list._members_and_dim()
        position = None if dim is None else wrap_dim(dim, len(td_list.batch_size))
        if stacked is None:
            return td_list
        stack_dim = stacked[1]
        if position not in (None, stack_dim):
            raise ValueError(f"dim {dim} is not the stack dim, {stack_dim}; leave it out")
        result = stack_densely(td_list.unbind(stack_dim), stack_dim)
        if td_list._names is not None:
            result._set_names(td_list._names)
        return result
    if dim is None:
        raise ValueError("dense_stack_tds needs dim for a list of collections")
    return stack_densely(td_list, dim)


def merge_tensordicts(
    *tensordicts: Any,
    callback_exist: Callable[..., object] | Mapping[NestedKey, Callable[..., object]] | None = None,
) -> Any:
    """Merge the entries of several collections into a new one; leaves are shared.

    Args:
        *tensordicts: two or more collections; the result has the class and batch size of the first.
        callback_exist: called with the entries of a key that all collections have, in order; returns the entry to keep. Or a
            mapping from keys to such functions. Without it, and for keys that some collections lack, the first entry is kept.

    Raises:
        StructureError: fewer than two collections; or a key has a leaf in one collection and a node in another.

    >>> merge_tensordicts(TensorDict(a=1, n={"b": 1}), TensorDict(n={"c": 2}))
    TensorDict(batch_size=[], fields={a: i64[], n: {b: i64[], c: i64[]}})
    """
    if len(tensordicts) < 2:
        raise StructureError(f"merge_tensordicts needs two collections or more, got {len(tensordicts)}")
    callbacks: Any = callback_exist
    if isinstance(callback_exist, Mapping):
        callbacks = {unravel_key_to_tuple(key): call for key, call in callback_exist.items()}
    match, levels = _collect_entries(tensordicts)
    # _map returns a shallow copy, and a plain collection for TensorDictParams.
    result = tensordicts[0]._map(identity)
    for path, level in levels.items():
        if path not in result.keys(True):
            result._set_path(path, level._with_children({}))
    for path, entries in match.items():
        call = callbacks.get(path) if isinstance(callbacks, dict) else callbacks
        if len(entries) == len(tensordicts) and call is not None:
            result._set_path(path, call(*entries))
        elif path not in result.keys(True):
            result._set_path(path, entries[0])
    return result


def _collect_entries(
    tensordicts: Sequence[Core],
) -> tuple[dict[tuple[str, ...], list[Child]], dict[tuple[str, ...], Core]]:
    """Return the entries of all collections that are not nodes of entries, and the first node at each other key path."""
    match: dict[tuple[str, ...], list[Child]] = {}
    levels: dict[tuple[str, ...], Core] = {}
    for td in tensordicts:
        if not has_entries(td):
            raise StructureError(f"merge_tensordicts takes collections of entries, got a {type(td).__name__}")
        for _, position, children in walk_levels(td):
            for key, child in children.items():
                path = get_path(position, key)
                if has_entries(child):
                    if path in match:
                        raise leaf_node_mismatch_error(match[path][0], child, path)
                    levels.setdefault(path, child)
                elif path in levels:
                    raise leaf_node_mismatch_error(levels[path], child, path)
                else:
                    match.setdefault(path, []).append(child)
    return match, levels


def _list_items(input: Iterable[object]) -> list[Any]:
    """Return the items as a list; foreign ones become tensors or collections."""
    items: list[Any] = input if type(input) is list else list(input)
    if len({*map(type, items)}) > 1 or (items and not isinstance(items[0], Core)):
        return [*map(convert_source, items)]
    return items


def _check_tensors(items: list[Any], what: str, out: object = None) -> list[Tensor]:
    """Return ``items``, whose first is a tensor; TypeError if another item or ``out`` is a collection."""
    if isinstance(out, Core):
        raise TypeError(f"cannot {what}: out= of tensors is a tensor; got a {type(out).__name__}")
    for i, item in enumerate(items):
        if isinstance(item, Core):
            raise TypeError(
                f"cannot {what}: item 0 is a {type(items[0]).__name__}, item {i} a {type(item).__name__}"
            )
    return items


def _get_batch_sizes(items: Sequence[Any], what: str) -> list[torch.Size]:
    """Return the batch size of each item; raise if an item is not a collection, or if only some items are value nodes."""
    if not items:
        raise StructureError(f"cannot {what}: there is nothing in the list; give at least one collection")
    sizes: list[torch.Size] = []
    checked: type | None = None
    for item in items:
        # Speed: isinstance() of an ABC is slow, so check each new class only once.
        if type(item) is not checked:
            if not isinstance(item, Core):
                raise TypeError(
                    f"cannot {what}: item {len(sizes)} is a {type(item).__name__}, not a collection"
                )
            if checked is not None:
                check_same_form(items[0], item, ())
            checked = type(item)
        sizes.append(item.batch_size)
    return sizes


def _join_items(items: Sequence[Any], plan: Join, out: Core) -> Any:
    first = items[0]
    result = first._join(items, plan)
    names = first._names
    if names is not None and any(item._names != names for item in items):
        result.names = None
    return result if out is None else write_result(out, result.batch_size, result)


def sort_leaves(node: Core, order: bool | list[NestedKey] | None) -> list[Tensor]:
    """List the leaves in insertion order, by their keys, or in the order of given keys."""
    if not order or order is True:
        return list(node.values(True, True, sort=bool(order)))
    wanted = [unravel_key_to_tuple(key) for key in order]
    present = {unravel_key_to_tuple(key): leaf for key, leaf in node.items(True, True)}
    if set(wanted) != set(present) or len(wanted) != len(present):
        raise KeyMismatchError(
            f"sorted= must have each key of the collection once; got {order}, the keys are {list(present)}"
        )
    return [present[path] for path in wanted]


def replace_entries(
    node: CoreT,
    keys: tuple[NestedKey, ...],
    out_key: NestedKey,
    keep_entries: bool,
    join: Callable[[list[Any]], object],
) -> CoreT:
    """Store the join of entries under a key, and remove the entries."""
    check_unlocked(node, "replace entries")
    root: Any = node
    paths = [unravel_key_to_tuple(key) for key in keys]
    target = unravel_key_to_tuple(out_key)
    entries = [get_entry(node, path) for path in paths]
    # Entries at or below out_key are not removed one by one: setting the new entry replaces them.
    old = [] if keep_entries else [path for path in dict.fromkeys(paths) if path[: len(target)] != target]
    for path in old:
        check_unlocked(get_parent(node, path), f"remove {show_path(path)}")
    try:
        joined = join(entries)
    except Exception as error:
        add_key_note(error, target)
        raise
    # An old entry that is a prefix of out_key must be removed first, so that a node can take its key.
    above = [path for path in old if path == target[: len(path)]]
    with restore_on_error(node) if above else nullcontext():
        for path in above:
            root.del_(path)
        root.set(target, joined)
    for path in old:
        if path not in above:
            root.del_(path)
    return node
