"""The keys of modules: checks of arguments, entries under keys, and the descriptors that store declared and assigned keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, Protocol, Union

from torch import Tensor

from td_core import KeyPathError, TensorCollection, TensorDict, unravel_key
from td_core.spi import RULES
from td_core.typing import NestedKey

from .module_errors import ModuleKeysError

#: A key in its shortest form: a string, or a tuple of at least two strings.
Key = Union[str, tuple[str, ...]]  # noqa: UP007

#: The output key whose value is not stored.
SINK = "_"


def as_keys(
    keys: Sequence[NestedKey],
    name: str = "keys",
    *,
    count: int | None = None,
    known: Collection[Key] | None = None,
) -> tuple[Key, ...]:
    """Convert keys to their shortest form: a string or a tuple is one key, a list is several.

    A tuple is several keys where it cannot be one: if ``count`` keys are needed and it has as many elements, or if it is not
    among the ``known`` keys, and all of its elements are.

    Raises:
        ModuleKeysError: the argument is not a key or a list of keys.
    """
    if isinstance(keys, tuple) and _are_several(keys, count, known):
        keys = list(keys)
    elif isinstance(keys, (str, tuple)):
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


def _are_several(keys: tuple[NestedKey, ...], count: int | None, known: Collection[Key] | None) -> bool:
    if count is not None:
        return len(keys) == count > 1
    if known is None or (_is_key(keys) and unravel_key(keys) in known):
        return False
    return all(_is_key(key) and unravel_key(key) in known for key in keys)


def _is_key(key: NestedKey) -> bool:
    try:
        unravel_key(key)
    except KeyPathError:
        return False
    return True


def _show(value: object) -> str:
    return f"{value!r} (of type {type(value).__name__})"


def join_key(key: Key, separator: str) -> str:
    """Return the name of the argument for a key, such as ``a_b`` for ``("a", "b")``."""
    return key if type(key) is str else separator.join(key)


def is_provided(key: Key, written: Collection[Key]) -> bool:
    """Return True if a key is among the written keys, or below one of them."""
    if key in written:
        return bool(key != SINK)
    if type(key) is str:
        return False
    levels = [key[0], *[key[:length] for length in range(2, len(key))]]
    return any(level in written for level in levels)


def is_related(left: Key, other: Key) -> bool:
    """Return True if two keys are equal, or one is below the other."""
    return bool(left == other) or is_provided(left, [other]) or is_provided(other, [left])


def has_key(tensordict: TensorCollection, key: Key) -> bool:
    """Return True if a collection has an entry at a key."""
    return bool(key in tensordict.keys(True))


def remove_keys(tensordict: TensorCollection, keys: Iterable[Key]) -> None:
    """Remove entries in place, skip missing ones, and remove the nodes that become empty."""
    for key in keys:
        if key == SINK or not has_key(tensordict, key):
            continue
        tensordict.del_(key)
        level = () if type(key) is str else key[:-1]
        while level and not tensordict[level].keys():
            tensordict.del_(level)
            level = level[:-1]


def read_outputs(result: object, keys: Iterable[Key]) -> dict[Key, Any]:
    """Return the values of a dict or collection at those of the keys that it has; a nested dict has nested keys, too."""
    found: dict[Key, Any] = {}
    for key in keys:
        if isinstance(result, dict) and key in result:
            found[key] = result[key]
            continue
        node = result
        for part in (key,) if type(key) is str else key:
            if not isinstance(node, (dict, TensorCollection)) or part not in node:
                break
            node = node[part]
        else:
            found[key] = node
    return found


def store_outputs(tensordict: TensorCollection, keys: Iterable[Key], values: Iterable[object]) -> None:
    """Store all values or, if one does not fit, none. A collection replaces the entry at its key."""
    entries = dict(zip(keys, values))
    entries.pop(SINK, None)
    if _are_plain(tensordict, entries):
        for key, value in entries.items():
            tensordict.set(key, value)
        return
    is_leaf = None
    for value in entries.values():
        if not isinstance(value, Tensor):
            is_leaf = _is_whole
            break
    if len(entries) == 1:
        ((key, value),) = entries.items()
        tensordict.set(key, value)
    elif is_leaf is not None and not _are_separate(entries):
        _store_in_order(tensordict, entries)
    elif entries:
        tensordict.update(entries, is_leaf=is_leaf)


def _store_in_order(tensordict: TensorCollection, entries: dict[Key, object]) -> None:
    """Store values one after the other, in a copy first, where an error changes nothing of the collection."""
    trial = tensordict.clone(recurse=False)
    for key, value in entries.items():
        trial.set(key, value.clone(recurse=False) if isinstance(value, TensorCollection) else value)
    for key, value in entries.items():
        tensordict.set(key, value)


def _are_plain(root: TensorCollection, entries: Mapping[Key, object]) -> bool:
    """Return True if no value can be refused: plain tensors, stored as they are in TensorDicts that exist."""
    if type(root) is not TensorDict:
        return False
    node = None
    size = root.batch_size
    for key, value in entries.items():
        if type(key) is str:
            holder = root
        elif len(key) == 2 and key[0] not in entries:
            holder = root.get(key[:1], None)
        else:
            return False
        if holder is not node:
            if type(holder) is not TensorDict or holder.is_locked or holder.device is not None:
                return False
            node, size = holder, holder.batch_size
        if type(value) is not Tensor or value.is_nested or (size and value.shape[: len(size)] != size):
            return False
    return True


def _are_separate(keys: Collection[Key]) -> bool:
    """Return True if no key is below another one, whose value an update would store instead."""
    nested = [key for key in keys if type(key) is tuple]
    return not any(is_provided(key[0] if len(key) == 2 else key[:-1], keys) for key in nested)


def _is_whole(cls: type) -> bool:
    return True


class Declaring(Protocol):
    """A module whose keys are :class:`DeclaredKeys`."""

    _all_in_keys: tuple[Key, ...] | None
    _all_out_keys: tuple[Key, ...] | None


class DeclaredKeys:
    """Descriptor of ``in_keys`` or ``out_keys``: the keys of the instance, else those that its class declares.

    Reading returns a new list, so only an assignment changes the keys of a module. Programs of tensordict get the list of the
    module, which they may change. Like a property, it has ``getter`` and ``setter``, for subclasses that replace one of the two.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept = f"_all_{name}"
        self.selected = f"_selected_{name}"

    def every(self, instance: Declaring) -> Sequence[Key] | None:
        """Return all keys of an instance, selected or not; None if there are none yet."""
        return instance._all_in_keys if self.name == "in_keys" else instance._all_out_keys

    def __get__(self, instance: Declaring | None, owner: type) -> Any:
        if instance is None:
            declared = getattr(owner, self.kept)
            return self if declared is None else list(declared)
        keys = instance.__dict__.get(self.selected)
        if keys is None:
            keys = self.every(instance)
        if (
            keys is None
        ):  # a setter of a subclass that was written for tensordict stores them as tensordict does
            keys = instance.__dict__.get(f"_{self.name}_apparent", instance.__dict__.get(f"_{self.name}"))
        if keys is None:
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self.name!r}")
        if not RULES.follows_tensordict:
            return list(keys)
        if not isinstance(keys, list):
            keys = list(keys)
            instance.__dict__[self.selected if self.selected in instance.__dict__ else self.kept] = keys
        return keys

    def __set__(self, instance: Any, keys: Any) -> None:
        instance.__dict__[self.kept] = as_keys(keys, self.name)
        instance.__dict__.pop(self.selected, None)
        instance._take_keys(self.name)

    @property
    def fget(self) -> Callable[[Any], Any]:
        """The function that reads the keys of a module."""
        return lambda instance: self.__get__(instance, type(instance))

    @property
    def fset(self) -> Callable[[Any, Any], None]:
        """The function that assigns the keys of a module."""
        return self.__set__

    def getter(self, fget: Callable[[Any], object]) -> property:
        """Return a property with another function to read the keys."""
        return property(fget, self.fset)

    def setter(self, fset: Callable[[Any, Any], None]) -> property:
        """Return a property with another function to assign the keys."""
        return property(self.fget, fset)


class FollowedKeys(DeclaredKeys):
    """Descriptor that returns the keys of the wrapped module until others are assigned.

    In programs of tensordict, assigned ``out_keys`` are those of the wrapped module, which writes them.
    """

    def every(self, instance: Any) -> Sequence[Key] | None:
        """Return the assigned keys, or the keys of the wrapped module."""
        keys = super().every(instance)
        return getattr(instance.td_module, self.name) if keys is None else keys

    def __set__(self, instance: Any, keys: Any) -> None:
        if self.name == "out_keys" and RULES.follows_tensordict:
            instance.td_module.out_keys = keys
        else:
            super().__set__(instance, keys)


def declare_keys(owner: type, names: Iterable[str]) -> None:
    """Replace keys in a class body by descriptors, so that each instance stores separate keys."""
    for name in names:
        declared = owner.__dict__.get(name)
        if isinstance(declared, (str, tuple, MutableSequence)):
            setattr(owner, f"_all_{name}", as_keys(declared, f"{owner.__name__}.{name}"))
            setattr(owner, name, DeclaredKeys(name))
