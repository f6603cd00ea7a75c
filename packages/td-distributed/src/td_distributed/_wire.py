"""The header that travels before the leaves: what will come, so that the receiver can refuse it and stay in step.

A message is: four int64 (a mark, the length of the header, the number of payload messages, their bytes), the header as
JSON (the encoded tree, where each piece of each leaf lies in one storage, the values), then the payload: the storage as
plain bytes, in one part, or in one for each large leaf and one for each run of small leaves. Nothing in it is executed,
imported or looked up but registered node kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from td_core import decode, encode
from td_core._nodes import Encoded

from . import _file, _paths, _storage
from ._attachment import attached
from ._group import MARK
from ._storage import Layout, Leaf, Span

LARGEST_HEADER = 1 << 28
#: Pieces of this size travel from where they are; smaller ones are copied together first.
LARGE = 1 << 16


@dataclass(slots=True)
class Message:
    """One collection, ready to be sent or as it was announced.

    Attributes:
        header: the JSON.
        layout: where each leaf lies in one storage.
        nodes: the encoded tree.
        values: the values of non-tensor data.
        together: the storage comes in one part.
        consolidated: the collection was locked by consolidation, so the received one is not.
    """

    header: bytes
    layout: Layout
    nodes: list[dict[str, Any]]
    values: list[Any]
    together: bool
    consolidated: bool = False

    def parts(self) -> list[tuple[int, int]]:
        """Return (first byte, one past the last) of each part of the storage that travels."""
        if self.together:
            return [(0, self.layout.nbytes)] if self.layout.nbytes else []
        found: list[tuple[int, int]] = []
        small = False
        for span in self.spans():
            start, stop = span.start, span.stop - span.pad
            if stop - start >= LARGE:
                found.append((start, stop))
                small = False
            elif small:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
                small = True
        return found

    def spans(self) -> Iterator[Span]:
        """Yield the pieces with bytes, each once, by where they lie."""
        end = 0
        for span in sorted(
            (span for leaf in self.layout.leaves for span in leaf.spans), key=lambda span: span.start
        ):
            if span.start >= end and span.stop > span.start:
                end = span.stop
                yield span

    def front(self) -> Tensor:
        """Return the first message."""
        parts = self.parts()
        nbytes = sum(stop - start for start, stop in parts)
        return torch.tensor([MARK, len(self.header), len(parts), nbytes], dtype=torch.int64)


def outgoing(collection: Any, together: bool) -> tuple[Message, list[Tensor]]:
    """Return a collection as a message and its payload, checked completely before anything is sent.

    Raises:
        StructureError: a leaf has no dense form.
        CodecError: a value that no registered serializer stores; names its key.
    """
    encoded = encode(collection)
    state = attached(collection)
    layout = state.layout(encoded) if state is not None and together else None
    if state is None or layout is None:
        message = _announce(encoded, _storage.plan(encoded), together, state is not None)
        return message, [_part(message, encoded, *part) for part in message.parts()]
    known = state.sent
    if encoded.values or known is None or known.nodes != encoded.nodes or known.layout is not layout:
        known = _announce(encoded, layout, True, True)
        state.sent = None if encoded.values else known
    return known, [state.storage] if layout.nbytes else []


def _announce(encoded: Encoded, layout: Layout, together: bool, consolidated: bool) -> Message:
    kind = {"together": together, "consolidated": consolidated, "nbytes": layout.nbytes}
    header = json.dumps({**kind, **_file.describe(encoded, layout)}).encode()
    return Message(header, layout, encoded.nodes, encoded.values, together)


def _part(message: Message, encoded: Encoded, start: int, stop: int) -> Tensor:
    """Return one part of the storage: the bytes of a large leaf as they lie, or copies of leaves."""
    spans: list[Leaf] = []
    pieces: list[Tensor] = []
    for place, leaf in zip(message.layout.leaves, encoded.leaves, strict=True):
        for span, piece in zip(place.spans, _storage.pieces_of(leaf)[0], strict=True):
            if start <= span.start < span.stop - span.pad <= stop:
                moved = span._replace(start=span.start - start, stop=span.stop - start)
                spans.append(Leaf((moved,)))
                pieces.append(piece)
    if len(pieces) == 1 and pieces[0].numel() * pieces[0].itemsize == stop - start:
        return as_bytes(pieces[0])
    room = torch.empty(stop - start, dtype=torch.uint8, device=pieces[0].device)
    layout = Layout(spans, stop - start)
    _storage.fill(room, layout, _storage.Views(room).pieces(layout), pieces)
    return room


def incoming(header: bytes) -> Message:
    """Return the message that a header announces.

    Raises:
        FormatError: the header is damaged.
    """
    with _file.damaged("the header of a message"):
        given = json.loads(header)
        layout, nodes, values = _file.from_description(given)
        layout = Layout(layout.leaves, int(given["nbytes"]))
        _storage.check(layout, layout.nbytes)
        return Message(header, layout, nodes, values, bool(given["together"]), bool(given["consolidated"]))


def assemble(message: Message, storage: Tensor) -> Any:
    """Return the collection of a message whose storage has arrived.

    Raises:
        FormatError: the storage is shorter than announced, or leaves contradict batch sizes.
    """
    with _file.damaged("a message"):
        _storage.check(message.layout, len(storage))
        leaves = list(map(_storage.check_rows, _storage.Views(storage).leaves(message.layout)))
        result = decode(Encoded(message.nodes, leaves, message.values))
        _file.check_shapes(result)
    return result.unlock_() if message.consolidated else result


Outline = dict[_paths.Path, str]


def outline(nodes: list[dict[str, Any]], layout: Layout) -> Outline:
    """Return what two peers must agree on: by key path, the description of a node or leaf."""
    result: Outline = {}
    for path, found in _paths.walk(nodes):
        if isinstance(found, int):
            leaf = layout.leaves[found]
            pieces = " and ".join(f"{span.dtype} of shape {list(span.shape)}" for span in leaf.spans)
            result[path] = pieces if leaf.ragged_idx is None else f"jagged: {pieces}"
        else:
            size = found["meta"].get("batch_size")
            result[path] = f"a {found['kind']}" + ("" if size is None else f" of batch size {list(size)}")
    return result


def as_bytes(piece: Tensor) -> Tensor:
    """Return the bytes of a tensor, C-contiguous."""
    plain = piece.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a tensor of one element is contiguous whatever its stride is, and keeps it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
