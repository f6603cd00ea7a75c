"""Node kinds: how nodes of each kind are flattened and unflattened.

A *transport* (pickle, a directory, a consolidated storage, a message) does not depend on the kinds. The
:class:`NodeKind` of a node flattens it into a :class:`Record` of names and values, and unflattens a record into a node.
A format that stores some kinds differently uses the kind's :class:`Layout` for that format, which is the same pair of
functions. N kinds and M transports need N + M implementations.
"""

from __future__ import annotations

import contextlib
import copyreg
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, takewhile
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any

from torch import Tensor

from .._python.public_names import set_module
from .._tree.defaults import show_path
from .._tree.node import Core, list_missing
from .._tree.stored_leaves import as_memory
from .._tree.walks import expand
from ..errors import PluginError, StructureError, TensorDictError
from .records import Layout, Record

#: One row of the table of an encoded tree, described in :class:`Encoded`; JSON can store it.
Row = dict[str, Any]


@set_module("td_core.spi")
@dataclass(frozen=True, slots=True)
class NodeKind:
    """A kind of node: its tag, its class, and its functions to flatten and unflatten.

    Attributes:
        tag: unique name that files store, so it must never change: ``"TensorDict"``, ``"mypackage.Image"``.
        type: the class; a subclass without a separate kind uses this one.
        flatten: function from a node to a record; ``unflatten(flatten(node))`` equals the node.
        unflatten: function from a record, whose ``meta`` was JSON, to a node.
        layouts: layouts by format (``"memmap/1"``, ``"consolidated/1"``, ``"state_dict/2"``), for formats that do
            not use ``flatten`` and ``unflatten``. The packages of formats add theirs to the kinds of td-core.
        with_class: True if the definition of the class registers the kind: a pickle must import the class first.
        attributes: function from a node to the part of its ``__dict__`` that copies and pickles keep in addition
            to the record. Default: the whole ``__dict__`` of an instance of a subclass, if instances of the class
            itself have no ``__dict__``. Slots that a subclass adds are always kept.
        is_leaf: True if a node is one leaf to users, as an ``UnbatchedTensor`` is: in tables, and so in ``load(keys=)`` and
            messages, the key path of what is in it ends at the node. ``keys()`` and ``td["node", "key"]`` are those of the
            class, and do not change: it hides its entries itself.
        select: function from the header of a record, the key paths of all leaves below it, and those of the leaves that are
            selected, to the header of a record with the selected leaves. Default: the same header.

    >>> KINDS["TensorDict"].type.__name__
    'TensorDict'
    """

    tag: str
    type: type
    flatten: Callable[[Any], Record]
    unflatten: Callable[[Record], Any]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    with_class: bool = False
    attributes: Callable[[Any], dict[str, Any]] | None = None
    is_leaf: bool = False
    select: (
        Callable[[dict[str, object], list[tuple[str, ...]], list[tuple[str, ...]]], dict[str, object]] | None
    ) = None

    def record_of(self, node: Core, format_name: str = "", path: tuple[str, ...] = ()) -> Record:
        """Flatten a node of this kind with the layout of a format; ``path`` is its key path, for messages.

        Raises:
            PluginError: the plugin's function does not return a :class:`Record`.
        """
        form: NodeKind | Layout = self.layouts.get(format_name, self)
        record = form.flatten(node)
        if isinstance(record, Record):
            return record
        where = f"{show_path(path)}: " if path else ""
        writer = f", of {KINDS.providers[self.tag]}," if self.tag in KINDS.providers else ""
        raise PluginError(
            f"{where}flatten of the node kind {self.tag!r}{writer} gives a Record; got {record!r}"
        )

    def node_of(self, record: Record, format_name: str = "") -> Core:
        """Unflatten a record with the layout of a format. Raise TypeError if the plugin's function returns no node."""
        form: NodeKind | Layout = self.layouts[format_name] if format_name else self
        node = form.unflatten(record)
        if not isinstance(node, Core):
            raise TypeError(f"a node is a collection; got {node!r}")
        return node

    def attributes_of(self, node: Core) -> dict[str, Any]:
        """Return the attributes and slots of a node that the user or a subclass set."""
        own = type(node) is self.type
        if self.attributes is not None:
            held = self.attributes(node)
        else:
            held = {} if own or self.type.__dictoffset__ else getattr(node, "__dict__", {})
        return held if own else {**held, **_read_slots(node, self.type)}


