"""The td wire: a header that describes the collection, followed by the bytes of its leaves.

A message consists of four int64 (a mark, the length of the header, the number of payload messages, their bytes), a
digest of the header (by which the receiver recognises a repeated one), the header as JSON (the encoded tree, the spans
of all leaves in one storage, the values), and the payload: the storage as plain bytes, either in one part, or in one
part per large leaf and per run of small leaves. Parts are split into pieces of bounded size, so that a receiver can
discard a message in bounded memory. The first message has a fixed size and holds as much as fits in it. Decoding
executes and imports nothing; it only looks up registered node kinds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import FormatError
from td_core.spi import Encoded, as_named, encode, parse_json

from . import _consolidated_file, _key_paths, _storage
from ._consolidated_backend import ConsolidatedBackend, attach_backend, get_backend
from ._group import MARK
from ._memory import END, TAIL, get_bytes, list_tails, make_vector
from ._storage import Layout

LARGEST_HEADER = 1 << 28
#: Size in bytes of the first message: a small collection fits in it and needs only one round of latency.
FIRST = 1 << 15
#: Number of its bytes that the message can use; they are followed by :data:`END`.
ROOM = FIRST - len(END)
#: A collective sends a collection of more bytes in parts: copying it into one message would take longer.
APART = 1 << 20
#: Largest size in bytes of one payload message.
PIECE = 1 << 28
#: Mark, bytes of the header, number of payload messages, bytes of the payload, digest of the header.
FRONT = struct.Struct("<4q16s")
NOTHING = bytes(FRONT.size)


@dataclass(slots=True)
class Message:
    """The description of one collection to send or to receive.

    Attributes:
        header: the description as JSON.
        layout: the spans of the leaves in one storage.
        nodes: the encoded tree.
        values: (plain, types) of each non-tensor value.
        together: True if the storage is sent as one part.
        spare: sent first messages to reuse, as (message, view of the payload in it, view of the storage that is
            copied there); None if the collection is not consolidated or does not fit in the first message.
        arrivals: CPU buffers of received first messages to reuse, as returned by :meth:`arrival`.
    """

    header: bytes
    layout: Layout
    nodes: list[_key_paths.Row]
    values: list[tuple[Any, Any]]
    together: bool
    spare: list[tuple[Tensor, memoryview, memoryview]] | None = None
    arrivals: list[tuple[Tensor, memoryview, Tensor, memoryview]] = field(default_factory=list)
    _front: bytes | None = None

    def front(self) -> bytes:
        """Return the bytes that precede the header, computed once."""
        if self._front is None:
            sizes = [stop - start for start, stop in self.parts()]
            self._front = make_front(MARK, self.header, sizes)
        return self._front

    def arrival(self, first: Tensor) -> tuple[Tensor, memoryview, Tensor, memoryview] | None:
        """Split a received first message into (message, bytes before the header, storage, its end); None if not on the CPU."""
        if not first.is_cpu:
            return None
        start = FRONT.size + len(self.header)
        data = get_bytes(first)
        return first, data[: FRONT.size], first[start : start + self.layout.nbytes], data[ROOM:]

    def is_small(self) -> bool:
        """Return True if header and storage fit in the first message."""
        size = self.layout.nbytes
        return self.together and 0 < size <= ROOM - FRONT.size - len(self.header)

    def whole(self, storage: Tensor) -> tuple[Tensor, memoryview, memoryview]:
        """Build a first message with the current storage, reusing a spare one; the caller returns it to ``spare`` once sent."""
        if not self.spare:
            first = pack_message(MARK, self.header, [storage])[0]
            return (
                first,
                get_bytes(first)[FRONT.size + len(self.header) :][: len(storage)],
                get_bytes(storage),
            )
        whole = self.spare.pop()
        whole[1][:] = whole[2]
        return whole

    def parts(self) -> list[tuple[int, int]]:
        """Return (first byte, one past the last) of the storage per payload message."""
        if self.together:
            whole = [(0, self.layout.nbytes)]
        else:
            whole = [(run[0][0], run[-1][1]) for run in _storage.list_runs(self.layout)]
        return [
            (position, min(position + PIECE, stop))
            for start, stop in whole
            for position in range(start, stop, PIECE)
        ]


def make_front(mark: int, header: bytes, sizes: Sequence[int]) -> bytes:
    """Encode the bytes that precede a header, for payload messages of the given sizes."""
    return FRONT.pack(mark, len(header), len(sizes), sum(sizes), compute_digest(header))


def compute_digest(header: bytes) -> bytes:
    """Compute the digest of a header, which precedes it."""
    return blake2b(header, digest_size=16).digest()


def fits_in_first(length: int, nbytes: int) -> bool:
    """Return True if the first message holds a header of ``length`` bytes and a payload of ``nbytes``."""
    return FRONT.size + length + nbytes <= ROOM


def pack_message(mark: int, header: bytes, payload: Sequence[Tensor]) -> list[Tensor]:
    """Pack header and payload into messages: a first one of fixed size, and more for what does not fit in it."""
    sizes = list(map(len, payload))
    fits = fits_in_first(len(header), sum(sizes))
    described = header if fits else header + list_tails(payload)
    inside = FRONT.size + len(described) <= ROOM
    parts = [
        make_front(mark, header, sizes), described if inside else b"", *(get_bytes(part) for part in payload if fits)
    ]  # fmt: skip
    first = bytearray(FIRST)
    first[ROOM:] = END
    position = 0
    for part in parts:
        first[position : position + len(part)] = part
        position += len(part)
    messages = [torch.frombuffer(first, dtype=torch.uint8)]
    if not inside:
        messages.append(make_vector(described))
    return messages if fits else [*messages, *payload]


def make_whole(collection: TensorCollection) -> tuple[Message, Tensor]:
    """Encode a collection as a message and its storage in one part."""
    message, encoded, storage = _make_message(collection, True)
    return message, _storage.gather_leaves(message.layout, encoded.leaves) if storage is None else storage


def make_message(collection: TensorCollection, together: bool) -> tuple[Message, list[Tensor]]:
    """Encode a collection as a message and its payload; all checks happen here, before anything is sent."""
    message, encoded, storage = _make_message(collection, together)
    return message, _payload(message, encoded, storage)


def _payload(message: Message, encoded: Encoded, storage: Tensor | None) -> list[Tensor]:
    if storage is None and message.together:
        storage = _storage.gather_leaves(message.layout, encoded.leaves)
    if storage is None:
        parts = [data for _, data in _storage.payload(message.layout, encoded.leaves)]
    else:
        parts = [storage] if len(storage) else []
    return [piece for part in parts for piece in (part.split(PIECE) if len(part) > PIECE else (part,))]


def split_message(
    collection: TensorCollection, device: torch.device, apart: bool
) -> tuple[int, int, list[Tensor]]:
    """Encode a collection for a collective: (bytes of the header, bytes of header and storage, messages with an end)."""
    message, encoded, storage = _make_message(collection, get_backend(collection) is not None)
    header, nbytes, end = make_vector(message.header), message.layout.nbytes, make_vector(END)
    size = len(header) + nbytes
    # Parts avoid a copy of large leaves. The header message starts with the number and the sizes of the parts.
    if apart and size >= APART:
        parts = _payload(message, encoded, storage)
        parts = [part.to(device) for part in parts]
        sizes = torch.tensor([len(parts), *map(len, parts)], device="cpu").view(torch.uint8)
        header = torch.cat([sizes, *([make_vector(list_tails(parts))] if parts else []), header])
        size += len(header) - len(message.header)
        messages = [torch.cat([header, end]), *parts]
    elif storage is None:
        joined = _storage.gather_leaves(Layout(message.layout.leaves, size + len(END)), encoded.leaves)
        joined[nbytes:] = torch.cat([header, end])
        messages = [joined]
    else:
        messages = [torch.cat([storage.to(device), header.to(device), end.to(device)])]
    return len(header), size, [item.to(device) for item in messages]


def parts_of(header: bytes, most: int) -> tuple[list[int], bytes, bytes]:
    """Parse a header message of :func:`split_message` into (sizes of the parts, at most ``most`` in sum, their tails, header)."""
    with _consolidated_file.convert_damage("the header of a message"):
        numbers = memoryview(header)[: len(header) // 8 * 8].cast("q")
        sizes = numbers[1 : numbers[0] + 1].tolist()
        if len(sizes) != numbers[0] or not all(0 < size <= PIECE for size in sizes) or sum(sizes) > most:
            raise FormatError(f"it announces {numbers[0]} parts of {sizes!r:.100} bytes, of {most} at most")
    start = 8 * len(sizes) + 8
    return sizes, header[start : start + TAIL * len(sizes)], header[start + TAIL * len(sizes) :]


def _make_message(collection: TensorCollection, together: bool) -> tuple[Message, Encoded, Tensor | None]:
    """Encode a collection as (message, encoded tree, storage); the storage is None unless it can be sent unchanged."""
    state = get_backend(collection)
    taken = state.encode_cached(collection) if state is not None and together else None
    if state is None or taken is None or taken.layout is None:
        encoded = encode(collection, in_memory=True)
        return _announce(encoded, _storage.plan(encoded), together), encoded, None
    if taken.sent is None:
        taken.sent = _announce(taken.encoded, taken.layout, True)
        taken.sent.spare = [] if taken.sent.is_small() and state.storage.is_cpu else None
    return taken.sent, taken.encoded, state.storage


def _announce(encoded: Encoded, layout: Layout, together: bool) -> Message:
    described = _consolidated_file.describe(encoded, layout)
    header = _consolidated_file.as_json({"together": together, **described}, encoded.nodes).encode()
    _consolidated_file.check_length(header, LARGEST_HEADER)
    return Message(header, layout, encoded.nodes, described["values"], together)


def parse_message(header: bytes) -> Message:
    """Parse a received header into a :class:`Message`; raise FormatError if it is damaged."""
    with _consolidated_file.convert_damage("the header of a message"):
        provided = parse_json(header)
        layout, nodes, values = _consolidated_file.from_description(provided)
        _storage.check(layout, layout.nbytes)
        return Message(header, layout, nodes, values, bool(provided["together"]))


def assemble(message: Message, storage: Tensor, named: type | None = None) -> Any:
    """Decode the consolidated collection from a message and its storage, as an instance of ``named`` if that is given."""
    with _consolidated_file.convert_damage("a message"):
        values = _consolidated_file.join_values(message.values, message.nodes)
        tree = _consolidated_file.assemble_table(message.nodes, message.layout, values, storage, named=named)
    return attach_backend(as_named(named, tree, "what was sent"), ConsolidatedBackend(storage))


Outline = dict[_key_paths.Path, str]


def describe_structure(nodes: list[dict[str, object]], layout: Layout) -> Outline:
    """Describe each node and leaf as text, by key path, to compare the structures of two peers."""
    result: Outline = {}
    for path, match in _key_paths.walk(nodes):
        if isinstance(match, int):
            leaf = layout.leaves[match]
            pieces = " and ".join(f"{span.dtype} of shape {list(span.shape)}" for span in leaf.spans)
            result[path] = (
                pieces if leaf.ragged_idx is None else f"jagged along dim {leaf.ragged_idx}: {pieces}"
            )
        else:
            size, dim = map(match["meta"].get, ("batch_size", "stack_dim"))
            result[path] = f"a {match['kind']}" + ("" if size is None else f" of batch size {list(size)}")
            result[path] += "" if dim is None else f" along dim {dim}"
    return result
