"""The hooks of a plugin. td-core calls each hook once, when it registers the plugin, and then uses the returned objects.

It checks these objects, and refuses a name, tag or type that another plugin has registered, with a message that names both
plugins. If a part of a plugin is refused, or its import fails, nothing of it is registered, and td-core issues a warning;
``import td_core`` does not fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pluggy

from .._encode.node_kinds import NodeKind
from .._encode.value_types import LeafSerializer
from .._formats.object_locations import StoreFactory
from .._formats.serializers import Serializer
from .._tree.coerce import Coercer

hookspec = pluggy.HookspecMarker("td")
hookimpl = pluggy.HookimplMarker("td")


@hookspec
def td_node_kinds() -> Iterable[NodeKind]:
    """Return the node kinds that the plugin adds.

    A :class:`~td_core.spi.NodeKind` defines how one class of collections is flattened and unflattened. This enables saving,
    sending, pickling and ``state_dict`` of the class. Its ``layouts`` have a pair of functions for each file format that
    must store the kind in a special form, such as the form that tensordict reads. ``is_leaf=True`` is for a class
    that hides its entries: ``load(keys=)`` and messages then end at the node, too. The module ``td_core.kinds`` looks up
    kinds and their layouts, for formats that read files of other programs.
    """
    raise NotImplementedError


@hookspec
def td_methods() -> type | Mapping[str, object]:
    """Return the methods that the plugin adds to every collection.

    The result is either a mapping from names to functions, classmethods or properties, or a class, whose public
    members are added. A name that a collection has already is refused. A tensorclass cannot have a field with the name of
    a method, unless it is declared with ``shadow=True``, so choose names that users will not want for fields. Only
    packages of the project may provide the methods that core lists for them.
    :func:`td_core.spi.make_classmethod` builds a classmethod from a function such as ``from_zarr(path)``.

    >>> from td_core.testing import installed
    >>> class Methods:
    ...     @hookimpl
    ...     def td_methods(self):
    ...         return {"largest": lambda self: max(leaf.max().item() for leaf in self.values(True, True))}
    >>> with installed(Methods()):
    ...     TensorDict({"a": torch.arange(3)}).largest()
    2
    """
    raise NotImplementedError


@hookspec
def td_serializers() -> Iterable[Serializer | LeafSerializer]:
    """Return the file formats and value types that the plugin adds.

    A :class:`~td_core.spi.Serializer` is a format for whole collections. ``save(format=...)`` selects it by name, and
    ``load`` calls its ``detect`` with the location. A :class:`~td_core.spi.LeafSerializer` converts values of one type for
    the value codec, in all formats, to values that JSON can store, and back. The type can be a string, the public name of
    a class, so that the plugin need not import its library.

    >>> from fractions import Fraction
    >>> from td_core.spi import LeafSerializer
    >>> serializer = LeafSerializer("fractions.Fraction", Fraction, dump=str, load=Fraction)
    """
    raise NotImplementedError


@hookspec
def td_coercers() -> Iterable[Coercer]:
    """Return the coercers that the plugin adds.

    A :class:`~td_core.spi.Coercer` has a tuple of types and a function that converts a value of these types when it is set.
    The function receives the value, and the batch size and device of the collection, and returns a tensor or a
    collection. ``from_any`` and ``from_dict`` call it, too. A coercer for ``object`` is called for all values that
    nothing else converts. A type can be a string, such as ``"pandas.Series"``, so that the plugin need not import its
    library.

    >>> from td_core.spi import Coercer
    >>> sets = Coercer((frozenset,), lambda value, batch_size, device: torch.tensor(sorted(value)))
    """
    raise NotImplementedError


@hookspec
def td_stores() -> Mapping[str, StoreFactory]:
    """Return the functions that open the stores of URLs, by scheme.

    A function takes a URL and the mapping ``storage_options`` of the operation, and returns an
    :class:`~td_core.typing.ObjectStore` of the objects below it. td-core calls it once for each operation on a URL. A scheme
    has lower case. It belongs to one plugin: if two plugins return the same scheme, the second one is refused, and
    ``TD_PLUGINS`` selects the other one.

    >>> from td_core.testing import installed
    >>> class Shelf:
    ...     @hookimpl
    ...     def td_stores(self):
    ...         return {"shelf": lambda url, options: options["books"]}
    >>> with installed(Shelf()) as record:
    ...     record.hooks
    ('td_stores',)
    """
    raise NotImplementedError
