"""Pickle and copy collections through the flat encoding, so that deep trees do not recurse.

A pickle holds bytes, JSON and the values of non-tensor data. A file of :func:`torch.save` holds tensors and names
one function, and can be read with ``weights_only=True`` if those values are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._python.public_names import set_module
from .._torch.kernels import PLAIN
from .._torch.private import get_cached_seqlens, get_ragged_dim
from .._tree.backends import get_backends
from .._tree.buffers import Leaves
from .._tree.components import JaggedParts, get_parts
from .._tree.defaults import add_key_note
from .._tree.devices import fix_decoded_devices
from .._tree.node import Core, CoreT, make_dense
from .._tree.walks import list_holders
from .decode import decode, decode_all
from .node_kinds import KINDS, Encoded, encode, get_key_path

_NO_ATTRIBUTES: dict[str, object] = {}

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
    leaves = leaves.tensors if isinstance(leaves, Leaves) else _join_jagged(leaves)
    made = decode_all(Encoded(nodes, leaves, values, classes, attributes or {}), {})
    for position, keeper in (keepers or {}).items():
        made[position]._keeper = keeper
    return fix_decoded_devices(made[0], nodes, leaves)


def reduce_collection(node: Core, protocol: int) -> tuple[object, ...]:
    """Return what ``__reduce_ex__`` of a collection returns: a rebuild function, its arguments, the attributes of the root."""
    reduced = None
    general = partial(_encode_for_pickle, node, protocol)
    for attachment in get_backends(node):
        reduced = reduced or attachment.reduce(node, protocol, general)
    reduced = reduced or (rebuild_collection, general())
    attributes = KINDS.attributes_of(node)
    return (*reduced, (attributes,)) if attributes else reduced


def _encode_for_pickle(node: Core, protocol: int) -> tuple[object, ...]:
    """Return the arguments of :func:`rebuild_collection`."""
    # torch.save uses protocol 2, and its files hold the tensors in the format of torch.
    encoded = encode(node, shared=True)
    leaves = Leaves(encoded.leaves) if protocol > 2 else _split_jagged(_separate_storages(encoded.leaves))
    encoded.attributes.pop(0, None)
    encoded.classes = encoded.reduce_classes()
    keepers = {i: object._keeper for i, object in enumerate(encoded.objects)}
    kept = {i: keeper for i, keeper in keepers.items() if keeper is not None}
    parts = encoded.nodes, leaves, encoded.values, encoded.classes
    return (*parts, encoded.attributes, kept) if kept else make_state(encoded, leaves)


def _split_jagged(leaves: list[Tensor]) -> list[object]:
    """Replace jagged leaves by their parts, which ``torch.load`` reads with ``weights_only`` in every release."""
    splits: dict[int, object] = {}
    for leaf in leaves:
        if leaf.layout is torch.jagged and id(leaf) not in splits:
            parts = JaggedParts.of(leaf)
            parts = parts._replace(values=parts.values.detach())
            splits[id(leaf)] = (*parts, leaf.requires_grad, isinstance(leaf, Parameter))
    return [splits.get(id(leaf), leaf) for leaf in leaves]


def _join_jagged(leaves: list[Any]) -> list[Tensor]:
    """Build the leaves that :func:`_split_jagged` has replaced; a leaf that occurs twice is built once."""
    joined: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, tuple) and id(leaf) not in joined:
            *parts, grad, is_parameter = leaf
            made = JaggedParts(*parts).check().join()
            joined[id(leaf)] = Parameter(made, grad) if is_parameter else made.requires_grad_(grad)
    return [joined.get(id(leaf), leaf) for leaf in leaves]


def make_state(encoded: Encoded, leaves: object) -> tuple[object, ...]:
    """Return the arguments of :func:`rebuild_collection`, which are also the state that a collection is restored from."""
    # Omit an empty argument, so that older releases can read the pickle.
    more = (encoded.attributes,) if encoded.attributes else ()
    return encoded.nodes, leaves, encoded.values, encoded.classes, *more


_foreign: Callable[[type, object], Any] | None = None


def set_foreign_state(read: Callable[[type, Any], Any]) -> None:
    """Register the function that decodes an attribute dict from a pickle of tensordict."""
    global _foreign
    _foreign = read


def restore_state(node: Core, state: Any) -> None:
    """Restore a collection from the result of ``__getstate__``, or set the attributes of the root."""
    if len(state) == 1 and isinstance(state, tuple):
        KINDS.set_attributes(node, state[0])
        return
    if _foreign is not None and isinstance(state, dict):
        decoded = _foreign(type(node), state)
    else:
        decoded = decode(Encoded(*state), fix_devices=True)
    names = [name for base in type(decoded).__mro__ for name in getattr(base, "__slots__", ())]
    for name in [*names, *getattr(decoded, "__dict__", ())]:
        if name != "__weakref__" and hasattr(decoded, name):
            object.__setattr__(node, name, getattr(decoded, name))
    KINDS.set_attributes(node, KINDS.attributes_of(decoded))


def copy_deeply(node: Core, memo: dict[int, Any]) -> object:
    """Copy the leaves and values of a collection, see :func:`copy.deepcopy`; an object that occurs twice is copied once."""
    for copy in (_copy_dense, _copy_stacked):
        whole = copy(node, memo)
        if whole is not None:
            return whole
    encoded = encode(node, shared=True)
    _copy_without_storage(encoded.leaves, memo)
    leaves: list[Tensor] = []
    kept = memo.setdefault(id(memo), [])
    try:
        for leaf in encoded.leaves:
            clone = None if id(leaf) in memo else _copy_filled(leaf, memo, kept)
            leaves.append(deepcopy(leaf, memo) if clone is None else clone)
    except Exception as error:
        add_key_note(error, get_key_path(encoded.nodes, [len(leaves)]))
        raise
    values = deepcopy(encoded.values, memo)
    # deepcopy of a value has also copied the nodes of this tree that the value refers to; reuse these copies.
    places = list(map(id, encoded.objects))
    made = {i: memo[place] for i, place in enumerate(places) if place in memo}
    if 0 in made:
        return made[0]
    copied = decode_all(Encoded(encoded.nodes, leaves, values, encoded.classes), made)
    memo.setdefault(id(memo), []).append(encoded.objects)
    memo.update(zip(places, copied))
    for position, attributes in encoded.attributes.items():
        if position not in made:
            KINDS.set_attributes(copied[position], deepcopy(attributes, memo))
    return copied[0]


def _copy_dense(root: Core, memo: dict[int, Any]) -> Core | None:
    """Copy a tree of plain nodes without their encoding; None if it has other nodes, a locked one, or one twice."""
    plain = type(make_dense({}, root.batch_size))
    if type(root) is not plain:
        return None
    copied: Core = root._with_children(root._children())
    made: dict[int, Core] = {id(root): copied}
    todo = [(root, copied)]
    kept = memo.setdefault(id(memo), [])
    # By hand: the row `steps: deepcopy of the list` of benchmarks/scale.py.
    for node, copy in todo:
        if node._locked or id(node) in memo:
            return None
        level: Any = copy._children()
        for key, child in level.items():
            if isinstance(child, Tensor):
                leaf = memo.get(id(child))
                if leaf is None and (leaf := _copy_filled(child, memo, kept)) is None:
                    try:
                        leaf = deepcopy(child, memo)
                    except Exception:
                        return None  # the encoding has the key of the leaf for the error, and uses the copies in the memo
                level[key] = leaf
            elif type(child) is plain and id(child) not in made:
                level[key] = made[id(child)] = below = child._with_children(child._children())
                todo.append((child, below))
            else:
                return None
    kept.append(todo)
    memo.update(made)
    return copied


def _copy_stacked(node: Core, memo: dict[int, Any]) -> Core | None:
    """Copy a lazy stack of trees of plain nodes member by member; None if it has more than that."""
    holders, kind = list_holders(node), KINDS.of(node)
    # The children of a kind in a file are read from it, so look at the holders first.
    if not holders or holders[0] is node or kind.type is not type(node) or node._locked or id(node) in memo:
        return None
    members = node._tree_children()
    if len(holders) != len(members) or not all(map(is_, holders, members)):
        return None
    if kind.attributes_of(node) or kind.record_of(node).values:
        return None
    copies = []
    for member in holders:
        copied = _copy_dense(member, memo)
        if copied is None:
            return None  # the encoding uses the copies that are in the memo
        copies.append(copied)
    made = iter(copies)
    stack: Core = node._map_members(lambda _: next(made))
    memo.setdefault(id(memo), []).append(node)
    memo[id(node)] = stack
    return stack


def copy_with_attributes(node: CoreT) -> CoreT:
    """Copy a collection as :func:`copy.copy` does: new nodes, the same leaves, and the attributes of the root."""
    copied = node._shallow_copy()
    if attributes := KINDS.attributes_of(node):
        KINDS.set_attributes(copied, attributes)
    return copied


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


def _copy_filled(leaf: Tensor, memo: dict[int, Any], kept: list[object]) -> Tensor | None:
    """Return a clone of a plain leaf that fills its storage, and add both to the ``memo`` of deepcopy; None for others."""
    # deepcopy would create an equal clone, but takes ten times as long.
    # torch warns when .grad of a tensor that is not a leaf of the autograd graph is read.
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.requires_grad:
        return None
    if True in (
        leaf.grad is not None,
        leaf.__dict__ != _NO_ATTRIBUTES,
        not (leaf.is_cpu or leaf.is_cuda),
        leaf.is_quantized,
        leaf.is_conj(),
        leaf.is_neg(),
        not leaf.is_contiguous(),
    ):
        return None
    storage = leaf.untyped_storage()
    if storage.nbytes() != leaf.nbytes or id(storage) in memo:
        return None
    try:
        copied = leaf.clone()
    except NotImplementedError:
        return None  # clone() does not support integers of less than a byte; deepcopy copies the storage
    memo[id(leaf)] = copied
    memo[id(storage)] = copied.untyped_storage()
    # Keep the storage alive, as deepcopy does: a freed object's id in the memo could be reused.
    kept.append(storage)
    return copied


def _copy_without_storage(leaves: list[Tensor], memo: dict[int, Any]) -> None:
    """Add clones of leaves without a storage, for which deepcopy fails, to its ``memo``."""
    for leaf in leaves:
        if type(leaf) is not Tensor or id(leaf) in memo:
            continue
        if leaf.layout not in _DEEP or (leaf.is_nested and leaf.layout is torch.strided):
            if leaf.is_leaf and leaf.grad is None and not leaf.__dict__:
                memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)


torch.serialization.add_safe_globals([rebuild_collection])
