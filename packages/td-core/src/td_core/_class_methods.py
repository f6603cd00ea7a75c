"""Classmethods built from module-level functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["make_classmethod"]

P = ParamSpec("P")
R = TypeVar("R")


def make_classmethod(
    function: Callable[P, R], *, dense: bool = False, with_class: Callable[..., Any] | None = None
) -> classmethod[Any, P, R]:
    """Build a classmethod that calls ``function`` (or ``with_class(cls, ...)``), with its signature and docstring."""
    # With ``dense``, ``cls._wrap_dense`` converts a collection that ``function`` returns to the class.

    @functools.wraps(function)
    def method(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs) if with_class is None else with_class(cls, *args, **kwargs)
        return cls._wrap_dense(result) if dense else result

    signature = inspect.signature(function)
    first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [first, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return classmethod(method)
