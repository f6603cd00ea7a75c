"""The footer of a file of Arrow and the heads of its record batches: their rows, and where the buffers of each column are.

Both are tables of Flatbuffers, see ``File.fbs`` and ``Message.fbs`` of apache/arrow.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import pyarrow as pa

from td_core.errors import FormatError
from td_store.arrays import ObjectFile

from ._nulls import Path

Bytes = tuple[int, int]
#: The bytes at the end: the size of the footer, and ``ARROW1``.
_TAIL = 10
#: The kinds of messages.
_DICTIONARY, _BATCH = 2, 3
#: Types whose buffers are counted in another way.
_UNCOUNTED = {
    pa.lib.Type_SPARSE_UNION, pa.lib.Type_DENSE_UNION, pa.lib.Type_STRING_VIEW, pa.lib.Type_BINARY_VIEW,
    pa.lib.Type_LIST_VIEW, pa.lib.Type_LARGE_LIST_VIEW, pa.lib.Type_RUN_END_ENCODED,
}  # fmt: skip


class Batch(NamedTuple):
    """A record batch: its rows, its bytes, the nulls of each node, the bytes of each buffer, and whether they are compressed."""

    rows: int
    body: Bytes
    nulls: list[int]
    buffers: list[Bytes]
    is_compressed: bool


class Part(NamedTuple):
    """Which nodes and buffers of a record batch a column has."""

    nodes: range
    buffers: range


def read_batches(content: ObjectFile, where: str) -> tuple[list[Batch], list[Bytes]]:
    """Return the record batches, whose heads are read with one call, and the bytes of all dictionaries.

    Raises:
        FormatError: the footer or a head is damaged.
    """
    end = content.info.size - _TAIL
    try:
        (length,) = struct.unpack("<i", _read(content, end, end + 4))
        footer = _Table(_read(content, end - length, end))
        dictionaries, blocks = footer.read_structs(2, "<qi4xq"), footer.read_structs(3, "<qi4xq")
        content.fetch([(begin, begin + head) for begin, head, _ in dictionaries + blocks])
        for block in dictionaries:
            _read_batch(content, *block, is_dictionary=True)
        batches = [_read_batch(content, *block) for block in blocks]
    except (struct.error, LookupError, ValueError) as error:
        raise FormatError(f"{where}: the file is damaged: its footer has {error!r:.200}") from error
    return batches, [(begin, begin + head + body) for begin, head, body in dictionaries]


def _read(content: ObjectFile, begin: int, end: int) -> bytes:
    if not 0 <= begin <= end <= content.info.size:
        raise ValueError(f"the bytes from {begin} to {end}")
    content.seek(begin)
    return content.read(end - begin) or b""


def _read_batch(
    content: ObjectFile, begin: int, head: int, body: int, *, is_dictionary: bool = False
) -> Batch:
    """Return a record batch from its head; raise ValueError for what pyarrow would allocate without a check."""
    data = _read(content, begin, begin + head)
    message = _Table(data[8 if data[:4] == b"\xff" * 4 else 4 :])  # a mark that files before 2019 lack
    if message.read_number(1, "<B") != (_DICTIONARY if is_dictionary else _BATCH):
        raise ValueError("a message of another kind than its block")
    batch = message.read_table(2)
    if is_dictionary:
        batch = batch.read_table(1)
    first, last, rows = begin + head, begin + head + body, batch.read_number(0)
    if message.read_number(3) != body or not 0 <= body <= last <= content.info.size:
        raise ValueError(f"a body of {body} bytes")
    buffers = [(first + start, first + start + size) for start, size in batch.read_structs(2, "<qq")]
    if any(not first <= start <= end <= last for start, end in buffers):
        raise ValueError("a buffer outside of its record batch")
    nodes = batch.read_structs(1, "<qq")
    if (
        rows < 0
        or any(not 0 <= nulls <= length for length, nulls in nodes)
        or (nodes[:1] and nodes[0][0] != rows)
    ):
        raise ValueError(f"a record batch of {rows} rows")
    return Batch(rows, (first, last), [nulls for _, nulls in nodes], buffers, batch.has(3))


class _Table:
    """A table of Flatbuffers: its fields have numbers, and may be missing."""

    def __init__(self, data: bytes, place: int | None = None) -> None:
        self._data = data
        self._place = self._unpack("<I", 0) if place is None else place
        fields = self._place - self._unpack("<i", self._place)
        size = self._unpack("<H", fields)
        self._offsets = struct.unpack_from(f"<{max(size // 2 - 2, 0)}H", data, fields + 4)

    def _unpack(self, form: str, place: int) -> int:
        number: int = struct.unpack_from(form, self._data, place)[0]
        return number

    def has(self, number: int) -> bool:
        """Return True if a field is there."""
        return number < len(self._offsets) and self._offsets[number] != 0

    def read_number(self, number: int, form: str = "<q") -> int:
        """Return a number, 0 if it is missing."""
        return self._unpack(form, self._place + self._offsets[number]) if self.has(number) else 0

    def _follow(self, number: int) -> int:
        place: int = self._place + self._offsets[number]
        return place + self._unpack("<I", place)

    def read_table(self, number: int) -> _Table:
        """Return a table."""
        return _Table(self._data, self._follow(number))

    def read_structs(self, number: int, form: str) -> list[tuple[Any, ...]]:
        """Return the numbers of each struct of a vector; nothing if it is missing."""
        if not self.has(number):
            return []
        place, size = self._follow(number), struct.calcsize(form)
        end = place + 4 + self._unpack("<I", place) * size
        if end > len(self._data):
            raise ValueError("a vector that is longer than its message")
        return list(struct.iter_unpack(form, self._data[place + 4 : end]))


def place_columns(schema: pa.Schema) -> dict[Path, Part] | None:
    """Return the nodes and buffers of each column path; None if a type has as many as its values need."""
    result: dict[Path, Part] = {}

    def visit(path: Path, kind: pa.DataType, nodes: int, buffers: int) -> tuple[int, int]:
        end = nodes + 1, buffers + _count_buffers(kind)
        for name, child in _list_children(kind):
            end = visit((*path, name), child, *end)
        result[path] = Part(range(nodes, end[0]), range(buffers, end[1]))
        return end

    end = 0, 0
    try:
        for item in schema:
            end = visit((item.name,), item.type, *end)
    except NotImplementedError:
        return None
    return result


def _list_children(kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    if isinstance(kind, pa.BaseExtensionType):
        return _list_children(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return []
    if pa.types.is_map(kind):
        return [("", pa.struct([kind.key_field, kind.item_field]))]
    return [(kind.field(i).name, kind.field(i).type) for i in range(kind.num_fields)]


def _count_buffers(kind: pa.DataType) -> int:
    """Return how many buffers a type has itself, without its children."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count_buffers(kind.storage_type)
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        return 1
    if kind.id in _UNCOUNTED:
        raise NotImplementedError
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return 3 if is_text or is_binary else 2
