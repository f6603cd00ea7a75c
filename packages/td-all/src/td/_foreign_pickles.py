"""Load pickles of tensordict: the functions that these pickles call, and the conversion of the state in them.

These pickles refer to classes by the import paths of :mod:`td._alias`, and store the attributes of instances.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from td_core import FormatError
from td_core.pickles import set_foreign_state
from td_distributed import from_buffer
from td_tensorclass import MetaData, NonTensorDataBase, NonTensorStack, UnbatchedTensor


class LockedSchema:
    """Placeholder for an attribute of locked tensordict collections that td does not need."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def accept() -> None:
    """Register :func:`make` as the converter of states in tensordict pickles."""
    set_foreign_state(make)


def make(cls: Any, state: Mapping[str, Any]) -> Any:
    """Build an instance of ``cls`` from the attributes in a tensordict pickle; raise FormatError for unknown ones."""
    if "_param_td" in state:
        return cls(state["_param_td"], no_convert=state["no_convert"], lock=bool(state.get("_lock_content")))
    if "_source" in state:
        return cls.from_tensordict(state["_source"])
    if "_tensordict" in state:
        made = cls(
            state["_tensordict"],
            batch_size=state["_batch_size"],
            device=state["_device"],
            names=state.get("_td_dim_names"),
        )
    elif "tensordicts" in state:
        made = _stack(cls, state)
    elif "non_tensordict" in state:
        inner, rest = state["tensordict"], state["non_tensordict"]
        if not issubclass(cls, NonTensorDataBase):
            return cls.from_tensordict(inner, rest)
        made = cls(
            rest["data"],
            rest.get("_metadata"),
            batch_size=inner.batch_size,
            device=inner.device,
            names=inner.names if any(inner.names) else None,
        )
        if inner.is_locked:
            made.lock_()
    else:
        raise FormatError(
            f"a pickle holds a {cls.__module__}.{cls.__qualname__} in no known form; it has {list(state)}"
        )
    return made.lock_() if state.get("_is_locked") else made


def _stack(cls: Any, state: Mapping[str, Any]) -> object:
    members, dim = state["tensordicts"], state["stack_dim"]
    if issubclass(cls, NonTensorStack):
        return cls(*members, stack_dim=dim)
    hooks = {name: state.get(f"_{name}", state.get(name)) for name in ("hook_in", "hook_out")}
    size = None if members else state["_batch_size"]
    return cls(*members, stack_dim=dim, stack_dim_name=state.get("_td_dim_name"), batch_size=size, **hooks)


def make_consolidated(metadata: dict[str, object], storage: Tensor) -> object:
    """Build a consolidated collection from its structure and its storage."""
    text = json.dumps(metadata, default=str).encode()
    end = text + len(text).to_bytes(8, "little", signed=True)
    return from_buffer(torch.cat([storage, torch.frombuffer(bytearray(end), dtype=torch.uint8)]))


def make_unbatched(data: Tensor, batch_size: torch.Size | None = None) -> UnbatchedTensor:
    """Build an :class:`UnbatchedTensor`; tensordict pickles pass the batch size by position."""
    return UnbatchedTensor(data, batch_size=batch_size)


def make_metadata(type_: Any, data: object, state: Mapping[str, Any]) -> MetaData[object]:
    """Build an instance of ``MetaData[type_]``."""
    inner = state["_tensordict"]
    made: MetaData[Any] = MetaData[type_](data, batch_size=inner.batch_size, device=inner.device)
    return made
