"""The hooks. Core calls each hook once, at registration, and then uses the returned objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pluggy

from .._coerce import Coercer
from .._nodes import NodeKind
from .._serializers import Serializer
from .._value_types import LeafSerializer

hookspec = pluggy.HookspecMarker("td")
hookimpl = pluggy.HookimplMarker("td")


@hookspec
def td_node_kinds() -> Iterable[NodeKind]:
    """Return the node kinds that the plugin adds.

    A :class:`~td_core.NodeKind` defines how one class of collections is flattened and unflattened, and how each format
    stores it. This enables saving, sending, pickling and ``state_dict`` of the class. A tag or class that is already
    registered is refused.
    """
    raise NotImplementedError


@hookspec
def td_methods() -> type | Mapping[str, object]:
    """Return the methods that the plugin adds to every collection.

    The result is either a mapping from names to functions, classmethods or properties, or a class, whose public
    members are added. A name must not shadow an attribute of any collection. Only packages of
    the project may provide the methods that core declares for them, with exactly the declared signature.
    """
    raise NotImplementedError


@hookspec
def td_serializers() -> Iterable[Serializer | LeafSerializer]:
    """Return the file formats and value types that the plugin adds.

    A :class:`~td_core.Serializer` is a format for whole collections. ``save(format=...)`` selects it by name, and
    ``load`` calls its ``detect`` with the location. A :class:`~td_core.LeafSerializer` converts values of one type for
    the value codec, in all formats. A name, tag or type that is already registered is refused.
    """
    raise NotImplementedError


@hookspec
def td_coercers() -> Iterable[Coercer]:
    """Return the coercers that the plugin adds.

    A :class:`~td_core.Coercer` has a tuple of types and a function that converts a value of these types to a tensor
    or a collection when it is set. A coercer for ``object`` is tried last. A type that is already registered is
    refused.
    """
    raise NotImplementedError
