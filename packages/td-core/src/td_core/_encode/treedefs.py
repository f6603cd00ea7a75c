"""Treedefs of checkpoints: nested containers and values with a :class:`LeafName` in place of each tensor and collection.

The value codec stores a treedef; a format stores the tensors and collections by name. A container, a value or an object with
a ``state_dict`` that neither of them can store raises an error with its key path, so that no checkpoint needs a pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Union

from torch import Tensor

from .._torch.kernels import PLAIN
from .._tree.node import Child, Core
from .._tree.shared_memory import get_memory_key
from ..errors import CodecError, FormatError
from ..typing import NestedKey
from .value_codec import MAX_DEPTH, split
from .value_types import VALUES, LeafSerializer

_PLAIN_VALUES = frozenset({str, int, float, bool, type(None)})

#: The selected part of a treedef of which nothing is selected.
_NOTHING = object()

#: What to save in place of an object, by the name of its class.
_INSTEAD = {
    "collections.deque": "list(value)",
    "collections.defaultdict": "dict(value)",
    "numpy.random._generator.Generator": "value.bit_generator.state",
    "numpy.random.mtrand.RandomState": "value.get_state()",
    "random.Random": "value.getstate()",
    "torch._C.Generator": "value.get_state()",
}

#: A nested dict, list or tuple, or a value in it.
Tree = Any

#: The key path of a value: the path of its parent and its key; empty at the root.
_Path = Union[tuple["_Path", object], tuple[()]]  # noqa: UP007  a string is not an operand of |


@dataclass(frozen=True, slots=True)
class LeafName:
    """The name of a tensor or collection in a treedef."""

    name: str

    def __post_init__(self) -> None:
        if type(self.name) is not str:
            raise TypeError(f"the name of a leaf is a string; got {self.name!r:.100}")


@dataclass(frozen=True, slots=True)
class _StateDict:
    """The state dict of a module, whose attribute ``_metadata`` has the versions of its submodules."""

    entries: OrderedDict[str, object]
    metadata: Mapping[str, object]

    def __post_init__(self) -> None:
        if type(self.entries) is not OrderedDict or not isinstance(self.metadata, dict):
            raise TypeError("a state dict has entries and metadata")


VALUES.add(LeafSerializer("leaf", LeafName, lambda leaf: leaf.name, LeafName))
VALUES.add(
    LeafSerializer(
        "state_dict",
        _StateDict,
        lambda state: [state.entries, state.metadata],
        lambda parts: _StateDict(*parts),
    )
)


def show_keys(path: _Path) -> str:
    """Format a key path for messages.

    >>> show_keys(((((), "optimizer"), "state"), 0))
    "['optimizer']['state'][0]"
    """
    return "".join(f"[{key!r:.100}]" for key in _list_keys(path)) or "the checkpoint"


def _list_keys(path: _Path) -> list[object]:
    keys = []
    while path:
        path, key = path
        keys.append(key)
    return keys[::-1]


def _check_value(value: object, path: _Path) -> None:
    """Raise CodecError for a value that the value codec cannot store."""
    cls = type(value)
    if VALUES.find(cls) is None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        instead = f"save {_INSTEAD[name]} in its place" if name in _INSTEAD else "leave it out"
        raise CodecError(
            f"cannot save {show_keys(path)}: only a pickle could hold a {name}; {instead}, or register a LeafSerializer "
            "through the hook td_serializers"
        )
    split(value, lambda: f"cannot save {show_keys(path)}")


class _Flattening:
    """The tensors and collections that a walk has found so far: by name, and the name of each by its memory."""

    def __init__(self) -> None:
        self.entries: dict[str, Child] = {}
        self.known: dict[object, LeafName] = {}

    def flatten(self, value: Tree, path: _Path, depth: int) -> Tree:
        """Return the treedef of a value."""
        cls = type(value)
        if cls in _PLAIN_VALUES:
            return value
        if isinstance(value, (Tensor, Core)):
            return self.name(value, path)
        if depth > MAX_DEPTH:
            raise CodecError(
                f"cannot save {show_keys(path):.200}: it is nested deeper than {MAX_DEPTH} levels, or contains itself"
            )
        if cls is list or cls is tuple:
            return cls(self.flatten(item, (path, position), depth + 1) for position, item in enumerate(value))
        if cls is dict or cls is OrderedDict:
            return self.flatten_dict(value, path, depth)
        state_dict = getattr(value, "state_dict", None)
        if callable(state_dict) and not isinstance(value, type):
            return self.flatten(state_dict(), path, depth + 1)
        _check_value(value, path)
        return value

    def flatten_dict(self, value: Tree, path: _Path, depth: int) -> Tree:
        """Return the treedef of a dict; that of the state dict of a module keeps the versions."""
        for key in value:
            if type(key) not in _PLAIN_VALUES:
                _check_value(key, (path, key))
        made = type(value)((key, self.flatten(item, (path, key), depth + 1)) for key, item in value.items())
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return made
        return _StateDict(made, self.flatten(dict(metadata), (path, "_metadata"), depth + 1))

    def name(self, value: Child, path: _Path) -> LeafName:
        """Return the name of a tensor or collection, which is a new one unless the same was found before."""
        shared: object = id(value)
        if isinstance(value, Tensor) and type(value) in PLAIN and value.numel():
            shared = get_memory_key(value, any_shape=False)
        if shared in self.known:
            return self.known[shared]
        name = ".".join(map(str, _list_keys(path))) or "~"
        while name in self.entries:
            name += "~"
        # The entry keeps the tensor alive, so that no other one gets its id.
        self.entries[name] = value
        self.known[shared] = LeafName(name)
        return self.known[shared]


def flatten_checkpoint(tree: Tree) -> tuple[object, dict[str, Child]]:
    """Return the treedef of a checkpoint, and its tensors and collections by name; those that are tied have one name.

    >>> weight = torch.ones(2)
    >>> flatten_checkpoint({"a": [weight, 3], "b": weight})
    ({'a': [LeafName(name='a.0'), 3], 'b': LeafName(name='a.0')}, {'a.0': tensor([1., 1.])})
    """
    walk = _Flattening()
    treedef = walk.flatten(tree if type(tree) is OrderedDict else dict(tree), (), 0)
    leaves = walk.entries.items()
    return treedef, {
        name: leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
        for name, leaf in leaves
    }


class Selecting:
    """A walk over a treedef that selects what is at some keys, and lists the key paths of the entries that this needs.

    >>> walk = Selecting(["a"])
    >>> walk.select({"a": [LeafName("a.0"), 3], "b": 4}), walk.entries, walk.missing
    ({'a': [LeafName(name='a.0'), 3]}, [('a.0',)], set())
    """

    def __init__(self, keys: Iterable[NestedKey]) -> None:
        #: Keys joined by dots, as in the names of entries.
        self.keys = [key if isinstance(key, str) else ".".join(map(str, key)) for key in keys]
        self.missing = set(self.keys)
        self.entries: list[tuple[str, ...]] = []

    def select(self, tree: Tree) -> Tree:
        """Return the part of a treedef."""
        part = self._select(tree, "")
        return type(tree)() if part is _NOTHING else part

    def _select(self, tree: Tree, name: str) -> Tree:
        """Return the part of a treedef at a name; ``_NOTHING`` if none of it is selected."""
        whole = {key for key in self.keys if f"{name}.".startswith(f"{key}.")}
        self.missing -= whole
        cls = type(tree)
        if cls is LeafName:
            below = {key for key in self.keys if key.startswith(f"{name}.")}
            self.missing -= below
            rests: list[tuple[str, ...]] = [tuple(key[len(name) + 1 :].split(".")) for key in sorted(below)]
            self.entries += [(tree.name, *rest) for rest in ([()] if whole else rests)]
            return tree if whole or below else _NOTHING
        if cls is _StateDict:
            entries = self._select(tree.entries, name)
            return entries if entries is _NOTHING else _StateDict(entries, tree.metadata)
        if cls not in (list, tuple, dict, OrderedDict):
            return tree if whole else _NOTHING
        is_dict = issubclass(cls, dict)
        made = []
        for key, item in tree.items() if is_dict else enumerate(tree):
            part = self._select(item, f"{name}.{key}" if name else str(key))
            if part is not _NOTHING:
                made.append((key, part) if is_dict else part)
        return cls(made) if made or whole else _NOTHING


def unflatten_checkpoint(treedef: Tree, entries: Mapping[str, Child]) -> Tree:
    """Build the tree of a treedef, as :func:`flatten_checkpoint` made it; FormatError if an entry is missing."""
    cls = type(treedef)
    if cls is LeafName:
        if treedef.name not in entries:
            raise FormatError(f"the checkpoint lacks the tensor {treedef.name!r}")
        return entries[treedef.name]
    if cls is list or cls is tuple:
        return cls(unflatten_checkpoint(item, entries) for item in treedef)
    if cls is dict or cls is OrderedDict:
        return cls((key, unflatten_checkpoint(item, entries)) for key, item in treedef.items())
    if cls is not _StateDict:
        return treedef
    state = unflatten_checkpoint(treedef.entries, entries)
    state._metadata = OrderedDict(unflatten_checkpoint(treedef.metadata, entries))
    return state
