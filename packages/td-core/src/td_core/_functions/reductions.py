"""Reductions and scans over batch dims, over feature dims, or over all dims.

All methods read ``dim`` in the same way. If it is omitted or None, each leaf is reduced to one number, and the batch size
becomes []. A dim, a name or a tuple of these reduces batch dims. ``"feature"`` reduces the feature dims of each leaf.
``reduce=True`` reduces all leaves together to one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from functools import reduce as reduce_in_order
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._plans.plans import ShapePlan, as_int, wrap_dim
from .._plans.reductions import (
    Pair,
    flatten_features,
    make_call,
    make_single_dim_call,
    reduce_plan,
    scan_plan,
)
from .._torch.dtypes import as_dtype
from .._torch.kernels import foreach, make_op
from .._tree.defaults import show_path
from .._tree.dim_names import find_dims
from .._tree.node import Core, CoreT, identity, make_dense
from .._tree.packed import list_filled
from .._tree.walks import has_entries, visit, zip_walk
from .._writes.check import LEAF_ERRORS, rephrase_error
from ..errors import StructureError
from ..typing import NO_DEFAULT, DtypeLike, NestedKey, NoDefault
from .joining import stack_densely
from .operands import raise_at_entry, raise_at_leaf, run_each_leaf, transform, write_result

_NORM = make_op("norm", torch.linalg.vector_norm, "autocast")
F = TypeVar("F", bound=Callable[..., object])
#: A dim or several, by position or name; None and NO_DEFAULT as torch and collections have them.
Dims = int | str | Sequence[int | str] | NoDefault | None
KeyTransform = Callable[[NestedKey], NestedKey]


def make_reduction(name: str, what: str) -> Callable[..., Any]:
    """Build the method ``name`` of a reduction with a ``dtype`` argument."""

    def method(
        self: object,
        dim: Dims = NO_DEFAULT,
        keepdim: bool | NoDefault = NO_DEFAULT,
        *,
        dtype: DtypeLike | None = None,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Any:
        options = {} if dtype is None else {"dtype": as_dtype(dtype)}
        return _reduce(self, name, dim, keepdim, reduce, key_transform, options)

    return _document(method, name, what, "dtype: the dtype to compute in.")


def make_deviation(name: str, what: str) -> Callable[..., Any]:
    """Build the method ``name`` of a reduction with a ``correction`` argument."""

    def method(
        self: object,
        dim: Dims = NO_DEFAULT,
        keepdim: bool | NoDefault = NO_DEFAULT,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Any:
        # Do not pass torch's default: some tensor subclasses reject the argument.
        options = {} if correction == 1 else {"correction": correction}
        return _reduce(self, name, dim, keepdim, reduce, key_transform, options)

    return _document(
        method, name, what, "correction: the divisor is the number of elements minus this number."
    )


def make_plain_reduction(name: str, what: str) -> Callable[..., Any]:
    """Build the method ``name`` of a reduction with ``dim``, ``keepdim`` and ``reduce`` only."""

    def method(
        self: object, dim: Dims = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None
    ) -> Any:
        return _reduce(self, name, dim, keepdim, reduce, None, {})

    return _document(method, name, what, None)


def make_indexed_reduction(name: str, what: str) -> Callable[..., Any]:
    """Build the method ``name`` of a reduction that returns values and indices."""

    def method(
        self: Core,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        if name not in _PAIRS and (isinstance(dim, Core) or getattr(dim, "ndim", False)):
            return getattr(self, f"{name}imum")(dim)
        if dim is NO_DEFAULT or dim is None:
            return _reduce(self, name if name in _PAIRS else f"a{name}", dim, keepdim, reduce, None, {})
        result_type = getattr(torch.return_types, name) if return_indices else None
        if dim == "feature":
            call = methodcaller(name, -1)
            pair = call(concat_features(self, name)) if reduce else reduce_features(self, call, 2)
            return _wrap_pair(pair, result_type)
        place = parse_dim(self, name, dim)
        joined = methodcaller(name, place, keepdim)(concat_elements(self, name, place)) if reduce else None

        def make(dims: Any) -> Callable[[Tensor], object]:
            return methodcaller(name, dims[0], keepdim)

        return reduce_pair(
            self, name, reduce_plan(tuple(self.batch_size), (place,), keepdim, make), joined, result_type
        )

    more = "; omitted or None to reduce each leaf to one number, without indices.\n            keepdim: keep the reduced dim"
    return _document_pair(method, name, what, f' or ``"feature"``{more}, with size 1')


def make_quantile(name: str, what: str) -> Callable[..., Any]:
    """Build the method ``name`` that computes quantiles."""

    def method(
        self: Core,
        q: float | Tensor,
        dim: Dims = NO_DEFAULT,
        keepdim: bool | NoDefault = NO_DEFAULT,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Any:
        return _compute_quantiles(name, self, q, dim, keepdim, interpolation, reduce, key_transform)

    options = """q: a number between 0 and 1, or a 1-d float tensor of them, which adds a first dim to every leaf (and to the
                batch size, unless each leaf is reduced to one number).
            interpolation: as in :func:`torch.quantile`."""
    return _document(method, name, what, options, "0.5, ")


def make_scan(name: str, what: str) -> Callable[..., Any]:
    """Build the method ``name`` of a cumulative operation that returns values and indices."""

    def method(self: Core, dim: int | str, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        place = parse_dim(self, name, dim)
        joined = methodcaller(name, place)(concat_elements(self, name, place)) if reduce else None
        result_type = getattr(torch.return_types, name) if return_indices else None
        plan = scan_plan(tuple(self.batch_size), place, partial(methodcaller, name))
        return reduce_pair(self, name, plan, joined, result_type)

    return _document_pair(method, name, what, "")


def _document_pair(method: F, name: str, what: str, more: str) -> F:
    """Set the name and the manual of a method that returns values and indices; ``more`` describes other dims."""
    doc = f"""Return {what} along a batch dim, with its indices.

        Args:
            dim: a batch dim, its name{more}.
            reduce: reduce all leaves together; the values and indices are tensors instead of collections.
            return_indices: False to return only the values.

        Returns:
            A ``torch.return_types.{name}`` of two collections, ``values`` and ``indices``, or only the values.

        Raises:
            IndexError: the dim is out of range.
            DimNamesError: no dim has this name.

        >>> td = TensorDict({{"a": torch.tensor([[1.0, 2.0], [3.0, 0.0]])}}, batch_size=[2])
        >>> torch.equal(td.{name}(0).values["a"], td["a"].{name}(0).values)
        True
        """
    method.__name__, method.__doc__ = name, doc
    return method


def _document(method: F, name: str, what: str, option: str | None, given: str = "") -> F:
    """Set the name and the manual of a reduction; ``option`` describes what others lack, ``given`` begins the calls."""
    method.__name__ = name
    more = f"\n            {option}" if option else ""
    transform = (
        "\n            key_transform: a function from the key of an entry, without its parents, to its new key."
        if option
        else ""
    )
    method.__doc__ = f"""Return {what} along batch dims, feature dims or all dims.

        Args:
            dim: a batch dim, its name or a tuple of these; ``"feature"`` for the feature dims of each leaf; omitted or
                None to reduce each leaf to one number.
            keepdim: keep the reduced dims, with size 1.{more}
            reduce: reduce all leaves together, to one tensor.{transform}

        Returns:
            A collection without the reduced dims, or one tensor if ``reduce`` is True.

        Raises:
            IndexError: a dim is out of range.
            DimNamesError: no dim has this name.

        >>> td = TensorDict({{"a": torch.tensor([[1.0, 2.0], [3.0, 0.0]])}}, batch_size=[2])
        >>> torch.equal(td.{name}({given}0)["a"], td["a"].{name}({given}0))
        True
        >>> torch.equal(td.{name}({given}reduce=True), td["a"].{name}({given.strip(", ")}))
        True
        """
    return method


_NO_KEEPDIM = "{name}: dim='feature' has no keepdim=True, for leaves differ in how many dims that is"

#: Reductions that take only one dim in torch.
_ONE_DIM = frozenset({"prod", "argmax", "argmin", "count_nonzero"})
#: Reductions that return values and indices in torch also where each leaf is reduced to one number.
_PAIRS = frozenset({"median", "nanmedian"})


def _reduce(
    node: Any,
    name: str,
    dim: Dims,
    keepdim: bool | NoDefault,
    reduce: bool | None,
    key_transform: KeyTransform | None,
    options: Mapping[str, object],
) -> object:
    """Reduce a collection by the function ``name`` of tensors."""
    keep = keepdim is True
    if dim == "feature":
        if keep:
            raise TypeError(_NO_KEEPDIM.format(name=name))
        call = methodcaller(name, -1, **options)
        if reduce:
            return call(concat_features(node, name))
        (result,) = reduce_features(node, call)
    else:
        dims = parse_dims(node, name, dim)
        if name in _ONE_DIM and (keep or dims is not None):
            make = make_single_dim_call(lambda value, place: getattr(value, name)(place, **options), keep)
        elif name in _PAIRS:
            make = make_single_dim_call(lambda value, place: getattr(value, name)(place)[0], keep)
        else:
            make = make_call(name, keep, options)
        if reduce and dims is None and name.startswith("arg"):  # positions in the order of the entries
            return make(None)(torch.cat([leaf.flatten() for leaf in _list_tensors(node, name)]))
        if reduce:
            return make(dims)(concat_elements(node, name, None if dims is None else dims[0]))
        result = transform(name, node, reduce_plan(tuple(node.batch_size), dims, keep, make))
    return result if key_transform is None else _rename_all_keys(result, key_transform)


def reduce_bools(
    node: Core,
    combine: Callable[..., bool],
    leaf: Callable[[Tensor], object],
    dim: Dims,
    keep: bool,
) -> object:
    """Compute ``all`` or ``any``: one bool, or a collection of bools if there is a dim, or dims are kept."""
    if dim is not None or keep:
        name = combine.__name__
        plan = reduce_plan(
            tuple(node.batch_size), parse_dims(node, name, dim), keep, make_call(name, keep, {})
        )
        return transform(name, node, plan)
    leaves = list_filled(node) or node._leaves()
    try:
        return combine(map(leaf, leaves))
    except LEAF_ERRORS as error:
        raise_at_leaf(error, combine.__name__, node, lambda value: bool(leaf(value)), leaves)


def compute_norms(
    node: CoreT,
    out: object,
    dtype: DtypeLike | None,
    key_transform: KeyTransform | None,
    reduce: bool | None,
) -> Any:
    """Compute the 2-norm of each leaf, or of all leaves together, see ``norm``."""
    if reduce:
        if out is not None or key_transform is not None:
            raise TypeError(
                "norm(reduce=True) returns one tensor, so it takes neither out= nor key_transform="
            )
        return _compute_norm(node, as_dtype(dtype))
    leaf: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dtype=as_dtype(dtype))
    if dtype is None and node._members_and_dim() is None and not torch.compiler.is_compiling():
        leaf = _make_norm(node._leaves())
    result = transform("norm", node, reduce_plan(tuple(node.batch_size), None, False, lambda dims: leaf))
    if key_transform is not None:
        result = _rename_all_keys(result, key_transform)
    return result if out is None else write_result(out, result.batch_size, result)


def reduce_by_logsumexp(node: CoreT, dim: Dims, keepdim: bool, out: object) -> CoreT:
    """Compute the logarithm of the sum of exponentials over batch dims, see ``logsumexp``."""
    dims = parse_dims(node, "logsumexp", dim)
    if dims is None:
        dims = tuple(range(len(node.batch_size)))
    if dims:
        make = make_call("logsumexp", keepdim, {})
        result = transform("logsumexp", node, reduce_plan(tuple(node.batch_size), dims, keepdim, make))
    else:  # torch reads an empty dims tuple as all dims
        result = run_each_leaf("logsumexp", node, lambda leaf: leaf[None].logsumexp(0))
    return result if out is None else write_result(out, result.batch_size, result)


def _compute_quantiles(
    name: str,
    node: Core,
    q: float | Tensor,
    dim: Dims,
    keepdim: bool | NoDefault,
    interpolation: str,
    reduce: bool | None,
    key_transform: KeyTransform | None,
) -> object:
    """Compute quantiles by the function ``name`` of torch over batch dims, feature dims or all dims."""
    keep, function = keepdim is True, getattr(torch, name)

    def call(value: Tensor, place: int) -> Tensor:
        level = q.to(value.device, value.dtype) if isinstance(q, Tensor) else q
        result: Tensor = function(value, level, place, interpolation=interpolation)
        return result

    front = len(q) if isinstance(q, Tensor) and q.ndim == 1 else None
    if dim == "feature":
        if keep:
            raise TypeError(_NO_KEEPDIM.format(name=name))
        if reduce:
            return call(concat_features(node, name), -1)
        item = reduce_features(node, lambda value: call(value, -1), front)
        result = item[0] if front is None else stack_densely(item, 0)
    else:
        dims = parse_dims(node, name, dim)
        make = make_single_dim_call(call, keep, front is not None)
        if reduce:
            return make(dims)(concat_elements(node, name, None if dims is None else dims[0]))
        # If leaves are reduced to one number per quantile, their first dim is not a batch dim.
        plan = reduce_plan(
            tuple(node.batch_size), dims, keep, make, None if dims is None and not keep else front
        )
        result = transform(name, node, plan)
    return result if key_transform is None else _rename_all_keys(result, key_transform)


def _compute_norm(node: Core, dtype: torch.dtype | None) -> Tensor:
    """Compute the 2-norm of all leaves together."""
    leaves = _check_leaves(node, "norm", list_filled(node) or node._leaves())
    try:
        if dtype is None:
            norms = [*foreach(_NORM, leaves)]
        else:
            norms = [torch.linalg.vector_norm(leaf, dtype=dtype) for leaf in leaves]
    except LEAF_ERRORS as error:
        raise_at_leaf(error, "norm", node, _NORM.single, node._leaves())
    first = norms[0]
    if len(norms) == 1:
        return first
    wide = reduce_in_order(torch.promote_types, [norm.dtype for norm in norms])
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first.device, wide) for norm in norms]))
    return total


def _make_norm(leaves: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function from a leaf to its norm; all norms are computed in one fused call if torch can."""
    try:
        result = dict(zip(map(id, leaves), foreach(_NORM, leaves), strict=True))
    except LEAF_ERRORS:
        return _NORM.single  # the call per leaf fails again, and its error has the key of the leaf
    return lambda leaf: result[id(leaf)] if id(leaf) in result else _NORM.single(leaf)


