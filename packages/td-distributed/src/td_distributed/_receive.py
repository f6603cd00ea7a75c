"""Write a received message into an existing collection: all of it, or nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import FormatError, StructureError
from td_core.spi import Encoded, as_bytes, decode, encode, show_path

from . import _consolidated_file, _key_paths, _storage, _wire
from ._consolidated_backend import get_backend
from ._wire import Message

#: A storage may be this many bytes larger than twice the bytes of its leaves and header; a larger one is refused.
SLACK = 1 << 26
#: Headers of up to this many bytes are parsed through a cache.
SHORT = 1 << 16
#: What an error says to a receiver without leaves.
_FIRST = "; init_remote() and from_remote_init() send to a process without entries"


class ReceiveTarget:
    """A collection to receive into, with its encoding before any message arrives.

    Attributes:
        last: the last message that was written into it.
    """

    def __init__(self, collection: TensorCollection) -> None:
        self.collection = collection
        self.state = get_backend(collection)
        self.cache = None if self.state is None else self.state.encode_cached(collection)
        self.last: Message | None = None if self.cache is None else self.cache.received
        self._apart: tuple[Encoded, _storage.Layout] | None = None
        self._checked: tuple[Encoded, _storage.Layout, list[object]] | None = None

    def prepare(self) -> None:
        """Encode the collection ahead of :meth:`check`, unless the previous message is expected again."""
        if self.last is None:
            with contextlib.suppress(Exception):  # check() raises the same error once there is a message
                self._apart = self._encode_target()

    def _encode_target(self) -> tuple[Encoded, _storage.Layout]:
        encoded = encode(self.collection) if self.cache is None else self.cache.encoded
        return encoded, (None if self.cache is None else self.cache.layout) or _storage.plan(encoded)

    def get_expected(self) -> Message | None:
        """Return the last delivered message, if it is small enough to arrive as a single message."""
        return self.last if self.last is not None and self.last.is_small() else None

    def parse_header(self, header: bytes) -> Message:
        """Parse a header into a :class:`Message`, or reuse the last one if the header is the same."""
        if self.last is not None and self.last.header == header:
            return self.last
        # Decoding nodes that hold values may modify them, so a cached message is used only without values.
        if len(header) > SHORT or (same := _parse_cached(header)).values:
            return _wire.parse_message(header)
        return Message(header, same.layout, same.nodes, [], same.together)

    def check(self, message: Message) -> None:
        """Raise if a message does not fit the collection, before memory is allocated for its storage.

        This bounds that memory by the size of the collection, whatever the header announces.
        """
        if self.last is message:
            return
        encoded, layout = self._apart or self._encode_target()
        _check_same(encoded, layout, message)
        nbytes = message.layout.nbytes
        if nbytes > SLACK:
            used = sum(stop - start for start, stop in _storage.list_used_spans(message.layout))
            if nbytes > 2 * (used + len(message.header)) + SLACK:
                raise FormatError(
                    f"cannot receive: a storage of {nbytes} bytes was announced for leaves of {used}"
                )
        with _consolidated_file.convert_damage("the header of a message"):
            values = _consolidated_file.join_values(message.values, message.nodes)
        self._checked = encoded, layout, values

    def deliver(self, message: Message, storage: Tensor) -> None:
        """Copy the received storage, which :meth:`check` has accepted, into the leaves; an error comes before any write."""
        if self._checked is None:
            # The header was checked before, so both storages have the same layout.
            assert self.state is not None
            self.state.storage.detach().copy_(storage)
            return
        held, now = self._checked[0].leaves, encode(self.collection).leaves
        if len(held) != len(now) or not all(map(is_, held, now)):
            # The caller replaced leaves while the message was in transit, so check again.
            self.cache = None if self.state is None else self.state.encode_cached(self.collection)
            self._apart = None
            self.check(message)
        encoded, layout, values = self._checked
        leaves = _storage.Views(storage).leaves(message.layout)
        order = _order(encoded.nodes, message.nodes)
        _check_tied(encoded, layout, leaves, order)
        _write(self.collection, Encoded(message.nodes, leaves, values))
        if self.cache is not None and self.cache.layout is not None and len(storage) == layout.nbytes:
            if all(_have_same_spans(layout.leaves[i], message.layout.leaves[j]) for i, j in order):
                self.cache.received = message


def _have_same_spans(left: _storage.Leaf, right: _storage.Leaf) -> bool:
    """Return True if two leaves have the same place in their storages."""
    return [span[:3] for span in left.spans] == [span[:3] for span in right.spans]


def deliver_files(collection: TensorCollection, saved: Any) -> None:
    """Copy a collection loaded from files into one of the same structure; errors as in :meth:`ReceiveTarget.deliver`."""
    encoded, right = encode(collection), encode(saved)
    message = Message(b"", _storage.plan(right), right.nodes, [], True)
    layout = _storage.plan(encoded)
    _check_same(encoded, layout, message)
    _check_tied(encoded, layout, right.leaves, _order(encoded.nodes, right.nodes))
    _write(collection, right)


def _write(collection: TensorCollection, received: Encoded) -> None:
    """Write all values and leaves of a message into a collection, or raise before the first write."""
    with _consolidated_file.convert_damage("a message"):
        source = decode(received)
    with torch.no_grad():
        try:
            collection.update_(source)
        except StructureError as error:
            raise StructureError(f"cannot receive: {error}; nothing was changed") from error


def _check_tied(
    encoded: Encoded, layout: _storage.Layout, received: Sequence[Tensor], order: list[tuple[int, int]]
) -> None:
    """Raise StructureError if a tensor under several keys would get different elements."""
    owners: dict[_storage.Leaf, tuple[int, int]] = {}
    if len({*layout.leaves}) == len(layout.leaves):
        return
    for left, right in order:
        owner, first = owners.setdefault(layout.leaves[left], (left, right))
        if received[first] is not received[right] and not _have_same_bytes(received[first], received[right]):
            paths = encoded.leaf_paths()
            raise StructureError(
                f"cannot receive: {show_path(paths[left])} is the same tensor as {show_path(paths[owner])} here, and has "
                "other elements in the message; nothing was changed"
            )


def _have_same_bytes(left: Tensor, right: Tensor) -> bool:
    pairs = zip(_storage.pieces_of(left)[0], _storage.pieces_of(right)[0], strict=True)
    return all(torch.equal(as_bytes(first), as_bytes(second)) for first, second in pairs)


def _check_same(encoded: Encoded, layout: _storage.Layout, message: Message) -> None:
    if encoded.nodes == message.nodes and (
        layout.leaves == message.layout.leaves or _get_forms(layout) == _get_forms(message.layout)
    ):
        return
    left = _wire.describe_structure(encoded.nodes, layout)
    with _consolidated_file.convert_damage("the header of a message"):
        right = _wire.describe_structure(message.nodes, message.layout)
    for path in [*left, *(path for path in right if path not in left)]:
        if left.get(path) != right.get(path):
            hint = "" if layout.leaves else _FIRST
            raise StructureError(
                f"cannot receive: {show_path(path)} is {left.get(path, 'missing')} here, "
                f"{right.get(path, 'missing')} in the message{hint}; nothing was changed"
            )


def _get_forms(layout: _storage.Layout) -> list[object]:
    return [(ragged, *((span.dtype, tuple(span.shape)) for span in spans)) for spans, ragged in layout.leaves]


@functools.lru_cache(16)
def _parse_cached(header: bytes) -> Message:
    return _wire.parse_message(header)


def _order(left: list[_key_paths.Row], right: list[_key_paths.Row]) -> list[tuple[int, int]]:
    """Match the leaves of two trees by key path. Return (position in ``left``, position in ``right``) pairs."""
    if left == right:
        return [(position, position) for position in _key_paths.leaves(left)]
    places = {path: result for path, result in _key_paths.walk(right) if isinstance(result, int)}
    return [(result, places[path]) for path, result in _key_paths.walk(left) if isinstance(result, int)]
