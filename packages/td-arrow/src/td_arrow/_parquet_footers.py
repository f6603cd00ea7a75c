"""The footer of a Parquet file: pyarrow ends the process at a damaged one, where it has no way to raise an error.

The footer is a struct of Thrift in its compact protocol, see ``parquet.thrift`` of apache/parquet-format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from td_core.errors import FormatError

_CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")
#: The bytes of a number of each physical type that has a fixed size.
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
#: The depth of structs and lists that no footer has.
_MOST_LEVELS = 20


class Chunk(NamedTuple):
    """A part of a column: its codec, its place in the file, the bytes of its plain pages, and the nulls, if they are counted."""

    codec: str
    begin: int
    stored: int
    size: int
    nulls: int | None


class _Leaf(NamedTuple):
    """A column of the schema: its physical type, and its most repetitions and definitions."""

    kind: int
    repetitions: int
    definitions: int


def read_chunks(file: pa.NativeFile, where: str) -> list[list[Chunk]]:
    """Return the parts of all columns for each row group; raise FormatError for a damaged footer."""
    try:
        size = file.size()
        file.seek(size - 8)
        length = int.from_bytes(file.read(4), "little")
        file.seek(size - 8 - length)
        footer = _Reader(file.read(length)).read_struct(0)
        leaves = list(_list_leaves(footer[2]))
        groups = footer.get(4, [])
        return [
            [_make_chunk(column[3], leaf) for column, leaf in zip(group[1], leaves, strict=True)]
            for group in groups
        ]
    except (LookupError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise FormatError(f"{where}: the file is damaged: its footer has {error!r:.200}") from error


def _list_leaves(elements: list[Any]) -> Iterator[_Leaf]:
    """Yield the leaves of a schema, which has its nodes before what is in them."""
    levels = [(elements[0].get(5, 0), 0, 0)]
    for element in elements[1:]:
        while levels[-1][0] == 0:
            levels.pop()
        left, repetitions, definitions = levels.pop()
        levels.append((left - 1, repetitions, definitions))
        repetitions += element.get(3, 0) == 2
        definitions += element.get(3, 0) > 0
        if element.get(5):
            levels.append((element[5], repetitions, definitions))
        else:
            yield _Leaf(element[1], repetitions, definitions)


def _make_chunk(data: dict[int, Any], leaf: _Leaf) -> Chunk:
    """Return a part of a column; raise ValueError for what pyarrow does not check."""
    statistics, histograms = data.get(12, {}), data.get(16, {})
    if data[1] != leaf.kind:
        raise ValueError(f"a chunk of the type {data[1]}; expected {leaf.kind}")
    for number, most in ((2, leaf.repetitions), (3, leaf.definitions)):
        if len(histograms.get(number, ())) not in (0, most + 1):
            raise ValueError(f"a histogram of {len(histograms[number])} levels; expected {most + 1}")
    for number in (1, 2, 5, 6):
        if len(statistics.get(number, b"")) not in (
            0,
            _WIDTHS.get(leaf.kind, len(statistics.get(number, b""))),
        ):
            raise ValueError("a bound of another size than its type")
    begin = min(filter(None, (data.get(11), data[9])), default=0)
    return Chunk(_CODECS[data[4]], begin, data[7], data[6], statistics.get(3))


class _Reader:
    """Reads values of Thrift: structs are dicts by the numbers of fields."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def _read_byte(self) -> int:
        self._place += 1
        return self._data[self._place - 1]

    def _read_number(self) -> int:
        result = shift = 0
        while True:
            byte = self._read_byte()
            result |= (byte & 127) << shift
            if byte < 128:
                return result
            shift += 7

    def _read_int(self) -> int:
        number = self._read_number()
        return (number >> 1) ^ -(number & 1)

    def _read_bytes(self, size: int) -> bytes:
        part = self._data[self._place : self._place + size]
        self._place += size
        if len(part) < size:
            raise ValueError("fewer bytes than it says")
        return part

    def read_struct(self, depth: int) -> dict[int, Any]:
        """Return a struct."""
        result: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_int()
            result[number] = self._read(head & 15, depth)
        return result

    def _read(self, kind: int, depth: int) -> Any:
        if depth > _MOST_LEVELS:
            raise ValueError("too many levels")
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._read_byte()
        if kind in (4, 5, 6):
            return self._read_int()
        if kind == 7:
            return struct.unpack("<d", self._read_bytes(8))[0]
        if kind == 8:
            return self._read_bytes(self._read_number())
        if kind == 12:
            return self.read_struct(depth + 1)
        if kind not in (9, 10):
            raise ValueError(f"a value of the unknown type {kind}")
        head = self._read_byte()
        count, kind = head >> 4, head & 15
        count = self._read_number() if count == 15 else count
        if count > len(self._data):
            raise ValueError("more items than bytes")
        if kind in (1, 2):
            return [self._read_byte() == 1 for _ in range(count)]
        return [self._read(kind, depth + 1) for _ in range(count)]
