"""The methods and the format that td-distributed registers with td-core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from td_core.spi import LazyFunction, Serializer, hookimpl, make_classmethod

from ._collectives import all_gather, broadcast, gather_and_stack, scatter
from ._consolidate import consolidate, from_consolidated, is_consolidated, load_as
from ._p2p import irecv, isend, recv, send
from ._reduce import all_reduce, reduce
from ._remote import from_remote_init, init_remote, receive_as

#: How zip and HDF5 files begin.
_OTHERS = (b"PK\x03\x04", b"\x89HDF\r\n\x1a\n")


class ConsolidatedFormat(Serializer):
    """Files that ``consolidate(filename)`` writes.

    >>> ConsolidatedFormat().detect(Path("missing"), b"")
    False
    """

    name = "consolidated"
    reads_objects = True  # if format= names it: a first part does not tell what an object ends with

    save = LazyFunction(__package__, "._consolidated_objects", "save_file")
    load = LazyFunction(__package__, "._consolidated_objects", "load_file")
    verify = LazyFunction(__package__, "._consolidated_objects", "verify_file")

    def detect(self, location: object, head: bytes) -> bool:
        """Return True for a file that ends with a structure and its length."""
        if not isinstance(location, Path) or len(head) < 8 or head.startswith(_OTHERS):
            return False
        if head[8:9] == b"{" and not head[8:].startswith((b'{"cls": "', b'{"cls":"')):
            return False  # a header of safetensors
        from ._consolidated_file import has_structure

        return has_structure(location)


_FORMAT = ConsolidatedFormat()


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"consolidated"``."""
    return [_FORMAT]


@hookimpl
def td_methods() -> Mapping[str, object]:
    """Return the methods that td-distributed attaches to every collection."""
    return {
        "consolidate": consolidate,
        "is_consolidated": is_consolidated,
        "from_consolidated": make_classmethod(from_consolidated, with_class=load_as),
        "send": send,
        "recv": recv,
        "isend": isend,
        "irecv": irecv,
        "init_remote": init_remote,
        "from_remote_init": make_classmethod(from_remote_init, with_class=receive_as),
        "broadcast": broadcast,
        "scatter": scatter,
        "gather_and_stack": gather_and_stack,
        "all_gather": all_gather,
        "all_reduce": all_reduce,
        "reduce": reduce,
    }