def _read_slots(node: Core, base: type) -> dict[str, object]:
    """Return the values of the slots that the class of a node adds to those of ``base``."""
    result: dict[str, object] = {}
    cls: type = type(node)
    for name, slot in _list_added_slots(cls, base).items():
        with contextlib.suppress(AttributeError):  # raised by a slot without a value
            result[name] = slot.__get__(node)
    return result


@lru_cache(maxsize=256)  # cached, since each copy of a node calls this
def _list_added_slots(cls: type, base: type) -> dict[str, MemberDescriptorType]:
    return {
        name: member
        for item in cls.__mro__
        if not issubclass(base, item)
        for name, member in vars(item).items()
        if isinstance(member, MemberDescriptorType) and not hasattr(base, name)
    }


class NodeKinds:
    """The registry of kinds, by tag, by class, and by the name of the class in a format."""

    def __init__(self) -> None:
        self._by_tag: dict[str, NodeKind] = {}
        self._by_type: dict[type, NodeKind] = {}
        self._by_name: dict[tuple[str, str], NodeKind] = {}
        #: ``distribution==version`` of the plugin that registered a kind, by tag; kinds of core are not included.
        self.providers: dict[str, str] = {}

    def add(self, kind: NodeKind, *, replace: bool = False, provider: str | None = None) -> None:
        """Register a kind. ``replace`` allows a class that is defined again, as by a notebook cell that runs twice."""
        _check_kind(kind)
        if not replace:
            if kind.tag in self._by_tag:
                raise PluginError(
                    f"the node kind tag {kind.tag!r} is taken by {self._by_tag[kind.tag].type!r}"
                )
            if kind.type in self._by_type:
                raise PluginError(f"{kind.type!r} already has a node kind, {self._by_type[kind.type].tag!r}")
            for format_name, layout in kind.layouts.items():
                self._check_names(kind, format_name, layout)
        self._by_tag[kind.tag] = kind
        self._by_type[kind.type] = kind
        if provider is not None:
            self.providers[kind.tag] = provider
        for format_name, layout in kind.layouts.items():
            self._by_name.update(dict.fromkeys(((format_name, name) for name in layout.names), kind))

    def _check_names(self, kind: NodeKind, format_name: str, layout: Layout) -> None:
        """Raise PluginError if another kind has a class name of a layout."""
        for name in layout.names:
            owner = self._by_name.get((format_name, name), kind)
            if owner.tag != kind.tag:
                raise PluginError(f"the name {name!r} in {format_name!r} is taken by the kind {owner.tag!r}")

    def add_layout(self, tag: str, format_name: str, layout: Layout) -> None:
        """Let a format store the kind of a tag with a layout; see :func:`td_core.kinds.add_layout`."""
        kind = self._by_tag[tag]
        self._check_names(kind, format_name, layout)
        for same in [kind for kind in self._by_type.values() if kind.tag == tag]:
            # In place, since encoded tables and the other registries hold the kind itself.
            object.__setattr__(same, "layouts", {**same.layouts, format_name: layout})
        self._by_name.update(dict.fromkeys(((format_name, name) for name in layout.names), kind))

    def add_alias(self, cls: type, tag: str) -> None:
        """Flatten nodes of a class as those of the kind with a tag."""
        self._by_type[cls] = replace(self._by_tag[tag], type=cls)

    def remove(self, tag: str) -> None:
        """Unregister the kind of a tag."""
        kind = self._by_tag.pop(tag)
        self._by_type.pop(kind.type, None)
        self.providers.pop(tag, None)
        for key in [key for key, value in self._by_name.items() if value is kind]:
            del self._by_name[key]

    def __getitem__(self, tag: str) -> NodeKind:
        return self._by_tag[tag]

    def get(self, tag: str) -> NodeKind | None:
        """Return the kind with a tag, or None."""
        return self._by_tag.get(tag)

    def __contains__(self, tag: object) -> bool:
        return tag in self._by_tag

    def __iter__(self) -> Iterator[NodeKind]:
        return iter(self._by_tag.values())

    def of(self, node: Core | type) -> NodeKind:
        """Return the kind of a node or class: the kind of its nearest registered base class."""
        cls = node if isinstance(node, type) else type(node)
        if (kind := self._find_nearest(cls)) is not None:
            return kind
        raise PluginError(
            f"{cls.__module__}.{cls.__qualname__} has no node kind, so it cannot be stored, sent or pickled; "
            "register one through the hook td_node_kinds"
        )

    def _find_nearest(self, cls: type) -> NodeKind | None:
        for base in cls.__mro__:
            kind = self._by_type.get(base)
            if kind is not None:
                return kind
        return None

    def attributes_of(self, node: Core) -> dict[str, Any]:
        """Return the attributes that the user set on a node; empty for a class without a kind."""
        kind = self._find_nearest(type(node))
        return {} if kind is None else kind.attributes_of(node)

    def set_attributes(self, node: Core, attributes: Mapping[str, object]) -> None:
        """Set the attributes that :meth:`attributes_of` returned for another node of the same class."""
        cls: type = type(node)
        slots = _list_added_slots(cls, self.of(node).type)
        more = {name: value for name, value in attributes.items() if name not in slots}
        for name in attributes.keys() - more.keys():
            slots[name].__set__(node, attributes[name])
        if more:
            vars(node).update(more)

    def find_by_name(self, format_name: str, name: str) -> NodeKind | None:
        """Return the kind with the class name ``name`` in the format ``format_name``, or None."""
        return self._by_name.get((format_name, name))


