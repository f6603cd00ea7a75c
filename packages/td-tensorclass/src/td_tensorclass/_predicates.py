"""Questions about values and classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core import default_is_leaf

from ._non_tensor import NonTensorDataBase
from ._tensorclass import TensorClass
from ._value_nodes import NonTensorNode


def is_non_tensor(data: Any) -> bool:
    """Tell whether a value is non-tensor data: one value for a batch, or one for each element.

    >>> from td_tensorclass import NonTensorData
    >>> is_non_tensor(NonTensorData("a")), is_non_tensor("a")
    (True, False)
    """
    return isinstance(data, NonTensorNode)


def is_tensorclass(obj: Any) -> bool:
    """Tell whether an instance or a class is a tensorclass.

    Non-tensor data for a whole batch counts: it is declared as a class with the field ``data``.

    >>> is_tensorclass(TensorClass), is_tensorclass({})
    (True, False)
    """
    cls = obj if isinstance(obj, type) else type(obj)
    return issubclass(cls, (TensorClass, NonTensorDataBase))


def is_leaf_nontensor(cls: type) -> bool:
    """Tell whether entries of a class are leaves, non-tensor data included: for ``is_leaf=`` of ``keys`` and the like.

    >>> td = TensorDict({"a": "x", "b": {"c": 1}})
    >>> list(td.keys(True, True, is_leaf=is_leaf_nontensor))
    ['a', ('b', 'c')]
    """
    # A mapping becomes a level wherever it is stored.
    return getattr(cls, "_is_value", False) or (default_is_leaf(cls) and not issubclass(cls, Mapping))
