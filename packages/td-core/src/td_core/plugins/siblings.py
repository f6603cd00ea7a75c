"""The methods that sibling packages add to every collection, and the function that attaches them.

Before the package is registered, access to one of its methods raises :class:`~td_core.errors.MissingPluginError`. A
registered function hides the placeholder, so a call has no overhead.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterator

from ..errors import PluginError
from .methods import DeclaredMethods
from .placeholders import METHODS, PROTOCOLS

__all__ = ["SiblingMethods", "attach", "detach"]

#: The package of each declared method.
_OWNERS = {**METHODS, **PROTOCOLS}


class SiblingMethods(DeclaredMethods):
    """The methods that packages of the project provide; other plugins add theirs here."""

    __slots__ = ()


def attach(name: str, member: object, distribution: str) -> None:
    """Add a function, classmethod or property to every collection.

    Raises PluginError if the name is not public, shadows a member, or is one of another package.
    """
    if name in _OWNERS:
        _check_provided(name, distribution)
    else:
        _check_new(name, member)
    setattr(SiblingMethods, name, member)


def detach(name: str) -> None:
    """Remove an attached member."""
    delattr(SiblingMethods, name)


def _check_provided(name: str, distribution: str) -> None:
    if distribution != _OWNERS[name]:
        raise PluginError(f"the method {name!r} is declared for the package {_OWNERS[name]!r} alone")
    if name in vars(SiblingMethods):
        raise PluginError(f"the method {name!r} is already provided")


def _check_new(name: str, member: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
        raise PluginError(f"the method name {name!r} is not a public Python identifier")
    if not isinstance(member, (classmethod, staticmethod, property)) and not inspect.isfunction(member):
        raise PluginError(
            f"the method {name!r} is a {type(member).__name__}; it must be a function, "
            "classmethod, staticmethod or property"
        )
    for base in dict.fromkeys(base for cls in _with_subclasses(SiblingMethods) for base in cls.__mro__):
        if name in vars(base):
            raise PluginError(f"the method name {name!r} would shadow {base.__qualname__}.{name}")


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)
