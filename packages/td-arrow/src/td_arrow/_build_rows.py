"""Build the collection of a table from its columns: leaves with the rows that there are, and members from templates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from td_core.errors import FormatError, MissingPluginError
from td_core.spi import STORABLE, decode_table, prune_table, show_path
from td_store.arrays import TableBuilder, restore

from ._nulls import Path, show_column
from ._read_columns import Padded, Parts, RowValues
from ._table_columns import TableColumns
from ._table_header import read_inline

Row = dict[str, Any]


class One(NamedTuple):
    """A value that all rows have."""

    value: Any


class _GoneError(Exception):
    """A row lacks the node."""


class RowBuilder:
    """Builds the table of nodes with tensors as leaves.

    Args:
        plan: what the table holds.
        items: what each column became, by column path.
        present: by column path, which rows have the entry, for entries that members lack.
        rows: the number of rows.
        where: the location of the table, for messages.
    """

    def __init__(
        self,
        plan: TableColumns,
        items: Mapping[Path, Any],
        present: Mapping[Path, Sequence[bool]],
        rows: int,
        where: str,
    ) -> None:
        self.plan, self.items, self.present, self.rows, self.where = plan, items, present, rows, where
        self.old = plan.lead
        self.lead = self.old if math.prod(self.old) == rows else [rows]
        self.leaves: list[Tensor] = []
        self.builder = TableBuilder(where)

    def build(self, masks: Mapping[Path, Tensor], mask_key: Path, strict: bool) -> Any:
        """Return the collection, with masks below ``mask_key``."""
        table = self.plan.table
        todo = [(0, self.builder.add_row("", {}), True)]
        while todo:
            old, new, in_rows = todo.pop()
            row = table.nodes[old]
            self._fill(new, row, in_rows)
            if row["meta"].get("each") and self._expand(new, row):
                continue
            below = in_rows and not (
                row["kind"] == "LazyStackedTensorDict" and row["meta"].get("stack_dim", 0) < len(self.old)
            )
            for group in ("entries", "members"):
                for key, ref in row[group]:
                    if isinstance(ref, list):
                        self._add_leaf(new, group, key, table.leaves[ref[0]], in_rows)
                        continue
                    item = self._find_changed(table.nodes[ref])
                    if item is not None:
                        self._add_item(self.builder.rows[new][group], key, item)
                        continue
                    child = self.builder.add_row("", {})
                    self.builder.rows[new][group].append([key, child])
                    todo.append((ref, child, below))
        self._add_masks(masks, mask_key)
        encoded = prune_table(self.builder.table)
        tensors = [self.leaves[ref] for ref in encoded.leaves]
        try:
            return decode_table(encoded, tensors, self.where, strict=strict)
        except MissingPluginError as error:
            names = [show_path(key) for path, key in self.plan.keys.items() if self._is_value(path)]
            raise MissingPluginError(
                f"{self.where}: {', '.join(names[:3]) or 'an entry'} holds values: {error}; or leave it out with keys="
            ) from error

    def _is_value(self, path: Path) -> bool:
        return isinstance(self.items.get(path), (RowValues, One))

    def _find_changed(self, row: Row) -> Any:
        """Return what the column of a node of values became if it holds no values any more, or None."""
        for _, ref in row["values"]:
            pair = self.plan.table.values[ref]
            item = self.items[tuple(pair["column"])] if isinstance(pair, dict) else None
            if item is not None and not isinstance(item, (RowValues, One)):
                return item
        return None

    def _fill(self, new: int, row: Row, in_rows: bool) -> None:
        """Copy a node of the header to a row, with the batch size that follows from the number of rows."""
        target = self.builder.rows[new]
        meta = dict(row["meta"])
        meta.pop("each", None)
        if in_rows:
            meta = set_rows(meta, self.old, self.lead)
        target.update({key: item for key, item in row.items() if key in ("kind", "class", "from")})
        target["meta"] = meta
        for name, ref in row["values"]:
            self._fill_value(target, name, self.plan.table.values[ref], meta)

    def _fill_value(self, target: Row, name: str, pair: Any, meta: Row) -> None:
        values = self.builder.table.values
        if isinstance(pair, dict):
            item = self.items[tuple(pair["column"])]
            if isinstance(item, One):
                pair = (
                    pair["one"]
                    if "one" in pair and self._is_equal(pair["one"], item.value)
                    else [item.value, None]
                )
                if target["kind"] == "NonTensorStack":
                    pair = [[item.value] * self.rows, None]
            elif isinstance(item, RowValues):
                found = item.values
                size = meta.get("batch_size") or []
                if target["kind"] == "NonTensorStack" and math.prod(size[len(self.lead) :]) != 1:
                    found = [value for cell in found for value in cell]
                elif (
                    target["kind"] != "NonTensorStack"
                    and size[: len(self.lead)] == self.lead
                    and "one" in pair
                ):
                    target["kind"] = "NonTensorStack"
                pair = [found, None]
            else:
                raise FormatError(
                    f"{self.where}: the column {show_column(tuple(pair['column']))} holds no values"
                )
        target["values"].append([name, len(values)])
        values.append(list(pair))

    def _is_equal(self, pair: Any, value: Any) -> bool:
        return (
            bool(pair[1] is None and pair[0] == value and type(pair[0]) is type(value)) or pair[1] is not None
        )

    def _add_leaf(self, new: int, group: str, key: str, place: Any, in_rows: bool) -> None:
        entries = self.builder.rows[new][group]
        if "column" not in place:
            entries.append([key, self._add_tensor(self._restore(place, in_rows))])
            return
        item = self.items[tuple(place["column"])]
        if isinstance(item, Tensor) and "select" in place:
            dim, number = place["select"]
            item = self._reshape(item).select(dim + len(self.lead), number)
            entries.append([key, self._add_tensor(item)])
            return
        self._add_item(entries, key, item)

    def _add_item(self, entries: list[Any], key: str, item: Any) -> None:
        """Add what a column became as an entry."""
        if isinstance(item, dict):
            level = self.builder.add_row("TensorDict", {"batch_size": self.lead})
            entries.append([key, level])
            for name, below in item.items():
                self._add_item(self.builder.rows[level]["entries"], name, below)
        elif isinstance(item, Tensor):
            entries.append([key, self._add_tensor(self._reshape(item))])
        elif isinstance(item, Padded):
            entries.append([key, self._add_tensor(self._reshape(item.leaf))])
            entries.append([f"{key}_lengths", self._add_tensor(self._reshape(item.lengths))])
        elif isinstance(item, Parts) and all(part is not None for part in item.tensors):
            parts = [part for part in item.tensors if part is not None]
            place = {"nested": "", "shapes": [list(part.shape) for part in parts]}
            flat = torch.cat([part.reshape(-1) for part in parts])
            entries.append([key, self._add_tensor(restore(place, lambda name: flat))])
        else:
            entries.append([key, self._add_values(item)])

    def _add_values(self, item: Any) -> int:
        if isinstance(item, One):
            return self.builder.add_value("NonTensorData", self.lead, [item.value, None])
        if isinstance(item, list):  # labels, which have no rows
            return self.builder.add_value("NonTensorData", self.lead, [item, None])
        if isinstance(item, Parts):
            values: Any = [None if part is None else part.tolist() for part in item.tensors]
        else:
            values = item.values
        return self.builder.add_value("NonTensorStack", self.lead, [values, None])

    def _add_tensor(self, leaf: Tensor) -> list[int]:
        self.leaves.append(leaf)
        return self.builder.add_leaf(len(self.leaves) - 1)

    def _reshape(self, leaf: Tensor) -> Tensor:
        """Return rows with the batch dims that they were made of."""
        if len(self.lead) == 1:
            return leaf
        return leaf.reshape([*self.lead, *leaf.shape[1:]])

    def _restore(self, place: Any, in_rows: bool) -> Tensor:
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
                    child = self.builder.add_row("TensorDict", {"batch_size": self.lead})
                    levels[key[: length - 1]]["entries"].append([key[length - 1], child])
                    levels[key[:length]] = self.builder.rows[child]
            levels[key[:-1]]["entries"].append([key[-1], self._add_tensor(self._reshape(mask))])

    def _expand(self, new: int, row: Row) -> bool:
        """Add the members of a lazy stack, one for each row; a stack without rows becomes a dense node."""
        (_, template), *_ = row["members"]
        if not self.rows:
            self._make_blank(new, template)
            return True
        for number in range(self.rows):
            member = self._add_member(template, number, None)
            self.builder.rows[new]["members"].append([str(number), member])
        return True

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
            for key, ref in row["entries"]:
                entries = self.builder.rows[target]["entries"]
                if isinstance(ref, list):
                    item = self.items.get(tuple(table.leaves[ref[0]].get("column", ())))
                    cell = item if isinstance(item, Tensor) else torch.empty(0, *size)
                    entries.append([key, self._add_tensor(cell)])
                elif not table.nodes[ref]["values"]:
                    entries.append([key, self.builder.add_row("", {})])
                    todo.append((entries[-1][1], ref))

    def _add_member(self, old: int, number: int, above: list[int] | None) -> int:
        """Add a node of a template with the entries that a row has; raise _GoneError if the row lacks it."""
        table = self.plan.table
        row = table.nodes[old]
        found = list(self._list_cells(row, number))
        if row.get("optional") and all(cell is None for _, _, cell in found):
            raise _GoneError
        meta = self._find_sizes(row["meta"], [cell for _, _, cell in found], number, above)
        new = self.builder.add_row(row["kind"], meta)
        target = self.builder.rows[new]
        target.update({key: item for key, item in row.items() if key in ("class", "from")})
        cells = {(group, key): cell for group, key, cell in found}
        for name, _ in row["values"]:
            value = cells["values", name]
            target["values"].append([name, len(self.builder.table.values)])
            self.builder.table.values.append([value.value, None])
        for group in ("entries", "members"):
            for key, ref in row[group]:
                if isinstance(ref, list):
                    cell = cells[group, key]
                    if cell is not None:
                        target[group].append([key, self._add_tensor(cell)])
                    continue
                try:
                    below = meta.get("batch_size", above)
                    target[group].append([key, self._add_member(ref, number, below)])
                except _GoneError:
                    continue
        return new

    def _find_sizes(self, meta: Row, cells: list[Any], number: int, above: list[int] | None) -> Row:
        """Return the header of a member, whose uneven sizes are those of its leaves, or of the node above."""
        size = meta.get("batch_size", [])
        if -1 not in size:
            return dict(meta)
        shapes = [cell.shape for cell in cells if isinstance(cell, Tensor)]
        shape: Any = shapes[0] if shapes else above
        if shape is None:
            raise FormatError(f"{self.where}: the batch size of a member in row {number} is unknown")
        return {**meta, "batch_size": [shape[dim] if n < 0 else n for dim, n in enumerate(size)]}

    def _list_cells(self, row: Row, number: int) -> Iterator[tuple[str, str, Any]]:
        """Yield group, key and the cell of a row for each leaf and value of a template; None where the row lacks it."""
        table = self.plan.table
        for group in ("entries", "members"):
            for key, ref in row[group]:
                if isinstance(ref, list):
                    yield group, key, self._get_cell(table.leaves[ref[0]], number)
        for name, ref in row["values"]:
            yield "values", name, self._get_cell(table.values[ref], number)

    def _get_cell(self, place: Any, number: int) -> Any:
        if not isinstance(place, dict):
            raise FormatError(f"{self.where}: a value of the members has no column")
        if "column" not in place:
            return self._restore(place, False)
        path = tuple(place["column"])
        if path in self.present and not self.present[path][number]:
            return None
        item = self.items[path]
        if isinstance(item, One):
            return item
        if isinstance(item, Tensor):
            return item[number]
        if isinstance(item, RowValues):
            return One(item.values[number])
        if isinstance(item, Parts):
            return item.tensors[number]
        raise FormatError(
            f"{self.where}: the column {show_column(path)} does not fit the members of the header"
        )


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
