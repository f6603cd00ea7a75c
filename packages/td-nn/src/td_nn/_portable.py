"""Functions inside pickles: those that pickle does not find by their names travel as code, where cloudpickle is there."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["make_portable"]


class _Code:
    """A function as the bytes that cloudpickle makes of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def make_portable(function: Callable[..., Any]) -> Any:
    """Return a function in a form that pickle takes.

    Raises:
        PicklingError: that needs cloudpickle, which is not installed.

    >>> make_portable(abs) is abs
    True
    """
    if isinstance(function, (nn.Module, type)) or not _is_nameless(function):
        return function
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ModuleNotFoundError:
        raise pickle.PicklingError(
            f"cannot pickle the function {function!r}, which no module has under its name; use a function of a module, "
            "or install what pickles its code: pip install cloudpickle"
        ) from None
    return _Code(cloudpickle.dumps(function))


def _is_nameless(function: Any) -> bool:
    """Tell whether pickle would not find a function again: it is a lambda, local, or of a class that has no name."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", None)
    if name is None or not hasattr(function, "__code__"):
        return False
    result: Any = sys.modules.get(function.__module__)
    for part in name.split("."):
        result = getattr(result, part, None)
    return result is not function
