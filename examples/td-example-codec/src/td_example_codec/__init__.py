"""Masked arrays as entries of a collection, and collections as .npz files."""

from __future__ import annotations

# First, because importing td_core imports plugin.py, which needs the modules below whole.
import td_core  # noqa: F401
from td_example_codec._masked import Masked
from td_example_codec._npz import NpzSerializer

__all__ = ["Masked", "NpzSerializer"]
