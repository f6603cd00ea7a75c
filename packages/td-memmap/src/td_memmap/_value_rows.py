"""Values of a stack by rows: a file of slots, one for each value, and a heap of encoded values.

A slot is a 64-bit word: the byte of its value in the heap, and bits of the checksum of the value. A value in the heap is
its length and CRC-32, and then a letter and the content. The heap only grows: a write adds the new value, and then
stores its slot in one aligned store. So a process that is killed, or one that reads at the same time, leaves or sees the
old value or the new one. A heap with many unused values is replaced, with its slots, by the files of the next number.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

from td_core.errors import CodecError, FormatError
from td_core.spi import join_value, parse_json, split_value

from . import _file_names, _fs
from ._fs import DirectoryTree, Parts
from ._shapes import check_size

#: First bytes of a heap; no slot has the byte 0.
MAGIC = b"tdheap1\n"
#: Most bytes of a slots file or heap that is read.
LIMIT = 1 << 40
SLOT = 8

#: Bytes of the length and the CRC-32 before a value in the heap.
_HEADER = 8
_LONGEST = (1 << 32) - 1
_OFFSET_BITS = 40
_OFFSET = np.uint64((1 << _OFFSET_BITS) - 1)
_CHECK_BITS = (1 << 23) - 1
#: This bit of a slot is set if the value is one of several that one node had (see ``Joints`` of td-tensorclass).
_SEPARATE = np.uint64(1 << 63)
#: A heap is replaced when it has this many times its size after the last replacement, and so many bytes more, each for
#: itself and for each slot: so the time to replace it is a constant part of the time of each write.
_GROWTH, _SPARE, _SPARE_OF_SLOT = 4, 1 << 20, 64

#: First bytes of an encoded value: of text, of JSON, and of JSON with types.
_TEXT, _JSON, _TYPED = b"s", b"j", b"t"

Slots = NDArray[np.uint64]


def encode_value(value: object) -> bytes:
    """Encode one value; raise CodecError if only a pickle could store it."""
    if type(value) is str:
        try:
            return _TEXT + value.encode()
        except UnicodeEncodeError:
            pass  # JSON has escapes for lone surrogates.
    plain, types = split_value(value)
    content = (
        _JSON + json.dumps(plain).encode() if types is None else _TYPED + json.dumps([plain, types]).encode()
    )
    if len(content) > _LONGEST:
        raise CodecError(f"a value of {len(content)} bytes is too long: at most {_LONGEST} are stored")
    return content


def _encode_values(values: Sequence[object]) -> list[bytes]:
    """Encode values; text alone is encoded faster."""
    if set(map(type, values)) == {str}:
        with suppress(UnicodeEncodeError):
            return [_TEXT + text.encode() for text in cast("Sequence[str]", values)]
    return list(map(encode_value, values))


def _decode_value(content: bytes, where: Callable[[], str]) -> object:
    kind, text = content[:1], content[1:]
    if kind == _TEXT:
        return text.decode()
    if kind not in (_JSON, _TYPED):
        raise ValueError(f"its first byte is {kind!r}")
    parsed = parse_json(text.decode())
    if kind == _JSON:
        return parsed
    if not isinstance(parsed, list) or len(parsed) != 2:
        raise ValueError(f"{parsed!r} is not a value and its types")
    plain, types = parsed
    return join_value(plain, types, where)


class RowEncoder:
    """Encoder of values for a heap that has ``start`` bytes; equal values are stored once.

    Attributes:
        records: the bytes to add to the heap.
    """

    def __init__(self, start: int = 0) -> None:
        self.records = bytearray(b"" if start else MAGIC)
        self._start = start
        self._known: dict[bytes, int] = {}

    def add(self, values: Sequence[object], separate: Sequence[bool] | None = None) -> Slots:
        """Encode values and return their slots; ``separate`` marks those that were not the one value of a node."""
        words = self.add_contents(_encode_values(values))
        if separate is not None:
            words[np.array(separate, bool)] |= _SEPARATE
        return words

    def add_contents(self, contents: Sequence[bytes]) -> Slots:
        """Add encoded values, and return their slots."""
        new = [content for content in dict.fromkeys(contents) if content not in self._known]
        if new:
            header = np.empty((len(new), 2), "<u4")
            header[:, 0], header[:, 1] = list(map(len, new)), list(map(zlib.crc32, new))
            ends = self._start + len(self.records) + np.cumsum(header[:, 0].astype(np.uint64) + _HEADER)
            if int(ends[-1]) >> _OFFSET_BITS:
                raise CodecError(f"the values of a stack take more than {1 << _OFFSET_BITS} bytes")
            checks = (header[:, 1] & np.uint32(_CHECK_BITS)).astype(np.uint64) << np.uint64(_OFFSET_BITS)
            words = ends - header[:, 0] - _HEADER | checks
            heads = header.tobytes()
            pairs = zip((heads[i : i + _HEADER] for i in range(0, len(heads), _HEADER)), new)
            self.records += b"".join(chain.from_iterable(pairs))
            self._known.update(zip(new, words.tolist()))
        return np.array(list(map(self._known.__getitem__, contents)), np.uint64)


def list_separate(slots: Slots) -> list[bool]:
    """Return for each slot whether its value was not the one value of a node; empty if none is marked."""
    marked = (slots & _SEPARATE) != 0
    result: list[bool] = marked.tolist() if marked.any() else []
    return result


def decode_rows(slots: Slots, heap: bytes, where: str) -> list[object]:
    """Return the values of all slots; raise FormatError for a slot or value that is damaged."""
    words = (slots & ~_SEPARATE).tolist()
    distinct = list(dict.fromkeys(words))

    def show(place: int) -> str:
        return f"{where}: row {words.index(distinct[place])}"

    values = _decode_values(_read_contents(np.array(distinct, np.uint64), heap, show), show)
    if len(distinct) == len(words):
        return values
    return list(map(dict(zip(distinct, values, strict=True)).__getitem__, words))


def _decode_values(contents: list[bytes], show: Callable[[int], str]) -> list[object]:
    """Decode values; text alone is decoded faster."""
    with suppress(UnicodeDecodeError):
        if {content[:1] for content in contents} == {_TEXT}:
            return [content[1:].decode() for content in contents]
    values = []
    for place, content in enumerate(contents):
        try:
            values.append(_decode_value(content, partial(show, place)))
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{show(place)} is damaged: {error}") from error
    return values


def _read_contents(slots: Slots, heap: bytes, show: Callable[[int], str]) -> list[bytes]:
    """Return the encoded values of slots; raise FormatError if a slot or its value is damaged."""
    if not len(slots):
        return []
    starts = (slots & _OFFSET).astype(np.int64)
    if heap[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"{show(0)} is damaged: the heap starts with {heap[: len(MAGIC)]!r}, expected {MAGIC!r}"
        )
    outside = (starts < len(MAGIC)) | (starts + _HEADER >= len(heap))
    if outside.any():
        place = int(outside.argmax())
        raise FormatError(
            f"{show(place)} is damaged: it is at byte {starts[place]} of a heap of {len(heap)} bytes"
        )
    data = np.frombuffer(heap, np.uint8)
    header = data[starts[:, None] + np.arange(_HEADER)].view("<u4")
    starts += _HEADER
    ends = starts + header[:, 0]
    checks = (slots >> np.uint64(_OFFSET_BITS)) & np.uint64(_CHECK_BITS)
    wrong = (ends > len(heap)) | (header[:, 1] & np.uint32(_CHECK_BITS) != checks)
    if not wrong.any():
        contents = [heap[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
        wrong = np.array(list(map(zlib.crc32, contents)), np.uint32) != header[:, 1]
        if not wrong.any():
            return contents
    place = int(wrong.argmax())
    raise FormatError(
        f"{show(place)} is damaged: its {header[place, 0]} bytes at byte {starts[place]} of the heap have another checksum, "
        f"or end after the {len(heap)} bytes of the heap"
    )


def list_row_files(number: int) -> tuple[str, str]:
    """Return the names of the file of slots and of the heap."""
    return f"{_file_names.SLOTS}{number}.memmap", f"{_file_names.HEAP}{number}.memmap"


def describe_rows(number: int, heap_size: int) -> dict[str, int]:
    """Return what the metadata says of values by rows: the number of their files, and the heap's size when it was made."""
    return {"rows": number, "heap": heap_size}


