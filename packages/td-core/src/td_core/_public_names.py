"""Public names of a package: lazy imports, and public module names for pickles."""

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
    """Build ``__getattr__`` and ``__dir__`` of a package that imports its public names at their first use."""
    # ``modules`` maps relative or absolute module names to names in them. The last module wins for a repeated name.
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes)


def set_module(name: str) -> Callable[[DefinedT], DefinedT]:
    """Return a decorator that sets ``__module__`` to a public name, so that pickles do not name private modules."""

    def decorate(defined: DefinedT) -> DefinedT:
        defined.__module__ = name
        return defined

    return decorate
