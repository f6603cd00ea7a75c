"""Types by name, such as ``"pandas.Series"``, so that a plugin can refer to a class without an import of its library."""

from __future__ import annotations

import re
import sys
from functools import reduce
from typing import Any

__all__ = ["get_root", "has_name", "is_instance_of_named", "is_type_name"]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+\Z")


def is_type_name(name: Any) -> bool:
    """Return True for a dotted name of a class: ``"package.Class"``."""
    return isinstance(name, str) and _NAME.match(name) is not None


def get_root(name: str) -> str:
    """Return the top-level package of a dotted name."""
    return name.partition(".")[0]


def has_name(cls: type, name: str) -> bool:
    """Return True if ``name`` is the module and qualname of ``cls``, or a public name of it in the same package."""
    if f"{cls.__module__}.{cls.__qualname__}" == name:
        return True
    # pandas.Series, for instance, is defined in pandas.core.series.
    return get_root(cls.__module__) == get_root(name) and _find_imported(name) is cls


def _find_imported(name: str) -> Any:
    """Return the object with a dotted name in a module that is already imported, or None."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, first = module.rpartition(".")
        rest = f"{first}.{rest}"
    try:
        return reduce(getattr, rest.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def is_instance_of_named(value: Any, types: tuple[type | str, ...]) -> bool:
    """Return True if a value is an instance of one of some types, which are classes or names of classes."""
    return any(
        any(has_name(base, kind) for base in type(value).__mro__)
        if isinstance(kind, str)
        else isinstance(value, kind)
        for kind in types
    )
