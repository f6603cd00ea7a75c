"""TensorAttrs: device, dtype and shape of a tensor, without its data."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core._ops.key_trees import Row, build

from ._tensorclass import TensorClass

#: The supported attributes of a tensor.
KNOWN = ("device", "dtype", "shape")


class TensorAttrs(TensorClass, autocast=True):
    """Device, dtype and shape of a tensor; None for attributes that are not recorded.

    Args:
        tgt_device: the device.
        tgt_dtype: the dtype.
        tgt_shape: the shape.

    >>> TensorAttrs(tgt_device="cpu", tgt_shape=(3,)).tgt_shape
    torch.Size([3])
    """

    tgt_device: torch.device | None = None
    tgt_dtype: torch.dtype | None = None
    tgt_shape: torch.Size | None = None

    @classmethod
    def from_tensor(cls, tensor: Tensor, *, fields: Sequence[str] = KNOWN) -> TensorAttrs:
        """Record attributes of a tensor.

        Args:
            tensor: the tensor.
            fields: the attributes to record, out of ``"device"``, ``"dtype"`` and ``"shape"``.

        Raises:
            ValueError: ``fields`` contains another name.

        >>> TensorAttrs.from_tensor(torch.zeros(3), fields=["dtype"]).tgt_dtype
        torch.float32
        """
        unknown = [name for name in fields if name not in KNOWN]
        if unknown:
            raise ValueError(f"attributes of a tensor are {list(KNOWN)}; got {unknown}")
        return cls(**{f"tgt_{name}": getattr(tensor, name) for name in fields})

    def _get_leaf_spec(self) -> tuple[torch.device | None, torch.dtype | None]:
        return self.tgt_device, self.tgt_dtype


def make_attrs(root: Any, fields: Sequence[str], num_threads: int | None) -> Any:
    """Copy the structure of a collection, without batch dims, with TensorAttrs in place of its leaves."""
    levels: list[Row] = [(root, {}, None, "")]
    leaves: list[Tensor] = []
    places: list[tuple[dict[str, Any], str]] = []
    for node, out, _, _ in levels:
        for key, child in dict(node._children()).items():
            out[key] = child
            if isinstance(child, Tensor):
                leaves.append(child)
                places.append((out, key))
            elif not child._is_value:
                levels.append((child, {}, out, key))
    describe = partial(TensorAttrs.from_tensor, fields=fields)
    with ThreadPoolExecutor(num_threads) if num_threads else nullcontext() as pool:
        for (out, key), leaf in zip(places, (pool.map if pool else map)(describe, leaves), strict=True):
            out[key] = leaf
    return build(levels, lambda node, out: node._with_children(out, batch_size=torch.Size(), names=None))
