"""Register a new tensorclass: its node kind with its layouts, and its pytree node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from td_core import Layout, LazyStackedTensorDict, NodeKind, Record, TensorCollection, TensorDict, kinds
from td_core.spi import expand, register_pytree
from td_core.spi import lock as lock_nodes

from ._non_tensor import NonTensorData

MEMBER = "_tensordict"


def _has_only_tensors(inner: TensorCollection) -> bool:
    """Return True unless an object of a pytree has replaced a tensor or a node."""
    root: object = inner
    items = expand([root], lambda item: item._tree_children() if isinstance(item, TensorCollection) else ())
    return all(isinstance(item, (Tensor, TensorCollection)) for item in items)


def register_class(cls: Any) -> None:
    """Register a tensorclass as node kind and pytree node; a class defined again, as in a notebook, replaces the old one."""

    def absent(node: Any) -> list[str]:
        """Return the fields that are None although they have defaults: decoding would otherwise set the defaults."""
        return node._absent_fields() if cls._schema.defaulted else []

    def flatten(node: Any) -> Record:
        names = absent(node)
        return Record({"absent": names} if names else {}, members={MEMBER: node._tensordict})

    def flatten_directory(node: Any) -> Record:
        return Record({}, members={MEMBER: node._tensordict}, values=dict.fromkeys(absent(node)))

    def unflatten(record: Record) -> Any:
        names = record.read_field("absent", list, type(None)) or ()
        values = {**dict.fromkeys(names), **record.values}
        return unflatten_directory(Record({}, {}, record.members, values, complete=record.complete))

    def unflatten_directory(record: Record) -> object:
        if kinds.find(tag) is before and cls._schema.names:
            kinds.register(kind)
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

    def flatten_state(node: Any) -> Record:
        # The state_dict format stores bare values next to the tensors, without batch size or device.
        children = dict(node._children())
        values = {name: None for name in cls._schema.names if name not in children}
        values.update(
            {
                key: child._value
                for key, child in children.items()
                if isinstance(child, NonTensorData) and child._metadata is None
            }
        )
        entries = {key: child for key, child in children.items() if key not in values}
        return Record({"_type": cls.__qualname__}, entries, values=values)

    def flatten_buffer(node: Any) -> Record:
        inner = node._tensordict
        layout = (
            kinds.of(inner).layouts.get("consolidated/1") or kinds.of(TensorDict).layouts["consolidated/1"]
        )
        record = layout.flatten(inner)
        record.values = {**record.values, **dict.fromkeys(absent(node))}
        return record

    def unflatten_buffer(record: Record) -> object:
        kind = kinds.of(LazyStackedTensorDict if "stack_dim" in record.meta else TensorDict)
        inner = kind.layouts["consolidated/1"].unflatten(record)
        cls._schema.check_keys(inner._children())
        return unflatten_directory(Record({}, {}, {MEMBER: inner}, record.values))

    tag = kinds.name_class(cls)
    shown = f"<class '{tag.replace(':', '.')}'>"
    layouts = {
        "memmap/1": Layout(flatten_directory, unflatten_directory, (shown,)),
        "consolidated/1": Layout(flatten_buffer, unflatten_buffer, (shown,)),
        "state_dict/2": Layout(flatten_state, unflatten, (cls.__qualname__,)),
    }
    before: Any = kinds.find(tag)
    kind = NodeKind(tag, cls, flatten, unflatten, layouts, with_class=True)
    kinds.register(kind)
    # cloudpickle first creates a class without fields. It replaces the registered class when its first instance is decoded.
    if before is not None and before.type._schema.names and not cls._schema.names:
        kinds.register(before)

    def tree_flatten(node: Any) -> tuple[list[TensorCollection], tuple[object, ...]]:
        return [node._tensordict], ()

    def tree_unflatten(children: Iterable[Any], context: tuple[object, ...]) -> object:
        (inner,) = children
        if cls._schema.options.frozen and isinstance(inner, TensorCollection) and _has_only_tensors(inner):
            lock_nodes(inner)
        return cls._wrap_unchecked(inner)

    register_pytree(cls, tree_flatten, tree_unflatten, lambda context: (MEMBER,))
