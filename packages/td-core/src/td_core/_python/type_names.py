"""Types by name, such as ``"pandas.Series"``, so that a plugin can refer to a class without an import of its library."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import reduce
from typing import Generic, TypeVar

T = TypeVar("T")

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+\Z")


def is_type_name(name: object) -> bool:
    """Return True for a dotted name of a class: ``"package.Class"``."""
    return isinstance(name, str) and _NAME.match(name) is not None


def has_name(cls: type, name: str) -> bool:
    """Return True if ``name`` is the module and qualname of ``cls``, or a public name of it in the same package."""
    if f"{cls.__module__}.{cls.__qualname__}" == name:
        return True
    # pandas.Series, for instance, is defined in pandas.core.series.
    return cls.__module__.partition(".")[0] == name.partition(".")[0] and find_imported(name) is cls


def find_imported(name: str) -> object:
    """Return the object with a dotted name in a module that is already imported, or None."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, first = module.rpartition(".")
        rest = f"{first}.{rest}"
    try:
        return reduce(getattr, rest.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def is_instance_of_named(value: object, types: tuple[type | str, ...]) -> bool:
    """Return True if a value is an instance of one of some types, which are classes or names of classes."""
    return any(
        any(has_name(base, kind) for base in type(value).__mro__)
        if isinstance(kind, str)
        else isinstance(value, kind)
        for kind in types
    )


class NamedTypes(Generic[T]):
    """A registry by the names of classes, which need not be imported."""

    def __init__(self) -> None:
        #: The items by name, grouped by the package of the class, so that most classes need one lookup.
        self._by_package: dict[str, dict[str, T]] = {}

    def __setitem__(self, name: str, item: T) -> None:
        self._by_package.setdefault(name.partition(".")[0], {})[name] = item

    def __delitem__(self, name: str) -> None:
        package = name.partition(".")[0]
        del self._by_package[package][name]
        if not self._by_package[package]:
            del self._by_package[package]

    def __iter__(self) -> Iterator[str]:
        return (name for group in self._by_package.values() for name in group)

    def __len__(self) -> int:
        return sum(map(len, self._by_package.values()))

    def get(self, name: str) -> T | None:
        """Return the item of a name, or None."""
        return self._by_package.get(name.partition(".")[0], {}).get(name)

    def find(self, cls: type) -> T | None:
        """Return the item of a class, or None."""
        group = self._by_package.get(cls.__module__.partition(".")[0])
        if group is None:
            return None
        return next((item for name, item in group.items() if has_name(cls, name)), None)
