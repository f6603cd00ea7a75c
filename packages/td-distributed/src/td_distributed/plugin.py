"""The methods that td-distributed registers with td-core."""

from __future__ import annotations

from collections.abc import Mapping

from td_core import hookimpl
from td_core.plugins.declarations import implementations

from . import _collectives, _consolidate, _p2p, _reduce, _remote  # noqa: F401  they implement the methods


@hookimpl
def td_methods() -> Mapping[str, object]:
    """Return the methods that td-distributed attaches to every collection."""
    return implementations("td-distributed")
