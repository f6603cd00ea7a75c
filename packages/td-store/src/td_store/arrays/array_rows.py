"""Find the paths of arrays in a table of nodes, and the leaves of lazy stacks that are stored as one array; build a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

import td_core
from td_core import kinds
from td_core.spi import Encoded, refuse_nodes

#: A node of a table, as in the records of td-core.
Row = dict[str, Any]
Rows = list[Row]

#: The provider of the kinds of values, for the message if it is not installed.
_VALUES_FROM = f"td-tensorclass=={td_core.__version__}"


class TableBuilder:
    """Builds the table of a save that another program or tensordict wrote, row by row, parents before children.

    Args:
        where: location of the save, for messages.
        most: how many rows and leaves the table can have, see :func:`get_most_nodes`; a further one raises FormatError.

    Attributes:
        table: the table, with places as leaves.
        rows: its rows.

    >>> from td_store.arrays import build_collection
    >>> builder = TableBuilder()
    >>> root = builder.add_row("TensorDict", {"batch_size": [2]})
    >>> builder.rows[root]["entries"].append(["a", builder.add_leaf("array 0")])
    >>> build_collection(builder.table, "data.bin", lambda name: torch.ones(2))["a"]
    tensor([1., 1.])
    """

    def __init__(self, where: str = "a save", most: float = math.inf) -> None:
        self.where, self.most = where, most
        self.table = Encoded([], [], [])
        self.rows: Rows = self.table.nodes

    def add_row(self, kind: str, meta: dict[str, object]) -> int:
        """Add the row of a node without entries, and return its position."""
        self._check_size()
        self.rows.append({"kind": kind, "meta": meta, "entries": [], "members": [], "values": []})
        return len(self.rows) - 1

    def add_leaf(self, place: object) -> list[int]:
        """Add the place of a leaf, and return a reference to it."""
        self._check_size()
        self.table.leaves.append(place)
        return [len(self.table.leaves) - 1]

    def _check_size(self) -> None:
        if len(self.rows) + len(self.table.leaves) >= self.most:
            raise refuse_nodes(self.where, self.most)

    def add_value(self, kind: str, size: Sequence[int], pair: Sequence[object]) -> int:
        """Add the row of a node that holds a value, which is the result of ``split_value``; return its position."""
        position = self.add_row(kind, {})
        self.set_value(position, kind, size, pair)
        return position

    def set_value(self, position: int, kind: str, size: Sequence[int], pair: Sequence[object]) -> None:
        """Make the node of a row hold a value."""
        row = self.rows[position]
        row.update({"kind": kind, "meta": {"batch_size": list(size)}, "from": _VALUES_FROM})
        row["values"].append(["data", len(self.table.values)])
        self.table.values.append(list(pair))

    def add_unbatched(self, size: Sequence[int], ref: list[int]) -> int:
        """Add the row of an ``UnbatchedTensor`` with a leaf; return its position."""
        position = self.add_row("UnbatchedTensor", {"stands_for": size})
        self.rows[position].update({"entries": [["data", ref]], "from": _VALUES_FROM})
        return position


@dataclass(frozen=True, slots=True)
class Stack:
    """Leaves of the members of a lazy stack that are stored as one array.

    Attributes:
        leaves: positions of the leaves in a table.
        dim: the stack dim.
        members: position of the member of each leaf.
    """

    leaves: list[int]
    dim: int
    members: list[int]


def list_array_paths(
    rows: Rows, stacks: dict[int, Stack], homes: set[int]
) -> tuple[list[tuple[str, ...]], dict[int, tuple[int, tuple[str, ...]]]]:
    """Return the path of each node, and by position of each leaf its node and path; of a stack, only the first leaf has one."""
    # The name of a member is omitted if the node has nothing else, and in the nodes ``homes``.
    plain = [not row["entries"] and len(row["members"]) == 1 for row in rows]
    stacked = {leaf: position for position, stack in stacks.items() for leaf in stack.leaves}
    nodes: list[tuple[str, ...]] = [()] * len(rows)
    leaves: dict[int, tuple[int, tuple[str, ...]]] = {}
    for position, row in enumerate(rows):
        above = nodes[position]
        kind = kinds.find(row["kind"])
        single = kind is not None and kind.is_leaf
        for group in ("entries", "members"):
            for key, ref in row[group]:
                hidden = single or (group == "members" and (plain[position] or position in homes))
                path = above if hidden else (*above, key)
                if not isinstance(ref, list):
                    nodes[ref] = path
                elif stacked.get(ref[0], ref[0]) == ref[0]:
                    leaves[ref[0]] = position, path
    return nodes, leaves


def find_stacks(
    rows: Rows, leaves: Sequence[Tensor], free: Sequence[bool], *, uneven: bool = False
) -> tuple[dict[int, Stack], set[int]]:
    """Return the stacks of leaves by the position of their first leaf, and the lazy stacks that they belong to.

    All members of such a lazy stack are TensorDicts with the same keys, and with leaves of the same dtype and shape.

    Args:
        rows: the nodes of a table.
        leaves: its leaves.
        free: False for each leaf that must be stored alone.
        uneven: allow leaves of different shapes with the same number of dims, keys that only some members have, and nodes
            without leaves, such as values.

    >>> from td_core import lazy_stack
    >>> from td_core.spi import encode
    >>> encoded = encode(lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)]))
    >>> free = [True, True]
    >>> find_stacks(encoded.nodes, encoded.leaves, free)
    ({}, set())
    >>> find_stacks(encoded.nodes, encoded.leaves, free, uneven=True)[0]
    {1: Stack(leaves=[1, 0], dim=0, members=[0, 1])}
    """
    result: dict[int, Stack] = {}
    homes: set[int] = set()
    for position, row in enumerate(rows):
        if row["kind"] != "LazyStackedTensorDict" or not row["members"] or "class" in row or row["values"]:
            continue
        groups = _group_members(rows, leaves, free, [ref for _, ref in row["members"]], uneven)
        if groups is not None:
            homes.add(position)
            dim = row["meta"]["stack_dim"]
            result.update({found[0]: Stack(found, dim, members) for members, found in groups})
    return result, homes


def _group_members(
    rows: Rows, leaves: Sequence[Tensor], free: Sequence[bool], members: list[int], uneven: bool
) -> list[tuple[list[int], list[int]]] | None:
    """Return for each key the members that have it, and their leaves; None if the nodes differ."""
    groups = []
    todo = [(list(range(len(members))), members)]
    while todo:
        numbers, positions = todo.pop()
        group = [rows[position] for position in positions]
        if uneven and not any(row["entries"] or row["members"] for row in group):
            continue
        if not all(_is_alike(row, group[0], uneven) for row in group):
            return None
        entries = {number: dict(row["entries"]) for number, row in zip(numbers, group)}
        for key in dict.fromkeys(chain.from_iterable(entries.values())):
            refs = {number: held[key] for number, held in entries.items() if key in held}
            found = [ref[0] for ref in refs.values() if isinstance(ref, list)]
            if not found:
                todo.append(([*refs], [ref for ref in refs.values() if isinstance(ref, int)]))
                continue
            chosen = [leaves[p] for p in found]
            looks = {(leaf.ndim if uneven else leaf.shape, leaf.dtype, leaf.device) for leaf in chosen}
            if len(found) < len(refs) or len(looks) > 1 or not all(free[p] for p in found):
                return None
            groups.append(([*refs], found))
    return groups


def _is_alike(row: Row, first: Row, uneven: bool) -> bool:
    """Return True if a row describes a plain TensorDict with the keys and metadata of ``first``, which may be uneven."""
    if row["kind"] != "TensorDict" or row["members"] or row["values"] or row.get("class"):
        return False
    if not uneven:
        keys = [[key for key, _ in each["entries"]] for each in (row, first)]
        return keys[0] == keys[1] and bool(row["meta"] == first["meta"])
    metas = [{**each["meta"], "batch_size": len(each["meta"]["batch_size"])} for each in (row, first)]
    return metas[0] == metas[1]
