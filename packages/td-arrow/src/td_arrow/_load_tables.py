"""Load files of tables, wholly or some rows and keys of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from td_core import NestedKey
from td_core.spi import make_reporter
from td_core.typing import DeviceType, Progress

from ._from_arrow import make_reader, read_collection
from ._nulls import Path
from ._parquet_options import READER, check_options, declare_options
from ._table_files import open_tables


@declare_options(READER)
def load_parquet(
    location: Any,
    *,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    filter: Any = None,
    device: DeviceType | None = None,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "jagged",
    times: str = "values",
    categories: str = "values",
    separator: str | None = None,
    strict: bool | None = None,
    num_threads: int = 0,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Load a Parquet file, or a directory of them.

    Args:
        location: a path, a URL, or a binary file object.
        keys: keys or key paths to read.
        rows: an index of the first batch dim: an int, a slice or positions, of the rows that ``filter`` keeps.
        filter: a ``pyarrow.compute.Expression``, or tuples of pyarrow such as ``[("step", "<", 10)]``, which rows meet. A
            nested column is a tuple of names.
        device: where the leaves go.
        nulls: as for :func:`td_arrow.from_arrow`; by default a null of a float column is NaN, and others are an error.
        mask_key: key of the level with masks.
        lists: what lists of numbers become.
        times: what times become.
        categories: what dictionary columns become.
        separator: splits the names of columns into key paths.
        strict: None warns for columns of the header that are gone; True raises FormatError; False does neither, and fills
            columns that a file of a directory lacks with nulls.
        num_threads: 1 decodes in this thread; 0 lets pyarrow choose.
        progress: show a progress bar, or call a function of (bytes done, total bytes).
        storage_options: arguments of the file system of fsspec, for a URL.
        **options: arguments of ``pyarrow.parquet.ParquetFile``.

    Raises:
        FormatError: the file is damaged, or cannot be read.
        ValueError: a column has nulls that ``nulls`` refuses.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.parquet")
    >>> load_parquet("data.parquet", filter=[("x", ">", 1)], rows=slice(2))["x"]
    tensor([2, 3])
    """
    check_options(options, READER, "load")
    with open_tables(
        location,
        "parquet",
        storage_options=storage_options,
        num_threads=num_threads,
        strict=strict,
        **options,
    ) as table:
        return load_table(
            table,
            rows=rows,
            condition=make_condition(filter),
            reader=make_reader(nulls, "auto", lists, times, categories, None, table.schema),
            progress=progress,
            keys=keys,
            device=device,
            mask_key=mask_key,
            separator=separator,
            strict=strict,
        )


def load_arrow(
    location: Any,
    *,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    filter: Any = None,
    device: DeviceType | None = None,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "jagged",
    times: str = "values",
    categories: str = "values",
    separator: str | None = None,
    strict: bool | None = None,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a file or a stream of Arrow, or a directory of files; the options are those of :func:`load_parquet`.

    A local file is mapped: numbers that are not compressed are read when they are used, and writes stay in memory.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> load_arrow("data.arrow", rows=[4, 1])["x"]
    tensor([4, 1])
    """
    with open_tables(location, "arrow", storage_options=storage_options, strict=strict) as table:
        return load_table(
            table,
            rows=rows,
            condition=make_condition(filter),
            reader=make_reader(nulls, "auto", lists, times, categories, None, table.schema),
            progress=progress,
            keys=keys,
            device=device,
            mask_key=mask_key,
            separator=separator,
            strict=strict,
        )


#: The operators of tuples.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "in": lambda field, values: field.isin(list(values)),
    "not in": lambda field, values: ~field.isin(list(values)),
}  # fmt: skip


def make_condition(condition: Any) -> Any:
    """Return the expression of the option ``filter``: of tuples that all hold, or of lists of these of which one does.

    Raises:
        TypeError: it is neither an expression nor tuples.
    """
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


def load_table(
    table: Any, *, rows: Any, condition: Any, reader: Any, progress: Progress, **options: Any
) -> Any:
    """Return the collection of some rows of a table."""
    chosen = Chosen(table, rows, condition)
    reader.mapped = getattr(table, "mapped", None)

    def fetch(paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
        names = list(paths)
        report = make_reporter(progress, max(len(names), 1), "load", "columns")
        for path, array in table.read(names, chosen.groups):
            yield path, chosen.select(array)
            report(1)

    result = read_collection(table.schema, chosen.count, fetch, reader, table.where, **options)
    return result[0] if chosen.is_single else result


def _fit_error(table: Any, condition: Any, error: Exception) -> ValueError:
    return ValueError(f"{table.where}: the filter {condition} does not fit the columns: {error}")


class Chosen:
    """The rows of a table to read: groups, and positions in these.

    Attributes:
        groups: the groups to read, or None for all.
        count: how many rows are read.
        is_single: True if the caller named one row.
    """

    def __init__(self, table: Any, rows: Any, condition: Any) -> None:
        self.groups: list[int] | None = None
        self._positions: Any = None
        self.count = sum(table.groups)
        self.is_single = False
        if condition is not None:
            self._filter(table, condition)
        if rows is not None:
            self._select_rows(table, rows)

    def _filter(self, table: Any, condition: Any) -> None:
        try:
            groups: list[int] = table.find_groups(condition)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _fit_error(table, condition, error) from error
        self.groups, self._positions = groups, self.find(table, groups, condition)
        self.count = len(self._positions)

    @staticmethod
    def find(table: Any, groups: list[int], condition: Any) -> Any:
        """Return the positions in some groups of the rows that meet a condition."""
        text = str(condition)
        names = [name for name in table.schema.names if name in text]
        columns = {path[0]: array for path, array in table.read([(name,) for name in names], groups)}
        total = sum(table.groups[i] for i in groups)
        content = pa.table({**columns, "td:position": pa.array(np.arange(total))})
        try:
            return content.filter(condition)["td:position"].to_numpy()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _fit_error(table, condition, error) from error

    def _select_rows(self, table: Any, rows: Any) -> None:
        self.is_single = isinstance(rows, int) and not isinstance(rows, bool)
        known = torch.arange(self.count)
        index = [rows] if self.is_single else rows
        try:
            chosen = known[index if isinstance(index, slice) else torch.as_tensor(index)].numpy()
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise IndexError(
                f"{table.where}: rows={rows!r:.100} is no index of its {self.count} rows"
            ) from error
        self.count = len(chosen)
        if self._positions is not None:
            self._positions = self._positions[chosen]
            return
        edges = np.cumsum([0, *table.groups])
        owners = np.searchsorted(edges, chosen, side="right") - 1
        groups = np.unique(owners)
        self.groups = groups.tolist()
        starts = np.cumsum([0, *(table.groups[i] for i in self.groups)])
        self._positions = chosen - edges[owners] + starts[np.searchsorted(groups, owners)]

    def select(self, array: Any) -> Any:
        """Return the chosen rows of the groups that were read."""
        positions = self._positions
        if positions is None:
            return array
        if len(positions) and bool((np.diff(positions) == 1).all()):
            return array.slice(int(positions[0]), len(positions))
        return array.take(pa.array(positions))
