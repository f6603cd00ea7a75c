"""The columns, nodes, places and values of a table while it is made, and the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from td_core import NestedKey
from td_core.spi import Encoded, make_table_header, show_path

from ._arrow_types import CHOICES, Cells
from ._nulls import Path, find_choice, list_choices
from ._table_header import InlineLeaves, dump_header, make_field

#: Files of Arrow cannot nest deeper than 64 levels: the keys below have one name together.
_MOST_LEVELS = 48
#: The column of a table that has no other one: it keeps the number of rows.
EMPTY = "td:rows"
#: A node of the table of nodes, or the place of a leaf.
Row = dict[str, Any]


class Tensors:
    """The form of cells with dims for each key path, as ``tensors=`` says."""

    def __init__(self, tensors: str | Mapping[NestedKey | None, str]) -> None:
        self._choices: dict[Path | None, str] = {None: "list", **list_choices(tensors)}
        for choice in self._choices.values():
            if choice not in CHOICES:
                raise ValueError(f"tensors is one of {', '.join(map(repr, CHOICES))}; got {choice!r:.100}")

    def get(self, path: Path) -> str:
        """Return the choice of a key path, of a level above it, or the default."""
        return find_choice(self._choices, path)


class TablePlan:
    """The columns of a collection, and its header.

    Attributes:
        lead: the batch dims that are rows.
        rows: the number of rows.
        columns: the columns, by their names from the outermost struct on, and whether they can be null.
        nodes: the rows of the table of nodes.
        places: the place of each leaf in it.
        pairs: its values.
        masks: by key path, the masks that no column has used.
        place: where in the tree the next column is, which decides the order of the columns.
    """

    def __init__(
        self,
        encoded: Encoded,
        separator: str | None,
        row_dims: int,
        tensors: Tensors,
        masks: dict[Path, Tensor],
    ) -> None:
        self.encoded, self.separator, self.tensors, self.masks = encoded, separator, tensors, masks
        self.lead = tuple(encoded.objects[0].batch_size[:row_dims])
        self.rows = torch.Size(self.lead).numel()
        self.columns: dict[Path, tuple[Cells, bool]] = {}
        self.nodes: list[Row] = []
        self.places: list[Row] = []
        self.pairs: list[Any] = []
        self.place: tuple[int, ...] = ()
        self.inline = InlineLeaves()
        self._levels: set[Path] = set()
        self._order: dict[Path, tuple[int, ...]] = {}

    def add_node(self, row: Row) -> int:
        """Add the row of a node without entries, members and values, and return its position."""
        self.nodes.append({**row, "entries": [], "members": [], "values": []})
        return len(self.nodes) - 1

    def add_place(self, place: Row) -> list[int]:
        """Add the place of a leaf, and return a reference to it."""
        self.places.append(place)
        return [len(self.places) - 1]

    def add_value(self, new: int, name: str, pair: Any) -> None:
        """Add a value of a node."""
        self.nodes[new]["values"].append([name, len(self.pairs)])
        self.pairs.append(pair)

    def add_column(self, path: Path, cells: Cells, nullable: bool | None = None) -> list[str]:
        """Add a column under a free name, and return its path in the table."""
        names = path or ("",)
        if self.separator is not None:
            names = (self.separator.join(names),)
        elif len(names) > _MOST_LEVELS:
            names = (*names[: _MOST_LEVELS - 1], ".".join(names[_MOST_LEVELS - 1 :]))
        # UTF-8 cannot store a surrogate without its pair.
        names = tuple(name.encode("utf-8", "backslashreplace").decode() for name in names)
        while names in self.columns or names in self._levels or self._has_column_above(names):
            names = (f"{names[0]}#", *names[1:])
        self._order[names] = (*self.place, len(self.columns))
        for length in range(1, len(names)):
            self._levels.add(names[:length])
        self.columns[names] = cells, cells.array.null_count > 0 if nullable is None else nullable
        return list(names)

    def _has_column_above(self, names: Path) -> bool:
        return len(names) > 1 and any(names[:length] in self.columns for length in range(1, len(names)))

    def show(self, keys: Path, row: int) -> str:
        """Return the beginning of a message about a row of an entry."""
        return f"cannot save {show_path(keys)}, row {row}"

    def make_table(self) -> pa.Table:
        """Return the table."""
        tree: dict[str, Any] = {}
        for names in sorted(self.columns, key=self._order.__getitem__):
            level = tree
            for name in names[:-1]:
                level = level.setdefault(name, {})
            level[names[-1]] = self.columns[names]
        arrays, fields = _make_fields(tree)
        if not fields:  # a table without columns has no number of rows
            nothing = pa.nulls(self.rows)
            arrays, fields = [nothing], [pa.field(EMPTY, nothing.type)]
        header = make_table_header(Encoded(self.nodes, self.places, self.pairs))
        header = {**header, "lead": list(self.lead), "inline": self.inline.arrays}
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields, dump_header(header)))


def _make_fields(tree: dict[str, Any]) -> tuple[list[pa.Array], list[pa.Field]]:
    arrays, fields = [], []
    for name, item in tree.items():
        if isinstance(item, dict):
            below, parts = _make_fields(item)
            arrays.append(pa.StructArray.from_arrays(below, fields=parts))
            fields.append(pa.field(name, arrays[-1].type, False))
        else:
            (array, facts), nullable = item
            arrays.append(array)
            fields.append(make_field(name, array, facts, nullable))
    return arrays, fields
