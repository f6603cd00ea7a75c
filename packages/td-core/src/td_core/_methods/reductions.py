"""Reductions such as ``sum``, ``max``, ``all``, and scans such as ``cummax``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.operands import run_each_leaf, transform, write_result
from .._functions.reductions import (
    NO_KEEPDIM,
    Dims,
    KeyTransform,
    concat_elements,
    concat_features,
    deviation,
    extreme,
    make_norm,
    parse_dim,
    parse_dims,
    reduce_bools,
    reduce_features,
    reduction,
    scan,
    with_indices,
    with_keys,
)
from .._plans.reductions import make_call, make_single_dim_call, reduce_plan, scan_plan
from .._torch.dtypes import as_dtype
from .._tree.node import Core
from ..typing import NO_DEFAULT, DtypeLike, NoDefault


class ReductionMixin(Core):
    """Reductions such as ``sum``, ``max``, ``all``, and scans such as ``cummax``."""

    __slots__ = ()

    sum = reduction("sum", "the sum")
    mean = reduction("mean", "the mean")
    prod = reduction("prod", "the product")
    nansum = reduction("nansum", "the sum of the elements that are not NaN")
    nanmean = reduction("nanmean", "the mean of the elements that are not NaN")
    std = deviation("std", "the standard deviation")
    var = deviation("var", "the variance")
    amax = extreme("amax", "the largest element")
    amin = extreme("amin", "the smallest element")
    max = with_indices("max", "the largest element")
    min = with_indices("min", "the smallest element")
    cummax = scan("cummax", "the cumulative maximum")
    cummin = scan("cummin", "the cumulative minimum")

    def all(self, dim: int | str | None = None) -> Any:
        """Return True if all elements are true; with ``dim`` return a collection of bools.

        Args:
            dim: a batch dim or its name; None to reduce all elements to one bool.

        >>> td = TensorDict({"a": torch.tensor([True, False])}, batch_size=[2])
        >>> td.all(), td.all(0)["a"]
        (False, tensor(False))
        """
        return reduce_bools(self, all, Tensor.all, dim)

    def any(self, dim: int | str | None = None) -> Any:
        """Return True if any element is true; with ``dim`` return a collection of bools, as :meth:`all`.

        >>> td = TensorDict({"a": torch.tensor([True, False])}, batch_size=[2])
        >>> td.any(), td.any(0)["a"]
        (True, tensor(True))
        """
        return reduce_bools(self, any, Tensor.any, dim)

    def norm(
        self,
        *,
        out: object = None,
        dtype: DtypeLike | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Self:
        """Return the 2-norm of each leaf over all its dims; the batch size of the result is [].

        Args:
            out: a collection that the result is written into; it may be empty.
            dtype: the dtype to compute in.
            key_transform: a function from the key of an entry, without its parents, to its new key.

        >>> TensorDict({"a": torch.tensor([3.0, 4.0])}).norm()["a"]
        tensor(5.)
        """
        leaf: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dtype=as_dtype(dtype))
        if dtype is None and self._members_and_dim() is None and not torch.compiler.is_compiling():
            leaf = make_norm(self._leaves())
        result = transform("norm", self, reduce_plan(tuple(self.batch_size), None, False, lambda dims: leaf))
        if key_transform is not None:
            result = with_keys(result, key_transform)
        return result if out is None else write_result(out, result.batch_size, result)

    def logsumexp(self, dim: object = None, keepdim: bool = False, *, out: object = None) -> Self:
        """Return the logarithm of the sum of exponentials, over batch dims.

        Args:
            dim: a batch dim, its name or a tuple of them; None for all batch dims. Without batch dims nothing is
                reduced.
            keepdim: keep the reduced dims, with size 1.
            out: a collection that the result is written into; it may be empty.

        >>> TensorDict({"a": torch.zeros(2)}, batch_size=[2]).logsumexp(0)["a"]
        tensor(0.6931)
        """
        dims = parse_dims(self, "logsumexp", dim)
        if dims is None:
            dims = tuple(range(len(self.batch_size)))
        if dims:
            make = make_call("logsumexp", keepdim, {})
            result = transform("logsumexp", self, reduce_plan(tuple(self.batch_size), dims, keepdim, make))
        else:  # torch reads an empty dims tuple as all dims
            result = run_each_leaf("logsumexp", self, lambda leaf: leaf[None].logsumexp(0))
        return result if out is None else write_result(out, result.batch_size, result)

    def quantile(
        self,
        q: float | Tensor,
        dim: Dims = NO_DEFAULT,
        keepdim: bool | NoDefault = NO_DEFAULT,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Any:
        """Return quantiles over batch dims, feature dims or all dims.

        Args:
            q: a number between 0 and 1, or a 1-d float tensor of them, which adds a first dim to every leaf (and to the
                batch size, unless each leaf is reduced to one number).
            dim: a batch dim, its name or a tuple of them; ``"feature"`` for the feature dims; omitted or None to reduce
                each leaf to one number.
            keepdim: keep the reduced dims, with size 1.
            interpolation: as in :func:`torch.quantile`.
            reduce: reduce all leaves together, to one tensor.
            key_transform: a function from the key of an entry, without its parents, to its new key.

        >>> td = TensorDict({"a": torch.tensor([1.0, 2.0, 4.0])}, batch_size=[3])
        >>> td.quantile(0.5, 0)["a"]
        tensor(2.)
        """
        keep = keepdim is True
        many = isinstance(q, Tensor) and q.ndim == 1

        def call(value: Tensor, place: int) -> Tensor:
            level = q.to(value.device, value.dtype) if isinstance(q, Tensor) else q
            return torch.quantile(value, level, place, interpolation=interpolation)

        front = len(q) if many else None  # type: ignore[arg-type]
        if dim == "feature":
            if keep:
                raise TypeError(NO_KEEPDIM.format(name="quantile"))
            if reduce:
                return call(concat_features(self, "quantile"), -1)
            item = reduce_features(self, lambda value: call(value, -1), front)
            result = self.stack(item) if many else item[0]  # type: ignore[attr-defined]
        else:
            dims = parse_dims(self, "quantile", dim)
            make = make_single_dim_call(call, keep, many)
            if reduce:
                return make(dims)(concat_elements(self, "quantile", None if dims is None else dims[0]))
            # If leaves are reduced to one number per quantile, their first dim is not a batch dim.
            plan = reduce_plan(
                tuple(self.batch_size), dims, keep, make, None if dims is None and not keep else front
            )
            result = transform("quantile", self, plan)
        return result if key_transform is None else with_keys(result, key_transform)

    def softmax(self, dim: int | str, dtype: DtypeLike | None = None) -> Self:
        """Return the softmax along a batch dim.

        Args:
            dim: a batch dim or its name.
            dtype: the dtype to compute in.

        >>> TensorDict({"a": torch.zeros(2)}, batch_size=[2]).softmax(0)["a"]
        tensor([0.5000, 0.5000])
        """
        place = parse_dim(self, "softmax", dim)
        plan = scan_plan(
            tuple(self.batch_size), place, lambda position: methodcaller("softmax", position, as_dtype(dtype))
        )
        return transform("softmax", self, plan)
