"""Datasets, groups and attributes of HDF5 files: create, write, read and locate them. Independent of collections.

The low-level interface of h5py is used where it is faster: a small dataset takes a third of the time.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import parse_json
from td_store.arrays import PlannedArray

from ._h5_files import H5_ERRORS, convert_errors, show_error

#: The dtypes of torch that HDF5 has, with the numpy dtype of their elements.
NATIVE: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        "bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip
_TORCH = {numpy: torch_ for torch_, numpy in NATIVE.items()}
#: The types of HDF5 for these dtypes, in the byte order of this machine.
_TYPES = {dtype: h5py.h5t.py_create(numpy, logical=True) for dtype, numpy in NATIVE.items()}

#: Attributes of the root: the JSON header in pieces, since an attribute has at most 64 kB, and its CRC-32.
_PIECE = 60_000
#: Datasets of at least this many bytes are not filled with zeros by HDF5: the end of a new file is zero anyway.
_LARGE = 1 << 20
#: Elements of datasets are aligned in a new file, so that they can be mapped.
_ALIGNMENT = 64


class Array(NamedTuple):
    """Dtype and shape of a dataset, as the header of a save lists them."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class DatasetOptions:
    """Options of datasets; :func:`td_hdf5.save` describes them."""

    chunks: int | tuple[int, ...] | bool | None = None
    compression: str | int | None = None
    compression_opts: object = None
    shuffle: bool | None = None
    fletcher32: bool | None = None


def list_arrays(arrays: Mapping[str, Array | PlannedArray]) -> dict[str, list[object]]:
    """Return dtype and shape of datasets or planned arrays, as the header has them."""
    return {
        name: [str(array.dtype).removeprefix("torch."), list(array.shape)] for name, array in arrays.items()
    }


def create_file(path: str, access: h5py.h5p.PropFAID) -> h5py.h5f.FileID:
    """Create an HDF5 file, or empty one that exists, and return its ``FileID``."""
    access.set_alignment(_ALIGNMENT, _ALIGNMENT)
    access.set_file_locking(False, True)  # the temporary file is locked already
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    return h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, creation, access)


def create_group(parent: h5py.h5g.GroupID, name: str) -> h5py.h5g.GroupID:
    """Create a group that keeps the order of its links, and return its ``GroupID``."""
    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    return h5py.h5g.create(parent, name.encode(), gcpl=creation)