def reduce_pair(node: Core, name: str, plan: ShapePlan, joined: object, result_type: object) -> Any:
    """Return ``joined``, a pair of tensors; if it is None, the pair of collections that ``plan`` computes."""
    if joined is None:
        pair = Pair(plan.batch, plan.steps, plan.spell, plan.leaf)
        try:
            joined = node._transform_multi(pair)
        except LEAF_ERRORS as error:
            raise_at_entry(error, name, node, pair.leaf)
    return _wrap_pair(joined, result_type)


def _wrap_pair(pair: Any, result_type: Any) -> Any:
    """Wrap values and indices in ``result_type``, or return only the values if it is None."""
    return pair[0] if result_type is None else result_type(tuple(pair))


def reduce_features(node: Core, call: Callable[[Tensor], Any], count: int | None = None) -> list[Core]:
    """Apply ``call`` to each leaf's flattened feature dims; return ``count`` collections of its results (None: a single one)."""
    results = [
        node._map(identity) for _ in range(count or 1)
    ]  # _map() makes plain collections of a TensorDictParams, whose leaves can be replaced below
    for levels in zip_walk(*results):
        n = len(levels[0].batch_size)
        for key, child in dict(levels[0]._children()).items():
            if isinstance(child, Tensor):
                try:
                    provided = _reduce_leaf(child, n, call)
                except LEAF_ERRORS as error:
                    message = f"{show_path((key,))} of shape {list(child.shape)}: {error}"
                    raise rephrase_error(error, message) from error
                for level, value in zip(levels, (provided,) if count is None else provided):
                    level._set_child(key, value)
    return results


