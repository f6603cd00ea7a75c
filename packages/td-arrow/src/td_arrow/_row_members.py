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
    above: list[Row | None]


class _Held(NamedTuple):
    """What a node has: in which rows it is missing, and whether it is a leaf in a column."""

    missing: list[bool]
    is_column: bool


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
    rows = [None if old is None else plan.encoded.nodes[old] for old in group.nodes]
    looks = [_describe(row) for row in rows if row is not None]
    if any(look != looks[0] for look in looks) or "each" in looks[0][2]:
        raise UnevenError
    leaves = _merge_entries(plan, group, rows, todo)
    held = [*leaves, *_merge_values(plan, group, rows)]
    missing = [row is None for row in rows]
    if any(missing):
        # A node is present where one of its leaves or values is.
        if all(each.missing != missing for each in held):
            raise UnevenError
        plan.nodes[group.new]["optional"] = True
    has_sizes = any(each.missing == missing and each.is_column for each in leaves)
    plan.nodes[group.new]["meta"] = {**looks[0][2], **_merge_sizes(rows, group.above, has_sizes)}


def _describe(row: Row) -> tuple[str | None, str | None, Row]:
    """Return what the nodes of all rows have in common: kind, class, and header without the batch size."""
    facts = {key: item for key, item in row["meta"].items() if key != "batch_size"}
    return row.get("kind"), row.get("class"), facts


def _merge_sizes(rows: list[Row | None], above: list[Row | None], has_sizes: bool) -> Row:
    """Return the batch size of a template, with -1 for sizes that follow from a leaf or from the node above."""
    sizes = [row["meta"]["batch_size"] for row in rows if row is not None and "batch_size" in row["meta"]]
    if not sizes:
        return {}
    if len({*map(len, sizes)}) > 1:
        raise UnevenError
    merged = [each[0] if len({*each}) == 1 else -1 for each in zip(*sizes, strict=True)]
    if -1 in merged and not has_sizes:
        if sizes != [row["meta"].get("batch_size", [])[: len(merged)] for row in above if row]:
            raise UnevenError
    return {"batch_size": merged}


def _mark(cells: Cells, absent: bool) -> Cells:
    """Return cells that say whether their nulls are entries that rows lack."""
    return Cells(cells.array, {**cells.facts, "absent": True}) if absent else cells


def _merge_values(plan: TablePlan, group: _Group, rows: list[Row | None]) -> list[_Held]:
    found = [None if row is None else dict(row["values"]) for row in rows]
    names = [list(each) for each in found if each is not None]
    if any(each != names[0] for each in names):
        raise UnevenError
    missing = [each is None for each in found]
    for name in names[0]:
        values = [None if each is None else plan.encoded.values[each[name]] for each in found]
        if any(missing) and sum(value is None for value in values) > sum(missing):
            raise UnevenError
        path = group.path if len(names[0]) == 1 else (*group.path, name)
        cells = _mark(make_values(values, partial(plan.show, group.keys)), any(missing))
        plan.add_value(group.new, name, {"column": plan.add_column(path, cells, nullable=True)})
    return [_Held(missing, False) for _ in names[0]]


def _merge_entries(plan: TablePlan, group: _Group, rows: list[Row | None], todo: list[_Group]) -> list[_Held]:
    """Add the entries and members of a group, and return what its leaves are."""
    held: list[_Held] = []
    unbatched = plan.nodes[group.new]["kind"] == "UnbatchedTensor"
    for place in ("entries", "members"):
        below = [None if row is None else dict(row[place]) for row in rows]
        keys = _merge_keys([list(item) for item in below if item is not None], place == "entries")
        for key in keys:
            refs = [None if item is None else item.get(key) for item in below]
            hidden = unbatched or (place == "members" and len(keys) == 1)
            path = group.path if hidden else (*group.path, key)
            deeper = (*group.keys, key) if place == "entries" and not unbatched else group.keys
            child = _merge_child(plan, refs, _Group([], -1, path, deeper, rows), todo, held)
            plan.nodes[group.new][place].append([key, child])
    return held


def _merge_child(
    plan: TablePlan, refs: list[Any], below: _Group, todo: list[_Group], held: list[_Held]
) -> Any:
    """Add what has the same key in all rows: leaves as a column, or nodes as a group that is merged later."""
    if any(isinstance(ref, list) for ref in refs):
        return _add_leaf(plan, refs, below.path, below.keys, held)
    child = plan.add_node(plan.encoded.nodes[next(ref for ref in refs if ref is not None)])
    todo.append(below._replace(nodes=refs, new=child))
    return child


def _merge_keys(lists: list[list[str]], may_differ: bool) -> list[str]:
    """Return all keys in an order that agrees with each list."""
    first = lists[0]
    if all(keys == first for keys in lists):
        return first
    if not may_differ:
        raise UnevenError
    graph: dict[str, dict[str, None]] = {key: {} for keys in lists for key in keys}
    for keys in lists:
        for before, after in itertools.pairwise(keys):
            graph[after][before] = None
    try:
        return list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        raise UnevenError from None


def _add_leaf(plan: TablePlan, refs: list[Any], path: Path, keys: Path, held: list[_Held]) -> list[int]:
    """Add a leaf of each row as a column, or as a place of leaves without elements."""
    if any(isinstance(ref, int) for ref in refs):
        raise UnevenError
    parts: list[Tensor | None] = [None if ref is None else plan.encoded.leaves[ref[0]] for ref in refs]
    missing = [part is None for part in parts]
    like = _find_common(parts, keys)
    if like is not None and 0 in like.shape:
        if any(missing):
            raise UnevenError
        held.append(_Held(missing, False))
        return plan.add_place({"empty": list(like.shape), "dtype": str(like.dtype)})
    if like is not None:
        cells: Cells | None = _join_parts(parts, like, plan.tensors.get(keys))
    else:
        cells = make_ragged([None if part is None else part.detach().cpu() for part in parts])
    if cells is None:
        raise UnevenError
    held.append(_Held(missing, True))
    column = plan.add_column(path, _mark(cells, any(missing)), nullable=any(missing))
    return plan.add_place({"column": column})


def _find_common(parts: list[Tensor | None], keys: Path) -> Tensor | None:
    """Return one of the leaves if all have its shape, else None; raise UnevenError if lists cannot hold them."""
    present = [part for part in parts if part is not None]
    looks = {(part.dtype, part.layout, part.ndim, part.is_quantized, part.device.type) for part in present}
    if len(looks) > 1 or present[0].is_nested:
        raise UnevenError
    try:
        check_storable(present[0])
    except CodecError as error:
        raise CodecError(f"cannot save {show_path(keys)}: {error}") from None
    return present[0] if len({part.shape for part in present}) == 1 else None


def _join_parts(parts: list[Tensor | None], like: Tensor, choice: str) -> Cells:
    """Return leaves of one shape as cells, with zeros where a row has none."""
    zeros = torch.zeros_like(like)
    stacked = torch.stack([zeros if part is None else part.detach() for part in parts])
    valid = np.array([part is not None for part in parts])
    return make_cells(stacked, choice, valid=None if valid.all() else valid)
