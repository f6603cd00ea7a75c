"""Predicates on values and classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core import default_is_leaf

from ._non_tensor import NonTensorDataBase
from ._tensorclass import TensorClass
from ._value_nodes import NonTensorNode


def is_non_tensor(data: object) -> bool:
    """Return True if ``data`` is a node of non-tensor data: NonTensorData, NonTensorStack or MetaData.

    >>> from td_tensorclass import NonTensorData
    >>> is_non_tensor(NonTensorData("a")), is_non_tensor("a")
    (True, False)
    """
    return isinstance(data, NonTensorNode)


def is_tensorclass(obj: object) -> bool:
    """Return True if an instance or a class is a tensorclass.

    NonTensorData and its subclasses count as tensorclasses with the field ``data``, as in tensordict.

    >>> is_tensorclass(TensorClass), is_tensorclass({})
    (True, False)
    """
    cls = obj if isinstance(obj, type) else type(obj)
    return issubclass(cls, (TensorClass, NonTensorDataBase))


def is_leaf_nontensor(cls: type) -> bool:
    """Return True if ``cls`` is a class of leaves or of non-tensor data; pass this function as ``is_leaf=`` to ``keys``.

    >>> td = TensorDict({"a": "x", "b": {"c": 1}})
    >>> list(td.keys(True, True, is_leaf=is_leaf_nontensor))
    ['a', ('b', 'c')]
    """
    # A mapping is stored as a node, not as a leaf.
    return getattr(cls, "_is_value", False) or (default_is_leaf(cls) and not issubclass(cls, Mapping))