def _reduce_leaf(leaf: Tensor, n: int, call: Callable[[Tensor], Any]) -> Any:
    """Apply ``call`` to the flattened feature dims of a leaf; of a nested tensor, to the elements of each component."""
    if not leaf.is_nested or n != 1:
        return call(flatten_features(leaf, n))
    parts = [call(part.flatten()) for part in leaf.unbind()]
    if isinstance(parts[0], Tensor):
        return torch.stack(parts, -1)  # quantiles stay the first dim
    return tuple(torch.stack(each, -1) for each in zip(*parts, strict=True))


def parse_dims(node: Core, name: str, dim: Dims) -> tuple[int, ...] | None:
    """Convert ``dim`` to non-negative batch dims, or to None for all dims of each leaf."""
    # By hand: the row `sum dim` of benchmarks/ops.py.
    if type(dim) is int and 0 <= dim < len(node.batch_size):
        return (dim,)
    if dim is NO_DEFAULT or dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return None
    provided = dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple([parse_dim(node, name, item) for item in provided])
    if len(set(dims)) != len(dims):
        raise IndexError(f"{name}: a dim appears twice in {dim!r}")
    return dims


def parse_dim(node: Core, name: str, dim: object) -> int:
    """Convert a dim or its name to a non-negative batch dim."""
    if type(dim) is not int:
        dim = as_int(find_dims(node, name, dim))
        if not isinstance(dim, int):
            raise TypeError(f"{name}: dim is an int, a name of a dim, or 'feature'; got {dim!r}")
    return wrap_dim(dim, len(node.batch_size))


