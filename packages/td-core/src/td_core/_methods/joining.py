"""``stack``, ``cat``, ``lazy_stack`` and ``maybe_dense_stack`` as class methods, and methods that join entries or pack them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.joining import cat, lazy_stack, maybe_dense_stack, replace_entries, sort_leaves, stack
from .._functions.packing import PackLayout, pack_leaves
from .._functions.padding import pad_to_dense
from .._plans.plans import wrap_dim
from .._python.public_names import make_classmethod
from .._tree.dim_names import find_dims
from .._tree.node import Core
from ..typing import NestedKey


class JoinMixin(Core):
    """Class methods such as ``stack``, ``cat`` and ``lazy_stack``, and methods that join entries or pack them."""

    __slots__ = ()

    stack = make_classmethod(stack)
    """Stack collections along a new batch dim; see :func:`td_core.stack`."""
    cat = make_classmethod(cat)
    """Concatenate collections along a batch dim; see :func:`td_core.cat`."""
    lazy_stack = make_classmethod(lazy_stack)
    """Create a lazy stack with collections as members; see :func:`td_core.lazy_stack`."""
    maybe_dense_stack = make_classmethod(maybe_dense_stack)
    """Stack collections densely if their structures are equal, else lazily; see :func:`td_core.maybe_dense_stack`."""

    def stack_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Replace several entries by one entry, their stack.

        Args:
            *keys: keys of the entries to stack.
            out_key: key of the new entry.
            dim: position of the new dim among all dims of the entries, batch dims included.
            keep_entries: do not remove the stacked entries.

        Raises:
            KeyPathError: an entry is missing.
            LockedError: the collection is locked.
            BatchSizeError: the shape of the result does not start with the batch size.

        >>> TensorDict({"a": 0, "b": 1}).stack_tensors("a", "b", out_key="c")["c"]
        tensor([0, 1])
        """
        return replace_entries(self, keys, out_key, keep_entries, lambda entries: stack(entries, dim))

    def cat_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Replace several entries by one entry, their concatenation along ``dim``.

        Arguments and errors are those of :meth:`stack_tensors`.

        >>> TensorDict({"a": [0], "b": [1]}).cat_tensors("a", "b", out_key="c")["c"]
        tensor([0, 1])
        """
        return replace_entries(self, keys, out_key, keep_entries, lambda entries: cat(entries, dim))

    def stack_from_tensordict(
        self, dim: int = 0, *, sorted: bool | list[NestedKey] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Stack all leaves to one tensor.

        Args:
            dim: position of the new dim among all dims of the leaves, batch dims included.
            sorted: order of the leaves: None or False for insertion order, True for sorted keys, or a list of all keys.
            out: a tensor to write into.

        Raises:
            KeyMismatchError: the keys in ``sorted`` are not those of the leaves.

        >>> TensorDict({"b": 1, "a": 0}).stack_from_tensordict(sorted=True)
        tensor([0, 1])
        """
        return torch.stack(sort_leaves(self, sorted), dim, out=out)

    def cat_from_tensordict(
        self, dim: int = 0, *, sorted: bool | list[NestedKey] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Concatenate all leaves along ``dim`` to one tensor.

        Arguments and errors are those of :meth:`stack_from_tensordict`.

        >>> TensorDict({"b": [1], "a": [0]}).cat_from_tensordict(sorted=["a", "b"])
        tensor([0, 1])
        """
        return torch.cat(sort_leaves(self, sorted), dim, out=out)

    def to_lazystack(self, dim: int | str = 0) -> Any:
        """Convert this collection to a lazy stack of its slices along a batch dim, which share its memory.

        Raises:
            DimError: ``dim`` is out of range.

        >>> TensorDict({"a": [0, 1]}, [2]).to_lazystack()
        LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={a: i64[]})
        """
        position = wrap_dim(find_dims(self, "to_lazystack", dim), len(self.batch_size), "to_lazystack: dim")
        return lazy_stack(
            self.unbind(position), position, stack_dim_name=self._names and self._names[position]
        )

    def pack(self, dim: int = -1, *, layout: PackLayout | None = None) -> tuple[Tensor, PackLayout]:
        """Concatenate all leaves into one tensor of shape (*batch_size, numel), and return it with its layout.

        Leaves are in the order of their keys, with their feature dims flattened.

        Args:
            dim: the position of the packed dim in the result.
            layout: the layout of an earlier ``pack``; the leaves must have its keys and shapes.

        Raises:
            TypeError: leaves have different dtypes.
            KeyMismatchError: the leaves are not those of ``layout``.
            BatchSizeError: a leaf has another shape than in ``layout``.
            StructureError: a leaf is a nested tensor, or an entry is non-tensor data.

        >>> TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2)}, [2]).pack()[0]
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 1.]])
        """
        return pack_leaves(self, dim, layout)

    def to_padded_tensor(self, padding: float = 0.0, mask_key: NestedKey | None = None) -> Any:
        """Pad ragged entries to the largest shape, and return a dense collection.

        Args:
            padding: the value of the padding elements.
            mask_key: the key of a bool mask to add: True at elements of the batch, False at padding. If no batch dim is
                padded, the mask has the batch dims and the padded dims of the entries, or of those in the node of the key.

        Raises:
            StructureError: with ``mask_key``, entries are padded differently, so that no mask is right for all.
            DepthError: the nesting is deeper than Python's recursion limit.

        >>> from td_core import LazyStackedTensorDict
        >>> members = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]
        >>> padded = LazyStackedTensorDict(*members).to_padded_tensor(mask_key="mask")
        >>> padded["a"], padded["mask"]
        (tensor([[1., 0.],
                [1., 1.]]), tensor([[ True, False],
                [ True,  True]]))
        """
        return pad_to_dense(self, padding, mask_key)
