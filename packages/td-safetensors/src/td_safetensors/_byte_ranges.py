"""Files that are read as ranges of bytes: local ones, without mapping them, and those in object stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from td_core.spi import run_parallel
from td_core.typing import ObjectInfo, ObjectLocation, ObjectStore, Range
from td_store.arrays import ObjectReader, read_into

from ._format import Array, Header, read_header

#: Bytes of each shard that are read at first: most headers are shorter.
_HEAD = 1 << 16


class LocalReader:
    """Reads ranges of an open file, without mapping it."""

    gap = 1 << 14

    def __init__(self, fd: int, num_threads: int) -> None:
        self.fd, self.num_threads = fd, num_threads

    @property
    def batch(self) -> object:
        """The file: each one is read by itself."""
        return id(self)

    def read_together(
        self, requests: Sequence[tuple[LocalReader, Sequence[tuple[int, int]]]]
    ) -> list[list[Tensor]]:
        """Return the bytes of each range."""
        return [reader._read_ranges(ranges) for reader, ranges in requests]

    def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        results = [torch.empty(end - begin, dtype=torch.uint8, device="cpu") for begin, end in ranges]

        def read(i: int) -> Callable[[], None]:
            return lambda: read_into(self.fd, results[i], ranges[i][0], lambda count: None)

        run_parallel([read(i) for i in range(len(ranges))], self.num_threads)
        return results


class RemoteFile:
    """A file in an object store with its header, of which the first bytes were read."""

    def __init__(self, path: str, store: ObjectStore, info: ObjectInfo, head: memoryview) -> None:
        self.path = path
        self.reader = ObjectReader(store, info)

        def read(size: int, begin: int) -> bytes:
            if begin + size <= len(head):
                return bytes(head[begin : begin + size])
            return bytes(store.read([Range(info.name, begin, begin + size, info.stamp)])[0])

        self.header: Header = read_header(read, info.size, path)

    def read(self, array: Array) -> Tensor:
        """Return the bytes of a tensor."""
        begin = self.header.start + array.begin
        return self.reader.read_together([(self.reader, [(begin, begin + array.nbytes)])])[0][0]


def open_objects(place: ObjectLocation, names: Sequence[str]) -> list[RemoteFile]:
    """Open files below a location, with one request for their sizes and one for their headers; or FileNotFoundError."""
    infos: list[ObjectInfo] = []
    for name, info in zip(names, place.store.stat(names), strict=True):
        if info is None:
            raise FileNotFoundError(f"{place.where}: there is no object {name!r}")
        infos.append(info)
    heads = place.store.read([Range(info.name, 0, min(info.size, _HEAD), info.stamp) for info in infos])
    return [
        RemoteFile(f"{place.where.rstrip('/')}/{info.name}", place.store, info, head)
        for info, head in zip(infos, heads, strict=True)
    ]
