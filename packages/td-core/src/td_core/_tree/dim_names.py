"""Dim names: a str or None per batch dim, stored only if at least one dim is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DimNamesError, StructureError
from ..typing import Names
from .node import Child, Core
from .walks import expand, has_entries, list_nested, visit, walk


def check_names(names: Sequence[str | None] | str | None, ndim: int) -> Names | None:
    """Check number, type and uniqueness of dim names, and return them as a tuple, or None if no dim is named.

    >>> check_names(["time", None], 2), check_names([None], 1)
    (('time', None), None)
    """
    if names is None:
        return None
    if isinstance(names, str):
        names = (names,)
    result = tuple(names)
    if len(result) != ndim:
        raise DimNamesError(
            f"there must be one name for each batch dim: got {len(result)} names {list(result)} for {ndim} batch dims"
        )
    provided = [name for name in result if name is not None]
    for name in provided:
        if not isinstance(name, str):
            raise DimNamesError(f"a dim name is a string or None; got {name!r} in {list(result)}")
    if len(set(provided)) != len(provided):
        raise DimNamesError(f"dim names must be unique; got {list(result)}")
    return result if provided else None


def find_dims(node: Core, what: str, dims: Any) -> Any:
    """Return one or several dims of an operation ``what`` with the position of each name in its place."""
    if type(dims) is int:
        return dims
    if isinstance(dims, str):
        names = node._names or ()
        if dims not in names:
            raise DimNamesError(f"{what}: no batch dim is named {dims!r}; the names are {list(names)}")
        return names.index(dims)
    if isinstance(dims, (tuple, list)) and not {int}.issuperset(map(type, dims)):
        return tuple([find_dims(node, what, dim) for dim in dims])
    return dims


def names_of_stack(names: Sequence[str | None], ndim: int, dim: int, name: str | None) -> Names | None:
    """Check the dim names of a lazy stack; the name of the stack dim must be ``name``, unless that is None."""
    result = check_names(names, ndim)
    if name is not None and (result is None or result[dim] != name):
        raise DimNamesError(f"stack_dim_name {name!r} is not the name of dim {dim} in {list(names)}")
    return result


def refuse_repeated(name: str | None, members: Iterable[Core]) -> None:
    """Raise DimNamesError if the name of a stack dim is not a string, or a member or a node below one uses it."""
    if name is None:
        return
    check_names([name], 1)
    for node in walk(*members):
        names = node._names or ()
        if name in names:
            raise DimNamesError(
                f"the stack dim cannot be named {name!r}: a member, or a level below one, has the names "
                f"{list(names)}, and dim names must be unique"
            )


def check_tails(root: Core, names: Names, path: tuple[str, ...] = ()) -> None:
    """Raise DimNamesError if a node from ``root`` on, which is at ``path``, has one of its new names for another dim."""

    def step(node: Core, ndim: int, path: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        left = node._names or ()
        repeated = [name for name in left[ndim:] if name is not None and name in names]
        if repeated:
            raise DimNamesError(
                f"the dims cannot have the names {list(names)}: {f'key {path!r}' if path else 'a member'} has the dim "
                f"names {list(left)}, of which {repeated[0]!r} is that of another dim; rename() one of both"
            )
        stacked = node._members_and_dim()
        if stacked is not None:
            yield from ((member, ndim - (stacked[1] < ndim), path) for member in stacked[0])
        elif has_entries(node):
            for key, child in dict(node._children()).items():
                if not isinstance(child, Tensor):
                    yield child, ndim, (*path, key)

    visit(step, root, len(names), path)


def join_names(node: Core, entry: Core, names: Names | None) -> Names | None:
    """Return the dim names of a node with ``names`` in which an entry will be stored: for dims without one those of the entry."""
    added = entry._names
    if added is None or added is names or added[: len(node.batch_size)] == names:
        return names
    ndim = len(node.batch_size)
    joined = [a if a is not None else b for a, b in zip(names or (None,) * ndim, added)]
    result = check_names(joined, ndim)
    if result is not None and result != names:
        check_tails(node, result)
    return result


def take_names(node: Core, entry: Child) -> None:
    """Give a node the dim names of an entry, for its dims without a name."""
    if isinstance(entry, Tensor) or entry._names is None:
        return
    if (joined := join_names(node, entry, node._names)) != node._names:
        node._set_names(joined)


def name_stack_dim(entry: Any, dim: int, name: str, key: str) -> None:
    """Name the stack dim of an entry that was read from a lazy stack. Raise DimNamesError if another dim has that name."""
    names = list(entry._names or (None,) * len(entry.batch_size))
    names[dim] = name
    if names.count(name) > 1:
        raise DimNamesError(
            f"two dims of key {key!r} would have one name, {names}: that of the stack dim, {name!r}, is also in a member; "
            "rename() one of both"
        )
    entry._names = tuple(names)


def store_names(root: Any, ndim: int, names: Names | None) -> None:
    """Store checked names for the ``ndim`` leading dims of a node, and of every node below it."""
    if names is not None:
        check_tails(root, names)

    def below(node: Core) -> list[Core]:
        # The setter of a lazy stack already passed the names to its members, without the stack dim.
        return [child._inner() for child in _list_aligned(node)]

    for node in expand([root], below):
        tail = (None,) * (len(node.batch_size) - ndim) if node._names is None else node._names[ndim:]
        full = ((names or (None,) * ndim) + tail)[: len(node.batch_size)]  # a level can have fewer dims
        node._names = full if any(name is not None for name in full) else None


def lift_names(root: Core) -> None:
    """Give each node the dim names of the nodes below it, for its dims without a name."""
    for node in reversed([*walk(root)]):
        for child in _list_aligned(node):
            take_names(node, child)


def _list_aligned(node: Core) -> list[Core]:
    """Return the nodes directly below that have the dims of the node; the members of a lazy stack lack one."""
    return [] if node._members_and_dim() is not None else list_nested(node)


def resize_names(names: Names | None, ndim: int) -> Names | None:
    """Truncate names to ``ndim`` dims, or extend them with None."""
    return None if names is None else check_names(names[:ndim] + (None,) * (ndim - len(names)), ndim)


def set_batch_size(node: Any, batch_size: torch.Size) -> None:
    """Store a checked batch size in one node. The leading dims keep their names, and new dims have no name."""
    node._set_batch_size(batch_size)
    names = node._names
    if names is not None and len(names) != len(batch_size):
        node._names = resize_names(names, len(batch_size))


def inherit_names(entry: Any, names: Names, path: str) -> Any:
    """Return an entry with the dim names of its new parent. Raise StructureError if the names conflict."""
    ndim = len(names)
    left = entry._names
    if left is not None:
        if left[:ndim] == names:
            return entry
        for right, own in zip(names, left):
            if own is not None and right is not None and own != right:
                raise StructureError(
                    f"cannot set {path}: its dim names {list(left)} contradict those of its parent, {list(names)}; "
                    "rename() it first"
                )
    rest = (None,) * (len(entry.batch_size) - ndim) if left is None else left[ndim:]
    if any(name is not None and name in names for name in rest):
        raise StructureError(
            f"cannot set {path}: its dim names {list(left)} repeat those of its parent, {list(names)}; rename() it first"
        )
    named = entry._shallow_copy()
    named._set_names(names + rest)
    return named


def name_nodes_below(node: Core) -> None:
    """Copy the dim names of a decoded node to its direct nodes without names: files do not store those of values."""
    names = node._names
    if names is None:
        return
    for key, child in dict(node._children()).items():
        if not isinstance(child, Tensor) and child._names is None:
            node._set_child(key, inherit_names(child, names, repr(key)))
