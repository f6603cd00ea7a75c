"""Functions of torch along one batch dim, such as ``cumsum``, ``sort`` and ``index_add``, and comparisons of collections."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.along_dims import (
    Dim,
    apply_along,
    apply_pair_along,
    combine_along,
    copy_along,
    diff_along,
    multiply_matrices,
    take_along,
)
from .._functions.grouping import find_unique
from .._functions.operands import Operand, check_operand, run_each_leaf
from .._functions.pointwise import combine_tensors, compare, is_equal
from .._torch.dtypes import as_dtype
from .._tree.node import Core
from ..typing import DtypeLike


class AlongMixin(Core):
    """Functions of torch along one batch dim or its name; arguments that are not described are those of torch."""

    __slots__ = ()

    def cumsum(self, dim: Dim, *, dtype: DtypeLike | None = None) -> Self:
        """Return the cumulative sum along a batch dim.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).cumsum(0)["a"]
        tensor([1, 4, 6])
        """
        return apply_along(self, "cumsum", dim, dtype=as_dtype(dtype))

    def cumprod(self, dim: Dim, *, dtype: DtypeLike | None = None) -> Self:
        """Return the cumulative product along a batch dim.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).cumprod(0)["a"]
        tensor([1, 3, 6])
        """
        return apply_along(self, "cumprod", dim, dtype=as_dtype(dtype))

    def log_softmax(self, dim: Dim, *, dtype: DtypeLike | None = None) -> Self:
        """Return the logarithm of :meth:`softmax` along a batch dim.

        >>> TensorDict({"a": torch.zeros(2)}, [2]).log_softmax(0)["a"]
        tensor([-0.6931, -0.6931])
        """
        return apply_along(self, "log_softmax", dim, dtype=as_dtype(dtype))

    def logcumsumexp(self, dim: Dim) -> Self:
        """Return the logarithm of the cumulative sum of the exponentials along a batch dim.

        >>> TensorDict({"a": torch.zeros(2)}, [2]).logcumsumexp(0)["a"]
        tensor([0.0000, 0.6931])
        """
        return apply_along(self, "logcumsumexp", dim)

    def diff(
        self, n: int = 1, dim: Dim = -1, prepend: Self | None = None, append: Self | None = None
    ) -> Self:
        """Return the differences of neighbours along a batch dim, after joining ``prepend`` and ``append``, collections.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).diff()["a"]
        tensor([ 2, -1])
        """
        return diff_along(self, n, dim, prepend, append)

    def sort(self, dim: Dim = -1, descending: bool = False, stable: bool = False) -> tuple[Self, Self]:
        """Sort each leaf along a batch dim; return values and indices. ``stable`` keeps the order of equal elements.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).sort().values["a"]
        tensor([1, 2, 3])
        """
        return apply_pair_along(self, "sort", dim, descending=descending, stable=stable)

    def argsort(self, dim: Dim = -1, descending: bool = False, stable: bool = False) -> Self:
        """Return the indices of :meth:`sort`.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).argsort()["a"]
        tensor([0, 2, 1])
        """
        return apply_along(self, "argsort", dim, descending=descending, stable=stable)

    def topk(self, k: int, dim: Dim = -1, largest: bool = True, sorted: bool = True) -> tuple[Self, Self]:
        """Return the ``k`` largest elements of each leaf along a batch dim, in order if ``sorted``, and their indices.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).topk(2).values["a"]
        tensor([3, 2])
        """
        return apply_pair_along(self, "topk", dim, (k,), k=k, largest=largest, sorted=sorted)

    def kthvalue(self, k: int, dim: Dim = -1, keepdim: bool = False) -> tuple[Self, Self]:
        """Return the ``k``-th smallest element of each leaf along a batch dim, and its index.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).kthvalue(2).values["a"]
        tensor(2)
        """
        return apply_pair_along(self, "kthvalue", dim, (1,) * keepdim, k=k, keepdim=keepdim)

    def index_add(self, dim: Dim, index: Tensor, source: Core, *, alpha: float | None = None) -> Self:
        """Return a copy with ``alpha * source``, a collection, added at positions of a dim.

        >>> td = TensorDict({"a": torch.zeros(2)}, [2])
        >>> td.index_add(0, torch.tensor([1, 1]), td + 1)["a"]
        tensor([0., 2.])
        """
        call = torch.index_add if alpha is None else partial(torch.index_add, alpha=alpha)
        return combine_along("index_add", self, dim, index, source, call)

    def index_copy(self, dim: Dim, index: Tensor, source: Core) -> Self:
        """Return a copy with the elements of a collection at positions of a dim.

        >>> td = TensorDict({"a": torch.zeros(2)}, [2])
        >>> td.index_copy(0, torch.tensor([1]), td[:1] + 5)["a"]
        tensor([0., 5.])
        """
        return copy_along(self, dim, index, source)

    def scatter_reduce(
        self, dim: Dim, index: Tensor, src: Core, reduce: str, *, include_self: bool = True
    ) -> Self:
        """Return a copy with ``src``, a collection, reduced into positions of a dim.

        The index has the batch dims, and is broadcast over the feature dims.

        >>> td = TensorDict({"a": torch.tensor([1.0, 3.0, 2.0])}, [3])
        >>> td.scatter_reduce(0, torch.tensor([0, 0, 2]), td, "amax")["a"]
        tensor([3., 3., 2.])
        """
        call = partial(torch.scatter_reduce, reduce=reduce, include_self=include_self)
        return combine_along("scatter_reduce", self, dim, index, src, call, full=True)

    def take_along_dim(self, indices: Tensor, dim: Dim | None = None) -> Self:
        """Return the elements at positions along a batch dim; the other dims broadcast. None flattens batch and indices.

        >>> td = TensorDict({"a": torch.tensor([[1, 3], [4, 2]])}, [2, 2])
        >>> td.take_along_dim(torch.tensor([[1]]), 1)["a"]
        tensor([[3],
                [2]])
        """
        taken: Self = take_along(self, indices, dim)
        return taken

    def unique(
        self,
        sorted: bool = True,
        return_inverse: bool = False,
        return_counts: bool = False,
        dim: Dim | None = None,
    ) -> Any:
        """Return each row along a batch dim once; two rows are equal if all their entries are.

        Rows are sorted by their first entry, equal ones by the next, and values by their first appearance; with
        ``sorted=False`` they are in the order in which they appear. Without ``dim`` the batch is flattened first.

        >>> TensorDict({"a": [1, 0, 1], "b": [4, 5, 4]}, [3]).unique()["b"]
        tensor([5, 4])
        """
        return find_unique(self, sorted, return_inverse, return_counts, dim)

    def isin(self, test_elements: object, *, assume_unique: bool = False, invert: bool = False) -> Self:
        """Return whether each element is in a tensor, array or list; ``assume_unique`` is faster where no element repeats.

        >>> TensorDict({"a": torch.tensor([1, 3, 2])}, [3]).isin([2, 3])["a"]
        tensor([False,  True,  True])
        """
        elements = torch.as_tensor(test_elements)
        call = partial(torch.isin, assume_unique=assume_unique, invert=invert)
        return run_each_leaf("isin", self, lambda leaf: call(leaf, elements.to(leaf.device)))

    def allclose(
        self, other: Operand, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
    ) -> bool:
        """Return True if all elements are close to those of an operand, with ``equal_nan`` NaN to NaN, and values equal.

        >>> td = TensorDict({"a": torch.ones(2)}, [2])
        >>> td.allclose(td + 1e-9), td.allclose(td + 1)
        (True, False)
        """
        close = combine_tensors(partial(torch.isclose, rtol=rtol, atol=atol, equal_nan=equal_nan))
        return bool(check_operand(compare(self, "eq", "allclose", other, close), "allclose", other).all())

    def equal(self, other: Core) -> bool:
        """Return True if a collection has the same batch size, keys, shapes, elements and values.

        >>> td = TensorDict({"a": torch.ones(2)}, [2])
        >>> td.equal(td.clone()), td.equal(td + 1), td.equal(td[:1])
        (True, False, False)
        """
        return is_equal(self, other)

    def matmul(self, other: Tensor | Core) -> Self:
        """Multiply the matrix or vector in the feature dims of each leaf by a matrix, a vector or those of a collection.

        >>> (TensorDict({"a": torch.ones(4, 2)}, [4]) @ torch.ones(2, 3))["a"].shape
        torch.Size([4, 3])
        """
        return multiply_matrices(self, other)

    def __matmul__(self, other: Tensor | Core) -> Self:
        """Return ``td @ x``, see :meth:`matmul`."""
        return multiply_matrices(self, other)

    def __rmatmul__(self, other: Tensor) -> Self:
        """Return ``x @ td``, see :meth:`matmul`."""
        return multiply_matrices(self, other, reflected=True)
