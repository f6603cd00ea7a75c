"""The members of a lazy stack as rows of a table: one template for all of them, and a column for each of its leaves.

A leaf whose sizes differ is a column of lists. A row is null where a member lacks the entry.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from td_core.errors import CodecError
from td_core.spi import show_path

from ._arrow_types import Cells, check_storable, make_cells, make_ragged
from ._nulls import Path
from ._row_values import make_values
from ._table_plan import Row, TablePlan


class UnevenError(Exception):
    """The members differ in a way that columns cannot hold."""


class _Group(NamedTuple):
    """Nodes of the same key in each row, None where a row lacks it, and where the template is added."""

    nodes: list[int | None]
    new: int
    path: Path
    keys: Path
    above: list[Any]


def merge_members(plan: TablePlan, members: Sequence[int], new: int, path: Path, keys: Path) -> bool:
    """Add the template of the members to a plan, below the row ``new``; False if columns cannot hold the members."""
    marks = [len(part) for part in (plan.nodes, plan.places, plan.pairs)]
    columns = dict(plan.columns)
    first = plan.add_node(plan.encoded.nodes[members[0]])
    plan.nodes[new]["members"].append(["0", first])
    plan.nodes[new]["meta"] = {**plan.nodes[new]["meta"], "each": True}
    try:
        todo = [_Group(list(members), first, path, keys, [])]
        while todo:
            _merge(plan, todo.pop(), todo)
    except UnevenError:
        for part, length in zip((plan.nodes, plan.places, plan.pairs), marks, strict=True):
            del part[length:]
        plan.columns.clear()
        plan.columns.update(columns)
        plan.nodes[new]["members"].clear()
        del plan.nodes[new]["meta"]["each"]
        return False
    return True


def _merge(plan: TablePlan, group: _Group, todo: list[_Group]) -> None:
    rows: list[Row | None] = [None if old is None else plan.encoded.nodes[old] for old in group.nodes]
    present = [row for row in rows if row is not None]
    first = present[0]
    kind = {key: first.get(key) for key in ("kind", "class")}
    facts = {key: item for key, item in first["meta"].items() if key != "batch_size"}
    for row in present:
        others = {key: item for key, item in row["meta"].items() if key != "batch_size"}
        if {key: row.get(key) for key in kind} != kind or others != facts or "each" in facts:
            raise UnevenError
    leaves = _merge_entries(plan, group, rows, todo)
    held = [*leaves, *_merge_values(plan, group, rows)]
    missing = [row is None for row in rows]
    # A node is present where one of its leaves or values is.
    if any(missing) and not any(absent == missing for absent, _ in held):
        raise UnevenError
    if any(missing):
        plan.nodes[group.new]["optional"] = True
    plan.nodes[group.new]["meta"] = {**first["meta"], **_merge_sizes(rows, group, leaves)}


def _merge_sizes(rows: list[Row | None], group: _Group, leaves: list[Any]) -> dict[str, Any]:
    """Return the batch size of a template, with -1 for sizes that follow from a leaf or from the node above."""
    sizes = [row["meta"]["batch_size"] for row in rows if row is not None and "batch_size" in row["meta"]]
    if not sizes:
        return {}
    if len({len(size) for size in sizes}) > 1:
        raise UnevenError
    merged = [size[0] if len({*size}) == 1 else -1 for size in zip(*sizes, strict=True)]
    if -1 in merged:
        missing = [row is None for row in rows]
        above = [row["meta"].get("batch_size", [])[: len(merged)] for row in group.above or () if row]
        if not any(absent == missing and not inline for absent, inline in leaves) and above != sizes:
            raise UnevenError
    return {"batch_size": merged}


def _merge_values(plan: TablePlan, group: _Group, rows: list[Row | None]) -> list[Any]:
    names = [[name for name, _ in row["values"]] for row in rows if row is not None]
    if any(each != names[0] for each in names):
        raise UnevenError
    missing = [row is None for row in rows]
    for name in names[0]:
        values = [None if row is None else plan.encoded.values[dict(row["values"])[name]] for row in rows]
        absent = any(missing)
        if absent and any(value is None and not gone for value, gone in zip(values, missing, strict=True)):
            raise UnevenError
        path = group.path if len(names[0]) == 1 else (*group.path, name)
        cells = make_values(values, partial(plan.show, group.keys))
        facts = {**cells.facts, **({"absent": True} if absent else {})}
        plan.add_value(
            group.new, name, {"column": plan.add_column(path, Cells(cells.array, facts), nullable=True)}
        )
    return [(missing, True) for _ in names[0]]


def _merge_entries(plan: TablePlan, group: _Group, rows: list[Row | None], todo: list[_Group]) -> list[Any]:
    """Add the entries and members of a group; return for each leaf in which rows it is absent, and whether it has no column."""
    held: list[Any] = []
    kind = plan.encoded.nodes[next(old for old in group.nodes if old is not None)]["kind"]
    for place in ("entries", "members"):
        below = [None if row is None else dict(row[place]) for row in rows]
        keys = _merge_keys([list(item) for item in below if item is not None])
        if place == "members" and any(item is not None and list(item) != keys for item in below):
            raise UnevenError
        for key in keys:
            refs = [None if item is None else item.get(key) for item in below]
            hidden = kind == "UnbatchedTensor" or (place == "members" and len(keys) == 1)
            path = group.path if hidden else (*group.path, key)
            named = place == "entries" and kind != "UnbatchedTensor"
            deeper = (*group.keys, key) if named else group.keys
            child = _add_child(plan, refs, path, deeper, rows, todo, held)
            plan.nodes[group.new][place].append([key, child])
    return held


def _add_child(
    plan: TablePlan,
    refs: list[Any],
    path: Path,
    keys: Path,
    above: list[Row | None],
    todo: list[_Group],
    held: list[Any],
) -> Any:
    """Add what has the same key in all rows: leaves as a column, or nodes as a template."""
    if any(isinstance(ref, list) for ref in refs):
        return _add_leaf(plan, refs, path, keys, held)
    old = next(ref for ref in refs if ref is not None)
    child = plan.add_node(plan.encoded.nodes[old])
    todo.append(_Group(refs, child, path, keys, above))
    return child


def _merge_keys(lists: list[list[str]]) -> list[str]:
    """Return all keys in an order that agrees with each list."""
    first = lists[0]
    if all(keys == first for keys in lists):
        return first
    graph: dict[str, dict[str, None]] = {key: {} for keys in lists for key in keys}
    for keys in lists:
        for before, after in itertools.pairwise(keys):
            graph[after][before] = None
    try:
        return list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        raise UnevenError from None


def _add_leaf(plan: TablePlan, refs: list[Any], path: Path, keys: Path, held: list[Any]) -> list[int]:
    if any(isinstance(ref, int) for ref in refs):
        raise UnevenError
    parts: list[Tensor | None] = [None if ref is None else plan.encoded.leaves[ref[0]] for ref in refs]
    present = [part for part in parts if part is not None]
    looks = {(part.dtype, part.layout, part.ndim, part.is_quantized, part.device.type) for part in present}
    if len(looks) > 1 or present[0].is_nested:
        raise UnevenError
    try:
        check_storable(present[0])
    except CodecError as error:
        raise CodecError(f"cannot save {show_path(keys)}: {error}") from None
    missing = [part is None for part in parts]
    even = len({part.shape for part in present}) == 1
    if even and 0 in present[0].shape:
        if any(missing):
            raise UnevenError
        held.append((missing, True))
        return plan.add_place({"empty": list(present[0].shape), "dtype": str(present[0].dtype)})
    cells = _join_parts(plan, parts, present[0], keys) if even else make_ragged(_detach(parts))
    if cells is None:
        raise UnevenError
    facts = {**cells.facts, **({"absent": True} if any(missing) else {})}
    held.append((missing, False))
    column = plan.add_column(path, Cells(cells.array, facts), nullable=any(missing))
    return plan.add_place({"column": column})


def _detach(parts: list[Tensor | None]) -> list[Tensor | None]:
    return [None if part is None else part.detach().cpu() for part in parts]


def _join_parts(plan: TablePlan, parts: list[Tensor | None], like: Tensor, keys: Path) -> Cells:
    """Return leaves of one shape as cells, with zeros where a row has none."""
    zeros = torch.zeros_like(like)
    stacked = torch.stack([zeros if part is None else part.detach() for part in parts])
    valid = np.array([part is not None for part in parts])
    return make_cells(stacked, plan.tensors.get(keys), valid=None if valid.all() else valid)
