"""The keys of a module: what may be given, how they are kept, and how a class declares them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableSequence
from typing import Any

from td_core import KeyPathError, TensorCollection, unravel_key

from .module_errors import ModuleKeysError

__all__ = [
    "SINK",
    "DeclaredKeys",
    "FollowedKeys",
    "Key",
    "as_keys",
    "has_key",
    "is_provided",
    "join_key",
    "is_related",
]

#: A key in its shortest form.
Key = Any

#: The output key whose value is not stored.
SINK = "_"


def as_keys(keys: Any, name: str = "keys") -> tuple[Key, ...]:
    """Return keys in their shortest form: a string or a tuple is one key, a list is several.

    Raises:
        ModuleKeysError: they are neither.
    """
    if isinstance(keys, (str, tuple)):
        keys = [keys]
    elif not isinstance(keys, MutableSequence):
        raise ModuleKeysError(
            f"{name} is a list of keys or one key, and a key is a string or a tuple of strings; "
            f"got {_show(keys)}"
        )
    try:
        return tuple(map(unravel_key, keys))
    except KeyPathError:
        wrong = [key for key in keys if not _is_key(key)]
        raise ModuleKeysError(
            f"{name} is a list of keys or one key, and a key is a string or a non-empty tuple of strings; "
            f"got {', '.join(map(_show, wrong))} among them"
        ) from None


def _is_key(key: Any) -> bool:
    try:
        unravel_key(key)
    except KeyPathError:
        return False
    return True


def _show(value: Any) -> str:
    return f"{value!r} (of type {type(value).__name__})"


def join_key(key: Key, separator: str) -> str:
    """Return the name of the argument that stands for a key.

    >>> join_key("a", "_"), join_key(("a", "b"), "_")
    ('a', 'a_b')
    """
    return key if type(key) is str else separator.join(key)


def is_provided(key: Key, written: Collection[Key]) -> bool:
    """Tell whether some keys, written, provide one that is read: it is one of them, or below one.

    >>> is_provided(("n", "a"), ["n"]), is_provided("n", [("n", "a")])
    (True, False)
    """
    if key in written:
        return bool(key != SINK)
    if type(key) is str:
        return False
    levels = [key[0], *[key[:length] for length in range(2, len(key))]]
    return any(level in written for level in levels)


def is_related(left: Key, other: Key) -> bool:
    """Tell whether two keys are the same, or one is below the other."""
    return bool(left == other) or is_provided(left, [other]) or is_provided(other, [left])


def has_key(tensordict: TensorCollection, key: Key) -> bool:
    """Tell whether a collection has an entry at a key."""
    return bool(key in tensordict.keys(True))


def remove_keys(tensordict: TensorCollection, keys: Iterable[Key]) -> None:
    """Remove those of some entries that a collection has, in place, and the levels that this leaves empty."""
    for key in keys:
        if key == SINK or not has_key(tensordict, key):
            continue
        tensordict.del_(key)
        level = () if type(key) is str else key[:-1]
        while level and not tensordict[level].keys():
            tensordict.del_(level)
            level = level[:-1]


class DeclaredKeys:
    """The attribute ``in_keys`` or ``out_keys``: what the instance keeps, else what its class declares.

    Reading gives a list that belongs to the reader: a module's keys change when they are assigned and at no other time.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept = f"_all_{name}"
        self.selected = f"_selected_{name}"

    def every(self, instance: Any) -> tuple[Key, ...] | None:
        """Return the keys of an instance, selected or not; None where it has none yet."""
        keys: tuple[Key, ...] | None = getattr(instance, self.kept)
        return keys

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            declared = getattr(owner, self.kept)
            return self if declared is None else list(declared)
        keys = instance.__dict__.get(self.selected)
        if keys is None:
            keys = self.every(instance)
        if keys is None:
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self.name!r}")
        return list(keys)

    def __set__(self, instance: Any, keys: Any) -> None:
        instance.__dict__[self.kept] = as_keys(keys, self.name)
        instance.__dict__.pop(self.selected, None)
        instance._take_keys(self.name)


class FollowedKeys(DeclaredKeys):
    """Keys that are those of the module inside until others are assigned."""

    def every(self, instance: Any) -> tuple[Key, ...] | None:
        """Return the keys that were assigned, or those of the module inside."""
        keys = super().every(instance)
        return tuple(getattr(instance.td_module, self.name)) if keys is None else keys


def declare_keys(owner: type, names: Iterable[str]) -> None:
    """Let the keys that a class body declares be kept by instances, each on its own."""
    for name in names:
        declared = owner.__dict__.get(name)
        if isinstance(declared, (str, tuple, MutableSequence)):
            setattr(owner, f"_all_{name}", as_keys(declared, f"{owner.__name__}.{name}"))
            setattr(owner, name, DeclaredKeys(name))