def _check_kind(kind: NodeKind) -> None:
    if not isinstance(kind.tag, str) or not kind.tag:
        raise PluginError(f"the tag of a node kind is a string; got {kind.tag!r}")
    if not isinstance(kind.type, type) or not issubclass(kind.type, Core):
        raise PluginError(
            f"the type of the node kind {kind.tag!r} is not a class of collections: {kind.type!r}"
        )
    if missing := list_missing(kind.type):
        raise PluginError(
            f"the class {kind.type.__name__} of the node kind {kind.tag!r} does not define {', '.join(missing)}, as every kind "
            "must: td_core.spi.REQUIRED lists what is needed"
        )
    if not all(isinstance(layout, Layout) for layout in kind.layouts.values()):
        raise PluginError(f"the layouts of the node kind {kind.tag!r} are not Layouts: {kind.layouts!r}")
    if kind.attributes is not None and not callable(kind.attributes):
        raise PluginError(
            f"the attributes of the node kind {kind.tag!r} are not a function: {kind.attributes!r}"
        )
    forms: list[NodeKind | Layout] = [kind, *kind.layouts.values()]
    for form in forms:
        if not callable(form.flatten) or not callable(form.unflatten):
            raise PluginError(f"the node kind {kind.tag!r} lacks a function: {form!r}")


KINDS = NodeKinds()

#: Tag of the kind whose members are stacked.
_LAZY = "LazyStackedTensorDict"

#: Function from a node, its record and the row of its parent to the record that a format stores, or to None.
Convert = Callable[[Any, Record, Row], "Record | None"]


class _ReducedClass:
    """Object that pickles as the reduced form of a class."""

    def __init__(self, parts: tuple[object, ...]) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[object, ...]:
        return self.parts


