"""Change the table of a store: remove, replace and add entries, and write the metadata of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from td_core.errors import KeyPathError
from td_core.spi import Encoded, Node, dump_table, encode, prune_table, show_path, visit

from .array_rows import Row

KeyPath = tuple[str, ...]


class TableEdit:
    """A copy of a table, whose entries are changed one after the other.

    >>> from td_core import TensorDict
    >>> edit = TableEdit(encode(TensorDict({"a": 1, "b": 2})))
    >>> removed = edit.remove(("a",))
    >>> edit.add(("b",), encode(TensorDict({"c": {"d": 3}})), ("c",))
    >>> edit.finish().leaf_paths()
    [('b', 'd')]
    """

    def __init__(self, table: Encoded) -> None:
        self._table = table
        self._nodes: list[Row] = [*table.nodes]
        self._leaves, self._values = [*table.leaves], [*table.values]
        #: The entries of the rows that were looked at, by position of the row.
        self._entries: dict[int, dict[str, Any]] = {}
        #: Whether nodes, leaves or values are no longer used.
        self._has_unused = False

    def find(self, path: Sequence[str]) -> Any:
        """Return the position of the node at a key path, or that of a leaf in a list.

        Raises:
            KeyPathError: there is no such entry.
        """
        found = 0
        for key in path:
            entries = {} if isinstance(found, list) else self._list_entries(found)
            if key not in entries:
                raise KeyPathError(
                    f"{show_path(tuple(path))} was removed since the collection was opened: open it again"
                )
            found = entries[key]
        return found

    def has(self, path: Sequence[str]) -> bool:
        """Return True if there is an entry at a key path."""
        return path[-1] in self._list_entries(self.find(path[:-1]))

    def get_row(self, path: Sequence[str]) -> Row:
        """Return the row of the node at a key path."""
        row: Row = self._nodes[self.find(path)]
        return row

    def put(self, path: KeyPath, ref: object) -> None:
        """Set the entry at a key path: the position of a node, or that of a leaf in a list."""
        entries = self._list_entries(self.find(path[:-1]))
        self._has_unused |= entries.get(path[-1]) is not None
        entries[path[-1]] = ref

    def remove(self, path: KeyPath) -> Any:
        """Remove an entry, and return what ``put`` takes; None if another process has removed it."""
        self._has_unused = True
        return self._list_entries(self.find(path[:-1])).pop(path[-1], None)

    def add(self, path: KeyPath, other: Encoded, source: KeyPath = ()) -> None:
        """Set the entry at a key path to the node or leaf at key path ``source`` of another table."""
        nodes, leaves, values = len(self._nodes), len(self._leaves), len(self._values)
        found = TableEdit(other).find(source)
        is_leaf = isinstance(found, list)
        part = Encoded([], [other.leaves[found[0]]], []) if is_leaf else prune_table(other, found)

        def shift(ref: Any) -> object:
            return [ref[0] + leaves] if isinstance(ref, list) else ref + nodes

        self._nodes += [
            {
                **row,
                "entries": [[key, shift(ref)] for key, ref in row["entries"]],
                "members": [[key, shift(ref)] for key, ref in row["members"]],
                "values": [[name, ref + values] for name, ref in row["values"]],
            }
            for row in part.nodes
        ]
        self._leaves += part.leaves
        self._values += part.values
        self.put(path, [leaves] if is_leaf else nodes)

    def add_node(self, path: KeyPath, node: Node) -> None:
        """Set the entry at a key path to a node without leaves."""
        self.add(path, _make_table(node))

    def set_meta(self, path: KeyPath, changes: Mapping[str, object]) -> None:
        """Change the metadata of the node at a key path; None removes a field."""
        self._set_meta(self.find(path), changes)

    def set_metadata_of(self, path: KeyPath, node: Node, fields: Sequence[str]) -> None:
        """Give the node at a key path, and the nodes below it, the fields of a node of the same structure."""
        other = _make_table(node)

        def set_level(position: Any, source: int) -> Iterator[tuple[Any, int]]:
            if isinstance(position, list):
                return
            row = other.nodes[source]
            self._set_meta(position, {name: row["meta"].get(name) for name in fields})
            below = {**self._list_entries(position), **dict(self._nodes[position]["members"])}
            for key, ref in (*row["entries"], *row["members"]):
                if key in below and not isinstance(ref, list):
                    yield below[key], ref

        visit(set_level, self.find(path), 0)

    def finish(self) -> Encoded:
        """Return the table without the nodes, leaves and values that are not used."""
        nodes = [*self._nodes]
        for position, entries in self._entries.items():
            row = [[key, ref] for key, ref in entries.items() if ref is not None]
            nodes[position] = {**nodes[position], "entries": row}
        table = replace(self._table, nodes=nodes, leaves=[*self._leaves], values=[*self._values])
        return prune_table(table) if self._has_unused else table

    def _list_entries(self, position: int) -> dict[str, Any]:
        if position not in self._entries:
            self._entries[position] = dict(self._nodes[position]["entries"])
        return self._entries[position]

    def _set_meta(self, position: int, changes: Mapping[str, object]) -> None:
        meta = {**self._nodes[position]["meta"], **changes}
        meta = {name: value for name, value in meta.items() if value is not None}
        self._nodes[position] = {**self._nodes[position], "meta": meta}


def find_row(table: Encoded, path: Sequence[str]) -> Row:
    """Return the row of the node at a key path.

    Raises:
        KeyPathError: the table has no such node.
    """
    return TableEdit(table).get_row(path)


def _make_table(node: Node) -> Encoded:
    """Return the table of a node, whose leaves have no places."""
    encoded = encode(node)
    header = dump_table(encoded, [None] * len(encoded.leaves))
    return Encoded(header["nodes"], header["leaves"], header["values"])
