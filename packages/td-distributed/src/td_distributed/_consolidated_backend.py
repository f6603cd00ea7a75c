"""The storage backend of consolidated collections: moves, copies and pickles them as one buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from td_core import TensorCollection, TensorDict, kinds
from td_core.errors import StructureError
from td_core.pickles import Leaves
from td_core.spi import (
    Encoded,
    StorageBackend,
    decode,
    encode,
    expand,
    guard_forms,
    lock,
    parse_json,
    set_module,
    walk,
)

from . import _consolidated_file, _key_paths, _storage
from ._storage import Layout, Leaf, Span

CollectionT = TypeVar("CollectionT", bound=TensorCollection)

KEY = "consolidated"

_REQUIRES_GRAD = attrgetter("requires_grad")


class EncodedCache:
    """Cached encoding of a consolidated collection, with the messages and pickle header derived from it.

    It is valid while only the contents of leaves change. A lock prevents neither ``td.batch_size = ...`` nor
    ``leaf.data = ...``, so :meth:`is_unchanged` compares everything that could have changed. ``find`` returns the
    layout of the leaves in the storage.

    Attributes:
        encoded: the encoded tree.
        loses_grad: True if a leaf requires grad and a view on the storage in its position would not.
        layout: the spans of the leaves in the storage; None if a leaf is outside of it.
        planned: True if that is the layout of the tensordict wire; None until it was compared.
        sent: the message that announces this collection.
        received: the last received message whose structure and layout were checked to be the same.
        schema: the nodes and :data:`_storage.Columns` as JSON, as pickles hold them.
    """

    __slots__ = (
        "_addresses", "_has_same_forms", "_leaves", "_rows", "encoded", "layout", "loses_grad",
        "planned", "received", "schema", "sent",
    )  # fmt: skip

    def __init__(self, node: Any, find: Callable[[Sequence[Tensor]], Layout | None]) -> None:
        self.encoded = encode(node)
        # The cache belongs to the root, so a reference to it would be a cycle.
        nodes, self.encoded.objects = self.encoded.objects, []
        self.layout = find(self.encoded.leaves)
        self.planned: bool | None = None
        self.sent: Any = None
        self.received: Any = None
        self.schema: str | None = None
        takes_grad = list(map(_REQUIRES_GRAD, self.encoded.leaves))
        self.loses_grad = any(takes_grad) and list(map(_REQUIRES_GRAD, self._view_leaves())) != takes_grad
        #: Per node: the node (None for the root, to avoid a reference cycle), its class, header, keys and children.
        self._rows: list[tuple[object, type, object, list[str], list[object]]] = []
        # Values and nested tensors could change without notice, so no rows are kept and the cache is never valid.
        if self.layout is None or self.encoded.values or any(leaf.is_nested for leaf in self.encoded.leaves):
            return
        self._leaves = list({id(leaf): leaf for leaf in self.encoded.leaves}.values())
        self._has_same_forms = guard_forms(self._leaves)
        self._addresses = list(map(Tensor.data_ptr, self._leaves))
        for item in nodes:
            meta, keys, children = _parts(item)
            held = None if item is node else item
            self._rows.append((held, type(item), deepcopy(meta), [*keys], [*children]))

    def _view_leaves(self) -> list[Tensor]:
        """Rebuild the tree with detached leaves and return its leaves, to see which would still require grad."""
        plain = [leaf.detach() for leaf in self.encoded.leaves]
        return encode(self.rebuild_with(plain)).leaves

    def rebuild_with(self, leaves: list[Tensor]) -> Any:
        """Decode the tree with other leaves."""
        return decode(replace(self.encoded, leaves=leaves))

    def is_unchanged(self, root: TensorCollection) -> bool:
        """Return True if the collection is the same as when it was encoded. Cheaper than encoding it again."""
        for node, cls, meta, keys, children in self._rows:
            item = root if node is None else node
            result = _parts(item)
            same = type(item) is cls and result[0] == meta and [*result[1]] == keys
            if not same or not all(map(is_, result[2], children)):
                return False
        return (
            bool(self._rows)
            and self._has_same_forms(*self._leaves)
            and list(map(Tensor.data_ptr, self._leaves)) == self._addresses
        )


def _parts(node: Any) -> tuple[object, Iterable[str], Collection[object]]:
    """Return the header of a node, its keys, and its child tensors and nodes."""
    if type(node) is TensorDict:
        # Hot path, run before every message: compare the attributes of the header without building it.
        held = node._children()
        return (node.batch_size, node.device, node._names, node._locked), held, held.values()
    record = kinds.record_of(node)
    children = [*record.entries.values(), *record.members.values()]
    return record.meta, [*record.entries, *record.members, *record.values], children


class ConsolidatedBackend(StorageBackend):
    """The storage of a consolidated collection, and the file that it was read from or written to, if any.

    Attributes:
        storage: 1-D uint8 tensor that all leaves are views of.
        filename: the file.
        memory: the ``UntypedStorage`` of ``storage``.
        users: number of references to ``memory`` when the layout was last compared with the layout of the tensordict
            wire; None before.
    """

    __slots__ = ("_encoded", "filename", "memory", "storage", "users")

    def __init__(self, storage: Tensor, filename: Path | None = None) -> None:
        self.storage = storage
        self.filename = filename
        self.memory = storage.untyped_storage()
        self.users: int | None = None
        self._encoded: EncodedCache | None = None

    def encode_cached(self, node: TensorCollection) -> EncodedCache:
        """Return the encoding of ``node``, cached while the collection is unchanged."""
        if self._encoded is None or not self._encoded.is_unchanged(node):
            self._encoded = EncodedCache(node, self._find)
        return self._encoded

    def get_received(self) -> Any:
        """Return the last message that was received into the collection, or None."""
        return None if self._encoded is None else self._encoded.received

    def is_valid_for(self, node: TensorCollection) -> bool:
        """Return True if all leaves are views of the storage; ``leaf.data = ...`` or an unaligned storage makes it False."""
        return self.storage.is_meta or self.encode_cached(node).layout is not None

    def _find(self, leaves: Sequence[Tensor]) -> Layout | None:
        base, size = self.storage.data_ptr(), len(self.storage)
        results = []
        for leaf in leaves:
            if leaf.device != self.storage.device:
                return None
            try:
                pieces, ragged = _storage.pieces_of(leaf)
            except StructureError:
                return None
            spans = []
            for piece in pieces:
                nbytes = piece.numel() * piece.itemsize
                start = piece.data_ptr() - base if nbytes else 0
                if start < 0 or start + nbytes > size or not _storage.is_plain(piece):
                    return None
                spans.append(Span(piece.dtype, piece.shape, start, start + nbytes, 0))
            results.append(Leaf(tuple(spans), ragged))
        # Leaves that overlap without being tied get separate spans when they are sent, so this is not their layout.
        return None if _storage.overlap(results) else Layout(results, size)

    def _copy_storage(self, node: Any, move: Any) -> Any:
        taken = self.encode_cached(node)
        if taken.layout is None or taken.loses_grad:
            return None
        storage = move(self.storage)
        leaves = _storage.Views(storage).leaves(taken.layout, taken.encoded.leaves)
        result = taken.rebuild_with(leaves)
        if node._locked:
            lock(result, by_user=node._locked is True)
        return attach_backend(result, ConsolidatedBackend(storage))

    def clone(self, node: object) -> Any:
        """Return an unlocked copy of ``node``; None on the CPU, where cloning leaf by leaf is as fast."""
        if self.storage.device.type == "cpu":
            return None
        result = self._copy_storage(node, torch.clone)
        return result if result is None else result.unlock_()

    def move(self, node: object, device: torch.device, non_blocking: bool | None) -> Any:
        """Move ``node`` to another device with a single copy of its storage."""
        result = self._copy_storage(node, partial(Tensor.to, device=device, non_blocking=bool(non_blocking)))
        if result is not None:
            set_devices(result, device)
        return result

    def pin(self, node: object) -> Any:
        """Copy ``node`` to pinned memory with a single copy of its storage."""
        return None if self.storage.is_cuda else self._copy_storage(node, Tensor.pin_memory)

    def write(
        self,
        node: Any,
        source: object,
        targets: Sequence[Tensor],
        values: Sequence[Tensor],
        non_blocking: bool,
    ) -> bool | None:
        """Copy the storage of ``source`` if both layouts are the same; None where that gains nothing (CPU to CPU)."""
        other = get_backend(source)
        if other is None or len(other.storage) != len(self.storage):
            return None
        if self.storage.device.type == "cpu" and other.storage.device.type == "cpu":
            return None
        left, right = self.storage.data_ptr(), other.storage.data_ptr()
        every = node._leaves()
        if len(every) != len(targets) or any(
            first.data_ptr() - left != second.data_ptr() - right
            or first.dtype != second.dtype
            or first.requires_grad
            for first, second in zip(targets, values, strict=True)
        ):
            return None
        self.storage.copy_(other.storage, non_blocking=non_blocking)
        return True

    def reduce(
        self, node: Any, protocol: int, encode: Callable[[], tuple[object, ...]]
    ) -> tuple[Any, ...] | None:
        """Pickle ``node`` as its structure in JSON and one buffer; None if it must be pickled leaf by leaf."""
        taken = self.encode_cached(node)
        if taken.layout is None or taken.loses_grad:
            return None
        attributes = _encode_attributes(node)
        if attributes and len(attributes.nodes) != len(taken.encoded.nodes):
            return None  # a node under two keys is encoded twice and would get its attributes twice
        if taken.schema is None:
            nodes = taken.encoded.nodes
            taken.schema = _consolidated_file.as_json([nodes, _storage.to_columns(taken.layout)], nodes)
        # torch.save pickles with protocol 2 and writes tensors itself.
        storage = [self.storage] if protocol <= 2 else Leaves([self.storage], in_place=True)
        # Earlier releases cannot load attributes, so pass them only if there are some.
        more = (attributes.attributes,) if attributes else ()
        return rebuild_consolidated, (
            taken.schema,
            storage,
            taken.encoded.values,
            taken.encoded.reduce_classes(),
            *more,
        )


def _encode_attributes(root: TensorCollection) -> Encoded | None:
    """Encode a collection with the attributes that were set on nodes below the root; None if no node has one."""
    nodes = expand(
        [root], lambda node: [child for child in node._tree_children() if isinstance(child, TensorCollection)]
    )
    if not any(kinds.of(node).attributes_of(node) for node in nodes if node is not root):
        return None
    encoded = encode(root, shared=True)
    encoded.attributes.pop(0, None)
    return encoded


@set_module("td_distributed.consolidated_pickles")
def rebuild_consolidated(
    schema: str,
    storage: list[Tensor] | Leaves,
    values: list[object],
    classes: dict[int, type],
    attributes: dict[int, dict[str, object]] | None = None,
) -> TensorCollection:
    """Rebuild the collection that :meth:`ConsolidatedBackend.reduce` pickled; raise FormatError if the pickle is damaged."""
    # ``attributes`` are those of the nodes below the root, by position of the node.
    if isinstance(storage, Leaves):
        nodes, columns = parse_json(schema)
        (data,) = storage.tensors
        leaves = _storage.Views(data).leaves(_storage.from_columns(columns))
        encoded = Encoded(nodes, leaves, values, classes, attributes or {})
        result: TensorCollection = decode(encoded, fix_devices=True)
    else:
        # torch.load() calls this with untrusted data, so check all of it.
        (data,) = storage
        with _consolidated_file.convert_damage("the pickle"):
            nodes, columns = parse_json(schema)
            layout = _storage.from_columns(columns)
            _key_paths.check_tree(nodes, len(layout.leaves), len(values))
            result = _consolidated_file.assemble_table(nodes, layout, values, data, classes, attributes)
    return attach_backend(result, ConsolidatedBackend(data))


torch.serialization.add_safe_globals([rebuild_consolidated])


def set_devices(collection: TensorCollection, device: torch.device) -> None:
    """Set the device of a collection and of the nodes below it, whose leaves are there already."""
    for node in walk(collection):
        node._set_device(device)


def attach_backend(collection: CollectionT, state: ConsolidatedBackend) -> CollectionT:
    """Attach a storage backend to a collection, and return the collection."""
    node: Any = collection._inner()
    node._backends = {**(node._backends or {}), KEY: state}
    return StorageBackend.pack(collection, state.storage)


def get_backend(collection: Any) -> ConsolidatedBackend | None:
    """Return the consolidated backend of a collection, or None."""
    if not isinstance(collection, TensorCollection):
        raise TypeError(f"a collection is needed, such as a TensorDict; got {type(collection).__name__}")
    result: ConsolidatedBackend | None = (collection._inner()._backends or {}).get(KEY)
    return result


def storage_of(collection: TensorCollection) -> Tensor:
    """Return the storage of a consolidated collection: a 1-D uint8 tensor that all its leaves are views of.

    Raises:
        StructureError: the collection is not consolidated.

    >>> storage_of(TensorDict({"a": torch.zeros(3)}).consolidate()).shape
    torch.Size([16])
    """
    state = get_backend(collection)
    if state is None or not state.is_valid_for(collection):
        raise StructureError(
            f"this {type(collection).__name__} is not consolidated: call consolidate() first"
        )
    return state.storage
