"""TensorAttrs: device, dtype and shape of a tensor, without its data."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from td_core import TensorCollection

from ._tensorclass import TensorClass
from ._value_nodes import ValueNode

CollectionT = TypeVar("CollectionT", bound=TensorCollection)

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


def make_attrs(root: CollectionT, fields: Sequence[str], num_threads: int | None) -> CollectionT:
    """Copy the structure of a collection, without batch dims, with TensorAttrs in place of its leaves."""
    describe = partial(TensorAttrs.from_tensor, fields=fields)
    top: dict[str, Any] = {"root": {}}
    levels: list[tuple[Any, dict[str, Any], str]] = [(root, top, "root")]
    with ThreadPoolExecutor(num_threads) if num_threads else nullcontext() as pool:
        for node, above, name in levels:  # parents before children, which are appended here
            out = above[name]
            for key, child in dict(node._children()).items():
                if isinstance(child, Tensor):
                    out[key] = pool.submit(describe, child) if pool else describe(child)
                elif isinstance(child, ValueNode):
                    out[key] = child
                else:
                    out[key] = {}
                    levels.append((child, out, key))
    for node, above, name in reversed(levels):
        entries = {
            key: value.result() if isinstance(value, Future) else value for key, value in above[name].items()
        }
        above[name] = node._with_children(entries, batch_size=torch.Size(), names=None)
    copied: CollectionT = top["root"]
    return copied
