"""The methods that every collection gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._collectives import all_gather, broadcast, gather_and_stack, scatter
from ._consolidate import consolidate, from_consolidated, is_consolidated
from ._p2p import irecv, isend, recv, send
from ._reduce import all_reduce, reduce
from ._remote import LIMIT, from_remote_init, init_remote


def _from_consolidated(cls: Any, filename: str | Path) -> Any:
    return from_consolidated(filename)


def _from_remote_init(
    cls: Any,
    src: int,
    group: Any = None,
    device: Any = None,
    use_broadcast: bool = False,
    limit: int = LIMIT,
    *,
    root: str | Path | None = None,
) -> Any:
    return from_remote_init(src, group, device, use_broadcast, limit, root=root)


METHODS: dict[str, Any] = {
    "consolidate": consolidate,
    "is_consolidated": is_consolidated,
    "from_consolidated": classmethod(_from_consolidated),
    "send": send,
    "recv": recv,
    "isend": isend,
    "irecv": irecv,
    "init_remote": init_remote,
    "from_remote_init": classmethod(_from_remote_init),
    "broadcast": broadcast,
    "scatter": scatter,
    "gather_and_stack": gather_and_stack,
    "all_gather": all_gather,
    "all_reduce": all_reduce,
    "reduce": reduce,
}
