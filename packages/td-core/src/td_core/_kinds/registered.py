"""The node kinds of core: the records of TensorDicts, lazy stacks, parameters and checkpoints.

A format that stores them in another form adds its layouts with :func:`td_core.kinds.add_layout`.
"""

from __future__ import annotations

from copy import copy

import torch

from .._encode.node_kinds import KINDS, NodeKind
from .._encode.records import Record
from .._tree.node import Core
from ..errors import BatchSizeError, FormatError
from .checkpoint import Checkpoint
from .lazy_stack import LazyStackedTensorDict
from .parameters import TensorDictParams
from .parameters_saved import get_roles, list_tied, set_roles, set_unusual_roles, tie_leaves
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


def _flatten_params(params: TensorDictParams) -> Record:
    inner = params._tensordict
    meta: dict[str, object] = {"no_convert": bool(params._no_convert), "roles": get_roles(inner)}
    if tied := list_tied(inner):
        meta["tied"] = tied
    if not params.training:
        meta["training"] = False
    return Record(meta, members={"params": inner})


def _unflatten_params(record: Record) -> TensorDictParams:
    cls, inner = record.cls or TensorDictParams, record.members["params"]
    roles = record.read_field("roles", str, dict, _NONE)
    if isinstance(roles, dict):
        set_unusual_roles(inner, roles)
    elif roles is not None:
        set_roles(inner, roles)
    tie_leaves(inner, record.read_field("tied", list, _NONE) or ())
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


def _flatten_checkpoint(node: Checkpoint) -> Record:
    record = Record.of(node, dict(node._children()), values={"treedef": node.treedef})
    if tied := list_tied(node):
        record.meta["tied"] = tied
    return record


def _unflatten_checkpoint(record: Record) -> Checkpoint:
    treedef = record.values["treedef"]
    inner = _unflatten_dense(Record(record.meta, record.entries))
    tie_leaves(inner, record.read_field("tied", list, _NONE) or ())
    return Checkpoint(inner, treedef)


for _kind in (
    NodeKind("TensorDict", TensorDict, _flatten_dense, _unflatten_dense),
    NodeKind("LazyStackedTensorDict", LazyStackedTensorDict, _flatten_stack, _unflatten_stack),
    NodeKind(
        "TensorDictParams",
        TensorDictParams,
        _flatten_params,
        _unflatten_params,
        attributes=_attributes_of_params,
        select=_select_roles,
    ),
    NodeKind("Checkpoint", Checkpoint, _flatten_checkpoint, _unflatten_checkpoint),
):
    KINDS.add(_kind)
