"""Build the collection of a table from its columns: leaves with the rows that there are, and members from templates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from td_core.errors import FormatError, MissingPluginError
from td_core.spi import STORABLE, decode_table, show_path
from td_store.arrays import TableBuilder, restore

from ._nulls import Path, show_column
from ._read_columns import Item, One, Padded, Parts, RowValues
from ._table_columns import TableColumns
from ._table_header import read_inline
from ._table_plan import Row

CellT = TypeVar("CellT", Tensor, One)


@dataclass
class RowBuilder:
    """Builds the table of nodes from what each column became, by column path.

    ``present`` has, for entries that members lack, which rows have them.
    """

    plan: TableColumns
    items: Mapping[Path, Item]
    present: Mapping[Path, Sequence[bool]]
    rows: int
    where: str

    def __post_init__(self) -> None:
        self.lead = self.plan.lead if math.prod(self.plan.lead) == self.rows else [self.rows]
        self.leaves: list[Tensor] = []
        self.builder = TableBuilder(self.where)

    def build(self, masks: Mapping[Path, Tensor], mask_key: Path) -> Any:
        """Return the collection, with masks below ``mask_key``."""
        table = self.plan.table
        todo = [(0, self.builder.add_row("", {}), True)]
        while todo:
            old, new, in_rows = todo.pop()
            row = table.nodes[old]
            self._fill(self.builder.rows[new], row, in_rows)
            if row["meta"].get("each"):
                self._expand(new, row["members"][0][1])
                continue
            is_lazy = row["kind"] == "LazyStackedTensorDict"
            below = in_rows and not (is_lazy and row["meta"].get("stack_dim", 0) < len(self.plan.lead))
            for group in ("entries", "members"):
                entries = self.builder.rows[new][group]
                for key, ref in row[group]:
                    if isinstance(ref, list):
                        self._add_leaf(entries, key, table.leaves[ref[0]], in_rows)
                        continue
                    item = self._find_changed(table.nodes[ref])
                    if item is None:
                        todo.append((ref, self._add_level(entries, key), below))
                    else:
                        self._add_item(entries, key, item)
        self._add_masks(masks, mask_key)
        try:
            return decode_table(self.builder.table, self.leaves, self.where)
        except MissingPluginError as error:
            values = [path for path, item in self.items.items() if isinstance(item, (RowValues, One))]
            names = ", ".join(show_path(self.plan.keys[path]) for path in values[:3])
            raise MissingPluginError(
                f"{self.where}: {names or 'an entry'} holds values: {error}; or leave it out with keys="
            ) from error

    def _find_changed(self, row: Row) -> Item | None:
        """Return what the column of a node of values became if it holds no values any more, or None."""
        for _, ref in row["values"]:
            pair = self.plan.table.values[ref]
            item = self.items[tuple(pair["column"])] if isinstance(pair, dict) else None
            if item is not None and not isinstance(item, (RowValues, One)):
                return item
        return None

    def _fill(self, target: Row, row: Row, in_rows: bool) -> None:
        """Copy a node of the header to a row, with the batch size that follows from the number of rows."""
        meta = {key: item for key, item in row["meta"].items() if key != "each"}
        if in_rows:
            meta = set_rows(meta, self.plan.lead, self.lead)
        target.update({key: item for key, item in row.items() if key in ("kind", "class", "from")})
        target["meta"] = meta
        for name, ref in row["values"]:
            pair = self.plan.table.values[ref]
            if isinstance(pair, dict):
                pair = self._read_value(target, pair)
            self._add_pair(target, name, pair)

    def _add_pair(self, target: Row, name: str, pair: Sequence[Any]) -> None:
        target["values"].append([name, len(self.builder.table.values)])
        self.builder.table.values.append(list(pair))

    def _read_value(self, target: Row, place: Row) -> Sequence[Any]:
        """Return a value of a column; one value that now differs by row makes a stack of its node."""
        item = self.items[tuple(place["column"])]
        is_stack, lead = target["kind"] == "NonTensorStack", self.lead
        if isinstance(item, One):
            if is_stack:
                return [[item.value] * self.rows, None]
            return _find_saved(place.get("one"), item.value)
        if not isinstance(item, RowValues):
            raise FormatError(
                f"{self.where}: the column {show_column(tuple(place['column']))} holds no values"
            )
        size = target["meta"].get("batch_size") or []
        if is_stack and math.prod(size[len(lead) :]) != 1:
            return [[value for cell in item.values for value in cell], None]
        if not is_stack and "one" in place and size[: len(lead)] == lead:
            target["kind"] = "NonTensorStack"
        return [item.values, None]

    def _add_leaf(self, entries: list[Any], key: str, place: Row, in_rows: bool) -> None:
        if "column" not in place:
            self._add_tensor(entries, key, self._restore(place, in_rows))
            return
        item = self.items[tuple(place["column"])]
        if isinstance(item, Tensor) and "select" in place:
            dim, number = place["select"]
            self._add_tensor(entries, key, self._reshape(item).select(dim + len(self.lead), number))
        else:
            self._add_item(entries, key, item)

    def _add_level(self, entries: list[Any], key: str, kind: str = "", batch: Sequence[int] = ()) -> int:
        """Add a node below another one, and return its position."""
        entries.append([key, self.builder.add_row(kind, {"batch_size": list(batch)} if kind else {})])
        position: int = entries[-1][1]
        return position

    def _add_item(self, entries: list[Any], key: str, item: Item) -> None:
        """Add what a column became as an entry."""
        if isinstance(item, dict):
            level = self._add_level(entries, key, "TensorDict", self.lead)
            for name, below in item.items():
                self._add_item(self.builder.rows[level]["entries"], name, below)
        elif isinstance(item, Tensor):
            self._add_tensor(entries, key, self._reshape(item))
        elif isinstance(item, Padded):
            self._add_tensor(entries, key, self._reshape(item.leaf))
            self._add_tensor(entries, f"{key}_lengths", self._reshape(item.lengths))
        elif isinstance(item, Parts) and all(part is not None for part in item.tensors):
            parts = [part for part in item.tensors if part is not None]
            place = {"nested": "", "shapes": [list(part.shape) for part in parts]}
            flat = torch.cat([part.reshape(-1) for part in parts])
            self._add_tensor(entries, key, restore(place, lambda name: flat))
        else:
            entries.append([key, self._add_values(item)])

    def _add_values(self, item: Item) -> int:
        if isinstance(item, (One, list)):  # labels have no rows
            value = item.value if isinstance(item, One) else item
            return self.builder.add_value("NonTensorData", self.lead, [value, None])
        values: Any = None
        if isinstance(item, Parts):
            values = [None if part is None else part.tolist() for part in item.tensors]
        elif isinstance(item, RowValues):
            values = item.values
        return self.builder.add_value("NonTensorStack", self.lead, [values, None])

    def _add_tensor(self, entries: list[Any], key: str, leaf: Tensor) -> None:
        self.leaves.append(leaf)
        entries.append([key, self.builder.add_leaf(len(self.leaves) - 1)])

    def _reshape(self, leaf: Tensor) -> Tensor:
        """Return rows with the batch dims that they were made of."""
        return leaf if len(self.lead) == 1 else leaf.reshape([*self.lead, *leaf.shape[1:]])

    def _restore(self, place: Row, in_rows: bool) -> Tensor:
        if "empty" in place:
            sizes = [*(self.lead if in_rows else ()), *place["empty"]]
            return torch.empty(sizes, dtype=STORABLE[place["dtype"]])
        if "inline" in place:
            return read_inline(place["inline"], self.plan.header)
        raise FormatError(f"{self.where}: a place in the header is damaged, {place!r:.200}")

    def _add_masks(self, masks: Mapping[Path, Tensor], mask_key: Path) -> None:
        if not masks:
            return
        root = self.builder.rows[0]
        while not root["entries"] and len(root["members"]) == 1:
            root = self.builder.rows[root["members"][0][1]]
        if any(key == mask_key[0] for key, _ in root["entries"]):
            raise ValueError(f"{show_path(mask_key)} is taken: pass another mask_key")
        levels: dict[Path, Row] = {(): root}
        for path, mask in masks.items():
            key = (*mask_key, *path)
            for length in range(1, len(key)):
                if key[:length] not in levels:
                    above = levels[key[: length - 1]]["entries"]
                    level = self._add_level(above, key[length - 1], "TensorDict", self.lead)
                    levels[key[:length]] = self.builder.rows[level]
            self._add_tensor(levels[key[:-1]]["entries"], key[-1], self._reshape(mask))

    def _expand(self, new: int, template: int) -> None:
        """Add the members of a lazy stack, one for each row; a stack without rows becomes a dense node."""
        if not self.rows:
            self._make_blank(new, template)
        for number in range(self.rows):
            member = self._add_member(template, number, None)
            self.builder.rows[new]["members"].append([str(number), member])

    def _make_blank(self, new: int, template: int) -> None:
        table = self.plan.table
        todo = [(new, template)]
        while todo:
            target, old = todo.pop()
            row = table.nodes[old]
            size = [max(number, 0) for number in row["meta"].get("batch_size", [])]
            while not row["entries"] and len(row["members"]) == 1 and not row["values"]:
                row = table.nodes[row["members"][0][1]]
            self.builder.rows[target].update({"kind": "TensorDict", "meta": {"batch_size": [0, *size]}})
            entries = self.builder.rows[target]["entries"]
            for key, ref in row["entries"]:
                if isinstance(ref, list):
                    item = self.items.get(tuple(table.leaves[ref[0]].get("column", ())))
                    self._add_tensor(
                        entries, key, item if isinstance(item, Tensor) else torch.empty(0, *size)
                    )
                elif not table.nodes[ref]["values"]:
                    todo.append((self._add_level(entries, key), ref))

    def _add_member(self, old: int, number: int, above: Sequence[int] | None) -> int | None:
        """Add a node of a template with the entries that a row has; return None if the row lacks it."""
        table = self.plan.table
        row = table.nodes[old]
        groups = ("entries", "members")
        cells = {
            (group, key): self._get_cell(table.leaves[ref[0]], number, Tensor)
            for group in groups
            for key, ref in row[group]
            if isinstance(ref, list)
        }
        values = {name: self._get_cell(table.values[ref], number, One) for name, ref in row["values"]}
        found = [cell for cell in (*cells.values(), *values.values()) if cell is not None]
        if row.get("optional") and not found:
            return None
        meta = self._find_sizes(row["meta"], found, number, above)
        new = self.builder.add_row(row["kind"], meta)
        target = self.builder.rows[new]
        target.update({key: item for key, item in row.items() if key in ("class", "from")})
        for name, value in values.items():
            self._add_pair(target, name, [None if value is None else value.value, None])
        for group in groups:
            for key, ref in row[group]:
                if isinstance(ref, list):
                    if (leaf := cells[group, key]) is not None:
                        self._add_tensor(target[group], key, leaf)
                    continue
                child = self._add_member(ref, number, meta.get("batch_size", above))
                if child is not None:
                    target[group].append([key, child])
        return new

    def _find_sizes(
        self, meta: Row, cells: Sequence[Tensor | One], number: int, above: Sequence[int] | None
    ) -> Row:
        """Return the header of a member, whose uneven sizes are those of its leaves, or of the node above."""
        size = meta.get("batch_size", [])
        if -1 not in size:
            return dict(meta)
        shape = next((cell.shape for cell in cells if isinstance(cell, Tensor)), above)
        if shape is None:
            raise FormatError(f"{self.where}: the batch size of a member in row {number} is unknown")
        return {**meta, "batch_size": [shape[dim] if n < 0 else n for dim, n in enumerate(size)]}

    def _get_cell(self, place: Any, number: int, wanted: type[CellT]) -> CellT | None:
        """Return what a row has at a place; None where it lacks the entry."""
        if not isinstance(place, dict):
            raise FormatError(f"{self.where}: a value of the members has no column")
        path = tuple(place.get("column", ()))
        if path in self.present and not self.present[path][number]:
            return None
        found: object = self.items[path] if path else self._restore(place, False)
        if isinstance(found, RowValues):
            found = One(found.values[number])
        elif isinstance(found, Parts):
            found = found.tensors[number]
        elif isinstance(found, Tensor) and path:
            found = found[number]
        if found is None or isinstance(found, wanted):
            return found
        raise FormatError(
            f"{self.where}: the column {show_column(path)} does not fit the members of the header"
        )


def _find_saved(saved: Sequence[Any] | None, value: object) -> Sequence[Any]:
    """Return the pair of a value that the header has, if it is still that of the column; else a pair of that one."""
    if saved is not None:
        plain, types = saved
        if types is not None or (plain == value and type(plain) is type(value)):
            return saved
    return [value, None]


def set_rows(meta: Row, old: list[int], lead: list[int]) -> Row:
    """Return the header of a node with other batch dims in place of those that were rows."""
    if old == lead:
        return meta
    meta = dict(meta)
    for name in ("batch_size", "stands_for"):
        if name in meta and meta[name][: len(old)] == old:
            meta[name] = [*lead, *meta[name][len(old) :]]
            if name == "batch_size" and meta.get("names"):
                kept = (meta["names"][: len(old)] or [None])[: len(lead)]
                meta["names"] = [*kept, *meta["names"][len(old) :]]
    return meta
