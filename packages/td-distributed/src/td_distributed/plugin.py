"""The methods and the format that td-distributed registers with td-core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from td_core import Serializer, hookimpl
from td_core.plugins.declarations import implementations
from td_core.spi import LazyFunction

from . import _collectives, _consolidate, _p2p, _reduce, _remote  # noqa: F401  they implement the methods

#: How zip and HDF5 files begin.
_OTHERS = (b"PK\x03\x04", b"\x89HDF\r\n\x1a\n")


class ConsolidatedFormat(Serializer):
    """Files that ``consolidate(filename)`` writes.

    >>> ConsolidatedFormat().detect(Path("missing"), b"")
    False
    """

    name = "consolidated"

    save = LazyFunction(__package__, "._consolidate", "save_file")
    load = LazyFunction(__package__, "._consolidate", "load_file")
    verify = LazyFunction(__package__, "._consolidate", "verify_file")

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
    return implementations("td-distributed")
