"""Find the tensors of a save, in a file, in shards or at a URL, and the header that describes the collection; open files."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import (
    Encoded,
    Serializer,
    check_table,
    load_table,
    open_regular,
    parse_json,
)
from td_core.typing import ObjectInfo, ObjectLocation, Range
from td_store.arrays import ObjectReader, Place, RangeSource, compute_check, list_names, map_file, view_mapped

from ._byte_ranges import LocalReader, RemoteFile, open_objects
from ._format import DTYPES, MAX_HEADER, Array, Header, get_dtype, read_header
from ._reference import build_foreign_table, read_reference
from ._shards import INDEX, SINGLE, UNFINISHED, check_weight_map, choose_file

#: File systems whose mapped pages are fetched one by one over a network.
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "fuse")


class File:
    """An open file with its header, which maps and reads its tensors."""

    def __init__(self, path: str, fd: int, header: Header, *, shared: bool = False) -> None:
        self.path, self.fd, self.header, self.shared = path, fd, header, shared
        self._mapped: torch.UntypedStorage | None = None

    def map(self, name: str, array: Array) -> Tensor:
        """Return a tensor of the file, mapped; raise FormatError if this torch lacks its dtype."""
        get_dtype(name, array)
        if self._mapped is None:
            self._mapped = map_file(self.fd, shared=self.shared)
        return view_storage(self._mapped, array, self.header.start + array.begin)


def view_storage(storage: torch.UntypedStorage, array: Array, begin: int) -> Tensor:
    """Return the tensor at a position of a storage; it is copied if its elements are not aligned there."""
    return view_mapped(storage, DTYPES[array.dtype], array.shape, begin)


def open_file(path: str, fd: int, *, shared: bool = False) -> File:
    """Return an open file with its header."""
    return File(path, fd, read_header(partial(read_bytes, fd), os.fstat(fd).st_size, path), shared=shared)


#: File and position of each tensor, by name.
Arrays = dict[str, tuple["File | RemoteFile", Array]]


class Save:
    """An open save: its files, the tensors in them by name, and the header that describes the collection.

    Attributes:
        path: path of the file, or of the index of shards.
        arrays: file and position of each tensor.
        table: the table of nodes, with places as leaves.
        hashes: the hashes of the tensors as in the ``td`` header, or None.
        is_remote: whether the files are in an object store.
    """

    is_remote = False

    def __init__(self, path: str, arrays: Arrays, table: Encoded, hashes: object = None) -> None:
        self.path, self.arrays, self.table, self.hashes = path, arrays, table, hashes

    def map(self, name: str) -> Tensor:
        """Return a tensor of the save, mapped from its file, or read from its URL."""
        file, array = self.arrays[name]
        if isinstance(file, File):
            return file.map(name, array)
        get_dtype(name, array)
        return view_storage(file.read(array).untyped_storage(), array, 0)

    def make_opener(self, num_threads: int = 0) -> Callable[[str, Place], RangeSource]:
        """Return a function from the name of a tensor and a place to a source that reads ranges of bytes."""
        readers: dict[str, LocalReader | ObjectReader] = {}

        def open_array(name: str, place: Place) -> RangeSource:
            file, array = self.arrays[name]
            get_dtype(name, array)
            if file.path not in readers:
                readers[file.path] = (
                    LocalReader(file.fd, num_threads) if isinstance(file, File) else file.reader
                )
            begin = file.header.start + array.begin
            return RangeSource(readers[file.path], DTYPES[array.dtype], array.shape, begin, place)

        return open_array


@contextlib.contextmanager
def open_save(path: Any, storage_options: Mapping[str, object] | None = None) -> Iterator[Save]:
    """Open a file, an index, or a directory with one of them, and read its headers.

    The path can be a URL or an object store.
    """
    objects = Serializer.find_objects(path, storage_options)
    if objects is not None:
        save = _open_remote(objects)
        save.is_remote = True
        yield save
        return
    place = os.fspath(path)
    if os.path.isdir(place):
        place = os.path.join(place, choose_file(place, os.listdir(place)))
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(open_for_reading(place))
        if is_index(os.pread(fd, 9, 0)) or place.endswith(".json"):
            yield _open_shards(place, stack)
        else:
            yield _describe_file(open_file(place, fd))


def _describe_file(file: File | RemoteFile) -> Save:
    arrays: Arrays = {name: (file, array) for name, array in file.header.arrays.items()}
    return _describe(file.path, arrays, file.header.metadata)


def _open_remote(place: ObjectLocation) -> Save:
    """Open a file, or the shards of an index, in an object store."""
    first, where = place.first, place.where
    head = b"" if first is None else bytes(first[1][:9])
    if first is not None and (is_index(head) or where.endswith(".json")):
        return _open_remote_shards(place, first[0], place.find_folder())
    # A web server answers with a page for a directory.
    if first is not None and (head[8:] == b"{" or place.marks.isdisjoint((INDEX, SINGLE))):
        return _describe_file(RemoteFile(where, place.store, *first))
    name = choose_file(where, place.marks & {INDEX, SINGLE} or {info.name for info in place.store.list()})
    info = place.marked.get(name) or place.store.stat([name])[0]
    if info is None:
        raise FileNotFoundError(f"there is no safetensors file at {where}, and no {name!r} below it")
    if name.endswith(".json"):
        return _open_remote_shards(place, info, place)
    return _describe_file(open_objects(place, [name])[0])


def _open_remote_shards(place: ObjectLocation, info: ObjectInfo, folder: ObjectLocation) -> Save:
    """Open the shards of an index; all their headers are read together."""
    path = f"{place.where.rstrip('/')}/{info.name}" if info.name else place.where
    if info.size > MAX_HEADER:
        raise FormatError(f"{path} is too long for an index of shards: it has {info.size} bytes")
    content = place.store.read([Range(info.name, 0, info.size, info.stamp)])[0]
    index = parse_json(bytes(content), path)
    weights = check_weight_map(index, path)
    if UNFINISHED in index:
        raise FormatError(f"{path}: a save to this location has not ended: save it again")
    names = list(dict.fromkeys(weights.values()))
    try:
        files = dict(zip(names, open_objects(folder, names), strict=True))
    except FileNotFoundError as error:
        raise FormatError(f"{path}: a shard that it names is missing: {error}") from error
    return _describe(path, _open_weight_map(weights, path, files.__getitem__), _read_metadata(index))


def _read_metadata(index: dict[str, object]) -> dict[str, str]:
    return {"td": json.dumps(index["td"])} if "td" in index else {}


def is_index(head: bytes) -> bool:
    """Return True if a file begins like JSON, and not like a safetensors file, whose header begins at byte 8."""
    return head[:1] == b"{" and head[8:9] != b"{"


def _open_shards(path: str, stack: contextlib.ExitStack) -> Save:
    """Open the shards of an index. Start again if another process replaces the index meanwhile."""
    while True:
        with open_for_reading(path) as fd, contextlib.ExitStack() as opened:
            before = os.fstat(fd)
            if before.st_size > MAX_HEADER:
                raise FormatError(f"{path} is too long for an index of shards: it has {before.st_size} bytes")
            index = parse_json(read_bytes(fd, before.st_size, 0), path)
            try:
                weights = check_weight_map(index, path)
                arrays = _open_weight_map(weights, path, partial(_open_shard, path, opened))
            except FileNotFoundError as error:
                now = os.stat(path)
                if (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
                    continue
                raise FormatError(f"{path}: a shard that it names is missing: {error.filename}") from error
            stack.push(opened.pop_all())
        return _describe(path, arrays, _read_metadata(index))


def _open_shard(path: str, stack: contextlib.ExitStack, relative: str) -> File:
    place = os.path.join(os.path.dirname(path), relative)
    return open_file(place, stack.enter_context(open_for_reading(place)))


def _open_weight_map(
    weights: Mapping[str, str], path: str, open_shard: Callable[[str], File | RemoteFile]
) -> Arrays:
    files: dict[str, File | RemoteFile] = {}
    arrays: Arrays = {}
    for name, relative in weights.items():
        if relative not in files:
            files[relative] = open_shard(relative)
        file = files[relative]
        # A tensor of a shard that the index assigns to another file, or to none, is not read.
        if name not in file.header.arrays:
            raise FormatError(
                f"{path}: the tensor {name!r} is not in {file.path}, which the index names for it"
            )
        arrays[name] = (file, file.header.arrays[name])
    return arrays


def _describe(path: str, arrays: Arrays, metadata: Mapping[str, str]) -> Save:
    """Choose the header that describes the collection: ours, that of tensordict, or the names of the tensors."""
    hashes = None
    if "td" in metadata:
        header = _read_header(metadata, path)
        table, hashes = load_table(header, path), header.get("hashes")
        check = compute_check((name, array.shape) for name, (_, array) in arrays.items())
        if header.get("check") != check:
            raise FormatError(
                f"{path}: the td header does not describe the tensors of the file; another program changed names or shapes"
            )
    elif "tensordict" in metadata:
        reference = parse_json(metadata["tensordict"], f"{path}: the tensordict header")
        table = read_reference(reference, path, {name: array for name, (_, array) in arrays.items()})
        check_table(table, path)
    else:
        return Save(path, arrays, build_foreign_table({name: array for name, (_, array) in arrays.items()}))
    named = set()
    for place in table.leaves:
        named.update(list_names(place))
    if named != arrays.keys():
        missing, extra = sorted(named - arrays.keys()), sorted(arrays.keys() - named)
        raise FormatError(
            f"{path}: its header and its tensors differ; missing: {missing!r:.300}, not in the header: {extra!r:.300}"
        )
    return Save(path, arrays, table, hashes)


def _read_header(metadata: Mapping[str, str], path: str) -> Any:
    header = parse_json(metadata["td"], f"{path}: the td header")
    beside = metadata.get("tensordict")
    if (
        isinstance(header, dict)
        and beside is not None
        and header.get("beside") != zlib.crc32(beside.encode())
    ):
        raise FormatError(
            f"{path}: the headers td and tensordict differ; another program changed one of them"
        )
    return header


@contextlib.contextmanager
def open_for_reading(path: str, *, write: bool = False) -> Iterator[int]:
    """Open a file for the duration of a block; with ``write`` also for writing."""
    fd = open_regular(path, write)
    try:
        yield fd
    finally:
        os.close(fd)


def read_bytes(fd: int, size: int, position: int) -> bytes:
    """Read bytes of a file; fewer if it ends before."""
    pieces = []
    while size and (piece := os.pread(fd, size, position)):
        pieces.append(piece)
        size, position = size - len(piece), position + len(piece)
    return b"".join(pieces)


def is_on_network(path: str) -> bool:
    """Return True if a file is on a network file system, as far as the system lists its mounts."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
        device = os.stat(path).st_dev
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2:3] == [wanted]:
            return kind.startswith(_NETWORK)
    return False
