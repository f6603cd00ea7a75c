"""``in_dims`` and ``out_dims`` of ``torch.vmap`` for collections: negative dims count from the last batch dim.

torch would count the dims of each leaf, including its feature dims. vmap has no extension point for this, so this
module wraps the internal functions of torch that read the dims. Dim 0 is passed unchanged.

A collection without leaves has nothing that torch could map: a placeholder of its batch size is mapped in its place. A lazy
stack whose stack dim is mapped is dense inside vmap; if the function returns that very collection, also out of a call of vmap
in it, the result is lazy again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from .._torch.kernels import PLAIN
from .._torch.private import add_batch_dim, get_mapped_dim, wrap_vmap
from .._torch.private import pytree as torch_pytree
from .._tree.node import Core
from .._tree.walks import expand, walk, zip_walk
from .mapped_names import get_names_after, get_names_before
from .pytree import has_leaves, resize_empty


def normalize_dims(dims: object, provided: object, count: Callable[[int, Core], int]) -> object:
    """Convert vmap dims to non-negative ints for the collections in ``provided``; ``count`` converts one dim."""
    # ``dims`` is an int, None or a pytree prefix of ``provided``.
    if dims is None or dims == 0:
        return dims
    wanted, spec = torch_pytree.tree_flatten(dims)
    if not any(wanted):
        return dims
    try:
        parts = spec.flatten_up_to(provided)
    except ValueError:
        return dims  # in_dims of another structure: vmap itself raises the error
    results = [_count_in(part, dim, count) for dim, part in zip(wanted, parts, strict=True)]
    return torch_pytree.tree_unflatten(results, spec)


def _count_in(part: object, dim: object, count: Callable[[int, Core], int]) -> object:
    if type(dim) is not int or not dim:
        return dim
    return torch_pytree.tree_map(
        lambda item: count(dim, item) if isinstance(item, Core) else dim,
        part,
        is_leaf=lambda item: isinstance(item, Core),
    )


def get_argument_dim(dim: int, node: Core) -> int:
    """Convert an ``in_dims`` value to a batch dim, or raise ValueError; return it unchanged without batch dims."""
    ndim = len(node.batch_size)
    return _dim_of(dim, ndim, node, f"in_dims={dim}") if ndim else dim


def get_result_dim(level: int, dim: int, node: Core) -> int:
    """Convert an ``out_dims`` value to the position of the new batch dim or raise ValueError; record it in every node."""
    result = _dim_of(dim, len(node.batch_size) + 1, node, f"out_dims={dim}")
    _announce_dim(result, level, node)
    return result


def _announce_dim(dim: int, level: int, node: Core) -> None:
    """Tell the nodes where the vmap of a level will insert its dim."""
    for item in walk(node):
        item._move_mapped_dim(dim, None, level)


def _dim_of(dim: int, ndim: int, node: Core, provided: str) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"torch.vmap: {provided} is out of range for a {type(node).__name__} of batch size {list(node.batch_size)}; "
            "dims behind the batch are dims of its leaves alone"
        )
    return dim % ndim


class _Calls(threading.local):
    """The lazy stacks that the calls of vmap in this thread made dense, by level; None while no arguments are mapped."""

    def __init__(self) -> None:
        self.found: list[tuple[weakref.ref[Core], Callable[[Any, int], Any]]] | None = None
        self.by_level: dict[int, list[tuple[weakref.ref[Core], Callable[[Any, int], object]]]] = {}
        self.args: object = None  # the arguments of a call inside of others that have such stacks


_calls = _Calls()


def is_mapping() -> bool:
    """Return True while vmap builds the arguments of its function."""
    return not torch.compiler.is_compiling() and _calls.found is not None


def note_whole(whole: Core, split: Callable[[Any, int], Any]) -> None:
    """Note the dense stack that a function gets for a lazy one; ``split(result, dim)`` makes a lazy stack of its result."""
    if _calls.found is not None:
        _calls.found.append((weakref.ref(whole), split))


def _create_inputs(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def create(dims: object, args: object, level: int, spec: object) -> object:
        if torch.compiler.is_compiling():
            return original(dims, args, level, spec)
        before, _calls.found = _calls.found, []
        given, _calls.args = _calls.args, None
        try:
            made = original(dims, args, level, spec)
            if given is not None:
                _note_again(given, made)
            return made
        finally:
            _calls.by_level[level], _calls.found = _calls.found, before

    return create


def _note_again(given: object, made: object) -> None:
    """Note the dense stacks of outer calls among the arguments, so that their results are split in those calls."""
    start = zip(*[torch_pytree.tree_leaves(tree, is_leaf=_is_node) for tree in (given, made)])
    outer = [(found, *item) for found in _calls.by_level.values() for item in found]
    for left, right in expand(start, _pair_children):
        for found, reference, split in outer:
            if left is reference():
                note_whole(right, partial(_note_result, found, split))


def _pair_children(pair: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Pair the entries of two nodes of one kind; there are none in a lazy stack, which is noted as a whole."""
    left, right = pair
    if not isinstance(left, Core) or type(left) is not type(right) or left._members_and_dim() is not None:
        return []
    return [(child, right._get_child(key)) for key, child in dict(left._children()).items()]


def _note_result(found: list[Any], split: Callable[[Any, int], Any], result: Core, dim: int) -> Core:
    """Note the result of a call for the outer call, which splits it."""
    found.append((weakref.ref(result), split))
    return result


class Placeholder:
    """A collection without leaves in the arguments or results of vmap: a pytree node with one leaf of its batch size."""

    def __init__(self, node: Core, leaf: Tensor) -> None:
        self.node = node
        self.leaf = leaf
        self.names = get_names_before(node._names, [leaf])


