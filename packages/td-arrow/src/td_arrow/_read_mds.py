"""Read data sets of mosaicml-streaming (MDS), without that library."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from td_core import NestedKey, TensorDict, lazy_stack
from td_core.errors import FormatError, StructureError
from td_core.spi import parse_json
from td_core.typing import DeviceType

from ._from_arrow import read_in_memory
from ._mds_encodings import decode_cells, find_size, is_known
from ._mds_shards import read_offsets, unpack_shard
from ._read_columns import is_list
from ._table_header import read_facts
from ._table_locations import is_url, open_input
from ._text_schemas import build_column, find_item

#: The version of the header of the index.
_VERSION = 1


def from_mds(
    path: Any,
    *,
    split: str = "",
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a data set of mosaicml-streaming.

    Columns of arrays of one shape are dense leaves, others jagged ones, or a lazy stack if their numbers of dims differ. Images
    are bytes.

    Args:
        path: a directory, or the URL of one.
        split: a directory below it.
        device: where the leaves go.
        keys: keys or key paths to load.
        rows: index of the samples: an int, a slice or positions. Only their shards are read.
        storage_options: arguments of the file system of fsspec, for a URL.

    Raises:
        FileNotFoundError: there is no index.
        FormatError: the data set is damaged, or a column is a pickle, which can run any code.

    >>> TensorDict({"x": torch.arange(3), "name": ["a", "b", "c"]}, [3]).to_mds(out="samples")
    >>> list(from_mds("samples", rows=slice(1, None))["name"])
    ['b', 'c']
    """
    folder = (
        f"{path}/{split}"
        if is_url(path) and split
        else os.path.join(os.fspath(path), split)
        if split
        else path
    )
    reader = _Folder(folder, storage_options)
    index = reader.read_index()
    shards = index["shards"]
    total = sum(shard["samples"] for shard in shards)
    positions = np.arange(total)
    picked = positions if rows is None else positions[_as_index(rows)]
    cells = reader.read_cells(shards, np.atleast_1d(picked))
    schema = _read_schema(index, reader.where)
    if schema is not None:
        result = _build_from_header(cells, schema, len(np.atleast_1d(picked)), keys, reader.where)
    else:
        result = _build(cells, len(np.atleast_1d(picked)))
        result = (
            result if keys is None else result.select(*([keys] if isinstance(keys, (str, tuple)) else keys))
        )
    result = result if np.ndim(picked) else result[0]
    return result if device is None else result.to(device)


def _as_index(rows: Any) -> Any:
    return rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows


class _Folder:
    """A directory of shards, local or at a URL."""

    def __init__(self, folder: Any, options: Mapping[str, Any] | None) -> None:
        self.where, self._options = os.fspath(folder), options

    def _read_file(self, name: str) -> bytes:
        path = f"{self.where}/{name}" if is_url(self.where) else os.path.join(self.where, name)
        with open_input(path, self._options) as file:
            content: bytes = file.read()
        return content

    def read_index(self) -> dict[str, Any]:
        """Return the index; raise FormatError if it is malformed."""
        where = f"{self.where}/index.json"
        try:
            index = parse_json(self._read_file("index.json").decode())
            if index["version"] != 2:
                raise FormatError(f"{where} has the version {index['version']!r:.100}; expected 2")
            for shard in index["shards"]:
                _check_shard(shard, index["shards"][0], where)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{where} is damaged: {error!r:.200}") from error
        found: dict[str, Any] = index
        return found

    def read_cells(self, shards: Sequence[Mapping[str, Any]], picked: Any) -> dict[str, tuple[str, Any]]:
        """Return encoding and cells of each column for some positions of samples."""
        if not shards:
            return {}
        names, encodings = shards[0]["column_names"], shards[0]["column_encodings"]
        sizes = [find_size(encoding) for encoding in encodings]
        pieces: list[Any] = [
            [None] * len(picked) if size is None else np.empty((len(picked), size), np.uint8)
            for size in sizes
        ]
        first = 0
        for shard in shards:
            places = np.flatnonzero((picked >= first) & (picked < first + shard["samples"]))
            if len(places):
                for column, cells in zip(
                    pieces, self._read_shard(shard, picked[places] - first, sizes), strict=True
                ):
                    if isinstance(column, np.ndarray):
                        column[places] = cells
                        continue
                    for place, cell in zip(places.tolist(), cells, strict=True):
                        column[place] = cell
            first += shard["samples"]
        result = {}
        for number, (name, encoding) in enumerate(zip(names, encodings, strict=True)):
            try:
                result[name] = encoding, decode_cells(encoding, pieces[number])
            except FormatError as error:
                raise FormatError(f"{self.where}: column {name!r}: {error}") from error
        return result

    def _read_shard(self, shard: Mapping[str, Any], wanted: Any, sizes: Sequence[int | None]) -> list[Any]:
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
        if None not in sizes:
            return _split_fixed(content, offsets, wanted, [size or 0 for size in sizes], where)
        view = memoryview(content)
        samples = [_split_sample(view[offsets[i] : offsets[i + 1]], sizes, where) for i in wanted.tolist()]
        columns: list[Any] = [*map(list, zip(*samples, strict=True))]
        return [
            cells if size is None else np.frombuffer(b"".join(cells), np.uint8).reshape(len(cells), size)
            for cells, size in zip(columns, sizes, strict=True)
        ]


