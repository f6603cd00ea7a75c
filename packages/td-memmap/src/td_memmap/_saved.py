"""Alias of a function under the module path in pickles of earlier releases."""

from ._memmap_backend import _again

__all__ = ["_again"]