def escape_key(key: str) -> str:
    """Return the name of a link for a key: HDF5 excludes ``/``, NUL, an empty name and the names ``.`` and ``..``.

    >>> escape_key("a/b"), escape_key(".."), escape_key("")
    ('a%2Fb', '%2E%2E', '%')
    """
    if not key:
        return "%"
    if not key.strip("."):
        return key.replace(".", "%2E") if len(key) < 3 else key
    name = key.replace("/", "%2F").replace("\0", "%00")
    # UTF-8 cannot store a surrogate without its pair.
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def choose_chunks(shape: Sequence[int], itemsize: int, chunks: Any) -> tuple[int, ...] | None:
    """Return the shape of the chunks of a dataset: sizes of the first dims, whole rows in the others; None if it has none.

    ``chunks`` is an int or a sequence of sizes of the first dims, or True for chunks of about 1 MB.
    """
    if chunks is None or chunks is False or not shape or 0 in shape:
        return None
    if chunks is True:
        row = math.prod(shape[1:]) * itemsize
        return (min(shape[0], max(1, (1 << 20) // max(row, 1))), *shape[1:])
    sizes = [chunks] if isinstance(chunks, int) else list(chunks)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"chunks are True, or positive sizes of the first dims; got {chunks!r}")
    return tuple(
        min(n, size) for n, size in zip(shape, [*sizes[: len(shape)], *shape[len(sizes) :]], strict=True)
    )


def create_dataset(
    parent: h5py.h5g.GroupID,
    name: str,
    array: Array,
    options: Mapping[str, object],
    *,
    names: Sequence[str | None] = (),
) -> h5py.h5d.DatasetID:
    """Create a dataset.

    Args:
        parent: the group or file.
        name: name of the link.
        array: dtype and shape.
        options: ``chunks``, as for :func:`choose_chunks`, and the filters of ``h5py.Group.create_dataset``. The first dim of a
            dataset with chunks can grow. A dataset without elements or without dims has none.
        names: labels of the first dims.
    """
    dtype, shape = NATIVE[array.dtype], array.shape
    chunks = choose_chunks(shape, dtype.itemsize, options.get("chunks"))
    filters = {key: value for key, value in options.items() if key != "chunks" and value is not None}
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    if filters and shape and 0 not in shape:
        chunks = chunks or choose_chunks(shape, dtype.itemsize, True)
        dataset = (
            h5py.Group(parent)
            .create_dataset(
                name, shape, dtype, chunks=chunks, maxshape=(None, *shape[1:]), track_times=False, **filters
            )
            .id
        )
    else:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_obj_track_times(False)
        if chunks is not None:
            creation.set_chunk(chunks)
            space = h5py.h5s.create_simple(shape, (h5py.h5s.UNLIMITED, *shape[1:]))
        elif array.nbytes:
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            if array.nbytes >= _LARGE:
                creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        dataset = h5py.h5d.create(parent, name.encode(), _TYPES[array.dtype], space, creation)
    for dim, label in enumerate(names):
        if label is not None:
            h5py.h5ds.set_label(dataset, dim, label.encode())
    return dataset


def write_part(dataset: h5py.h5d.DatasetID, value: Tensor, part: Sequence[slice] | None = None) -> None:
    """Write a contiguous CPU tensor into a dataset, or into a part of it."""
    data = value.numpy()
    if part is None or not part:
        if value.numel():
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, data)
        return
    memory, space = _select(dataset, part)
    dataset.write(memory, space, data)


def read_part(dataset: h5py.h5d.DatasetID, part: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """Read a part of a dataset into a new tensor."""
    shape = [len(range(item.start, item.stop, item.step)) for item in part]
    result = torch.empty(shape, dtype=dtype)
    if part:
        memory, space = _select(dataset, part)
        dataset.read(memory, space, result.numpy(), _TYPES[dtype])
    else:
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, result.numpy(), _TYPES[dtype])
    return result


def read_positions(
    dataset: h5py.h5d.DatasetID, part: Sequence[slice], dim: int, positions: Tensor, dtype: torch.dtype
) -> Tensor:
    """Read a part of a dataset at increasing positions of one dim into a new tensor, each chunk once."""
    shape = [len(range(item.start, item.stop, item.step)) for item in part]
    starts, counts, steps = [item.start for item in part], list(shape), tuple(item.step for item in part)
    shape[dim] = len(positions)
    space = dataset.get_space()
    space.select_none()
    ends = (positions.diff() > 1).nonzero().flatten() + 1
    runs = zip(
        positions[[0, *ends.tolist()]].tolist(), positions[[*(ends - 1).tolist(), -1]].tolist(), strict=True
    )
    for first, last in runs:
        starts[dim], counts[dim] = first, last - first + 1
        space.select_hyperslab(tuple(starts), tuple(counts), steps, op=h5py.h5s.SELECT_OR)
    result = torch.empty(shape, dtype=dtype)
    dataset.read(h5py.h5s.create_simple(tuple(shape)), space, result.numpy(), _TYPES[dtype])
    return result


def _select(dataset: h5py.h5d.DatasetID, part: Sequence[slice]) -> tuple[h5py.h5s.SpaceID, h5py.h5s.SpaceID]:
    counts = tuple(len(range(item.start, item.stop, item.step)) for item in part)
    space = dataset.get_space()
    space.select_hyperslab(tuple(item.start for item in part), counts, tuple(item.step for item in part))
    return h5py.h5s.create_simple(counts), space


def read_whole(dataset: h5py.h5d.DatasetID, target: Tensor) -> None:
    """Read a dataset into a contiguous CPU tensor of its shape."""
    if target.numel():
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, target.numpy(), _TYPES[target.dtype])


def find_array(
    file: object, name: str, path: str, wanted: Array | None = None, home: object = None
) -> tuple[h5py.h5d.DatasetID, Array]:
    """Return the dataset of a name, and its dtype and shape, which is faster if they are those of ``wanted``.

    ``home`` is the number of the file, if it is known. FormatError: the dataset is missing, damaged or in another file.
    """
    try:
        dataset = h5py.h5d.open(file, name.encode())
        why = find_elsewhere(dataset, get_file_number(file) if home is None else home)
        is_known = (
            wanted is not None
            and dataset.shape == wanted.shape
            and dataset.get_type().equal(_TYPES[wanted.dtype])
        )
    except H5_ERRORS as error:
        raise FormatError(
            f"{path}: the dataset {name!r} is missing or damaged: {show_error(error)}"
        ) from error
    if why is not None:
        raise FormatError(f"{path}: the dataset {name!r} is not read: {why}")
    return dataset, wanted if wanted is not None and is_known else describe(dataset, name, path)


def describe(dataset: h5py.h5d.DatasetID, name: str, path: str) -> Array:
    """Return dtype and shape of a dataset, the dtype in the byte order of this machine."""
    with convert_errors(f"{path}: the dataset {name!r}"):
        numpy, shape = dataset.dtype.newbyteorder("="), tuple(dataset.shape)
    if numpy not in _TORCH:
        raise FormatError(
            f"{path}: the dataset {name!r} has the dtype {dataset.dtype}, which torch does not have"
        )
    return Array(_TORCH[numpy], shape)


def can_hold(found: Array, wanted: Array) -> bool:
    """Return True if a dataset has more rows than an array, of the same dtype and shape."""
    return (
        found.dtype == wanted.dtype
        and len(found.shape) == len(wanted.shape) > 0
        and found.shape[1:] == wanted.shape[1:]
        and found.shape[0] > wanted.shape[0]
    )


