"""Pickle and copy collections through the flat encoding, so that deep trees do not recurse.

A pickle holds bytes, JSON and the values of non-tensor data. A file of :func:`torch.save` holds tensors and names
one function, and can be read with ``weights_only=True`` if those values are plain.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._python.public_names import set_module
from .._torch.kernels import PLAIN
from .._torch.private import get_cached_seqlens, get_ragged_dim
from .._tree.buffers import Leaves
from .._tree.components import JaggedParts, get_parts
from .._tree.devices import fix_decoded_devices
from .._tree.node import Core
from .decode import decode_all
from .node_kinds import Encoded, encode

#: The layouts whose tensors have a working ``__deepcopy__``.
_DEEP = frozenset({torch.strided, torch.jagged, torch.sparse_coo})


@set_module("td_core.pickles")
def rebuild_collection(
    nodes: list[dict[str, object]],
    leaves: list[Tensor],
    values: list[Any],
    classes: dict[int, type],
    attributes: dict[int, dict[str, object]] | None = None,
    keepers: dict[int, object] | None = None,
) -> Any:
    """Rebuild the collection that :meth:`PickleMixin.__reduce_ex__` encoded."""
    # ``classes`` makes pickle import or rebuild the classes of nodes before this call. ``attributes`` holds the attributes
    # of all nodes but the root: those of the root may refer to the root, so pickle sets them afterwards.
    leaves = leaves.tensors if isinstance(leaves, Leaves) else leaves
    made = decode_all(Encoded(nodes, leaves, values, classes, attributes or {}), {})
    for position, keeper in (keepers or {}).items():
        made[position]._keeper = keeper
    return fix_decoded_devices(made[0], nodes, leaves)


def encode_for_pickle(node: Core, protocol: int) -> tuple[object, ...]:
    """Return the arguments of :func:`rebuild_collection`."""
    # torch.save uses protocol 2, and its files hold the tensors in the format of torch.
    encoded = encode(node, shared=True)
    leaves = Leaves(encoded.leaves) if protocol > 2 else _separate_storages(encoded.leaves)
    encoded.attributes.pop(0, None)
    encoded.classes = encoded.reduce_classes()
    keepers = {i: object._keeper for i, object in enumerate(encoded.objects)}
    kept = {i: keeper for i, keeper in keepers.items() if keeper is not None}
    parts = encoded.nodes, leaves, encoded.values, encoded.classes
    return (*parts, encoded.attributes, kept) if kept else make_state(encoded, leaves)


def make_state(encoded: Encoded, leaves: object) -> tuple[object, ...]:
    # Omit an empty argument, so that older releases can read the pickle.
    more = (encoded.attributes,) if encoded.attributes else ()
    return encoded.nodes, leaves, encoded.values, encoded.classes, *more


def _separate_storages(leaves: list[Tensor]) -> list[Tensor]:
    """Clone leaves that share a storage with leaves of another dtype, which torch.save rejects."""
    kinds: dict[int, set[torch.dtype]] = {}
    parts = [_get_strided_parts(leaf) for leaf in leaves]
    for part in chain(*parts):
        kinds.setdefault(part.untyped_storage().data_ptr(), set()).add(part.dtype)
    mixed = {place for place, dtypes in kinds.items() if place and len(dtypes) > 1}
    copies: dict[int, Tensor] = {}
    for leaf, own in zip(leaves, parts):
        if id(leaf) not in copies and any(part.untyped_storage().data_ptr() in mixed for part in own):
            for part in own:
                if id(part) not in copies:  # jagged leaves of equal lengths share the offsets tensor
                    copies[id(part)] = part.detach().clone()
            copy = _assemble_like(leaf, [copies[id(part)] for part in own])
            grad = leaf.requires_grad
            copies[id(leaf)] = Parameter(copy, grad) if type(leaf) is Parameter else copy.requires_grad_(grad)
    return [copies.get(id(leaf), leaf) for leaf in leaves]


def _get_strided_parts(leaf: Tensor) -> list[Tensor]:
    """Return the strided tensors of a leaf: itself, or the values, offsets and lengths of a jagged one."""
    if leaf.layout is torch.jagged:
        return get_parts(leaf)
    plain = type(leaf) in PLAIN and leaf.layout is torch.strided and not leaf.is_nested
    return [leaf] if plain else []


def _assemble_like(leaf: Tensor, parts: list[Tensor]) -> Tensor:
    """Build a leaf with the layout of ``leaf`` from the parts of a jagged tensor, or from one plain tensor."""
    return (
        JaggedParts.of_tensors(get_ragged_dim(leaf), parts)._replace(seqlens=get_cached_seqlens(leaf)).join()
        if leaf.is_nested
        else parts[0]
    )


def copy_plain(leaves: list[Tensor], memo: dict[int, Any]) -> None:
    """Add clones of leaves that fill their storage, and of these storages, to the ``memo`` of deepcopy."""
    # deepcopy would create equal clones, but takes ten times as long.
    for leaf in leaves:
        if type(leaf) is not Tensor:
            continue
        if leaf.layout not in _DEEP or (leaf.is_nested and leaf.layout is torch.strided):
            # deepcopy fails on these layouts, since they have no storage.
            if leaf.is_leaf and leaf.grad is None and not leaf.__dict__:
                memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            continue
        if _has_only_elements(leaf):
            storage = leaf.untyped_storage()
            if id(leaf) in memo or id(storage) in memo:
                continue
            try:
                copied = leaf.clone()
            except NotImplementedError:
                continue  # clone() does not support integers of less than a byte; deepcopy copies the storage
            memo[id(leaf)] = copied
            memo[id(storage)] = copied.untyped_storage()
            # Keep the storage alive, as deepcopy does: a freed object's id in the memo could be reused.
            memo.setdefault(id(memo), []).append(storage)


def _has_only_elements(leaf: Tensor) -> bool:
    """Return True if a plain tensor has no state that its clone would lack, and fills its storage."""
    if leaf.requires_grad or leaf.grad is not None or leaf.__dict__:
        return False
    if leaf.layout is not torch.strided or not (leaf.is_cpu or leaf.is_cuda):
        return False
    if leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or not leaf.is_contiguous():
        return False
    return leaf.untyped_storage().nbytes() == leaf.nbytes


torch.serialization.add_safe_globals([rebuild_collection])
