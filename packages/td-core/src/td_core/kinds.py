"""Read access to the registered kinds of nodes and their layouts, for formats that store kinds in a form of their own.

Most formats need only :func:`td_core.spi.encode` and :func:`td_core.spi.decode`. A format that reads or writes files of another
program, such as those of tensordict, looks up the kind of a class name in such a file with :func:`named`, or flattens a node
with the layout of such a file with :func:`record_of`.

>>> kind = of(TensorDict({"a": 1}))
>>> kind.tag, list(record_of(TensorDict({"a": 1})).entries)
('TensorDict', ['a'])
"""

from __future__ import annotations

from collections.abc import Iterator

from ._encode.node_kinds import KINDS, NodeKind, find_subclass, get_class_name
from ._encode.records import Layout, Record
from ._transforms.pytree import register_kind
from ._tree.node import Core

__all__ = [
    "add_layout",
    "find",
    "find_class",
    "list_kinds",
    "name_class",
    "named",
    "of",
    "record_of",
    "register",
    "store_as",
]


def of(node: Core | type) -> NodeKind:
    """Return the kind of a node or of a class of nodes: that of its nearest registered base class.

    Raises:
        PluginError: the class has no kind.

    >>> of(TensorDict).tag
    'TensorDict'
    """
    return KINDS.of(node)


def find(tag: str) -> NodeKind | None:
    """Return the kind with a tag, or None if no installed package provides it.

    >>> find("LazyStackedTensorDict").type.__name__, find("none")
    ('LazyStackedTensorDict', None)
    """
    return KINDS.get(tag)


def named(name: str, format: str) -> NodeKind | None:
    """Return the kind whose layout for ``format`` has the class name ``name``, or None.

    >>> named("TensorDict", "no such format") is None
    True
    """
    return KINDS.find_by_name(format, name)


def add_layout(cls: type, format: str, layout: Layout) -> None:
    """Let a format store nodes of a class of td-core with a layout; an earlier one for this format is replaced.

    This is for the package of the format. A kind of a plugin has its layouts in ``NodeKind.layouts``.

    Raises:
        PluginError: the class has no kind, or another kind has a class name of the layout.

    >>> def flatten(node):
    ...     return Record({"sizes": list(node.batch_size)}, dict(node.items()))
    >>> def unflatten(record):
    ...     return TensorDict(record.entries, record.meta["sizes"])
    >>> add_layout(TensorDict, "sizes/1", Layout(flatten, unflatten, ("Dict",)))
    >>> record_of(TensorDict({"a": 1}), "sizes/1").meta, named("Dict", "sizes/1").tag
    ({'sizes': []}, 'TensorDict')
    """
    KINDS.add_layout(KINDS.of(cls).tag, format, layout)


def register(kind: NodeKind) -> None:
    """Register the kind of a class whose definition registers it, or replace it if the class is defined again.

    The kinds of a plugin are registered by the hook ``td_node_kinds`` instead, which refuses a tag that is taken.

    Raises:
        PluginError: the kind is malformed.

    >>> register(of(TensorDict))
    """
    KINDS.add(kind, replace=True)


def record_of(node: Core, format: str = "") -> Record:
    """Flatten a node with the layout of its kind for ``format``, or without a layout if the kind has none.

    Raises:
        PluginError: the class of the node has no kind, or ``flatten`` of its kind returns no :class:`~td_core.spi.Record`.

    >>> record_of(TensorDict({"a": 1}, device="cpu")).meta
    {'batch_size': [], 'device': 'cpu'}
    """
    return KINDS.of(node).record_of(node, format)


def store_as(cls: type, tag: str) -> None:
    """Store and send nodes of a class as those of another kind, which they are afterwards.

    This is for classes whose state is not a part of the collection, such as the file in which its leaves are.

    >>> class Opened(TensorDict):
    ...     pass
    >>> store_as(Opened, "TensorDict")
    >>> of(Opened({"a": 1})).tag, list(record_of(Opened({"a": 1})).entries)
    ('TensorDict', ['a'])
    """
    KINDS.add_alias(cls, tag)
    register_kind(KINDS.of(cls))


def list_kinds() -> Iterator[NodeKind]:
    """Yield every registered kind.

    >>> {"TensorDict", "LazyStackedTensorDict"} <= {kind.tag for kind in list_kinds()}
    True
    """
    return iter(list(KINDS))


def name_class(cls: type) -> str:
    """Return the name of a class of nodes in files, ``"module:qualname"``.

    >>> name_class(TensorDict)
    'td_core._kinds.tensordict:TensorDict'
    """
    return get_class_name(cls)


def find_class(kind: NodeKind, name: str) -> type | None:
    """Return the subclass of the type of a kind whose name in files is ``name``, or None if it is not defined.

    Nothing is imported. ``name`` is the result of :func:`name_class`, or ``str()`` of the class, which tensordict writes.

    >>> class Own(TensorDict):
    ...     pass
    >>> find_class(of(TensorDict), name_class(Own)) is Own
    True
    """
    return find_subclass(kind.type, name)
