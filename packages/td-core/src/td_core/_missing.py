"""What a message says about a package that provides nothing: not installed, switched off, or broken."""

from __future__ import annotations

import re
from typing import Any

from .errors import MissingPluginError

__all__ = ["UNAVAILABLE", "describe_missing_package", "missing_writer_error"]

_PROVIDER = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?)==([A-Za-z0-9.+!_\-]*)\Z")

#: Why an installed distribution provides nothing, by name; the plugin manager fills it.
UNAVAILABLE: dict[str, str] = {}


def describe_missing_package(distribution: str) -> str:
    """Return the end of a message: which package is missing, and what to do about it.

    >>> describe_missing_package("td-example")
    "the package 'td-example', which is not installed: pip install td-example"
    """
    why = UNAVAILABLE.get(distribution, f"not installed: pip install {distribution}")
    return f"the package {distribution!r}, which is {why}"


def missing_writer_error(what: str, provider: Any) -> MissingPluginError | None:
    """Return the error for something that a package wrote which is not here to read it.

    The provider is ``distribution==version`` as the file says it; it may say anything, and gives None if it names no
    package.

    >>> print(missing_writer_error("node 3", "td-example==1.2"))
    node 3 was written by 'td-example' 1.2, which is not installed: pip install td-example
    """
    result = _PROVIDER.match(provider) if isinstance(provider, str) else None
    if result is None:
        return None
    name, version = result.groups()
    why = UNAVAILABLE.get(name, f"not installed: pip install {name}")
    return MissingPluginError(f"{what} was written by {name!r} {version}, which is {why}")
