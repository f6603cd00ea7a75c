"""Look at files of tables without loading them: their columns, sizes and nulls, and whether they are damaged."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from td_core import Problem, Report, Tree
from td_core.errors import FormatError
from td_core.spi import describe_table, make_reporter
from td_core.typing import Progress
from td_store.arrays import report_damage

from ._arrow_types import find_dense
from ._build_rows import set_rows
from ._dialects import read_lance
from ._nulls import Nulls, show_column
from ._read_columns import ColumnReader, join_chunks
from ._table_columns import plan_columns
from ._table_files import ParquetTable, open_tables
from ._table_header import hash_column, read_facts
from ._table_locations import show_place


def inspect_parquet(location: Any, *, storage_options: Mapping[str, Any] | None = None) -> Tree:
    """Return the tree of a Parquet file from its footer: shapes, dtypes, sizes, row groups and nulls.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.zeros(6, 2)}, [6]), "data.parquet")
    >>> print(inspect_parquet("data.parquet").children["x"].dtype)
    torch.float32
    """
    with open_tables(location, "parquet", storage_options=storage_options) as table:
        return _inspect(table)


def inspect_arrow(location: Any, *, storage_options: Mapping[str, Any] | None = None) -> Tree:
    """Return the tree of a file of Arrow from its header."""
    with open_tables(location, "arrow", storage_options=storage_options) as table:
        return _inspect(table)


def _inspect(table: Any) -> Tree:
    rows = sum(table.groups)
    plan = plan_columns(table.schema, rows, table.where, strict=False)
    lead = plan.lead if math.prod(plan.lead) == rows else [rows]
    for row in plan.table.nodes:
        row["meta"] = set_rows(row["meta"], plan.lead, lead)
    tables = getattr(table, "tables", [table])

    def describe(key: str, place: Any) -> Tree:
        path = tuple(place.get("column", ()))
        leaf = Tree(key, "leaf", place="the header")
        if "empty" in place:
            leaf.shape, leaf.dtype = [*lead, *place["empty"]], place["dtype"]
        if not path:
            return leaf
        field = plan.fields[path]
        dense = read_lance(field) or find_dense(field.type, read_facts(field))
        if dense is None:
            leaf.kind, leaf.dtype = "column", str(field.type)
        else:
            leaf.shape, leaf.dtype = [*lead, *dense.shape], str(dense.dtype)
            leaf.nbytes = math.prod(leaf.shape) * dense.dtype.itemsize
        leaf.place = f"column {show_column(path)}, {len(table.groups)} groups"
        chunks = [
            chunk for part in tables if isinstance(part, ParquetTable) for chunk in part.list_chunks(path)
        ]
        if chunks:
            stored = sum(chunk.total_compressed_size for chunk in chunks)
            leaf.nbytes = leaf.nbytes or sum(chunk.total_uncompressed_size for chunk in chunks)
            nulls = [chunk.statistics.null_count if chunk.statistics else None for chunk in chunks]
            count = sum(number or 0 for number in nulls)
            leaf.place += f", {chunks[0].compression.lower()}, {stored} bytes stored, {count} nulls"
        return leaf

    return describe_table(plan.table, os.path.basename(table.where.rstrip("/")) or table.where, describe)


def verify_parquet(
    location: Any, *, progress: Progress = False, storage_options: Mapping[str, Any] | None = None
) -> Report:
    """Decode all columns of a Parquet file, compare the CRC of pages that have one, and report what is damaged.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.zeros(6, 2)}, [6]), "data.parquet", checksums=True)
    >>> verify_parquet("data.parquet").ok
    True
    """
    where = show_place(location)

    def check() -> Report:
        options = {"page_checksum_verification": True}
        with open_tables(location, "parquet", storage_options=storage_options, **options) as table:
            return _verify(table, progress)

    return report_damage(where, where, check)


def verify_arrow(
    location: Any, *, progress: Progress = False, storage_options: Mapping[str, Any] | None = None
) -> Report:
    """Read all columns of a file of Arrow, compare the hashes of its header, and report what is damaged."""
    where = show_place(location)

    def check() -> Report:
        with open_tables(location, "arrow", storage_options=storage_options) as table:
            return _verify(table, progress)

    return report_damage(where, where, check)


def _verify(table: Any, progress: Progress) -> Report:
    plan = plan_columns(table.schema, sum(table.groups), table.where, strict=False)
    hashes = plan.header.get("hashes") or {}
    digests = hashes.get("columns") if isinstance(hashes, dict) else None
    report = make_reporter(progress, max(len(plan.fields), 1), "verify", "columns")
    problems, hashed = [], 0
    for path, field in plan.fields.items():
        try:
            _, array = next(table.read([path]))
            array = join_chunks(array)
            array.validate(full=True)
            ColumnReader(Nulls.of("fill")).read(array, field, plan.keys[path])
            name = "/".join(path)
            if isinstance(digests, dict) and name in digests:
                hashed += 1
                digest = hash_column(array, str(hashes.get("algorithm")))
                if digest != digests[name]:
                    raise FormatError(f"its hash is {digest}, {digests[name]} was saved")
        except (FormatError, ValueError) as error:
            problems.append(Problem(show_column(path), "damaged", str(error)))
        report(1)
    return Report(table.where, len(plan.fields), hashed, problems)
