"""Read, store, write and remove single entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, strided

from .._python.settings import RULES, SETTINGS
from .._tree.coerce import coerce
from .._tree.defaults import (
    add_nested,
    check_cycle,
    get_entry,
    get_parent,
    missing_key_error,
    show_path,
    unwrap_entry,
)
from .._tree.dim_names import inherit_names, join_names, take_names
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core, CoreT, make_dense
from .._tree.ragged import convert_form, find_holders, list_distinct_members
from .._tree.walks import has_entries, list_holders, visit
from .._writes.inplace import write_unrecorded
from .._writes.pair import pair_rows
from .._writes.update import write_entry
from ..errors import DimNamesError, KeyPathError, StructureError, TensorDictError
from ..typing import NO_DEFAULT, NestedKey

NOT_GIVEN: object = object()

_FORMS = frozenset({"as_list", "as_nested_tensor", "as_padded_tensor"})

#: Number of slices that iteration creates at once: one at a time is slower, and all at once need more memory.
_TOGETHER = 64


def get_in_form(node: Core, key: NestedKey, default: object, form: dict[str, Any]) -> object:
    """Return an entry as a list, nested or padded tensor; TypeError if the entry is not uneven."""
    if (inner := node._inner()) is not node:
        return inner.get(key, default, **form)
    first, *rest = unravel_key_to_tuple(key)
    child = node._children().get(first) if rest else None
    if isinstance(child, Core):
        return child.get(tuple(rest), default, **form)
    if form.get("as_padded_tensor"):
        entry = node.get(key, default)
        ragged = isinstance(entry, Tensor) and entry.is_nested
        return convert_form(key, list(entry.unbind()) if ragged else None, 0, entry, **form)
    if RULES.follows_tensordict:
        return node.get(key, default)
    raise TypeError(f"{type(node).__name__}.get() takes no {', '.join(form)}: only lazy stacks do")


def parse_get_options(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, dict[str, Any]]:
    """Return the default that ``get`` received, or NOT_GIVEN, and the form of the result; {} for the default form."""
    if len(args) > 1:
        raise TypeError(f"get() takes a key and one default, got {len(args)} defaults")
    default = args[0] if args else kwargs.pop("default", NOT_GIVEN)
    forms = _FORMS.intersection(kwargs)
    return default, {} if forms and not any(kwargs[form] for form in forms) else kwargs


def iter_rows(node: CoreT, count: int) -> Iterator[CoreT]:
    """Yield the slices along the first batch dim, created in groups of up to ``_TOGETHER``."""
    # torch cannot slice a sparse leaf, but it can unbind it.
    if count <= _TOGETHER or any(leaf.layout is not strided for leaf in node._leaves()):
        yield from node.unbind(0)
        return
    for start in range(0, count, _TOGETHER):
        yield from node._index(slice(start, start + _TOGETHER)).unbind(0)


def missing_length_error(node: Core) -> TypeError:
    """Return the error for the length of a collection without batch dims."""
    return TypeError(
        f"a {type(node).__name__} without batch dims has no length and is not a sequence: len(td.keys()) counts "
        "its entries; of a list of collections torch.stack() makes a collection, whose entries are the tensors, "
        "and numpy() makes arrays"
    )


def missing_rows_error(node: Core) -> StructureError | TypeError:
    """Return the error for a loop over a collection without batch dims."""
    error = TypeError if RULES.follows_tensordict else StructureError
    return error(
        f"cannot iterate over a {type(node).__name__} without batch dims; use keys(). A library that searches a "
        "batch for tensors finds them after td_core.count_as_mapping(); log() of Lightning also takes batch_size="
    )


def set_new(
    node: Core, path: tuple[str, ...], value: object, prefix: tuple[str, ...], non_blocking: bool
) -> None:
    """Store a value under a path of several keys, the first of which is missing."""
    check_unlocked(node, f"set {show_path(prefix + path)}")
    if type(value) in (list, tuple) and set_rows(node, path, value, prefix, non_blocking):
        return
    entry = coerce_for(node, value, prefix + path, non_blocking)
    if not isinstance(entry, Tensor):
        check_cycle(node, entry, prefix + path)
    names = node._names if isinstance(entry, Tensor) else join_names(node, entry, node._names)
    for part in reversed(path[1:]):
        entry = make_dense({part: entry}, node.batch_size, node.device, names)
    add_nested(node, path[0], entry)
    take_names(node, entry)


def name_parents(parents: list[Core], node: Core) -> None:
    """Give parents the dim names of a node below them, unless another entry has one of these names for another dim."""
    with suppress(DimNamesError):
        for parent in reversed(parents):
            take_names(parent, node)


def set_rows(
    node: Core, path: tuple[str, ...], value: object, prefix: tuple[str, ...], non_blocking: bool
) -> bool:
    """Store uneven tensors of a list in the members of a lazy stack, one per member; return False if that does not apply."""
    rows = pair_rows(node, value)

    def check(member: Core, row: object) -> Iterator[tuple[object, ...]]:
        check_unlocked(member, f"set {show_path(prefix + path)}")
        nested = pair_rows(member, row)
        if nested is None:
            coerce_for(member, row, prefix + path, non_blocking)
        yield from nested or ()

    for member, row in rows or ():
        visit(check, member, row)
    for member, row in rows or ():
        member._set_path(path, row, prefix, non_blocking=non_blocking)
    return rows is not None


def remove_entry(root: Core, path: tuple[str, ...]) -> None:
    """Remove an entry; from a lazy stack also one that only some members have."""
    try:
        node = get_parent(root, path)
    except (KeyError, StructureError):  # not all members of a lazy stack have the nodes on the path
        holders = find_holders(root, path)
        if not holders:
            raise
        for holder in holders:
            check_unlocked(holder, f"remove {show_path(path)}")
        for holder in holders:
            holder._del_child(path[-1])
        return
    check_unlocked(node, f"remove {show_path(path)}")
    try:
        node._del_child(path[-1])
    except KeyError:
        raise missing_key_error(node, path[-1], path[:-1]) from None


def remove_all_entries(root: Core) -> None:
    """Remove every entry; LockedError, before the first one, if the collection or a member is locked."""
    nodes = list_distinct_members([root])
    for node in (root, *nodes):
        check_unlocked(node, "clear the collection")
    with root._edit_together():
        for node in nodes:
            for key in list(node._children()):
                node._del_child(key)


def pop_entry(root: Core, path: tuple[str, ...], default: object) -> object:
    """Remove an entry and return it, or the default if it is missing; a list if only some members have it."""
    if default is not NO_DEFAULT and path not in root.keys(True):
        if len(path) == 1 and type(root._children()) is dict:
            return default
        return _pop_partial(root, path, default) if find_holders(root, path) else default
    try:
        entry = get_entry(root, path)
    except KeyError:
        if not find_holders(root, path):
            raise
        return _pop_partial(root, path, None)
    root.del_(path)
    return unwrap_entry(entry)


def find_last_key(node: Core) -> str:
    """Return the last key of a node, or of a member of a lazy stack; KeyPathError for an empty collection."""
    keys = list(node._children()) or [key for holder in list_holders(node) for key in holder._children()]
    if not keys:
        raise KeyPathError(f"popitem: the {type(node).__name__} is empty")
    return keys[-1]


def _pop_partial(root: Core, path: tuple[str, ...], default: object) -> object:
    """Remove an entry that only some members of a lazy stack have; return it, or the default, for each member."""
    for holder in find_holders(root, path):
        check_unlocked(holder, f"remove {show_path(path)}")
    return _pop_rows(root, path, default)


def _pop_rows(node: Core, path: tuple[str, ...], default: object) -> object:
    for depth, part in enumerate(path):
        stacked = node._members_and_dim()
        if stacked is not None:
            return [_pop_rows(member, path[depth:], default) for member in stacked[0]]
        child = node._children().get(part)
        if depth == len(path) - 1 or child is None or not has_entries(child):
            break
        node = child
    return node.pop(path[depth:], default)


def set_missing(root: Core, path: tuple[str, ...], value: object) -> None:
    """Store a value under a missing key path; in a lazy stack on the path, only in the members that lack the entry."""
    if not find_holders(root, path):
        root.set(path, value)
        return

    def step(node: Core, rest: tuple[str, ...], value: object) -> Iterator[tuple[object, ...]]:
        child = node._children().get(rest[0]) if len(rest) > 1 else None
        if node._members_and_dim() is not None:
            entry = coerce_for(node, value, path, False)
            yield from ((member, rest, part) for member, _, part in node._split_write(entry))
        elif child is not None and has_entries(child):
            yield child, rest[1:], value
        elif rest not in node.keys(True):
            node._set_path(rest, value)

    visit(step, root, path, value)


def write_held_entry(root: Core, path: tuple[str, ...], item: object, non_blocking: bool) -> None:
    """Copy a value into an existing entry, in place; into the data of a parameter that autograd does not let change."""
    try:
        _write_member_entry(root, path, item, non_blocking)
    except StructureError:
        write_unrecorded(root, lambda data: _write_member_entry(data, path, item, non_blocking))


def _write_member_entry(root: Core, path: tuple[str, ...], item: object, non_blocking: bool) -> None:
    """Copy a value into an existing entry, in place."""
    node, last = get_parent(root, path), path[-1]
    try:
        held = node._peek_child(last)
    except KeyError:
        raise missing_key_error(node, last, path[:-1]) from None
    if pair_rows(node, item) is not None:
        node.update_({last: item}, non_blocking=non_blocking)
        return
    value: object = coerce(item, node.batch_size, node.device, path, non_blocking=non_blocking)
    if isinstance(held, Tensor) != isinstance(value, Tensor):
        raise StructureError(
            f"cannot write {show_path(path)} in place: it is a {type(held).__name__}, the value a "
            f"{type(value).__name__}; use set() to replace it"
        )
    try:
        write_entry(node, last, value, path, non_blocking)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TensorDictError):
            raise
        raise StructureError(f"cannot write {show_path(path)} in place: {error}") from error


def show_entry(child: Any) -> Any:
    """Return the result of ``parent[key]``; unchanged for an object that a pytree function put in place of a leaf."""
    try:
        return child._unwrap()
    except AttributeError:
        if isinstance(child, Core):
            raise
        return child


def get_default(node: Core, key: NestedKey, default: object = NOT_GIVEN) -> Any:
    """Return the default for a missing key, None if it is not given; raise KeyPathError for NO_DEFAULT."""
    if default is NOT_GIVEN:
        if not SETTINGS.get_defaults_to_none:
            raise missing_key_error(node, key)
        return None
    # get_entry raises the error that names the missing part of the path.
    return get_entry(node, unravel_key_to_tuple(key)) if default is NO_DEFAULT else default


def coerce_for(node: Core, value: object, path: tuple[str, ...], non_blocking: bool) -> Child:
    """Convert ``value`` to an entry of this collection; a nested collection inherits the dim names.

    The caller gives the collection the names of the entry, with ``take_names``, once it is stored.
    """
    entry = coerce(value, node.batch_size, node.device, path, non_blocking=non_blocking)
    if isinstance(entry, Tensor):
        return entry
    names = node._names if entry._names is None else join_names(node, entry, node._names)
    return entry if names is None else inherit_names(entry, names, show_path(path))
