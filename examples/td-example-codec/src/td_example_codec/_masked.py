"""A kind of nodes that td-core does not have: a tensor with missing elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from td_core import TensorDict
from td_core.spi import Record


class Masked(TensorDict):
    """A tensor with missing elements: the entries ``data`` and ``mask``, which is True for missing elements.

    >>> masked = Masked.from_numpy(np.ma.array([1, 2], mask=[False, True]))
    >>> masked.filled(0)
    tensor([1, 0])
    """

    __slots__ = ()

    @classmethod
    def from_numpy(cls, array: np.ma.MaskedArray[Any, Any], batch_size: torch.Size = torch.Size()) -> Masked:
        """Convert a numpy masked array to a node.

        >>> Masked.from_numpy(np.ma.array([[1, 2]], mask=[[False, True]])).get("mask")
        tensor([[False,  True]])
        """
        entries = {"data": torch.tensor(array.data), "mask": torch.tensor(np.ma.getmaskarray(array))}
        return cls(entries, batch_size=batch_size)

    def filled(self, value: float) -> Tensor:
        """Return the data, with ``value`` in place of missing elements."""
        filled: Tensor = self.get("data").masked_fill(self.get("mask"), value)
        return filled

    def to_numpy(self) -> np.ma.MaskedArray[Any, Any]:
        """Convert the node to a numpy masked array."""
        return np.ma.array(self.get("data").numpy(force=True), mask=self.get("mask").numpy(force=True))


def coerce(value: Any, batch_size: torch.Size, device: torch.device | None) -> Masked:
    """Convert the value of ``td["key"] = masked_array``, for a collection with this batch size and device."""
    masked = Masked.from_numpy(value, batch_size)
    return masked if device is None else masked.to(device)


def flatten(node: Masked) -> Record:
    """Convert a node to a record: a header that JSON can store, and the entries."""
    return Record.of(node, node._children())


def unflatten(record: Record) -> Masked:
    """Build a node from a record, of the stored subclass; the constructor checks the shapes of the entries."""
    batch_size, device, names, locked = record.read_header()
    return (record.cls or Masked)(record.entries, batch_size, device, names, lock=locked)
