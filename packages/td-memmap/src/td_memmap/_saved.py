"""The old path of a function that pickles of earlier releases name."""

from ._memmap_backend import _again

__all__ = ["_again"]
