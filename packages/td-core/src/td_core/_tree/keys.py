"""Validation and flattening of keys.

A key is a ``str`` or a non-empty, possibly nested tuple of ``str``. Its flat form is a tuple of plain ``str``: an
instance of a subclass of ``str``, such as a member of an enumeration, is converted to the equal plain ``str``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ..errors import KeyPathError
from ..typing import NestedKey
from .walks import expand

KEY_SEPARATOR = "."

NON_STRING_KEY = "<NON_NESTED>"
"""Prefix of the keys that replace dict keys which are not strings."""


def unravel_key_to_tuple(key: NestedKey) -> tuple[str, ...]:
    """Flatten a key to a tuple of strings.

    Raises:
        KeyPathError: ``key`` is not a string or a non-empty nested tuple of strings.

    >>> unravel_key_to_tuple(("a", ("b", ("c",))))
    ('a', 'b', 'c')
    """
    if type(key) is str:
        return (key,)
    if isinstance(key, str):
        return ("".join((key,)),)  # str() of a member of an enumeration returns its name, not its value
    if isinstance(key, tuple) and key:
        for part in key:
            if type(part) is not str:
                break
        else:
            return key
        parts = expand([key], lambda part: reversed(part) if isinstance(part, tuple) else ())
        flat: list[Any] = [part for part in parts if not isinstance(part, tuple) or not part]
        if all(isinstance(part, str) for part in flat):
            return tuple("".join((part,)) for part in flat)
    hint = ""
    if isinstance(key, int):
        hint = ": save() keeps a mapping with other keys, such as the state of an optimizer, as it is"
    raise KeyPathError(
        f"a key is a string or a non-empty, possibly nested tuple of strings; got {key!r}{hint}"
    )


def unravel_key_below(prefix: tuple[str, ...], key: NestedKey) -> tuple[str, ...]:
    """Flatten a key of the node or mapping under ``prefix``; the error names that place."""
    try:
        return unravel_key_to_tuple(key)
    except KeyPathError as error:
        if not prefix:
            raise
        place = prefix[0] if len(prefix) == 1 else prefix
        raise KeyPathError(f"under the key {place!r}: {error}") from None


def unravel_key(key: NestedKey) -> str | tuple[str, ...]:
    """Flatten a key: return a string for a key of one part, otherwise a flat tuple of strings.

    >>> unravel_key(("a",)), unravel_key(("a", ("b",)))
    ('a', ('a', 'b'))
    """
    if type(key) is str:
        return key
    path = unravel_key_to_tuple(key)
    return path[0] if len(path) == 1 else path


def unravel_key_list(keys: Iterable[NestedKey]) -> list[str | tuple[str, ...]]:
    """Flatten each key, as :func:`unravel_key` does.

    >>> unravel_key_list([("a",), ("b", ("c",))])
    ['a', ('b', 'c')]
    """
    if isinstance(keys, str):
        raise KeyPathError(f"unravel_key_list takes a sequence of keys; got the single key {keys!r}")
    return [unravel_key(key) for key in keys]


def is_pair_key(key: object) -> bool:
    """Return True for a key that replaces a dict key which is not a string; see :data:`NON_STRING_KEY`."""
    return isinstance(key, str) and key.startswith(NON_STRING_KEY)


def is_key(index: object) -> bool:
    """Return True if an argument of ``[]`` is a key, and not an index."""
    while type(index) is tuple and index:
        index = index[0]
    return isinstance(index, str)


def suggest_keys(key: str, existing: Iterable[str]) -> str:
    """Format the existing keys that resemble ``key``, as the end of an error message.

    >>> suggest_keys("obz", ["obs", "action"])
    "did you mean 'obs'?"
    """
    names = [str(name) for name in list(existing)]
    near = difflib.get_close_matches(key, names, n=3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return f"existing keys: [{shown}]"
