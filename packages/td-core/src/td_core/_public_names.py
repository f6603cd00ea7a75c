"""Public names of a package: lazy imports, and public module names for pickles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

import torch

from ._torch_private import add_safe_name

__all__ = ["lazy_names", "set_module"]

DefinedT = TypeVar("DefinedT")


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str] | Mapping[str, str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build ``__getattr__`` and ``__dir__`` of a package that imports its public names at their first use.

    >>> find, list_names = lazy_names("json", {"json.decoder": ["JSONDecodeError"]})
    >>> list_names(), find("JSONDecodeError").__name__
    (['JSONDecodeError'], 'JSONDecodeError')
    """
    # ``modules`` maps relative or absolute module names to names in them, or to a mapping from public names to these. The
    # last module wins for a repeated name.
    homes = {
        name: (module, names[name] if isinstance(names, Mapping) else name)
        for module, names in modules.items()
        for name in names
    }

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        value = getattr(import_module(module, package), original)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes)


def set_module(name: str, *, in_files: bool = False) -> Callable[[DefinedT], DefinedT]:
    """Return a decorator that sets ``__module__`` to a public name, so that pickles do not name private modules.

    ``in_files``: let ``torch.load(weights_only=True)`` accept the class, also under the name of its own module.

    >>> @set_module("mypackage")
    ... class Image:
    ...     pass
    >>> Image.__module__
    'mypackage'
    """

    def decorate(defined: Any) -> Any:
        before, defined.__module__ = defined.__module__, name
        if in_files:
            torch.serialization.add_safe_globals([defined])
            add_safe_name(defined, f"{before}.{defined.__name__}")
        return defined

    return decorate
