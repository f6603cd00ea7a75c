"""What td-distributed registers with td-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core import hookimpl
from td_core._class_methods import of_class

from ._collectives import all_gather, broadcast, gather_and_stack, scatter
from ._consolidate import consolidate, from_consolidated, is_consolidated
from ._p2p import irecv, isend, recv, send
from ._reduce import all_reduce, reduce
from ._remote import from_remote_init, init_remote


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that td-distributed attaches to every collection."""
    return {
        "consolidate": consolidate,
        "is_consolidated": is_consolidated,
        "from_consolidated": of_class(from_consolidated),
        "send": send,
        "recv": recv,
        "isend": isend,
        "irecv": irecv,
        "init_remote": init_remote,
        "from_remote_init": of_class(from_remote_init),
        "broadcast": broadcast,
        "scatter": scatter,
        "gather_and_stack": gather_and_stack,
        "all_gather": all_gather,
        "all_reduce": all_reduce,
        "reduce": reduce,
    }
