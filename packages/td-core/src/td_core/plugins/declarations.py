"""Declarations of methods that other packages provide: the one place of their signatures and docstrings.

A declaration is a method with an empty body in a class below :class:`~td_core.plugins.siblings.SiblingMethods`, so
editors and type checkers see it whether the package is installed or not. The package implements it by a function with
the same parameters, without defaults and annotations, which :func:`implements` takes from the declaration.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from ..errors import MissingPluginError, PluginError

__all__ = [
    "DECLARATIONS", "Declaration", "implementations", "implements", "implements_classmethod", "provided_by", "shows",
    "takes",
]  # fmt: skip

F = TypeVar("F")
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Declaration:
    """Placeholder of a method whose package is not registered.

    Access through a collection raises :class:`~td_core.errors.MissingPluginError`, an ``AttributeError``, so ``hasattr``
    returns False.

    Attributes:
        distribution: the package that provides the method.
        declared: the declared function, classmethod or property.
        implementation: the member that the package attaches; None until the package is imported.
    """

    def __init__(self, distribution: str, declared: Any) -> None:
        self.distribution = distribution
        self.declared = declared
        self.implementation: object = None
        self.function = unwrap_member(declared)
        functools.update_wrapper(self, self.function)

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner
        self.name = name
        DECLARATIONS[name] = self

    def __get__(self, instance: object, owner: type | None = None) -> Declaration:
        cls = owner if owner is not None else type(instance)
        if cls is self.owner:
            return self
        call = "" if isinstance(self.declared, property) else "()"
        message = f"{cls.__name__}.{self.name}{call} is provided by " + MissingPluginError.describe(
            self.distribution
        )
        # torch.compile evaluates hasattr() over a descriptor only when it raises AttributeError itself.
        raise AttributeError(message) if torch.compiler.is_compiling() else MissingPluginError(message)

    def __call__(self, instance: object, *args: object, **kwargs: object) -> Any:
        """Raise the error for a missing package; ``help()`` shows the signature of callables only."""
        return self.__get__(instance, type(instance))

    def implement(self, function: Any) -> Any:
        """Give ``function`` the declared signature and docstring, and return it as the member to attach."""
        declared = inspect.unwrap(self.function)
        function.__doc__, function.__annotations__ = declared.__doc__, declared.__annotations__
        if declared is self.function:
            if _get_parameters(function) != _get_parameters(declared):
                raise PluginError(
                    f"the method {self.name!r} is declared with the parameters {_get_parameters(declared)}; "
                    f"got {_get_parameters(function)}"
                )
            function.__defaults__, function.__kwdefaults__ = declared.__defaults__, declared.__kwdefaults__
        else:
            function = takes(self.function.options)(function)
        kind = type(self.declared)
        self.implementation = function if kind is type(self.function) else kind(function)
        return function


#: Every declaration, by method name.
DECLARATIONS: dict[str, Declaration] = {}


def _get_parameters(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parameters by position or name, without the first, and of those by name only."""
    code = function.__code__
    names, count = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_argcount
    return names[1:count], names[count:]


def unwrap_member(member: object) -> Any:
    """Return the function of a method, classmethod or property."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def provided_by(distribution: str) -> Callable[[F], F]:
    """Return a decorator that declares a method, classmethod or property of the package ``distribution``.

    >>> class Collection:
    ...     @provided_by("td-example")
    ...     def shine(self) -> None:
    ...         '''Shine.'''
    >>> class Example(Collection):
    ...     '''Subclass of the class with the declaration.'''
    >>> Example().shine()
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: Example.shine() is provided by the package 'td-example', which is
    not installed: install it from where its authors publish it
    >>> hasattr(Example(), "shine")
    False
    >>> del DECLARATIONS["shine"]
    """

    def declare(declared: F) -> F:
        return cast(F, Declaration(distribution, declared))

    return declare


def takes(options: Callable[P, T]) -> Callable[[Callable[[S, T], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator for a method of one argument, an instance of the dataclass ``options``.

    The decorated method has the parameters of the dataclass instead.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class ShineOptions:
    ...     colour: str = "white"
    >>> @takes(ShineOptions)
    ... def shine(self, options):
    ...     return options
    >>> shine(None, "red"), inspect.signature(shine)
    (ShineOptions(colour='red'), <Signature (self, colour: 'str' = 'white')>)
    """

    def decorate(function: Callable[[S, T], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(function)
        def method(data: S, *args: P.args, **kwargs: P.kwargs) -> R:
            return function(data, options(*args, **kwargs))

        changed: Any = method
        signature = inspect.signature(function)
        own, _ = signature.parameters.values()
        parameters = [own, *inspect.signature(options).parameters.values()]
        changed.__signature__ = signature.replace(parameters=parameters)
        changed.__annotations__ = {item.name: item.annotation for item in parameters[1:]}
        changed.__annotations__["return"] = signature.return_annotation
        changed.options = options
        cast(Any, options).__init__.__qualname__ = function.__name__  # A TypeError names the method.
        return cast(Callable[Concatenate[S, P], R], method)

    return decorate


def shows(options: Callable[..., object], *, more: bool = False) -> Callable[[F], F]:
    """Return a decorator that shows the fields of a dataclass in the signature of a function with ``**options``.

    With ``more``, the signature keeps ``**options``: the function accepts other names too.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(cast(Any, function))
        *own, rest = signature.parameters.values()
        first = [item for item in own if item.kind is not item.KEYWORD_ONLY]
        fields = [
            item
            for item in inspect.signature(options).parameters.values()
            if item.name not in signature.parameters
        ]
        parameters = [*first, *fields, *own[len(first) :], *([rest] if more else [])]
        cast(Any, function).__signature__ = signature.replace(parameters=parameters)
        return function

    return decorate


def implements(
    declared: Callable[Concatenate[S, P], R],
) -> Callable[[Callable[..., object]], Callable[Concatenate[Any, P], Any]]:
    """Return a decorator that makes a function the implementation of a declaration, with its signature and docstring."""

    def implement(function: Callable[..., object]) -> Callable[Concatenate[Any, P], Any]:
        method: Callable[Concatenate[Any, P], Any] = cast(Declaration, declared).implement(function)
        return method

    return implement


def implements_classmethod(
    declared: Callable[P, object],
) -> Callable[[Callable[..., object]], Callable[P, Any]]:
    """Return a decorator like :func:`implements`, whose function without the parameter ``cls`` passes None for it."""

    def implement(function: Callable[..., object]) -> Callable[P, Any]:
        method = cast(Declaration, declared).implement(function)

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return method(None, *args, **kwargs)

        signature = inspect.signature(method)
        changed: Any = call
        changed.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        return call

    return implement


def implementations(distribution: str) -> dict[str, Any]:
    """Return the implemented members of the package ``distribution`` by name, for the hook ``td_methods``."""
    return {
        name: declaration.implementation
        for name, declaration in DECLARATIONS.items()
        if declaration.distribution == distribution
    }
