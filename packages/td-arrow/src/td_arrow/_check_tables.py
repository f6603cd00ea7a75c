"""Look at files of tables without loading them: their columns, sizes and nulls, and whether they are damaged."""

from __future__ import annotations

import math
import os
from typing import Any

import pyarrow as pa

from td_core import Problem, Report, Tree
from td_core.errors import FormatError
from td_core.spi import describe_table, make_reporter
from td_core.typing import Progress
from td_store.arrays import report_damage

from ._arrow_types import find_dense
from ._build_rows import set_rows
from ._dialects import read_lance
from ._nulls import Nulls, Path, show_column
from ._read_columns import ColumnReader, join_chunks
from ._table_columns import plan_columns
from ._table_files import ParquetTable, Table, open_tables
from ._table_header import check_hash, hash_column, read_facts
from ._table_locations import StorageOptions, show_place
from ._table_options import bind


def _inspect(name: str, location: Any, *, storage_options: StorageOptions = None) -> Tree:
    """Return the tree of a file from its header: shapes, dtypes, sizes, groups and nulls."""
    with open_tables(location, name, storage_options) as table:
        rows = sum(table.groups)
        plan = plan_columns(table.schema, rows, table.where, strict=False)
        lead = plan.lead if math.prod(plan.lead) == rows else [rows]
        for row in plan.table.nodes:
            row["meta"] = set_rows(row["meta"], plan.lead, lead)

        def describe(key: str, place: Any) -> Tree:
            leaf = Tree(key, "leaf", place="the header")
            if "empty" in place:
                leaf.shape, leaf.dtype = [*lead, *place["empty"]], place["dtype"]
            elif "column" in place:
                path = tuple(place["column"])
                _describe_column(leaf, table, path, plan.fields[path], lead)
            return leaf

        root = os.path.basename(table.where.rstrip("/")) or table.where
        return describe_table(plan.table, root, describe)


inspect_parquet, inspect_arrow = bind(_inspect, "parquet"), bind(_inspect, "arrow")


def _describe_column(leaf: Tree, table: Table, path: Path, field: pa.Field, lead: list[int]) -> None:
    """Add to a leaf what its column is, and with Parquet its size in the file."""
    dense = read_lance(field) or find_dense(field.type, read_facts(field))
    if dense is None:
        leaf.kind, leaf.dtype = "column", str(field.type)
    else:
        leaf.shape, leaf.dtype = [*lead, *dense.shape], str(dense.dtype)
        leaf.nbytes = math.prod(leaf.shape) * dense.dtype.itemsize
    leaf.place = f"column {show_column(path)}, {len(table.groups)} groups"
    parts = [part for part in table.list_tables() if isinstance(part, ParquetTable)]
    chunks = [chunk for part in parts for chunk in part.list_chunks(path)]
    if chunks:
        leaf.nbytes = leaf.nbytes or sum(chunk.size for chunk in chunks)
        stored, nulls = sum(chunk.stored for chunk in chunks), sum(chunk.nulls or 0 for chunk in chunks)
        leaf.place += f", {chunks[0].codec}, {stored} bytes stored, {nulls} nulls"


def _verify(
    name: str,
    location: Any,
    *,
    progress: Progress = False,
    storage_options: StorageOptions = None,
) -> Report:
    """Decode all columns of a file, compare the CRC of its pages or the hashes of its header, and report what is damaged."""
    where = show_place(location)
    options = {"page_checksum_verification": True} if name == "parquet" else {}

    def check() -> Report:
        with open_tables(location, name, storage_options, **options) as table:
            return _check_columns(table, progress)

    return report_damage(where, where, check)


verify_parquet, verify_arrow = bind(_verify, "parquet"), bind(_verify, "arrow")


def _check_columns(table: Table, progress: Progress) -> Report:
    plan = plan_columns(table.schema, sum(table.groups), table.where, strict=False)
    hashes = plan.header.get("hashes")
    hashes = hashes if isinstance(hashes, dict) else {}
    digests = hashes.get("columns")
    digests = digests if isinstance(digests, dict) else {}
    report = make_reporter(progress, max(len(plan.fields), 1), "verify", "columns")
    problems, hashed, tables = [], 0, table.list_tables()
    for part in tables:
        try:
            hashed += check_hash(part.schema, "schema" in hashes)
        except FormatError as error:
            problems.append(Problem(os.path.basename(part.where), "damaged", str(error)))
    for path, field in plan.fields.items():
        try:
            array = join_chunks(next(iter(table.read([path])))[1])
            array.validate(full=True)
            ColumnReader(Nulls.of("fill")).read(array, field, plan.keys[path])
            saved = digests.get("/".join(path))
            if saved is not None:
                hashed += 1
                digest = hash_column(array, str(hashes.get("algorithm")))
                if digest != saved:
                    raise FormatError(f"its hash is {digest}, {saved} was saved")
        except (FormatError, ValueError) as error:
            problems.append(Problem(show_column(path), "damaged", str(error)))
        report(1)
    return Report(table.where, len(tables), hashed, problems)
