"""The methods that td-distributed registers with td-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core import hookimpl
from td_core._class_methods import make_classmethod

from ._collectives import all_gather, broadcast, gather_and_stack, scatter
from ._consolidate import consolidate, from_consolidated, is_consolidated, read_as
from ._p2p import irecv, isend, recv, send
from ._reduce import all_reduce, reduce
from ._remote import from_remote_init, init_remote, receive_as


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that td-distributed attaches to every collection."""
    methods: tuple[Any, ...] = (
        all_gather, all_reduce, broadcast, consolidate, gather_and_stack, init_remote, irecv, is_consolidated,
        isend, recv, reduce, scatter, send,
    )  # fmt: skip
    makers: dict[Any, Any] = {from_consolidated: read_as, from_remote_init: receive_as}
    return {
        **{method.__name__: method for method in methods},
        **{maker.__name__: make_classmethod(maker, with_class=made) for maker, made in makers.items()},
    }
