"""The wire of tensordict: one message per leaf, in an order that both sides derive from their collection.

Keys are sorted as strings in each node, nested collections are traversed depth first, a lazy stack sends its members in
order, and non-tensor data is not sent. No message describes the structure, so a mismatch cannot be detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import StructureError
from td_core.spi import count_users, encode, expand, show_path

from . import _key_paths, _storage
from ._consolidated_backend import get_backend
from ._memory import allocate


def pseudo_random_tags(seed: int) -> Iterator[int]:
    """Yield the pseudo-random tags that tensordict derives from a seed, the same for sender and receiver."""
    while True:
        tag = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % 10_000
        yield tag
        seed = tag + 1


def sort_leaves(collection: TensorCollection) -> list[Tensor]:
    """Return the leaves in the order in which they are sent; raise StructureError if one is nested, sparse or on meta."""
    encoded = encode(collection)
    leaves: list[Tensor] = []
    for ref in expand([0], partial(_list_below, encoded.nodes)):
        if isinstance(ref, list):
            leaf = encoded.leaves[ref[0]]
            if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_meta:
                raise StructureError(
                    f"{show_path(encoded.leaf_paths()[ref[0]])} is nested, sparse or on the meta device, and so no "
                    "message of this wire; send the collection with consolidated=True, or without this leaf"
                )
            leaves.append(leaf.detach())
    return leaves


def _list_below(nodes: list[_key_paths.Row], ref: int | list[int]) -> list[Any]:
    """Return references to the children of a node, the last one first; empty for a leaf."""
    if isinstance(ref, list):
        return []
    rows = [*sorted(nodes[ref]["entries"], key=itemgetter(0), reverse=True), *reversed(nodes[ref]["members"])]
    return [child for _, child in rows]


#: Plan a storage as tensordict does: tied leaves get separate spans.
_plan = partial(_storage.plan, tie=False)


def make_messages(collection: TensorCollection, consolidated: bool, device: torch.device) -> list[Tensor]:
    """Encode a collection as its messages: one per leaf, or one storage if ``consolidated``."""
    if not consolidated:
        return [leaf.resolve_conj().resolve_neg().contiguous().to(device) for leaf in sort_leaves(collection)]
    storage = _get_wire_storage(collection)
    if storage is None:
        encoded = encode(collection, in_memory=True)
        storage = _storage.gather_leaves(_plan(encoded), encoded.leaves)
    return [storage.to(device)]


def receive(collection: TensorCollection, consolidated: bool, peer: Any) -> Iterator[None]:
    """Receive into the leaves of a collection; a storage that needs a buffer is copied in the iterator's second step."""
    device = peer.device()
    if not consolidated:
        for leaf in sort_leaves(collection):
            if _storage.is_plain(leaf) and leaf.device == device:
                peer.recv(leaf)
            else:
                leaf.copy_(peer.recv(torch.empty(leaf.shape, dtype=leaf.dtype, device=device)))
        return
    storage = _get_wire_storage(collection)
    if storage is not None and storage.device == device:
        peer.recv(storage)
        return
    encoded = encode(collection)
    layout = _plan(encoded)
    arrived = peer.recv(allocate(layout.nbytes, device))
    yield
    for leaf, view in zip(encoded.leaves, _storage.Views(arrived).leaves(layout), strict=True):
        leaf.detach().copy_(view)


def _get_wire_storage(collection: TensorCollection) -> Tensor | None:
    """Return the storage of a consolidated collection if its layout is that of tensordict, else None."""
    state = get_backend(collection)
    if state is None:
        return None
    # Checking all leaves takes longer than sending them. So a locked collection is checked again only if the number of
    # references to its storage changed, as after ``leaf.data = ...``.
    users = count_users(state.memory) if collection.is_locked else None
    if users is not None and state.users == users:
        return state.storage
    taken = state.encode_cached(collection)
    if taken.layout is None:
        return None
    if taken.planned is None:
        planned = _plan(taken.encoded)
        starts = [
            [span.start for leaf in item.leaves for span in leaf.spans] for item in (taken.layout, planned)
        ]
        taken.planned = starts[0] == starts[1] and len(state.storage) == planned.nbytes
    if not taken.planned:
        return None
    state.users = users
    return state.storage
