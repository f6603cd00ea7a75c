"""The columns of a schema, and the table of nodes that they describe, with or without a header.

A column is named by a *column path*: its name, after the names of the structs that it is in.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from td_core import NestedKey
from td_core.errors import FormatError
from td_core.spi import Encoded, parse_json, select_keys

from ._nulls import Path, show_column
from ._table_header import read_header
from ._table_plan import EMPTY, Row


@dataclass(slots=True)
class TableColumns:
    """What a read is about to make of a table.

    Attributes:
        table: the nodes, with places as leaves.
        fields: the field of each column that is read, by its column path.
        keys: the key path of each of them.
        lead: the batch dims that were rows.
        header: the header of the schema; empty for a table of another program.
    """

    table: Encoded
    fields: dict[Path, pa.Field] = field(default_factory=dict)
    keys: dict[Path, Path] = field(default_factory=dict)
    lead: list[int] = field(default_factory=list)
    header: Row = field(default_factory=dict)


def list_fields(schema: Iterable[pa.Field], where: str) -> dict[Path, pa.Field]:
    """Return all fields of a schema by column path, structs before what is in them; two of one path are an error."""
    result: dict[Path, pa.Field] = {}
    todo: list[tuple[Path, pa.Field]] = [((), item) for item in reversed(list(schema))]
    while todo:
        path, item = todo.pop()
        try:
            below = (*path, item.name)
        except UnicodeDecodeError as error:
            raise FormatError(f"{where}: the name of a column is damaged: {error}") from error
        if below in result:
            raise FormatError(f"{where}: two columns are called {show_column(below)}: rename one")
        result[below] = item
        if is_level(item):
            todo += [(below, part) for part in reversed(list(item.type))]
    return result


def is_level(item: pa.Field) -> bool:
    """Return True for a field of structs that is a level, not an extension type in structs."""
    return pa.types.is_struct(item.type) and b"ARROW:extension:name" not in (item.metadata or {})


def plan_columns(
    schema: pa.Schema,
    rows: int,
    where: str,
    *,
    separator: str | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    strict: bool | None = None,
) -> TableColumns:
    """Return what a table holds, from its schema alone; see :func:`td_arrow.from_arrow` for the options."""
    fields = list_fields(schema, where)
    found = read_header(schema.metadata, where)
    if found is None:
        table = Encoded([_make_level([rows])], [], [])
        result = TableColumns(table, lead=[rows])
    else:
        table, header = found
        result = TableColumns(table, lead=header["lead"], header=header)
    places = _list_places(table)
    if not all(path in fields for path, _ in places):
        _drop_missing(table, fields, where, strict)
        places = _list_places(table)
    known = {path for path, _ in places}
    hidden = {*_list_index_columns(schema), (EMPTY,)}
    new = [path for path in _list_columns(fields, known) if path not in known and path not in hidden]
    if new:
        _add_new(result, new, fields, separator, where)
    result.table = select_keys(table, keys, where)
    for path, key in places if keys is None and not new else _list_places(result.table):
        if path in fields:  # else its entry is dropped
            result.fields[path] = fields[path]
            result.keys.setdefault(path, key)
    return result


def _make_level(batch: list[int]) -> Row:
    return {
        "kind": "TensorDict",
        "meta": {"batch_size": list(batch)},
        "entries": [],
        "members": [],
        "values": [],
    }


def _get_column(place: Any) -> Path | None:
    names = place.get("column") if isinstance(place, dict) else None
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise FormatError(f"its place in the header is damaged, {place!r:.200}")
    return tuple(names)


def _list_places(table: Encoded) -> list[tuple[Path, Path]]:
    """Return column path and key path of each leaf and value that is in a column."""
    result = []
    for place, key in zip(table.leaves, table.leaf_paths(members=False), strict=True):
        path = _get_column(place)
        if path is None and not (isinstance(place, dict) and ("inline" in place or "empty" in place)):
            raise FormatError(f"its place in the header is damaged, {place!r:.200}")
        if path is not None:
            result.append((path, key))
    keys = table.node_paths(members=False) if table.values else []
    for row, key in zip(table.nodes, keys):
        for _, ref in row["values"]:
            path = _get_column(table.values[ref])
            if path is not None:
                result.append((path, key))
    return result


def _list_columns(fields: Mapping[Path, pa.Field], known: set[Path]) -> list[Path]:
    """Return the columns that are no levels, in the order of the schema; a level that the header has as a column is one."""
    return [
        path
        for path, item in fields.items()
        if (not is_level(item) or path in known or not item.type.num_fields)
        and not any(path[:length] in known for length in range(1, len(path)))
    ]


def _list_index_columns(schema: pa.Schema) -> list[Path]:
    """Return the columns of the default index of pandas."""
    try:
        content = parse_json((schema.metadata or {}).get(b"pandas", b"{}"))
        names = content.get("index_columns", [])
        return [(name,) for name in names if isinstance(name, str) and name.startswith("__index_level_")]
    except (ValueError, AttributeError):
        return []


def _drop_missing(table: Encoded, fields: Mapping[Path, pa.Field], where: str, strict: bool | None) -> None:
    """Remove the entries of columns that the table has no longer."""
    gone: list[Path] = []
    for row in table.nodes:
        for group in ("entries", "members"):
            kept = []
            for key, ref in row[group]:
                items = (
                    [table.leaves[ref[0]]]
                    if isinstance(ref, list)
                    else [table.values[i] for _, i in table.nodes[ref]["values"]]
                )
                paths = [path for item in items if (path := _get_column(item)) is not None]
                missing = [path for path in paths if path not in fields]
                gone += missing
                if not missing:
                    kept.append([key, ref])
            row[group] = kept
    if strict is False:
        return
    names = ", ".join(dict.fromkeys(map(show_column, gone)))
    if strict:
        raise FormatError(f"{where}: the columns {names} are gone: pass strict=False to read the others")
    warnings.warn(f"{where}: the columns {names} are gone, so their entries are left out", stacklevel=4)


def _add_new(
    result: TableColumns,
    columns: list[Path],
    fields: Mapping[Path, pa.Field],
    separator: str | None,
    where: str,
) -> None:
    """Add entries for columns that the header does not have."""
    table = result.table
    nodes: dict[Path, int] = {}
    for position, path in enumerate(table.node_paths(members=False)):
        row = table.nodes[position]
        if row["kind"] == "TensorDict" and "batch_size" in row["meta"]:
            nodes.setdefault(path, position)
    for column in columns:
        key = tuple(part for name in column for part in (name.split(separator) if separator else (name,)))
        for length in range(1, len(key)):
            if key[:length] not in nodes:
                above = _find_node(nodes, key[: length - 1], column, where)
                _check_free(table, above, key[length - 1], column, separator, where)
                nodes[key[:length]] = _add_child(
                    table, above, key[length - 1], _make_level(result.lead or [])
                )
        above = _find_node(nodes, key[:-1], column, where)
        _check_free(table, above, key[-1], column, separator, where)
        if is_level(fields[column]):
            nodes[key] = _add_child(table, above, key[-1], _make_level(result.lead or []))
        else:
            table.nodes[above]["entries"].append([key[-1], [len(table.leaves)]])
            table.leaves.append({"column": list(column)})


def _find_node(nodes: Mapping[Path, int], key: Path, column: Path, where: str) -> int:
    if key in nodes:
        return nodes[key]
    raise FormatError(
        f"{where}: the column {show_column(column)} has no place in the collection of the header"
    )


def _check_free(
    table: Encoded, above: int, key: str, column: Path, separator: str | None, where: str
) -> None:
    if any(key == name for name, _ in table.nodes[above]["entries"]):
        name = column[0] if len(column) == 1 else show_column(column)
        taken = name.rpartition(separator)[0] if separator and separator in name else name
        raise FormatError(
            f"{where}: {taken!r} is a column, and the level of {name!r} with separator={separator!r}"
        )


def _add_child(table: Encoded, above: int, key: str, row: Row) -> int:
    table.nodes.append(row)
    table.nodes[above]["entries"].append([key, len(table.nodes) - 1])
    return len(table.nodes) - 1
