"""What td-distributed registers with td-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core import hookimpl


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that td-distributed attaches to every collection."""
    from . import _methods

    return _methods.METHODS
