"""The header of a file that is changed in place, as a tree of rows: entries are added and removed, then it is written again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import h5py

from td_core import Encoded, TensorDict
from td_core.array_formats import list_names

from ._datasets import Array, list_arrays, write_header
from ._h5_layout import Layout, make_entry_layout


@dataclass(slots=True)
class Row:
    """A node of the header. Children are rows, or places of leaves in a list of one item, by their keys.

    Attributes:
        fields: the fields of the row that do not refer to others.
        group: name of the group of the node; None if it has none.
        values: the stored values by name.
    """

    fields: dict[str, Any]
    group: str | None
    entries: dict[str, Any] = field(default_factory=dict)
    members: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def iter_rows(self) -> Iterator[Row]:
        """Yield this row and those below, parents first."""
        todo = [self]
        while todo:
            row = todo.pop()
            yield row
            todo += [
                child
                for children in (row.entries, row.members)
                for child in children.values()
                if isinstance(child, Row)
            ]

    def iter_places(self) -> Iterator[Any]:
        """Yield the places of the leaves below."""
        for row in self.iter_rows():
            for children in (row.entries, row.members):
                for child in children.values():
                    if not isinstance(child, Row):
                        yield child[0]


def build_rows(table: Encoded, groups: list[str | None]) -> Row:
    """Return the tree of the rows of a table, whose leaves are places."""
    rows = [
        Row({key: value for key, value in row.items() if key not in ("entries", "members", "values")}, group)
        for row, group in zip(table.nodes, groups, strict=True)
    ]
    for row, fields in zip(rows, table.nodes, strict=True):
        for children, group in ((row.entries, "entries"), (row.members, "members")):
            for key, ref in fields[group]:
                children[key] = [table.leaves[ref[0]]] if isinstance(ref, list) else rows[ref]
        row.values.update({name: table.values[ref] for name, ref in fields["values"]})
    return rows[0]


def make_table(row: Row) -> Encoded:
    """Return the table of a row and those below, with places as leaves."""
    rows = list(row.iter_rows())
    positions = {id(item): position for position, item in enumerate(rows)}
    table = Encoded([], [], [])
    for item in rows:
        fields: dict[str, Any] = {**item.fields, "entries": [], "members": [], "values": []}
        for group, children in (("entries", item.entries), ("members", item.members)):
            for key, child in children.items():
                fields[group].append(
                    [key, positions[id(child)] if isinstance(child, Row) else [len(table.leaves)]]
                )
                if not isinstance(child, Row):
                    table.leaves.append(child[0])
        for name, value in item.values.items():
            fields["values"].append([name, len(table.values)])
            table.values.append(value)
        table.nodes.append(fields)
    return table


class LiveHeader:
    """The header of an open file, with what a change needs: the names that are taken, and the datasets by name.

    Attributes:
        root: the row of the collection.
        arrays: dtype and shape of the datasets.
        others: links that belong to no leaf.
    """

    def __init__(self, root: Row, arrays: Mapping[str, Array], others: list[str]) -> None:
        self.root, self.arrays, self.others = root, dict(arrays), others

    def list_links(self) -> set[str]:
        """Return the names of all datasets and groups."""
        return {*self.arrays, *self.others, *(row.group for row in self.root.iter_rows() if row.group)}

    def add(self, row: Row, key: str, layout: Layout) -> None:
        """Add an entry that was written with a layout, whose root has it as its only entry."""
        header = layout.make_header()
        made = build_rows(Encoded(header["nodes"], header["leaves"], header["values"]), header["groups"])
        row.entries[key] = made.entries[key]
        self.arrays.update(
            {name: Array(array.dtype, array.shape) for name, array in layout.plan.arrays.items()}
        )

    def add_link(self, file: Any, row: Row, key: str, place: Any) -> Any:
        """Add an entry for a leaf of this file: another link to its dataset. Return its place."""
        (name,) = list_names(place)
        layout = make_entry_layout(TensorDict({key: 0}), key, row.group or "", self.list_links())
        (link,) = layout.plan.arrays
        h5py.h5o.link(h5py.h5d.open(file, name.encode()), h5py.h5g.open(file, b"/"), link.encode())
        self.arrays[link] = self.arrays[name]
        copied = link if isinstance(place, str) else {**place, "tensor": link}
        row.entries[key] = [copied]
        return copied

    def remove(self, file: object, row: Row, key: str) -> None:
        """Remove an entry, with the datasets and groups that no other one has."""
        self.vacate(file, row, key)
        del row.entries[key]

    def vacate(self, file: object, row: Row, key: str) -> None:
        """Remove the content of an entry, which gets another one at its position among the keys."""
        child = row.entries[key]
        row.entries[key] = [None]
        rows = list(child.iter_rows()) if isinstance(child, Row) else []
        places = list(child.iter_places()) if isinstance(child, Row) else [child[0]]
        groups = Counter(other.group for other in self.root.iter_rows())
        used = {name for place in self.root.iter_places() for name in list_names(place)}
        names = dict.fromkeys(name for place in places for name in list_names(place) if name not in used)
        own = f"{row.group}/{key}" if row.group else key
        names.update(dict.fromkeys(name for name in self.others if name == own))
        gone = [other.group for other in rows if other.group and not groups[other.group]]
        # Groups are removed last, and those below before those above.
        for name in [*names, *sorted(dict.fromkeys(gone), key=len, reverse=True)]:
            h5py.h5g.open(file, b"/").unlink(name.encode())
            self.arrays.pop(name, None)
            if name in self.others:
                self.others.remove(name)

    def write(self, file: Any) -> None:
        """Write the header into a file."""
        table = make_table(self.root)
        header = {
            "version": 1,
            "nodes": table.nodes,
            "leaves": table.leaves,
            "values": table.values,
            "groups": [row.group for row in self.root.iter_rows()],
            "others": self.others,
            "arrays": list_arrays(self.arrays),
        }
        write_header(file, header)
