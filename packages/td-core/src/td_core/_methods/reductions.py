"""Reductions such as ``sum``, ``max``, ``all``, and scans such as ``cummax``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Self

from .._functions.along_dims import apply_along
from .._functions.reductions import (
    KeyTransform,
    compute_norms,
    make_deviation,
    make_indexed_reduction,
    make_plain_reduction,
    make_quantile,
    make_reduction,
    make_scan,
    reduce_bools,
    reduce_by_logsumexp,
)
from .._torch.dtypes import as_dtype
from .._tree.node import Core
from ..typing import DtypeLike


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
    argmax = make_plain_reduction("argmax", "the position of the largest element")
    argmin = make_plain_reduction("argmin", "the position of the smallest element")
    count_nonzero = make_plain_reduction("count_nonzero", "the number of elements that are not zero")
    max = make_indexed_reduction("max", "the largest element")
    min = make_indexed_reduction("min", "the smallest element")
    median = make_indexed_reduction("median", "the median (the lower of two)")
    nanmedian = make_indexed_reduction("nanmedian", "the median of the elements that are not NaN")
    quantile = make_quantile("quantile", "quantiles")
    nanquantile = make_quantile("nanquantile", "quantiles of the elements that are not NaN")
    cummax = make_scan("cummax", "the cumulative maximum")
    cummin = make_scan("cummin", "the cumulative minimum")

    def all(self, dim: int | str | tuple[int | str, ...] | None = None, keepdim: bool = False) -> Any:
        """Return True if all elements are true; with ``dim`` return a collection of bools.

        Args:
            dim: a batch dim, its name or a tuple of these; None to reduce all elements to one bool.
            keepdim: keep the reduced dims, with size 1.

        >>> td = TensorDict({"a": torch.tensor([True, False])}, batch_size=[2])
        >>> td.all(), td.all(0)["a"]
        (False, tensor(False))
        """
        return reduce_bools(self, all, Tensor.all, dim, keepdim)

    def any(self, dim: int | str | tuple[int | str, ...] | None = None, keepdim: bool = False) -> Any:
        """Return True if any element is true; with ``dim`` return a collection of bools, as :meth:`all`.

        >>> td = TensorDict({"a": torch.tensor([True, False])}, batch_size=[2])
        >>> td.any(), td.any(0)["a"]
        (True, tensor(True))
        """
        return reduce_bools(self, any, Tensor.any, dim, keepdim)

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

    def logsumexp(
        self, dim: int | str | Sequence[int | str] | None = None, keepdim: bool = False, *, out: object = None
    ) -> Self:
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

    def softmax(self, dim: int | str, dtype: DtypeLike | None = None) -> Self:
        """Return the softmax along a batch dim.

        Args:
            dim: a batch dim or its name.
            dtype: the dtype to compute in.

        >>> TensorDict({"a": torch.zeros(2)}, batch_size=[2]).softmax(0)["a"]
        tensor([0.5000, 0.5000])
        """
        return apply_along(self, "softmax", dim, dtype=as_dtype(dtype))
