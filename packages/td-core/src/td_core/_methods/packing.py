"""Methods ``pack`` and ``to_padded_tensor``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._functions.packing import PackLayout, check_layout, make_layout
from .._functions.padding import make_mask, pad_node
from .._plans.plans import wrap_dim
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core
from ..errors import DepthError
from ..typing import NestedKey


class PackMixin(Core):
    """Methods ``pack`` and ``to_padded_tensor``."""

    __slots__ = ()

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
        size = self.batch_size
        position = wrap_dim(dim, len(size) + 1, "pack: dim") - len(size) - 1
        left = make_layout(self, position)
        if layout is not None:
            check_layout(layout, left)
            left = PackLayout(layout.keys, layout.shapes, position, layout.nested, layout.device, layout.cls)
        leaves = [self[key] for key in left.keys]
        for key, leaf in zip(left.keys, leaves, strict=True):
            if leaf.dtype != leaves[0].dtype:
                raise TypeError(
                    f"cannot pack leaves of different dtypes: key {left.keys[0]!r} has {leaves[0].dtype}, key {key!r} "
                    f"has {leaf.dtype}; convert them first, for example with float()"
                )
        if not leaves:
            packed = torch.zeros((*size, 0), device=self.device)
        else:
            # reshape(..., -1) raises for a batch without elements.
            packed = torch.cat(
                [leaf.reshape(*size, math.prod(leaf.shape[len(size) :])) for leaf in leaves], -1
            )
        return packed.movedim(-1, position), left

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
        try:
            result = pad_node(self, padding)
            if mask_key is not None:
                result.set(mask_key, make_mask(self, unravel_key_to_tuple(mask_key)))
        except RecursionError as error:
            raise DepthError(f"the levels are too many to be padded one inside the other: {error}") from error
        return result
