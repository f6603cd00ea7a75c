"""The layouts of TensorDicts, lazy stacks and parameters in ``meta.json``, which tensordict reads.

The metadata names the classes of tensordict. Additional keys, which tensordict ignores, start with an underscore.
"""

from __future__ import annotations

import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, kinds
from td_core.spi import (
    RULES,
    Layout,
    Node,
    Record,
    as_batch_size,
    check_names,
    list_unusual_roles,
    make_dense,
    name_nodes_below,
)

#: Name of the layouts of this file format in a node kind.
FORMAT = "memmap/1"
#: Field with the node around the one that tensordict reads, such as a TensorDictParams: a list, since entries are objects.
OUTER = "_outer"

_DENSE = "<class 'tensordict._td.TensorDict'>"
_STACK = "<class 'tensordict._lazy.LazyStackedTensorDict'>"


def _flatten_dense(td: Node) -> Record:
    meta: dict[str, object] = {
        "shape": list(td.batch_size),
        "device": "cpu",
        "_type": _DENSE,
        "_format_version": 1,
        "_class": "tensordict:TensorDict",
    }
    if td._names is not None:
        meta["_names"] = list(td._names)
    if td._locked is True:
        meta["_locked"] = True
    return Record(meta, dict(td._children()))


def _unflatten_dense(record: Record) -> TensorDict:
    meta = record.meta
    size, listed, device = as_batch_size(meta["shape"]), meta.get("_names"), meta.get("device")
    names = check_names(listed, len(size)) if isinstance(listed, list) else None
    device = None if device in (None, "None") else torch.device(device)
    td = make_dense(dict(record.entries), size, device, names, record.cls)
    name_nodes_below(td)
    return td.lock_() if meta.get("_locked") is True else td


def _flatten_stack(stack: LazyStackedTensorDict) -> Record:
    record = kinds.record_of(stack)
    general = record.meta
    meta: dict[str, object] = {
        "_type": _STACK,
        "_format_version": 1,
        "_class": "tensordict:LazyStackedTensorDict",
        "stack_dim": general["stack_dim"],
        "stack_dim_name": general.get("stack_dim_name"),
        # Store the number, to detect a missing member on load; tensordict counts the directories.
        "_members": len(record.members),
    }
    if not record.members:
        meta["_batch_size"] = general["batch_size"]
    if "locked" in general:
        meta["_locked"] = True
    return Record(meta, members=record.members)


def _unflatten_stack(record: Record) -> LazyStackedTensorDict:
    found = record.meta
    meta = {name: found.get(name) for name in ("stack_dim", "stack_dim_name")}
    if "_batch_size" in found:
        meta["batch_size"] = found["_batch_size"]
    general = Record({**meta, "locked": found.get("_locked")}, members=record.members, cls=record.cls)
    stack: LazyStackedTensorDict = kinds.of(LazyStackedTensorDict).unflatten(general)
    return stack


def _flatten_params(params: TensorDictParams) -> Record:
    inner = params._tensordict
    kind = kinds.of(inner)
    layout = kind.layouts[FORMAT]
    record = layout.flatten(inner)
    record.meta.setdefault("_type", layout.names[0])
    if type(inner) is not kind.type and "_class" in record.meta:
        record.meta |= {"_type": str(type(inner)), "_class": kinds.name_class(type(inner))}
    if not RULES.follows_tensordict:
        general = kinds.record_of(params)
        # Unlike one letter for each leaf, these roles hold for entries that are added to the save later.
        header = {**general.meta, "roles": list_unusual_roles(inner)}
        tag = kinds.of(params).tag
        record.meta[OUTER] = [{"kind": tag, "meta": header, "members": [*general.members]}]
    return record


kinds.add_layout(TensorDict, FORMAT, Layout(_flatten_dense, _unflatten_dense, (_DENSE,)))
kinds.add_layout(LazyStackedTensorDict, FORMAT, Layout(_flatten_stack, _unflatten_stack, (_STACK,)))
# No class names: parameters are saved as the collection they hold, so no file names this kind.
kinds.add_layout(TensorDictParams, FORMAT, Layout(_flatten_params, kinds.of(TensorDictParams).unflatten))