@set_module("td_core.spi")
@dataclass(slots=True)
class Encoded:
    """An encoded tree: a flat table of nodes, the leaves, and the Python values.

    Attributes:
        nodes: JSON rows ``{"kind", "meta", "entries", "members", "values"}``, parents before children. An entry is
            ``[key, i]`` with the position ``i`` of a node, or ``[key, [j]]`` with the position ``j`` of a leaf; a
            value is ``[name, position]``.
        leaves: the tensors; in a table that is read from a file, what describes them.
        values: the Python values.
        classes: classes of nodes by position, if available. They take precedence over class names in the rows, which
            can be ambiguous or differ from the name in a pickle.
        attributes: attributes that users set on nodes, by position; only with ``shared``.
        objects: the nodes themselves; empty in a table that was not made by :func:`encode`.

    >>> encoded = encode(TensorDict({"a": 1, "n": {"b": 2}}))
    >>> [node["entries"] for node in encoded.nodes], len(encoded.leaves)
    ([[['a', [0]], ['n', 1]], [['b', [1]]]], 2)
    """

    nodes: list[Row]
    leaves: list[Any]
    values: list[Any]
    classes: Mapping[int, type] = field(default_factory=dict)
    attributes: dict[int, dict[str, Any]] = field(default_factory=dict)
    objects: list[Core] = field(default_factory=list)

    def node_paths(self, *, members: bool = True) -> list[tuple[str, ...]]:
        """Return the key path of each node, from keys of entries and names of members; the first one of a shared node.

        With ``members`` False, names of members are omitted, so that a key path is the one by which users get the node.

        >>> encode(TensorDict({"a": 1, "n": {"b": 2}})).node_paths()
        [(), ('n',)]
        """
        return self._list_paths(members)[0]

    def reduce_classes(self) -> dict[int, Any]:
        """Return :attr:`classes` for a pickle: classes that :mod:`copyreg` can reduce are replaced by their reduced form."""
        # cloudpickle ignores copyreg and would pickle a class without an import path by value, as a new class on load.
        result: dict[int, object] = dict(self.classes)
        for position, cls in self.classes.items():
            reduce = copyreg.dispatch_table.get(type(cls))
            if reduce is not None and isinstance(parts := reduce(cls), tuple):
                result[position] = _ReducedClass(parts)
        return result

    def leaf_paths(self, *, members: bool = True) -> list[tuple[str, ...]]:
        """Return the key path of each leaf; ``members`` as for :meth:`node_paths`.

        >>> from td_core import lazy_stack
        >>> encoded = encode(lazy_stack([TensorDict({"a": 1}), TensorDict({"a": 2})]))
        >>> sorted(encoded.leaf_paths()), encoded.leaf_paths(members=False)
        ([('0', 'a'), ('1', 'a')], [('a',), ('a',)])
        """
        return self._list_paths(members)[1]

    def row_axes(self) -> list[tuple[int, int | None] | None]:
        """Return for each leaf how many of its leading dims are batch dims of the root, and the row that it is a part of.

        The row is the position of its member in a lazy stack along the first batch dim, so that the dims are those after the
        first; otherwise None. The result has None for a leaf without rows: an unbatched tensor, and a leaf of a kind whose
        header has no ``batch_size``.

        >>> from td_core import lazy_stack
        >>> encode(TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3])).row_axes()
        [(1, None)]
        >>> sorted(encode(lazy_stack([TensorDict({"a": 1}), TensorDict({"a": 2})])).row_axes())
        [(0, 0), (0, 1)]
        """
        sizes = self._list_batch_sizes()
        batch = sizes[0] or []
        result: list[tuple[int, int | None] | None] = [None] * len(self.leaves)
        for row, size, (count, member) in zip(self.nodes, sizes, self._list_rows(len(batch))):
            if "batch_size" not in row["meta"]:
                continue
            own = batch[:count] if member is None else batch[1 : count + 1]
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, size or ())))
            for _, ref in row["entries"]:
                if isinstance(ref, list) and (shared or not batch or member is not None):
                    result[ref[0]] = shared, member
        return result

    def with_rows(self, count: int) -> Encoded:
        """Return a table of a collection with another size of the first batch dim; leaves and values are the same.

        Raises:
            StructureError: the collection has no batch dims, or has a node for each row, in a lazy stack along the first dim.

        >>> table = encode(TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, batch_size=[3])).with_rows(5)
        >>> [row["meta"]["batch_size"] for row in table.nodes]
        [[5], [5]]
        """
        batch = self._list_batch_sizes()[0]
        if not batch:
            raise StructureError(f"a collection without batch dims has no rows; got {count} rows")
        nodes = [{**row, "meta": dict(row["meta"])} for row in self.nodes]
        for row, (dims, member) in zip(nodes, self._list_rows(len(batch))):
            if row["kind"] == _LAZY and row["meta"]["stack_dim"] == 0 and (dims and member is None):
                if len(row["members"]) != count:
                    raise StructureError(
                        f"a lazy stack along the first batch dim has a node for each row: {len(row['members'])} rows "
                        f"cannot become {count}"
                    )
            for name in ("batch_size", "stands_for"):
                size = row["meta"].get(name)
                if dims and member is None and size and size[0] == batch[0]:
                    row["meta"][name] = [count, *size[1:]]
        return replace(self, nodes=nodes, objects=[])

    def _list_batch_sizes(self) -> list[list[int] | None]:
        """Return the batch size of each node, with -1 for uneven dims; None where the table does not have it."""
        result: list[list[int] | None] = [row["meta"].get("batch_size") for row in self.nodes]
        for position in range(len(result) - 1, -1, -1):  # children follow their parent
            row = self.nodes[position]
            below = [result[ref] for _, ref in row["members"]]
            if result[position] is None and below and below[0] is not None:
                shared = [
                    sizes[0] if len({*sizes}) == 1 else -1 for sizes in zip(*(each or () for each in below))
                ]
                if row["kind"] == _LAZY:
                    shared.insert(row["meta"]["stack_dim"], len(below))
                result[position] = shared
        return result

    def _list_rows(self, batch_dims: int) -> list[tuple[int, int | None]]:
        """Return for each node how many batch dims of the root its batch can begin with, and the row that it is a part of."""
        result: list[tuple[int, int | None]] = [(batch_dims, None)] * len(self.nodes)
        for position, row in enumerate(self.nodes):  # a parent precedes its children
            for _, ref in row["entries"]:
                if isinstance(ref, int):
                    result[ref] = result[position]
            count, member = result[position]
            dim = row["meta"]["stack_dim"] if row["kind"] == _LAZY else count
            for number, (_, ref) in enumerate(row["members"]):
                if dim >= count:
                    result[ref] = count, member
                else:
                    result[ref] = (count - 1, number) if dim == 0 and member is None else (dim, member)
        return result

    def _list_paths(self, members: bool) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        nodes: list[tuple[str, ...]] = [()] * len(self.nodes)
        leaves: list[tuple[str, ...]] = [()] * len(self.leaves)
        for path, row in zip(nodes, self.nodes):  # a parent precedes its children
            hidden = not members and (kind := KINDS.get(row["kind"])) is not None and kind.is_leaf
            for group in ("entries", "members"):
                named = members or (group == "entries" and not hidden)
                for key, child in row[group]:
                    below = (*path, key) if named else path
                    if isinstance(child, int):
                        nodes[child] = nodes[child] or below
                    else:
                        leaves[child[0]] = below
        return nodes, leaves


