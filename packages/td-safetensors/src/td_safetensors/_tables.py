"""Walk the table of nodes that ``td_core.encode`` returns: names and key paths of leaves, parts of stacks, selections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from td_core.errors import KeyPathError

__all__ = [
    "Stack",
    "check_rows",
    "find_stacks",
    "list_key_paths",
    "list_name_paths",
    "select_keys",
    "show_path",
]

Rows = list[dict[str, Any]]

#: Kinds whose single leaf has the key path of the node itself, with the name of the entry.
ONE_LEAF = {"UnbatchedTensor": "data"}


@dataclass(frozen=True, slots=True)
class Stack:
    """Leaves of the members of a lazy stack that are stored as one tensor, stacked along ``dim``."""

    leaves: list[int]
    dim: int


def show_path(path: tuple[str, ...]) -> str:
    """Format a key path for messages."""
    return repr(path[0] if len(path) == 1 else path) if path else "the root"


def check_rows(rows: Rows, count: int) -> None:
    """Raise TypeError or ValueError for rows that a file cannot have; ``count`` is the number of leaves."""
    for position, row in enumerate(rows):
        if not isinstance(row["meta"], dict):
            raise TypeError(f"the meta of node {position} is {row['meta']!r:.100}")
        for group in ("entries", "members"):
            for key, ref in row[group]:
                if not isinstance(key, str):
                    raise TypeError(f"a key of node {position} is {key!r:.100}")
                number, first, end = (
                    (*ref, 0, count) if isinstance(ref, list) else (ref, position + 1, len(rows))
                )
                if type(number) is not int or not first <= number < end:
                    raise ValueError(f"the entry {key!r} of node {position} refers to {ref!r:.100}")


def _walk(rows: Rows, join: Callable[[Any, str, bool], Any], root: Any) -> tuple[list[Any], dict[int, Any]]:
    """Return a value for each node and leaf; ``join`` takes the value above, the key, and whether it is an entry."""
    nodes: list[Any] = [root] * len(rows)
    leaves: dict[int, Any] = {}
    for position, row in enumerate(rows):
        above = nodes[position]
        single = ONE_LEAF.get(row["kind"])
        for group in ("entries", "members"):
            for key, ref in row[group]:
                value = above if key == single else join(above, key, group == "entries")
                if isinstance(ref, list):
                    leaves.setdefault(ref[0], value)
                else:
                    nodes[ref] = value
    return nodes, leaves


def list_key_paths(rows: Rows) -> tuple[list[tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """Return the key path of each node and of each leaf. Members have the key path of their node."""
    return _walk(rows, lambda above, key, entry: (*above, key) if entry else above, ())


def list_name_paths(rows: Rows, stacks: dict[int, Stack], homes: set[int]) -> dict[int, str]:
    """Return the wanted name of each leaf by position in tree order; of a stack, of its first leaf only.

    The name is the keys joined by dots. The name of a member is omitted if the node has nothing else, and in the nodes ``homes``.
    """
    plain = [not row["entries"] and len(row["members"]) == 1 for row in rows]
    stacked = {leaf: position for position, stack in stacks.items() for leaf in stack.leaves}
    names: list[str | None] = [None] * len(rows)
    result: dict[int, str] = {}
    for position, row in enumerate(rows):
        above = names[position]
        single = ONE_LEAF.get(row["kind"])
        for group in ("entries", "members"):
            for key, ref in row[group]:
                hidden = group == "members" and (plain[position] or position in homes)
                name = above if hidden or key == single else key if above is None else f"{above}.{key}"
                if not isinstance(ref, list):
                    names[ref] = name
                elif stacked.get(ref[0], ref[0]) == ref[0]:
                    result[ref[0]] = name or ""
    return result


def find_stacks(rows: Rows, leaves: list[Tensor], free: list[bool]) -> tuple[dict[int, Stack], set[int]]:
    """Return the stacks of leaves by the position of their first leaf, and the lazy stacks that they belong to.

    All members of such a lazy stack are TensorDicts with the same keys and with leaves of the same shape and dtype;
    ``free`` has False for the leaves that must be stored alone.
    """
    result: dict[int, Stack] = {}
    homes: set[int] = set()
    for position, row in enumerate(rows):
        if row["kind"] != "LazyStackedTensorDict" or not row["members"] or "class" in row or row["values"]:
            continue
        groups = _group_members(rows, leaves, free, [ref for _, ref in row["members"]])
        if groups is not None:
            homes.add(position)
            result.update({group[0]: Stack(group, row["meta"]["stack_dim"]) for group in groups})
    return result, homes


def _group_members(
    rows: Rows, leaves: list[Tensor], free: list[bool], members: list[int]
) -> list[list[int]] | None:
    """Return the leaves of some nodes in groups of the same key, or None if the nodes differ."""
    groups = []
    todo = [members]
    while todo:
        group = [rows[position] for position in todo.pop()]
        first = group[0]
        keys = [key for key, _ in first["entries"]]
        for row in group:
            if row["kind"] != "TensorDict" or row["members"] or row["values"] or row.get("class"):
                return None
            if [key for key, _ in row["entries"]] != keys or row["meta"] != first["meta"]:
                return None
        for i in range(len(keys)):
            refs = [row["entries"][i][1] for row in group]
            if all(isinstance(ref, list) for ref in refs):
                positions = [ref[0] for ref in refs]
                looks = {(leaves[p].shape, leaves[p].dtype, leaves[p].device) for p in positions}
                if len(looks) > 1 or not all(free[p] for p in positions):
                    return None
                groups.append(positions)
            elif any(isinstance(ref, list) for ref in refs):
                return None
            else:
                todo.append(refs)
    return groups


def select_keys(rows: Rows, keys: Iterable[tuple[str, ...]]) -> Rows:
    """Return the rows of the nodes on the way to some key paths and below them, with the entries that remain.

    Entries are in the order of the key paths, as ``TensorDict.select`` returns them.

    Raises:
        KeyPathError: a key path does not exist.
    """
    paths = list(keys)
    wanted = set(paths)
    ranks: dict[tuple[str, ...], int] = {}
    for rank, path in enumerate(paths):
        for length in range(len(path) + 1):
            ranks.setdefault(path[:length], rank)
    found: set[tuple[str, ...]] = set()
    result: Rows = [{}]
    todo: deque[tuple[int, int, tuple[str, ...], bool]] = deque([(0, 0, (), () in wanted)])
    while todo:
        old, new, path, whole = todo.popleft()
        row = rows[old]
        selected: Rows = []
        result[new] = {**row, "entries": [], "members": []}
        for group in ("entries", "members"):
            children = [
                (path if group == "members" or key == ONE_LEAF.get(row["kind"]) else (*path, key), key, ref)
                for key, ref in row[group]
            ]
            if not whole:
                children.sort(key=lambda child: ranks.get(child[0], 0))
            for below, key, ref in children:
                chosen = whole or below in wanted
                if chosen:
                    found.add(below)
                if not chosen and below not in ranks:
                    continue
                if isinstance(ref, list):
                    if chosen:
                        result[new][group].append([key, ref])
                    continue
                result[new][group].append([key, len(result) + len(selected)])
                todo.append((ref, len(result) + len(selected), below, chosen))
                selected.append({})
        result += selected
    missing = wanted - found - {()}
    if missing:
        raise KeyPathError(f"the save has no {', '.join(map(show_path, sorted(missing)))}")
    return result
