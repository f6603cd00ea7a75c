"""An example plugin of td-core: masked arrays as entries of collections, and collections as .npz files."""

from __future__ import annotations

# Import td_core first: it imports plugin.py, which needs the complete modules below.
import td_core  # noqa: F401
from td_example_codec._masked import Masked
from td_example_codec._npz import NpzSerializer

__all__ = ["Masked", "NpzSerializer"]