def _fill_placeholder(leaves: Iterable[object], item: Placeholder) -> object:
    """Return the collection with the batch size of the mapped leaf."""
    (leaf,) = leaves
    if not isinstance(leaf, Tensor):
        return leaf  # vmap counts leaves by a tree of ints
    result = item.node._shallow_copy()
    resize_empty(result, leaf.shape, get_mapped_dim(leaf))
    result._set_names(get_names_after(item.names, leaf.shape, [leaf]))
    return result


torch_pytree.register_pytree_node(Placeholder, lambda item: ([item.leaf], item), _fill_placeholder)


def _hold_places(tree: object, make: Callable[[Core], Tensor], least: int = 0) -> object:
    """Replace the collections of a tree that have no leaves, and at least ``least`` batch dims, by placeholders."""
    if not _may_need_place(tree) or torch.compiler.is_compiling():
        return tree

    def hold(item: Any) -> Any:
        is_empty = isinstance(item, Core) and len(item.batch_size) >= least and not has_leaves(item)
        return Placeholder(item, make(item)) if is_empty else item

    return torch_pytree.tree_map(hold, tree, is_leaf=_is_node)


def _may_need_place(item: object) -> bool:
    """Return True for a collection without leaves, and for any object that may contain one."""
    if type(item) is tuple:
        return any(map(_may_need_place, item))
    return type(item) not in PLAIN and (not isinstance(item, Core) or not has_leaves(item))


def _make_leaf(node: Core, *mapped: int) -> Tensor:
    """Return a tensor without memory of a batch size, behind the ``mapped`` sizes."""
    return torch.empty((*mapped, *node.batch_size), device="meta")


def _read_in_dims(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def process(in_dims: object, args: tuple[object, ...], func: object) -> object:
        if in_dims != 0 and args:
            in_dims = normalize_dims(in_dims, args, get_argument_dim)
        if torch.compiler.is_compiling():
            return original(in_dims, args, func)
        held = _hold_places(args, _make_leaf, 1) if any(map(_may_need_place, args)) else args
        processed = original(in_dims, held, func)
        _calls.args = args if any(_calls.by_level.values()) else None
        return processed

    return process


def _unpack(out_dims: Any, outputs: object) -> object:
    """Return the item of a tuple of one out dim if the function returned one collection, as vmap does for one tensor."""
    single = isinstance(outputs, Core) and type(out_dims) is tuple and len(out_dims) == 1
    return out_dims[0] if single else out_dims


def _read_out_dims(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def unwrap(outputs: object, out_dims: object, level: int, size: int, func: object) -> object:
        def make(node: Core) -> Tensor:
            made: Tensor = add_batch_dim(_make_leaf(node, size), 0, level)
            return made

        if not torch.compiler.is_compiling():
            for item in torch_pytree.tree_leaves(outputs, is_leaf=_is_node):
                if isinstance(item, Core):
                    _announce_dim(0, level, item)
        dims = normalize_dims(_unpack(out_dims, outputs), outputs, partial(get_result_dim, level))
        if torch.compiler.is_compiling():
            return original(outputs, dims, level, size, func)
        result = original(_hold_places(outputs, make), dims, level, size, func)
        for reference, split in _calls.by_level.pop(level, ()):
            if (whole := reference()) is not None:
                result = _split_again(result, outputs, dims, whole, split)
        return result

    return unwrap


def _split_again(
    result: Any, outputs: Any, dims: object, whole: Core, split: Callable[[Any, int], Any]
) -> object:
    """Make lazy stacks of the results that belong to ``whole`` in the outputs of the function."""
    given, _ = torch_pytree.tree_flatten(outputs, is_leaf=_is_node)
    made, spec = torch_pytree.tree_flatten(result, is_leaf=_is_node)
    flat, prefix = torch_pytree.tree_flatten(dims, is_leaf=lambda item: item is None)
    positions = [
        dim
        for dim, part in zip(flat, prefix.flatten_up_to(outputs), strict=True)
        for _ in torch_pytree.tree_leaves(part, is_leaf=_is_node)
    ]
    for i, (item, dim) in enumerate(zip(given, positions, strict=True)):
        if item is whole and dim is not None:
            made[i] = split(made[i], dim)
        elif isinstance(item, Core) and dim is not None:
            for left, right in zip_walk(item, made[i]):
                for key, child in dict(left._children()).items():
                    if child is whole:
                        right._set_child(key, split(right._get_child(key), dim))
    return torch_pytree.tree_unflatten(made, spec)


def _is_node(item: object) -> bool:
    return isinstance(item, Core)


def _flatten_chunks(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def flatten(chunks: list[Any]) -> object:
        return original([_hold_places(chunk, _make_leaf) for chunk in chunks])

    return flatten


def _join_chunks(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def join(out_dims: object, spec: Any, chunks: Any) -> Any:
        if out_dims != 0:
            first = torch_pytree.tree_unflatten([chunk[0] for chunk in chunks], spec)
            out_dims = normalize_dims(_unpack(out_dims, first), first, _dim_of_chunk)
        return original(out_dims, spec, chunks)

    return join


def _dim_of_chunk(dim: int, node: Core) -> int:
    return dim % len(node.batch_size)


wrap_vmap("_process_batched_inputs", _read_in_dims)
wrap_vmap("_unwrap_batched", _read_out_dims)
wrap_vmap("_create_batched_inputs", _create_inputs)
wrap_vmap("_flatten_chunks_output", _flatten_chunks)
wrap_vmap("_concat_chunked_outputs", _join_chunks)
