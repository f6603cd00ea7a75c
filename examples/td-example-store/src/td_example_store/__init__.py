"""An example plugin of td-core: collections in a SQLite data base, whose leaves can stay there."""

from __future__ import annotations

# Import td_core first: it imports plugin.py, which needs the complete modules below.
import td_core  # noqa: F401
from td_example_store._format import SqliteFormat
from td_example_store._rows import RowSource

__all__ = ["RowSource", "SqliteFormat"]