def get_file_number(item: object) -> Any:
    """Return the number of the file that a group or dataset is in: a link can lead to another one."""
    return h5py.h5g.get_objinfo(item, b".").fileno


def find_elsewhere(dataset: h5py.h5d.DatasetID, home: object) -> str | None:
    """Return why the elements of a dataset are not in the file with the number ``home``, or None."""
    if (
        dataset.get_offset() is None
    ):  # which is faster than the property list, and is known only for elements in the file
        creation = dataset.get_create_plist()
        if creation.get_layout() == h5py.h5d.VIRTUAL:
            return "it is virtual, its elements are those of other datasets"
        if creation.get_external_count():
            return f"its elements are in another file, {os.fsdecode(creation.get_external(0)[0])!r}"
    return None if get_file_number(dataset) == home else "a link leads to it in another file"


def locate(dataset: h5py.h5d.DatasetID, array: Array, size: int) -> int | None:
    """Return the position in the file of the elements of a contiguous dataset, in the byte order of this machine; else None.

    ``size`` is the size of the file, beyond which no elements can lie.
    """
    if dataset.get_offset() is None:  # which it is for other layouts
        return None
    if not dataset.get_type().equal(_TYPES[array.dtype]) and not dataset.dtype.isnative:
        return None
    offset = dataset.get_offset()
    if offset is None or not array.nbytes or dataset.get_storage_size() != array.nbytes:
        return None
    return int(offset) if offset + array.nbytes <= size else None


def describe_storage(dataset: h5py.h5d.DatasetID) -> str:
    """Return how the elements of a dataset are stored, for people."""
    creation = dataset.get_create_plist()
    layout = creation.get_layout()
    if layout == h5py.h5d.CONTIGUOUS:
        begin = dataset.get_offset()
        return "contiguous" if begin is None else f"{begin}-{begin + dataset.get_storage_size()}"
    if layout != h5py.h5d.CHUNKED:
        return "compact" if layout == h5py.h5d.COMPACT else "virtual"
    filters = [creation.get_filter(i)[3].decode() for i in range(creation.get_nfilters())]
    return ", ".join(
        [f"chunks {list(creation.get_chunk())}", *filters, f"{dataset.get_storage_size()} bytes"]
    )


def count_links(file: object, name: str) -> int:
    """Return the number of links in a group."""
    return int(h5py.h5g.open(file, name.encode() or b".").get_num_objs())


def write_header(file: object, header: Mapping[str, object]) -> None:
    """Write a header into the attributes of a file or group, in the place of the header that it has."""
    text = json.dumps(header, separators=(",", ":")).encode()
    root = h5py.h5g.open(file, b".")
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    _write_text(root, b"td.crc", b"%08x" % zlib.crc32(text))
    for number, piece in enumerate(pieces):
        _write_text(root, b"td.%d" % number, piece)
    number = len(pieces)
    while h5py.h5a.exists(root, b"td.%d" % number):
        h5py.h5a.delete(root, b"td.%d" % number)
        number += 1


def write_text(owner: object, name: str, text: str) -> None:
    """Write an attribute of text, in the place of one that exists."""
    _write_text(owner, name.encode(), text.encode())


def _write_text(owner: object, name: bytes, text: bytes) -> None:
    if h5py.h5a.exists(owner, name):
        h5py.h5a.delete(owner, name)
    data = np.array(text)
    attribute = h5py.h5a.create(owner, name, h5py.h5t.py_create(data.dtype), h5py.h5s.create(h5py.h5s.SCALAR))
    attribute.write(data)


def read_header(file: object, path: str) -> Any:
    """Return the header in the attributes of a file or group, None if there is none; FormatError if it is damaged."""
    with convert_errors(f"{path}: the td header"):
        root = h5py.h5g.open(file, b".")
        if not h5py.h5a.exists(root, b"td.0"):
            return None
        pieces: list[bytes] = []
        while h5py.h5a.exists(root, b"td.%d" % len(pieces)):
            pieces.append(_read_text(root, b"td.%d" % len(pieces)))
        text, checksum = b"".join(pieces), _read_text(root, b"td.crc")
        if checksum != b"%08x" % zlib.crc32(text):
            raise FormatError(f"{path}: the td header is damaged: its checksum differs")
        return parse_json(text.decode())


def _read_text(owner: object, name: bytes) -> bytes:
    attribute = h5py.h5a.open(owner, name)
    data = np.empty((), f"S{attribute.get_type().get_size()}")
    attribute.read(data)
    return bytes(data[()])


def iter_parts(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of an array with the most rows that have at most ``limit`` bytes."""
    if not shape:
        yield ()
        return
    rows = max(1, limit // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0]), 1), *(slice(0, n, 1) for n in shape[1:]))
