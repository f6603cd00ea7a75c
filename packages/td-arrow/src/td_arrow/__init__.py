"""Collections as tables: Arrow, Parquet, pandas, polars."""

from __future__ import annotations

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core

__all__ = ["__version__"]

__version__ = _td_core.__version__
