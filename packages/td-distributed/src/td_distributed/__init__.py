"""Send, receive, collectives and consolidation for td-core.

>>> import torch
>>> from td_core import TensorDict
>>> td = TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}}).consolidate()
>>> td.is_consolidated()
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import core first: its last statement loads the plugin of this package.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._checkpoint import DistributedStateful
    from ._collectives import all_gather, broadcast, gather_and_stack, scatter
    from ._consolidate import consolidate, from_buffer, from_consolidated, is_consolidated
    from ._consolidated_backend import storage_of
    from ._p2p import irecv, isend, recv, send
    from ._reduce import all_reduce, reduce
    from ._remote import from_remote_init, init_remote

__version__ = _td_core.__version__

__all__ = [
    "DistributedStateful", "all_gather", "all_reduce", "broadcast", "consolidate", "from_buffer",
    "from_consolidated", "from_remote_init", "gather_and_stack", "init_remote", "irecv", "is_consolidated",
    "isend", "recv", "reduce", "scatter", "send", "storage_of",
]  # fmt: skip

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "._consolidated_backend": ("storage_of",),
        "._checkpoint": ("DistributedStateful",),
        "._collectives": ("all_gather", "broadcast", "gather_and_stack", "scatter"),
        "._consolidate": ("consolidate", "from_buffer", "from_consolidated", "is_consolidated"),
        "._p2p": ("irecv", "isend", "recv", "send"),
        "._reduce": ("all_reduce", "reduce"),
        "._remote": ("from_remote_init", "init_remote"),
    },
)
