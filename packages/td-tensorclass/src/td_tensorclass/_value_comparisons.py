"""Comparisons of values: of two of them, and of a column with one value or with one for each element."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from td_core import LinkedList, TensorCollection
from td_core.errors import BatchSizeError
from td_core.spi import RULES, Node, is_same_value


def is_equal_value(a: object, b: object) -> bool:
    """Return True if two values are equal by ``==``, or are arrays of one shape with equal elements; False if ``==`` raises."""
    if is_same_value(a, b):
        return True
    try:
        equal = a == b
        if isinstance(equal, (bool, np.bool_)):
            return bool(equal)
        # == broadcasts arrays, so compare their shapes, too.
        return np.shape(a) == np.shape(b) and bool(np.asarray(equal).all())
    except Exception:  # a user-defined == may raise anything
        return False


def _order(holds: Callable[[Any, Any], object]) -> Callable[[object, object], bool]:
    """Return a function that is False for values without an order, as a comparison with NaN is."""

    def compare(a: object, b: object) -> bool:
        try:
            return bool(holds(a, b))
        except (TypeError, ValueError, RuntimeError):
            return False

    return compare


#: How values are compared, by the function of torch for tensors.
COMPARISONS: dict[object, Callable[[Any, Any], bool]] = {
    torch.eq: is_equal_value,
    torch.ne: lambda a, b: not is_equal_value(a, b),
    torch.lt: _order(operator.lt),
    torch.le: _order(operator.le),
    torch.gt: _order(operator.gt),
    torch.ge: _order(operator.ge),
}


def make_value_comparison(name: str, symbol: str) -> Callable[[Any, object], Any]:
    """Build the special method ``name`` of the nodes of values."""
    single, whole = getattr(torch, name.strip("_")), getattr(TensorCollection, name)

    def method(self: Any, other: object) -> object:
        if isinstance(other, (Node, dict)) or RULES.follows_tensordict:
            return whole(self, other)
        return self._compare(_as_column(self, other), single)

    method.__name__, method.__qualname__ = name, f"NonTensorNode.{name}"
    method.__doc__ = f"Compare each value with ``x``, as ``value {symbol} x`` does; return a bool tensor."
    return method


def _as_column(node: Any, other: object) -> object:
    """Convert the operand of a comparison with a column to a column: a list has one value for each element."""
    size: torch.Size = node.batch_size
    if -1 in size:
        raise BatchSizeError(
            f"the members of the stack have batches of several sizes, {list(size)}: compare each of them"
        )
    if isinstance(other, (Tensor, np.ndarray, np.generic, LinkedList)):
        other = other.tolist()
    if not size or not isinstance(other, list):
        return node._stack._of([other] * size.numel(), size, None)
    column = node._stack.from_list(other, len(size))
    if column.batch_size != size:
        raise BatchSizeError(
            f"a list is compared as one value for each element of the batch, whose size is {list(size)}; the list has "
            f"{list(column.batch_size)}; NonTensorData(list) is one value"
        )
    return column
