"""What td-memmap registers with td-core."""

from __future__ import annotations

from collections.abc import Iterable

from td_core._serializers import Serializer
from td_core.plugins.hookspecs import hookimpl

from ._methods import Methods
from ._serializer import DirectoryFormat


@hookimpl
def td_methods() -> type:
    """Return the methods of memory mapping, saving and loading."""
    return Methods


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the directory format."""
    return [DirectoryFormat()]
