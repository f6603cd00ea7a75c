"""Reductions such as ``sum``, ``max``, ``all``, and scans such as ``cummax``."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from torch import Tensor
from typing_extensions import Self

from .._functions.operands import transform
from .._functions.reductions import (
    Dims,
    KeyTransform,
    compute_norms,
    compute_quantiles,
    make_deviation,
    make_indexed_reduction,
    make_plain_reduction,
    make_reduction,
    make_scan,
    parse_dim,
    reduce_bools,
    reduce_by_logsumexp,
)
from .._plans.reductions import scan_plan
from .._torch.dtypes import as_dtype
from .._tree.node import Core
from ..typing import NO_DEFAULT, DtypeLike, NoDefault


class ReductionMixin(Core):
    """Reductions such as ``sum``, ``max``, ``all``, and scans such as ``cummax``."""

    __slots__ = ()

    sum = make_reduction("sum", "the sum")
    mean = make_reduction("mean", "the mean")
    prod = make_reduction("prod", "the product")
    nansum = make_reduction("nansum", "the sum of the elements that are not NaN")
    nanmean = make_reduction("nanmean", "the mean of the elements that are not NaN")
    std = make_deviation("std", "the standard deviation")
    var = make_deviation("var", "the variance")
    amax = make_plain_reduction("amax", "the largest element")
    amin = make_plain_reduction("amin", "the smallest element")
    max = make_indexed_reduction("max", "the largest element")
    min = make_indexed_reduction("min", "the smallest element")
    cummax = make_scan("cummax", "the cumulative maximum")
    cummin = make_scan("cummin", "the cumulative minimum")

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
        reduce: bool | None = None,
    ) -> Any:
        """Return the 2-norm of each leaf over all its dims; the batch size of the result is [].

        Args:
            out: a collection that the result is written into; it may be empty.
            dtype: the dtype to compute in.
            key_transform: a function from the key of an entry, without its parents, to its new key.
            reduce: return the norm of all elements of all leaves, one tensor.

        Raises:
            TypeError: ``reduce`` with ``out`` or ``key_transform``.

        >>> td = TensorDict({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(12.0)})
        >>> td.norm()["a"], td.norm(reduce=True)
        (tensor(5.), tensor(13.))
        """
        return compute_norms(self, out, dtype, key_transform, reduce)

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
        return reduce_by_logsumexp(self, dim, keepdim, out)

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
        return compute_quantiles(self, q, dim, keepdim, interpolation, reduce, key_transform)

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
