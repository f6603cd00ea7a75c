"""Read data sets of mosaicml-streaming (MDS), without that library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from td_core import NestedKey, TensorDict, lazy_stack
from td_core.errors import FormatError, StructureError
from td_core.spi import parse_json
from td_core.typing import DeviceType

from ._arrow_types import Facts, is_list
from ._from_arrow import read_in_memory
from ._mds_encodings import Bytes, decode_cells, find_size, is_known
from ._mds_shards import Ints, read_offsets, unpack_shard
from ._table_header import read_facts
from ._table_locations import StorageOptions, is_url, open_input
from ._text_schemas import build_column, find_item, parse_schema, report_misfit


def read_mds(
    path: Any,
    split: str,
    device: DeviceType | None,
    keys: Iterable[NestedKey] | NestedKey | None,
    rows: Any,
    storage_options: StorageOptions,
) -> Any:
    """Load a data set; see :func:`td_arrow.from_mds`."""
    folder = _Folder(os.fspath(path), storage_options)
    if split:
        folder = _Folder(folder.join(split), storage_options)
    index = folder.read_index()
    picked = np.arange(sum(shard["samples"] for shard in index["shards"]))
    if rows is not None:
        picked = picked[rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows]
    cells = folder.read_cells(index["shards"], np.atleast_1d(picked))
    count = np.size(picked)
    if index.get("td") is None:
        result = TensorDict({name: _make_entry(each, count) for name, each in cells.items()}, [count])
        if keys is not None:
            result = result.select(*([keys] if isinstance(keys, (str, tuple)) else keys))
    else:
        schema = parse_schema(index["td"], f"{folder.where}: the td header of the index")
        result = _build_from_header(cells, schema, count, keys, folder.where)
    result = result if np.ndim(picked) else result[0]
    return result if device is None else result.to(device)


class _Folder:
    """A directory of shards, local or at a URL."""

    def __init__(self, where: str, options: StorageOptions) -> None:
        self.where, self._options = where, options

    def join(self, name: str) -> str:
        """Return the location of a file."""
        return f"{self.where}/{name}" if is_url(self.where) else os.path.join(self.where, name)

    def _read_file(self, name: str) -> bytes:
        with open_input(self.join(name), self._options) as file:
            content: bytes = file.read()
        return content

    def read_index(self) -> Facts:
        """Return the index; raise FormatError if it is malformed."""
        where = f"{self.where}/index.json"
        try:
            index: Facts = parse_json(self._read_file("index.json").decode())
            if index["version"] != 2:
                raise FormatError(f"{where} has the version {index['version']!r:.100}; expected 2")
            for shard in index["shards"]:
                _check_columns(shard, index["shards"][0], where)
                _check_shard(shard, where)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{where} is damaged: {error!r:.200}") from error
        return index

    def read_cells(self, shards: Sequence[Facts], picked: Ints) -> Facts:
        """Return the cells of each column for some positions of samples."""
        if not shards:
            return {}
        encodings = shards[0]["column_encodings"]
        sizes = [find_size(encoding) for encoding in encodings]
        pieces: list[Any] = [
            np.empty(len(picked), object) if size is None else np.empty((len(picked), size), np.uint8)
            for size in sizes
        ]
        first = 0
        for shard in shards:
            places = np.flatnonzero((picked >= first) & (picked < first + shard["samples"]))
            if len(places):
                found = self._read_shard(shard, picked[places] - first, sizes)
                for column, cells in zip(pieces, found, strict=True):
                    column[places] = cells
            first += shard["samples"]
        result = {}
        for name, encoding, cells in zip(shards[0]["column_names"], encodings, pieces, strict=True):
            try:
                result[name] = decode_cells(encoding, cells)
            except FormatError as error:
                raise FormatError(f"{self.where}: column {name!r}: {error}") from error
        return result

    def _read_shard(self, shard: Facts, wanted: Ints, sizes: Sequence[int | None]) -> list[Any]:
        """Return for each column the bytes of the cells of some samples of a shard: a matrix if all have one size."""
        packed = shard.get("zip_data")
        info, is_packed = (packed, True) if packed else (shard["raw_data"], False)
        try:
            data = self._read_file(info["basename"])
        except FileNotFoundError:
            if not is_packed:
                raise
            # The library keeps the shards that it has unpacked.
            info, is_packed = shard["raw_data"], False
            data = self._read_file(info["basename"])
        where = f"{self.where}/{info['basename']}"
        content = unpack_shard(shard, data, is_packed, where)
        offsets = read_offsets(content, shard["samples"], where)
        fixed = [size for size in sizes if size is not None]
        if len(fixed) == len(sizes):
            return _split_fixed(content, offsets, wanted, fixed, where)
        view = memoryview(content)
        samples = [_split_sample(view[offsets[i] : offsets[i + 1]], sizes, where) for i in wanted.tolist()]
        columns: list[Any] = []
        for cells, size in zip(zip(*samples, strict=True), sizes, strict=True):
            column: Any = np.empty(len(cells), object)
            column[:] = [bytes(cell) for cell in cells]
            if size is not None:
                column = np.frombuffer(b"".join(cells), np.uint8).reshape(len(cells), size)
            columns.append(column)
        return columns


def _split_fixed(
    content: bytes, offsets: Ints, wanted: Ints, sizes: Sequence[int], where: str
) -> list[Bytes]:
    """Return the columns of samples of one size."""
    if (np.diff(offsets) != sum(sizes)).any():
        raise FormatError(f"{where} is damaged: the cells of a sample are not those of its columns")
    samples = np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]].reshape(len(offsets) - 1, sum(sizes))
    ends = np.cumsum(sizes).tolist()
    return [samples[wanted, end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _split_sample(sample: memoryview, sizes: Sequence[int | None], where: str) -> list[memoryview]:
    """Return the bytes of the cells of a sample."""
    count = sum(size is None for size in sizes)
    lengths = iter(np.frombuffer(sample[: 4 * count], "<u4").tolist() if len(sample) >= 4 * count else ())
    begin, cells = 4 * count, []
    for size in sizes:
        end = begin + (next(lengths, len(sample) + 1) if size is None else size)
        cells.append(sample[begin:end])
        begin = end
    if begin != len(sample):
        raise FormatError(f"{where} is damaged: the cells of a sample are not those of its columns")
    return cells


def _check_columns(shard: Facts, first: Facts, where: str) -> None:
    """Raise an error for columns that cannot be read, or are not those of the first shard."""
    names, encodings = shard["column_names"], shard["column_encodings"]
    if [names, encodings] != [first["column_names"], first["column_encodings"]]:
        raise FormatError(f"{where}: its shards have several sets of columns")
    if len({*names}) < len(names) or len(names) != len(encodings):
        raise FormatError(f"{where}: two columns have one name, or columns lack an encoding")
    for name, encoding in zip(names, encodings, strict=True):
        if not isinstance(name, str) or not isinstance(encoding, str):
            raise TypeError(f"the column {name!r:.100} has the encoding {encoding!r:.100}")
        if encoding == "pkl":
            raise FormatError(
                f"{where}: column {name!r} is a pickle, which can run any code: td never loads it"
            )
        if not is_known(encoding):
            raise FormatError(
                f"{where}: column {name!r} has the encoding {encoding!r:.100}, which is unknown"
            )


def _check_shard(shard: Facts, where: str) -> None:
    """Raise an error for a shard of another format, or with names of files that leave the directory."""
    if shard["format"] != "mds" or shard["version"] != 2:
        raise FormatError(
            f"{where}: a shard has the format {shard['format']!r:.100}; expected 'mds' of version 2"
        )
    if type(shard["samples"]) is not int or shard["samples"] < 0:
        raise ValueError(f"a shard has {shard['samples']!r:.100} samples")
    for file in filter(None, (shard["raw_data"], shard.get("zip_data"))):
        name = file["basename"]
        if not isinstance(name, str) or name in ("", ".", "..") or {*"/\\:\0"} & {*name}:
            raise FormatError(f"{where}: a shard is called {name!r:.100}, which is not the name of a file")
        if type(file["bytes"]) is not int:
            raise ValueError(f"the file {name!r} has {file['bytes']!r:.100} bytes")


def _build_from_header(
    cells: Facts, schema: pa.Schema, rows: int, keys: Iterable[NestedKey] | NestedKey | None, where: str
) -> Any:
    """Return the collection of columns that td has written."""
    if not cells and not rows:
        return read_in_memory(schema.empty_table(), where, keys=keys)
    items = [item for item in schema if item.name in cells]
    arrays = []
    for item in items:
        with report_misfit(where, (item.name,), "the td header says"):
            arrays.append(_build_array(cells[item.name], item, where))
    table = pa.Table.from_arrays(arrays, schema=pa.schema(items, schema.metadata))
    result = read_in_memory(table, where, keys=keys)
    for name in cells if keys is None else ():
        if name not in schema.names:
            result.set(name, _make_entry(cells[name], rows))
    return result


def _build_array(cells: Any, item: pa.Field, where: str) -> pa.Array:
    inner = find_item(item)
    if isinstance(cells, np.ndarray):
        flat = cells.reshape(-1)
        array = pa.array(flat.astype(bool) if pa.types.is_boolean(inner.type) else flat)
        for size in reversed(cells.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array.cast(item.type)
    if is_list(item.type) and all(isinstance(cell, np.ndarray) for cell in cells):
        return pa.array([cell.tolist() for cell in cells], item.type)
    if pa.types.is_null(item.type):
        return pa.nulls(len(cells))
    if read_facts(item).get("json") or not pa.types.is_floating(inner.type):
        return build_column(list(cells), item, where)
    return pa.array(cells, item.type)


def _make_entry(cells: Any, rows: int) -> Any:
    """Return the entry of the cells of a column of another program."""
    if isinstance(cells, np.ndarray):
        return torch.from_numpy(cells)
    if cells and all(isinstance(cell, np.ndarray) for cell in cells):
        leaves = [torch.from_numpy(cell) for cell in cells]
        try:
            return TensorDict({"data": leaves}, [rows])["data"]
        except StructureError:
            return lazy_stack([TensorDict({"data": leaf}) for leaf in leaves])
    kinds = {*map(type, cells)}
    if kinds and kinds <= {int, float}:
        return torch.tensor(cells, dtype=torch.int64 if kinds == {int} else torch.float64)
    return TensorDict({"data": cells}, [rows]).get("data")
