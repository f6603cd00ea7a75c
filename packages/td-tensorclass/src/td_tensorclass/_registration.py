"""Register a new tensorclass: its node kind with its layouts, and its pytree node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from td_core import LazyStackedTensorDict, TensorCollection, TensorDict, kinds
from td_core.spi import Layout, NodeKind, Record, expand, register_pytree
from td_core.spi import lock as lock_nodes

from ._non_tensor import NonTensorData

MEMBER = "_tensordict"


def _has_only_tensors(inner: TensorCollection) -> bool:
    """Return True unless an object of a pytree has replaced a tensor or a node."""
    root: object = inner
    items = expand([root], lambda item: item._tree_children() if isinstance(item, TensorCollection) else ())
    return all(isinstance(item, (Tensor, TensorCollection)) for item in items)


def register_class(cls: type[TensorCollection]) -> None:
    """Register a tensorclass as node kind and pytree node; a class defined again, as in a notebook, replaces the old one."""
    Registration(cls).register()


class Registration:
    """The node kind and pytree node of one tensorclass."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.tag = kinds.name_class(cls)
        shown = f"<class '{self.tag.replace(':', '.')}'>"
        layouts = {
            "memmap/1": Layout(self.flatten_directory, self.unflatten_directory, (shown,)),
            "consolidated/1": Layout(self.flatten_buffer, self.unflatten_buffer, (shown,)),
            "state_dict/2": Layout(self.flatten_state, self.unflatten, (cls.__qualname__,)),
        }
        self.kind = NodeKind(self.tag, cls, self.flatten, self.unflatten, layouts, with_class=True)
        #: The kind of an earlier class of this name.
        self.before: Any = kinds.find(self.tag)

    def register(self) -> None:
        """Register the class, and the functions for its nodes."""
        kinds.register(self.kind)
        # cloudpickle first creates a class without fields. It replaces the registered class when its first instance is decoded.
        if self.before is not None and self.before.type._schema.names and not self.cls._schema.names:
            kinds.register(self.before)
        register_pytree(self.cls, self.tree_flatten, self.tree_unflatten, lambda context: (MEMBER,))

    def find_absent(self, node: Any) -> list[str]:
        """Return the fields that are None although they have defaults: decoding would otherwise set the defaults."""
        return node._absent_fields() if self.cls._schema.defaulted else []

    def flatten(self, node: Any) -> Record:
        """Return the record of a node: the collection that it wraps, and the fields that are None."""
        names = self.find_absent(node)
        return Record({"absent": names} if names else {}, members={MEMBER: node._tensordict})

    def unflatten(self, record: Record) -> Any:
        """Build a node from its record, or from that of a state dict."""
        names = record.read_field("absent", list, type(None)) or ()
        values = {**dict.fromkeys(names), **record.values}
        return self.unflatten_directory(Record({}, {}, record.members, values, complete=record.complete))

    def flatten_directory(self, node: Any) -> Record:
        """Return the record of a node for a directory, where fields that are None are values."""
        return Record({}, members={MEMBER: node._tensordict}, values=dict.fromkeys(self.find_absent(node)))

    def unflatten_directory(self, record: Record) -> object:
        """Build a node from the record of a directory."""
        cls = self.cls
        if kinds.find(self.tag) is self.before and cls._schema.names:
            kinds.register(self.kind)
        inner = record.members[MEMBER]
        cls._schema.check_keys(inner._children())
        if cls._schema.defaulted and record.complete:
            inner = cls._add_defaults(inner, record.values)
        node = cls._wrap_unchecked(inner)
        # Old files store plain values, and None for missing fields, next to the collection.
        for name, value in record.values.items():
            if value is not None:
                node._set_path(name, value)
        if cls._schema.options.frozen:
            node.lock_()
        return node

    def flatten_state(self, node: Any) -> Record:
        """Return the record of a node for a state dict: bare values next to the tensors, without batch size or device."""
        children = dict(node._children())
        values = {name: None for name in self.cls._schema.names if name not in children}
        values.update(
            {
                key: child._value
                for key, child in children.items()
                if isinstance(child, NonTensorData) and child._metadata is None
            }
        )
        entries = {key: child for key, child in children.items() if key not in values}
        return Record({"_type": self.cls.__qualname__}, entries, values=values)

    def flatten_buffer(self, node: Any) -> Record:
        """Return the record of a node for a consolidated file: that of its collection, with the fields that are None."""
        layouts = kinds.of(node._tensordict).layouts
        layout = layouts.get("consolidated/1") or kinds.of(TensorDict).layouts["consolidated/1"]
        record = layout.flatten(node._tensordict)
        record.values = {**record.values, **dict.fromkeys(self.find_absent(node))}
        return record

    def unflatten_buffer(self, record: Record) -> object:
        """Build a node from the record of a consolidated file."""
        kind = kinds.of(LazyStackedTensorDict if "stack_dim" in record.meta else TensorDict)
        inner = kind.layouts["consolidated/1"].unflatten(record)
        self.cls._schema.check_keys(inner._children())
        return self.unflatten_directory(Record({}, {}, {MEMBER: inner}, record.values))

    def tree_flatten(self, node: Any) -> tuple[list[TensorCollection], tuple[object, ...]]:
        """Return the collection of a node as the child of a pytree node."""
        return [node._tensordict], ()

    def tree_unflatten(self, children: Iterable[Any], context: tuple[object, ...]) -> object:
        """Build a node around a collection, or around an object in its place."""
        (inner,) = children
        cls = self.cls
        if cls._schema.options.frozen and isinstance(inner, TensorCollection) and _has_only_tensors(inner):
            lock_nodes(inner)
        return cls._wrap_unchecked(inner)
