"""The node kinds of non-tensor data: how each format stores values, under the class names that tensordict uses."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch

from td_core import kinds
from td_core.errors import FormatError
from td_core.spi import Layout, NodeKind, Record

from ._metadata import MetaData
from ._non_tensor import NonTensorData, NonTensorDataBase
from ._non_tensor_stack import NonTensorStack
from ._unbatched import UnbatchedNode

_MODULE = "tensordict.tensorclass"  # files contain the class names of tensordict
_STACK = f"<class '{_MODULE}.NonTensorStack'>"
_NONE = type(None)
#: Allowed keys in the metadata of one value in a directory; other keys mean that the node is not a value.
_ONE_VALUE = frozenset(
    {"data", "_metadata", "_is_non_tensor", "_names", "batch_size", "_type", "_class", "_format_version"}
)


NodeT = TypeVar("NodeT", NonTensorDataBase, NonTensorStack, UnbatchedNode)


def _apply_header(node: NodeT, meta: dict[str, object]) -> NodeT:
    """Set the device, names and lock of a node from its header."""
    _, device, names, locked = Record({"batch_size": [*node.batch_size], **meta}).read_header()
    node._device = node._device if device is None else device
    node._names = node._names if names is None else names
    return node.lock_() if locked else node


def _flatten_data(node: NonTensorDataBase) -> Record:
    values = {"data": node._value}
    if node._metadata is not None:
        values["_metadata"] = node._metadata
    return Record.of(node, values=values)


def _unflatten_data(cls: type[NonTensorDataBase], record: Record) -> NonTensorDataBase:
    size = record.read_field("batch_size", list)
    node = (record.cls or cls)(record.values["data"], record.values.get("_metadata"), batch_size=size)
    return _apply_header(node, record.meta)


def _flatten_stack(node: NonTensorStack) -> Record:
    node._check_whole()
    record = Record.of(node, values={"data": node._snapshot})
    record.meta.update(_joints_of(node))
    return record


def _joints_of(node: NonTensorStack) -> dict[str, object]:
    """Encode the batch dims along which a stack varies (:data:`Joints`) as a header field; empty if all dims do."""
    if node._joints is None:
        return {}
    dims, ones = node._joints
    return {"joints": {"dims": list(dims), "ones": ones}}


def _join_as(stack: NonTensorStack, record: Record) -> None:
    """Set the batch dims along which a stack varies (:data:`Joints`) from its header."""
    told, ndim = record.read_field("joints", dict, _NONE), len(stack.batch_size)
    if told is None:
        return
    dims, ones = Record(told).read_field("dims", list), Record(told).read_field("ones", list, _NONE)
    count = stack.batch_size.numel()
    if not all(type(dim) is int and 0 <= dim < ndim for dim in dims) or len(ones or "." * count) != count:
        raise FormatError(
            f"a NonTensorStack of batch size {list(stack.batch_size)} is not joined as {told!r}"
        )
    stack._joints = tuple(dims), ones


def _unflatten_stack(record: Record) -> NonTensorStack:
    values, size = record.values["data"], torch.Size(record.read_field("batch_size", list))
    if not isinstance(values, list) or len(values) != size.numel():
        raise FormatError(
            f"a NonTensorStack of batch size {list(size)} needs {size.numel()} values; got {values!r}"
        )
    stack = (record.cls or NonTensorStack)._of(values, size)
    _join_as(stack, record)
    return _apply_header(stack, record.meta)


def _data_to_directory(node: NonTensorDataBase) -> Record:
    cls = type(node)
    module = (
        _MODULE
        if cls.__module__.partition(".")[0] == __package__
        else kinds.name_class(cls).partition(":")[0]
    )
    meta = {"_is_non_tensor": True, "_type": f"<class '{module}.{cls.__qualname__}'>"}
    return Record(meta, values={"data": node._value, "_metadata": node._metadata})


def _data_from_values(cls: type[NonTensorDataBase], record: Record) -> NonTensorDataBase:
    # These formats do not store the batch size of a value, so use the batch size of its parent.
    values, size = record.values, record.batch_size
    if "data" not in values:
        raise FormatError(f"a {cls.__name__} has no data")
    node = (record.cls or cls)(values["data"], values.get("_metadata"), batch_size=size)
    return _apply_header(node, {"names": record.meta.get("_names")})


def _data_from_directory(cls: type[NonTensorDataBase], record: Record) -> NonTensorDataBase:
    unknown = [key for key in {**record.meta, **record.values, **record.entries} if key not in _ONE_VALUE]
    if unknown:
        raise FormatError(f"a {cls.__name__} has no {', '.join(map(repr, unknown))}")
    return _data_from_values(cls, record)


def _stack_to_directory(node: NonTensorStack) -> Record:
    meta = {
        "_type": _STACK,
        "_format_version": 1,
        "_class": "tensordict:NonTensorStack",
        "stack_dim": 0,
        "device": None if node.device is None else str(node.device),
        **_joints_of(node),
    }
    return Record(meta, values={"data": node.tolist()})


def _stack_from_directory(record: Record) -> NonTensorStack:
    data = record.values.get("data")
    if not isinstance(data, list):
        raise FormatError(f"the values of a NonTensorStack are a list; got {data!r}")
    # If the batch size is not stored, each depth at which the lists have equal lengths is a dim.
    size = record.meta.get("batch_size")
    stack = (record.cls or NonTensorStack).from_list(data, None if size is None else len(size))
    _join_as(stack, record)
    meta = {"device": record.meta.get("device"), "names": record.meta.get("_names")}
    return _apply_header(stack, meta)


def _stack_to_buffer(node: NonTensorStack) -> Record:
    meta: dict[str, object] = {
        "stack_dim": 0,
        "stack_dim_name": node.names[0],
        "is_locked": node._locked is True,
    }
    if not node._values:
        meta["batch_size"] = list(node.batch_size)
    return Record(meta, members={str(i): part for i, part in enumerate(node.tensordicts)})


def _stack_from_buffer(record: Record) -> NonTensorStack:
    meta = record.meta
    name = record.read_field("stack_dim_name", str, _NONE)
    if "batch_size" in meta:
        stack = _unflatten_stack(Record({"batch_size": meta["batch_size"]}, values={"data": []}))
        names: list[str | None] = [None] * len(stack.batch_size)
        names[meta["stack_dim"]] = name
    else:
        members: list[Any] = [record.members[str(i)] for i in range(len(record.members))]
        stack = NonTensorStack(*members, stack_dim=meta["stack_dim"])
        names = members[0].names
        names.insert(meta["stack_dim"], name)
    if any(names):
        stack.names = names
    if record.read_field("is_locked", bool, _NONE):
        stack.lock_()
    return stack


def _state_data(node: NonTensorDataBase) -> Record:
    values = {"data": node._value, "_metadata": node._metadata, "_is_non_tensor": True}
    return Record({"_type": type(node).__name__}, values=values)


def _state_stack(node: NonTensorStack) -> Record:
    return Record({"_type": "NonTensorStack"}, values={"data": node.tolist()})


def _from_state_stack(record: Record) -> NonTensorStack:
    cls = record.cls or NonTensorStack
    node = cls.from_list(record.values["data"], len(record.batch_size))
    told = node.batch_size[: node.batch_size.index(0) + 1] if 0 in node.batch_size else None
    # Nested lists lose the sizes of the dims after one of size 0.
    return node if told is None or record.batch_size[: len(told)] != told else cls._of([], record.batch_size)


def _flatten_unbatched(node: UnbatchedNode) -> Record:
    record = Record.of(node, {"data": node._payload})
    # Not named "batch_size": formats check that the shapes of entries start with the size of that name.
    record.meta["stands_for"] = record.meta.pop("batch_size")
    return record


def _unflatten_unbatched(record: Record) -> UnbatchedNode:
    data: Any = record.entries["data"]
    node = UnbatchedNode(data, torch.Size(record.read_field("stands_for", list)))
    return _apply_header(node, record.meta)


def _data_kind(cls: type[NonTensorDataBase]) -> NodeKind:
    name = cls.__name__
    unflatten, from_values = partial(_unflatten_data, cls), partial(_data_from_values, cls)
    from_directory = partial(_data_from_directory, cls)
    layouts = {
        "memmap/1": Layout(_data_to_directory, from_directory, (f"<class '{_MODULE}.{name}'>",)),
        "consolidated/1": Layout(_flatten_data, unflatten, (name,), is_inline=True),
        "state_dict/2": Layout(_state_data, from_values, (name,)),
    }
    return NodeKind(name, cls, _flatten_data, unflatten, layouts)


_STACK_LAYOUTS = {
    "memmap/1": Layout(_stack_to_directory, _stack_from_directory, (_STACK,)),
    "consolidated/1": Layout(_stack_to_buffer, _stack_from_buffer, ("NonTensorStack",)),
    "state_dict/2": Layout(_state_stack, _from_state_stack, ("NonTensorStack",)),
}

#: The kinds that the plugin registers.
NODE_KINDS = (
    _data_kind(NonTensorData),
    _data_kind(MetaData),
    NodeKind("NonTensorStack", NonTensorStack, _flatten_stack, _unflatten_stack, _STACK_LAYOUTS),
    NodeKind("UnbatchedTensor", UnbatchedNode, _flatten_unbatched, _unflatten_unbatched, is_leaf=True),
)
