"""Open files of tables: leaves are mapped from files of Arrow where they can be, or decoded in groups when they are used."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import torch
from torch import Tensor

from td_core import NestedKey, TensorCollection
from td_core.errors import FormatError, UnsupportedOperationError
from td_core.spi import check_mode, set_module
from td_core.typing import ObjectLocation
from td_store import StoredTensor
from td_store.arrays import (
    MappedSource,
    ObjectReader,
    RangeSource,
    as_mapped,
    read_shape,
    refuse_objects,
    refuse_values,
)

from ._arrow_types import Dense, convert, is_inside, peel, view_buffer
from ._dialects import find_features
from ._from_arrow import Columns, read_collection
from ._group_sources import GroupedFile, GroupSource, ObjectGroupSource, show_file
from ._nulls import Path, show_column
from ._read_columns import find_form, join_chunks
from ._save_tables import save_arrow
from ._table_columns import list_fields
from ._table_files import ObjectArrow, ObjectParquet, ParquetTable, Table, map_path, open_tables, read_arrow
from ._table_locations import Stamp, check_stamp, is_directory, list_parts, refuse_url, stamp_file
from ._table_options import bind, check_count


def _open(
    name: str,
    location: Any,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    separator: str | None = None,
    strict: bool | None = None,
    cache_bytes: int = 1 << 28,
) -> Any:
    """Open a file or a directory of one of the formats; see :func:`td_arrow.open`."""
    check_mode(mode)
    check_count("cache_bytes", cache_bytes, 0, "a number of bytes, 0 or more")
    options: dict[str, Any] = {"keys": keys, "separator": separator, "strict": strict}
    if isinstance(location, ObjectLocation):
        return _open_objects(name, location, mode, cache_bytes, options)
    where = refuse_url(location, "open")
    is_folder = is_directory(where)
    if mode == "r+" and (name == "parquet" or is_folder):
        kind = "a Parquet file" if name == "parquet" else "a directory of tables"
        raise UnsupportedOperationError(
            f"cannot open {where} with mode='r+': {kind} cannot be changed in place; open it with mode='c', or save again"
        )
    paths = [path for path, _ in list_parts(where)] if is_folder else [where]
    stamps = [stamp_file(path) for path in paths]
    with open_tables(where, name, strict=strict) as table:
        files = tuple(
            GroupedFile(os.path.abspath(path), stamp, tuple(part.groups))
            for path, stamp, part in zip(paths, stamps, table.list_tables(), strict=True)
        )
        columns = _OpenColumns(name, mode, cache_bytes, table, files)
        result = read_collection(table.schema, sum(table.groups), columns.fetch, table.where, **options)
        for path, stamp in zip(paths, stamps, strict=True):
            check_stamp(path, stamp)
    if mode == "c":
        return result
    result = result.lock_()
    if mode == "r+":
        refuse_values(result, where)
    return result


def _open_objects(
    name: str, location: ObjectLocation, mode: str, cache: int, options: Mapping[str, Any]
) -> Any:
    """Open a table in an object store: groups of rows are read when they are used, and a stream of Arrow at once."""
    if mode == "r+":
        refuse_objects(location, "write into", "open it with mode='c', and save() the result")
    with open_tables(location, name, strict=options["strict"]) as table:
        tables = table.list_tables()
        parts = [part for part in tables if isinstance(part, (ObjectParquet, ObjectArrow))]
        files = tuple(GroupedFile(part.content, (), tuple(part.groups)) for part in parts)
        columns = _ObjectColumns(name, mode, cache, table, files)
        fetch = columns.fetch if len(parts) == len(tables) else table.read
        result = read_collection(table.schema, sum(table.groups), fetch, table.where, **options)
    return result if mode == "c" else result.lock_()


open_parquet, open_arrow = bind(_open, "parquet"), bind(_open, "arrow")


def create_arrow(like: TensorCollection, location: Any, *, durable: bool = False) -> Any:
    """Write a file of Arrow with zeros in the structure of a collection, and open it for writing."""
    refuse_objects(location, "create a file to fill at", "save() the collection when it is complete")
    path = refuse_url(location, "create")
    if os.path.lexists(path):
        raise FileExistsError(f"cannot create {path!r}: it exists")
    for key, leaf in like.items(True, True):
        if isinstance(leaf, Tensor) and (leaf.dtype == torch.bool or leaf.is_nested):
            raise UnsupportedOperationError(
                f"cannot create {key!r}: bools are bits in Arrow, and nested leaves have no fixed size, so neither can be "
                "written in place"
            )
    zeros = like.apply(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu"), device=None)
    save_arrow(zeros, path, durable=durable)
    return open_arrow(path, mode="r+")


#: What :class:`Dense` has, without that class, which pickles do not name.
Form = tuple[Any, ...]


class _OpenColumns:
    """Gives the columns of an opened table: leaves that are read when they are used, and the others."""

    source: ClassVar[type[GroupSource]] = GroupSource

    def __init__(
        self, name: str, mode: str, cache: int, table: Table, files: tuple[GroupedFile, ...]
    ) -> None:
        self._name, self._mode, self._cache, self._table, self._files = name, mode, cache, table, files
        self._place = [(show_file(file.path), file.stamp) for file in files[:1]]
        self._shapes = find_features(table.schema.metadata)
        self._fields = list_fields(table.schema, table.where)
        #: The columns of each file, if there are several.
        self._known = [
            list_fields(part.schema, part.where) for part in table.list_tables() if part is not table
        ]

    def fetch(self, paths: Iterable[Path]) -> Columns:
        """Yield each column, those that are read now last."""
        eager = []
        may_map = self._table.mapped is not None and len(self._table.groups) == 1
        # What is mapped is read at no cost.
        columns = self._table.read(paths) if may_map else ((path, None) for path in paths)
        for path, array in columns:
            dense = find_form(self._fields[path], path, self._shapes)
            leaf = None
            if dense is not None and all(path in known for known in self._known):
                leaf = self._map_column(path, dense, array) if self._name == "arrow" else None
                leaf = self._open_column(path, dense) if leaf is None else leaf
            if leaf is None:
                eager.append(path)
            else:
                yield path, leaf
        yield from self._table.read(eager)

    def _open_column(self, path: Path, dense: Dense) -> Tensor | None:
        """Return a leaf that is read when it is used; None for a column that must be read now."""
        field = self._fields[path]
        if self._name == "arrow":
            if self._mode == "r+":
                raise UnsupportedOperationError(
                    f"{self._table.where}: column {show_column(path)} cannot be written in place: it is compressed, has nulls, "
                    "bools or several record batches; open it with mode='c', or leave it out with keys="
                )
        elif self._may_be_refused(path, field, dense):
            return None
        rows = sum(self._table.groups)
        if not rows or 0 in dense.shape:
            return None
        try:
            shape = read_shape((rows, *dense.shape), dense.dtype.itemsize)
        except ValueError as error:
            raise FormatError(
                f"{self._table.where}: column {show_column(path)} is damaged: {error}"
            ) from error
        source = self.source(self._name, self._files, path, field, shape, dense.dtype, self._cache)
        return StoredTensor(source, mode="c" if self._mode == "c" else "r+")

    def _may_be_refused(self, path: Path, field: pa.Field, dense: Dense) -> bool:
        """Return True for a column of integers that can have nulls, as far as its statistics say."""
        if not field.nullable or dense.dtype.is_floating_point or dense.dtype.is_complex:
            return False
        tables = [table for table in self._table.list_tables() if isinstance(table, ParquetTable)]
        chunks = [chunk for table in tables for chunk in table.list_chunks(path)]
        return any(chunk.nulls is None or chunk.nulls for chunk in chunks)

    def _map_column(self, path: Path, dense: Dense, array: pa.ChunkedArray | None) -> Tensor | None:
        leaf = None if array is None else _view_column(array, dense, self._table.mapped)
        if leaf is None or self._mode == "c":
            return leaf
        place = (*self._place[0], path, tuple(dense))
        if self._mode == "r":
            return as_mapped(leaf, rebuild_column, *place)
        return StoredTensor(MappedColumn(*place, leaf.shape, leaf.dtype))


class _ObjectColumns(_OpenColumns):
    source = ObjectGroupSource

    def _map_column(self, path: Path, dense: Dense, array: pa.ChunkedArray | None) -> Tensor | None:
        """Return a leaf whose rows are read as ranges of bytes; None if its numbers are not in one piece of the file."""
        (table, *others) = self._table.list_tables()
        if (
            others
            or not isinstance(table, ObjectArrow)
            or dense.stored == torch.bool
            or dense.order is not None
        ):
            return None
        found, shape = table.find_range(path), (table.groups[0], *dense.stored_shape)
        if found is None or found[1] - found[0] < math.prod(shape) * dense.stored.itemsize:
            return None
        place = "x" if dense.dtype == dense.stored else {"tensor": "x", "dtype": str(dense.dtype)}
        reader = ObjectReader(table.content.store, table.content.info)
        return StoredTensor(
            RangeSource(reader, dense.stored, shape, found[0], place), mode="c" if self._mode == "c" else "r+"
        )


def _view_column(column: pa.ChunkedArray, dense: Dense, mapped: torch.UntypedStorage | None) -> Tensor | None:
    """Return a leaf that is a view of a mapped file; None if it is compressed, or has nulls or bits."""
    array = join_chunks(column)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    numbers, levels = peel(array)
    buffer = numbers.buffers()[1]
    if numbers.null_count or levels.count(None) < len(levels) or dense.stored is torch.bool:
        return None
    if buffer is None or mapped is None or not is_inside(buffer, mapped):
        return None
    width, count = dense.stored.itemsize, len(numbers)
    if pa.types.is_fixed_size_binary(numbers.type):
        width, count = numbers.type.byte_width, count * math.prod(dense.stored_shape)
    begin = numbers.offset * width
    leaf = convert(view_buffer(buffer, dense.stored, count, begin, None, mapped), dense)
    return leaf if not count or leaf.data_ptr() == buffer.address + begin else None


def _map_again(path: str, stamp: Stamp, column: Path, form: Form, shared: bool) -> Tensor:
    # What was written has changed the time of the last write.
    check_stamp(path, stamp, written=shared)
    table = read_arrow(map_path(path, shared=shared), path, check=False)
    leaf = _view_column(next(table.read([column]))[1], Dense(*form), table.mapped)
    if leaf is None:
        raise UnsupportedOperationError(f"{path}: column {show_column(column)} cannot be mapped")
    return leaf


@set_module("td_arrow.arrow_pickles")
def rebuild_column(path: str, stamp: Stamp, column: Path, form: Form) -> Tensor:
    """Map a column again, in another process; raise FormatError if the file has changed."""
    return as_mapped(_map_again(path, stamp, column, form, False), rebuild_column, path, stamp, column, form)


@set_module("td_arrow.arrow_pickles")
@dataclass(eq=False, repr=False)
class MappedColumn(MappedSource):
    """A column of a file of Arrow that is opened for writing."""

    path: str
    stamp: Stamp
    column: Path
    form: Form
    shape: torch.Size
    dtype: torch.dtype

    def _open(self) -> Tensor:
        return _map_again(self.path, self.stamp, self.column, self.form, True)

    def __reduce__(self) -> Any:
        return MappedColumn, (self.path, self.stamp, self.column, self.form, self.shape, self.dtype)
