"""Load files of tables, wholly or some rows and keys of them."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from td_core.spi import make_reporter
from td_core.typing import Progress

from ._from_arrow import Columns, read_collection
from ._nulls import Path
from ._table_files import Table, open_tables
from ._table_locations import StorageOptions
from ._table_options import READER, bind, check_options, option

#: The options of a read that are those of :func:`read_collection`.
_READING = [
    each
    for each in inspect.signature(read_collection).parameters.values()
    if each.kind is each.KEYWORD_ONLY and each.name not in ("copy", "default", "mapped")
]


def _load(
    name: str,
    location: Any,
    *,
    rows: Any = None,
    filter: Any = None,
    progress: Progress = False,
    storage_options: StorageOptions = None,
    **options: Any,
) -> Any:
    """Load a file or a directory of one of the formats; see :func:`td_arrow.load`."""
    reading = {each.name: options.pop(each.name) for each in _READING if each.name in options}
    threads = options.pop("num_threads", 0)
    check_options(options, READER, f"the format {name!r}")
    strict = reading.get("strict")
    with open_tables(location, name, storage_options, threads, strict, **options) as table:
        chosen = Chosen(table, rows, make_condition(filter))

        def fetch(paths: Iterable[Path]) -> Columns:
            names = list(paths)
            report = make_reporter(progress, max(len(names), 1), "load", "columns")
            for path, array in table.read(names, chosen.groups):
                yield path, select_rows(array, chosen.positions)
                report(1)

        result = read_collection(
            table.schema, chosen.count, fetch, table.where, mapped=table.mapped, **reading
        )
        return result[0] if chosen.is_single else result


load_parquet = bind(_load, "parquet", [*_READING, option("num_threads", 0), *READER])
load_arrow = bind(_load, "arrow", _READING)

#: The operators of tuples.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "in": lambda field, values: field.isin(list(values)),
    "not in": lambda field, values: ~field.isin(list(values)),
}  # fmt: skip


def make_condition(condition: object) -> pc.Expression | None:
    """Return the expression of the option ``filter``: of tuples that all hold, or of lists of these of which one does."""
    if condition is None or isinstance(condition, pc.Expression):
        return condition
    if isinstance(condition, list) and condition and all(isinstance(item, list) for item in condition):
        return functools.reduce(operator.or_, map(make_condition, condition))
    if not isinstance(condition, list) or not condition or not all(map(_is_comparison, condition)):
        raise TypeError(
            f"filter is an expression of pyarrow.compute, or a list of tuples such as ('step', '<', 10); got {condition!r:.100}"
        )
    parts = [_OPERATORS[name](pc.field(column), value) for column, name, value in condition]
    return functools.reduce(operator.and_, parts)


def _is_comparison(item: object) -> bool:
    """Return True for a tuple of a column, or a path of names, an operator and a value."""
    return (
        isinstance(item, tuple)
        and len(item) == 3
        and isinstance(item[0], (str, tuple))
        and item[1] in _OPERATORS
    )


def find_rows(table: Table, groups: list[int], condition: pc.Expression) -> npt.NDArray[np.int64]:
    """Return the positions in some groups of the rows that meet a condition."""
    text = str(condition)
    names = [name for name in table.schema.names if name in text]
    columns = {path[0]: array for path, array in table.read([(name,) for name in names], groups)}
    total = sum(table.groups[i] for i in groups)
    content = pa.table({**columns, "td:position": pa.array(np.arange(total))})
    found: npt.NDArray[np.int64] = content.filter(condition)["td:position"].to_numpy()
    return found


def select_rows(array: pa.ChunkedArray, positions: npt.NDArray[np.int64] | None) -> pa.ChunkedArray:
    """Return some rows of a column; None for all."""
    if positions is None:
        return array
    if len(positions) and bool((np.diff(positions) == 1).all()):
        return array.slice(int(positions[0]), len(positions))
    return array.take(pa.array(positions))


class Chosen:
    """The rows of a table to read: groups, and positions in these.

    Attributes:
        groups: the groups to read, or None for all.
        positions: the positions in these groups, or None for all.
        count: how many rows are read.
        is_single: True if the caller named one row.
    """

    def __init__(self, table: Table, rows: Any, condition: pc.Expression | None) -> None:
        self.groups: list[int] | None = None
        self.positions: npt.NDArray[np.int64] | None = None
        self.count = sum(table.groups)
        self.is_single = isinstance(rows, int) and not isinstance(rows, bool)
        if condition is not None:
            try:
                self.groups = table.find_groups(condition)
                self.positions = find_rows(table, self.groups, condition)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                text = f"{table.where}: the filter {condition} does not fit the columns: {error}"
                raise ValueError(text) from error
            self.count = len(self.positions)
        if rows is not None:
            self._select_rows(table, rows)

    def _select_rows(self, table: Table, rows: Any) -> None:
        index = [rows] if self.is_single else rows
        try:
            known = torch.arange(self.count)
            chosen = known[index if isinstance(index, slice) else torch.as_tensor(index)].numpy()
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise IndexError(
                f"{table.where}: rows={rows!r:.100} is no index of its {self.count} rows"
            ) from error
        self.count = len(chosen)
        if self.positions is not None:
            self.positions = self.positions[chosen]
            return
        edges = np.cumsum([0, *table.groups])
        owners = np.searchsorted(edges, chosen, side="right") - 1
        groups = np.unique(owners)
        self.groups = groups.tolist()
        starts = np.cumsum([0, *(table.groups[i] for i in self.groups)])
        self.positions = chosen - edges[owners] + starts[np.searchsorted(groups, owners)]
