"""The wire of the reference implementation: the leaves alone, in an order that both sides know.

Keys are sorted as strings at each level, nested collections are expanded in place, a lazy stack sends member after
member, non-tensor data sends nothing. No message says what comes, so a mismatch cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from td_core import encode
from td_core._nodes import KINDS

from . import _storage
from ._attachment import attached


def pseudo_random_tags(seed: int) -> Iterator[int]:
    """Yield the tags that both sides draw from one seed.

    >>> from itertools import islice
    >>> list(islice(pseudo_random_tags(5), 4))
    [1262, 841, 4077, 6859]
    """
    tag = _draw(seed)
    while True:
        yield tag
        tag = _draw(tag + 1)


def _draw(seed: int) -> int:
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % 10_000


def in_order(collection: Any) -> list[Tensor]:
    """Return the leaves in the order in which they travel."""
    leaves: list[Tensor] = []
    todo: list[Any] = [collection]
    while todo:
        node = todo.pop()
        if isinstance(node, Tensor):
            leaves.append(node)
            continue
        record = KINDS.of(node).flatten(node)
        todo.extend(record.entries[key] for key in sorted(record.entries, reverse=True))
        todo.extend(reversed(list(record.members.values())))
    return leaves


def outgoing(collection: Any, consolidated: bool, device: torch.device) -> list[Tensor]:
    """Return the messages of a collection."""
    if consolidated:
        return [_buffer(collection).to(device)]
    return [leaf.detach().contiguous().to(device) for leaf in in_order(collection)]


def receive(collection: Any, consolidated: bool, peer: Any) -> None:
    """Receive into the leaves of a collection."""
    if consolidated:
        storage = _storage_as_planned(collection)
        if storage is not None and storage.device == peer.device():
            peer.recv(storage)
            return
        leaves = in_insertion_order(collection)
        layout = _storage.plan_leaves(leaves)
        arrived = peer.recv(torch.empty(layout.nbytes, dtype=torch.uint8, device=peer.device()))
        for leaf, view in zip(leaves, _storage.Views(arrived).leaves(layout), strict=True):
            leaf.detach().copy_(view)
        return
    device = peer.device()
    for leaf in in_order(collection):
        target = leaf.detach()
        if target.is_contiguous() and target.device == device:
            peer.recv(target)
        else:
            target.copy_(peer.recv(torch.empty(leaf.shape, dtype=leaf.dtype, device=device)))


def in_insertion_order(collection: Any) -> list[Tensor]:
    """Return the leaves in the order in which the reference lays them out in one storage: depth first."""
    leaves: list[Tensor] = []
    todo: list[Any] = [collection]
    while todo:
        node = todo.pop()
        if isinstance(node, Tensor):
            leaves.append(node)
            continue
        record = KINDS.of(node).flatten(node)
        todo.extend(reversed([*record.entries.values(), *record.members.values()]))
    return leaves


def _storage_as_planned(collection: Any) -> Tensor | None:
    """Return the storage of a consolidated collection if it is what the wire carries."""
    state = attached(collection)
    found = None if state is None else state.layout(encode(collection))
    if state is None or found is None:
        return None
    planned = _storage.plan(encode(collection))
    starts = [[span.start for leaf in layout.leaves for span in leaf.spans] for layout in (found, planned)]
    return state.storage if starts[0] == starts[1] and len(state.storage) == planned.nbytes else None


def _buffer(collection: Any) -> Tensor:
    known = _storage_as_planned(collection)
    if known is not None:
        return known
    leaves = in_insertion_order(collection)
    return _storage.gathered(_storage.plan_leaves(leaves), leaves)
