"""Methods that factories build, and classmethods built from module-level functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["make_classmethod"]

P = ParamSpec("P")
R = TypeVar("R")
MethodT = TypeVar("MethodT", bound=Callable[..., object])


def name_method(method: MethodT, name: str, doc: str) -> MethodT:
    """Give a method that a factory built its name and docstring."""
    method.__name__, method.__doc__ = name, doc
    # torch.compile keeps graphs by code object, up to a limit, and the closures of one factory share theirs.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


def make_classmethod(
    function: Callable[P, R], *, dense: bool = False, with_class: Callable[..., Any] | None = None
) -> classmethod[Any, P, R]:
    """Build a classmethod with the signature and docstring of a function, for the hook ``td_methods``.

    Args:
        function: the function, without a parameter for the class.
        dense: convert the collection that ``function`` returns to the class on which the method is called.
        with_class: function to call instead, with the class as its first argument; for example
            ``lambda cls, path: my_format.load_as(cls, path)``.

    >>> def from_range(stop: int):
    ...     return TensorDict({"a": torch.arange(stop)})
    >>> class Numbers(TensorDict):
    ...     from_range = make_classmethod(from_range, dense=True)
    >>> type(Numbers.from_range(3)).__name__
    'Numbers'
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