def _split_fixed(content: bytes, offsets: Any, wanted: Any, sizes: Sequence[int], where: str) -> list[Any]:
    """Return the columns of samples of one size."""
    if (np.diff(offsets) != sum(sizes)).any():
        raise FormatError(f"{where} is damaged: the cells of a sample are not those of its columns")
    samples = np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]].reshape(len(offsets) - 1, sum(sizes))
    ends = np.cumsum(sizes).tolist()
    return [samples[wanted, end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _split_sample(sample: Any, sizes: Sequence[int | None], where: str) -> list[Any]:
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


def _check_shard(shard: Mapping[str, Any], first: Mapping[str, Any], where: str) -> None:
    """Raise an error if the index is malformed, or a column cannot be read."""
    if shard["format"] != "mds" or shard["version"] != 2:
        raise FormatError(
            f"{where}: a shard has the format {shard['format']!r:.100}; expected 'mds' of version 2"
        )
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
    if type(shard["samples"]) is not int or shard["samples"] < 0:
        raise ValueError(f"a shard has {shard['samples']!r:.100} samples")
    for file in filter(None, (shard["raw_data"], shard.get("zip_data"))):
        name = file["basename"]
        if not isinstance(name, str) or name in ("", ".", "..") or {*"/\\:\0"} & {*name}:
            raise FormatError(f"{where}: a shard is called {name!r:.100}, which is not the name of a file")
        if type(file["bytes"]) is not int:
            raise ValueError(f"the file {name!r} has {file['bytes']!r:.100} bytes")


def _read_schema(index: Mapping[str, Any], where: str) -> Any:
    """Return the schema of the table that was written; None if another program wrote the data set."""
    header = index.get("td")
    if header is None:
        return None
    try:
        if header["version"] != _VERSION:
            raise FormatError(
                f"{where}: the td header has the version {header['version']!r:.100}; upgrade td-arrow"
            )
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(header["schema"])))
    except (ValueError, LookupError, TypeError, OSError, pa.ArrowException) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{where}: the td header of the index is damaged: {type(error).__name__}"
        ) from error


def _build_from_header(
    cells: Mapping[str, tuple[str, Any]], schema: Any, rows: int, keys: Any, where: str
) -> Any:
    """Return the collection of columns that td has written."""
    if not cells and not rows:
        return read_in_memory(schema.empty_table(), where, keys=keys)
    items = [item for item in schema if item.name in cells]
    arrays = []
    for item in items:
        try:
            arrays.append(_build_array(cells[item.name][1], item))
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise FormatError(f"{where}: column {item.name!r} is not what the td header says") from error
    others = {name: cells[name][1] for name in cells if name not in schema.names}
    table = pa.Table.from_arrays(arrays, schema=pa.schema(items, schema.metadata))
    result = read_in_memory(table, where, keys=keys)
    for name, each in others.items() if keys is None else ():
        result.set(name, _make_entry(each, rows))
    return result


def _build_array(cells: Any, item: Any) -> Any:
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
        return build_column(list(cells), item)
    return pa.array(cells, item.type)


def _build(cells: Mapping[str, tuple[str, Any]], rows: int) -> Any:
    """Return the collection of columns that another program has written."""
    result = TensorDict({}, [rows])
    for name, (_, each) in cells.items():
        result.set(name, _make_entry(each, rows))
    return result


def _make_entry(cells: Any, rows: int) -> Any:
    """Return the entry of the cells of a column."""
    if isinstance(cells, np.ndarray):
        return torch.from_numpy(cells)
    if cells and all(isinstance(cell, np.ndarray) for cell in cells):
        leaves = [torch.from_numpy(cell) for cell in cells]
        try:
            return TensorDict({"data": leaves}, [rows])["data"]
        except StructureError:
            return lazy_stack([TensorDict({"data": leaf}) for leaf in leaves])
    if cells and all(type(cell) in (int, float) for cell in cells):
        return torch.tensor(
            cells, dtype=torch.int64 if all(type(cell) is int for cell in cells) else torch.float64
        )
    return TensorDict({"data": cells}, [rows]).get("data")