def read_slots(tree: DirectoryTree, parts: Parts, name: str, count: int) -> Slots:
    """Return the slots in a file; raise FormatError if it is missing or too short."""
    content = read_row_file(tree, parts, name)
    check_size(tree.show(parts, name), len(content), count * SLOT)
    return np.frombuffer(content, "<u8", count)


def read_row_file(tree: DirectoryTree, parts: Parts, name: str) -> bytes:
    """Return the content of a file of slots or of a heap."""
    try:
        return tree.read(parts, name, LIMIT)
    except FileNotFoundError:
        raise FormatError(f"{tree.show(parts, name)} is missing") from None


@dataclass(slots=True)
class SavedRows:
    """Values by rows in an open directory, which the caller has locked, to write to them.

    Attributes:
        tree: the directory of the node.
        count: number of values.
        number: number of the files.
        size: size of the heap when it was made.
    """

    tree: DirectoryTree
    count: int
    number: int
    size: int

    def read_slots(self) -> Slots:
        """Return the slots; they are read before the values to which they point."""
        return read_slots(self.tree, (), list_row_files(self.number)[0], self.count)

    def read(self, slots: Slots) -> list[object]:
        """Return the values of slots, without reading the rest of the heap."""
        name = list_row_files(self.number)[1]
        heap, status = self.tree.open((), name)
        with _fs.closing(heap):
            content = mmap.mmap(heap, status.st_size, access=mmap.ACCESS_READ)
        return decode_rows(slots, cast("bytes", content), self.tree.show((), name))

    def write(self, places: Sequence[int], values: Sequence[object], separate: Sequence[bool] | None) -> bool:
        """Write values at ``places``; return True if the files should be replaced now by smaller ones."""
        if not len(places):
            return False
        slots_name, heap_name = list_row_files(self.number)
        heap, status = self.tree.open((), heap_name, writable=True)
        with _fs.closing(heap):
            encoder = RowEncoder(status.st_size)
            words = encoder.add(values, separate)
            try:
                _fs.write_at(heap, encoder.records, status.st_size)
            except OSError as error:
                raise _fs.add_path(error, "cannot write the values", self.tree.show((), heap_name)) from error
            _fs.set_time(heap)
        slots, opened = self.tree.open((), slots_name, writable=True)
        with _fs.closing(slots):
            check_size(self.tree.show((), slots_name), opened.st_size, self.count * SLOT)
            # Elements of an aligned array are stored in one instruction, so that no reader sees a part of a slot.
            mapped = np.frombuffer(mmap.mmap(slots, self.count * SLOT), "<u8")
            mapped[np.array(places)] = words
            _fs.set_time(slots)
        limit = _GROWTH * self.size + _SPARE + _SPARE_OF_SLOT * self.count
        return status.st_size + len(encoder.records) > limit

    def replace(self, write_meta: Callable[[dict[str, int]], None]) -> None:
        """Replace the files by those of the next number, without unused values; ``write_meta`` writes the metadata."""
        old, new = list_row_files(self.number), list_row_files(self.number + 1)
        slots, heap = read_slots(self.tree, (), old[0], self.count), read_row_file(self.tree, (), old[1])
        where = self.tree.show((), old[0])
        contents = _read_contents(slots & ~_SEPARATE, heap, lambda place: f"{where}: row {place}")
        encoder = RowEncoder()
        words = encoder.add_contents(contents) | (slots & _SEPARATE)
        for name, content in zip(new, (words.tobytes(), encoder.records), strict=True):
            self.tree.replace((), name, content)
        write_meta(describe_rows(self.number + 1, len(encoder.records)))
        for name in old:
            self.tree.remove((), name)
