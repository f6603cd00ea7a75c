"""Pickle functions that have no importable name, such as lambdas, by their code with cloudpickle."""

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
    """A function as bytes that cloudpickle wrote; unpickling returns the function."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def make_portable(function: Callable[..., Any]) -> Any:
    """Convert a function to an object that can be pickled; a function with an importable name stays as it is.

    Raises:
        PicklingError: the function has no importable name, and cloudpickle is not installed.
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
    """Return True if pickle cannot import a function by name: a lambda or a local function, for example."""
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