def _list_tensors(node: Core, name: str) -> list[Tensor]:
    """Return all leaves of a collection as a list; ValueError if it has none."""
    return _check_leaves(node, name, list(node.values(include_nested=True, leaves_only=True)))


def _check_leaves(node: Core, name: str, leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves unchanged; ValueError if there are none to reduce."""
    if not leaves:
        raise ValueError(f"{name}(reduce=True) needs a leaf; this {type(node).__name__} has none")
    return leaves


def concat_features(node: Core, name: str) -> Tensor:
    """Flatten the feature dims of all leaves, and concatenate the leaves along that last dim."""
    n = len(node.batch_size)
    return torch.cat([flatten_features(leaf, n) for leaf in _list_tensors(node, name)], -1)


def concat_elements(node: Core, name: str, dim: int | None) -> Tensor:
    """Concatenate the leaves along ``dim``, or all their elements in one dim if ``dim`` is None."""
    if dim is None:
        filled = list_filled(node)
        if filled is None:
            return torch.cat([leaf.flatten() for leaf in _check_leaves(node, name, node._leaves())])
        return filled[0] if len(filled) == 1 else torch.cat(filled)
    leaves = _list_tensors(node, name)
    shapes = [list(leaf.shape) for leaf in leaves]
    try:
        return torch.cat(leaves, dim)
    except RuntimeError as error:
        raise StructureError(
            f"{name}(dim={dim}, reduce=True) puts the leaves behind each other along dim {dim}, and their other sizes "
            f"differ: {shapes}"
        ) from error


def _rename_all_keys(result: Core, key_transform: KeyTransform) -> Any:
    """Rename every key, nested ones too, with ``key_transform``. Return plain collections."""
    renamed = make_dense({}, result.batch_size, result.device, result._names)

    def rename(source: Core, target: Core) -> Iterator[tuple[object, object]]:
        for key, child in dict(source._children()).items():
            level = child
            if has_entries(child):
                level = make_dense({}, child.batch_size, child.device, child._names)
                yield child, level
            target._set_path(key_transform(key), level)

    visit(rename, result, renamed)
    return renamed
