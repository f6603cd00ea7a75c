"""Public names of a package: imported at first use, and written into pickles instead of private ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

__all__ = ["lazy_names", "set_module"]

DefinedT = TypeVar("DefinedT")


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        modules: the names that each module has, which is said relative to the package (``"._module"``) or not; of a name
            that several have, that of the last counts.

    >>> find, names = lazy_names("math", {"fractions": ["Fraction"]})
    >>> find("Fraction")(1, 2), names()
    (Fraction(1, 2), ['Fraction'])
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes)


def set_module(name: str) -> Callable[[DefinedT], DefinedT]:
    """Return a decorator that sets the module under which a pickle names a class or function.

    Files outlive private modules, so what they name is imported from a public one.

    >>> set_module("fractions")(type("Fraction", (), {}))
    <class 'fractions.Fraction'>
    """

    def decorate(defined: DefinedT) -> DefinedT:
        defined.__module__ = name
        return defined

    return decorate
