"""Functions that are classmethods too."""

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
    """Return a classmethod that calls ``function`` without the class, with its signature and documentation.

    Args:
        function: what is called; the result says of which kind it is.
        dense: let the class make its own of the result, where that is a collection.
        with_class: what is called in its place, with the class before the other arguments.

    >>> class Shape:
    ...     parse = make_classmethod(lambda text: text.split())
    >>> Shape.parse("3 4")
    ['3', '4']
    """

    @functools.wraps(function)
    def method(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs) if with_class is None else with_class(cls, *args, **kwargs)
        return cls._wrap_dense(result) if dense else result

    signature = inspect.signature(function)
    first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [first, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return classmethod(method)
