"""Collections as torch pytrees: what makes vmap, grad, export and ``tree_map`` work on them.

vmap hands leaves back with fewer dims, so a context holds no size that a leaf can tell: it says which child gives the
batch size, and how many dims that child has beyond it. Any object may stand where a leaf stood (vmap passes ints,
export passes dicts), so nothing is asked of leaves but ``shape``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from ._collection import Core, show_path
from ._dim_names import inherit_names
from ._foreach import PLAIN
from ._mapped_names import get_names_after, get_names_before
from ._nodes import KINDS, NodeKind, Record
from ._ragged import get_display_shape
from ._torch_private import functorch_level, get_mapped_dim
from ._value_codec import is_same_value, join, split

Context = tuple[Any, ...]

#: What registers a class, by the base from which its subclasses have it too.
_REGISTRARS: dict[type, Callable[[Any], None]] = {}

#: Under this name a node keeps what its context said of the batch size, where there is no tensor to tell it.
_SIZES = "pytree"


def register(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    keys: Callable[[Any], Iterable[str]],
    dump: Callable[[Any], Any] = tuple,
    load: Callable[[Any], Any] = tuple,
) -> None:
    """Register a kind with torch's pytrees.

    Args:
        cls: the class; :func:`register_with_subclasses` covers its subclasses.
        flatten: node -> (children, context).
        unflatten: (children, context) -> node.
        keys: context -> a name for each child, for key paths.
        dump: context -> what the value codec can store, for ``torch.export.save``.
        load: the inverse.
    """

    def with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
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


def register_with_subclasses(base: type, registrar: Callable[[Any], None]) -> None:
    """Register a class, the subclasses that it has and, as soon as they are defined, those to come.

    Args:
        base: the class.
        registrar: calls :func:`register` for a class, ``base`` or one derived from it.
    """
    _REGISTRARS[base] = registrar
    todo = [base]
    while todo:
        cls = todo.pop()
        register_as_its_base(cls)
        todo.extend(cls.__subclasses__())


def register_as_its_base(cls: type) -> None:
    """Register a class as the nearest of its bases wants it, if one does."""
    if cls not in torch_pytree.SUPPORTED_NODES:
        registrar = next((_REGISTRARS[base] for base in cls.__mro__ if base in _REGISTRARS), None)
        if registrar is not None:
            registrar(cls)


def has_leaves(node: Core) -> bool:
    """Tell whether any leaf is below a node."""
    todo: list[Any] = [node]
    while todo:
        for child in todo.pop()._tree_children():
            if type(child) in PLAIN or not isinstance(child, Core):
                return True
            todo.append(child)
    return False


def leaves_below(nodes: list[Any]) -> list[Any]:
    """Return the leaves below some nodes: tensors, and the objects that pytrees have in place of tensors and nodes."""
    result, todo = [], nodes[:]
    while todo:
        node = todo.pop()
        if type(node) not in PLAIN and isinstance(node, Core):
            todo.extend(node._tree_children())
        else:
            result.append(node)
    return result


def encode_sizes(node: Core, children: list[Any]) -> tuple[Any, ...]:
    """Return the part of a context from which :func:`infer_batch_size` tells the batch size again.

    The first item is ``(child, extra dims)``, of a leaf if there is one, or, where there is no leaf below, the batch size
    itself; then come, for each child without leaves, its position and the dims it has beyond this node's. In ``children``
    it has no other dims from here on, so that its own context says nothing of a batch size that may vary.
    """
    ndim = len(node.batch_size)
    leaf: Any = _get_kept(node)
    level: Any = None
    empty = []
    for position, child in enumerate(children):
        # A tensor is told at once; asking an abstract class takes longer.
        if type(child) in PLAIN:
            leaf = leaf or (position, child.ndim - ndim)
        elif not isinstance(child, Core):
            leaf = leaf or (position, child.ndim - ndim if isinstance(child, Tensor) else 0)
        elif has_leaves(child):
            level = level or (position, len(child.batch_size) - ndim)
        else:
            tail = child.batch_size[ndim:]
            empty.append((position, tuple(tail)))
            children[position] = child = child._shallow_copy()
            _resize(child, tail)
    return (leaf or level or torch.Size(node.batch_size), *empty)


def _get_kept(node: Core) -> Any:
    return (node._inner()._backends or {}).get(_SIZES)


def _keep(node: Core, children: list[Any], sizes: tuple[Any, ...]) -> None:
    """Keep the way to the batch size where an object stands for the leaf that gave it: there is a next context."""
    source = sizes[0]
    if not isinstance(source, torch.Size):
        child = children[source[0]]
        if not isinstance(child, Tensor) and (not isinstance(child, Core) or _get_kept(child)):
            inner: Any = node._inner()
            inner._backends = {_SIZES: source}


def infer_batch_size(children: list[Any], sizes: tuple[Any, ...]) -> torch.Size:
    """Return the batch size that ``children`` imply, and give it to those of them that have no leaves."""
    source, *empty = sizes
    if isinstance(source, torch.Size):
        batch_size = source
    else:
        position, extra = source
        child = children[position]
        shape: Any = _get_shape(child) or ()
        batch_size = torch.Size(shape[:-extra] if extra else shape)
        if functorch_level() is not None or (type(child) not in PLAIN and isinstance(child, Core)):
            # Collections may stand where leaves stood, as in a Jacobian, with a batch size of their own each, and vmap puts
            # its dim behind all others where out_dims is -1.
            others = {position for position, _ in empty}
            for i, other in enumerate(children):
                shape = _get_shape(other)
                if shape is not None and shape[: len(batch_size)] != batch_size and i not in others:
                    batch_size = _find_common_prefix(batch_size, shape)
    if empty:
        leaf = None if isinstance(source, torch.Size) else _leaf_of(children[source[0]])
        hidden = None
        if isinstance(leaf, Tensor) and not torch.compiler.is_compiling():
            hidden = get_mapped_dim(leaf)
        for position, tail in empty:
            if isinstance(children[position], Core):
                _resize(children[position], torch.Size((*batch_size, *tail)), hidden)
    return batch_size


def _leaf_of(node: Any) -> Any:
    """Return the first leaf below a node, of those that pytrees have in place of tensors and nodes."""
    while isinstance(node, Core):
        node = next(iter(node._tree_children()), None)
    return node


def _get_shape(child: Any) -> tuple[Any, ...] | None:
    """Return the shape of a leaf, or the batch size of a collection; None for an object in their place."""
    # A tensor is told at once; asking an abstract class takes longer.
    if type(child) in PLAIN and not child.is_nested:
        return child.shape  # type: ignore[no-any-return]
    if isinstance(child, Core):
        return child.batch_size
    return get_display_shape(child) if isinstance(child, Tensor) else None


def _find_common_prefix(first: torch.Size, second: tuple[Any, ...]) -> torch.Size:
    """Return the leading sizes that two shapes share."""
    same = [a == b for a, b in zip(first, second)]
    return first[: same.index(False) if False in same else len(same)]


def _resize(root: Core, batch_size: torch.Size, hidden: int | None = None) -> None:
    """Give a node without leaves another batch size, and those below; it lacks the dim ``hidden`` where vmap took that."""
    todo = [(root, batch_size)]
    while todo:
        node, size = todo.pop()
        ndim = len(node.batch_size)
        stacked = node._members_and_dim()
        if stacked is None:
            todo.extend(
                (child, torch.Size((*size, *child.batch_size[ndim:]))) for child in node._iter_nested()
            )
            if hidden is not None:
                node._hide_dim(hidden, size)
            node._set_batch_size(size)
        elif len(size) == ndim:
            members, dim = stacked
            todo.extend((member, torch.Size((*size[:dim], *size[dim + 1 :]))) for member in members)


def register_mapping(cls: Any) -> None:
    """Register a class whose nodes are made by ``cls._make(children, batch_size, device, names)``."""

    def flatten(node: Any) -> tuple[list[Any], Context]:
        children = dict(node._children())
        values = list(children.values())
        return values, (
            tuple(children),
            encode_sizes(node, values),
            node.device,
            get_names_before(node._names, values),
        )

    def unflatten(values: Iterable[Any], context: Context) -> Any:
        keys, sizes, device, names = context
        children = list(values)
        batch_size = infer_batch_size(children, sizes)
        named = get_names_after(names, batch_size, children)
        if named is not None:
            # What has no leaves had no dims in the context, and so no names.
            for position, _ in sizes[1:]:
                if isinstance(child := children[position], Core):
                    children[position] = inherit_names(child, named, show_path((keys[position],)))
        node = cls._make(dict(zip(keys, children)), batch_size, device, named)
        _keep(node, children, sizes)
        return node

    register(cls, flatten, unflatten, lambda context: context[0])


class Shell:
    """A node without entries, in a context; two are equal where their kind says the same of both."""

    __slots__ = ("meta", "node", "values")

    def __init__(self, node: Core, record: Record) -> None:
        self.node = node
        self.meta = record.meta
        self.values = record.values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shell):
            return False
        return self.meta == other.meta and is_same_value(dict(self.values), dict(other.values))

    # A header is JSON, which has no hash.
    __hash__ = None  # type: ignore[assignment]


def register_kind(kind: NodeKind) -> None:
    """Register the class of a kind whose package has not registered it by itself, and its subclasses."""
    if kind.type not in torch_pytree.SUPPORTED_NODES:
        register_with_subclasses(kind.type, _register_as_kind)


def _register_as_kind(cls: Any) -> None:
    """Register a class as its kind takes it apart: the kind that it has then, for one of its own may come later."""
    # What a leaf can tell is taken off, so that it is not compared.
    bare: dict[str, Any] = {"batch_size": torch.Size(), "device": None, "names": None}

    def flatten(node: Any) -> tuple[list[Any], Context]:
        children = dict(node._children())
        values = list(children.values())
        shell = Shell(
            node._with_children({}, **bare), KINDS.of(cls).record_of(node._with_children(children, **bare))
        )
        return values, (
            tuple(children),
            encode_sizes(node, values),
            node.device,
            get_names_before(node._names, values),
            shell,
        )

    def unflatten(values: Iterable[Any], context: Context) -> Any:
        keys, sizes, device, names, shell = context
        children = list(values)
        batch_size = infer_batch_size(children, sizes)
        return shell.node._with_children(
            dict(zip(keys, children)),
            batch_size=batch_size,
            device=device,
            names=get_names_after(names, batch_size, children),
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
