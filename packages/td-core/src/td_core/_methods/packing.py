"""Methods ``pack`` and ``to_padded_tensor``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._functions.packing import PackLayout, pack_leaves
from .._functions.padding import pad_to_dense
from .._tree.node import Core
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
