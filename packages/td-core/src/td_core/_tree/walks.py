"""Visit, compare and rebuild trees of any depth, without recursion.

The functions that pass a *position* with each node extend it in constant time: a pair of the parent's position and the key,
None for the root. ``get_path`` converts it to a key path, for an error or a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard, TypeVar, Union, overload

import torch
from torch import Tensor

from .node import Child, Core, CoreT

T = TypeVar("T")
KeyT = TypeVar("KeyT")
NodeT = TypeVar("NodeT")
ResultT = TypeVar("ResultT")
#: Called with a node, its new entries and its state; yields key, node and state of each child to rebuild.
Fill = Callable[[NodeT, dict[KeyT, T], Any], Iterable[tuple[KeyT, NodeT, object]]]
Position = Union[tuple["Position", str], None]  # noqa: UP007  a string is not an operand of |


def expand(start: Iterable[T], below: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Iterate over items and those that ``below`` returns for them, parents first and the last of siblings first.

    ``below(item)`` is called when the next item is requested, so it depends on what the caller did with ``item``.

    >>> list(expand([4], lambda item: [item // 2] if item > 1 else []))
    [4, 2, 1]
    """
    todo = list(start)
    while todo:
        item = todo.pop()
        yield item
        todo.extend(below(item))


def visit(step: Callable[..., Iterable[tuple[object, ...]]], *start: object) -> None:
    """Call ``step(*start)``, and then ``step`` with each tuple that a call yields: recursion without a limit of depth.

    A call runs to its end before the calls that it requests, the last of which comes first.

    >>> seen = []
    >>> def step(depth):
    ...     seen.append(depth)
    ...     yield from [(depth + 1,)] if depth < 2 else []
    >>> visit(step, 0)
    >>> seen
    [0, 1, 2]
    """
    for _ in expand([start], lambda item: step(*item)):
        pass


def walk(*nodes: Core) -> Iterator[Core]:
    """Iterate over nodes and all nodes below them, parents first. Below a lazy stack are its members.

    >>> len(list(walk(TensorDict({"a": 1, "n": {"b": 2}}))))
    2
    """
    return expand(nodes, list_nested)


def list_nested(node: Core) -> list[Core]:
    """Return the nodes directly below: the members of a lazy stack, the entries of any other node that are not leaves."""
    return [child for child in node._tree_children() if not isinstance(child, Tensor)]


def list_state_nodes(value: Core) -> list[Core]:
    """List a collection and all nodes below it; a wrapper is replaced by the node that holds its entries."""
    results = [value._inner()]
    for node in results:
        results.extend(child._inner() for child in list_nested(node))
    return results


def has_common_node(first: list[Core], second: list[Core]) -> bool:
    """Return True if a node is in both lists."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace id() of a node
        return any(a is b for a in first for b in second)
    return not {*map(id, first)}.isdisjoint(map(id, second))


def has_entries(child: Any) -> TypeGuard[Core]:
    """Return True if an entry is a node of entries: neither a leaf nor a value node."""
    try:
        return not isinstance(child, Tensor) and not child._is_value
    except AttributeError:  # an object that a pytree function put in place of a leaf
        return False


def list_holders(node: Core) -> list[Core]:
    """Return the nodes that hold the entries: the node itself; for a lazy stack its members, or theirs if they are stacks."""
    return [holder for (holder,) in node._zip_members()]


def walk_levels(root: Core) -> Iterator[tuple[Core, Position, dict[str, Child]]]:
    """Iterate over nodes with their positions and a copy of their entries; one that is removed from the copy is not visited."""
    todo: list[tuple[Core, Position]] = [(root, None)]
    while todo:
        node, position = todo.pop()
        entries = dict(node._children())
        yield node, position, entries
        todo.extend((child, (position, key)) for key, child in entries.items() if has_entries(child))


def list_levels(root: Core) -> list[tuple[Core, list[str], list[object]]] | None:
    """Return each node with its keys and entries; None if a node makes its entries when they are read, or has values."""
    levels = []
    for node in walk(root):
        inner = node._inner()
        held = inner._children()
        if type(held) is not dict or inner._children() is not held:
            return None
        levels.append((node, [*held], [*held.values()]))
    return levels


def get_path(position: Position, *keys: str) -> tuple[str, ...]:
    """Return the key path of a position, extended by ``keys``."""
    parents = []
    while position is not None:
        position, key = position
        parents.append(key)
    return (*reversed(parents), *keys)


def zip_walk(*roots: Core) -> Iterator[tuple[Core, ...]]:
    """Iterate over the nodes at the same key path of several trees, where all of them have a node of entries.

    Of lazy stacks, iterate over the members; another tree is then split along the stack dim of the first.
    """

    def below(nodes: tuple[Core, ...]) -> Iterable[tuple[Core, ...]]:
        first, *others = nodes
        for key, child in dict(first._children()).items():
            if has_entries(child) and all(key in node._children() for node in others):
                found = (child, *[node._get_child(key) for node in others])
                if all(map(has_entries, found)):
                    yield from child._zip_members(*found[1:])

    return expand(roots[0]._zip_members(*roots[1:]), below)


@overload
def map_levels(
    root: CoreT,
    fill: Fill[Core, str, Child],
    state: object = ...,
    make: None = ...,
    by_member: bool = ...,
) -> CoreT: ...
@overload
def map_levels(
    root: NodeT,
    fill: Fill[NodeT, KeyT, T],
    state: object = ...,
    make: Callable[[NodeT, dict[KeyT, T]], ResultT] = ...,
    by_member: bool = ...,
) -> ResultT: ...
def map_levels(
    root: Any,
    fill: Callable[..., Iterable[tuple[object, Any, object]]],
    state: object = None,
    make: Callable[..., object] | None = None,
    by_member: bool = False,
) -> Any:
    """Rebuild a tree level by level, and return the new root.

    ``fill(node, entries, state)`` adds the new entries of a node, and yields the key, the node and the state of each child to
    rebuild. ``make(node, entries)`` then builds the nodes, the deepest first; it returns None to drop one. By default, a new
    node is of the same kind as the old one. ``by_member`` rebuilds the members of lazy stacks.
    """
    rebuild: Any = map_levels
    if by_member and root._members_and_dim() is not None:
        return root._map_members(lambda member: rebuild(member, fill, state, make, True))
    top: dict[object, Any] = {}
    node, entries = root, top
    levels: list[tuple[Any, dict[object, Any], dict[object, Any], object, object]] = []
    done = 0
    # Count by hand: torch.compile of torch 2.9 does not iterate over items that are appended in the loop.
    while True:
        for key, child, below in fill(node, entries, state):
            if by_member and child._members_and_dim() is not None:
                if (made := rebuild(child, fill, below, make, True)) is None:
                    entries.pop(key, None)
                else:
                    entries[key] = made
                continue
            inner = entries[key] = {}  # this keeps the order of keys until the node is built
            levels.append((child, inner, entries, key, below))
        if done == len(levels):
            break
        node, entries, _, _, state = levels[done]
        done += 1
    for node, entries, parent, key, _ in reversed(levels):
        made = node._with_children(entries) if make is None else make(node, entries)
        if made is None:
            del parent[key]
        else:
            parent[key] = made
    return root._with_children(top) if make is None else make(root, top)
