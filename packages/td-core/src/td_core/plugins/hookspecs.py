"""The four hooks. Hooks discover, what they return behaves; no hook is called after registration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from .._coerce import Coercer
from .._nodes import NodeKind
from .._serializers import Serializer
from .._value_types import LeafSerializer

hookspec = pluggy.HookspecMarker("td")
hookimpl = pluggy.HookimplMarker("td")


@hookspec
def td_node_kinds() -> Iterable[NodeKind]:
    """Return the kinds of node that the plugin adds.

    A :class:`~td_core.NodeKind` says how one class of collection is taken apart and put together, and how
    each format writes it. Saving, sending, pickling and ``state_dict`` of that class follow from it. A tag or
    a class that is already registered is refused.
    """
    raise NotImplementedError


@hookspec
def td_methods() -> type | Mapping[str, Any]:
    """Return the methods that the plugin adds to every collection.

    Either a mapping of names to functions, classmethods or properties, or a class whose public members are
    taken. A name must not shadow anything that a collection has; only td-memmap, td-tensorclass and
    td-distributed may provide the methods that are declared for them, with exactly the declared signature.
    """
    raise NotImplementedError


@hookspec
def td_serializers() -> Iterable[Serializer | LeafSerializer]:
    """Return the formats that the plugin adds.

    A :class:`~td_core.Serializer` is a format for whole collections; ``save(format=...)`` finds it by name
    and ``load`` by asking it whether it recognises the path. A :class:`~td_core.LeafSerializer` tells the
    value codec how to store values of a foreign type, in every format at once. A name, tag or type that is
    already registered is refused.
    """
    raise NotImplementedError


@hookspec
def td_coercers() -> Iterable[Coercer]:
    """Return how values of foreign types become entries of a collection.

    A :class:`~td_core.Coercer` is a tuple of types and a function that turns such a value into a tensor or a
    collection when it is set. An entry for ``object`` is tried last. A type that is already registered is
    refused.
    """
    raise NotImplementedError
