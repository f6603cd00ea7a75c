"""``repr``, and ``_repr_html_`` for notebooks."""

from __future__ import annotations

from torch import Tensor

from .._convert.description import Description, describe
from .._convert.printing import PrintedNode, print_collection, print_for_notebook, print_leaf
from .._torch.dtypes import SHORT_NAMES
from .._tree.defaults import unwrap_entry
from .._tree.node import Core


class ReprMixin(Core):
    """``repr``, and ``_repr_html_`` for notebooks."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the compact form, or the long form if :class:`td_core.set_printoptions` selects it."""
        return print_collection(self)

    def _repr_html_(self) -> str | None:
        """Return a collapsible HTML tree with the size of each node in bytes; None if that option is off."""
        return print_for_notebook(self)

    def describe(self) -> Description:
        """Return a table of the leaves: key, dtype, shape, size, share of the size, device, and what shares memory.

        The result prints as text, and as a table in notebooks; it is iterable, with one row for each key. Nothing is read, and
        the members of a lazy stack, which are in one row, are not stacked.

        >>> weight = torch.zeros(2, 3)
        >>> TensorDict({"layer": {"weight": weight, "bias": torch.zeros(2)}, "tied": weight}).describe()
        TensorDict [], 56 bytes
        key           dtype  shape   size      share  device  memory
        layer.weight  f32    [2, 3]  24 bytes  42.9%  cpu
        layer.bias    f32    [2]     8 bytes   14.3%  cpu
        tied          f32    [2, 3]  24 bytes  42.9%  cpu     shared with layer.weight
        """
        return describe(self)

    def _ipython_key_completions_(self: Core) -> list[object]:
        """Return the keys that IPython and notebooks offer after ``data["``."""
        return list(self.keys(include_nested=True))

    def _print_node(self) -> PrintedNode:
        """Return what is printed of this node; a lazy stack describes its entries without stacking them."""
        leaf = unwrap_entry(self)
        text = f"{SHORT_NAMES[leaf.dtype]}{list(leaf.shape)}" if isinstance(leaf, Tensor) else None
        return PrintedNode(
            [print_leaf(key, child) for key, child in dict(self._children()).items()], text=text
        )