def encode(
    tree: Core,
    *,
    shared: bool = False,
    format_name: str = "",
    convert: Convert | None = None,
    in_memory: bool = False,
) -> Encoded:
    """Encode a tree of any depth as a flat table.

    Args:
        tree: any collection.
        shared: write one row for a node that occurs under several key paths, instead of one row per occurrence.
        format_name: a format; nodes whose kind has a layout for it are flattened with that layout, and their rows have the
            name as ``"format"``.
        convert: with ``format_name``, a function from a node, its record and the row of its parent to the record to store,
            or to None if the format cannot describe the node, which is then flattened without a layout.
        in_memory: read stored tensors, each of them once.

    Raises:
        PluginError: a node has no registered kind, or its ``flatten`` does not return a :class:`Record`.
    """
    nodes: list[Row] = [{}]
    leaves: list[Tensor] = []
    values: list[object] = []
    classes: dict[int, type] = {}
    todo: list[tuple[int, Row]] = [(0, {})]
    known: dict[int, int] = {}
    attributes: dict[int, dict[str, object]] = {}
    objects: list[Core] = [tree]  # keeps the nodes alive, so that their ids stay unique
    ordered = True
    while todo:
        position, above = todo.pop()
        node = objects[position]
        kind = KINDS.of(node)
        form, record = _flatten(node, kind, format_name, convert, above)
        if not isinstance(record, Record):
            # record_of() raises an error with the key path.
            record = kind.record_of(node, form, get_key_path(nodes, position))
        row = nodes[position]
        row.update(_make_row(node, kind, form, record, len(values)))
        values += record.values.values()
        if kind.with_class or type(node) is not kind.type:
            classes[position] = type(node)
        if shared and (held := kind.attributes_of(node)):
            attributes[position] = held
        for place, group in ((row["entries"], record.entries), (row["members"], record.members)):
            for key, child in dict(group).items():
                if isinstance(child, Tensor):
                    place.append([key, [len(leaves)]])
                    leaves.append(child)
                elif shared and id(child) in known:
                    place.append([key, known[id(child)]])
                    ordered = ordered and known[id(child)] > position
                else:
                    known[id(child)] = len(nodes)
                    objects.append(child)
                    place.append([key, len(nodes)])
                    todo.append((len(nodes), row))
                    nodes.append({})
    if in_memory:
        leaves = as_memory(leaves)
    encoded = Encoded(nodes, leaves, values, classes, attributes, objects)
    if not ordered:
        _put_parents_first(encoded)
    return encoded


def _make_row(node: Core, kind: NodeKind, form: str, record: Record, first_value: int) -> dict[str, object]:
    """Return the row of a node without its entries and members; its first value gets the position ``first_value``."""
    row: dict[str, object] = {"kind": kind.tag, "meta": record.meta, "entries": [], "members": []}
    if form:
        row["format"] = form
    row["values"] = [[name, number] for number, name in enumerate(record.values, first_value)]
    if kind.tag in KINDS.providers:
        row["from"] = KINDS.providers[kind.tag]
    if type(node) is not kind.type:
        row["class"] = get_class_name(type(node))
    return row


