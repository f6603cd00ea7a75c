"""Register td-arrow with td-core. The rest of the package is imported at first use."""

from __future__ import annotations
