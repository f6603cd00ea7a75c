"""The value codec: convert Python values to JSON and back, with their types.

``split`` returns two pieces of JSON. *plain* is the value as Python's ``json`` writes it, so any JSON reader can show
it. *types* is a sidecar, None if *plain* alone is exact; it records what JSON cannot: that a list was a tuple, or a
number a ``numpy.float32``. ``join`` is the inverse. Neither function pickles, imports or resolves a name from a file:
types are looked up by tag in one table, which plugins extend with a :class:`LeafSerializer`.

A sidecar is a tree of the same structure as *plain*. A node is None (exact), ``"tag"``, or ``{"t": [tags], "c":
children}``: the children are converted first, then the tags from last to first. Children have positions or keys as
names; ``"*"`` means every item of a list. The tag of a plugin is written as ``tag@distribution==version``.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Callable
from numbers import Number
from typing import Any, Union

import numpy as np
import torch

from .._tree.walks import expand
from ..errors import CodecError, FormatError, MissingPluginError
from .check_lines import compare_check_line
from .value_types import VALUES

#: Maximum nesting of a value; each conversion to a simpler value counts as one level. Python's json fails at about
#: a thousand levels, and a sidecar needs two per level of the value.
MAX_DEPTH = 200

# int() and str() reject integers of more than 4300 decimal digits, so JSON cannot hold them.
_LARGE = 1 << 12_000
_PLAIN = frozenset({str, float, bool, type(None)})


#: The path of the parent and the key; empty at the root. To extend it takes constant time.
Path = Union[tuple["Path", object], tuple[()]]  # noqa: UP007  a string is not an operand of |


def parse_json(text: str | bytes, where: str = "") -> Any:
    """Parse JSON.

    Args:
        text: the JSON; bytes can end with a check line.
        where: where it was read, for messages; then all errors are FormatErrors.

    Raises:
        FormatError: it is malformed, an object repeats a key, or the check line differs; ValueError without ``where``.
        RecursionError: it is nested too deep, without ``where``.

    >>> parse_json('{"a": 1}')
    {'a': 1}
    >>> parse_json("{", "data.bin")
    Traceback (most recent call last):
    td_core.errors.FormatError: data.bin is not valid JSON: Expecting property name enclosed in double quotes: ...
    """
    try:
        if not isinstance(text, str):
            compare_check_line(text)
            text = text.decode()
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if not where:
            raise
        raise FormatError(f"{where} is not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {key!r}")
    return result


# Reuse one decoder: json.loads() with this option would create a decoder per call.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def split(value: object, where: Callable[[], str] | None = None) -> tuple[Any, Any]:
    """Split a value into plain JSON and a sidecar of types.

    Args:
        value: the value.
        where: a function that returns the place of the value, with which messages then start.

    Returns:
        ``(plain, types)``; ``types`` is None if ``plain`` alone is exact.

    Raises:
        CodecError: a type is not registered, or the value is nested too deep; the message has the path.

    >>> split({"a": [1, 2.5], "b": None})
    ({'a': [1, 2.5], 'b': None}, None)
    >>> split([(1, 2), (3, 4)])
    ([[1, 2], [3, 4]], {'c': {'*': 'tuple'}})
    """
    try:
        return _split(value, (), 0)
    except CodecError as error:
        if where is None:
            raise
        raise CodecError(f"{where()}: {error}") from error


def join(plain: object, types: object, where: Callable[[], str] | None = None) -> Any:
    """Join plain JSON and types to a value; the inverse of :func:`split`, safe for untrusted data.

    Args:
        plain: the first item of the result of :func:`split`.
        types: the second one.
        where: a function that returns the place of the value, with which messages then start.

    Raises:
        FormatError: ``plain`` and ``types`` do not match; the message has the path.
        MissingPluginError: a type belongs to a plugin that is not installed; the message names it.

    >>> join([[1, 2], [3, 4]], {"c": {"*": "tuple"}})
    [(1, 2), (3, 4)]
    """
    try:
        return plain if types is None else _join(plain, types, (), 0)
    except (FormatError, MissingPluginError) as error:
        if where is None:
            raise
        raise type(error)(f"{where()}: {error}") from error


def is_readable(types: object) -> bool:
    """Return True if a JSON reader without the sidecar can show the value, with simplified types.

    >>> is_readable(split((1, 2))[1]), is_readable(split(b"x")[1])
    (True, False)
    """
    # A tuple is readable as a list, and a numpy.float32 as a number; bytes are base64 text, so they are not readable.
    parts = expand(
        [types],
        lambda node: [*node.get("t", ()), *node.get("c", {}).values()] if isinstance(node, dict) else (),
    )
    return all(node is None or isinstance(node, dict) or node in VALUES.natural for node in parts)


def _split(value: Any, path: Path, depth: int) -> tuple[object, object]:
    cls = type(value)
    if cls in _PLAIN or (cls is int and -_LARGE < value < _LARGE):
        return value, None
    if depth > MAX_DEPTH:
        raise CodecError(
            f"cannot store the value at {_show(path)}: it is nested deeper than {MAX_DEPTH} levels, "
            "or contains itself"
        )
    if cls is list:
        pairs = [_split(item, (path, position), depth + 1) for position, item in enumerate(value)]
        return [plain for plain, _ in pairs], _types_of_items([types for _, types in pairs])
    if cls is dict and all(type(key) is str for key in value):
        plains: dict[str, object] = {}
        children: dict[str, object] = {}
        for key, item in value.items():
            plains[key], types = _split(item, (path, key), depth + 1)
            if types is not None:
                children[key] = types
        return plains, {"c": children} if children else None
    tag, simpler = _dump(value, path)
    plain, types = _split(simpler, path, depth + 1)
    return plain, _make_types(VALUES.written[tag], types)


def _dump(value: object, path: Path) -> tuple[str, object]:
    """Convert a value with its serializer; return the tag of the serializer and the result."""
    cls = type(value)
    serializer = VALUES.find(cls)
    if serializer is None:
        raise CodecError(
            f"cannot store the value at {_show(path)}: no serializer is registered for its type "
            f"{cls.__module__}.{cls.__qualname__}; register a LeafSerializer through the hook "
            f"td_serializers, or pass allow_pickle=True where the format has it; got {_shorten(value)}"
        )
    try:
        return serializer.tag, serializer.dump(value)
    except (TypeError, ValueError) as error:
        raise CodecError(
            f"cannot store the value at {_show(path)}: {error}; got {_shorten(value)}"
        ) from error


def _types_of_items(
    types: list[object],
) -> object:
    first = types[0] if types else None
    # One node for equal types keeps the sidecar of a million tuples small.
    if first is not None and len(types) > 1 and all(node == first for node in types):
        return {"c": {"*": first}}
    children = {str(position): node for position, node in enumerate(types) if node is not None}
    return {"c": children} if children else None


def _make_types(tag: str, types: Any) -> object:
    if types is None:
        return tag
    if isinstance(types, str):
        return {"t": [tag, types]}
    return {**types, "t": [tag, *types.get("t", ())]}


def _join(plain: object, types: object, path: Path, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise FormatError(
            f"the types of the value at {_show(path)} are nested deeper than {MAX_DEPTH} levels"
        )
    if type(types) is str:
        return _load(types, plain, path)
    if type(types) is not dict or not types.keys() <= {"t", "c"}:
        raise _damage_error(path, types)
    tags, children = types.get("t", []), types.get("c", {})
    if type(tags) is not list or type(children) is not dict:
        raise _damage_error(path, types)
    value = _join_children(plain, children, path, depth) if children else plain
    for tag in reversed(tags):
        value = _load(tag, value, path)
    return value


def _join_children(plain: object, children: dict[object, object], path: Path, depth: int) -> object:
    if type(plain) is dict:
        if not children.keys() <= plain.keys():
            raise _damage_error(path, children)
        return {
            key: item if children.get(key) is None else _join(item, children[key], (path, key), depth + 1)
            for key, item in plain.items()
        }
    if type(plain) is not list:
        raise _damage_error(path, children)
    if children.keys() == {"*"} and children["*"] is not None:
        return [
            _join(item, children["*"], (path, position), depth + 1) for position, item in enumerate(plain)
        ]
    items = list(plain)
    for name, types in children.items():
        position = _parse_position(name)
        if position is None or position >= len(items):
            raise _damage_error(path, children)
        if types is not None:
            items[position] = _join(items[position], types, (path, position), depth + 1)
    return items


def _parse_position(name: object) -> int | None:
    """Parse a position in a list. Accept decimal digits only: int() also accepts signs, spaces and underscores."""
    if type(name) is str and name.isascii() and name.isdigit() and len(name) <= 18:
        return int(name)
    return None


def _load(written: object, value: object, path: Path) -> object:
    if type(written) is not str:
        raise _damage_error(path, written)
    tag, _, provider = written.partition("@")
    serializer = VALUES.by_tag.get(tag)
    if serializer is None:
        error = MissingPluginError.of_writer(f"the value at {_show(path)}, of the type {tag!r},", provider)
        raise error or FormatError(f"the value at {_show(path)} is of the unknown type {_shorten(written)}")
    try:
        return serializer.load(value)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, NotImplementedError) as error:
        raise FormatError(
            f"the value at {_show(path)} is no {tag!r}: {error}; got {_shorten(value)}"
        ) from error


def _damage_error(path: Path, types: object) -> FormatError:
    return FormatError(f"the types of the value at {_show(path)} do not fit it; got {_shorten(types)}")


def _show(path: Path) -> str:
    keys: list[str] = []
    while path:
        path, key = path
        keys.append(f"[{_shorten(key)}]")
    if not keys:
        return "the top level"
    return "".join(reversed(keys)) if len(keys) <= 20 else "".join(reversed(keys[-10:])) + "..."


def _shorten(value: object) -> str:
    return reprlib.repr(value)


def is_same_value(a: object, b: object) -> bool:
    """Return True if two values are the same object, or equal values of one type; NaN equals NaN.

    >>> is_same_value(float("nan"), float("nan")), is_same_value(1, 1.0)
    (True, False)
    """
    # If ``==`` raises or does not return a bool, only the same object is equal.
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return _is_equal(a, b)
    except Exception:  # ``==`` of a user-defined class may raise anything
        return False


def _is_equal(a: object, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        equal = a == b  # torch.equal does not support float8
        return bool(equal.all()) or bool((equal | ((a != a) & (b != b))).all())
    if isinstance(a, (np.ndarray, np.generic)):
        return _is_equal_array(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same_value(value, b[key]) for key, value in a.items())
    equal = a == b
    if isinstance(equal, (bool, np.bool_)):
        return bool(equal) or (isinstance(a, Number) and bool(a != a and b != b))
    return False


def _is_equal_array(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject and a.dtype.names is None:
        return all(map(is_same_value, a.flat, b.flat))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
