"""Send, receive, collectives and consolidation for td-core.

>>> import torch
>>> from td_core import TensorDict
>>> td = TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}}).consolidate()
>>> td.is_consolidated()
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# First, whichever of the two packages a program imports first: core loads the plugin of this one as its last statement.
import td_core as _td_core

if TYPE_CHECKING:
    from ._attachment import storage_of
    from ._checkpoint import DistributedStateful
    from ._collectives import all_gather, broadcast, gather_and_stack, scatter
    from ._consolidate import consolidate, from_buffer, from_consolidated, is_consolidated
    from ._p2p import irecv, isend, recv, send
    from ._reduce import all_reduce, reduce
    from ._remote import from_remote_init, init_remote

__version__ = _td_core.__version__

_HOMES = {
    "DistributedStateful": "_checkpoint",
    "all_gather": "_collectives",
    "all_reduce": "_reduce",
    "broadcast": "_collectives",
    "consolidate": "_consolidate",
    "from_buffer": "_consolidate",
    "from_consolidated": "_consolidate",
    "from_remote_init": "_remote",
    "gather_and_stack": "_collectives",
    "init_remote": "_remote",
    "irecv": "_p2p",
    "is_consolidated": "_consolidate",
    "isend": "_p2p",
    "recv": "_p2p",
    "reduce": "_reduce",
    "scatter": "_collectives",
    "send": "_p2p",
    "storage_of": "_attachment",
}

__all__ = [
    "DistributedStateful",
    "all_gather",
    "all_reduce",
    "broadcast",
    "consolidate",
    "from_buffer",
    "from_consolidated",
    "from_remote_init",
    "gather_and_stack",
    "init_remote",
    "irecv",
    "is_consolidated",
    "isend",
    "recv",
    "reduce",
    "scatter",
    "send",
    "storage_of",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
