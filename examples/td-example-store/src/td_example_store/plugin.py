"""The hook of the plugin; the entry point in ``pyproject.toml`` names this module."""

from __future__ import annotations

from collections.abc import Iterable

from td_core.spi import Serializer, hookimpl
from td_example_store._format import SqliteFormat


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"sqlite"``."""
    return [SqliteFormat()]
