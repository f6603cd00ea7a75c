"""The node kinds of core: how each format stores TensorDicts, lazy stacks, parameters and checkpoints.

The layouts of ``"memmap/1"`` and ``"consolidated/1"`` write metadata that tensordict reads, with its class names.
Additional keys, which tensordict ignores, start with an underscore.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from .._encode.node_kinds import KINDS, NodeKind
from .._encode.records import Layout, Record
from .._methods.collection import TensorCollection
from .._plans.plans import as_batch_size
from .._tree.defaults import show_path
from .._tree.dim_names import check_names, inherit_names
from .._tree.node import Core
from ..errors import BatchSizeError, FormatError
from .checkpoint import Checkpoint
from .lazy_stack import LazyStackedTensorDict
from .parameters import TensorDictParams, get_roles, set_roles
from .tensordict import TensorDict

_NONE = type(None)


def _flatten_dense(td: Core) -> Record:
    return Record.of(td, dict(td._children()))


def _unflatten_dense(record: Record) -> TensorDict:
    size, device, names, locked = record.read_header()
    if record.members or record.values:
        raise FormatError(f"a TensorDict has no members and no values: {[*record.members, *record.values]}")
    td: TensorDict = (record.cls or TensorDict)._make(dict(record.entries), size, device, names)
    if size:
        try:
            td._check_batch_size(size)
        except BatchSizeError as error:
            raise FormatError(str(error)) from error
    return td.lock_() if locked else td


def _dense_to_directory(td: Core) -> Record:
    meta: dict[str, object] = {
        "shape": list(td.batch_size),
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:TensorDict",
    }
    if td._names is not None:
        meta["_names"] = list(td._names)
    if td._locked is True:
        meta["_locked"] = True
    return Record(meta, dict(td._children()))


def _dense_from_directory(record: Record) -> TensorDict:
    meta = record.meta
    size, listed, device = as_batch_size(meta["shape"]), meta.get("_names"), meta.get("device")
    names = check_names(listed, len(size)) if isinstance(listed, list) else None
    device = None if device in (None, "None") else torch.device(device)
    td: TensorDict = (record.cls or TensorDict)._make(dict(record.entries), size, device, names)
    _set_names_below(td)
    if meta.get("_locked") is True:
        td.lock_()
    return td


def _set_names_below(td: TensorDict) -> None:
    """Copy the dim names of a node to its value nodes without names, whose names the files do not store."""
    names = td._names
    if names is None:
        return
    for key, child in dict(td._children()).items():
        if not isinstance(child, Tensor) and child._names is None:
            td._set_child(key, inherit_names(child, names, show_path((key,))))


def _flatten_stack(stack: LazyStackedTensorDict) -> Record:
    meta: dict[str, object] = {"stack_dim": stack._stack_dim}
    if stack._stack_dim_name is not None:
        meta["stack_dim_name"] = stack._stack_dim_name
    if not stack._members:
        meta["batch_size"] = list(stack._empty_size)
        if stack.device is not None:
            meta["device"] = str(stack.device)
    if stack._locked is True:
        meta["locked"] = True
    hooks = {"hook_in": stack._hook_in, "hook_out": stack._hook_out}
    return Record(
        meta,
        members={str(i): member for i, member in enumerate(stack._members)},
        values={name: hook for name, hook in hooks.items() if hook is not None},
    )


def _unflatten_stack(record: Record) -> LazyStackedTensorDict:
    meta = record.meta
    members = [record.members[str(i)] for i in range(len(record.members))]
    dim, depths = record.read_field("stack_dim", int), {len(member.batch_size) for member in members}
    if len(depths) > 1 or not 0 <= dim <= max(depths, default=dim):
        raise FormatError(
            f"a lazy stack of members of {sorted(depths)} batch dims cannot have the stack_dim {dim!r}"
        )
    stack: LazyStackedTensorDict = (record.cls or LazyStackedTensorDict)._of(members, dim)
    stack._stack_dim_name = record.read_field("stack_dim_name", str, _NONE)
    for name, hook in record.values.items():
        if name not in ("hook_in", "hook_out") or not callable(hook):
            raise FormatError(f"a lazy stack has no {name} that is {hook!r}")
        setattr(stack, f"_{name}", hook)
    if not members:
        size = record.read_batch_size() if "batch_size" in meta else torch.Size((0,))
        if size[dim : dim + 1] != (0,):
            raise FormatError(
                f"a lazy stack without members cannot have the batch size {list(size)} and the stack_dim {dim}"
            )
        stack._empty_size = size
        if record.read_field("device", str, _NONE) is not None:
            stack._set_device(torch.device(meta["device"]))
    if record.read_field("locked", bool, _NONE):
        stack.lock_()
    return stack


def _stack_to_directory(stack: LazyStackedTensorDict) -> Record:
    meta: dict[str, object] = {
        "_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:LazyStackedTensorDict",
        "stack_dim": stack._stack_dim,
        "stack_dim_name": stack._stack_dim_name,
        # Store the number, to detect a missing member on load; tensordict counts the directories.
        "_members": len(stack._members),
    }
    if not stack._members:
        meta["_batch_size"] = list(stack._empty_size)
    if stack._locked is True:
        meta["_locked"] = True
    return Record(meta, members={str(i): member for i, member in enumerate(stack._members)})


def _stack_from_directory(record: Record) -> LazyStackedTensorDict:
    provided = record.meta
    meta = {name: provided.get(name) for name in ("stack_dim", "stack_dim_name")}
    if "_batch_size" in provided:
        meta["batch_size"] = provided["_batch_size"]
    return _unflatten_stack(
        Record({**meta, "locked": provided.get("_locked")}, members=record.members, cls=record.cls)
    )


def _flatten_params(params: TensorDictParams) -> Record:
    inner = params._tensordict
    meta = {"no_convert": bool(params._no_convert), "roles": get_roles(inner)}
    if not params.training:
        meta["training"] = False
    return Record(meta, members={"params": inner})


def _unflatten_params(record: Record) -> TensorDictParams:
    cls, inner = record.cls or TensorDictParams, record.members["params"]
    roles = record.read_field("roles", str, _NONE)
    if roles is not None:
        set_roles(inner, roles)
    params: TensorDictParams = cls(inner, no_convert=True)
    object.__setattr__(params, "_no_convert", record.meta.get("no_convert", False))
    if record.read_field("training", bool, _NONE) is False:
        params.training = False
    return params


def _select_roles(
    meta: dict[str, object], paths: list[tuple[str, ...]], selected: list[tuple[str, ...]]
) -> dict[str, object]:
    """Return the header of parameters with the roles of selected leaves; unchanged if they do not fit the leaves."""
    roles = meta.get("roles")
    if not isinstance(roles, str) or len(roles) != len(paths):
        return meta
    letters = dict(zip(paths, roles, strict=True))
    return {**meta, "roles": "".join(letters[path] for path in selected)}


#: Attributes of a new module with their defaults, and the attributes that a record omits or stores in another form.
_BARE = {**vars(torch.nn.Module()), "_get_hooks": []}
_STATE = frozenset({"_compiled_call_impl", "_no_convert", "_tensordict", "training"})


def _attributes_of_params(params: TensorDictParams) -> dict[str, object]:
    """Return the hooks of a module, in copies of their dicts, and the attributes that the user set on it."""
    return {
        name: copy(value) if name in _BARE else value
        for name, value in vars(params).items()
        if name not in _STATE and (name not in _BARE or value != _BARE[name])
    }


def _params_to_directory(params: TensorDictParams) -> Record:
    inner = params._tensordict
    layout = KINDS.of(inner).layouts["memmap/1"]
    record = layout.flatten(inner)
    record.meta.setdefault("_type", layout.names[0])
    return record


def _flatten_checkpoint(node: Checkpoint) -> Record:
    return Record.of(node, dict(node._children()), values={"treedef": node.treedef})


def _unflatten_checkpoint(record: Record) -> Checkpoint:
    treedef = record.values["treedef"]
    return Checkpoint(_unflatten_dense(Record(record.meta, record.entries)), treedef)


def _dense_to_buffer(td: TensorCollection) -> Record:
    device = None if td.device is None else str(td.device)
    meta = {
        "device": device,
        "names": td.names,
        "batch_size": list(td.batch_size),
        "is_locked": td._locked is True,
    }
    return Record(meta, dict(td._children()))


def _dense_from_buffer(record: Record) -> TensorDict:
    td = _unflatten_dense(Record(record.meta, record.entries))
    _set_names_below(td)
    if record.read_field("is_locked", bool, _NONE):
        td.lock_()
    return td


def _stack_to_buffer(stack: LazyStackedTensorDict) -> Record:
    record = _flatten_stack(stack)  # only stacks without hooks, which the format cannot store
    record.meta.pop("locked", None)
    record.meta = {"stack_dim_name": None, **record.meta, "is_locked": stack._locked is True}
    return record


def _stack_from_buffer(record: Record) -> LazyStackedTensorDict:
    return _unflatten_stack(
        Record({**record.meta, "locked": record.meta.get("is_locked")}, members=record.members)
    )


_DENSE = ("<class 'tensordict._td.TensorDict'>",)
_STACK = ("<class 'tensordict._lazy.LazyStackedTensorDict'>",)
_DENSE_LAYOUTS = {
    "memmap/1": Layout(_dense_to_directory, _dense_from_directory, _DENSE),
    "consolidated/1": Layout(_dense_to_buffer, _dense_from_buffer, ("TensorDict",)),
}
_STACK_LAYOUTS = {
    "memmap/1": Layout(_stack_to_directory, _stack_from_directory, _STACK),
    "consolidated/1": Layout(_stack_to_buffer, _stack_from_buffer, ("LazyStackedTensorDict",)),
}
# No class names: parameters are saved as the collection they hold, so no file names this kind.
_PARAMS_LAYOUTS = {"memmap/1": Layout(_params_to_directory, _unflatten_params)}
for _kind in (
    NodeKind("TensorDict", TensorDict, _flatten_dense, _unflatten_dense, _DENSE_LAYOUTS),
    NodeKind(
        "LazyStackedTensorDict", LazyStackedTensorDict, _flatten_stack, _unflatten_stack, _STACK_LAYOUTS
    ),
    NodeKind(
        "TensorDictParams",
        TensorDictParams,
        _flatten_params,
        _unflatten_params,
        _PARAMS_LAYOUTS,
        attributes=_attributes_of_params,
        select=_select_roles,
    ),
    NodeKind("Checkpoint", Checkpoint, _flatten_checkpoint, _unflatten_checkpoint),
):
    KINDS.add(_kind)
