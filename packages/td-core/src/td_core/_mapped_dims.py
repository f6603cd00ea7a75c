"""``in_dims`` and ``out_dims`` of ``torch.vmap`` for collections: negative dims count from the last batch dim.

torch would count the dims of each leaf, including its feature dims. vmap has no extension point for this, so this
module wraps the internal functions of torch that read the dims. Dim 0 is passed unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ._collection import Core
from ._torch_private import pytree as torch_pytree
from ._torch_private import wrap_vmap
from ._walks import walk


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


def get_result_dim(dim: int, node: Core) -> int:
    """Convert an ``out_dims`` value to the position of the new batch dim or raise ValueError; record it in every node."""
    result = _dim_of(dim, len(node.batch_size) + 1, node, f"out_dims={dim}")
    for item in walk(node):
        item._move_mapped_dim(result, None)
    return result


def _dim_of(dim: int, ndim: int, node: Core, provided: str) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"torch.vmap: {provided} is out of range for a {type(node).__name__} of batch size {list(node.batch_size)}; "
            "dims behind the batch are dims of its leaves alone"
        )
    return dim % ndim


def _read_in_dims(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def process(in_dims: object, args: tuple[object, ...], func: object) -> object:
        if in_dims != 0 and args:
            in_dims = normalize_dims(in_dims, args, get_argument_dim)
        return original(in_dims, args, func)

    return process


def _unpack(out_dims: Any, outputs: object) -> object:
    """Return the item of a tuple of one out dim if the function returned one collection, as vmap does for one tensor."""
    single = isinstance(outputs, Core) and type(out_dims) is tuple and len(out_dims) == 1
    return out_dims[0] if single else out_dims


def _read_out_dims(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def unwrap(outputs: object, out_dims: object, *args: object) -> object:
        return original(outputs, normalize_dims(_unpack(out_dims, outputs), outputs, get_result_dim), *args)

    return unwrap


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
wrap_vmap("_concat_chunked_outputs", _join_chunks)