def _put_parents_first(encoded: Encoded) -> None:
    """Sort the nodes so that parents precede children."""
    order = sort_topologically(encoded.nodes)
    encoded.nodes = [encoded.nodes[old] for old in order]
    encoded.objects = [encoded.objects[old] for old in order]
    classes, attributes = encoded.classes, encoded.attributes
    encoded.classes = {new: classes[old] for new, old in enumerate(order) if old in classes}
    encoded.attributes = {new: attributes[old] for new, old in enumerate(order) if old in attributes}


def _flatten(
    node: Core, kind: NodeKind, format_name: str, convert: Convert | None, above: Row
) -> tuple[str, Record]:
    """Flatten a node with the layout of a format, or without one; return the name of the layout and the record."""
    if format_name not in kind.layouts:
        return "", kind.flatten(node)
    record = kind.layouts[format_name].flatten(node)
    if convert is None or not isinstance(record, Record):
        return format_name, record
    converted = convert(node, record, above)
    return ("", kind.flatten(node)) if converted is None else (format_name, converted)


def sort_topologically(rows: list[Row]) -> list[int]:
    """Return an order in which parents precede children, and update the references in the rows to that order."""
    below = [
        [ref for group in ("entries", "members") for _, ref in row[group] if isinstance(ref, int)]
        for row in rows
    ]
    waiting = Counter(chain.from_iterable(below))
    order = [0]
    for position in order:
        for ref in below[position]:
            waiting[ref] -= 1
            if not waiting[ref]:
                order.append(ref)
    places = {old: new for new, old in enumerate(order)}
    for row in rows:
        for group in ("entries", "members"):
            row[group] = [[key, places[ref] if isinstance(ref, int) else ref] for key, ref in row[group]]
    return order


def user_class(cls: type | None) -> type | None:
    """Return ``cls`` if a user defined it, so that it may have moved since a save; otherwise None.

    >>> class Own(TensorDict):
    ...     pass
    >>> user_class(Own), user_class(TensorDict)
    (<class '...Own'>, None)
    """
    kind = None if cls is None else KINDS._find_nearest(cls)
    return cls if kind is not None and (kind.with_class or kind.type is not cls) else None


def as_named(cls: type | None, saved: object, what: str) -> Any:
    """Convert a loaded node to the class that the caller named, or raise StructureError. Messages call it ``what``.

    >>> td = TensorDict({"a": 1})
    >>> as_named(None, td, "what is saved") is td
    True
    """
    named: Any = user_class(cls)
    if named is None or isinstance(saved, named):
        return saved
    try:
        return named._of_saved(saved)
    except (TensorDictError, TypeError, ValueError) as error:
        raise StructureError(
            f"{what}, a {type(saved).__name__}, is not a {named.__name__}: {error}"
        ) from error


def get_class_name(cls: type) -> str:
    """Return the name of a class in files: ``"module:qualname"``."""
    return f"{get_module_name(cls)}:{cls.__qualname__}"


def get_module_name(cls: type) -> str:
    """Return the module name of a class. In a spawned process the main script is ``__mp_main__``: return ``__main__``."""
    return "__main__" if cls.__module__ == "__mp_main__" else cls.__module__


def find_subclass(base: type, name: object) -> type | None:
    """Return the subclass of ``base`` with a stored name or None. Prefer the current one if a class was redefined."""
    results = [
        cls
        for cls in expand([base], type.__subclasses__)
        if cls is not base
        and name in (get_class_name(cls), f"<class '{get_module_name(cls)}.{cls.__qualname__}'>")
    ]
    return next(iter([*filter(_is_in_its_module, results), *results]), None)


def _is_in_its_module(cls: type) -> bool:
    try:
        return attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is cls
    except (KeyError, AttributeError):
        return False


def get_key_path(rows: list[Row], position: int | list[int]) -> tuple[str, ...]:
    """Return the key path of a node, or of a leaf if ``position`` is a list, in the rows of an encoded tree."""
    path: tuple[str, ...] = ()
    while position:
        above = [
            (key, parent)
            for parent in range(len(rows) if isinstance(position, list) else position)
            for group in ("entries", "members")
            for key, ref in rows[parent].get(group, ())
            if ref == position
        ]
        key, position = above[0]
        path = (key, *path)
    return path
