"""Open files of tables: leaves are mapped from files of Arrow where they can be, or decoded in groups when they are used."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from td_core import NestedKey
from td_core.errors import UnsupportedOperationError
from td_core.spi import check_mode, set_module
from td_store import StoredTensor
from td_store.arrays import MappedSource, as_mapped, refuse_values

from ._arrow_types import Dense, convert, is_inside, peel, view_buffer
from ._from_arrow import get_columns, make_reader, read_collection
from ._group_sources import GroupedFile, GroupSource
from ._nulls import Path, show_column
from ._read_columns import find_form
from ._save_tables import save_arrow
from ._table_columns import list_fields
from ._table_files import ArrowTable, map_path, open_tables, refuse_url
from ._table_locations import Stamp, check_stamp, is_directory, list_parts, stamp_file

#: How many bytes of decoded groups each process keeps for each file.
_CACHE = 1 << 28


def open_parquet(
    location: Any,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    separator: str | None = None,
    strict: bool | None = None,
    cache_bytes: int = _CACHE,
) -> Any:
    """Open a Parquet file, or a directory of them, without reading columns of numbers.

    Rows are decoded in whole row groups when they are used, and kept. For rows in a random order, convert the file to the
    format ``"arrow"``. Values, lists, and integers with nulls are read now.

    Args:
        location: a local path.
        mode: ``"r"``, or ``"c"``, which keeps writes in memory.
        keys: keys or key paths to open.
        separator: splits the names of columns into key paths.
        strict: as for :func:`td_arrow.from_arrow`.
        cache_bytes: how many bytes of decoded groups of a file each process keeps.

    Raises:
        FormatError: the file is damaged.
        UnsupportedOperationError: the mode is ``"r+"``.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.parquet", row_group_size=2)
    >>> open_parquet("data.parquet")[[5, 1]]["x"]
    tensor([5, 1])
    """
    return _Opening(location, "parquet", mode, cache_bytes).open(keys, separator, strict)


def open_arrow(
    location: Any,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    separator: str | None = None,
    strict: bool | None = None,
    cache_bytes: int = _CACHE,
) -> Any:
    """Open a file of Arrow, or a directory of them; the options are those of :func:`open_parquet`.

    Numbers of one record batch that are not compressed are mapped. Others are decoded in record batches. With the mode
    ``"r+"``, writes reach the file: all leaves must be mapped, and one location is one file.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.arrow")
    >>> open_arrow("data.arrow", mode="r+")["x"].zero_().sum()
    tensor(0)
    """
    return _Opening(location, "arrow", mode, cache_bytes).open(keys, separator, strict)


def create_arrow(like: Any, location: Any, *, durable: bool = False) -> Any:
    """Write a file of Arrow with zeros in the structure of a collection, and open it for writing.

    Raises:
        FileExistsError: something is at the location.
        UnsupportedOperationError: a leaf is a bool or has no fixed size, so that it cannot be written in place.
    """
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


class _Opening:
    """Opens one location."""

    def __init__(self, location: Any, name: str, mode: str, cache_bytes: int) -> None:
        check_mode(mode)
        if type(cache_bytes) is not int or cache_bytes < 0:
            raise ValueError(f"cache_bytes is a number of bytes, 0 or more; got {cache_bytes!r:.100}")
        self.path, self.name, self.mode, self.cache = refuse_url(location, "open"), name, mode, cache_bytes
        if mode == "r+" and (name == "parquet" or is_directory(self.path)):
            kind = "a Parquet file" if name == "parquet" else "a directory of tables"
            raise UnsupportedOperationError(
                f"cannot open {self.path} with mode='r+': {kind} cannot be changed in place; open it with mode='c', or save "
                "again"
            )

    def open(self, keys: Any, separator: str | None, strict: bool | None) -> Any:
        paths = [path for path, _ in list_parts(self.path)] if is_directory(self.path) else [self.path]
        stamps = [stamp_file(path) for path in paths]
        with open_tables(self.path, self.name, strict=strict) as table:
            tables = getattr(table, "tables", [table])
            self._files = tuple(
                GroupedFile(os.path.abspath(path), stamp, tuple(part.groups))
                for path, stamp, part in zip(paths, stamps, tables, strict=True)
            )
            self._known = [list_fields(part.schema, part.where) for part in tables]
            self._table, self._fields = table, list_fields(table.schema, table.where)
            reader = make_reader("auto", "auto", "jagged", "values", "values", None, table.schema)
            self._shapes = reader.shapes
            rows = sum(table.groups)
            result = read_collection(
                table.schema,
                rows,
                self._fetch,
                reader,
                table.where,
                keys=keys,
                separator=separator,
                strict=strict,
            )
            for path, stamp in zip(paths, stamps, strict=True):
                check_stamp(path, stamp)
        if self.mode == "c":
            return result
        result = result.lock_()
        if self.mode == "r+":
            refuse_values(result, self.path)
        return result

    def _fetch(self, paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
        eager = []
        for path in paths:
            leaf = self._open_column(path)
            if leaf is None:
                eager.append(path)
            else:
                yield path, leaf
        yield from self._table.read(eager)

    def _open_column(self, path: Path) -> Tensor | None:
        """Return a leaf that is read when it is used; None for a column that must be read now."""
        field = self._fields[path]
        dense = find_form(field, path, self._shapes)
        if dense is None or any(path not in known for known in self._known):
            return None
        if self.name == "arrow":
            mapped = self._map_column(path, dense)
            if mapped is not None:
                return mapped
            self._check_mode(path)
        elif self._may_be_refused(path, field, dense):
            return None
        rows = sum(sum(file.groups) for file in self._files)
        if not rows or 0 in dense.shape:
            return None
        source = GroupSource(
            self.name, self._files, path, field, (rows, *dense.shape), dense.dtype, self.cache
        )
        return StoredTensor(source, mode="c" if self.mode == "c" else "r+")

    def _check_mode(self, path: Path) -> None:
        """Raise UnsupportedOperationError for a column that is not mapped, if it must be written."""
        if self.mode == "r+":
            raise UnsupportedOperationError(
                f"{self.path}: column {show_column(path)} cannot be written in place: it is compressed, has nulls, bools or "
                "several record batches; open it with mode='c', or leave it out with keys="
            )

    def _may_be_refused(self, path: Path, field: Any, dense: Dense) -> bool:
        """Return True for a column of integers that can have nulls, as far as its statistics say."""
        if not field.nullable or dense.dtype.is_floating_point or dense.dtype.is_complex:
            return False
        tables = getattr(self._table, "tables", [self._table])
        chunks = [chunk for table in tables for chunk in table.list_chunks(path)]
        return any(chunk.statistics is None or chunk.statistics.null_count for chunk in chunks)

    def _map_column(self, path: Path, dense: Dense) -> Tensor | None:
        if len(self._files) > 1 or len(self._files[0].groups) != 1:
            return None
        leaf = view_column(self._table, path, dense)
        if leaf is None or self.mode == "c":
            return leaf
        place = (self._files[0].path, self._files[0].stamp, path, dense)
        if self.mode == "r":
            return as_mapped(leaf, rebuild_column, *place[:3], tuple(dense))
        return StoredTensor(MappedColumn(*place[:3], tuple(dense), leaf.shape, leaf.dtype))


def view_column(table: ArrowTable, path: Path, dense: Dense) -> Tensor | None:
    """Return a leaf that is a view of a mapped file; None if it is compressed, or has nulls or bits."""
    array = next(get_columns(table.whole, [path]))[1].chunk(0)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_fixed_size_binary(array.type):
        numbers, valid = array, array.null_count == 0
    else:
        numbers, levels = peel(array)
        valid = not numbers.null_count and all(level is None for level in levels)
    buffer = numbers.buffers()[1]
    if not valid or dense.stored == torch.bool or buffer is None or table.mapped is None:
        return None
    if not is_inside(buffer, table.mapped):
        return None
    width, count = dense.stored.itemsize, len(numbers)
    if pa.types.is_fixed_size_binary(numbers.type):
        width, count = numbers.type.byte_width, count * math.prod(dense.stored_shape)
    begin = numbers.offset * width
    leaf = convert(view_buffer(buffer, dense.stored, count, begin, None, table.mapped), dense)
    return leaf if not count or leaf.data_ptr() == buffer.address + begin else None


def _map_again(path: str, stamp: Stamp, column: Path, form: tuple[Any, ...], shared: bool) -> Tensor:
    if shared:  # what was written has changed the time of the last write
        check_stamp(path, stamp, written=True)
    else:
        check_stamp(path, stamp)
    table = ArrowTable(map_path(path, shared=shared), path, check=False)
    leaf = view_column(table, column, Dense(*form))
    if leaf is None:
        raise UnsupportedOperationError(f"{path}: column {show_column(column)} cannot be mapped")
    return leaf


@set_module("td_arrow.arrow_pickles")
def rebuild_column(path: str, stamp: Stamp, column: Path, form: tuple[Any, ...]) -> Tensor:
    """Map a column again, in another process.

    Raises:
        FormatError: the file has changed since it was opened.
    """
    return as_mapped(_map_again(path, stamp, column, form, False), rebuild_column, path, stamp, column, form)


@set_module("td_arrow.arrow_pickles")
class MappedColumn(MappedSource):
    """A column of a file of Arrow that is opened for writing."""

    def __init__(
        self,
        path: str,
        stamp: Stamp,
        column: Path,
        form: tuple[Any, ...],
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        self.path, self.stamp, self.column, self.form = path, stamp, column, form
        self.shape, self.dtype = shape, dtype

    def _open(self) -> Tensor:
        return _map_again(self.path, self.stamp, self.column, self.form, True)

    def __reduce__(self) -> Any:
        return MappedColumn, (self.path, self.stamp, self.column, self.form, self.shape, self.dtype)
