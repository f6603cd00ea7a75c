"""Registration of collections as torch pytree nodes, for vmap, grad, export and ``tree_map``.

vmap returns leaves with fewer dims, so a pytree context stores no size that a leaf can provide. It stores which child
provides the batch size, and how many feature dims that child has. A leaf may be replaced by any object (vmap passes
ints, export passes dicts), so only ``shape`` of a leaf is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._encode.node_kinds import KINDS, NodeKind
from .._encode.records import Record
from .._encode.value_codec import is_same_value, join, split
from .._torch.kernels import PLAIN
from .._torch.private import functorch_level, get_mapped_dim, wrap_jacobians
from .._torch.private import pytree as torch_pytree
from .._tree.defaults import get_tree_children, show_path
from .._tree.dim_names import inherit_names, set_batch_size
from .._tree.node import Core
from .._tree.ragged import get_display_shape
from .._tree.walks import expand, list_nested, visit, walk
from .mapped_names import get_names_after, get_names_before

Context = tuple[Any, ...]

#: Registrar functions by base class; a registrar also registers the subclasses of its base.
_REGISTRARS: dict[type, Callable[[object], None]] = {}


class _Jacobian(threading.local):
    """What this thread builds for jacrev or jacfwd: a basis or the result, in which ``ndim`` dims are those of the first input.

    A new first dim of the basis is ``has_first``; the result loses it.
    """

    ndim: int | None = None
    has_first: bool = False


_jacobian = _Jacobian()
#: One item for each Jacobian that any thread builds: empty lists are faster to test than attributes of a thread.
_in_progress: list[None] = []


def _has_first_dim() -> bool:
    return not torch.compiler.is_compiling() and _jacobian.has_first


def _finish_jacobian(build: Callable[[], object], ndim: int | None) -> object:
    """Build the basis of jacrev or jacfwd, or their result, in which Jacobians replace leaves."""
    before = _jacobian.ndim, _jacobian.has_first
    _jacobian.ndim, _jacobian.has_first = ndim, True
    _in_progress.append(None)
    try:
        return build()
    finally:
        _in_progress.pop()
        _jacobian.ndim, _jacobian.has_first = before


wrap_jacobians(_finish_jacobian)

#: Key in ``_backends`` for the source of the batch size, for nodes in which no tensor provides it.
_SIZES = "pytree"


def register(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    keys: Callable[[Any], Iterable[str]],
    dump: Callable[[Any], Any] = tuple,
    load: Callable[[Any], Any] = tuple,
) -> None:
    """Register one class as a torch pytree node. ``keys`` returns the names of the children from a context.

    >>> class Pair:
    ...     def __init__(self, items):
    ...         self.items = items
    >>> register(
    ...     Pair, lambda pair: (list(pair.items), ()), lambda items, context: Pair(items), lambda context: ("a", "b"))
    >>> torch_pytree.tree_leaves(Pair([1, 2]))
    [1, 2]
    """
    # torch.export.save stores a context as ``dump(context)``, which the value codec writes; ``load`` is the inverse.

    def with_keys(node: Core) -> tuple[list[tuple[Any, object]], object]:
        children, context = flatten(node)
        return [(torch_pytree.MappingKey(key), child) for key, child in zip(keys(context), children)], context

    torch_pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
        to_dumpable_context=lambda context: split(dump(context)),
        from_dumpable_context=lambda dumped: load(join(*dumped)),
    )


def register_with_subclasses(base: type, registrar: Callable[[object], None]) -> None:
    """Call ``registrar`` for a class and all its subclasses, including those that are defined later.

    >>> class Values:  # a collection calls the registrar of its nearest registered base when it is defined
    ...     pass
    >>> register_with_subclasses(Values, lambda cls: print(cls.__name__))
    Values
    """
    _REGISTRARS[base] = registrar
    for cls in expand([base], type.__subclasses__):
        register_as_its_base(cls)


def register_as_its_base(cls: type) -> None:
    """Register a class with the registrar of its nearest registered base."""
    if cls not in torch_pytree.SUPPORTED_NODES:
        registrar = next((_REGISTRARS[base] for base in cls.__mro__ if base in _REGISTRARS), None)
        if registrar is not None:
            registrar(cls)


def has_leaves(node: Core) -> bool:
    """Return True if at least one leaf is below a node."""
    if not PLAIN.isdisjoint(map(type, node._tree_children())):
        return True
    for level in walk(node):
        for child in level._tree_children():
            if type(child) in PLAIN or not isinstance(child, Core):
                return True
    return False


def leaves_below(nodes: list[object]) -> list[Any]:
    """Return the leaves below some nodes: tensors, and the objects that replaced tensors or nodes in a pytree."""
    return [
        item for item in expand(nodes, get_tree_children) if type(item) in PLAIN or not isinstance(item, Core)
    ]


def encode_sizes(node: Core, children: list[Any]) -> tuple[object, ...]:
    """Return how unflattening finds the batch size of a node, then ``(position, extra dims)`` of each child without leaves."""
    # The first item names a child by position and feature dims, and has a third item if the child is a node; or it is the
    # batch size itself if no child has leaves.
    ndim = len(node.batch_size)
    leaf = _get_kept(node)
    level = None
    empty = []
    for position, child in enumerate(children):
        # Hot path: most children are plain.
        if type(child) in PLAIN:
            leaf = leaf or (position, child.ndim - ndim)
        elif not isinstance(child, Core):
            leaf = leaf or (position, child.ndim - ndim if isinstance(child, Tensor) else 0)
        elif has_leaves(child):
            level = level or (position, len(child.batch_size) - ndim, True)
        else:
            tail = child.batch_size[ndim:]
            empty.append((position, tuple(tail)))
            children[position] = child = child._shallow_copy()
            resize_empty(child, tail)
    return (leaf or level or torch.Size(node.batch_size), *empty)


def _get_kept(node: Core) -> object:
    return (node._inner()._backends or {}).get(_SIZES)


def _keep(node: Core, children: list[object], sizes: tuple[Any, ...]) -> None:
    """Store the source of the batch size on a node for the next flatten, if an object replaced the leaf that provides it."""
    source = sizes[0]
    if not isinstance(source, torch.Size):
        child = children[source[0]]
        if not isinstance(child, Tensor) and (not isinstance(child, Core) or _get_kept(child)):
            inner: Any = node._inner()
            inner._backends = {_SIZES: source}


def infer_batch_size(children: list[Any], sizes: tuple[Any, ...]) -> torch.Size:
    """Compute the batch size from ``children``, and set it on the children without leaves."""
    source, *empty = sizes
    if isinstance(source, torch.Size):
        batch_size = source
    else:
        position, extra = source[0], source[1]
        child = children[position]
        shape: Any = _get_shape(child) or ()
        if _in_progress and _is_split(source):
            leaf = next(iter(torch_pytree.tree_leaves(child)))
            return _resize_children(leaf.shape[: leaf.ndim - _jacobian.ndim - extra], children, empty)
        batch_size = torch.Size(shape[:-extra] if extra else shape)
        if functorch_level() is not None or (type(child) not in PLAIN and isinstance(child, Core)):
            # A Jacobian replaces leaves by collections with different batch sizes, and vmap with out_dims=-1 adds its dim
            # after the others, so use only the leading dims that all children share.
            others = {position for position, _ in empty}
            batch_size = _shorten_to_shared(batch_size, children, others)
    if empty:
        leaf = None if isinstance(source, torch.Size) else _leaf_of(children[source[0]])
        hidden = None
        if isinstance(leaf, Tensor) and not torch.compiler.is_compiling():
            hidden = get_mapped_dim(leaf)
        _resize_children(batch_size, children, empty, hidden)
    return batch_size


def _is_split(source: tuple[object, ...]) -> bool:
    """Return True if this thread builds a Jacobian in place of the child that gives the batch size, which was a leaf."""
    return len(source) == 2 and not torch.compiler.is_compiling() and _jacobian.ndim is not None


def _resize_children(
    batch_size: torch.Size, children: list[object], empty: list[Any], hidden: int | None = None
) -> torch.Size:
    """Set the batch size of the children without leaves, and return it; ``hidden`` as for :func:`resize_empty`."""
    for position, tail in empty:
        if isinstance(children[position], Core):
            resize_empty(children[position], torch.Size((*batch_size, *tail)), hidden)
    return batch_size


def _leaf_of(node: object) -> object:
    """Return the first leaf below a node, or None: a tensor, or an object that replaced one in a pytree."""
    while isinstance(node, Core):
        node = next(iter(node._tree_children()), None)
    return node


def _get_shape(child: Any) -> tuple[object, ...] | None:
    """Return the shape of a leaf, the batch size of a node, or None for any other object."""
    # Hot path: most children are plain.
    if type(child) in PLAIN and not child.is_nested:
        shape: torch.Size = child.shape
        return shape
    if isinstance(child, Core):
        return child.batch_size
    return get_display_shape(child) if isinstance(child, Tensor) else None


def _shorten_to_shared(
    batch_size: torch.Size, children: list[object], without_leaves: set[int]
) -> torch.Size:
    """Return the leading dims of ``batch_size`` that all children share, except those without leaves."""
    for i, child in enumerate(children):
        shape = _get_shape(child)
        if shape is not None and shape[: len(batch_size)] != batch_size and i not in without_leaves:
            batch_size = _find_common_prefix(batch_size, shape)
    return batch_size


def _find_common_prefix(first: torch.Size, second: tuple[object, ...]) -> torch.Size:
    """Return the longest common prefix of two shapes."""
    same = [a == b for a, b in zip(first, second)]
    return first[: same.index(False) if False in same else len(same)]


def resize_empty(root: Core, batch_size: torch.Size, hidden: int | None = None) -> None:
    """Set the batch size of a tree without leaves. ``hidden`` is the batch dim that vmap maps over, or None."""

    def resize(node: Core, size: torch.Size) -> Iterator[tuple[object, torch.Size]]:
        ndim = len(node.batch_size)
        stacked = node._members_and_dim()
        if stacked is None:
            for child in list_nested(node):
                yield child, torch.Size((*size, *child.batch_size[ndim:]))
            if hidden is not None:
                node._move_mapped_dim(hidden, size, functorch_level().level())
            set_batch_size(node, size)
        elif len(size) == ndim:
            members, dim = stacked
            for member in members:
                yield member, torch.Size((*size[:dim], *size[dim + 1 :]))

    visit(resize, root, batch_size)


def register_mapping(cls: Any) -> None:
    """Register a class with the constructor ``cls._make(children, batch_size, device, names)``."""

    def unflatten(values: Iterable[object], context: Context) -> object:
        keys, sizes, device, names = context
        children = list(values)
        batch_size = infer_batch_size(children, sizes)
        named = get_names_after(names, batch_size, children, bool(_in_progress) and _has_first_dim())
        if named is not None:
            # Children without leaves were flattened without batch dims, so they lost their dim names.
            for position, _ in sizes[1:]:
                if isinstance(child := children[position], Core):
                    children[position] = inherit_names(child, named, show_path((keys[position],)))
        node = cls._make(dict(zip(keys, children)), batch_size, device, named)
        _keep(node, children, sizes)
        return node

    register(cls, _flatten, unflatten, lambda context: context[0])


def _flatten(node: Core) -> tuple[list[Any], Context]:
    children = dict(node._children())
    values = list(children.values())
    names = get_names_before(node._names, values)
    return values, (tuple(children), encode_sizes(node, values), node.device, names)


class Shell:
    """A node without its entries, part of a pytree context. Shells are equal if their headers and values are equal."""

    __slots__ = ("meta", "node", "values")

    def __init__(self, node: Core, record: Record) -> None:
        self.node = node
        self.meta = record.meta
        self.values = record.values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shell):
            return False
        # There is no hash: a header is a dict, which is not hashable.
        return self.meta == other.meta and is_same_value(dict(self.values), dict(other.values))


def register_kind(kind: NodeKind) -> None:
    """Register the class of a kind and its subclasses, unless its package has registered it as a pytree already."""
    if kind.type not in torch_pytree.SUPPORTED_NODES:
        register_with_subclasses(kind.type, _register_as_kind)


def _register_as_kind(cls: Any) -> None:
    """Register a class whose kind flattens it. Each call looks up the kind, since a nearer one may be added later."""
    # Remove the metadata that leaves provide or the context stores, so that shells compare equal without it.
    bare: dict[str, object] = {"batch_size": torch.Size(), "device": None, "names": None}

    def flatten(node: Any) -> tuple[list[Any], Context]:
        values, context = _flatten(node)
        record = KINDS.of(cls).record_of(node._with_children(dict(node._children()), **bare))
        return values, (*context, Shell(node._with_children({}, **bare), record))

    def unflatten(values: Iterable[object], context: Context) -> object:
        keys, sizes, device, names, shell = context
        children = list(values)
        batch_size = infer_batch_size(children, sizes)
        return shell.node._with_children(
            dict(zip(keys, children)),
            batch_size=batch_size,
            device=device,
            names=get_names_after(names, batch_size, children, bool(_in_progress) and _has_first_dim()),
        )

    def dump(context: Context) -> Context:
        *rest, shell = context
        return (*rest, shell.meta, dict(shell.values))

    def load(dumped: Context) -> Context:
        *rest, meta, values = dumped
        kind = KINDS.of(cls)
        record = Record(meta, values=values, cls=None if cls is kind.type else cls)
        return (*rest, Shell(kind.unflatten(record), record))

    register(cls, flatten, unflatten, lambda context: context[0], dump, load)
